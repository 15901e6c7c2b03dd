"""Whole runs: interrupted and resumed equals uninterrupted, and what a run checks of itself."""

import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

import arborl.run.run as run_module
from arborl.cli import main
from arborl.config import load_config, read_config, with_settings
from arborl.core.errors import InputError
from arborl.distributed.coordination import Coordinator
from arborl.distributed.fsdp import launcher_requests_fsdp
from arborl.engine.state import Ema, Shadow
from arborl.run import logger, setup
from arborl.run.folder import claim_folder, flat
from arborl.run.resume import checkpoint_of, config_of, resolve_start
from arborl.tools.files import lock
from arborl.trainer import train
from arborl.worlds.mixture import Steering

from launching import Fork, assert_same_run, last_checkpoint, rows_of, timeless

MIXTURE = ["train.epochs=8", "log.save_every=3", "eval.num_prompts=8", "log.record_every=0", "train.ema_decay=0.9"]


@pytest.mark.parametrize("kind", ["mixture", "lora", "full"])
def test_a_run_that_went_on_later_is_the_run_that_never_stopped(tmp_path: Path, sd3_overrides, kind: str):
    overrides = MIXTURE if kind == "mixture" else [*sd3_overrides, f"model.train={kind}", "log.save_every=2"]
    first, both = (2, 4) if kind == "mixture" else (1, 2)
    overrides = [*overrides, f"train.epochs={both}", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*overrides, "run_name=whole"]))
    parts = train(load_config("mixture", [*overrides, "run_name=parts", f"train.epochs={first}"]))
    assert train(read_config(parts / "config.yaml", [f"train.epochs={both}"]), resume=parts) == parts
    assert_same_run(whole, parts, ended_at=first)


LONGER = [*MIXTURE, "train.epochs=20", "log.save_every=1000", "train.schedule=linear", "train.warmup=8"]


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupts."""
    return train(load_config("mixture", [*LONGER, f"log.dir={tmp_path_factory.mktemp('longer')}"]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_run_that_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, longer: Path, number: signal.Signals
):
    cut = tmp_path / "runs" / "cut"
    with Fork("train", "-c", "mixture", *LONGER, "run_name=cut", cwd=tmp_path) as process:
        process.until(lambda: rows_of(cut) >= 5)
        process.signal(number)
        code, said = process.ended()
    assert code == 130
    assert "arborl train --resume runs/cut" in said
    assert "Traceback" not in said
    train(read_config(cut / "config.yaml"), resume=cut)
    assert_same_run(longer, cut)


def test_a_second_interrupt_leaves_the_last_whole_checkpoint(tmp_path: Path, monkeypatch, capsys):
    """Interrupted in the middle of an update, twice: what is saved is the epoch before, untouched."""
    settings = [*MIXTURE, "train.epochs=4", "log.save_every=1", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*settings, "run_name=whole"]))
    honest, calls = torch.optim.AdamW.step, []

    def impatient(self, *rest, **named):
        result = honest(self, *rest, **named)
        calls.append(1)
        if len(calls) == 5:  # the first of epoch 2's two steps
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(load_config("mixture", [*settings, "run_name=cut"]))
    assert "2 epochs saved" in capsys.readouterr().err
    monkeypatch.undo()
    cut = tmp_path / "cut"
    train(read_config(cut / "config.yaml"), resume=cut)
    assert_same_run(whole, cut)


def test_an_interrupt_while_averaged_weights_are_in_the_model(tmp_path: Path, monkeypatch):
    settings = [*MIXTURE, "train.epochs=4", "eval.every=1", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*settings, "run_name=whole"]))
    honest, calls = run_module.evaluate, []

    def interrupted(*rest, **named):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(*rest, **named)

    monkeypatch.setattr(run_module, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(load_config("mixture", [*settings, "run_name=cut"]))
    monkeypatch.undo()
    train(read_config(tmp_path / "cut" / "config.yaml"), resume=tmp_path / "cut")
    assert_same_run(whole, tmp_path / "cut")


def test_an_interrupt_between_two_optimizer_steps_waits_for_the_epochs_end(tmp_path: Path, monkeypatch):
    """What is saved is whole: the epoch is complete, and its line of metrics is there."""
    settings = [*MIXTURE, "train.epochs=4", "train.updates=2", f"log.dir={tmp_path}"]
    whole = train(load_config("mixture", [*settings, "run_name=whole"]))
    step, seen = Ema.step, []

    def interrupted(self: Ema, steps: int) -> None:
        seen.append(steps)
        if len(seen) == 3:  # the first of the second epoch's two
            os.kill(os.getpid(), signal.SIGINT)
        step(self, steps)

    monkeypatch.setattr(Ema, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(load_config("mixture", [*settings, "run_name=cut"]))
    assert seen == [1, 2, 3, 4]
    monkeypatch.undo()
    assert last_checkpoint(tmp_path / "cut").name == "epoch_000002"
    assert len(timeless(tmp_path / "cut")) == 2
    train(read_config(tmp_path / "cut" / "config.yaml"), resume=tmp_path / "cut")
    assert_same_run(whole, tmp_path / "cut")


@pytest.mark.parametrize("calls", [2, 5])
def test_an_interrupt_while_the_old_policy_takes_the_models_place(tmp_path: Path, monkeypatch, calls: int):
    """In the middle of giving the model its own weights back, in a rollout: what is saved are the model's own."""
    settings = [*MIXTURE, "model.train=lora", "model.lora.rank=2", "loss.name=own_losses:OldRollsOut", "train.epochs=3"]
    settings += [f"log.dir={tmp_path}", "train.learning_rate=0.01"]
    whole = train(load_config("mixture", [*settings, "run_name=whole"]))
    restore, seen = Shadow.restore, []

    def interrupted(self: Shadow) -> None:
        seen.append(self)
        if len(seen) == calls:
            raise KeyboardInterrupt
        restore(self)

    monkeypatch.setattr(Shadow, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(load_config("mixture", [*settings, "run_name=cut"]))
    assert len(seen) > calls
    monkeypatch.undo()
    train(read_config(tmp_path / "cut" / "config.yaml"), resume=tmp_path / "cut")
    assert_same_run(whole, tmp_path / "cut")


def test_checkpoints_need_room_for_an_old_policy_too(tmp_path: Path, monkeypatch, capsys):
    """A disk that holds those of the trained weights alone is warned of."""
    settings = [*MIXTURE, "train.ema_decay=0", "train.epochs=0", "log.keep=2", f"log.dir={tmp_path}"]
    weights = sum(4 * p.numel() for p in Steering().parameters())
    for loss, copies in (([], 3), (["loss.name=own_losses:Regression"], 4)):
        for short in (0, 1):
            free = weights * (copies * 3 + 2) + 1 - short
            monkeypatch.setattr(
                "arborl.engine.checks.shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free)
            )
            train(load_config("mixture", [*settings, *loss]))
            assert capsys.readouterr().err.count("warning: free disk") == short


def test_one_command_that_starts_and_restarts_keeps_the_sizes_it_found(tmp_path: Path):
    """`--resume auto` with sizes that are to be found: those that were found, so that the run is the same."""
    sizes = ("sample.batch_size", "sample.decode_batch_size", "train.batch_size")
    settings = [*MIXTURE, *(f"{key}=auto" for key in sizes), f"log.dir={tmp_path}", "run_name=x", "train.epochs=1"]
    run = train(resolve_start(Path("auto"), "mixture", settings).config)
    before, again = flat(read_config(run / "config.yaml")), resolve_start(Path("auto"), "mixture", settings)
    assert again.resume == run
    for key in sizes:
        assert type(before[key]) is int
        assert flat(again.config)[key] == before[key]


def test_a_run_is_locked_before_it_is_read(tmp_path: Path, monkeypatch):
    """A process that is told to leave still saves, and the one that takes over sees what it saved."""
    settings = [*MIXTURE, "train.epochs=4", "log.save_every=2", "log.keep=9", f"log.dir={tmp_path}", "run_name=x"]
    run = train(load_config("mixture", settings))
    newest = last_checkpoint(run)
    later = newest.rename(tmp_path / "saved later")
    done: list[int] = []

    def others_leave(path: Path):
        later.rename(newest)
        return lock(path)

    for module in (setup, logger):
        if hasattr(module, "lock"):
            monkeypatch.setattr(module, "lock", others_leave)
    honest = run_module.Run.complete
    monkeypatch.setattr(
        run_module.Run, "complete", lambda self, *given: done.append(self.state.epoch) or honest(self, *given)
    )
    train(read_config(run / "config.yaml", ["train.epochs=6"]), resume=run)
    assert done == [4, 5]


def test_two_runs_started_together_get_folders_of_their_own(tmp_path: Path):
    config = load_config("mixture", [f"log.dir={tmp_path}"])
    assert [claim_folder(config).name for _ in range(3)] == ["tree-1", "tree-2", "tree-3"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = [*MIXTURE, "train.epochs=1", f"log.dir={tmp_path_factory.mktemp('first')}", "run_name=first"]
    return train(load_config("mixture", settings))


@pytest.mark.parametrize("name", ["tree-1 (copy)", "früh 早", ".hidden", "x" * 120])
def test_a_run_goes_on_in_a_folder_of_any_name(tmp_path: Path, first: Path, monkeypatch, capsys, name: str):
    """A file manager calls a copy what it likes, and that is no setting of the run."""
    renamed = shutil.copytree(first, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for command in (
        ["train", "--resume", f"./{name}", "train.epochs=2"],
        ["train", "--resume", f"./{name}", "train.epochs=3"],
        ["eval", "--run", f"./{name}"],
        ["report", f"./{name}"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert not ended.value.code, capsys.readouterr().err
    assert read_config(renamed / "config.yaml").run_name == "first"
    assert last_checkpoint(renamed).name == "epoch_000003"


def test_runs_may_lie_in_a_folder_called_checkpoints(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [
        "log.trackers=[]",
        "log.record_every=0",
        "eval.num_prompts=4",
        "log.dir=checkpoints",
        "run_name=foo",
        "train.epochs=1",
    ]
    run = train(load_config("mixture", settings))
    assert run == Path("checkpoints/foo")
    assert config_of(run, None, []).run_name == "foo"
    assert checkpoint_of(run).name == "epoch_000001"
    assert resolve_start(run, None, ["train.epochs=2"]).resume == run
    assert checkpoint_of(run / "checkpoints" / "epoch_000001").name == "epoch_000001"
    monkeypatch.chdir(run / "checkpoints")
    assert checkpoint_of(Path("epoch_000001")).name == "epoch_000001"
    assert config_of(Path("epoch_000001"), None, []).run_name == "foo"


def test_a_new_run_takes_a_name_that_fits_every_system(tmp_path: Path):
    config = load_config("mixture", [f"log.dir={tmp_path / 'runs'}"])
    for name in ("a b", "../up", ".hidden", ""):
        with pytest.raises(InputError, match="cannot be a folder's name"):
            train(with_settings(config, {"run_name": name}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_reference_is_the_policy_at_the_start_in_bf16_too(tmp_path: Path, sd3_overrides, kind: str):
    settings = [*sd3_overrides, f"model.train={kind}", "loss.kl=0.1", "train.epochs=1"]
    run = train(load_config("mixture", [*settings, "train.mixed_precision=bf16", f"log.dir={tmp_path}"]))
    assert timeless(run)[0]["kl"] == 0.0


def test_a_damaged_or_foreign_checkpoint_is_one_line(tmp_path: Path, capsys):
    run = train(load_config("mixture", [*MIXTURE, "train.epochs=1", f"log.dir={tmp_path}", "run_name=x"]))
    weights = last_checkpoint(run) / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    (weights.parent / "ema.safetensors").unlink()
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "--run", str(run)])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "none of its checkpoints is whole (epoch_000001 has other files than its SHA256SUMS says" in lines[-1]


def test_a_policy_that_moves_between_rollout_and_update_is_told(tmp_path: Path, monkeypatch, capsys):
    """The run-time check of the first update's ratio: quiet when all is well, one clear line when it is not."""
    settings = [
        "train.epochs=2",
        "sample.num_prompts=2",
        "eval.num_prompts=2",
        "log.record_every=0",
        f"log.dir={tmp_path}",
    ]
    train(load_config("mixture", settings))
    assert "ratio" not in capsys.readouterr().err
    loop = sys.modules[train.__module__]
    honest = loop.update

    def meddled(policy, *rest, **how):
        with torch.no_grad():
            policy.module.out.bias += 0.01
        return honest(policy, *rest, **how)

    monkeypatch.setattr(loop, "update", meddled)
    run = train(load_config("mixture", settings))
    messages = capsys.readouterr().err
    assert messages.count("the first update's ratio is off by") == 1
    assert timeless(run)[0]["ratio_error"] > 1e-4


def test_training_twice_in_one_process_with_different_precisions(tmp_path: Path, capsys):
    settings = [
        "train.epochs=1",
        "sample.num_prompts=2",
        "eval.num_prompts=2",
        "log.record_every=0",
        f"log.dir={tmp_path}",
    ]
    for number, precision in enumerate(("no", "bf16", "no"), 1):
        assert train(load_config("mixture", [*settings, f"train.mixed_precision={precision}"])).name == f"tree-{number}"


@pytest.mark.parametrize(
    "shapes", [["sample.batch_size=8", "sample.pad_batches=true"], ["sample.batch_size=16", "train.batch_size=3"]]
)
def test_the_ratio_in_bf16(tmp_path: Path, sd3_overrides, shapes: list[str], capsys):
    """Exact with equal shapes also in bf16; else within the bound that the run-time check allows."""
    settings = [
        *sd3_overrides,
        "train.epochs=2",
        "log.record_every=0",
        f"log.dir={tmp_path}",
        "train.learning_rate=0.01",
    ]
    run = train(load_config("mixture", [*settings, "train.mixed_precision=bf16", *shapes]))
    errors = [row["ratio_error"] for row in timeless(run)[:2]]
    assert max(errors) <= (0.0 if "sample.pad_batches=true" in shapes else 1e-4)
    assert "ratio is off" not in capsys.readouterr().err


def test_prompts_may_be_moved_but_not_changed(tmp_path: Path):
    first, moved, changed = (tmp_path / f"{name}.txt" for name in ("first", "moved", "changed"))
    first.write_text("a dot at the top left\na dot at the top right\n")
    moved.write_text(first.read_text())
    changed.write_text("a dot at the top left\na dot at the bottom right\n")
    run = train(load_config("mixture", [*MIXTURE, "train.epochs=1", f"log.dir={tmp_path}", f"prompts.path={first}"]))
    first.unlink()
    more = ["train.epochs=2"]
    with pytest.raises(InputError, match=r"prompts.path=.*changed.txt: holds other prompts than when the run began"):
        train(read_config(run / "config.yaml", [*more, f"prompts.path={changed}"]), resume=run)
    train(read_config(run / "config.yaml", [*more, f"prompts.path={moved}"]), resume=run)
    assert [row["epoch"] for row in timeless(run)] == [0, 1, 2]


def test_an_interrupt_while_the_run_saves_itself(tmp_path: Path, monkeypatch):
    """The launcher's signals reach processes one after another: one that is leaving takes its first for that."""
    together = Coordinator(Accelerator(cpu=True))
    together.several, together.agreed = True, True
    with together.handling_signals():
        os.kill(os.getpid(), signal.SIGTERM)  # this process's first
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher's copy of it
        together.since -= 3
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no terminals that hang up")
@pytest.mark.parametrize(("second", "cut_short"), [("SIGHUP", False), ("SIGINT", True)])
def test_a_second_hangup_cuts_nothing_short(second: str, cut_short: bool):
    """A shell passes on the one that the terminal has sent; it is no sign of impatience, as a second Ctrl-C is."""
    together, saved = Coordinator(Accelerator(cpu=True)), list[str]()

    def save() -> None:
        with together.handling_signals():
            together.hold()
            for name in ("SIGHUP", second):
                os.kill(os.getpid(), getattr(signal, name))
            saved.append("all of it")
            together.release()

    with pytest.raises(KeyboardInterrupt):
        save()
    assert bool(saved) is not cut_short


@pytest.mark.parametrize(("environment", "expected"), [({}, False), ({"ACCELERATE_USE_FSDP": "true"}, True)])
def test_nobody_else_hears_that_weights_are_to_be_split(monkeypatch, environment: dict[str, str], expected: bool):
    """With accelerate's flags on, transformers would load empty text encoders on all ranks but the first."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_VERSION", "FSDP_OFFLOAD_PARAMS"):
        monkeypatch.setenv(name, {"FSDP_VERSION": "2"}.get(name, environment.get(name, "false")))
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert launcher_requests_fsdp.__wrapped__() is expected
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    if expected:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "1")
        with pytest.raises(InputError, match="fsdp_version=1"):
            launcher_requests_fsdp.__wrapped__()
