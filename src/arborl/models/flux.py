"""FluxPipeline: FLUX.1-dev, -schnell and what was made from them."""

from typing import Any

import torch
from torch import Tensor

from ..config.schema import Config
from ..core.errors import InputError
from ..core.schedule import Schedule, shifted
from ..core.tensors import floats
from .pipeline import JOINT_ATTENTION, PipelineModel, latent_size, vae_factor
from .source import Source

PATCH = 2
"""The transformer sees patches of 2×2 latent pixels, packed into its channels."""


class FluxModel(PipelineModel):
    """Latents are kept unpacked, as pictures; packing is a matter of the call."""

    pipeline = "FluxPipeline"
    t5 = "text_encoder_2"
    auto_compile = True
    cfg = False  # guidance is distilled into the weights, which take its scale as an input
    # As in diffusers' own LoRA training, and Flow-GRPO's.
    lora_targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

    @classmethod
    def latent_shape_for(cls, source: Source, config: Config) -> tuple[int, ...]:
        shape, scale = source.config("transformer"), config.sample.guidance_scale
        if scale != 1 and not shape.get("guidance_embeds"):
            problem = "this model has no guidance (it was distilled without one)"
            raise InputError("sample.guidance_scale", scale, problem, "1")
        return (shape.whole("in_channels") // PATCH**2, *latent_size(config, vae_factor(source), PATCH))

    @classmethod
    def encode_texts(cls, pipe: Any, texts: list[str], config: Config, device: torch.device) -> dict[str, Tensor]:
        text, pooled, _ = pipe.encode_prompt(texts, device=device, max_sequence_length=config.model.max_sequence_length)
        return {"text": text, "pooled": pooled}

    @classmethod
    def pipeline_schedule(cls, config: Config, steps: int) -> Schedule:
        # The pipeline hands its scheduler an even grid from 1 to 1/steps, so shifted it is exactly ours, unless the
        # scheduler's settings make more of it (a last level of its own, another spacing).
        scheduler, exact = cls.ode_scheduler(config), shifted(steps, cls.default_shift(config))
        with cls.reading_scheduler(config):
            even = torch.linspace(1, 1 / steps, steps).tolist()
            scheduler.set_timesteps(sigmas=even, **cls.dynamic_shift(scheduler, config))
            found = Schedule.from_sigmas(floats(scheduler.sigmas))
        return exact if torch.allclose(found.sigma, exact.sigma, rtol=0, atol=1e-5) else found

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        self.takes_guidance = bool(self.source.config("transformer").get("guidance_embeds"))
        keep_gradients_whole(self.pipe.transformer)

    def velocity(self, x: Tensor, t: Tensor, *cond: Tensor) -> Tensor:
        text, pooled = cond
        n, _, height, width = x.shape
        scale = torch.full((n,), self.config.sample.guidance_scale, device=x.device)
        out = self.module(
            hidden_states=pack(x),
            timestep=t / 1000,
            guidance=scale if self.takes_guidance else None,
            pooled_projections=pooled,
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
            img_ids=_positions(height // PATCH, width // PATCH, x.device),
            return_dict=False,
        )[0]
        return unpack(out, height, width)

    def as_pipeline_latents(self, latents: Tensor) -> Tensor:
        return pack(latents)


class _WholeGradient(torch.autograd.Function):
    """The tensor itself, whose gradient arrives as one block of memory.

    A single block joins attention and MLP, so attention's gradient is a slice of a wider one; a double block's is not.
    cuDNN's attention (torch 2.11, cuDNN 9.19) seems to take the two for one case, and dies at the second it meets with
    an illegal memory access.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def keep_gradients_whole(transformer: Any) -> None:
    for block in transformer.single_transformer_blocks:
        block.attn.register_forward_hook(lambda module, inputs, output: _WholeGradient.apply(output))


def pack(x: Tensor) -> Tensor:
    """N×C×H×W latents to N×(H/2·W/2)×4C tokens."""
    n, channels, height, width = x.shape
    patches = x.view(n, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * PATCH**2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    n, _, channels = tokens.shape
    patches = tokens.view(n, height // PATCH, width // PATCH, channels // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(n, -1, height, width)


def _positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """(0, row, column) of each picture token."""
    row, column = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], -1).flatten(0, 1).float()
