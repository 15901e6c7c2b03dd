"""Output of a run that nobody may be there to read any more."""

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

READER_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)
"""Errors of a pipe whose reader ended, and of a terminal that was closed: they do not go away."""


class Tolerant:
    """A stream whose failures are nobody's business: a run is not worth less because its messages cannot be shown.

    What a full disk does not take is lost; what has no reader any more goes nowhere from then on, also where libraries
    write to the descriptor themselves, and when the interpreter ends.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None  # of something that nobody chose not to read

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._failed(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: OSError | ValueError) -> None:
        if isinstance(error, OSError) and error.errno in READER_GONE:
            discard(self._stream)
        elif isinstance(error, OSError):
            self.lost = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def tolerant_output() -> Iterator[None]:
    """Inside, what cannot be written to stdout or stderr stops nothing."""
    with ExitStack() as redirected:
        # A daemon's may be closed from the start: then they are None, which everyone knows to deal with.
        if sys.stdout is not None:
            redirected.enter_context(redirect_stdout(Tolerant(sys.stdout)))  # pyright: ignore[reportArgumentType]
        if sys.stderr is not None:
            redirected.enter_context(redirect_stderr(Tolerant(sys.stderr)))  # pyright: ignore[reportArgumentType]
        yield


def discard(stream: TextIO) -> None:
    """Send what is written to a stream, and what waits in it, nowhere."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def flush_or_discard() -> OSError | None:
    """Before the process ends: an exit code says how a command went, not whether somebody read to its end. Returns why
    something that was asked for is not there to be read, as where stdout is a file on a full disk.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            discard(stream)
        if getattr(stream, "lost", None):  # what still waits in it would be an error again when Python ends
            discard(stream)
    return getattr(sys.stdout, "lost", None)
