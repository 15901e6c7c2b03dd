"""A model that is broken ends its run at once, and the run says from where one can go on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from arborl import trainer
from arborl.config import load_config
from arborl.core.errors import InputError
from arborl.distributed.gather import nonfinite_weights
from arborl.engine.evaluate import Evaluation, evaluate
from arborl.run.checkpoint import checkpoints, problem_with
from arborl.run.paths import epoch_name
from arborl.worlds.mixture import MixtureModel

from launching import forked, last_checkpoint, ranks, rows_of

TINY = ["-c", "mixture", "train.epochs=6", "log.save_every=1", "log.keep=9", "log.record_every=0", "log.trackers=[]"]
TINY += ["eval.num_prompts=4", "eval.every=2", "sample.num_prompts=1", "sample.batch_size=64", "run_name=x"]


MODEL = """
import os
import torch
from arborl.worlds.mixture import MixtureModel

class Breaks(MixtureModel):
    "Its answers are not finite from some call on, on one of the processes."

    calls = 0

    def predict(self, x, t, cond):
        Breaks.calls += 1
        velocity = super().predict(x, t, cond)
        here = os.environ.get("RANK", "0") == os.environ["BREAKS_ON"]
        return velocity * torch.nan if here and Breaks.calls > int(os.environ["BREAKS_AFTER"]) else velocity
"""


def test_weights_that_are_not_finite_stop_the_run_with_the_checkpoint_before(tmp_path: Path):
    """After two good epochs a rate that ruins everything."""
    assert forked("train", *TINY, "train.epochs=2", cwd=tmp_path).code == 0
    run = tmp_path / "runs" / "x"
    ended = forked("train", "--resume", "runs/x", "train.epochs=9", "train.learning_rate=1e30", cwd=tmp_path)
    assert ended.stopped_with("the last sound checkpoint is runs/x/checkpoints/epoch_00000"), ended.said
    assert "not finite" in ended.errors[0]
    assert "reward" not in ended.errors[0]
    assert rows_of(run) <= 4, "at once"
    assert last_checkpoint(run).name in ended.errors[0]
    # The bad rate stays out of what comes next.
    again = forked("train", "--resume", "runs/x", "train.epochs=4", "train.learning_rate=1e-4", cwd=tmp_path)
    assert again.code == 0, again.said
    assert problem_with(last_checkpoint(run)) is None


def test_weights_are_looked_at_when_an_epoch_is_done(tmp_path: Path, monkeypatch):
    """Before anything of it is written, and also in the last one, which no rollout follows."""
    honest, calls = trainer.update, []

    def ruins(model: MixtureModel, *given: object) -> object:
        stats = honest(model, *given)
        calls.append(1)
        if len(calls) == 3:
            next(model.module.parameters()).data.view(-1)[0] = torch.inf
        return stats

    monkeypatch.setattr(trainer, "update", ruins)
    settings = ["train.epochs=3", "log.save_every=1", "eval.num_prompts=4", "log.record_every=0", "log.trackers=[]"]
    with pytest.raises(InputError, match=r"the update of epoch 2 left 1 of the \d+ trained tensors with"):
        trainer.train(load_config("mixture", [*settings, f"log.dir={tmp_path}", "run_name=x"]))
    assert rows_of(tmp_path / "x") == 2
    assert last_checkpoint(tmp_path / "x").name == "epoch_000002"


@pytest.mark.parametrize(("calls", "rank"), [(0, 0), (15, 0), (15, 1), (50, 0), (50, 1)])
def test_answers_that_are_not_finite_stop_all_processes(tmp_path: Path, calls: int, rank: int):
    """In the first evaluation, in a rollout, later on; of one process, or of the second of two."""
    (tmp_path / "breaks.py").write_text(MODEL)
    known = {"BREAKS_ON": str(rank), "BREAKS_AFTER": str(calls)}
    endings = ranks(1 + rank, "train", *TINY, "model.family=breaks:Breaks", cwd=tmp_path, environment=known)
    assert endings[0].code == 2, endings
    assert all(ended.code for ended in endings)
    assert not any("Traceback" in ended.said for ended in endings)
    error = endings[0].errors[0]
    assert "its answers are not finite, for " in error
    assert "reward" not in error
    kept = checkpoints(tmp_path / "runs" / "x" / "checkpoints")
    assert all(problem_with(path) is None for path in kept)
    assert not kept or error.endswith(f"the last sound checkpoint is runs/x/checkpoints/{kept[-1].name}")


UNDRAWN = """
import torch
from arborl.worlds.mixture import MixtureModel

class Undrawn(MixtureModel):
    "Its decoder overflows for a share of what it is given, from some call on."

    calls = 0

    def decode(self, latents):
        Undrawn.calls += 1
        pictures = super().decode(latents)
        if Undrawn.calls > AFTER:
            pictures[: round(SHARE * len(pictures)), :, 0] = VALUE
        return pictures
"""


@pytest.mark.parametrize(
    ("after", "share", "value"), [(3, 0.25, "inf"), (3, 1.0, "nan"), (5, 1.0, "inf"), (6, 1.0, "nan")]
)
def test_pictures_that_are_not_finite_are_the_decoders_doing(tmp_path: Path, after: int, share: float, value: str):
    """Few of them have no score; many end the run, in training as in an evaluation."""
    named = {"AFTER": str(after), "SHARE": str(share), "VALUE": f"torch.{value}"}
    text = UNDRAWN
    for name, shown in named.items():
        text = text.replace(name, shown)
    (tmp_path / "undrawn.py").write_text(text)
    settings = [*TINY, "sample.num_prompts=2", "train.epochs=2", "log.save_every=1", "model.family=undrawn:Undrawn"]
    ended = forked("train", *settings, cwd=tmp_path)
    if share < 1:
        assert ended.code == 0, ended.said
        assert "the decoder makes pictures that are not finite, and have no score" in ended.said
    else:
        assert ended.code == 2, ended.said
        assert "error: model: its decoder made" in ended.errors[0]
        assert "reward" not in ended.errors[0]


def test_the_only_checkpoint_is_not_put_away(tmp_path: Path):
    """Its weights are finite, and without it the run would begin anew; where there is another it stands aside."""
    (tmp_path / "breaks.py").write_text(MODEL)
    own = ["log.keep=1", "model.family=breaks:Breaks"]
    for number, keep in enumerate((1, 2)):
        words = [*TINY, *own, f"log.keep={keep}", f"run_name=run-{number}"]
        endings = ranks(1, "train", *words, cwd=tmp_path, environment={"BREAKS_ON": "0", "BREAKS_AFTER": "50"})
        kept = checkpoints(tmp_path / "runs" / f"run-{number}" / "checkpoints")
        assert len(kept) == 1, endings
        assert problem_with(kept[0]) is None
        last = rows_of(tmp_path / "runs" / f"run-{number}")
        assert kept[0].name == epoch_name(last - number)
        assert kept[0].with_name(f"broken_{epoch_name(last)}").is_dir() == bool(number)
        assert ("the last sound checkpoint" in endings[0].errors[0]) == bool(number)


def test_a_last_evaluation_that_is_not_finite_finishes_no_run(tmp_path: Path, monkeypatch):
    def broken(*given: Any, **named: Any) -> Evaluation:
        found = evaluate(*given, **named)
        return replace(found, nonfinite=2) if given[3].accelerator and len(calls) == 3 else found

    calls: list[int] = []
    honest = trainer.update
    monkeypatch.setattr(trainer, "update", lambda *given, **named: (calls.append(1), honest(*given, **named))[1])
    monkeypatch.setattr("arborl.run.run.evaluate", broken)
    settings = ["train.epochs=3", "eval.num_prompts=4", "eval.every=0", "log.record_every=0", "log.trackers=[]"]
    with pytest.raises(InputError, match="for 2 pictures of the evaluation after 3 epochs"):
        trainer.train(load_config("mixture", [*settings, f"log.dir={tmp_path}", "run_name=x"]))
    assert not (tmp_path / "x" / "summary.json").exists()


def test_weights_that_one_process_holds_are_told_on_all(monkeypatch):
    """With split weights the others are fine themselves."""
    fine = {"a": torch.ones(3), "b": torch.ones(2)}
    assert nonfinite_weights(fine, Accelerator()) == []
    assert nonfinite_weights(fine | {"b": torch.tensor([1.0, -torch.inf])}, Accelerator()) == ["b"]
    monkeypatch.setattr("arborl.distributed.gather.any_rank", lambda fact, accelerator: True)
    monkeypatch.setattr("arborl.distributed.gather.gather_strings", lambda words, accelerator: [*words, "another's"])
    assert nonfinite_weights(fine, Accelerator()) == ["another's"]


def test_a_run_that_goes_on_and_is_broken_at_once_names_the_checkpoint_before(tmp_path: Path):
    (tmp_path / "breaks.py").write_text(MODEL)
    own = [*TINY, "train.epochs=2", "model.family=breaks:Breaks"]
    known = {"BREAKS_ON": "0", "BREAKS_AFTER": "1000000"}
    assert ranks(1, "train", *own, cwd=tmp_path, environment=known)[0].code == 0
    again = ["train", "--resume", "runs/x", "train.epochs=4"]
    ended = ranks(1, *again, cwd=tmp_path, environment=known | {"BREAKS_AFTER": "0"})[0]
    assert ended.errors[0].endswith("the last sound checkpoint is runs/x/checkpoints/epoch_000001")
    assert problem_with(tmp_path / "runs/x/checkpoints/epoch_000002") is None, "it was fine before"
