"""Checkpoints of a running run: saved when they are due; all ranks leave when one cannot be written."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..config.schema import Config
from ..core.errors import InputError
from ..distributed.coordination import Coordinator
from ..distributed.gather import unequal_weights
from ..engine.state import State
from .checkpoint import checkpoints, problem_with, quarantine, save_best, save_checkpoint
from .logger import Logger
from .paths import BEST, CHECKPOINTS, epoch_name, epoch_of


@dataclass
class Saver:
    """The run's checkpoints: the newest ones, and the best."""

    config: Config
    accelerator: Accelerator
    state: State
    logger: Logger
    coordinator: Coordinator
    enabled: bool = True  # not where only what is learnt counts
    failed: bool = False  # a checkpoint could not be written

    def __post_init__(self) -> None:
        self.began = self.state.epoch  # with this process

    def save_if_due(self) -> None:
        if self.state.epoch % self.config.log.save_every == 0:
            self._check_weights()
            with self.saving():
                self.save()

    def save(self) -> None:
        """A checkpoint of the last whole epoch, by the first rank; where weights are split all of them are needed."""
        if self.enabled:
            folder, main = self.logger.folder / CHECKPOINTS, self.accelerator.is_main_process
            name = epoch_name(self.state.epoch)
            self._say_where(name, save_checkpoint(self.state, folder, self.config.log.keep, main))

    def save_best(self, evaluation: Mapping[str, Any], by: str) -> None:
        if self.enabled:
            folder, main = self.logger.folder / CHECKPOINTS, self.accelerator.is_main_process
            with self.coordinator.independent():  # whatever fails here, the epoch can be saved before all leave
                self._say_where(BEST, save_best(self.state, folder, evaluation, by, main))

    def _say_where(self, name: str, put_aside: Path | None) -> None:
        if put_aside:
            self.logger.say(f"checkpoint {name} has files that are not the run's; it is kept as {put_aside.name}")

    def distrust(self, epoch: int) -> Path | None:
        """The weights after so many epochs turned out broken: nothing is saved any more. Returns the newest sound
        checkpoint from before; where there is one nobody goes on from the broken weights, if they were saved.
        """
        self.failed = True
        if not self.accelerator.is_main_process:  # the first rank says why
            return None
        folder = self.logger.folder / CHECKPOINTS
        before = [path for path in checkpoints(folder) if (epoch_of(path.name) or 0) < epoch]
        sound = next((path for path in reversed(before) if problem_with(path) is None), None)
        if sound and self.began < epoch == self.state.saved:
            try:
                quarantine(folder / epoch_name(epoch), "broken")
            except (OSError, InputError) as error:
                self.logger.warn_once(f"{epoch_name(epoch)} is broken and could not be put aside ({error})")
        return sound

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, where a checkpoint cannot be written all ranks leave, and nobody tries again."""
        try:
            with self.coordinator.independent():
                self.logger.sync()
                yield
        except Exception:
            self.failed = True
            raise

    def _check_weights(self) -> None:
        """Ranks that have drifted apart would save one of several models."""
        if differ := unequal_weights(self.state.every_weight(), self.accelerator):
            self.failed = True
            problem = f"{len(differ)} of their trained weights differ, such as {differ[0]}: what is saved is of before"
            raise self.coordinator.raised_by_all(InputError("processes", self.accelerator.num_processes, problem))
