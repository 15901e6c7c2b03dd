"""StableDiffusionXLPipeline: SD's UNet with two text encoders, and told the size of the picture."""

from typing import Any

import torch
from torch import Tensor

from ..config.schema import Config
from .pipeline import picture_size
from .sd import SDModel


class SDXLModel(SDModel):
    pipeline = "StableDiffusionXLPipeline"
    inputs = ("text", "pooled")

    @classmethod
    def encode_texts(cls, pipe: Any, texts: list[str], config: Config, device: torch.device) -> dict[str, Tensor]:
        text, _, pooled, _ = pipe.encode_prompt(texts, device=device, do_classifier_free_guidance=False)
        return {"text": text, "pooled": pooled}

    def negative(self, encoded: dict[str, Tensor]) -> dict[str, Tensor]:
        # Without a negative prompt SDXL is led away from zeros, not from an empty text.
        if self.config.sample.negative_prompt or not self.source.index.get("force_zeros_for_empty_prompt", True):
            return encoded
        return {name: torch.zeros_like(row) for name, row in encoded.items()}

    def velocity(self, x: Tensor, t: Tensor, *cond: Tensor) -> Tensor:
        text, pooled = cond
        height, width = picture_size(self.config)
        # (original size, crop, target size): a picture that was neither scaled nor cropped.
        time_ids = torch.tensor([height, width, 0, 0, height, width], device=x.device, dtype=x.dtype)
        added = {"text_embeds": pooled, "time_ids": time_ids.expand(len(x), -1)}
        return self.module(x, t, encoder_hidden_states=text, added_cond_kwargs=added, return_dict=False)[0]
