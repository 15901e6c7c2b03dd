"""Signs of reward hacking: whether only the trained reward is getting better."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SIGMAS = 2.0
"""Standard errors that a change must exceed to count."""

LIMITS = {
    "dark": (0.0, 0.25),
    "saturated": (0.0, 0.25),
    "entropy": (0.6, 0.0),
    "edges": (0.4, 0.0),
    "diversity": (0.1, 0.0),
}
"""The share of a statistic's first value that must be left, and the amount that may be added. Leaves grow alike in any
run that learns (on the scenes to a fifth of their first diversity), so much less of it must be left.
"""


def of(row: Mapping[str, Any], name: str) -> float | None:
    """A number of an evaluation, over the prompts that all evaluations of the run have: others are another question."""
    return row.get(f"eval_between/{name}" if is_between(row, name) else f"eval/{name}")


def is_between(row: Mapping[str, Any], name: str) -> bool:
    """Whether that number is over some of the prompts: the first, which every evaluation has."""
    return row.get(f"eval_between/{name}") is not None


def evaluations(rows: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The rows of metrics that hold an evaluation of this reward: those where it scored as many pictures as ever, for
    means over fewer are of others.
    """
    found = [row for row in rows if of(row, name) is not None]
    fewest = min((of(row, f"{name}_failed") or 0.0 for row in found), default=0.0)
    return [row for row in found if (of(row, f"{name}_failed") or 0.0) == fewest]


def best(rows: Sequence[Mapping[str, Any]], name: str, aim: float = 1.0) -> Mapping[str, Any] | None:
    """The evaluation where this reward was highest (lowest, where it aims down), the earliest of equals."""
    return max(evaluations(rows, name), key=lambda row: aim * (of(row, name) or 0.0), default=None)


def hacking(rows: Sequence[Mapping[str, Any]], trained: Mapping[str, float], watched: Sequence[str]) -> list[str]:
    """Rewards and statistics that got worse while a trained reward improved, by the newest row; empty if none did.

    A reward has changed if it did by more than two standard errors: a trained one since the first evaluation, a watched
    one since its best. A statistic of the pictures has when it left `LIMITS`.
    """
    now = rows[-1]
    whole = {name: evaluations(rows, name) for name in [*trained, *watched]}
    trained = {name: aim for name, aim in trained.items() if now in whole[name]}
    risen = [name for name, aim in trained.items() if aim * _change(whole[name][:1], now, name) > 0]
    if not risen:
        return []
    fallen = [name for name in watched if now in whole[name] and _change([best(rows, name)], now, name) < 0]
    worse = [f"{name} {_shown(best(rows, name), name)} -> {_shown(now, name)}" for name in fallen]
    for name, (left, added) in LIMITS.items():
        first, last = statistic(rows, name)
        if first is None or last is None:
            continue
        if (added and last > first + added) or (left and last < first * left):
            worse.append(f"{name} {first:.3g} -> {last:.3g}")
    if not worse:
        return []
    first = whole[risen[0]][0]
    return [f"{risen[0]} {_shown(first, risen[0])} -> {_shown(now, risen[0])}", *worse]


def _change(before: Sequence[Mapping[str, Any] | None], now: Mapping[str, Any], name: str) -> int:
    """-1, 0 or 1: whether a reward fell, stayed or rose by more than chance explains."""
    then = before[0] if before else None
    score, earlier = of(now, name), None if then is None else of(then, name)
    if then is None or score is None or earlier is None:
        return 0
    error = math.hypot(*(of(row, f"{name}_stderr") or 0.0 for row in (then, now)))
    change = score - earlier
    return (change > 0) - (change < 0) if abs(change) > SIGMAS * error else 0


def statistic(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float | None, float | None]:
    """A statistic at first and at last; of the leaves' diversity, which every epoch has and a moving window moves, the
    mean between two evaluations.
    """
    if name != "diversity":
        found = [value for row in rows if (value := of(row, f"pictures/{name}")) is not None]
        return (found[0], found[-1]) if found else (None, None)
    spans: list[list[float]] = [[]]
    for row in rows:
        if of(row, "pictures/dark") is not None and spans[-1]:
            spans.append([])
        if row.get("diversity") is not None:
            spans[-1].append(row["diversity"])
    means = [sum(span) / len(span) for span in spans if span]
    return (means[0], means[-1]) if len(means) > 1 else (None, None)


def _shown(row: Mapping[str, Any] | None, name: str) -> str:
    return "–" if row is None else f"{of(row, name):.4g}"
