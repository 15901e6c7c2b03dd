"""Bodies of requests to a reward server, under limits of time and memory that all requests share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request

READ_SECONDS, STALL_SECONDS = 60.0, 5.0
"""In which a request must have arrived, and each further quarter of a MiB of it."""
SMALL_BYTES = 2**18
"""A request's bytes that are read at once; for more it waits until there is room."""
BODY_BYTES = 2**27
"""Of all requests together, besides what is small; and one may have more alone."""
REFUSE_SECONDS, REFUSE_BYTES = 5.0, 2**24
"""How long, and how much, of a request that is refused is read and dropped."""


class Budget:
    """So much of something, given out in the order of asking. Who asks for more than there is gets all of it."""

    def __init__(self, whole: int) -> None:
        self.whole = self.left = whole
        self._line, self._given_back = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def hold(self, amount: int) -> AsyncIterator[None]:
        amount = min(amount, self.whole)
        async with self._line:
            while self.left < amount:
                self._given_back.clear()
                await self._given_back.wait()
            self.left -= amount
        try:
            yield
        finally:
            self.left += amount
            self._given_back.set()


class Bodies:
    """The bodies of all requests, as far as they are here.

    What counts is what has come, not what a client says that it will send: one that stops holds up nobody. When there
    is no more room, what is here whole is scored first; then the oldest that is on its way may go on alone.
    """

    def __init__(self) -> None:
        self._coming, self._here = dict[object, int](), dict[object, int]()  # bytes of large ones, oldest first
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def read(self, request: Request, most: int) -> AsyncIterator[bytearray]:
        """A request's body, if it is not too long, whose memory is taken until the block ends."""
        key = object()
        try:
            yield await self._read(request, most, key)  # and not kept here, so that it goes when it was taken apart
        finally:
            self._coming.pop(key, None)
            self._here.pop(key, None)
            self._changed.set()

    async def _read(self, request: Request, most: int, key: object) -> bytearray:
        claim = request.headers.get("content-length", "")
        if claim.isdecimal() and int(claim) > most:
            await refuse(request, 413, f"the request has more than {most} bytes")
        now = asyncio.get_running_loop().time
        until, stall = now() + READ_SECONDS, now() + STALL_SECONDS
        body, seen = bytearray(), 0
        try:
            async with asyncio.timeout_at(min(until, stall)) as clock:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        break
                    if len(body) > SMALL_BYTES:
                        self._coming[key] = len(body)
                        clock.reschedule(None)  # it is not the client that is slow
                        asked = now()
                        await self._room(key)
                        until, stall = until + now() - asked, stall + now() - asked
                    if len(body) - seen > SMALL_BYTES:
                        seen, stall = len(body), now() + STALL_SECONDS
                    clock.reschedule(min(until, stall))
        except TimeoutError:
            problem = f"the request did not arrive within {READ_SECONDS:g} s, or stood still for {STALL_SECONDS:g} s"
            raise HTTPException(408, problem) from None
        if len(body) > most:
            await refuse(request, 413, f"the request has more than {most} bytes")
        if key in self._coming:
            self._here[key] = self._coming.pop(key)
            self._changed.set()
        return body

    async def _room(self, key: object) -> None:
        while sum(self._coming.values()) + sum(self._here.values()) > BODY_BYTES:
            if not self._here and next(iter(self._coming)) is key:
                return
            self._changed.clear()
            await self._changed.wait()


async def refuse(request: Request, status: int, problem: str) -> NoReturn:
    """An error, told once the request is through: a client that is cut off while sending may not see the answer."""
    size = 0
    with suppress(TimeoutError, RuntimeError):  # RuntimeError: its stream was read by now
        async with asyncio.timeout(REFUSE_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > REFUSE_BYTES:
                    break
    raise HTTPException(status, problem)
