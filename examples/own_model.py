"""Post-train a network of your own, from Python: some ten seconds on two cores.

    python examples/own_model.py [key=value ...]

A small network learns to draw a light spot anywhere in an 8×8 picture: plain flow matching, as you may have done it
elsewhere. `Spot` says how ArboRL drives it. A reward then asks for the spot on the side that the prompt names, which
the network has never heard of, and TreeGRPO teaches it. Pictures before and after are in the run's folder.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from arborl import Model, load_config, read_metrics, train
from arborl.models import Cond


class Spot(Model):
    latent_shape = (1, 8, 8)
    default_prompts = ("a spot on the left", "a spot on the right")

    def __init__(self, config, device):
        super().__init__(config, device)
        self.module = nn.Sequential(
            nn.Linear(64 + 2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64)
        )
        if config.model.path:
            self.module.load_state_dict(torch.load(config.model.path, weights_only=True))
        self.module.to(device)

    def encode(self, prompts):
        return Cond({"side": torch.tensor([[1.0 if "left" in p else -1.0] for p in prompts], device=self.device)})

    def predict(self, x, t, cond):
        return self.module(torch.cat([x.flatten(1), t[:, None] / 1000, cond.tensors["side"]], 1)).float().view_as(x)

    def decode(self, latents):
        return (latents / 2 + 0.5).clamp(0, 1).expand(-1, 3, -1, -1)


def on_its_side(images, prompts, columns):
    """Light on the named half of the picture less that on the other, over all of it."""
    left, right = (half.mean((1, 2, 3)) for half in images.chunk(2, 3))
    sign = torch.tensor([1.0 if "left" in prompt else -1.0 for prompt in prompts], device=images.device)
    return sign * (left - right) / (left + right).clamp_min(1e-6)


def pretrain(model, path, steps=2000):
    """Flow matching on spots; the prompt's place in the input is held at 0."""
    optimizer, axis = torch.optim.Adam(model.module.parameters(), 2e-3), torch.arange(8.0)
    for _ in range(steps):
        across, down = ((axis - (1 + 5 * torch.rand(128, 1))) ** 2 for _ in range(2))
        data = 2 * torch.exp(-(across[:, None, None] + down[:, None, :, None]) / 2) - 1
        noise, sigma = torch.randn_like(data), torch.rand(128)
        x = torch.lerp(data, noise, sigma[:, None, None, None])
        loss = (model.predict(x, 1000 * sigma, Cond({"side": torch.zeros(128, 1)})) - (noise - data)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.module.state_dict(), path)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)  # products as small as these only wait for one another
    own = ["model.family=own_model:Spot", "rewards=none", "rewards.side.fn=own_model:on_its_side"]
    own += ["train.learning_rate=2e-3", "train.epochs=60", "eval.every=20", "eval.num_between=0", *sys.argv[1:]]
    weights = Path("runs/spot.pt")
    weights.parent.mkdir(exist_ok=True)
    pretrain(Spot(load_config("mixture", own), torch.device("cpu")), weights)
    run = train(load_config("mixture", [f"model.path={weights}", *own]))
    for row in read_metrics(run):
        if "eval/side" in row:
            print(f"after {row['epoch']} epochs: {row['eval/side']:+.2f} (1: all light on the named side)")
