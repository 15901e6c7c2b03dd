"""VideoAlign (VideoReward): Qwen2-VL watches a video and says how it looks, how it moves, how well it fits its prompt.

Liu et al. 2025, arXiv:2501.13918. The network reads two frames a second and a text with three tokens of its own; a
linear head on the last layer's states at these tokens gives visual quality (`vq`), motion quality (`mq`) and text
alignment (`ta`), each in units of its spread on the authors' data.
"""

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ..config.schema import RewardConfig
from ..core.errors import InputError, first_line
from .catalog import VIDEOALIGN
from .files import Weights, check_names, collect_missing, converted, from_hub, read_tensors, tensors_of
from .neural import NetworkReward
from .preprocessing import normalised

FOLDER = Path("videoalign_ckpt")
SETTINGS = replace(VIDEOALIGN, file="model_config.json", place="", size="2 kB")
TEMPLATE = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"

PARTS = ("vq", "mq", "ta")
REWARD_TOKENS = tuple(f"<|{part.upper()}_reward|>" for part in PARTS)
VIDEO = "<|video_pad|>"
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\n<|vision_start|>{VIDEO}<|vision_end|>{{text}}<|im_end|>\n<|im_start|>assistant\n"
)
"""One turn of Qwen2-VL's chat. Written out: a folder whose chat template was changed must not change the scores."""
MARKERS = re.compile("(" + "|".join(map(re.escape, (*re.findall(r"<\|\w+\|>", CHAT), *REWARD_TOKENS))) + ")")

MEAN_STD = {"vq": (3.6757, 2.2476), "mq": (1.1646, 1.3811), "ta": (2.8105, 2.5121)}
MIN_FRAMES, MAX_FRAMES = 4, 768  # frames
PATCH, MERGED, PAIR = 14, 2, 2  # pixels of a patch's side, patches of a token's side, frames of a patch
SIDE = PATCH * MERGED
MIN_PIXELS, MAX_PIXELS = 128 * SIDE**2, 256 * SIDE**2  # pixels of a frame
MAX_ASPECT = 200

VIDEOS_PER_CALL = 4
"""Videos given to the network at a time, whatever batch_size says of pictures: five seconds are some 1,300 tokens of
video and 900 of text each, which fills a GPU, and frames in float32 are large."""

T = TypeVar("T")


@dataclass(frozen=True)
class Backbone(Weights):
    """The configuration and the tokenizer of a transformers folder; its weights stay where they are."""

    @property
    def advice(self) -> str:
        return f"a folder of your own, or `hf download {self.hub} --include '*.json' '*.txt'` (12 MB, no weights)"

    def _from_hub(self, key: str, given: str) -> Path:
        folder = from_hub(given or self.hub, ["*.json", "*.txt"], fetch=bool(given))
        if isinstance(folder, Path) and (folder / "config.json").is_file():
            return folder
        raise self.missing(key, given, "" if isinstance(folder, Path) else folder)


BACKBONE = Backbone(hub="Qwen/Qwen2-VL-2B-Instruct", licence="Apache-2.0")


@dataclass(frozen=True)
class Settings:
    """The settings in model_config.json; where it is silent, those of the published one."""

    fps: float = 2.0
    max_pixels: int = MAX_PIXELS
    alpha: float = 128.0
    rslora: bool = False
    mean_std: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MEAN_STD)


class VideoAlign(NetworkReward):
    """Scores of videos, as named parts `vq`, `mq` and `ta`.

    Two files lie in its folder beside the checkpoint: `model_config.json`, and the authors' `prompt_template.py`, which
    holds the question the network was trained with. It is read, never run.

    Frames are taken evenly from the first to the last, two for each second of the video (`fps`), at least four if there
    are so many, and always an even number; a video of one frame is seen as two alike.
    """

    of_videos = True

    def __init__(self, name: str, config: RewardConfig, pipeline: str = "") -> None:
        super().__init__(name, replace(config, batch_size=min(config.batch_size, VIDEOS_PER_CALL)), pipeline)
        path = self.key("path")
        with collect_missing() as attempt:
            self.file = attempt(lambda: _checkpoint(path, config.path))
            self.settings = attempt(lambda: _settings(path, config.path, self.file))
            self.question = attempt(lambda: _question(path, _template(path, config.path, self.file)))
            self.backbone = attempt(lambda: BACKBONE.find(self.key("backbone"), config.backbone))
            self.words = Path(config.tokenizer).expanduser() if config.tokenizer else self.backbone
            if config.tokenizer and not self.words.is_dir():
                self.words = attempt(lambda: BACKBONE.find(self.key("tokenizer"), config.tokenizer))

    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        settings, key = self.settings, self.key("path")
        kept_as = f"videoalign-{'rs' if settings.rslora else 'a'}{settings.alpha:g}"
        config = self._architecture()

        def convert() -> dict[str, Tensor]:
            tensors = _merged(key, self.file, settings)
            self._empty(config, tensors)
            return tensors

        tensors = converted(key, self.file, kept_as, convert)
        self.network = self._empty(config, tensors)
        self._read_words(config.text_config.vocab_size)
        self.network.config.video_token_id = self.ids[VIDEO]
        self.head = tensors.pop("rm_head.weight").to(device, torch.float32)
        self.network.load_state_dict({n: t.to(device, dtype) for n, t in tensors.items()}, assign=True)
        # Rotary frequencies are in no file. The authors cast the whole network to bfloat16, these with it, to train it
        # and to use it: exact ones would turn a token 1,000 places away by up to 1.2 rad more.
        visual, text = self.network.visual, self.network.language_model
        visual.rotary_pos_emb = type(visual.rotary_pos_emb)(config.vision_config).to(device, torch.bfloat16)
        text.rotary_emb = type(text.rotary_emb)(config.text_config).to(device, torch.bfloat16)
        self.network.requires_grad_(False).eval()

    def _empty(self, config: Any, tensors: Mapping[str, Tensor]) -> Any:
        """The network without weights, if these tensors are its weights and the head's."""
        from transformers import Qwen2VLModel

        words, head = (tensors.get(name) for name in ("language_model.embed_tokens.weight", "rm_head.weight"))
        if words is not None and words.ndim:
            config.text_config.vocab_size = words.shape[0]  # the authors' tokens were added to it
        with torch.device("meta"):
            network = Qwen2VLModel(config)
            outputs = 3 if head is not None and head.ndim and len(head) == 3 else 1
            wanted = {"rm_head.weight": torch.empty(outputs, config.text_config.hidden_size)} | network.state_dict()
        what = f"VideoReward over the network of {self.backbone}"
        check_names(self.key("path"), self.file, tensors, wanted, what)
        return network

    def _architecture(self) -> Any:
        from transformers import Qwen2VLConfig

        key = self.key("backbone")
        found = _json(key, self.backbone / "config.json")
        if (kind := found.get("model_type")) != "qwen2_vl":
            raise InputError(key, self.backbone, f"is a {kind}", f"a Qwen2-VL, such as {BACKBONE.hub}")
        return Qwen2VLConfig.from_dict(found)

    def _read_words(self, rows: int) -> None:
        """The tokenizer, and all of the text that does not depend on the prompt as tokens."""
        from transformers import AutoTokenizer

        key = self.key("tokenizer" if self.config.tokenizer else "backbone")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.words, local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"has no tokenizer that could be read ({(str(error).splitlines() or ['?'])[0][:160]})"
            raise InputError(key, self.words, problem, cure=BACKBONE.advice) from None
        self.tokenizer.add_tokens(list(REWARD_TOKENS), special_tokens=True)

        parts = MARKERS.split(CHAT.replace("{text}", self.question))  # every other one is a marker
        known = self.tokenizer.get_vocab()
        unknown = [marker for marker in parts[1::2] if not 0 <= known.get(marker, -1) < rows]
        if unknown:
            problem = f"its tokenizer has no {unknown[0]}, or more tokens than the checkpoint has embeddings ({rows})"
            raise InputError(key, self.words, problem, f"the tokenizer of {BACKBONE.hub}")
        self.ids = {marker: known[marker] for marker in parts[1::2]}
        at = next(i for i, part in enumerate(parts) if "{text_prompt}" in part)
        self.before, self.around, self.after = self._tokens(parts[:at]), parts[at], self._tokens(parts[at + 1 :])

    def _tokens(self, parts: Sequence[str]) -> list[int]:
        return [token for part in parts for token in ([self.ids[part]] if part in self.ids else self._plain(part))]

    def _plain(self, text: str) -> list[int]:
        """Tokens of words. A marker that someone wrote into a prompt is words as well."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []

    def tokens(self, prompt: str, pads: int) -> list[int]:
        """The whole text about a prompt, as the tokenizer would have it, with a place for each token of the video."""
        start = self.before.index(self.ids[VIDEO])
        before = [*self.before[:start], *[self.ids[VIDEO]] * pads, *self.before[start + 1 :]]
        return [*before, *self._plain(self.around.replace("{text_prompt}", prompt)), *self.after]

    def score(
        self, images: Float[Tensor, "n frames 3 height width"], prompts: Sequence[str]
    ) -> dict[str, Float[Tensor, " n"]]:
        height, width = images.shape[-2:]
        if max(height, width) > MAX_ASPECT * min(height, width):
            problem = f"was given videos of {width}×{height}, which are too long and thin to be scored"
            raise InputError(self.key("fn"), None, problem, f"sides that differ by a factor of {MAX_ASPECT} at most")
        indices = chosen(images.shape[1], self.config.fps, self.settings.fps)
        rows, columns = size(height, width, self.settings.max_pixels)
        pixels = patches(resized(images[:, indices.to(images.device)], rows, columns))
        grid = [len(indices) // PAIR, rows // PATCH, columns // PATCH]

        texts = [torch.tensor(self.tokens(prompt, math.prod(grid) // MERGED**2)) for prompt in prompts]
        # Padded on the right, where nothing that is scored looks: attention is causal and needs no other mask.
        tokens = pad_sequence(texts, batch_first=True, padding_value=self.after[-1]).to(images.device)
        # Every token is one place after the last, those of the video too: the authors never gave their network the
        # three-dimensional positions that Qwen2-VL has for it, neither to train it nor to use it.
        places = torch.arange(tokens.shape[1], device=images.device).expand(3, len(tokens), -1)
        states = self.network(
            input_ids=tokens,
            position_ids=places,
            pixel_values_videos=pixels,
            video_grid_thw=torch.tensor([grid] * len(tokens), device=images.device),
            use_cache=False,
        ).last_hidden_state
        scores = {}
        for i, (part, token) in enumerate(zip(PARTS, REWARD_TOKENS, strict=True)):
            raw = states[tokens == self.ids[token]].float() @ self.head[i % len(self.head)]
            mean, std = self.settings.mean_std[part]
            scores[part] = (raw - mean) / std
        return scores


def chosen(frames: int, fps: float, wanted: float = 2.0) -> Tensor:
    """Which frames of a video are looked at."""
    count = min(max(frames / fps * wanted, MIN_FRAMES), min(MAX_FRAMES, frames) // PAIR * PAIR)
    return torch.linspace(0, frames - 1, max(round(count / PAIR) * PAIR, PAIR)).round().long()


def size(height: int, width: int, largest: int = MAX_PIXELS) -> tuple[int, int]:
    """Sides that are whole tokens, about as long as they were, with neither too many nor too few pixels."""
    rows, columns = (max(SIDE, round(side / SIDE) * SIDE) for side in (height, width))
    if rows * columns > largest:
        shrink = math.sqrt(height * width / largest)
        rows, columns = (max(SIDE, math.floor(side / shrink / SIDE) * SIDE) for side in (height, width))
    elif rows * columns < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = (math.ceil(side * grow / SIDE) * SIDE for side in (height, width))
    return rows, columns


def resized(
    videos: Float[Tensor, "n frames 3 height width"], rows: int, columns: int
) -> Float[Tensor, "n frames 3 rows columns"]:
    """Bytes in, bytes out, as torchvision has it: bicubic with antialiasing on floats between them; then normalised."""
    frames = (videos.flatten(0, 1) * 255).round()
    frames = functional.interpolate(frames, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
    return normalised(frames.clamp(0, 255).round() / 255).unflatten(0, videos.shape[:2])


def patches(videos: Float[Tensor, "n frames 3 rows columns"]) -> Float[Tensor, "patches values"]:
    """Two frames' patches, the four that become a token one after the other; one row each."""
    n, frames, channels, rows, columns = videos.shape
    grid = (frames // PAIR, PAIR, channels, rows // SIDE, MERGED, PATCH, columns // SIDE, MERGED, PATCH)
    parted = videos.reshape(n, *grid).permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return parted.reshape(-1, channels * PAIR * PATCH**2)


def _checkpoint(key: str, given: str) -> Path:
    """The newest checkpoint of the folder, or what else the key means."""
    folder = Path(given).expanduser() if given else FOLDER
    steps = {path: path.parent.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*/model.pth")}
    numbered = {path: int(step) for path, step in steps.items() if step.isdecimal()}
    return max(numbered, key=lambda path: numbered[path]) if numbered else VIDEOALIGN.find(key, given)


def _near(file: Path | None, name: str) -> Path | None:
    """A file that belongs to a checkpoint: beside it, or beside the folder it is in."""
    folders = (file.parent, file.parent.parent) if file else ()
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _settings(key: str, given: str, file: Path | None) -> Settings:
    path = _near(file, SETTINGS.file)
    if path is None and file is not None and not (given and Path(given).expanduser().exists()):
        with suppress(InputError):  # came from the hub, perhaps
            path = SETTINGS.find(key, given)
    found = _json(key, path) if path else {}
    data, model, lora, scale = (
        section if isinstance(section := found.get(name), dict) else {}
        for name in ("data_config", "model_config", "peft_lora_config", "inference_config")
    )
    for section, name, known in (
        (data, "sample_type", "uniform"),
        (data, "num_frames", None),
        (data, "prompt_template_type", "detailed_special"),
        (model, "use_special_tokens", True),
    ):
        if section.get(name, known) != known:
            raise InputError(key, path, f"{name} is {section[name]}, which is not supported", f"{name}={known}")

    def number(section: Mapping[str, Any], name: str, otherwise: float | int, positive: bool = True) -> float:
        value = section.get(name, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(key, path, f"{name} is {value!r}", "a number")
        if positive and value <= 0:
            raise InputError(key, path, f"{name} is {value}", "a number above 0")
        return float(value)

    return Settings(
        fps=number(data, "fps", Settings.fps),
        max_pixels=int(number(data, "max_frame_pixels", Settings.max_pixels)),
        alpha=number(lora, "lora_alpha", Settings.alpha),
        rslora=bool(lora.get("use_rslora", False)),
        mean_std={
            part: (number(scale, f"{part.upper()}_mean", mean, False), number(scale, f"{part.upper()}_std", std))
            for part, (mean, std) in MEAN_STD.items()
        },
    )


def _json(key: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(key, path, f"cannot be read ({first_line(error)})", "a JSON file") from None
    if not isinstance(found, dict):
        raise InputError(key, path, f"holds a {type(found).__name__}", "a JSON object")
    return found


def _template(key: str, given: str, file: Path | None) -> Path:
    """The authors' prompt_template.py: with the checkpoint, or in the usual folder."""
    name, folder = "prompt_template.py", Path(given or FOLDER).expanduser()
    folder = folder if folder.is_dir() else folder.parent if folder.is_file() else FOLDER
    path = _near(file, name) or folder / name
    if not path.is_file():
        problem = f"{name}, which holds the question the network was trained with, is not here"
        raise InputError(key, given or None, problem, cure=f"that of github.com/KwaiVGI/VideoAlign, put into {folder}")
    return path


def _question(key: str, path: Path) -> str:
    """The question in the authors' file, which is parsed and not run."""
    allowed = "the file of github.com/KwaiVGI/VideoAlign"
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise InputError(key, path, f"is not Python ({error})", allowed) from None
    constants = {
        target.id: line.value.value
        for line in body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
    text = constants.get(TEMPLATE)
    if not isinstance(text, str):
        raise InputError(key, path, f"has no string {TEMPLATE}", allowed)
    for needed in ("{text_prompt}", *REWARD_TOKENS):
        if text.count(needed) != 1:
            problem = f"{TEMPLATE} has {needed} {text.count(needed)} times instead of once"
            raise InputError(key, path, problem, allowed)
    return text


def _merged(key: str, path: Path, settings: Settings) -> dict[str, Tensor]:
    """The checkpoint of the network under LoRA as one of the network alone, under the names of today's transformers.

    W becomes W + s·BA, with s = α/r or, of rank-stabilised LoRA, α/√r (Hu et al. 2021; Kalajdzievski 2023).
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in tensors_of(key, path, read_tensors(key, path)).items():
        name = name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
        if ".original_module." not in name and not name.startswith("lm_head."):
            tensors[name] = tensor
    for name in [name for name in tensors if ".base_layer." in name]:
        weight = tensors.pop(name)
        layer, kind = name.split(".base_layer.")
        for a, b in ((f"{layer}.lora_{half}.default.weight" for half in "AB"),
                     (f"{layer}.lora_embedding_{half}.default" for half in "AB")):  # fmt: skip
            if kind != "weight" or a not in tensors or b not in tensors:
                continue
            A, B = tensors.pop(a).float(), tensors.pop(b).float()
            flipped = "lora_embedding" in a  # an embedding's weight is the transpose of a linear layer's
            rows, columns = weight.shape[::-1] if flipped else weight.shape
            if A.shape != (rank := len(A), columns) or B.shape != (rows, rank):
                problem = f"{a} and its other half do not fit: {list(B.shape)} times {list(A.shape)}"
                raise InputError(key, path, problem, "the checkpoint as its authors publish it")
            change = settings.alpha / (math.sqrt(rank) if settings.rslora else rank) * (B @ A)
            weight = (weight.float() + (change.T if flipped else change)).to(weight.dtype)
        tensors[f"{layer}.{kind}"] = weight
    return {_today(name): tensor for name, tensor in tensors.items()}


def _today(name: str) -> str:
    """Until transformers 4.50 `model` was the language model, and the vision tower stood beside it."""
    name = name.removeprefix("model.") if name.startswith(("model.visual.", "model.language_model.")) else name
    return f"language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
