"""Output that nobody can read any more costs no epoch: a pipe without a reader, a full disk, a closed terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arborl.config import load_config, read_config
from arborl.tools.output import flush_or_discard, tolerant_output
from arborl.trainer import train

from launching import Fork, Limits, assert_same_run, rows_of

SETTINGS = ["train.epochs=8", "log.save_every=3", "eval.num_prompts=4", "log.record_every=0", "log.trackers=[]"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return train(load_config("mixture", [*SETTINGS, f"log.dir={folder}", "run_name=whole"]))


def started(cwd: Path, log: Path, *more: str) -> Fork:
    """A run whose output goes there."""
    return Fork("train", "-c", "mixture", *SETTINGS, "run_name=cut", *more, cwd=cwd, log=log, limits=Limits())


def test_a_disk_that_is_full_where_messages_go(tmp_path: Path, whole: Path):
    with started(tmp_path, Path("/dev/full")) as process:
        assert process.ended().code == 0
    assert_same_run(whole, tmp_path / "runs" / "cut")


def test_a_reader_that_goes_away_after_the_first_line(tmp_path: Path, whole: Path):
    """As `2>&1 | head -1` does it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with started(tmp_path, pipe) as process:
        process.until(lambda: bool(_read(reader)))
        os.close(reader)
        assert process.ended().code == 0
    assert_same_run(whole, tmp_path / "runs" / "cut")
    assert (tmp_path / "runs" / "cut" / "report.html").is_file()


def test_a_terminal_that_closes_saves_the_run(tmp_path: Path):
    """The system sends SIGHUP, and what is written from then on fails."""
    master, slave = pty.openpty()
    more = ["train.epochs=400", "log.save_every=1000"]
    run = tmp_path / "runs" / "cut"
    with started(tmp_path, Path(os.ttyname(slave)), *more) as process:
        os.close(slave)
        os.set_blocking(master, False)
        process.until(lambda: (_read(master), rows_of(run) >= 5)[1])
        os.close(master)
        process.signal(signal.SIGHUP)  # not every system sends it to whoever opened a terminal by name
        ended = process.ended()
    assert ended.code == 130
    epochs = rows_of(run)
    assert 5 <= epochs < 400
    more = [f"train.epochs={epochs + 3}"]
    train(read_config(run / "config.yaml", more), resume=run)
    other = train(load_config("mixture", [*SETTINGS, *more, f"log.dir={tmp_path}", "run_name=whole"]))
    assert_same_run(other, run)


def _read(end: int) -> bytes:
    """What is there by now; a terminal that nobody reads would hold the run up."""
    try:
        return os.read(end, 65536)
    except OSError:
        return b""


def test_a_run_under_nohup_ignores_the_hangup(tmp_path: Path, whole: Path, monkeypatch):
    """Whoever starts a run so that it ignores the signal means it."""
    log = tmp_path / "log"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        calls = []
        monkeypatch.setattr(os, "fsync", lambda handle: calls.append(handle) or os.kill(os.getpid(), signal.SIGHUP))
        train(load_config("mixture", [*SETTINGS, f"log.dir={tmp_path / 'runs'}", "run_name=cut"]))
    except KeyboardInterrupt:
        pytest.fail("it left")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert calls
    assert not log.exists()
    assert_same_run(whole, tmp_path / "runs" / "cut")


def test_a_daemon_whose_output_is_closed_from_the_start(tmp_path: Path, whole: Path, monkeypatch):
    """Python has no streams then."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    train(load_config("mixture", [*SETTINGS, f"log.dir={tmp_path}", "run_name=cut"]))
    flush_or_discard()
    assert_same_run(whole, tmp_path / "cut")


def test_a_reader_that_goes_away_from_a_script(tmp_path: Path):
    """Python itself would end with an error over what it cannot write in the end."""
    script = "import sys; from arborl import load_config, train; train(load_config('mixture', sys.argv[1:]))"
    reader, writer = os.pipe()
    os.close(reader)
    words = [*SETTINGS, "train.epochs=2", f"log.dir={tmp_path}", "run_name=cut"]
    assert subprocess.run([sys.executable, "-c", script, *words], stdout=writer, stderr=writer).returncode == 0
    os.close(writer)
    assert rows_of(tmp_path / "cut") == 3


COMMANDS = (["plan", "-c", "mixture"], ["-h"], ["rewards", "--json"])
ENDING = """
import gc, json, os, sys
import arborl.engine.cost, arborl.rewards.inspect, diffusers.utils, transformers  # what the commands import
from arborl.cli import main
gc.freeze()
said = {}
for number, words in enumerate(json.loads(sys.argv[1])):
    for kind in ("full", "unread"):
        log = os.open(f"{kind}-{number}", os.O_CREAT | os.O_RDWR)
        if not (child := os.fork()):
            if kind == "full":
                stdout = os.open("/dev/full", os.O_WRONLY)
            else:
                reader, stdout = os.pipe()
                os.close(reader)
            os.dup2(stdout, 1)
            os.dup2(log, 2)
            main(words)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.setdefault(kind, []).append([code, os.pread(log, 2**20, 0).decode()])
print(json.dumps(said))
"""


def test_a_result_that_is_not_there_to_be_read_is_an_error_and_one_that_nobody_wants_is_none(tmp_path: Path):
    """Each command in a Python of its own to its end, though not from its start: it is forked after the imports."""
    command = [sys.executable, "-c", ENDING, json.dumps(COMMANDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    lost = [1, "error: stdout cannot be written to (No space left on device)\n"]
    assert json.loads(done.stdout) == {"full": [lost] * 3, "unread": [[0, ""]] * 3}


def test_a_comparison_goes_on_whoever_reads(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    cells = ["compare", "mixture", "mixture tree.k=3", "--seeds", "1", "--compute", "3e3", "--out", "x"]
    with Fork(*cells, cwd=tmp_path, log=pipe) as comparison:
        comparison.until(lambda: bool(_read(reader)))
        os.close(reader)
        assert comparison.ended().code == 0
    assert len(list(tmp_path.glob("x/*/seed-0/summary.json"))) == 2
    assert (tmp_path / "x" / "compare.json").is_file()


def test_what_libraries_print_themselves_stops_nothing_either(monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115 (what it still holds cannot be written when it is closed)
    monkeypatch.setattr(sys, "stdout", full)
    with tolerant_output():
        print("x" * 100_000, flush=True)
        sys.stdout.writelines(["a", "b"])
        assert sys.stdout.encoding == full.encoding
        print("done", flush=True)
    with pytest.raises(OSError):
        full.close()
