"""A small web server in the foreground: rewards for runs elsewhere, a run's page for whoever trains it."""

import errno
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette

from ..core.errors import InputError


def serve_at(host: str, port: int, app: Starlette, announce: Callable[[str], None]) -> None:
    """Serve until interrupted. Port 0 takes a free one; `announce` gets the address once the server answers."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        key, value = ("--port", port) if error.errno in (errno.EADDRINUSE, errno.EACCES) else ("--host", host)
        raise InputError(key, value, f"cannot be served at ({error.strerror or error})") from None
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    with listener, suppress(KeyboardInterrupt):
        announce(f"http://{shown}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])
