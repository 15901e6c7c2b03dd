"""The numbers of small runs, kept: every preset on the scenes and the mixture, LoRA and full, one and two processes.

A change that moves code must not move a number. `python tests/recorded/runs.py` runs them all again (OMP_NUM_THREADS=1,
some ten minutes on two cores) and says which differ; with `--write` it keeps what it finds, for a change that is meant
to. Bits depend on the processor's vector instructions, so that each file says which it was recorded on.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
EPOCHS = 3
BROKEN_OFF = 2
"""Epochs after which a run that goes on later has come to its first end."""
SMALL = [
    "sample.num_prompts=2",
    "sample.group_size=4",
    "sample.batch_size=64",
    "sample.decode_batch_size=16",
    "train.batch_size=16",
    "eval.num_prompts=4",
    f"train.epochs={EPOCHS}",
    "log.trackers=[]",
    "log.record_every=0",
    "log.save_every=1000",
    "train.schedule=constant",  # a run that goes on has the rates of a longer one
]
LORA = ["model.train=lora", "model.lora.rank=4", "model.lora.alpha=8", "train.learning_rate=1e-3"]
ON_SCENES = ("base", "sd35_24gb", "sd35_nocfg", "flux_branch", "wan_branch")
"""Presets of models whose weights are not here, on the scenes' own."""
PRESETS = (
    "awm",
    "base",
    "branch",
    "branch_depth",
    "branch_mix",
    "branch_width",
    "dance",
    "ddpo",
    "flat",
    "flow_grpo",
    "flow_grpo_fast",
    "flux_branch",
    "mix",
    "mix_flash",
    "mixture",
    "nft",
    "scenes_long",
    "sd35_24gb",
    "sd35_nocfg",
    "tempflow",
    "tree",
    "tree_fast",
    "tree_flash",
    "tree_long",
    "wan_branch",
)
MEASURED = ("time/", "tflops/", "step_time")
"""Metrics that the clock says."""
RENAMED = {"steps_broken": "steps_nonfinite"}
"""Metrics that were called otherwise when the numbers were recorded."""
ADDED = ("learning_rate",)
"""Metrics that are newer than the recorded numbers."""


@dataclass(frozen=True)
class Case:
    preset: str
    train: str
    processes: int = 1
    resumed: bool = False

    @property
    def name(self) -> str:
        parts = [
            self.preset,
            self.train,
            *(["two"] if self.processes > 1 else []),
            *(["resumed"] if self.resumed else []),
        ]
        return "-".join(parts)

    def settings(self) -> list[str]:
        """What follows `arborl train`."""
        own = ["model=scenes", "rewards=scene"] if self.preset in ON_SCENES else []
        trained = LORA if self.train == "lora" else ["model.train=full"]
        return ["--config-name", self.preset, *own, *SMALL, *trained]

    def recorded_as(self) -> str:
        """A run that was interrupted has the numbers of one that was not."""
        return Case(self.preset, self.train, self.processes).name


def cases() -> list[Case]:
    ways = [
        (preset, train) for preset in PRESETS for train in ("lora", "full") if (preset, train) != ("mixture", "lora")
    ]
    return (
        [Case(*way) for way in ways]
        + [Case(*way, processes=2) for way in ways]
        + [Case(*way, resumed=True) for way in ways]
    )


def launch(arguments: list[str], processes: int, cwd: Path) -> None:
    alone = [sys.executable, "-m", "arborl"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = alone if processes == 1 else [*launcher, "-m", "arborl"]
    known = os.environ | {"ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "train", *arguments], cwd=cwd, env=known, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"


def numbers(case: Case, folder: Path, launch: Callable[[list[str], int, Path], None] = launch) -> dict:
    """What a run comes to: its metrics, those of the clock aside, and digests of what it saved."""
    settings = [*case.settings(), f"log.dir={folder}", f"run_name={case.name}"]
    if case.resumed:
        launch([*settings, f"train.epochs={BROKEN_OFF}"], case.processes, folder)
        launch(["--resume", str(folder / case.name), f"train.epochs={EPOCHS}"], case.processes, folder)
    else:
        launch(settings, case.processes, folder)
    run = folder / case.name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if not name.startswith((*MEASURED, *ADDED))} for row in rows]
    if case.resumed:  # it keeps the evaluation that it had made at its first end
        kept = {name: value for name, value in rows[BROKEN_OFF].items() if name.startswith("eval/")}
        assert kept
        rows[BROKEN_OFF] = {name: value for name, value in rows[BROKEN_OFF].items() if name not in kept}
    sums = (run / "checkpoints" / f"epoch_{EPOCHS:06d}" / "SHA256SUMS").read_text().splitlines()
    digests = {line.split()[1]: line.split()[0] for line in sums if line.endswith(".safetensors")}
    return {"metrics": rows, "digests": digests}


def machine() -> dict[str, str]:
    """What decides the bits besides the code."""
    import torch

    known = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    model = next((line.split(":")[1].strip() for line in known if "model name" in line), platform.processor())
    return {"processor": model, "instructions": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def differences(recorded: dict, found: dict, exact: bool) -> list[str]:
    """Where two runs differ; on another processor, beyond rounding that three epochs may have amplified."""
    result = []
    if len(recorded["metrics"]) != len(found["metrics"]):
        return [f"{len(found['metrics'])} lines of metrics, recorded {len(recorded['metrics'])}"]
    for a, b in zip(recorded["metrics"], found["metrics"], strict=True):
        if a.keys() != b.keys():
            result.append(f"epoch {a['epoch']}: metrics {sorted(a.keys() ^ b.keys())}")
        for key in a.keys() & b.keys():
            close = (
                a[key] is not None and b[key] is not None and math.isclose(a[key], b[key], rel_tol=1e-3, abs_tol=1e-4)
            )
            if a[key] != b[key] and (exact or not close):
                result.append(f"epoch {a['epoch']}: {key} {b[key]}, recorded {a[key]}")
    if exact and recorded["digests"] != found["digests"]:
        result.append("the checkpoint's weights differ")
    return result


def recorded() -> dict:
    """What was recorded, metrics by the names they have now."""
    found = json.loads((HERE / "runs.json").read_text(encoding="utf-8"))
    for run in found["runs"].values():
        run["metrics"] = [{RENAMED.get(name, name): value for name, value in row.items()} for row in run["metrics"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases to run; all of them if none are named")
    parser.add_argument("--write", action="store_true", help="keep what is found")
    chosen = parser.parse_args()
    todo = [case for case in cases() if not chosen.names or case.name in chosen.names]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        found = dict(zip(todo, pool.map(lambda case: numbers(case, Path(folder)), todo), strict=True))
    if chosen.write:
        before = json.loads((HERE / "runs.json").read_text(encoding="utf-8"))["runs"] if chosen.names else {}
        kept = before | {case.name: found[case] for case in todo if not case.resumed}
        lines = ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in kept.items())
        text = f'{{"machine": {json.dumps(machine())},\n"runs": {{\n{lines}\n}}}}\n'
        (HERE / "runs.json").write_text(text, encoding="utf-8")
    known = recorded()
    exact = known["machine"] == machine()
    print("bit for bit" if exact else f"within rounding: recorded on {known['machine']}, this is {machine()}")
    wrong = {case.name: differences(known["runs"][case.recorded_as()], found[case], exact) for case in todo}
    for name, lines in wrong.items():
        print(f"{name}: {'as recorded' if not lines else '; '.join(lines[:4])}")
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    main()
