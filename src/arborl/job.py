"""Everything a run is made of, and what it reports: the loop in `train.py` stays a page long."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from . import log
from .advantage import advantage_of, knobs_of
from .batches import settled
from .checkpoint import State, checkpoints, head_of
from .checks import groups_of_leaves, ratio_bound, spread, spread_of, steps_of, transitions
from .collect import gather, gather_words, unequal_weights
from .config.schema import Config
from .core.advantage import advantages
from .core.errors import InputError
from .core.tree import Plan
from .draw import cell_of, draw_tree, interleave, sheet
from .evaluate import Evaluation, decode_and_score, evaluate
from .fit import memory_in_use
from .models import Model
from .plan import BACKWARD_COST, window_of
from .prompts import Prompts, Share, deal, share_of
from .record import Record, RecordedTree, previews
from .report import write_report
from .rewards import Rewards, Scores
from .together import Together
from .update import SUMS, Stats
from .watch import best, diversity, hacking


@dataclass
class Job:
    config: Config
    accelerator: Accelerator
    model: Model
    rewards: Rewards
    train_prompts: Prompts
    eval_prompts: Prompts
    state: State
    run: log.Run
    together: Together
    flops: int = 0  # floating-point operations of a forward
    keeps: bool = True  # write checkpoints; not where only what is learnt counts
    looked: bool = False  # at the first rollout
    examined: bool = False  # the first updates: their ratio, and where their gradients came to
    reached: dict[str, bool] = field(default_factory=dict)  # by gradients so far, of the groups of trained weights
    steps: int = 0  # since this process began
    hacked: bool = False  # eval.watch=stop saw reward hacking
    finished: bool = False
    unsaved: bool = False  # a checkpoint could not be written
    diversity: Tensor = field(default_factory=lambda: torch.zeros(0))  # among each prompt's leaves, this epoch
    evaluated: tuple[int, Evaluation] | None = None  # the newest, and after how many epochs
    first: Evaluation | None = None

    @property
    def epochs(self) -> int | None:
        """How many there will be; None where the clock decides."""
        return None if self.config.train.max_seconds else self.config.train.epochs

    def goes_on(self) -> bool:
        """Whether there are epochs, and seconds, left."""
        limit = self.config.train.max_seconds
        # The first rank's clock counts, so that all of them stop after the same epoch.
        used = gather(torch.tensor([self.run.trained]), self.accelerator)[0] if limit else 0.0
        return self.state.epoch < self.config.train.epochs and not (limit and used >= limit) and not self.hacked

    def share(self) -> Share:
        """This process's prompts of the epoch at hand."""
        how = deal(self.config.sample, self.accelerator.num_processes)
        return share_of(self.train_prompts, how, self.accelerator.process_index, self.state.prompts, self.config.seed)

    def score(self, record: Record, share: Share) -> Scores:
        """The scores of a process's leaves; none for those of places that only fill up."""
        real, size = share.real, settled(self.config.sample.decode_batch_size)
        leaves = record.leaves
        empty = torch.full((len(leaves) - real, leaves.shape[1]), torch.nan)
        self.diversity = torch.full((len(leaves),), torch.nan)
        if not real:
            return Scores({}, empty.double())
        if not self.looked:
            for text in self.model.check_decoder(leaves[0, :2].to(self.model.device)):
                self.run.warn_once(text)
        prompts = share.prompts.take(range(real))
        found, _, thumbnails, _ = decode_and_score(
            self.model, self.rewards.trained, leaves[:real], prompts, size, stage=self.run.stage
        )
        self.diversity[:real] = diversity(thumbnails)
        parts = {name: torch.cat([values, empty]) for name, values in found.parts.items()}
        return Scores(parts, torch.cat([found.total, empty.to(found.total)]), found.lost)

    def tell_failures(self, scores: Scores, share: Share) -> None:
        """A reward that fails too often stops the run, on all ranks and before anything is learnt from the rest."""
        leaves = share.total * scores.total.shape[1]
        for name in self.rewards.trained.functions:
            mine = scores.lost.get(name)
            lost = int(gather(torch.tensor([float(mine.pictures if mine else 0)]), self.accelerator).sum())
            why = "; ".join(gather_words([mine.why] if mine else [], self.accelerator)[:2]) if lost else ""
            if lost > self.config.train.max_failed * leaves and self.rewards.weights[name]:
                problem = f"failed on {lost} of the {leaves} leaves of epoch {self.state.epoch} ({why})"
                error = InputError(f"rewards.{name}", None, problem, "more of them, with train.max_failed")
                raise self.together.found_by_all(error)
            if lost:
                self.run.warn_once(f"rewards.{name} failed ({why}); such leaves are left out and counted")

    def look_at(self, record: Record, scores: Scores, share: Share) -> None:
        """Once, at a run's first epoch: is the log-density that of the noise drawn, and do leaves differ in score?"""
        if self.looked:
            return
        self.looked = True
        steps = steps_of(self.model, record, self.config)
        self.run.warn_if_wrong(transitions(steps, ratio_bound(self.model, self.accelerator))[1])
        found = spread_of(gather(scores.total.float(), self.accelerator)[: share.total], groups_of_leaves(record.plan))
        self.run.warn_if_wrong(spread({0: found}, 0))

    def advantage(self, plan: Plan, scores: Scores, record: Record) -> Float[Tensor, "prompts edges"]:
        config, density = self.config, record.log_density.cpu()
        knobs = knobs_of(config, self._spread(scores) if config.advantage.std == "batch" else None)
        return advantages(advantage_of(config), plan, scores.total, density, config.train.adv_clip, **knobs)

    def _spread(self, scores: Scores) -> float:
        """The standard deviation of the epoch's leaf scores, on all ranks."""
        return float(_std(gather(scores.total.double(), self.accelerator).flatten()).nan_to_num())

    def records(self, epoch: int) -> bool:
        every = self.config.log.record_every
        return every > 0 and epoch % every == 0 and self.accelerator.is_main_process

    def keep_tree_if_due(
        self,
        epoch: int,
        share: Share,
        record: Record,
        scores: Scores,
        advantage: Float[Tensor, "prompts edges"],
        keep: Bool[Tensor, "prompts edges"],
        stats: Stats,
    ) -> None:
        """The first prompt's trees, in the Record's file form and as a drawing."""
        if record.clean is None or stats.ratios is None:
            return
        shown = record.plan.shown
        tree = RecordedTree(
            epoch=epoch,
            prompt=share.prompts.texts[0],
            plan=record.plan,
            log_density=record.log_density[0].cpu(),
            advantage=advantage[0].cpu(),
            kept=keep[0].cpu(),
            ratio=stats.ratios.cpu(),
            scores={name: values[0] for name, values in scores.parts.items()} | {"total": scores.total[0]},
            shown=shown,
            pictures=previews(self.model, record.clean[shown], settled(self.config.sample.decode_batch_size)),
            latents=record.latents[0].cpu(),
        )
        stem = self.run.folder / "trees" / f"epoch_{epoch:06d}"
        with self.run.writing():
            tree.save(stem)
            draw_tree(tree, stem.with_suffix(".png"))
        self.run.show("trees", epoch, stem.with_suffix(".png"), [tree.prompt])

    def complete_epoch(
        self, plan: Plan, scores: Scores, advantage: Float[Tensor, "prompts edges"], stats: Stats, share: Share
    ) -> dict[str, float]:
        """Count the epoch as done; its numbers over all ranks (`docs/metrics.md` says what each means)."""
        state = self.state
        metrics = self._scores(scores, share.total)
        size = gather(advantage[:, plan.stochastic].abs().float(), self.accelerator)[: share.total]
        metrics |= {"advantage_abs": float(size.nanmean()), "advantage_zero": float((size == 0).float().mean())}
        sums = torch.stack([stats.sums[name].double().cpu() for name in SUMS])
        summed = dict(zip(SUMS, gather(sums[None], self.accelerator).sum(0).tolist(), strict=True))
        edges, parents = summed.pop("edges"), summed.pop("parents")
        metrics |= {"edges": edges, "parents": parents}
        with_kl = self.config.train.kl > 0
        metrics |= {name: value / edges for name, value in summed.items() if edges and (with_kl or name != "kl")}
        metrics |= {
            "ratio_error": float(gather(stats.ratio_error.cpu().view(1), self.accelerator).max()),
            "grad_norm": stats.grad_norm,
            "steps": stats.steps,
            "steps_skipped": stats.skipped,
            "steps_broken": stats.broken,
            "window": window_of(self.config, plan, state.epoch),
        }
        self._check(metrics, stats)
        state.epoch += 1
        state.prompts += share.total
        state.forwards += plan.forwards * share.total
        state.forwards += int(parents) if with_kl else 0  # the reference's
        state.forward_backwards += int(parents)
        calls = {"rollout": plan.forwards * share.total, "update": BACKWARD_COST * int(parents)}
        metrics |= {f"tflops/{name}": self._tflops(count, name) for name, count in calls.items()}
        return metrics | {"forwards": state.forwards, "forward_backwards": state.forward_backwards}

    def _tflops(self, forwards: int, stage: str) -> float:
        """Needed operations a second that a stage came to, all processes together."""
        return 1e-12 * self.flops * forwards / self.run.seconds[stage]

    def _scores(self, scores: Scores, prompts: int) -> dict[str, float]:
        total = gather(scores.total.float(), self.accelerator)[:prompts]
        values = {
            "reward": float(total.nanmean()),
            "reward_stderr": _stderr(total),
            "reward_std": float(_std(total).nanmean()),
            "reward_failed": float(total.isnan().sum()),
        }
        unknown = torch.full_like(scores.total, torch.nan, dtype=torch.float32)
        for name in gather_words([*scores.parts], self.accelerator):
            found = gather(scores.parts.get(name, unknown), self.accelerator)[:prompts]
            part = found.flatten()
            values |= {f"rewards/{name}/mean": float(part.nanmean()), f"rewards/{name}/std": float(_std(part))}
            values[f"rewards/{name}/stderr"] = _stderr(found)
            if name in self.rewards.functions:
                values[f"rewards/{name}/failed"] = float(part.isnan().float().mean())
        return values | {"diversity": float(gather(self.diversity, self.accelerator)[:prompts].mean())}

    def _check(self, metrics: dict[str, float], stats: Stats) -> None:
        """Say once what should not be: a first update whose densities are not the rollout's; weights that no gradient
        reaches; broken gradients.
        """
        if metrics["reward"] != metrics["reward"]:
            self.run.warn_once("no leaf got a score this epoch, so nothing was trained: the reward answered NaN alone")
        elif not metrics["steps"] and not metrics["steps_broken"]:
            self.run.warn_once("no prompt's leaves differ in score this epoch, so there was nothing to learn")
        if metrics["steps_broken"]:
            self.run.warn_once("a gradient was not finite and its step was left out (steps_broken counts them)")
        if self.examined or not metrics["steps"]:
            return
        if not self.steps:
            self._check_first(metrics["ratio_error"], stats)
        self.steps += stats.steps
        self.reached = {name: found or self.reached.get(name, False) for name, found in stats.reached.items()}
        self.examined = self.steps > 1  # a last layer that starts at zero lets gradients through from the second step
        missed = [name for name, found in self.reached.items() if not found]
        if self.examined and missed:
            some = ", ".join(missed[:4]) + (", …" if len(missed) > 4 else "")
            self.run.warn_once(
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
            raise self.together.found_by_all(InputError("processes", self.accelerator.num_processes, problem))
        bound = ratio_bound(self.model, self.accelerator)
        if not ratio_error <= bound:
            self.run.warn_once(
                f"the first update's ratio is off by {ratio_error:.1e} (rounding explains {bound:.0e}): the "
                "rollout drew from another policy than the update evaluates. Look for dropout, a changed dtype or a "
                "reward that touches the model; sample.pad_batches=true with equal batch sizes rules out rounding"
            )

    def evaluate_if_due(self, epoch: int) -> dict[str, float]:
        """Before the first epoch, and every `eval.every`: the metrics of the weights the epoch starts from."""
        every = self.config.eval.every
        if epoch and (not every or epoch % every):
            return {}
        return self._evaluate(epoch).metrics()

    def _evaluate(self, epoch: int) -> Evaluation:
        """Score the held-out pictures, keep the weights if they are the best so far, and look for reward hacking."""
        if self.evaluated and self.evaluated[0] == epoch:
            return self.evaluated[1]
        with self.state.ema.applied():
            found = evaluate(self.model, self.rewards, self.eval_prompts, self.config, self.together)
        self.evaluated, self.first = (epoch, found), self.first or found
        with self.together.alone():
            if self.accelerator.is_main_process and len(found.pictures):
                captions = [f"{score:.3f} {text}" for score, text in zip(found.scores, found.captions, strict=True)]
                with self.run.writing():
                    path = self.run.folder / "samples" / f"epoch_{epoch:06d}.png"
                    boxes = sheet(found.pictures, captions, path)
                    pictures = [shown | {"box": box} for shown, box in zip(found.shown(), boxes, strict=True)]
                    index = {"format": "arborl.sheet", "version": 1, "epoch": epoch, "pictures": pictures}
                    log.write_whole(path.with_suffix(".json"), json.dumps(index, indent=1, ensure_ascii=False))
                self.run.show("samples", epoch, path, captions, found.pictures)
        shown = ", ".join(
            f"{name} {found.mean[name]:.4f} ± {found.stderr[name]:.4f}"
            + (f" ({found.failed[name]} without a score)" if found.failed[name] else "")
            for name in self.rewards.functions
        )
        self.run.say(f"evaluation after {epoch} epochs, {found.prompts} pictures: {shown}")
        for problem in found.problems:
            self.run.warn_once(f"{problem}, in an evaluation")
        signs: list[str] = []
        is_best = False
        with self.together.alone():
            if self.accelerator.is_main_process:
                rows = [*self.run.read_metrics(), {"epoch": epoch} | log.finite(found.metrics())]
                is_best = self._is_best(epoch, rows)
                if self.config.eval.watch != "off":
                    aims = {name: aim for name, aim in self.rewards.aims.items() if self.rewards.weights[name]}
                    signs = hacking(rows, aims, self.rewards.watched)
        if self.keeps and bool(gather(torch.tensor([float(is_best)]), self.accelerator).any()):
            with self._saving():
                self.state.save_best(self.run.folder / "checkpoints", self.accelerator.is_main_process)
        if signs:
            told = f"{signs[0]}, but {', '.join(signs[1:])}"
            self.run.warn_once(f"after {epoch} epochs this looks like reward hacking: {told}")
        if self.config.eval.watch == "stop":
            self.hacked = bool(gather(torch.tensor([float(bool(signs))]), self.accelerator).any())
        return found

    @property
    def best_by(self) -> str:
        """The reward that says which weights are the best."""
        weighed = [name for name in self.rewards.functions if self.rewards.weights[name]]
        return self.config.eval.best or [*self.rewards.watched, *weighed][0]

    def _is_best(self, epoch: int, rows: list[dict[str, Any]]) -> bool:
        """Untrained weights are not kept: the model has them."""
        return epoch > 0 and best(rows, self.best_by, self.rewards.aims[self.best_by]) is rows[-1]

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Where a checkpoint cannot be written all ranks leave, and nobody tries again."""
        try:
            with self.together.alone():
                self.run.sync()
                yield
        except Exception:
            self.unsaved = True
            raise

    def save(self) -> None:
        """A checkpoint of the last whole epoch, by the first rank; where weights are split all of them are needed."""
        if self.keeps:
            self.state.save(self.run.folder / "checkpoints", self.config.log.keep, self.accelerator.is_main_process)

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
            raise self.together.found_by_all(InputError("processes", self.accelerator.num_processes, problem))

    def stop_if_broken(self, stats: Stats) -> None:
        """Gradients that are not finite again and again will not mend themselves."""
        most = self.config.train.max_broken
        if stats.broken and self.state.broken >= most:
            problem = f"the last {self.state.broken} optimizer steps had gradients that are not finite"
            error = InputError("train.max_broken", most, problem, "a lower train.learning_rate or another precision")
            raise self.together.found_by_all(error)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Whatever comes, the run is left as it should be."""
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """A run that was cut off keeps what is whole and says how to go on."""
        together = self.together
        if not self.finished:
            # One process alone cannot save weights that are split.
            if not together.torn and not self.unsaved and (together.agreed or not self.state.sharded):
                try:
                    self.save()
                except InputError as error:
                    self.run.say(str(error))
            kept = checkpoints(self.run.folder / "checkpoints")
            after = f"{int(kept[-1].name.removeprefix('epoch_'))} epochs" if kept else "no epoch"
            self.run.say(f"stopped; {after} saved. To go on: arborl train --resume {self.run.folder}")
        self.run.close()
        if self.finished or together.agreed:
            self.accelerator.wait_for_everyone()  # a launcher ends all ranks with the first; one may still be writing

    def finish(self) -> None:
        """The last checkpoint, the last evaluation, and what the run came to."""
        epochs, run, stopped = self.state.epoch, self.run, self.hacked
        with self._saving():
            self.save()
        with run.stage("evaluate"):
            metrics = self._evaluate(epochs).metrics()
        with self.together.alone(), run.writing():
            run.log(epochs, metrics)
            self._sum_up(stopped)
        self.finished = True

    def _sum_up(self, stopped: bool) -> None:
        """What the run came to, for people and in summary.json: with that it is over."""
        epochs, run = self.state.epoch, self.run
        if stopped:
            run.say("stopped for what looks like reward hacking (eval.watch=stop)")
        if not self.accelerator.is_main_process:
            return
        rows = run.read_metrics()
        reward = f"eval/{next(iter(self.rewards.functions))}"
        top = best(rows, self.best_by, self.rewards.aims[self.best_by])
        summary = {
            "heldout_before": rows[0].get(reward),
            "heldout_before_stderr": rows[0].get(f"{reward}_stderr"),
            "heldout_after": rows[-1][reward],
            "heldout_after_stderr": rows[-1][f"{reward}_stderr"],
            "best": top and {"reward": self.best_by, "value": top[f"eval/{self.best_by}"], "epoch": top["epoch"]},
            "seconds": sum(row["step_time"] for row in rows),
            "train_seconds": run.trained,
            "epochs": epochs,
            "forwards": self.state.forwards,
            "forward_backwards": self.state.forward_backwards,
            "peak_memory": memory_in_use(self.accelerator.device),
        }
        split = sorted(log.seconds_by_stage(rows).items(), key=lambda item: -item[1])
        run.say(f"{summary['seconds']:.0f} s: " + ", ".join(f"{name} {spent:.1f}" for name, spent in split))
        numbers = [summary[f"heldout_{when}"] for when in ("before", "before_stderr", "after", "after_stderr")]
        shown = ["–" if number is None else f"{number:.4f}" for number in numbers]
        run.say(f"{reward}: {shown[0]} ± {shown[1]} before, {shown[2]} ± {shown[3]} after {epochs} epochs")
        if top and top["epoch"] not in (0, epochs):
            where, value = run.folder / "checkpoints" / "best", top[f"eval/{self.best_by}"]
            there = where.is_dir() and head_of(where)["epoch"] == top["epoch"]
            kept = where if there else "not kept, as the run went on"
            run.say(f"{self.best_by} was highest after {top['epoch']} epochs, {value:.4f}: {kept}")
        self._show()
        log.write_whole(run.folder / "summary.json", json.dumps(summary, indent=1))
        try:
            run.say(f"all of it on one page: {write_report(run.folder)}")
        except (InputError, OSError) as error:  # the run is whole without it, and `arborl report` makes it later
            run.warn_once(f"no report was written ({error})")
        run.say(f"metrics, pictures, trees and checkpoints: {run.folder}")

    def _show(self) -> None:
        """Where to look: the same captions before and after, and one tree."""
        run, epochs = self.run, self.state.epoch
        before, after = (run.folder / "samples" / f"epoch_{epoch:06d}.png" for epoch in (0, epochs))
        if epochs and before.is_file() and after.is_file():
            both = run.folder / "samples" / "before_after.png"
            try:
                names = ["before", f"after {epochs} epochs"]
                interleave([before, after], names, both, cell_of(self._evaluate(epochs).pictures))
                run.say(f"pictures before and after: {both}")
            except OSError as error:
                if error.errno:  # it is the disk's
                    raise
                run.warn_once(f"no picture of before and after: a sheet cannot be read ({error})")
        if trees := sorted((run.folder / "trees").glob("epoch_*.png")):
            run.say(f"a tree, with its pictures and advantages: {trees[-1]}")


def _std(values: Float[Tensor, "*group n"]) -> Float[Tensor, "*group"]:
    """Population standard deviation over the last axis, of what is not NaN."""
    return ((values - values.nanmean(-1, keepdim=True)) ** 2).nanmean(-1).sqrt()


def _stderr(scores: Float[Tensor, "prompts leaves"]) -> float:
    """How far chance among prompts moves a mean: a prompt's leaves share its difficulty, so its mean counts once."""
    means = scores.nanmean(1)
    means = means[~means.isnan()]
    return float(means.std() / len(means) ** 0.5) if len(means) > 1 else math.nan
