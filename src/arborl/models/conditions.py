"""What a prompt file gives a pipeline's call besides text; and prompts with it encoded by the call up to its loop."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from ..core.errors import InputError
from ..data.embedding_cache import Encode, Request
from ..data.prompts import Picture
from ..tools.quiet import quiet_libraries
from .call import is_pictures
from .loop import Levels, Loop, Results, UsedDirectlyError
from .pipeline import is_encoder
from .prepared import find_rules, to_tensors
from .source import BROKEN, DEVICE_ERRORS

REFUSED = (*BROKEN, StopIteration, NotImplementedError)
"""What a call may raise that is tried with arguments it is not made for."""
SHORT, LONG = "a", "a photo of a red house beside a blue cat and a dog"
"""Texts of different length, which show how prompts come to share a call; and that stand for those that are kept."""


@dataclass(frozen=True)
class Blank:
    """A picture of which only the size is known, width first."""

    size: tuple[int, int]

    def picture(self) -> PIL.Image.Image:
        return PIL.Image.new("RGB", self.size, (127, 127, 127))


def stand_in(argument: str, value: Any) -> Any:
    """What stands for something that is kept: of a picture its size; the value itself of others."""
    if isinstance(value, list):
        return [stand_in(argument, each) for each in value]
    if not is_pictures(argument):
        return value
    with nullcontext(value) if isinstance(value, PIL.Image.Image) else PIL.Image.open(value) as image:
        return Blank(image.size)


def opened(value: Any) -> Any:
    """Pictures in the place of their paths and of what stands for them."""
    if isinstance(value, list):
        return [opened(each) for each in value]
    if isinstance(value, Blank):
        return value.picture()
    return value.open() if isinstance(value, Picture) else value


def encoder(loop: Loop, arguments: Mapping[str, Any], seed: int) -> Encode:
    """A function that encodes requests with the parts that the pipeline has loaded: all that they had a hand in before
    the loop is kept.
    """
    rules: dict[str, str] = {}
    levels = Levels(torch.tensor([1000.0], device=loop.device), torch.tensor([1.0, 0.0]), None)

    def prepared(text: str | list[str], given: Mapping[str, Any]) -> Results:
        own = {**arguments, **{name: opened(value) for name, value in given.items()}, "prompt": text}
        own["generator"] = torch.Generator().manual_seed(seed)
        if isinstance(text, list) and "negative_prompt" in own:
            own["negative_prompt"] = [own["negative_prompt"]] * len(text)
        try:
            return loop.prepare(levels, own, lambda part: is_encoder(part) or part == "vae").results
        except UsedDirectlyError as error:
            raise InputError("model.path", None, str(error)) from None

    def together(given: Mapping[str, Any]) -> Results | None:
        try:
            return prepared([SHORT, LONG], given)
        except DEVICE_ERRORS:
            raise
        except REFUSED:  # the pipeline takes one prompt at a time
            return None

    @torch.no_grad()
    def encode(requests: Sequence[Request]) -> list[dict[str, Tensor]]:
        with quiet_libraries():
            if not rules:
                given = dict(requests[0].given)
                rules.update(find_rules(prepared(SHORT, given), prepared(LONG, given), together(given)))
            return [to_tensors(prepared(each.text, dict(each.given)), rules) for each in requests]

    return encode
