"""Plans: shapes that hold together, windows that are never empty, tails that end at σ = 0."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.core.errors import ArgumentError
from arborl.core.kernels import sde_able
from arborl.core.plans import PLANS, Group, Noise, Shape, Splits, Window
from arborl.core.schedule import Schedule, shifted
from arborl.core.tree import Plan, Tail, deterministic, grow
from arborl.models.sd import ddim_schedule
from arborl.worlds.mixture import Mixture

from tiny_ddim import TinyDDIM


def small_shape(**fields: Any) -> Shape:
    """A small shape: what is not named does not matter to the test."""
    usual = Shape(
        noise=Noise("flow_sde", 0.7),
        k=2,
        window=Window(size=2, stride=1, interval=1),
        splits=Splits(points=(), rounds=2),
        group=Group(size=4),
        trees=1,
        max_leaves=64,
    )
    return usual._replace(**fields)


def shapes(draw: st.DrawFn, name: str) -> Plan:
    """A small plan of every kind, with whatever settings fit."""
    steps = draw(st.integers(5, 8))
    schedule = draw(st.sampled_from([shifted(steps, 3.0), diffusion_schedule(steps)]))
    window = Window(draw(st.integers(1, 2)), draw(st.integers(0, 2)), draw(st.integers(1, 3)))
    shape = Shape(
        noise=Noise("flow_sde" if schedule.is_flow else "ddim", 0.3, draw(st.booleans())),
        k=draw(st.integers(2, 3)),
        # A tree that branches at every step would have too many leaves.
        window=window if name == "tree" else draw(st.sampled_from([window, None])),
        splits=Splits(
            draw(st.sampled_from([(), (0,), (0, 2), (1,)])),
            draw(st.integers(1, 2)),
            draw(st.sampled_from([1.0, 2.0])) if schedule.is_flow else 1.0,
        ),
        group=Group(draw(st.integers(2, 4)), draw(st.booleans())),
        trees=draw(st.integers(1, 2)),
        max_leaves=64,
        tail=tails(draw),
    )
    return PLANS[name](schedule, draw(st.integers(0, 10**5)), shape)


def tails(draw: st.DrawFn) -> Tail:
    return Tail(draw(st.sampled_from(["euler", "dpmpp_2m"])), draw(st.integers(0, 4)))


def diffusion_schedule(steps: int) -> Schedule:
    alphas = torch.linspace(0.01, 0.999, steps + 1).tolist()
    return Schedule.from_alphas(alphas, list(range(10 * steps, 0, -10)), "epsilon")


class TestPlans:
    @pytest.mark.parametrize("name", PLANS)
    @given(st.data())
    @settings(max_examples=60)
    def test_every_plan_is_consistent_and_every_window_has_a_step_in_it(self, name: str, data: st.DataObject):
        plan = shapes(data.draw, name)
        assert plan.stochastic.any(), "a window is never empty, at whatever epoch"
        assert (plan.depth[plan.child] == plan.depth[plan.parent] + 1).all()
        assert (plan.tree[plan.child] == plan.tree[plan.parent]).all()
        assert sum(len(level.parents) for level in plan.levels) == plan.forwards
        covered = torch.cat([torch.arange(plan.edges)[level.edges] for level in plan.levels])
        assert covered.tolist() == list(range(plan.edges))

    @pytest.mark.parametrize("name", PLANS)
    @given(st.data())
    @settings(max_examples=60)
    def test_every_path_is_a_chain_of_levels_that_ends_where_the_schedule_ends(self, name: str, data: st.DataObject):
        plan = shapes(data.draw, name)
        schedule, last = plan.schedule, plan.schedule.sigma_next.min()
        into = {int(child): edge for edge, child in enumerate(plan.child)}
        for leaf in plan.leaves.tolist():
            edge = into[leaf]
            assert schedule.sigma_next[plan.step[edge]] == last
            if schedule.is_flow:
                assert last == 0
                assert not plan.stochastic[edge], "nothing could remove the noise of the last step"
        for edge, parent in enumerate(plan.parent.tolist()):
            level = schedule.sigma[plan.step[edge]]
            if parent < plan.roots:
                assert level == schedule.sigma[0]
            else:
                assert level == schedule.sigma_next[plan.step[into[parent]]]

    @given(st.data())
    def test_chains_are_what_is_left_after_the_last_split(self, data: st.DataObject):
        plan = shapes(data.draw, data.draw(st.sampled_from(sorted(PLANS))))
        for edge in range(plan.edges):
            below, node = [], plan.roots + edge
            while (children := (plan.parent == node).nonzero().flatten().tolist()) and len(children) == 1:
                below.append(children[0])
                node = plan.roots + children[0]
            expected = plan.leaves.tolist().index(node) if not children else -1
            assert plan.only_leaf[edge] == expected

    def test_the_comb_differs_from_its_spine_by_one_draw(self):
        shape = small_shape(noise=Noise("flow_sde", 0.5), k=3, splits=Splits((0, 2), 1))
        plan = PLANS["comb"](shifted(6, 3.0), 0, shape)
        assert len(plan.leaves) == 6
        assert plan.trained_parents.tolist() == [0, int((plan.depth == 2).nonzero()[plan.depth.tolist().count(2) - 1])]
        assert plan.forwards == 3 + 3 * 5 + 3 * 3
        for leaf in plan.leaves.tolist():
            noisy, node = 0, leaf
            while node >= plan.roots:
                noisy += int(plan.stochastic[node - plan.roots])
                node = int(plan.parent[node - plan.roots])
            assert noisy == 1

    @pytest.mark.parametrize("name", ["tree", "mix", "branch"])
    @pytest.mark.parametrize("diffusion", [False, True])
    def test_without_a_window_a_plan_is_stochastic_wherever_a_step_may_be(self, name: str, diffusion: bool):
        schedule, kernel = (diffusion_schedule(6), "ddim") if diffusion else (shifted(6, 3.0), "flow_sde")
        able = sde_able(schedule, kernel, 0.3)
        for excess in (False, True):  # which only flat is asked for
            shape = small_shape(noise=Noise(kernel, 0.3, excess), window=None)
            plan = PLANS[name](schedule, 5, shape)
            assert plan.step[plan.stochastic].unique().tolist() == able.nonzero().flatten().tolist()


OTHERWISE: dict[str, tuple[str, object]] = {
    "noise.kernel": ("tree", "dance_sde"),
    "noise.eta": ("tree", 0.4),
    "noise.excess": ("flat", True),
    "k": ("comb", 3),
    "window": ("branch", None),
    "window.size": ("mix", 3),
    "window.stride": ("tree", 2),
    "window.interval": ("tree", 3),
    "splits.points": ("comb", (1,)),
    "splits.rounds": ("branch", 3),
    "splits.scale": ("branch", 1.5),
    "group.size": ("mix", 3),
    "group.shared_noise": ("flat", True),
    "trees": ("comb", 2),
    "max_leaves": ("flat", 3),
    "tail.solver": ("tree", "dpmpp_2m"),
    "tail.steps": ("tree", 1),
}
"""For every field of a shape a plan to which another value matters."""


class TestShape:
    def test_no_field_is_forgotten(self):
        usual = small_shape()
        inner = {f"{name}.{field}" for name in usual._fields for field in getattr(getattr(usual, name), "_fields", ())}
        plain = {name for name in usual._fields if not hasattr(getattr(usual, name), "_fields")}
        assert {*OTHERWISE} == inner | plain | {"window"}

    @pytest.mark.parametrize("key", OTHERWISE)
    def test_every_field_matters_to_a_plan(self, key: str):
        def arrays() -> list[list[float]]:
            plan = PLANS[name](shifted(10, 3.0), 3, shape)
            table = plan.schedule.sigma, plan.schedule.sigma_next
            own = plan.parent, plan.step, plan.coefficients.std, plan.multistep
            return [[plan.roots], *(values.tolist() for values in (*table, *own))]

        name, value = OTHERWISE[key]
        shape = small_shape()
        usual = arrays()
        assert arrays() == usual
        record, _, field = key.partition(".")
        shape = shape._replace(**{record: getattr(shape, record)._replace(**{field: value}) if field else value})
        if key == "max_leaves":
            with pytest.raises(ArgumentError, match="max_leaves=3"):
                arrays()
        else:
            assert arrays() != usual


class TestODE:
    """The kernel "ode": a group of trajectories that are told apart by their first noise alone."""

    @given(st.data())
    def test_a_flat_group_is_as_many_deterministic_trajectories(self, data: st.DataObject):
        steps, size, tail = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5)), tails(data.draw)
        schedule = data.draw(st.sampled_from([shifted(steps, 3.0), diffusion_schedule(steps)]))
        noise = Noise("ode", data.draw(st.sampled_from([0.0, 0.7])), data.draw(st.booleans()))
        shape = small_shape(noise=noise, group=Group(size), trees=data.draw(st.integers(1, 2)), tail=tail)
        plan = PLANS["flat"](schedule, data.draw(st.integers(0, 100)), shape)
        assert not plan.stochastic.any()
        assert (plan.coefficients.std == 0).all()
        assert plan.roots == len(plan.leaves) == size
        assert plan.forwards == plan.edges == size * (min(tail.steps, steps) or steps)
        assert plan.tree[plan.leaves].tolist() == list(range(size))
        if tail.steps in (0, steps):
            one = deterministic(schedule, tail=tail)
            assert plan.kernel == one.kernel
            for ours, its in zip(plan.coefficients, one.coefficients, strict=True):
                assert torch.equal(ours.view(steps, size), its[:, None].expand(steps, size))
            assert torch.equal(plan.multistep_coefficient.view(steps, size)[:, 0], one.multistep_coefficient)

    def test_its_trajectories_are_those_of_diffusers_euler(self):
        from diffusers import FlowMatchEulerDiscreteScheduler

        schedule = shifted(7, 3.0)
        scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
        scheduler.set_timesteps(sigmas=schedule.sigma.tolist())
        self.follow(schedule, lambda answer, timestep, x: scheduler.step(answer, timestep, x), scheduler.timesteps)

    @pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
    def test_its_trajectories_are_those_of_diffusers_ddim(self, prediction: str):
        scheduler = TinyDDIM.scheduler(prediction)
        schedule = ddim_schedule(scheduler, 7)
        scheduler.set_timesteps(7)
        self.follow(schedule, lambda answer, timestep, x: scheduler.step(answer, timestep, x), scheduler.timesteps)

    def follow(self, schedule: Schedule, step: Callable[..., Any], timesteps: torch.Tensor) -> None:
        plan = PLANS["flat"](schedule, 0, small_shape(noise=Noise("ode", 0.0), group=Group(3)))
        latents = torch.zeros(plan.nodes, 2, 4, dtype=torch.float64)
        latents[:3] = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
        theirs = latents[:3].clone()
        for level, timestep in zip(plan.levels, timesteps, strict=True):
            torch.testing.assert_close(plan.timestep[level.parents].float(), timestep.float().expand(3))
            before = latents[plan.parent[level.edges]]
            a, b, _ = (c[level.edges].view(-1, 1, 1) for c in plan.coefficients)
            latents[plan.child[level.edges]] = a * before + b * torch.tanh(1.7 * before)
            theirs = step(torch.tanh(1.7 * theirs), timestep, theirs).prev_sample.double()
        torch.testing.assert_close(latents[plan.leaves], theirs, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", PLANS)
    @pytest.mark.parametrize("window", [Window(1, 1, 1), None])
    @pytest.mark.parametrize(
        ("diffusion", "stochastic"), [(False, "flow_sde, dance_sde or cps"), (True, "ddim")], ids=["flow", "diffusion"]
    )
    @pytest.mark.parametrize("steps", [1, 6])
    def test_where_trajectories_part_it_is_refused_in_one_line(
        self, name: str, window: Window | None, diffusion: bool, stochastic: str, steps: int
    ):
        schedule = diffusion_schedule(steps) if diffusion else shifted(steps, 3.0)
        shape = small_shape(noise=Noise("ode", 0.0), group=Group(4, shared_noise=True), window=window)
        with pytest.raises(ArgumentError) as error:
            PLANS[name](schedule, 0, shape)
        assert str(error.value) == (
            "kernel=ode: adds no noise, so that branches of one trajectory would be the same picture"
            f"; allowed: {stochastic}; try: plan=flat with group.shared_noise=false"
        )


class TestTails:
    @pytest.mark.parametrize("prediction", ["flow", "epsilon", "v_prediction"])
    def test_the_second_order_tail_is_diffusers_own_solver(self, prediction: str):
        from diffusers import DPMSolverMultistepScheduler

        torch.manual_seed(0)
        if prediction == "flow":
            schedule = shifted(9, 3.0)
        else:
            alphas = torch.linspace(0.02, 1.0, 10, dtype=torch.float64).tolist()
            schedule = Schedule.from_alphas(alphas, list(range(900, 0, -100)), prediction)
        kernel = "flow_sde" if prediction == "flow" else "ddim"
        plan = grow(schedule, kernel, 1, [1] * 9, [0.5] + [0.0] * 8, tail=Tail("dpmpp_2m", 5))
        assert plan.multistep.tolist() == [False] * 2 + [True] * 3 + [False]
        rows = plan.step[1:]
        name = "flow_prediction" if prediction == "flow" else prediction
        solver = DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++", solver_order=2, prediction_type=name, final_sigmas_type="zero",
            use_flow_sigmas=prediction == "flow", lower_order_final=True,
        )  # fmt: skip
        solver.set_timesteps(5)
        levels = torch.cat([schedule.alpha(plan.schedule.sigma[rows]), torch.ones(1).double()])
        sigmas = torch.cat([plan.schedule.sigma[rows], torch.zeros(1).double()])
        solver.sigmas = sigmas if prediction == "flow" else sigmas / levels
        solver.timesteps = torch.arange(5)

        def answer(x: torch.Tensor, level: float) -> torch.Tensor:
            return torch.tanh(1.7 * x + level)  # any function will do

        x = y = torch.randn(4, 3, dtype=torch.float64)
        before = torch.zeros_like(x)
        for i, edge in enumerate(range(1, 6)):
            level = float(plan.schedule.sigma[plan.step[edge]])
            v = answer(x, level)
            a, b, _ = (c[edge] for c in plan.coefficients)
            clean_a, clean_b = (c[int(plan.parent[edge])] for c in plan.x0_coefficients)
            clean = clean_a * x + clean_b * v
            x = a * x + b * v + plan.multistep_coefficient[edge] * (clean - before)
            before = clean
            y = solver.step(answer(y, level), torch.tensor(i), y).prev_sample
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)

    def test_second_order_steps_converge_faster(self):
        """On a Gaussian, where the ODE takes noise z to mean + spread·z exactly."""
        data = Mixture(torch.tensor([[0.7, -0.4]]).double(), torch.ones(1).double(), 0.3)
        z = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)).double()

        def error(solver: str, steps: int) -> float:
            plan = grow(shifted(steps, 1.0), "flow_sde", 1, [1] * steps, [0.0] * steps, tail=Tail(solver))
            x, before = z, z
            for edge in range(plan.edges):
                v = data.velocity(x, plan.sigma[edge].expand(len(x)))
                a, b, _ = (c[edge] for c in plan.coefficients)
                clean = plan.x0_coefficients[0][edge] * x + plan.x0_coefficients[1][edge] * v
                x, before = a * x + b * v + plan.multistep_coefficient[edge] * (clean - before), clean
            return float((x - (data.means + 0.3 * z)).abs().max())

        first, second = ([error(solver, n) for n in (64, 128, 256)] for solver in ("euler", "dpmpp_2m"))
        assert all(b < a / 1.7 for a, b in itertools.pairwise(first))
        assert all(b < a / 2.5 for a, b in itertools.pairwise(second))
        assert second[-1] < first[-1] / 10

    @given(start=st.integers(0, 38), steps=st.integers(1, 40))
    def test_a_shorter_tail_always_ends_at_zero(self, start: int, steps: int):
        table, rows, second = Tail("dpmpp_2m", steps).rows_from(shifted(40, 3.0), start)
        assert len(rows) == min(steps, 40 - start)
        assert table.sigma[rows[0]] == shifted(40, 3.0).sigma[start]
        assert table.sigma_next[rows[-1]] == 0
        assert (table.sigma_next[rows] < table.sigma[rows]).all()
        assert not second[0]
        assert not second[-1]
