"""A diffusion model as small as they come: a real diffusers UNet and DDIM scheduler, random weights."""

import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from arborl.config.schema import Config
from arborl.core.schedule import Schedule
from arborl.models import Cond, Model
from arborl.models.sd import ddim_schedule


class TinyDDIM(Model):
    diffusion = True
    prediction: ClassVar[str] = "epsilon"
    default_prompts = ("a cat", "a dog", "a house", "a tree")
    lora_targets = ("to_q", "to_v")
    latent_shape = (4, 8, 8)

    def __init__(self, config: Config, device: torch.device) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__(config, device)
        self.module = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8,),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D",),
            mid_block_type="UNetMidBlock2DCrossAttn",
            up_block_types=("CrossAttnUpBlock2D",),
            cross_attention_dim=8,
            attention_head_dim=4,
            norm_num_groups=4,
        ).to(device)

    @staticmethod
    def scheduler(prediction: str):
        from diffusers import DDIMScheduler

        return DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
            prediction_type=prediction,
        )

    @classmethod
    def pipeline_schedule(cls, config: Config, steps: int) -> Schedule:
        return ddim_schedule(cls.scheduler(cls.prediction), steps)

    def encode(self, prompts: Sequence[str]) -> Cond:
        seeds = [torch.Generator().manual_seed(zlib.crc32(text.encode())) for text in prompts]
        return Cond({"text": torch.stack([torch.randn(3, 8, generator=seed) for seed in seeds]).to(self.device)})

    def predict(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        return self.module(x, t, encoder_hidden_states=cond.tensors["text"], return_dict=False)[0].float()

    def decode(self, latents: Tensor) -> Tensor:
        return functional.interpolate(torch.sigmoid(latents[:, :3]), scale_factor=4)


class TinyV(TinyDDIM):
    prediction = "v_prediction"
