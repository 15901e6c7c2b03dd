"""Pictures of some prompts, in a folder: `arborl sample`."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from .config.schema import Config
from .core.errors import InputError
from .data.prompts import Prompts, load_prompts
from .engine.batches import settled
from .engine.generate import generate, noise_of_seeds
from .engine.score import as_bytes, middle_frames
from .models import model_class
from .run.drawings import save_picture, sheet
from .run.inputs import evaluation_prompts
from .run.resume import load_for_inference


def sample(config: Config, run: Path | None, texts: Sequence[str], count: int | None, to: Path) -> str:
    """One picture for each text (or of the prompts that the settings name), in turn up to `count`; says what it made.

    Picture i starts from the noise that diffusers draws with seed + i.
    """
    model_class(config).check(config, may_fetch=True)
    if texts or config.prompts.path:
        prompts = Prompts([*texts], {}) if texts else load_prompts(config.prompts.path)
        count = count or len(prompts)
    else:
        prompts = evaluation_prompts(config, model_class(config))
        count = count or min(16, len(prompts))
    prompts = prompts.take([i % len(prompts) for i in range(count)])
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--out", to, f"cannot be made ({error.strerror})") from None
    model = load_for_inference(config, run, prompts.texts)
    seeds = [config.seed + i for i in range(count)]
    noise = noise_of_seeds(seeds, model.latent_shape)
    leaves = generate(model, prompts, torch.arange(count), config, noise)[:, 0]
    pictures = torch.cat(
        [as_bytes(model.decode(part)) for part in leaves.split(settled(config.sample.decode_batch_size))]
    )
    files = [save_picture(picture, to / f"{i:05d}") for i, picture in enumerate(pictures)]
    rows = [
        {"file": file.name, "prompt": text, "seed": seed}
        for file, text, seed in zip(files, prompts.texts, seeds, strict=True)
    ]
    (to / "index.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    sheet(middle_frames(pictures)[:64], prompts.texts[:64], to / "sheet.png")
    kind = "picture" if pictures.ndim == 4 else "video"
    return f"{to}: {len(pictures)} {kind}(s), sheet.png, and index.jsonl with their prompts"
