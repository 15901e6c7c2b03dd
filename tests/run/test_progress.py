"""A run's progress on a terminal of any width, and where the time went."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from arborl.config.schema import Config, LogConfig
from arborl.run.folder import STAGES
from arborl.run.logger import Logger
from arborl.run.progress import BLOCKS, ProgressBar, clock, facts, time_split

from launching import PATIENCE, Fork

METRICS = {"reward": 0.4312, "reward_std": 0.0831, "reward_failed": 0.0}


@pytest.fixture(scope="module")
def logger(tmp_path_factory: pytest.TempPathFactory) -> Logger:
    config = Config(log=LogConfig(dir=str(tmp_path_factory.mktemp("runs")), trackers=[]))
    return Logger(config, Accelerator(), None, 0, quiet=True)


@given(
    width=st.integers(20, 300),
    epoch=st.integers(0, 99),
    names=st.lists(st.sampled_from(["hps", "imagereward", "aesthetic", "clipscore"]), max_size=4, unique=True),
    ascii_only=st.booleans(),
)
def test_progress_time_left_and_reward_come_first_at_any_width(logger: Logger, width, epoch, names, ascii_only):
    bar = ProgressBar(logger, epoch, 100)
    bar.advance(METRICS | {f"rewards/{name}/mean": 0.25 for name in names})
    line = bar.line(width, ascii_only).plain
    assert len(line) <= width
    assert line.startswith(f"epoch {epoch + 1}/100")
    assert width < 24 or re.search(r"eta \d+:\d\d", line)
    first = "reward 0.4312" if len(names) < 2 else f"{names[0]} 0.2500"
    assert width < 44 or first in line
    assert width < 60 or ("#" in line or "." * 8 in line if ascii_only else "━" * 8 in line)
    assert width < 200 or "std within a prompt 0.0831" in line


def test_time_left_by_the_clock_and_by_the_epochs(logger: Logger, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bar = ProgressBar(logger, 10, 20)
    assert bar.seconds_left is None
    now[0] += 30
    bar.advance(METRICS)
    assert bar.seconds_left == 9 * 30
    now[0] += 12
    assert bar.seconds_left == 9 * 30 - 12
    logger.trained = 40.0
    by_clock = ProgressBar(logger, 0, None, limit=100.0)
    assert by_clock.line(80).plain.startswith("epoch 0  ")
    assert (by_clock.seconds_left, by_clock.share) == (60.0, 0.4)
    assert [clock(seconds) for seconds in (5, 65, 3599, 3600, 86399)] == [
        "0:05",
        "1:05",
        "59:59",
        "1:00:00",
        "23:59:59",
    ]


@given(st.lists(st.floats(0, 1e4), min_size=len(STAGES), max_size=len(STAGES)))
def test_the_bar_shows_what_counts_and_is_never_longer_than_it_may(seconds):
    row = {f"time/{name}": spent for name, spent in zip(STAGES, seconds, strict=True)}
    shown = time_split(row | {"tflops/rollout": 431.2, "tflops/update": 520.0})
    assert shown.count("▇") <= BLOCKS + len(STAGES)
    assert shown.endswith("TFLOP/s: rollout 431, update 520")
    longest = max(seconds)
    if longest > 1:
        assert f"{STAGES[seconds.index(longest)]} ▇" in shown


def test_a_terminal_of_each_width_shows_how_far_the_run_is(tmp_path: Path):
    """A real pseudo-terminal, made wider while the run goes on: what is on its line is what is readable."""
    master, slave = pty.openpty()
    tiny = ["train.epochs=100000", "eval.num_prompts=4", "eval.every=0", "log.record_every=0", "log.trackers=[]"]
    known = {"TERM": "xterm", "COLUMNS": "", "LINES": ""}
    with Fork("train", "-c", "mixture", *tiny, cwd=tmp_path, log=Path(os.ttyname(slave)), environment=known) as process:
        process.until(lambda: bool(select.select([master], [], [], 0)[0]))
        os.close(slave)
        for width in (60, 120):
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
            text, deadline = "", time.monotonic() + PATIENCE
            bar = rf"epoch \d+/100000  ━{{8,}}.*  eta [\d:]+  reward -?\d\.\d{{4}}.{{0,{width}}}"
            while not (found := [line for line in _lines(text) if re.fullmatch(bar, line)]):
                assert time.monotonic() < deadline, text[-2000:]
                text += os.read(master, 65536).decode(errors="replace")
            assert len(found[0]) <= width
            assert "rollout" not in found[0]
            assert width < 120 or "std within a prompt" in found[0]
    os.close(master)


def _lines(text: str) -> list[str]:
    """What a terminal shows line by line; the last may not be whole yet."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain)[:-1]]


def test_a_reward_with_a_long_name_leaves_room_for_it(tmp_path: Path):
    metrics = {"reward": 1.0, "reward_std": 0.5, "reward_failed": 0}
    metrics |= {f"rewards/{name}/mean": 0.25 for name in ("a_reward_with_quite_a_long_name_x", "place")}
    assert facts(metrics)[:2] == ["a_reward_with_q… 0.2500", "place 0.2500"]
    bar = ProgressBar(SimpleNamespace(main=False, trained=0.0), 0, 150)  # pyright: ignore[reportArgumentType]
    bar.done, bar.facts = 40, facts(metrics)
    bar.ends.append(bar.ends[-1] + 1)
    for width in (60, 80, 120, 200):
        line = bar.line(width).plain
        assert len(line) <= width
        assert re.match(r"epoch 40/150  .*eta [\d:]+  a_reward_with_q… 0.2500", line), line
