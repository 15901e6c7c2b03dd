"""`arborl doctor`: quiet about a healthy run, and it finds each planted fault."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import arborl.models.lora as lora
from arborl.cli import main
from arborl.config import load_config, with_settings
from arborl.core.errors import InputError
from arborl.core.kernels import Gaussian
from arborl.data.prompts import Prompts, split_prompts
from arborl.doctor import Subject, _broken_canary, examine
from arborl.engine.autotune import Trial, choose, describe_batches, max_rows, trials
from arborl.engine.checks import Finding, check_pictures, check_spread, spread_of
from arborl.run import setup
from arborl.trainer import train

from conftest import make_policy
from launching import Ended, ranks

CPU = torch.device("cpu")
MIXTURE = load_config("mixture")
QUICK = ["sample.num_prompts=2", "eval.num_prompts=4", "log.record_every=0", "log.trackers=[]"]


def findings(overrides: list[str], seconds: float = 0, name: str = "mixture") -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(load_config(name, overrides), canary_seconds=seconds)}


def wrong(found: dict[str, Finding]) -> set[str]:
    return {what for what, finding in found.items() if finding.ok is False}


def test_a_healthy_model_has_nothing_wrong(sd3_overrides, tmp_path: Path):
    found = findings([*sd3_overrides, f"log.dir={tmp_path}", "train.learning_rate=1e-2"], seconds=3)
    assert not wrong(found), found
    assert {*found} >= {
        "learning rates",
        "free disk",
        "first-update ratio",
        "noise in the log-density",
        "gradients",
        "processes",
        "decoded pictures",
        "reward scene",
        "spread of rewards",
        "sample.batch_size",
        "train.batch_size",
        "forecast",
        "memory",
        "canary",
    }
    assert re.search(r"step 0: \d\.\de", found["first-update ratio"].measured)
    assert not list(tmp_path.iterdir()), "the patient is left as it was"


def test_it_leaves_weights_and_optimizer_as_they_were(sd3_overrides):
    from arborl.run.setup import start_accelerator

    config = load_config("mixture", [*sd3_overrides, "train.ema_decay=0.9"])
    patient = Subject(config, start_accelerator(config), None)
    before = {name: p.detach().clone() for name, p in patient.state.parameters.items()}
    list(patient.findings())
    assert all(torch.equal(p, before[name]) for name, p in patient.state.parameters.items())
    assert not patient.state.optimizer.state
    assert all(p.grad is None for p in patient.state.parameters.values())


@pytest.fixture
def untimed(monkeypatch):
    """Without the trials of micro-batches, which say nothing of faults."""
    monkeypatch.setattr(Subject, "speed", lambda self: iter(()))


LOSSES = {
    "leaves, ODE": ["loss.name=own_losses:Regression", "algo=flat", "kernel.name=ode", "sample.group_size=4"],
    "the old rolls out": ["loss.name=own_losses:OldRollsOut"],
    "edges": ["loss.name=own_losses:Reinforce"],
    "what the rollout answered": ["loss.name=guard", "sample.offload=true"],
}


@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES)
def test_another_loss_has_nothing_wrong(settings: list[str], tmp_path: Path):
    """What has no density is not asked for one."""
    found = findings([*settings, f"log.dir={tmp_path}"])
    assert not wrong(found), found
    assert ("first-update ratio" in found) == (settings in (LOSSES["edges"], LOSSES["what the rollout answered"]))
    assert "moved" in found["gradients"].measured


@pytest.mark.usefixtures("untimed")
class TestPlantedFaults:
    @pytest.mark.parametrize("how", ["frozen", "switched off", "in part"])
    def test_a_frozen_lora(self, sd3_overrides, monkeypatch, how: str):
        honest = lora.inject

        def faulty(module, *rest):
            honest(module, *rest)
            if how == "frozen":
                module.requires_grad_(False)
                return
            for name, layer in module.named_modules():
                if hasattr(layer, "lora_A") and (how == "switched off" or name.endswith("to_q")):
                    layer.forward = layer.base_layer.forward

        monkeypatch.setattr(lora, "inject", faulty)
        found = findings(sd3_overrides)
        where = {"frozen": "set-up"}.get(how, "gradients")
        assert wrong(found) == {where}
        words = {
            "frozen": "no trainable weight: all of them are frozen",
            "switched off": "no trained weight has a part in the model's answer",
            "in part": "not reached: transformer_blocks.*.attn.to_q",
        }
        assert words[how] in found[where].measured

    @pytest.mark.parametrize("factor", [4.0, pytest.param(0.5, marks=pytest.mark.slow)])
    def test_a_wrong_noise_std_in_the_log_density(self, sd3_overrides, monkeypatch, factor: float):
        """As in a published implementation: samples are drawn with one std and evaluated with another. The ratio of the
        first update is 1 all the same.
        """
        honest = Gaussian.log_density
        monkeypatch.setattr(Gaussian, "log_density", lambda self, x: honest(self._replace(std=self.std * factor), x))
        found = findings(sd3_overrides)
        assert wrong(found) == {"noise in the log-density"}
        assert found["first-update ratio"].ok
        assert f"step 0: {1 / factor:.1f}" in found["noise in the log-density"].measured

    def test_a_log_density_of_another_formula(self, sd3_overrides, monkeypatch):
        honest = Gaussian.log_density
        monkeypatch.setattr(Gaussian, "log_density", lambda self, x: 2 * honest(self, x))
        assert "noise in the log-density" in wrong(findings(sd3_overrides))

    def test_a_policy_that_moves(self, sd3_overrides, monkeypatch):
        """Dropout makes rollout and update two policies."""
        from arborl.models.sd3 import SD3Model

        honest = SD3Model.velocity
        monkeypatch.setattr(
            SD3Model, "velocity", lambda self, x, *rest: honest(self, x, *rest) + 0.01 * torch.randn_like(x)
        )
        found = findings(sd3_overrides)
        assert "first-update ratio" in wrong(found)
        assert "noise in the log-density" not in wrong(found)

    @pytest.mark.parametrize("kind", ["first", "sorted", "batch"])
    def test_a_reward_that_ignores_the_prompt_order(self, tmp_path: Path, monkeypatch, kind: str, capsys):
        (tmp_path / "mixed_up.py").write_text(
            "from arborl.worlds.mixture import place\n"
            "def first(images, prompts, columns): return place(images, [prompts[0]] * len(prompts), columns)\n"
            "def sorted_(images, prompts, columns): return place(images, sorted(prompts), columns)\n"
            "def batch(images, prompts, columns):\n"
            "    scores = place(images, prompts, columns)\n"
            "    return scores - scores[0]\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        name = {"sorted": "sorted_"}.get(kind, kind)
        chosen = [*QUICK, "rewards=none", f"rewards.mine.fn=mixed_up:{name}"]
        found = findings(chosen)
        assert "reward mine" in wrong(found)
        assert "in another order, or alone" in found["reward mine"].measured
        with pytest.raises(
            InputError, match=r"^rewards.mine: the same pictures in another order, or alone, score up to"
        ):
            train(load_config("mixture", [*chosen, "train.epochs=1", f"log.dir={tmp_path}"]))
        assert not list(tmp_path.glob("*/metrics.jsonl"))

    @pytest.mark.parametrize(("amount", "ok"), [("3", False), ("0.1", None), ("0", True)])
    def test_a_reward_of_chance(self, tmp_path: Path, monkeypatch, amount: str, ok: bool | None, capsys):
        """It is wrong where it drowns what pictures differ in, and said where it shows."""
        (tmp_path / "lucky.py").write_text(
            "import torch\n"
            "from arborl.worlds.mixture import place\n"
            "def lucky(images, prompts, columns):\n"
            f"    return place(images, prompts, columns) + {amount} * torch.rand(len(prompts))\n"
        )
        sys.modules.pop("lucky", None)
        monkeypatch.syspath_prepend(tmp_path)
        chosen = [*QUICK, "rewards=none", "rewards.mine.fn=lucky:lucky"]
        torch.manual_seed(0)
        found = findings(chosen)["reward mine"]
        assert found.ok is ok, found
        assert ("differently each time" in found.measured) == (ok is not True)
        config = load_config("mixture", [*chosen, "train.epochs=0", f"log.dir={tmp_path}"])
        if ok is None:  # three pictures of noise may differ by more, or by less
            return
        if not ok:
            with pytest.raises(
                InputError, match=r"^rewards.mine: the same pictures score up to .* differently each time"
            ):
                train(config)
            assert not list(tmp_path.glob("*/metrics.jsonl"))
        else:
            train(config)
            assert "not the same twice" not in capsys.readouterr().err

    def test_a_reward_that_does_not_answer_or_tells_nothing(self, tmp_path: Path, monkeypatch):
        (tmp_path / "silent.py").write_text(
            "import torch\n"
            "def raises(images, prompts, columns): raise ConnectionError('nobody there')\n"
            "def alike(images, prompts, columns): return torch.ones(len(prompts))\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        chosen = [*QUICK, "rewards=place", "rewards.a.fn=silent:raises", "rewards.b.fn=silent:alike"]
        found = findings(chosen)
        assert wrong(found) >= {"reward a", "reward b"}
        assert "nobody there" in found["reward a"].measured
        assert "all alike" in found["reward b"].measured

    def test_a_vae_that_overflows_in_half_precision(self, sd3_overrides, monkeypatch):
        """As some published ones do: fine in float32, too large for float16, and clamping hides it."""
        policy = make_policy([*sd3_overrides, "sample.decode_batch_size=2"])
        latents = torch.randn(2, *policy.latent_shape)
        _, whole = check_pictures(policy, latents, Prompts(["a dog"] * len(latents), {}))
        assert whole.ok
        vae = policy.model.pipe.vae
        with torch.no_grad():
            vae.decoder.conv_in.weight *= 3e4
            vae.decoder.conv_in.bias *= 3e4
        assert check_pictures(policy, latents, Prompts(["a dog"] * len(latents), {}))[1].ok, (
            "its group norms undo the scale, so float32 does not mind"
        )
        vae.half()
        honest = vae.decode
        monkeypatch.setattr(vae, "decode", lambda z, **named: honest(z.half(), **named))
        _, finding = check_pictures(policy, latents, Prompts(["a dog"] * len(latents), {}))
        assert finding.ok is False
        assert "overflow" in finding.measured
        assert "float16" in finding.measured
        assert "float32" in finding.advice

    def test_gradients_that_are_not_synchronised(self, tmp_path: Path):
        first, _ = unwrapped(tmp_path, "doctor", "--canary", "0", "--json")
        assert first.code != 0
        found = {row["what"]: row for row in map(json.loads, re.findall(r"^\{.*\}$", first.said, re.MULTILINE))}
        assert found["processes"]["ok"] is False, first.said
        assert "gradients are not synchronised" in found["processes"]["advice"]

    @pytest.mark.slow
    def test_gradients_that_are_not_synchronised_stop_a_run(self, tmp_path: Path):
        first, second = unwrapped(tmp_path, "train")
        assert 0 not in (first.code, second.code)
        (told,) = first.errors + second.errors
        assert "gradients differ between them after the first backward pass" in told
        assert "Traceback" not in first.said.split("error:")[0]


def unwrapped(folder: Path, *arguments: str) -> list[Ended]:
    """Two processes whose model nobody has wrapped."""
    (folder / "unwrapped.py").write_text(
        "from accelerate import Accelerator\n"
        "from arborl.worlds.mixture import MixtureModel as Model\n"
        "Accelerator.prepare_model = lambda self, model, **options: model\n"
    )
    return ranks(2, *arguments, "-c", "mixture", "model.family=unwrapped:Model", *QUICK, cwd=folder)


def test_the_command(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "-c", "mixture", "--canary", "0", *QUICK])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert "ok    first-update ratio: within" in said
    assert "forecast:" in said
    with pytest.raises(SystemExit) as stopped:
        main(
            ["doctor", "-c", "mixture", "--canary", "0", *QUICK, "rewards=none", "rewards.x.fn=jpeg", "kernel.eta=1e-6"]
        )
    assert stopped.value.code == 1
    assert "raise kernel.eta" in capsys.readouterr().out


class TestSpread:
    def test_within_and_between(self):
        scores = torch.tensor([[0.0, 2.0, 10.0, 12.0], [4.0, 6.0, 4.0, 6.0]])
        within, between = spread_of(scores, torch.tensor([0, 0, 1, 1]))
        assert within == pytest.approx(1.0)
        assert between == pytest.approx(float(torch.tensor([1.0, 11.0, 5.0, 5.0]).std(correction=0)))
        within, _ = spread_of(torch.tensor([[1.0, torch.nan, 3.0]]), torch.tensor([0, 0, 0]))
        assert within == pytest.approx(1.0)

    def test_advice_names_the_better_place(self):
        found = {0: spread_of(torch.tensor([[1.0, 5.0]]), torch.zeros(2, dtype=torch.long))}
        found |= {3: spread_of(torch.tensor([[1.0, 1.01]]), torch.zeros(2, dtype=torch.long))}
        assert "with the window at step 0 leaves differ" in check_spread(found, 3).advice


class TestMicroBatches:
    """Sizes left to auto, and that any combination works out."""

    @given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8))
    def test_the_choice_is_never_much_slower_than_the_best(self, seconds: list[float]):
        tried = [Trial(2**i, value) for i, value in enumerate(seconds)]
        chosen = choose(tried)
        assert chosen.seconds * 0.97 <= min(seconds)
        assert all(trial.seconds > chosen.seconds * 0.97 for trial in tried if trial.size < chosen.size)

    def test_what_does_not_fit_is_not_chosen(self):
        def run(size: int) -> None:
            if size > 8:
                raise torch.OutOfMemoryError("no room")

        tried = trials("train.batch_size", run, 64, CPU)
        assert not tried[-1].fits or tried[-1].size <= 8
        assert choose(tried).size <= 8
        with pytest.raises(InputError, match=r"train.batch_size=1: not even one row"):
            trials("train.batch_size", lambda size: run(9), 4, CPU)

    @given(most=st.integers(1, 100))
    def test_no_more_rows_than_there_are(self, most: int):
        sizes: list[int] = []
        trials("sample.batch_size", sizes.append, most, CPU)
        assert max(sizes) <= most

    @settings(max_examples=40)
    @given(
        prompts=st.integers(1, 9),
        total=st.none() | st.integers(1, 9),
        updates=st.integers(1, 9),
        size=st.integers(1, 40),
        processes=st.integers(1, 5),
    )
    def test_no_combination_divides_to_zero(
        self, prompts: int, total: int | None, updates: int, size: int, processes: int
    ):
        sizes = {"sample.num_prompts": prompts, "sample.prompts_per_epoch": total, "train.updates": updates}
        config = with_settings(MIXTURE, sizes)
        how = split_prompts(config.sample, processes)
        assert how.per_process * processes >= how.total >= 1
        assert (how.per_process - 1) * processes < how.total
        assert all(value >= 1 for value in max_rows(config, processes).values())
        lines = describe_batches(config, size, processes)
        counts = [int(number) for line in lines for number in re.findall(r"\d+", line)]
        assert min(counts) >= 1

    def test_what_is_found_is_not_looked_for_again_by_the_canary(self, monkeypatch):
        seen: list[object] = []
        honest = setup.find_batch_sizes

        def spy(config, *rest):
            seen.append(config.train.batch_size)
            return honest(config, *rest)

        monkeypatch.setattr(setup, "find_batch_sizes", spy)
        findings([*QUICK, "train.batch_size=auto"], seconds=0.5)
        assert seen[0] == "auto"
        assert all(type(size) is int for size in seen[1:])
        assert len(seen) > 1

    def test_auto_is_found_told_and_kept(self, tmp_path: Path, capsys):
        auto = ["sample.batch_size=auto", "sample.decode_batch_size=auto", "train.batch_size=auto"]
        run = train(load_config("mixture", [*QUICK, *auto, "train.epochs=2", f"log.dir={tmp_path}"]))
        said = capsys.readouterr().err
        assert len(re.findall(r"batch_size=auto: \d+ \(a row takes with 1: ", said)) == 3
        from arborl.config import read_config

        kept = read_config(run / "config.yaml")
        sizes = [kept.sample.batch_size, kept.sample.decode_batch_size, kept.train.batch_size]
        assert all(isinstance(size, int) and size >= 1 for size in sizes)

    @pytest.mark.parametrize("prompts", [1, 3])
    def test_more_updates_than_parents(self, tmp_path: Path, prompts: int):
        """Steps that are left without an edge are counted as skipped."""
        chosen = [f"sample.num_prompts={prompts}", "tree.w=1", "train.updates=9", "train.epochs=1", "loss.kl=0"]
        run = train(load_config("mixture", [*QUICK, *chosen, f"log.dir={tmp_path}"]))
        row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
        assert row["steps"] + row["steps_skipped"] == 9


def test_a_rate_that_breaks_the_model_is_a_finding():
    """Of the configured rate it is wrong; of ten times as much it is a remark."""
    found = findings([*QUICK, "train.learning_rate=1e29"], seconds=2.0)["canary"]
    assert found.ok is False
    assert "not finite" in found.measured
    assert "lower train.learning_rate" in found.advice
    tenfold = _broken_canary(["2 epochs at learning rate 1e-4: brightness +0 ± 1"], "model: …", 10.0, 1e-4)
    assert tenfold.ok is None
