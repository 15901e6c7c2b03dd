"""A run's progress: a line that fits any terminal, and now and then a longer one where there is none."""

import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ..core.errors import shortened
from .folder import STAGES
from .logger import Logger

BLOCKS = 24
"""Length of the bar that shows where an epoch's time went, all stages together."""
SECONDS_BETWEEN_LINES = 10.0
LEAST_BAR, MOST_BAR = 8, 40
"""Columns of the bar on a terminal; with fewer it is left out."""
LONGEST_NAME = 16
"""Characters of a reward's name beside its score."""
REMEMBERED = 20
"""Epochs whose time tells how long the rest will take."""


class ProgressBar:
    """Epochs done, time left and reward, in this order: what does not fit a terminal's line is left out at its end.

    Where stages took their time is in the lines of a log file, in the metrics, and told at the end.
    """

    def __init__(self, logger: Logger, start: int, total: int | None, limit: float = 0.0) -> None:
        self.logger, self.done, self.total, self.limit = logger, start, total, limit
        self.ends = deque([time.monotonic()], maxlen=REMEMBERED + 1)  # of epochs
        self.last_line = 0.0
        self.facts: list[str] = []
        on = logger.main and logger.console.is_terminal
        # What it shows stays readable when it is over: the bar goes, and the last lines say what the run came to.
        self.live = Live(self, console=logger.console, refresh_per_second=2, transient=True) if on else None

    def __enter__(self) -> "ProgressBar":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def advance(self, metrics: Mapping[str, float]) -> None:
        self.done += 1
        self.ends.append(time.monotonic())
        self.facts = facts(metrics)
        finished = self.done == self.total
        if not self.live and (time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES or finished):
            left = f", {clock(self.seconds_left or 0)} left" if self.seconds_left else ""
            self.logger.say(f"{self.head}: {', '.join(self.facts)}{left} | {time_split(metrics)}")
            self.last_line = time.monotonic()

    @property
    def head(self) -> str:
        return f"epoch {self.done}" + (f"/{self.total}" if self.total else "")

    @property
    def share(self) -> float:
        """Of the run that is over."""
        if self.total:
            return min(1.0, self.done / self.total)
        return min(1.0, self.logger.trained / self.limit) if self.limit else 0.0

    @property
    def seconds_left(self) -> float | None:
        """From now on, by the last epochs; None before the first."""
        since = time.monotonic() - self.ends[-1]
        if not self.total:
            return max(0.0, self.limit - self.logger.trained - since) if self.limit else None
        if len(self.ends) < 2:
            return None
        each = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        return max(0.0, each * (self.total - self.done) - since)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.line(options.max_width, options.ascii_only)

    def line(self, width: int, ascii_only: bool = False) -> Text:
        """The whole of it in so many columns."""
        left = "" if self.seconds_left is None else f"eta {clock(self.seconds_left)}"
        words = [word for word in (self.head, left, *self.facts) if word]
        kept = words[:1]
        for word in words[1:]:
            # The bar gives way to time left and reward, but to no more than these.
            room = width - (0 if len(kept) < 3 else LEAST_BAR + 2)
            if len("  ".join([*kept, word])) <= room:
                kept.append(word)
        room = min(MOST_BAR, width - len("  ".join(kept)) - 2)
        if room < LEAST_BAR:
            return Text("  ".join(kept), no_wrap=True, overflow="crop")
        full = round(self.share * room)
        bar, rest = ("#", ".") if ascii_only else ("━", "━")
        parts = [(bar * full, "green"), (rest * (room - full), "bright_black")]
        return Text.assemble(f"{kept[0]}  ", *parts, *(f"  {word}" for word in kept[1:]), no_wrap=True, overflow="crop")


def facts(metrics: Mapping[str, float]) -> list[str]:
    """An epoch's numbers in words, the most important first."""
    names = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    names = [name.split("/")[1] for name in names if name.count("/") == 2]
    if len(names) > 1:  # their sum by weight says less than each of them
        found = [f"{shortened(name, LONGEST_NAME)} {metrics[f'rewards/{name}/mean']:.4f}" for name in names]
    else:
        found = [f"reward {metrics['reward']:.4f}"]
    found += [f"std within a prompt {metrics['reward_std']:.4f}"]
    return found + ([f"{metrics['reward_failed']:.0f} without a score"] if metrics["reward_failed"] else [])


def clock(seconds: float) -> str:
    """Seconds for people: 0:42, 12:05, 3:00:00."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def time_split(row: Mapping[str, float]) -> str:
    """An epoch's time as text, a piece of a bar for each stage; and the speed of the model's calls."""
    spent = {name: row.get(f"time/{name}") or 0.0 for name in STAGES}
    total = sum(spent.values()) or 1.0
    shown = {name: seconds for name, seconds in spent.items() if seconds >= max(0.05, 0.01 * total)}
    parts = [f"{name} {'▇' * round(BLOCKS * s / total)} {s:.1f}s" for name, s in shown.items()]
    rates = [f"{name} {row[f'tflops/{name}']:.3g}" for name in ("rollout", "update") if f"tflops/{name}" in row]
    speed = f"TFLOP/s: {', '.join(rates)}" if rates else ""
    return " | ".join(filter(None, [" ".join(parts), speed]))
