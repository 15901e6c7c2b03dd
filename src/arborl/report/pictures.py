"""Pictures inside a page, compressed without visible loss."""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from PIL import Image

T = TypeVar("T")
QUALITY, EXACT = 82, 96
"""Of WebP; and the longest side, in pixels, of pictures that are kept to the last bit."""


def as_webp(picture: Image.Image) -> str:
    """A picture as a data: address."""
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=max(picture.size) <= EXACT, quality=QUALITY, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most so many of some items, evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def evenly_within(items: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """As many of some items as fit into `most` bytes of JSON, evenly, but two at least."""
    size = {id(item): len(json.dumps(item)) for item in items}
    for count in range(len(items), 2, -1):
        chosen = evenly(items, count)
        if sum(size[id(item)] for item in chosen) <= most:
            return chosen
    return evenly(items, 2)
