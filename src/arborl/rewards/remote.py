"""A reward that servers compute: pictures go out as PNG over HTTP, scores come back. `serve` writes up the protocol.

A picture that no server scores is NaN, never an invented score, and the run warns of the failure in one line.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ..config.schema import RewardConfig
from ..core.errors import InputError
from .base import Columns, Failures, RewardFailed
from .client import PROBE_SECONDS, Refused, Server, png
from .preprocessing import as_rgb

RETRY_SECONDS = 1.0
"""Seconds before a server is asked again after its first failure; doubled at each further one in a row."""
MAX_TEXT_BYTES = 16 * 2**10
"""Bytes of a request that are allowed for a picture's prompt and columns, where a server limits its size."""


class RemoteReward:
    """Called as any reward; the servers of `rewards.<name>.url` share its pictures, `batch_size` at a time."""

    is_remote = True

    def __init__(self, name: str, config: RewardConfig) -> None:
        self.name, self.config = name, config
        token = _token(f"rewards.{name}.token", config.token)
        urls = _urls(f"rewards.{name}.url", config.url)
        self.servers = [Server(url, token, config.timeout, config.retries) for url in urls]
        self.parts: tuple[str, ...] = ()  # as the first scores had them; ("",) of a reward without parts
        self.failures: list[Failures] = []
        self.round: _Round | None = None

    def check(self) -> None:
        """Every server is there, takes the token and is one of rewards; else an error."""
        for server in self.servers:
            try:
                server.greet(self.config.timeout)
            except RewardFailed as error:
                problem, cure = str(error), None
                if isinstance(error, Refused) and error.status in (401, 403):
                    problem, cure = "refuses the token", f"the server's token in ${self.config.token}"
                elif isinstance(error, Refused) and error.status >= 400:
                    problem = f"is not a reward server ({problem})"
                raise InputError(f"rewards.{self.name}.url", server.url, problem, cure=cure) from None

    def take_failures(self) -> list[Failures]:
        """Failures since the last call of this, request by request. A call that raises leaves nothing here."""
        taken, self.failures = self.failures, []
        return taken

    def cancel(self) -> None:
        """Nobody waits for the answer any more: requests that are out are the last."""
        if self.round:
            self.round.stop()

    def __call__(self, images: Tensor, prompts: Sequence[str], columns: Columns) -> Tensor | dict[str, Tensor]:
        """Scores, or named parts; NaN for what no server scored, and for pictures that are not finite.

        `RewardFailed` where nothing at all was scored.
        """
        images = as_rgb(images)
        sound = images.isfinite().flatten(1).all(1).nonzero().flatten().tolist()
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(Server.learn_limits, self.servers))
            size = self._size(images[0].numel()) if sound else 1
            pieces = [_Piece(sound[i : i + size]) for i in range(0, len(sound), size)]
            self.round = shared = _Round(pieces, self.servers, self.config.retries)
            work = [pool.submit(self._work, server, shared, images, prompts, columns) for server in self.servers]
            try:
                for worker in work:
                    worker.result()
            finally:
                shared.stop()
        failed = [piece for piece in pieces if piece.scores is None]
        if failed and len(failed) == len(pieces):
            raise RewardFailed(failed[-1].why)
        self.failures += [Failures(len(piece.rows), piece.why) for piece in failed]
        found = {part: torch.full((len(images),), torch.nan) for part in self.parts or ("",)}
        for piece in pieces:
            for part, scores in (piece.scores or {}).items():
                found[part][piece.rows] = torch.tensor(scores)
        return found.get("", found)

    def _size(self, numbers: int) -> int:
        """Pictures a request: as configured, or less where a server takes fewer.

        A PNG is little more than a byte a number, and base64 makes 4 of 3.
        """
        each = numbers * 3 // 2 + MAX_TEXT_BYTES
        limits = [limits for server in self.servers if (limits := server.limits)]
        return min([self.config.batch_size, *(min(items, max(1, size // each)) for items, size in limits)])

    def _work(self, server: Server, shared: "_Round", images: Tensor, prompts: Sequence[str], columns: Columns) -> None:
        """One server's share: it takes a piece whenever it is free."""
        try:
            while piece := shared.take(server):
                try:
                    if server.down:
                        server.greet(min(PROBE_SECONDS, self.config.timeout))
                except RewardFailed as error:
                    shared.leave_out(server, piece, error)
                    continue
                try:
                    items = self._items(piece.rows, images, prompts, columns)
                    if shared.left <= 0:  # interrupted meanwhile
                        return
                    scores = server.score(items)
                    with shared.changed:
                        shared.done(server, piece, self._same_parts(scores))
                except RewardFailed as error:
                    shared.failed(server, piece, error)
        except BaseException:
            shared.stop()  # or the others would wait for this piece
            raise

    def _items(
        self, rows: Sequence[int], images: Tensor, prompts: Sequence[str], columns: Columns
    ) -> list[dict[str, Any]]:
        pixels = (images[rows].float().clamp(0, 1) * 255).round().to(torch.uint8).movedim(-3, -1).cpu().numpy()
        items: list[dict[str, Any]] = []
        for row, picture in zip(rows, pixels, strict=True):
            content = {"png": png(picture)} if picture.ndim == 3 else {"frames": [png(frame) for frame in picture]}
            fields = {key: values[row] for key, values in columns.items()}
            try:
                json.dumps(fields, allow_nan=False)
            except (TypeError, ValueError) as error:
                problem = f"a prompt's fields cannot be sent as JSON ({error})"
                raise InputError(f"rewards.{self.name}.url", None, problem) from None
            items.append({"prompt": prompts[row], **content, "columns": fields})
        return items

    def _same_parts(self, scores: dict[str, list[float]]) -> dict[str, list[float]]:
        """Scores whose parts are those of every answer so far."""
        if scores and not self.parts:
            self.parts = tuple(scores)
        if scores and set(scores) != set(self.parts):
            now, before = (", ".join(names) or "plain scores" for names in (scores, self.parts))
            raise RewardFailed(f"answers garbage ({now} where other answers have {before})")
        return scores


@dataclass(eq=False)
class _Piece:
    """Some of a call's pictures, which travel in one request."""

    rows: list[int]
    attempts: int = 0
    last: Server | None = None  # that failed at it
    closed: list[Server] = field(default_factory=list)  # that will not get it again
    scores: dict[str, list[float]] | None = None
    why: str = ""


class _Round:
    """The pieces of one call, shared out among the servers."""

    def __init__(self, pieces: Sequence[_Piece], servers: Sequence[Server], retries: int) -> None:
        self.waiting, self.left = list(pieces), len(pieces)
        self.servers, self.retries = servers, retries
        self.changed = Condition()
        for server in servers:
            server.out = False

    def take(self, server: Server) -> _Piece | None:
        """The server's next piece, once it has rested after a failure; None when there is nothing left to do."""
        with self.changed:
            while self.left > 0 and not server.out:
                piece = next((piece for piece in self.waiting if self._suits(piece, server)), None)
                rest = server.rests_until - monotonic()
                if piece and rest <= 0:
                    self.waiting.remove(piece)
                    return piece
                self.changed.wait(rest if piece else None)
            return None

    def done(self, server: Server, piece: _Piece, scores: dict[str, list[float]]) -> None:
        with self.changed:
            server.failures, piece.scores = 0, scores
            self.left -= 1
            self.changed.notify_all()

    def failed(self, server: Server, piece: _Piece, error: RewardFailed) -> None:
        """Another server may take the piece at once; this one rests first, and once held to be down had its chance."""
        with self.changed:
            piece.why, piece.last = f"{server.url} {error}", server
            if not isinstance(error, Refused):
                piece.attempts += 1
                server.failures += 1
                server.rests_until = 0 if server.down else monotonic() + RETRY_SECONDS * 2 ** (server.failures - 1)
            if isinstance(error, Refused) or server.down:
                piece.closed.append(server)
            self._put_back(piece, piece.why)

    def leave_out(self, server: Server, piece: _Piece, error: RewardFailed) -> None:
        """A server that is still down has no further part in this call."""
        with self.changed:
            server.out = True
            self._put_back(piece, f"{server.url} {error}")

    def stop(self) -> None:
        with self.changed:
            self.left = 0
            self.changed.notify_all()
        for server in self.servers:
            server.close()

    def _suits(self, piece: _Piece, server: Server) -> bool:
        """A piece that a server failed at is left to the others, if any are up."""
        others = any(other is not server and not other.down and self._may(piece, other) for other in self.servers)
        return self._may(piece, server) and not (others and piece.last is server)

    def _may(self, piece: _Piece, server: Server) -> bool:
        return not server.out and server not in piece.closed

    def _put_back(self, piece: _Piece, why: str) -> None:
        """To the front; then what no server may take any more is lost."""
        self.waiting.insert(0, piece)
        kept = [
            piece
            for piece in self.waiting
            if piece.attempts <= self.retries and any(self._may(piece, server) for server in self.servers)
        ]
        for lost in set(self.waiting) - set(kept):
            lost.why = lost.why or why
        self.left -= len(self.waiting) - len(kept)
        self.waiting = kept
        self.changed.notify_all()


def _urls(key: str, given: object) -> list[str]:
    urls = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not urls:
        raise InputError(key, "[]", "names no server", "http://host:port, or a list of these")
    return list(dict.fromkeys(_url(key, url) for url in urls))


def _url(key: str, url: object) -> str:
    allowed = "http://host:port or https://host:port, with a path or without"
    if not isinstance(url, str) or not re.fullmatch(r"[!-~]+", url):
        raise InputError(key, url, "is no address", allowed)
    try:
        split = urlsplit(url)
        sound = split.scheme in ("http", "https") and split.hostname and split.port != 0
    except ValueError:
        raise InputError(key, url, "is no address", allowed) from None
    if split.username is not None or split.password is not None:
        raise InputError(key, split.hostname, "is given with a password", cure="a token, in an environment variable")
    if not sound or "?" in url or "#" in url:
        raise InputError(key, url, "is no server's address", allowed)
    return url.rstrip("/")


def _token(key: str, variable: str) -> str | None:
    token = os.environ.get(variable, "") if variable else ""
    if not re.fullmatch(r"[!-~]*", token):
        raise InputError(key, f"${variable}", "holds what an HTTP header cannot", "printable ASCII without spaces")
    return token or None
