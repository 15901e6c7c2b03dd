"""The built-in losses against their papers' formulas, a sample at a time in double precision."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from arborl.core.errors import ArgumentError
from arborl.core.kernels import Coefficients
from arborl.core.losses import LOSSES, Awm, Dppo, EdgeBatch, Guard, LeafBatch, Nft, Surrogate, noised
from arborl.core.losses.base import check_flag, check_number
from arborl.core.schedule import PREDICTIONS

ADVANTAGE = [2.3, -0.4, 0.0, -7.0, 6.0, 0.9]
SIGMA = [1.0, 0.9, 0.7, 0.5, 0.3, 0.08]


def leaves(prediction: str) -> LeafBatch:
    x0, noise = torch.randn(2, 6, 3, 2, 2, generator=torch.manual_seed(0), dtype=torch.float64)
    sigma = torch.tensor(SIGMA, dtype=torch.float64)
    if prediction != "flow":
        sigma = 0.99 * sigma  # at 1 nothing is left of the sample
    alpha = 1 - sigma if prediction == "flow" else torch.sqrt(1 - sigma**2)
    x = noised(x0, noise, alpha, sigma)
    return LeafBatch(x, x0, noise, sigma, alpha, torch.tensor(ADVANTAGE, dtype=torch.float64), prediction)


def answers() -> dict[Any, Tensor]:
    policy, old, reference = torch.randn(3, 6, 3, 2, 2, generator=torch.manual_seed(1), dtype=torch.float64)
    return {"policy": policy.requires_grad_(), "old": policy.detach() + 0.3 * old, "reference": reference}


def nft(loss: Nft, asked: dict[Any, Tensor], batch: LeafBatch) -> Tensor:
    """Theorem 3.2 of DiffusionNFT, as its code weighs it."""
    total = torch.zeros((), dtype=torch.float64)
    for n in range(6):
        sigma, alpha = float(batch.sigma[n]), float(batch.alpha[n])
        x, x0 = batch.x[n].flatten(), batch.x0[n].flatten()
        policy, old, reference = (asked[who][n].flatten() for who in ("policy", "old", "reference"))
        good = min(1.0, max(0.0, 0.5 + float(batch.advantage[n]) / (2 * loss.spread)))
        for share, answer in (
            (good, (1 - loss.beta) * old + loss.beta * policy),
            (1 - good, (1 + loss.beta) * old - loss.beta * policy),
        ):
            if batch.prediction == "flow":
                found = x - sigma * answer
            elif batch.prediction == "epsilon":
                found = (x - sigma * answer) / alpha
            else:
                found = alpha * x - sigma * answer
            elements = [found[i] - x0[i] for i in range(12)]
            size = max(1e-5, sum(abs(float(e.detach())) for e in elements) / 12) if loss.adaptive else 1.0
            total = total + loss.spread / loss.beta * share * torch.stack([e**2 for e in elements]).mean() / size
        total = total + loss.kl * sum((policy[i] - reference[i]) ** 2 for i in range(12)) / 12
    return total


def awm(loss: Awm, asked: dict[Any, Tensor], batch: LeafBatch) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for n in range(6):
        sigma, alpha = float(batch.sigma[n]), float(batch.alpha[n])
        policy, old, reference = (asked[who][n].flatten() for who in ("policy", "old", "reference"))
        noise, x0 = batch.noise[n].flatten(), batch.x0[n].flatten()
        target = {"flow": noise - x0, "epsilon": noise, "v_prediction": alpha * noise - sigma * x0}[batch.prediction]

        def log_p(answer: Tensor, target: Tensor = target, sigma: float = sigma) -> Tensor:
            error = torch.stack([(answer[i] - target[i]) ** 2 for i in range(12)]).mean()
            return -sigma * ((error + 1e-10) ** loss.power - 1e-10**loss.power) / loss.power

        ratio = torch.exp(log_p(policy) - (log_p(old) if loss.off_policy else log_p(policy).detach()))
        advantage = float(batch.advantage[n]) / loss.spread
        held = ratio.clamp(1 - loss.ratio_clip, 1 + loss.ratio_clip)
        total = total + torch.maximum(-advantage * ratio, -advantage * held)
        total = total + loss.ema * ((policy - old) ** 2).mean() + loss.kl * ((policy - reference) ** 2).mean()
    return total


def same(found: Tensor, expected: Tensor, asked: dict[Any, Tensor]) -> None:
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    mine, theirs = (torch.autograd.grad(one, asked["policy"], retain_graph=True)[0] for one in (found, expected))
    assert float(theirs.abs().max()) > 0
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nft(prediction: str, adaptive: bool, beta: float) -> None:
    loss, asked, batch = Nft(kl=0.2, beta=beta, adaptive=adaptive), answers(), leaves(prediction)
    same(loss(asked, batch)[0], nft(loss, asked, batch), asked)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("options", [{}, {"off_policy": True, "ratio_clip": 0.002}, {"power": 1.0, "ema": 0.0}])
def test_awm(prediction: str, options: dict[str, Any]) -> None:
    loss, asked, batch = Awm(kl=0.2, **options), answers(), leaves(prediction)
    same(loss(asked, batch)[0], awm(loss, asked, batch), asked)
    if loss.off_policy:
        assert 0 < float(loss(asked, batch)[1]["clip_ratio"].sum()) < 6


def test_on_policy_the_ratio_of_awm_is_one_and_its_gradient_is_that_of_the_density() -> None:
    loss, asked, batch = Awm(ema=0.0, power=1.0), answers(), leaves("flow")
    total, seen = loss(asked, batch)
    torch.testing.assert_close(seen["loss"].detach(), -batch.advantage / 5)
    total.backward()
    weight = (batch.advantage / 5 * batch.sigma).view(-1, 1, 1, 1)
    assert asked["policy"].grad is not None
    torch.testing.assert_close(asked["policy"].grad, weight * 2 * (asked["policy"] - batch.target).detach() / 12)


def test_without_weights_nft_is_a_policy_gradient_and_a_trust_region() -> None:
    """σ²·[-2A·δ·(u - v_old) + spread·β·δ²], but for what no gradient sees."""
    asked, batch = answers(), leaves("flow")
    total, _ = Nft(adaptive=False, beta=0.5, spread=8.0)(asked, batch)
    apart = asked["policy"] - asked["old"]
    weight = (batch.sigma**2).view(-1, 1, 1, 1)
    advantage = batch.advantage.view(-1, 1, 1, 1)
    two = weight * (-2 * advantage * apart * (batch.target - asked["old"]) + 8 * 0.5 * apart**2)
    expected = torch.autograd.grad(two.flatten(1).mean(1).sum(), asked["policy"])[0]
    torch.testing.assert_close(torch.autograd.grad(total, asked["policy"])[0], expected)


@pytest.mark.parametrize(
    ("loss", "asks", "sampler", "regularizer"),
    [
        (Nft(), ("old",), "old", True),
        (Nft(kl=0.1), ("old", "reference"), "old", True),
        (Awm(), ("old",), "policy", True),
        (Awm(kl=0.1, ema=0.0), ("reference",), "policy", True),
        (Awm(ema=0.0), (), "policy", False),
        (Awm(ema=0.0, off_policy=True), ("old",), "old", False),
        (Dppo(), (), "policy", False),
        (Guard(clip=0.1, kl=0.1), ("reference",), "policy", True),
    ],
)
def test_who_is_asked_and_who_rolls_out(loss: Any, asks: tuple[str, ...], sampler: str, regularizer: bool) -> None:
    assert (loss.asks, loss.sampler, loss.has_regularizer) == (asks, sampler, regularizer)


def test_how_much_the_old_policy_keeps() -> None:
    assert [Nft().old_decay(steps) for steps in (0, 1, 100, 499, 500, 9999)] == [0, 0.001, 0.1, 0.499, 0.5, 0.5]
    ocr = Nft(decay_rate=0.0075, decay_most=0.999, decay_start=75)
    assert [ocr.old_decay(steps) for steps in (0, 75, 79, 9999)] == [0, 0, pytest.approx(0.03), 0.999]
    assert [Awm().old_decay(steps) for steps in (0, 100, 300, 9999)] == [0, 0.1, 0.3, 0.3]


# edges


def edges() -> tuple[EdgeBatch, Tensor, dict[Any, Tensor]]:
    """Two parents, the second far from the policy that drew, with four children each, of both signs twice over."""
    generator = torch.manual_seed(3)
    x, old = torch.randn(2, 2, 4, generator=generator, dtype=torch.float64)
    moved = torch.tensor([[0.001], [0.2]], dtype=torch.float64) * torch.tensor([1.0, -1.0, 1.0, 1.0])
    row = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    a, b, s = (torch.full((8,), value, dtype=torch.float64) for value in (0.9, -0.2, 0.3))
    s[4:] = 0.15
    before = a[:, None] * x[row] + b[:, None] * old[row]
    after = a[:, None] * x[row] + b[:, None] * (old + moved)[row]
    child = torch.where((torch.arange(8) % 2 == 0)[:, None], 2 * after - before, 2 * before - after)
    density = -((child - before) ** 2).mean(1) / (2 * s**2) - torch.log(s) - 0.5 * math.log(2 * math.pi)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, 2.0, -2.0, -2.0], dtype=torch.float64)
    step = torch.tensor([0.2] * 4 + [0.05] * 4, dtype=torch.float64)
    batch = EdgeBatch(x, row, child, density, advantage, torch.ones(8).double(), Coefficients(a, b, s), step, old)
    return batch, before, {"policy": (old + moved).requires_grad_(), "reference": old}


def by_hand(batch: EdgeBatch, before: Tensor, answer: Tensor, n: int) -> tuple[Tensor, Tensor, float]:
    """One edge's log ratio, its divergence and its noise."""
    a, b, s = (float(c[n]) for c in batch.coefficients)
    parent = int(batch.row[n])
    mean = a * batch.x[parent] + b * answer[parent]
    log_ratio = ((batch.child[n] - before[n]) ** 2 - (batch.child[n] - mean) ** 2).mean() / (2 * s**2)
    return log_ratio, ((mean - before[n]) ** 2).mean() / (2 * s**2), s


def test_dppo_drops_what_is_far_and_goes_on_away() -> None:
    batch, before, asked = edges()
    total, seen = Dppo()(asked, batch)
    terms = list[Tensor]()
    for n in range(8):
        log_ratio, divergence, _ = by_hand(batch, before, asked["policy"], n)
        ratio, advantage = torch.exp(log_ratio), float(batch.advantage[n])
        assert float(seen["divergence"][n]) == pytest.approx(float(divergence.detach()), rel=1e-6)
        away = (float(ratio.detach()) > 1) == (advantage > 0)
        dropped = float(divergence.detach()) >= 1e-5 and away
        assert bool(seen["dropped"][n]) == dropped
        terms.append(-advantage * ratio * (0.0 if dropped else 1.0))
    same(total, torch.stack(terms).sum(), asked)
    assert seen["dropped"].tolist() == [0, 0, 0, 0, 1, 0, 0, 1]
    assert Dppo(threshold=1.0)(asked, batch)[1]["dropped"].sum() == 0


@pytest.mark.parametrize("reweight", [True, False])
def test_guard_corrects_each_sample_by_its_own_divergence(reweight: bool) -> None:
    batch, before, asked = edges()
    total, seen = Guard(clip=0.002, reweight=reweight)(asked, batch)
    terms = list[Tensor]()
    for n in range(8):
        log_ratio, divergence, s = by_hand(batch, before, asked["policy"], n)
        ratio, advantage = torch.exp(s * (log_ratio + divergence)), float(batch.advantage[n])
        assert float(seen["ratio"][n]) == pytest.approx(float(ratio.detach()), rel=1e-9)
        edge = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - 0.002, 1 + 0.002))
        terms.append(edge / (float(batch.step_size[n]) if reweight else 1.0))
    same(total, torch.stack(terms).sum(), asked)
    assert 0 < seen["clip_ratio"].sum() < 8


def test_the_mean_of_guards_log_ratio_is_zero_over_what_is_drawn() -> None:
    """Without the correction it is minus the divergence, so that good samples are clipped later than bad ones."""
    before, after, s = torch.zeros(64), torch.full((64,), 0.1), 0.3
    child = before + s * torch.randn(4000, 64, generator=torch.manual_seed(0))
    count = len(child)
    one = torch.ones(count)
    density = -((child - before) ** 2).mean(1) / (2 * s**2) - math.log(s) - 0.5 * math.log(2 * math.pi)
    kernel = Coefficients(0 * one, one, s * one)
    batch = EdgeBatch(
        torch.zeros(1, 64), torch.zeros(count).long(), child, density, one, one, kernel, one, before[None]
    )
    _, plain = Surrogate(clip=9.0)({"policy": after[None]}, batch)
    _, guarded = Guard(clip=9.0)({"policy": after[None]}, batch)
    divergence = 0.1**2 / (2 * s**2)
    assert float(plain["ratio"].log().mean()) == pytest.approx(-divergence, rel=0.03)
    assert float(guarded["ratio"].log().mean()) == pytest.approx(0.0, abs=0.03 * s * divergence)


@pytest.mark.parametrize("s", [0.2, 0.6])
def test_how_far_the_log_ratio_spreads_over_what_is_drawn(s: float) -> None:
    """√(2D/N) for N elements; guard's by how far the means are apart, whatever the noise."""
    size, count, apart = 64, 4000, 0.1
    before, after = torch.zeros(size), torch.full((size,), apart)
    child = before + s * torch.randn(count, size, generator=torch.manual_seed(0))
    one = torch.ones(count)
    density = -((child - before) ** 2).mean(1) / (2 * s**2) - math.log(s) - 0.5 * math.log(2 * math.pi)
    batch = EdgeBatch(
        *(torch.zeros(1, size), torch.zeros(count).long(), child, density, one, one),
        *(Coefficients(0 * one, one, s * one), one, before[None]),
    )
    plain, guarded = (
        loss({"policy": after[None]}, batch)[1]["ratio"].log().std() for loss in (Surrogate(clip=9.0), Guard(clip=9.0))
    )
    divergence = apart**2 / (2 * s**2)
    assert float(plain) == pytest.approx(math.sqrt(2 * divergence / size), rel=0.05)
    assert float(guarded) == pytest.approx(apart / math.sqrt(size), rel=0.05)


# every option matters

OPTIONS: dict[str, dict[str, Any]] = {
    "surrogate": {"clip": 0.001, "kl": 0.5, "edge_weight": "noise"},
    "dppo": {"threshold": 10.0, "kl": 0.5, "edge_weight": "noise"},
    "guard": {"clip": 0.001, "kl": 0.5, "edge_weight": "noise", "reweight": False},
    "nft": {
        "kl": 0.5,
        "beta": 0.5,
        "spread": 2.0,
        "adaptive": False,
        "decay_rate": 0.01,
        "decay_most": 0.2,
        "decay_start": 100,
    },
    "awm": {
        "kl": 0.5,
        "power": 0.5,
        "spread": 2.0,
        "ema": 0.5,
        "off_policy": True,
        "ratio_clip": 0.01,
        "decay_rate": 0.002,
        "decay_most": 0.2,
        "decay_start": 100,
    },
}
OF_LEVELS = {"levels_per_leaf", "level_share"}
"""Which calls there are, and not what they cost: tests/engine/test_losses.py has these."""


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, of in OPTIONS.items() for option in of])
def test_every_option_of_the_built_in_losses_matters(name: str, option: str) -> None:
    usual: dict[str, Any] = {"clip": 0.1} if name in ("surrogate", "guard") else {}
    if option == "ratio_clip":
        usual["off_policy"] = True

    def says(**options: Any) -> Any:
        loss = LOSSES[name](**usual | options)  # type: ignore[arg-type]
        uneven = torch.linspace(0.5, 1.5, 8).double()
        weighed = dataclasses.replace(edges()[0], noise_weight=uneven, advantage=uneven - 0.7)
        asked, batch = (answers(), leaves("flow")) if name in ("nft", "awm") else (edges()[2], weighed)
        total, _ = loss({who: asked[who] for who in (*loss.asks, "policy")}, batch)  # type: ignore[arg-type]
        kept = [loss.old_decay(steps) for steps in (50, 250, 9999)]
        return float(total), torch.autograd.grad(total, asked["policy"])[0].tolist(), kept

    assert says(**{option: OPTIONS[name][option]}) != says()


def test_every_option_is_tried() -> None:
    assert OPTIONS.keys() == LOSSES.keys()
    for name, loss in LOSSES.items():
        assert {field.name for field in dataclasses.fields(loss)} - OF_LEVELS == OPTIONS[name].keys()  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_options_are_given_by_name(loss: type) -> None:
    """Fields come from two classes, so that their order says nothing."""
    assert {field.kw_only for field in dataclasses.fields(loss)} == {True}


@pytest.mark.parametrize("value", ["x", True, math.nan, math.inf, None, [1.0]])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"^beta.*: is no number; allowed: a number, above 0$"):
        check_number("beta", value, above=0.0)


@pytest.mark.parametrize("value", [2, "yes", None])
def test_what_is_neither_true_nor_false_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"adaptive.*allowed: true, false$"):
        check_flag("adaptive", value)
