"""A run in a process of its own."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a comparison. The forkserver does not listen to them: it must outlive its children."""


def run(arguments: Sequence[str], log: Path, threads: int) -> None:
    """`arborl` with these arguments, in a session of its own, its words in a file that is locked meanwhile."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL)
    if hasattr(os, "setsid"):
        os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if fcntl := _fcntl():
        fcntl.flock(sys.stdout.fileno(), fcntl.LOCK_EX)
    import torch

    from ..cli import main

    torch.set_num_threads(threads)
    main(list(arguments))


def is_running(log: Path) -> bool:
    """Whether a process is writing this log."""
    fcntl = _fcntl()
    if fcntl is None or not log.is_file():
        return False
    with log.open("ab") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _fcntl():
    """Locks, where the system has them."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl
