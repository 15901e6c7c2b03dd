"""The Slurm script in `cluster/` works as it says, with a Slurm of our own that starts tasks and queues again."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launching import PATIENCE, ROOT, last_checkpoint, timeless

SRUN = """#!/usr/bin/env bash
# As many tasks as there are to be; the signal of one that fails is left to the script.
while [ "$1" != bash ]; do shift; done
echo $$ > "$STAGE/srun"
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & pids+=($!)
done
printf '%s\\n' "${pids[@]}" > "$STAGE/tasks"
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$STAGE/scontrol"
"""


@pytest.mark.slow
def test_the_slurm_script_goes_on_after_a_signal(tmp_path: Path):
    """SIGTERM to the tasks: they save and leave, the job is queued again, and the same script ends the run."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "STAGE": str(tmp_path),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "here",
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_USE_CPU": "1",
        "OMP_NUM_THREADS": "1",
    }
    settings = ["train.epochs=150", "log.save_every=100000", "log.record_every=0", "eval.num_prompts=4", "run_name=x"]
    command = ["bash", str(ROOT / "cluster" / "slurm.sh"), "-c", "mixture", *settings, "sample.prompts_per_epoch=4"]
    options = {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    job = subprocess.Popen(command, **options)
    try:
        log, deadline = tmp_path / "runs" / "x" / "metrics.jsonl", time.monotonic() + PATIENCE
        while not (log.exists() and log.read_text().count("\n") >= 3):
            assert time.monotonic() < deadline
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.01)
        for pid in (tmp_path / "tasks").read_text().split():
            os.kill(int(pid), signal.SIGTERM)
        _, errors = job.communicate(timeout=PATIENCE)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 130, errors
    assert "To go on: arborl train --resume runs/x" in errors
    assert f"requeue {os.getpid()}" in (tmp_path / "scontrol").read_text()
    saved = int(last_checkpoint(tmp_path / "runs" / "x").name.removeprefix("epoch_"))
    assert 3 <= saved < 150
    again = subprocess.run(command, **options, timeout=PATIENCE)
    assert again.returncode == 0, again.stderr
    assert [row["epoch"] for row in timeless(tmp_path / "runs" / "x")] == list(range(151))


@pytest.mark.slow
def test_two_machines_with_a_copy_of_the_weights_each(tmp_path: Path):
    """Two launchers of two processes, `train.shard=node`: the run of one process."""
    settings = ["-c", "mixture", "train.epochs=4", "log.record_every=0", "eval.num_prompts=4", "train.ema_decay=0.9"]
    settings += ["sample.prompts_per_epoch=4", "loss.kl=0.1"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    launch += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    script = [str(ROOT / "train.py"), *settings, "run_name=two", "train.shard=node"]
    options = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    machines = [subprocess.Popen([*launch, f"--node_rank={rank}", *script], **options) for rank in (0, 1)]
    try:
        assert [machine.wait(timeout=PATIENCE) for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            if machine.poll() is None:
                os.killpg(machine.pid, signal.SIGKILL)
    alone = [sys.executable, "-m", "arborl", "train", *settings, "run_name=one"]
    assert subprocess.run(alone, **options, timeout=PATIENCE).returncode == 0
    one, two = (last_checkpoint(tmp_path / "runs" / name) for name in ("one", "two"))
    for file in sorted(one.glob("*.safetensors")):
        mine, theirs = load_file(file), load_file(two / file.name)
        for name, values in mine.items():
            torch.testing.assert_close(theirs[name], values, rtol=1e-5, atol=1e-6)
