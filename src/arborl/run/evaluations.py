"""Evaluations while a run goes on, and what is concluded from them."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..config.schema import Config
from ..core.errors import first_line
from ..data.prompts import Prompts
from ..distributed.coordination import Coordinator
from ..distributed.gather import any_rank
from ..engine.evaluate import Evaluation
from ..rewards import Rewards
from ..tools.files import write_atomically
from ..tools.finite_json import finite_json
from .checkpoint import Best, bests_set_aside, bring_back, evaluation_of_best, kept_best, set_aside
from .drawings import BROKEN_SHEET, check_png, sheet
from .folder import finite, flat, read_evaluations, with_absolute_paths, without_evaluation
from .logger import Logger
from .paths import CHECKPOINTS, SAMPLES, epoch_name
from .reward_hacking import best, hacking, of

SaveBest = Callable[[Mapping[str, Any], str], None]
"""Keeps the weights, as the best by an evaluation and a reward."""
ASKED = (
    *("seed", "eval.num_prompts", "eval.num_between", "eval.num_steps"),
    *("sample.num_steps", "sample.sigmas", "sample.shift", "sample.guidance_scale", "sample.negative_prompt"),
    *("sample.resolution", "sample.width", "sample.num_frames"),
)
"""Settings that decide what an evaluation asks; with what the rewards compute."""


def protocol_of(config: Config, prompts: Prompts) -> str:
    """What evaluations ask, in a word: where it is the same, their scores can be compared.

    Of files the names count, and of servers nothing: both move from one machine to the next.
    """
    asked = {name: value for name, value in flat(config).items() if name in ASKED}
    for name, reward in with_absolute_paths(config).rewards.items():  # those that are only watched are among them
        asked |= {f"{name}.{part}": getattr(reward, part) for part in ("fn", "dtype", "fps")}
        asked |= {f"{name}.{part}": Path(getattr(reward, part)).name for part in ("path", "backbone")}
    asked |= {"prompts": prompts.digest}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def protocol_before(before: Config, config: Config, prompts: Prompts) -> str:
    """What the evaluations of a run asked by its settings `before`, where it did not write that down, as version 0.1.0;
    nothing that could be compared if its prompts were others.
    """
    then, now = with_absolute_paths(before), with_absolute_paths(config)
    same = (then.prompts.path, then.prompts.held_out, then.eval.prompts) == (
        now.prompts.path,
        now.prompts.held_out,
        now.eval.prompts,
    )
    return protocol_of(before, prompts) if same else ""


@dataclass
class Evaluations:
    """The run's evaluations: pictures and scores, which weights are the best, reward hacking."""

    config: Config
    accelerator: Accelerator
    rewards: Rewards
    prompts: Prompts
    logger: Logger
    coordinator: Coordinator
    newest: Evaluation | None = None
    first: Evaluation | None = None
    hacked: bool = False  # eval.watch=stop saw reward hacking

    def __post_init__(self) -> None:
        self.protocol = protocol_of(self.config, self.prompts)

    def conclude(self, epoch: int, found: Evaluation, save_best: SaveBest) -> None:
        """Keep an evaluation, keep the weights if they are the best so far, and look for reward hacking."""
        self.newest, self.first = found, self.first or found
        averaged = self.config.train.ema_decay > 0
        row = {"epoch": epoch, "protocol": self.protocol, "averaged": averaged, **finite(found.metrics())}
        with self.coordinator.independent():
            self.logger.log_evaluation(row)
            if self.accelerator.is_main_process and len(found.pictures):
                captions = self._captions(found.shown())
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
        self.look_at(row, save_best)

    def look_at(self, row: Mapping[str, Any], save_best: SaveBest) -> None:
        """What follows from an evaluation of the weights as they are, made now or before the run was cut off."""
        is_best = False
        with self.coordinator.independent(), self.logger.writing():
            if self.accelerator.is_main_process:
                kept = self._best_so_far()
                is_best = self._beats(row, kept)
                if is_best and kept and not self._is_match(kept):
                    self._set_aside(kept)
        if any_rank(is_best, self.accelerator):
            save_best(row, self.measure)
        self._watch(row)

    def show_again(self, epoch: int) -> None:
        """The pictures of an evaluation that a run goes on from: TensorBoard dropped what it had from there on."""
        path = self.logger.folder / SAMPLES / f"{epoch_name(epoch)}.png"
        index = path.with_suffix(".json")
        with self.coordinator.independent():
            if not (self.accelerator.is_main_process and path.is_file() and index.is_file()):
                return
            try:
                captions = self._captions(finite_json(index.read_bytes())["pictures"])
                check_png(path)
            except BROKEN_SHEET as error:
                problem = f"{path} is damaged ({first_line(error)})"
                self.logger.warn_once(f"TensorBoard lacks the pictures after {epoch} epochs: {problem}")
                return
            self.logger.log_pictures(SAMPLES, epoch, path, captions, only="tensorboard")

    def _captions(self, shown: Sequence[Mapping[str, Any]]) -> list[str]:
        """What stands under pictures: the first reward's score, and the prompt."""
        first = next(iter(self.rewards.functions))
        scores = (item["scores"][first] for item in shown)
        numbers = (math.nan if score is None else score for score in scores)
        return [f"{number:.3f} {item['prompt']}" for number, item in zip(numbers, shown, strict=True)]

    def _watch(self, row: Mapping[str, Any]) -> None:
        """Look for reward hacking as of an evaluation."""
        signs: list[str] = []
        with self.coordinator.independent():
            if self.accelerator.is_main_process and self.config.eval.watch != "off":
                aims = {name: aim for name, aim in self.rewards.directions.items() if self.rewards.weights[name]}
                signs = hacking(self._history(row), aims, self.rewards.watched)
        if signs:
            shown = f"{signs[0]}, but {', '.join(signs[1:])}"
            self.logger.warn_once(f"after {row['epoch']} epochs this looks like reward hacking: {shown}")
        if self.config.eval.watch == "stop":
            self.hacked = any_rank(bool(signs), self.accelerator)

    def _history(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The metrics of the epochs so far, with those evaluations alone that asked what this one did."""
        earlier = [one for one in self.made() if one["epoch"] < row["epoch"]]
        metrics = map(without_evaluation, self.logger.read_metrics())
        return [*sorted([*earlier, *metrics], key=lambda one: one["epoch"]), row]

    @property
    def best_by(self) -> str:
        """The reward that says which weights are the best."""
        weighed = [name for name in self.rewards.functions if self.rewards.weights[name]]
        return self.config.eval.best or [*self.rewards.watched, *weighed][0]

    @property
    def measure(self) -> str:
        """The reward, and whether less of it is better."""
        return f"-{self.best_by}" if self.rewards.directions[self.best_by] < 0 else self.best_by

    def _is_match(self, weights: Best) -> bool:
        """Whether weights were chosen as they are now: by comparable evaluations and by the same measure."""
        row = weights.evaluation
        known = row is not None and self.comparable(row) and of(row, self.best_by) is not None
        return known and weights.by in (None, self.measure)

    def best(self) -> Mapping[str, Any] | None:
        """The best evaluation there was: of the run's epochs, or of the weights that are kept as the best, whose epoch
        may have been undone. Those by other prompts, pictures or rewards are no match for it.
        """
        return self._top([evaluation_of_best(self.logger.folder), *self.made()])

    def _top(self, rows: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """The best of some evaluations, as far as they can be compared."""
        some = [row for row in rows if row is not None and self.comparable(row)]
        return best(some, self.best_by, self.rewards.directions[self.best_by])

    def made(self) -> list[dict[str, Any]]:
        """The evaluations of the run's epochs, as far as they can be compared with those of now."""
        rows = read_evaluations(self.logger.folder)
        return [row for row in rows if "undone" not in row and self.comparable(row)]

    def _best_so_far(self) -> Best | None:
        """The weights that are kept as the best. Where they were chosen by another measure, or there are none, better
        ones of those that were set aside take their place.
        """
        kept = kept_best(self.logger.folder)
        if (kept and self._is_match(kept)) or not (self.logger.folder / CHECKPOINTS).is_dir():
            return kept
        matching = [one for one in bests_set_aside(self.logger.folder) if one.by and self._is_match(one)]
        top = self._top([one.evaluation for one in [kept, *matching] if one])
        better = next((one for one in matching if one.evaluation is top), None)
        if better is None:
            return kept
        if kept:
            self._set_aside(kept)
        self.logger.say(f"checkpoints/{better.path.name} is the best by today's measure again")
        return bring_back(better)

    def _set_aside(self, kept: Best) -> None:
        name = set_aside(kept).name
        self.logger.say(f"checkpoints/best was chosen by another measure; it is kept as {name}")

    def _beats(self, row: Mapping[str, Any], kept: Best | None) -> bool:
        """Whether the weights of an evaluation are to be kept: they are better than those that are, and than the
        untrained ones, which the model has. What else was better is gone.
        """
        untrained = [one for one in read_evaluations(self.logger.folder) if one["epoch"] == 0]
        return row["epoch"] > 0 and self._top([*untrained, kept.evaluation if kept else None, row]) is row

    def comparable(self, row: Mapping[str, Any]) -> bool:
        """Whether an evaluation asked what evaluations ask now."""
        return row.get("protocol") == self.protocol
