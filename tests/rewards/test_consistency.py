"""A reward is held to its contract: each picture by its prompt alone, whatever comes with it, however often."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arborl.cli import main
from arborl.rewards.consistency import NOTICEABLE, ROUNDING, TOO_MUCH, examine, unlike

counts = st.integers(3, 9)
seeds = st.integers(0, 10**6)


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestExamine:
    @given(counts, seeds, st.sampled_from([1e-3, 1.0, 100.0]), st.sampled_from([-1.0, 0.0, 22.0]))
    def test_a_score_of_its_own_is_sound_whatever_its_scale(self, count: int, seed: int, scale: float, offset: float):
        scores = scale * (drawn(count, seed) + offset)
        found = examine(lambda index: scores[index], count)
        assert (found.fault, found.error("mine"), found.noise) == (None, None, "")
        assert (found.chance, found.company) == (0, 0)
        assert found.scores.equal(scores)

    @given(counts, seeds, st.sampled_from([0.0, 22.0]))
    def test_rounding_that_changes_with_the_size_of_a_call_is_sound(self, count: int, seed: int, offset: float):
        """As in half precision, whose kernels are chosen by shape."""
        scores = drawn(count, seed) + offset

        def ask(index: list[int]) -> Tensor:
            return (1 + 0.45 * ROUNDING * (-1) ** len(index)) * scores[index]

        assert examine(ask, count).fault is None

    @given(counts, seeds)
    def test_a_score_is_looked_for_once_it_is_there_and_its_lack_is_no_difference(self, count: int, seed: int):
        scores = drawn(count, seed)
        scores[1:] = torch.nan
        assert examine(lambda index: scores[index], count).fault is None
        scores[0] = torch.nan
        assert examine(lambda index: scores[index], count).fault is None

    @given(counts, seeds, st.sampled_from(["mean", "best", "rank", "first", "place", "softmax"]), st.floats(0, 30))
    def test_what_depends_on_the_call_is_found(self, count: int, seed: int, how: str, offset: float):
        scores = offset + torch.arange(count, dtype=torch.float64)[drawn(count, seed).argsort()] + 1

        def ask(index: list[int]) -> Tensor:
            own = scores[index]
            return {
                "mean": own - own.mean(),
                "best": own / own.max(),
                "rank": own.argsort().argsort().double(),
                "first": own - own[0],
                "place": own + 3 * torch.arange(len(own)),
                "softmax": own.softmax(0),
            }[how]

        found = examine(ask, count)
        if how == "best" and float(scores.min() / scores.max()) > 1 - 2 * ROUNDING:
            return  # as small as rounding
        assert found.fault
        assert "in another order, or alone" in found.fault[0]
        assert "nothing else in the call" in found.fault[1]
        assert str(found.error("mine")) == f"rewards.mine: {found.fault[0]}; allowed: {found.fault[1]}"

    @given(counts, seeds, st.sampled_from([0.15, 0.3, 0.45]))
    def test_a_little_company_is_a_warning(self, count: int, seed: int, share: float):
        """As of a network in half precision whose kernels depend on the size of the call."""
        scores = torch.arange(count, dtype=torch.float64)[drawn(count, seed).argsort()] * 1e-3 + 1e-4
        spread = float(scores.std(correction=0))
        found = examine(lambda index: scores[index] + share * spread * (len(index) == 1), count)
        assert found.fault is None
        assert "in another order, or alone" in found.noise
        assert "nothing else in the call" in found.cure

    @given(counts, seeds, st.sampled_from(["alone", "first", "others"]))
    def test_a_score_that_only_some_calls_have_is_found(self, count: int, seed: int, how: str):
        """As of scores that are normalised over the call: a single picture has no deviation."""
        scores = drawn(count, seed)

        def ask(index: list[int]) -> Tensor:
            own = scores[index].clone()
            own[
                {"alone": slice(0 if len(own) == 1 else len(own), None), "first": slice(1, None), "others": slice(1)}[
                    how
                ]
            ] = torch.nan
            return own

        found = examine(ask, count)
        assert found.fault
        assert "in some calls and none in others" in found.fault[0]

    @given(counts)
    def test_what_only_another_order_shows_is_found(self, count: int):
        """Pictures that happen to come sorted, to a reward that sorts."""
        scores = torch.arange(count, dtype=torch.float64)
        assert examine(lambda index: scores[index].sort().values, count).fault

    @given(seeds, st.sampled_from([0.0, 1.0, 22.0]))
    def test_pure_chance_is_found(self, seed: int, offset: float):
        torch.manual_seed(seed)
        found = examine(lambda index: offset + torch.rand(len(index), dtype=torch.float64), 8)
        assert found.fault
        assert "differently each time" in found.fault[0]
        line = str(found.error("mine"))
        assert line.startswith("rewards.mine: the same pictures score up to")
        assert "; allowed: one score for a picture and its prompt; try: its network in eval mode, and what" in line
        assert found.fault[1] == found.cure == line.partition("; allowed: ")[2].replace("; try", "")

    @given(seeds, st.sets(st.integers(0, 7), max_size=7))
    def test_pure_chance_is_found_beside_pictures_without_a_score(self, seed: int, without: set[int]):
        torch.manual_seed(seed)

        def ask(index: list[int]) -> torch.Tensor:
            scores = torch.rand(len(index), dtype=torch.float64)
            return scores.masked_fill(torch.tensor([i in without for i in index]), torch.nan)

        found = examine(ask, 8)
        assert found.least > 0
        assert bool(found.fault) or len(without) > 4, "few draws may be alike"

    def test_no_score_at_all_is_no_chance(self):
        found = examine(lambda index: torch.full((len(index),), torch.nan), 3)
        assert not found.noise
        assert not found.never_twice

    def test_chance_that_shows_late_is_not_taken_for_company(self):
        scores, times = torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64), iter(range(99))
        found = examine(lambda index: scores[index] + 2 * (next(times) == 2), 3)
        assert "differently each time" in found.noise
        assert not found.never_twice

    @pytest.mark.parametrize(("share", "noise", "fault"), [(0.5 * NOTICEABLE, 0, 0), (0.9 * TOO_MUCH, 1, 0), (2, 1, 1)])
    def test_chance_is_held_against_what_pictures_differ_in(self, share: float, noise: bool, fault: bool):
        scores, times = torch.tensor([-1.0, 1.0] * 3, dtype=torch.float64), iter(range(99))
        found = examine(lambda index: scores[index] + share * (next(times) == 1), 6)
        assert found.spread == 1
        assert (bool(found.noise), bool(found.fault)) == (noise, fault)

    def test_few_and_small_calls(self):
        asked: list[int] = []
        examine(lambda index: asked.append(len(index)) or torch.zeros(len(index)), 8)
        assert asked == [8, 8, 8, 1, 1, 1]

    def test_pictures_that_are_alike_are_made_unlike(self):
        made = unlike(torch.full((3, 3, 8, 8), 0.5))
        assert made.flatten(1).mean(1).unique().numel() == 3
        assert 0 <= made.min() <= made.max() <= 1


FAULTY = """
import asyncio, torch

def own(images, prompts, columns): return images.flatten(1).mean(1)
def chance(images, prompts, columns): return torch.rand(len(prompts))
def company(images, prompts, columns): return own(images, prompts, columns) - own(images, prompts, columns).mean()
def normalised(images, prompts, columns):
    scores = own(images, prompts, columns)
    return (scores - scores.mean()) / scores.std()
def first(images, prompts, columns): return own(images, prompts, columns) + len(prompts[0])
def ended(images, prompts, columns): raise SystemExit(0)
def cancelled(images, prompts, columns): raise asyncio.CancelledError
class SilentError(Exception):
    def __str__(self): raise RuntimeError("no words")
def silent(images, prompts, columns): raise SilentError
def twice(images, prompts, columns): return {1: own(images, prompts, columns), "1": own(images, prompts, columns)}
def huge(images, prompts, columns): return 1e39 * own(images, prompts, columns).double()
def surrogate(images, prompts, columns): return {"\\ud800": own(images, prompts, columns)}
def markup(images, prompts, columns): return {"[/red]": own(images, prompts, columns)}
def overflowing(images, prompts, columns):
    return {name: torch.full((len(prompts),), 3e38) for name in ("one", "other")}
def inside(images, prompts, columns): return 1e15 * own(images, prompts, columns)

def little(images, prompts, columns):
    return own(images, prompts, columns) + 0.05 * (len(prompts) > 1) * own(images, prompts, columns).amax()

calls = 0
def judge(images, prompts, columns):
    "It scores 3, and once 4."
    global calls
    calls += 1
    return torch.tensor([3.0 + (calls == 2 and i == 0) for i in range(len(prompts))])

lucky = False
def later(images, prompts, columns):
    return own(images, prompts, columns) + (torch.rand(len(prompts)) if lucky else 0)

cache = {}
def cached(images, prompts, columns):
    "It is slow at first, and says the same."
    keys = [hash(image.numpy().tobytes()) for image in images]
    return torch.tensor([cache.setdefault(key, float(image.mean())) for key, image in zip(keys, images)])
"""
REFUSED = {
    "chance": "the same pictures score up to",
    "company": "the same pictures in another order, or alone, score up to",
    "first": "the same pictures in another order, or alone, score up to",
    "normalised": "the same pictures have a score in some calls and none in others",
    "ended": "SystemExit: 0, at faulty.py:11",
    "cancelled": "CancelledError, at faulty.py:12",
    "twice": "returned two parts of one name",
    "huge": "returned a score too large to count with for mine",
    "overflowing": "returned a score too large to count with for mine/one",
    "surrogate": r"rewards.mine.fn=\ud800: cannot be the name of a part",
    "markup": "rewards.mine.fn=[/red]: cannot be the name of a part",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "ending.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("faulty", None)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


TRAIN = ["train", "-c", "mixture", "train.epochs=1", "sample.num_prompts=2", "eval.num_prompts=2", "log.trackers=[]"]
TRAIN += ["log.record_every=0", "rewards=none"]


@pytest.mark.parametrize("function", REFUSED)
def test_what_is_wrong_is_one_line_in_the_check_and_before_a_run(here: Path, capsys, function: str):
    text = refused(capsys, "rewards", "check", f"faulty:{function}")
    assert REFUSED[function].replace("mine", function) in text
    text = refused(capsys, *TRAIN, f"rewards.mine.fn=faulty:{function}")
    assert text.startswith("error: rewards.mine")
    assert REFUSED[function] in text
    assert not (here / "runs").exists()


@pytest.mark.parametrize("function", ["own", "cached", "inside"])
def test_what_is_sound_passes_both(here: Path, capsys, function: str):
    for words in (["rewards", "check", f"faulty:{function}"], [*TRAIN, f"rewards.mine.fn=faulty:{function}"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        said = capsys.readouterr().err
        assert "differently" not in said
        assert "inf" not in said


def test_every_reward_is_asked(here: Path, capsys):
    text = refused(capsys, *TRAIN, "rewards.a.fn=faulty:own", "rewards.b.fn=faulty:chance", "rewards.b.weight=0.1")
    assert text.startswith("error: rewards.b: the same pictures")


def test_a_little_company_is_said_in_the_check_and_before_a_run(here: Path, capsys):
    for words in (["rewards", "check", "faulty:little"], [*TRAIN, "rewards.little.fn=faulty:little"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        said = capsys.readouterr().err
        assert stopped.value.code == 0, said
        assert "warning:" in said
        assert "in another order, or alone, score up to" in said


def test_a_judge_that_is_sometimes_of_another_mind_is_warned_of(here: Path, capsys):
    """Pictures of noise are all alike to it, so how much its changes matter is not known yet."""
    with pytest.raises(SystemExit) as stopped:
        main([*TRAIN, "run_name=x", "rewards.mine.fn=faulty:judge"])
    said = capsys.readouterr().err
    assert stopped.value.code == 0, said
    assert "warning: rewards.mine: the same pictures score up to 1 differently each time" in said


def test_a_run_that_goes_on_is_not_ended_by_chance(here: Path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*TRAIN, "run_name=x", "rewards.mine.fn=faulty:later"])
    assert stopped.value.code == 0
    sys.modules["faulty"].lucky = True
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--resume", "runs/x", "train.epochs=2"])
    said = capsys.readouterr().err
    assert stopped.value.code == 0, said
    assert "warning: rewards.mine: the same pictures score up to" in said


def test_a_file_that_ends_python_ends_no_run_quietly(here: Path, capsys):
    text = refused(capsys, *TRAIN, "rewards.mine.fn=ending:score")
    assert text == "error: rewards.mine.fn=ending:score: ending ends Python when it is imported (SystemExit: 0)"


def test_a_check_that_fails_has_told_the_score_too(here: Path):
    command = [sys.executable, "-m", "arborl", "rewards", "check", "faulty:company", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here)
    assert (done.returncode, json.loads(done.stdout)["scores"]) == (2, {"company": 0.0})
    assert done.stderr.startswith("error: rewards.company: the same pictures in another order, or alone")
