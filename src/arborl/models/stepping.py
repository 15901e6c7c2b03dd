"""One step of a pipeline's loop for many rows, in as few calls as the pipeline lets them share.

How rows share a call, and which elements of the latents are free, is found by trying, once a model.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.schedule import Schedule
from ..core.tensors import ints, to_device
from . import call
from .base import Cond
from .conditions import REFUSED, SHORT, opened
from .loop import Levels, Loop, RowTimesteps, Stepped, calling, can_pass_over, denoisers
from .prepared import leaves, restore
from .source import DEVICE_ERRORS

EXACT, NEAR, CLEAR = 1e-4, 0.05, 0.1
"""Differences of two answers, as shares: of the same arithmetic; of half precision in calls of different sizes; and of
the difference that another noise level makes, of which half precision takes less.
"""


class Style(NamedTuple):
    """How rows share a call of a pipeline."""

    listed: bool = True  # a list of prompts, or one prompt and a number of pictures
    mixed: bool = False  # at noise levels of their own, or all at one
    alone: bool = False  # not at all

    def __str__(self) -> str:
        if self.alone:
            return "each row is a call of its own, as the pipeline takes no more"
        return "rows of all noise levels share a call" if self.mixed else "rows of one noise level share a call"


class Free(NamedTuple):
    """The elements of the latents that a loop moves, where some are given: their places in the latents, and in what
    arrives at the scheduler.
    """

    place: Tensor
    arrival: Tensor


class Stepper:
    """Answers for rows of latents at noise levels. `loop` is the pipeline as it is now, `fixed` what every call is
    given.
    """

    def __init__(
        self, loop: Callable[[], Loop], cls: type, fixed: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.loop, self.cls, self.fixed, self.dtype, self.device = loop, cls, fixed, dtype, device
        self.tables: list[tuple[dict[float, int], Levels]] = []
        self.style: Style | None = None
        self.free: Free | None = None

    def add(self, schedule: Schedule) -> None:
        """Know a table of steps, so that a step is found in it again by its timestep."""
        timesteps, sigmas = schedule.timestep.float(), torch.cat([schedule.sigma, schedule.sigma_next[-1:]]).float()
        steps = {t: i for i, t in enumerate(timesteps.tolist())}
        if all(known != steps for known, _ in self.tables):
            self.tables.append((steps, Levels(timesteps.to(self.device), sigmas, None)))

    def groups(self, t: Tensor) -> Tensor:
        """Numbers of the groups of timesteps whose rows may share a call."""
        if self.style is not None and self.style.mixed:
            return torch.zeros(len(t), dtype=torch.long)
        return torch.unique(t, return_inverse=True)[1]

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """In one call, unless rows differ in what cannot be mixed."""
        style, levels, alike = self.style or Style(), t.tolist(), cond.host["alike"]
        rows = range(len(x))
        keys = [(alike[i], None if style.mixed else levels[i], i if style.alone else None) for i in rows]
        if len(set(keys)) == 1:
            return self._velocity(x, levels, cond, style)
        found = torch.empty_like(x, dtype=torch.float32)
        for key in dict.fromkeys(keys):
            some = torch.tensor([i for i in rows if keys[i] == key])
            index = to_device(some, x.device)
            part = self._velocity(x[index], [levels[i] for i in ints(some)], cond[some], style)
            found = found.index_copy(0, index, part)
        return found

    def arguments(self, count: int, style: Style, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for so many rows. A text only stands for what is kept of it: nobody looks at it again."""
        found = {**self.fixed, **{name: opened(value) for name, value in given.items()}}
        texts = {"prompt": SHORT} | {name: found[name] for name in ("negative_prompt",) if name in found}
        if style.listed:
            return found | {name: [value] * count for name, value in texts.items()}
        number = next(name for name in call.NUMBERS if name in call.takes(self.cls))
        return found | texts | {number: count}

    def results(self, cond: Cond) -> dict[str, list[Any]]:
        """What the pipeline's methods would have returned for these rows."""
        return restore(cond.tensors, cond.host["form"], self.dtype)

    def place(self, x: Tensor, own: Tensor) -> Tensor:
        """Latents of ours in the shape and type of the pipeline's own, with the elements that it gives."""
        if not self.free:
            return x.to(own.dtype).view(own.shape)
        return own.flatten(1).index_copy(1, self.free.place, x.to(own.dtype)).view(own.shape)

    def _velocity(self, x: Tensor, t: Sequence[float], cond: Cond, style: Style) -> Tensor:
        arrived = self._step(self.loop(), x, t, cond, style).velocity.float()
        return arrived.flatten(1)[:, self.free.arrival] if self.free else arrived.view(x.shape)

    def _step(self, loop: Loop, x: Tensor, t: Sequence[float], cond: Cond, style: Style) -> Stepped:
        arguments = self.arguments(len(x), style, cond.host["given"][0])
        return loop.velocity(partial(self.place, x), self._levels(t), self.results(cond), arguments)

    def _levels(self, t: Sequence[float]) -> Levels:
        """The table that a level is from, and its step in it; for several levels, or for one of no table, a table of
        their own.
        """
        one = len(set(t)) == 1
        for steps, table in self.tables if one and can_pass_over(self.cls) else ():
            if t[0] in steps:
                return table._replace(step=steps[t[0]])
        known = (float(table.sigmas[steps[t[0]]]) for steps, table in self.tables if t[0] in steps)
        sigmas = torch.tensor([next(known, t[0] / 1000), 0.0])
        row = to_device(torch.tensor(t[:1] if one else t), self.device)
        return Levels(row if one else row[None].as_subclass(RowTimesteps), sigmas, 0)

    # What is found out by trying.

    def find_style(self, x: Tensor, high: float, low: float, cond: Cond) -> Style:
        """How two rows share a call: as each is answered alone, or else in some way that is. `cond` is of both."""

        def answers(rows: Sequence[int], t: Sequence[float], style: Style) -> Tensor:
            return self._velocity(x[list(rows)], t, cond[: len(rows)], style)

        first, second, wrong = (answers([i], [t], Style()) for i, t in ((0, high), (1, low), (1, high)))
        right = {True: torch.cat([first, second]), False: torch.cat([first, wrong])}
        self.style = Style(alone=True)
        for style in (Style(mixed=True), Style(listed=False, mixed=True), Style(), Style(listed=False)):
            if not style.listed and not any(name in call.takes(self.cls) for name in call.NUMBERS):
                continue
            try:
                found = answers([0, 1], [high, low if style.mixed else high], style)
            except DEVICE_ERRORS:
                raise
            except REFUSED:
                continue
            if _agree(found, right[style.mixed], (second - wrong).norm() if style.mixed else None):
                self.style = style
                break
        return self.style

    def find_free(self, x: Tensor, t: float, cond: Cond) -> Free | None:
        """The elements that reach the model and that the scheduler moves, by their gradients; None for all of them."""
        reached: list[Tensor] = []

        def seen(own: Any, inside: Any) -> Any:
            def asked(*args: Any, **kwargs: Any) -> Any:
                inputs = leaves([*args, *kwargs.values()]).values()
                reached.extend(value for value in inputs if isinstance(value, Tensor) and value.requires_grad)
                with torch.no_grad():
                    return inside(*args, **kwargs)

            return calling(own, asked)

        loop = self.loop()
        loop.parts = {**loop.parts, **{name: seen(own, loop.parts[name]) for name, own in denoisers(loop.pipe).items()}}
        with torch.enable_grad():
            arrived = self._step(loop, x.requires_grad_(), [t], cond, Style()).latents.float().flatten()
            (reaching,) = torch.autograd.grad([value.float().sum() for value in reached], x, retain_graph=True)

            def gradient(weight: Tensor) -> Tensor:
                (found,) = torch.autograd.grad(arrived, x, weight, retain_graph=True)
                return found.flatten()

            free = (gradient(torch.ones_like(arrived)) != 0) & (reaching.flatten() != 0)
            number = torch.arange(len(arrived), device=x.device)
            # Each place's number, a byte at a time: half precision holds no more exactly.
            arrival = torch.zeros_like(free, dtype=torch.long)
            for byte in range(4):
                arrival += gradient((number // 256**byte % 256).float()).round().long() * 256**byte
        place = free.nonzero().flatten()
        if not (len(place) == len(arrived) == x.numel() and torch.equal(arrival, number)):
            self.free = Free(place, arrival[place])
        return self.free


def _agree(found: Tensor, right: Tensor, between: Tensor | None) -> bool:
    """Whether answers are the right ones: exactly, to the rounding of half precision, or far nearer than `between`."""
    off, size = (found - right).flatten(1).norm(dim=1), right.flatten(1).norm(dim=1)
    most = NEAR * size if between is None else CLEAR * between
    return bool(((off <= EXACT * size) | (off <= most)).all())
