"""Where the time went, in metrics and on the terminal."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.config.schema import Config
from arborl.run.folder import STAGES
from arborl.run.logger import BLOCKS, Logger, time_split


def test_stages_within_stages_are_counted_once(tmp_path):
    from arborl.run.setup import start_accelerator

    config = Config()
    config.log.dir, config.log.trackers = str(tmp_path), []
    run = Logger(config, start_accelerator(config), None, 0, quiet=True)
    start = time.perf_counter()
    with run.stage("reward"):
        time.sleep(0.02)
        for _ in range(2):
            with run.stage("decode"):
                time.sleep(0.03)
    whole = time.perf_counter() - start
    assert run.seconds["decode"] >= 0.06
    assert 0.02 <= run.seconds["reward"] < whole - 0.06 + 1e-3
    assert sum(run.seconds.values()) == pytest.approx(whole, abs=2e-3)
    run.close()


@given(st.lists(st.floats(0, 1e4), min_size=len(STAGES), max_size=len(STAGES)))
def test_the_bar_shows_what_counts_and_is_never_longer_than_it_may(seconds):
    row = {f"time/{name}": spent for name, spent in zip(STAGES, seconds, strict=True)}
    shown = time_split(row | {"tflops/rollout": 431.2, "tflops/update": 520.0})
    assert shown.count("▇") <= BLOCKS + len(STAGES)
    assert shown.endswith("TFLOP/s: rollout 431, update 520")
    longest = max(seconds)
    if longest > 1:
        assert f"{STAGES[seconds.index(longest)]} ▇" in shown
