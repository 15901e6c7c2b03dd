"""Everything a run is made of, from its first epoch to its last: the loop in `trainer.py` stays a page long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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
from ..distributed.gather import gather, unequal_weights
from ..engine.autotune import memory_in_use
from ..engine.batches import settled
from ..engine.cost import BACKWARD_COST
from ..engine.evaluate import Evaluation
from ..engine.method import advantage_of, knobs_of, window_of
from ..engine.rollout import Rollout
from ..engine.score import decode_and_score, diversity
from ..engine.state import State
from ..engine.update import Stats
from ..models import Model
from ..rewards import Rewards, Scores
from .checkpoint import checkpoints, save_best, save_checkpoint
from .drawings import draw_tree
from .evaluations import Evaluations
from .guards import Guards
from .logger import Logger
from .metrics import score_metrics, std, update_metrics
from .paths import CHECKPOINTS, TREES, epoch_name, epoch_of
from .summary import sum_up
from .trees import TreeFile, previews


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
    keeps: bool = True  # write checkpoints; not where only what is learnt counts
    finished: bool = False
    unsaved: bool = False  # a checkpoint could not be written
    diversity: Tensor = field(default_factory=lambda: torch.zeros(0))  # among each prompt's leaves, this epoch

    def __post_init__(self) -> None:
        parts = self.config, self.accelerator, self.model, self.rewards
        self.guards = Guards(*parts, self.logger, self.coordinator)
        self.evaluations = Evaluations(*parts, self.eval_prompts, self.state, self.logger, self.coordinator)

    @property
    def epochs(self) -> int | None:
        """How many there will be; None where the clock decides."""
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
        """This process's prompts of the epoch at hand."""
        how = split_prompts(self.config.sample, self.accelerator.num_processes)
        return local_prompts(
            self.train_prompts, how, self.accelerator.process_index, self.state.prompts, self.config.seed
        )

    def score(self, rollout: Rollout, local: LocalPrompts) -> Scores:
        """The scores of a process's leaves; none for those of places that only fill up."""
        real, size = local.num_real, settled(self.config.sample.decode_batch_size)
        leaves = rollout.leaves
        empty = torch.full((len(leaves) - real, leaves.shape[1]), torch.nan)
        self.diversity = torch.full((len(leaves),), torch.nan)
        if not real:
            return Scores({}, empty.double())
        if not self.guards.rollout_checked:
            for text in self.model.check_decoder(leaves[0, :2].to(self.model.device)):
                self.logger.warn_once(text)
        prompts = local.prompts.take(range(real))
        found, _, thumbnails, _ = decode_and_score(
            self.model, self.rewards.trained, leaves[:real], prompts, size, stage=self.logger.stage
        )
        self.diversity[:real] = diversity(thumbnails)
        parts = {name: torch.cat([values, empty]) for name, values in found.parts.items()}
        return Scores(parts, torch.cat([found.total, empty.to(found.total)]), found.lost)

    def advantage(self, plan: Plan, scores: Scores, rollout: Rollout) -> Float[Tensor, "prompts edges"]:
        config, density = self.config, rollout.log_density.cpu()
        knobs = knobs_of(config, self._spread(scores) if config.advantage.std == "batch" else None)
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
        shown = rollout.plan.preview_nodes
        tree = TreeFile(
            epoch=epoch,
            prompt=local.prompts.texts[0],
            plan=rollout.plan,
            log_density=rollout.log_density[0].cpu(),
            advantage=advantage[0].cpu(),
            kept=keep[0].cpu(),
            ratio=stats.ratios.cpu(),
            scores={name: values[0] for name, values in scores.parts.items()} | {"total": scores.total[0]},
            shown=shown,
            pictures=previews(self.model, rollout.x0[shown], settled(self.config.sample.decode_batch_size)),
            latents=rollout.latents[0].cpu(),
        )
        stem = self.logger.folder / TREES / epoch_name(epoch)
        with self.logger.writing():
            tree.save(stem)
            draw_tree(tree, stem.with_suffix(".png"))
        self.logger.show(TREES, epoch, stem.with_suffix(".png"), [tree.prompt])

    def complete_epoch(
        self, plan: Plan, scores: Scores, advantage: Float[Tensor, "prompts edges"], stats: Stats, local: LocalPrompts
    ) -> dict[str, float]:
        """Count the epoch as done; its numbers over all ranks (`docs/metrics.md` says what each means)."""
        state = self.state
        total, with_kl = local.total, self.config.train.kl > 0
        metrics = score_metrics(scores, self.diversity, self.rewards, total, self.accelerator)
        metrics |= update_metrics(advantage, plan, stats, total, with_kl, self.accelerator)
        metrics["window"] = window_of(self.config, plan, state.epoch)
        parents = metrics["parents"]
        self.guards.check_update(metrics, stats)
        state.epoch += 1
        state.prompts += local.total
        state.forwards += plan.forwards * local.total
        state.forwards += int(parents) if with_kl else 0  # the reference's
        state.forward_backwards += int(parents)
        calls = {"rollout": plan.forwards * local.total, "update": BACKWARD_COST * int(parents)}
        metrics |= {f"tflops/{name}": self._tflops(count, name) for name, count in calls.items()}
        return metrics | {"forwards": state.forwards, "forward_backwards": state.forward_backwards}

    def _tflops(self, forwards: int, stage: str) -> float:
        """Needed operations a second that a stage came to, all processes together."""
        return 1e-12 * self.flops * forwards / self.logger.seconds[stage]

    def evaluate_if_due(self, epoch: int) -> dict[str, float]:
        """Before the first epoch, and every `eval.every`: the metrics of the weights the epoch starts from."""
        every = self.config.eval.every
        if epoch and (not every or epoch % every):
            return {}
        return self._evaluate(epoch).metrics()

    def _evaluate(self, epoch: int) -> Evaluation:
        return self.evaluations.at(epoch, self._save_best)

    def _save_best(self) -> None:
        if self.keeps:
            with self._saving():
                save_best(self.state, self.logger.folder / CHECKPOINTS, self.accelerator.is_main_process)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Where a checkpoint cannot be written all ranks leave, and nobody tries again."""
        try:
            with self.coordinator.independent():
                self.logger.sync()
                yield
        except Exception:
            self.unsaved = True
            raise

    def save(self) -> None:
        """A checkpoint of the last whole epoch, by the first rank; where weights are split all of them are needed."""
        if self.keeps:
            save_checkpoint(
                self.state, self.logger.folder / CHECKPOINTS, self.config.log.keep, self.accelerator.is_main_process
            )

    def save_if_due(self) -> None:
        if self.state.epoch % self.config.log.save_every == 0:
            self._check_weights()
            with self._saving():
                self.save()

    def _check_weights(self) -> None:
        """Ranks that have drifted apart would save one of several models."""
        if differ := unequal_weights(self.state.parameters, self.accelerator):
            self.unsaved = True
            problem = f"{len(differ)} of their trained weights differ, such as {differ[0]}: what is saved is of before"
            raise self.coordinator.raised_by_all(InputError("processes", self.accelerator.num_processes, problem))

    def stop_if_nonfinite(self, stats: Stats) -> None:
        """Gradients that are not finite again and again will not mend themselves."""
        most = self.config.train.max_nonfinite_steps
        if stats.nonfinite and self.state.nonfinite_steps >= most:
            problem = f"the last {self.state.nonfinite_steps} optimizer steps had gradients that are not finite"
            error = InputError(
                "train.max_nonfinite_steps", most, problem, "a lower train.learning_rate or another precision"
            )
            raise self.coordinator.raised_by_all(error)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Whatever comes, the run is left as it should be."""
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """A run that was cut off keeps what is whole and says how to go on."""
        together = self.coordinator
        if not self.finished:
            # One process alone cannot save weights that are split.
            if not together.mid_update and not self.unsaved and (together.agreed or not self.state.sharded):
                try:
                    self.save()
                except InputError as error:
                    self.logger.say(str(error))
            kept = checkpoints(self.logger.folder / CHECKPOINTS)
            after = f"{epoch_of(kept[-1].name)} epochs" if kept else "no epoch"
            self.logger.say(f"stopped; {after} saved. To go on: arborl train --resume {self.logger.folder}")
        self.logger.close()
        if self.finished or together.agreed:
            self.accelerator.wait_for_everyone()  # a launcher ends all ranks with the first; one may still be writing

    def finish(self, write_report: Callable[[Path], Path]) -> None:
        """The last checkpoint, the last evaluation, and what the run came to."""
        epochs, run, stopped = self.state.epoch, self.logger, self.evaluations.hacked
        with self._saving():
            self.save()
        with run.stage("evaluate"):
            metrics = self._evaluate(epochs).metrics()
        with self.coordinator.independent(), run.writing():
            run.log(epochs, metrics)
            if stopped:
                run.say("stopped for what looks like reward hacking (eval.watch=stop)")
            if self.accelerator.is_main_process:
                sum_up(run, self.state, self.evaluations, memory_in_use(self.accelerator.device), write_report)
        self.finished = True
