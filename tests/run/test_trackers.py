"""What trackers are told: read back from the files that they wrote themselves."""

import io
import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import wandb
from accelerate.tracking import TensorBoardTracker
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arborl.cli import main
from arborl.config import load_config, read_config
from arborl.run.trackers import MAX_SIDE, log_pictures, wandb_id
from arborl.trainer import train

TINY = ["eval.num_prompts=3", "eval.every=1", "sample.num_prompts=2", "log.record_every=4", "train.epochs=2"]
CAPTIONS = ["a dot at the top left", "a dot at the top right", "a dot at the bottom left"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder to be in, on a machine where nobody has logged in anywhere."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    wandb.teardown()  # it reads the environment once
    yield tmp_path / "here"
    wandb.teardown()


def history(part: Path) -> list[dict]:
    """The rows of a folder of W&B's, as its own reader has them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(part)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in told.splitlines()]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def sheet_of(run: Path, epoch: int) -> list[str]:
    """Score and prompt of every picture that an evaluation kept."""
    shown = json.loads((run / "samples" / f"epoch_{epoch:06d}.json").read_text())["pictures"]
    return [f"{picture['scores']['place']:.3f} {picture['prompt']}" for picture in shown]


def test_tensorboard_and_wandb_offline_get_numbers_and_pictures_and_go_on_in_the_same_run(place: Path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train(load_config("mixture", [*TINY, "log.trackers=[tensorboard,wandb]"]))
    name = wandb_id(run)
    train(read_config(run / "config.yaml", ["train.epochs=3"]), resume=run)
    assert wandb_id(run) == name
    assert os.listdir(place) == ["runs"]

    board = EventAccumulator(str(run / "arborl"), {"images": 0, "tensors": 0, "scalars": 0})
    board.Reload()
    assert [point.step for point in board.Scalars("reward")] == [0, 1, 2]
    assert [point.step for point in board.Scalars("eval/place")] == [0, 1, 2, 3]
    assert [shown.step for shown in board.Images("samples")] == [0, 1, 2, 3]
    assert [shown.step for shown in board.Images("trees")] == [0]
    for tag, file in ("samples", "samples/epoch_000000.png"), ("trees", "trees/epoch_000000.png"):
        theirs = Image.open(io.BytesIO(board.Images(tag)[0].encoded_image_string))
        assert theirs.tobytes() == Image.open(run / file).convert("RGB").tobytes()
    # This reader drops scalars and pictures of epochs that were done again, but not texts: the last of each counts.
    texts = {event.step: event.tensor_proto.string_val[0] for event in board.Tensors("samples/captions/text_summary")}
    told = [[line.strip() for line in texts[epoch].decode().splitlines()] for epoch in range(4)]
    assert told == [sheet_of(run, epoch) for epoch in range(4)]

    before, after = map(history, sorted((run / "wandb").glob("offline-run-*")))
    assert [row["_step"] for row in before] == [0, 1, 2]
    assert [row["_step"] for row in after] == [2, 3]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The evaluation that the run went on from is the one it had made at its first end.
    for row, ours in zip([*before[:2], before[2] | after[0], after[1]], rows, strict=True):
        assert row["eval/place"] == pytest.approx(ours["eval/place"])
        assert row.get("reward") == pytest.approx(ours.get("reward"))  # one row has both, numbers and pictures
        assert row["samples.captions"] == sheet_of(run, ours["epoch"])
        assert [caption.split(" ", 1)[1] for caption in row["samples.captions"]] == CAPTIONS
    files = run / "wandb" / "latest-run" / "files"
    assert all((files / picture).is_file() for picture in after[1]["samples.filenames"])
    assert before[0]["trees.captions"] in ([caption] for caption in [*CAPTIONS, "a dot at the bottom right"])
    assert Image.open(files / after[1]["samples.filenames"][0]).size == (32, 32)


@pytest.mark.parametrize("name", ["epoch_000002.png", "epoch_000002.json"])
def test_a_sheet_that_was_cut_short_is_a_warning(place: Path, capsys, name: str):
    run = train(load_config("mixture", [*TINY, "log.trackers=[tensorboard]"]))
    path = run / "samples" / name
    path.write_bytes(path.read_bytes()[:300])
    train(read_config(run / "config.yaml", ["train.epochs=3"]), resume=run)
    said = capsys.readouterr().err
    assert "warning: TensorBoard lacks the pictures after 2 epochs" in said


def test_a_huge_drawing_is_made_smaller_and_not_refused(tmp_path: Path, monkeypatch):
    Image.new("RGB", (300, 10_000)).save(tmp_path / "tree.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    tracker = TensorBoardTracker("arborl", tmp_path)
    tracker.start()
    log_pictures(tracker, "trees", 0, tmp_path / "tree.png", ["a dot"], None)
    tracker.finish()
    monkeypatch.undo()
    board = EventAccumulator(str(tmp_path / "arborl"))
    board.Reload()
    assert (board.Images("trees")[0].width, board.Images("trees")[0].height) == (123, MAX_SIDE)


@pytest.mark.parametrize("key", ["", "short"])
def test_wandb_without_a_key_is_one_line_and_asks_nothing(place: Path, monkeypatch, capsys, key: str):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(SystemExit) as stopped:
        main(["train", "-c", "mixture", *TINY, "log.trackers=[wandb]"])
    assert stopped.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "log.trackers=wandb: W&B cannot start (" in line
    assert "WANDB_MODE=offline" in line
    assert os.listdir(place) == []


@pytest.mark.skipif(not find_spec("trackio"), reason="it cannot be installed beside Pillow 13")
def test_trackio_has_all_runs_of_a_folder(place: Path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.delenv("TRACKIO_DIR")
    run = train(load_config("mixture", [*TINY, "train.epochs=1", "log.trackers=[trackio]"]))
    train(read_config(run / "config.yaml", ["train.epochs=2"]), resume=run)
    with sqlite3.connect(place / "runs" / "trackio" / "arborl.db") as base:
        found = base.execute("select run_id, run_name, step, metrics from metrics").fetchall()
    assert {(row[0], row[1]) for row in found} == {(found[0][0], run.name)}
    by_step: dict[int, dict] = {}
    for _, _, step, metrics in found:
        by_step[step] = by_step.get(step, {}) | json.loads(metrics)
    assert [*by_step] == [0, 1, 2]
    for step, row in by_step.items():
        pictures = [row[f"samples/{number:02d}"] for number in range(3)]
        assert [picture["caption"] for picture in pictures] == sheet_of(run, step)
        assert all((place / "runs/trackio/media" / picture["file_path"]).is_file() for picture in pictures)
        assert ("reward" in row) == (step < 2)
