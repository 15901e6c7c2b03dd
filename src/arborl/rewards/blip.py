"""ImageReward (arXiv 2304.05977): BLIP reads picture and prompt together, a linear head rates what it read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.schema import RewardConfig
from ..core.errors import InputError, first_line, shortened
from ..tools.quiet import quiet_libraries
from .catalog import IMAGEREWARD
from .clip import TOY_MAX_WIDTH, affine
from .files import Weights, check_names, collect_missing, converted, read_tensors, tensors_of
from .neural import NetworkReward
from .preprocessing import centre_crop, normalised
from .tokenizers import tokenizer_folder

HEADS = (16, 12)
"""Attention heads of ViT-L/16 and of BERT-base."""
SIZES = (1024, 24, 768, 12)
"""Widths and layers of the two."""
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the head's raw output over its authors' pictures."""
LENGTH = 35
BERT = Weights(hub="google-bert/bert-base-uncased")


class ImageReward(NetworkReward):
    def __init__(self, name: str, config: RewardConfig, pipeline: str = "") -> None:
        super().__init__(name, config, pipeline)
        with collect_missing() as attempt:
            self.path = attempt(lambda: IMAGEREWARD.find(self.key("path"), config.path))
            beside = str(self.path.parent) if self.path and (self.path.parent / "vocab.txt").is_file() else ""
            words = config.tokenizer or beside
            self.tokenizer_path = attempt(lambda: tokenizer_folder(self.key("tokenizer"), words, BERT))

    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        key, path = self.key("path"), self.path

        def convert() -> dict[str, Tensor]:
            tensors = from_original(key, path, tensors_of(key, path, read_tensors(key, path)))
            blip_configs(key, path, tensors, HEADS)
            return tensors

        tensors = converted(key, path, "imagereward", convert)
        self.network = Blip(key, path, tensors, HEADS, dtype).to(device).requires_grad_(False).eval()
        with quiet_libraries():
            from transformers import BertTokenizer

            try:
                self.tokenizer = BertTokenizer.from_pretrained(self.tokenizer_path, do_lower_case=True)
            except (OSError, ValueError, TypeError, KeyError) as error:
                problem = f"cannot be read ({shortened(first_line(error), 200)})"
                raise InputError(self.key("tokenizer"), self.tokenizer_path, problem, BERT.hub) from None
        words = self.network.text.config.vocab_size
        if len(self.tokenizer) > words:
            problem = f"has {len(self.tokenizer)} tokens, and the network knows {words}"
            raise InputError(self.key("tokenizer"), self.tokenizer_path, problem, BERT.hub)

    def score(self, images: Float[Tensor, "n 3 height width"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        pixels = normalised(centre_crop(images, self.network.size, rounded=True))
        words = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        return self.network(pixels, words["input_ids"].to(pixels.device), words["attention_mask"].to(pixels.device))


class Blip(nn.Module):
    """Picture tokens, read by a BERT with cross-attention; the first text token's state is rated."""

    def __init__(
        self, key: str, path: Path, tensors: Mapping[str, Tensor], heads: tuple[int, int], dtype: torch.dtype
    ) -> None:
        super().__init__()
        from transformers import BlipTextModel, BlipVisionModel

        vision, text = blip_configs(key, path, tensors, heads)
        self.size: int = vision.image_size
        with quiet_libraries():
            own = _part(tensors, "vision.")
            self.vision: Any = BlipVisionModel.from_pretrained(None, config=vision, state_dict=own, dtype=dtype)
            own = _part(tensors, "text.")
            self.text: Any = BlipTextModel.from_pretrained(
                None, config=text, state_dict=own, dtype=dtype, add_pooling_layer=False
            )
        self.head = nn.Linear(tensors["head.weight"].shape[1], 1)
        self.head.load_state_dict({name: tensors[f"head.{name}"].float() for name in ("weight", "bias")})

    def forward(
        self, pixels: Float[Tensor, "n 3 size size"], ids: Int[Tensor, "n words"], mask: Int[Tensor, "n words"]
    ) -> Float[Tensor, " n"]:
        seen = self.vision(pixels.to(self.vision.dtype)).last_hidden_state
        read = self.text(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
            is_decoder=False,
        )
        return (self.head(read.last_hidden_state[:, 0].float())[:, 0] - MEAN) / STD


def blip_configs(key: str, path: Path, tensors: Mapping[str, Tensor], heads: tuple[int, int]) -> tuple[Any, Any]:
    """Both parts' sizes, read off the weights: nothing missing, nothing left over, and no other BLIP."""
    from transformers import BlipTextModel, BlipVisionModel
    from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig

    vision, text = _part(tensors, "vision."), _part(tensors, "text.")
    try:
        patches = vision["embeddings.patch_embedding.weight"]
        words, length = (text[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
        places, side = vision["embeddings.position_embedding"].shape[1], patches.shape[-1]
        vision_config = BlipVisionConfig(
            hidden_size=len(patches),
            intermediate_size=len(vision["encoder.layers.0.mlp.fc1.weight"]),
            num_hidden_layers=_count(vision, "encoder.layers."),
            num_attention_heads=heads[0],
            patch_size=side,
            image_size=round((places - 1) ** 0.5) * side,
            layer_norm_eps=1e-6,
            hidden_act="gelu",
        )
        text_config = BlipTextConfig(
            vocab_size=len(words),
            max_position_embeddings=len(length),
            hidden_size=words.shape[1],
            encoder_hidden_size=len(patches),
            intermediate_size=len(text["encoder.layer.0.intermediate.dense.weight"]),
            num_hidden_layers=_count(text, "encoder.layer."),
            num_attention_heads=heads[1],
            layer_norm_eps=1e-12,
            hidden_act="gelu",
            is_decoder=True,  # gives it cross-attention; it is called to read both ways all the same
        )
    except KeyError as error:
        raise InputError(key, path, f"does not hold ImageReward (no {error.args[0]})", IMAGEREWARD.file) from None
    except (IndexError, TypeError):
        raise InputError(
            key, path, "does not hold ImageReward (a tensor is of another shape)", IMAGEREWARD.file
        ) from None
    sizes = (len(patches), vision_config.num_hidden_layers, words.shape[1], text_config.num_hidden_layers)
    if max(sizes) > TOY_MAX_WIDTH and sizes != SIZES:
        problem = f"holds another BLIP ({sizes[0]} wide, {sizes[1]} layers) than ImageReward's"
        raise InputError(key, path, problem, IMAGEREWARD.file)
    with quiet_libraries(), torch.device("meta"):
        wanted = (
            BlipVisionModel(vision_config).state_dict(),
            BlipTextModel(text_config, add_pooling_layer=False).state_dict(),
        )
    for own, names in zip((vision, text), wanted, strict=True):
        check_names(key, path, own, names, "ImageReward")
    return vision_config, text_config


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _count(tensors: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)})


def from_original(key: str, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published weights under transformers' names (`vision.`, `text.`), the head as one affine map."""
    inside = {
        "cls_token": "embeddings.class_embedding",
        "pos_embed": "embeddings.position_embedding",
        "patch_embed.proj": "embeddings.patch_embedding",
        "norm": "post_layernorm",
    }
    block = {"attn.qkv": "self_attn.qkv", "attn.proj": "self_attn.projection", "norm1": "layer_norm1"}
    block |= {"norm2": "layer_norm2"}
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("blip.visual_encoder."):
            rest = name.removeprefix("blip.visual_encoder.")
            rest = next((new + rest.removeprefix(old) for old, new in inside.items() if _is(rest, old)), rest)
            rest = rest.replace("blocks.", "encoder.layers.", 1) if rest.startswith("blocks.") else rest
            for old, new in block.items():
                rest = rest.replace(f".{old}.", f".{new}.")
            made[f"vision.{rest}"] = tensor
        elif name.startswith("blip.text_encoder.") and not name.endswith("position_ids"):
            made[f"text.{name.removeprefix('blip.text_encoder.')}"] = tensor
        elif not name.startswith(("mlp.layers.", "blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.")):
            made[name] = tensor  # what does not belong here is named in the error
    made["head.weight"], made["head.bias"] = affine(key, path, tensors, "mlp.layers.")
    strangers = sorted(name for name in made if not name.startswith(("vision.", "text.", "head.")))
    if strangers:
        problem = f"does not hold ImageReward: {len(strangers)} tensors unexpected, such as {strangers[0]}"
        raise InputError(key, path, problem, IMAGEREWARD.file)
    return made


def _is(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")
