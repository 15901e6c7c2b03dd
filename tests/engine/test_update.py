"""The update: ratio 1 at the first step, the reward's own gradient, no step where there is nothing to learn."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborl.core.advantage import advantages, backup_values, tree
from arborl.core.losses import clipped_surrogate
from arborl.core.noise import fold
from arborl.core.prune import prune
from arborl.core.schedule import shifted
from arborl.core.tree import grow
from arborl.engine.checks import recheck_steps
from arborl.engine.contracts import loss_of
from arborl.engine.method import make_plan
from arborl.engine.rollout import Epoch, Rollout, sample_trees
from arborl.engine.state import Ema, State, trainable
from arborl.engine.update import Stats, Trained, TrainingCalls, partition, update
from arborl.models import Model
from arborl.worlds.mixture import place

from conftest import local_of, make_policy

TEXTS = ["a dot at the top left", "a dot at the top right", "a dot at the bottom left", "a dot at the bottom right"]


class Bench:
    """A policy, its optimizer and one rollout, ready for an update."""

    def __init__(self, overrides: list[str], epoch: int = 0, texts: list[str] = TEXTS) -> None:
        self.policy = make_policy(overrides)
        self.config, self.model, self.loss = self.policy.config, self.policy.model, loss_of(self.policy.config)
        parameters = trainable(self.model.module)
        train = self.config.train
        optimizer = torch.optim.AdamW(list(parameters.values()), lr=train.learning_rate)
        old = self.policy.keep_beside(parameters)
        self.state = State(parameters, optimizer, Ema(parameters, train.ema_decay), old)
        self.key = fold(self.config.seed, epoch)
        self.texts, self.epoch = texts, epoch
        self.record = self.rollout()

    def rollout(self) -> Rollout:
        plan = make_plan(self.config, self.policy.schedule(), self.epoch)
        return sample_trees(
            self.policy, Epoch(self.epoch, plan, self.key, local_of(self.texts)), self.policy.encode(self.texts)
        )

    def advantage(self, scores: torch.Tensor | None = None) -> torch.Tensor:
        if scores is None:
            scores = torch.randn(len(self.texts), len(self.record.plan.leaves), generator=torch.manual_seed(0))
        return advantages(
            tree, self.record.plan, scores, self.record.log_density, 5.0, temperature=1.0, backup="softmax"
        )

    def kept(self, advantage: torch.Tensor) -> torch.Tensor:
        return prune(self.record.plan, advantage, among=self.loss.edges(self.record.plan))

    def update(self, advantage: torch.Tensor) -> Stats:
        return update(self.policy, self.state, self.loss, self.record, advantage, self.kept(advantage))

    def calls(self, advantage: torch.Tensor) -> TrainingCalls:
        return TrainingCalls(self.policy, self.loss, self.record, advantage)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.state.parameters.values()])


def wake(model: Model) -> None:
    """Move trained weights off their no-op start, so that they matter."""
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.module.parameters() if p.requires_grad):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))


MIXTURE = ["sample.num_prompts=4", "train.updates=1", "loss.kl=0"]
SETTINGS = {
    "mixture": MIXTURE,
    "mixture flat": [*MIXTURE, "algo=flat", "sample.group_size=4"],
    "mixture cps": [*MIXTURE, "kernel.name=cps"],
    "mixture dance": [*MIXTURE, "kernel.name=dance_sde", "kernel.eta=0.3"],
    "mixture dppo": [*MIXTURE, "loss.name=dppo"],
    "mixture guard": [*MIXTURE, "loss.name=guard"],
}


def first_ratio_error(bench: Bench) -> float:
    wake(bench.model)
    bench.record = bench.rollout()
    return float(bench.update(bench.advantage()).ratio_error)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("name", SETTINGS)
def test_ratio_is_exactly_one_with_equal_shapes_on_the_mixture(name: str, size: int):
    batch = [f"sample.batch_size={size}", f"train.batch_size={size}", "sample.pad_batches=true"]
    assert first_ratio_error(Bench([*SETTINGS[name], *batch])) == 0.0


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("sizes", [(1024, 3), (5, 64), (1, 7)])
def test_ratio_is_one_to_rounding_with_any_shapes_on_the_mixture(name: str, sizes: tuple[int, int]):
    batch = [f"sample.batch_size={sizes[0]}", f"train.batch_size={sizes[1]}"]
    assert first_ratio_error(Bench([*SETTINGS[name], *batch])) <= 1e-6


SD3_TEXTS = ["a photo of a cat", "red house"]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("extra", [[], ["model.train=full"], ["sample.guidance_scale=3.0"]])
def test_ratio_is_exactly_one_with_equal_shapes_on_sd3(sd3_overrides, size: int, extra: list[str]):
    batch = [f"sample.batch_size={size}", f"train.batch_size={size}", "sample.pad_batches=true"]
    assert first_ratio_error(Bench([*sd3_overrides, *extra, *batch], texts=SD3_TEXTS)) == 0.0


@pytest.mark.parametrize("sizes", [(16, 3), (1, 8)])
@pytest.mark.parametrize("extra", [[], ["model.train=full"], ["train.cfg_grad=cond", "sample.guidance_scale=3.0"]])
def test_ratio_is_one_to_rounding_with_any_shapes_on_sd3(sd3_overrides, sizes: tuple[int, int], extra: list[str]):
    batch = [f"sample.batch_size={sizes[0]}", f"train.batch_size={sizes[1]}"]
    assert first_ratio_error(Bench([*sd3_overrides, *extra, *batch], texts=SD3_TEXTS)) <= 1e-6


@pytest.mark.parametrize("value", [0.1, 0.0, 24.7])
def test_equal_scores_leave_weights_and_optimizer_untouched(value: float):
    bench = Bench(MIXTURE)
    bench.update(bench.advantage())  # so that the optimizer has a state to lose
    weights, optimizer = bench.weights(), copy.deepcopy(bench.state.optimizer.state_dict())
    stats = bench.update(bench.advantage(torch.full((4, 16), value)))
    assert (stats.steps, stats.skipped) == (0, 1)
    assert torch.equal(bench.weights(), weights)
    for mine, before in zip(
        bench.state.optimizer.state_dict()["state"].values(), optimizer["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[name], before[name]) for name in before)


def test_with_kl_equal_scores_pull_back_to_the_base_model():
    bench = Bench([*MIXTURE, "loss.kl=1.0", "train.learning_rate=0.001"])
    wake(bench.model)
    divergence = []
    for _ in range(30):
        bench.record = bench.rollout()
        stats = bench.update(bench.advantage(torch.zeros(4, 16)))
        divergence.append(float(stats.sums["kl"] / stats.sums["edges"]))
    assert stats.steps == 1
    assert divergence[-1] < 0.5 * divergence[0]


def test_masked_leaves_train_nothing_below_them():
    bench = Bench(MIXTURE)
    scores = torch.randn(4, 16)
    scores[0] = math.nan
    stats = bench.update(bench.advantage(scores))
    assert int(stats.sums["edges"]) == 3 * 30
    assert int(stats.sums["parents"]) == 3 * 15
    assert math.isfinite(stats.grad_norm)


def gradient(bench: Bench, advantage: torch.Tensor) -> torch.Tensor:
    """What the optimizer is handed, by taking its step away."""
    seen: list[torch.Tensor] = []
    bench.state.optimizer.step = lambda *_, **__: seen.append(
        torch.cat([p.grad.flatten().clone() for p in bench.state.parameters.values()])
    )
    bench.update(advantage)
    return seen[0]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_micro_batch_size_does_not_change_the_gradient(size: int):
    whole = Bench([*MIXTURE, "train.batch_size=1000", "loss.kl=0.1"])
    split = Bench([*MIXTURE, f"train.batch_size={size}", "loss.kl=0.1"])
    for bench in (whole, split):
        wake(bench.model)
    expected, found = gradient(whole, whole.advantage()), gradient(split, split.advantage())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("extra", [[], ["model.train=full", "sample.guidance_scale=3.0"]])
def test_the_micro_batch_size_does_not_change_the_gradient_on_sd3(sd3_overrides, extra):
    found = []
    for size in (1, 5, 64):
        bench = Bench([*sd3_overrides, *extra, f"train.batch_size={size}"], texts=SD3_TEXTS)
        found.append(gradient(bench, bench.advantage()))
    assert float(found[0].abs().max()) > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-3 * float(found[0].abs().max()))


def test_one_forward_per_parent_equals_one_forward_per_edge():
    bench = Bench(MIXTURE)
    wake(bench.model)
    advantage = bench.advantage()
    training, stats = bench.calls(advantage), Stats.of(bench.loss)
    every = training.trained(bench.kept(advantage))
    calls: list[int] = []
    predict = bench.model.predict
    bench.model.predict = lambda x, t, cond: calls.append(len(x)) or predict(x, t, cond)
    shared = training.loss_of(every, stats, False)
    assert calls == [4 * 15]
    apart = sum(
        training.loss_of(
            Trained(every.calls[r][None], p[None], e[None], torch.tensor([0]), [torch.tensor([0])]), stats, False
        )
        for p, e, r in zip(every.prompt, every.edge, every.row, strict=True)
    )
    assert len(calls) == 1 + 4 * 30
    torch.testing.assert_close(shared, apart, rtol=1e-4, atol=1e-4)


def test_the_policy_gradient_is_the_gradient_of_the_expected_reward():
    """Against finite differences of the mean reward, with the shift applied at the stochastic steps alone."""
    prompts = 1500
    for epoch in (0, 6):
        bench = Bench(
            ["tree.w=2", "sample.batch_size=100000", "train.batch_size=100000", "loss.kl=0"],
            epoch,
            ["a dot at the top right"] * prompts,
        )
        model, plan = bench.model, bench.record.plan
        with torch.no_grad():
            model.module.out.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
        noisy = (plan.schedule.sigma[plan.step[plan.stochastic]].unique()).float()
        forward = model.module.forward

        def mean_reward(shift: torch.Tensor, bench=bench, forward=forward, noisy=noisy) -> torch.Tensor:
            def moved(x, sigma, where):
                touched = torch.isclose(sigma[:, None], noisy).any(1)
                return forward(x, sigma, where) + (sigma * touched)[:, None] * shift

            bench.model.module.forward = moved
            bench.record = bench.rollout()
            pictures = bench.model.decode(bench.record.leaves.flatten(0, 1))
            return place(pictures, ["top right"] * len(pictures), {}).view(prompts, -1)

        steps = torch.eye(2) * 0.05
        numeric = torch.stack([(mean_reward(s).mean() - mean_reward(-s).mean()) / 0.1 for s in steps])
        scores = mean_reward(torch.zeros(2))
        model.module.forward = forward
        advantage = backup_values(plan, scores - scores.mean())
        estimate = torch.zeros(2)
        for level in plan.levels:
            only = torch.zeros(prompts, plan.edges, dtype=torch.bool)
            only[:, level.edges] = plan.stochastic[level.edges]
            if only.any():
                training = bench.calls(advantage)
                trained = training.trained(only)
                model.module.zero_grad()
                (-training.loss_of(trained, Stats.of(bench.loss), False)).backward()
                estimate += model.module.out.bias.grad * 2 / len(trained.edge)  # densities are means over 2 elements
        assert float(torch.cosine_similarity(estimate, numeric, dim=0)) > 0.97
        assert float(estimate.norm() / numeric.norm()) == pytest.approx(1, abs=0.25)


@given(parts=st.integers(1, 9), prompts=st.integers(1, 6))
def test_the_partition_is_even_and_complete(parts: int, prompts: int):
    plan = grow(shifted(10, 3.0), "flow_sde", 1, [2] * 3 + [1] * 7, [0.7] * 3 + [0.0] * 7)
    part_of = partition(len(plan.trained_parents), prompts, parts, (1, 2))
    sizes = torch.bincount(part_of.flatten(), minlength=parts)
    assert int(sizes.sum()) == prompts * 7
    assert int(sizes.max() - sizes.min()) <= 1


def test_every_part_of_an_epoch_takes_its_own_step():
    bench = Bench([*MIXTURE, "train.updates=4"])
    stats = bench.update(bench.advantage())
    assert stats.steps == 4
    assert int(stats.sums["parents"]) == 60
    assert float(stats.ratio_error) <= 1e-6  # of the first step only; later ones have moved
    assert float(stats.sums["ratio"]) != 120


def test_a_gradient_that_is_not_finite_is_not_stepped():
    bench = Bench(MIXTURE)
    weights = bench.weights()
    bench.record.latents[0, -1] = math.inf
    bench.record.latents[:, 1] = math.nan
    stats = bench.update(bench.advantage())
    assert (stats.steps, stats.skipped, stats.nonfinite) == (0, 0, 1)
    assert not math.isfinite(stats.grad_norm)
    assert torch.equal(bench.weights(), weights)


def test_surrogate_by_hand():
    new = torch.log(torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5], dtype=torch.float64)).requires_grad_()
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss, ratio, clipped = clipped_surrogate(new, torch.zeros(5).double(), advantage, 0.2)
    assert loss.tolist() == pytest.approx([-2.0, -1.2, -0.5, 1.5, 0.8])
    assert ratio.tolist() == pytest.approx([1.0, 1.5, 0.5, 1.5, 0.5])
    assert clipped.tolist() == [0, 1, 0, 0, 1]
    loss.sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([-2.0, 0.0, -0.5, 1.5, 0.0]).double())


def test_lora_off_is_the_base_and_a_step_moves_lora_alone(sd3_overrides):
    bench = Bench([*sd3_overrides, "loss.kl=0.1"], texts=SD3_TEXTS)
    module = bench.model.module
    base = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    x, t = torch.randn(2, *bench.model.latent_shape), torch.tensor([900.0, 300.0])
    with torch.no_grad():
        before = bench.model.predict(x, t, bench.record.cond)
        wake(bench.model)
        assert not torch.equal(bench.model.predict(x, t, bench.record.cond), before)
        assert torch.equal(bench.policy.predict(x, t, bench.record.cond, "reference"), before)
    bench.record = bench.rollout()
    weights = bench.weights()
    bench.update(bench.advantage())
    assert not torch.equal(bench.weights(), weights)
    assert all(torch.equal(p, base[name]) for name, p in module.named_parameters() if not p.requires_grad)


def test_ema_follows_and_steps_aside():
    bench = Bench([*MIXTURE, "train.ema_decay=0.9"])
    start = bench.weights()
    bench.update(bench.advantage())
    moved = bench.weights()
    average = torch.cat([a.flatten() for a in bench.state.ema.weights.values()])
    torch.testing.assert_close(average, 0.9 * start + 0.1 * moved)
    with bench.state.ema.applied():
        assert torch.equal(bench.weights(), average)
    assert torch.equal(bench.weights(), moved)


def test_padding_changes_the_size_of_calls_and_nothing_else():
    """Those of the update, and of the checks that look at a rollout again."""
    found = []
    for alike in ((), (5, 6)):
        bench = Bench([*MIXTURE, "train.batch_size=6"])
        bench.policy.bitwise_batch_sizes, predict, sizes = alike, bench.model.predict, []

        def counted(x, t, cond, predict=predict, sizes=sizes):
            sizes.append(len(x))
            return predict(x, t, cond)

        bench.model.predict = counted
        steps = recheck_steps(bench.policy, bench.record)
        stats = bench.update(bench.advantage())
        found.append((sizes, [s.chance for s in steps], [s.noise for s in steps], stats, bench.weights()))
    (sizes, chance, noise, stats, weights), (padded, *same) = found
    assert min(sizes) < 5
    assert padded == [max(5, size) for size in sizes]
    assert same[0] == chance
    assert same[1] == pytest.approx(noise, rel=1e-5)
    assert same[2].sums["parents"] == stats.sums["parents"]
    assert float(same[2].ratio_error) <= 1e-6
    torch.testing.assert_close(same[3], weights, rtol=1e-5, atol=1e-6)
