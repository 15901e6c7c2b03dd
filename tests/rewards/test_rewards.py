"""Rewards against the projects they are from, against plain transformers, and against files and pictures gone wrong."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from torch import Tensor

from arborl.cli import main
from arborl.config import load_config
from arborl.config.schema import RewardConfig
from arborl.core.errors import InputError
from arborl.rewards import Rewards, blip, clip, load_rewards
from arborl.rewards.base import Reward, RewardFailed, make_reward
from arborl.rewards.catalog import BUILT_IN
from arborl.rewards.files import read_tensors, tensors_of
from arborl.rewards.inspect import example
from arborl.rewards.ocr import likeness, target
from arborl.rewards.preprocessing import centre_crop, letterbox, normalised
from arborl.rewards.tokenizers import ClipTokens
from arborl.tools.imports import import_object
from bench.pipelines import build, clip_encoder
from bench.reward_files import (
    TINY,
    TINY_BLIP,
    bert_tokenizer,
    clip_folder,
    clip_tokenizer,
    head,
    image_reward,
    open_clip,
)

from conftest import ROOT
from launching import forked

GOLDEN = ROOT / "tests" / "golden"
WEIGHTLESS = [name for name, known in BUILT_IN.items() if not known.needs]
NETWORKS = ["hps", "pickscore", "clipscore", "aesthetic", "imagereward"]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every picture reward's files, tiny, in their usual places under one folder."""
    home = tmp_path_factory.mktemp("rewards")
    for name in ("hps_ckpt", "aesthetic_ckpt", "imagereward_ckpt"):
        (home / name).mkdir()
    torch.save({"state_dict": open_clip(TINY)}, home / "hps_ckpt" / "HPS_v2.1_compressed.pt")
    clip_folder(home / "clip_ckpt")
    clip_folder(home / "pickscore_ckpt", activation="gelu")
    torch.save(head("layers.", 16), home / "aesthetic_ckpt" / "sac+logos+ava1-l14-linearMSE.pth")
    torch.save(image_reward(TINY_BLIP), home / "imagereward_ckpt" / "ImageReward.pt")
    clip_tokenizer(home / "tokenizer")
    bert_tokenizer(home / "bert")
    return home


@pytest.fixture(scope="module", autouse=True)
def tokenizer_is_read_once(files: Path) -> Iterator[None]:
    """CLIP's tokenizer among these files, which takes longer to read than a tiny network takes to load and to run."""
    honest = ClipTokens._load
    kept = cache(honest)

    def load(self: ClipTokens, folder: Path) -> Any:
        return kept(None, folder.resolve()) if folder.resolve() == files / "tokenizer" else honest(self, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClipTokens, "_load", load)
        yield


@pytest.fixture
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(files)
    monkeypatch.setattr(blip, "HEADS", (4, 4))
    return files


def make(name: str, **settings: object) -> Reward:
    """A built-in reward as a run would make it."""
    tokenizer = {"imagereward": "bert"}.get(name, "tokenizer") if name in NETWORKS else ""
    return make_reward(name, RewardConfig(**({"tokenizer": tokenizer} | settings)))


def pictures(count: int = 3, height: int = 64, width: int = 64, seed: int = 0) -> Tensor:
    """Smooth random pictures, of 256 levels."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 3, 8, 8, generator=generator)
    large = torch.nn.functional.interpolate(small, (height, width), mode="bicubic").clamp(0, 1)
    return (large * 255).round() / 255


def as_pil(images: Tensor) -> list[Image.Image]:
    return [Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy()) for picture in images]


PROMPTS = ["a red kite over a grey harbour", "two cats", "a red kite over a grey harbour"]


class TestGolden:
    """Numbers computed with HPSv2's and ImageReward's own code."""

    def test_hps_from_its_file_to_its_score(self, here, tmp_path, monkeypatch):
        path, expected = tmp_path / "tiny.pt", json.loads((GOLDEN / "hps_tiny.json").read_text())
        tensors = {name: values.float() for name, values in load_file(GOLDEN / "hps_tiny.safetensors").items()}
        torch.save({"state_dict": tensors}, path)
        monkeypatch.setattr(clip, "HEADS", (3, 4))
        images = load_file(GOLDEN / "hps_tiny_io.safetensors")["images"].permute(0, 3, 1, 2) / 255
        for _ in range(2):  # converted, and then from the converted copy
            scores = make("hps", path=str(path))(images, expected["captions"], {})
            assert (scores - torch.tensor(expected["paired_scores"])).abs().max() < 1e-5

    def test_image_reward(self):
        given_, path = load_file(GOLDEN / "imagereward_tiny_io.safetensors"), Path("tiny")
        found = load_file(GOLDEN / "imagereward_tiny.safetensors")
        found = {name: values.float() if values.is_floating_point() else values for name, values in found.items()}
        network = blip.Blip("", path, blip.from_original("", path, found), (3, 4), torch.float32).eval()
        for shift in range(4):
            images = given_["pixel_values"].roll(-shift, 0)
            with torch.no_grad():
                scores = network(images, given_["input_ids"], given_["attention_mask"])
            pairs = given_["expected_scores_all_pairs"][[(i + shift) % 4 for i in range(4)], range(4)]
            assert (scores - pairs).abs().max() < 1e-5

    @pytest.mark.parametrize("row", range(5))
    def test_letterbox_is_exact(self, row):
        found = load_file(GOLDEN / "hps_letterbox.safetensors")
        images = found[f"image_{row}"].permute(2, 0, 1)[None] / 255
        assert torch.equal(normalised(letterbox(images, 56))[0], found[f"pixels_{row}"])

    @pytest.mark.parametrize(
        ("image", "crop", "rounded"),
        [
            *((f"image_{i}", f"crop_{i}", False) for i in range(4)),
            *((f"image_{i}", f"crop_{i}", True) for i in range(4)),
        ]
        + [("image_odd_margin", f"crop_odd_margin_{kind}", kind == "rounded") for kind in ("rounded", "floored")],
    )
    def test_resize_is_near_pils(self, image, crop, rounded):
        found = load_file(GOLDEN / "resize_pil.safetensors")
        ours = centre_crop(found[image].permute(2, 0, 1)[None] / 255, 56, rounded)[0] * 255
        assert (ours.round() - found[crop].permute(2, 0, 1)).abs().max() <= 1

    def test_tokens_are_exact(self, files):
        tokens = ClipTokens("", str(files / "tokenizer"))
        for row in json.loads((GOLDEN / "clip_tokens.json").read_text())["prompts"]:
            assert tokens([row["text"]], clean=True)[0].tolist() == row["ids"], row["kind"]


class TestPlainTransformers:
    """A `CLIPModel` and `CLIPProcessor` on PIL pictures give the same scores."""

    @pytest.fixture(params=[(64, 64), (90, 61), (512, 300), (40, 57)], ids=str)
    def images(self, request) -> Tensor:
        return pictures(3, *request.param)

    @staticmethod
    @cache
    def loaded(folder: Path) -> tuple[Any, Any]:
        from transformers import CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

        pictures = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
        processor = CLIPProcessor(pictures, CLIPTokenizer.from_pretrained("tokenizer"))
        return CLIPModel.from_pretrained(folder).eval(), processor

    def features(self, folder: Path, images: Tensor) -> tuple[Tensor, Tensor, float, float]:
        """Unit vectors of pictures and prompts, the logit scale, and what the resize alone does to a cosine."""
        model, processor = self.loaded(folder)
        given_ = processor(text=PROMPTS, images=as_pil(images), return_tensors="pt", padding=True, truncation=True)
        with torch.no_grad():
            out = model(**given_)
            ours = model.get_image_features(normalised(centre_crop(images, 56))).pooler_output
        ours = ours / ours.norm(dim=-1, keepdim=True)
        resize = ((ours - out.image_embeds) * out.text_embeds).sum(-1).abs().max()
        return out.image_embeds, out.text_embeds, float(model.logit_scale.detach().exp()), float(resize)

    def test_clipscore(self, here, images):
        seen, read, _, resize = self.features(here / "clip_ckpt", images)
        difference = (make("clipscore")(images, PROMPTS, {}) - (seen * read).sum(-1)).abs().max()
        assert difference < 1e-3
        assert difference <= resize + 1e-6, "beside the resize there is no difference"

    def test_pickscore(self, here, images):
        seen, read, scale, resize = self.features(here / "pickscore_ckpt", images)
        difference = (make("pickscore")(images, PROMPTS, {}) - scale * (seen * read).sum(-1)).abs().max()
        assert difference < 1e-3
        assert difference <= scale * resize + 1e-5

    def test_aesthetic(self, here, images):
        seen, *_ = self.features(here / "clip_ckpt", images)
        layers = torch.load("aesthetic_ckpt/sac+logos+ava1-l14-linearMSE.pth", weights_only=True)
        for i in (0, 2, 4, 6, 7):
            seen = torch.nn.functional.linear(seen, layers[f"layers.{i}.weight"], layers[f"layers.{i}.bias"])
        assert (make("aesthetic")(images, PROMPTS, {}) - seen[:, 0]).abs().max() < 1e-3


@pytest.mark.parametrize("name", [*NETWORKS, "jpeg", "brightness"])
class TestContract:
    """What holds for every reward of pictures."""

    MADE: ClassVar[dict[str, Reward]] = {}

    @pytest.fixture
    def reward(self, here, name) -> Reward:
        if name not in self.MADE:
            self.MADE[name] = make(name)
            self.MADE[name](pictures(1), ["loads it"], {})
        return self.MADE[name]

    def test_one_score_a_picture_and_order_is_kept(self, reward, name):
        images = pictures(5, 70, 56)
        prompts, before = [f"{text} {i}" for i, text in enumerate([*PROMPTS, "", "!"])], images.clone()
        scores = reward(images, prompts, {})
        assert scores.shape == (5,)
        assert scores.dtype == torch.float32
        assert scores.isfinite().all()
        assert not scores.requires_grad
        assert torch.equal(images, before), "what it was given is as it was"
        back = reward(images.flip(0), prompts[::-1], {})
        assert torch.allclose(back.flip(0), scores, atol=1e-5)
        assert scores.std() > 1e-4 * scores.abs().mean(), "pictures differ, and so do their scores"

    def test_micro_batches_change_nothing(self, reward, name, here):
        whole = reward(pictures(5), PROMPTS + PROMPTS[:2], {})
        split = make(name, batch_size=2)(pictures(5), PROMPTS + PROMPTS[:2], {})
        assert torch.allclose(whole, split, atol=1e-5)

    def test_of_a_video_the_mean_over_its_frames(self, reward, name):
        videos = torch.stack([pictures(2, seed=seed) for seed in range(3)], 1)
        frames = [reward(videos[:, i], PROMPTS[:2], {}) for i in range(3)]
        assert torch.allclose(reward(videos, PROMPTS[:2], {}), torch.stack(frames).mean(0), atol=1e-5)

    def test_any_prompt(self, reward, name):
        prompts = ["", " ", "word " * 2000, "“quotes” & &amp; 🥐\n\t", "\x00", "ß" * 10_000]
        assert reward(pictures(6), prompts, {}).isfinite().all()

    def test_any_size(self, reward, name):
        for size in [(1, 1), (1, 7), (57, 1), (224, 224), (333, 77)]:
            if name in ("jpeg", "brightness") or max(size) <= 32 * min(size) or name == "hps":
                assert reward(pictures(2, *size), PROMPTS[:2], {}).isfinite().all()
            else:
                with pytest.raises(RewardFailed, match="too long and thin"):
                    reward(pictures(2, *size), PROMPTS[:2], {})

    @pytest.mark.parametrize("channels", [1, 4])
    def test_grey_and_transparent_pictures(self, reward, name, channels):
        if name in ("brightness", "jpeg"):
            return  # take what they are given
        images = pictures(2)
        if channels == 1:
            images = images[:, :1]
            same = images.expand(-1, 3, -1, -1)
        else:
            same, images = images, torch.cat([images, torch.rand(2, 1, 64, 64)], 1)
        assert torch.equal(reward(images, PROMPTS[:2], {}), reward(same, PROMPTS[:2], {}))


class TestHps:
    def test_converted_weights_are_kept_and_a_changed_file_is_converted_anew(self, here, tmp_path, monkeypatch):
        monkeypatch.setenv("ARBORL_CACHE", str(tmp_path / "cache"))
        path = tmp_path / "mine.pt"
        torch.save({"state_dict": open_clip(TINY, seed=1)}, path)
        first = make("hps", path=str(path))(pictures(), PROMPTS, {})
        (copy,) = (tmp_path / "cache" / "arborl" / "rewards").iterdir()
        copy.write_bytes(copy.read_bytes()[:1000])
        assert torch.equal(make("hps", path=str(path))(pictures(), PROMPTS, {}), first), "a damaged copy is made again"
        assert copy.stat().st_size > 1000
        torch.save({"state_dict": open_clip(TINY, seed=2)}, path)
        assert not torch.equal(make("hps", path=str(path))(pictures(), PROMPTS, {}), first)

    def test_a_cache_that_cannot_be_written_is_said_and_does_not_matter(self, here, tmp_path, monkeypatch):
        (tmp_path / "cache").write_text("a file where a folder should be")
        monkeypatch.setenv("ARBORL_CACHE", str(tmp_path / "cache"))
        shutil.copy(here / "hps_ckpt" / "HPS_v2.1_compressed.pt", tmp_path / "hps.pt")
        with pytest.warns(UserWarning, match="could not be kept"):
            assert make("hps", path=str(tmp_path / "hps.pt"))(pictures(), PROMPTS, {}).isfinite().all()

    def test_plain_safetensors_will_do(self, here, tmp_path):
        save_file(open_clip(TINY), tmp_path / "hps.safetensors")
        ours = make("hps", path=str(tmp_path / "hps.safetensors"))(pictures(), PROMPTS, {})
        assert torch.equal(ours, make("hps")(pictures(), PROMPTS, {}))

    def test_half_precision_towers_give_float32_scores(self, here):
        exact = make("hps")(pictures(), PROMPTS, {})
        for dtype in ("bfloat16", "float16"):
            rough = make("hps", dtype=dtype)(pictures(), PROMPTS, {})
            assert rough.dtype == torch.float32
            assert (rough - exact).abs().max() < 0.03

    @pytest.mark.slow
    def test_the_full_network_loads_as_the_real_file_would(self, tmp_path, here, monkeypatch):
        from bench.reward_files import VIT_H

        monkeypatch.setenv("ARBORL_CACHE", str(tmp_path))
        tensors = open_clip(VIT_H, dtype=torch.float16)
        assert len(tensors) == 686
        assert sum(values.numel() for values in tensors.values()) == pytest.approx(986.1e6, rel=1e-4)
        torch.save({"state_dict": tensors}, tmp_path / "HPS_v2.1_compressed.pt")
        reward = make("hps", path=str(tmp_path / "HPS_v2.1_compressed.pt"))
        assert reward(pictures(1, 512, 512), PROMPTS[:1], {}).isfinite().all()


class TestTokenizer:
    """Where CLIP's vocabulary is looked for."""

    def test_the_pipeline_in_use_has_one(self, here, tmp_path):
        shutil.copytree(here / "tokenizer", tmp_path / "pipeline" / "tokenizer")
        reward = make_reward("hps", RewardConfig(), str(tmp_path / "pipeline"))
        assert torch.equal(reward(pictures(), PROMPTS, {}), make("hps")(pictures(), PROMPTS, {}))

    def test_one_of_a_hub_pipeline_in_the_cache(self, here, tmp_path, monkeypatch):
        snapshot = tmp_path / "models--some--pipeline" / "snapshots" / "1" / "tokenizer"
        shutil.copytree(here / "tokenizer", snapshot)
        (tmp_path / "models--some--pipeline" / "refs").mkdir()
        (tmp_path / "models--some--pipeline" / "refs" / "main").write_text("1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        assert make_reward("clipscore", RewardConfig(), "some/pipeline")(pictures(), PROMPTS, {}).isfinite().all()

    def test_one_of_another_vocabulary_is_not_taken(self, here, sd3_folder):
        with pytest.raises(InputError, match="neither in the pipeline that is trained nor in the hub's cache"):
            make_reward("hps", RewardConfig(), str(sd3_folder))
        with pytest.raises(InputError, match=r"rewards.hps.tokenizer=.* is not CLIP's tokenizer, of 49408 tokens"):
            make_reward("hps", RewardConfig(tokenizer=str(sd3_folder)))

    def test_none_is_one_line(self, here, tmp_path):
        with pytest.raises(InputError, match=r"rewards.hps.tokenizer=nowhere: there is no tokenizer"):
            make_reward("hps", RewardConfig(tokenizer="nowhere"))
        with pytest.raises(InputError, match=r"rewards.imagereward.tokenizer: .*bert-base-uncased is not here"):
            make_reward("imagereward", RewardConfig())


class Bomb:
    """What a checkpoint from a stranger may hold."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.path}",)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def saved(value: object) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        buffer = io.BytesIO()
        torch.save(value(data) if callable(value) else value, buffer)
        return buffer.getvalue()

    return change


def tensors(data: bytes) -> dict:
    return torch.load(io.BytesIO(data), weights_only=True)


def inside(data: bytes, change: Callable[[dict], dict]) -> dict:
    """A checkpoint with its tensors changed, those of HPS under their key."""
    found = tensors(data)
    return {"state_dict": change(found["state_dict"])} if "state_dict" in found else change(found)


DAMAGE = {
    "cut short": (cut, "cut short or damaged"),
    "empty": (lambda data: b"", "cut short or damaged"),
    "text": (lambda data: b"<!DOCTYPE html> not found", "not a checkpoint"),
    "a tensor": (saved(torch.zeros(3)), "holds a Tensor"),
    "no tensors": (saved({"a": "b"}), "a: file of named tensors|holds no tensor|has no state_dict"),
    "nothing": (saved({}), "holds nothing|has no state_dict"),
    "one missing": (saved(lambda data: inside(data, lambda t: dict(list(t.items())[:-1]))), "missing|head of five|no "),
    "one too many": (saved(lambda data: inside(data, lambda t: t | {"layers.9.x": torch.zeros(1)})), "unexpected|five"),
    "another kind": (
        saved(lambda data: inside(data, lambda t: {n: v.long() for n, v in t.items()})),
        "of another kind|whole numbers",
    ),
    "names that are none": (
        saved({0: torch.zeros(2)}),
        "holds no tensor|state_dict",
    ),
    "another shape": (
        saved(lambda data: inside(data, lambda t: t | {list(t)[-1]: torch.zeros(2, 3)})),
        "of another shape|do not fit|must match|ends in",
    ),
}


class TestFiles:
    """Files that are not what they should be: one line, and nothing in them is run."""

    @pytest.mark.parametrize("damage", DAMAGE)
    @pytest.mark.parametrize("name", ["hps", "aesthetic", "imagereward"])
    def test_damaged(self, here, tmp_path, name, damage):
        change, words = DAMAGE[damage]
        path = tmp_path / Path(BUILT_IN[name].needs[0].file).name
        path.write_bytes(change((here / BUILT_IN[name].needs[0].place).read_bytes()))
        with pytest.raises(InputError, match=words) as error:
            make(name, path=str(path))(pictures(1), ["a"], {})
        assert str(error.value).startswith(f"rewards.{name}.path={path}")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["hps", "aesthetic", "imagereward"])
    @pytest.mark.parametrize("legacy", [False, True])
    def test_code_in_a_pickle_is_not_run(self, here, tmp_path, name, legacy):
        path, mark = tmp_path / "evil.pt", tmp_path / "mark"
        torch.save({"state_dict": {"x": Bomb(mark)}}, path, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(InputError, match="is refused: it holds more than weights"):
            make(name, path=str(path))(pictures(1), ["a"], {})
        assert not mark.exists()

    def test_code_in_a_transformers_folder_is_not_run(self, here, tmp_path):
        folder, mark = tmp_path / "clip", tmp_path / "mark"
        shutil.copytree(here / "clip_ckpt", folder)
        (folder / "model.safetensors").unlink()
        torch.save({"x": Bomb(mark)}, folder / "pytorch_model.bin")
        with pytest.raises(InputError, match=r"rewards.clipscore.path=.* cannot be read"):
            make("clipscore", path=str(folder))(pictures(1), ["a"], {})
        assert not mark.exists()

    @pytest.mark.parametrize("name", ["HPS_v2_compressed.pt", "HPS_v2.0_compressed.pt"])
    def test_hps_2_0_is_told_by_its_name(self, here, tmp_path, name):
        shutil.copy(here / "hps_ckpt" / "HPS_v2.1_compressed.pt", tmp_path / name)
        with pytest.raises(InputError, match=r"holds HPS v2.0 .*only the name tells.*HPS_v2.1_compressed.pt"):
            make("hps", path=str(tmp_path / name))

    def test_another_clip_is_not_hps(self, here, tmp_path):
        large = {"vision": {"width": 768, "layers": 1, "patch": 14, "side": 28}, "text": {"width": 512, "layers": 1}}
        torch.save({"state_dict": open_clip(large | {"embedding": 512})}, tmp_path / "large.pt")
        with pytest.raises(InputError, match=r"holds another CLIP \(768 wide, 1 layers\) than HPS's ViT-H-14"):
            make("hps", path=str(tmp_path / "large.pt"))(pictures(1), ["a"], {})

    def test_flipped_bytes_are_one_line_or_weights(self, here, tmp_path):
        whole, path = (here / "aesthetic_ckpt" / "sac+logos+ava1-l14-linearMSE.pth").read_bytes(), tmp_path / "a.pth"
        draw, told = np.random.default_rng(0), []
        for _ in range(150):
            data, place = bytearray(whole), int(draw.integers(0, len(whole)))
            place = place if draw.random() < 0.3 else int(draw.integers(0, 3000))
            data[place] ^= int(draw.integers(1, 256))
            path.write_bytes(bytes(data))
            try:
                tensors_of("", path, read_tensors("", path))
            except InputError as error:
                told.append(str(error))
        assert 5 < len(told) < 150
        assert not any("\n" in line for line in told)

    def test_plain_open_clip_weights_are_not_hps(self, here, tmp_path):
        torch.save(open_clip(TINY), tmp_path / "open_clip_pytorch_model.bin")
        with pytest.raises(InputError, match="has no state_dict, as HPS's file has"):
            make("hps", path=str(tmp_path / "open_clip_pytorch_model.bin"))(pictures(1), ["a"], {})

    @pytest.mark.parametrize(
        "damage", ["weights cut short", "weights gone", "config gone", "another model", "one short"]
    )
    def test_damaged_folders(self, here, tmp_path, damage):
        folder = tmp_path / "clip"
        shutil.copytree(here / "clip_ckpt", folder)
        weights = folder / "model.safetensors"
        if damage == "weights cut short":
            weights.write_bytes(cut(weights.read_bytes()))
        elif damage == "weights gone":
            weights.unlink()
        elif damage == "config gone":
            (folder / "config.json").unlink()
        elif damage == "another model":
            (folder / "config.json").write_text('{"model_type": "bert"}')
        else:
            save_file(
                {name: t for name, t in load_file(weights).items() if "proj" not in name}, weights, {"format": "pt"}
            )
        with pytest.raises(InputError) as error:
            make("pickscore", path=str(folder))(pictures(1), ["a"], {})
        assert str(error.value).startswith(f"rewards.pickscore.path={folder}")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", NETWORKS)
    def test_what_is_missing_says_where_to_get_it_and_where_to_put_it(self, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        need = BUILT_IN[name].needs[0]
        with pytest.raises(InputError) as error:
            make_reward(name, RewardConfig())
        text = str(error.value)
        assert text.startswith(f"rewards.{name}.path: {need.file or need.hub} is not here (not at {need.place}")
        assert f"`hf download {need.hub}" in text
        assert f"--local-dir {Path(need.place).parent if need.file else need.place}`" in text
        for path, words in (("nowhere.pt", "no such file or folder"), (str(tmp_path), "the folder has no")):
            with pytest.raises(InputError, match=words):
                make_reward(name, RewardConfig(path=path))
        for hub in ("someone/weights", "someone/weights-v1.5"):
            with pytest.raises(InputError, match="is not here \\(not in the hub's cache\\)"):
                make_reward(name, RewardConfig(path=hub))


def sign(text: str, size: int = 44) -> Tensor:
    canvas = Image.new("RGB", (320, 160), "white")
    ImageDraw.Draw(canvas).text((20, 50), text, fill="black", font=ImageFont.load_default(size))
    return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1)[None] / 255


@pytest.mark.skipif(not find_spec("rapidocr"), reason="needs the extra: pip install 'arborl[ocr]'")
class TestOcr:
    """With the real weights in RapidOCR's wheel."""

    @pytest.fixture(scope="class")
    def ocr(self) -> Reward:
        return make_reward("ocr", RewardConfig())

    def test_text_typo_and_noise(self, ocr):
        prompt = 'a shop with a sign that says "FRESH BREAD"'
        noise = torch.rand(1, 3, 160, 320, generator=torch.Generator().manual_seed(0))
        images = torch.cat([sign("FRESH BREAD"), sign("FRESH BRAED"), noise, torch.ones(1, 3, 160, 320)])
        right, typo, *none = ocr(images, [prompt] * 4, {}).tolist()
        assert right == 1.0
        assert 0.5 < typo < 1.0
        assert none == [0.0, 0.0]

    def test_other_words_around_it_do_not_matter_and_case_does_not(self, ocr):
        assert ocr(sign("the open door", 36), ["a sign: “OPEN”"], {}).item() == 1.0

    def test_a_prompt_without_quotes_is_one_line(self, ocr, tmp_path, capsys):
        for prompt in ("a sign", 'a sign ""', 'one " alone'):
            with pytest.raises(InputError, match="quote no text to be read"):
                ocr(sign("A"), [prompt], {})
        (tmp_path / "prompts.txt").write_text('a sign "A"\na sign\n')
        refused(
            ["train", "rewards=ocr", f"prompts.path={tmp_path}/prompts.txt"], ["1 of 2 prompts", "'a sign'"], capsys
        )

    @given(st.text(max_size=12), st.text(alphabet="abc", min_size=1, max_size=8))
    def test_likeness(self, read: str, wanted: str):
        score = likeness(read, wanted)
        assert 0 <= score <= 1
        assert likeness(f"{read}{wanted}{read}", wanted) == 1
        assert (score == 1) == (wanted in "".join(read.split()).casefold())
        assert likeness("", wanted) == 0

    def test_target(self):
        assert target('a "Big  Sale" and “50%”') == "bigsale50%"


def refused(arguments: list[str], words: Sequence[str], capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    told = [line for line in lines if line.startswith("error: ")]
    assert len(told) == 1, lines
    assert all(word in told[0] for word in words), told


class TestSeveral:
    """Which rewards are asked, when, and what one that fails costs."""

    def test_watched_rewards_are_asked_in_evaluations_alone(self):
        rewards = load_rewards({"place": RewardConfig(weight=1.0)}, watched=["jpeg", "place"])
        assert list(rewards.functions) == ["place", "jpeg"]
        assert list(rewards.trained.functions) == ["place"]
        assert rewards.watched == ["jpeg"]

    def test_without_a_weight_a_watched_reward_is_not_trained(self):
        configs = {"a": RewardConfig("jpeg"), "b": RewardConfig("brightness"), "c": RewardConfig("jpeg", 0.0)}
        rewards = load_rewards(configs, watched=["a"])
        assert rewards.weights == {"a": 0.0, "b": 1.0, "c": 0.0}
        assert list(rewards.trained.functions) == ["b", "c"], "weight 0 alone still logs it"

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            (["eval.rewards=[nose]"], ["rewards.nose.fn", "no built-in reward of that name", "hps"]),
            (["eval.best=nose"], ["eval.best=nose", "place"]),
            (["rewards.place.weight=0"], ["every reward's weight is 0"]),
            (["rewards.red.weight=1"], ["rewards.red.fn", "is not set"]),
            (["rewards.pictures.fn=jpeg"], ["rewards=pictures", "cannot be a reward's name"]),
            (["rewards.hps.batch_size=0"], ["rewards.hps.batch_size=0", "1 or more"]),
            (["rewards.hps.dtype=int8"], ["rewards.hps.dtype=int8", "bfloat16"]),
            (["rewards.hps.weights=x"], ["rewards.hps.weights", "rewards.<name>.weight"]),
        ],
    )
    def test_bad_settings(self, overrides, words, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        refused(["train", "-c", "mixture", *overrides], words, capsys)
        assert not list(tmp_path.iterdir())

    def test_one_that_raises_has_no_score_and_says_so(self):
        def broken(images, prompts, columns):
            raise ConnectionError("gone\nfor good")

        rewards = load_rewards({"jpeg": RewardConfig(weight=1.0)})
        rewards.functions["mine"] = broken
        scores, failures = rewards(pictures(), PROMPTS, {})
        assert scores["mine"].isnan().all()
        assert scores["jpeg"].isfinite().all()
        assert failures["mine"].pictures == 3
        assert failures["mine"].why.startswith("ConnectionError: gone, at test_rewards.py:")
        with pytest.raises(ConnectionError):
            rewards(pictures(), PROMPTS, {}, strict=True)

    def test_one_that_ends_python_has_no_score_and_says_so(self):
        rewards = load_rewards({"jpeg": RewardConfig(weight=1.0)})
        rewards.functions["mine"] = lambda images, prompts, columns: sys.exit(0)
        scores, failures = rewards(pictures(), PROMPTS, {})
        assert scores["mine"].isnan().all()
        assert scores["jpeg"].isfinite().all()
        assert failures["mine"].why.startswith("SystemExit: 0, at test_rewards.py:")
        with pytest.raises(RewardFailed, match="SystemExit: 0"):
            rewards(pictures(), PROMPTS, {}, strict=True)

    @pytest.mark.parametrize("how", ["in place", "a view", "numpy", "data"])
    def test_one_that_writes_into_what_it_is_given_spoils_nothing(self, how: str):
        """Neither what the next one scores nor what is saved, and evaluated, of the pictures."""

        def spoils(images, prompts, columns):
            match how:
                case "in place":
                    images.zero_()
                case "a view":
                    images[:, 0, 2:].detach().fill_(-1)
                case "numpy":
                    images.numpy()[:] = 7
                case "data":
                    images.data.mul_(3)
            prompts.sort()
            columns["place"][0]["left"] = 9
            columns["place"].clear()
            return torch.arange(float(len(images)))

        def watches(images, prompts, columns):
            assert (prompts, columns) == (list(PROMPTS), {"place": [{"left": i} for i in range(3)]})
            return images.flatten(1).mean(1)

        functions = {"first": spoils, "then": watches}
        rewards = Rewards(functions, dict.fromkeys(functions, 1.0))
        given, prompts, columns = pictures(), list(PROMPTS), {"place": [{"left": i} for i in range(3)]}
        before = given.clone()
        scores, failures = rewards(given, prompts, columns)
        assert not failures
        assert given.equal(before)
        assert (prompts, columns) == (list(PROMPTS), {"place": [{"left": i} for i in range(3)]})
        assert scores["then"].equal(before.flatten(1).mean(1))

    def test_a_picture_that_is_none_gets_no_score(self, here):
        images = pictures()
        images[1, 0, 3, 3] = torch.nan
        rewards = load_rewards({name: RewardConfig(weight=1.0) for name in ("jpeg", "brightness")})
        for scores in rewards(images, PROMPTS, {}).scores.values():
            assert scores.isnan().tolist() == [False, True, False]


MINE = """
import torch

calls = 0

def some(images, prompts, columns):
    "Fails at every third call that a run makes; before that it tries three pictures."
    global calls
    calls += len(prompts) > 3
    if calls % 3 == 0 and len(prompts) > 3:
        raise ConnectionError("no answer")
    return {"a": images.flatten(1).mean(1), "b": images[:, 0].flatten(1).mean(1)}

def later(images, prompts, columns):
    "Fails for good after a while."
    global calls
    calls += len(prompts) > 3
    if calls > 4:
        raise ConnectionError("no answer")
    return images.flatten(1).mean(1)

def never(images, prompts, columns):
    raise ConnectionError("no answer")

def darkness(images, prompts, columns):
    return -images.flatten(1).mean(1)
"""
RUN = ["train", "-c", "mixture", "run_name=x", "train.epochs=3", "sample.num_prompts=2", "eval.num_prompts=8"]
RUN += ["log.trackers=[]", "log.record_every=0", "rewards=none"]


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("mine", None)
    return tmp_path


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_ok(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 0


class TestFailures:
    def test_leaves_without_a_score_are_left_out_and_counted(self, own, capsys):
        run_ok(*RUN, "rewards.mine.fn=mine:some", "sample.decode_batch_size=8")
        told = capsys.readouterr().err
        assert "rewards.mine failed (ConnectionError: no answer, at mine.py:11)" in told
        shares = [row["rewards/mine/failed"] for row in rows(own / "runs" / "x")[:-1]]
        assert all(0 < share <= 0.5 for share in shares)
        assert all(row["steps"] > 0 for row in rows(own / "runs" / "x")[:-1])
        assert all("rewards/mine/a/mean" in row for row in rows(own / "runs" / "x")[:-1])

    def test_too_many_stop_the_run_with_a_line_and_lose_nothing(self, own, capsys):
        with pytest.raises(SystemExit) as stopped:
            main([*RUN, "rewards.mine.fn=mine:later", "train.epochs=9", "sample.decode_batch_size=32"])
        assert stopped.value.code == 2
        told = capsys.readouterr().err.strip().splitlines()
        assert told[-1].startswith("error: rewards.mine: failed on 32 of the 32 leaves of epoch 3 (ConnectionError")
        assert "3 epochs saved. To go on: arborl train --resume runs/x" in told[-2]
        run_ok("train", "--resume", "runs/x", "rewards.mine.fn=mine:darkness", "train.epochs=4")
        assert [row["epoch"] for row in rows(own / "runs" / "x")] == [0, 1, 2, 3, 4]


class TestCommand:
    def test_the_list(self, here, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")
        run_ok("rewards")
        told = capsys.readouterr().out
        assert all(name in told for name in BUILT_IN)
        run_ok("rewards", "--json")
        listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        assert listed["jpeg"]["ready"]
        assert not listed["videoalign"]["ready"]
        assert "hf download KwaiVGI/VideoReward" in listed["videoalign"]["lacks"]

    @pytest.mark.parametrize("name", WEIGHTLESS)
    def test_check_draws_a_picture_that_suits(self, name, capsys):
        run_ok("rewards", "check", name, "--json")
        found = json.loads(capsys.readouterr().out)
        assert found["scores"][name] is not None
        if name in ("scene", "place", "ocr"):
            assert found["scores"][name] > 0.95

    def test_check_of_a_network_with_a_picture_of_ones_own(self, here, capsys, tmp_path):
        for mode in ("RGB", "RGBA", "L", "P", "1"):
            Image.new(mode, (33, 20)).save(tmp_path / "a.png")
            more = ["--picture", f"{tmp_path}/a.png", "--prompt", "a cat", "rewards.hps.tokenizer=tokenizer"]
            run_ok("rewards", "check", "hps", *more)
            told = capsys.readouterr().out
            assert "hps: " in told
            assert "one picture of 33×20 on cpu" in told
        Image.new("I;16", (33, 20)).save(tmp_path / "a.png")
        refused(["rewards", "check", "jpeg", "-i", f"{tmp_path}/a.png"], ["--picture", "more than 8 bits"], capsys)
        (tmp_path / "a.png").write_bytes(b"no picture")
        refused(["rewards", "check", "jpeg", "-i", f"{tmp_path}/a.png"], ["--picture", "cannot be read"], capsys)
        refused(["rewards", "check", "nose"], ["rewards.nose.fn=nose", "is not known", "hps"], capsys)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["check", "jpeg", "--device", "foo"], ["--device=foo"]),
            (["check", "jpeg", "--device", "cuda:99"], ["--device=cuda:99"]),
            (["check", "place", "-i", "big.png"], ["rewards.place", "reads 32×32 pictures"]),
            (["check", "clipscore", "rewards.clipscore.tokenizer=tokenizer", "-i", "thin.png"], ["too long and thin"]),
            (["check", "ocr", "-i", "thin.png"], ["rewards.ocr", "too long and thin"]),
            (["check", "torch:mean"], ["rewards.mean.fn=torch:mean", "does not take what a reward is given"]),
            (["check", "hps"], ["rewards.hps.tokenizer", "CLIP's tokenizer is neither"]),
        ],
    )
    def test_what_cannot_be_scored_is_one_line(self, here, capsys, arguments, words):
        Image.new("RGB", (40, 40)).save(here / "big.png")
        Image.new("RGB", (100, 1)).save(here / "thin.png")
        refused(["rewards", *arguments], words, capsys)

    def test_a_server_that_could_not_score_does_not_start(self, here, tmp_path, capsys):
        (tmp_path / "junk.pt").write_bytes(b"junk")
        more = [f"rewards.hps.path={tmp_path}/junk.pt", "rewards.hps.tokenizer=tokenizer"]
        refused(["serve", "hps", "--port", "0", *more], ["rewards.hps.path", "not a checkpoint"], capsys)

    def test_all_that_is_missing_is_told_at_once(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError) as error:
            make_reward("aesthetic", RewardConfig())
        assert all(f"rewards.aesthetic.{field}" in str(error.value) for field in ("path", "backbone"))
        assert "tokenizer" not in str(error.value), "it reads no prompts"
        with pytest.raises(InputError, match=r"rewards.imagereward.path.*and rewards.imagereward.tokenizer"):
            make_reward("imagereward", RewardConfig())

    def test_an_evaluation_needs_no_trained_reward(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        run_ok("eval", "-c", "mixture", "rewards=none", "eval.rewards=[place]", "eval.num_prompts=4", "--json")
        found = json.loads(capsys.readouterr().out)
        assert set(found["rewards"]) == {"place"}
        assert set(found["pictures"]) == {"dark", "saturated", "entropy", "edges"}

    def test_an_evaluation_without_any_score_is_an_error(self, own, capsys):
        more = ["rewards=none", "rewards.mine.fn=mine:never", "eval.num_prompts=4"]
        refused(["eval", "-c", "mixture", *more], ["none of the 4 pictures got a score"], capsys)

    def test_a_function_of_ones_own(self, own, capsys):
        run_ok("rewards", "check", "mine:darkness")
        assert "darkness: -" in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["hps", "ocr", "place", "scene"])
    def test_examples_are_pictures(self, name):
        picture, prompt = example(name, import_object("rewards", BUILT_IN[name].fn, ()))
        assert picture.shape[0] == 3
        assert 0 <= picture.min() <= picture.max() <= 1
        assert prompt


def test_a_reward_may_bring_an_example_of_its_own():
    def width(images, prompts, columns):
        return torch.full((len(images),), float(images.shape[-1]))

    width.example = lambda: (torch.zeros(3, 4, 7), "a dot")  # type: ignore[attr-defined]
    picture, prompt = example("width", width)
    assert (picture.shape, prompt) == ((3, 4, 7), "a dot")


@pytest.fixture(scope="session")
def sd3_with_clip_words(tmp_path_factory, files) -> Path:
    """A tiny SD3 pipeline with CLIP's own tokenizers, as the real one has."""
    from transformers import CLIPTokenizer

    pipe, folder = build("sd3"), tmp_path_factory.mktemp("sd3") / "pipeline"
    words = {"vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407, "bos_token_id": 49406}
    for encoder, tokenizer in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")):
        pipe.register_modules(**{encoder: clip_encoder(16, **words, pad_token_id=1)})
        pipe.register_modules(**{tokenizer: CLIPTokenizer.from_pretrained(files / "tokenizer")})
    pipe.save_pretrained(folder)
    return folder


def test_the_treegrpo_command_end_to_end(files, sd3_with_clip_words, tmp_path):
    """As its README writes it, in one process: HPS-v2.1's file in its place, the tokenizer the pipeline's own."""
    shutil.copytree(files / "hps_ckpt", tmp_path / "hps_ckpt")
    readme = ["--config-name", "base", "run_name=sd3-5m_treegrpo", "sample.num_prompts=2", "sample.num_trees=1"]
    small = [f"model.path={sd3_with_clip_words}", "sample.resolution=16", "model.max_sequence_length=4"]
    small += ["train.epochs=2", "eval.num_prompts=2", "eval.rewards=[hps,jpeg]"]
    done = forked("train", *readme, "tree.w=4", "tree.k=2", *small, cwd=tmp_path)
    assert done.code == 0, done.said
    found = rows(tmp_path / "runs" / "sd3-5m_treegrpo")
    assert [(row["edges"], row["parents"], row["steps"]) for row in found[:2]] == [(60, 30, 1)] * 2
    assert all(-1 < row["rewards/hps/mean"] < 1 and row["rewards/hps/std"] > 0 for row in found[:2])
    assert found[0]["ratio_error"] <= 1e-6
    assert {"eval/hps", "eval/jpeg", "eval/pictures/dark"} <= found[2].keys()
    assert "rewards/jpeg/mean" not in found[0], "watched, and so not asked of leaves"


def test_a_run_can_be_looked_at_from_another_folder(here, sd3_with_clip_words, tmp_path, monkeypatch, capsys):
    """Where the weights were found is kept with the run, those of watched rewards too."""
    options = [f"model.path={sd3_with_clip_words}", "sample.resolution=16", "model.max_sequence_length=4"]
    options += ["train.epochs=0", "eval.num_prompts=2", f"log.dir={tmp_path}", "run_name=x", "eval.rewards=[aesthetic]"]
    run_ok("train", "-c", "base", *options)
    monkeypatch.chdir(tmp_path)
    run_ok("eval", "--run", "x", "--json")
    assert set(json.loads(capsys.readouterr().out)["rewards"]) == {"hps", "aesthetic"}


def test_hps_and_clip_one_to_one(here, sd3_with_clip_words, tmp_path, capsys):
    options = [f"model.path={sd3_with_clip_words}", "sample.resolution=16", "model.max_sequence_length=4"]
    options += ["train.epochs=1", "eval.num_prompts=2", "sample.num_prompts=2", f"log.dir={tmp_path}", "run_name=both"]
    options += ["rewards.hps.weight=0.5"]
    run_ok("train", "-c", "base", "rewards=hps_clip", *options)
    row = rows(tmp_path / "both")[0]
    plain = 0.5 * row["rewards/hps/mean"] + row["rewards/clipscore/mean"]
    assert row["reward"] == pytest.approx(plain, abs=1e-6), "z-scores would sum to nothing"
    assert row["reward_zscored_std"] > 0
    assert row["rewards/hps/std"] > 0
    assert row["rewards/clipscore/std"] > 0
    config = load_config("base", ["rewards=hps_clip"])
    assert {name: reward.weight for name, reward in config.rewards.items()} == {"hps": 1.0, "clipscore": 1.0}
    assert config.advantage.combine == "zscore"
