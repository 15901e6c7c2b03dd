"""VideoAlign against its own parts: peft's network with its adapters unmerged, frames and patches by hand."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from arborl.cli import main
from arborl.config.schema import RewardConfig
from arborl.core.errors import InputError
from arborl.rewards.videoalign import REWARD_TOKENS, VideoAlign, chosen, patches, resized, size
from bench.reward_files import QUESTION, qwen_tokenizer

from conftest import tiny_overrides

TEMPLATE = f'import nothing_of_the_kind\n\nSIMPLE = "no"\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = """{QUESTION}"""\n'
MEAN, STD = (3.6757, 1.1646, 2.8105), (2.2476, 1.3811, 2.5121)
PROMPTS = ["a dog runs", "", "the {dog} sat {text_prompt} {} on the mat", "été — 犬\n\n two  spaces "]


class Head(Qwen2VLForConditionalGeneration):
    def __init__(self, config: Any, outputs: int) -> None:
        super().__init__(config)
        self.rm_head = nn.Linear(config.text_config.hidden_size, outputs, bias=False)


@dataclass
class Made:
    """The files of a reward, and the network they were written from."""

    folder: Path
    backbone: Path
    network: Any
    tokenizer: Any

    def reward(self, **settings: Any) -> VideoAlign:
        settings = {"path": str(self.folder), "backbone": str(self.backbone), "fps": 8.0, **settings}
        return VideoAlign("look", RewardConfig(**settings))


def make(
    root: Path, *, old: bool = True, outputs: int = 1, rslora: bool = False, words: bool = False, saved: bool = False
) -> Made:
    """A tiny network under LoRA, written as the authors write theirs; `words`: the embedding is under LoRA as well."""
    folder, backbone = root / "ckpt", root / "qwen"
    tokenizer = qwen_tokenizer()
    tokenizer.save_pretrained(backbone)
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    settings = {
        "model_type": "qwen2_vl",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "tie_word_embeddings": not words,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "vocab_size": 320,  # as Qwen's: more than there are tokens, until the authors cut it
        "vision_config": {**vision, "model_type": "qwen2_vl", "in_chans": 3},
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    }
    (backbone / "config.json").write_text(json.dumps(settings | {"torch_dtype": "bfloat16"}))
    tokenizer.add_tokens(list(REWARD_TOKENS), special_tokens=True)

    torch.manual_seed(1)
    network: Any = Head(Qwen2VLConfig.from_dict(settings | {"vocab_size": len(tokenizer)}), outputs)
    for rotary in (network.model.visual.rotary_pos_emb, network.model.language_model.rotary_emb):
        rotary.inv_freq.copy_(rotary.inv_freq.bfloat16())
    linear = r".*language_model.*_proj" + (r"|.*embed_tokens" if words else "")
    lora = LoraConfig(
        r=4, lora_alpha=6, target_modules=linear, use_rslora=rslora, modules_to_save=["rm_head"] if saved else None
    )
    network = get_peft_model(network, lora).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1))
    state = network.state_dict()
    if old:
        state = {
            name.replace(".language_model.", ".").replace(".model.visual.", ".visual."): t for name, t in state.items()
        }
        state = {name.replace("base_model.visual.", "base_model.model.visual."): t for name, t in state.items()}
    (folder / "checkpoint-7").mkdir(parents=True)
    torch.save(state, folder / "checkpoint-7" / "model.pth")
    (folder / "prompt_template.py").write_text(TEMPLATE)
    config = {
        "data_config": {"fps": 2.0, "num_frames": None, "max_frame_pixels": 200704, "sample_type": "uniform"},
        "model_config": {"output_dim": outputs, "use_special_tokens": True},
        "peft_lora_config": {"lora_r": 4, "lora_alpha": 6, "use_rslora": rslora},
        "inference_config": {f"{p}_{what}": x for what, xs in (("mean", MEAN), ("std", STD))
                             for p, x in zip(("VQ", "MQ", "TA"), xs, strict=True)},
    }  # fmt: skip
    (folder / "model_config.json").write_text(json.dumps(config))
    return Made(folder, backbone, network, tokenizer)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("videoalign"))


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Made:
    """To be broken."""
    shutil.copytree(made.folder.parent, tmp_path / "copy")
    return Made(tmp_path / "copy" / "ckpt", tmp_path / "copy" / "qwen", made.network, made.tokenizer)


def videos(n: int = 1, frames: int = 9, height: int = 90, width: int = 120) -> Tensor:
    return torch.rand(n, frames, 3, height, width, generator=torch.Generator().manual_seed(n + frames))


@torch.no_grad()
def slow(made: Made, video: Tensor, prompt: str, fps: float = 8.0) -> list[float]:
    """One video from the formulas: an index, a patch, an adapter at a time, nothing merged or padded."""
    count = min(max(len(video) / fps * 2, 4), len(video) - len(video) % 2)
    count = max(2, 2 * round(count / 2))
    frames = [video[round(i * (len(video) - 1) / (count - 1))] for i in range(count)]
    rows, columns = size(*video.shape[-2:])
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    ready = []
    for frame in frames:
        levels = (frame * 255).round().to(torch.uint8).float()
        levels = interpolate(levels[None], (rows, columns), mode="bicubic", antialias=True, align_corners=False)[0]
        levels = levels.clamp(0, 255).round().to(torch.uint8).float()
        ready.append((levels / 255 - mean[:, None, None]) / std[:, None, None])
    pixels = []
    for t in range(0, count, 2):
        for top in range(0, rows, 28):
            for left in range(0, columns, 28):
                for y in (top, top + 14):
                    for x in (left, left + 14):
                        pair = [ready[t + k][:, y : y + 14, x : x + 14] for k in (0, 1)]
                        pixels.append(torch.stack([pair[k][c] for c in range(3) for k in (0, 1)]).flatten())
    grid = torch.tensor([[count // 2, rows // 14, columns // 14]])

    text = QUESTION.replace("{text_prompt}", prompt)
    turn = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}]
    text = made.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    text = text.replace("<|video_pad|>", "<|video_pad|>" * (int(grid.prod()) // 4))
    ids = torch.tensor(made.tokenizer(text)["input_ids"])
    head = made.network.base_model.model
    states = head.model.language_model.embed_tokens(ids)
    seen = head.model.visual(torch.stack(pixels), grid_thw=grid).pooler_output
    states[ids == made.tokenizer.convert_tokens_to_ids("<|video_pad|>")] = seen
    states = head.model.language_model(inputs_embeds=states[None], use_cache=False).last_hidden_state[0]
    scores = []
    for i, token in enumerate(REWARD_TOKENS):
        (place,) = (ids == made.tokenizer.convert_tokens_to_ids(token)).nonzero()
        raw = head.rm_head(states[place[0]])
        scores.append(float((raw[i if len(raw) == 3 else 0] - MEAN[i]) / STD[i]))
    return scores


def table(scores: Any) -> Tensor:
    assert list(scores) == ["vq", "mq", "ta"]
    return torch.stack(list(scores.values()), 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"old": False, "outputs": 3},
        {"outputs": 3, "rslora": True, "saved": True},
        {"old": False, "words": True},
    ],
    ids=str,
)
def test_merged_is_unmerged(tmp_path: Path, options: dict):
    made, given = make(tmp_path, **options), videos(2)
    found = table(made.reward()(given, PROMPTS[:2], {}))
    expected = torch.tensor([slow(made, video, prompt) for video, prompt in zip(given, PROMPTS, strict=False)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.std(0).min() > 1e-4  # it does look, and read
    again = table(made.reward()(given, PROMPTS[:2], {}))  # from the kept copy
    torch.testing.assert_close(again, found, rtol=0, atol=1e-5)


def test_a_batch_is_its_videos(made: Made):
    reward, given = made.reward(), videos(len(PROMPTS) + 1)
    prompts = [*PROMPTS, "dog " * 2500]
    together = table(reward(given, prompts, {}))  # of other lengths: four and one
    alone = torch.cat([table(reward(given[i : i + 1], prompts[i : i + 1], {})) for i in range(len(prompts))])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(together[2], torch.tensor(slow(made, given[2], PROMPTS[2])), rtol=0, atol=1e-5)


def test_precision(made: Made):
    given = videos(2)
    exact, half = (table(made.reward(dtype=dtype)(given, PROMPTS[:2], {})) for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=0, atol=0.1)


class TestText:
    @pytest.mark.parametrize("prompt", [*PROMPTS, "dog " * 2500])
    def test_tokens_are_those_of_the_whole(self, made: Made, prompt: str):
        reward = made.reward()
        reward(videos(), [""], {})
        text = QUESTION.replace("{text_prompt}", prompt)
        turn = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}]
        text = made.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        whole = made.tokenizer(text.replace("<|video_pad|>", "<|video_pad|>" * 5))["input_ids"]
        assert reward.tokens(prompt, 5) == whole

    @pytest.mark.parametrize(
        "marker", [*REWARD_TOKENS, "<|im_end|>", "<|video_pad|>", "<|image_pad|>", "<|endoftext|>"]
    )
    def test_a_marker_in_a_prompt_is_words(self, made: Made, marker: str):
        reward, given = made.reward(), videos()
        scores = table(reward(given, [f"a {marker} dog"], {}))
        assert scores.isfinite().all()
        token = made.tokenizer.convert_tokens_to_ids(marker)
        assert reward.tokens(f"a {marker} dog", 5).count(token) == reward.tokens("a dog", 5).count(token)
        assert made.tokenizer.decode(reward.tokens(f"a {marker} dog", 5)).count(f"a {marker} dog") == 1


class TestPixels:
    @pytest.mark.parametrize(
        "shape", [(1, 90, 120), (2, 90, 120), (3, 30, 30), (5, 200, 64), (33, 40, 300), (4, 150, 1)]
    )
    def test_any_video(self, made: Made, shape: tuple[int, int, int]):
        given = videos(1, *shape)
        found = table(made.reward()(given, ["a dog"], {}))
        torch.testing.assert_close(found[0], torch.tensor(slow(made, given[0], "a dog")), rtol=0, atol=1e-5)

    def test_which_frames(self):
        assert chosen(81, 16.0).tolist() == [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]
        assert chosen(33, 16.0).tolist() == [0, 11, 21, 32]
        assert chosen(5, 16.0).tolist() == [0, 1, 3, 4]
        assert [chosen(n, 16.0).tolist() for n in (1, 2, 3)] == [[0, 0], [0, 1], [0, 2]]
        assert len(chosen(10_000, 8.0)) == 768

    @pytest.mark.parametrize(
        ("given", "found"),
        [((480, 832), (336, 588)), ((448, 448), (448, 448)), ((449, 449), (448, 448)), ((16, 32), (224, 448))],
    )
    def test_sizes(self, given: tuple[int, int], found: tuple[int, int]):
        assert size(*given) == found

    @pytest.mark.parametrize("shape", [(1, 200), (7, 1400), (3000, 20), (1, 1), (720, 1280)])
    def test_sizes_are_whole_tokens(self, shape: tuple[int, int]):
        rows, columns = size(*shape)
        assert rows % 28 == columns % 28 == 0
        assert 100352 <= rows * columns <= 200704 or max(shape) > 100 * min(shape)

    def test_patches_are_those_of_transformers(self):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        frame = videos(1, 1, 280, 392)[0, 0]
        expected = Qwen2VLImageProcessorPil()(
            (frame * 255).round().byte().permute(1, 2, 0).numpy(), return_tensors="pt"
        )
        assert expected["image_grid_thw"].tolist() == [[1, 20, 28]]
        found = patches(resized(frame.expand(1, 2, -1, -1, -1), 280, 392))
        torch.testing.assert_close(found, expected["pixel_values"], rtol=0, atol=1e-5)


class TestFiles:
    def test_the_newest_checkpoint(self, copy: Made):
        shutil.copytree(copy.folder / "checkpoint-7", copy.folder / "checkpoint-12")
        (copy.folder / "checkpoint-x").mkdir()
        assert copy.reward().file == copy.folder / "checkpoint-12" / "model.pth"

    def test_by_its_file(self, copy: Made):
        file = copy.folder / "checkpoint-7" / "model.pth"
        assert copy.reward(path=str(file)).settings == copy.reward().settings

    def test_its_usual_folder(self, copy: Made, monkeypatch: pytest.MonkeyPatch):
        copy.folder.rename(copy.folder.parent / "videoalign_ckpt")
        monkeypatch.chdir(copy.folder.parent)
        assert copy.reward(path="").file == Path("videoalign_ckpt/checkpoint-7/model.pth")

    def test_published_settings_where_there_are_none(self, copy: Made):
        (copy.folder / "model_config.json").unlink()
        settings = copy.reward().settings
        assert (settings.alpha, settings.fps, settings.max_pixels, settings.rslora) == (128, 2, 200704, False)
        assert settings.mean_std == dict(zip(("vq", "mq", "ta"), zip(MEAN, STD, strict=True), strict=True))

    def test_another_scale_is_another_network(self, copy: Made):
        given = videos()
        before = table(copy.reward()(given, ["a dog"], {}))
        edit(copy, "lora_alpha", 12)
        assert not torch.allclose(before, table(copy.reward()(given, ["a dog"], {})), atol=1e-3)

    def test_a_tokenizer_elsewhere(self, copy: Made):
        elsewhere = copy.folder.parent / "words"
        elsewhere.mkdir()
        for path in copy.backbone.glob("*"):
            if path.name != "config.json":
                path.rename(elsewhere / path.name)
        assert table(copy.reward(tokenizer=str(elsewhere))(videos(), ["a dog"], {})).isfinite().all()
        with pytest.raises(InputError, match=r"rewards.look.backbone=.*tokenizer"):
            copy.reward()(videos(), ["a dog"], {})

    def test_all_that_is_missing_in_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError) as caught:
            VideoAlign("look", RewardConfig())
        for told in ("model.pth", "KwaiVGI/VideoReward", "prompt_template.py", "Qwen/Qwen2-VL-2B-Instruct"):
            assert told in str(caught.value)
        assert "\n" not in str(caught.value)


def edit(made: Made, name: str, value: object) -> None:
    path = made.folder / "model_config.json"
    config = json.loads(path.read_text())
    for section in config.values():
        if name in section:
            section[name] = value
    path.write_text(json.dumps(config))


def rewrite(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Made], None]:
    def broken(made: Made) -> None:
        state = torch.load(checkpoint(made), weights_only=True)
        change(state)
        torch.save(state, checkpoint(made))

    return broken


def checkpoint(made: Made) -> Path:
    return made.folder / "checkpoint-7" / "model.pth"


class Code:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def template(text: str) -> Callable[[Made], object]:
    return lambda made: (made.folder / "prompt_template.py").write_text(text)


def cut(made: Made) -> None:
    whole = checkpoint(made).read_bytes()
    checkpoint(made).write_bytes(whole[: len(whole) // 2])


LAYER = "base_model.model.model.layers.0.mlp.up_proj"
BROKEN: dict[str, tuple[Callable[[Made], object], str]] = {
    "no checkpoint": (lambda made: checkpoint(made).unlink(), r"path=.*has no .*model.pth.*hf download"),
    "no folder": (lambda made: shutil.rmtree(made.folder), r"path=.*no such file or folder"),
    "no template": (lambda made: (made.folder / "prompt_template.py").unlink(), r"path=.*prompt_template.py.*github"),
    "a template without a token": (template(TEMPLATE.replace("<|MQ_reward|>", "")), r"path=.*<\|MQ_reward\|> 0 times"),
    "a template without a prompt": (template(TEMPLATE.replace("{text_prompt}", "")), r"path=.*\{text_prompt\} 0 times"),
    "another template": (template("x = 1\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = 2"), r"path=.*has no string DETAILED"),
    "no Python": (template("def ("), r"path=.*is not Python"),
    "cut short": (cut, r"path=.*cut short or damaged"),
    "text": (lambda made: checkpoint(made).write_text("weights"), r"path=.*(is not a checkpoint|is refused)"),
    "code": (lambda made: torch.save({"a": Code()}, checkpoint(made)), r"path=.*is refused.*code"),
    "a list": (lambda made: torch.save([1], checkpoint(made)), r"path=.*holds a list"),
    "a missing key": (rewrite(lambda state: state.pop(f"{LAYER}.base_layer.weight")), r"path=.*missing.*up_proj"),
    "another key": (rewrite(lambda state: state.update(more=torch.zeros(1))), r"path=.*1 unexpected, such as more"),
    "half an adapter": (rewrite(lambda state: state.pop(f"{LAYER}.lora_A.default.weight")), r"path=.*unexpected.*_B"),
    "another adapter": (
        rewrite(lambda state: state.update({f"{LAYER}.lora_A.default.weight": torch.zeros(4, 5)})),
        r"path=.*do not fit",
    ),
    "no head": (rewrite(lambda state: state.pop("base_model.model.rm_head.weight")), r"path=.*missing.*rm_head"),
    "another head": (
        rewrite(lambda state: state.update({"base_model.model.rm_head.weight": torch.zeros(2, 32)})),
        r"path=.*another shape.*rm_head",
    ),
    "no words": (
        rewrite(lambda state: state.pop("base_model.model.model.embed_tokens.weight")),
        r"path=.*missing.*embed_tokens",
    ),
    "few words": (
        rewrite(lambda state: state.update({"base_model.model.model.embed_tokens.weight": torch.zeros(9, 32)})),
        r"backbone=.*more tokens than the checkpoint has embeddings \(9\)",
    ),
    "no JSON": (lambda made: (made.folder / "model_config.json").write_text("{"), r"path=.*cannot be read"),
    "no spread": (lambda made: edit(made, "MQ_std", 0), r"path=.*MQ_std is 0; allowed: a number above 0"),
    "a word for a number": (lambda made: edit(made, "lora_alpha", "much"), r"path=.*lora_alpha is 'much'"),
    "other frames": (lambda made: edit(made, "sample_type", "multi_pts"), r"path=.*sample_type is multi_pts"),
    "no backbone": (lambda made: (made.backbone / "config.json").unlink(), r"backbone=.*has no config.json"),
    "another backbone": (
        lambda made: (made.backbone / "config.json").write_text('{"model_type": "clip"}'),
        r"backbone=.*is a clip; allowed: a Qwen2-VL",
    ),
    "half a tokenizer": (
        lambda made: (made.backbone / "tokenizer.json").write_text('{"version": "1.0", "model": {'),
        r"backbone=.*tokenizer",
    ),
    "no tokenizer": (
        lambda made: [path.unlink() for path in made.backbone.glob("*") if path.name != "config.json"],
        r"backbone=.*tokenizer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_told_in_a_line(copy: Made, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    damage, told = BROKEN[case]
    damage(copy)
    with pytest.raises(InputError, match=rf"^rewards\.look\.{told}") as caught:
        copy.reward()(videos(), ["a dog"], {})
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


def test_pictures_are_no_videos(made: Made):
    with pytest.raises(InputError, match=r"rewards.look.fn: scores videos"):
        made.reward()(videos()[0], ["a dog"] * 9, {})


def test_too_thin_to_be_seen(made: Made):
    with pytest.raises(InputError, match=r"rewards.look.fn: .*1×201.*factor of 200"):
        made.reward()(videos(1, 4, 201, 1), ["a dog"], {})


def test_nothing_is_fetched_but_names_and_words(monkeypatch: pytest.MonkeyPatch, made: Made):
    asked: list[dict] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda hub, **how: asked.append(how) or str(made.backbone))
    for given in ("", "some/qwen"):  # and nothing unasked
        made.reward(backbone=given)
    assert asked == [{"allow_patterns": ["*.json", "*.txt"], "local_files_only": local} for local in (True, False)]


def test_training_with_it(made: Made, tiny_folder, tmp_path: Path):
    overrides = [
        *tiny_overrides("wan", tiny_folder("wan")),
        "rewards=none",
        "rewards.videoalign.fn=videoalign",
        f"rewards.videoalign.path={made.folder}",
        f"rewards.videoalign.backbone={made.backbone}",
        f"log.dir={tmp_path}",
        "run_name=x",
        "train.epochs=1",
    ]
    with pytest.raises(SystemExit) as stopped:
        main(["train", *overrides])
    assert stopped.value.code == 0
    row = json.loads((tmp_path / "x" / "metrics.jsonl").read_text().splitlines()[0])
    parts = [row[f"rewards/videoalign/{part}/mean"] for part in ("vq", "mq", "ta")]
    assert row["rewards/videoalign/mean"] == pytest.approx(sum(parts) / 3, abs=1e-5)
    assert row["rewards/videoalign/vq/std"] > 0
    assert all(math.isfinite(part) for part in parts)
