"""Numbers of an epoch, by hand."""

import pytest

from arborl.run.metrics import speed_metrics


def test_a_forward_and_backward_counts_as_three_forwards():
    found = speed_metrics(forwards=40, parents=10, flops=10**12, seconds={"rollout": 4.0, "update": 2.0, "reward": 9.0})
    assert found == pytest.approx({"tflops/rollout": 40 / 4, "tflops/update": 3 * 10 / 2})
