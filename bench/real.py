"""Two epochs of the real models at true size with random weights, on one GPU: `python -m bench.real [case ...]`.

Builds each pipeline in a folder with the real diffusers classes, runs the preset as a user would, each in a process of
its own, and prints the table of docs/hardware.md: seconds a stage in the second epoch, and peak memory.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

GIB = 2**30
ROOM = Path(os.environ.get("BENCH_ROOM", "/dev/shm")) / "arborl-real"

TREE = ["algo=tree", "tree.w=4", "tree.k=2", "sample.num_steps=10"]
SIZES = ["sample.batch_size=16", "sample.decode_batch_size=8", "train.batch_size=8"]
CASES: dict[str, tuple[str, str, list[str]]] = {
    # name: pipeline, preset, overrides
    "sd35": ("sd3", "base", ["sample.num_prompts=8", *SIZES]),
    "sd35-full": (
        "sd3",
        "base",
        ["sample.num_prompts=8", *SIZES, "model.train=full", "train.gradient_checkpointing=true"],
    ),
    "sd35_24gb": ("sd3", "sd35_24gb", []),
    "flux": ("flux", "flux_branch", [*TREE, "sample.num_prompts=2"]),
    "wan": ("wan", "wan_branch", [*TREE, "sample.num_prompts=2"]),
    "flux_branch": ("flux", "flux_branch", []),
    "wan_branch": ("wan", "wan_branch", []),
}
LIMITS = {"sd35_24gb": 24e9}
"""Bytes the allocator may take, for cases that promise to fit a smaller card."""
STAGES = ("rollout", "decode", "reward", "update")


def make_folder(family: str) -> Path:
    """The family's pipeline in bfloat16, with full text encoders where memory is promised."""
    from .pipelines import build

    folder = ROOM / family
    if not folder.exists():
        start = time.perf_counter()
        options = {"text": "full"} if family == "sd3" else {}
        pipe = build(family, device="cuda", size="full", **options)
        count = sum(p.numel() for p in pipe.transformer.parameters())
        pipe.to(torch.bfloat16).save_pretrained(folder)
        print(f"{family}: {count / 1e9:.2f} B parameters, built in {time.perf_counter() - start:.0f} s", flush=True)
    return folder


def run(case: str) -> None:
    """One case in this process; prints a JSON line."""
    from arborl.config import load_config
    from arborl.trainer import train

    family, preset, own = CASES[case]
    folder = ROOM / family
    common = [
        f"model.path={folder}",
        f"prompts.cache={ROOM / 'embeddings' / case}",
        "rewards=brightness",
        f"log.dir={ROOM / 'runs'}",
        f"run_name={case}",
        "train.epochs=2",
        "eval.num_prompts=1",
        "log.trackers=[]",
        "log.record_every=0",
        "log.save_every=100",
    ]
    shutil.rmtree(ROOM / "runs" / case, ignore_errors=True)
    if case in LIMITS:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMITS[case] / total)
    start = time.perf_counter()
    rows = [json.loads(line) for line in (train(load_config(preset, [*common, *own])) / "metrics.jsonl").open()]
    found = {f"{stage}": round(rows[1][f"time/{stage}"], 1) for stage in STAGES}
    found |= {"epoch": round(rows[1]["step_time"], 1), "ratio_error": max(row["ratio_error"] for row in rows[:2])}
    found |= {"allocated": torch.cuda.max_memory_allocated() / GIB, "reserved": torch.cuda.max_memory_reserved() / GIB}
    found |= {"forwards": rows[1]["forwards"] - rows[0]["forwards"], "trained": int(rows[1]["parents"])}
    print("RESULT " + json.dumps({"case": case, "whole": round(time.perf_counter() - start), **found}), flush=True)


def main(names: list[str]) -> None:
    results = []
    for case in names:
        make_folder(CASES[case][0])
        torch.cuda.empty_cache()
        command = [sys.executable, "-m", "bench.real", "--case", case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            print(f"{case}: failed with exit code {done.returncode}", flush=True)
            continue
        results.append(json.loads(lines[-1].removeprefix("RESULT ")))
        print(results[-1], flush=True)
    print("| case | forwards | trained | rollout s | decode, score s | update s | peak GiB (reserved) | ratio off by |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['case']} | {r['forwards']} | {r['trained']} | {r['rollout']} | {r['decode'] + r['reward']:.1f} "
            f"| {r['update']} "
            f"| {r['allocated']:.1f} ({r['reserved']:.1f}) | {r['ratio_error']:.1e} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        run(sys.argv[2])
    else:
        main(sys.argv[1:] or [*CASES])
