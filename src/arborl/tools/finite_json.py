"""JSON whose numbers are numbers, as a run's files hold it."""

import json
import math
from typing import Any


def finite_json(content: str | bytes) -> Any:
    """JSON without NaN and without numbers of more than 64 bits; for all else one error, `ValueError`."""
    try:
        return json.loads(content, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number")
    return number


def _whole(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) >= 2**63:
        raise ValueError("a number of more than 64 bits")
    return number
