"""The pictures and videos of a request to a reward server: looked over before they are unpacked, a call's at a time."""

import base64
import io
import math
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from starlette.exceptions import HTTPException
from torch import Tensor

from ..tools.strict_json import strict_json

MAX_PICTURE_PIXELS, MAX_REQUEST_PIXELS = 2**23, 2**26
"""The largest picture (4K has 2^23), and all those of a request together: a small file may hold a huge picture."""
MAX_FRAMES = 4096
"""Of all videos of a request: each becomes an object or two."""
MAX_BYTES_PER_PIXEL, MAX_BYTES_BESIDES = 8, 2**16
"""Of a picture's file, and what it may have besides: most that are not compressed have 3 or 4."""
MAX_PIXELS_PER_BYTE = 4
"""Of a video that is larger than that; a PNG that is not compressed has 1 for each byte of its base64."""
MAX_CALL_PIXELS = 2**23
"""Pixels that the reward is given in one call, but for a single picture or video that has more: 100 MB as floats."""
MAX_PROMPT_LENGTH = 100_000
"""Characters of a prompt."""
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Pictures of 8 bits a channel or less, which become RGB without loss (but for transparency)."""


@dataclass(frozen=True)
class Item:
    """A picture, or a video, as it came; its size is what its files claim, and is held to when they are unpacked."""

    id: int
    prompt: str
    frames: list[str]
    is_video: bool
    size: tuple[int, int]  # height and width
    columns: dict[str, object]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.frames), 3, *self.size) if self.is_video else (3, *self.size)

    @property
    def pixels(self) -> int:
        return math.prod(self.size) * len(self.frames)


def read_items(body: bytes | bytearray, max_items: int) -> list[Item]:
    """The pictures of a request; an error that says what is wrong with it."""
    try:
        request = strict_json(body)
    except ValueError as error:
        raise HTTPException(400, f"the request cannot be read: {error}") from None
    if not isinstance(request, dict) or type(request.get("version")) is not int or request["version"] != 1:
        raise HTTPException(400, "the request is not of version 1")
    items = request.get("items")
    if not isinstance(items, list) or not items:
        raise HTTPException(400, "the request has no list of items")
    if len(items) > max_items:
        raise HTTPException(413, f"the request has {len(items)} items, and {max_items} are the most")
    found: list[Item] = []
    left = MAX_REQUEST_PIXELS
    videos = [item.get("frames") for item in items if isinstance(item, dict)]
    if sum(len(frames) for frames in videos if isinstance(frames, list)) > MAX_FRAMES:
        raise HTTPException(413, f"the request has more than {MAX_FRAMES} frames")
    for place, item in enumerate(items):
        try:
            found.append(_item(item, left))
        except ValueError as error:
            raise HTTPException(400, f"item {place}: {error}") from None
        left -= found[-1].pixels
    if len({item.id for item in found}) < len(found):
        raise HTTPException(400, "an id comes twice")
    return found


def _item(item: Any, left: int) -> Item:
    if not isinstance(item, dict):
        raise ValueError("is not an object")
    prompt, columns, number = item.get("prompt"), item.get("columns", {}), item.get("id")
    if type(number) is not int:
        raise ValueError("has no id")
    if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT_LENGTH:
        raise ValueError(f"has no prompt of at most {MAX_PROMPT_LENGTH} characters")
    if not isinstance(columns, dict):
        raise ValueError("its columns are not an object")
    if ("png" in item) == ("frames" in item):
        raise ValueError('has neither "png" nor "frames", or both')
    is_video = "frames" in item
    frames = item["frames"] if is_video else [item["png"]]
    if not isinstance(frames, list) or not frames:
        raise ValueError("its frames are not a list")
    sizes: set[tuple[int, int]] = set()
    pixels = 0
    for frame in frames:
        size = _png_size(frame)
        pixels += math.prod(size)
        if 3 * len(frame) > 4 * (MAX_BYTES_PER_PIXEL * math.prod(size) + MAX_BYTES_BESIDES):
            raise ValueError("a picture's file has much else than its pixels")
        if math.prod(size) > MAX_PICTURE_PIXELS or pixels > left:
            raise HTTPException(413, "a picture, or all of a request together, has too many pixels")
        sizes.add(size)
    if len(sizes) > 1:
        raise ValueError("its frames differ in size")
    if pixels > max(MAX_PICTURE_PIXELS, MAX_PIXELS_PER_BYTE * sum(map(len, frames))):
        raise HTTPException(413, "a video unpacks to too much for its size")
    return Item(number, prompt, frames, is_video, sizes.pop(), columns)


def _png_size(text: object) -> tuple[int, int]:
    """The height and width that a PNG claims to have, from its beginning alone."""
    if not isinstance(text, str):
        raise ValueError("a picture is not base64")
    try:
        start = base64.b64decode(text[:32], validate=True)
    except ValueError:
        raise ValueError("a picture is not base64") from None
    if len(start) < 24 or start[:8] != b"\x89PNG\r\n\x1a\n" or start[12:16] != b"IHDR":
        raise ValueError("a picture is not a sound PNG")
    width, height = struct.unpack(">II", start[16:24])
    if not width or not height:
        raise ValueError("a picture is not a sound PNG (it has no pixels)")
    return height, width


def read_png(text: object, left: int) -> Tensor:
    """A picture's 3×H×W bytes. Its size is looked at before anything is unpacked, and must fit into `left` pixels."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True)) if isinstance(text, str) else None
    except ValueError:
        file = None
    if file is None:
        raise ValueError("a picture is not base64")
    try:
        with Image.open(file, formats=["PNG"]) as picture:
            if math.prod(picture.size) > min(MAX_PICTURE_PIXELS, left):
                raise HTTPException(413, "a picture, or all of a request together, has too many pixels")
            if picture.mode not in PNG_MODES:
                raise ValueError("more than 8 bits a channel")
            pixels = np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))
    except Image.DecompressionBombError:
        raise HTTPException(413, "a picture has too many pixels") from None
    except (OSError, SyntaxError, ValueError, EOFError, LookupError, struct.error, zlib.error) as error:
        raise ValueError(f"a picture is not a sound PNG ({error})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def calls(items: Sequence[Item]) -> Iterator[list[Item]]:
    """What the reward is called with: pictures of one size, up to `MAX_CALL_PIXELS`."""
    alike: dict[tuple[int, ...], list[Item]] = defaultdict(list)
    for item in items:
        alike[item.shape].append(item)
    for group in alike.values():
        each = max(1, MAX_CALL_PIXELS // group[0].pixels)
        yield from (group[i : i + each] for i in range(0, len(group), each))


def unpack(items: Sequence[Item], decoders: ThreadPoolExecutor) -> list[Tensor]:
    """The items' pixels: 8 bits; channels first, after the frames if it is a video."""
    most = math.prod(items[0].size)
    texts = [frame for item in items for frame in item.frames]
    frames = iter(decoders.map(read_png, texts, [most] * len(texts)))
    found: list[Tensor] = []
    for item in items:
        try:
            pictures = [next(frames) for _ in item.frames]
            if any(picture.shape[1:] != item.size for picture in pictures):
                raise ValueError("a picture is not a sound PNG (it claims two sizes)")
        except ValueError as error:
            raise HTTPException(400, f"the item with id {item.id}: {error}") from None
        found.append(torch.stack(pictures) if item.is_video else pictures[0])
    return found
