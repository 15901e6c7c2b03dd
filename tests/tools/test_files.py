"""Files that are there complete or as they were before."""

from pathlib import Path

import pytest

from arborl.tools.files import atomic, write_atomically


class CutError(Exception):
    """Ends a writing early."""


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("before", [None, "as it was"])
def test_what_is_cut_short_leaves_everything_as_it_was(tmp_path: Path, cache: bool, before: str | None):
    path = tmp_path / "some.json"
    if before is not None:
        path.write_text(before)

    def cut_short() -> None:
        with atomic(path, cache) as aside:
            aside.write_text("half of")
            assert (path.read_text() if path.exists() else None) == before, "nobody sees a file that is being written"
            raise CutError

    with pytest.raises(CutError):
        cut_short()
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if before is None else ["some.json"])
    assert before is None or path.read_text() == before


@pytest.mark.parametrize("cache", [False, True])
def test_what_is_finished_takes_its_place(tmp_path: Path, cache: bool):
    path = tmp_path / "some.json"
    path.write_text("as it was")
    with atomic(path, cache) as aside:
        aside.write_text("all of it")
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.json"]
    assert path.read_text() == "all of it"
    write_atomically(path, "ü")
    assert path.read_bytes() == "ü".encode()


def test_a_place_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(OSError), atomic(tmp_path / "none" / "some.json") as aside:
        aside.write_text("all of it")
    assert not list(tmp_path.iterdir())
