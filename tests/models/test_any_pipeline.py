"""Seventeen pipelines by their own loops, held to one contract: each is what its own call makes of it.

By default two are tested in full, one with guidance and masks and one with two experts; of the others a picture and a
first update. The rest is `slow`.
"""

import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from arborl.cli import main
from arborl.config import load_config, with_settings
from arborl.config.schema import Config
from arborl.core.noise import fold
from arborl.core.schedule import shifted
from arborl.data.prompts import LocalPrompts, Prompts
from arborl.engine.contracts import loss_of
from arborl.engine.generate import generate, noise_of_seeds
from arborl.engine.method import make_plan
from arborl.engine.policy import Policy
from arborl.engine.rollout import Epoch, sample_trees
from arborl.engine.state import Ema, State, trainable
from arborl.engine.update import Stats, update
from arborl.models import Cond, any_pipeline, call, load_model, loop, model_class
from arborl.models.any_pipeline import AnyPipelineModel
from arborl.models.flux import pack
from arborl.models.loop import Loop, denoisers
from arborl.models.source import Source
from arborl.models.stepping import Stepper
from arborl.run.inputs import prompts_for
from bench import pipelines
from bench.more_pipelines import CALLS, PIPELINES

from conftest import (
    CPU,
    EDITORS,
    TEXTS,
    TINY,
    make,
    make_policy,
    moved,
    noise_picture,
    pipeline_overrides,
    tiny_overrides,
)
from launching import assert_same_run
from test_models import digests, edited, latest, refused, run_ok

IN_FULL = ("qwen_image", "wan22_a14b")


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def by_default(*names: str) -> list[Any]:
    """Every pipeline, the others slow."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in PIPELINES]


IN_FULL_BY_DEFAULT = by_default(*IN_FULL)
ONE_A_CALL = {
    "hunyuan_video15": "its VAE decodes one video",
    "qwen_image_edit_plus": "it takes one prompt",
    "wan_i2v": "it takes one picture",
    "wan22_5b_i2v": "it takes one picture",
    "qwen_image_edit": "its own batch is another picture than its own single calls",
}
"""Pipelines whose own call cannot be compared with for several prompts, and why."""
HEAVY = ("hunyuan_video15", "qwen_image_edit", "qwen_image_edit_plus")
"""Pipelines that fill every text up to a thousand tokens, or enlarge every picture to a thousand pixels."""


class Case(NamedTuple):
    """A pipeline as the engine has it, and its prompts."""

    name: str
    policy: Policy
    prompts: Prompts
    folder: Path

    @property
    def model(self) -> AnyPipelineModel:
        assert isinstance(self.policy.model, AnyPipelineModel)
        return self.policy.model

    @property
    def config(self) -> Config:
        return self.policy.config

    def some(self, *rows: int) -> "Case":
        return self._replace(prompts=self.prompts.take(rows))


@pytest.fixture(scope="module")
def settings(pipeline_folder) -> Callable[[str], Config]:
    """A pipeline's settings, read once: that takes as long as a tiny pipeline's picture."""
    return cache(lambda name: load_config("tree", pipeline_overrides(name, pipeline_folder(name))))


@pytest.fixture
def load(settings) -> Callable[..., Case]:
    """A pipeline, with settings of a test's own."""

    def loaded(name: str, *own: str) -> Case:
        config = with_settings(settings(name), {key: yaml.safe_load(v) for key, v in (text.split("=") for text in own)})
        model = load_model(config, CPU)
        assert isinstance(model, AnyPipelineModel)
        prompts = prompts_for(config, type(model), config.prompts.path)
        policy = Policy(model, config, Accelerator(cpu=True), loss_of(config))
        return Case(name, policy, prompts, Path(config.model.path))

    return loaded


# What a pipeline's own call makes of prompts.


def plain(case: Case, **options: Any) -> Any:
    """The pipeline as diffusers loads it, with Euler's steps. Its weights are frozen as the trainer's are: torch takes
    another product where a weight wants a gradient, which rounds differently.
    """
    pipe = diffusers.DiffusionPipeline.from_pretrained(case.folder, **options)
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
    pipe.scheduler = case.model.ode_scheduler(case.config)
    scale = case.config.sample.guidance_scale
    if case.name == "hunyuan_video15":
        pipe.guider = pipe.guider.new(enabled=scale > 1, guidance_scale=scale)
    return pipe


def own_arguments(case: Case) -> dict[str, Any]:
    """What the test says itself, so that what the model says is held to it."""
    sample = case.config.sample
    given = CALLS[case.name] | {"num_inference_steps": sample.num_steps}
    if case.name.startswith("qwen"):
        given |= {"true_cfg_scale": sample.guidance_scale}
        given |= {"negative_prompt": sample.negative_prompt or " "} if sample.guidance_scale > 1 else {}
    elif case.name != "hunyuan_video15":
        given |= {"guidance_scale": sample.guidance_scale}
    return given | ({"negative_prompt": sample.negative_prompt} if sample.negative_prompt else {})


def own_call(case: Case, pipe: Any, seeds: Sequence[int]) -> Tensor:
    """One call, for one prompt or for all of them together."""
    given, texts = own_arguments(case), list(case.prompts.texts)  # some write into the list that they are given
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    pictures = [case.prompts.columns["source"][i].open() for i in range(len(texts))] if case.name in EDITORS else []
    if len(texts) == 1:
        given |= {"prompt": texts[0], "generator": generators[0]} | ({"image": pictures[0]} if pictures else {})
    else:
        given |= {"prompt": texts, "generator": generators} | ({"image": pictures} if pictures else {})
        given |= {name: [given[name]] * len(texts) for name in ("negative_prompt",) if name in given}
    return pipe(**given, output_type="pt", return_dict=False)[0]


def seeds_of(case: Case) -> list[int]:
    """LTX draws from its picture's encoding by the generator of the noise; kept, it is that of seed 0."""
    return [0 if case.name == "ltx_i2v" else 5 + i for i in range(len(case.prompts))]


def drawn(case: Case, seeds: Sequence[int]) -> Tensor:
    """The engine's pictures, by the ODE from the noise of these seeds."""
    case.policy.encode(case.prompts)
    start = noise_of_seeds(case.policy, seeds)
    leaves = generate(case.policy, case.prompts, torch.arange(len(case.prompts)), start)
    return case.policy.decode(leaves[:, 0], case.prompts)


def check_pictures(case: Case, own_batch: bool = True) -> None:
    """The engine's pictures are the pipeline's own, bit for bit. Together they are within rounding: the engine encodes
    one prompt at a time, and the pipeline all at once.
    """
    pipe, seeds = plain(case), seeds_of(case)
    case.policy.encode(case.prompts)
    single = [(case.some(i), seeds[i : i + 1]) for i in range(len(seeds))]
    alone = torch.cat([own_call(one, pipe, seed) for one, seed in single])
    assert float(alone.std()) > 0.01  # a picture of something
    assert torch.equal(torch.cat([drawn(one, seed) for one, seed in single]), alone)
    if len(single) > 1:
        assert float((alone[0] - alone[1]).abs().max()) > 0.01
        expected = own_call(case, pipe, seeds) if own_batch and case.name not in ONE_A_CALL else alone
        torch.testing.assert_close(drawn(case, seeds), expected, rtol=0, atol=1e-5)


class TestPictures:
    """The rollout by the ODE is the pipeline's own call."""

    @pytest.mark.parametrize("name", PIPELINES)
    def test_with_guidance(self, load, name: str):
        if name in HEAVY:
            return check_pictures(load(name, "sample.num_steps=2").some(0))
        return check_pictures(load(name, "sample.num_steps=3").some(0, 1))

    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    @pytest.mark.parametrize("guidance", [1.0, slow(4.5)])
    def test_of_three_prompts_with_and_without_guidance(self, load, name: str, guidance: float):
        check_pictures(load(name, "sample.num_steps=4", f"sample.guidance_scale={guidance}"))

    @pytest.mark.parametrize("name", [param for param in IN_FULL_BY_DEFAULT if "flux" not in param.values[0]])
    def test_led_away_from_a_text(self, load, name: str):
        case = load(name, "sample.num_steps=3", "sample.negative_prompt=blue").some(0, 1)
        check_pictures(case)
        without = load(name, "sample.num_steps=3").some(0, 1)
        assert float((drawn(case, [0, 0]) - drawn(without, [0, 0])).abs().max()) > 1e-3

    @pytest.mark.parametrize("name", PIPELINES)
    def test_the_family_is_read_from_the_folder_and_brings_its_settings(self, settings, name: str):
        config = settings(name)
        assert (config.model.family, config.model.train, config.sample.sigmas) == ("pipeline", "lora", "pipeline")
        assert model_class(config).video == ("num_frames" in CALLS[name])


# Rows of a call.


def assert_near(found: Tensor, expected: Tensor, share: float = 1e-5) -> None:
    """Rows differ by no more than a share of their size: random weights answer with large numbers."""
    off, size = ((rows).flatten(1).norm(dim=1) for rows in (found - expected, expected))
    assert found.shape == expected.shape
    assert bool((off <= share * size).all()), f"off by {float((off / size).max()):.1e}"


@torch.no_grad()
def check_rows(case: Case) -> None:
    """Each row has its own prompt and its own level, whichever others it is called with."""
    moved(case.model)
    order, levels = [2, 0, 1, 0, 2], [1, 3, 0, 3, 2]
    t = case.policy.schedule().timestep[levels].float()
    cond = case.policy.encode(case.prompts)
    x = case.model.noise(fold(0, 0), torch.tensor([[i, 0, 0] for i in range(5)]))
    together = case.policy.predict(x, t, cond[torch.tensor(order)])
    assert together.dtype == torch.float32
    for i, prompt in enumerate(order):
        alone = case.policy.predict(x[i : i + 1], t[i : i + 1], case.policy.encode(case.prompts.take([prompt])))
        assert_near(together[i : i + 1], alone)


class Calls(list[tuple[str, int]]):
    """Which part was called with how many rows."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        for name, part in case.model.denoisers.items():
            part.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self.seen(name, args, kwargs), with_kwargs=True
            )

    def seen(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("hidden_states", args[0] if args else None)
        self.append((name, len(inputs)))


@torch.no_grad()
def check_groups(case: Case) -> None:
    """Rows of one group are one call of one part, or two with guidance; so ranks that have the same groups make the
    same calls.
    """
    cond = case.policy.encode(case.prompts)
    t = case.policy.schedule().timestep.float()
    groups, calls = case.policy.call_groups(t), Calls(case)
    for group in groups.unique():
        rows = (groups == group).nonzero().flatten()
        calls.clear()
        x = case.model.noise(fold(0, 0), torch.tensor([[i, 0, 0] for i in range(len(rows))]))
        case.policy.predict(x, t[rows], cond[torch.zeros(len(rows), dtype=torch.long)])
        assert len({part for part, _ in calls}) == 1
        assert len(calls) <= 2
        assert {count for _, count in calls} <= {len(rows), 2 * len(rows)}


class TestRows:
    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    def test_batch_equals_single(self, load, name: str):
        check_rows(load(name))

    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    def test_a_group_is_a_call(self, load, name: str):
        check_groups(load(name))

    def test_pictures_of_different_sizes_side_by_side(self, load, tmp_path: Path):
        """Each size is a call of its own."""
        rows = []
        for i, size in enumerate([(16, 16), (24, 16), (16, 32)]):
            noise_picture(i, size).save(tmp_path / f"{i}.png")
            rows.append({"prompt": TEXTS[i], "source": f"{i}.png"})
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        check_pictures(load("flux_kontext", f"prompts.path={tmp_path / 'prompts.jsonl'}"), own_batch=False)
        check_rows(load("flux_kontext", f"prompts.path={tmp_path / 'prompts.jsonl'}"))


# Kept embeddings.


def same_cond(one: Cond, other: Cond) -> bool:
    tensors = one.tensors.keys() == other.tensors.keys()
    return (
        tensors and one.host == other.host and all(torch.equal(one.tensors[n], other.tensors[n]) for n in one.tensors)
    )


class TestKeptEmbeddings:
    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    def test_they_are_the_encoders_own_also_from_disk(self, load, monkeypatch, tmp_path: Path, name: str):
        fresh = load(name, "prompts.cache=none")
        kept = load(name, f"prompts.cache={tmp_path}")
        assert text_encoders(fresh.model.pipe)
        assert not text_encoders(kept.model.pipe)
        expected = fresh.policy.encode(fresh.prompts)
        assert same_cond(kept.policy.encode(kept.prompts), expected)
        monkeypatch.setattr(any_pipeline, "_encoders", lambda *given: pytest.fail("encoded again"))
        again = load(name, f"prompts.cache={tmp_path}")
        assert same_cond(again.policy.encode(again.prompts), expected)

    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    def test_text_encoders_and_denoisers_are_never_both_in_memory(self, load, monkeypatch, tmp_path: Path, name: str):
        """While texts are encoded what is trained has no weights, and later the text encoders have none."""
        case, pipes = load(name, f"prompts.cache={tmp_path}"), []
        monkeypatch.setattr(Loop, "prepare", looked_at(Loop.prepare, lambda loop: pipes.append(weightless(loop.pipe))))
        held: list[Any] = []
        monkeypatch.setattr(Source, "load", lambda *given, **how: held.append(load_parts(*given, **how)) or held[-1])
        case.policy.encode(case.prompts)
        assert pipes
        for without in pipes:
            assert all(without[part] for part in denoisers(case.model.pipe))
            assert not any(gone for part, gone in without.items() if part.startswith("text_encoder"))
        (encoders,) = held
        assert all(gone for part, gone in weightless(encoders).items())

    def test_what_decides_an_embedding_decides_its_place(self, settings):
        """Another number of tokens, another text to be led away from, guidance or none; and nothing else."""

        def place(**own: Any) -> Path:
            config = with_settings(
                settings("qwen_image"), {key.replace("__", "."): value for key, value in own.items()}
            )
            embeddings = model_class(config).embeddings(config, CPU)
            return embeddings.path(TEXTS[0])

        shorter, led_away = place(model__max_sequence_length=16), place(sample__negative_prompt="blue")
        assert len({place(), shorter, led_away, place(sample__guidance_scale=1.0)}) == 4
        assert place(sample__guidance_scale=5.0) == place(sample__num_steps=7) == place(seed=3) == place()
        assert place(sample__resolution=64) == place(model__lora__rank=2) == place()

    def test_what_the_pipelines_own_index_says_decides_too(self, settings, tmp_path: Path):
        """A distilled pipeline encodes no text to be led away from, by the same encoders."""
        config = settings("flux2_klein")
        other = edited(Path(config.model.path), tmp_path / "pipe", "model_index.json", is_distilled=True)
        places = set()
        for path in (config.model.path, str(other)):
            some = with_settings(config, {"model.path": path})
            places.add(model_class(some).embeddings(some, CPU).path(TEXTS[0]).name)
        assert len(places) == 2

    def test_a_picture_is_known_by_what_is_in_it(self, load, tmp_path: Path):
        """At the same place another one is encoded anew."""
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "source": "a.png"}))
        noise_picture(0, (16, 16)).save(tmp_path / "a.png")
        case = load("flux_kontext", f"prompts.path={tmp_path / 'prompts.jsonl'}")
        first = case.policy.encode(case.prompts)
        noise_picture(1, (16, 16)).save(tmp_path / "a.png")
        assert not same_cond(case.policy.encode(case.prompts), first)
        noise_picture(0, (16, 16)).save(tmp_path / "a.png")
        assert same_cond(case.policy.encode(case.prompts), first)


def text_encoders(pipe: Any) -> list[str]:
    return [name for name, part in pipe.components.items() if name.startswith("text_encoder") and part is not None]


def weightless(pipe: Any) -> dict[str, bool]:
    """Which of a pipeline's networks have no weights."""
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {name: all(p.is_meta for p in module.parameters()) for name, module in modules.items()}


def looked_at(real: Callable[..., Any], look: Callable[[Any], None]) -> Callable[..., Any]:
    """A method that shows what it is called on first."""
    return lambda own, *given, **how: look(own) or real(own, *given, **how)


load_parts = Source.load


# Training.


def first_update(case: Case) -> Stats:
    """One rollout and one optimizer step on it, by advantages of chance."""
    parameters, key, count = trainable(case.policy.module), fold(case.config.seed, 0), len(case.prompts)
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.02)
    state = State(parameters, optimizer, Ema(parameters, 0.0), case.policy.keep_beside(parameters))
    plan = make_plan(case.config, case.policy.schedule(), 0)
    local = LocalPrompts(case.prompts, torch.arange(count), count)
    rollout = sample_trees(case.policy, Epoch(0, plan, key, local), case.policy.encode(case.prompts))
    advantage = torch.randn(rollout.log_density.shape, generator=torch.Generator().manual_seed(0)).double()
    keep = plan.stochastic.expand(count, -1)
    return update(case.policy, state, loss_of(case.config), rollout, advantage, keep)


ROUNDED = ("qwen_image_edit", "qwen_image_edit_plus")
"""Pipelines whose rows differ in form, so that rollout and update may put others together: a call of another number of
rows rounds differently.
"""


def in_calls_of(size: int) -> list[str]:
    """Rollout and update in calls of one size, which round alike."""
    return [f"sample.batch_size={size}", f"train.batch_size={size}", "sample.pad_batches=true"]


class TestTraining:
    @pytest.mark.parametrize("name", PIPELINES)
    def test_a_first_update(self, load, name: str):
        """The ratio is 1, LoRA alone moves, and off it is the base bit for bit."""
        heavy = name in HEAVY
        case = load(name, "sample.num_steps=3", "tree.w=1", *in_calls_of(1 if heavy else 4))
        case = case.some(0) if heavy else case.some(0, 1)
        weights = {name: p.detach().clone() for name, p in case.policy.module.named_parameters()}
        rest = {
            f"{part}.{name}": (p, p.detach().clone())
            for part, module in case.model.pipe.components.items()
            if isinstance(module, nn.Module) and part not in case.model.trained
            for name, p in module.named_parameters()
        }
        cond, t = case.policy.encode(case.prompts.take([0])), case.policy.schedule().timestep[:1].float()
        x = case.model.noise(fold(0, 0), torch.tensor([[0, 0, 0]]))
        with torch.no_grad():
            base = case.policy.predict(x, t, cond)
        stats = first_update(case)
        assert float(stats.ratio_error) <= (1e-5 if name in ROUNDED else 0.0)
        assert stats.steps == 1
        assert stats.grad_norm > 0
        changed = {name for name, p in case.policy.module.named_parameters() if not torch.equal(p, weights[name])}
        assert changed
        assert all(".lora_" in name for name in changed)
        assert all(torch.equal(p, before) and not p.requires_grad for p, before in rest.values())
        assert torch.equal(case.policy.predict(x, t, cond, "reference"), base)
        with torch.no_grad():
            assert not torch.equal(case.policy.predict(x, t, cond), base)

    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    def test_two_epochs_by_the_command_line(self, trained_run, name: str):
        """The folder is as it was, every group of weights got a gradient, and what is kept is LoRA alone."""
        run = trained_run(name, "log.record_every=2")
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows[:2]:
            assert row["ratio_error"] <= (1e-5 if name in ROUNDED else 0.0)
            assert row["steps"] == 1
            assert math.isfinite(row["reward"])
        assert "no gradient reached" not in run.said, run.said
        assert "ratio is off" not in run.said, run.said
        assert digests(run.pipeline) == run.before
        names = load_file(latest(run.folder) / "weights.safetensors").keys()
        assert all(".lora_" in name for name in names)
        assert (run.folder / "trees" / "epoch_000000.png").is_file()


class TrainedRun(NamedTuple):
    folder: Path
    said: str
    pipeline: Path
    before: dict[str, str]  # digests of the pipeline's files


@pytest.fixture(scope="module")
def trained_run(pipeline_folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainedRun]:
    """Two epochs by the command line, with settings of a test's own; once."""
    runs: dict[tuple[str, ...], TrainedRun] = {}

    def trained(name: str, *own: str) -> TrainedRun:
        if (name, *own) not in runs:
            pipeline, to, said = pipeline_folder(name), tmp_path_factory.mktemp("runs"), io.StringIO()
            before = digests(pipeline)
            settings = [*pipeline_overrides(name, pipeline), *in_calls_of(8), "train.epochs=2"]
            with redirect_stderr(said):
                run_ok("train", *settings, "train.learning_rate=0.02", f"log.dir={to}", "run_name=x", *own)
            runs[name, *own] = TrainedRun(to / "x", said.getvalue(), pipeline, before)
        return runs[name, *own]

    return trained


class TestExport:
    """`arborl export` loads what it wrote with plain diffusers, and compares; here once more by hand."""

    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    def test_a_lora(self, trained_run, tmp_path: Path, capsys, name: str):
        run_ok("export", str(trained_run(name, "log.record_every=2").folder), str(tmp_path / "out"))
        assert "gives the trainer's own picture" in " ".join(capsys.readouterr().out.split())
        facts = json.loads((tmp_path / "out" / "export.json").read_text())["check"]
        assert facts["largest"] <= 1e-4
        assert facts["from_base"] > 1e-4  # training did something
        experts = name in ("wan22_a14b", "wan_i2v")
        files = {path.name for path in (tmp_path / "out").glob("*pytorch_lora_weights.safetensors")}
        second = {"transformer_2_pytorch_lora_weights.safetensors"} if experts else set()
        assert files == {"pytorch_lora_weights.safetensors"} | second
        for file in files:
            weights = load_file(tmp_path / "out" / file)
            assert any(bool(weight.any()) for key, weight in weights.items() if key.endswith("lora_B.weight"))

    @pytest.mark.parametrize("name", by_default("wan22_a14b"))
    def test_a_lora_merged(self, trained_run, tmp_path: Path, capsys, name: str):
        check_export_of_a_pipeline(trained_run(name, "log.record_every=2"), tmp_path / "out", capsys, "--merge")

    @pytest.mark.parametrize("name", by_default("qwen_image"))
    def test_a_full_fine_tune(self, trained_run, tmp_path: Path, capsys, name: str):
        check_export_of_a_pipeline(trained_run(name, "model.train=full", "train.epochs=1"), tmp_path / "out", capsys)


def check_export_of_a_pipeline(run: TrainedRun, to: Path, capsys, *flags: str) -> None:
    run_ok("export", str(run.folder), str(to), *flags)
    told = " ".join(capsys.readouterr().out.split())
    assert "weights are there" in told
    assert "gives the trainer's own picture" in told
    pipe = diffusers.DiffusionPipeline.from_pretrained(to)
    base = diffusers.DiffusionPipeline.from_pretrained(run.pipeline)
    for part, module in base.components.items():
        if isinstance(module, nn.Module):
            pairs = zip(module.parameters(), getattr(pipe, part).parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs) == (not part.startswith("transformer"))


# By other settings, and by other commands.


class SteppedError(Exception):
    """A scheduler has got its velocity."""


def first_velocity(case: Case, pipe: Any) -> Tensor:
    """What arrives first at the scheduler in the pipeline's own call from the noise of seed 0."""
    found: list[Tensor] = []

    def step(velocity: Tensor, *given: Any, **how: Any) -> None:
        found.append(velocity)
        raise SteppedError

    pipe.scheduler.step = step
    with pytest.raises(SteppedError):
        own_call(case, pipe, [0])
    return found[0]


HALF = ["model.dtype=bfloat16", "train.mixed_precision=bf16"]


class TestOtherSettings:
    @pytest.mark.parametrize("name", by_default(*IN_FULL, "flux_kontext", "ltx_i2v"))
    def test_half_precision(self, load, name: str):
        """As on a GPU: a model call is the pipeline's own bit for bit, and rows share it as they do in float32."""
        case, whole = load(name, *HALF).some(0), load(name)
        cond, x = case.policy.encode(case.prompts), noise_of_seeds(case.policy, [0])[:, 0]
        whole.policy.encode(whole.prompts)
        assert case.model.messages == whole.model.messages
        with torch.no_grad():
            velocity = case.policy.predict(x, case.policy.schedule().timestep[:1].float(), cond)
        assert velocity.dtype == torch.float32
        if case.prompts.columns:  # a plain call bears no VAE in float32 beside a transformer in bfloat16
            assert velocity.isfinite().all()
            return
        pipe = plain(case, torch_dtype={"default": torch.bfloat16, "vae": torch.float32})
        assert pipe.transformer.dtype == torch.bfloat16
        expected = first_velocity(case, pipe)
        free = case.model.stepper.free
        assert torch.equal(velocity, expected.float().flatten(1)[:, free.arrival] if free else expected.float())

    @pytest.mark.slow
    @pytest.mark.parametrize("name", PIPELINES)
    def test_half_precision_trained_and_exported(self, pipeline_folder, tmp_path: Path, name: str):
        overrides = [*pipeline_overrides(name, pipeline_folder(name)), *HALF, "train.learning_rate=0.02"]
        run_ok("train", *overrides, "train.epochs=1", f"log.dir={tmp_path}", "run_name=x")
        run_ok("export", str(tmp_path / "x"), str(tmp_path / "out"))
        facts = json.loads((tmp_path / "out" / "export.json").read_text())["check"]
        assert facts["rounded"]
        assert facts["mean"] < 0.01

    @pytest.mark.slow
    @pytest.mark.parametrize("name", PIPELINES)
    def test_gradient_checkpointing_changes_no_gradient(self, load, name: str):
        plain, checkpointed = (load(name, f"train.gradient_checkpointing={how}").some(0) for how in ("false", "true"))
        found: list[dict[str, Tensor]] = []
        for case in (plain, checkpointed):
            cond, x = case.policy.encode(case.prompts), moved(case.model).noise(fold(0, 0), torch.zeros(1, 3).long())
            case.policy.predict(x, case.policy.schedule().timestep[:1].float(), cond).square().sum().backward()
            found.append({n: p.grad for n, p in case.policy.module.named_parameters() if p.grad is not None})
        assert found[0]
        assert found[0].keys() == found[1].keys()
        for name, gradient in found[0].items():
            assert_near(found[1][name][None], gradient[None])

    @pytest.mark.parametrize("part", ["transformer", "transformer_2"])
    def test_one_expert_of_two(self, load, part: str):
        """The other is called, and is not trained."""
        case = load("wan22_a14b", f"model.components=[{part}]", *in_calls_of(4)).some(0)
        assert first_update(case).steps == 1
        trained = {
            name for name, module in case.model.denoisers.items() for p in module.parameters() if p.requires_grad
        }
        assert trained == {part}

    def test_levels_that_are_not_the_pipelines_own(self, load):
        """An even grid, as a hand-written family has it; both experts are asked for their own."""
        case = load("wan22_a14b", "sample.sigmas=shift", "sample.shift=2.0").some(0)
        expected = shifted(6, 2.0)
        assert case.policy.schedule().sigma.tolist() == expected.sigma.tolist()
        check_groups(case)
        assert float(first_update(case).ratio_error) == 0

    def test_distillation_leaves_no_guidance(self, pipeline_folder, capsys):
        """A scale that the call ignores is an error, as it is for a hand-written family."""
        folder = pipeline_folder("flux2_klein", is_distilled=True)
        words = ["sample.guidance_scale=3", "allowed: 1"]
        refused(["train", *pipeline_overrides("flux2_klein", folder), "train.epochs=1"], words, capsys)

    @pytest.mark.slow
    @pytest.mark.parametrize("own", [{}, {"guidance_scale": 1.0}, {"enabled": False}])
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    def test_guidance_that_is_a_part(self, pipeline_folder, tmp_path: Path, own: dict[str, Any], scale: float):
        """It is as strong as the settings say, whatever its own are."""
        beside = pipeline_folder("hunyuan_video15").parent / "prompts.jsonl"
        folder = edited(pipeline_folder("hunyuan_video15"), tmp_path / "pipe", "guider/guider_config.json", **own)
        overrides = [*pipeline_overrides("hunyuan_video15", folder), f"prompts.path={beside}", "sample.num_steps=2"]
        policy = make_policy([*overrides, f"sample.guidance_scale={scale}"], "tree")
        prompts = prompts_for(policy.config, type(policy.model), str(beside))
        check_pictures(Case("hunyuan_video15", policy, prompts, folder).some(0))


class TestCommands:
    """What is given beside a prompt is known to them all."""

    @pytest.mark.parametrize("name", ["flux_kontext", "ltx_i2v"])
    def test_sample(self, pipeline_folder, tmp_path: Path, name: str):
        """Each picture is the one of its seed, and so the same as of a plain call."""
        run_ok("sample", *pipeline_overrides(name, pipeline_folder(name)), "-n", "2", "-o", str(tmp_path))
        rows = [json.loads(line) for line in (tmp_path / "index.jsonl").read_text().splitlines()]
        assert [(row["prompt"], row["seed"]) for row in rows] == [(TEXTS[0], 0), (TEXTS[1], 1)]

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, 1])
    def test_export_of_a_video_from_a_picture(self, trained_run, tmp_path: Path, seed: int):
        """Its first frame is drawn from the picture's encoding, by whichever seed."""
        run_ok("export", str(trained_run("ltx_i2v", f"seed={seed}").folder), str(tmp_path / "out"))

    def test_eval_and_embed(self, pipeline_folder, tmp_path: Path):
        folder = pipeline_folder("flux_kontext")
        overrides = [*pipeline_overrides("flux_kontext", folder), f"prompts.cache={tmp_path}"]
        run_ok("embed", str(folder.parent / "prompts.jsonl"), *overrides)
        assert len(list(tmp_path.rglob("*.safetensors"))) == len(TEXTS)
        run_ok("eval", *overrides)
        assert len(list(tmp_path.rglob("*.safetensors"))) == len(TEXTS)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["flux_kontext", "wan22_a14b", "ltx_i2v"])
    def test_doctor(self, pipeline_folder, tmp_path: Path, capsys, name: str):
        """Down to the canary, whatever it sings after a second."""
        overrides = [*pipeline_overrides(name, pipeline_folder(name)), f"log.dir={tmp_path}"]
        with pytest.raises(SystemExit):
            main(["doctor", *overrides, "--canary", "1", "--json"])
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {row["what"] for row in found if row["ok"] is False} <= {"canary"}
        assert "canary" in {row["what"] for row in found}

    @pytest.mark.slow
    def test_a_run_goes_on(self, pipeline_folder, tmp_path: Path):
        overrides = pipeline_overrides("flux_kontext", pipeline_folder("flux_kontext"))
        run_ok("train", *overrides, "train.epochs=1", f"log.dir={tmp_path}", "run_name=x")
        run_ok("train", "--resume", str(tmp_path / "x"), "train.epochs=2")
        run_ok("train", *overrides, "train.epochs=2", f"log.dir={tmp_path}", "run_name=y")
        assert_same_run(tmp_path / "y", tmp_path / "x", ended_at=1)


@pytest.mark.parametrize("name", ["SanaVideoPipeline", "SanaImageToVideoPipeline"])
def test_a_video_is_known_as_one(name: str):
    """Also where its frames are called otherwise; or it is refused."""
    assert call.shape_problem(getattr(diffusers, name)) or AnyPipelineModel._of(name, "").video


@pytest.mark.parametrize("name", PIPELINES)
def test_pictures_are_told_from_numbers(settings, name: str):
    """What a call takes as a number or a switch is no picture, whatever it is called."""
    for argument, parameter in call.takes(model_class(settings(name)).cls).items():
        assert not (isinstance(parameter.default, int | float) and call.is_pictures(argument)), argument


# Beside hand-written families.


class Pair(NamedTuple):
    """One folder, driven by a family of its own and by its own loop, with the same LoRA."""

    hand: Any
    loop: AnyPipelineModel

    def packed(self, x: Tensor) -> Tensor:
        """Latents as they go round in the pipeline's loop."""
        return pack(x) if self.hand.pipeline == "FluxPipeline" else x


FAMILIES = {
    "sd3": ("sd3", {}, {}),
    "sd3, dynamic shift, patches of 1": ("sd3", {"use_dynamic_shifting": True}, {"patch_size": 1}),
    "sd3, dynamic shift, patches of 4": ("sd3", {"use_dynamic_shifting": True}, {"patch_size": 4}),
    "flux": ("flux", {}, {}),
    "flux, stretched to the end": ("flux", {"shift_terminal": 0.1}, {}),
    "wan": ("wan", {}, {}),
}


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., Pair]:
    def made(which: str, *own: str) -> Pair:
        family, scheduler, transformer = FAMILIES[which]
        pipe = pipelines.build(family)
        if transformer:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                sizes = dict(pipe.transformer.config) | transformer
                pipe.register_modules(transformer=pipelines.randomised(type(pipe.transformer).from_config(sizes), 0.2))
        pipe.save_pretrained(tmp_path)
        file = tmp_path / "scheduler" / "scheduler_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | scheduler))
        overrides = [*tiny_overrides(family, tmp_path), "sample.sigmas=pipeline", "model.lora.alpha=8", *own]
        hand = make(overrides, "tree")[1]
        layers = f"model.lora.targets=[{','.join(hand.lora_layers(hand.module))}]"
        loop = make([*overrides, "model=pipeline", "model.lora.alpha=8", layers, *TINY[family], *own], "tree")[1]
        for model in (hand, loop):
            draw = torch.Generator().manual_seed(3)
            for name, parameter in model.module.named_parameters():
                if ".lora_" in name:
                    parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
        return Pair(hand, loop)

    return made


def assert_alike(pair: Pair) -> None:
    """Levels, velocities, gradients and pictures."""
    for steps in (3, 10):
        hand, loop = pair.hand.schedule(steps), pair.loop.schedule(steps)
        torch.testing.assert_close(loop.sigma, hand.sigma, rtol=0, atol=1e-6)
        torch.testing.assert_close(loop.sigma_next, hand.sigma_next, rtol=0, atol=1e-6)
        torch.testing.assert_close(loop.timestep, hand.timestep, rtol=0, atol=1e-3)
    assert pair.loop.default_shift(pair.loop.config) == pytest.approx(pair.hand.default_shift(pair.hand.config))
    x, t = pair.hand.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]])), loop.timestep[[1, 5]].float()
    (v, gradients), (expected, hand_gradients) = (
        answers(model, latents, t) for model, latents in ((pair.loop, pair.packed(x)), (pair.hand, x))
    )
    assert_near(v, pair.packed(expected))
    assert gradients.keys() == hand_gradients.keys()
    for name, gradient in gradients.items():
        assert_near(gradient[None], hand_gradients[name][None])
    torch.testing.assert_close(pair.loop.decode(pair.packed(x)), pair.hand.decode(x), rtol=0, atol=1e-5)


def answers(model: Any, x: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Velocities, and the gradients of their squares."""
    v = model.predict(x, t, model.encode(TEXTS[:2]))
    names, parameters = zip(*((n, p) for n, p in model.module.named_parameters() if p.requires_grad), strict=True)
    return v.detach(), dict(zip(names, torch.autograd.grad(v.square().sum(), parameters), strict=True))


class TestHandWrittenFamilies:
    @pytest.mark.parametrize("which", [slow(which) if "of 1" in which else which for which in FAMILIES])
    def test_they_are_what_their_own_loops_are(self, pair, which: str):
        assert_alike(pair(which, "sample.guidance_scale=3"))

    @pytest.mark.slow
    @pytest.mark.parametrize("which", ["sd3", "flux", "wan"])
    def test_without_guidance_too(self, pair, which: str):
        assert_alike(pair(which, "sample.guidance_scale=1"))


class AskedError(Exception):
    """A scheduler has its levels."""


def check_levels(case: Case) -> None:
    """The table of the engine is the one that the pipeline's own call has its scheduler make."""
    pipe = plain(case)
    real = pipe.scheduler.set_timesteps

    @wraps(real)  # loops look at the names of its arguments
    def made(*given: Any, **how: Any) -> None:
        real(*given, **how)
        raise AskedError

    pipe.scheduler.set_timesteps = made
    with pytest.raises(AskedError):
        own_call(case, pipe, [0])
    table = case.policy.schedule()
    assert table.sigma.float().tolist() == pipe.scheduler.sigmas[:-1].tolist()
    assert table.sigma_next.float().tolist() == pipe.scheduler.sigmas[1:].tolist()
    assert table.timestep.float().tolist() == pipe.scheduler.timesteps.tolist()


class TestLevels:
    @pytest.mark.parametrize("name", [param for param in IN_FULL_BY_DEFAULT if "flux2" not in param.values[0]])
    def test_they_are_those_of_the_pipelines_own_call(self, load, name: str):
        check_levels(load(name, "sample.num_steps=5").some(0))

    @pytest.mark.parametrize("steps", [5, 12])
    @pytest.mark.parametrize("name", ["flux2_klein", "flux2"])
    def test_flux2_shifts_by_the_number_of_steps(self, load, name: str, steps: int):
        check_levels(load(name, f"sample.num_steps={steps}").some(0))


# The pipeline is never left changed.


def state_of(pipe: Any) -> dict[str, Any]:
    """All that a call could leave behind, as it is: identities, and tensors' versions."""
    found: dict[str, Any] = {"random": torch.get_rng_state().tolist(), "gradients": torch.is_grad_enabled()}
    for owner, thing in {"pipe": pipe, "scheduler": pipe.scheduler}.items():
        found[owner] = id(thing), type(thing), {name: id(value) for name, value in vars(thing).items()}
    for part, module in pipe.components.items():
        for name, layer in module.named_modules() if isinstance(module, nn.Module) else ():
            hooks = [list(each) for each in (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)]
            flags = layer.training, getattr(layer, "_hf_hook", None), "forward" in vars(layer)
            weights = [(id(p), p._version, p.requires_grad, p.grad is None) for p in layer.parameters(recurse=False)]
            found[f"{part}.{name}"] = hooks, flags, weights
    return found


def used(case: Case) -> list[Tensor]:
    """Everything that a pipeline is used for; prompts are encoded anew."""
    cond = case.policy.encode(case.prompts)
    x = case.model.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]]))
    v = case.policy.predict(x, case.policy.schedule().timestep[:2].float(), cond)
    return [v.detach(), case.policy.decode(x, case.prompts), noise_of_seeds(case.policy, [3])]


class PlantedError(Exception):
    """Not one that a pipeline raises."""


def fail_at(case: Case, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant an error at a step of the call; at `guidance` it is the second half that fails."""
    pipe = type(case.model.pipe)
    transformer = type(case.model.pipe.transformer), "forward"
    cls, name = {
        "encode_prompt": (pipe, "encode_prompt"),
        "prepare_latents": (pipe, "prepare_latents"),
        "set_timesteps": (loop._Scheduler, "set_timesteps"),
        "transformer": transformer,
        "guidance": transformer,
        "step": (loop._Scheduler, "step"),
        "decode": (type(case.model.pipe.vae), "decode"),
    }[where]
    real, calls = getattr(cls, name), itertools.count()

    @wraps(real)  # loops look at the names of arguments
    def fails(*given: Any, **how: Any) -> Any:
        if where == "guidance" and next(calls) % 2 == 0:
            return real(*given, **how)
        raise PlantedError

    monkeypatch.setattr(cls, name, fails)


STEPS = ("encode_prompt", "prepare_latents", "set_timesteps", "transformer", "guidance", "step", "decode")


class TestNothingIsLeftBehind:
    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    def test_by_calls(self, load, name: str):
        case = load(name, "prompts.cache=none").some(0, 1)
        used(case)  # what libraries find out once stays
        before = state_of(case.model.pipe)
        used(case)
        assert state_of(case.model.pipe) == before

    @pytest.mark.parametrize("name", IN_FULL)
    def test_by_an_error_at_any_step(self, load, monkeypatch, name: str):
        case = load(name, "prompts.cache=none").some(0, 1)
        expected, before = used(case), state_of(case.model.pipe)
        for where in STEPS:
            with monkeypatch.context() as patched:
                fail_at(case, where, patched)
                with pytest.raises(PlantedError):
                    used(case)
            assert state_of(case.model.pipe) == before, where
            assert all(map(torch.equal, used(case), expected)), where

    @pytest.mark.parametrize("name", IN_FULL_BY_DEFAULT)
    def test_two_threads_at_once(self, load, name: str):
        """Of model calls, not of decoding: Wan's VAE keeps its frames on itself while it works."""
        case = load(name).some(0, 1)
        cond, x = case.policy.encode(case.prompts), case.model.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]]))
        t = case.policy.schedule().timestep[[0, 0, 1, 3]].float()

        def answer(i: int) -> Tensor:
            row = torch.tensor([i % 2])
            return case.policy.predict(x[row], t[[i % 4]], cond[row]).detach()

        expected = [answer(i) for i in range(12)]
        with ThreadPoolExecutor(2) as pool:
            assert all(map(torch.equal, pool.map(answer, range(12)), expected))


# Bad input is one line, and nothing is written.

BAD = {
    "an argument that is near another": ("qwen_image", ["model.call.guidance_scal=2"], ["nearest: guidance_scale"]),
    "an argument with a setting of its own": ("qwen_image", ["model.call.height=32"], ["try: sample.resolution"]),
    "an argument that the engine gives": ("qwen_image", ["model.call.latents=1"], ["model.call.latents=1"]),
    "an argument of another kind": ("qwen_image", ["model.call.attention_kwargs={}"], ["a number, a text"]),
    "a part that is none": ("qwen_image", ["model.components=transformer_9"], ["no such part", "allowed: transformer"]),
    "another part": ("wan22_a14b", ["model.components=transformer_9"], ["allowed: transformer, transformer_2"]),
    "half a gradient": ("qwen_image", ["train.cfg_grad=cond"], ["allowed: both"]),
    "a text that nobody takes": ("flux2_klein", ["sample.negative_prompt=blue"], ["takes none", "an empty one"]),
    "a text without guidance": ("wan22_a14b", ["sample.negative_prompt=blue", "sample.guidance_scale=1"], ["guidance"]),
    "a text that guidance does not know": (
        "flux_kontext",
        ["sample.negative_prompt=blue"],
        ["model.call.true_cfg_scale"],
    ),
    "layers that are none": ("qwen_image", ["model.lora.targets=[nose]"], ["to_q"]),
    "a size that is refused": ("ltx", ["sample.resolution=17"], ["divisible by 32", "try: other sizes"]),
    "a size that becomes another": ("qwen_image", ["sample.resolution=17"], ["sample.resolution=17"]),
    "frames that become others": ("wan22_a14b", ["sample.num_frames=6"], ["sample.num_frames=6", "5"]),
    "frames of a picture": ("qwen_image", ["sample.num_frames=5"], ["sample.num_frames=5", "no videos"]),
}


@pytest.fixture
def refuses(tmp_path: Path, pipeline_folder, capsys) -> Callable[..., None]:
    def check(name: str, own: list[str], words: list[str], folder: Path | None = None, without: str = "") -> None:
        folder = folder or pipeline_folder(name)
        replaced = {without, *(text.split("=")[0] for text in own)}
        given = [text for text in pipeline_overrides(name, folder) if text.split("=")[0] not in replaced]
        places = [f"log.dir={tmp_path / 'runs'}", f"prompts.cache={tmp_path / 'kept'}"]
        before = sorted(tmp_path.rglob("*"))
        refused(["train", *given, "train.epochs=1", *places, *own], words, capsys)
        assert sorted(tmp_path.rglob("*")) == before

    return check


@pytest.mark.parametrize("what", BAD)
def test_bad_settings(refuses, what: str):
    name, own, words = BAD[what]
    refuses(name, own, [own[0].split("=")[0], *words])


def test_a_call_of_a_hand_written_family(sd3_overrides, capsys, tmp_path: Path):
    own = [*sd3_overrides, f"log.dir={tmp_path / 'runs'}", "model.call.x=1"]
    refused(["train", *own], ["model.call.x=1", "a call of its own", "try: model.family=pipeline"], capsys)
    assert not (tmp_path / "runs").exists()


PICTURES = {
    "no such column": (["a.png"], "given", ["has no column 'source'", "allowed: given"]),
    "no such picture": (["b.png"], "source", ["there is no picture b.png"]),
    "half a picture": (["cut.png"], "source", ["picture cut.png cannot be read", "truncated"]),
    "no picture at all": (["text.png"], "source", ["picture text.png cannot be read"]),
    "nothing in a line": (["a.png", None], "source", ["prompt 2 has nothing in column 'source'"]),
    "a number": (["a.png", 3], "source", ["prompt 2 has 3", "allowed: the path of a picture"]),
    "nothing in a list": ([["a.png", ""]], "source", ["prompt 1 has ['a.png', '']"]),
}


class TestBadPictures:
    @pytest.mark.parametrize("what", PICTURES)
    def test_in_a_prompt_file(self, refuses, tmp_path: Path, what: str):
        values, column, words = PICTURES[what]
        noise_picture(0, (16, 16)).save(tmp_path / "a.png")
        (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
        (tmp_path / "text.png").write_text("a picture")
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(json.dumps({"prompt": "a", column: value}) for value in values))
        refuses("flux_kontext", [f"prompts.path={file}"], [f"prompts.path={file}", *words])

    def test_without_a_prompt_file(self, refuses):
        words = ["prompts.path: model.call takes source from it", "allowed: a .jsonl file"]
        refuses("flux_kontext", ["prompts.path="], words)

    def test_of_a_file_without_columns(self, refuses, tmp_path: Path):
        (tmp_path / "prompts.txt").write_text("a cat")
        words = ["has no column 'source', which model.call names"]
        refuses("flux_kontext", [f"prompts.path={tmp_path / 'prompts.txt'}"], words)

    @pytest.mark.parametrize("name", [name for name in EDITORS if name != "flux_kontext"])
    def test_for_a_pipeline_that_is_given_none(self, refuses, name: str):
        refuses(name, [], ["try: model.call.image=column:NAME"], without="model.call.image")


PLACES = {
    "encodes a prompt nowhere": ({"_class_name": "OmniGenPipeline"}, ["has no encode_prompt in its call"]),
    "remembers steps": ({"_class_name": "Flux2KleinKVPipeline"}, ["from one step to the next"]),
    "has two states": ({"_class_name": "LTX2Pipeline"}, ["two states"]),
    "is in no diffusers": ({"_class_name": "MyPipeline"}, ["MyPipeline", "a newer diffusers"]),
    "is no pipeline": ({"_class_name": "AutoencoderKL"}, ["AutoencoderKL", "code in a model's folder is never run"]),
    "is of diffusion": ({"scheduler": ["diffusers", "DDIMScheduler"]}, ["DDIMScheduler", "FlowMatchEuler"]),
    "is of diffusion, by its settings": ({"scheduler": ["diffusers", "UniPCMultistepScheduler"]}, ["use_flow_sigmas"]),
}


class TestBadPipelines:
    @pytest.mark.parametrize("what", PLACES)
    def test_of_another_shape(self, refuses, pipeline_folder, tmp_path: Path, what: str):
        index, words = PLACES[what]
        folder = edited(pipeline_folder("qwen_image"), tmp_path / "pipe", "model_index.json", **index)
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}))
        refuses("qwen_image", [], [f"model.path={folder}", *words], folder)

    @pytest.mark.parametrize("part", ["text_encoder", "transformer", "vae", "scheduler"])
    def test_code_in_a_folder_is_never_run(self, refuses, pipeline_folder, tmp_path: Path, part: str):
        index = {part: ["my_module", "MyPart"]}
        folder = edited(pipeline_folder("qwen_image"), tmp_path / "pipe", "model_index.json", **index)
        code = f"open({str(tmp_path / 'imported')!r}, 'w').close()\nclass MyPart: pass\n"
        for place in (folder, folder / part):
            (place / "my_module.py").write_text(code)
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}))
        words = ["MyPart"] if part == "scheduler" else [f"its {part} is code of its own (my_module)"]
        refuses("qwen_image", [], [f"model.path={folder}", *words], folder)
        assert not (tmp_path / "imported").exists()


# Rewards get what the model was given.

CLOSENESS = """
import torch
from PIL import Image

seen = []

def closeness(pictures, prompts, columns):
    found = []
    for picture, prompt, source in zip(pictures, prompts, columns["source"]):
        with Image.open(source) as image:
            given = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
        seen.append((prompt, given.tolist()))
        found.append(-(picture.permute(1, 2, 0).flatten().cpu() - given / 255).abs().mean())
    return torch.stack(found)
"""


def test_rewards_are_given_the_picture_that_was_edited(pipeline_folder, tmp_path: Path, monkeypatch):
    """Its path opens from wherever the program runs, and belongs to the prompt."""
    (tmp_path / "near.py").write_text(CLOSENESS)
    monkeypatch.chdir(tmp_path)
    overrides = [*pipeline_overrides("flux_kontext", pipeline_folder("flux_kontext")), "train.epochs=1", "run_name=x"]
    run_ok("train", *overrides, "rewards=none", "rewards.near.fn=near:closeness")
    seen = dict(sys.modules["near"].seen)
    assert seen.keys() == set(TEXTS)
    for i, text in enumerate(TEXTS):
        assert bytes(seen[text]) == noise_picture(i, (16, 16)).tobytes()
    rows = [json.loads(line) for line in (tmp_path / "runs" / "x" / "metrics.jsonl").read_text().splitlines()]
    assert -1 < rows[0]["reward"] < 0
    assert rows[0]["reward_std"] > 0


# The laws find what is planted.


class TestPlantedFaults:
    def test_rows_that_all_get_the_first_level(self, load, monkeypatch):
        case = load("qwen_image")
        case.policy.encode(case.prompts)
        real = Stepper._levels
        monkeypatch.setattr(Stepper, "_levels", lambda self, t: real(self, t[:1] * len(t)))
        with pytest.raises(AssertionError, match="off by"):
            check_rows(case)

    @pytest.mark.parametrize("name", IN_FULL)
    def test_a_text_to_be_led_away_from_that_is_ignored(self, load, monkeypatch, name: str):
        real = AnyPipelineModel.arguments.__func__

        def without(cls: type[AnyPipelineModel], config: Config) -> dict[str, Any]:
            found = real(cls, config)
            return found | ({"negative_prompt": " "} if "negative_prompt" in found else {})

        monkeypatch.setattr(AnyPipelineModel, "arguments", classmethod(without))
        case = load(name, "sample.num_steps=3", "sample.negative_prompt=blue", "prompts.cache=none").some(0)
        with pytest.raises(AssertionError):
            check_pictures(case)

    def test_a_first_frame_that_is_overwritten(self, load, monkeypatch):
        real = Stepper.place

        def overwritten(self: Stepper, x: Tensor, own: Tensor) -> Tensor:
            placed = real(self, x, own)
            return placed if self.free is None else real(self, x, torch.zeros_like(own))

        monkeypatch.setattr(Stepper, "place", overwritten)
        with pytest.raises(AssertionError):
            check_pictures(load("ltx_i2v", "sample.num_steps=3").some(0))

    def test_two_experts_that_are_taken_for_one(self, load, monkeypatch):
        monkeypatch.setattr(AnyPipelineModel, "call_groups", lambda self, t: torch.zeros(len(t), dtype=torch.long))
        with pytest.raises(AssertionError):
            check_groups(load("wan22_a14b"))

    def test_levels_of_another_picture(self, load, monkeypatch):
        real = AnyPipelineModel._dry_run.__func__

        def larger(cls: type[AnyPipelineModel], config: Config, steps: int) -> Any:
            found = real(cls, config, steps)
            return found._replace(asked=found.asked | {"mu": found.asked["mu"] * 1.01})

        monkeypatch.setattr(AnyPipelineModel, "_dry_run", classmethod(larger))
        monkeypatch.setattr(any_pipeline, "_DRY_RUNS", {})
        with pytest.raises(AssertionError):
            check_levels(load("qwen_image").some(0))
