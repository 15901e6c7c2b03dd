"""Whole epochs against arithmetic done here, step by step, from the settings: what reaches the optimizer, and how.

Comparing runs with runs finds no fault that both have. Here a run's rollout and scores are taken as they are, and its
advantages, losses, gradients, optimizer steps and averages are worked out again from the papers' formulas.
"""

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor

from arborl import trainer
from arborl.config import load_config
from arborl.data.prompts import Prompts
from arborl.engine.evaluate import evaluate
from arborl.engine.method import Method
from arborl.engine.policy import Policy
from arborl.engine.rollout import Rollout
from arborl.engine.score import LeafScores
from arborl.engine.state import copy_into, trainable
from arborl.engine.update import Trained, TrainingCalls, partition
from arborl.models import Model
from arborl.rewards import Scores, rewards_of
from arborl.worlds.mixture import MixtureModel

SMALL = [
    "sample.num_prompts=3",
    "train.epochs=2",
    "tree.w=2",
    "tree.s=0",
    "eval.num_prompts=2",
    "log.trackers=[]",
    "log.record_every=0",
]


@dataclass
class Epoch:
    """What one epoch of a run had, before and after its update."""

    texts: list[str]
    scores: Scores
    rollout: Rollout
    advantage: Tensor
    keep: Tensor
    key: Any
    before: dict[str, Tensor]
    model: Model
    batches: list[Trained] = field(default_factory=list)  # what each of its model calls trained


class Watched:
    """A run, and what went through its hands."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.epochs: list[Epoch] = []
        self.config = load_config("mixture", [*SMALL, f"log.dir={folder}", *overrides])
        with pytest.MonkeyPatch.context() as patch:
            self._watch(patch)
            self.folder = trainer.train(self.config)
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        self.rows = [json.loads(line) for line in lines]
        last = self.folder / "checkpoints" / f"epoch_{len(self.epochs):06d}"
        self.weights = load_file(last / "weights.safetensors")
        self.average = load_file(last / "ema.safetensors") if self.config.train.ema_decay else {}

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        credit, update, loss = Method.credit, trainer.update, TrainingCalls.loss_of
        seen: list[Scores] = []

        def credited(method: Method, epoch: Any, scored: LeafScores, rollout: Rollout) -> tuple[Tensor, Tensor]:
            seen.append(scored.scores)
            return credit(method, epoch, scored, rollout)

        def updated(policy, state, loss, rollout, advantage, keep, rates):
            before = {name: p.detach().clone() for name, p in state.parameters.items()}
            texts, model = rollout.prompts.prompts.texts, copy.deepcopy(policy.model)
            self.epochs.append(Epoch(texts, seen[-1], rollout, advantage, keep, rollout.key, before, model))
            return update(policy, state, loss, rollout, advantage, keep, rates)

        def lost(training: TrainingCalls, trained: Trained, *rest, **more):
            self.epochs[-1].batches.append(trained)
            return loss(training, trained, *rest, **more)

        patch.setattr(Method, "credit", credited)
        patch.setattr(trainer, "update", updated)
        patch.setattr(TrainingCalls, "loss_of", lost)


def flow_sde(sigma: float, below: float, eta: float) -> tuple[float, float, float]:
    """Flow-GRPO's transition: what x and v are multiplied by, and the noise added."""
    g = eta * math.sqrt(sigma / (1 - (sigma if sigma < 1 else below)))
    d = below - sigma
    return 1 + g**2 * d / (2 * sigma), d * (1 + g**2 * (1 - sigma) / (2 * sigma)), g * math.sqrt(-d)


def zscores(values: Tensor, unit: float | None = None) -> Tensor:
    """Prompt by prompt."""
    return torch.stack([(row - row.mean()) / (unit or row.std(correction=0)) for row in values.double()])


def carried_up(epoch: Epoch, leaves: Tensor, temperature: float) -> Tensor:
    """Each edge's value: of an edge into a leaf the leaf's; else the mean below, by softmax of the densities."""
    plan, density = epoch.rollout.plan, epoch.rollout.log_density.double()
    below: dict[int, list[int]] = {}
    for edge, parent in enumerate(plan.parent.tolist()):
        below.setdefault(parent, []).append(edge)

    def value(prompt: int, edge: int) -> float:
        node = plan.roots + edge
        if node not in below:
            return float(leaves[prompt, plan.leaves.tolist().index(node)])
        weights = torch.softmax(density[prompt, below[node]] / temperature, 0)
        return sum(float(w) * value(prompt, e) for w, e in zip(weights, below[node], strict=True))

    return torch.tensor([[value(p, e) for e in range(plan.edges)] for p in range(len(leaves))], dtype=torch.float64)


def left(images: Tensor, prompts: list[str], columns: dict[str, list[object]]) -> Tensor:
    """How much more light there is on the left."""
    half = images.shape[-1] // 2
    return 10 * (images[..., :half].flatten(1).mean(1) - images[..., half:].flatten(1).mean(1))


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("how", ["zscore", "sum"])
def test_advantages(tmp_path: Path, std: str, how: str):
    """Two rewards combined, centred, divided, carried up by the rollout's densities, and clamped."""
    own = [f"advantage.std={std}", f"advantage.combine={how}", "advantage.temperature=0.4", "loss.adv_clip=0.4"]
    both = ["rewards.place.weight=2", "rewards.left.fn=test_by_hand:left", "rewards.left.weight=-0.5"]
    (epoch,) = Watched(tmp_path, [*own, *both, "train.epochs=1"]).epochs
    place, side = (epoch.scores.parts[name].double() for name in ("place", "left"))
    if how == "zscore":
        place, side = zscores(place), zscores(side)
    total = 2 * place - 0.5 * side
    unit = {"group": None, "batch": float(total.std(correction=0)), "none": 1.0}[std]
    expected = carried_up(epoch, zscores(total, unit), 0.4)
    assert (expected.abs() > 0.4).any()
    assert (expected.abs() < 0.4).any()
    torch.testing.assert_close(epoch.advantage.double(), expected.clamp(-0.4, 0.4), rtol=1e-4, atol=1e-4)


SETTINGS = [
    "train.updates=2",
    "train.learning_rate=0.04",
    "train.schedule=linear",
    "train.warmup=1",
    "loss.clip=0.003",
    "loss.kl=0.3",
    "loss.edge_weight=noise",
    "train.max_grad_norm=0.005",
    "train.beta1=0.6",
    "train.beta2=0.8",
    "train.weight_decay=0.4",
    "train.ema_decay=0.7",
    "train.ema_every=3",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return Watched(tmp_path_factory.mktemp("by_hand"), SETTINGS)


RATES = [0.04 * 1 / 2, 0.04 * 3 / 4, 0.04 * 2 / 4, 0.04 * 1 / 4]
"""Of its four optimizer steps: half a rate to warm up with, and a quarter less at each."""


class ByHand:
    """The same optimizer steps, in double precision and one edge after another."""

    def __init__(self, run: Watched) -> None:
        self.run, self.model = run, copy.deepcopy(run.epochs[0].model)
        self.model.module.double()
        self.base = copy.deepcopy(self.model)
        self.weights = {name: p for name, p in self.model.module.named_parameters() if p.requires_grad}
        self.first = {name: torch.zeros_like(p) for name, p in self.weights.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.weights.items()}
        self.average = {name: p.detach().clone() for name, p in self.weights.items()}
        self.steps, self.clipped, self.norms, self.divergence = 0, [], [], []
        for epoch in run.epochs:
            plan, prompts = epoch.rollout.plan, len(epoch.texts)
            of_call = partition(len(plan.trained_parents), prompts, 2, epoch.key)
            part_of = torch.full((prompts, plan.nodes), -1)
            part_of[:, plan.trained_parents] = of_call
            covered = sorted([p, e] for one in epoch.batches for p, e in zip(one.prompt, one.edge, strict=True))
            assert covered == epoch.keep.nonzero().tolist(), "every kept edge is trained once"
            for part in range(2):
                chosen = epoch.keep & (part_of[:, plan.parent] == part)
                self.step(self.gradients(epoch, chosen.nonzero().tolist()))

    def gradients(self, epoch: Epoch, edges: list[list[int]]) -> dict[str, Tensor]:
        plan, rollout, config = epoch.rollout.plan, epoch.rollout, self.run.config
        added = [self.transition(plan, edge)[2] for edge in plan.stochastic.nonzero().flatten().tolist()]
        loss = torch.zeros((), dtype=torch.float64)
        self.clipped.append(0)
        self.divergence.append(0.0)
        for prompt, edge in edges:
            a, b, std = self.transition(plan, edge)
            parent, child = int(plan.parent[edge]), plan.roots + edge
            x, drawn = (rollout.latents[prompt, node].double() for node in (parent, child))
            t = plan.schedule.timestep[plan.step[edge]].double()[None]
            mean, base = (
                a * x + b * model.predict(x[None], t, rollout.cond[prompt : prompt + 1])[0]
                for model in (self.model, self.base)
            )
            density = (-((drawn - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))).mean()
            ratio = torch.exp(density - rollout.log_density[prompt, edge].double())
            advantage = float(epoch.advantage[prompt, edge])
            low, high = 1 - config.loss.clip, 1 + config.loss.clip
            free, held = advantage * ratio, advantage * ratio.clamp(low, high)
            self.clipped[-1] += int(held < free)
            kl = ((mean - base.detach()) ** 2).mean() / (2 * std**2)
            self.divergence[-1] += float(kl.detach())
            loss = loss - std / (sum(added) / len(added)) * torch.minimum(free, held) + config.loss.kl * kl
        found = torch.autograd.grad(loss / len(edges), list(self.weights.values()))
        return dict(zip(self.weights, found, strict=True))

    def transition(self, plan: Any, edge: int) -> tuple[float, float, float]:
        step = int(plan.step[edge])
        return flow_sde(float(plan.schedule.sigma[step]), float(plan.schedule.sigma_next[step]), 0.7)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> None:
        """Clip by the norm of all; AdamW; every third step the average."""
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        self.norms.append(norm)
        rate = RATES[self.steps]
        self.steps += 1
        for name, p in self.weights.items():
            g = gradients[name] * min(1, 0.005 / norm)
            self.first[name] = 0.6 * self.first[name] + 0.4 * g
            self.second[name] = 0.8 * self.second[name] + 0.2 * g**2
            m, v = self.first[name] / (1 - 0.6**self.steps), self.second[name] / (1 - 0.8**self.steps)
            p -= rate * 0.4 * p + rate * m / (v.sqrt() + 1e-8)
            if self.steps % 3 == 0:
                self.average[name] = 0.7 * self.average[name] + 0.3 * p


def test_weights_averages_and_metrics(trained: Watched):
    """Clip range, KL, edge weights, gradient clipping, AdamW, its falling rate and the average, all at once, over four
    steps.
    """
    mine = ByHand(trained)
    assert mine.steps == 4
    assert sum(mine.clipped), "no edge is held back by the clip, so that it was not tried"
    assert min(mine.norms) > 0.005, "gradients are never clipped, so that it was not tried"
    for name, p in mine.weights.items():
        torch.testing.assert_close(trained.weights[name].double(), p.detach(), rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(trained.average[name].double(), mine.average[name], rtol=1e-3, atol=2e-5)
    for row, epoch in zip(trained.rows, range(2), strict=False):
        steps = slice(2 * epoch, 2 * epoch + 2)
        assert row["grad_norm"] == pytest.approx(max(mine.norms[steps]), rel=1e-3)
        assert row["clip_ratio"] == pytest.approx(sum(mine.clipped[steps]) / row["edges"], abs=1e-6)
        assert row["learning_rate"] == pytest.approx(RATES[2 * epoch])
        assert row["kl"] == pytest.approx(sum(mine.divergence[steps]) / row["edges"], rel=1e-3, abs=1e-7)


def first_step(epoch: Epoch) -> list[list[int]]:
    return epoch.batches[0].calls.tolist()


def test_every_epoch_and_every_seed_has_a_partition_of_its_own(trained: Watched, tmp_path: Path):
    first, second = trained.epochs
    assert first_step(first) != first_step(second)
    other = Watched(tmp_path, [*SETTINGS, "seed=1"])
    assert first_step(other.epochs[0]) != first_step(first)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "twelve.txt"
    path.write_text("\n".join(f"number {n} at the top left" for n in range(12)))
    return path


def test_prompts_advance_and_follow_the_seed(tmp_path: Path, prompt_file: Path):
    """Four epochs of three see all twelve, in another order with another seed."""
    seen = []
    for seed in (0, 1):
        settings = [f"prompts.path={prompt_file}", "train.epochs=4", f"seed={seed}", f"run_name=seed-{seed}"]
        run = Watched(tmp_path, settings)
        seen.append([text for epoch in run.epochs for text in epoch.texts])
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(prompt_file.read_text().splitlines())
    assert seen[0] != seen[1]


def test_evaluations_start_from_noise_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same at each, and none that an epoch trains on; with the steps that they are given."""
    noise, steps = MixtureModel.noise, MixtureModel.schedule
    drawn: list[Tensor] = []
    levels: list[int] = []

    def drew(self: Any, *given: Any) -> Tensor:
        drawn.append(noise(self, *given))
        return drawn[-1]

    def scheduled(self: Any, count: int) -> Any:
        levels.append(count)
        return steps(self, count)

    monkeypatch.setattr(MixtureModel, "noise", drew)
    monkeypatch.setattr(MixtureModel, "schedule", scheduled)
    run = Watched(tmp_path, ["eval.every=1", "eval.num_steps=7"])
    evaluations = [one for one in drawn if len(one) == 2][-3:]  # two pictures each, after 0, 1 and 2 epochs
    assert torch.equal(evaluations[0], evaluations[1])
    assert torch.equal(evaluations[0], evaluations[2])
    roots = torch.cat([epoch.rollout.latents[:, : epoch.rollout.plan.roots].flatten(0, 1) for epoch in run.epochs])
    assert not (roots[:, None] == evaluations[0][None]).all(-1).any()
    assert levels.count(7) == 3


def test_evaluations_look_at_the_average(tmp_path: Path):
    """The last evaluation's scores are those of the averaged weights, and not of the trained ones."""
    run = Watched(tmp_path, ["train.learning_rate=0.05", "train.ema_decay=0.7", "eval.num_prompts=8"])
    model, rewards = run.epochs[-1].model, rewards_of(run.config)
    policy = Policy(model, run.config, Accelerator(cpu=True))
    prompts = Prompts(list(model.default_prompts), {})

    def scored(weights: dict[str, Tensor]) -> float:
        copy_into(trainable(model.module), weights)
        return evaluate(policy, rewards, prompts).mean["place"]

    assert run.rows[-1]["eval/place"] == pytest.approx(scored(run.average), abs=1e-7)
    assert run.rows[-1]["eval/place"] != pytest.approx(scored(run.weights), abs=1e-4)
