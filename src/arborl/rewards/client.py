"""Requests to a reward server, held to a time and a size, and answers held to the protocol that `serve` writes up."""

import base64
import json
import math
import secrets
import socket
import ssl
import struct
import zlib
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from threading import RLock, Timer
from typing import Any, NoReturn
from urllib.parse import urlsplit

import numpy as np
import requests
import torch
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies
from urllib3.exceptions import HTTPError

from ..tools.hosts import is_loopback
from ..tools.strict_json import strict_json
from .base import RewardFailed

PROBE_SECONDS = 5.0
"""Seconds in which a server must say that it is there, where it was held to be down."""
MAX_ITEM_BYTES, MAX_ANSWER_BYTES = 4 * 2**10, 64 * 2**10
"""The longest answer in bytes: so much for each picture, and so much besides."""
MAX_ID = 2**31
"""What ids stay below, whatever a server keeps them in."""
MAX_SCORE = torch.finfo(torch.float32).max


class Refused(RewardFailed):
    """The server will not, however often it is asked."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Server:
    """One URL: what is known of it, and requests to it, one at a time."""

    def __init__(self, url: str, token: str | None, timeout: float, retries: int) -> None:
        self.url, self.timeout, self.retries = url, timeout, retries
        self._token = token
        self._proxies = _proxies(url)
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
            about = strict_json(self._ask("GET", "/", seconds, MAX_ANSWER_BYTES))
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
                self.greet(min(PROBE_SECONDS, self.timeout))

    def score(self, items: list[dict[str, Any]]) -> dict[str, list[float]]:
        """Scores in the order of the items. Ids begin elsewhere each time, so that no other request's answer fits."""
        first = secrets.randbelow(MAX_ID - len(items))
        items = [{"id": first + i, **item} for i, item in enumerate(items)]
        body = json.dumps({"version": 1, "items": items}).encode()
        if self.limits and len(body) > self.limits[1]:
            raise Refused(f"takes {self.limits[1]} bytes a request, and {len(items)} pictures have {len(body)}")
        content = self._ask("POST", "/score", self.timeout, MAX_ANSWER_BYTES + MAX_ITEM_BYTES * len(items), body)
        try:
            return read_answer(content, len(items), first)
        except ValueError as error:
            raise RewardFailed(f"answers garbage ({error})") from None

    def close(self) -> None:
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
                    proxies=self._proxies,
                    timeout=seconds,
                    allow_redirects=False,
                    stream=True,
                )
                content = answer.raw.read(most + 1, decode_content=False)
            except (requests.Timeout, TimeoutError):
                raise late from None
            except (requests.RequestException, HTTPError, OSError) as error:
                raise late if self._watch.over else RewardFailed(f"does not answer ({self._why(error)})") from None
            if self._watch.over:
                raise late
        if len(content) > most:
            raise RewardFailed(f"answers garbage (more than {most} bytes)")
        if answer.status_code == 200:
            return content
        return _raise_status(answer, content)

    def _why(self, error: Exception) -> str:
        if self._proxies and not is_loopback(urlsplit(self.url).hostname or "") and get_environ_proxies(self.url):
            return f"{_root(error)}; asked directly, since a proxy would read an http request with its token"
        return _root(error)

    def _authorise(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """As an `auth`, since requests would let a netrc file replace a mere header."""
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def _proxies(url: str) -> dict[str, str]:
    """Overrides of the environment's proxies: none for https, all where a proxy is not to be asked.

    A proxy reads an http request and the token in it, and its loopback is another machine's. https passes unread.
    """
    split = urlsplit(url)
    return {} if split.scheme == "https" and not is_loopback(split.hostname or "") else {"http": "", "https": ""}


class _Response(HTTPResponse):
    def _read_next_chunk_size(self) -> int:
        """As in the library, which takes a size below 0: -1 reads without end, and others are a `ValueError`."""
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]
        if size < 0:
            raise HTTPException(f"a chunk of {size} bytes")
        return size


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
            made.response_class = _Response
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
        reason = strict_json(content)["error"]
    except (ValueError, KeyError, TypeError):
        reason = answer.reason
    text = f"answers {status}" + (f": {reason:.200}" if isinstance(reason, str) and reason else "")
    if status in (408, 429) or status >= 500:
        raise RewardFailed(text)
    raise Refused(text, status)


def _root(error: BaseException) -> str:
    """The innermost cause of an error that libraries wrapped."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{text or type(error).__name__:.200}"


def png(pixels: np.ndarray) -> str:
    """A PNG that is not compressed: Pillow takes twenty times as long for a smaller one, and GPUs wait for it."""
    height, width, _ = pixels.shape
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with its filter, 0 for none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines.tobytes(), 0)), chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def read_answer(content: bytes, count: int, first: int = 0) -> dict[str, list[float]]:
    """The scores in an answer, by part (`""` where there are no parts), in the order of the items; NaN for null.

    The items' ids are `first` and those that follow it.

    Empty where every score is null. `ValueError` says what is amiss: nothing is guessed or mended.
    """
    answer = strict_json(content)
    if not isinstance(answer, dict) or type(answer.get("version")) is not int or answer["version"] != 1:
        raise ValueError("not an answer of version 1")
    rows = answer.get("scores")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and {"id", "score"} <= set(row) for row in rows):
        raise ValueError("no list of scores with their ids")
    if any(type(row["id"]) is not int for row in rows):
        raise ValueError("an id that is no integer")
    ids = sorted(row["id"] for row in rows)
    if ids != list(range(first, first + count)):
        counted = ", but count from 0: a server answers the ids it was sent" if ids == list(range(count)) else ""
        raise ValueError(f"the ids are not those of the {count} items{counted}")
    scores: dict[int, Any] = {row["id"] - first: row["score"] for row in rows}
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_SCORE:
        raise ValueError("a score that is not a finite number")
    return float(value)
