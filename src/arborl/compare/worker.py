"""A run in a process of its own."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str], log: Path, threads: int) -> None:
    """`arborl` with these arguments, in a session of its own, its words in a file."""
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    import torch

    from ..cli import main

    torch.set_num_threads(threads)
    main(list(arguments))
