"""Files that are complete or not there, and locks that end with their process."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..core.errors import InputError

LOCK_ATTEMPTS = 3


try:
    import fcntl
except ImportError:  # not on every system: there nobody is kept out
    fcntl = None


def lock(path: Path) -> IO[bytes]:
    """Hold the lock on a file, which is made if need be, for as long as what is returned is open."""
    file = path.open("ab")
    for attempt in range(LOCK_ATTEMPTS):
        try:
            if fcntl:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:  # held; or for a moment by someone who only asks
            time.sleep(0.1 if attempt < LOCK_ATTEMPTS - 1 else 0)
        except OSError:  # a file system without locks
            return file
    file.close()
    raise InputError("run", path.parent, "another process is writing to it", "another run, or wait for it")


def is_locked(path: Path) -> bool:
    """Whether a process holds it."""
    if fcntl is None or not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


@contextmanager
def atomic(path: Path, cache: bool = False) -> Iterator[Path]:
    """A file that is there complete or as it was before: what is written aside, to the path that is given, takes its
    place at the end of the block.

    A `cache` can be made again, and several processes may make it: each has a path of its own, and none waits for the
    disk.
    """
    aside = path.with_name(f".{path.name}{f'.{os.getpid()}' if cache else ''}.tmp")
    try:
        yield aside
        if not cache:
            fsync(aside)
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    with atomic(path) as aside:
        aside.write_text(text, encoding="utf-8")


def fsync(path: Path) -> None:
    """Have a file, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def umask() -> int:
    """The process's umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
