"""A run from its first epoch to its last, as the loop in `trainer.py` calls it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import NoReturn

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from ..config.schema import Config
from ..core.errors import InputError
from ..core.noise import fold
from ..data.prompts import Prompts, local_prompts, split_prompts
from ..distributed.coordination import Coordinator
from ..distributed.gather import any_rank, gather, nonfinite_weights, sum_ranks
from ..engine.autotune import peak_memory
from ..engine.evaluate import evaluate
from ..engine.method import Method, make_plan, window_of
from ..engine.policy import Policy
from ..engine.rates import learning_rates
from ..engine.rollout import Epoch, Rollout
from ..engine.score import LeafScores
from ..engine.state import State
from ..engine.update import Stats
from ..rewards import Rewards
from .checkpoint import checkpoints
from .drawings import draw_tree
from .evaluations import Evaluations
from .folder import evaluation_in
from .guards import Guards
from .logger import Logger
from .metrics import score_metrics, speed_metrics, update_metrics
from .paths import CHECKPOINTS, TREES, epoch_name, epoch_of
from .progress import ProgressBar
from .saver import Saver
from .summary import write_summary
from .trees import TreeFile, first_tree


@dataclass
class Run:
    config: Config
    accelerator: Accelerator
    policy: Policy
    method: Method
    rewards: Rewards
    train_prompts: Prompts
    eval_prompts: Prompts
    state: State
    logger: Logger
    coordinator: Coordinator
    flops: int = 0  # floating-point operations of a forward
    clock: float = 0.0  # the share of train.max_seconds that is over; 0 where the clock decides nothing
    finished: bool = False
    evaluated: dict[str, float] = field(default_factory=dict[str, float])  # metrics of this epoch's evaluation

    def __post_init__(self) -> None:
        own, logger = (self.config, self.accelerator), self.logger
        self.guards = Guards(*own, self.policy, self.state, self.rewards, logger, self.coordinator)
        self.evaluations = Evaluations(*own, self.rewards, self.eval_prompts, logger, self.coordinator)
        self.saver = Saver(*own, self.state, logger, self.coordinator)
        self.bar = ProgressBar(logger, self.state.epoch, self.epochs, self.config.train.max_seconds)
        self.schedule = self.policy.schedule()

    @property
    def epochs(self) -> int | None:
        """The number of epochs; None where the clock decides."""
        return None if self.config.train.max_seconds else self.config.train.epochs

    def goes_on(self) -> bool:
        """Whether there are epochs, and seconds, left."""
        if limit := self.config.train.max_seconds:
            # The first rank's clock counts, so that all of them stop after the same epoch, and step at the same rates.
            used = gather(torch.tensor([self.logger.trained], dtype=torch.float64), self.accelerator)[0]
            self.clock = float(used) / limit
        return self.state.epoch < self.config.train.epochs and self.clock < 1 and not self.evaluations.hacked

    def next_epoch(self) -> Epoch:
        """What this process does in the epoch to come."""
        config, number = self.config, self.state.epoch
        how = split_prompts(config.sample, self.accelerator.num_processes)
        rank, every = self.accelerator.process_index, config.log.record_every
        with self.logger.stage("rollout"):
            plan = make_plan(config, self.schedule, number)
        local = local_prompts(self.train_prompts, how, rank, self.state.prompts, config.seed)
        recorded = every > 0 and number % every == 0 and self.accelerator.is_main_process
        rates = learning_rates(config, number, self.clock)
        return Epoch(number, plan, fold(config.seed, number), local, recorded, rates)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of an epoch. Where each process works by itself, all leave at its end if one failed or has to
        stop; what an update has begun is held together until `complete`.
        """
        coordinator = self.coordinator
        alone: dict[str, Callable[[], AbstractContextManager[None]]] = dict.fromkeys(
            ("encode", "reward", "record"), coordinator.independent
        )
        alone["rollout"] = coordinator.independent_sampling
        with self.logger.stage(name):
            if name == "update":
                coordinator.hold()
            with alone.get(name, nullcontext)():
                yield

    def check_rollout(self, rollout: Rollout) -> None:
        """A rollout whose leaves are not finite ends the run; so does a decoder that fails."""
        with self.logger.stage("rollout"):
            fine = rollout.leaves.flatten(2).isfinite().all(2)[: rollout.prompts.num_real]
            broken = sum_ranks(float((~fine).sum()), self.accelerator)
        self._stop_if_broken(int(broken), f"the rollout of epoch {self.state.epoch}")
        if not self.guards.rollout_checked:
            with self.stage("reward"):
                self.guards.check_decoder(rollout)

    def check_scores(self, rollout: Rollout, scored: LeafScores) -> None:
        """Too many leaves without a picture or a score end the run; the first epoch's scores and densities are looked
        at.
        """
        with self.logger.stage("advantage"):
            broken = sum_ranks(float(scored.undecoded), self.accelerator)
            leaves = rollout.prompts.total * scored.scores.total.shape[1]
            self._stop_if_undecoded(int(broken), leaves, f"epoch {self.state.epoch}")
            self.guards.check_rewards(scored.scores, rollout.prompts, self.state.epoch)
            self.guards.check_rollout(rollout, scored.scores)

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

    def complete(
        self,
        epoch: Epoch,
        rollout: Rollout,
        scored: LeafScores,
        advantage: Float[Tensor, "prompts edges"],
        keep: Bool[Tensor, "prompts edges"],
        stats: Stats,
    ) -> None:
        """Count the epoch as done, write what it came to, and save where that is due."""
        metrics = self._count(epoch, scored, advantage, stats)
        with self.coordinator.independent():
            self.bar.advance(self.logger.log(epoch.number, metrics | self.evaluated))
        self.coordinator.release()
        with self.stage("record"):
            if epoch.recorded:
                self._keep_tree(first_tree(self.policy, epoch, rollout, scored.scores, advantage, keep, stats))
        self.guards.stop_if_nonfinite(stats, self.state.nonfinite_steps)
        with self.stage("checkpoint"):
            self.saver.save_if_due()

    def _keep_tree(self, tree: TreeFile) -> None:
        """The first prompt's trees, as a file and as a drawing."""
        stem = self.logger.folder / TREES / epoch_name(tree.epoch)
        with self.logger.writing():
            tree.save(stem)
            draw_tree(tree, stem.with_suffix(".png"))
        self.logger.log_pictures(TREES, tree.epoch, stem.with_suffix(".png"), [tree.prompt])

    def _count(
        self, epoch: Epoch, scored: LeafScores, advantage: Float[Tensor, "prompts edges"], stats: Stats
    ) -> dict[str, float]:
        """The counters move on; the epoch's numbers over all ranks (`docs/metrics.md` says what each means)."""
        state, plan, loss = self.state, epoch.plan, self.method.loss
        with self.logger.stage("update"):
            broken = nonfinite_weights(state.parameters, self.accelerator)
        if broken:
            tensors = f"{len(broken)} of the {len(state.parameters)} trained tensors"
            problem = f"the update of epoch {state.epoch} left {tensors} with weights that are not finite"
            self._stop_as_broken(f"{problem}, such as {broken[0]}", state.epoch + 1)
        total = epoch.prompts.total
        metrics = score_metrics(scored.scores, scored.diversity, self.rewards, total, self.accelerator)
        metrics |= update_metrics(advantage, loss.edges(plan), stats, total, self.accelerator)
        metrics |= {"window": window_of(self.config, plan, state.epoch), "learning_rate": epoch.learning_rates[0]}
        self.guards.check_update(metrics, stats)
        forwards, parents = plan.forwards * total, int(metrics["parents"])
        state.epoch += 1
        state.prompts += total
        state.forwards += forwards + parents * len(loss.asks)  # a call's forwards of further policies
        state.forward_backwards += parents
        metrics |= speed_metrics(forwards, parents, self.flops, self.logger.seconds)
        metrics |= {"forwards": state.forwards, "forward_backwards": state.forward_backwards}
        self.coordinator.mid_update = False  # what can be saved is whole, whatever becomes of its metrics
        return metrics

    def evaluate_if_due(self, epoch: Epoch) -> None:
        """Before the first epoch, and every `eval.every`: the weights the epoch starts from."""
        number, every, made = epoch.number, self.config.eval.every, self.logger.evaluated
        self.evaluated = {}
        if made and made["epoch"] == number:
            self.evaluations.look_at(made, self.saver.save_best)
            self.evaluations.show_again(number)
            self.evaluated = {name: value for name, value in evaluation_in(made).items() if name != "epoch"}
        elif not number or (every and number % every == 0):
            self.evaluated = self._evaluate(number, between=number > 0)

    def _evaluate(self, epoch: int, between: bool = False) -> dict[str, float]:
        with self.state.ema.applied():
            found = evaluate(self.policy, self.rewards, self.eval_prompts, self.coordinator, between=between)
        where = f"the evaluation after {epoch} epochs"
        self._stop_if_broken(found.nonfinite, where)
        self._stop_if_undecoded(found.undecoded, found.prompts, where)
        self.evaluations.conclude(epoch, found, self.saver.save_best)
        return found.metrics()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, signals ask the run to stop at a good place. Whatever ends the block: save if possible, close the
        trackers, say how to resume.
        """
        with self.coordinator.handling_signals():
            try:
                with self.bar:
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
