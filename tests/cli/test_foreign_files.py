"""No command removes or overwrites a file that it did not make, wherever it lies and whatever it is.

Every place that a command writes to is taken by somebody else's files, folders and links, under the names that the
command would write and under those that it might use meanwhile. Afterwards they are what they were.
"""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from arborl.cli import main
from arborl.config import load_config
from arborl.core.errors import InputError
from arborl.run.checkpoint import save_checkpoint
from arborl.run.folder import claim_folder
from arborl.run.resume import load_for_inference
from arborl.tools.files import MARK, MARK_TEXT, SCRATCH, lock, scratch

from conftest import tiny_overrides
from launching import Fork, contents

KINDS = ("file", "folder", "link", "link to a folder", "dangling link")
LINKS = KINDS[2:]
SMALL = ("sample.num_prompts=2", "eval.num_prompts=2", "eval.every=1", "log.trackers=[]", "train.ema_decay=0.5")


class Foreign:
    """What somebody else made: each has a place of its own, and what its links lead to lies elsewhere."""

    def __init__(self, elsewhere: Path) -> None:
        self.elsewhere, self.places = elsewhere, [elsewhere]
        (elsewhere / "folder").mkdir(parents=True)
        (elsewhere / "folder" / "keep.txt").write_text("theirs")
        (elsewhere / "some.txt").write_text("theirs too")

    def put(self, place: Path, kind: str = "file") -> Path:
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file":
            place.write_text(f"my own {place.name}")
        elif kind == "folder":
            place.mkdir()
            (place / "keep.txt").write_text("mine")
        else:
            goal = {"link": "some.txt", "link to a folder": "folder", "dangling link": "nothing"}[kind]
            place.symlink_to(self.elsewhere / goal)
        self.places.append(place)
        return place

    def seen(self) -> dict[str, tuple[int, str]]:
        """Everything there is of it: which file it is, and its contents or where it leads."""
        found = {}
        for place in self.places:
            for path in [place, *([] if place.is_symlink() else sorted(place.rglob("*")))]:
                if path.is_symlink():
                    what = f"to {path.readlink()}"
                else:
                    what = path.read_text(errors="replace") if path.is_file() else f"exists: {path.is_dir()}"
                found[str(path)] = (path.lstat().st_ino if path.is_symlink() or path.exists() else 0, what)
        return found

    @contextmanager
    def untouched(self, what: object) -> Iterator[None]:
        before = self.seen()
        yield
        after = self.seen()
        assert {path for path in before | after if before.get(path) != after.get(path)} == set(), what

    def clear(self) -> None:
        """Take the places free again."""
        for place in self.places[1:]:
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        self.places = self.places[:1]


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Foreign:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ARBORL_CACHE", str(tmp_path / "cache"))
    return Foreign(tmp_path / "elsewhere")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, with trees."""
    folder = tmp_path_factory.mktemp("finished")
    small = (*SMALL, "train.epochs=2", "log.save_every=1", "train.learning_rate=1e-3")
    assert ended("train", "-c", "mixture", *small, f"log.dir={folder}", "run_name=x") == 0
    return folder / "x"


def ended(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in arguments])
    return int(stopped.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
    """One clear line, and exit code 2."""
    capsys.readouterr()
    assert ended(*arguments) == 2, arguments
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("error: ")] == said[-1:], (arguments, said)


def taken_one_at_a_time(foreign: Foreign, places: list[Path], kinds: tuple[str, ...], refuse: Callable[[], None]):
    """Each place by each kind, and whoever meets it there says so."""
    for place in places:
        for kind in kinds:
            foreign.put(place, kind)
            with foreign.untouched((place, kind)):
                refuse()
            foreign.clear()


def sprinkle(foreign: Foreign, folder: Path, *names: str) -> None:
    """Files that only look as if they were ours: temporary ones, and what the run's own names begin with."""
    kinds = cycle(KINDS)
    hidden = (".new-run", ".report.html.tmp", ".config.yaml.tmp", ".summary.json.tmp", ".epoch_000001.png.tmp")
    for name in (*hidden, ".out.tmp", f"{SCRATCH}0", f"{SCRATCH}1", f"{SCRATCH}2", f"{SCRATCH}3", "notes.txt", *names):
        foreign.put(folder / name, next(kinds))
    other = foreign.put(folder / f"{SCRATCH}other", "folder")
    (other / MARK).write_text("another's mark\n")
    linked = foreign.put(folder / f"{SCRATCH}linked", "folder")
    (linked / MARK).symlink_to(foreign.elsewhere / "some.txt")


def abandoned(folder: Path) -> Path:
    """What a process that was killed leaves behind."""
    left = folder / f"{SCRATCH}left"
    (left / "half").mkdir(parents=True)
    (left / "half" / "weights").write_text("half of")
    (left / MARK).write_bytes(MARK_TEXT)
    return left


def test_a_run_and_those_who_read_it_leave_alone_what_is_not_theirs(foreign: Foreign, finished: Path, capsys):
    runs, run = Path("runs"), Path("runs/x")
    shutil.copytree(finished, run)
    begun = ("epoch_000001_mine.png", "epoch_000001.png.bak", "epoch_000002 (copy).json", ".epoch_000001.json")
    sprinkle(foreign, runs, "tree-1", "flat-1")
    sprinkle(foreign, run)
    sprinkle(foreign, run / "trees", *begun)
    sprinkle(foreign, run / "samples", *begun)
    partial = (".epoch_000003.tmp", ".epoch_000001.old", ".best.tmp", "epoch_0001", "damaged_epoch_000002", ".best.old")
    sprinkle(foreign, run / "checkpoints", "epoch_000001_mine", *partial)
    shutil.rmtree(run / "checkpoints" / "epoch_000001")
    foreign.put(run / "checkpoints" / "epoch_000001", "folder")
    left = [abandoned(folder) for folder in (runs, run, run / "trees", run / "samples", run / "checkpoints")]
    sprinkle(foreign, Path("pages"))
    sprinkle(foreign, Path("pictures"), "00002.png", "0.png", "mine.png")
    sprinkle(foreign, Path("own cache"))
    small = ("-c", "mixture", *SMALL, "train.epochs=1")
    with scratch(runs) as live, scratch(run / "checkpoints") as too:
        for working in (live, too):
            foreign.places.append(foreign.put(working / "half of it"))
        for command in (
            ("train", *small),
            ("train", *small, "tree.plan=flat"),
            ("train", "--resume", run, "train.epochs=4", "log.keep=1"),
            ("report", run),
            ("report", run),
            ("report", run, "--out", "pages/x.html"),
            ("report", run, "--out", "pages/x.html"),
            ("sample", "--run", run, "-n", 2, "--out", "pictures"),
            ("sample", "--run", run, "-n", 1, "--out", "pictures"),
            ("sample", "--run", run, "-n", 2, "--out", "pictures"),
            ("eval", "--run", run, "eval.num_prompts=2"),
            ("plan", "-c", "mixture"),
            ("rewards",),
            ("completion", "bash"),
            ("doctor", "-c", "mixture", *SMALL, "--canary", 1),
        ):
            with foreign.untouched(command):
                assert ended(*command) in (0, 1 if command[0] == "doctor" else 0), capsys.readouterr().err
    assert {path.name for path in runs.glob("[a-z]*-2")} == {"tree-2", "flat-2"}
    assert {path.name for path in (run / "checkpoints").glob("epoch_00000[1-8]")} == {"epoch_000001", "epoch_000004"}
    assert not any(path.exists() for path in left), "what was abandoned goes"
    rows = [json.loads(line) for line in Path("pictures/index.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == ["00000.png", "00001.png"]


def test_a_run_that_begins_takes_nobodys_place(foreign: Foreign, capsys):
    small = ("train", "-c", "mixture", *SMALL, "train.epochs=1")
    taken_one_at_a_time(foreign, [Path("runs/x")], KINDS, lambda: refused(capsys, *small, "run_name=x"))
    Path("runs/x").mkdir()
    refused(capsys, *small, "run_name=x")
    with pytest.raises(InputError, match="runs/x exists"):  # it may have come while the model was loaded
        claim_folder(load_config("mixture", ["run_name=x"]))
    assert not list(Path("runs/x").iterdir())
    shutil.rmtree("runs")
    taken_one_at_a_time(foreign, [Path("runs")], ("file", "link", "dangling link"), lambda: refused(capsys, *small))


def test_a_run_that_goes_on_writes_through_no_link_and_into_no_folder_of_others(
    foreign: Foreign, finished: Path, capsys
):
    run, kinds = Path("runs/x"), cycle(KINDS[1:])
    names = ("metrics.jsonl", "evaluations.jsonl", "summary.json", "report.html", ".lock", ".lock")
    for name in (
        *names,
        "trees/epoch_000002.png",
        "trees/epoch_000003.json",
        "samples/epoch_000003.png",
        "samples/before_after.png",
    ):
        shutil.copytree(finished, run)
        (run / name).unlink(missing_ok=True)
        foreign.put(run / name, next(kinds))
        before = contents(run)
        with foreign.untouched(name):
            refused(capsys, "train", "--resume", run, "train.epochs=4")
        assert contents(run) == before, "it is as finished as it was"
        foreign.clear()
        shutil.rmtree(run)
    for name in ("trees", "samples", "checkpoints"):  # another run's, whose lock would not be asked
        shutil.copytree(finished, run)
        shutil.copytree(finished, "runs/other")
        (run / name).rename(run / f"own {name}")
        (run / name).symlink_to(Path("runs/other", name).resolve())
        before = contents(Path("runs"))
        refused(capsys, "train", "--resume", run, "train.epochs=4", "log.keep=1")
        assert contents(Path("runs")) == before
        shutil.rmtree("runs")
    for name, kind in (("epoch_000003", "file"), ("epoch_000003", "folder"), ("best", "link"), ("best", "folder")):
        shutil.copytree(finished, run)
        shutil.rmtree(run / "checkpoints" / name, ignore_errors=True)
        foreign.put(run / "checkpoints" / name, kind)
        before = contents(run)
        with foreign.untouched(name):
            refused(capsys, "train", "--resume", run, "train.epochs=4", "log.save_every=1")
        assert contents(run) == before, "it is as finished as it was"
        foreign.clear()
        shutil.rmtree(run)
    shutil.copytree(finished, run)
    (run / "report.html").write_text("my own page")
    foreign.places.append(run / "report.html")
    with foreign.untouched("a page of one's own"):
        assert ended("train", "--resume", run, "train.epochs=3") == 0
    assert "no report was written" in capsys.readouterr().err


def test_a_file_in_a_checkpoint_keeps_it(finished: Path, tmp_path: Path):
    """One that is not needed any more stays, and a sound one is gone on from; a damaged one is put aside with the file,
    whatever was put there before.
    """
    run = tmp_path / "x"
    kept = shutil.copytree(finished, run) / "checkpoints"
    texts: list[str] = []

    def go_on(until: int, *noted: str) -> set[str]:
        for name in noted:
            texts.append(f"{name}, until {until}")
            (kept / name / "notes.txt").write_text(texts[-1])
        assert ended("train", "--resume", run, f"train.epochs={until}", "log.save_every=1", "log.keep=2") == 0
        assert sorted(path.read_text() for path in kept.rglob("notes.txt")) == sorted(texts)
        return {path.name for path in kept.glob("*epoch*")}

    assert go_on(4, "epoch_000002", "best") == {"epoch_000002", "epoch_000003", "epoch_000004"}
    assert go_on(6, "epoch_000003") == {"epoch_000002", "epoch_000003", "epoch_000005", "epoch_000006"}
    (kept / "epoch_000002").rename(kept / "damaged_epoch_000006")
    (kept / "epoch_000006" / "weights.safetensors").write_bytes(b"damaged")
    assert {"damaged_epoch_000006", "damaged_epoch_000006-1"} < go_on(7, "epoch_000006")


@pytest.mark.parametrize("kind", ["file", "folder", "link", "checkpoint"])
def test_what_comes_into_a_checkpoints_place_meanwhile_stays(
    foreign: Foreign, finished: Path, kind: str, monkeypatch, capsys
):
    """A checkpoint with somebody's file in it is put aside, with the file; for anything else the run ends."""
    run, seen = Path("runs/x"), []
    kept = Path(shutil.copytree(finished, run)) / "checkpoints"
    place = kept / "epoch_000003"

    def save(*given: Any) -> Path | None:
        if not seen and kind == "checkpoint":
            foreign.put(shutil.copytree(kept / "epoch_000002", place) / "notes.txt")
            foreign.places[-1] = kept / "kept_epoch_000003" / "notes.txt"
        elif not seen:
            foreign.put(place, kind)
        seen.append(foreign.seen())
        return save_checkpoint(*given)

    monkeypatch.setattr("arborl.run.saver.save_checkpoint", save)
    assert ended("train", "--resume", run, "train.epochs=3", "log.save_every=1") == (0 if kind == "checkpoint" else 2)
    if kind == "checkpoint":
        assert foreign.places[-1].read_text() == "my own notes.txt"
        assert "has files that are not the run's; it is kept as kept_epoch_000003" in capsys.readouterr().err
    else:
        assert foreign.seen() == seen[0]


def test_pages_and_pictures_take_no_other_files_place(foreign: Foreign, finished: Path, capsys):
    run = Path("runs/x")
    shutil.copytree(finished, run)
    (run / "report.html").unlink()
    taken_one_at_a_time(foreign, [run / "report.html"], KINDS, lambda: refused(capsys, "report", run))
    taken_one_at_a_time(
        foreign, [Path("page.html")], KINDS, lambda: refused(capsys, "report", run, "--out", "page.html")
    )

    def sample() -> None:
        refused(capsys, "sample", "--run", run, "-n", 2, "--out", "pictures")

    places = [Path("pictures") / name for name in ("00001.png", "index.jsonl", "sheet.png")]
    taken_one_at_a_time(foreign, places, KINDS, sample)
    shutil.rmtree("pictures")
    taken_one_at_a_time(foreign, [Path("pictures")], ("file", "link", "dangling link"), sample)
    assert ended("sample", "--run", run, "-n", 1, "--out", "pictures") == 0
    taken_one_at_a_time(foreign, places[:1], KINDS, sample)
    for name in ("00000.png", "sheet.png"):
        Path("pictures", name).unlink()
        taken_one_at_a_time(foreign, [Path("pictures") / name], LINKS, sample)
    # Somebody's data set, with an index of its own.
    Path("pictures", "index.jsonl").write_text('{"file": "00000.png", "caption": "mine"}\n')
    taken_one_at_a_time(foreign, [Path("pictures") / "00000.png"], ("file",), sample)


def test_what_comes_while_pictures_are_made_stays(foreign: Foreign, finished: Path, capsys, monkeypatch):
    run = shutil.copytree(finished, "runs/x")

    def load(*given: Any) -> Any:
        foreign.put(Path("pictures/00000.png"))
        return load_for_inference(*given)

    monkeypatch.setattr("arborl.sample.load_for_inference", load)
    with pytest.raises(SystemExit):
        main(["sample", "--run", str(run), "-n", "2", "--out", "pictures"])
    assert "has a file 00000.png that is not from an earlier arborl sample" in capsys.readouterr().err
    assert Path("pictures/00000.png").read_text() == "my own 00000.png"
    assert [path.name for path in Path("pictures").iterdir()] == ["00000.png"]


def test_what_says_that_it_is_of_another_epoch_is_not_dropped(finished: Path, tmp_path: Path):
    run = shutil.copytree(finished, tmp_path / "x")
    kept = run / "checkpoints"
    shutil.copytree(kept / "epoch_000002", kept / "epoch_000000")
    (kept / "epoch_000001.mine").mkdir()
    assert ended("train", "--resume", run, "train.epochs=4", "log.keep=1") == 0
    assert (kept / "epoch_000000" / "state.json").is_file()


def test_a_comparison_takes_nobodys_place(foreign: Foreign, finished: Path, capsys):
    out = Path("out")
    given = ["compare", "mixture", "--seeds", 1, "--compute", 900, "--out", out]
    given += [word for text in (*SMALL[:2], "loss.kl=0") for word in ("--set", text)]

    def compare() -> None:
        refused(capsys, *given)

    taken_one_at_a_time(foreign, [out], ("file", "link", "dangling link"), compare)
    results = [out / name for name in ("compare.md", "compare.json", "compare.png", "report.html")]
    taken_one_at_a_time(foreign, results, KINDS[:1], compare)
    taken_one_at_a_time(foreign, results[1:2], KINDS[1:], compare)
    taken_one_at_a_time(foreign, [out / "mixture"], ("file", "link", "dangling link"), compare)
    runs = [out / "mixture" / "seed-0", out / "mixture" / "seed-0.log"]
    taken_one_at_a_time(foreign, runs, KINDS, compare)

    sprinkle(foreign, out)
    sprinkle(foreign, out / "mixture", "seed-1", ".seed-0.tmp")
    left = abandoned(out)
    with foreign.untouched("a comparison"):
        assert ended(*given) == 0
    assert not left.exists()
    with foreign.untouched("the same again"):
        assert ended(*given) == 0
    (out / "mixture" / "seed-0" / "summary.json").unlink()
    shutil.rmtree(out / "mixture" / "seed-0" / "checkpoints")
    before = contents(out)
    with lock(out / "mixture" / "seed-0" / ".lock"):
        compare()
    assert contents(out) == before, "a run that somebody else writes is theirs"
    foreign.put(out / "mixture" / "seed-0" / "notes.txt")
    with foreign.untouched("a run that came to no checkpoint"):
        assert ended(*given) == 0


def test_an_export_and_the_cache_take_nobodys_place(foreign: Foreign, tiny_folder, capsys):
    small = [*tiny_overrides("sd", tiny_folder("sd")), "prompts.cache=own cache"]
    Path("p.txt").write_text("a cat\na dog\n")
    sprinkle(foreign, Path("own cache"))
    with foreign.untouched("encoding"):
        assert ended("embed", "p.txt", *small) == 0
    assert ended("train", *small, "prompts.path=p.txt", "train.epochs=1", "run_name=x") == 0
    encoded = next(path for path in Path("own cache").rglob("*.safetensors"))
    encoded.unlink()
    for kind in KINDS[1:]:
        foreign.put(encoded, kind)
        with foreign.untouched(kind):
            refused(capsys, "embed", "p.txt", *small)
        foreign.places.pop()
        shutil.rmtree(encoded) if kind == "folder" else encoded.unlink()
    taken_one_at_a_time(
        foreign,
        [Path("out")],
        ("file", "folder", "link", "link to a folder"),
        lambda: refused(capsys, "export", "runs/x", "out"),
    )
    sprinkle(foreign, Path("to"))
    left = abandoned(Path("to"))
    with foreign.untouched("an export"):
        assert ended("export", "runs/x", "to/out") == 0, capsys.readouterr().err
    assert not left.exists()
    with foreign.untouched("the same again"):
        refused(capsys, "export", "runs/x", "to/out")


def test_a_server_writes_nothing(foreign: Foreign, tmp_path: Path):
    here = tmp_path / "here"
    sprinkle(foreign, here)
    with Fork("serve", "brightness", "--port", "0", cwd=here) as server:
        server.until(lambda: "http://" in server.said)
        server.signal(signal.SIGINT)
        server.ended()
        made = {path.name for path in here.iterdir()} - {place.name for place in foreign.places}
        assert made == {server.log.name}
