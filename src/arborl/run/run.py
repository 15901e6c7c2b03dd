"""A run from its first epoch to its last, as the loop in `trainer.py` calls it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import NoReturn

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from ..config.schema import Config
from ..core.advantage import advantages
from ..core.errors import InputError
from ..core.tree import Plan
from ..data.prompts import LocalPrompts, Prompts, local_prompts, split_prompts
from ..distributed.coordination import Coordinator
from ..distributed.gather import any_rank, gather, nonfinite_weights, sum_ranks
from ..engine.autotune import peak_memory
from ..engine.batches import settled
from ..engine.evaluate import evaluate
from ..engine.method import advantage_arguments, advantage_of, window_of
from ..engine.rollout import Rollout
from ..engine.score import score_leaves
from ..engine.state import State
from ..engine.update import Stats
from ..models import Model
from ..rewards import Rewards, Scores
from .checkpoint import checkpoints
from .drawings import draw_tree
from .evaluations import Evaluations
from .folder import evaluation_in
from .guards import Guards
from .logger import Logger
from .metrics import score_metrics, speed_metrics, std, update_metrics
from .paths import CHECKPOINTS, TREES, epoch_name, epoch_of
from .saver import Saver
from .summary import write_summary
from .trees import first_tree


@dataclass
class Run:
    config: Config
    accelerator: Accelerator
    model: Model
    rewards: Rewards
    train_prompts: Prompts
    eval_prompts: Prompts
    state: State
    logger: Logger
    coordinator: Coordinator
    flops: int = 0  # floating-point operations of a forward
    finished: bool = False
    diversity: Tensor = field(default_factory=lambda: torch.zeros(0))  # among each prompt's leaves, this epoch
    undecoded: int = 0  # of this epoch's leaves on this process

    def __post_init__(self) -> None:
        own = self.config, self.accelerator
        self.guards = Guards(*own, self.model, self.rewards, self.logger, self.coordinator)
        self.evaluations = Evaluations(*own, self.rewards, self.eval_prompts, self.logger, self.coordinator)
        self.saver = Saver(self.config, self.accelerator, self.state, self.logger, self.coordinator)

    @property
    def epochs(self) -> int | None:
        """The number of epochs; None where the clock decides."""
        return None if self.config.train.max_seconds else self.config.train.epochs

    def goes_on(self) -> bool:
        """Whether there are epochs, and seconds, left."""
        limit = self.config.train.max_seconds
        # The first rank's clock counts, so that all of them stop after the same epoch.
        used = gather(torch.tensor([self.logger.trained]), self.accelerator)[0] if limit else 0.0
        return (
            self.state.epoch < self.config.train.epochs
            and not (limit and used >= limit)
            and not self.evaluations.hacked
        )

    def local_prompts(self) -> LocalPrompts:
        """This process's prompts of the next epoch."""
        how = split_prompts(self.config.sample, self.accelerator.num_processes)
        return local_prompts(
            self.train_prompts, how, self.accelerator.process_index, self.state.prompts, self.config.seed
        )

    def score(self, rollout: Rollout, local: LocalPrompts) -> Scores:
        """The scores of this process's leaves. Their diversity is kept for `complete_epoch`; for `check_decoded`, how
        many the decoder made no picture of.
        """
        self.guards.check_decoder(rollout, local)
        size = settled(self.config.sample.decode_batch_size)
        scores, self.diversity, self.undecoded = score_leaves(
            self.model, self.rewards.trained, rollout.leaves, local, size, self.logger.stage
        )
        return scores

    def check_finite(self, rollout: Rollout, local: LocalPrompts) -> None:
        """A rollout whose leaves are not finite ends the run."""
        with self.logger.stage("rollout"):
            fine = rollout.leaves.flatten(2).isfinite().all(2)[: local.num_real]
            broken = sum_ranks(float((~fine).sum()), self.accelerator)
        self._stop_if_broken(int(broken), f"the rollout of epoch {self.state.epoch}")

    def check_decoded(self, scores: Scores, local: LocalPrompts) -> None:
        """Leaves that the decoder made no picture of have no score; too many of them end the run."""
        broken, leaves = sum_ranks(float(self.undecoded), self.accelerator), local.total * scores.total.shape[1]
        self._stop_if_undecoded(int(broken), leaves, f"epoch {self.state.epoch}")

    def _stop_if_undecoded(self, broken: int, pictures: int, where: str) -> None:
        if broken > self.config.train.max_failed * pictures:
            problem = f"its decoder made {broken} of the {pictures} pictures of {where} that are not finite"
            self._stop_as_broken(problem, self.state.epoch)
        if broken:
            why = "an overflow, maybe: model.vae_dtype=float32 shows"
            self.logger.warn_once(f"the decoder makes pictures that are not finite, and have no score ({why})")

    def _stop_if_broken(self, pictures: int, where: str) -> None:
        """A model whose answers are not finite ends the run: nothing that is learnt or scored from here on would mean
        anything, and no reward is to blame.
        """
        if pictures:
            weights = "are not finite" if nonfinite_weights(self.state.parameters, self.accelerator) else "are finite"
            problem = f"its answers are not finite, for {pictures} pictures of {where} (its weights {weights})"
            self._stop_as_broken(problem, self.state.epoch)

    def _stop_as_broken(self, problem: str, epoch: int) -> NoReturn:
        sound = self.saver.distrust(epoch)
        last = f"; the last sound checkpoint is {sound}" if sound else ""
        cure = f"a lower train.learning_rate or another precision{last}"
        raise self.coordinator.raised_by_all(InputError("model", None, problem, cure=cure))

    def advantage(self, plan: Plan, scores: Scores, rollout: Rollout) -> Float[Tensor, "prompts edges"]:
        config, density = self.config, rollout.log_density.cpu()
        knobs = advantage_arguments(config, self._spread(scores) if config.advantage.std == "batch" else None)
        return advantages(advantage_of(config), plan, scores.total, density, config.train.adv_clip, **knobs)

    def _spread(self, scores: Scores) -> float:
        """The standard deviation of the epoch's leaf scores, on all ranks."""
        return float(std(gather(scores.total.double(), self.accelerator).flatten()).nan_to_num())

    def records(self, epoch: int) -> bool:
        every = self.config.log.record_every
        return every > 0 and epoch % every == 0 and self.accelerator.is_main_process

    def keep_tree_if_due(
        self,
        epoch: int,
        local: LocalPrompts,
        rollout: Rollout,
        scores: Scores,
        advantage: Float[Tensor, "prompts edges"],
        keep: Bool[Tensor, "prompts edges"],
        stats: Stats,
    ) -> None:
        """The first prompt's trees, as a file and as a drawing."""
        if rollout.x0 is None or stats.ratios is None:
            return
        size = settled(self.config.sample.decode_batch_size)
        tree = first_tree(self.model, epoch, local.prompts.texts[0], rollout, scores, advantage, keep, stats, size)
        stem = self.logger.folder / TREES / epoch_name(epoch)
        with self.logger.writing():
            tree.save(stem)
            draw_tree(tree, stem.with_suffix(".png"))
        self.logger.log_pictures(TREES, epoch, stem.with_suffix(".png"), [tree.prompt])

    def complete_epoch(
        self, plan: Plan, scores: Scores, advantage: Float[Tensor, "prompts edges"], stats: Stats, local: LocalPrompts
    ) -> dict[str, float]:
        """Count the epoch as done; its numbers over all ranks (`docs/metrics.md` says what each means)."""
        state = self.state
        with self.logger.stage("update"):
            broken = nonfinite_weights(state.parameters, self.accelerator)
        if broken:
            tensors = f"{len(broken)} of the {len(state.parameters)} trained tensors"
            problem = f"the update of epoch {state.epoch} left {tensors} with weights that are not finite"
            self._stop_as_broken(f"{problem}, such as {broken[0]}", state.epoch + 1)
        total, with_kl = local.total, self.config.train.kl > 0
        metrics = score_metrics(scores, self.diversity, self.rewards, total, self.accelerator)
        metrics |= update_metrics(advantage, plan, stats, total, with_kl, self.accelerator)
        metrics["window"] = window_of(self.config, plan, state.epoch)
        self.guards.check_update(metrics, stats)
        forwards, parents = plan.forwards * total, int(metrics["parents"])
        state.epoch += 1
        state.prompts += total
        state.forwards += forwards + (parents if with_kl else 0)  # a parent's forward of the reference
        state.forward_backwards += parents
        metrics |= speed_metrics(forwards, parents, self.flops, self.logger.seconds)
        metrics |= {"forwards": state.forwards, "forward_backwards": state.forward_backwards}
        self.coordinator.mid_update = False  # what can be saved is whole, whatever becomes of its metrics
        return metrics

    def evaluate_if_due(self, epoch: int) -> dict[str, float]:
        """Before the first epoch, and every `eval.every`: the metrics of the weights the epoch starts from."""
        every, made = self.config.eval.every, self.logger.evaluated
        if made and made["epoch"] == epoch:
            self.evaluations.look_at(made, self.saver.save_best)
            self.evaluations.show_again(epoch)
            return {name: value for name, value in evaluation_in(made).items() if name != "epoch"}
        if epoch and (not every or epoch % every):
            return {}
        return self._evaluate(epoch, between=epoch > 0)

    def _evaluate(self, epoch: int, between: bool = False) -> dict[str, float]:
        with self.state.ema.applied():
            found = evaluate(
                self.model, self.rewards, self.eval_prompts, self.config, self.coordinator, between=between
            )
        where = f"the evaluation after {epoch} epochs"
        self._stop_if_broken(found.nonfinite, where)
        self._stop_if_undecoded(found.undecoded, found.prompts, where)
        self.evaluations.conclude(epoch, found, self.saver.save_best)
        return found.metrics()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Whatever ends the block: save if possible, close the trackers, say how to resume."""
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Save the last whole epoch of a run that was cut off, and say how to go on."""
        coordinator = self.coordinator
        if not self.finished:
            # One process alone cannot save weights that are split.
            if not coordinator.mid_update and not self.saver.failed and (coordinator.agreed or not self.state.sharded):
                self._save_last()
            kept = checkpoints(self.logger.folder / CHECKPOINTS)
            after = f"{epoch_of(kept[-1].name)} epochs" if kept else "no epoch"
            self.logger.say(f"stopped; {after} saved. To go on: arborl train --resume {quote(str(self.logger.folder))}")
        self.logger.close()
        if self.finished or coordinator.agreed:
            self.accelerator.wait_for_everyone()  # a launcher ends all ranks with the first; one may still be writing

    def _save_last(self) -> None:
        """The last whole epoch; but one whose metrics cannot be written, now neither, does not count."""
        with suppress(InputError):  # what is lost by it is asked next
            self.logger.sync()
        lost = bool(self.logger.unwritten)
        if any_rank(lost, self.accelerator) if self.coordinator.agreed else lost:
            return
        try:
            self.saver.save()
        except InputError as error:
            self.logger.say(str(error))

    def finish(self, write_report: Callable[..., Path]) -> None:
        """The last checkpoint, the last evaluation, and what the run came to."""
        epochs, logger, stopped = self.state.epoch, self.logger, self.evaluations.hacked
        with self.saver.saving():
            self.saver.save()
        with logger.stage("evaluate"):
            metrics = self._evaluate(epochs)
        with self.coordinator.independent(), logger.writing():
            logger.log(epochs, metrics)
            if stopped:
                logger.say("stopped for what looks like reward hacking (eval.watch=stop)")
            if self.accelerator.is_main_process:
                write_summary(logger, self.state, self.evaluations, peak_memory(self.accelerator.device), write_report)
        self.finished = True
