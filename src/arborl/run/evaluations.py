"""Evaluations while a run goes on, and what is concluded from them."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from ..config.schema import Config, RewardConfig
from ..data.prompts import Prompts
from ..distributed.coordination import Coordinator
from ..distributed.gather import any_rank
from ..engine.evaluate import Evaluation
from ..engine.state import State
from ..models import Model
from ..rewards import Rewards
from ..tools.files import write_atomically
from .checkpoint import evaluation_of_best, set_aside_best
from .drawings import sheet
from .folder import finite, flat, read_evaluations
from .logger import Logger
from .paths import SAMPLES, epoch_name
from .reward_hacking import best, hacking, of

ASKED = (
    *("seed", "eval.num_prompts", "eval.num_between", "eval.num_steps"),
    *("sample.num_steps", "sample.sigmas", "sample.shift", "sample.guidance_scale", "sample.negative_prompt"),
    *("sample.resolution", "sample.width", "sample.num_frames"),
)
"""Settings that decide what an evaluation asks; with the rewards' own `fn`, `dtype` and `fps`."""


def protocol_of(config: Config, prompts: Prompts) -> str:
    """What evaluations ask, in a word: where it is the same, their scores can be compared."""
    asked = {name: value for name, value in flat(config).items() if name in ASKED}
    # A run's own settings have those that are only watched among its rewards, those it was started with may not.
    rewards = {name: RewardConfig() for name in config.eval.rewards} | config.rewards
    asked |= {f"{name}.{part}": getattr(r, part) for name, r in rewards.items() for part in ("fn", "dtype", "fps")}
    asked |= {"prompts": prompts.digest}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Evaluations:
    """The run's evaluations: pictures and scores, which weights are the best, reward hacking."""

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

    def __post_init__(self) -> None:
        self.protocol = protocol_of(self.config, self.prompts)

    def conclude(self, epoch: int, found: Evaluation, save_best: Callable[[Mapping[str, Any]], None]) -> None:
        """Keep an evaluation, keep the weights if they are the best so far, and look for reward hacking."""
        self.newest, self.first = found, self.first or found
        row = {"epoch": epoch, "protocol": self.protocol, **finite(found.metrics())}
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

    def look_at(self, row: Mapping[str, Any], save_best: Callable[[Mapping[str, Any]], None]) -> None:
        """What follows from an evaluation of the weights as they are, made now or before the run was cut off."""
        is_best = False
        with self.coordinator.independent():
            if self.accelerator.is_main_process:
                is_best = self._beats_the_kept(row)
                if is_best and (aside := set_aside_best(self.logger.folder, self.comparable)):
                    self.logger.say(f"checkpoints/best was chosen by other evaluations; it is kept as {aside.name}")
        if any_rank(is_best, self.accelerator):
            save_best(row)
        self._watch(row)

    def show_again(self, epoch: int) -> None:
        """The pictures of an evaluation that a run goes on from: TensorBoard dropped what it had from there on."""
        path = self.logger.folder / SAMPLES / f"{epoch_name(epoch)}.png"
        index = path.with_suffix(".json")
        if not (self.accelerator.is_main_process and path.is_file() and index.is_file()):
            return
        try:
            captions = self._captions(json.loads(index.read_bytes())["pictures"])
            self.logger.log_pictures(SAMPLES, epoch, path, captions, only="tensorboard")
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.logger.warn_once(f"TensorBoard lacks the pictures after {epoch} epochs: {path} is damaged ({error})")

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

    def best(self) -> Mapping[str, Any] | None:
        """The best evaluation there was: of the run's epochs, or of the weights that are kept as the best, whose epoch
        may have been undone. Those by other prompts, pictures or rewards are no match for it.
        """
        rows = [row for row in read_evaluations(self.logger.folder) if "undone" not in row and self.comparable(row)]
        kept = self._kept()
        return best([*([kept] if kept else []), *rows], self.best_by, self.rewards.directions[self.best_by])

    def _beats_the_kept(self, row: Mapping[str, Any]) -> bool:
        """Whether the weights of an evaluation are to be kept: they are better than those that are, and than the
        untrained ones, which the model has. What else was better is gone.
        """
        untrained = [one for one in read_evaluations(self.logger.folder) if one["epoch"] == 0 and self.comparable(one)]
        others = [*untrained, *filter(None, [self._kept()])]
        top = best([*others, row], self.best_by, self.rewards.directions[self.best_by])
        return row["epoch"] > 0 and top is row

    def comparable(self, row: Mapping[str, Any]) -> bool:
        """Whether an evaluation asked what evaluations ask now."""
        return row.get("protocol", self.protocol) == self.protocol and of(row, self.best_by) is not None

    def _kept(self) -> Mapping[str, Any] | None:
        kept = evaluation_of_best(self.logger.folder)
        return kept if kept and self.comparable(kept) else None
