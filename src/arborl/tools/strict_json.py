"""JSON from others: held to the standard, and to a size as Python objects before there are any."""

import codecs
import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

MAX_MARKS, MAX_TEXTS, MAX_DEPTH = 2**19, 2**19, 100
"""Brackets, commas and colons, of which each may become an object of a hundred bytes; strings; brackets in brackets."""
MAX_WIDE = 2**20
"""Bytes of a string that is not plain ASCII: as Python's it takes up to four times as much."""
MAX_HIGH = 2**19
"""Bytes that are not ASCII: each text with some of them is written anew."""
MAX_OUTSIDE = 2**24
"""Bytes outside strings."""
PIECE_BYTES = 2**20
"""What is looked over at a time."""
OTHERS = re.compile(rb'[\x80-\xff][^"\\]*+(?:\\.[^"\\]*+)*+')
"""What is not ASCII, and the rest of its text."""
NO_ESCAPE = re.compile(rb"\\[\x80-\xff]")
"""A backslash before what nobody escapes."""
_HIGH = bytes(range(128, 256))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def strict_json(content: bytes | bytearray) -> Any:
    """JSON without what Python adds to it, without names that come twice, and not too much of it; else `ValueError`."""
    _check_size(content)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name comes twice")
        return dict(pairs)

    def no_constant(text: str) -> None:
        raise ValueError(f"{text} is no number")

    try:
        # Decoded here: `loads` would take UTF-16 too, where quotes and brackets are not the bytes that were looked at.
        text = _escaped(content).decode("ascii")
        return json.loads(text, object_pairs_hook=once, parse_constant=no_constant)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError:
        raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _escaped(content: bytes | bytearray) -> bytes | bytearray:
    """The same with \\u in place of what is not ASCII, of which one character would have Python hold all of them in two
    or four bytes each.
    """
    if content.isascii():
        return content
    return OTHERS.sub(_in_ascii, content.removeprefix(codecs.BOM_UTF8))


def _in_ascii(rest_of_text: re.Match[bytes]) -> bytes:
    return json.dumps(json.loads(b'"' + rest_of_text[0] + b'"'))[1:-1].encode()


def _check_size(content: bytes | bytearray) -> None:
    """Look at what is outside the strings, by searches alone: less than a tenth of the time that parsing takes."""
    outside, quotes, high, inside, length, plain = bytearray(), 0, 0, False, 0, True
    for piece in _without_escapes(content):
        quotes += piece.count(b'"')
        if quotes > 2 * MAX_TEXTS:
            raise ValueError("too many texts")
        high += len(piece) - len(piece.translate(None, _HIGH))
        if high > MAX_HIGH:
            raise ValueError("too much besides ASCII")
        if NO_ESCAPE.search(piece):
            raise ValueError("not JSON")
        for place, part in enumerate(piece.split(b'"')):
            if place:  # a quote stood before it
                inside, length, plain = not inside, 0, True
            if inside:
                length, plain = length + len(part), plain and part.isascii() and b"\\u" not in part
            else:
                outside += part
            if not plain and length > MAX_WIDE:
                raise ValueError("a text too long for what is in it")
            if len(outside) > MAX_OUTSIDE:
                raise ValueError("too much besides texts")
    if inside or not outside.removeprefix(codecs.BOM_UTF8).isascii():
        raise ValueError("not JSON")
    if sum(outside.count(mark) for mark in (b"[", b"]", b"{", b"}", b",", b":")) > MAX_MARKS:
        raise ValueError("too many values")
    brackets = outside.translate(None, _NO_BRACKETS)
    if max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0) > MAX_DEPTH:
        raise ValueError("nested too deep")


def _without_escapes(content: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """The same in pieces, for a copy of all of it is much, with other letters for escaped backslashes and then for
    escaped quotes: each quote that is left begins or ends a string.
    """
    lone = b""
    for start in range(0, len(content), PIECE_BYTES):
        piece = (lone + content[start : start + PIECE_BYTES]).replace(rb"\\", b"__")
        lone = b"\\" if piece.endswith(b"\\") else b""  # what it escapes is in the next piece
        yield piece.removesuffix(lone).replace(rb"\"", b"__")
    yield lone
