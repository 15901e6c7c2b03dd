"""Plans: shapes that hold together, windows that are never empty, tails that end at σ = 0."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.core.plans import PLANS
from arborl.core.schedule import Schedule, shifted
from arborl.core.tree import Plan, Tail, grow
from arborl.worlds.mixture import Mixture


def shapes(draw: st.DrawFn, name: str) -> Plan:
    """A small plan of every kind, with whatever settings fit."""
    steps = draw(st.integers(5, 8))
    schedule = draw(st.sampled_from([shifted(steps, 3.0), diffusion_schedule(steps)]))
    knobs = {
        "eta": 0.3,
        "k": draw(st.integers(2, 3)),
        "w": draw(st.integers(1, 2)),
        "s": draw(st.integers(0, 2)),
        "tou": draw(st.integers(1, 3)),
        "group_size": draw(st.integers(2, 4)),
        "num_trees": draw(st.integers(1, 2)),
        "shared_noise": draw(st.booleans()),
        "excess_noise": draw(st.booleans()),
        "split_points": draw(st.sampled_from([[], [0], [0, 2], [1]])),
        "split_rounds": draw(st.integers(1, 2)),
        "split_noise_scale": draw(st.sampled_from([1.0, 2.0])) if schedule.is_flow else 1.0,
        "mix_ode_sde": draw(st.booleans()),
        "mix_sde_window": draw(st.integers(1, 2)),
        "max_leaves": 64,
        "tail": Tail(draw(st.sampled_from(["euler", "dpmpp_2m"])), draw(st.integers(0, 4))),
    }
    return PLANS[name](schedule, "flow_sde" if schedule.is_flow else "ddim", draw(st.integers(0, 10**5)), **knobs)


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
        plan = PLANS["comb"](
            shifted(6, 3.0),
            "flow_sde",
            0,
            eta=0.5,
            k=3,
            split_points=[0, 2],
            split_rounds=1,
            num_trees=1,
            max_leaves=64,
        )
        assert len(plan.leaves) == 6
        assert plan.trained_parents.tolist() == [0, int((plan.depth == 2).nonzero()[plan.depth.tolist().count(2) - 1])]
        assert plan.forwards == 3 + 3 * 5 + 3 * 3
        for leaf in plan.leaves.tolist():
            noisy, node = 0, leaf
            while node >= plan.roots:
                noisy += int(plan.stochastic[node - plan.roots])
                node = int(plan.parent[node - plan.roots])
            assert noisy == 1


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
