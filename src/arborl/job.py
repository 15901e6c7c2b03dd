"""Everything a run is made of, set up once, and what it reports: the loop in `train.py` stays a page long."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from jaxtyping import Bool, Float, Int
from torch import Tensor

from . import log
from .checkpoint import Ema, State, latest, trainable
from .config.schema import Config
from .core.advantage import advantages
from .core.errors import InputError
from .core.noise import fold
from .core.tree import Plan
from .draw import draw_tree, sheet
from .evaluate import Evaluation, decode_and_score, evaluate, gather
from .models import Model, load_model, model_class
from .plan import check_plan, warnings_about
from .prompts import Prompts, epoch_indices, load_prompts
from .record import Record, RecordedTree, as_bytes
from .rewards import Rewards, Scores, load_rewards
from .update import Stats

RATIO_BOUND, RATIO_BOUND_HALF = 1e-6, 1e-4
"""How far from 1 the first update's ratio may be by rounding alone, in float32 and in half precision."""


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
    ratio_checked: bool = False

    def prompts_of(self, epoch: int) -> tuple[Prompts, Int[Tensor, " prompts"]]:
        """This rank's prompts of an epoch, and their places among those of all ranks."""
        count, rank = self.config.sample.num_prompts, self.accelerator.process_index
        everyone = count * self.accelerator.num_processes
        chosen = epoch_indices(len(self.train_prompts), everyone, epoch, self.config.seed)
        ids = torch.arange(rank * count, (rank + 1) * count)
        return self.train_prompts.take([chosen[i] for i in ids.tolist()]), ids

    def score(self, record: Record, prompts: Prompts) -> Scores:
        size = self.config.sample.decode_batch_size
        return decode_and_score(self.model, self.rewards, record.leaves, prompts, size)[0]

    def advantage(self, plan: Plan, scores: Scores, record: Record) -> Float[Tensor, "prompts edges"]:
        config, density = self.config.advantage, record.log_density.cpu()
        knobs = {"temperature": config.temperature, "backup": config.backup}
        return advantages(config.name, plan, scores.total, density, self.config.train.adv_clip, **knobs)

    def records(self, epoch: int) -> bool:
        every = self.config.log.record_every
        return every > 0 and epoch % every == 0 and self.accelerator.is_main_process

    @torch.no_grad()
    def keep_tree_if_due(
        self,
        epoch: int,
        prompts: Prompts,
        record: Record,
        scores: Scores,
        advantage: Float[Tensor, "prompts edges"],
        keep: Bool[Tensor, "prompts edges"],
    ) -> None:
        """The first prompt's trees, in the Record's file form and as a drawing."""
        if record.clean is None:
            return
        size = self.config.sample.decode_batch_size
        pictures = torch.cat([as_bytes(self.model.decode(part)) for part in record.clean.split(size)])
        tree = RecordedTree(
            epoch=epoch,
            prompt=prompts.texts[0],
            plan=record.plan,
            log_density=record.log_density[0].cpu(),
            advantage=advantage[0].cpu(),
            kept=keep[0].cpu(),
            scores={name: values[0] for name, values in scores.parts.items()} | {"total": scores.total[0]},
            pictures=pictures,
            latents=record.latents[0].cpu(),
        )
        stem = self.run.folder / "trees" / f"epoch_{epoch:06d}"
        tree.save(stem)
        draw_tree(tree, stem.with_suffix(".png"))

    def check_ratio(self, stats: Stats) -> None:
        """Once a run: the update's log-densities, before any step, must be the rollout's."""
        if self.ratio_checked or not stats.steps:
            return
        self.ratio_checked = True
        single = all(p.dtype == torch.float32 for p in self.model.module.parameters())
        bound = RATIO_BOUND if single and self.accelerator.mixed_precision == "no" else RATIO_BOUND_HALF
        error = float(stats.ratio_error)
        if not error <= bound:
            self.run.warn(
                f"the first update's ratio is off by {error:.1e} (rounding explains {bound:.0e}): the rollout drew "
                "from another policy than the update evaluates. Look for dropout, a changed dtype or a reward that "
                "touches the model; sample.pad_batches=true with equal batch sizes rules out rounding"
            )

    def metrics(
        self, plan: Plan, scores: Scores, advantage: Float[Tensor, "prompts edges"], stats: Stats
    ) -> dict[str, float]:
        """Every number of an epoch, over all ranks; `docs/metrics.md` says what each means."""
        total = gather(scores.total.float(), self.accelerator)
        values = {
            "reward": float(total.nanmean()),
            "reward_std": float(_std(total).nanmean()),
            "reward_failed": float(total.isnan().sum()),
        }
        for name in scores.parts:
            part = gather(scores.parts[name], self.accelerator).flatten()
            values |= {f"rewards/{name}/mean": float(part.nanmean()), f"rewards/{name}/std": float(_std(part))}
        size = gather(advantage[:, plan.stochastic].abs().float(), self.accelerator)
        values |= {"advantage_abs": float(size.nanmean()), "advantage_zero": float((size == 0).float().mean())}
        names = sorted(stats.sums)
        sums = torch.stack([stats.sums[name].double().cpu() for name in names]) if names else torch.zeros(0)
        summed = dict(zip(names, gather(sums[None], self.accelerator).sum(0).tolist(), strict=True))
        edges = summed.pop("edges", 0.0)
        values |= {"edges": edges, "parents": summed.pop("parents", 0.0)}
        values |= {name: value / edges for name, value in summed.items()}
        return values | {
            "ratio_error": float(gather(stats.ratio_error.cpu().view(1), self.accelerator).max()),
            "grad_norm": stats.grad_norm,
            "steps": stats.steps,
            "steps_skipped": stats.skipped,
            "window": int(plan.step[plan.stochastic].min()),
            "forwards": self.state.forwards,
            "forward_backwards": self.state.forward_backwards,
        }

    def evaluate_if_due(self, epoch: int) -> dict[str, float]:
        """Before the first epoch, and every `eval.every`: the metrics of the weights the epoch starts from."""
        every = self.config.eval.every
        if epoch and (not every or epoch % every):
            return {}
        return self._evaluate(epoch).metrics()

    def _evaluate(self, epoch: int) -> Evaluation:
        with self.state.ema.applied():
            found = evaluate(self.model, self.rewards, self.eval_prompts, self.config, self.accelerator)
        if self.accelerator.is_main_process and len(found.pictures):
            captions = [f"{score:.3f} {text}" for score, text in zip(found.scores, found.captions, strict=True)]
            sheet(found.pictures, captions, self.run.folder / "samples" / f"epoch_{epoch:06d}.png")
        first = next(iter(self.rewards.functions))
        self.run.say(
            f"evaluation after {epoch} epochs: {first} {found.mean[first]:.4f} ± {found.stderr[first]:.4f} "
            f"on {found.prompts} prompts" + (f", {found.failed} without a score" if found.failed else "")
        )
        return found

    def save(self) -> None:
        if self.accelerator.is_main_process:
            self.state.save(self.run.folder / "checkpoints", self.config.log.keep)

    def save_if_due(self) -> None:
        if self.state.epoch % self.config.log.save_every == 0:
            self.save()

    def finish(self) -> None:
        """The last checkpoint, the last evaluation, and what the run came to."""
        epochs, run = self.config.train.epochs, self.run
        self.save()
        with run.stage("evaluate"):
            after = self._evaluate(epochs)
        run.log(epochs, after.metrics())
        if not self.accelerator.is_main_process:
            return
        rows = run.read_metrics()
        reward = f"eval/{next(iter(self.rewards.functions))}"
        before, after = rows[0], rows[-1]
        summary = {
            "heldout_before": before.get(reward),
            "heldout_before_stderr": before.get(f"{reward}_stderr"),
            "heldout_after": after[reward],
            "heldout_after_stderr": after[f"{reward}_stderr"],
            "seconds": sum(row["step_time"] for row in rows),
            "epochs": epochs,
            "forwards": self.state.forwards,
            "forward_backwards": self.state.forward_backwards,
        }
        (run.folder / "summary.json").write_text(json.dumps(summary, indent=1))
        split = sorted(log.seconds_by_stage(rows).items(), key=lambda item: -item[1])
        run.say(f"{summary['seconds']:.0f} s: " + ", ".join(f"{name} {spent:.1f}" for name, spent in split))
        numbers = [summary[f"heldout_{when}"] for when in ("before", "before_stderr", "after", "after_stderr")]
        shown = ["no score" if number is None else f"{number:.4f}" for number in numbers]
        run.say(f"{reward}: {shown[0]} ± {shown[1]} before, {shown[2]} ± {shown[3]} after {epochs} epochs")
        run.say(f"metrics, pictures, trees and checkpoints: {run.folder}")


def prepare(config: Config, resume: Path | None = None) -> Job:
    """Check everything a user can get wrong, load it, and only then make the run's folder."""
    check_plan(config)
    checkpoint = latest(resume) if resume else None
    folder = resume or log.new_folder(config)
    trackers = log.trackers(config)
    for path, key in ((config.prompts.path, "prompts.path"), (config.eval.prompts, "eval.prompts")):
        if path:
            load_prompts(path, key=key)  # a missing file should not wait for a model to load
    rewards = weights_at_hand(config)
    # accelerate remembers the first precision of a process; a notebook may well train twice with different ones.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=precision(config),
        log_with=[*trackers] or None,
        project_config=ProjectConfiguration(logging_dir=str(folder)),
        # Buffers never change here, and a rank may be ahead of another inside a rollout.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    model = load_model(config, accelerator.device)
    prompts = load_prompts(config.prompts.path, model.default_prompts)
    held_out = load_prompts(config.eval.prompts) if config.eval.prompts else prompts
    probe(model, rewards, prompts)
    parameters = trainable(model.module)
    train = config.train
    optimizer = torch.optim.AdamW(
        list(parameters.values()),
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        fused=accelerator.device.type == "cuda",
    )
    model.module, optimizer = accelerator.prepare(model.module, optimizer)
    state = State(parameters, optimizer, Ema(parameters, train.ema_decay, train.ema_every))
    if checkpoint:
        state.load(checkpoint)
    run = log.Run(folder, config, accelerator, state.epoch)
    for text in warnings_about(config):
        run.warn(text)
    return Job(config, accelerator, model, rewards, prompts, held_out, state, run)


def _std(values: Float[Tensor, "*group n"]) -> Float[Tensor, "*group"]:
    """Population standard deviation over the last axis, of what is not NaN."""
    return ((values - values.nanmean(-1, keepdim=True)) ** 2).nanmean(-1).sqrt()


def weights_at_hand(config: Config) -> Rewards:
    """The rewards; one line names everything that is missing, rewards and model alike."""
    problems: list[InputError] = []
    rewards = None
    try:
        rewards = load_rewards(config.rewards, config.advantage.combine)
    except InputError as error:
        problems.append(error)
    try:
        model_class(config).check(config)
    except InputError as error:
        problems.append(error)
    if rewards is None or problems:
        raise problems[0] if len(problems) == 1 else InputError("missing", None, "; and ".join(map(str, problems)))
    return rewards


def precision(config: Config) -> str:
    """The arithmetic that `train.mixed_precision` means here."""
    if config.train.mixed_precision != "auto":
        return config.train.mixed_precision
    return "bf16" if torch.cuda.is_available() else "no"


@torch.no_grad()
def probe(model: Model, rewards: Rewards, prompts: Prompts) -> None:
    """Score two pictures of pure noise, so that a reward that does not keep its contract is known before the run."""
    two = prompts.take([0, len(prompts) - 1])
    pictures = model.decode(model.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]], device=model.device)))
    if not pictures.isfinite().all():
        raise RuntimeError("the decoder returned pictures that are not finite")
    rewards(pictures, two.texts, two.columns)
