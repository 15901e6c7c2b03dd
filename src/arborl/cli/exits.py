"""Exit codes, ranks that leave together, one line in place of a traceback."""

import ctypes
import os
import re
import signal
import sys
from typing import NoReturn

import click

from ..tools.output import flush_or_discard


def settle(code: int) -> int:
    """Have everything written; the exit code, which a command that went well loses with what it was to print."""
    lost = flush_or_discard()
    if lost is None or code:
        return code
    click.echo(f"error: stdout cannot be written to ({lost.strerror})", err=True)
    return 1


def leave(code: int) -> NoReturn:
    """End the process; under a launcher at once."""
    code = settle(code)
    if "WORLD_SIZE" in os.environ:
        # Threads of gloo may outlive their process group and abort the process when its interpreter ends
        # (pytorch/pytorch#179291). All that matters is written and closed by now.
        os._exit(code)
    sys.exit(code)


def one_line(text: str) -> str:
    """click's message in our style: one line, in lower case, without a full stop."""
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]


def exit_with_launcher() -> None:
    """A launcher that is killed leaves its ranks at work, and a run that goes on meanwhile has two writers. On Linux a
    process may ask for a signal: all of them then leave together, with a checkpoint.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def is_lost_connection(error: Exception) -> bool:
    """Whether an error only says that another process does not answer any more."""
    from torch.distributed import DistError

    gloo = type(error) is RuntimeError and re.search(
        r"gloo.*([Cc]onnection|[Pp]ipe|[Tt]imed? ?out)", str(error), re.DOTALL
    )
    return isinstance(error, DistError) or bool(gloo)


def ranks_connected() -> bool:
    from accelerate import PartialState

    return bool(PartialState._shared_state)
