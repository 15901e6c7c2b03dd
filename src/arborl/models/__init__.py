"""Models by family."""

from pathlib import Path

import torch

from ..config.schema import Config
from ..core.errors import InputError
from ..imports import find
from .base import Cond, Model, read_index

__all__ = ["Cond", "Model", "load_model", "model_class"]

FAMILIES = {
    "mixture": "arborl.models.mixture:MixtureModel",
    "scenes": "arborl.scenes.model:ScenesModel",
    "sd3": "arborl.models.sd3:SD3Model",
}
PIPELINES = {"StableDiffusion3Pipeline": "sd3"}


def model_class(config: Config) -> type[Model]:
    """The class that drives the configured model: named, or told by the pipeline's own index."""
    family = config.model.family if config.model.family != "auto" else _family_of_folder(config.model.path)
    found = find("model.family", FAMILIES.get(family, family), ["auto", *FAMILIES])
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise InputError("model.family", family, "is not a subclass of arborl.models.Model")
    return found


def _family_of_folder(path: str) -> str:
    index = Path(path) / "model_index.json"
    if not path or not index.is_file():
        problem = "no model_index.json there to tell the family by"
        raise InputError(
            "model.path", path or None, problem, f"a pipeline's folder, or model.family={'|'.join(FAMILIES)}"
        )
    name = read_index(index).get("_class_name")
    if name not in PIPELINES:
        raise InputError("model.path", path, f"a {name} is not supported", ", ".join(PIPELINES))
    return PIPELINES[name]


def load_model(config: Config, device: torch.device) -> Model:
    """The configured model on `device`, its trainable part ready."""
    lora = config.model.lora
    # Adapters and small networks draw their first weights from the seed, not from whatever ran before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = model_class(config)(config, device)
        model.make_trainable(config.model.train, lora.rank, lora.alpha, lora.targets)
    if config.train.gradient_checkpointing:
        enable = getattr(model.module, "enable_gradient_checkpointing", None)
        if enable is None:
            raise InputError(
                "train.gradient_checkpointing", True, "this model cannot recompute its activations", "false"
            )
        enable()
    if config.train.kl > 0:
        model.keep_reference()
    return model
