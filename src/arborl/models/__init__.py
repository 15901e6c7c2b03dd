"""Models, a file for each family: how it encodes, predicts and decodes; and what families share."""

import torch

from ..config.schema import Config
from ..core.errors import InputError
from ..tools.imports import import_object
from .activation_checkpointing import checkpoint_activations
from .base import Cond, Model, parts_of
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
    "pipeline": "arborl.models.any_pipeline:AnyPipelineModel",
}
PIPELINES = {
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "WanPipeline": "wan",
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
}
"""The pipelines with a family of their own; `pipeline` drives all others. Each family has settings of its own in the
group `model` under the same name.
"""


RENAMED = {
    "grid": "schedule_for",
    "pipeline_grid": "pipeline_schedule",
    "own_shift": "default_shift",
    "integrator": "ode_scheduler",
    "left_out": "unused_components",
    "half_decoder": "vae_fp16_safe",
    "led_away_from": "negative_texts",
    "compiles_by_itself": "auto_compile",
    "compile": "compile_decoder",
}
"""Methods and attributes that had another name. A class of a user's own that still overrides the old one is an error:
it would be ignored without a word. (Names that others may use for things of their own fail in other ways.)
"""
MOVED = {"quickly", "as_trained", "least_rows", "trained_sizes"}
MOVED |= {"fast_sampling", "update_numerics", "min_batch_size", "update_batch_sizes", "keep_reference", "reference"}
"""What a model once did and the engine's `Policy` does now."""


def model_class(config: Config) -> type[Model]:
    """The class that drives the configured model: named, or told by the pipeline's own index."""
    family = config.model.family if config.model.family != "auto" else family_of(config.model.path)
    found = import_object("model.family", FAMILIES.get(family, family), ["auto", *FAMILIES])
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise InputError("model.family", family, "is not a subclass of arborl.models.Model")
    check_overrides(family, found)
    found = found.of(config)
    if missing := sorted(found.__abstractmethods__):
        raise InputError(
            "model.family", family, f"lacks {', '.join(missing)}", "a class with encode, predict and decode"
        )
    return found


def check_overrides(family: str, found: type[Model]) -> None:
    """Nothing that a user's own class overrides may have another name by now."""
    theirs = [cls for cls in found.__mro__ if issubclass(cls, Model) and not cls.__module__.startswith("arborl.")]
    own = {name for cls in theirs for name in vars(cls)}
    for old in sorted(own & RENAMED.keys()):
        raise InputError("model.family", family, f"overrides {old}, which has another name now", cure=RENAMED[old])
    for old in sorted(own & MOVED):
        problem = f"overrides {old}, which is not the model's any more: arborl.engine.policy.Policy has it"
        raise InputError("model.family", family, problem)


def family_of(path: str) -> str:
    """The family of a pipeline in a folder or on the hub, by its own index."""
    index = Source(path).index
    name = index["_class_name"]
    is_wan22 = name == "WanPipeline" and ("transformer_2" in Source(path).parts or index.get("expand_timesteps"))
    if name in PIPELINES and not is_wan22:
        return PIPELINES[name]
    from .call import pipeline_class  # which knows all of diffusers, and takes its time

    pipeline_class(name, path)
    return "pipeline"


def load_model(config: Config, device: torch.device) -> Model:
    """The configured model on `device`, its trainable part ready."""
    lora = config.model.lora
    # Adapters and small networks draw their first weights from the seed, not from whatever ran before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = model_class(config)(config, device)
        model.make_trainable(config.model.train, lora.rank, lora.alpha, lora.targets)
    for part in parts_of(model.module).values():
        checkpoint_activations(part, config.train.gradient_checkpointing)
    return model
