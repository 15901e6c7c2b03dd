"""Files and folders that are complete or not there, that replace nothing but what may be replaced, and locks that end
with their process.
"""

import errno
import itertools
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..core.errors import InputError

LOCK_ATTEMPTS = 3
SCRATCH, MARK, MARK_TEXT = ".arborl-", "mark", b"A folder of ArboRL's, for what is being written; it may be removed.\n"
"""Names of scratch folders begin so; the file in each that says whose it is, and what it says besides its machine."""
MARK_PATTERN = re.compile(re.escape(MARK_TEXT) + rb"(?:Made on ([^\n]{1,255})\.\n)?")
A_DAY = 86400.0
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


try:
    import fcntl
except ImportError:  # not on every system: there nobody is kept out
    fcntl = None


def lock(path: Path) -> IO[bytes]:
    """Hold the lock on a file, which is made if need be, for as long as what is returned is open."""
    file = open(path, "ab", opener=not_through_links)  # noqa: SIM115 (whoever holds the lock closes it)
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
    raise InputError("run", path.parent, "another process is writing to it", cure="another run, or to wait for it")


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
def scratch(folder: Path) -> Iterator[Path]:
    """A new hidden folder in a folder, for what takes its place there once it is complete; it goes with the block.

    It holds a mark that is locked for as long as its maker lives, so that `remove_abandoned` knows whose it is.
    """
    made = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=folder))
    mark: IO[bytes] | None = None
    try:
        mark = open(made / MARK, "xb")  # noqa: SIM115 (closed before the folder goes)
        if fcntl:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(mark.fileno(), fcntl.LOCK_EX)  # whoever asks whether it is abandoned holds it for a moment
        # Not before it is locked: nobody takes it for abandoned in between.
        mark.write(MARK_TEXT + b"Made on " + _machine() + b".\n")
        mark.flush()
        yield made
    finally:
        if mark:
            with suppress(OSError):  # the disk may be full
                mark.close()
        _remove_scratch(made)


def abandoned(folder: Path, alone: bool = False) -> list[Path]:
    """The scratch folders in a folder whose makers were killed.

    Some shared file systems have locks that other machines do not see: what was made on another one is left alone for a
    day, unless who asks is `alone` here, by a lock of its own.
    """
    found = (left for left in folder.glob(f"{SCRATCH}*") if not left.is_symlink())
    return [left for left in found if _is_abandoned(left / MARK, alone)]


def remove_abandoned(folder: Path, alone: bool = False) -> None:
    """Remove these, and nothing else; who is `alone` also those that were left without a mark, with nothing in them."""
    for left in abandoned(folder, alone):
        _remove_scratch(left)
    for left in folder.glob(f"{SCRATCH}*") if alone else ():
        with suppress(OSError):  # not empty, or no folder
            left.rmdir()


def _is_abandoned(mark: Path, alone: bool) -> bool:
    if fcntl is None:
        return False
    try:
        with open(mark, "r+b", opener=not_through_links) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # its maker holds it, or nobody can
            found = MARK_PATTERN.fullmatch(file.read(1024))
            old = time.time() - os.fstat(file.fileno()).st_mtime > A_DAY
    except OSError:
        return False
    return found is not None and (alone or old or found[1] in (None, _machine()))


def _machine() -> bytes:
    return re.sub(rb"[^!-~]", b"?", platform.node().encode())[:255] or b"?"


def _remove_scratch(made: Path) -> None:
    """The mark last: should this be cut short, what is left is still known."""
    with suppress(OSError):
        for entry in [entry for entry in made.iterdir() if entry.name != MARK]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)  # a file that is open elsewhere, on NFS, goes the next time
            else:
                entry.unlink(missing_ok=True)
    shutil.rmtree(made, ignore_errors=True)


@contextmanager
def atomic(path: Path, cache: bool = False) -> Iterator[Path]:
    """A file that is there complete or as it was before: what is written aside, to the path that is given, takes its
    place at the end of the block. Only a file is ever replaced, no link and no folder.

    A `cache` can be made again, so nobody waits for the disk.
    """
    with scratch(path.parent) as folder:
        aside = folder / path.name
        yield aside
        if not cache:
            fsync(aside)
        check_is_file(path)
        aside.replace(path)


def check_is_file(path: Path) -> None:
    """Raise an error if something stands at a path that is not a file: a link leads to what somebody else made."""
    kind = kind_of(path)
    if kind not in (None, "file"):
        raise FileExistsError(errno.EEXIST, f"{path.name} is a {kind} there", str(path))


def kind_of(path: Path) -> str | None:
    """What stands at a path: a file, a folder, a link, something else; None for nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "device or pipe")


def free_place(path: Path) -> Path:
    """This path, or the first of it with -1, -2, … behind it, where nothing stands."""
    names = (path.name if not n else f"{path.name}-{n}" for n in itertools.count())
    return next(place for place in map(path.with_name, names) if kind_of(place) is None)


def as_text(path: Path | str) -> str:
    """A path, or a word of a command line, that may be of bytes that are no text."""
    return os.fsencode(path).decode(errors="replace")


def write_atomically(path: Path, text: str) -> None:
    with atomic(path) as aside:
        aside.write_text(text, encoding="utf-8")


def append(path: Path, text: str) -> None:
    """Add to a file's end, all of it or nothing; the file is made if need be."""
    left = text.encode()
    with open(path, "ab", buffering=0, opener=not_through_links) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def not_through_links(path: str, flags: int) -> int:
    """Opens a file for `open`, but not what a link of that name leads to, and waits for no pipe's other end."""
    return os.open(path, flags | NO_LINK | getattr(os, "O_NONBLOCK", 0), 0o666)


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
