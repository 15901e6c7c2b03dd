"""WanPipeline: Wan2.1 text-to-video."""

from typing import Any

import torch
from torch import Tensor

from ..config.schema import Config
from ..core.errors import InputError
from ..data.prompts import HELDOUT_VIDEOS, VIDEOS
from .pipeline import PipelineModel, latent_size
from .source import Source

ORIGINAL = {
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
}
"""diffusers' names of layers, and what Wan's own code calls them."""


class WanModel(PipelineModel):
    pipeline = "WanPipeline"
    schedulers = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
    video = True
    auto_compile = True
    t5 = "text_encoder"
    inputs = ("text",)
    default_prompts, heldout_prompts = VIDEOS, HELDOUT_VIDEOS
    lora_targets = ("to_k", "to_out.0", "to_q", "to_v")  # Flow-GRPO's, without those of image-to-video

    @classmethod
    def latent_shape_for(cls, source: Source, config: Config) -> tuple[int, ...]:
        if "transformer_2" in source.parts or source.index.get("expand_timesteps"):
            problem = "Wan2.2's two experts and per-token timesteps are not this family's"
            raise InputError("model.path", source.path, problem, cure="model.family=pipeline")
        shape, vae = source.config("transformer"), source.config("vae")
        stride, frames = vae.whole("scale_factor_temporal", 4), config.sample.num_frames
        if (frames - 1) % stride:
            near = (frames - 1) // stride * stride + 1
            problem = f"this model's videos have {stride}·n + 1 frames"
            raise InputError("sample.num_frames", frames, problem, f"{near} or {near + stride}, say")
        height, width = latent_size(config, vae.whole("scale_factor_spatial", 8), shape.wholes("patch_size")[-1])
        return (shape.whole("in_channels"), (frames - 1) // stride + 1, height, width)

    @classmethod
    def encode_texts(cls, pipe: Any, texts: list[str], config: Config, device: torch.device) -> dict[str, Tensor]:
        text, _ = pipe.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=config.model.max_sequence_length,
            device=device,
        )
        return {"text": text}

    @classmethod
    def ode_scheduler(cls, config: Config) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        own = cls.open(config).config("scheduler")  # UniPC as it is shipped, which calls its shift another name
        shift = own.get("flow_shift", own.get("shift", 1.0))
        return FlowMatchEulerDiscreteScheduler(own.get("num_train_timesteps", 1000), shift)

    def velocity(self, x: Tensor, t: Tensor, *cond: Tensor) -> Tensor:
        return self.module(hidden_states=x, timestep=t, encoder_hidden_states=cond[0], return_dict=False)[0]

    def pixels(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        mean, std = (
            torch.tensor(values, device=latents.device).view(-1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode(latents * std + mean, return_dict=False)[0].transpose(1, 2)

    @classmethod
    def comfyui(cls, layer: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        for ours, original in ORIGINAL.items():
            layer = layer.replace(ours, original)
        return {f"diffusion_model.{layer}.lora_A.weight": a, f"diffusion_model.{layer}.lora_B.weight": b}

    def call_options(self) -> dict[str, Any]:
        return super().call_options() | {"num_frames": self.config.sample.num_frames}
