import atexit
import gc
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"
# The tests hold the engine to exact numbers, which is a CPU's business; what needs a GPU has its own marker.
os.environ.setdefault("ACCELERATE_USE_CPU", "1")
# What a test encodes is no other's, and not the user's.
os.environ["ARBORL_CACHE"] = tempfile.mkdtemp(prefix="arborl-test-cache-")
atexit.register(shutil.rmtree, os.environ["ARBORL_CACHE"], ignore_errors=True)
# Two workers share the machine, and small tensors gain nothing from threads. Must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines advertise AMX and trap on its instructions, which ends Python at the first bf16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# What waits in a buffer when Python ends is lost or found as with most people's Python, also where this one holds none.
os.environ.pop("PYTHONUNBUFFERED", None)
# What Python compiles for one worker or command is kept for the next: there are dozens, and each begins with all of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A time is never a test's outcome, and a run's examples are the same on every machine.
settings.register_profile("arborl", deadline=None, derandomize=True)
settings.load_profile("arborl")

# Shapes and types are checked at every call while testing; must come before the first import of these modules.
install_import_hook(
    [
        "arborl.core",
        "arborl.data.prompts",
        "arborl.engine.contracts",
        "arborl.engine.evaluate",
        "arborl.engine.generate",
        "arborl.engine.method",
        "arborl.engine.policy",
        "arborl.engine.rollout",
        "arborl.engine.score",
        "arborl.engine.update",
        "arborl.models.base",
        "arborl.rewards.base",
        "arborl.rewards.blip",
        "arborl.rewards.clip",
        "arborl.rewards.neural",
        "arborl.rewards.preprocessing",
        "arborl.rewards.tokenizers",
        "arborl.rewards.videoalign",
        "arborl.run.evaluations",
        "arborl.run.guards",
        "arborl.run.inputs",
        "arborl.run.metrics",
        "arborl.run.reward_hacking",
        "arborl.run.run",
        "arborl.run.setup",
        "arborl.run.trees",
        "arborl.worlds.scenes",
    ],
    "checking.checked",
)

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402

from arborl.config import load_config  # noqa: E402
from arborl.config.schema import Config  # noqa: E402
from arborl.core.noise import Key  # noqa: E402
from arborl.core.schedule import shifted  # noqa: E402
from arborl.core.tree import Plan, grow  # noqa: E402
from arborl.data.prompts import LocalPrompts, Prompts  # noqa: E402
from arborl.engine.contracts import loss_of  # noqa: E402
from arborl.engine.policy import Policy  # noqa: E402
from arborl.engine.rollout import Rollout, grow_trees  # noqa: E402
from arborl.models import Model, load_model  # noqa: E402
from arborl.models.call import SETTINGS_FOR  # noqa: E402
from arborl.run.trees import TreeFile  # noqa: E402
from arborl.worlds.scenes import FOLDER  # noqa: E402
from arborl.worlds.scenes.grammar import split  # noqa: E402
from bench import more_pipelines  # noqa: E402
from bench.pipelines import build  # noqa: E402

from browser import MISSING  # noqa: E402

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def sd3_folder() -> Path:
    """A real pipeline, trained and small."""
    return FOLDER


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(split()[0][:4]))
    return path


@pytest.fixture(scope="session")
def sd3_overrides(sd3_folder: Path, prompt_file: Path) -> list[str]:
    """That pipeline as any other: by its folder, with LoRA."""
    return [
        "model=sd3",
        f"model.path={sd3_folder}",
        "model.max_sequence_length=2",
        "model.lora.rank=8",
        "sample.guidance_scale=1",
        "rewards=scene",
        f"prompts.path={prompt_file}",
        "sample.resolution=64",
        "sample.num_steps=6",
        "sample.num_prompts=2",
        "tree.w=2",
        "eval.num_prompts=4",
        "log.record_every=0",
    ]


TINY = {
    "sd3": ["sample.resolution=16", "model.max_sequence_length=4"],
    "flux": [
        "sample.resolution=16",
        "sample.width=24",
        "sample.num_steps=8",  # its shift is smaller for small pictures
        "model.max_sequence_length=4",
        "sample.guidance_scale=3.5",
    ],
    "wan": ["sample.resolution=16", "sample.width=32", "sample.num_frames=5", "model.max_sequence_length=4"],
    "sd": ["sample.resolution=16", "sample.width=24"],
    "sdxl": ["sample.resolution=16", "sample.width=24"],
}
"""Each family of diffusers pipelines, and what makes a picture of it tiny."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A real pipeline of a family with tiny random weights, built once."""
    folders: dict[str, Path] = {}

    def folder(family: str, **options: object) -> Path:
        name = "-".join([family, *map(str, options.values())])
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("pipelines") / name
            build(family, **options).save_pretrained(folders[name])
        return folders[name]

    return folder


def tiny_overrides(family: str, folder: Path) -> list[str]:
    """A family's tiny pipeline by its folder alone, with as little of everything as teaches."""
    return [
        f"model.path={folder}",
        "model.lora.rank=4",
        "rewards=brightness",
        "sample.num_steps=5",
        "sample.num_prompts=2",
        "tree.w=2",
        "eval.num_prompts=2",
        "log.trackers=[]",
        "log.record_every=0",
        *TINY[family],
    ]


EDITORS = ("flux_kontext", "qwen_image_edit", "qwen_image_edit_plus", "wan_i2v", "wan22_5b_i2v", "ltx_i2v")
"""Pipelines that are given a picture beside the text."""
TEXTS = ("a photo of a cat", "red house", "a dog that describes the image in detail and a blue cat")
"""Texts of different length."""
NEVER_SAID = ("max_area", "use_resolution_binning")
"""Arguments of calls that the model gives itself."""


def noise_picture(seed: int, size: tuple[int, int]) -> PIL.Image.Image:
    """A picture of nothing, unlike that of any other seed; width first."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=draw, dtype=torch.uint8)
    return PIL.Image.frombytes("RGB", size, pixels.numpy().tobytes())


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A real pipeline that has no family of its own, built once. Beside it lie prompts, with a picture each where it
    takes one.
    """
    folders: dict[str, Path] = {}

    def folder(name: str, **options: object) -> Path:
        key = "-".join([name, *map(str, options.values())])
        if key not in folders:
            beside = tmp_path_factory.mktemp(key)
            more_pipelines.build(name, **options).save_pretrained(beside / name)
            size = more_pipelines.CALLS[name]["width"], more_pipelines.CALLS[name]["height"]
            for i in range(len(TEXTS)):
                noise_picture(i, size).save(beside / f"{i}.png")
            rows = [{"prompt": text, "source": f"{i}.png"} for i, text in enumerate(TEXTS)]
            (beside / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
            folders[key] = beside / name
        return folders[key]

    return folder


def pipeline_overrides(name: str, folder: Path) -> list[str]:
    """A pipeline by its folder and what its call is given, with as little of everything as teaches: both experts of
    Wan2.2 have a step in the window.
    """
    found = [
        f"model.path={folder}",
        f"prompts.path={folder.parent / 'prompts.jsonl'}",
        "prompts.held_out=0",
        "model.lora.rank=4",
        "rewards=brightness",
        "sample.guidance_scale=3",
        "sample.num_steps=6",
        "sample.num_prompts=2",
        "sample.batch_size=8",
        "sample.decode_batch_size=8",
        "train.batch_size=8",
        "kernel.eta=0.3",
        "tree.w=3",
        "eval.num_prompts=2",
        "log.trackers=[]",
        "log.record_every=0",
    ]
    for argument, value in more_pipelines.CALLS[name].items():
        if argument not in NEVER_SAID:
            key = SETTINGS_FOR.get(argument, f"model.call.{argument}")
            found.append(f"{key}={str(value).lower()}")
    return [*found, "model.call.image=column:source"] if name in EDITORS else found


def make(overrides: list[str], name: str = "mixture") -> tuple[Config, Model]:
    """A configuration and its model, ready to roll out."""
    config = load_config(name, overrides)
    return config, load_model(config, CPU)


def make_policy(overrides: list[str], name: str = "mixture") -> Policy:
    """A configuration's policy, for its own loss, as one process on the CPU has it."""
    config, model = make(overrides, name)
    return Policy(model, config, Accelerator(cpu=True), loss_of(config))


def local_of(texts: Sequence[str], ids: Sequence[int] | None = None) -> LocalPrompts:
    """Prompts of one process: the first ones of an epoch, or those in certain places of it."""
    return LocalPrompts(Prompts(list(texts), {}), torch.tensor(ids or list(range(len(texts)))), len(texts))


def trees_of(
    policy: Policy, plan: Plan, texts: Sequence[str], key: Key = (0, 0), ids: Sequence[int] | None = None, **how: Any
) -> Rollout:
    """A rollout of some prompts."""
    return grow_trees(policy, plan, policy.encode(texts), key, local_of(texts, ids), **how)


def moved(model: Model) -> Model:
    """Adapters that do something: fresh ones are a no-op."""
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.module.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.05
    return model


def recorded_tree(leaves_without_score: bool = False) -> TreeFile:
    """Two trees of a plan, with numbers drawn by chance."""
    plan = grow(shifted(4, 3.0), "flow_sde", 2, [2, 3, 1, 1], [0.5, 0.5, 0.0, 0.0])
    scores = torch.rand(len(plan.leaves))
    if leaves_without_score:
        scores[0] = math.nan
    return TreeFile(
        epoch=3,
        prompt="a <b>dot</b> & „quotes“ at the top left",
        plan=plan,
        log_density=torch.randn(plan.edges),
        advantage=torch.randn(plan.edges).double(),
        kept=plan.stochastic,
        ratio=torch.where(plan.stochastic, 1.0, torch.nan),
        shown=plan.preview_nodes,
        scores={"place": scores, "total": scores.double()},
        pictures=torch.randint(0, 255, (len(plan.preview_nodes), 3, 8, 8), dtype=torch.uint8),
        latents=torch.randn(plan.nodes, 4, 2, 2),
    )


LONG = (
    *("models/test_models", "models/test_any_pipeline", "test_processes", "test_scenes", "test_every_setting"),
    *("test_strangers", "test_survival", "test_run", "test_compare", "test_presets", "test_rewards", "test_losses"),
    *("test_report", "test_foreign_files", "test_remote", "test_doctor", "test_output", "test_evaluations"),
    *("test_update", "test_imports", "test_cli", "test_commands", "test_configuration", "test_extending"),
    *("test_compile", "test_fuzz", "test_broken_checkpoints", "test_mixture", "test_nonfinite", "test_learns"),
    *("test_rollout", "test_prune", "test_environment", "test_manners", "test_recorded", "test_reward_hacking"),
    "test_embedding_cache",
)
"""Files that take the longest, in that order: begun first, so that no worker is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if f"{name}.py" in item.nodeid), len(LONG)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests that are left out for want of a browser are no small print."""
    reasons = {str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())}
    if any(MISSING in reason for reason in reasons):
        terminalreporter.write_line(f"WARNING: {MISSING}", red=True, bold=True)
