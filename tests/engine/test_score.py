"""Leaves decoded while others score, and statistics of pictures that mean what they say."""

import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborl.data.prompts import Prompts
from arborl.engine.score import decode_and_score, diversity, statistics, thumbnails
from arborl.rewards import Rewards

from conftest import make_policy


def test_pictures_are_decoded_while_servers_score_others():
    """The first answer comes only once the second pictures are decoded; one at a time it never would."""
    policy = make_policy(["model=mixture", "sample.decode_batch_size=2"])
    model = policy.model
    further, decoded = threading.Event(), itertools.count(1)
    decode = model.decode

    def counted(latents):
        if next(decoded) == 2:
            further.set()
        return decode(latents)

    class Server:
        is_remote = True

        def __call__(self, images, prompts, columns):
            assert further.wait(20)
            assert not torch.is_grad_enabled()
            return torch.arange(float(len(images)))

    model.decode = counted
    rewards = Rewards({"x": Server()}, {"x": 1.0})
    leaves = torch.randn(3, 2, *model.latent_shape)
    scored = decode_and_score(policy, rewards, leaves, Prompts(["a", "b", "c"], {}))
    assert scored.scores.total.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_every_leaf_is_scored_with_its_own_prompt_and_columns(remote: bool, batch_size: int):
    """The picture shows which latent it was made of, the scores say which prompt it came with."""
    policy = make_policy(["model=mixture", f"sample.decode_batch_size={batch_size}"])
    model = policy.model
    model.decode = lambda latents: latents[:, :1, None, None].expand(-1, 3, 4, 4)
    prompts = Prompts(["a", "bb", "ccc"], {"number": [10, 20, 30]})
    leaves = torch.arange(6.0).view(3, 2, 1).expand(3, 2, *model.latent_shape)

    def told(images: torch.Tensor, texts: list[str], columns: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([float(len(text)) for text in texts])
        return {"latent": images[:, 0, 0, 0], "text": lengths, "number": torch.tensor(columns["number"]).float()}

    told.is_remote = remote  # type: ignore[attr-defined]
    parts = decode_and_score(policy, Rewards({"x": told}, {"x": 1.0}), leaves, prompts).scores.parts
    assert parts["x/latent"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert parts["x/text"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert parts["x/number"].tolist() == [[10, 10], [20, 20], [30, 30]]


images = st.builds(
    lambda seed, n, h, w: torch.rand(n, 3, h, w, generator=torch.Generator().manual_seed(seed)),
    st.integers(0, 99),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 20),
)


def flat(*colour: float, side: int = 16) -> torch.Tensor:
    return torch.tensor(colour, dtype=torch.float32).view(1, 3, 1, 1).expand(1, 3, side, side)


class TestStatistics:
    @given(images)
    def test_are_of_each_picture_alone_and_bounded(self, some):
        found = statistics(some)
        for name, values in found.items():
            alone = torch.cat([statistics(picture[None])[name] for picture in some])
            assert torch.allclose(values, alone, atol=1e-6), name
            assert ((values >= 0) & (values <= (9 if name == "entropy" else 1))).all()

    def test_of_pictures_one_knows(self):
        def of(picture: torch.Tensor) -> dict[str, float]:
            return {name: round(float(values[0]), 4) for name, values in statistics(picture).items()}

        assert of(flat(0, 0, 0)) == {"dark": 1, "saturated": 0, "entropy": 0, "edges": 0}
        assert of(flat(1, 0, 0)) == {"dark": 0, "saturated": 1, "entropy": 0, "edges": 0}
        assert of(flat(0.5, 0.5, 0.5)) == {"dark": 0, "saturated": 0, "entropy": 0, "edges": 0}
        halves = torch.cat([flat(0, 0, 0), flat(1, 1, 1)], 3)
        assert of(halves) == {"dark": 0.5, "saturated": 0, "entropy": 1, "edges": round(1 / 32, 4)}
        assert of(torch.rand(1, 3, 64, 64))["edges"] > 0.8

    def test_diversity(self):
        same = thumbnails(torch.rand(1, 3, 40, 30)).expand(4, -1, -1, -1)
        assert diversity(same[None]).item() == pytest.approx(0, abs=1e-3)
        both = torch.cat([thumbnails(flat(0, 0, 0)), thumbnails(flat(1, 1, 1))])
        assert diversity(both[None]).item() == pytest.approx(1, abs=1e-3), "black and white are a whole step apart"
        assert diversity(both[None, :1]).item() == 0, "one leaf has none"
        order = torch.randperm(6)
        some = torch.rand(2, 6, 3, 16, 16)
        assert torch.allclose(diversity(some), diversity(some[:, order]), atol=1e-5)
