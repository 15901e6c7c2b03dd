"""StableDiffusion3Pipeline: SD3, SD3.5 and anything saved in that layout."""

from typing import Any

import torch
from torch import Tensor

from ..config.schema import Config
from .pipeline import JOINT_ATTENTION, PipelineModel, latent_size, vae_factor
from .source import Source


class SD3Model(PipelineModel):
    pipeline = "StableDiffusion3Pipeline"
    t5 = "text_encoder_3"
    optional_components = ("text_encoder_3", "tokenizer_3")
    vae_fp16_safe = True
    auto_compile = True
    lora_targets = JOINT_ATTENTION

    @classmethod
    def latent_shape_for(cls, source: Source, config: Config) -> tuple[int, ...]:
        shape, factor = source.config("transformer"), vae_factor(source)
        patch = shape.whole("patch_size")
        largest = shape.whole("pos_embed_max_size") * patch * factor
        return (shape.whole("in_channels"), *latent_size(config, factor, patch, largest))

    @classmethod
    def tokens(cls, config: Config) -> int:
        source = cls.open(config)
        *_, height, width = cls.latent_shape_for(source, config)
        patch = source.config("transformer").whole("patch_size")
        return (height // patch) * (width // patch)

    @classmethod
    def encode_texts(cls, pipe: Any, texts: list[str], config: Config, device: torch.device) -> dict[str, Tensor]:
        text, _, pooled, _ = pipe.encode_prompt(
            texts,
            prompt_2=None,
            prompt_3=None,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=config.model.max_sequence_length,
        )
        return {"text": text, "pooled": pooled}

    def velocity(self, x: Tensor, t: Tensor, *cond: Tensor) -> Tensor:
        text, pooled = cond
        return self.module(
            hidden_states=x, timestep=t, encoder_hidden_states=text, pooled_projections=pooled, return_dict=False
        )[0]
