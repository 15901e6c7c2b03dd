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
Ids begin at a number that the client draws for each request, below 2^31: an answer that has other ids, such as a cached
one or another request's, is none. A server that answers the ids it was given needs nothing else.

Anything else is an error, `{"error": "one line"}`: 400 malformed, 401 wrong token, 408 sent too slowly, 411 in
chunks, 413 too large, 421 not for this machine, 500 the reward failed, 503 busy. 408, 429 and 5xx are worth another
attempt; the rest are not.

Where the server has a token, every request has the header `Authorization: Bearer <token>`, which is looked at before
anything else is read. Without one the server answers only where the request's `Host` is this machine's own
(`localhost`, `127.0.0.1`, `[::1]`): a web page can have its own name point here, but cannot choose another `Host`.

This server's limits, besides those it names: a picture has 2^23 pixels at most, all of a request 2^26. A video has
2^23, or 4 for each byte of its base64 where that is more; all videos of a request have 4096 frames. A picture's file
has 8 bytes a pixel and 64 KiB. JSON is nested 100 deep at most, and has half a million brackets, commas and colons
outside its strings, and half a million strings. A string with letters besides ASCII, escaped or not, has 1 MiB; all
that are not escaped have half a MiB. Requests have a `Content-Length`, and a head of some 16 KiB that must come within
5 s. A request must come within 60 s, and each further 256 KiB of it within 5 s. What is large is scored in several
calls: a score must not depend on the others.
"""

import asyncio
import ctypes
import hmac
import logging
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from ..core.errors import InputError
from ..tools.hosts import is_loopback
from ..tools.web import admit, serve_at
from .base import RAISED, Reward, describe_failure
from .inspect import usable
from .intake import Bodies, Budget, refuse
from .items import Item, calls, read_items, unpack

log = logging.getLogger(__name__)

M_MMAP_THRESHOLD = -3
"""Of malloc.h."""

MAX_UNPACKED_PIXELS = 2**24
"""Pixels that are unpacked at a time, for all requests together, or one call's where it has more."""
MAX_CONCURRENT, MAX_WAITING, DECODERS = 4, 256, 4
"""Requests that are unpacked or scored, and all that are here; more are turned away as busy. Threads that unpack."""


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
    if not token and not is_loopback(host):
        cure = "a token in $ARBORL_REWARD_TOKEN (the same value for the run)"
        raise InputError("--host", host, "would serve anyone who can reach it", cure=cure)
    _return_memory()
    guarded = "token required" if token else "no token"
    served = app(reward, name, token, max_items, max_bytes, device)
    serve_at(host, port, served, lambda at: print(f"serving {name} at {at} ({guarded})", flush=True))


def _return_memory() -> None:
    """Pictures' memory goes back when they go: glibc would keep blocks of up to 32 MB, of each thread its own."""
    with suppress(OSError, AttributeError):  # another system's, or another library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


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
    bodies, unpacked = Bodies(), Budget(MAX_UNPACKED_PIXELS)
    slots, parsing, turn, line = asyncio.Semaphore(MAX_CONCURRENT), asyncio.Lock(), asyncio.Lock(), [0]
    decoders = ThreadPoolExecutor(DECODERS)

    async def about(request: Request) -> Response:
        await _authorise(request, token)
        return JSONResponse({"arborl": 1, "reward": name, "max_items": max_items, "max_bytes": max_bytes})

    async def score(request: Request) -> Response:
        await _authorise(request, token)
        # A web page can make a browser post anything but JSON to any address, this one too.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            await refuse(request, 400, "Content-Type must be application/json")
        if line[0] >= MAX_WAITING:
            await refuse(request, 503, "busy")
        line[0] += 1
        try:
            async with bodies.read(request, max_bytes) as body, slots:
                async with parsing:  # which needs a copy or two
                    items = await asyncio.to_thread(read_items, body, max_items)
                del body  # the items hold as much
                return await answer(request, items)
        finally:
            line[0] -= 1

    async def answer(request: Request, items: list[Item]) -> Response:
        fields = list(dict.fromkeys(field for item in items for field in item.columns))
        scores: dict[int, Any] = {}
        for call in calls(items):
            async with unpacked.hold(sum(item.pixels for item in call)):
                pictures = await asyncio.to_thread(unpack, call, decoders)
                async with turn:
                    if await request.is_disconnected():
                        return Response(status_code=408)  # nobody waits for these scores
                    scores |= await asyncio.to_thread(_scores, reward, call, pictures, fields, place)
        if len({tuple(score) if isinstance(score, dict) else None for score in scores.values()}) > 1:
            raise HTTPException(500, "the reward failed: its parts differ with the picture")
        return JSONResponse({"version": 1, "scores": [{"id": item.id, "score": scores[item.id]} for item in items]})

    return Starlette(
        routes=[Route("/", about, methods=["GET"]), Route("/score", score, methods=["POST"])],
        exception_handlers={HTTPException: _error_response, ClientDisconnect: _error_response},
    )


async def _error_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return Response(status_code=400)  # the client is gone
    line = "".join(c if c.isprintable() else " " for c in error.detail)
    return JSONResponse({"error": line[:1000]}, error.status_code, {"Connection": "close"})


async def _authorise(request: Request, token: str | None) -> None:
    given = request.headers.get("authorization", "").encode()
    if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        await refuse(request, 401, "wrong token" if given else "a token is required")
    host = request.headers.get("host", "")
    if not token and not is_loopback(re.sub(r":\d*$", "", host)):
        await refuse(request, 421, "without a token, only this machine's own name is answered to")
    admit(request)


@torch.no_grad()
def _scores(
    reward: Reward, items: Sequence[Item], pictures: list[Tensor], fields: Sequence[str], device: torch.device
) -> dict[int, Any]:
    """Scores by id. `pictures` is emptied: as floats they take four times the memory, and the bytes need not stay."""
    try:
        images = torch.empty((len(items), *items[0].shape), dtype=torch.float32, device=device)
        for i in reversed(range(len(items))):
            images[i] = pictures.pop().to(device)
        found = _called(reward, images.div_(255), items, fields)
    except RAISED as error:
        log.exception("the reward failed")
        raise HTTPException(500, f"the reward failed: {describe_failure(error)}") from None
    return {item.id: score for item, score in zip(items, found, strict=True)}


def _called(reward: Reward, images: Tensor, items: Sequence[Item], fields: Sequence[str]) -> list[Any]:
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
