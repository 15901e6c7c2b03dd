"""What balanced siblings do to a gradient, on the mixture: `python -m bench.siblings`, a minute on two cores.

For each depth of a tree, the gradient that its edges give along one direction of the weights, prompt by prompt: its
mean, beside the gradient of the expected reward where only that step's velocity moves (by differences), and its
variance in units of the mean's square, which is what more prompts have to make up for.
"""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.func import functional_call, jvp

from arborl.config import load_config
from arborl.core.advantage import advantages, tree
from arborl.core.kernels import Coefficients, coefficients, transition
from arborl.core.noise import fold
from arborl.data.prompts import LocalPrompts, Prompts
from arborl.engine.contracts import loss_of
from arborl.engine.method import make_plan
from arborl.engine.policy import Policy
from arborl.engine.rollout import Rollout, grow_trees
from arborl.models import load_model

PROMPT, TARGET = "a dot at the top left", (-1.5, 1.5)
CPU = torch.device("cpu")
SETTINGS = ("sample.num_steps=6", "tree.s=0", "kernel.eta=0.5", "sample.batch_size=65536", "train.batch_size=65536")


def reward(latents: Tensor) -> Tensor:
    """Nearness to the place that the prompt names: smooth, and told by the latent itself."""
    return torch.exp(-0.5 * ((latents - torch.tensor(TARGET)) ** 2).sum(-1))


@dataclass
class World:
    """The mixture with moved weights, a plan on it, and a direction to move the weights in."""

    policy: Policy
    siblings: str
    k: int
    w: int

    @classmethod
    def of(cls, k: int, w: int, siblings: str) -> "World":
        config = load_config("mixture", [*SETTINGS, f"tree.k={k}", f"tree.w={w}", f"tree.siblings={siblings}"])
        policy = Policy(load_model(config, CPU), config, Accelerator(cpu=True), loss_of(config))
        with torch.no_grad():
            for number, weight in enumerate(policy.module.parameters()):
                weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        return cls(policy, siblings, k, w)

    def __post_init__(self) -> None:
        self.plan = make_plan(self.policy.config, self.policy.schedule(), 0)
        draw = torch.Generator().manual_seed(100)
        # Of the last layer only, which acts everywhere: of all weights, most directions hardly do.
        named = dict(self.policy.module.named_parameters())
        self.direction = {
            name: torch.randn(weight.shape, generator=draw) if name.startswith("out") else torch.zeros_like(weight)
            for name, weight in named.items()
        }

    def rollout(self, prompts: int, seed: int) -> Rollout:
        local = LocalPrompts(Prompts([PROMPT] * prompts, {}), torch.arange(prompts), prompts)
        return grow_trees(self.policy, self.plan, self.policy.encode([PROMPT] * prompts), fold(seed, 0), local)

    def advantage(self, rollout: Rollout) -> Tensor:
        scores = reward(rollout.leaves)
        return advantages(
            tree, self.plan, scores, rollout.log_density, 100.0, backup="mean", temperature=1.0, spread=1.0
        )

    def estimates(self, prompts: int, seed: int) -> Tensor:
        """Prompt × depth: the mean over a depth's edges of A·∇log p along the direction."""
        rollout, plan = self.rollout(prompts, seed), self.plan
        advantage, found = self.advantage(rollout), list[Tensor]()
        for step in range(self.w):
            edges = (plan.stochastic & (plan.step == step)).nonzero().flatten()
            x, child = (rollout.latents[:, nodes].flatten(0, 1) for nodes in (plan.parent[edges], plan.child[edges]))
            kernel = Coefficients(*(c[edges].float().repeat(prompts) for c in plan.coefficients))
            velocity, change = self.velocity(x, step, rollout)
            mean = transition(x, velocity, kernel).mean
            score = ((child - mean) * kernel.b[:, None] * change).sum(1) / kernel.std**2
            found.append((advantage[:, edges] * score.view(prompts, -1)).mean(1))
        return torch.stack(found, 1)

    def velocity(self, x: Tensor, step: int, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The model's at a step, and how it changes along the direction."""
        sigma = self.plan.schedule.sigma[step].float().expand(len(x))
        place = rollout.cond.tensors["place"][:1].expand(len(x), -1)
        weights = {name: weight.detach() for name, weight in self.policy.module.named_parameters()}

        def steering(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(self.policy.module, weights, (x, sigma, place))

        own, change = jvp(steering, (weights,), (self.direction,))
        return self.policy.model.data.velocity(x, sigma) + own, change  # pyright: ignore

    @torch.no_grad()
    def differences(self, samples: int, step: int, size: float = 0.02) -> float:
        """The derivative of the expected reward where only one step's velocity moves along the direction: the same
        draws on both sides, each child's noise its own.
        """
        schedule, config = self.plan.schedule, self.policy.config
        rows = torch.arange(len(schedule))
        eta = torch.where(rows < self.w, config.kernel.eta or 0.0, 0.0).double()
        a, b, std = (c.float() for c in coefficients(schedule, self.plan.kernel, rows, eta, torch.ones_like(eta)))
        rollout, found = self.rollout(1, 0), list[Tensor]()
        for side in (1, -1):
            draw = torch.Generator().manual_seed(7)
            x = torch.randn(samples, 2, generator=draw)
            for row in range(len(schedule)):
                velocity, change = self.velocity(x, row, rollout)
                moved = velocity + (side * size * change if row == step else 0)
                x = a[row] * x + b[row] * moved + std[row] * torch.randn(samples, 2, generator=draw)
            found.append(reward(x))
        return float((found[0] - found[1]).mean() / (2 * size))


def main() -> None:
    prompts = 20_000
    print("| k | step | by differences | independent | balanced | relative variance, independent | balanced |")
    print("|---|---|---|---|---|---|---|")
    for k in (2, 3, 4, 6):
        w = 2
        worlds = {siblings: World.of(k, w, siblings) for siblings in ("independent", "balanced")}
        found = {siblings: world.estimates(prompts, 0) for siblings, world in worlds.items()}
        for step in range(w):
            truth = worlds["balanced"].differences(200_000, step)
            means = [f"{float(f[:, step].mean()):.4f}" for f in found.values()]
            spread = [f"{float(f[:, step].var() / f[:, step].mean() ** 2):.1f}" for f in found.values()]
            print(f"| {k} | {step} | {truth:.4f} | {' | '.join(means)} | {' | '.join(spread)} |", flush=True)


if __name__ == "__main__":
    main()
