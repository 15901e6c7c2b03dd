"""Serve a reward over HTTP, for runs on other machines or rewards with other needs. The client is `remote`.

The protocol, version 1. Texts are JSON in UTF-8; `{url}` may have a path.

`GET {url}/` names the reward, and shows that the server lives: `{"arborl": 1, "reward": "<name>", "max_items": 64,
"max_bytes": 268435456}`, the limits being those of one request.

`POST {url}/score`, `Content-Type: application/json`, scores some pictures:
`{"version": 1, "items": [{"id": 0, "prompt": "…", "png": "<base64>", "columns": {…}}, …]}`. Pictures are 8-bit RGB PNG:
256 levels, as in a saved picture. A video has `"frames": ["<base64>", …]`, all of one size, in place of `"png"`.
Ids are integers, each once; `columns` holds the prompt's further fields, any JSON.

The answer is 200 and `{"version": 1, "scores": [{"id": 0, "score": 0.27}, …]}`: every id once, in any order. A score is
a finite number, null for "no score", or an object of such, the named parts of a score, the same names in all items.

Anything else is an error, `{"error": "one line"}`: 400 malformed, 401 wrong token, 408 sent too slowly, 413 too large,
500 the reward failed, 503 busy. 408, 429 and 5xx are worth another attempt; the rest are not.

Where the server has a token, every request has the header `Authorization: Bearer <token>`.
"""

import asyncio
import base64
import hmac
import io
import ipaddress
import math
import struct
import traceback
import zlib
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from ..core.errors import InputError
from ..tools.web import serve_at
from .base import Reward
from .client import strict_json
from .inspect import usable

MAX_PICTURE_PIXELS, MAX_REQUEST_PIXELS = 4096 * 4096, 2**28
"""The largest picture, and all those of a request together: a small file may hold a huge picture."""
MAX_PROMPT_LENGTH = 100_000
"""Characters of a prompt."""
MAX_CONCURRENT, MAX_WAITING = 4, 256
"""Requests held in memory, and those that wait unread; more are turned away as busy."""
READ_SECONDS = 60.0
"""In which a request must have arrived."""
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Pictures of 8 bits a channel or less, which become RGB without loss (but for transparency)."""


@dataclass(frozen=True)
class Item:
    id: int
    prompt: str
    pixels: Tensor  # 8 bits; channels first, after the frames if it is a video
    columns: dict[str, object]


def serve(
    reward: Reward,
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    max_items: int = 64,
    max_bytes: int = 256 * 2**20,
    device: torch.device | str | None = None,
) -> None:
    """Serve until interrupted. Port 0 takes a free one; the line that is printed says which."""
    if not token and not _is_loopback(host):
        problem, allowed = (
            "would serve anyone who can reach it",
            "set $ARBORL_REWARD_TOKEN (the same value for the run)",
        )
        raise InputError("--host", host, problem, allowed)
    guarded = "token required" if token else "no token"
    served = app(reward, name, token, max_items, max_bytes, device)
    serve_at(host, port, served, lambda at: print(f"serving {name} at {at} ({guarded})", flush=True))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def app(
    reward: Reward,
    name: str,
    token: str | None,
    max_items: int = 64,
    max_bytes: int = 256 * 2**20,
    device: torch.device | str | None = None,
) -> Starlette:
    """The server's two routes. The reward is called in a thread, once at a time; it gets its pictures on `device`."""
    place = usable(device)
    slots, turn, line = asyncio.Semaphore(MAX_CONCURRENT), asyncio.Lock(), [0]

    async def about(request: Request) -> Response:
        await _authorise(request, token, max_bytes)
        return JSONResponse({"arborl": 1, "reward": name, "max_items": max_items, "max_bytes": max_bytes})

    async def score(request: Request) -> Response:
        await _authorise(request, token, max_bytes)
        # A web page can make a browser post anything but JSON to any address, this one too.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            await _refuse(request, 400, "Content-Type must be application/json", max_bytes)
        if line[0] >= MAX_WAITING:
            await _refuse(request, 503, "busy", max_bytes)
        line[0] += 1
        try:
            async with slots:
                items = await asyncio.to_thread(read_items, await _body(request, max_bytes), max_items)
                async with turn:
                    if await request.is_disconnected():
                        return Response(status_code=408)  # nobody waits for these scores
                    return JSONResponse(await asyncio.to_thread(answer, reward, items, place))
        finally:
            line[0] -= 1

    return Starlette(
        routes=[Route("/", about, methods=["GET"]), Route("/score", score, methods=["POST"])],
        exception_handlers={HTTPException: _error_response, ClientDisconnect: _error_response},
    )


async def _error_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return Response(status_code=400)  # the client is gone
    line = "".join(c if c.isprintable() else " " for c in error.detail)
    return JSONResponse({"error": line[:1000]}, error.status_code)


async def _authorise(request: Request, token: str | None, max_bytes: int) -> None:
    given = request.headers.get("authorization", "").encode()
    if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        await _refuse(request, 401, "wrong token" if given else "a token is required", max_bytes)


async def _refuse(request: Request, status: int, problem: str, max_bytes: int) -> None:
    """An error, told once the request is through: a client that is cut off while sending may not see the answer."""
    with suppress(HTTPException):
        await _body(request, max_bytes, keep=False)
    raise HTTPException(status, problem)


async def _body(request: Request, most: int, keep: bool = True) -> bytes:
    """A request's body, if it is not too long. Of one that is, as much again is read and dropped."""
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if keep and size <= most:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                if size > 2 * most:
                    break
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {READ_SECONDS:g} s") from None
    if size > most:
        raise HTTPException(413, f"the request has more than {most} bytes")
    return b"".join(chunks)


def read_items(body: bytes, max_items: int) -> list[Item]:
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
    for place, item in enumerate(items):
        try:
            found.append(_item(item, left))
        except ValueError as error:
            raise HTTPException(400, f"item {place}: {error}") from None
        left -= found[-1].pixels.numel() // 3
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
    if "png" in item:
        return Item(number, prompt, read_png(item["png"], left), columns)
    if not isinstance(item["frames"], list) or not item["frames"]:
        raise ValueError("its frames are not a list")
    frames: list[Tensor] = []
    for text in item["frames"]:
        frames.append(read_png(text, left))
        left -= frames[-1].numel() // 3
        if frames[-1].shape != frames[0].shape:
            raise ValueError("its frames differ in size")
    return Item(number, prompt, torch.stack(frames), columns)


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
            pixels = np.array(picture.convert("RGB"))
    except Image.DecompressionBombError:
        raise HTTPException(413, "a picture has too many pixels") from None
    except (OSError, SyntaxError, ValueError, EOFError, LookupError, struct.error, zlib.error) as error:
        raise ValueError(f"a picture is not a sound PNG ({error})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def answer(reward: Reward, items: list[Item], device: torch.device) -> dict[str, Any]:
    """The reward's scores as the protocol has them. Pictures of one size are scored in one call."""
    alike: dict[torch.Size, list[Item]] = defaultdict(list)
    for item in items:
        alike[item.pixels.shape].append(item)
    fields = list(dict.fromkeys(field for item in items for field in item.columns))
    scores: dict[int, object] = {}
    try:
        for group in alike.values():
            found = _scores(reward, group, fields, device)
            scores |= {item.id: score for item, score in zip(group, found, strict=True)}
        if len({tuple(score) if isinstance(score, dict) else None for score in scores.values()}) > 1:
            raise ValueError("the reward's parts differ with the size of the picture")
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever it is, the client gets a 500 and the next is served)
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        raise HTTPException(500, f"the reward failed: {type(error).__name__}: {first}") from None
    return {"version": 1, "scores": [{"id": item.id, "score": scores[item.id]} for item in items]}


@torch.no_grad()
def _scores(reward: Reward, items: list[Item], fields: list[str], device: torch.device) -> list[Any]:
    images = torch.stack([item.pixels for item in items]).to(device).float() / 255
    columns = {field: [item.columns.get(field) for item in items] for field in fields}
    found = reward(images, [item.prompt for item in items], columns)
    if not isinstance(found, Mapping):
        return _numbers(found, len(items))
    if not found or not all(isinstance(part, str) and part for part in found):
        raise ValueError("the reward returned a dict without named parts")
    parts = {part: _numbers(scores, len(items)) for part, scores in found.items()}
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]


def _numbers(scores: object, count: int) -> list[float | None]:
    if not isinstance(scores, Tensor) or scores.shape != (count,) or not scores.dtype.is_floating_point:
        shown = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"the reward returned {shown}, not a float tensor of shape ({count},)")
    values = scores.float().tolist()
    if any(math.isinf(value) for value in values):
        raise ValueError("the reward returned an infinite score")
    return [None if math.isnan(value) else value for value in values]
