"""Plans: counts, windows that are never empty, tails that end at σ = 0, noise at splits, errors that help."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.config import load_config, options
from arborl.core.errors import InputError
from arborl.core.noise import fold
from arborl.core.plans import PLANS
from arborl.core.schedule import Schedule, shifted
from arborl.core.tree import Plan, Tail, grow
from arborl.engine.cost import costs, epochs_within
from arborl.engine.method import check_plan, kernel_of, make_plan, plan_variants, pruning, window_of, window_plans
from arborl.engine.rollout import sample_trees
from arborl.worlds.mixture import Mixture

from conftest import make


def plan_json(*arguments: str) -> dict:
    command = [sys.executable, "-m", "arborl", "plan", *arguments, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


class TestCounts:
    def test_branch_with_20_steps_and_four_splits(self):
        found = plan_json(
            "algo=branch", "sample.num_steps=20", "tree.split_points=[0,3,6,9]", "sample.num_prompts=1", "model=mixture"
        )
        assert found["images"] == 16
        assert found["positions"] == [{"window": 0, "forwards": 203, "forward_backwards": 203 - 16}]

    def test_mix_computes_the_shared_prefix_once(self):
        found = plan_json(
            "algo=mix",
            "sample.num_steps=25",
            "sample.group_size=12",
            "tree.w=4",
            "sample.num_prompts=1",
            "model=mixture",
        )
        assert found["images"] == 12
        assert len(found["positions"]) > 15
        for row in found["positions"]:
            start = row["window"]
            assert row["forwards"] == start + 1 + 12 * (24 - start)
            assert row["forward_backwards"] == 1 + 12 * 3

    def test_mix_really_calls_the_model_as_often(self):
        config, model = make(["algo=mix", "sample.num_steps=10", "sample.group_size=6", "tree.w=3", "tree.tou=1"])
        seen, predict = [], model.predict
        model.predict = lambda x, t, cond: (seen.append(len(x)), predict(x, t, cond))[1]  # pyright: ignore
        plan = make_plan(config, model.schedule(10), 4)
        sample_trees(model, plan, model.encode(["a dot"] * 2), fold(0, 0), torch.arange(2), config.sample)
        assert sum(seen) == 2 * plan.forwards == 2 * (4 + 1 + 6 * 5)

    def test_tree_of_the_readme(self):
        found = plan_json("sample.num_prompts=1", "model=mixture", "tree.w=4", "tree.k=2", "sample.num_steps=10")
        assert found["positions"][0] == {"window": 0, "forwards": 111, "forward_backwards": 15}

    def test_the_last_step_is_deterministic_and_not_trained(self):
        config = load_config("branch", ["model=mixture"])
        plan = make_plan(config, shifted(20, 3.0), 0)
        assert plan.step[plan.stochastic].unique().tolist() == list(range(19))
        assert plan.coefficients.std[plan.step == 19].abs().max() == 0

    @pytest.mark.parametrize("name", options("algo"))
    def test_costs_add_up_to_the_epochs_a_budget_allows(self, name: str):
        config = load_config(name)
        epochs = epochs_within(config, 3e5)
        spent = list(itertools.islice(costs(config), epochs + 1))
        assert sum(spent[:-1]) <= 3e5 < sum(spent)

    def test_a_budget_where_pruning_ends_early(self):
        config = load_config("branch_width", ["prune.until=0.5"])
        config.train.epochs = epochs_within(config, 3e5)
        assert sum(itertools.islice(costs(config), config.train.epochs)) == pytest.approx(3e5, rel=0.1)
        whole = load_config("branch_width", ["prune.until=1"])
        assert config.train.epochs < epochs_within(whole, 3e5)


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

    @pytest.mark.parametrize("name", ["tree", "mix", "branch_mix", "mix_flash"])
    def test_windows_slide_and_come_to_every_place(self, name: str):
        config = load_config(name, ["model=mixture", "tree.s=1"])
        schedule = shifted(config.sample.num_steps, 3.0)
        epochs = range(0, 40 * config.tree.tou, config.tree.tou)
        noisy = [make_plan(config, schedule, epoch) for epoch in epochs]
        steps = {tuple(plan.step[plan.stochastic].unique().tolist()) for plan in noisy}
        assert len(steps) > 3
        assert all(steps)

    @pytest.mark.parametrize(("s", "count"), [(0, 1), (1, 18), (2, 9), (5, 18), (18, 1)])
    def test_a_window_beside_splits_is_known_by_its_place_not_by_its_looks(self, s: int, count: int):
        """On a split point a window of one step changes nothing, and is still a place of its own."""
        config = load_config("branch_mix", ["model=mixture", "tree.mix_sde_window=1", "tree.tou=3", f"tree.s={s}"])
        config.sample.num_steps = 19
        found = window_plans(config)
        assert len(found) == count
        for epoch in range(0, 120, 7):
            plan = make_plan(config, shifted(19, 3.0), epoch)
            expected = found[epoch // 3 % count][1]
            assert torch.equal(plan.eta, expected.eta)
            assert torch.equal(plan.step, expected.step)

    def test_what_a_run_comes_to_is_what_walking_all_its_epochs_finds(self):
        config = load_config("branch_depth", ["model=mixture", "tree.mix_ode_sde=true", "tree.s=3", "tree.tou=7"])
        config.prune.until, config.train.epochs = 0.8, 400
        schedule = shifted(20, 3.0)

        def stage(epoch: int) -> tuple:
            plan = make_plan(config, schedule, epoch)
            return window_of(config, plan, epoch), pruning(config, plan, epoch)

        assert {stage(epoch) for epoch, _ in plan_variants(config)} == {stage(epoch) for epoch in range(400)}

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

    @pytest.mark.parametrize(
        ("preset", "overrides", "words"),
        [
            ("branch", ["tree.split_points=[0,19]"], ["tree.split_points", "step 19", "of [0, 1"]),
            ("branch", ["tree.split_points=[3,3]"], ["tree.split_points", "twice"]),
            ("branch", ["tree.split_points=[]", "tree.split_rounds=18"], ["tree.split_rounds=18", "1..17"]),
            ("branch", ["tree.split_noise_scale=400"], ["tree.split_noise_scale=400", "less"]),
            ("branch", ["kernel.name=cps", "tree.split_noise_scale=2"], ["tree.split_noise_scale=2", "dance_sde"]),
            ("branch_mix", ["tree.mix_sde_window=30"], ["tree.mix_sde_window=30", "1..19"]),
            ("mix", ["tree.w=30"], ["tree.w=30", "1..2"]),
            ("mix", ["kernel.name=ddim"], ["kernel.name=ddim", "flow model", "flow_sde"]),
            ("dance", ["sample.group_size=1"], ["sample.group_size", "2 leaves"]),
            ("tempflow", ["tree.k=1000"], ["tree.max_leaves"]),
            ("tempflow", ["tree.k=1"], ["advantage.group=siblings", "branches"]),
            ("tempflow", ["tree.k=1", "tree.split_points=[0]"], ["tree.k and sample.num_trees", "2 leaves"]),
            ("flow_grpo", ["advantage.name=depth"], ["advantage.group=tree", "prompt"]),
            ("branch", ["prune.depth=[30]"], ["prune.depth=[30]", "1..20"]),
            (
                "tree",
                ["prune.depth=[1,2,3,4]", "tree.s=0"],
                ["prune.depth=[1, 2, 3, 4]", "epoch 0", "no edge to train"],
            ),
            ("mix", ["prune.depth=[26,27]"], ["prune.depth=[26, 27]", "1..25"]),
        ],
    )
    def test_a_bad_plan_is_one_line_with_the_key_and_what_is_allowed(self, preset, overrides, words):
        with pytest.raises(InputError) as error:
            check_plan(load_config(preset, ["model=mixture", "rewards=place", *overrides]))
        assert "\n" not in str(error.value)
        assert all(word in str(error.value) for word in words), str(error.value)

    def test_a_batch_that_is_pruned_away_only_later_in_the_run_is_an_error_at_its_start(self):
        moving = ["model=mixture", "tree.w=1", "prune.depth=[4]", "tree.tou=5"]
        check_plan(load_config("tree", [*moving, "train.epochs=15"]))
        with pytest.raises(InputError, match="at epoch 15"):
            check_plan(load_config("tree", [*moving, "train.epochs=16"]))


class TestTails:
    def euler_and_2m(self, steps: int, solver: str, tail_steps: int) -> torch.Tensor:
        config, model = make(
            [f"sample.num_steps={steps}", f"sample.tail_solver={solver}", f"sample.tail_steps={tail_steps}", "tree.w=1"]
        )
        plan = make_plan(config, model.schedule(steps), 0)
        texts = ["a dot"] * 32
        return sample_trees(model, plan, model.encode(texts), fold(0, 0), torch.arange(32), config.sample).leaves

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

    def test_a_tail_as_long_as_the_schedule_is_the_schedule(self):
        for n in (0, 9, 50):
            assert torch.equal(self.euler_and_2m(10, "euler", n), self.euler_and_2m(10, "euler", 0))

    @given(start=st.integers(0, 38), steps=st.integers(1, 40))
    def test_a_shorter_tail_always_ends_at_zero(self, start: int, steps: int):
        table, rows, second = Tail("dpmpp_2m", steps).of(shifted(40, 3.0), start)
        assert len(rows) == min(steps, 40 - start)
        assert table.sigma[rows[0]] == shifted(40, 3.0).sigma[start]
        assert table.sigma_next[rows[-1]] == 0
        assert (table.sigma_next[rows] < table.sigma[rows]).all()
        assert not second[0]
        assert not second[-1]


class TestSplitNoise:
    """At a split the noise is drawn with κ·s, and its density is taken with κ·s."""

    @pytest.mark.parametrize(("kernel", "eta"), [("dance_sde", 0.3), ("flow_sde", 0.2)])
    def test_mean_log_density_is_that_of_the_true_density(self, kernel: str, eta: float):
        overrides = ["algo=branch", f"kernel.name={kernel}", f"kernel.eta={eta}", "sample.num_steps=8"]
        config, model = make([*overrides, "tree.split_points=[0,3]", "tree.split_noise_scale=4"])
        plan = make_plan(config, model.schedule(8), 0)
        assert plan.kappa[plan.step == 3].unique().tolist() == [4.0]
        prompts = 3000
        record = sample_trees(
            model, plan, model.encode(["a dot"] * prompts), fold(0, 0), torch.arange(prompts), config.sample
        )
        plain = grow(plan.schedule, kernel, 1, [1] * 8, [eta] * 7 + [0.0]).coefficients.std
        for step in range(7):
            edges = plan.step == step
            scale = 4.0 if step in (0, 3) else 1.0
            std = plan.coefficients.std[edges]
            torch.testing.assert_close(std, scale * plain[step].expand_as(std))
            # E[log N(x; μ, s)] = -½ - log s - ½ log 2π; the mean over two elements varies by 1/√2·1/√draws.
            true = -0.5 - torch.log(std[0]) - 0.5 * torch.log(torch.tensor(2 * torch.pi))
            draws = record.log_density[:, edges].double()
            assert float(draws.mean()) == pytest.approx(float(true), abs=4 * 0.5 / draws.numel() ** 0.5)

    def test_children_are_spread_as_the_plan_says(self):
        config, model = make(["algo=branch", "sample.num_steps=8", "tree.split_points=[0]", "tree.k=2"])
        plan = make_plan(config, model.schedule(8), 0)
        texts = ["a dot"] * 4000
        record = sample_trees(model, plan, model.encode(texts), fold(0, 0), torch.arange(4000), config.sample)
        apart = record.latents[:, 1] - record.latents[:, 2]
        assert kernel_of(config) == "dance_sde"
        assert float(apart.std()) == pytest.approx(2**0.5 * float(plan.coefficients.std[0]), rel=0.03)
