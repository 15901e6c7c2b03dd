"""One epoch on this machine's device, and what of the chip it uses: `python -m bench.epoch [group ...]`.

On a GPU SD3.5-medium at its true size with random weights, scored by a ViT-H, as a tree, as a flat group, and node by
node as published code works (batch 1, a forward and backward pass for every edge, not compiled); then FLUX.1-dev and
Wan2.1. Without one, the scenes. Prints the table of docs/performance.md: seconds a stage, forwards, the share of the
matrix peak measured here that the needed operations come to, and peak memory.
"""

import argparse
import gc
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from arborl.config import load_config, with_settings
from arborl.config.schema import Config
from arborl.core.noise import fold
from arborl.data.prompts import LocalPrompts, Prompts, local_prompts, split_prompts
from arborl.engine.autotune import peak_memory, reset_peak_memory
from arborl.engine.batches import BatchSizes
from arborl.engine.cost import BACKWARD_COST
from arborl.engine.method import Method, make_plan, window_positions
from arborl.engine.rates import learning_rates
from arborl.engine.rollout import Epoch, Rollout, predict, sample_trees
from arborl.engine.score import score
from arborl.engine.update import Stats, Trained, TrainingCalls, clip_gradients, update
from arborl.models.pipeline import JOINT_ATTENTION
from arborl.run.run import Run
from arborl.run.setup import prepare

from . import more_pipelines
from .pipelines import PIPELINES, build
from .reward_files import TINY, VIT_H, clip_tokenizer, open_clip

PROMPTS = [f"{what} {where}" for what in ("a cat", "a red house", "a dog") for where in ("at night", "by the sea", "")]
GPU, CPU = ("sd35", "flux", "wan", "klein", "zimage", "qwen"), ("scenes",)
WIDTHS = {"sample.batch_size": 32, "sample.decode_batch_size": 16, "train.batch_size": 32}


@dataclass
class Row:
    """A line of the table."""

    model: str
    way: str
    forwards: int = 0
    parents: int = 0
    pictures: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    share: dict[str, float] = field(default_factory=dict)  # of the matrix peak
    memory: float = 0.0  # GiB
    ratio: float = 0.0

    @property
    def epoch(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        stages = (f"{self.seconds.get(name, 0):.2f}" for name in ("rollout", "decode", "reward", "update"))
        shares = " | ".join(f"{100 * self.share[name]:.0f} %" if name in self.share else "–" for name in SHARES)
        return (
            f"| {self.model}, {self.way} | {self.forwards}, {self.parents}, {self.pictures} | {' | '.join(stages)} | "
            f"**{self.epoch:.2f}** | {shares} | {self.memory:.1f} | {self.ratio:.1e} |"
        )


SHARES = ("rollout", "frontier", "update")
HEAD = (
    "| model, way | forwards, parents, pictures | rollout s | decode s | reward s | update s | epoch s "
    "| rollout: of peak | full frontier | update: of peak | peak GiB | first ratio off by |\n" + "|---" * 12 + "|"
)


def matrix_peak(device: torch.device) -> float:
    """Operations a second of one large matrix product of random numbers: in bfloat16 on a GPU, else in float32."""
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * size**3 / best


@contextmanager
def waits(found: list[str]) -> Iterator[None]:
    """Inside, whatever makes the host wait for the GPU is noted."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yield
        found += [f"{Path(w.filename).name}:{w.lineno}" for w in heard if "synchroniz" in str(w.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sizes_of(config: Config) -> BatchSizes:
    return BatchSizes(int(config.sample.batch_size), int(config.sample.decode_batch_size), int(config.train.batch_size))


class Bench:
    """A model that is set up once, and epochs of it in different ways."""

    def __init__(self, name: str, config: Config, peak: float) -> None:
        self.name, self.config, self.peak = name, config, peak
        start = time.perf_counter()
        self.run: Run = prepare(config)
        seconds, tera = time.perf_counter() - start, self.run.flops / 1e12
        print(f"{name}: set up in {seconds:.0f} s, {tera:.4g} TFLOP a forward", flush=True)
        self.schedule = self.run.policy.schedule()
        self.run.state.check_gradients = False

    def epoch(self, way: str, edge_by_edge: bool = False, **changes: Any) -> Row:
        """One epoch with some settings changed, timed; its window in the middle."""
        config = with_settings(self.config, {key.replace("__", "."): value for key, value in changes.items()})
        run, policy, logger = self.run, self.run.policy, self.run.logger
        policy.config, policy.batch_sizes = config, sizes_of(config)
        method = Method(config, run.accelerator)
        middle = min((config.sample.num_steps - config.tree.w) // 2, window_positions(config, self.schedule) - 1)
        plan, local = make_plan(config, self.schedule, middle), self.local(config)
        epoch = Epoch(middle, plan, fold(config.seed, middle), local)
        reset_peak_memory(run.accelerator.device)
        logger.seconds.clear()
        with run.stage("encode"):
            cond = policy.encode(local.prompts.texts)
        with run.stage("rollout"):
            rollout = sample_trees(policy, epoch, cond)
        with run.stage("reward"):
            scored = score(policy, run.rewards.trained, rollout, logger.stage)
        with run.stage("advantage"):
            advantage, keep = method.credit(epoch, scored, rollout)
        with logger.stage("update"):
            if edge_by_edge:
                stats = self.each_edge(method, rollout, advantage, keep)
            else:
                stats = update(policy, run.state, method.loss, rollout, advantage, keep, learning_rates(config, middle))
        row = Row(self.name, way, plan.forwards * local.total, int(stats.sums["parents"]), scored.scores.total.numel())
        row.seconds = dict(logger.seconds)
        parents = row.parents if not edge_by_edge else len(plan.trained_parents) * local.total  # what is needed
        calls = {"rollout": row.forwards, "update": BACKWARD_COST * parents}
        row.share = {name: run.flops * n / logger.seconds[name] / self.peak for name, n in calls.items()}
        row.memory, row.ratio = peak_memory(run.accelerator.device) / 2**30, float(stats.ratio_error)
        print(json.dumps(asdict(row)), flush=True)
        return row

    def local(self, config: Config) -> LocalPrompts:
        """The prompts of an epoch."""
        run = self.run
        return local_prompts(run.train_prompts, split_prompts(config.sample), 0, run.state.prompts, config.seed)

    def full_frontier(self) -> float:
        """Share of the peak while every leaf's path advances."""
        config, policy = self.config, self.run.policy
        policy.config, policy.batch_sizes = config, sizes_of(config)
        local = self.local(config)
        cond, leaves = policy.encode(local.prompts.texts), config.tree.k**config.tree.w
        rows = torch.tensor([[p, 0, n] for p in range(local.total) for n in range(leaves)], device=policy.device)
        x = policy.model.noise(fold(0, 0), rows).unflatten(0, (local.total, leaves))
        t = torch.full((leaves,), 500.0, device=policy.device)
        best = float("inf")
        with policy.fast_sampling():
            for _ in range(4):
                start = time.perf_counter()
                predict(policy, x, t, cond)
                if policy.device.type == "cuda":
                    torch.cuda.synchronize()
                best = min(best, time.perf_counter() - start)
        return self.run.flops * len(rows) / best / self.peak

    def each_edge(self, method: Method, rollout: Rollout, advantage: torch.Tensor, keep: torch.Tensor) -> Stats:
        """A forward and backward pass for every edge, as if its siblings had other parents."""
        run, state = self.run, self.run.state
        training, stats = TrainingCalls(run.policy, method.loss, rollout, advantage), Stats.of(method.loss)
        every = training.trained(keep)
        zero = torch.zeros(1, dtype=torch.long)
        for prompt, edge, row in zip(every.prompt, every.edge, every.row, strict=True):
            one = Trained(every.calls[row][None], prompt[None], edge[None], zero, [zero])
            run.accelerator.backward(training.loss_of(one, stats, first=True) / len(every.edge))
        clip_gradients(state.parameters.values(), self.config.train.max_grad_norm)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        return stats

    def close(self) -> None:
        self.run.logger.close()
        self.run = None  # pyright: ignore[reportAttributeAccessIssue]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def settings(folder: Path, name: str, *more: str) -> list[str]:
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    common = {
        "prompts.cache": folder / "embeddings" / name,
        "prompts.path": folder / "prompts.txt",
        "log.dir": folder / "runs",
        "run_name": name,
        "log.trackers": "[]",
        "tree.w": 4,
        "tree.k": 2,
        "tree.s": 1,
        "sample.num_steps": 10,
        "eval.num_prompts": 2,
        "compile": "on",
    }
    return [*(f"{key}={value}" for key, value in common.items()), *more]


def pipeline(folder: Path, family: str, tiny: bool) -> Path:
    """A family's pipeline of random weights, made once."""
    where, device = folder / family, "cuda" if torch.cuda.is_available() else "cpu"
    if not where.exists():
        size, dtype = ("tiny", torch.float32) if tiny else ("full", torch.bfloat16)
        make = build if family in PIPELINES else more_pipelines.build
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            made = make(family, size=size, device=device)
        finally:
            torch.set_default_dtype(before)
        made.to(dtype).save_pretrained(where)
        del made
        gc.collect()
        torch.cuda.empty_cache()
    return where


def hps(folder: Path, tiny: bool, tokenizer: str) -> list[str]:
    """HPS-v2.1's layout at its true size, with random weights."""
    home = folder / "hps"
    if not home.exists():
        home.mkdir()
        torch.save(
            {"state_dict": open_clip(TINY if tiny else VIT_H, dtype=torch.float16)}, home / "HPS_v2.1_compressed.pt"
        )
    where = tokenizer or str(clip_tokenizer(folder / "tokenizer"))
    return ["rewards=hps", f"rewards.hps.path={home}", f"rewards.hps.tokenizer={where}"]


def sd35(folder: Path, options: argparse.Namespace, peak: float) -> Iterator[Row]:
    """SD3.5-medium, LoRA, 512 px, no guidance, 8 prompts."""
    tiny = options.tiny
    own = [
        "model=sd3",
        f"model.path={pipeline(folder, 'sd3', tiny)}",
        *hps(folder, tiny, options.tokenizer),
        *(f"{key}={4 if tiny else size}" for key, size in WIDTHS.items()),
        f"sample.num_prompts={2 if tiny else 8}",
        *(["sample.resolution=16"] if tiny else ["sample.resolution=512"]),
        "sample.shift=3.0",
        f"sample.guidance_scale={options.guidance}",
        # With the 16 tokens of the small text encoders as many as the real ones give, 333.
        *([] if tiny else ["model.max_sequence_length=317"]),
        f"model.train={options.train}",
        *options.set,
    ]
    name = "SD3.5-medium" + (" full" if options.train == "full" else "")
    fast = Bench(name, load_config("tree", settings(folder, "fast", *own)), peak)
    noted: list[str] = []
    _rollout_waits(fast, noted)
    print(f"a rollout makes the host wait {len(noted)} times {sorted(set(noted))}", flush=True)
    if "tree" in options.ways:
        fast.epoch("tree, once to warm up")
        row = fast.epoch("tree")
        row.share["frontier"] = fast.full_frontier()
        yield row
    if "balanced" in options.ways:
        for _ in range(2):  # one after the other, twice: what differs between two of a kind is the machine's
            yield fast.epoch("tree, balanced and falling", tree__siblings="balanced", train__schedule="linear")
            yield fast.epoch("tree, again")
    if "nft" in options.ways:
        few = [setting for setting in own if not setting.startswith("model.path=")]
        wanted = ["algo=nft", f"model.path={folder / 'sd3'}", *few, "sample.group_size=16", "sample.num_prompts=1"]
        nft = Bench(name, load_config("tree", settings(folder, "nft", *wanted)), peak)
        nft.epoch("NFT, one prompt to warm up")
        yield nft.epoch("NFT, 9 of 10 levels", sample__num_prompts=2 if tiny else 8)
        nft.close()
    if "loop" in options.ways:
        more = ["model.family=pipeline", f"model.lora.targets=[{','.join(JOINT_ATTENTION)}]"]
        loop = Bench(name, load_config("tree", settings(folder, "loop", *own, *more)), peak)
        loop.epoch("tree by the pipeline's own loop, once to warm up")
        yield loop.epoch("tree by the pipeline's own loop")
        loop.close()
    if "flat" in options.ways:
        yield fast.epoch("flat", tree__plan="flat", advantage__name="flat", sample__group_size=16)
    if "tail" in options.ways:
        yield fast.epoch("tree, tail of 2 steps", sample__tail_solver="dpmpp_2m", sample__tail_steps=2)
    if "w6" in options.ways:
        yield fast.epoch("tree w=6", tree__w=6)
    if "w8" in options.ways:
        yield fast.epoch("tree w=8", tree__w=8)
    if "nodes" in options.ways:
        one = ["sample.batch_size=1", "sample.decode_batch_size=1", "train.batch_size=1", "compile=off"]
        slow = Bench(name, load_config("tree", settings(folder, "slow", *own, *one)), peak)
        slow.epoch("node by node, one prompt to warm up", edge_by_edge=True, sample__num_prompts=1)
        yield slow.epoch("node by node", edge_by_edge=True)
        slow.close()
    fast.close()


@torch.no_grad()
def _rollout_waits(bench: Bench, noted: list[str]) -> None:
    """What makes the host wait inside a rollout of one prompt, once everything is compiled and loaded."""
    config, policy = bench.config, bench.run.policy
    local = LocalPrompts(Prompts(PROMPTS[:2], {}), torch.arange(2), 2)
    epoch, cond = Epoch(3, make_plan(config, bench.schedule, 3), fold(0, 0), local), policy.encode(PROMPTS[:2])
    for heard in ([], noted):
        with waits(heard):
            sample_trees(policy, epoch, cond)


def flux(folder: Path, options: argparse.Namespace, peak: float) -> Iterator[Row]:
    """FLUX.1-dev, LoRA, 720 px, 2 prompts."""
    sizes = ["sample.batch_size=8", "sample.decode_batch_size=8", "train.batch_size=4"]
    yield from _other(folder, options, peak, "flux", "flux_branch", "FLUX.1-dev", sizes)


def wan(folder: Path, options: argparse.Namespace, peak: float) -> Iterator[Row]:
    """Wan2.1 1.3 B, LoRA, 33 frames of 240×416, 2 prompts."""
    sizes = ["sample.batch_size=8", "sample.decode_batch_size=2", "train.batch_size=2"]
    yield from _other(folder, options, peak, "wan", "wan_branch", "Wan2.1 1.3 B", sizes)


def qwen(folder: Path, options: argparse.Namespace, peak: float) -> Iterator[Row]:
    """Qwen-Image 20 B, LoRA, 512 px, 2 prompts."""
    yield from _any(folder, options, peak, "qwen_image", "Qwen-Image 20 B", 8, 4)


def zimage(folder: Path, options: argparse.Namespace, peak: float) -> Iterator[Row]:
    """Z-Image 6 B, LoRA, 512 px, 2 prompts; without guidance, as its Turbo."""
    yield from _any(folder, options, peak, "z_image", "Z-Image 6 B", 16, 8, "sample.guidance_scale=0")


def klein(folder: Path, options: argparse.Namespace, peak: float) -> Iterator[Row]:
    """FLUX.2-klein 4 B, LoRA, 512 px, 2 prompts."""
    yield from _any(folder, options, peak, "flux2_klein", "FLUX.2-klein 4 B", 16, 8)


def _any(
    folder: Path,
    options: argparse.Namespace,
    peak: float,
    family: str,
    name: str,
    sampled: int,
    trained: int,
    *more: str,
) -> Iterator[Row]:
    """A pipeline without a family of its own; two epochs, the second of which counts."""
    own = [f"model.path={pipeline(folder, family, options.tiny)}", "rewards=brightness", "sample.num_prompts=2"]
    own += [f"sample.batch_size={sampled}", "sample.decode_batch_size=4", f"train.batch_size={trained}", *more]
    own += ["sample.resolution=32", "model.max_sequence_length=32"] if options.tiny else ["sample.resolution=512"]
    bench = Bench(name, load_config("tree", settings(folder, family, *own, *options.set)), peak)
    bench.epoch("tree, once to warm up")
    row = bench.epoch("tree")
    row.share["frontier"] = bench.full_frontier()
    yield row
    bench.close()


def _other(
    folder: Path, options: argparse.Namespace, peak: float, family: str, preset: str, name: str, sizes: list[str]
) -> Iterator[Row]:
    own = [f"model.path={pipeline(folder, family, options.tiny)}", "algo=tree", "rewards=brightness", *sizes]
    own += ["sample.num_prompts=2", "train.gradient_checkpointing=false"]
    own += ["sample.resolution=16", "sample.width=16"] if options.tiny else []
    bench = Bench(name, load_config(preset, settings(folder, family, *own)), peak)
    bench.epoch("tree, once to warm up")
    row = bench.epoch("tree")
    row.share["frontier"] = bench.full_frontier()
    yield row
    bench.close()


def scenes(folder: Path, options: argparse.Namespace, peak: float) -> Iterator[Row]:
    """The model inside the package, on whatever this is."""
    bench = Bench(
        "scenes", load_config("tree", settings(folder, "scenes", "compile=off", "tree.w=3", "prompts.path=''")), peak
    )
    bench.epoch("tree, once to warm up")
    yield bench.epoch("tree")
    yield bench.epoch("flat", tree__plan="flat", advantage__name="flat", sample__group_size=8)
    yield bench.epoch(
        "node by node",
        edge_by_edge=True,
        sample__batch_size=1,
        sample__decode_batch_size=1,
    )
    bench.close()


GROUPS: dict[str, Callable[[Path, argparse.Namespace, float], Iterator[Row]]] = {
    "sd35": sd35,
    "flux": flux,
    "wan": wan,
    "qwen": qwen,
    "zimage": zimage,
    "klein": klein,
    "scenes": scenes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}")
    parser.add_argument(
        "--ways",
        nargs="*",
        default=["tree", "balanced", "nft", "loop", "flat", "tail", "w6", "w8", "nodes"],
        help="of SD3.5-medium",
    )
    parser.add_argument("--train", default="lora", choices=("lora", "full"), help="what is trained of SD3.5-medium")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of SD3.5-medium, as key=value")
    parser.add_argument("--guidance", type=float, default=1.0, help="of SD3.5-medium")
    parser.add_argument("--tokenizer", default="", help="folder with CLIP's tokenizer; else of open_clip_torch")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this script")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = matrix_peak(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, matrix peak {peak / 1e12:.3g} TFLOP/s", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_ROOM")) as folder:
        for group in options.groups or (GPU if device.type == "cuda" else CPU):
            try:
                rows += GROUPS[group](Path(folder), options, peak)
            except Exception:  # noqa: BLE001 (the other rows are still worth having)
                traceback.print_exc()
    print(HEAD)
    print(*rows, sep="\n", flush=True)
    _compare(rows)


def _compare(rows: list[Row]) -> None:
    """The tree beside other ways of the same model."""
    for row in rows:
        tree = next((r for r in rows if r.model == row.model and r.way == "tree"), None)
        if tree and row is not tree:
            each, own = tree.seconds["rollout"] / tree.forwards, row.seconds["rollout"] / row.forwards
            print(
                f"{row.model}, {row.way}: {row.epoch / tree.epoch:.2f} times the tree's seconds, {own / each:.2f} "
                f"times its seconds a needed forward, {row.memory / tree.memory:.2f} times its memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
