"""Prompt files, and which prompts an epoch sees."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.core.errors import InputError
from arborl.data.prompts import LEAST_HELD_OUT, PromptLists, Prompts, hold_out, load_prompts, prompt_order


class TestPrompts:
    def test_lines_and_rows(self, tmp_path: Path):
        (tmp_path / "a.txt").write_text("one\n\n  two  \n")
        assert load_prompts(str(tmp_path / "a.txt")).texts == ["one", "two"]
        (tmp_path / "a.jsonl").write_text('{"prompt": "one", "n": 1}\n{"prompt": "two"}\n')
        rows = load_prompts(str(tmp_path / "a.jsonl"))
        assert rows.columns == {"n": [1, None]}
        assert rows.repeat(2).texts == ["one", "one", "two", "two"]
        assert rows.take([1, 0, 1]).columns["n"] == [None, 1, None]

    def test_not_text(self, tmp_path: Path):
        (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InputError, match="not UTF-8"):
            load_prompts(str(tmp_path / "a.txt"))

    @given(total=st.integers(1, 40), per_epoch=st.integers(1, 30), seed=st.integers(0, 9))
    def test_every_pass_sees_every_prompt_once_whatever_the_batch(self, total: int, per_epoch: int, seed: int):
        epochs = -(-2 * total // per_epoch)
        seen = [i for epoch in range(epochs) for i in prompt_order(total, epoch * per_epoch, per_epoch, seed)]
        assert sorted(seen[:total]) == sorted(seen[total : 2 * total]) == list(range(total))
        one_by_one = [prompt_order(total, i, 1, seed)[0] for i in range(len(seen))]
        assert seen == one_by_one, "where an epoch ends must not change the order"

    def test_passes_and_seeds_differ(self):
        assert prompt_order(50, 0, 50, 0) != prompt_order(50, 50, 50, 0)
        assert prompt_order(50, 0, 50, 0) != prompt_order(50, 0, 50, 1)


class TestHeldOut:
    @given(
        texts=st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=300),
        more=st.lists(st.text(max_size=4), max_size=100),
        share=st.floats(0, 0.5),
    )
    def test_a_prompt_is_on_one_side_whatever_else_is_in_the_file(
        self, texts: list[str], more: list[str], share: float
    ):
        lists = hold_out(Prompts(texts, {"row": list(range(len(texts)))}), share)
        if lists.trained_on:  # too small to be split
            assert lists.training.texts == lists.evaluation.texts == texts
            return
        assert len(set(lists.evaluation.texts)) >= LEAST_HELD_OUT
        assert sorted(lists.training.columns["row"] + lists.evaluation.columns["row"]) == list(range(len(texts)))
        assert not set(lists.training.texts) & set(lists.evaluation.texts)
        turned = hold_out(Prompts([*more, *reversed(texts)], {}), share)
        assert set(lists.evaluation.texts) <= set(turned.evaluation.texts)
        assert not set(lists.training.texts) & set(turned.evaluation.texts)

    def test_the_share_is_about_what_is_asked_for(self):
        lists = hold_out(Prompts([f"prompt {i}" for i in range(20_000)], {}), 0.05)
        assert 900 < len(lists.evaluation) < 1100
        assert lists.evaluated_on == "held-out prompts"

    def test_what_it_is_called(self):
        some, other = Prompts(["a", "b"], {}), Prompts(["c"], {})
        assert PromptLists(some, some).evaluated_on == "training prompts"
        assert PromptLists(some, other).evaluated_on == "held-out prompts"
        mixed = PromptLists(some, Prompts(["b", "c"], {}))
        assert (mixed.trained_on, mixed.evaluated_on) == (1, "prompts of which some are trained on")


def test_prompts_without_a_default():
    with pytest.raises(InputError, match="no prompt list"):
        load_prompts("", Prompts([], {}).texts)
