"""A running job's page, on loopback: the same as report.html, which asks every two seconds for what is new."""

import hashlib
import json
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..core.errors import InputError
from ..run.paths import CONFIG, SAMPLES, TREES
from .page import read, render


def _state(folder: Path) -> str:
    """A word that changes when a file does that the page shows."""
    patterns = ("*.json*", CONFIG, f"{TREES}/*.json", f"{SAMPLES}/*.json")
    shown = [path for pattern in patterns for path in folder.glob(pattern)]
    stats = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(shown) if path.is_file()]
    return f'"{hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:32]}"'


def app(folder: Path) -> Starlette:
    """The page and its data, read anew at each request; pictures that were read before are kept."""

    def page(request: Request) -> Response:
        try:
            return HTMLResponse(render(read(folder), live=True), headers={"Cache-Control": "no-store"})
        except (InputError, OSError) as error:
            return PlainTextResponse(str(error), status_code=503)

    def data(request: Request) -> Response:
        try:
            headers = {"ETag": _state(folder), "Cache-Control": "no-store"}
            if request.headers.get("if-none-match") == headers["ETag"]:
                return Response(status_code=304, headers=headers)
            text = json.dumps(read(folder), allow_nan=False)
        except (InputError, OSError) as error:  # a file may come or go just now; the page asks again
            return PlainTextResponse(str(error), status_code=503)
        return Response(text, media_type="application/json", headers=headers)

    # A page elsewhere could have its name point here and read the answers; it cannot choose the Host header.
    own = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=[Route("/", page), Route("/data.json", data)], middleware=[own])
