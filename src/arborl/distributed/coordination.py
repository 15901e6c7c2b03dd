"""Processes go on together or stop together: errors of one of them, and interrupts, reach all at the same place."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType

from accelerate import Accelerator
from accelerate.utils import gather_object

from .gather import any_rank

SIGHUP = getattr(signal, "SIGHUP", None)
"""Of a terminal that is closed; not on every system."""
ENDINGS = [number for number in (signal.SIGINT, signal.SIGTERM, SIGHUP) if number]
"""Signals that ask a run to save and leave."""


class OtherRankFailed(RuntimeError):  # noqa: N818 (it says where to look, and is no error of its own)
    """Another process failed, and says why."""


@contextmanager
def fail_together(accelerator: Accelerator) -> Iterator[None]:
    """For work that each process does by itself: if one process fails, all of them leave at the end of the block."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 (raised below, once all have heard of it)
        error = caught
    verdict = _verdict(error, accelerator)
    if verdict:
        raise verdict


def _verdict(error: Exception | None, accelerator: Accelerator) -> Exception | None:
    """The error a process raises once all have reported theirs: its own, if it is the first that met it."""
    if accelerator.num_processes == 1 or not any_rank(error is not None, accelerator):
        return error
    errors: list[str | None] = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    rank, text = next((rank, text) for rank, text in enumerate(errors) if text is not None)
    known = error is not None and errors.index(errors[accelerator.process_index]) < accelerator.process_index
    return _elsewhere(rank, text) if error is None or known else error


def _elsewhere(rank: int, text: str) -> OtherRankFailed:
    return OtherRankFailed(f"rank {rank} failed ({text})")


class Coordinator:
    """Brings all processes out of a run at the same place, whichever of them met an error or an interrupt.

    Ctrl-C, SIGTERM and SIGHUP all arrive as KeyboardInterrupt: at once where nothing is half done, after the update
    where something would be. Several processes must leave at the same place, so there an interrupt waits for the end of
    a stage. A second one is never held back.
    """

    def __init__(self, accelerator: Accelerator, split: bool = False) -> None:
        self.accelerator, self.split = accelerator, split  # whether every process has a part of the weights alone
        self.several = accelerator.num_processes > 1
        self.mid_update = False  # weights and counters are on their way from one epoch to the next
        self.holding = False  # and an interrupt waits for the end of it, and of what is written about it
        self.waiting = False  # an interrupt has come and is held back
        self.agreed = not self.several  # whether all processes are leaving at the same place
        self.since = 0.0  # when this process was last told to stop

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.since and number == SIGHUP:
            return  # a shell passes on the one that the terminal has already sent: nobody is impatient
        before, self.since = self.since, time.monotonic()
        if self.several and before and self.since - before < 2:
            return  # a launcher passes on the Ctrl-C that the terminal has already sent to everyone
        if before or not (self.holding or self.several):
            raise KeyboardInterrupt
        self.waiting = True
        if self.accelerator.is_main_process and not self.agreed:
            when = "this epoch's update" if self.holding else "this stage"
            with suppress(OSError):  # the terminal may be what is gone
                # Not by print: the signal may have come in the middle of one.
                os.write(2, f"\nfinishing {when} before leaving; interrupt again to leave at once\n".encode())

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python hands signals to the main thread alone; elsewhere whoever runs us deals with them
            return
        # Whoever ignores one, as nohup does for its command, is not told to leave by it.
        heeded = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hold(self) -> None:
        """From here to `release` the first interrupt waits.

        Whatever else ends the run before, an error or a second interrupt, finds it `mid_update`, unless whoever has all
        weights and counters together said that it is not.
        """
        self.holding = self.mid_update = True

    def release(self) -> None:
        self.holding = self.mid_update = False
        self._leave_if_asked()

    @contextmanager
    def independent(self) -> Iterator[None]:
        """For work that each process does by itself: if one fails or has to stop, all leave at the end of the block."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 (raised below, once all have heard of it)
            error = caught
        verdict = _verdict(error, self.accelerator)
        if verdict:
            self.agreed = True
            raise verdict
        if not self.holding:
            self._leave_if_asked()

    def raised_by_all(self, error: Exception) -> Exception:
        """The error for this process to raise where all have met the same one: the first rank says why."""
        self.agreed = True
        return error if self.accelerator.is_main_process else _elsewhere(0, f"{type(error).__name__}: {error}")

    def independent_sampling(self) -> AbstractContextManager[None]:
        """`independent`, for work that calls the model: with split weights a call needs the other processes."""
        return nullcontext() if self.split else self.independent()

    def _leave_if_asked(self) -> None:
        if any_rank(self.waiting, self.accelerator):
            self.agreed = True
            raise KeyboardInterrupt
