"""From settings to plans and pruning: windows that move, every stage of a run, errors that name the key."""

import pytest
import torch

from arborl.config import load_config, with_settings
from arborl.core.errors import InputError
from arborl.core.plans import PLANS
from arborl.core.prune import Pruning
from arborl.core.schedule import shifted
from arborl.engine.method import (
    check_plan,
    eta_of,
    kernel_of,
    make_plan,
    plan_at,
    plan_variants,
    plans_of_a_run,
    pruning,
    warnings_about,
    window_of,
    window_plans,
)


def test_the_last_step_is_deterministic_and_not_trained():
    config = load_config("branch", ["model=mixture"])
    plan = make_plan(config, shifted(20, 3.0), 0)
    assert plan.step[plan.stochastic].unique().tolist() == list(range(19))
    assert plan.coefficients.std[plan.step == 19].abs().max() == 0


def test_flat_is_stochastic_wherever_its_noise_fits_and_everywhere_but_last_if_told_so():
    fits = make_plan(load_config("flat", ["model=mixture"]), shifted(10, 3.0), 0)
    assert fits.step[fits.stochastic].unique().tolist() == list(range(8))
    config = load_config("flat", ["model=mixture", "kernel.excess_noise=true"])
    published = make_plan(config, shifted(10, 3.0), 0)
    assert published.step[published.stochastic].unique().tolist() == list(range(9))
    assert published.forwards == 160


def test_flat_with_one_noise_shares_the_first_forward():
    plan = make_plan(load_config("flat", ["model=mixture", "sample.shared_noise=true"]), shifted(10, 3.0), 0)
    assert (plan.roots, len(plan.leaves), plan.forwards) == (1, 16, 1 + 9 * 16)


ODE = ["kernel.name=ode", "sample.group_size=3", "kernel.excess_noise=true"]
FAMILIES = {"flow": [], "diffusion": ["model.family=tiny_ddim:TinyDDIM"]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("eta", ["null", "0.5", "50"])
def test_a_flat_plan_without_noise_is_a_group_of_separate_trajectories(family: str, steps: int, eta: str):
    overrides = [*ODE, *FAMILIES[family], f"sample.num_steps={steps}", f"kernel.eta={eta}"]
    config = load_config("flat", ["model=mixture", *overrides])
    assert (kernel_of(config), eta_of(config)) == ("ode", 0.0)
    plan = plan_at(config)
    assert plan.kernel == {"flow": "ode", "diffusion": "ddim"}[family]
    assert not plan.stochastic.any()
    assert (plan.roots, len(plan.leaves), plan.forwards) == (3, 3, 3 * steps)
    assert [place for place, _ in plans_of_a_run(config)] == [0]
    assert [(epoch, shape.edges) for epoch, shape in plan_variants(config)] == [(0, 3 * steps)]
    assert warnings_about(config) == []


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
def test_without_noise_the_tail_is_the_whole_trajectory(solver: str):
    tail = [f"sample.tail_solver={solver}", "sample.tail_steps=4"]
    config = load_config("flat", ["model=mixture", *ODE, *tail])
    plan = plan_at(config)
    assert plan.forwards == 3 * 4
    assert plan.schedule.sigma[plan.step].max() == 1
    assert plan.multistep.any() == (solver == "dpmpp_2m")
    assert window_of(config, plan, 0) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", [*(f"tree.plan={name}" for name in PLANS if name != "flat"), "sample.shared_noise=true"]
)
def test_every_other_plan_refuses_a_kernel_without_noise(name: str, family: str):
    overrides = ["model=mixture", *ODE, *FAMILIES[family], name]
    with pytest.raises(InputError) as error:
        plans_of_a_run(load_config("flat", overrides))
    allowed = {"flow": "auto, flow_sde, dance_sde or cps", "diffusion": "auto, ddim"}[family]
    assert str(error.value) == (
        "kernel.name=ode: adds no noise, so that branches of one trajectory would be the same picture"
        f"; allowed: {allowed}; try: tree.plan=flat with sample.shared_noise=false"
    )


@pytest.mark.parametrize("name", ["tree", "mix", "branch_mix", "mix_flash"])
def test_windows_slide_and_come_to_every_place(name: str):
    config = load_config(name, ["model=mixture", "tree.s=1"])
    schedule = shifted(config.sample.num_steps, 3.0)
    epochs = range(0, 40 * config.tree.tou, config.tree.tou)
    noisy = [make_plan(config, schedule, epoch) for epoch in epochs]
    steps = {tuple(plan.step[plan.stochastic].unique().tolist()) for plan in noisy}
    assert len(steps) > 3
    assert all(steps)


@pytest.mark.parametrize(("s", "count"), [(0, 1), (1, 18), (2, 9), (5, 18), (18, 1)])
def test_a_window_beside_splits_is_known_by_its_place_not_by_its_looks(s: int, count: int):
    """On a split point a window of one step changes nothing, and is still a place of its own."""
    config = load_config("branch_mix", ["model=mixture", "tree.mix_sde_window=1", "tree.tou=3", f"tree.s={s}"])
    config = with_settings(config, {"sample.num_steps": 19})
    found = window_plans(config)
    assert len(found) == count
    for epoch in range(0, 120, 7):
        plan = make_plan(config, shifted(19, 3.0), epoch)
        expected = found[epoch // 3 % count][1]
        assert torch.equal(plan.eta, expected.eta)
        assert torch.equal(plan.step, expected.step)


def test_what_a_run_comes_to_is_what_walking_all_its_epochs_finds():
    config = load_config("branch_depth", ["model=mixture", "tree.mix_ode_sde=true", "tree.s=3", "tree.tou=7"])
    config = with_settings(config, {"prune.until": 0.8, "train.epochs": 400})
    schedule = shifted(20, 3.0)

    def stage(epoch: int) -> tuple:
        plan = make_plan(config, schedule, epoch)
        return window_of(config, plan, epoch), pruning(config, plan, epoch)

    assert {stage(epoch) for epoch, _ in plan_variants(config)} == {stage(epoch) for epoch in range(400)}


def test_pruning_ends_with_its_share_of_the_run():
    config = load_config("branch_depth", ["train.epochs=100", "prune.until=0.4"])
    plan = make_plan(config, shifted(20, 3.0), 0)
    assert pruning(config, plan, 39).depths
    assert pruning(config, plan, 40) == Pruning()


def test_by_default_pruned_depths_stop_at_the_last_split():
    config = load_config("branch_depth", ["prune.stop_depth=null", "prune.slide_interval=1", "train.epochs=100"])
    plan = make_plan(config, shifted(20, 3.0), 0)
    assert pruning(config, plan, 0).depths == (15, 16, 17, 18)
    assert pruning(config, plan, 99).depths == (9, 10, 11, 12)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tree.w=9"], ["tree.w=9", "1..8"]),
        (["tree.k=4", "tree.w=8"], ["tree.max_leaves=1024"]),
        (["kernel.eta=50.0"], ["kernel.eta=50.0", "at most 0.964"]),
        (["sample.num_steps=1"], ["sample.num_steps=1", "2 or more"]),
        (["kernel.name=cps", "kernel.eta=2.0"], ["kernel.eta=2.0"]),
    ],
)
def test_a_bad_tree_is_one_line_with_the_key_and_what_is_allowed(overrides, words):
    with pytest.raises(InputError) as error:
        plans_of_a_run(load_config("mixture", overrides))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


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
        ("mix", ["kernel.name=ddim"], ["kernel.name=ddim", "flow model", "allowed: auto, flow_sde"]),
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
def test_a_bad_plan_is_one_line_with_the_key_and_what_is_allowed(preset, overrides, words):
    with pytest.raises(InputError) as error:
        check_plan(load_config(preset, ["model=mixture", "rewards=place", *overrides]))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_batch_that_is_pruned_away_only_later_in_the_run_is_an_error_at_its_start():
    moving = ["model=mixture", "tree.w=1", "prune.depth=[4]", "tree.tou=5"]
    check_plan(load_config("tree", [*moving, "train.epochs=15"]))
    with pytest.raises(InputError, match="at epoch 15"):
        check_plan(load_config("tree", [*moving, "train.epochs=16"]))
