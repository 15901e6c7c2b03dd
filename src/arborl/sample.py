"""Pictures of some prompts, in a folder: `arborl sample`."""

import json
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .config.schema import Config
from .core.errors import InputError
from .core.tensors import ints
from .data.prompts import Prompts
from .engine.generate import generate, noise_of_seeds
from .engine.score import as_bytes, middle_frames
from .models import model_class
from .run.drawings import save_picture, sheet
from .run.inputs import evaluation_prompts, prompts_for
from .run.resume import load_for_inference
from .tools.files import kind_of, remove_abandoned, write_atomically
from .tools.finite_json import finite_json

INDEX, SHEET = "index.jsonl", "sheet.png"
PICTURE = re.compile(r"\d{5,}\.(png|webp)")


class Made(NamedTuple):
    """What `arborl sample` says, and a row for each picture: its file, prompt and seed."""

    message: str
    rows: list[dict[str, Any]]


def sample(config: Config, run: Path | None, texts: Sequence[str], count: int | None, to: Path) -> Made:
    """One picture for each text (or of the prompts that the settings name), in turn up to `count`.

    Picture i starts from the noise that diffusers draws with seed + i. Pictures that earlier calls made in the folder,
    which its index.jsonl names, may be replaced; any other file that is in the way is an error.
    """
    family = model_class(config)
    family.check(config, may_fetch=True)
    if texts and (columns := family.columns(config)):
        problem = f"this model takes {', '.join(columns)} beside each prompt"
        raise InputError("--prompt", texts[0], problem, cure="prompts.path")
    if texts or config.prompts.path:
        prompts = Prompts([*texts], {}) if texts else prompts_for(config, family, config.prompts.path)
        count = count or len(prompts)
    else:
        prompts, _ = evaluation_prompts(config, family)
        count = count or min(16, len(prompts))
    prompts = prompts.take([i % len(prompts) for i in range(count)])
    earlier = _earlier(to)
    _check_free(to, count, earlier)
    try:
        to.mkdir(parents=True, exist_ok=True)
        remove_abandoned(to)
    except OSError as error:
        raise InputError("--out", to, f"cannot be made ({error.strerror})") from None
    policy = load_for_inference(config, run, prompts)
    seeds = [config.seed + i for i in range(count)]
    noise = noise_of_seeds(policy, seeds)
    leaves = generate(policy, prompts, torch.arange(count), noise)[:, 0]
    parts = torch.arange(count).split(policy.batch_sizes.decode)
    pictures = torch.cat([as_bytes(policy.decode(leaves[rows], prompts.take(ints(rows)))) for rows in parts])
    kind, ending = ("picture", ".png") if pictures.ndim == 4 else ("video", ".webp")
    rows = [
        {"file": f"{i:05d}{ending}", "prompt": text, "seed": seed}
        for i, (text, seed) in enumerate(zip(prompts.texts, seeds, strict=True))
    ]
    _check_free(to, count, earlier)  # again: pictures take their time
    earlier = {name: row for name, row in earlier.items() if name not in {row["file"] for row in rows}}
    try:
        # The index first: what it names is ours, also where this is cut short. Others from before stay, and in it too.
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [*rows, *earlier.values()])
        write_atomically(to / INDEX, text)
        for i, picture in enumerate(pictures):
            save_picture(picture, to / f"{i:05d}")
        sheet(middle_frames(pictures)[:64], prompts.texts[:64], to / SHEET)
    except OSError as error:
        raise InputError("--out", to, f"cannot be written to ({error.strerror})") from None
    return Made(f"{to}: {len(pictures)} {kind}(s), {SHEET}, and {INDEX} with their prompts", rows)


def _earlier(folder: Path) -> dict[str, dict[str, Any]]:
    """The pictures that earlier calls made in a folder, as its index says; none where that is no index of ours."""
    if kind_of(folder / INDEX) != "file":
        return {}
    try:
        rows = [finite_json(line) for line in (folder / INDEX).read_text(encoding="utf-8").splitlines()]
    except ValueError:
        return {}
    return {row["file"]: row for row in rows} if all(map(_is_row, rows)) else {}


def _is_row(row: object) -> bool:
    """Whether this is what `sample` writes of a picture, and nothing more."""
    if not isinstance(row, dict) or row.keys() != {"file", "prompt", "seed"}:
        return False
    is_ours = isinstance(row["file"], str) and PICTURE.fullmatch(row["file"]) is not None
    return is_ours and isinstance(row["prompt"], str) and type(row["seed"]) is int


def _check_free(folder: Path, count: int, earlier: Container[str]) -> None:
    """An error if something in the folder bears a name that will be written and is not from an earlier call."""
    pictures = [f"{i:05d}{ending}" for i in range(count) for ending in (".png", ".webp")]
    for name in [INDEX, SHEET, *pictures]:
        kind, ours = kind_of(folder / name), bool(earlier) if name in (INDEX, SHEET) else name in earlier
        if kind and not (ours and kind == "file"):
            problem = f"has a {kind} {name} that is not from an earlier arborl sample"
            raise InputError("--out", folder, problem, "a new folder, or the one of earlier samples")
