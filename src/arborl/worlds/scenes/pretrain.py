"""Make the scenes pipeline from nothing: `python -m arborl.worlds.scenes.pretrain --out FOLDER`, minutes on one GPU.

An autoencoder learns the pictures, then a transformer and its two text encoders learn to draw them from captions, of
which a share is wrong. So the model knows how every scene looks and half believes what it is told: room for a reward.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional

from .build import SHIFT, build, tokenizer
from .grammar import all_scenes, describe
from .render import SIDE, render

TRAIN_TIMESTEPS = 1000
EMPTY = 0.1
"""Share of captions left out, so that guidance works."""
ZERO_TOKENS = 256
"""Tokens that diffusers appends to a caption where there is no T5, by default."""
JITTER, TINT = 0.02, 0.03
"""Standard deviations of an object's place, in picture sides, and of colours; no draw is off by more than two."""


def draw_all(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`count` pictures as bytes, scene after scene and each a little off its ideal; and which scene each is."""
    every = all_scenes().to(device)
    index = torch.arange(count, device=device) % len(every)
    pictures = torch.empty(count, 3, SIDE, SIDE, dtype=torch.uint8, device=device)
    for part in torch.arange(count, device=device).split(4096):
        shift, tint = (torch.randn(len(part), *shape, device=device).clamp(-2, 2) for shape in ((2,), (2, 3)))
        pictures[part] = (render(every[index[part]], JITTER * shift, TINT * tint) * 255).round().clamp(0, 255).byte()
    return pictures, index


def train_vae(vae: Any, pictures: Tensor, steps: int, batch: int, peak: float = 2e-3) -> None:
    """Reconstruction and a faint KL; then the two numbers that bring latents to mean 0 and variance 1."""
    parameters = list(vae.parameters())
    optimizer = _adamw(parameters, peak, 1e-4)

    def step() -> Tensor:
        wanted = _pixels(pictures, _choose(len(pictures), batch, pictures.device))
        posterior = vae.encode(wanted).latent_dist
        off = vae.decode(posterior.mean + posterior.std * torch.randn_like(posterior.mean)).sample - wanted
        loss = off.abs().mean() + off.square().mean() + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        _descend(loss, parameters, optimizer)
        return off.detach().abs().mean() / 2

    _repeat("autoencoder, mean error", [step], steps, optimizer, peak)
    some = encode(vae, pictures[:8192])
    vae.register_to_config(shift_factor=round(float(some.mean()), 4), scaling_factor=round(1 / float(some.std()), 4))


@torch.no_grad()
def encode(vae: Any, pictures: Tensor) -> Tensor:
    """Latents as the transformer sees them."""
    means = [vae.encode(_pixels(pictures, part)).latent_dist.mean for part in torch.arange(len(pictures)).split(2048)]
    return (torch.cat(means) - vae.config.shift_factor) * vae.config.scaling_factor


def train_flow(
    pipe: Any, latents: Tensor, index: Tensor, steps: int, batch: int, wrong: float, peak: float = 1e-3
) -> None:
    """Flow matching, captions wrong by design; the weights that stay are an average over the last tenth of steps."""
    device = latents.device
    transformer, encoders = pipe.transformer, (pipe.text_encoder, pipe.text_encoder_2)
    scenes = all_scenes().to(device)
    captions = [describe(scene) for scene in scenes.tolist()] + [""]
    tokens = torch.tensor(tokenizer()(captions, padding="max_length").input_ids, device=device)
    parameters = [p for part in (transformer, *encoders) for p in part.parameters()]
    average = [p.detach().clone() for p in parameters]
    optimizer = _adamw(parameters, peak, 0.01)

    def step(zero_tokens: int, batch: int) -> Tensor:
        chosen = _choose(len(latents), batch, device)
        clean, captioned = latents[chosen], index[chosen]
        captioned = torch.where(
            torch.rand(batch, device=device) < wrong, _choose(len(scenes), batch, device), captioned
        )
        captioned = torch.where(torch.rand(batch, device=device) < EMPTY, len(captions) - 1, captioned)
        found = [encoder(tokens[captioned], output_hidden_states=True) for encoder in encoders]
        # As StableDiffusion3Pipeline encodes a caption: the layer before the last, and the projected end token.
        text = torch.cat([f.hidden_states[-2] for f in found], -1)
        pooled = torch.cat([f.text_embeds for f in found], -1)
        even, noise = torch.sigmoid(1.2 * torch.randn(batch, device=device)), torch.randn_like(clean)
        sigma = SHIFT * even / (1 + (SHIFT - 1) * even)
        x = torch.lerp(clean, noise, sigma[:, None, None, None])
        text = functional.pad(text, (0, 0, 0, zero_tokens))
        velocity = transformer(x, text, pooled, sigma * TRAIN_TIMESTEPS, return_dict=False)[0]
        loss = functional.mse_loss(velocity, noise - clean)
        _descend(loss, parameters, optimizer)
        torch._foreach_lerp_(average, [p.detach() for p in parameters], min(1.0, 10 / steps))
        return loss.detach()

    # Now and then with the zero tokens, so that a call with diffusers' own defaults works too.
    turns = [lambda: step(0, batch)] * 7 + [lambda: step(ZERO_TOKENS, max(1, batch // 8))]
    _repeat("flow, loss", turns, steps, optimizer, peak)
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)


def _pixels(pictures: Tensor, index: Tensor) -> Tensor:
    """Some pictures as an autoencoder wants them, in [-1, 1]."""
    return pictures[index].float() / 127.5 - 1


def _choose(total: int, count: int, device: torch.device) -> Tensor:
    return torch.randint(total, (count,), device=device)


def _adamw(parameters: list[nn.Parameter], peak: float, decay: float) -> torch.optim.Optimizer:
    device = parameters[0].device
    rate = torch.tensor(peak, device=device)  # a tensor: a captured step reads it anew each time
    return torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.99), weight_decay=decay, fused=True, capturable=device.type == "cuda"
    )


def _descend(loss: Tensor, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def _captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """The same step as a CUDA graph, which costs no Python and no kernel launches of its own."""
    if device.type != "cuda":
        return step
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _repeat(
    name: str, turns: list[Callable[[], Tensor]], total: int, optimizer: torch.optim.Optimizer, peak: float
) -> None:
    """`total` steps, the given ones in turn, the rate rising over the first twentieth and falling as a cosine."""
    if not total:
        return
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(0)  # capturing takes steps of its own
    ready = {step: _captured(step, rate.device) for step in dict.fromkeys(turns)}
    start, warm = time.monotonic(), max(1, total // 20)
    for number in range(total):
        rate.fill_(peak * min(1.0, (number + 1) / warm) * 0.5 * (1 + math.cos(math.pi * number / total)))
        value = ready[turns[number % len(turns)]]()
        if (number + 1) % max(1, total // 8) == 0:
            click.echo(f"{name} {float(value):.4f} after {number + 1}/{total} steps, {time.monotonic() - start:.0f} s")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the pipeline.")
@click.option("--wrong", default=0.55, help="Share of captions that belong to another picture.")
@click.option("--pictures", default=100_800, help="Pictures to draw and learn from.")
@click.option("--vae-steps", default=3500, help="Steps of the autoencoder.")
@click.option("--steps", default=12000, help="Steps of the transformer and the text encoders.")
@click.option("--batch", default=512, help="Pictures a step.")
@click.option("--seed", default=0)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    out: Path, wrong: float, pictures: int, vae_steps: int, steps: int, batch: int, seed: int, device: str
) -> None:
    """Make the scenes pipeline from nothing and save it."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    pipe = build()
    sizes = {
        name: sum(p.numel() for p in getattr(pipe, name).parameters())
        for name in ("transformer", "vae", "text_encoder", "text_encoder_2")
    }
    click.echo(", ".join(f"{name} {size:,}" for name, size in sizes.items()) + f": {sum(sizes.values()):,} parameters")
    pipe.to(device)
    drawn, index = draw_all(pictures, torch.device(device))
    train_vae(pipe.vae, drawn, vae_steps, batch // 2)
    train_flow(pipe, encode(pipe.vae, drawn), index, steps, batch, wrong)
    save(pipe, out)
    click.echo(f"saved {out}")


def save(pipe: Any, out: Path) -> None:
    """Half precision on disk, full precision once loaded."""
    pipe.to("cpu")
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        getattr(pipe, name).half()
    pipe.save_pretrained(out)
    for name in ("text_encoder", "text_encoder_2"):
        file = out / name / "config.json"  # transformers would load what it was saved in
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float32"}, indent=2))


if __name__ == "__main__":
    main()
