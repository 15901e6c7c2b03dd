"""What a run survives: kill -9, damaged checkpoints, a full or read-only disk, interrupts at its very end. Each time it
goes on to the state, bit for bit, that it would have come to undisturbed.
"""

import errno
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from accelerate import Accelerator

from arborl.cli import main
from arborl.config import load_config, read_config
from arborl.core.errors import InputError
from arborl.run import folder as run_folder
from arborl.run.checkpoint import checkpoints, latest_valid, problem_with
from arborl.tools.files import append
from arborl.trainer import train

from launching import (
    Ended,
    Fork,
    Limits,
    Started,
    arborl,
    assert_same_run,
    contents,
    forked,
    rows_of,
    small_disk,
    timeless,
)

MIXTURE = [
    "--config-name=mixture",
    "train.epochs=12",
    "train.ema_decay=0.9",
    "tree.siblings=balanced",
    "sample.num_prompts=2",
    "eval.num_prompts=8",
    "eval.every=2",
    "log.save_every=1",
    "log.record_every=0",
]


def uninterrupted(arguments: list[str], folder: Path) -> Path:
    """What a run comes to when nothing happens to it."""
    ended = forked("train", *arguments, f"log.dir={folder}", "run_name=whole", cwd=folder)
    assert ended.code == 0, ended.said
    return folder / "whole"


# kill -9


def half_written(run: Path) -> bool:
    with suppress(FileNotFoundError):  # it is written: the folder that it was written in went as it was looked into
        return any((run / "checkpoints").glob(".arborl-*/epoch_*"))
    return False


def kill(command: Started, run: Path, moment: str, amount: float) -> None:
    """SIGKILL: `amount` seconds after its start, or after it is set up, or while it writes its n-th checkpoint."""
    if moment == "start":
        time.sleep(amount)
    elif moment == "work":
        command.until(lambda: "pictures an epoch" in command.said or command.code is not None)
        time.sleep(amount)
    else:
        saved = last_epoch(run)
        command.until(lambda: last_epoch(run) >= saved + amount, pause=0.0005)
        command.until(lambda: _frozen_while_writing(command, run), pause=0.0005)
    command.signal(signal.SIGKILL)
    command.ended()


def _frozen_while_writing(command: Started, run: Path) -> bool:
    """Stop it where a checkpoint is half written; too late, and it goes on to the next one."""
    if not half_written(run):
        return False
    command.signal(signal.SIGSTOP)
    command.until(lambda: psutil.Process(command.pid).status() == psutil.STATUS_STOPPED, pause=0.0005)
    if half_written(run):
        return True
    command.signal(signal.SIGCONT)
    return False


def last_epoch(run: Path) -> int:
    found = checkpoints(run / "checkpoints")
    return int(found[-1].name.removeprefix("epoch_")) if found else 0


def killed_again_and_again(
    start: Callable[..., Started], arguments: list[str], moments: list[tuple[str, float]], folder: Path
) -> Counter[str]:
    """Start a run, kill it, let it go on, and so on to its end: always with the same command. Where the kills fell."""
    command = ["train", "--resume", "auto", *arguments, f"log.dir={folder}", "run_name=cut"]
    run, fell = folder / "cut", Counter[str]()
    for moment, amount in moments:
        with start(*command, cwd=folder) as process:
            kill(process, run, moment, amount)
            code, said = process.ended()
        assert code == -signal.SIGKILL, f"it came to its end before it could be killed: {said}"
        fell["writing a checkpoint"] += half_written(run)
        fell["before the first checkpoint"] += not checkpoints(run / "checkpoints")
        fell["starting up"] += "pictures an epoch" not in said
        fell["all"] += 1
        for path in checkpoints(run / "checkpoints"):
            assert problem_with(path) is None
    with start(*command, cwd=folder) as process:
        code, said = process.ended()
    assert code == 0, said
    assert not list((run / "checkpoints").glob(".*"))
    return fell


def test_a_run_that_is_killed_three_times(tmp_path: Path):
    falling = [*MIXTURE, "train.schedule=linear", "train.warmup=3"]
    whole = uninterrupted(falling, tmp_path)
    chance = random.Random(0)
    moments = [("writing", 0), ("writing", 3), ("work", chance.uniform(0, 0.2))]
    fell = killed_again_and_again(Fork, falling, moments, tmp_path)
    assert fell["writing a checkpoint"] >= 2
    assert_same_run(whole, tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("algo", ["tree", "branch"])
def test_a_run_that_is_killed_twenty_times(tmp_path: Path, sd3_overrides: list[str], algo: str, kind: str):
    """In every phase: while it starts, samples, learns, evaluates and writes."""
    settings = [
        f"--config-name={algo}",
        *sd3_overrides,
        f"model.train={kind}",
        "train.epochs=60",
        "train.ema_decay=0.9",
    ]
    settings += ["sample.num_prompts=1", "eval.num_prompts=2", "eval.every=2", "log.save_every=1", "log.record_every=7"]
    settings += ["tree.split_points=[0,2]"] if algo == "branch" else ["tree.w=2"]
    whole = uninterrupted(settings, tmp_path)
    rows = (whole / "metrics.jsonl").read_text().splitlines()
    pace = sum(float(re.findall(r'"step_time": ([\d.e-]+)', row)[0]) for row in rows) / len(rows)
    chance = random.Random(f"{algo} {kind}")
    drawn = {"start": lambda: chance.uniform(0.1, 5), "work": lambda: chance.uniform(0, 4 * pace)}
    drawn["writing"] = lambda: chance.randrange(3)
    kinds = ["start"] * 4 + ["work"] * 9 + ["writing"] * 7
    chance.shuffle(kinds)
    fell = killed_again_and_again(arborl, settings, [(moment, drawn[moment]()) for moment in kinds], tmp_path)
    print(f"{algo} {kind}: an epoch takes {pace:.2f} s; kills {dict(fell)}")
    assert fell["all"] == 20
    assert fell["writing a checkpoint"] >= 7
    assert_same_run(whole, tmp_path / "cut")


# one command for the start and for going on


def test_resume_auto(tmp_path: Path, capsys):
    """It starts what is not there, goes on with what was cut off, and leaves alone what is over."""
    settings = [*MIXTURE, "train.epochs=4", f"log.dir={tmp_path}"]
    whole = uninterrupted([*MIXTURE, "train.epochs=4"], tmp_path)

    def auto(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as left:
            main(["train", "--resume", "auto", *settings, *arguments])
        return left.value.code, capsys.readouterr().err

    code, said = auto()
    assert code == 2
    assert "run_name=auto: --resume auto must know which run it is about" in said
    train(load_config("mixture", [*settings[1:], "run_name=cut", "train.epochs=2"]))
    (tmp_path / "cut" / "summary.json").unlink()  # as if it had been cut off there
    before = contents(tmp_path / "cut")
    (tmp_path / "other.txt").write_text("a dot at the bottom left\na dot somewhere\n")
    for key, value, text in (
        ("model.lora.rank", 3, "cannot change when a run goes on; allowed: "),
        ("model.train", "lora", "cannot change when a run goes on; allowed: full, as it was started"),
        ("seed", 7, "cannot change when a run goes on; allowed: 0, as it was started"),
        ("prompts.path", tmp_path / "other.txt", "holds other prompts than when the run began"),
    ):
        code, said = auto("run_name=cut", f"{key}={value}")
        assert code == 2
        assert f"error: {key}={value}: {text}" in said
    assert contents(tmp_path / "cut") == before
    code, said = auto("run_name=cut")
    assert code in (0, None), said
    assert_same_run(whole, tmp_path / "cut")
    before = contents(tmp_path / "cut")
    code, said = auto("run_name=cut")
    assert (code, said) == (0, f"{tmp_path / 'cut'} is finished already\n")
    assert contents(tmp_path / "cut") == before


class KilledError(BaseException):
    """The end, wherever it comes."""


def killed(*_: object, **__: object) -> None:
    raise KilledError


@pytest.mark.parametrize("at", ["run.summary.write_atomically", "trainer.write_report"])
def test_a_run_that_is_killed_at_its_end_has_a_report_once_it_went_on(tmp_path: Path, monkeypatch, at: str):
    """summary.json says that a run is finished, and nobody goes on with one that is: so it comes last."""
    command = ["train", "--resume", "auto", *MIXTURE, "train.epochs=2", f"log.dir={tmp_path}", "run_name=cut"]
    monkeypatch.setattr(f"arborl.{at}", killed)
    with pytest.raises(KilledError):
        main(command)
    monkeypatch.undo()
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 0
    assert (tmp_path / "cut" / "summary.json").is_file()
    page = (tmp_path / "cut" / "report.html").read_text()
    assert '"finished":true' in page
    assert '"summary":{"eval_before"' in page


def test_a_run_that_is_killed_while_it_takes_its_folder_leaves_nothing_for_long(tmp_path: Path):
    command = ["train", *MIXTURE, "train.epochs=1", f"log.dir={tmp_path / 'runs'}"]
    child = os.fork()
    if child == 0:
        run_folder.save_config = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            run_folder.claim_folder(load_config("mixture", [f"log.dir={tmp_path / 'runs'}"]))
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert forked(*command, cwd=tmp_path).code == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tree-1"]


# readers of a run that is going on


def test_a_reader_is_not_told_that_a_healthy_run_is_broken(tmp_path: Path, finished: Path, monkeypatch, capsys):
    """With log.keep=1 the checkpoint that it has found is gone before it has read it; and the best are replaced."""
    run = shutil.copytree(finished, tmp_path / "run")
    kept, moves = run / "checkpoints", []

    def found(folder: Path) -> tuple[Path | None, dict[Path, str]]:
        found, damaged = latest_valid(folder)
        if found and len(moves) < 3:
            moves.append(found.rename(kept / f"epoch_{int(found.name[-6:]) + 1:06d}"))
        return found, damaged

    def problem(path: Path) -> str | None:
        if len(moves) == 3:
            return problem_with(path)
        moves.append(shutil.copytree(path, tmp_path / f"other {len(moves)}"))
        path.rename(tmp_path / f"best {len(moves)}")
        problem = problem_with(path)
        moves[-1].rename(path)
        return problem

    shutil.rmtree(kept / "epoch_000003")
    monkeypatch.setattr("arborl.run.resume.latest_valid", found)
    monkeypatch.setattr("arborl.run.resume.problem_with", problem)
    for named in (run, kept / "best"):
        moves.clear()
        with pytest.raises(SystemExit) as left:
            main(["eval", "--run", str(named)])
        assert left.value.code == 0, capsys.readouterr().err
        assert len(moves) == 3
    shutil.rmtree(kept / "best")
    with pytest.raises(SystemExit) as left:
        main(["eval", "--run", str(kept / "best")])
    assert Ended(left.value.code, capsys.readouterr().err).stopped_with("is not complete (no SHA256SUMS)")


# damage


def places(size: int, chance: random.Random) -> list[int]:
    """The first byte, the last, and some between."""
    return [0, size - 1, *(chance.randrange(size) for _ in range(3))]


def damages(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What may befall a checkpoint, a case at a time."""
    chance = random.Random(1)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()

        def put(text: bytes, file: Path = file) -> Callable[[], object]:
            return lambda: file.write_bytes(text)

        for place in places(len(whole), chance):
            flipped = bytes([whole[place] ^ 1 << chance.randrange(8)])
            yield f"{file.name}: a bit at {place}", put(whole[:place] + flipped + whole[place + 1 :])
            # Zeros that were zeros before are no damage.
            zeroed = (whole[:place] + bytes(16) + whole[place + 16 :])[: len(whole)]
            if zeroed != whole:
                yield f"{file.name}: 16 zeros at {place}", put(zeroed)
            yield f"{file.name}: cut to {place}", put(whole[:place])
        for more in (b"\0", b"\n", b"x" * 4096):
            yield f"{file.name}: {len(more)} more", put(whole + more)
        yield f"{file.name}: gone", file.unlink
        yield f"{file.name}: renamed", lambda file=file: file.rename(file.with_suffix(".bak"))
        yield f"{file.name}: a folder", lambda file=file: (file.unlink(), file.mkdir())
    yield "one more", lambda: (folder / "optimizer.more.safetensors").write_text("mine")
    yield "one more folder", lambda: (folder / "optimizer.old.safetensors").mkdir()
    yield "empty list", lambda: (folder / "SHA256SUMS").write_bytes(b"")
    yield "not a folder", lambda: (shutil.rmtree(folder), folder.write_text("?"))
    yield "nothing in it", lambda: [file.unlink() for file in folder.iterdir()]
    other = folder.with_name("epoch_000003")
    yield "another's list", lambda: shutil.copy(other / "SHA256SUMS", folder)
    yield "another's weights", lambda: shutil.copy(other / "weights.safetensors", folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted([*MIXTURE, "train.epochs=4"], tmp_path_factory.mktemp("finished"))


def test_no_damage_goes_unseen(tmp_path: Path, finished: Path):
    run = shutil.copytree(finished, tmp_path / "run")
    before, newest = checkpoints(run / "checkpoints")
    kept = shutil.copytree(newest, tmp_path / "kept")
    assert latest_valid(run) == (newest, {})
    cases = 0
    for name, damage in damages(newest):
        damage()
        problem = problem_with(newest)
        assert problem is not None, name
        assert latest_valid(run) == (before, {newest: problem}), name
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        shutil.copytree(kept, newest)
        cases += 1
    assert cases >= 140
    assert problem_with(newest) is None


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, capsys):
    whole = uninterrupted([*MIXTURE, "train.epochs=6"], tmp_path)
    cut = train(load_config("mixture", [*MIXTURE[1:], f"log.dir={tmp_path}", "run_name=cut", "train.epochs=4"]))
    weights = cut / "checkpoints" / "epoch_000004" / "ema.safetensors"
    flip(weights)
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["train", "--resume", str(cut), "train.epochs=6"])
    said = capsys.readouterr().err
    assert left.value.code == 0
    assert "warning: checkpoint epoch_000004 is damaged (ema.safetensors is not what was written); it is left" in said
    assert "kept as damaged_epoch_000004" in said
    assert "epoch 4/6" in said, "the epoch after the third comes again"
    assert (cut / "checkpoints" / "damaged_epoch_000004" / "ema.safetensors").is_file()
    assert_same_run(whole, cut)


def flip(file: Path) -> None:
    """One bit, in the middle."""
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 4
    file.write_bytes(text)


def test_a_run_without_a_sound_checkpoint_is_left_as_it_is(tmp_path: Path, finished: Path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    for path in checkpoints(run / "checkpoints"):
        flip(path / "optimizer.exp_avg.safetensors")
    before = contents(run)
    for command in (["train", "--resume", str(run), "train.epochs=9"], ["eval", "--run", str(run)]):
        with pytest.raises(SystemExit) as left:
            main(command)
        told = Ended(left.value.code, capsys.readouterr().err)
        assert told.stopped_with("none of its checkpoints is whole (epoch_000004 is damaged")
    assert contents(run) == before


def test_files_that_a_failing_machine_leaves_behind_are_one_line(tmp_path: Path, finished: Path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    going_on = ["train", "--resume", str(run), "train.epochs=9"]
    auto = ["train", "--resume", "auto", *MIXTURE, f"log.dir={tmp_path}", "run_name=run"]
    for name, command, text in (
        ("metrics.jsonl", going_on, "line 3 of its metrics.jsonl is damaged; try: the run without that line"),
        ("summary.json", auto, "its summary.json is damaged; try: the run without that file"),
        ("config.yaml", going_on, "config.yaml: "),
    ):
        whole = (run / name).read_bytes()
        lines = whole.splitlines(keepends=True)
        for ruin in (b"".join([*lines[:2], bytes(100), b"\n", *lines[3:]]), b"".join([*lines[:2], b"\xff\xfe\n"])):
            (run / name).write_bytes(ruin)
            before = contents(run)
            with pytest.raises(SystemExit) as left:
                main(command)
            told = Ended(left.value.code, capsys.readouterr().err)
            assert told.stopped_with(text)
            assert contents(run) == before
        (run / name).write_bytes(whole)


# a disk that is full, or may not be written


def test_a_full_disk(tmp_path: Path):
    """Whatever meets it first: settings, TensorBoard's files, pictures, metrics, a checkpoint. One line, and the run
    goes on once there is room.
    """
    settings = [*MIXTURE, "train.epochs=4", "log.record_every=0"]
    met = fill(tmp_path, settings, [4, 12, 64, 136, 228])
    assert met["a checkpoint"] >= 2
    assert met["the run's folder"] >= 2


def test_a_full_disk_at_a_tree_and_between_checkpoints(tmp_path: Path):
    fill(tmp_path, [*MIXTURE, "train.epochs=2", "log.record_every=5"], [200])
    # Metrics and TensorBoard's files grow with each epoch.
    fill(tmp_path, [*MIXTURE, "train.epochs=20", "eval.every=0", "log.save_every=1000"], [64])


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_page(tmp_path: Path):
    """Every size of a disk up to the one that holds the run: each write is once the one that fails."""
    met = fill(tmp_path, [*MIXTURE, "train.epochs=3"], range(4, 500, 4))
    assert met["nothing"]
    met += fill(tmp_path, [*MIXTURE, "train.epochs=1", "log.record_every=1"], range(32, 300, 12))
    # With one checkpoint at the end, the last evaluation and the summary come next.
    met += fill(tmp_path, [*MIXTURE, "train.epochs=1", "log.save_every=1000"], range(112, 256, 4))
    print(met)


def fill(folder: Path, arguments: list[str], sizes: list[int] | range) -> Counter[str]:
    """The same run on disks of so many KiB, each made larger afterwards; what it was that did not fit."""
    folder = folder / str(len(list(folder.iterdir())))
    folder.mkdir()
    whole, met = uninterrupted(arguments, folder), Counter[str]()
    with small_disk(folder / "disk") as disk:
        for size in sizes:
            run, seen = disk.path / f"x{size}", disk.seen / f"x{size}"
            how = {"cwd": folder, "limits": Limits(disk=disk.shell.pid)}
            disk.resize(size * 1024)
            ended = forked("train", *arguments, f"log.dir={disk.path}", f"run_name={run.name}", **how)
            for path in [*(seen / "checkpoints").glob("*"), *(seen / "checkpoints").glob(".*")]:
                assert problem_with(path) is None, (size, path)
            disk.resize(2**26)
            if ended.code == 0:
                met["nothing"] += 1
            else:
                assert ended.stopped_with("No space left on device"), (size, ended.said)
                assert f"error: log.dir={disk.path}" in ended.said
                met["a checkpoint" if "could not write a checkpoint" in ended.errors[0] else "the run's folder"] += 1
                if seen.exists():
                    ended = forked("train", "--resume", str(run), **how)
                    assert ended.code == 0, (size, ended.said)
            if seen.exists():
                assert_same_run(whole, seen)
            disk.do(f"rm -rf '{disk.path}'/*")
    return met


def test_files_that_may_not_grow(tmp_path: Path):
    """A quota by another name, for machines where no disk can be mounted: no file may have more than 20,000 bytes."""
    settings = [*MIXTURE, "log.trackers=[]", "train.epochs=40", "eval.every=0", "log.save_every=5"]
    whole = uninterrupted(settings, tmp_path)
    limits = Limits(file_size=21_000)
    ended = forked("train", *settings, f"log.dir={tmp_path}", "run_name=cut", cwd=tmp_path, limits=limits)
    assert ended.stopped_with("cannot be written to (File too large)"), ended.said
    saved = last_epoch(tmp_path / "cut")
    assert 0 < saved < 40
    assert saved % 5 == 0, "an epoch whose metrics could not be written does not count"
    limits = Limits(file_size=10_000)
    ended = forked("train", "--resume", "cut", cwd=tmp_path, limits=limits)
    assert ended.stopped_with("File too large"), ended.said
    assert last_epoch(tmp_path / "cut") == saved
    ended = forked("train", "--resume", "cut", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert_same_run(whole, tmp_path / "cut")


def test_a_folder_that_may_not_be_written(tmp_path: Path, finished: Path):
    run = shutil.copytree(finished, tmp_path / "runs" / "x")
    how = {"cwd": tmp_path, "limits": Limits(unprivileged=True)}
    before = contents(tmp_path / "runs")

    def refused(closed: list[Path], *arguments: str, text: str) -> None:
        for folder in closed:
            folder.chmod(0o555)
        try:
            ended = forked("train", *arguments, **how)
        finally:
            for folder in closed:
                folder.chmod(0o755)
        assert ended.stopped_with(text), ended.said

    everything = [tmp_path / "runs", *(path for path in (tmp_path / "runs").rglob("*") if path.is_dir())]
    new, on = [*MIXTURE, "run_name=y"], ["--resume", "runs/x", "train.epochs=6"]
    refused(everything, *new, text="error: log.dir=runs: cannot be written to (Permission denied)")
    refused(everything, *on, text="error: log.dir=runs/x: cannot be written to (Permission denied)")
    assert contents(tmp_path / "runs") == before
    for part in ("samples", "checkpoints"):
        refused([run / part], *on, text="Permission denied")


def test_a_disk_that_turns_read_only(tmp_path: Path, finished: Path):
    with small_disk(tmp_path / "disk") as disk:
        disk.do(f"cp -r '{finished}' '{disk.path}/x'")
        disk.do(f"mount -o remount,ro '{disk.path}'")
        how = {"cwd": tmp_path, "limits": Limits(disk=disk.shell.pid)}
        before = contents(disk.seen)
        ended = forked("train", *MIXTURE, f"log.dir={disk.path}", "run_name=y", **how)
        assert ended.stopped_with("Read-only file system"), ended.said
        ended = forked("train", "--resume", str(disk.path / "x"), "train.epochs=6", **how)
        assert ended.stopped_with("Read-only file system"), ended.said
        assert contents(disk.seen) == before


# interrupts at the very end

SLOW_REWARD = """
import time
from pathlib import Path

def score(images, prompts, columns):
    if len(prompts) == 7:  # an evaluation's, not an epoch's
        Path("evaluating").touch()
        time.sleep(0.3)
    return images.flatten(1).mean(1)
"""


def test_an_interrupt_after_the_last_epoch(tmp_path: Path):
    """While the last checkpoint is written, and then while the last evaluation is made; of a run that had ended before,
    and was made longer.
    """
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    settings = [*MIXTURE, "train.epochs=3", "eval.every=0", "log.save_every=1000", "eval.num_prompts=7"]
    settings += ["rewards=none", "rewards.r.fn=slow:score"]
    whole = uninterrupted(settings, tmp_path)
    run = tmp_path / "runs" / "cut"
    ended = forked("train", *settings, "run_name=cut", "train.epochs=2", cwd=tmp_path)
    assert ended.code == 0, ended.said
    with Fork("train", "--resume", "runs/cut", "train.epochs=3", cwd=tmp_path) as command:
        command.until(lambda: _frozen_while_writing(command, run), pause=0.0005)
        command.signal(signal.SIGTERM)
        command.signal(signal.SIGCONT)
        code, said = command.ended()
    assert code == 130, said
    assert "stopped; 3 epochs saved. To go on: arborl train --resume runs/cut" in said
    assert "Traceback" not in said
    assert rows_of(run) == 3
    (tmp_path / "evaluating").unlink()
    with Fork("train", "--resume", "runs/cut", cwd=tmp_path) as command:
        command.until((tmp_path / "evaluating").exists)
        command.signal(signal.SIGINT)
        code, said = command.ended()
    assert code == 130, said
    assert "stopped; 3 epochs saved. To go on: arborl train --resume runs/cut" in said
    assert "Traceback" not in said
    assert not (run / "summary.json").exists()
    (run / "samples" / "epoch_000000.png").write_bytes(b"")  # a machine that failed may have lost it
    ended = forked("train", "--resume", "runs/cut", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert "warning: no picture of before and after: a sheet cannot be read" in ended.said
    assert_same_run(whole, run, ended_at=2)
    assert [row["epoch"] for row in timeless(run)] == [0, 1, 2, 3]


@pytest.mark.parametrize("what", ["the line of metrics", "a tracker"])
def test_metrics_that_cannot_be_written_once_cost_no_epoch(tmp_path: Path, what: str, monkeypatch):
    """The run ends with a line, and with a checkpoint of all it had learnt, metrics and all."""
    settings = [*MIXTURE[1:], "train.epochs=6", "log.save_every=1000", "log.trackers=[]", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*settings, "run_name=whole"]))
    times = iter(range(100))

    def failing(write: Callable[..., None]) -> Callable[..., None]:
        def once(*given: object, **named: object) -> None:
            if (what == "a tracker" or Path(str(given[0])).name == "metrics.jsonl") and next(times) == 3:
                raise OSError(errno.EIO, "Input/output error")
            write(*given, **named)

        return once

    run = tmp_path / "cut"
    with monkeypatch.context() as patch:
        if what == "a tracker":
            patch.setattr(Accelerator, "log", failing(Accelerator.log))
        else:
            patch.setattr("arborl.run.logger.append", failing(append))
        with pytest.raises(InputError, match="cannot be written to"):
            train(load_config("mixture", [*settings, "run_name=cut"]))
    assert rows_of(run) == 4
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["epoch_000004"]
    train(read_config(run / "config.yaml"), resume=run)
    assert_same_run(whole, run)
