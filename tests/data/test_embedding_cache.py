"""Encoded prompts on disk: what is kept is what was encoded, what is damaged is encoded again, nothing twice."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arborl.cli import main
from arborl.config import load_config
from arborl.core.errors import InputError
from arborl.data.embedding_cache import Embeddings, Request, cache_folder, fingerprint
from arborl.data.prompts import Prompts, prompt_order
from arborl.engine.precompute import prompts_of_a_run
from arborl.trainer import train

from conftest import tiny_overrides
from launching import ranks


class Encoder:
    """Counts what it is asked."""

    def __init__(self, fail_at: int = -1) -> None:
        self.asked: list[str] = []
        self.opened, self.fail_at = 0, fail_at

    @contextmanager
    def __call__(self) -> Iterator[object]:
        self.opened += 1
        yield self.encode

    def encode(self, requests: Sequence[Request]) -> list[dict[str, Tensor]]:
        texts = [request.text for request in requests]
        if len(self.asked) == self.fail_at:
            raise KeyboardInterrupt
        self.asked += texts
        seeds = [torch.Generator().manual_seed(sum(text.encode()) + len(text)) for text in texts]
        long = torch.stack([torch.randn(3, 4, generator=seed) for seed in seeds])
        return [{"text": row.to(torch.bfloat16), "pooled": row[0]} for row in long]


def kept(folder: Path, encoder: Encoder | None = None, **settings: str | int) -> Embeddings:
    return Embeddings(folder, {"encoders": "x", **settings}, encoder or Encoder())


def texts_of(requests: Sequence[Request]) -> list[str]:
    return [request.text for request in requests]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@settings(max_examples=30)
@given(texts=st.lists(st.text(), min_size=1, max_size=5))
def test_what_is_loaded_is_what_was_encoded(texts: list[str], tmp_path_factory: pytest.TempPathFactory):
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    folder, encoder = tmp_path_factory.mktemp("cache"), Encoder()
    first = kept(folder, encoder).get(texts)
    rows = Encoder().encode([Request(text) for text in texts])
    assert equal(first, {name: torch.stack([row[name] for row in rows]) for name in rows[0]})
    assert equal(kept(folder, encoder).get(texts), first)
    assert sorted(encoder.asked) == sorted(set(texts))  # each once, whatever was asked


@given(a=st.tuples(st.text(), st.integers()), b=st.tuples(st.text(), st.integers()))
def test_another_text_or_setting_is_another_file(a: tuple[str, int], b: tuple[str, int]):
    clean = [(text.encode("utf-8", "replace").decode(), tokens) for text, tokens in (a, b)]
    paths = [kept(Path("x"), max_sequence_length=tokens).path(text) for text, tokens in clean]
    assert (paths[0] == paths[1]) == (clean[0] == clean[1])


DAMAGE = {
    "cut short": lambda data: data[:-3],
    "empty": lambda data: b"",
    "a byte of the tensors": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "the digest": lambda data: re.sub(rb'"digest":"..', rb'"digest":"xx', data),
    "the text": lambda data: data.replace(b"a dog", b"a fog"),
    "something else": lambda data: b"not safetensors",
    "longer": lambda data: data + b"x",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_rebuilt_not_trusted(how: str, tmp_path: Path):
    encoder = Encoder()
    cache = kept(tmp_path, encoder)
    first = cache.get(["a cat", "a dog"])
    path = cache.path("a dog")
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    assert texts_of(cache.missing(["a cat", "a dog"])) == ["a dog"]
    assert equal(cache.get(["a cat", "a dog"]), first)
    assert encoder.asked == ["a cat", "a dog", "a dog"]
    assert equal(cache.get(["a dog", "a cat"]), {name: tensor[[1, 0]] for name, tensor in first.items()})
    assert encoder.asked == ["a cat", "a dog", "a dog"]


def test_any_flipped_byte_is_noticed(tmp_path: Path):
    """Every byte in turn: an entry gives its own tensors, or none."""
    cache = kept(tmp_path)
    first = cache.get(["a cat"])
    path = cache.path("a cat")
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        found = cache._load("a cat")
        assert found is None or equal({name: t[None] for name, t in found.items()}, first), position


def test_an_entry_in_anothers_place_is_not_taken_for_it(tmp_path: Path):
    encoder = Encoder()
    cache = kept(tmp_path, encoder)
    first = cache.get(["a cat", "a dog"])
    cache.path("a dog").write_bytes(cache.path("a cat").read_bytes())
    assert equal(cache.get(["a cat", "a dog"]), first)
    assert encoder.asked[2:] == ["a dog"]


def test_a_long_list_is_not_read_to_the_end_to_go_on(tmp_path: Path):
    cache = kept(tmp_path)
    cache.get(["a cat", "a dog", "red house"])
    path = cache.path("a dog")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    cache.path("red house").write_bytes(path.read_bytes()[:-1])
    assert texts_of(cache.missing(["a cat", "a dog", "red house"], verify=False)) == ["red house"]


def test_an_interrupted_fill_goes_on_where_it_stopped(tmp_path: Path):
    texts = [f"prompt {i}" for i in range(10)]
    encoder = Encoder(fail_at=6)
    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path, encoder).fill(texts, 2)
    cache = kept(tmp_path, again := Encoder())
    assert texts_of(cache.missing(texts)) == texts[6:]
    cache.fill(cache.missing(texts), 2)
    assert again.asked == texts[6:]
    assert not cache.missing(texts)
    assert again.opened == 1
    cache.fill([], 2)
    assert again.opened == 1  # nothing to encode, nothing loaded


def test_texts_that_are_always_needed_are_among_the_missing(tmp_path: Path):
    cache = Embeddings(tmp_path, {}, Encoder(), always=[""])
    assert texts_of(cache.missing(["a", "b", "a"])) == ["", "a", "b"]


def test_a_fingerprint_is_of_names_and_contents(tmp_path: Path):
    small, large = tmp_path / "config.json", tmp_path / "model.safetensors"
    small.write_text("{}")
    large.write_bytes(os.urandom(2**21))
    before = fingerprint([small, large], tmp_path)
    assert fingerprint([large, small], tmp_path) == before
    small.write_text("{ }")
    assert fingerprint([small, large], tmp_path) != before
    small.write_text("{}")
    assert fingerprint([small, large], tmp_path) == before
    small.rename(tmp_path / "other.json")
    assert fingerprint([tmp_path / "other.json", large], tmp_path) != before


@pytest.mark.parametrize("size", [2**10, 2**24])
def test_a_byte_anywhere_is_another_file(size: int, tmp_path: Path):
    """Such as in a download that was damaged, and then mended, in a file of the same size and date."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    os.utime(file, (10**9, 10**9))
    seen = {fingerprint([file], tmp_path)}
    for place in (0, size // 3 + 1, size // 2 + 70, size - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"x")
        os.utime(file, (10**9, 10**9))
        seen.add(fingerprint([file], tmp_path))
    assert len(seen) == 5


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert cache_folder("here/it") == Path("here/it")
    assert cache_folder("auto") == Path(os.environ["ARBORL_CACHE"]) / "arborl" / "embeddings"
    monkeypatch.delenv("ARBORL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "arborl" / "embeddings"


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"prompts.cache=.*cannot be written"):
        kept(tmp_path / "file").get(["a"])


def test_a_run_asks_for_what_its_epochs_and_evaluations_see():
    config = load_config("mixture", ["eval.num_prompts=2"])
    prompts, held_out = Prompts([f"p{i}" for i in range(50)], {}), Prompts(["e0", "e1", "e2"], {})
    for start, count in ((0, 12), (44, 12), (7, 50), (7, 99)):
        seen = {f"p{i}" for place in range(start, start + count) for i in prompt_order(50, place, 1, config.seed)}
        assert set(prompts_of_a_run(config, prompts, held_out, start, count).texts) == seen | {"e0", "e1"}
    assert set(prompts_of_a_run(config, prompts, held_out, 7, 10**12).texts) == {*prompts.texts, "e0", "e1"}


class TestCommand:
    """`arborl embed`."""

    def run(self, *arguments: str) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["embed", *arguments])
        assert stopped.value.code == 0

    def test_a_file_is_encoded_once_and_then_training_needs_no_text_encoder(
        self, tiny_folder, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
    ):
        file = tmp_path / "prompts.txt"
        file.write_text("a cat\na dog\nred house\n")
        overrides = [*tiny_overrides("sd3", tiny_folder("sd3")), f"prompts.cache={tmp_path / 'cache'}"]
        overrides += ["prompts.batch_size=2", "sample.guidance_scale=3"]
        self.run(str(file), *overrides)
        assert "4 prompt(s) encoded" in capsys.readouterr().out  # and the negative one
        self.run(str(file), *overrides)
        assert "none to encode, 4 kept from before" in capsys.readouterr().out

        def never(*_: object) -> object:
            raise AssertionError("a text encoder was loaded")

        monkeypatch.setattr("arborl.models.pipeline._text_encoders", never)
        train(load_config("tree", [*overrides, f"prompts.path={file}", f"log.dir={tmp_path}", "train.epochs=1"]))

    def test_two_processes_share_the_work(self, tiny_folder, tmp_path: Path):
        file = tmp_path / "prompts.txt"
        file.write_text("\n".join(f"a cat {'a ' * i}" for i in range(5)))
        overrides = [*tiny_overrides("sd", tiny_folder("sd")), f"prompts.cache={tmp_path / 'cache'}"]
        both = ranks(2, "embed", str(file), *overrides, cwd=tmp_path)
        assert [one.code for one in both] == [0, 0], both
        assert ["prompt(s) encoded" in one.said for one in both] == [True, False]
        assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 6
        assert not list((tmp_path / "cache").rglob("*.tmp"))

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["nowhere.txt", "model=sd3"], ["PROMPTS=nowhere.txt", "no such file"]),
            (["{file}"], ["prompts.cache=none", "on the spot"]),
            (["{file}", "model=sd3", "model.path=some/model"], ["model.path=some/model", "hf download"]),
        ],
    )
    def test_bad_input_is_one_line(self, arguments: list[str], words: list[str], tmp_path: Path, capsys):
        (tmp_path / "p.txt").write_text("a cat")
        with pytest.raises(SystemExit) as stopped:
            main(["embed", *(a.format(file=tmp_path / "p.txt") for a in arguments)])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert all(word in line for word in words), line
