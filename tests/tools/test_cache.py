"""Digests of large files: each is read once, and none is believed of a file that may have changed."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from arborl.config import load_config
from arborl.core.errors import InputError
from arborl.tools import cache
from arborl.tools.cache import LARGE, cache_home, file_digest


class TestFileDigest:
    @pytest.fixture(autouse=True)
    def own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("ARBORL_CACHE", str(tmp_path / "cache"))

    @pytest.fixture
    def read(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of files that were read to the end, whatever their age."""
        names: list[str] = []
        digest = hashlib.file_digest

        def counted(file, kind):
            names.append(Path(file.name).name)
            return digest(file, kind)

        monkeypatch.setattr(hashlib, "file_digest", counted)
        monkeypatch.setattr(cache, "SETTLED", -1e9)
        return names

    def large(self, path: Path, fill: bytes = b"a", size: int = LARGE) -> str:
        path.write_bytes(fill * size)
        return hashlib.sha256(fill * size).hexdigest()

    def test_a_large_file_is_read_once(self, tmp_path: Path, read: list[str]):
        digests = {tmp_path / name: self.large(tmp_path / name, name.encode()) for name in "ab"}
        for _ in range(3):
            assert {path: file_digest(path) for path in digests} == digests
        assert read == ["a", "b"]
        (tmp_path / "link").symlink_to(tmp_path / "a")
        assert file_digest(tmp_path / "link") == digests[tmp_path / "a"]
        assert len(read) == 2

    def test_a_file_that_changed_is_read_again(self, tmp_path: Path, read: list[str]):
        path = tmp_path / "a"
        changes = [
            lambda: self.large(path, b"b"),  # in place, the same size
            lambda: self.large(path, b"b", LARGE + 1),
            lambda: (other := tmp_path / "aside", self.large(other, b"c"), other.replace(path))[1],
        ]
        self.large(path)
        os.utime(path, (10**9, 10**9))
        file_digest(path)
        for number, change in enumerate(changes, 2):
            digest = change()
            os.utime(path, (10**9, 10**9))  # its date does not tell
            assert file_digest(path) == digest
            assert len(read) == number

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"null",
            b"[]",
            b"1",
            b"{}",
            b'{"file": 3}',
            b'{"sha256": "x"}',
            b"\xff\xfe",
            b"[" * 10**5,
            b"\0" * 99,
        ],
    )
    def test_a_memory_that_is_damaged_is_made_again(self, content: bytes, tmp_path: Path, read: list[str]):
        digest = self.large(tmp_path / "a")
        file_digest(tmp_path / "a")
        (kept,) = (cache_home() / "digests").iterdir()
        whole = kept.read_bytes()
        kept.write_bytes(content)
        assert file_digest(tmp_path / "a") == digest
        assert len(read) == 2
        assert kept.read_bytes() == whole

    def test_what_is_kept_of_another_file_is_not_believed(self, tmp_path: Path, read: list[str]):
        self.large(tmp_path / "a")
        file_digest(tmp_path / "a")
        (kept,) = (cache_home() / "digests").iterdir()
        for place in range(5):
            entry = json.loads(kept.read_bytes())
            entry["file"][place], entry["sha256"] = "other", "0" * 64
            kept.write_text(json.dumps(entry))
            assert file_digest(tmp_path / "a") != "0" * 64

    def test_a_file_that_was_just_written_is_not_remembered(self, tmp_path: Path):
        """It could change once more within the same tick of the clock."""
        self.large(tmp_path / "a")
        file_digest(tmp_path / "a")
        assert not (cache_home() / "digests").exists()

    def test_a_cache_that_cannot_be_written_does_not_matter(self, tmp_path: Path, read: list[str]):
        (tmp_path / "cache").write_text("a file")
        digest = self.large(tmp_path / "a")
        assert [file_digest(tmp_path / "a"), file_digest(tmp_path / "a")] == [digest, digest]
        assert len(read) == 2


class TestHomes:
    def test_a_user_without_a_home(self, monkeypatch: pytest.MonkeyPatch):
        """As in a container that is given a number for a user."""
        for name in ("HOME", "ARBORL_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it answers then
        with pytest.raises(InputError, match="there is none; try: HOME or ARBORL_CACHE"):
            cache_home()
        monkeypatch.setenv("ARBORL_CACHE", "/somewhere")
        assert cache_home() == Path("/somewhere/arborl")

    @pytest.mark.parametrize("key", ["prompts.cache", "prompts.path", "model.path", "rewards.x.path", "log.dir"])
    def test_a_home_that_is_not_known(self, key: str):
        with pytest.raises(InputError, match=f"^{key}=~nobody-of-that-name/x: begins with a home folder"):
            load_config("tree", [f"{key}='~nobody-of-that-name/x'"])
