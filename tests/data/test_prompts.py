"""Prompt files, and which prompts an epoch sees."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.core.errors import InputError
from arborl.data.prompts import Prompts, load_prompts, prompt_order


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


def test_prompts_without_a_default():
    with pytest.raises(InputError, match="no prompt list"):
        load_prompts("", Prompts([], {}).texts)
