"""Prompt files, and which prompts an epoch sees."""

import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.core.errors import InputError
from arborl.data.prompts import LEAST_HELD_OUT, PromptLists, Prompts, hold_out, load_prompts, prompt_order

UNREADABLE = {
    "not UTF-8": ("txt", b"a cat\n\xff\xfe\x00"),
    "NULs": ("txt", b"a cat\n\0\0\0"),
    "half a letter": ("jsonl", rb'{"prompt": "a \ud800 cat"}'),
    "half a letter in a column": ("jsonl", rb'{"prompt": "a cat", "n": ["\udfff"]}'),
    "half a letter in a column's name": ("jsonl", rb'{"prompt": "a cat", "\ud800": 1}'),
    "a number of 6,000 digits": ("jsonl", b'{"prompt": "a cat", "n": ' + b"9" * 6000 + b"}"),
    "lists in lists": ("jsonl", b'{"prompt": "a cat", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "lists in lists, not as deep": ("jsonl", b'{"prompt": "a cat", "n": ' + b"[" * 600 + b"]" * 600 + b"}"),
    "a list": ("jsonl", b"[1]"),
    "a number": ("jsonl", b"1"),
    "no prompt": ("jsonl", b'{"text": "a cat"}'),
    "a prompt that is none": ("jsonl", b'{"prompt": ["a cat"]}'),
    "an empty one": ("jsonl", b'{"prompt": " "}'),
    "cut short": ("jsonl", b'{"prompt": "a cat"'),
    "nothing": ("txt", b" \n\n"),
}
TEXT = st.text(st.one_of(st.characters(), st.sampled_from("\ud800\udfff\0\n")), max_size=4)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)


def check_usable(content: bytes, ending: str) -> None:
    """Such a file is prompts that can be written, named and counted, or one line."""
    with TemporaryDirectory() as folder:
        file = Path(folder, f"a.{ending}")
        file.write_bytes(content)
        try:
            prompts = load_prompts(str(file))
        except InputError:
            return
    assert len(prompts) > 0
    assert prompts.digest
    assert all(text.encode() for text in prompts.texts)
    assert json.dumps(prompts.columns, ensure_ascii=False).encode()


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

    @pytest.mark.parametrize("name", UNREADABLE)
    def test_what_cannot_be_read_is_one_line(self, name: str, tmp_path: Path):
        ending, content = UNREADABLE[name]
        file = tmp_path / f"a.{ending}"
        file.write_bytes(content)
        with pytest.raises(InputError) as refused:
            load_prompts(str(file))
        assert str(refused.value).startswith(f"prompts.path={file}: ")
        assert str(refused.value).isprintable()

    def test_what_is_no_file_is_one_line(self, tmp_path: Path):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        for place in (tmp_path, tmp_path / "pipe", tmp_path / "loop", tmp_path / "not there", tmp_path / ("x" * 300)):
            with pytest.raises(InputError, match=f"^prompts.path={re.escape(str(place))[:200]}"):
                load_prompts(str(place))
        with pytest.raises(InputError, match="cannot be read"):
            load_prompts("/proc/self/mem")  # a file as any other, until it is read

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
    def test_what_is_not_ones_own_is_one_line(self, tmp_path: Path):
        folder = tmp_path / "closed"
        folder.mkdir()
        (folder / "a.txt").write_text("one")
        try:
            for closed, mode in ((folder / "a.txt", 0o600), (folder, 0o700)):
                os.seteuid(0)
                for place in (*tmp_path.parents, tmp_path, folder):
                    place.chmod(place.stat().st_mode | 0o055)
                closed.chmod(mode)
                os.seteuid(54321)
                with pytest.raises(InputError, match="Permission denied"):
                    load_prompts(str(folder / "a.txt"))
        finally:
            os.seteuid(0)

    @given(
        content=st.one_of(st.binary(max_size=40), st.text(max_size=40).map(lambda text: text.encode(errors="replace"))),
        ending=st.sampled_from(["txt", "jsonl"]),
    )
    def test_any_bytes_are_prompts_or_one_line(self, content: bytes, ending: str):
        check_usable(content, ending)

    @given(row=st.dictionaries(TEXT, JSON, max_size=3), prompt=st.one_of(TEXT, JSON), plain=st.booleans())
    def test_any_row_is_a_prompt_or_one_line(self, row: dict[str, object], prompt: object, plain: bool):
        line = json.dumps(row | {"prompt": prompt}, ensure_ascii=plain)
        check_usable(line.encode("utf-8", "surrogatepass"), "jsonl")

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
