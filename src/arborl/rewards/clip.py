"""Rewards on CLIP: HPS-v2.1, PickScore, CLIPScore and the aesthetic predictor."""

import pickle
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from ..config.schema import RewardConfig
from ..core.errors import InputError, first_line, shortened
from ..tools.quiet import quiet_libraries
from .catalog import AESTHETIC, CLIP_L14, HPS, PICKSCORE
from .files import DAMAGED, check_names, collect_missing, converted, read_tensors, tensors_of
from .neural import NetworkReward
from .preprocessing import centre_crop, letterbox, normalised
from .tokenizers import END, START, ClipTokens

HEADS = (16, 16)
"""Attention heads of ViT-H-14's picture and text parts: what the shapes of its weights do not tell."""

VIT_H, TOY_MAX_WIDTH = (1280, 32, 1024, 24), 256
"""Its widths and layers, pictures first; and how wide toys are, which may have any size (no published CLIP is one)."""

_networks: WeakValueDictionary[tuple[str, torch.device, torch.dtype], Any] = WeakValueDictionary()
"""CLIPs in use, so that two rewards on one share it."""


class ClipReward(NetworkReward):
    """A CLIP's picture and text parts, and how pictures and text are made ready for it."""

    reads = True  # prompts, and not pictures alone
    clean = False  # the text, as open_clip does
    half = torch.float16  # as CLIP's and HPS's authors compute; bfloat16 is as fast and eight times as rough

    def __init__(self, name: str, config: RewardConfig, pipeline: str = "") -> None:
        super().__init__(name, config, pipeline)
        with collect_missing() as attempt:
            self.path = attempt(self.find)
            beside = self.path if self.path is not None and self.path.is_dir() else None
            if self.reads:
                self.tokens = attempt(lambda: ClipTokens(self.key("tokenizer"), config.tokenizer, beside, pipeline))

    @abstractmethod
    def find(self) -> Path:
        """The file or folder of the weights."""

    def read(self, dtype: torch.dtype) -> Any:
        """The CLIP, on the host."""
        return clip_of_folder(self.key("path"), self.path, dtype)

    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        key = str(self.path.resolve()), device, dtype
        if key not in _networks:
            self.network = _networks[key] = self.read(dtype).to(device).requires_grad_(False).eval()
        self.network: Any = _networks[key]
        self.size = self.network.config.vision_config.image_size

    def preprocess(self, images: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 size size"]:
        return normalised(centre_crop(images, self.size))

    def embed_images(self, images: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n embedding"]:
        """Unit vectors, in float32."""
        pixels = self.preprocess(images).to(self.network.dtype)
        return functional.normalize(self.network.get_image_features(pixels).pooler_output.float(), dim=-1)

    def embed_texts(self, prompts: Sequence[str]) -> Float[Tensor, "n embedding"]:
        """Unit vectors, in float32; a prompt that comes again is not computed again."""
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        ids = self.tokens(list(places), self.clean).to(self.network.device)
        features = functional.normalize(self.network.get_text_features(ids).pooler_output.float(), dim=-1)
        return features[[places[prompt] for prompt in prompts]]

    def score(self, images: Float[Tensor, "n 3 height width"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        return (self.embed_images(images) * self.embed_texts(prompts)).sum(-1)


class Hps(ClipReward):
    """HPS-v2.1 (arXiv 2306.09341): the cosine of picture and prompt in a ViT-H-14 taught human preferences.

    Reads the file its authors publish, in open_clip's layout; pictures are letterboxed, not cropped.
    """

    clean = True

    def find(self) -> Path:
        path = HPS.find(self.key("path"), self.config.path)
        # Both versions are the same network, so nothing inside tells them apart; the name does.
        if re.fullmatch(r"HPS_v2(\.0)?(_compressed)?\.(pt|safetensors)", path.name):
            problem = "by its name holds HPS v2.0 (the network is the same: only the name tells)"
            raise InputError(self.key("path"), path, problem, HPS.file, cure="another name, if you mean it")
        return path

    def read(self, dtype: torch.dtype) -> Any:
        from transformers import CLIPModel

        key, path = self.key("path"), self.path

        def convert() -> dict[str, Tensor]:
            tensors = from_open_clip(open_clip_tensors(key, path))
            clip_config(key, path, tensors, HEADS)
            return tensors

        tensors = converted(key, path, "hps", convert)
        with quiet_libraries():
            config = clip_config(key, path, tensors, HEADS)
            return CLIPModel.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)

    def preprocess(self, images: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 size size"]:
        return normalised(letterbox(images, self.size))


class PickScore(ClipReward):
    """PickScore v1 (arXiv 2305.01569): the same network taught on Pick-a-Pic; cosine times its own logit scale."""

    def find(self) -> Path:
        return PICKSCORE.find(self.key("path"), self.config.path)

    def score(self, images: Float[Tensor, "n 3 height width"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        return self.network.logit_scale.float().exp() * super().score(images, prompts)


class ClipScore(ClipReward):
    """The cosine of picture and prompt in OpenAI's ViT-L/14."""

    def find(self) -> Path:
        return CLIP_L14.find(self.key("path"), self.config.path)


class Aesthetic(ClipReward):
    """The LAION aesthetic predictor, v2: a rating read off the picture's unit vector in OpenAI's ViT-L/14.

    Its head is five linear layers with nothing in between, so one affine map does the same.
    """

    reads = False

    def find(self) -> Path:
        with collect_missing() as attempt:
            self.head_path = attempt(lambda: AESTHETIC.find(self.key("path"), self.config.path))
            return attempt(lambda: CLIP_L14.find(self.key("backbone"), self.config.backbone))

    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        super().load(device, dtype)
        key, path = self.key("path"), self.head_path
        weight, bias = affine(key, path, tensors_of(key, path, read_tensors(key, path)), "layers.")
        if weight.shape[1] != self.network.config.projection_dim:
            problem = f"reads {weight.shape[1]} numbers, and its network gives {self.network.config.projection_dim}"
            raise InputError(key, path, problem, f"{AESTHETIC.file} on {CLIP_L14.hub}")
        self.weight, self.bias = (t.float().to(device) for t in (weight, bias))

    def score(self, images: Float[Tensor, "n 3 height width"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        return functional.linear(self.embed_images(images), self.weight, self.bias)[:, 0]


def affine(
    key: str, path: Path, tensors: Mapping[str, Tensor], prefix: str
) -> tuple[Float[Tensor, "1 width"], Float[Tensor, " 1"]]:
    """Linear layers one after another (numbered 0, 2, 4, 6, 7: dropout in the gaps) as one, in float64."""
    wanted = {f"{prefix}{i}.{part}" for i in (0, 2, 4, 6, 7) for part in ("weight", "bias")}
    if {name for name in tensors if name.startswith(prefix)} != wanted:
        raise InputError(
            key, path, f"does not hold a head of five layers ({prefix}0 to {prefix}7)", "the original file"
        )
    if not all(tensors[name].is_floating_point() for name in wanted):
        raise InputError(key, path, "holds a head of whole numbers", "the original file")
    layers = [(tensors[f"{prefix}{i}.weight"].double(), tensors[f"{prefix}{i}.bias"].double()) for i in (0, 2, 4, 6, 7)]
    weight, bias = layers[0]
    try:
        for w, b in layers[1:]:
            weight, bias = w @ weight, w @ bias + b
    except RuntimeError:
        raise InputError(key, path, "its layers do not fit one another", "the original file") from None
    if weight.ndim != 2 or len(weight) != 1 or bias.shape != (1,):
        raise InputError(key, path, f"ends in numbers of shape {tuple(bias.shape)}", "a head that ends in one number")
    return weight, bias


def clip_of_folder(key: str, path: Path, dtype: torch.dtype) -> Any:
    """A CLIP in transformers' own format; every weight must be there, and no other."""
    with quiet_libraries():
        from transformers import AutoConfig, CLIPModel

        try:
            kind = AutoConfig.from_pretrained(path).model_type
            if kind != "clip":
                raise InputError(key, path, f"holds a model of the kind {kind}", "a CLIP")
            loaded: Any = CLIPModel.from_pretrained(path, dtype=dtype, output_loading_info=True)
        except InputError:
            raise
        except (OSError, ValueError, SafetensorError, pickle.UnpicklingError, StrictDataclassError, *DAMAGED) as error:
            raise InputError(key, path, f"cannot be read ({shortened(first_line(error), 200)})") from None
    network, info = loaded
    wrong = [str(name) for kind in ("missing_keys", "mismatched_keys") for name in info.get(kind) or ()]
    if wrong:
        raise InputError(key, path, f"does not hold the whole CLIP: {len(wrong)} weights, such as {min(wrong)}")
    return network


def open_clip_tensors(key: str, path: Path) -> dict[str, Tensor]:
    """The weights in HPS's file, under open_clip's names."""
    found = read_tensors(key, path)
    if isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    elif path.suffix != ".safetensors":
        # Plain open_clip weights lie bare in their file; HPS was trained from them and has the same names and shapes.
        raise InputError(key, path, "has no state_dict, as HPS's file has", f"{HPS.file} (not a plain open_clip file)")
    return tensors_of(key, path, found)


def from_open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's weights under transformers' names: fused projections split, two matrices turned."""
    names = {
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "ln_final": "text_model.final_layer_norm",
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "visual.ln_pre": "vision_model.pre_layrnorm",
        "visual.ln_post": "vision_model.post_layernorm",
        "visual.transformer.resblocks": "vision_model.encoder.layers",
        "transformer.resblocks": "text_model.encoder.layers",
    }
    inner = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    turned = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in turned and tensor.ndim == 2:
            found[turned[name]] = tensor.T.contiguous()
            continue
        start = next((old for old in names if name == old or name.startswith(old + ".")), name)
        new = names.get(start, start) + name.removeprefix(start)
        for old, replacement in inner.items():
            new = new.replace(f".{old}.", f".{replacement}.")
        new = new.replace(".attn.out_proj.", ".self_attn.out_proj.")
        if (fused := re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", new)) and tensor.ndim and len(tensor) % 3 == 0:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{fused[1]}.self_attn.{letter}_proj.{fused[2]}"] = part.contiguous()
        else:
            found[new] = tensor
    return found


def clip_config(key: str, path: Path, tensors: Mapping[str, Tensor], heads: tuple[int, int]) -> Any:
    """A CLIP with erf GELU, its sizes read off its weights: nothing missing, nothing left over, and no other CLIP."""
    from transformers import CLIPConfig, CLIPModel

    def tower(part: str, heads: int) -> dict[str, Any]:
        first = tensors[f"{part}.encoder.layers.0.mlp.fc1.weight"]
        layers = {name.split(".")[3] for name in tensors if name.startswith(f"{part}.encoder.layers.")}
        sizes = {"hidden_size": first.shape[1], "intermediate_size": first.shape[0], "num_hidden_layers": len(layers)}
        return sizes | {"num_attention_heads": heads, "hidden_act": "gelu", "layer_norm_eps": 1e-5}

    try:
        patch = tensors["vision_model.embeddings.patch_embedding.weight"].shape[-1]
        places = len(tensors["vision_model.embeddings.position_embedding.weight"])
        words = tensors["text_model.embeddings.token_embedding.weight"]
        vision = tower("vision_model", heads[0]) | {"patch_size": patch}
        vision["image_size"] = round((places - 1) ** 0.5) * patch
        text = tower("text_model", heads[1]) | {"vocab_size": len(words), "bos_token_id": START, "eos_token_id": END}
        text["max_position_embeddings"] = len(tensors["text_model.embeddings.position_embedding.weight"])
        width = len(tensors["visual_projection.weight"])
    except KeyError as error:
        raise InputError(key, path, f"does not hold a CLIP of open_clip (no {error.args[0]})", HPS.file) from None
    except (IndexError, TypeError):
        raise InputError(
            key, path, "does not hold a CLIP of open_clip (a tensor is of another shape)", HPS.file
        ) from None
    sizes = (vision["hidden_size"], vision["num_hidden_layers"], text["hidden_size"], text["num_hidden_layers"])
    if max(sizes) > TOY_MAX_WIDTH and sizes != VIT_H:
        problem = f"holds another CLIP ({sizes[0]} wide, {sizes[1]} layers) than HPS's ViT-H-14"
        raise InputError(key, path, problem, HPS.file)
    with quiet_libraries():
        config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=width)
        with torch.device("meta"):
            wanted = CLIPModel(config).state_dict()
        check_names(key, path, tensors, wanted, "a ViT-H-14 of open_clip")
    return config
