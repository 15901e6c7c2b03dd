"""A batched rollout is the node-by-node one, whatever the batch, the company and the place of a prompt."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from arborl.config import load_config
from arborl.core.kernels import KERNELS, Coefficients, transition
from arborl.core.noise import Key, fold, normal
from arborl.core.tree import Plan, deterministic, grow
from arborl.engine.contracts import loss_of
from arborl.engine.method import kernel_of, make_plan
from arborl.engine.policy import Policy
from arborl.engine.rollout import Rollout, grow_trees
from arborl.models import load_model, lora
from arborl.models.base import Cond

from conftest import local_of, make_policy, moved, tiny_overrides, trees_of

MIXTURE = ["sample.num_prompts=3", "sample.num_steps=6", "tree.w=2", "tree.k=3", "sample.num_trees=2"]


def node_by_node(
    model: Policy, plan: Plan, cond: Cond, key: Key, prompt_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One node at a time, one model call an edge, every address spelled out: slow and obvious."""
    latents = torch.empty(len(cond), plan.nodes, *model.latent_shape)
    density = torch.zeros(len(cond), plan.edges)
    for p, prompt_id in enumerate(prompt_ids):
        counter = [0] * plan.roots  # the next number in each tree
        tree_of = list(range(plan.roots))
        for root in range(plan.roots):
            latents[p, root] = normal(key, torch.tensor([[prompt_id, root, 0]]), model.latent_shape)[0]
        for edge, parent in enumerate(plan.parent.tolist()):
            tree = tree_of[parent]
            tree_of.append(tree)
            counter[tree] += 1
            step = int(plan.step[edge])
            levels = [plan.schedule.sigma[step], plan.schedule.sigma_next[step], plan.eta[edge], plan.kappa[edge]]
            x = latents[p, parent][None]
            t = plan.schedule.timestep[step][None].float()
            v = model.predict(x, t, cond[torch.tensor([p])])
            gaussian = transition(x, v, Coefficients(*KERNELS[plan.kernel](*(level[None] for level in levels))))
            address = torch.tensor([[prompt_id, tree, counter[tree]]])
            child = gaussian.sample(normal(key, address, model.latent_shape))
            latents[p, plan.roots + edge] = child[0]
            density[p, edge] = gaussian.log_density(child)[0]
    return latents, density


def grown(overrides: list[str], prompts: list[str] | None = None, epoch: int = 1) -> tuple[Policy, Rollout, Key]:
    policy = make_policy(overrides)
    plan = make_plan(policy.config, policy.schedule(), epoch)
    texts = prompts or ["a dot at the top left", "red house", "a dog"][: policy.config.sample.num_prompts]
    key = fold(policy.config.seed, epoch)
    return policy, trees_of(policy, plan, texts, key), key


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
def test_batched_equals_node_by_node_on_the_mixture(kernel: str):
    model, record, key = grown([*MIXTURE, f"kernel.name={kernel}", "kernel.eta=0.4"])
    latents, density = node_by_node(model, record.plan, record.cond, key, [0, 1, 2])
    torch.testing.assert_close(record.latents, latents, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(record.log_density, density, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_batched_equals_node_by_node_on_sd3(sd3_overrides):
    model, record, key = grown(
        [*sd3_overrides, "sample.guidance_scale=3.0", "kernel.eta=0.4", "sample.num_steps=4", "tree.w=2"]
    )
    latents, density = node_by_node(model, record.plan, record.cond, key, [0, 1])
    torch.testing.assert_close(record.latents, latents, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(record.log_density, density, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "extra",
    [
        ["sample.batch_size=1"],
        ["sample.batch_size=5"],
        ["sample.batch_size=7", "sample.pad_batches=true"],
        ["sample.offload=true"],
    ],
)
def test_micro_batches_padding_and_offloading_change_nothing_but_rounding(sd3_overrides, extra):
    _, whole, _ = grown([*sd3_overrides, "sample.batch_size=64"])
    _, split, _ = grown([*sd3_overrides, *extra])
    torch.testing.assert_close(split.latents, whole.latents, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(split.log_density, whole.log_density, rtol=1e-4, atol=1e-5)


def test_a_prompts_trees_do_not_depend_on_the_others():
    policy = make_policy(MIXTURE)
    plan = make_plan(policy.config, policy.schedule(), 0)
    texts = ["a dot at the top left", "a dot at the top right", "a dot at the bottom left"]
    key = fold(0, 0)
    together = trees_of(policy, plan, texts, key)
    for i, text in enumerate(texts):
        alone = trees_of(policy, plan, [text], key, [i])
        torch.testing.assert_close(alone.latents[0], together.latents[i], rtol=1e-5, atol=1e-6)


def test_a_tree_does_not_depend_on_how_many_there_are():
    _, one, _ = grown([*MIXTURE, "sample.num_trees=1"])
    _, two, _ = grown([*MIXTURE, "sample.num_trees=2"])
    first = two.plan.tree == 0
    torch.testing.assert_close(two.latents[:, first], one.latents, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(two.latents[:, ~first], one.latents)


def test_siblings_differ_and_epochs_and_seeds_differ():
    _, record, _ = grown(MIXTURE)
    assert len(record.leaves[0].unique(dim=0)) == len(record.plan.leaves)
    for other in (grown(MIXTURE, epoch=2)[1], grown([*MIXTURE, "seed=1"])[1]):
        assert not torch.allclose(other.latents[:, 0], record.latents[:, 0])


def test_ode_levels_share_no_noise_and_have_no_density():
    _, record, _ = grown(MIXTURE)
    assert (record.log_density[:, ~record.plan.stochastic] == 0).all()
    assert (record.log_density[:, record.plan.stochastic] != 0).all()


def test_the_first_prompts_clean_pictures():
    policy = make_policy(MIXTURE)
    plan = make_plan(policy.config, policy.schedule(), 0)
    record = trees_of(policy, plan, ["a dot"], fold(0, 0), keep_x0=True)
    assert record.x0 is not None
    torch.testing.assert_close(record.x0[plan.leaves], record.leaves[0])
    x, sigma = record.latents[0, :2], plan.schedule.sigma[:1].float()
    v = policy.predict(x, plan.timestep[:2].float(), record.cond[torch.tensor([0, 0])])
    torch.testing.assert_close(record.x0[:2], x - sigma * v, rtol=1e-5, atol=1e-5)


def test_the_same_draws_in_another_process():
    """Nothing of the process (hash seed, global generators, threads) enters."""
    program = (
        "import torch; torch.manual_seed(9); torch.set_num_threads(1);"
        "from arborl.core.noise import fold, normal;"
        "print(normal(fold(5, 7), torch.tensor([[1, 2, 3]]), (4,)).tolist())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert other == f"{normal(fold(5, 7), torch.tensor([[1, 2, 3]]), (4,)).tolist()}\n"


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["off", "on"])
def test_on_a_gpu_nothing_waits_in_a_rollout(tiny_folder, how):
    config = load_config("mixture", [*tiny_overrides("sd3", tiny_folder("sd3")), "train.batch_size=4"])
    policy = Policy(load_model(config, torch.device("cuda")), config, Accelerator(), loss_of(config))
    if how == "on":
        policy.compile()
    texts = ["a red house", "a dog"]
    cond, plan = policy.encode(texts), make_plan(config, policy.schedule(), 0)
    with torch.autocast("cuda", torch.bfloat16):
        grow_trees(policy, plan, cond, fold(0, 0), local_of(texts))
        torch.cuda.set_sync_debug_mode("error")
        try:
            grow_trees(policy, plan, cond, fold(0, 0), local_of(texts))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_only_what_the_update_sees_again_is_computed_as_it_will(tiny_folder):
    policy = make_policy([*tiny_overrides("sd3", tiny_folder("sd3")), "tree.s=0", "train.batch_size=3"])
    model: Any = moved(policy.model)
    plan, texts = make_plan(policy.config, policy.schedule(), 0), ["a red house", "a dog"]
    plain = trees_of(policy, plan, texts, fold(0, 0))
    seen, predict = [], model.predict

    def spy(x, t, cond):
        merged = any(layer.disable_adapters for layer in lora._layers(model.module))
        seen.append((len(x), torch.is_grad_enabled(), merged))
        return predict(x, t, cond)

    model.predict, policy.compiled = spy, True
    record = trees_of(policy, plan, texts, fold(0, 0))
    # Two stochastic levels of 2 and 4 rows in the update's micro-batches of 3, no row alone; then three of 8 at once.
    assert seen == [(rows, True, False) for rows in (2, 3, 2)] + [(8, False, True)] * 3
    torch.testing.assert_close(record.latents, plain.latents, rtol=1e-4, atol=1e-4)
    assert not record.latents.requires_grad
    assert not record.log_density.requires_grad


def test_mix_really_calls_the_model_as_often():
    policy = make_policy(["algo=mix", "sample.num_steps=10", "sample.group_size=6", "tree.w=3", "tree.tou=1"])
    seen, predict = [], policy.model.predict
    policy.model.predict = lambda x, t, cond: (seen.append(len(x)), predict(x, t, cond))[1]  # pyright: ignore
    plan = make_plan(policy.config, policy.schedule(), 4)
    trees_of(policy, plan, ["a dot"] * 2, fold(0, 0))
    assert sum(seen) == 2 * plan.forwards == 2 * (4 + 1 + 6 * 5)


@torch.no_grad()
@pytest.mark.parametrize("family", [[], ["model.family=tiny_ddim:TinyDDIM"]], ids=["flow", "diffusion"])
def test_a_group_without_noise_is_what_the_ode_makes_of_each_first_noise(family: list[str]):
    policy, record, key = grown([*family, "algo=flat", "kernel.name=ode", "sample.group_size=3", "sample.num_steps=4"])
    plan, prompts = record.plan, len(record.latents)
    assert (record.log_density == 0).all()
    assert len(record.latents[:, :3].flatten(0, 1).unique(dim=0)) == 3 * prompts, "every trajectory has its own noise"
    one = deterministic(policy.schedule())
    for root in range(3):
        start = record.latents[:, root : root + 1]
        made = trees_of(policy, one, record.prompts.prompts.texts, key, start=start)
        torch.testing.assert_close(record.latents[:, plan.tree == root], made.latents, rtol=1e-5, atol=1e-5)


def leaves_of_tail(steps: int, solver: str, tail_steps: int) -> torch.Tensor:
    policy = make_policy(
        [f"sample.num_steps={steps}", f"sample.tail_solver={solver}", f"sample.tail_steps={tail_steps}", "tree.w=1"]
    )
    return trees_of(policy, make_plan(policy.config, policy.schedule(), 0), ["a dot"] * 32, fold(0, 0)).leaves


def test_a_tail_as_long_as_the_schedule_is_the_schedule():
    for n in (0, 9, 50):
        assert torch.equal(leaves_of_tail(10, "euler", n), leaves_of_tail(10, "euler", 0))


class TestSplitNoise:
    """At a split the noise is drawn with κ·s, and its density is taken with κ·s."""

    @pytest.mark.parametrize(("kernel", "eta"), [("dance_sde", 0.3), ("flow_sde", 0.2)])
    def test_mean_log_density_is_that_of_the_true_density(self, kernel: str, eta: float):
        overrides = ["algo=branch", f"kernel.name={kernel}", f"kernel.eta={eta}", "sample.num_steps=8"]
        policy = make_policy([*overrides, "tree.split_points=[0,3]", "tree.split_noise_scale=4"])
        plan = make_plan(policy.config, policy.schedule(), 0)
        assert plan.kappa[plan.step == 3].unique().tolist() == [4.0]
        record = trees_of(policy, plan, ["a dot"] * 3000, fold(0, 0))
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
        policy = make_policy(["algo=branch", "sample.num_steps=8", "tree.split_points=[0]", "tree.k=2"])
        plan = make_plan(policy.config, policy.schedule(), 0)
        record = trees_of(policy, plan, ["a dot"] * 4000, fold(0, 0))
        apart = record.latents[:, 1] - record.latents[:, 2]
        assert kernel_of(policy.config) == "dance_sde"
        assert float(apart.std()) == pytest.approx(2**0.5 * float(plan.coefficients.std[0]), rel=0.03)
