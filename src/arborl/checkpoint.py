"""The state after whole epochs, on disk. Noise and prompts are functions of (seed, epoch), so weights are all of it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .core.errors import InputError

VERSION = 1


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name, of a module that is not wrapped yet."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no trainable parameter")
    return named


class Ema:
    """An exponential moving average of the trained weights."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, every: int = 1) -> None:
        self.parameters, self.decay, self.every, self.steps = parameters, decay, every, 0
        self.average = {name: p.detach().clone() for name, p in parameters.items()}
        self._own: dict[str, Tensor] | None = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        if self.decay and self.steps % self.every == 0:
            averages, live = list(self.average.values()), [self.parameters[name].detach() for name in self.average]
            torch._foreach_lerp_(averages, live, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights (its own where there is no average)."""
        if not self.decay:
            yield
            return
        self._own = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            _copy_into(self.parameters, self.average)
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Give the model its own weights back. May be called again: an interrupt can fall into the middle of it."""
        if self._own is not None:
            _copy_into(self.parameters, self._own)
            self._own = None


@dataclass
class State:
    """What changes while training."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema
    epoch: int = 0  # whole epochs behind it
    forwards: int = 0
    forward_backwards: int = 0

    def save(self, folder: Path, keep: int) -> Path:
        """Write aside, rename into place, then drop all but the newest `keep`. What is there already is not touched."""
        target = folder / f"epoch_{self.epoch:06d}"
        if target in checkpoints(folder):
            return target
        self._write(target, with_optimizer=True)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
        return target

    def save_best(self, folder: Path) -> None:
        """The weights alone, apart from the others and in the place of those that were the best before."""
        self._write(folder / "best", with_optimizer=False)

    def _write(self, target: Path, with_optimizer: bool) -> None:
        self.ema.restore()
        aside = target.parent / f".{target.name}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file({n: p.detach().cpu().contiguous() for n, p in self.parameters.items()}, aside / "weights.safetensors")
        if self.ema.decay:
            save_file({n: p.cpu().contiguous() for n, p in self.ema.average.items()}, aside / "ema.safetensors")
        if with_optimizer:
            torch.save(self.optimizer.state_dict(), aside / "optimizer.pt")
        head = {"version": VERSION, "epoch": self.epoch, "ema_steps": self.ema.steps}
        head |= {"forwards": self.forwards, "forward_backwards": self.forward_backwards}
        (aside / "state.json").write_text(json.dumps(head))
        old = target.parent / f".{target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        aside.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def load(self, path: Path) -> None:
        head = _head(path)
        load_weights(self.parameters, path / "weights.safetensors")
        # An average that is switched on later begins with the weights it finds.
        average = weights_of(path)
        self.ema.average = {n: t.to(self.parameters[n].device) for n, t in _tensors(average).items()}
        configured = {name: self.optimizer.defaults[name] for name in ("lr", "betas", "weight_decay")}
        self.optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu"))
        for group in self.optimizer.param_groups:
            group.update(configured)  # the saved groups hold the values of before
        self.epoch, self.ema.steps = head["epoch"], head["ema_steps"]
        self.forwards, self.forward_backwards = head["forwards"], head["forward_backwards"]


def drop_best_from(folder: Path, epoch: int) -> None:
    """A run that goes on from an epoch has not had the evaluations after it: what was best among them goes."""
    best = folder / "best"
    if best.is_dir() and _head(best)["epoch"] >= epoch:
        shutil.rmtree(best)


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(path for path in folder.glob("epoch_*") if (path / "state.json").is_file())


def latest(run: Path) -> Path | None:
    """The newest checkpoint of a run folder; None for a run that ended before its first."""
    if not (run / "config.yaml").is_file():
        raise InputError("run", run, "is not a run folder (it has no config.yaml)")
    return next(iter(reversed(checkpoints(run / "checkpoints"))), None)


def weights_of(path: Path) -> Path:
    """The weights to look at in a checkpoint: the average where there is one."""
    average = path / "ema.safetensors"
    return average if average.is_file() else path / "weights.safetensors"


def load_weights(parameters: dict[str, nn.Parameter], path: Path) -> None:
    """Put saved weights into a model; names and shapes must be exactly the model's."""
    tensors = _tensors(path)
    wrong = {n for n, t in tensors.items() if n not in parameters or parameters[n].shape != t.shape}
    wrong |= parameters.keys() - tensors.keys()
    if wrong:
        raise InputError("checkpoint", path, f"does not fit the model ({len(wrong)} tensors, such as {min(wrong)})")
    _copy_into(parameters, tensors)


def _head(path: Path) -> dict[str, int]:
    try:
        head = json.loads((path / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise InputError("checkpoint", path, f"cannot be read ({error})") from None
    if head.get("version") != VERSION:
        raise InputError("checkpoint", path, f"has version {head.get('version')}", str(VERSION))
    return head


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError("checkpoint", path, f"cannot be read ({error})") from None


@torch.no_grad()
def _copy_into(parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
