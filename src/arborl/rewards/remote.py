"""A reward that servers compute: pictures go out as PNG over HTTP, scores come back. `serve` writes up the protocol.

A picture that no server scores is NaN, never an invented score, and the failure is told in a line.
"""

import base64
import json
import math
import os
import re
import socket
import ssl
import struct
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, RLock, Timer
from time import monotonic
from typing import Any, NoReturn
from urllib.parse import urlsplit

import numpy as np
import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor
from urllib3.exceptions import HTTPError

from ..config.schema import RewardConfig
from ..core.errors import InputError
from .base import Columns
from .pixels import as_rgb

WAIT = 1.0
"""Seconds before a server is asked again after its first failure; doubled at each further one in a row."""
PROBE = 5.0
"""Seconds in which a server must say that it is there, where it was held to be down."""
ITEM_BYTES, ANSWER_BYTES = 4 * 2**10, 64 * 2**10
"""How long an answer may be: so much for each picture, and so much besides."""
TEXT_BYTES = 16 * 2**10
"""What a picture's prompt and columns are held to take of a request, where a server limits its size."""
LARGEST = torch.finfo(torch.float32).max


class RewardFailed(Exception):  # noqa: N818 (a name that callers know)
    """A server did not score what it was sent. One line says why."""

    def __init__(self, text: str) -> None:
        super().__init__("".join(c if c.isprintable() else " " for c in text))


class Refused(RewardFailed):
    """The server will not, however often it is asked."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class RemoteReward:
    """Called as any reward; the servers of `rewards.<name>.url` share its pictures, `batch_size` at a time."""

    def __init__(self, name: str, config: RewardConfig) -> None:
        self.name, self.config = name, config
        token = _token(f"rewards.{name}.token", config.token)
        urls = _urls(f"rewards.{name}.url", config.url)
        self.servers = [_Server(url, token, config.timeout, config.retries) for url in urls]
        self.parts: tuple[str, ...] = ()  # as the first scores had them; ("",) of a reward without parts
        self.failures: list[str] = []

    def check(self) -> None:
        """Every server is there, takes the token and is one of rewards; else an error."""
        for server in self.servers:
            try:
                server.greet(self.config.timeout)
            except RewardFailed as error:
                problem = str(error)
                if isinstance(error, Refused) and error.status in (401, 403):
                    problem = f"refuses the token; set ${self.config.token}"
                elif isinstance(error, Refused) and error.status >= 400:
                    problem = f"is not a reward server ({problem})"
                raise InputError(f"rewards.{self.name}.url", server.url, problem) from None

    def take_failures(self) -> list[str]:
        """What was lost since this was last called, a line a request. A call that raises leaves nothing here."""
        taken, self.failures = self.failures, []
        return taken

    def __call__(self, images: Tensor, prompts: Sequence[str], columns: Columns) -> Tensor | dict[str, Tensor]:
        """Scores, or named parts; NaN for what no server scored, and for pictures that are not finite.

        `RewardFailed` where nothing at all was scored.
        """
        images = as_rgb(images)
        sound = images.isfinite().flatten(1).all(1).nonzero().flatten().tolist()
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(_Server.learn_limits, self.servers))
            size = self._size(images[0].numel()) if sound else 1
            pieces = [_Piece(sound[i : i + size]) for i in range(0, len(sound), size)]
            shared = _Round(pieces, self.servers, self.config.retries)
            work = [pool.submit(self._work, server, shared, images, prompts, columns) for server in self.servers]
            try:
                for worker in work:
                    worker.result()
            finally:
                shared.stop()
        failed = [piece for piece in pieces if piece.scores is None]
        lost = [f"rewards.{self.name}: {len(piece.rows)} pictures have no score: {piece.why}" for piece in failed]
        if lost and len(lost) == len(pieces):
            raise RewardFailed(lost[-1])
        self.failures += lost
        found = {part: torch.full((len(images),), torch.nan) for part in self.parts or ("",)}
        for piece in pieces:
            for part, scores in (piece.scores or {}).items():
                found[part][piece.rows] = torch.tensor(scores)
        return found.get("", found)

    def _size(self, numbers: int) -> int:
        """Pictures a request: as configured, or less where a server takes fewer.

        A PNG is little more than a byte a number, and base64 makes 4 of 3.
        """
        each = numbers * 3 // 2 + TEXT_BYTES
        limits = [limits for server in self.servers if (limits := server.limits)]
        return min([self.config.batch_size, *(min(items, max(1, size // each)) for items, size in limits)])

    def _work(
        self, server: "_Server", shared: "_Round", images: Tensor, prompts: Sequence[str], columns: Columns
    ) -> None:
        """One server's share: it takes a piece whenever it is free."""
        try:
            while piece := shared.take(server):
                try:
                    if server.down:
                        server.greet(min(PROBE, self.config.timeout))
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
        for i, (row, picture) in enumerate(zip(rows, pixels, strict=True)):
            content = {"png": _png(picture)} if picture.ndim == 3 else {"frames": [_png(frame) for frame in picture]}
            fields = {key: values[row] for key, values in columns.items()}
            try:
                json.dumps(fields, allow_nan=False)
            except (TypeError, ValueError) as error:
                problem = f"a prompt's fields cannot be sent as JSON ({error})"
                raise InputError(f"rewards.{self.name}.url", None, problem) from None
            items.append({"id": i, "prompt": prompts[row], **content, "columns": fields})
        return items

    def _same_parts(self, scores: dict[str, list[float]]) -> dict[str, list[float]]:
        """Scores whose parts are those of every answer so far."""
        if scores and not self.parts:
            self.parts = tuple(scores)
        if scores and set(scores) != set(self.parts):
            now, before = (", ".join(names) or "plain scores" for names in (scores, self.parts))
            raise RewardFailed(f"answers garbage ({now} where other answers have {before})")
        return scores


def read_answer(content: bytes, count: int) -> dict[str, list[float]]:
    """The scores in an answer, by part (`""` where there are no parts), in the order of the items; NaN for null.

    Empty where every score is null. `ValueError` says what is amiss: nothing is guessed or mended.
    """
    answer = strict_json(content)
    if not isinstance(answer, dict) or type(answer.get("version")) is not int or answer["version"] != 1:
        raise ValueError("not an answer of version 1")
    rows = answer.get("scores")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and {"id", "score"} <= set(row) for row in rows):
        raise ValueError("no list of scores with their ids")
    if any(type(row["id"]) is not int for row in rows) or sorted(row["id"] for row in rows) != list(range(count)):
        raise ValueError(f"the ids are not those of the {count} items")
    scores: dict[int, Any] = {row["id"]: row["score"] for row in rows}
    if all(score is None for score in scores.values()):
        return {}
    names = next((list(score) for score in scores.values() if isinstance(score, dict)), None)
    if names is not None and ("" in names or not names):
        raise ValueError("parts without a name")
    names = names or [""]
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(count):
        score = dict.fromkeys(names) if scores[i] is None else scores[i]
        parts = score if isinstance(score, dict) else {"": score}
        if set(parts) != set(names):
            raise ValueError("the items differ in their parts")
        for name in names:
            found[name].append(_number(parts[name]))
    return found


def _number(value: object) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError("a score that is not a finite number")
    return float(value)


def strict_json(content: bytes) -> Any:
    """JSON without what Python adds to it, and without names that come twice; else `ValueError`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name comes twice")
        return dict(pairs)

    def no_constant(text: str) -> None:
        raise ValueError(f"{text} is no number")

    try:
        return json.loads(content, object_pairs_hook=once, parse_constant=no_constant)
    except json.JSONDecodeError:
        raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


@dataclass(eq=False)
class _Piece:
    """Some of a call's pictures, which travel in one request."""

    rows: list[int]
    attempts: int = 0
    last: "_Server | None" = None  # that failed at it
    closed: "list[_Server]" = field(default_factory=list)  # that will not get it again
    scores: dict[str, list[float]] | None = None
    why: str = ""


class _Round:
    """The pieces of one call, shared out among the servers."""

    def __init__(self, pieces: Sequence[_Piece], servers: "Sequence[_Server]", retries: int) -> None:
        self.waiting, self.left = list(pieces), len(pieces)
        self.servers, self.retries = servers, retries
        self.changed = Condition()
        for server in servers:
            server.out = False

    def take(self, server: "_Server") -> _Piece | None:
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

    def done(self, server: "_Server", piece: _Piece, scores: dict[str, list[float]]) -> None:
        with self.changed:
            server.failures, piece.scores = 0, scores
            self.left -= 1
            self.changed.notify_all()

    def failed(self, server: "_Server", piece: _Piece, error: RewardFailed) -> None:
        """Another server may take the piece at once; this one rests first, and once held to be down had its chance."""
        with self.changed:
            piece.why, piece.last = f"{server.url} {error}", server
            if not isinstance(error, Refused):
                piece.attempts += 1
                server.failures += 1
                server.rests_until = 0 if server.down else monotonic() + WAIT * 2 ** (server.failures - 1)
            if isinstance(error, Refused) or server.down:
                piece.closed.append(server)
            self._put_back(piece, piece.why)

    def leave_out(self, server: "_Server", piece: _Piece, error: RewardFailed) -> None:
        """A server that is still down has no further part in this call."""
        with self.changed:
            server.out = True
            self._put_back(piece, f"{server.url} {error}")

    def stop(self) -> None:
        with self.changed:
            self.left = 0
            self.changed.notify_all()
        for server in self.servers:
            server.hang_up()

    def _suits(self, piece: _Piece, server: "_Server") -> bool:
        """A piece that a server failed at is left to the others, if any are up."""
        others = any(other is not server and not other.down and self._may(piece, other) for other in self.servers)
        return self._may(piece, server) and not (others and piece.last is server)

    def _may(self, piece: _Piece, server: "_Server") -> bool:
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


class _Server:
    """One URL: what is known of it, and requests to it, one at a time."""

    def __init__(self, url: str, token: str | None, timeout: float, retries: int) -> None:
        self.url, self.timeout, self.retries = url, timeout, retries
        self._token = token
        self._watch: _Watch | None = None  # over the request in flight
        self.limits: tuple[int, int] | None = None  # items and bytes it takes in a request, once it has told
        self.failures = 0  # in a row
        self.rests_until = 0.0
        self.out = False  # of the present call

    @property
    def down(self) -> bool:
        """It used up its retries, and has not answered since."""
        return self.failures > self.retries

    def greet(self, seconds: float) -> None:
        """Ask what it is and what it takes; an error unless it is a server of rewards."""
        try:
            about = strict_json(self._ask("GET", "/", seconds, ANSWER_BYTES))
        except ValueError:
            about = None
        if not isinstance(about, dict) or type(about.get("arborl")) is not int:
            raise Refused("is not a reward server")
        if about["arborl"] != 1:
            raise Refused(f"speaks version {about['arborl']} of the protocol, and version 1 is meant")
        most = (about.get("max_items", 2**31), about.get("max_bytes", 2**63))
        if any(type(value) is not int or value < 1 for value in most):
            raise Refused("is not a reward server (its max_items or max_bytes is no count)")
        self.limits = most

    def learn_limits(self) -> None:
        """Before its first pictures; one that does not answer is no worse off than without."""
        if self.limits is None and not self.down:
            with suppress(RewardFailed):
                self.greet(min(PROBE, self.timeout))

    def score(self, items: list[dict[str, Any]]) -> dict[str, list[float]]:
        body = json.dumps({"version": 1, "items": items}).encode()
        if self.limits and len(body) > self.limits[1]:
            raise Refused(f"takes {self.limits[1]} bytes a request, and {len(items)} pictures have {len(body)}")
        content = self._ask("POST", "/score", self.timeout, ANSWER_BYTES + ITEM_BYTES * len(items), body)
        try:
            return read_answer(content, len(items))
        except ValueError as error:
            raise RewardFailed(f"answers garbage ({error})") from None

    def hang_up(self) -> None:
        if watch := self._watch:
            watch.shut()

    def _ask(self, method: str, path: str, seconds: float, most: int, body: bytes | None = None) -> bytes:
        """A request and its whole answer, within so many seconds and bytes."""
        headers = {"Content-Type": "application/json"} if body else {}
        late = RewardFailed(f"does not answer within {seconds:g} s")
        with requests.Session() as session, _Watch(seconds) as self._watch:
            session.mount("http://", self._watch)
            session.mount("https://", self._watch)
            try:
                answer = session.request(
                    method,
                    self.url + path,
                    data=body,
                    headers=headers | {"Accept": "application/json", "Accept-Encoding": "identity"},
                    auth=self._authorise,
                    timeout=seconds,
                    allow_redirects=False,
                    stream=True,
                )
                content = answer.raw.read(most + 1, decode_content=False)
            except (requests.Timeout, TimeoutError):
                raise late from None
            except (requests.RequestException, HTTPError, OSError) as error:
                raise late if self._watch.over else RewardFailed(f"does not answer ({_root(error)})") from None
            if self._watch.over:
                raise late
        if len(content) > most:
            raise RewardFailed(f"answers garbage (more than {most} bytes)")
        if answer.status_code == 200:
            return content
        return _raise_status(answer, content)

    def _authorise(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """As an `auth`, since requests would let a netrc file replace a mere header."""
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class _Watch(HTTPAdapter):
    """Shuts a request's connection when its time is up: the timeouts of requests start anew with every byte."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.over = False
        self._lock, self._sockets = RLock(), list[socket.socket]()
        self._timer = Timer(seconds, self.shut)
        self._timer.daemon = True

    def __enter__(self) -> "_Watch":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for held in self._sockets:
                held.close()

    def shut(self) -> None:
        with self._lock:
            self.over = True
            for held in self._sockets:
                with suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        kind = pool.ConnectionCls

        def connection(*args: Any, **kwargs: Any) -> Any:
            made = kind(*args, **kwargs)
            connect = made._new_conn
            made._new_conn = lambda: self._hold(connect())
            return made

        pool.ConnectionCls = connection
        return pool

    def _hold(self, connected: socket.socket) -> socket.socket:
        """Keep a second handle: TLS, which comes next, takes the first for itself."""
        with self._lock:
            self._sockets.append(connected.dup())
            if self.over:
                self.shut()
        return connected


def _raise_status(answer: requests.Response, content: bytes) -> NoReturn:
    status = answer.status_code
    if answer.is_redirect:
        raise Refused(f"redirects to {answer.headers['Location']:.200}, which is not followed", status)
    try:
        told = strict_json(content)["error"]
    except (ValueError, KeyError, TypeError):
        told = answer.reason
    text = f"answers {status}" + (f": {told:.200}" if isinstance(told, str) and told else "")
    if status in (408, 429) or status >= 500:
        raise RewardFailed(text)
    raise Refused(text, status)


def _root(error: BaseException) -> str:
    """What happened under the layers that libraries wrap around it."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{text or type(error).__name__:.200}"


def _png(pixels: np.ndarray) -> str:
    """A PNG that is not compressed: Pillow takes 40 times as long to make one 30% smaller, and GPUs wait for it."""
    height, width, _ = pixels.shape
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with its filter, 0 for none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines.tobytes(), 0)), chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


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
        raise InputError(key, split.hostname, "is given with a password", "a token, in an environment variable")
    if not sound or "?" in url or "#" in url:
        raise InputError(key, url, "is no server's address", allowed)
    return url.rstrip("/")


def _token(key: str, variable: str) -> str | None:
    token = os.environ.get(variable, "") if variable else ""
    if not re.fullmatch(r"[!-~]*", token):
        raise InputError(key, f"${variable}", "holds what an HTTP header cannot", "printable ASCII without spaces")
    return token or None
