"""Four dots in a plane: a flow model whose exact velocity is known, plus a small network that is what trains.

The base model draws a dot near one of four corners and ignores the prompt; a reward can teach the network to put it
where the prompt says. Small enough to train in seconds, exact enough to check a sampler against the truth.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..config.schema import Config
from ..core.errors import InputError
from ..models.base import Cond, Model
from ..rewards.base import Columns, RewardFailed

PLACES = {
    "top left": (-1.5, 1.5),
    "top right": (1.5, 1.5),
    "bottom left": (-1.5, -1.5),
    "bottom right": (1.5, -1.5),
}
WEIGHTS = (0.30, 0.20, 0.35, 0.15)
SPREAD = 0.25
CANVAS = 3.0
"""The picture shows the square [-3, 3]²."""
PIXELS = 32
DOT = 2.0
"""Radius of the drawn dot in pixels (one standard deviation)."""
TINT = (1.0, 0.75, 0.3)
"""Its colour."""


def place_of(prompt: str) -> int | None:
    """Index of the corner a prompt names, or None."""
    return next((i for i, name in enumerate(PLACES) if name in prompt.lower()), None)


def pixel_grid() -> tuple[Tensor, Tensor]:
    """x and y of every pixel's centre, y upwards, each PIXELS × PIXELS."""
    axis = (torch.arange(PIXELS) + 0.5) / PIXELS * 2 * CANVAS - CANVAS
    y, x = torch.meshgrid(-axis, axis, indexing="ij")
    return x, y


class Mixture:
    """The data distribution: Σ w_i N(m_i, spread²·I), with its flow in closed form."""

    def __init__(self, means: Float[Tensor, "modes d"], weights: Float[Tensor, " modes"], spread: float) -> None:
        self.means, self.weights, self.spread = means, weights / weights.sum(), spread

    def velocity(self, x: Float[Tensor, "n d"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """E[noise - x0 | x_σ = x] for x_σ = (1-σ)x0 + σ·noise: posterior over modes, then Gaussian conditioning."""
        means, keep = self.means.to(x), (1 - sigma)[:, None, None]
        variance = (keep * self.spread) ** 2 + sigma[:, None, None] ** 2
        off = x[:, None] - keep * means
        logits = self.weights.to(x).log() - (off**2).sum(-1) / (2 * variance[..., 0])
        noise = sigma[:, None, None] / variance * off
        clean = means + keep * self.spread**2 / variance * off
        return (torch.softmax(logits, -1)[..., None] * (noise - clean)).sum(1)


class Steering(nn.Module):
    """A small network of (x, σ, place) that is added to the exact velocity; its last layer starts at zero.

    It fades with σ: the last steps are never stochastic, so nothing a reward says reaches them directly, and a network
    that acts there is bent by what it learns at the others: without the fade runs rise and then fall (docs/log.md).
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.hidden = nn.Linear(2 + 3 + len(PLACES), width)
        self.middle = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, sigma: Tensor, place: Tensor) -> Tensor:
        level = torch.stack([sigma, torch.cos(3 * sigma), torch.sin(3 * sigma)], -1)
        h = torch.tanh(self.hidden(torch.cat([x, level, place], -1)))
        return sigma[:, None] * self.out(torch.tanh(self.middle(h)))


class MixtureModel(Model):
    latent_shape = (2,)
    default_prompts = tuple(f"a dot at the {name}" for name in PLACES)
    lora_targets = ("hidden", "middle", "out")

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        if config.sample.guidance_scale != 1:
            raise InputError("sample.guidance_scale", config.sample.guidance_scale, "the mixture has no guidance", "1")
        self.data = Mixture(torch.tensor(list(PLACES.values())), torch.tensor(WEIGHTS), SPREAD)
        self.module = Steering().to(device)

    def encode(self, prompts: Sequence[str]) -> Cond:
        place = torch.zeros(len(prompts), len(PLACES))
        for row, prompt in enumerate(prompts):
            if (index := place_of(prompt)) is not None:
                place[row, index] = 1
        return Cond({"place": place.to(self.device)})

    def predict(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        sigma = t / 1000
        return self.data.velocity(x, sigma) + self.module(x, sigma, cond.tensors["place"]).float()

    def decode(self, latents: Tensor) -> Tensor:
        x, y = (axis.to(latents) for axis in pixel_grid())
        off = (x - latents[:, 0, None, None]) ** 2 + (y - latents[:, 1, None, None]) ** 2
        dot = torch.exp(-off / (2 * (DOT * 2 * CANVAS / PIXELS) ** 2))
        tint = torch.tensor(TINT).to(latents)
        return dot[:, None] * tint[:, None, None]


def place(images: Tensor, prompts: Sequence[str], columns: Columns) -> Tensor:
    """Nearness of the mixture model's dot to the corner its prompt names: 1 on it, 0 far off. NaN if none is named."""
    if images.shape[-2:] != (PIXELS, PIXELS):
        raise RewardFailed(f"the place reward reads {PIXELS}×{PIXELS} pictures of the mixture model")
    x, y = (axis.to(images) for axis in pixel_grid())
    centres = torch.tensor(list(PLACES.values())).to(images)
    named = [place_of(prompt) for prompt in prompts]
    target = centres[[index or 0 for index in named]][:, :, None, None]
    # How much of the dot lies near the target, in units of what a dot exactly on it would give.
    reach, width = 1.0, DOT * 2 * CANVAS / PIXELS
    near = torch.exp(-((x - target[:, 0]) ** 2 + (y - target[:, 1]) ** 2) / (2 * reach**2))
    whole = 2 * torch.pi * DOT**2 * sum(TINT) / 3 * reach**2 / (reach**2 + width**2)
    scores = (images.mean(1) * near).flatten(1).sum(1) / whole
    return torch.where(torch.tensor([index is None for index in named], device=scores.device), torch.nan, scores)


def example() -> tuple[Tensor, str]:
    """A picture for `place` to read, and its prompt."""
    x, y = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="xy")
    dot = torch.exp(-((x - PIXELS / 4) ** 2 + (y - PIXELS / 4) ** 2) / (2 * DOT**2))
    return torch.tensor(TINT).view(3, 1, 1) * dot, "a dot at the top left"


place.example = example  # type: ignore[attr-defined]
