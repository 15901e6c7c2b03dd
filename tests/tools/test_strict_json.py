"""JSON from others is what it is to anyone, or is refused before it takes memory."""

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.tools.hosts import is_loopback
from arborl.tools.strict_json import MAX_DEPTH, MAX_MARKS, _without_escapes, strict_json

texts = st.text(st.sampled_from('a"\\\\[]{},:é🌳\0'), max_size=8)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)


pieces = st.sampled_from([1, 2, 3, 8, 2**20])


@given(anything, st.booleans(), st.sampled_from([None, 1]), pieces)
def test_is_what_it_is_to_anyone(value: Any, ascii_only: bool, indent: int | None, piece: int):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    with patch("arborl.tools.strict_json.PIECE_BYTES", piece):
        assert strict_json(text) == strict_json(bytearray(text)) == value


@given(st.text('\\"ax', max_size=20).map(str.encode), pieces)
def test_quotes_that_end_a_text_are_found_in_pieces_of_any_size(content: bytes, piece: int):
    with patch("arborl.tools.strict_json.PIECE_BYTES", piece):
        found = b"".join(_without_escapes(content))
    assert found == content.replace(rb"\\", b"__").replace(rb"\"", b"__")


@given(st.text('\\"éu0a', max_size=12), pieces)
def test_texts_are_what_they_are_to_anyone(text: str, piece: int):
    """Also with what nobody escapes."""
    body = f'"{text}"'.encode()
    try:
        value = json.loads(body)
    except ValueError:
        with pytest.raises(ValueError), patch("arborl.tools.strict_json.PIECE_BYTES", piece):
            strict_json(body)
    else:
        with patch("arborl.tools.strict_json.PIECE_BYTES", piece):
            assert strict_json(body) == value


@given(st.binary(max_size=40) | texts.map(str.encode), pieces)
def test_anything_else_is_a_value_error(content: bytes, piece: int):
    try:
        with patch("arborl.tools.strict_json.PIECE_BYTES", piece):
            found = strict_json(content)
    except ValueError:
        return
    assert found == json.loads(content)


@pytest.mark.parametrize(("first", "last"), ["[]", ('{"a":', "}")])
def test_depth(first: str, last: str):
    def nested(depth: int) -> bytes:
        return (first * depth + "1" + last * depth).encode()

    assert strict_json(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match="nested too deep"):
            strict_json(nested(depth))
    assert strict_json(json.dumps(first * 1000).encode()) == first * 1000, "brackets in a text are text"


@pytest.mark.parametrize("piece", ["[],", "{},", "1,", '"",', '{"a":1},', "]"])
def test_what_would_be_too_many_objects_is_refused(piece: str):
    with pytest.raises(ValueError, match="too many"):
        strict_json(f"[{piece * MAX_MARKS}0]".encode())
    with pytest.raises(ValueError, match="too much"):
        strict_json(b"[" + b" " * 2**25 + b"]")
    few = f"[{piece.replace(']', '[]]')[:-1]}]" if piece == "]" else f"[{piece * 50_000}0]"
    if piece != "]":
        assert len(strict_json(few.encode())) == 50_001


def test_in_another_encoding_is_refused():
    for encoding in ("utf-16", "utf-32", "utf-16-le"):
        with pytest.raises(ValueError, match="not"):
            strict_json(json.dumps(["[" * 200]).encode(encoding))


def test_whose_machine_a_name_means():
    for host in ("localhost", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"):
        assert is_loopback(host)
    for host in ("", "localhost.example.org", "127.0.0.1.nip.io", "0.0.0.0", "10.0.0.1", "::", "[", "localhost:80"):
        assert not is_loopback(host)
