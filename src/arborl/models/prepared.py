"""What a pipeline prepares for one prompt, as named tensors that a file can hold; and how prompts come to share a call.

A name is the way to a value (method, number of the call, places in tuples and lists) and, after a bar, the rule by
which the values of several prompts become one. Which rule holds is found by preparing two prompts apart and together.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import InputError
from .loop import Results

ROWS, PADDED, MASK, SAME, LONGEST, LISTED, PLAIN = "rows", "padded", "mask", "same", "longest", "listed", "plain"
"""Rules: a row each, of one shape; rows filled up with zeros to the longest, along one axis; which places of these are
no filling, where the pipeline leaves that out if all are; the same for all; the longest one's for all; a list with an
item for each; no tensor.
"""


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """What is at the ends of nested tuples, lists and dicts of lists, by the way to it."""
    if isinstance(value, Mapping):
        inner = ((f"{name}.{i}", each) for name, values in value.items() for i, each in enumerate(values))
        return {end: leaf for way, each in inner for end, leaf in leaves(each, way).items()}
    if isinstance(value, tuple | list):
        kind = "t" if isinstance(value, tuple) else "l"
        found = {f"{path}.{kind}": None} if not value else {}
        inner = ((f"{path}.{kind}{i}", each) for i, each in enumerate(value))
        return found | {end: leaf for way, each in inner for end, leaf in leaves(each, way).items()}
    return {path: value}


def nested(ends: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The inverse of `leaves`, for results of methods."""
    methods: dict[str, dict[int, dict[tuple[str, ...], Any]]] = {}
    for path, leaf in ends.items():
        name, number, *way = path.split(".")
        methods.setdefault(name, {}).setdefault(int(number), {})[tuple(way)] = leaf
    return {name: [_nested(calls[i]) for i in sorted(calls)] for name, calls in methods.items()}


def _nested(ends: Mapping[tuple[str, ...], Any]) -> Any:
    if () in ends:
        return ends[()]
    kind = next(iter(ends))[0][0]
    parts: dict[int, dict[tuple[str, ...], Any]] = {}
    for (first, *rest), leaf in ends.items():
        if first[1:]:
            parts.setdefault(int(first[1:]), {})[tuple(rest)] = leaf
    values = [_nested(parts[i]) for i in sorted(parts)]
    return tuple(values) if kind == "t" else values


def find_rules(one: Results, other: Results, both: Results | None) -> dict[str, str]:
    """The rule of every value, from what was prepared for a prompt, for a longer one, and for the two together (None
    where the pipeline takes one at a time: then only equal shapes share a call).
    """
    a, b, ab = leaves(one), leaves(other), leaves(both) if both is not None else {}
    lengths = {path: axis for path in a if (axis := _other_axis(a[path], b.get(path))) is not None}
    return {path: _rule(path, a, b, ab, lengths) for path in a}


def _rule(
    path: str, a: Mapping[str, Any], b: Mapping[str, Any], ab: Mapping[str, Any], lengths: Mapping[str, int]
) -> str:
    one, other, both = a[path], b.get(path), ab.get(path)
    if one is None and isinstance(both, Tensor):
        for beside, axis in lengths.items():
            own = [int(found[beside].shape[axis]) for found in (a, b)]
            if [int(row.sum()) for row in both] == own and path.split(".")[:2] == beside.split(".")[:2]:
                return f"{MASK}:{beside}:{axis}:{str(both.dtype).removeprefix('torch.')}"
    if not isinstance(one, Tensor):
        return PLAIN
    if not isinstance(other, Tensor) or not isinstance(both, Tensor) or one.ndim != other.ndim:
        return ROWS if one.ndim and len(one) == 1 else SAME
    last = path.rsplit(".", 1)[-1]
    second = f"{path.removesuffix('l0')}l1"
    if last == "l0" and second in ab and second not in a and _near(both, one) and _near(ab[second], other):
        return LISTED
    if both.shape == other.shape and _near(both, other):
        return SAME if one.shape == other.shape else LONGEST
    if len(one) == 1 and len(both) == 2:
        axis = lengths.get(path)
        if axis is None and both.shape[1:] == one.shape[1:]:
            return ROWS
        if axis and _near(both, torch.cat([_filled(one, both.shape), _filled(other, both.shape)])):
            return f"{PADDED}:{axis}"
    return ROWS if one.ndim and len(one) == 1 else SAME


def _other_axis(one: Any, other: Any) -> int | None:
    """The one axis besides the first along which two values have another length."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.ndim == other.ndim):
        return None
    axes = [i for i in range(1, one.ndim) if one.shape[i] != other.shape[i]]
    return axes[0] if len(axes) == 1 else None


def _near(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return bool((found == expected).all())
    off = (found.float() - expected.float()).norm()
    return bool(off <= 0.1 * expected.float().norm() + 1e-6)


def _filled(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros behind the values, up to a row of that shape."""
    missing = [size - own for size, own in zip(shape[1:], value.shape[1:], strict=True)]
    return functional.pad(value, [side for size in reversed(missing) for side in (0, size)])


def to_tensors(results: Results, rules: Mapping[str, str]) -> dict[str, Tensor]:
    """What was prepared for one prompt, to be kept: rows without their first axis, plain values as their JSON."""
    found = leaves(results)
    if found.keys() != rules.keys():
        unlike = sorted(found.keys() ^ rules.keys())
        raise RuntimeError(f"other values were prepared for one prompt than for another: {', '.join(unlike)}")
    kept: dict[str, Tensor] = {}
    for path, value in found.items():
        rule, *more = rules[path].split(":")
        if rule == MASK:
            beside, axis, dtype = more
            value = torch.ones(found[beside].shape[int(axis)], dtype=getattr(torch, dtype))
        elif rule == PADDED or (rule == ROWS and isinstance(value, Tensor)):
            value, rule = value[0], rule if rule == ROWS else f"{PADDED}:{int(more[0]) - 1}"
        elif not isinstance(value, Tensor):
            value, rule = torch.frombuffer(bytearray(_plain(path, value)), dtype=torch.uint8), PLAIN
        kept[f"{path}|{rule}"] = value
    return kept


def _plain(path: str, value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError:
        problem = f"what {path.partition('.')[0]} returns cannot be kept (a {type(value).__name__})"
        raise InputError("model.path", None, problem, "tensors, numbers and texts") from None


KIND = "kind of "
"""What a name in a form begins with that tells prompts of different values apart."""
Form = dict[str, tuple[int, ...] | str]
"""The shape that each of a prompt's values has in a call, or a plain value's JSON."""


def collate(rows: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], list[Form]]:
    """Several prompts' values in tensors whose first axis is the prompt, filled up to one shape; and the true forms."""
    names = dict.fromkeys(name for row in rows for name in row)
    tensors: dict[str, Tensor] = {}
    forms: list[Form] = [{} for _ in rows]
    for name in names:
        path, rule = name.rsplit("|", 1)
        having = {i: row[name] for i, row in enumerate(rows) if name in row}
        if rule == PLAIN:
            for i, value in having.items():
                forms[i][name] = bytes(value.tolist()).decode()
            continue
        if rule == LONGEST:
            longest = max(having.values(), key=lambda value: value.numel())
            having = dict.fromkeys(having, longest)
        most = tuple(map(max, zip(*(value.shape for value in having.values()), strict=True)))
        first = next(iter(having.values()))
        together = first.new_zeros(len(rows), *most)
        for i, value in having.items():
            together[i][tuple(map(slice, value.shape))] = value
            forms[i][name] = most if rule == MASK or rule.startswith(PADDED) else tuple(value.shape)
        if rule == MASK and bool(together.all()):
            for i in having:
                del forms[i][name]
                forms[i][f"{path}|{PLAIN}"] = "null"
            continue
        if rule == SAME:  # a table that is another for some prompts stands for none but theirs
            kinds: list[Tensor] = []
            for i, value in having.items():
                kind = next((k for k, one in enumerate(kinds) if torch.equal(one, value)), len(kinds))
                kinds += [value] * (kind == len(kinds))
                forms[i][f"{KIND}{name}"] = str(kind)
        tensors[name] = together
    return tensors, forms


def signature(form: Form) -> tuple[tuple[str, tuple[int, ...] | str], ...]:
    """Prompts of one signature can share a call."""
    return tuple(sorted((name, how) for name, how in form.items() if not name.endswith(f"|{LISTED}")))


def restore(tensors: Mapping[str, Tensor], forms: Sequence[Form], dtype: torch.dtype) -> dict[str, list[Any]]:
    """The results that the pipeline's methods would have returned for these rows, of one signature; floating-point
    numbers in the model's precision.
    """
    ends: dict[str, Any] = {}
    for name, form in forms[0].items():
        path, rule = name.rsplit("|", 1)
        if name.startswith(KIND):
            continue
        if isinstance(form, str):
            ends[path] = json.loads(form)
            continue
        rows = tensors[name]
        if rows.is_floating_point():
            rows = rows.to(dtype)
        if rule == LISTED:
            shapes = [each[name] for each in forms]
            ends |= {f"{path.removesuffix('l0')}l{i}": _cut(rows[i], shape) for i, shape in enumerate(shapes)}
        elif rule in (SAME, LONGEST):
            ends[path] = _cut(rows[0], form)
        else:
            ends[path] = rows if tuple(rows.shape[1:]) == form else rows[(slice(None), *map(slice, form))]
    return nested(ends)


def _cut(value: Tensor, shape: tuple[int, ...] | str) -> Tensor:
    return value if tuple(value.shape) == shape else value[tuple(slice(int(size)) for size in shape)]
