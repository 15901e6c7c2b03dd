"""Runs in processes of their own: started, killed, launched together, on a disk that is full, and then compared."""

import ctypes
import fnmatch
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import psutil
import pytest

from arborl.compare import worker
from arborl.run.checkpoint import checkpoints, problem_with

ROOT = Path(__file__).parent.parent
PATIENCE = 120
"""Seconds after which a process is taken to hang; never how long anything should take."""


def last_checkpoint(run: Path) -> Path:
    return checkpoints(run / "checkpoints")[-1]


def timeless(run: Path) -> list[dict]:
    """A run's metrics without what the clock says."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "tflops/", "step_time"))} for row in rows]


def assert_same_run(one: Path, other: Path, ended_at: int | None = None) -> None:
    """Weights, averages, optimizer, the best weights and metrics, bit for bit; times aside.

    Where the other had come to its end before, after so many epochs, it has the evaluation of then besides: among its
    metrics, and maybe as its best.
    """
    a, b = last_checkpoint(one), last_checkpoint(other)
    assert a.name == b.name
    rows = timeless(other)
    best_is_more = False
    if ended_at is not None:
        more = {name for name in rows[ended_at] if name.startswith("eval/")}
        assert more
        rows[ended_at] = {name: value for name, value in rows[ended_at].items() if name not in more}
        best = b.with_name("best") / "state.json"
        best_is_more = best.is_file() and json.loads(best.read_text())["epoch"] == ended_at
    for mine, theirs in ((a, b), *([] if best_is_more else [(a.with_name("best"), b.with_name("best"))])):
        assert mine.exists() == theirs.exists()
        if mine.exists():
            assert (mine / "SHA256SUMS").read_text() == (theirs / "SHA256SUMS").read_text()
            assert problem_with(mine) is None
            assert problem_with(theirs) is None
    assert timeless(one) == rows


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def files_below(folder: Path, pattern: str) -> list[Path]:
    """The files below a folder with such a name, while others write to it: `rglob` raises where a folder goes as it
    looks, and runs make and remove folders all the time.
    """
    walked = ((Path(at), names) for at, _, names in os.walk(folder))
    return [at / name for at, names in walked for name in fnmatch.filter(names, pattern)]


class Ended(NamedTuple):
    """How a process ended, and what it had said."""

    code: int
    said: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.said.splitlines() if line.startswith("error")]

    def stopped_with(self, text: str, code: int = 2) -> bool:
        """Whether it said what is wrong in one line, and nothing but lines."""
        assert "Traceback" not in self.said, self.said
        assert [text in line for line in self.errors] == [True], self.said
        return self.code == code


class Disk:
    """A small file system that only the runs on it see. It is gone with the shell that holds it, come what may."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        whoever = [] if os.geteuid() == 0 else ["--map-root-user"]
        self.shell = subprocess.Popen(
            ["unshare", "--mount", *whoever, "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            self.do(f"mount -t tmpfs -o size=64m tmpfs '{path}'")
        except OSError:
            self.close()
            raise

    def do(self, command: str) -> None:
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        try:
            self.shell.stdin.write(f"{command}; echo done $?\n")
            self.shell.stdin.flush()
        except BrokenPipeError:
            raise OSError("no mount namespace here") from None
        lines = []
        for line in self.shell.stdout:
            if line.startswith("done"):
                break
            lines.append(line)
        else:
            line = "done ?"
        if line.strip() != "done 0":
            raise OSError(f"{command}: {''.join(lines)}")

    def resize(self, size: int) -> None:
        self.do(f"mount -o remount,size={size} '{self.path}'")

    @property
    def seen(self) -> Path:
        """The same place, as seen from here."""
        return Path(f"/proc/{self.shell.pid}/root{self.path}")

    def close(self) -> None:
        self.shell.kill()
        self.shell.communicate()


@contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    try:
        disk = Disk(path)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here ({error})")
    try:
        yield disk
    finally:
        disk.close()


@dataclass(frozen=True)
class Limits:
    """What a forked run may do."""

    disk: int = 0  # process whose mounts it sees
    file_size: int = 0  # most bytes in a file
    unprivileged: bool = False  # permissions hold for root too

    def apply(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if self.disk:
            spaces = {"mnt": 0x20000} if os.geteuid() == 0 else {"user": 0x10000000, "mnt": 0x20000}
            for name, kind in spaces.items():
                with open(f"/proc/{self.disk}/ns/{name}") as space:
                    assert libc.setns(space.fileno(), kind) == 0, os.strerror(ctypes.get_errno())
        if self.file_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_size, self.file_size))
        if self.unprivileged and os.geteuid() == 0:
            version3, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            assert libc.capset(version3, none) == 0, os.strerror(ctypes.get_errno())


class Started(ABC):
    """A process in a session of its own, what it says in a file. At the end nothing is left of it."""

    pid: int
    log: Path

    @property
    @abstractmethod
    def code(self) -> int | None:
        """How it ended, None while it runs."""

    @abstractmethod
    def close(self) -> None:
        """Kill what is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.is_file() else ""

    def until(self, met: Callable[[], bool], pause: float = 0.002) -> None:
        """Wait for what it is to come to."""
        deadline = time.monotonic() + PATIENCE
        while not met():
            assert time.monotonic() < deadline, self.said
            assert self.code is None, self.said
            time.sleep(pause)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def ended(self, within: float = PATIENCE) -> Ended:
        deadline = time.monotonic() + within
        while self.code is None:
            assert time.monotonic() < deadline, f"hangs after: {self.said}"
            time.sleep(0.01)
        return Ended(self.code, self.said)


class Command(Started):
    """A command as anyone would give it."""

    def __init__(self, *command: str, cwd: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.log = cwd / f"{self.mark}.log"
        known = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "ARBORL_TEST": self.mark}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=cwd, env=known, stdout=log, stderr=log, start_new_session=True)
        self.pid = self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def close(self) -> None:
        for process in self.left():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def left(self) -> list[psutil.Process]:
        """What is alive of it. A launcher's processes have sessions of their own, but its environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("ARBORL_TEST") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


class Fork(Started):
    """`arborl` in a process that has imported everything already: it starts in no time."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.log = log or cwd / f"{uuid.uuid4().hex}.log"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["arborl.compare.preload"])
        given = {"ACCELERATE_USE_CPU": "1"} | dict(environment or {})
        self.process = context.Process(target=_child, args=(arguments, cwd, self.log, given, limits or Limits()))
        self.process.start()
        self.pid = self.process.pid or 0
        self.until(lambda: self.log.exists())  # it has a session of its own from then on

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _child(arguments: Sequence[str], cwd: Path, log: Path, given: Mapping[str, str], limits: Limits) -> None:
    limits.apply()
    os.chdir(cwd)
    os.environ.update(given)
    worker.run(arguments, log, threads=1)


def forked(
    *arguments: str, cwd: Path, limits: Limits | None = None, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run to the end."""
    with Fork(*arguments, cwd=cwd, limits=limits, environment=environment) as process:
        return process.ended()


@contextmanager
def started_ranks(
    count: int, *arguments: str, cwd: Path, machines: int = 1, environment: Mapping[str, str] | None = None
) -> Iterator[list[Fork]]:
    """`arborl` in several processes that know of each other, on what they take for so many machines.

    Nobody ends one for another here, as a launcher would: each must come to its end by itself.
    """
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(some.getsockname()[1])}
    here = count // machines
    known = place | {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(here)} | dict(environment or {})
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Fork(*arguments, cwd=cwd, environment=known | {"RANK": str(rank), "LOCAL_RANK": str(rank % here)})
            )
            for rank in range(count)
        ]


def ranks(
    count: int, *arguments: str, cwd: Path, machines: int = 1, environment: Mapping[str, str] | None = None
) -> list[Ended]:
    """As many processes as that, run to the end."""
    if count == 1:
        return [forked(*arguments, cwd=cwd, environment=environment)]
    with started_ranks(count, *arguments, cwd=cwd, machines=machines, environment=environment) as started:
        return [process.ended() for process in started]


def arborl(*arguments: str, cwd: Path) -> Command:
    return Command(sys.executable, "-m", "arborl", *arguments, cwd=cwd)


def launcher(processes: int, *arguments: str, cwd: Path) -> Command:
    """train.py with the mixture, as torchrun starts it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return Command(*launcher, str(ROOT / "train.py"), "-c", "mixture", *arguments, cwd=cwd)


def rows_of(run: Path) -> int:
    """Lines of metrics so far."""
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0
