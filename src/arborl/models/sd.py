"""StableDiffusionPipeline: SD 1.x and 2.x, a UNet that predicts noise or v."""

from typing import Any

import torch
from torch import Tensor

from ..config.schema import Config
from ..core.errors import InputError
from ..core.schedule import Schedule
from .pipeline import PipelineModel, latent_size, vae_factor
from .source import Source


class SDModel(PipelineModel):
    pipeline = "StableDiffusionPipeline"
    diffusion = True
    trained_component = "unet"
    inputs = ("text",)
    unused_components = ("safety_checker", "feature_extractor", "image_encoder")
    schedulers = (
        "PNDMScheduler",
        "DDIMScheduler",
        "DDPMScheduler",
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "DPMSolverMultistepScheduler",
        "LMSDiscreteScheduler",
        "UniPCMultistepScheduler",
    )  # all of them on the ᾱ of the same three numbers
    lora_targets = ("to_k", "to_out.0", "to_q", "to_v")  # DDPO's, and diffusers' own LoRA training

    @classmethod
    def latent_shape_for(cls, source: Source, config: Config) -> tuple[int, ...]:
        shape = source.config("unet")
        if shape.get("time_cond_proj_dim") is not None:
            problem = "it was distilled for consistency sampling, which the engine's steps are not"
            raise InputError("model.path", source.path, problem, cure="the model it was distilled from")
        return (shape.whole("in_channels"), *latent_size(config, vae_factor(source), 1))

    @classmethod
    def encode_texts(cls, pipe: Any, texts: list[str], config: Config, device: torch.device) -> dict[str, Tensor]:
        return {"text": pipe.encode_prompt(texts, device, 1, False)[0]}

    @classmethod
    def ode_scheduler(cls, config: Config) -> Any:
        from diffusers import DDIMScheduler

        # Pipelines are shipped with other schedulers, whose settings need not say that x̂0 is not to be clipped.
        with cls.reading_scheduler(config):
            own = cls.open(config).config("scheduler")
            return DDIMScheduler.from_config(own, clip_sample=False, thresholding=False)

    @classmethod
    def pipeline_schedule(cls, config: Config, steps: int) -> Schedule:
        scheduler = cls.ode_scheduler(config)
        with cls.reading_scheduler(config):
            return ddim_schedule(scheduler, steps)

    def velocity(self, x: Tensor, t: Tensor, *cond: Tensor) -> Tensor:
        return self.module(x, t, encoder_hidden_states=cond[0], return_dict=False)[0]

    @classmethod
    def comfyui(cls, layer: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        # Names as kohya's trainer writes them, which every program for UNets reads.
        name = f"lora_unet_{layer.replace('.', '_')}"
        alpha = torch.tensor(float(len(a)))
        return {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": alpha}


def ddim_schedule(scheduler: Any, steps: int) -> Schedule:
    """The steps a diffusers DDIMScheduler takes: each ends where the next begins, the last where the scheduler says."""
    scheduler.set_timesteps(steps)
    timesteps = [int(t) for t in scheduler.timesteps]
    alphas = [float(scheduler.alphas_cumprod[t]) for t in timesteps] + [float(scheduler.final_alpha_cumprod)]
    if alphas[0] <= 0:
        problem = "its schedule begins at pure noise, where no clean sample can be predicted"
        raise InputError("sample.num_steps", steps, problem, cure="a scheduler whose ᾱ is above 0 at every timestep")
    return Schedule.from_alphas(alphas, timesteps, scheduler.config.prediction_type)
