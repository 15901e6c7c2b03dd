"""Models, a file for each family: how it encodes, predicts and decodes; and what families share."""

import torch

from ..config.schema import Config
from ..core.errors import InputError
from ..tools.imports import import_object
from .activation_checkpointing import checkpoint_activations
from .base import Cond, Model
from .source import Source

__all__ = ["Cond", "Model", "family_of", "load_model", "model_class"]

FAMILIES = {
    "mixture": "arborl.worlds.mixture:MixtureModel",
    "scenes": "arborl.worlds.scenes.model:ScenesModel",
    "sd3": "arborl.models.sd3:SD3Model",
    "flux": "arborl.models.flux:FluxModel",
    "wan": "arborl.models.wan:WanModel",
    "sd": "arborl.models.sd:SDModel",
    "sdxl": "arborl.models.sdxl:SDXLModel",
}
PIPELINES = {
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "WanPipeline": "wan",
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
}
"""Which family drives a pipeline. Each has settings of its own in the group `model` under the same name."""


def model_class(config: Config) -> type[Model]:
    """The class that drives the configured model: named, or told by the pipeline's own index."""
    family = config.model.family if config.model.family != "auto" else family_of(config.model.path)
    found = import_object("model.family", FAMILIES.get(family, family), ["auto", *FAMILIES])
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise InputError("model.family", family, "is not a subclass of arborl.models.Model")
    if missing := sorted(found.__abstractmethods__):
        raise InputError("model.family", family, f"lacks {', '.join(missing)}", "encode, predict and decode")
    return found


def family_of(path: str) -> str:
    """The family of a pipeline in a folder or on the hub, by its own index."""
    name = Source(path).index.get("_class_name")
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
    checkpoint_activations(model.module, config.train.gradient_checkpointing)
    if config.train.kl > 0:
        model.keep_reference()
    return model
