"""Checks for what may silently be wrong with a run, made while it runs."""

import math
from dataclasses import dataclass, field

from accelerate import Accelerator

from ..config.schema import Config
from ..core.errors import InputError
from ..data.prompts import LocalPrompts
from ..distributed.coordination import Coordinator
from ..distributed.gather import gather, gather_strings, sum_ranks
from ..engine.checks import (
    check_spread,
    check_transitions,
    groups_of_leaves,
    ratio_bound,
    recheck_steps,
    spread_of,
    unasked_parts,
)
from ..engine.policy import Policy
from ..engine.rollout import Rollout
from ..engine.state import State
from ..engine.update import Stats
from ..rewards import Rewards, Scores
from .logger import Logger


@dataclass
class Guards:
    """Checks of a run's first epochs and of every epoch's rewards. Each warns once."""

    config: Config
    accelerator: Accelerator
    policy: Policy
    state: State
    rewards: Rewards
    logger: Logger
    coordinator: Coordinator
    rollout_checked: bool = False  # the first one: its densities, and whether leaves differ
    reached: dict[str, bool] = field(default_factory=dict)  # by gradients so far, of the groups of trained weights
    steps: int = 0  # since this process began

    def check_rewards(self, scores: Scores, local: LocalPrompts, epoch: int) -> None:
        """A reward that gives too many leaves no score stops the run, on all ranks and before anything is learnt from
        the rest. It may have failed on them, or have answered NaN.
        """
        leaves = local.total * scores.total.shape[1]
        for name in self.rewards.trained.functions:
            mine = scores.failures.get(name)
            failed = int(sum_ranks(float(mine.pictures if mine else 0), self.accelerator))
            why = "; ".join(gather_strings([mine.why] if mine else [], self.accelerator)[:2]) if failed else ""
            known = scores.parts.get(name)
            none = 0 if known is None else int(known[: local.num_real].isnan().sum())
            lost = max(failed, int(sum_ranks(float(none), self.accelerator)))
            if lost > self.config.train.max_failed * leaves and self.rewards.weights[name]:
                problem = f"failed on {lost} of the {leaves} leaves of epoch {epoch} ({why})"
                if not failed:
                    problem = f"answered NaN, no score, for {lost} of the {leaves} leaves of epoch {epoch}"
                elif lost > failed:
                    problem = (
                        f"has no score for {lost} of the {leaves} leaves of epoch {epoch}: {failed} failed ({why})"
                    )
                error = InputError(f"rewards.{name}", None, problem, cure="a larger train.max_failed")
                raise self.coordinator.raised_by_all(error)
            if failed:
                self.logger.warn_once(f"rewards.{name} failed ({why}); such leaves are left out and counted")
            if lost > failed:
                text = "answered NaN, no score, for some leaves; such leaves are left out and counted"
                self.logger.warn_once(f"rewards.{name} {text}")

    def check_decoder(self, rollout: Rollout) -> None:
        """Once, at a run's first epoch: does the decoder draw what it draws in full precision?"""
        if rollout.prompts.num_real:
            for text in self.policy.model.check_decoder(rollout.leaves[0, :2].to(self.policy.device)):
                self.logger.warn_once(text)

    def check_rollout(self, rollout: Rollout, scores: Scores) -> None:
        """Once, at a run's first epoch: is the log-density that of the noise drawn, and do leaves differ in score?"""
        if self.rollout_checked:
            return
        self.rollout_checked = True
        if self.policy.compares_densities:
            steps = recheck_steps(self.policy, rollout)
            self.logger.warn_if_wrong(check_transitions(steps, ratio_bound(self.policy))[1])
        total = gather(scores.total.float(), self.accelerator)[: rollout.prompts.total]
        found = spread_of(total, groups_of_leaves(rollout.plan))
        self.logger.warn_if_wrong(check_spread({0: found}, 0))

    def check_update(self, metrics: dict[str, float], stats: Stats) -> None:
        """Say once what should not be: a first update whose densities are not the rollout's; weights that no gradient
        reaches; broken gradients.
        """
        if math.isnan(metrics["reward"]):
            self.logger.warn_once(
                "no leaf got a score this epoch, so nothing was trained: the reward answered NaN alone"
            )
        elif not metrics["steps"] and not metrics["steps_nonfinite"]:
            self.logger.warn_once("no prompt's leaves differ in score this epoch, so there was nothing to learn")
        if metrics["steps_nonfinite"]:
            self.logger.warn_once("a gradient was not finite and its step was left out (steps_nonfinite counts them)")
        if not self.state.check_gradients or not metrics["steps"]:
            return
        if not self.steps:
            self._check_first(metrics.get("ratio_error", 0.0), stats)
        self.steps += stats.steps
        self.reached = {name: found or self.reached.get(name, False) for name, found in stats.reached.items()}
        # A last layer that starts at zero lets gradients through from the second step on.
        self.state.check_gradients = self.steps < 2
        if self.state.check_gradients:
            return
        for part in (unasked := unasked_parts(self.reached, [*self.policy.parts])):
            self.logger.warn_once(f"{part} was not asked in the first steps: it is for other noise levels than these")
        missed = [name for name, found in self.reached.items() if not found and name.split(".")[0] not in unasked]
        if missed:
            some = ", ".join(missed[:4]) + (", …" if len(missed) > 4 else "")
            self.logger.warn_once(
                f"no gradient reached {len(missed)} of {len(self.reached)} groups of trained weights in the first "
                f"steps, so they stay as they are: {some}"
            )

    def _check_first(self, ratio_error: float, stats: Stats) -> None:
        """At the first step weights are the rollout's own, and gradients must be everyone's."""
        if stats.unequal:
            problem = (
                f"{len(stats.unequal)} gradients differ between them after the first backward pass, such as that of "
                f"{stats.unequal[0]}: they are not synchronised, and every process would train a model of its own"
            )
            raise self.coordinator.raised_by_all(InputError("processes", self.accelerator.num_processes, problem))
        bound = ratio_bound(self.policy)
        if self.policy.compares_densities and not ratio_error <= bound:
            self.logger.warn_once(
                f"the first update's ratio is off by {ratio_error:.1e} (rounding explains {bound:.0e}): the "
                "rollout drew from another policy than the update evaluates. Look for dropout, a changed dtype or a "
                "reward that touches the model; sample.pad_batches=true with equal batch sizes rules out rounding"
            )

    def stop_if_nonfinite(self, stats: Stats, in_a_row: int) -> None:
        """Gradients that are not finite again and again will not mend themselves."""
        most = self.config.train.max_nonfinite_steps
        if stats.nonfinite and in_a_row >= most:
            problem = f"the last {in_a_row} optimizer steps had gradients that are not finite"
            cure = "a lower train.learning_rate or another precision"
            raise self.coordinator.raised_by_all(InputError("train.max_nonfinite_steps", most, problem, cure=cure))
