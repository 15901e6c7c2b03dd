"""The closed-form mixture: its velocity is the truth, and samplers are held to it."""

import pytest
import torch

from arborl.core.noise import fold
from arborl.core.schedule import shifted
from arborl.core.tree import deterministic
from arborl.worlds.mixture import PIXELS, PLACES, SPREAD, WEIGHTS, Mixture, place
from bench.marginals import marginals

from conftest import make, make_policy, trees_of

MEANS = torch.tensor(list(PLACES.values()))
SAMPLES = 4000


@pytest.mark.parametrize("sigma", [0.05, 0.3, 0.6, 0.95, 1.0])
def test_velocity_is_the_conditional_expectation(sigma: float):
    """E[noise - x0 | x_σ = x] by brute force: a million clean samples, each weighed by how well it explains x."""
    torch.manual_seed(0)
    data = Mixture(MEANS, torch.tensor(WEIGHTS), SPREAD)
    mode = torch.multinomial(torch.tensor(WEIGHTS), 1_000_000, replacement=True)
    x0 = (MEANS[mode] + SPREAD * torch.randn(len(mode), 2)).double()
    for x in (1 - sigma) * x0[:4] + sigma * torch.randn(4, 2).double():
        noise = (x - (1 - sigma) * x0) / sigma
        weight = torch.softmax(-(noise**2).sum(1) / 2, 0)
        expected = (weight[:, None] * (noise - x0)).sum(0)
        found = data.velocity(x[None], torch.tensor([sigma]).double())[0]
        torch.testing.assert_close(found, expected, atol=0.04, rtol=0.02)


# A mode of weight 0.3 has a standard error of 0.005 among 8,000 samples: three of them, and 5% of the spread.
@pytest.mark.parametrize(
    ("kernel", "eta"),
    [
        ("flow_sde", 0.7),
        pytest.param("flow_sde", 0.3, marks=pytest.mark.slow),
        pytest.param("dance_sde", 0.3, marks=pytest.mark.slow),  # core/test_kernels.py has its numbers and its formula
    ],
)
def test_sdes_keep_the_marginals_at_many_steps_and_come_closer_with_each(kernel: str, eta: float):
    (_, few), (_, some), (weight, many) = (marginals(kernel, eta, steps) for steps in (10, 50, 400))
    assert weight == pytest.approx(0.30, abs=0.015)
    assert many == pytest.approx(0.30, rel=0.05)
    assert abs(many - 0.30) < abs(some - 0.30) < abs(few - 0.30)


@pytest.mark.parametrize(
    ("eta", "low", "high"),
    [
        pytest.param(0.5, 0.26, 0.285, marks=pytest.mark.slow),
        (0.7, 0.245, 0.275),
        pytest.param(0.9, 0.225, 0.255, marks=pytest.mark.slow),
    ],
)
def test_cps_does_not_keep_the_marginals(eta: float, low: float, high: float):
    """The smaller mode shrinks and the spread with it, at 400 steps as at 10: more of both with more noise."""
    weight, spread = marginals("cps", eta, 400)
    assert low <= weight <= high
    assert spread < 0.28


def test_the_ode_lands_on_the_data():
    policy = make_policy(["sample.num_steps=200"])
    record = trees_of(policy, deterministic(shifted(200, 3.0)), ["a dot"] * SAMPLES, fold(0, 0))
    nearest = torch.cdist(record.leaves[:, 0], MEANS).argmin(1)
    weights = torch.bincount(nearest, minlength=4) / SAMPLES
    assert float((weights - torch.tensor(WEIGHTS)).abs().max()) < 0.022


def test_pictures_and_the_place_reward():
    _, model = make([])
    pictures = model.decode(torch.cat([MEANS, torch.tensor([[50.0, 50.0]])]))
    assert pictures.shape == (5, 3, PIXELS, PIXELS)
    assert 0 <= float(pictures.min()) <= float(pictures.max()) <= 1
    for i, name in enumerate(PLACES):
        scores = place(pictures, [f"a dot at the {name}"] * 5, {})
        assert float(scores[i]) == pytest.approx(1, abs=0.02)
        assert (scores[torch.arange(5) != i] < 0.3).all()
    assert place(pictures[:2], ["nowhere", "top left"], {}).isnan().tolist() == [True, False]
