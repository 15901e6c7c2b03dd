"""Whole runs in real processes: interrupted and resumed equals uninterrupted, two processes equal one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import arborl.job as job_module
import arborl.train as loop
from arborl.checkpoint import problem_with
from arborl.cli import main
from arborl.config import load_config, read_config
from arborl.log import claim_folder
from arborl.train import train

ROOT = Path(__file__).parent.parent
MIXTURE = ["train.epochs=8", "log.save_every=3", "eval.num_prompts=8", "log.record_every=0", "train.ema_decay=0.9"]


def last_checkpoint(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("epoch_*"))[-1]


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, averages, optimizer and metrics, bit for bit; times aside."""
    a, b = last_checkpoint(one), last_checkpoint(other)
    assert a.name == b.name
    assert (a / "SHA256SUMS").read_text() == (b / "SHA256SUMS").read_text()
    assert problem_with(a) is None
    assert problem_with(b) is None
    assert timeless(one) == timeless(other)


def timeless(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "step_time"} for row in rows]


@pytest.mark.parametrize("kind", ["mixture", "lora", "full"])
def test_a_run_that_went_on_later_is_the_run_that_never_stopped(tmp_path: Path, sd3_overrides, kind: str):
    overrides = MIXTURE if kind == "mixture" else [*sd3_overrides, f"model.train={kind}", "log.save_every=2"]
    overrides = [*overrides, "train.epochs=4", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*overrides, "run_name=whole"]))
    parts = train(load_config("mixture", [*overrides, "run_name=parts", "train.epochs=2"]))
    # A run that ended has evaluated at its end; the epochs it goes on with write that line anew.
    assert train(read_config(parts / "config.yaml", ["train.epochs=4"]), resume=parts) == parts
    assert_same_run(whole, parts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_run_that_goes_on_as_if_nothing_had_happened(tmp_path: Path, number: signal.Signals):
    settings = [*MIXTURE, "train.epochs=60", "log.save_every=1000"]
    whole = train(load_config("mixture", [*settings, "run_name=whole", f"log.dir={tmp_path}"]))
    command = [sys.executable, "-m", "arborl", "train", "-c", "mixture", *settings, "run_name=cut"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    log, deadline = tmp_path / "runs" / "cut" / "metrics.jsonl", time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") >= 5):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "arborl train --resume runs/cut" in errors
    assert "Traceback" not in errors
    cut = tmp_path / "runs" / "cut"
    train(read_config(cut / "config.yaml"), resume=cut)
    assert_same_run(whole, cut)


def launcher(processes: int, *arguments: str) -> tuple[list[str], dict[str, str]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    return [*launcher, str(ROOT / "train.py"), "-c", "mixture", *arguments], environment


def launch(processes: int, *arguments: str, cwd: Path) -> str:
    """Run to the end; what was said."""
    command, environment = launcher(processes, *arguments)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_one_process_equals_two(tmp_path: Path):
    settings = ["train.epochs=4", "log.record_every=0", "eval.num_prompts=9", "train.batch_size=16", "train.updates=3"]
    launch(1, *settings, "sample.num_prompts=4", "run_name=one", cwd=tmp_path)
    launch(2, *settings, "sample.num_prompts=2", "run_name=two", cwd=tmp_path)
    one, two = (load_file(last_checkpoint(tmp_path / "runs" / r) / "weights.safetensors") for r in ("one", "two"))
    for name, weights in one.items():
        torch.testing.assert_close(two[name], weights, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(timeless(tmp_path / "runs" / "one"), timeless(tmp_path / "runs" / "two"), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


ONE_RANK_FAILS = """
import os
import torch

def nan(images, prompts, columns):
    scores = images.flatten(1).mean(1)
    return scores if os.environ.get("RANK") == "0" else torch.full_like(scores, torch.nan)

def infinite(images, prompts, columns):
    infinite.calls = getattr(infinite, "calls", 0) + 1
    scores = images.flatten(1).mean(1)
    return scores / 0 if os.environ.get("RANK") == "1" and infinite.calls > 3 else scores
"""


def test_a_rank_without_a_single_score_hangs_nobody(tmp_path: Path):
    (tmp_path / "faulty.py").write_text(ONE_RANK_FAILS)
    settings = ["train.epochs=2", "log.record_every=0", "eval.num_prompts=4", "sample.num_prompts=2", "run_name=x"]
    launch(2, *settings, "rewards=none", "rewards.r.fn=faulty:nan", cwd=tmp_path)
    row = timeless(tmp_path / "runs" / "x")[0]
    assert (row["reward_failed"], row["steps"], row["parents"]) == (32, 2, 30)


PARTS = """
import os
import torch

calls = 0

def parts(images, prompts, columns):
    "Rank 1 names its parts the other way round, and fails at every other call."
    global calls
    calls += 1
    low, high = torch.zeros(len(prompts)), torch.ones(len(prompts)) + images.flatten(1).mean(1).cpu()
    if os.environ["RANK"] == "0":
        return {"low": low, "high": high}
    if calls % 2 == 0:
        raise ConnectionError("rank 1 has no network")
    return {"high": high, "low": low}

def gone(images, prompts, columns):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls > 3:
        raise ConnectionError("rank 1 has no network")
    return images.flatten(1).mean(1)
"""


def test_ranks_that_name_parts_in_another_order_and_fail_now_and_then(tmp_path: Path):
    (tmp_path / "faulty.py").write_text(PARTS)
    settings = ["train.epochs=2", "log.record_every=0", "eval.num_prompts=4", "sample.num_prompts=2", "run_name=x"]
    settings += ["sample.decode_batch_size=8", "rewards=none"]
    errors = launch(2, *settings, "rewards.r.fn=faulty:parts", cwd=tmp_path)
    for row in timeless(tmp_path / "runs" / "x")[:2]:
        assert row["rewards/r/low/mean"] == 0
        assert row["rewards/r/high/mean"] > 1
        assert row["rewards/r/failed"] == 0.25
    assert "rewards.r failed (ConnectionError: rank 1 has no network" in errors, (
        "whoever it was, the first rank says it"
    )


def test_a_reward_that_fails_on_one_rank_stops_both(tmp_path: Path):
    (tmp_path / "faulty.py").write_text(PARTS)
    settings = ["train.epochs=9", "log.record_every=0", "eval.num_prompts=4", "sample.num_prompts=2", "run_name=x"]
    settings += ["train.max_failed=0.3", "sample.decode_batch_size=32", "rewards=none", "rewards.r.fn=faulty:gone"]
    command, environment = launcher(2, *settings)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode != 0
    assert "error: rewards.r: failed on 32 of the 64 leaves of epoch 1 (ConnectionError: rank 1" in done.stderr
    assert "1 epochs saved. To go on: arborl train --resume runs/x" in done.stderr


def test_a_mistake_that_one_rank_alone_meets_is_told(tmp_path: Path):
    (tmp_path / "faulty.py").write_text(ONE_RANK_FAILS)
    settings = ["train.epochs=5", "log.record_every=0", "eval.num_prompts=4", "sample.num_prompts=2", "run_name=x"]
    command, environment = launcher(2, *settings, "rewards=none", "rewards.r.fn=faulty:infinite")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode != 0
    assert "error on rank 1: rewards.r.fn: returned an infinite score" in done.stderr


def test_ctrl_c_on_two_processes_leaves_a_checkpoint(tmp_path: Path):
    """The terminal signals the launcher and both ranks, and the launcher its ranks again; they leave together."""
    settings = ["train.epochs=5000", "log.record_every=0", "eval.num_prompts=4", "sample.num_prompts=2", "run_name=x"]
    command, environment = launcher(2, *settings, "log.save_every=100000")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)
    log, deadline = tmp_path / "runs" / "x" / "metrics.jsonl", time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "To go on: arborl train --resume runs/x" in errors, errors
    saved = int(last_checkpoint(tmp_path / "runs" / "x").name.removeprefix("epoch_"))
    assert saved >= 3
    assert len(timeless(tmp_path / "runs" / "x")) == saved


def test_a_second_interrupt_leaves_the_last_whole_checkpoint(tmp_path: Path, monkeypatch, capsys):
    """Interrupted in the middle of an update, twice: what is saved is the epoch before, untouched."""
    settings = [*MIXTURE, "train.epochs=4", "log.save_every=1", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*settings, "run_name=whole"]))
    honest, calls = torch.optim.AdamW.step, []

    def impatient(self, *rest, **named):
        result = honest(self, *rest, **named)
        calls.append(1)
        if len(calls) == 5:  # the first of epoch 2's two steps
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(load_config("mixture", [*settings, "run_name=cut"]))
    assert "2 epochs saved" in capsys.readouterr().err
    monkeypatch.undo()
    cut = tmp_path / "cut"
    train(read_config(cut / "config.yaml"), resume=cut)
    assert_same_run(whole, cut)


def test_an_interrupt_while_averaged_weights_are_in_the_model(tmp_path: Path, monkeypatch):
    settings = [*MIXTURE, "train.epochs=4", "eval.every=1", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*settings, "run_name=whole"]))
    honest, calls = job_module.evaluate, []

    def interrupted(*rest):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(*rest)

    monkeypatch.setattr(job_module, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(load_config("mixture", [*settings, "run_name=cut"]))
    monkeypatch.undo()
    train(read_config(tmp_path / "cut" / "config.yaml"), resume=tmp_path / "cut")
    assert_same_run(whole, tmp_path / "cut")


def test_two_runs_started_together_get_folders_of_their_own(tmp_path: Path):
    config = load_config("mixture", [f"log.dir={tmp_path}"])
    assert [claim_folder(config).name for _ in range(3)] == ["tree-1", "tree-2", "tree-3"]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_reference_is_the_policy_at_the_start_in_bf16_too(tmp_path: Path, sd3_overrides, kind: str):
    settings = [*sd3_overrides, f"model.train={kind}", "train.kl=0.1", "train.epochs=1", "log.record_every=0"]
    run = train(load_config("mixture", [*settings, "train.mixed_precision=bf16", f"log.dir={tmp_path}"]))
    assert timeless(run)[0]["kl"] == 0.0


def test_a_damaged_or_foreign_checkpoint_is_one_line(tmp_path: Path, capsys):
    run = train(load_config("mixture", [*MIXTURE, "train.epochs=1", f"log.dir={tmp_path}", "run_name=x"]))
    weights = last_checkpoint(run) / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    (weights.parent / "ema.safetensors").unlink()
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "--run", str(run)])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "none of its checkpoints is whole (epoch_000001 has other files than its SHA256SUMS says" in lines[-1]


def test_a_policy_that_moves_between_rollout_and_update_is_told(tmp_path: Path, monkeypatch, capsys):
    """The run-time check of the first update's ratio: quiet when all is well, one clear line when it is not."""
    settings = [
        "train.epochs=2",
        "sample.num_prompts=2",
        "eval.num_prompts=2",
        "log.record_every=0",
        f"log.dir={tmp_path}",
    ]
    loop.train(load_config("mixture", settings))
    assert "ratio" not in capsys.readouterr().err
    honest = loop.update

    def meddled(model, *rest):
        with torch.no_grad():
            model.module.out.bias += 0.01
        return honest(model, *rest)

    monkeypatch.setattr(loop, "update", meddled)
    run = loop.train(load_config("mixture", settings))
    messages = capsys.readouterr().err
    assert messages.count("the first update's ratio is off by") == 1
    assert timeless(run)[0]["ratio_error"] > 1e-4


def test_training_twice_in_one_process_with_different_precisions(tmp_path: Path, capsys):
    settings = [
        "train.epochs=1",
        "sample.num_prompts=2",
        "eval.num_prompts=2",
        "log.record_every=0",
        f"log.dir={tmp_path}",
    ]
    for number, precision in enumerate(("no", "bf16", "no"), 1):
        assert train(load_config("mixture", [*settings, f"train.mixed_precision={precision}"])).name == f"tree-{number}"


@pytest.mark.parametrize(
    "shapes", [["sample.batch_size=8", "sample.pad_batches=true"], ["sample.batch_size=16", "train.batch_size=3"]]
)
def test_the_ratio_in_bf16(tmp_path: Path, sd3_overrides, shapes: list[str], capsys):
    """Exact with equal shapes also in bf16; else within the bound that the run-time check allows."""
    settings = [
        *sd3_overrides,
        "train.epochs=3",
        "log.record_every=0",
        f"log.dir={tmp_path}",
        "train.learning_rate=0.01",
    ]
    run = train(load_config("mixture", [*settings, "train.mixed_precision=bf16", *shapes]))
    errors = [row["ratio_error"] for row in timeless(run)[:3]]
    assert max(errors) <= (0.0 if "sample.pad_batches=true" in shapes else 1e-4)
    assert "ratio is off" not in capsys.readouterr().err
