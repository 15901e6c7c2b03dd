"""One epoch at SD3.5-medium's true size with random weights, on a GPU: `python -m bench.sd35 [case ...]`.

Checks what must hold on a GPU in bf16 (the CPU's noise, first-update ratio), then prints seconds and memory.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from arborl.config import load_config
from arborl.core.noise import fold, normal
from arborl.trainer import train

from .pipelines import build

PROMPTS = ["a photo of a cat", "red house", "a dog", "blue house"]


def check_noise() -> None:
    address = torch.tensor([[n % 5, n // 5 % 3, n // 15] for n in range(64)])
    here, there = normal(fold(0, 1), address, (16, 64, 64)), normal(fold(0, 1), address.cuda(), (16, 64, 64)).cpu()
    off = (here - there).abs()
    print(f"noise on the GPU against the CPU: largest difference {float(off.max()):.1e}, "
          f"elements that differ {int((off > 0).sum())} of {off.numel()}")  # fmt: skip
    big = torch.stack([torch.arange(128), torch.zeros(128, dtype=torch.long), torch.arange(128)], 1).cuda()
    normal(fold(0, 1), big, (16, 64, 64))
    torch.cuda.synchronize()
    start = time.perf_counter()
    normal(fold(0, 1), big, (16, 64, 64))
    torch.cuda.synchronize()
    print(f"noise of 128 latents: {1e3 * (time.perf_counter() - start):.1f} ms")


def epoch(folder: Path, name: str, *overrides: str) -> None:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    common = [
        "model=sd3",
        f"model.path={folder / 'sd35'}",
        f"prompts.cache={folder / 'embeddings'}",
        "rewards=brightness",
        f"prompts.path={prompts}",
        f"log.dir={folder}",
        "sample.num_prompts=8",
        "eval.num_prompts=1",
        "log.trackers=[]",
        "log.record_every=0",
        "log.save_every=100",
        "train.epochs=3",
        "tree.s=2",
        f"run_name={name}",
        "model.max_sequence_length=77",
    ]
    config = load_config("tree", [*common, *overrides])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = train(config)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    row = rows[1]
    stages = " ".join(f"{stage} {row[f'time/{stage}']:.2f}" for stage in ("rollout", "decode", "reward", "update"))
    errors = " ".join(f"{r['ratio_error']:.1e}" for r in rows[:3])
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{name}: seconds {stages}; ratio off by {errors}; peak {peak:.1f} GiB; reward {row['reward']:.4f}", flush=True
    )


def main() -> None:
    check_noise()
    with tempfile.TemporaryDirectory() as folder:
        build("sd3", size="full", device="cuda").to(torch.bfloat16).save_pretrained(Path(folder) / "sd35")
        same, other = ([f"sample.batch_size={s}", f"train.batch_size={t}"] for s, t in ((16, 16), (32, 8)))
        cases = {
            "lora": same,
            "lora-padded": [*same, "sample.pad_batches=true"],
            "lora-other-shapes": other,
            "full": [*same, "model.train=full"],
            "lora-cfg": [*same, "sample.guidance_scale=4.5"],
            "lora-float32": [*other, "model.dtype=float32", "train.mixed_precision=no", "sample.num_prompts=2"],
        }
        for name in sys.argv[1:] or cases:
            epoch(Path(folder), name, *cases[name])


if __name__ == "__main__":
    main()
