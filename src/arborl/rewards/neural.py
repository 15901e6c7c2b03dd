"""A reward that is a neural network: found when it is made, loaded at its first call, fed a few pictures at a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..config.schema import RewardConfig
from ..core.errors import InputError
from .base import Columns
from .preprocessing import as_rgb

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class NetworkReward(ABC):
    """Subclasses look for their files in `__init__` (nothing is read yet), read them in `load`, and score in `score`.

    Called as any reward: (pictures or videos, prompts, columns) -> one score each. Of a video a picture's reward scores
    the frames, and their mean is the score; a reward `of_videos` gets the videos themselves.
    """

    of_videos = False
    half = torch.bfloat16  # the precision of its network on a GPU, unless another is asked for

    def __init__(self, name: str, config: RewardConfig, pipeline: str = "") -> None:
        self.name, self.config = name, config
        self.pipeline = pipeline  # folder or hub id of the model that is trained, which may have a tokenizer for us
        self.device: torch.device | None = None

    def key(self, field: str) -> str:
        """A setting of this reward, as the user writes it."""
        return f"rewards.{self.name}.{field}"

    def dtype(self, device: torch.device) -> torch.dtype:
        if self.config.dtype != "auto":
            return DTYPES[self.config.dtype]
        return self.half if device.type == "cuda" else torch.float32

    @abstractmethod
    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        """Read the weights and put the network on a device."""

    @abstractmethod
    def score(
        self, images: Float[Tensor, "n *picture"], prompts: Sequence[str]
    ) -> Float[Tensor, " n"] | Mapping[str, Float[Tensor, " n"]]:
        """Float32 scores, or named parts, of a few pictures that are RGB and in [0, 1]."""

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], columns: Columns) -> Tensor | dict[str, Tensor]:
        if self.of_videos and images.ndim != 5:
            raise InputError(
                self.key("fn"), None, "scores videos, and was given pictures", cure="a model that makes videos"
            )
        images = as_rgb(images)
        frames = 1
        if images.ndim == 5 and not self.of_videos:
            frames = images.shape[1]
            images, prompts = images.flatten(0, 1), [prompt for prompt in prompts for _ in range(frames)]
        if self.device != images.device:
            self.load(images.device, self.dtype(images.device))
            self.device = images.device
        size = self.config.batch_size
        found: list[Mapping[str, Tensor]] = []
        for i in range(0, len(images), size):
            scores = self.score(images[i : i + size].float().clamp(0, 1), prompts[i : i + size])
            found.append(scores if isinstance(scores, Mapping) else {"": scores})
        whole = {part: torch.cat([scores[part] for scores in found]).view(-1, frames).mean(1) for part in found[0]}
        return whole.get("", whole)
