"""What a large model costs to look at, to split and to save, on a GPU: `python -m bench.scale [case ...]`.

SD3.5-medium's true size with random weights: `arborl doctor`, micro-batches left to auto, and weights split by FSDP2
beside whole ones (one process: what splitting costs, and that it changes nothing), with checkpoints written, verified
and gone on with.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from arborl.run.checkpoint import latest_valid, problem_with

from .pipelines import build

ROOT = Path(__file__).parent.parent
PROMPTS = [
    "a photo of a cat",
    "red house",
    "a dog",
    "blue house",
    "a street at night",
    "a green bird",
    "a boat",
    "rain",
]


def settings(folder: Path, *more: str) -> list[str]:
    return [
        "model=sd3",
        f"model.path={folder / 'sd35'}",
        f"prompts.cache={folder / 'embeddings'}",
        f"prompts.path={folder / 'prompts.txt'}",
        f"log.dir={folder / 'runs'}",
        "rewards=brightness",
        "model.max_sequence_length=77",
        "eval.num_prompts=2",
        "log.trackers=[]",
        "log.record_every=0",
        "log.keep=1",
        "tree.s=2",
        *more,
    ]


def run(*command: str) -> float:
    """Seconds that it took, with what it said."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stderr=subprocess.STDOUT, env=os.environ)
    print(f"[exit {done.returncode}]", flush=True)
    return time.perf_counter() - start


def launched(*arguments: str) -> float:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    return run(*launcher, "train.py", *arguments)


def doctor(folder: Path) -> None:
    more = ["sample.num_prompts=8", "sample.batch_size=16", "train.batch_size=16"]
    seconds = run("-m", "arborl", "doctor", "-c", "tree", "--canary", "100", *settings(folder, *more))
    print(f"doctor: {seconds:.0f} s", flush=True)


def auto(folder: Path) -> None:
    more = ["sample.batch_size=auto", "sample.decode_batch_size=auto", "train.batch_size=auto", "train.epochs=2"]
    run("-m", "arborl", "train", "-c", "tree", *settings(folder, *more, "sample.num_prompts=8", "run_name=sizes"))
    report(folder / "runs" / "sizes")


def split(folder: Path, how: str, *more: str) -> None:
    """Two epochs and a third one after going on, whole and split: the same weights, up to rounding?"""
    common = [f"model.train={how}", "sample.num_prompts=2", "sample.batch_size=16", "train.batch_size=8", *more]
    for name in ("no", "full"):
        own = settings(folder, *common, f"train.shard={name}", f"run_name={how}-{name}", "log.save_every=2")
        launched("-c", "tree", *own, "train.epochs=2")
        launched("--resume", "auto", "-c", "tree", *own, "train.epochs=3")
        report(folder / "runs" / f"{how}-{name}")
    whole, parts = (latest_valid(folder / "runs" / f"{how}-{name}")[0] for name in ("no", "full"))
    assert whole
    assert parts
    one, two = load_file(whole / "weights.safetensors"), load_file(parts / "weights.safetensors")
    off = max(float((one[name] - two[name]).abs().max()) for name in one)
    size = max(float(value.abs().max()) for value in one.values())
    print(f"{how}: whole and split weights differ by {off:.1e} after 3 epochs (the largest is {size:.2g})", flush=True)


def report(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    stages = " ".join(f"{stage} {rows[1][f'time/{stage}']:.2f}" for stage in ("rollout", "decode", "reward", "update"))
    errors = " ".join(f"{row['ratio_error']:.1e}" for row in rows if "ratio_error" in row)
    peak = summary["peak_memory"] / 2**30
    checkpoint = latest_valid(folder)[0]
    assert checkpoint
    start = time.perf_counter()
    problem = problem_with(checkpoint)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in checkpoint.iterdir()) / 1e9
    saved = " ".join(f"{row['time/checkpoint']:.1f}" for row in rows if row.get("time/checkpoint", 0) > 0.2)
    print(
        f"{folder.name}: seconds {stages}; ratio off by {errors}; peak {peak:.1f} GiB; a checkpoint of {size:.2f} GB, "
        f"verified in {seconds:.1f} s ({problem or 'sound'}); logged while saving: {saved or 'under 0.2 s'}",
        flush=True,
    )


def main() -> None:
    cases = {
        "doctor": doctor,
        "auto": auto,
        "lora": lambda folder: split(folder, "lora"),
        "full": lambda folder: split(folder, "full", "train.gradient_checkpointing=true"),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompts.txt").write_text("\n".join(PROMPTS))
        build("sd3", size="full", device="cuda").to(torch.bfloat16).save_pretrained(folder / "sd35")
        torch.cuda.empty_cache()
        for case in sys.argv[1:] or cases:
            print(f"== {case}", flush=True)
            cases[case](folder)


if __name__ == "__main__":
    main()
