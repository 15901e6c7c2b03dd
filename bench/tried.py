"""What else might make SD3.5-medium faster, one at a time: `python -m bench.tried [trial ...]`, on a GPU.

A forward without gradients (adapters merged, as rollouts take it) and a forward and backward pass, with random weights,
by what is changed: nothing, float8 products, CUDA graphs, attention by another backend, adapters beside the weights,
the same without looking whether compiled code still applies, fewer activations kept. Also how Wan2.1's decoder makes
its videos (`videos`), and on a CPU what training on the scenes comes to when nodes without a log-density are computed
in float8 (`scenes`).
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from arborl.config import load_config
from arborl.engine.policy import Policy
from arborl.engine.rollout import Rollout, sample_trees
from arborl.models import compile, lora
from arborl.models.sd3 import SD3Model
from arborl.trainer import train

from .epoch import matrix_peak
from .pipelines import SD3, WAN, randomised

TEXT = 333
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


class Float8Linear(nn.Module):
    """A linear layer whose product is taken in float8: weights scaled by row once, inputs by row at every call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = scaled(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = scaled(x.flatten(0, -2))
        out = torch._scaled_mm(
            rows,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            bias=None if self.bias is None else self.bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out.view(*x.shape[:-1], -1)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn), scale


def to_float8(module: nn.Module) -> None:
    for name, child in module.named_children():
        # Modulations see one row a sample, which is not worth it.
        if isinstance(child, nn.Linear) and "norm" not in name:
            setattr(module, name, Float8Linear(child))
        elif "norm" not in name:
            to_float8(child)


@contextmanager
def rounded(module: nn.Module) -> Iterator[None]:
    """Inside, the same layers have their adapters merged, and multiply numbers that float8 can hold."""

    def round_trip(x: Tensor) -> Tensor:
        values, scale = scaled(x)
        return (values.float() * scale).to(x.dtype)

    with lora.merged(module) if lora.is_injected(module) else nullcontext():
        layers = [
            layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and "blocks." in name and "norm" not in name and "lora_" not in name
        ]
        kept = [layer.weight.data for layer in layers]
        handles = [layer.register_forward_pre_hook(lambda _, args: (round_trip(args[0]),)) for layer in layers]
        for layer in layers:
            layer.weight.data = round_trip(layer.weight.data)
        try:
            yield
        finally:
            for layer, weight, handle in zip(layers, kept, handles, strict=True):
                layer.weight.data = weight
                handle.remove()


def scenes(epochs: int) -> None:
    """The main run, as it is and with float8 where no log-density is taken; evaluated alike."""

    def coarse(policy: Policy, *args: Any) -> Rollout:
        plain = policy.fast_sampling

        @contextmanager
        def fast_sampling() -> Iterator[None]:
            with plain(), rounded(policy.module):
                yield

        with mock.patch.object(policy, "fast_sampling", fast_sampling):
            return sample_trees(policy, *args)

    for name, way in (("float32", sample_trees), ("float8", coarse)):
        with tempfile.TemporaryDirectory() as folder, mock.patch("arborl.trainer.sample_trees", way):
            own = [f"log.dir={folder}", "log.trackers=[]", *([f"train.epochs={epochs}"] if epochs else [])]
            lines = (train(load_config("tree", own)) / "metrics.jsonl").read_text().splitlines()
        scores = [row["eval/scene"] for row in map(json.loads, lines) if "eval/scene" in row]
        print(f"scenes, {name}: held-out {scores[0]:.4f} to {scores[-1]:.4f}", flush=True)


def transformer(tiny: bool, adapters: bool) -> Any:
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    with DEVICE:
        made = randomised(SD3Transformer2DModel(**SD3["tiny" if tiny else "full"]["transformer"]), 0.02)
    made.to(torch.bfloat16 if DEVICE.type == "cuda" else torch.float32).requires_grad_(False)
    if adapters:
        lora.inject(made, 32, 64, SD3Model.lora_targets)
    return made.eval()


def inputs(module: Any, rows: int) -> dict[str, Any]:
    draw, knobs = torch.Generator(DEVICE).manual_seed(1), module.config
    side = 64 if knobs.in_channels == 16 else 8

    def some(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, device=DEVICE, generator=draw).to(next(module.parameters()).dtype)

    return {
        "hidden_states": some(knobs.in_channels, side, side),
        "encoder_hidden_states": some(TEXT, knobs.joint_attention_dim),
        "pooled_projections": some(knobs.pooled_projection_dim),
        "timestep": torch.linspace(50, 950, rows, device=DEVICE),
        "return_dict": False,
    }


def timed(run: Callable[[], Any], times: int = 5) -> tuple[float, float]:
    """(seconds of the first call, best of the others)."""
    seconds: list[float] = []
    for _ in range(times + 2):
        start = time.perf_counter()
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[0], min(seconds[1:])


def call(module: Any, given: dict[str, Any], trains: bool, graphs: bool) -> Tensor:
    """One forward, and where something is trained its backward pass."""
    if graphs:
        torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        out = module(**given)[0].float()
    if trains:
        module.zero_grad(set_to_none=True)
        out.square().mean().backward()
    return out.detach()


@torch.no_grad()
def videos(tiny: bool) -> None:
    """Wan2.1's decoder: 33 frames of 480×832, by precision, layout and compiling."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    with DEVICE:
        vae = AutoencoderKLWan(**WAN["tiny" if tiny else "full"]["vae"]).eval().requires_grad_(False)
        latents = torch.randn(2, 16, 3, 4, 4) if tiny else torch.randn(2, 16, 9, 60, 104)
    plain, exact = vae.decoder.forward, None
    ways = [
        (torch.float32, False, False),
        (torch.float16, False, False),
        (torch.float16, True, False),
        (torch.float32, False, True),
        (torch.float16, True, True),
    ]
    for dtype, last, fast in ways:
        torch._dynamo.reset()
        for layer in vae.decoder.modules():
            if isinstance(layer, nn.Conv2d | nn.Conv3d):
                layout = torch.channels_last if isinstance(layer, nn.Conv2d) else torch.channels_last_3d
                layer.weight.data = layer.weight.contiguous(memory_format=layout if last else torch.contiguous_format)
        vae.decoder.forward = plain
        if fast:
            compile.compile_forward(vae.decoder)

        def run() -> Tensor:
            with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):  # noqa: B023 (called right here)
                return vae.decode(latents, return_dict=False)[0].float()

        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        first, best = timed(run, 2)
        found = run()
        exact = found if exact is None else exact
        memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
        print(
            f"videos, {str(dtype)[6:]}{', channels last' * last}{', compiled' * fast}: {best / 2:.2f} s a video, "
            f"first call {first:.0f} s, {memory:.1f} GiB, pixels {float((found - exact).abs().mean()) / 2:.1e} from "
            "float32",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["plain", "float8", "graphs", "flash", "adapters", "unguarded", "update", "budget", "videos", "scenes"]
    parser.add_argument("trials", nargs="*", default=every[:-1], help=f"of {', '.join(every)}")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script")
    options = parser.parse_args()
    peak, sizes = matrix_peak(DEVICE), (2, 4) if options.tiny else (32, 8)
    print(f"matrix peak {peak / 1e12:.3g} TFLOP/s", flush=True)
    exact: dict[int, Tensor] = {}
    flops = 0
    for trial in options.trials:
        torch._dynamo.reset()
        gc.collect()
        if trial == "videos":
            videos(options.tiny)
            continue
        if trial == "scenes":
            scenes(2 if options.tiny else 0)
            continue
        trains = trial in ("update", "budget")
        module = transformer(options.tiny, adapters=trains or trial in ("adapters", "unguarded"))
        if not flops:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                module(**inputs(module, 1))
            flops = counter.get_total_flops()
        functorch.activation_memory_budget = 0.5 if trial == "budget" else 1.0
        if trial == "float8":
            for block in compile.blocks(module):
                to_float8(block)
        for block in compile.blocks(module):
            if trial == "graphs":
                block.compile(mode="reduce-overhead", dynamic=False)
            else:
                compile.compile_forward(block)
        backend = SDPBackend.FLASH_ATTENTION if trial == "flash" else None
        for rows in sizes:
            given = inputs(module, rows)

            run = partial(call, module, given, trains, trial == "graphs")
            try:
                if DEVICE.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                with torch.set_grad_enabled(trains), sdpa_kernel(backend or list(ALL)):
                    first, best = timed(run)
                    if trial == "unguarded":
                        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                            _, best = timed(run)
                    out = run().clone()
            except Exception as error:  # noqa: BLE001 (that it does not run is a result)
                print(f"{trial}, {rows} rows: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
                continue
            exact.setdefault(rows, out)
            off = float((out - exact[rows]).norm() / exact[rows].norm())
            share = flops * rows * (3 if trains else 1) / best / peak
            memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
            print(
                f"{trial}, {rows} rows: {1e3 * best / rows:.2f} ms a row ({100 * share:.0f} % of peak), first call "
                f"{first:.0f} s, {memory:.1f} GiB, {off:.1e} from plain",
                flush=True,
            )


ALL = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

if __name__ == "__main__":
    main()
