"""Several processes: they come to what one comes to, leave together, and none is left behind."""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from arborl.models import compile
from arborl.run.checkpoint import problem_with

from conftest import tiny_overrides
from launching import (
    PATIENCE,
    ROOT,
    Command,
    Ended,
    forked,
    last_checkpoint,
    launcher,
    ranks,
    rows_of,
    started_ranks,
    timeless,
)

MIXTURE = [
    "--config-name=mixture",
    "train.epochs=4",
    "train.batch_size=16",
    "train.updates=3",
    "sample.prompts_per_epoch=4",
    "eval.num_prompts=9",
    "log.record_every=0",
]


def trained(processes: int, arguments: list[str], cwd: Path, name: str, machines: int = 1) -> Path:
    for ended in ranks(processes, "train", *arguments, f"run_name={name}", cwd=cwd, machines=machines):
        assert ended.code == 0, ended.said
        assert "Traceback" not in ended.said
    return cwd / "runs" / name


def assert_close(one: Path, other: Path, atol: float = 1e-6, ended_at: Sequence[int] = ()) -> None:
    """The same weights and metrics, but for the order in which numbers are summed; and for evaluations after so many
    epochs, which the other had at an end of its own.
    """
    mine, theirs = (load_file(last_checkpoint(run) / "weights.safetensors") for run in (one, other))
    assert mine.keys() == theirs.keys()
    for name, weights in mine.items():
        torch.testing.assert_close(theirs[name], weights, rtol=0, atol=atol)
    for row, theirs in zip(timeless(one), timeless(other), strict=True):
        more = {name for name in theirs if name.startswith("eval/")} if row["epoch"] in ended_at else set()
        assert theirs.keys() - row.keys() == more
        assert not row.keys() - theirs.keys()
        for name, value in row.items():
            same = value is None if theirs[name] is None else theirs[name] == pytest.approx(value, rel=1e-3, abs=1e-4)
            assert same, (row["epoch"], name, value, theirs[name])


# as many as one


def test_the_mixture_on_one_two_and_four_processes(tmp_path: Path):
    """Copied, split, or split on each of two machines; evenly or not: three prompts on two processes leave one of them
    with less to do. Steps of several micro-batches, whose gradients are summed over the ranks once; and steps of
    denoising that are drawn for each prompt, wherever it is. Their rates fall alike.
    """
    kl = [
        *MIXTURE,
        "loss.kl=0.1",
        "train.ema_decay=0.9",
        "train.batch_size=3",
        "prune.step_fraction=0.6",
        "tree.siblings=balanced",
        "train.learning_rate=1e-4",  # AdamW's first steps are as large where a gradient is all rounding
    ]
    kl += ["train.schedule=linear", "train.warmup=2"]
    one = trained(1, kl, tmp_path, "one")
    assert_close(one, trained(2, kl, tmp_path, "two"))
    assert_close(one, trained(4, [*kl, "train.shard=node"], tmp_path, "four", machines=2))
    uneven = [*MIXTURE, "sample.prompts_per_epoch=3", "loss.kl=0", "loss.name=guard"]
    one = trained(1, uneven, tmp_path, "three-on-one")
    assert_close(one, trained(2, [*uneven, "train.shard=full"], tmp_path, "three-on-two"))


OLD = ["train.updates=2", "train.batch_size=7"]
OLD += ["train.learning_rate=2e-5"]  # AdamW's first steps are as large where a gradient is all rounding


def test_an_old_policy_that_rolls_out_on_one_and_two_processes(tmp_path: Path):
    """Copied or split, with adapters too; unevenly, so that a rank makes idle calls of every policy; and a run that
    goes on with others than it began with.
    """
    slow = ["loss.options.decay_rate=0.7", "loss.options.decay_most=0.7", "loss.options.levels_per_leaf=3"]
    for kind in (
        ["algo=nft", "sample.group_size=5", *slow],
        ["loss.name=own_losses:OldRollsOut", "loss.options.keep=0.7", "model.train=lora", "model.lora.rank=2"],
    ):
        settings = [*MIXTURE, *OLD, *kind, "sample.prompts_per_epoch=3"]
        folder = tmp_path / kind[1].partition("=")[2]
        folder.mkdir()
        one = trained(1, settings, folder, "one")
        if "algo=nft" in kind:  # with adapters: test_weights_that_differ_at_first_are_the_first_processs
            assert_close(one, trained(2, settings, folder, "two"))
        split = trained(2, [*settings, "train.shard=full", "train.epochs=2"], folder, "split")
        for ended in ranks(1, "train", "--resume", "runs/split", "train.epochs=4", "train.shard=no", cwd=folder):
            assert ended.code == 0, ended.said
        assert_close(one, split, ended_at=(2,))
        old = {run: load_file(last_checkpoint(run) / "old.safetensors") for run in (one, split)}
        for name, weights in old[one].items():
            torch.testing.assert_close(old[split][name], weights, rtol=0, atol=1e-6)
            assert not torch.equal(weights, load_file(last_checkpoint(one) / "weights.safetensors")[name])


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [3, 4])
@pytest.mark.parametrize("kl", [0, 0.1])
@pytest.mark.parametrize("shard", ["no", "full"])
def test_every_way_to_train_the_mixture(tmp_path: Path, shard: str, kl: float, prompts: int):
    settings = [*MIXTURE, f"train.shard={shard}", f"loss.kl={kl}", f"sample.prompts_per_epoch={prompts}"]
    one = trained(1, [*settings, "train.shard=no"], tmp_path, "one")
    for processes in (2, 3, 4):
        assert_close(one, trained(processes, settings, tmp_path, f"on-{processes}"))
    if shard == "full":
        assert_close(one, trained(4, [*settings, "train.shard=node"], tmp_path, "on-two-machines", machines=2))


def test_prompts_of_each_process_are_prompts_of_an_epoch(tmp_path: Path):
    """Two for each of two processes are four for one."""
    settings = [*MIXTURE, "train.epochs=2", "sample.prompts_per_epoch=null"]
    one = trained(1, [*settings, "sample.num_prompts=4"], tmp_path, "one")
    assert_close(one, trained(2, [*settings, "sample.num_prompts=2"], tmp_path, "two"))


def pictures(sd3_overrides: list[str], kind: str) -> list[str]:
    few = ["--config-name=mixture", *sd3_overrides, f"model.train={kind}", "train.epochs=2"]
    return [*few, "sample.prompts_per_epoch=3", "tree.w=2", "train.learning_rate=3e-5", "train.batch_size=4"]


def test_a_transformer_on_two_processes(tmp_path: Path, sd3_overrides: list[str]):
    few = pictures(sd3_overrides, "lora")
    one = trained(1, few, tmp_path, "one")
    assert_close(one, trained(2, [*few, "train.shard=full"], tmp_path, "split"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_every_way_to_train_a_transformer_on_two_processes(tmp_path: Path, sd3_overrides: list[str], kind: str):
    few = [*pictures(sd3_overrides, kind), "loss.kl=0.1", "train.epochs=4", "train.updates=2", "train.ema_decay=0.9"]
    one = trained(1, few, tmp_path, "one")
    assert_close(one, trained(2, few, tmp_path, "two"))
    assert_close(one, trained(2, [*few, "train.shard=full"], tmp_path, "split"))


@pytest.mark.slow
def test_compiled_code_on_two_processes(tmp_path: Path, tiny_folder, monkeypatch: pytest.MonkeyPatch):
    """No rank waits for gradients of a rollout's forwards, whole or split."""
    monkeypatch.setattr(compile, "BACKEND", "eager")
    few = ["--config-name=mixture", *tiny_overrides("sd3", tiny_folder("sd3")), "train.epochs=3", "train.batch_size=4"]
    few += ["sample.prompts_per_epoch=3"]  # a rank has less to do than the other
    one = trained(1, few, tmp_path, "one")
    assert_close(one, trained(2, [*few, "compile=on"], tmp_path, "two"))
    assert_close(one, trained(2, [*few, "compile=on", "train.shard=full"], tmp_path, "split"))


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path):
    """Two with a copy each, then one, then two that share the weights."""
    settings = [*MIXTURE, "train.epochs=6", "loss.kl=0.1", "train.ema_decay=0.9", "sample.prompts_per_epoch=4"]
    one = trained(1, settings, tmp_path, "one")
    run = trained(2, [*settings, "train.epochs=2"], tmp_path, "many")
    for processes, more in ((1, ["train.epochs=4"]), (2, ["train.epochs=6", "train.shard=full"])):
        for ended in ranks(processes, "train", "--resume", "runs/many", *more, cwd=tmp_path):
            assert ended.code == 0, ended.said
    assert [row["epoch"] for row in timeless(run)] == [0, 1, 2, 3, 4, 5, 6]
    assert_close(one, run, ended_at=(2, 4))


APART = """
import os
import torch
from arborl.worlds.mixture import MixtureModel
from own_losses import OldRollsOut

class Apart(MixtureModel):
    "Begins with other weights on each process."

    def __init__(self, config, device):
        super().__init__(config, device)
        with torch.no_grad():
            for p in self.module.parameters():
                p += 0.05 * int(os.environ.get("RANK", "0"))
"""


@pytest.mark.parametrize("how", ["full", "lora"])
def test_weights_that_differ_at_first_are_the_first_processs(tmp_path: Path, how: str):
    """Those that follow them too: an average, and an old policy that draws the rollouts."""
    (tmp_path / "apart.py").write_text(APART)
    settings = [*MIXTURE, *OLD, f"model.train={how}", "loss.name=apart:OldRollsOut", "model.family=apart:Apart"]
    settings += ["train.ema_decay=0.5", "train.epochs=2"]
    one, two = trained(1, settings, tmp_path, "one"), trained(2, settings, tmp_path, "two")
    assert_close(one, two)
    mine, theirs = (load_file(last_checkpoint(run) / "old.safetensors") for run in (one, two))
    for key, weights in mine.items():
        torch.testing.assert_close(theirs[key], weights, rtol=0, atol=1e-6)


HELD = """
from pathlib import Path
from accelerate import PartialState
from torch.distributed.tensor import DTensor
from arborl.engine.policy import Policy

honest = Policy.keep_beside

def telling(self, parameters):
    "Notes how the old policy's weights are held."
    old = honest(self, parameters)
    kinds = {"split" if isinstance(w, DTensor) else "whole" for w in old.weights.values()}
    Path(f"old-{'-'.join(kinds)}-{PartialState().process_index}").touch()
    return old

Policy.keep_beside = telling
from own_losses import OldRollsOut
"""


@pytest.mark.parametrize("how", ["full", "lora"])
def test_an_old_policys_weights_are_split_with_the_others(tmp_path: Path, how: str):
    (tmp_path / "held.py").write_text(HELD)
    settings = [*MIXTURE, f"model.train={how}", "loss.name=held:OldRollsOut", "train.shard=full", "train.epochs=1"]
    trained(2, settings, tmp_path, "x")
    assert {path.name for path in tmp_path.glob("old-*")} == {"old-split-0", "old-split-1"}


TELLING = """
from pathlib import Path
from accelerate import PartialState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from arborl.worlds.mixture import MixtureModel

class Telling(MixtureModel):
    "Notes how its weights are held."

    def predict(self, x, t, cond):
        kind = "split" if all(isinstance(p, DTensor) for p in self.module.parameters()) else "whole"
        kind = "copied" if isinstance(self.module, DistributedDataParallel) else kind
        Path(f"rank{PartialState().process_index}of{PartialState().num_processes}.{kind}").touch()
        return super().predict(x, t, cond)
"""


@pytest.mark.parametrize(("name", "kind"), [pytest.param("ddp", "copied", marks=pytest.mark.slow), ("fsdp2", "split")])
def test_ready_made_settings_for_accelerate(tmp_path: Path, name: str, kind: str):
    (tmp_path / "telling.py").write_text(TELLING)
    settings = [*MIXTURE, "model.family=telling:Telling", "train.epochs=2"]
    one = trained(1, settings, tmp_path, "one")
    accelerate, cluster = Path(sys.executable).with_name("accelerate"), ROOT / "cluster" / f"{name}.yaml"
    start = [str(accelerate), "launch", "--config_file", str(cluster), "--num_processes", "2"]
    with Command(*start, str(ROOT / "train.py"), *settings, "run_name=two", cwd=tmp_path) as command:
        code, said = command.ended()
    assert code == 0, said
    assert {f"rank0of2.{kind}", f"rank1of2.{kind}"} <= {path.name for path in tmp_path.iterdir()}
    assert_close(one, tmp_path / "runs" / "two")


# one of them fails

FAULTY = """
import os
import shutil
from pathlib import Path
import torch
from arborl.worlds.mixture import MixtureModel

ALL = -1

class Faulty(MixtureModel):
    "On one rank, from some call on, something goes wrong: FAULT is what, RANK whose, and AT when."

    calls = 0

    def due(self, where):
        fault, rank, at = FAULT
        if fault.split()[0] != where or rank not in (int(os.environ.get("RANK", "0")), ALL):
            return False
        self.calls += 1
        return self.calls > at

    def encode(self, prompts):
        if self.due("encode"):
            raise RuntimeError("no such word")
        if self.due("folder"):
            shutil.rmtree("runs/x/checkpoints")
            Path("runs/x/checkpoints").write_text("not a folder")
        return super().encode(prompts)

    def decode(self, latents):
        if self.due("decode"):
            raise RuntimeError("no such picture")
        return super().decode(latents)

    def predict(self, x, t, cond):
        if torch.is_grad_enabled():
            if self.due("learn"):
                raise RuntimeError("no such gradient")
            found = super().predict(x, t, cond)
            if self.due("nan") and (FAULT[0] == "nan" or self.calls == FAULT[2] + 1):
                found.register_hook(lambda gradient: gradient * torch.nan)
            return found
        if self.due("draw"):
            raise RuntimeError("no such noise")
        return super().predict(x, t, cond)
"""

FAULTS = [
    "train.epochs=6",
    "train.updates=1",
    "train.batch_size=1024",
    "sample.prompts_per_epoch=4",
    "log.save_every=2",
]
FAULTS += ["model.family=faulty:Faulty", "log.record_every=0", "eval.num_prompts=4", "loss.kl=0", "run_name=x"]


def failing(folder: Path, fault: str, rank: int, at: int, *arguments: str) -> list[Ended]:
    """Two processes, one of which meets a fault; each has ended by itself, or this would not come back."""
    folder.mkdir()
    (folder / "faulty.py").write_text(FAULTY + f"\nFAULT = {(fault, rank, at)}\n")
    ended = ranks(2, "train", "--config-name=mixture", *FAULTS, *arguments, cwd=folder)
    assert all(each.code not in (0, None) for each in ended), ended
    return ended


@pytest.mark.parametrize("shard", ["no", "full"])
def test_a_rank_that_fails_stops_all(tmp_path: Path, shard: str):
    """While it encodes, samples, decodes or learns: the error is told once, and what is whole is kept."""
    faults = [("draw", 1, 60, "no such noise"), ("learn", 1, 3, "no such gradient")]
    if shard == "no":  # it makes no difference to the others
        faults += [("encode", 0, 4, "no such word"), ("decode", -1, 5, "no such picture")]
    for fault, rank, at, text in faults:
        ended = failing(tmp_path / fault, fault, rank, at, f"train.shard={shard}")
        run, first = tmp_path / fault / "runs" / "x", max(rank, 0)
        assert ended[first].said.count("Traceback") == ended[first].said.count(f"RuntimeError: {text}") == 1, ended
        assert "Traceback" not in ended[1 - first].said, ended[1 - first].said
        assert "To go on: arborl train --resume runs/x" in ended[0].said
        saved = int(last_checkpoint(run).name.removeprefix("epoch_"))
        assert problem_with(last_checkpoint(run)) is None
        if fault in ("encode", "decode") or (fault, shard) == ("draw", "no"):
            # All leave at the same place, with the last whole epoch.
            assert f"rank {first} failed (RuntimeError: {text})" in ended[1 - first].said
            assert saved == rows_of(run) > 0


def test_a_checkpoint_that_cannot_be_written_stops_all(tmp_path: Path):
    """Its folder turns into a file under the run. Split weights are gathered to the end all the same."""
    for shard in ("no", "full"):
        ended = failing(tmp_path / shard, "folder", 0, 5, f"train.shard={shard}")
        assert ended[0].stopped_with("could not write a checkpoint")
        assert "stopped on rank 1: rank 0 failed (InputError: log.dir=runs/x/checkpoints" in ended[1].said


def test_a_gradient_that_is_not_finite_on_one_rank(tmp_path: Path):
    """Both leave the step out, and are the same afterwards: with copies a checkpoint says so if they are not."""
    runs = {}
    for name, processes, rank, more in (
        ("one", 1, 0, []),
        ("two", 2, 1, []),
        ("split", 2, 1, ["train.shard=full"]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "faulty.py").write_text(f"{FAULTY}\nFAULT = {('nan once', rank, 2)}\n")
        runs[name] = trained(processes, ["--config-name=mixture", *FAULTS, *more], tmp_path / name, "x")
        assert [row.get("steps_nonfinite") for row in timeless(runs[name])] == [0, 0, 1, 0, 0, 0, None]
        assert [row.get("steps") for row in timeless(runs[name])] == [1, 1, 0, 1, 1, 1, None]
    assert_close(runs["one"], runs["two"])
    assert_close(runs["one"], runs["split"])


def test_gradients_that_are_not_finite_any_more(tmp_path: Path):
    for shard in ("no", "full"):
        ended = failing(tmp_path / shard, "nan", 1, 1, f"train.shard={shard}", "train.max_nonfinite_steps=3")
        text = "train.max_nonfinite_steps=3: the last 3 optimizer steps had gradients that are not finite"
        cure = "try: a lower train.learning_rate or another precision"
        assert ended[0].stopped_with(text)
        assert (ended[1].code, ended[1].said) == (1, f"stopped on rank 1: rank 0 failed (InputError: {text}; {cure})\n")
        assert "nothing to learn" not in ended[0].said
        assert rows_of(tmp_path / shard / "runs" / "x") == 4


LONG = ["train.epochs=5000", "log.record_every=0", "eval.num_prompts=4", "sample.prompts_per_epoch=4", "run_name=x"]
LONG += ["log.save_every=3"]


def goes_on_alone(folder: Path) -> None:
    run = folder / "runs" / "x"
    saved = int(last_checkpoint(run).name.removeprefix("epoch_"))
    assert saved >= 6
    ended = forked("train", "--resume", "runs/x", f"train.epochs={saved + 2}", "train.shard=no", cwd=folder)
    assert ended.code == 0, ended.said
    assert [row["epoch"] for row in timeless(run)] == list(range(saved + 3))


def test_a_rank_that_is_killed(tmp_path: Path):
    """The other ends too, and one process alone goes on."""
    words = ["train", "--config-name=mixture", *LONG, "train.shard=full"]
    with started_ranks(2, *words, cwd=tmp_path) as (first, second):
        first.until(lambda: rows_of(tmp_path / "runs" / "x") >= 8)
        second.signal(signal.SIGKILL)
        code, said = first.ended(within=60)
    assert code == 1
    assert "stopped: another process is gone (" in said
    assert "Traceback" not in said
    goes_on_alone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["no", "full"])
def test_a_rank_that_is_killed_under_a_launcher(tmp_path: Path, shard: str):
    """It ends too, and leaves nobody behind."""
    with launcher(2, *LONG, f"train.shard={shard}", cwd=tmp_path) as command:
        command.until(lambda: rows_of(tmp_path / "runs" / "x") >= 8)
        (second,) = [process for process in command.left() if process.environ().get("RANK") == "1"]
        second.kill()
        code, said = command.ended(within=60)
        assert code != 0
        assert command.left() == [], said
    goes_on_alone(tmp_path)


def test_ctrl_c_on_two_processes_leaves_a_checkpoint(tmp_path: Path):
    """The terminal signals the launcher and both ranks, and the launcher its ranks again, who may be leaving by then;
    they leave together all the same.
    """
    settings = ["train.epochs=5000", "log.record_every=0", "eval.num_prompts=4", "sample.num_prompts=2", "run_name=x"]
    run = tmp_path / "runs" / "x"
    with launcher(2, *settings, "log.save_every=100000", cwd=tmp_path) as command:
        command.until(lambda: rows_of(run) >= 3)
        everyone = command.left()
        for pause in (0.01, 0.02, 0.04, 0):
            for process in everyone:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGINT)
            time.sleep(pause)
        _, said = command.ended()
        assert command.left() == []
    saved = int(last_checkpoint(run).name.removeprefix("epoch_"))
    assert saved >= 3
    assert len(timeless(run)) == saved
    assert f"stopped; {saved} epochs saved. To go on: arborl train --resume runs/x" in said, said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells the ranks")
def test_a_launcher_that_is_killed_leaves_nobody_at_work(tmp_path: Path):
    """Its ranks have sessions of their own, and would go on beside the run that takes their place."""
    settings = ["train.epochs=5000", "log.record_every=0", "eval.num_prompts=4", "sample.num_prompts=2", "run_name=x"]
    run = tmp_path / "runs" / "x"
    with launcher(2, *settings, "log.save_every=100000", cwd=tmp_path) as command:
        command.until(lambda: rows_of(run) >= 3)
        command.signal(signal.SIGKILL)
        command.ended()
        deadline = time.monotonic() + PATIENCE
        while command.left():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert problem_with(last_checkpoint(run)) is None
    assert len(timeless(run)) == int(last_checkpoint(run).name.removeprefix("epoch_"))


# rewards that differ from rank to rank

REWARDS = """
import os
import torch

second = os.environ["RANK"] == "1"
calls = 0

def call(prompts):
    "Which it is of those that a run makes; before that it tries three pictures."
    global calls
    calls += len(prompts) > 3
    return calls

def nan(images, prompts, columns):
    scores = images.flatten(1).mean(1)
    return torch.full_like(scores, torch.nan) if second else scores

def infinite(images, prompts, columns):
    scores = images.flatten(1).mean(1)
    return scores / 0 if call(prompts) > 2 and second else scores

def parts(images, prompts, columns):
    "Rank 1 names its parts the other way round, and fails at every other call."
    low, high = torch.zeros(len(prompts)), torch.ones(len(prompts)) + images.flatten(1).mean(1).cpu()
    if call(prompts) % 2 and second:
        raise ConnectionError("rank 1 has no network")
    return {"high": high, "low": low} if second else {"low": low, "high": high}

def gone(images, prompts, columns):
    if call(prompts) > 2 and second:
        raise ConnectionError("rank 1 has no network")
    return images.flatten(1).mean(1)
"""

REWARDED = ["train.epochs=2", "log.record_every=0", "eval.num_prompts=8", "sample.num_prompts=2", "run_name=x"]


def rewarded(folder: Path, function: str, *arguments: str) -> list[Ended]:
    (folder / "rewarding.py").write_text(REWARDS)
    reward = ["rewards=none", f"rewards.r.fn=rewarding:{function}"]
    return ranks(2, "train", "--config-name=mixture", *REWARDED, *reward, *arguments, cwd=folder)


def test_a_rank_without_a_single_score_hangs_nobody(tmp_path: Path):
    ended = rewarded(tmp_path, "nan")
    assert [each.code for each in ended] == [0, 0], ended
    row = timeless(tmp_path / "runs" / "x")[0]
    assert (row["reward_failed"], row["steps"], row["parents"]) == (32, 2, 30)


def test_a_rank_without_a_single_score_may_be_too_many(tmp_path: Path):
    ended = rewarded(tmp_path, "nan", "train.max_failed=0.4")
    text = "rewards.r: answered NaN, no score, for 32 of the 64 leaves of epoch 0"
    assert ended[0].stopped_with(f"error: {text}")
    assert f"stopped on rank 1: rank 0 failed (InputError: {text}" in ended[1].said


def test_ranks_that_name_parts_in_another_order_and_fail_now_and_then(tmp_path: Path):
    ended = rewarded(tmp_path, "parts", "sample.decode_batch_size=8")
    assert [each.code for each in ended] == [0, 0], ended
    for row in timeless(tmp_path / "runs" / "x")[:2]:
        assert row["rewards/r/low/mean"] == 0
        assert row["rewards/r/high/mean"] > 1
        assert row["rewards/r/failed"] == 0.25
    told = "rewards.r failed (ConnectionError: rank 1 has no network"
    assert told in ended[0].said, "whoever it was, the first rank says it"


def test_a_mistake_that_one_rank_alone_meets_is_told(tmp_path: Path):
    ended = rewarded(tmp_path, "infinite", "train.epochs=5")
    assert ended[1].stopped_with("error on rank 1: rewards.r.fn: returned an infinite score")
    assert (ended[0].code, ended[0].errors) == (1, [])


FAILING = ["train.epochs=9", "train.max_failed=0.3", "sample.decode_batch_size=32"]


def test_a_reward_that_fails_on_one_rank_stops_both(tmp_path: Path):
    ended = rewarded(tmp_path, "gone", *FAILING)
    text = "rewards.r: failed on 32 of the 64 leaves of epoch 1 (ConnectionError: rank 1"
    assert ended[0].stopped_with(f"error: {text}")
    assert f"stopped on rank 1: rank 0 failed (InputError: {text}" in ended[1].said
    assert "1 epochs saved. To go on: arborl train --resume runs/x" in ended[0].said


@pytest.mark.slow
def test_a_reward_that_fails_under_a_launcher(tmp_path: Path):
    """It ends all with the first that leaves, which is not before the checkpoint is written."""
    (tmp_path / "rewarding.py").write_text(REWARDS)
    with launcher(2, *REWARDED, *FAILING, "rewards=none", "rewards.r.fn=rewarding:gone", cwd=tmp_path) as command:
        code, said = command.ended()
        assert command.left() == []
    assert code != 0
    assert "error: rewards.r: failed on 32 of the 64 leaves of epoch 1 (ConnectionError: rank 1" in said
    assert "1 epochs saved. To go on: arborl train --resume runs/x" in said
    assert problem_with(last_checkpoint(tmp_path / "runs" / "x")) is None
