"""A run in a process of its own."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ..tools.files import fcntl

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
    if fcntl:
        fcntl.flock(sys.stdout.fileno(), fcntl.LOCK_EX)
    import torch

    from ..cli import main

    torch.set_num_threads(threads)
    main(list(arguments))
