"""A small web server in the foreground: rewards for runs elsewhere, a run's page for whoever trains it.

It may stand among strangers. uvicorn gives a client any time for the head of its request, takes connections until
there are no more file descriptors, and logs whatever happens: all three have their bounds here.
"""

import asyncio
import errno
import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..core.errors import InputError

try:
    import resource
except ImportError:  # not on every system
    resource = None

HEAD_BYTES = 2**14
"""The longest head of a request: each of its lines becomes an object."""
HEAD_SECONDS = 5.0
"""In which the head of a connection's first request must have come; twice that, at most, for a later one."""
MAX_CONNECTIONS = 512
"""Connections at a time, or half of the file descriptors where these are few."""
ACCEPTED_AT_ONCE, QUEUE = 16, 1024
"""Connections that asyncio takes before it looks at any of them, and those that the system keeps until then."""
LOG_MESSAGES, LOG_CHARACTERS, LOG_SECONDS = 10, 2000, 60.0
"""Messages of one kind in the log within so many seconds, and characters of a message."""


def serve_at(host: str, port: int, app: Starlette, announce: Callable[[str], None]) -> None:
    """Serve until interrupted. Port 0 takes a free one; `announce` gets the address once the server answers."""
    try:
        made = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        key, value = ("--port", port) if error.errno in (errno.EADDRINUSE, errno.EACCES) else ("--host", host)
        raise InputError(key, value, f"cannot be served at ({error.strerror or error})") from None
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        loop="asyncio",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    with _Listener(fileno=made.detach()) as listener, _bounded_log(), suppress(KeyboardInterrupt):
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])


def admit(request: Request) -> None:
    """Its sender may be here: the connection does not give way to newer ones."""
    request.state.admitted = True


class _Listener(socket.socket):
    def listen(self, backlog: int = 0, /) -> None:
        """Let the system keep `QUEUE` connections: asyncio asks for as few as it takes at once."""
        super().listen(max(backlog, QUEUE))


class _WholeBodies(h11.Connection):
    """Requests say how long they are: a body in chunks may be cut into as many as it has bytes, which takes a while."""

    problem = 400, "no HTTP, or a head that is too long"

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            self.problem = 411, "a request needs a Content-Length"
            raise h11.RemoteProtocolError(self.problem[1])
        return event


class _Connection(H11Protocol):
    """It must send a request's head soon. Where there are too many, the oldest whose sender was not admitted goes."""

    connections: set["_Connection"]  # type: ignore[assignment]
    born: float
    head_timer: asyncio.TimerHandle

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = _WholeBodies(h11.SERVER, HEAD_BYTES)

    def send_400_response(self, msg: str) -> None:
        """The protocol's own answer to what is no request."""
        assert isinstance(self.conn, _WholeBodies)
        status, problem = self.conn.problem
        headers = [("content-type", "application/json"), ("connection", "close")]
        body = json.dumps({"error": problem}).encode()
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def admitted(self) -> bool:
        return bool(self.scope) and bool(self.scope.get("state", {}).get("admitted"))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.born = self.loop.time()
        self.head_timer = self.loop.call_later(HEAD_SECONDS, self._check_head, None)
        if len(self.connections) > max_connections():
            oldest = min((each for each in self.connections if not each.admitted), key=lambda each: each.born)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.head_timer.cancel()
        super().connection_lost(exc)

    def _check_head(self, last: object) -> None:
        """Hang up if no request is at work and, `last` being the last request, none was when this was asked before."""
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self.cycle is last:
            self.transport.abort()
        else:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._check_head, self.cycle if waits else self)


def max_connections() -> int:
    """Half of the file descriptors at most: the rest is for files, and for connections that were not looked at yet."""
    if resource is None:
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


class _BoundedLog(logging.StreamHandler[Any]):
    """Standard error, for messages whose number and length others decide."""

    def __init__(self) -> None:
        super().__init__()
        self.since, self.said = -LOG_SECONDS, Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if monotonic() - self.since >= LOG_SECONDS:
            self.since = monotonic()
            self.said.clear()
        self.said[record.name] += 1
        if self.said[record.name] == LOG_MESSAGES:
            record.msg = f"{record.msg} (further ones are left out for up to {LOG_SECONDS:g} s)"
        if self.said[record.name] <= LOG_MESSAGES:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        half = LOG_CHARACTERS // 2
        return text if len(text) <= LOG_CHARACTERS else f"{text[:half]} … {text[-half:]}"


@contextmanager
def _bounded_log() -> Iterator[None]:
    handler = _BoundedLog()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
