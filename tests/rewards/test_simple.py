"""The rewards without weights, and one with parts."""

import torch

from arborl.config.schema import RewardConfig
from arborl.rewards import load_rewards
from arborl.rewards.simple import brightness, jpeg


class TestRewards:
    def test_canaries(self):
        flat, noisy = torch.full((1, 3, 64, 64), 0.5), torch.rand(1, 3, 64, 64)
        assert float(brightness(flat, [""], {})) == 0.5
        sizes = jpeg(torch.cat([flat, noisy]), ["", ""], {})
        assert 0 > float(sizes[0]) > float(sizes[1]) > -0.1

    def test_named_parts_and_weights(self):
        rewards = load_rewards({"a": RewardConfig("brightness", 2.0), "b": RewardConfig("jpeg", 0.0)})
        parts = {name: v.view(1, 4) for name, v in rewards(torch.rand(4, 3, 8, 8), [""] * 4, {}).scores.items()}
        scores = rewards.combine(parts)
        torch.testing.assert_close(scores.total, 2 * parts["a"].double())
