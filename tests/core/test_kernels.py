"""Kernels against the reference projects' numbers, torch's own Normal, samples, and diffusers' scheduler."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborl.core.errors import InputError
from arborl.core.kernels import KERNELS, Gaussian, coefficients, sde_able, transition, x0_coefficients
from arborl.core.schedule import Schedule, shifted
from arborl.core.tree import deterministic, grow
from arborl.models.sd import ddim_schedule

from conftest import ROOT
from tiny_ddim import TinyDDIM

GOLDEN = json.loads((ROOT / "tests" / "golden" / "kernels_and_trees.json").read_text())
FLOW = [kernel for kernel in KERNELS if kernel != "ddim"]
CASES = [(kernel, i) for kernel in ("flow_sde", "dance_sde") for i in range(len(GOLDEN[kernel]))]


def edge(kernel: str, x, v, sigma: float, sigma_next: float, eta: float, kappa: float = 1.0) -> Gaussian:
    levels = [torch.full((len(x),), value, dtype=torch.float64) for value in (sigma, sigma_next, eta, kappa)]
    return transition(x, v, KERNELS[kernel](*levels))


@pytest.mark.parametrize(("kernel", "row"), CASES)
def test_golden_mean_std_and_log_density(kernel: str, row: int):
    case = GOLDEN[kernel][row]
    x, v, child, mean = (torch.tensor(case[name]) for name in ("x", "v", "x_next", "mean"))
    sigma, sigma_next = GOLDEN["sigmas_shift3_T10"][case["step"] :][:2]
    gaussian = edge(kernel, x, v, sigma, sigma_next, case["eta"])
    torch.testing.assert_close(gaussian.mean, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gaussian.std, torch.full((2,), case["std"]), rtol=1e-5, atol=1e-7)
    expected = torch.tensor(case["log_prob_mean"])
    torch.testing.assert_close(gaussian.log_density(child), expected, rtol=1e-5, atol=1e-5)


def test_dance_as_its_paper_writes_it():
    """x + d·v - ½η²·score·d with score = -(x - (1-σ)x̂0)/σ², term by term."""
    x, v = torch.randn(2, 5, 3, dtype=torch.float64)
    sigma, sigma_next, eta = 0.6, 0.5, 0.3
    d, clean = sigma_next - sigma, x - sigma * v
    score = -(x - (1 - sigma) * clean) / sigma**2
    expected = x + d * v - 0.5 * eta**2 * score * d
    torch.testing.assert_close(edge("dance_sde", x, v, sigma, sigma_next, eta).mean, expected)


def test_cps_as_its_paper_writes_it():
    x, v = torch.randn(2, 5, 3, dtype=torch.float64)
    sigma, sigma_next = 0.6, torch.tensor(0.5, dtype=torch.float64)
    std = sigma_next * torch.sin(torch.tensor(0.4 * torch.pi / 2, dtype=torch.float64))
    expected = (1 - sigma_next) * (x - sigma * v) + (sigma_next**2 - std**2).sqrt() * (x + (1 - sigma) * v)
    gaussian = edge("cps", x, v, sigma, float(sigma_next), 0.4)
    torch.testing.assert_close(gaussian.mean, expected)
    torch.testing.assert_close(gaussian.std, std.expand(5))


@pytest.mark.parametrize("kernel", KERNELS)
@given(step=st.integers(1, 8), eta=st.floats(0.05, 1.0), seed=st.integers(0, 1000))
def test_log_density_is_the_mean_of_torchs_normal(kernel: str, step: int, eta: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x, v, child = torch.randn(3, 4, 2, 3, 3, generator=generator)
    schedule = shifted(10, 3.0)
    gaussian = edge(kernel, x, v, float(schedule.sigma[step]), float(schedule.sigma_next[step]), eta)
    if kernel == "ode":
        assert (gaussian.std == 0).all()
        assert (gaussian.log_density(child) == 0).all()
        return
    normal = torch.distributions.Normal(gaussian.mean.double(), gaussian.std.double().view(-1, 1, 1, 1))
    expected = normal.log_prob(child.double()).flatten(1).mean(1)
    torch.testing.assert_close(gaussian.log_density(child).double(), expected, rtol=1e-5, atol=1e-5)


def test_kl_is_torchs_own():
    mean, other, std = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6) + 0.1
    normals = [torch.distributions.Normal(m, std[:, None]) for m in (mean, other)]
    expected = torch.distributions.kl_divergence(*normals).mean(1)
    torch.testing.assert_close(Gaussian(mean, std).kl(Gaussian(other, std)), expected)


@pytest.mark.parametrize(
    ("kernel", "kappa"), [("flow_sde", 1.0), ("flow_sde", 4.0), ("dance_sde", 1.0), ("dance_sde", 4.0), ("cps", 1.0)]
)
def test_moments_of_samples_and_density_at_the_std_they_were_drawn_with(kernel: str, kappa: float):
    torch.manual_seed(0)
    x, v = torch.randn(2, 1, 4).repeat(1, 50_000, 1)
    gaussian = edge(kernel, x, v, 0.75, 0.6667, 0.3, kappa)
    noise = torch.randn_like(x)
    child = gaussian.sample(noise)
    torch.testing.assert_close(child.mean(0), gaussian.mean[0], atol=4 * float(gaussian.std[0]) / 223, rtol=0)
    torch.testing.assert_close(child.std(0), gaussian.std[0].expand(4), rtol=0.02, atol=0)
    # The expected log-density of a Gaussian under itself is minus its entropy; another std would miss it.
    entropy = torch.distributions.Normal(0.0, gaussian.std[0]).entropy()
    assert float(gaussian.log_density(child).mean()) == pytest.approx(-float(entropy), abs=0.01)


@pytest.mark.parametrize("kernel", FLOW)
def test_zero_noise_is_the_ode(kernel: str):
    x, v = torch.randn(2, 4, 3, 5)
    schedule = shifted(10, 3.0)
    for sigma, sigma_next in zip(schedule.sigma.tolist(), schedule.sigma_next.tolist(), strict=True):
        gaussian = edge(kernel, x, v, sigma, sigma_next, 0.0)
        torch.testing.assert_close(gaussian.mean, x + (sigma_next - sigma) * v, rtol=1e-6, atol=1e-6)
        assert (gaussian.std == 0).all()


@pytest.mark.parametrize("kernel", FLOW)
def test_zero_noise_is_diffusers_own_scheduler(kernel: str):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    schedule = Schedule.from_sigmas(scheduler.sigmas.tolist())
    torch.testing.assert_close(schedule.timestep.float(), scheduler.timesteps, rtol=1e-6, atol=0)
    ours = theirs = torch.randn(3, 4, 8, 8)
    for step, timestep in enumerate(scheduler.timesteps):
        v = torch.randn(3, 4, 8, 8)
        theirs = scheduler.step(v, timestep, theirs, return_dict=False)[0]
        ours = edge(kernel, ours, v, float(schedule.sigma[step]), float(schedule.sigma_next[step]), 0.0).mean
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_grid_must_fall_to_zero():
    for grid in ([1.0, 0.5], [1.0, 1.0, 0.0], [0.0], [1.2, 0.0]):
        with pytest.raises(ValueError, match="falls strictly"):
            Schedule.from_sigmas(grid)


class TestDdim:
    @pytest.mark.parametrize("row", range(len(GOLDEN["ddim"]["cases"])))
    @pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
    def test_golden_log_density(self, row: int, prediction: str):
        """With the same noise told as ε or as v = (ε - σ·x)/α."""
        case = GOLDEN["ddim"]["cases"][row]
        schedule = ddim_schedule(TinyDDIM.scheduler(prediction), 20)
        assert schedule.timestep.tolist() == GOLDEN["ddim"]["timesteps"]
        x, eps, child = (torch.tensor(case[name]).double() for name in ("x", "eps", "x_next"))
        step = torch.tensor([case["step"]] * len(x))
        sigma = schedule.sigma[step].view(-1, 1, 1, 1)
        answer = eps if prediction == "epsilon" else (eps - sigma * x) / torch.sqrt(1 - sigma**2)
        eta, kappa = torch.full((len(x),), case["eta"]).double(), torch.ones(len(x)).double()
        gaussian = transition(x, answer, coefficients(schedule, "ddim", step, eta, kappa))
        expected = torch.tensor(case["log_prob_mean"]).double()
        torch.testing.assert_close(gaussian.log_density(child), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
    @pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
    def test_steps_and_clean_samples_are_those_of_diffusers_own_scheduler(self, prediction: str, eta: float):
        scheduler = TinyDDIM.scheduler(prediction)
        schedule = ddim_schedule(scheduler, 10)
        plan = grow(schedule, "ddim", 1, [1] * 10, [eta] * 10) if eta else deterministic(schedule)
        ours = theirs = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)).double()
        for step, timestep in enumerate(scheduler.timesteps):
            answer, noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(step + 1)).double()
            a, b = x0_coefficients(schedule, schedule.sigma[step : step + 1])
            result = scheduler.step(answer, timestep, theirs, eta=eta, variance_noise=noise if eta else None)
            torch.testing.assert_close(a * ours + b * answer, result.pred_original_sample, rtol=1e-4, atol=1e-4)
            gaussian = transition(
                ours, answer, type(plan.coefficients)(*(c[step].expand(3) for c in plan.coefficients))
            )
            ours, theirs = gaussian.sample(noise), result.prev_sample
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def test_every_step_that_adds_noise_may_be_stochastic(self):
        schedule = ddim_schedule(TinyDDIM.scheduler("epsilon"), 10)
        assert sde_able(schedule, "ddim", 1.0).all()
        clean_end = Schedule.from_alphas([0.01, 0.5, 1.0], [500, 1], "epsilon")
        assert sde_able(clean_end, "ddim", 1.0).tolist() == [True, False]

    def test_kernels_belong_to_their_kind_of_model(self):
        schedule = ddim_schedule(TinyDDIM.scheduler("epsilon"), 10)
        with pytest.raises(InputError, match=r"kernel=flow_sde.*diffusion model.*ddim"):
            sde_able(schedule, "flow_sde", 0.7)
        with pytest.raises(InputError, match=r"kernel=ddim.*flow model"):
            sde_able(shifted(10, 3.0), "ddim", 1.0)
        with pytest.raises(InputError, match=r"eta=1.5.*at most 1"):
            sde_able(schedule, "ddim", 1.5)

    @pytest.mark.parametrize(
        ("alphas", "timesteps", "prediction"),
        [
            ([0.5, 0.4], [1], "epsilon"),
            ([0.1, 0.2], [1, 2], "epsilon"),
            ([0.0, 0.5], [1], "epsilon"),
            ([0.1, 0.5], [1], "x"),
        ],
    )
    def test_a_table_that_makes_no_sense_is_refused(self, alphas, timesteps, prediction):
        with pytest.raises(ValueError, match="not"):
            Schedule.from_alphas(alphas, timesteps, prediction)
