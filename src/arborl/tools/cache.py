"""The user's cache folder, and in it the digests of large files that were read before."""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ..core.errors import InputError
from .files import atomic, remove_abandoned

LARGE = 2**20
"""Bytes from which a file's digest is kept: a smaller one is read as fast."""
SETTLED = 2.0
"""Seconds since a file's last change from which its digest is kept. One that was written within the same tick of the
file system's clock as it was read would look unchanged.
"""


def cache_home() -> Path:
    """Folder of this package in the user's cache."""
    home = os.environ.get("ARBORL_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(home).expanduser() / "arborl"
    except RuntimeError:  # no HOME, and a user whom the system does not know, as in some containers
        problem = "leads into a home folder, and there is none"
        raise InputError("cache folder", home, problem, cure="HOME or ARBORL_CACHE set to a folder") from None


def file_digest(path: Path) -> str:
    """SHA-256 of a whole file. A large one is read once, while size, times and inode stay as they are."""
    found = path.stat()
    known_by = [str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    kept = cache_home() / "digests" / f"{hashlib.sha256(known_by[0].encode(errors='surrogateescape')).hexdigest()}.json"
    if found.st_size >= LARGE and (known := _known(kept, known_by)):
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if found.st_size >= LARGE and time.time() - max(found.st_mtime, found.st_ctime) > SETTLED:
        with suppress(OSError):  # a cache that cannot be written is read without
            kept.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(kept.parent)
            with atomic(kept, cache=True) as aside:
                aside.write_text(json.dumps({"file": known_by, "sha256": digest}))
    return digest


def _known(kept: Path, known_by: list[str | int]) -> str | None:
    """The digest that was kept of a file as it is now."""
    try:
        found = json.loads(kept.read_bytes())
        return str(found["sha256"]) if found["file"] == known_by else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
