"""The trees of one prompt as files: written once, read by drawings, reports and tests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from ..core.errors import InputError, first_line, shortened
from ..core.kernels import KERNELS
from ..core.schedule import PREDICTIONS, Schedule
from ..core.tree import Plan
from ..data.prompts import Prompts
from ..engine.policy import Policy
from ..engine.rollout import Epoch, Rollout
from ..engine.score import as_bytes, middle_frames
from ..engine.update import Stats
from ..rewards import Scores
from ..tools.files import atomic, write_atomically
from ..tools.finite_json import finite_json

VERSION, READABLE = 3, (2, 3)  # version 2 has no ratios
LEVELS = ("sigma", "sigma_next", "timestep")


@dataclass(frozen=True)
class TreeFile:
    """One prompt's trees of one epoch, complete: what a person needs to see how its scores became advantages."""

    epoch: int
    prompt: str
    plan: Plan
    log_density: Float[Tensor, " edges"]
    advantage: Float[Tensor, " edges"]  # NaN where no leaf below has a score
    kept: Bool[Tensor, " edges"]  # the edges the update trained
    ratio: Float[Tensor, " edges"]  # new over old density when the update came to the edge; NaN where it did not
    scores: dict[str, Float[Tensor, " leaves"]]  # per reward, and `total`
    shown: Int[Tensor, " shown"]  # the nodes that have a picture
    pictures: Tensor  # theirs, uint8, shown×3×H×W, small: x̂0 at inner nodes, the picture itself at leaves
    latents: Float[Tensor, "nodes *latent"]

    def save(self, stem: Path) -> None:
        """`stem`.safetensors with the arrays and `stem`.json with the rest, each complete or not there."""
        plan = self.plan
        tensors = {
            "plan.parent": plan.parent,
            "plan.step": plan.step,
            "plan.eta": plan.eta,
            "plan.kappa": plan.kappa,
            "plan.multistep": plan.multistep,
            **{f"schedule.{name}": getattr(plan.schedule, name) for name in LEVELS},
            "log_density": self.log_density,
            "advantage": self.advantage,
            "kept": self.kept,
            "ratio": self.ratio,
            "shown": self.shown,
            "pictures": self.pictures,
            "latents": self.latents,
            **{f"scores.{name}": values for name, values in self.scores.items()},
        }
        head = {
            "format": "arborl.tree",
            "version": VERSION,
            "epoch": self.epoch,
            "prompt": self.prompt,
            "kernel": plan.kernel,
            "prediction": plan.schedule.prediction,
            "roots": plan.roots,
            "balanced": plan.balanced,
            "scores": list(self.scores),
        }
        stem.parent.mkdir(parents=True, exist_ok=True)
        with atomic(stem.with_suffix(".safetensors")) as aside:
            save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, aside)
        write_atomically(stem.with_suffix(".json"), json.dumps(head, indent=1, ensure_ascii=False))

    @classmethod
    def load(cls, stem: Path) -> "TreeFile":
        stem = stem.with_suffix("")
        try:
            return cls._load(stem)
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise InputError("tree file", stem, f"cannot be read ({first_line(error)})") from None

    @classmethod
    def _load(cls, stem: Path) -> "TreeFile":
        head = finite_json(stem.with_suffix(".json").read_text(encoding="utf-8"))
        tensors = load_file(stem.with_suffix(".safetensors"))
        if head.get("format") != "arborl.tree" or head.get("version") not in READABLE:
            found = f"{head.get('format')} version {head.get('version')}"
            raise InputError("tree file", stem, f"is {found}", f"arborl.tree version {VERSION}")
        tensors.setdefault("ratio", torch.full(tensors["log_density"].shape, torch.nan))
        _check(head, tensors)
        levels = {name: tensors[f"schedule.{name}"] for name in LEVELS}
        schedule = Schedule(**levels, prediction=head["prediction"])
        arrays = (tensors[f"plan.{name}"] for name in ("parent", "step", "eta", "kappa", "multistep"))
        plan = Plan(schedule, head["kernel"], head["roots"], *arrays, balanced=head.get("balanced") is True)
        scores = {name: tensors[f"scores.{name}"] for name in head["scores"]}
        names = ("log_density", "advantage", "kept", "ratio", "shown", "pictures", "latents")
        own = {name: tensors[name] for name in names}
        return cls(epoch=head["epoch"], prompt=head["prompt"], plan=plan, scores=scores, **own)


def _check(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """What a file says must be a tree; `ValueError` where it is not."""

    def check(holds: bool, problem: str) -> None:
        if not holds:
            raise ValueError(problem)

    for name, kind in {"epoch": int, "roots": int, "prompt": str, "kernel": str, "prediction": str}.items():
        check(type(head[name]) is kind, f"its {name} is {shortened(repr(head[name]), 60)}")
    check(head["kernel"] in KERNELS, f"no kernel is called {shortened(head['kernel'], 60)}")
    check(head["prediction"] in PREDICTIONS, f"nothing predicts {shortened(head['prediction'], 60)}")
    parent, step, shown, latents = (tensors[name] for name in ("plan.parent", "plan.step", "shown", "latents"))
    roots, edges, steps = head["roots"], parent.numel(), tensors["schedule.sigma"].numel()
    check(roots > 0 and edges > 0 and steps > 0 and latents.ndim > 1, "it is no tree")
    leaves = roots + edges - len(set(parent.flatten().tolist()))
    shapes = {f"plan.{name}": (edges,) for name in ("parent", "step", "eta", "kappa", "multistep")}
    shapes |= dict.fromkeys(("log_density", "advantage", "kept", "ratio"), (edges,))
    shapes |= {f"schedule.{name}": (steps,) for name in LEVELS} | {"latents": (roots + edges, *latents.shape[1:])}
    shapes |= {f"scores.{name}": (leaves,) for name in head["scores"]} | {"shown": (shown.numel(),)}
    shapes["pictures"] = (shown.numel(), 3, *tensors["pictures"].shape[2:])
    for name, shape in shapes.items():
        check(tensors[name].shape == shape, f"{name} has the shape {tuple(tensors[name].shape)}")
    kinds = {"plan.parent": torch.int64, "plan.step": torch.int64, "shown": torch.int64, "pictures": torch.uint8}
    kinds |= {"plan.multistep": torch.bool, "kept": torch.bool}
    for name in shapes:
        wanted = kinds.get(name)
        found = tensors[name].dtype
        check(found == wanted if wanted else found.is_floating_point, f"{name} holds {found}")
    check(tensors["pictures"].ndim == 4 and tensors["pictures"].numel() > 0, "its pictures are none")
    for name in (*(f"schedule.{name}" for name in LEVELS), "plan.eta", "plan.kappa"):
        low, high = tensors[name].min(), tensors[name].max()
        check(0 <= float(low) <= float(high) <= (1 if "sigma" in name else 1e9), f"its {name} is out of range")
    nodes = torch.arange(roots, roots + edges)  # breadth first: parents in order, each before its children
    check(bool((parent >= 0).all() and (parent < nodes).all()) and is_sorted(parent), "its edges are no tree")
    check(bool(((step >= 0) & (step < steps)).all()), "its steps are not in its schedule")
    check(bool(((shown >= 0) & (shown < roots + edges)).all()), "it shows nodes that it does not have")
    check(bool((parent[tensors["plan.multistep"]] >= roots).all()), "a first step looks back")


def is_sorted(values: Tensor) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def first_tree(
    policy: Policy,
    epoch: Epoch,
    rollout: Rollout,
    scores: Scores,
    advantage: Float[Tensor, "prompts edges"],
    keep: Bool[Tensor, "prompts edges"],
    stats: Stats,
) -> TreeFile:
    """The file of a rollout's first prompt; its x̂0 and ratios must be there."""
    assert rollout.x0 is not None
    assert stats.ratios is not None
    shown = rollout.plan.preview_nodes
    return TreeFile(
        epoch=epoch.number,
        prompt=epoch.texts[0],
        plan=rollout.plan,
        log_density=rollout.log_density[0].cpu(),
        advantage=advantage[0].cpu(),
        kept=keep[0].cpu(),
        ratio=stats.ratios.cpu(),
        scores={name: values[0] for name, values in scores.parts.items()} | {"total": scores.total[0]},
        shown=shown,
        pictures=previews(policy, rollout.x0[shown], epoch.prompts.prompts.take([0])),
        latents=rollout.latents[0].cpu(),
    )


PREVIEW = 192
"""Longer side of a recorded tree's pictures, in pixels at most."""


@torch.no_grad()
def previews(policy: Policy, latents: Float[Tensor, "n *latent"], prompt: Prompts) -> Tensor:
    """Small pictures (uint8) of some of a prompt's latents, decoded a few at a time."""
    small: list[Tensor] = []
    for part in latents.split(policy.batch_sizes.decode):
        pictures = middle_frames(policy.decode(part, prompt.repeat(len(part))))
        scale = PREVIEW / max(pictures.shape[-2:])
        if scale < 1:
            pictures = functional.interpolate(pictures, scale_factor=scale, mode="bilinear", antialias=True)
        small.append(as_bytes(pictures))
    return torch.cat(small)
