"""StableDiffusion3Pipeline: SD3, SD3.5 and anything saved in that layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.schema import Config
from ..core.errors import InputError
from ..core.schedule import Schedule
from .base import Cond, Model, dtypes, read_index
from .guidance import guided
from .quiet import quiet_libraries


class SD3Model(Model):
    lora_targets = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
    )

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        self.pipe: Any = load_pipeline(self.path(config), dtypes(config, device)).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        for part in (self.pipe.vae, self.pipe.text_encoder, self.pipe.text_encoder_2, self.pipe.text_encoder_3):
            if part is not None:
                part.eval().requires_grad_(False)
        if config.model.max_sequence_length == 0 and self.pipe.text_encoder_3 is not None:
            raise InputError("model.max_sequence_length", 0, "this pipeline has a T5, which needs tokens", "1 or more")
        self.module = self.pipe.transformer
        shape = self.pipe.transformer.config
        resolution = config.sample.resolution
        factor, patch = self.pipe.vae_scale_factor, shape.patch_size
        largest = shape.pos_embed_max_size * patch * factor
        if resolution % (factor * patch) or resolution > largest:
            problem = f"this model's pictures come in multiples of {factor * patch}"
            raise InputError("sample.resolution", resolution, problem, f"{factor * patch}..{largest}")
        self.latent_shape = (shape.in_channels, resolution // factor, resolution // factor)

    @classmethod
    def check(cls, config: Config, may_fetch: bool) -> None:
        locate(cls.path(config), may_fetch)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        text, negative, pooled, negative_pooled = self.pipe.encode_prompt(
            list(prompts),
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=self.config.sample.guidance_scale > 1,
            max_sequence_length=self.config.model.max_sequence_length,
        )
        tensors = {"text": text, "pooled": pooled}
        if self.config.sample.guidance_scale > 1:
            tensors |= {"negative_text": negative, "negative_pooled": negative_pooled}
        return Cond(tensors)

    @classmethod
    def pipeline_grid(cls, config: Config, steps: int) -> Schedule:
        from diffusers import FlowMatchEulerDiscreteScheduler

        path = cls.path(config)
        try:
            scheduler: Any = FlowMatchEulerDiscreteScheduler.from_pretrained(path, subfolder="scheduler")
        except OSError:
            raise InputError("model.path", path, "has no scheduler to read", "or sample.sigmas=shift") from None
        scheduler.set_timesteps(steps)
        return Schedule.from_sigmas(scheduler.sigmas.tolist())

    def predict(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        # Frozen weights may be bfloat16 while trained ones are float32; autocast, if on, takes it from there.
        dtype = next(self.module.parameters()).dtype

        def velocity(x: Tensor, t: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
            out = self.module(
                hidden_states=x.to(dtype),
                timestep=t,
                encoder_hidden_states=text.to(dtype),
                pooled_projections=pooled.to(dtype),
                return_dict=False,
            )
            return out[0].float()

        scale, grad = self.config.sample.guidance_scale, self.config.train.cfg_grad
        return guided(velocity, x, t, cond, ("text", "pooled"), scale, grad)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        pixels = vae.decode(latents.float() / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return (pixels / 2 + 0.5).clamp(0, 1)


def locate(path: str, may_fetch: bool = True) -> dict[str, None]:
    """Check that a pipeline is where `path` says, before anything heavy; returns the parts its index leaves empty."""
    if not path:
        raise InputError("model.path", None, "is not set", "a folder with a diffusers pipeline, or a hub id")
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith(".") or path.count("/") != 1:
            raise InputError("model.path", path, "there is no such folder")
        from huggingface_hub import constants, try_to_load_from_cache

        cached = isinstance(try_to_load_from_cache(path, "model_index.json"), str)
        if not cached and (constants.HF_HUB_OFFLINE or not may_fetch):
            raise _missing(path)
        return {}
    index = folder / "model_index.json"
    if not index.is_file():
        raise InputError("model.path", path, "the folder holds no diffusers pipeline (no model_index.json)")
    parts = read_index(index)
    if parts.get("_class_name") != "StableDiffusion3Pipeline":
        raise InputError(
            "model.path", path, f"the folder holds a {parts.get('_class_name')}", "StableDiffusion3Pipeline"
        )
    return {name: None for name in ("text_encoder_3", "tokenizer_3") if parts.get(name, [None])[0] is None}


def load_pipeline(path: str, dtype: dict[str, torch.dtype]) -> Any:
    """The pipeline of a folder or hub id; a clear line if weights are missing."""
    absent = locate(path)
    with quiet_libraries():
        from diffusers import StableDiffusion3Pipeline

        try:
            return StableDiffusion3Pipeline.from_pretrained(path, dtype=dtype, **absent)
        except OSError as error:
            if Path(path).is_dir():
                raise InputError("model.path", path, f"is incomplete ({str(error).splitlines()[0]})") from None
            raise _missing(path) from None


def _missing(path: str) -> InputError:
    problem = "these weights are not here (no such folder, not in the hub's cache) and were not fetched"
    fix = f"a folder made with `hf download {path} --local-dir FOLDER` (gated models: `hf auth login` first)"
    return InputError("model.path", path, problem, fix)
