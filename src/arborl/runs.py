"""What a command is pointed at: a preset, or a run's own settings and weights."""

from collections.abc import Sequence
from pathlib import Path

from .checkpoint import latest, load_weights, trainable, weights_of
from .config import load_config, read_config
from .config.schema import Config
from .core.errors import InputError
from .embed import embed
from .models import Model, load_model
from .prepare import start_accelerator

FIXED_ON_RESUME = ("model.", "seed", "run_name", "log.dir", "prompts.")
FREE_ON_RESUME = ("model.path=", "prompts.cache=", "prompts.batch_size=")
"""Where things lie may change from one machine to the next, as long as they are the same things."""


def config_of(run: Path | None, name: str | None, overrides: Sequence[str], resume: bool = False) -> Config:
    """The configuration of a run, or of a preset, with overrides; to go on with a run, some may not change."""
    if run is None:
        return load_config(name or "tree", overrides)
    run, _ = _run_and_checkpoint(run)
    latest(run)  # says so if the folder is not a run's
    if name is not None:
        raise InputError("--config-name", name, "a run has its own settings", "single keys, as key=value")
    for text in overrides:
        bare = text.lstrip("+~")
        if resume and bare.startswith(FIXED_ON_RESUME) and not bare.startswith(FREE_ON_RESUME):
            key, _, value = text.partition("=")
            raise InputError(key, value, "cannot change when a run goes on", "the value it was started with")
    return read_config(run / "config.yaml", overrides)


def checkpoint_of(run: Path) -> Path:
    """A run's newest checkpoint, or the one that is named."""
    folder, checkpoint = _run_and_checkpoint(run)
    checkpoint = checkpoint or latest(folder)
    if checkpoint is None:
        raise InputError("run", run, "has no checkpoint yet")
    return checkpoint


def load(config: Config, run: Path | None, texts: Sequence[str]) -> Model:
    """A model for looking at: the configured one, with a run's averaged or newest weights where one is named."""
    accelerator = start_accelerator(config)
    embed(config, texts, accelerator)
    model = load_model(config, accelerator.device)
    if run is not None:
        load_weights(trainable(model.module), weights_of(checkpoint_of(run)))
    model.module = accelerator.prepare(model.module)
    return model


def _run_and_checkpoint(path: Path) -> tuple[Path, Path | None]:
    """A run's folder, or one of the checkpoints in it."""
    return (path.parent.parent, path) if (path / "state.json").is_file() else (path, None)
