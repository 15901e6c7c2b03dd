"""How well each kernel keeps the data distribution: `python -m bench.marginals`.

Two modes of weight 0.30 and 0.70 and spread 0.30, whose exact velocity is known; noise at every step that may have it.
"""

import torch
from accelerate import Accelerator

from arborl.config import load_config
from arborl.core.kernels import sde_able
from arborl.core.noise import fold
from arborl.core.schedule import shifted
from arborl.core.tree import grow
from arborl.data.prompts import LocalPrompts, Prompts
from arborl.engine.policy import Policy
from arborl.engine.rollout import grow_trees
from arborl.worlds.mixture import Mixture, MixtureModel

MEANS, WEIGHTS, SPREAD = torch.tensor([[-2.0, 0.0], [2.0, 0.0]]), torch.tensor([0.3, 0.7]), 0.3


def marginals(kernel: str, eta: float, steps: int, samples: int = 8000, seed: int = 0) -> tuple[float, float]:
    """(weight of the smaller mode, spread around the modes) of what the kernel draws."""
    config = load_config("tree", ["sample.batch_size=100000"])
    model = MixtureModel(config, torch.device("cpu"))
    model.data = Mixture(MEANS, WEIGHTS, SPREAD)
    schedule = shifted(steps, 3.0)
    able = sde_able(schedule, kernel, eta).tolist()
    prompts = Prompts(["a dot"] * samples, {})
    plan = grow(schedule, kernel, 1, [1] * steps, [eta if a else 0.0 for a in able])
    policy, local = Policy(model, config, Accelerator(cpu=True)), LocalPrompts(prompts, torch.arange(samples), samples)
    x = grow_trees(policy, plan, policy.encode(prompts.texts), fold(seed, 0), local).leaves[:, 0]
    nearest = torch.cdist(x, MEANS).argmin(1)
    return float((nearest == 0).float().mean()), float((x - MEANS[nearest]).std())


def main() -> None:
    print("| kernel | η | steps | weight of the 0.30 mode | spread (0.30) |\n|---|---|---|---|---|")
    cases = [("flow_sde", 0.7), ("dance_sde", 0.3), ("cps", 0.3), ("cps", 0.5), ("cps", 0.7), ("cps", 0.9)]
    for kernel, eta in cases:
        for steps in (10, 50, 400):
            weight, spread = marginals(kernel, eta, steps)
            print(f"| {kernel} | {eta} | {steps} | {weight:.3f} | {spread:.3f} |", flush=True)


if __name__ == "__main__":
    main()
