"""Every loss keeps the contract of `core/losses`: those of the table, and some of one's own that take all of it."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.config import load_config
from arborl.core.advantage import advantages, tree
from arborl.core.errors import ArgumentError, InputError
from arborl.core.losses import LOSSES, Awm, Dppo, EdgeBatch, EdgeLoss, LeafBatch, LeafLoss, Nft, noised
from arborl.core.noise import fold
from arborl.core.schedule import PREDICTIONS
from arborl.engine.contracts import TAKEN, loss_of
from arborl.engine.cost import costs, count_model_calls
from arborl.engine.method import Method, check_plan, plan_at
from arborl.engine.rollout import Epoch, kept_latents
from arborl.engine.score import LeafScores
from arborl.models.sd import ddim_schedule
from arborl.rewards import Scores
from arborl.trainer import train

from launching import assert_same_run, last_checkpoint, timeless
from own_losses import Regression
from test_update import SD3_TEXTS, Bench, gradient, wake

LOSS_SETTINGS = {
    "surrogate": [],
    "surrogate, KL, noise": ["loss.kl=0.1", "loss.edge_weight=noise"],
    "Reinforce": ["loss.name=own_losses:Reinforce"],
    "Regression": ["loss.name=own_losses:Regression"],
    "Regression, ODE": [
        *("loss.name=own_losses:Regression", "loss.options.keep=0.8"),
        *("algo=flat", "kernel.name=ode", "sample.group_size=6"),
    ],
    "OldRollsOut": ["loss.name=own_losses:OldRollsOut"],
    "dppo, KL": ["loss.name=dppo", "loss.kl=0.1"],
    "guard": ["loss.name=guard", "loss.edge_weight=noise"],
    "nft": ["loss.name=nft", "loss.options.levels_per_leaf=2"],
    "nft, KL, flat": ["algo=nft", "sample.group_size=6", "loss.kl=0.1", "loss.options.adaptive=false"],
    "awm": ["loss.name=awm", "loss.options.levels_per_leaf=2", "loss.options.off_policy=true", "loss.kl=0.1"],
    "awm, flat": ["algo=awm", "sample.group_size=6"],
}
SMALL = ["sample.num_prompts=4", "train.updates=1", "loss.kl=0"]
every_loss = pytest.mark.parametrize("name", LOSS_SETTINGS)


def bench(name: str, *more: str, **how: Any) -> Bench:
    """A rollout of moved weights, ready for an update; the old policy stands elsewhere."""
    made = Bench([*SMALL, *LOSS_SETTINGS[name], *more], **how)
    wake(made.model)
    made.record = made.rollout()
    return made


def test_every_loss_of_the_table_is_tried() -> None:
    assert {text.split(",")[0] for text in LOSS_SETTINGS} >= set(LOSSES)


# what changes nothing


@every_loss
@pytest.mark.parametrize(
    "more", [["train.batch_size=1"], ["train.batch_size=7"], ["train.batch_size=7", "sample.pad_batches=true"]]
)
def test_micro_batches_and_padding_change_nothing(name: str, more: list[str]) -> None:
    whole, split = bench(name, "train.batch_size=1000"), bench(name, *more)
    expected, found = gradient(whole, whole.advantage()), gradient(split, split.advantage())
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["OldRollsOut", "Reinforce"])
@pytest.mark.parametrize("how", ["lora", "full"])
def test_micro_batches_change_nothing_on_sd3(sd3_overrides: list[str], name: str, how: str) -> None:
    """With guidance, whose negative prompt goes to every policy; an old one's adapters are exchanged at each call."""
    found = []
    for size in (3, 64):
        settings = [*sd3_overrides, f"model.train={how}", "sample.guidance_scale=3", f"train.batch_size={size}"]
        made = Bench([*settings, *LOSS_SETTINGS[name]], texts=SD3_TEXTS)
        wake(made.model)
        found.append(gradient(made, made.advantage()))
    assert float(found[0].abs().max()) > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-3 * float(found[0].abs().max()))


@every_loss
@pytest.mark.parametrize("value", [0.0, 24.7])
def test_equal_scores_move_nothing(name: str, value: float) -> None:
    made = bench(name)
    made.update(made.advantage())  # so that the optimizer has a state to lose
    weights, state = made.weights(), made.state
    moments = [value.clone() for held in state.optimizer.state.values() for value in held.values()]
    old = {name: held.clone() for name, held in state.old.weights.items()} if state.old else {}
    stats = made.update(made.advantage(torch.full((4, len(made.record.plan.leaves)), value)))
    if made.loss.has_regularizer:
        assert stats.steps == 1
        return
    assert (stats.steps, stats.skipped) == (0, 1)
    assert torch.equal(made.weights(), weights)
    for mine, before in zip(
        (v for held in state.optimizer.state.values() for v in held.values()), moments, strict=True
    ):
        assert torch.equal(mine, before)
    assert all(torch.equal(held, old[name]) for name, held in (state.old.weights if state.old else {}).items())


@every_loss
def test_leaves_without_a_score_take_no_part(name: str) -> None:
    """Whatever they look like: what is only theirs may as well be no number."""
    scores = torch.randn(4, 64, generator=torch.manual_seed(1))
    found = []
    for spoilt in (False, True):
        made = bench(name)
        plan = made.record.plan
        some = scores[:, : len(plan.leaves)].clone()
        some[0], some[1, ::2], some[2, 0] = math.nan, math.nan, math.nan
        advantage = made.advantage(some)
        if spoilt:
            for prompt, edge in advantage.isnan().nonzero().tolist():
                made.record.latents[prompt, plan.child[edge]] = math.nan
            made.record.log_density[advantage.isnan()] = math.nan
        found.append(gradient(made, advantage))
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


@every_loss
def test_what_is_counted_is_what_is_called(name: str) -> None:
    made = bench(name, "train.batch_size=5")
    asked: list[tuple[int, bool]] = []
    predict = made.model.predict

    def spy(x: torch.Tensor, t: torch.Tensor, cond: Any) -> torch.Tensor:
        asked.append((len(x), torch.is_grad_enabled()))
        return predict(x, t, cond)

    made.model.predict = spy  # pyright: ignore[reportAttributeAccessIssue]
    stats = made.update(made.advantage())
    expected = count_model_calls(made.config, made.record.plan, 0)
    trained, others = (sum(rows for rows, grad in asked if grad is which) for which in (True, False))
    assert trained == expected.forward_backwards == int(stats.sums["parents"])
    assert others == expected.forward_backwards * len(made.loss.asks)
    assert next(costs(made.config)) == expected.cost + others
    assert stats.sums.keys() == {"edges", "parents", *made.loss.metrics}
    assert all(float(value) == float(value) for value in stats.sums.values())


# gradients


@pytest.mark.parametrize("name", ["surrogate", "Reinforce"])
def test_at_the_policy_itself_it_is_the_policy_gradient(name: str) -> None:
    """-A times the gradient of the log-density, against differences of the density in double precision."""
    made = bench(name, "train.batch_size=1000", "tree.w=2")
    advantage = made.advantage()
    found = gradient(made, advantage)
    for module in (made.model.module,):
        module.double()
    trained = made.calls(advantage).trained(made.kept(advantage))
    plan, record = made.record.plan, made.record

    def objective() -> float:
        prompt, node = trained.calls[trained.row, 0], plan.parent[trained.edge]
        x, child = (record.latents[prompt, n].double() for n in (node, plan.child[trained.edge]))
        v = made.model.data.velocity(x, plan.sigma[node])  # type: ignore[attr-defined]
        v = v + made.model.module(x, plan.sigma[node], record.cond.tensors["place"][prompt].double())
        a, b, std = (c[trained.edge, None] for c in plan.coefficients)
        density = (-((child - a * x - b * v) ** 2) / (2 * std**2) - torch.log(std)).mean(1)
        return float((-advantage[trained.prompt, trained.edge] * density).mean())

    flat = torch.nn.utils.parameters_to_vector(made.model.module.parameters()).detach()
    for place in range(0, len(flat), 391):
        values = []
        for step in (1e-5, -1e-5):
            moved = flat.clone()
            moved[place] += step
            torch.nn.utils.vector_to_parameters(moved, made.model.module.parameters())
            with torch.no_grad():
                values.append(objective())
        assert float(found[place]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-3, abs=1e-6)


def test_a_regression_on_winners_alone_is_their_own_velocity() -> None:
    """Of one leaf, the gradient at the model's answer is 2·weight·(answer - target) / its elements, by hand."""
    answer = torch.randn(3, 4, generator=torch.manual_seed(0)).requires_grad_()
    x0, noise = torch.randn(2, 3, 4, generator=torch.manual_seed(1))
    sigma, alpha = torch.tensor([0.2, 0.5, 0.9]), torch.tensor([0.8, 0.5, 0.1])
    batch = LeafBatch(noised(x0, noise, alpha, sigma), x0, noise, sigma, alpha, torch.tensor([1.0, 0.0, -1.0]), "flow")
    loss, seen = Regression(temperature=1.0)({"policy": answer, "old": answer.detach() + 0.1}, batch)
    loss.backward()
    weight = torch.exp(batch.advantage)[:, None]
    expected = (2 * weight * (answer.detach() - (noise - x0)) - 2 * 0.1) / 4
    assert answer.grad is not None
    torch.testing.assert_close(answer.grad, expected)
    torch.testing.assert_close(seen["distance"], torch.full((3,), 0.01))


# leaves at noise levels of their own


@given(kind=st.sampled_from(PREDICTIONS), level=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_the_target_is_the_answer_whose_clean_sample_is_the_leaf(kind: str, level: float, seed: int) -> None:
    x0, noise = torch.randn(2, 5, 3, 2, generator=torch.Generator().manual_seed(seed))
    sigma = torch.full((5,), level)
    alpha = 1 - sigma if kind == "flow" else torch.sqrt(1 - sigma**2)
    batch = LeafBatch(noised(x0, noise, alpha, sigma), x0, noise, sigma, alpha, torch.zeros(5), kind)
    torch.testing.assert_close(
        batch.predict_x0(batch.target), x0, rtol=1e-3, atol=1e-4 / level if kind != "flow" else 1e-5
    )


def test_leaves_are_noised_as_diffusers_does_it() -> None:
    x0, noise = torch.randn(2, 4, 3, 2, 2, generator=torch.manual_seed(0))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    sigma = scheduler.sigmas[:4]
    expected = scheduler.scale_noise(x0, scheduler.timesteps, noise)
    torch.testing.assert_close(noised(x0, noise, 1 - sigma, sigma), expected)
    ddim = diffusers.DDIMScheduler(timestep_spacing="trailing")
    schedule = ddim_schedule(ddim, 4)
    expected = ddim.add_noise(x0, noise, schedule.timestep.long())
    levels = (schedule.alpha(schedule.sigma).float(), schedule.sigma.float())
    torch.testing.assert_close(noised(x0, noise, *levels), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=25)
@given(levels=st.integers(1, 10), prompts=st.integers(1, 4), first=st.integers(0, 9), seed=st.integers(0, 9))
def test_levels_and_noise_depend_on_the_leaf_alone(levels: int, prompts: int, first: int, seed: int) -> None:
    """Each leaf has as many of the sampler's levels, none twice, wherever its prompt is and whoever else is there."""
    plan, loss, key = (
        plan_at(load_config("mixture", ["algo=flat", "sample.group_size=3"])),
        Regression(levels),
        fold(seed, 1),
    )
    ids = torch.arange(first, first + prompts)
    drawn = plan.step[loss.ancestors(plan, key, ids)]
    assert drawn.shape == (prompts, 3 * levels)
    by_leaf = drawn.view(prompts, 3, levels)
    assert all(len(row.unique()) == levels for row in by_leaf.flatten(0, 1))
    assert set(drawn.flatten().tolist()) <= set(range(10))
    assert torch.equal(plan.step[loss.ancestors(plan, key, ids[-1:])], drawn[-1:])
    call = torch.arange(3 * levels)
    noise = loss.noise(key, ids[-1].expand(len(call)), call, (5,))
    assert torch.equal(loss.noise(key, ids[-1:], call[-1:], (5,)), noise[-1:])
    assert len(noise.unique(dim=0)) == len(call)


@pytest.mark.parametrize("family", [[], ["model.family=tiny_ddim:TinyDDIM", "rewards=brightness"]])
def test_what_is_asked_is_the_leaf_at_its_level(family: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At every call: the point, the model's time there, the prompt, and the advantage of the leaf's ancestor."""
    made = Bench([*family, *LOSS_SETTINGS["Regression"], "train.batch_size=7", "train.updates=1"])
    plan, record, advantage = made.record.plan, made.record, made.advantage()
    asked: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
    known: list[LeafBatch] = []
    predict, loss = made.model.predict, Regression.__call__
    monkeypatch.setattr(made.model, "predict", lambda x, t, cond: (asked.append((x, t, cond)), predict(x, t, cond))[1])
    monkeypatch.setattr(Regression, "__call__", lambda self, a, batch: (known.append(batch), loss(self, a, batch))[1])
    made.update(advantage)
    seen = set()
    for batch, (x, t, cond) in zip(known, asked[1::2], strict=True):  # the policy is asked after the old one
        torch.testing.assert_close(batch.x, x[: len(batch.x)])
        rows = torch.stack([(plan.schedule.timestep - float(one)).abs().argmin() for one in t])
        sigma = plan.schedule.sigma[rows].float()
        torch.testing.assert_close(batch.sigma, sigma)
        torch.testing.assert_close(batch.alpha, plan.schedule.alpha(plan.schedule.sigma[rows]).float())
        for n in range(len(batch.x)):
            leaves = record.leaves
            (match,) = (leaves == batch.x0[n]).flatten(2).all(2).nonzero().tolist()
            prompt, leaf = match
            seen.add((prompt, leaf, int(rows[n])))
            above = int(plan.leaves[leaf])  # up the leaf's own way, to the edge that starts at this level
            while plan.step[above - plan.roots] != rows[n]:
                above = int(plan.parent[above - plan.roots])
            assert float(batch.advantage[n]) == pytest.approx(float(advantage[prompt, above - plan.roots]))
            for name, tensor in cond.tensors.items():
                assert torch.equal(tensor[n], record.cond.tensors[name][prompt])
            expected = batch.alpha[n] * batch.x0[n] + sigma[n] * batch.noise[n]
            torch.testing.assert_close(batch.x[n], expected)
    assert len(seen) == 3 * record.leaves.shape[:2].numel(), "each leaf at three levels"


PLANS = {
    "tree": ["algo=tree", "tree.w=2"],
    "a short tail": ["algo=tree_flash", "tree.w=2", "tree.s=1"],
    "comb": ["algo=tempflow"],
    "comb, short tails": ["algo=tempflow", "sample.tail_steps=2"],
    "mix": ["algo=mix", "sample.num_steps=10", "sample.group_size=3"],
    "several trees": ["algo=branch", "sample.num_trees=2", "tree.split_points=[0,3]"],
}


@pytest.mark.parametrize("settings", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_leafs_levels_are_those_of_its_own_way(settings: list[str], share: float) -> None:
    """Each is where an edge on the leaf's way starts, whatever the way's length, none is drawn twice."""
    plan = plan_at(load_config("mixture", settings), 1)
    loss, key = Awm(levels_per_leaf=2, level_share=share), fold(0, 0)
    calls, ids = loss.calls(plan), torch.arange(200)
    ancestors = loss.ancestors(plan, key, ids)
    for call, (node, into) in enumerate(zip(calls.node.tolist(), calls.edge.tolist(), strict=True)):
        way = list[int]()
        while node >= plan.roots:
            way.insert(0, node - plan.roots)
            node = int(plan.parent[node - plan.roots])
        assert way[-1] == into
        expected = way[: max(1, int(Fraction(str(share)) * len(way)))]
        assert set(ancestors[:, call].tolist()) == set(expected), "all of them, for one prompt or another, and no other"
    by_leaf = ancestors.view(200, -1, 2)
    assert (by_leaf[..., 0] != by_leaf[..., 1]).all()


def test_a_leaf_of_a_tree_is_trained_with_the_means_over_its_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    """At levels before a split all leaves below share a number, and a batch of them alone is worth a step."""
    made = bench("nft", "loss.options.levels_per_leaf=10", "tree.w=2", "tree.s=0")
    known: list[LeafBatch] = []
    answer = Nft.__call__
    monkeypatch.setattr(Nft, "__call__", lambda self, a, batch: (known.append(batch), answer(self, a, batch))[1])
    plan, scores = made.record.plan, torch.randn(4, 4, generator=torch.manual_seed(0))
    advantage = advantages(tree, plan, scores, made.record.log_density, 5.0, temperature=1.0, backup="mean")
    made.update(advantage)
    (batch,) = known
    level = {float(sigma): row for row, sigma in enumerate(plan.schedule.sigma.float())}
    seen = set()
    for sigma, x0, value in zip(batch.sigma.tolist(), batch.x0, batch.advantage.tolist(), strict=True):
        ((prompt, leaf),) = (made.record.leaves == x0).flatten(2).all(2).nonzero().tolist()
        z = advantage[prompt, plan.leaves - plan.roots]
        expected = z[leaf] if level[sigma] else z[leaf // 2 * 2 : leaf // 2 * 2 + 2].mean()
        assert value == pytest.approx(float(expected), abs=1e-6)
        seen.add((prompt, leaf, level[sigma]))
    assert len(seen) == 4 * 4 * 10


def test_a_step_is_worth_taking_where_only_an_ancestor_has_an_advantage() -> None:
    for depth, steps in ((1, 1), (99, 0)):
        made = bench("Regression", "loss.options.levels_per_leaf=10", "tree.w=2", "tree.s=0")
        plan = made.record.plan
        advantage = (plan.depth[plan.child] == depth).double().expand(4, -1)
        assert made.update(advantage).steps == steps


def test_a_leaf_is_left_out_at_a_level_where_its_ancestor_has_no_advantage() -> None:
    """Its own advantage or another level's is no reason: such calls are not made and counted in nothing."""
    made = bench("Regression", "loss.options.levels_per_leaf=10", "tree.w=2", "tree.s=0")
    plan, advantage = made.record.plan, made.advantage()
    first = plan.depth[plan.child] == 1
    assert 0 < int(first.sum()) < len(plan.leaves)
    advantage[:, first] = math.nan
    asked: list[int] = []
    predict = made.model.predict
    made.model.predict = lambda x, t, cond: (asked.append(len(x)), predict(x, t, cond))[1]  # pyright: ignore[reportAttributeAccessIssue]
    stats = made.update(advantage)
    assert (stats.steps, stats.nonfinite) == (1, 0)
    assert math.isfinite(stats.grad_norm)
    count = 4 * len(plan.leaves) * 9  # of ten levels all but the first
    assert int(stats.sums["edges"]) == int(stats.sums["parents"]) == count
    assert sum(asked) == 2 * count, "of the policy and the old one"
    inner = ~torch.isin(plan.child, plan.leaves)
    advantage[:, inner] = math.nan
    assert int(made.update(advantage).sums["edges"]) == 4 * len(plan.leaves)


@pytest.mark.parametrize("steps", [10, 50])
def test_the_number_of_levels_is_the_share_rounded_down_as_in_decimal_arithmetic(steps: int) -> None:
    """Not as in floats, where 0.58 * 50 is below 29."""
    plan = plan_at(load_config("mixture", ["algo=flat", "sample.group_size=2", f"sample.num_steps={steps}"]))
    for percent in range(1, 101):
        expected = max(1, percent * steps // 100)
        with pytest.raises(ArgumentError, match=rf": {expected} noise levels can be drawn; allowed: 1\.\.{expected}$"):
            Awm(levels_per_leaf=steps + 1, level_share=percent / 100).calls(plan)


def test_other_levels_come_with_their_own_advantages() -> None:
    """A loss says which of a leaf's ancestors it is trained at, and both follow from that."""
    made = Bench([*SMALL, "loss.name=test_losses:LastLevel"])
    plan, advantage = made.record.plan, made.advantage()
    training = made.calls(advantage)
    trained = training.trained(made.kept(advantage))
    edge = plan.leaves[trained.calls[trained.row, 1]] - plan.roots
    expected = advantage[trained.prompt, edge].float()
    assert torch.equal(training.advantage_of(trained), expected)
    assert set(training.level.flatten().tolist()) == {9}


def test_every_level_is_drawn_as_often() -> None:
    plan, loss = plan_at(load_config("mixture", ["algo=flat", "sample.group_size=8"])), Regression(levels_per_leaf=2)
    counts = torch.bincount(plan.step[loss.ancestors(plan, fold(0, 0), torch.arange(600))].flatten(), minlength=10)
    assert (counts / counts.sum() - 0.1).abs().max() < 0.008


def test_a_model_that_predicts_noise_learns_from_leaves_too() -> None:
    made = Bench(["model.family=tiny_ddim:TinyDDIM", "rewards=brightness", *LOSS_SETTINGS["Regression"]])
    assert not made.record.plan.schedule.is_flow
    stats = made.update(made.advantage())
    assert stats.steps > 0
    assert math.isfinite(stats.grad_norm)
    assert stats.grad_norm > 0


# the rollout's answers


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("plan", ["tree", "comb, short tails"])
def test_the_rollouts_answers_are_those_at_each_edges_parent(plan: str, offload: bool, monkeypatch: Any) -> None:
    """Not those of a node beside it that is not trained, and not those of weights that have moved since."""
    more = [*PLANS[plan], "train.batch_size=7", "train.updates=2", "train.learning_rate=0.01"]
    made = bench("dppo, KL", *more, f"sample.offload={str(offload).lower()}")
    record, shape = made.record, made.record.plan
    assert record.answers is not None
    assert kept_latents(made.policy, shape) == record.latents.shape[1] + record.answers.shape[1]
    assert bench("surrogate", *more).record.answers is None
    with torch.no_grad():
        expected = torch.stack(
            [
                made.policy.predict(record.latents[:, node], shape.timestep[node].float().expand(4), record.cond)
                for node in shape.trained_parents.tolist()
            ],
            1,
        )
    torch.testing.assert_close(record.answers, expected)
    known: list[EdgeBatch] = []
    answer = Dppo.__call__
    monkeypatch.setattr(Dppo, "__call__", lambda self, a, batch: (known.append(batch), answer(self, a, batch))[1])
    stats = made.update(made.advantage())
    assert stats.ratio_error <= 1e-6
    assert float(stats.sums["divergence"]) > 0, "the second step is not where the rollout was"
    for batch in known:
        torch.testing.assert_close(batch.drawn_from.log_density(batch.child), batch.log_density, rtol=1e-4, atol=1e-4)
    sizes = torch.cat([batch.step_size for batch in known])
    assert {round(x, 5) for x in sizes.tolist()} == {
        round(float(x), 5) for x in (shape.schedule.sigma - shape.schedule.sigma_next)[shape.step[shape.stochastic]]
    }


# the old policy


@pytest.mark.parametrize("how", ["lora", "full"])
def test_the_old_policy_begins_as_the_policy_and_follows_it(sd3_overrides: list[str], how: str) -> None:
    settings = [*sd3_overrides, f"model.train={how}", *LOSS_SETTINGS["OldRollsOut"], "loss.options.keep=0.75"]
    made = Bench([*settings, "train.learning_rate=0.01"], texts=SD3_TEXTS)
    assert made.state.old is not None
    assert made.policy.copies.keys() == (set() if how == "lora" else {"old", "reference"})
    x, t = torch.randn(2, *made.policy.latent_shape), torch.tensor([900.0, 300.0])

    def answer(who: Any) -> torch.Tensor:
        return made.policy.predict(x, t, made.record.cond, who).detach()

    first = answer("policy")
    assert torch.equal(answer("old"), first)
    assert torch.equal(answer("reference"), first)
    expected = {name: p.detach().clone() for name, p in made.state.parameters.items()}
    for _ in range(3):
        made.update(made.advantage())
        live = made.weights()
        expected = {n: 0.75 * e + 0.25 * made.state.parameters[n].detach() for n, e in expected.items()}
        apart = {who: answer(who) for who in ("policy", "old", "reference")}
        assert torch.equal(made.weights(), live), "the policy has its own weights again"
        assert torch.equal(apart["reference"], first)
        assert len({tuple(values.flatten().tolist()) for values in apart.values()}) == 3
    for name, weights in made.state.old.weights.items():
        torch.testing.assert_close(weights, expected[name])


def test_who_rolls_out() -> None:
    """Another policy draws other leaves; it is the old one where the loss says so."""
    drawn = {}
    for name in ("Regression", "OldRollsOut"):
        made = Bench([*SMALL, *LOSS_SETTINGS[name]])
        before = made.rollout().leaves
        wake(made.model)
        drawn[name] = torch.equal(made.rollout().leaves, before)
    assert drawn == {"Regression": False, "OldRollsOut": True}


def test_nobody_keeps_weights_that_nobody_asks_for(sd3_overrides: list[str]) -> None:
    """Neither of an average that is off, nor of policies that the loss does not ask."""
    made = Bench([*sd3_overrides, "model.train=full", "loss.kl=0"], texts=SD3_TEXTS)
    assert (made.policy.copies, made.policy.old, made.state.old) == ({}, None, None)
    assert made.state.ema.weights == {}
    asks = Bench([*sd3_overrides, "model.train=full", "loss.kl=0.1"], texts=SD3_TEXTS)
    assert asks.policy.copies.keys() == {"reference"}
    whole = sum(p.numel() * p.element_size() for p in asks.model.module.parameters())
    assert asks.policy.bytes_beside() == {"reference": whole}
    adapters = Bench([*sd3_overrides, *LOSS_SETTINGS["OldRollsOut"]], texts=SD3_TEXTS)
    assert adapters.policy.copies == {}
    assert adapters.policy.bytes_beside() == {"old": sum(4 * p.numel() for p in adapters.state.parameters.values())}


RUN = ["sample.num_prompts=2", "eval.num_prompts=4", "log.trackers=[]", "log.record_every=2", "train.ema_decay=0.5"]
OLD_RUNS = {
    "full": [],
    "lora": ["model.train=lora", "model.lora.rank=2", "train.learning_rate=0.01"],
}


@pytest.mark.parametrize("how", OLD_RUNS)
def test_a_run_with_an_old_policy_goes_on_bit_for_bit(tmp_path: Path, how: str) -> None:
    settings = [*RUN, *LOSS_SETTINGS["OldRollsOut"], *OLD_RUNS[how], f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*settings, "run_name=whole", "train.epochs=4"]))
    parts = load_config("mixture", [*settings, "run_name=parts", "train.epochs=2"])
    run = train(parts)
    assert (last_checkpoint(run) / "old.safetensors").is_file()
    assert not (last_checkpoint(run).with_name("best") / "old.safetensors").exists()
    train(load_config("mixture", [*settings, "run_name=parts", "train.epochs=4"]), resume=run)
    assert_same_run(whole, run, ended_at=2)
    assert (whole / "report.html").is_file()
    (row, *_) = timeless(whole)
    assert row.keys() >= {"error", "distance", "edges", "parents"}
    assert not row.keys() & {"ratio", "ratio_error", "clip_ratio", "kl"}


def test_nft_with_adapters_on_sd3_goes_on_bit_for_bit(tmp_path: Path, sd3_overrides: list[str]) -> None:
    settings = [
        *sd3_overrides,
        "algo=nft",
        "sample.group_size=3",
        "loss.options.levels_per_leaf=2",
        *RUN,
        "log.record_every=0",
    ]
    settings += ["train.learning_rate=0.01", "loss.options.decay_rate=0.2", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*settings, "run_name=whole", "train.epochs=2"]))
    run = train(load_config("mixture", [*settings, "run_name=parts", "train.epochs=1"]))
    train(load_config("mixture", [*settings, "run_name=parts", "train.epochs=2"]), resume=run)
    assert_same_run(whole, run, ended_at=1)
    rows = [row for row in timeless(whole) if "grad_norm" in row]
    assert rows[0]["distance"] == pytest.approx(0, abs=1e-6)
    assert [row["grad_norm"] > 0 for row in rows] == [True, True]


def test_an_old_policy_that_is_switched_on_later_begins_with_the_weights_it_finds(tmp_path: Path) -> None:
    settings = [*RUN, f"log.dir={tmp_path}", "run_name=x"]
    run = train(load_config("mixture", [*settings, "train.epochs=2"]))
    assert not (last_checkpoint(run) / "old.safetensors").exists()
    more = [*settings, *LOSS_SETTINGS["OldRollsOut"], "train.epochs=3", "loss.options.keep=1"]
    train(load_config("mixture", more), resume=run)
    checkpoints = run / "checkpoints"
    kept, before = (checkpoints / f"epoch_{n:06d}" for n in (3, 2))
    assert (kept / "old.safetensors").read_bytes() == (before / "weights.safetensors").read_bytes()


# a loss of one's own, and its mistakes


class Wrong(EdgeLoss):
    """Not what a loss returns; which of it, the option says."""

    metrics = ("one",)

    def __init__(self, how: str, clip: float) -> None:
        self.how = how

    def __call__(self, answers, batch):
        loss = answers["policy"].flatten(1).mean(1)[batch.row]
        return {
            "vector": (loss, {"one": loss}),
            "names": (loss.sum(), {"two": loss}),
            "mean": (loss.sum(), {"one": loss.mean()}),
            "number": (1.0, {"one": loss}),
        }[self.how]


class Lacks(LeafLoss):
    metrics = ("one",)


class Plain(LeafLoss):
    """Its levels are no option."""

    metrics = ("one",)
    levels_per_leaf = 99

    def __init__(self, beta: float = 1.0) -> None:
        self.inverse = 1 / beta

    def __call__(self, answers, batch):
        loss = answers["policy"].flatten(1).mean(1)
        return loss.sum(), {"one": loss}


class Shares(Plain):
    """Nor is the share of them that it draws from."""

    levels_per_leaf = 1
    level_share = 1.5


class LastLevel(Plain):
    """Of its own choice: the level that the step into the leaf starts at."""

    levels_per_leaf = 1

    def ancestors(self, plan, key, prompt_ids):
        return (plan.leaves - plan.roots).expand(len(prompt_ids), -1)


class OwnLevels(LastLevel):
    def levels(self, plan, key, prompt_ids):
        return plan.step[self.ancestors(plan, key, prompt_ids)]


class AsksNobody(Regression):
    asks = ("ref",)


class AsksText(Regression):
    asks = "old"


class Samples(Regression):
    sampler = "reference"


class Takes(Regression):
    metrics = ("error", "edges")


class Overshoots(Regression):
    def old_decay(self, steps):
        return 2


MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown": (["loss.name=surogate"], r"loss\.name=surogate: .*allowed: surrogate"),
    "no class": (
        ["loss.name=test_losses:bench"],
        r"loss\.name=test_losses:bench: is not a subclass.*EdgeLoss or LeafLoss",
    ),
    "lacks": (["loss.name=test_losses:Lacks"], r"loss\.name=test_losses:Lacks: lacks __call__; allowed: "),
    "option": (
        ["loss.name=own_losses:Regression", "loss.options.hlod=1"],
        r"loss\.options\.hlod=1: own_losses:Regression takes no such argument; allowed: .*hold",
    ),
    "of the surrogate": (["loss.options.beta=1"], r"loss\.options\.beta=1: surrogate takes no such argument"),
    "required": (["loss.name=test_losses:Wrong"], r"loss\.options\.how: .*has no default"),
    "too many levels": (
        ["loss.name=own_losses:Regression", "loss.options.levels_per_leaf=11"],
        r"loss\.options\.levels_per_leaf=11: 10 noise levels can be drawn; allowed: 1\.\.10",
    ),
    "no number of levels": (
        ["loss.name=own_losses:Regression", "loss.options.levels_per_leaf=1.5"],
        r"loss\.options\.levels_per_leaf=1\.5: 10 noise levels can be drawn; allowed: 1\.\.10",
    ),
    "its own levels": (["loss.name=test_losses:Plain"], r"loss\.name=.*Plain: its levels_per_leaf is 99: .*1\.\.10"),
    "too large a share": (
        ["loss.name=awm", "loss.options.level_share=1.5"],
        r"loss\.options\.level_share=1\.5: is too large; allowed: a number, above 0, at most 1$",
    ),
    "no share": (["loss.name=awm", "loss.options.level_share=0.0"], r"loss\.options\.level_share=0\.0: is too small"),
    "its own share": (
        ["loss.name=test_losses:Shares"],
        r"loss\.name=.*Shares: its level_share is 1\.5: is too large; allowed: a number, above 0, at most 1$",
    ),
    "levels of its own": (
        ["loss.name=test_losses:OwnLevels"],
        r"loss\.name=test_losses:OwnLevels: has a method levels, which nobody asks: .*; try: ancestors",
    ),
    "no such option": (["loss.name=test_losses:Plain", "loss.options.gamma=1"], r"loss\.options\.gamma=1: .*: beta$"),
    "cannot be made": (
        ["loss.name=test_losses:Plain", "loss.options.beta=0"],
        r"loss\.name=test_losses:Plain: cannot be made of its settings \(ZeroDivisionError: division by zero\)",
    ),
    "too small": (["loss.name=nft", "loss.options.beta=0.0"], r"loss\.options\.beta=0\.0: .*small; allowed: .*above 0"),
    "too large": (
        ["loss.name=awm", "loss.options.decay_most=1.5"],
        r"loss\.options\.decay_most=1\.5: .*large; .*most 1",
    ),
    "of another": (["loss.name=nft", "loss.options.power=1.0"], r"loss\.options\.power=1\.0: nft takes no such .*beta"),
    "levels of nft": (
        ["algo=nft", "sample.num_steps=5"],
        r"loss\.options\.levels_per_leaf=9: 5 noise levels can be drawn; allowed: 1\.\.5",
    ),
    "threshold": (["loss.name=dppo", "loss.options.threshold=-1.0"], r"loss\.options\.threshold=-1\.0: .*0 or more"),
    "asks": (["loss.name=test_losses:AsksNobody"], r"loss\.name=.*: its asks are \('ref',\); allowed: .*reference"),
    "asks a text": (["loss.name=test_losses:AsksText"], r"loss\.name=.*: its asks are 'old'; allowed: a tuple"),
    "sampler": (["loss.name=test_losses:Samples"], r"loss\.name=.*: its sampler is 'reference'; allowed: policy, old"),
    "metrics": (
        ["loss.name=test_losses:Takes"],
        r"loss\.name=test_losses:Takes: calls a metric edges, as every run does; try: another name",
    ),
    "no density": (["algo=flat", "kernel.name=ode"], r"kernel\.name=ode: .*loss\.name=surrogate needs; allowed: auto"),
    "depths": (["loss.name=own_losses:Regression", "prune.depth=[2]"], r"prune\.depth=\[2\]: .*trains leaves"),
    "steps": (["loss.name=own_losses:Regression", "prune.step_fraction=0.5"], r"prune\.step_fraction=0\.5: .*leaves"),
    "siblings of leaves": (
        ["loss.name=own_losses:Regression", "algo=tempflow"],
        r"advantage\.group=siblings: .* levels of steps without noise too, which have no siblings; "
        r"allowed: tree, prompt$",
    ),
    "siblings": (
        [
            "loss.name=own_losses:Regression",
            "algo=flat",
            "kernel.name=ode",
            "advantage.name=depth",
            "advantage.group=siblings",
        ],
        r"advantage\.group=siblings: no tree of this plan branches",
    ),
}


@pytest.mark.parametrize(("settings", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_before_a_run(settings: list[str], text: str) -> None:
    with pytest.raises(InputError, match=f"^{text}") as error:
        check_plan(load_config("mixture", settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["vector", "names", "mean", "number"])
def test_what_a_loss_returns_is_held_to_its_contract(how: str, tmp_path: Path) -> None:
    """Before a run, and at every call."""
    settings = [*SMALL, "loss.name=test_losses:Wrong", f"loss.options.how={how}"]
    made = Bench(settings)
    text = r"^loss\.name=test_losses:Wrong: (returned|measured) .*; allowed: "
    with pytest.raises(InputError, match=text):
        made.update(made.advantage())
    with pytest.raises(InputError, match=text):
        train(load_config("mixture", [*settings, f"log.dir={tmp_path / 'runs'}"]))
    assert not (tmp_path / "runs").exists()


def test_an_old_policy_keeps_a_share_of_itself() -> None:
    made = Bench([*SMALL, "loss.name=test_losses:Overshoots"])
    with pytest.raises(
        InputError, match=r"^loss\.name=test_losses:Overshoots: its old_decay is 2\.0, .*; allowed: 0\.\.1"
    ):
        made.update(made.advantage())


def test_old_weights_are_in_the_model_once() -> None:
    """Else its own would be lost. Where an average had them before, it has its own again after both have left."""
    made = bench("OldRollsOut", "train.ema_decay=0.5", "model.train=lora", "model.lora.rank=2")
    made.update(made.advantage())
    own = made.weights()
    with made.policy.acting("old"), pytest.raises(RuntimeError), made.policy.acting("old"):
        pass
    assert torch.equal(made.weights(), own)
    average, old = made.state.ema.applied(), made.policy.acting("old")
    average.__enter__()
    old.__enter__()
    assert not torch.equal(made.weights(), own)
    made.state.restore()
    assert torch.equal(made.weights(), own)


def test_the_metrics_of_every_run_have_names_of_their_own(tmp_path: Path) -> None:
    run = train(load_config("mixture", [*RUN, *LOSS_SETTINGS["Reinforce"], "train.epochs=1", f"log.dir={tmp_path}"]))
    for name in timeless(run)[0].keys() - {"loss"}:
        assert name in TAKEN or "/" in name or name.startswith(("reward", "steps")), name


def test_settings_and_options_reach_the_constructor() -> None:
    config = load_config("mixture", ["loss.clip=0.3", "loss.kl=0.2", "loss.edge_weight=noise"])
    assert vars(loss_of(config)) == {"clip": 0.3, "kl": 0.2, "edge_weight": "noise"}
    own = loss_of(load_config("mixture", ["loss.name=own_losses:Regression", "loss.options.hold=3"]))
    assert (own.hold, own.temperature) == (3, 0.5)  # type: ignore[union-attr]


def test_pruning_by_width_keeps_whole_leaves() -> None:
    """Of a tree's chains the best and the worst: these leaves are trained, and no others."""
    made = bench("Regression", "prune.width_mode=best_and_worst", "prune.width_ratio=0.25")
    scores = torch.randn(4, 16, generator=torch.manual_seed(0))
    config = made.config
    epoch = Epoch(0, made.record.plan, made.key, made.record.prompts)
    scored = LeafScores(Scores({}, scores.double()), torch.zeros(4), 0)
    _, keep = Method(config).credit(epoch, scored, made.record)
    into_leaves = keep[:, made.record.plan.leaves - made.record.plan.roots]
    assert keep.sum() == into_leaves.sum() == 4 * 4
    order = scores.argsort(1)
    for row, places in zip(into_leaves, order, strict=True):
        assert row[places[:2]].all()
        assert row[places[-2:]].all()
