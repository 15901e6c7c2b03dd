"""Trees of any shape: consistent, with windows and noise that fit the schedule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from arborl.core import plans
from arborl.core import tree as trees
from arborl.core.errors import InputError
from arborl.core.kernels import sde_able
from arborl.core.schedule import Schedule, shifted, window_start

from test_plans import small_shape


def random_plan(draw: st.DrawFn) -> trees.Plan:
    """Arities and noise drawn step by step: shapes no preset has."""
    steps = draw(st.integers(1, 5))
    arity = draw(st.lists(st.integers(1, 3), min_size=steps, max_size=steps))
    eta = draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=steps, max_size=steps))
    return trees.grow(shifted(steps, 3.0), "flow_sde", draw(st.integers(1, 3)), arity, eta)


@given(st.data())
def test_a_plan_is_consistent(data: st.DataObject):
    plan = random_plan(data.draw)
    assert (plan.parent < plan.child).all()
    assert (plan.depth[plan.child] == plan.depth[plan.parent] + 1).all()
    assert (plan.tree[plan.child] == plan.tree[plan.parent]).all()
    assert sum(len(level.parents) for level in plan.levels) == plan.forwards
    covered = torch.cat([torch.arange(plan.edges)[level.edges] for level in plan.levels])
    assert covered.tolist() == list(range(plan.edges))
    for level in plan.levels:
        assert (level.parents[level.slot] == plan.parent[level.edges]).all()
    for tree in range(plan.roots):
        numbers = plan.index_in_tree[plan.tree == tree]
        assert numbers.tolist() == list(range(len(numbers)))
    assert (plan.depth[plan.leaves] == len(plan.schedule)).all()


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return made


@pytest.mark.parametrize("roots", [1, 64, 512])
def test_numbers_within_trees_take_memory_in_proportion_to_the_nodes(roots: int):
    plan = trees.grow(shifted(12, 3.0), "flow_sde", roots, [1] * 12, [0.5] * 12)
    with Largest() as largest:
        plan.index_in_tree  # noqa: B018 (it is computed when it is asked for)
    assert 0 < largest.elements <= 2 * plan.nodes


@given(s=st.integers(0, 7), tou=st.integers(1, 50), w=st.integers(1, 8), epoch=st.integers(0, 10**6))
def test_the_window_is_never_empty_and_never_leaves_the_steps_that_may_be_stochastic(s, tou, w, epoch):
    schedule = shifted(10, 3.0)
    plan = plans.tree(
        schedule, epoch, small_shape(noise=plans.Noise("flow_sde", 0.7), k=1, window=plans.Window(w, s, tou))
    )
    steps = plan.step[plan.stochastic].tolist()
    assert steps == list(range(steps[0], steps[0] + w))
    assert sde_able(schedule, "flow_sde", 0.7)[steps].all()
    assert steps[0] == (s * (epoch // tou)) % (8 - w + 1)


def test_the_window_moves():
    assert [window_start(e, 1, 2, 5) for e in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0]


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
@given(steps=st.integers(1, 50), shift=st.floats(0.5, 8), eta=st.floats(0.05, 1))
@settings(max_examples=30)
def test_a_step_that_may_be_stochastic_adds_no_more_noise_than_it_reaches(kernel, steps, shift, eta):
    schedule = shifted(steps, shift)
    able = sde_able(schedule, kernel, eta)
    assert not able[-1], "the step into σ = 0 must stay deterministic"
    plan = trees.grow(schedule, kernel, 1, [1] * steps, [eta if a else 0.0 for a in able.tolist()])
    assert (plan.coefficients.std <= schedule.sigma_next + 1e-12).all()


def test_the_scheduler_grid_of_the_design():
    grid = [1.0, 0.9601293, 0.9133490, 0.8576923, 0.7903683, 0.7072785, 0.6021506, 0.4648760, 0.2780488, 0.0089286, 0.0]
    schedule = Schedule.from_sigmas(grid)
    std = trees.grow(schedule, "flow_sde", 1, [1] * 10, [0.7] * 10).coefficients.std
    assert float(std[8]) == pytest.approx(0.225, abs=1e-3)
    assert sde_able(schedule, "flow_sde", 0.7).tolist() == [True] * 7 + [False] * 3


def test_scaled_noise_only_where_the_kernel_can():
    with pytest.raises(InputError, match=r"kappa=4.*dance_sde, flow_sde"):
        trees.grow(shifted(4, 3.0), "cps", 1, [2, 1, 1, 1], [0.3] * 4, [4.0, 1.0, 1.0, 1.0])
