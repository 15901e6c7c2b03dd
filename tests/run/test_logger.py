"""Where the time went, in metrics."""

import time

import pytest

from arborl.config.schema import Config, LogConfig
from arborl.run.logger import Logger


def test_stages_within_stages_are_counted_once(tmp_path):
    from arborl.run.setup import start_accelerator

    config = Config(log=LogConfig(dir=str(tmp_path), trackers=[]))
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
