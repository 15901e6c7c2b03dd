"""Imports that every run needs. The forkserver makes them once, and runs start from there in no time."""

import gc
import signal

from ..tools.quiet import quiet_libraries
from .worker import ENDINGS

for number in ENDINGS:
    signal.signal(number, signal.SIG_IGN)

with quiet_libraries():
    import diffusers

    diffusers.StableDiffusion3Pipeline  # noqa: B018 (diffusers imports what it is asked for)

from ..trainer import train  # noqa: E402, F401

gc.freeze()  # runs share these pages as long as nobody looks through them
