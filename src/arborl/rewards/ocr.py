"""Text in pictures: how much of what a prompt quotes can be read in its picture, by RapidOCR."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.schema import RewardConfig
from ..core.errors import InputError
from .base import Columns
from .preprocessing import as_rgb, check_aspect

QUOTED = re.compile('["“”]([^"“”]*)["“”]')


def target(prompt: str) -> str:
    """The text a picture should show: the prompt's quoted parts, without spaces and case; empty if there is none."""
    return _plain("".join(QUOTED.findall(prompt)))


def likeness(read: str, wanted: str) -> float:
    """1 where the text is there, else what is left of it after the fewest letters changed, added and left out."""
    from rapidfuzz.distance import Levenshtein

    read = _plain(read)
    if wanted in read:
        return 1.0
    return 1 - min(Levenshtein.distance(read, wanted), len(wanted)) / len(wanted)


def check_quotes(texts: Sequence[str]) -> None:
    """Every prompt says in double quotes what is to be written."""
    without = [text for text in texts if not target(text)]
    if without:
        shown = without[0] if len(without[0]) <= 60 else without[0][:60] + "…"
        problem = f"{len(without)} of {len(texts)} prompts quote no text to be read, such as {shown!r}"
        raise InputError("prompts", None, problem, 'prompts with text in double quotes: a sign that says "OPEN"')


class Ocr:
    """Reads each picture (of a video each frame; the mean counts) on the CPU."""

    check_prompts = staticmethod(check_quotes)

    def __init__(self, name: str, config: RewardConfig, pipeline: str = "") -> None:
        try:
            import rapidfuzz  # noqa: F401
            import rapidocr  # noqa: F401
        except ImportError as error:
            problem = f"needs packages that are not here ({error.name})"
            raise InputError(f"rewards.{name}.fn", "ocr", problem, cure="pip install 'arborl[ocr]'") from None
        self.engine: Any = None

    def __call__(self, images: Tensor, prompts: Sequence[str], columns: Columns) -> Tensor:
        images = as_rgb(images)
        check_aspect(images)
        pixels = (images * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).cpu()
        scores = []
        for picture, prompt in zip(pixels, prompts, strict=True):
            wanted = target(prompt)
            if not wanted:
                check_quotes([prompt])
            frames = picture.view(-1, *picture.shape[-3:])
            read = [likeness(self.read(frame), wanted) for frame in frames]
            scores.append(sum(read) / len(read))
        return torch.tensor(scores, dtype=torch.float32)

    def read(self, picture: Tensor) -> str:
        """All the text in a picture, in reading order."""
        if self.engine is None:
            from rapidocr import RapidOCR

            self.engine = RapidOCR(params={"Global.log_level": "error"})
        found = self.engine(picture.numpy()[:, :, ::-1])  # it takes BGR, as OpenCV does
        return "".join(found.txts or ())


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()
