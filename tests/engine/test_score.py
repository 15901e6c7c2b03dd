"""Decoding while others score."""

import itertools
import threading

import torch

from arborl.data.prompts import Prompts
from arborl.engine.score import decode_and_score
from arborl.rewards import Rewards

from conftest import make


def test_pictures_are_decoded_while_servers_score_others():
    """The first answer comes only once the second pictures are decoded; one at a time it never would."""
    _, model = make(["model=mixture"])
    further, decoded = threading.Event(), itertools.count(1)
    decode = model.decode

    def counted(latents):
        if next(decoded) == 2:
            further.set()
        return decode(latents)

    class Server:
        elsewhere = True

        def __call__(self, images, prompts, columns):
            assert further.wait(20)
            assert not torch.is_grad_enabled()
            return torch.arange(float(len(images)))

    model.decode = counted
    rewards = Rewards({"x": Server()}, {"x": 1.0})
    leaves = torch.randn(3, 2, *model.latent_shape)
    scored = decode_and_score(model, rewards, leaves, Prompts(["a", "b", "c"], {}), 2)
    assert scored.scores.total.tolist() == [[0, 1]] * 3
