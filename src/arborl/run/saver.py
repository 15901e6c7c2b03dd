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
from .checkpoint import checkpoints, quarantine, save_best, save_checkpoint
from .logger import Logger
from .paths import CHECKPOINTS, epoch_name, epoch_of


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
            save_checkpoint(self.state, folder, self.config.log.keep, main)

    def save_best(self, evaluation: Mapping[str, Any]) -> None:
        if self.enabled:
            with self.saving():
                save_best(self.state, self.logger.folder / CHECKPOINTS, evaluation, self.accelerator.is_main_process)

    def distrust(self, epoch: int) -> Path | None:
        """The weights after so many epochs turned out broken: nothing is saved any more, and where they are saved
        nobody goes on from them. Returns the newest checkpoint from before.
        """
        self.failed = True
        folder = self.logger.folder / CHECKPOINTS
        if self.accelerator.is_main_process and self.began < epoch == self.state.saved:
            quarantine(folder / epoch_name(epoch))
        before = [path for path in checkpoints(folder) if (epoch_of(path.name) or 0) < epoch]
        return before[-1] if before else None

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
        if differ := unequal_weights(self.state.parameters, self.accelerator):
            self.failed = True
            problem = f"{len(differ)} of their trained weights differ, such as {differ[0]}: what is saved is of before"
            raise self.coordinator.raised_by_all(InputError("processes", self.accelerator.num_processes, problem))
