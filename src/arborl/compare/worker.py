"""A run in a process of its own."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ..tools.files import fcntl, not_through_links

ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a comparison. The forkserver does not listen to them: it must outlive its children."""

SAFE_PATH, OURS = "PYTHONSAFEPATH", "arborl"
"""The variable that keeps Python from looking for modules in the current folder, and its value where a comparison set
it.
"""


def run(arguments: Sequence[str], log: Path, threads: int) -> None:
    """`arborl` with these arguments, in a session of its own, its words in a file that is locked meanwhile."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background jobs ignore it
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]  # it was for the forkserver
    if hasattr(os, "setsid"):
        os.setsid()
    leave_with_comparison()
    with open(log, "ab", opener=not_through_links) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if fcntl:
        fcntl.flock(sys.stdout.fileno(), fcntl.LOCK_EX)
    import torch

    from ..cli import main

    torch.set_num_threads(threads)
    main(list(arguments))


def leave_with_comparison() -> None:
    """Whatever ends the process that asked for this one, also SIGKILL, closes a pipe; then this one leaves as if it was
    terminated, with a checkpoint. Its parent in the system's eyes is the forkserver, which says nothing of that.
    """
    comparison = multiprocessing.parent_process()
    if comparison is None:  # called by hand
        return

    def watch() -> None:
        comparison.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="comparison", daemon=True).start()
