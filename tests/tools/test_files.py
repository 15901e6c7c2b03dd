"""Files that are there complete or as they were before."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from arborl.core.errors import InputError
from arborl.tools.files import (
    MARK,
    MARK_TEXT,
    SCRATCH,
    abandoned,
    append,
    atomic,
    lock,
    remove_abandoned,
    scratch,
    write_atomically,
)


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


@pytest.mark.parametrize("cache", [False, True])
def test_only_a_file_is_replaced_and_what_a_link_leads_to_is_not(tmp_path: Path, cache: bool):
    theirs = tmp_path / "theirs.txt"
    theirs.write_text("theirs")
    path, folder = tmp_path / "some.json", tmp_path / "folder"
    for goal in (theirs, tmp_path / "nothing", tmp_path):
        path.symlink_to(goal)
        for write in (lambda: append(path, "ours"), lambda: lock(path), lambda: save(path, cache)):
            with pytest.raises(OSError):
                write()
        assert path.readlink() == goal
        path.unlink()
    folder.mkdir()
    with pytest.raises(FileExistsError):
        save(folder, cache)
    assert {entry.name for entry in tmp_path.iterdir()} == {"theirs.txt", "folder"}
    assert theirs.read_text() == "theirs"


def save(path: Path, cache: bool) -> None:
    with atomic(path, cache) as aside:
        aside.write_text("ours")


def test_a_link_that_comes_meanwhile_is_not_replaced_either(tmp_path: Path):
    path = tmp_path / "some.json"

    def save_late() -> None:
        with atomic(path) as aside:
            aside.write_text("ours")
            path.symlink_to("theirs.txt")

    with pytest.raises(FileExistsError):
        save_late()
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.json"]


@pytest.mark.parametrize("cache", [False, True])
def test_names_of_files_that_are_being_written_are_nobodys(tmp_path: Path, cache: bool):
    """A link under the name of a temporary file leads to somebody's file: it must not be written through."""
    theirs = tmp_path / "theirs.txt"
    theirs.write_text("theirs")
    for name in (".some.json.tmp", f".some.json.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(theirs)
    save(tmp_path / "some.json", cache)
    assert theirs.read_text() == "theirs"
    assert len(list(tmp_path.glob(".some.json*.tmp"))) == 2


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path):
    child = os.fork()
    if child == 0:
        with scratch(tmp_path) as made:
            (made / "half").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [left.name.startswith(SCRATCH) for left in tmp_path.iterdir()] == [True]
    others = {"no mark": None, "another mark": b"mine\n", "more than the mark": MARK_TEXT + b"mine\n"}
    for name, text in others.items():
        folder = tmp_path / f"{SCRATCH}{name}"
        folder.mkdir()
        (folder / "keep.txt").write_text("theirs")
        if text is not None:
            (folder / MARK).write_bytes(text)
    (tmp_path / f"{SCRATCH}file").write_text("theirs")
    (tmp_path / f"{SCRATCH}link").symlink_to(tmp_path / "elsewhere")
    with scratch(tmp_path) as live:
        (live / "half").write_text("of it")
        remove_abandoned(tmp_path)
        assert (live / "half").read_text() == "of it", "its maker is at work"
    left = {path.name.removeprefix(SCRATCH) for path in tmp_path.iterdir()}
    assert left == {*others, "file", "link"}
    assert all((tmp_path / f"{SCRATCH}{name}" / "keep.txt").read_text() == "theirs" for name in others)


def test_what_another_machine_makes_is_left_alone_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not every shared file system lets it see a lock that is held elsewhere."""
    with scratch(tmp_path) as made:
        shutil.copytree(made, tmp_path / f"{SCRATCH}left")
    mark = tmp_path / f"{SCRATCH}left" / MARK
    monkeypatch.setattr("platform.node", lambda: "another")
    remove_abandoned(tmp_path)
    assert mark.is_file()
    assert abandoned(tmp_path, alone=True) == [mark.parent], "whoever holds a run's lock need not wait"
    os.utime(mark, (time.time() - 90000,) * 2)
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_maker_was_killed_before_its_mark_goes_where_nobody_else_is(tmp_path: Path):
    (tmp_path / f"{SCRATCH}empty").mkdir()
    (tmp_path / f"{SCRATCH}theirs").mkdir()
    (tmp_path / f"{SCRATCH}theirs" / "keep.txt").write_text("theirs")
    remove_abandoned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "its maker may be at work"
    remove_abandoned(tmp_path, alone=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"{SCRATCH}theirs"]


def test_what_is_added_is_there_whole_or_not_at_all(tmp_path: Path):
    resource = pytest.importorskip("resource")
    append(tmp_path / "log", "first\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(OSError, match="large"):
            append(tmp_path / "log", "second, and too long\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append(tmp_path / "log", "thïrd\n")
    assert (tmp_path / "log").read_text(encoding="utf-8") == "first\nthïrd\n"


def test_a_lock_is_held_by_one(tmp_path: Path):
    with lock(tmp_path / "lock"), pytest.raises(InputError, match="another process is writing to it"):
        lock(tmp_path / "lock")
