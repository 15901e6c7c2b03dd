"""FLUX's backward pass by attention backend, on a GPU: `python -m bench.flux_backward [whole|flash|plain]`.

Two double and two single blocks of FLUX.1-dev's size with random weights, 720 px. `whole` is as ArboRL trains it,
`flash` without cuDNN's attention, `plain` as diffusers has it, which dies with torch 2.11 and cuDNN 9.19.
"""

import subprocess
import sys
import time

import torch

SIDE, TEXT, BATCH = 45, 512, 4


def run(how: str) -> None:
    from diffusers import FluxTransformer2DModel

    from arborl.models import lora
    from arborl.models.flux import FluxModel, _positions, keep_gradients_whole

    from .pipelines import randomised

    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(how != "flash")
    with torch.device("cuda"):
        module = randomised(FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True), 0.02)
    module.to(torch.bfloat16).requires_grad_(False)
    lora.inject(module, 16, 32, FluxModel.lora_targets)
    module.enable_gradient_checkpointing()
    if how == "whole":
        keep_gradients_whole(module)

    def step() -> None:
        draw = torch.Generator("cuda").manual_seed(1)
        shapes = {"hidden_states": (SIDE**2, 64), "pooled_projections": (768,), "encoder_hidden_states": (TEXT, 4096)}
        given = {
            name: torch.randn(BATCH, *shape, device="cuda", dtype=torch.bfloat16, generator=draw)
            for name, shape in shapes.items()
        }
        level, scale = (torch.full((BATCH,), value, device="cuda") for value in (0.7, 3.5))
        ids = {"txt_ids": torch.zeros(TEXT, 3, device="cuda"), "img_ids": _positions(SIDE, SIDE, torch.device("cuda"))}
        with torch.autocast("cuda", torch.bfloat16):
            out = module(**given, **ids, timestep=level, guidance=scale, return_dict=False)[0]
        module.zero_grad()
        out.float().square().mean().backward()
        torch.cuda.synchronize()

    for _ in range(3):
        step()
    total = sum(float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None)
    start = time.perf_counter()
    for _ in range(10):
        step()
    print(f"{how}: {(time.perf_counter() - start) * 100:.1f} ms a step, sum of |gradient| {total:.2f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        run(sys.argv[1])
    else:
        for name in ("whole", "flash", "plain"):
            done = subprocess.run(
                [sys.executable, "-m", "bench.flux_backward", name], stderr=subprocess.PIPE, text=True
            )
            if done.returncode:
                print(f"{name}: failed ({done.stderr.strip().splitlines()[-1][:120]})", flush=True)
