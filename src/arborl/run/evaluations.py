"""Evaluations while a run goes on, and what is concluded from them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from ..config.schema import Config
from ..data.prompts import Prompts
from ..distributed.coordination import Coordinator
from ..distributed.gather import any_rank
from ..engine.evaluate import Evaluation
from ..engine.state import State
from ..models import Model
from ..rewards import Rewards
from ..tools.files import write_atomically
from .checkpoint import evaluation_of_best
from .drawings import sheet
from .folder import finite
from .logger import Logger
from .paths import SAMPLES, epoch_name
from .reward_hacking import best, hacking


@dataclass
class Evaluations:
    """The run's evaluations: pictures and scores of held-out prompts, which weights are the best, reward hacking."""

    config: Config
    accelerator: Accelerator
    model: Model
    rewards: Rewards
    prompts: Prompts
    state: State
    logger: Logger
    coordinator: Coordinator
    newest: Evaluation | None = None
    first: Evaluation | None = None
    hacked: bool = False  # eval.watch=stop saw reward hacking

    def conclude(self, epoch: int, found: Evaluation, save_best: Callable[[Mapping[str, Any]], None]) -> None:
        """Keep an evaluation, keep the weights if they are the best so far, and look for reward hacking."""
        self.newest, self.first = found, self.first or found
        row = {"epoch": epoch, **finite(found.metrics())}
        with self.coordinator.independent():
            self.logger.log_evaluation(row)
            if self.accelerator.is_main_process and len(found.pictures):
                captions = [f"{score:.3f} {text}" for score, text in zip(found.scores, found.captions, strict=True)]
                with self.logger.writing():
                    path = self.logger.folder / SAMPLES / f"{epoch_name(epoch)}.png"
                    boxes = sheet(found.pictures, captions, path)
                    pictures = [shown | {"box": box} for shown, box in zip(found.shown(), boxes, strict=True)]
                    index = {"format": "arborl.sheet", "version": 1, "epoch": epoch, "pictures": pictures}
                    write_atomically(path.with_suffix(".json"), json.dumps(index, indent=1, ensure_ascii=False))
                self.logger.log_pictures(SAMPLES, epoch, path, captions, found.pictures)
        shown = ", ".join(
            f"{name} {found.mean[name]:.4f} ± {found.stderr[name]:.4f}"
            + (f" ({found.failed[name]} without a score)" if found.failed[name] else "")
            for name in self.rewards.functions
        )
        self.logger.say(f"evaluation after {epoch} epochs, {found.prompts} pictures: {shown}")
        for problem in found.problems:
            self.logger.warn_once(f"{problem}, in an evaluation")
        is_best = False
        with self.coordinator.independent():
            if self.accelerator.is_main_process:
                rows = [*self.logger.read_metrics(), row]
                is_best = epoch > 0 and self.best(rows) is row  # untrained weights are not kept: the model has them
        if any_rank(is_best, self.accelerator):
            save_best(row)
        self.watch(row)

    def watch(self, row: Mapping[str, Any]) -> None:
        """Look for reward hacking as of an evaluation, this one or one that a run goes on from."""
        signs: list[str] = []
        with self.coordinator.independent():
            if self.accelerator.is_main_process and self.config.eval.watch != "off":
                aims = {name: aim for name, aim in self.rewards.directions.items() if self.rewards.weights[name]}
                signs = hacking([*self.logger.read_metrics(), row], aims, self.rewards.watched)
        if signs:
            shown = f"{signs[0]}, but {', '.join(signs[1:])}"
            self.logger.warn_once(f"after {row['epoch']} epochs this looks like reward hacking: {shown}")
        if self.config.eval.watch == "stop":
            self.hacked = any_rank(bool(signs), self.accelerator)

    @property
    def best_by(self) -> str:
        """The reward that says which weights are the best."""
        weighed = [name for name in self.rewards.functions if self.rewards.weights[name]]
        return self.config.eval.best or [*self.rewards.watched, *weighed][0]

    def best(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The best evaluation there was: of those in the rows of metrics, and that of the weights that are kept as the
        best, which may be of an epoch that was undone.
        """
        kept = evaluation_of_best(self.logger.folder)
        return best([*([kept] if kept else []), *rows], self.best_by, self.rewards.directions[self.best_by])
