"""Code shared by all families of diffusers pipelines. A family names its trained part and says how it is called."""

import gc
import inspect
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config.schema import Config
from ..core.errors import InputError
from ..core.noise import fold
from ..core.schedule import Schedule
from ..data.embedding_cache import Embeddings, Encode, Request, cache_folder, fingerprint
from ..data.prompts import HELDOUT_PICTURES, PICTURES, Prompts
from ..tools.quiet import quiet_libraries
from . import lora
from .base import Cond, Model
from .compile import compile_forward, uncompiled
from .guidance import guided
from .source import Source

MAX_MEAN_DIFFERENCE, MAX_PIXEL_DIFFERENCE = 4e-3, 0.1
"""Mean and largest difference of pixels up to which half precision draws the same picture."""
JOINT_ATTENTION = (
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
)
"""Layers of attention over text and picture, in SD3 and FLUX alike: what Flow-GRPO adapts in SD3.5."""


class DiffusersModel(Model):
    """A diffusers pipeline, loaded in two halves that never share memory: text encoders, then what is trained and
    the VAE.
    """

    default_prompts, heldout_prompts = PICTURES, HELDOUT_PICTURES
    pipeline: ClassVar[str]
    """The name of its class in diffusers."""
    trained_component: ClassVar[str] = "transformer"
    """The part that is trained."""
    unused_components: ClassVar[Sequence[str]] = ()
    """Parts that are not needed even to make a picture."""
    optional_components: ClassVar[Sequence[str]] = ()
    """Parts that its pipelines may lack."""
    vae_fp16_safe: ClassVar[bool] = False
    """Whether its VAE is known to decode in float16 without overflow (SDXL's and FLUX's do not)."""
    schedulers: ClassVar[Sequence[str]] = ("FlowMatchEulerDiscreteScheduler",)
    """Those whose settings say which noise levels the model knows."""

    @classmethod
    @abstractmethod
    def latent_shape_for(cls, source: Source, config: Config) -> tuple[int, ...]:
        """The shape of a latent; an `InputError` for pictures that the model cannot make."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        self.source = self.open(config)
        self._check_settings(self.source, config)
        self.latent_shape = self.latent_shape_for(self.source, config)
        self.embedding_cache = self.embeddings(config, device)
        self.decoder_compiled = False
        vae_dtype = config.model.vae_dtype
        self.decode_dtype = torch.float32 if vae_dtype == "auto" else getattr(torch, vae_dtype)
        trained = self.components(config)
        others = [part for part in self.source.parts if part.startswith("transformer")]  # one loop gives all one dtype
        precision = dtypes([*trained, *others], config, device)
        self.dtype = precision[trained[0]]
        away = (*self.unused_components, *(filter(is_encoder, self.source.parts) if self.embedding_cache else ()))
        self.pipe = self.source.load(precision, lambda name: name not in away).to(device)
        for part in self.pipe.components.values():
            if isinstance(part, nn.Module):
                part.eval().requires_grad_(False)
        parts = {name: getattr(self.pipe, name) for name in trained}
        self.module = nn.ModuleDict(parts) if len(parts) > 1 else parts[trained[0]]

    @classmethod
    def components(cls, config: Config) -> list[str]:
        """The parts that are trained."""
        return [cls.trained_component]

    @classmethod
    def open(cls, config: Config, may_fetch: bool = True) -> Source:
        source = Source(cls.path(config), may_fetch)
        found = source.index.get("_class_name")
        if found != cls.pipeline:
            raise InputError("model.path", source.path, f"the folder holds a {found}", cls.pipeline)
        return source

    @classmethod
    def check(cls, config: Config, may_fetch: bool) -> None:
        super().check(config, may_fetch)
        source = cls.open(config, may_fetch)
        cls._check_settings(source, config)
        cls.latent_shape_for(source, config)
        if config.model.train == "lora":
            module = nn.ModuleDict({part: source.skeleton_of(part) for part in cls.components(config)})
            lora.check_targets(module, config.model.lora.targets or cls.lora_layers(module))

    @classmethod
    def _check_parts(cls, source: Source) -> None:
        """Every part that the pipeline takes is named, and says of itself what can be."""
        import diffusers

        takes = inspect.signature(getattr(diffusers, cls.pipeline).__init__).parameters.items()
        for name, parameter in takes:
            may_lack = name in ("self", *cls.unused_components, *cls.optional_components)
            if parameter.default is inspect.Parameter.empty and not may_lack:
                source.class_name(name)
        for part in (cls.trained_component, "vae", "scheduler"):
            if part != "vae" or part in source.parts:  # which not every pipeline has
                source.check_kinds(part)
        for key in ("scaling_factor", "shift_factor") if "vae" in source.parts else ():
            source.config("vae").check_number(key)

    def compile_decoder(self) -> list[str]:
        """Where it is convolutions all through; in float16 if it draws the same pictures in it."""
        decoder = getattr(self.pipe.vae, "decoder", None)
        if self.video or decoder is None:
            return []
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            decoder.to(memory_format=torch.channels_last)
        compile_forward(decoder)
        self.decoder_compiled = True
        if on_gpu and self.vae_fp16_safe and self.config.model.vae_dtype == "auto":
            self.decode_dtype = torch.float16
        noise = self.noise(fold(0, 0), torch.tensor([[0, 0, 0], [1, 0, 0]], device=self.device))
        return self.check_decoder(noise)

    def check_decoder(self, latents: Tensor) -> list[str]:
        if self.decode_dtype == torch.float32 or self.config.model.vae_dtype != "auto":
            return []
        half, found = self.decode_dtype, self.decode(latents)
        self.decode_dtype = torch.float32
        with uncompiled():
            off = (found - torch.cat([self.decode(part) for part in latents.split(1)])).abs()
        mean, largest = float(off.mean()), float(off.max())
        if mean <= MAX_MEAN_DIFFERENCE and largest <= MAX_PIXEL_DIFFERENCE:  # not so for what is no number
            self.decode_dtype = half
            return []
        size = f"{mean:.1e} on average, {largest:.2g} at most"
        return [f"pictures are decoded in float32 from now on: in float16 their pixels differ by {size}"]

    @classmethod
    @contextmanager
    def reading_scheduler(cls, config: Config) -> Iterator[None]:
        """Inside, settings of the pipeline's scheduler that cannot be used are one line."""
        source = cls.open(config)
        source.check_kinds("scheduler")
        with source.reading("scheduler's settings"):
            yield

    @classmethod
    def ode_scheduler(cls, config: Config) -> Any:
        """The diffusers scheduler whose steps the engine's ODE takes, made from the pipeline's own settings."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        with cls.reading_scheduler(config):
            return FlowMatchEulerDiscreteScheduler.from_config(cls.open(config).config("scheduler"))

    @classmethod
    def adjust(cls, pipe: Any, config: Config) -> None:
        """Give a plain pipeline what of the settings its call does not take."""
        pipe.scheduler = cls.ode_scheduler(config)

    @classmethod
    def comfyui(cls, layer: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        """A layer's LoRA (b·a is added to its weight) under the names that ComfyUI reads."""
        return {f"transformer.{layer}.lora_A.weight": a, f"transformer.{layer}.lora_B.weight": b}

    @classmethod
    @abstractmethod
    def _check_settings(cls, source: Source, config: Config) -> None:
        """Raise an `InputError` for settings that do not fit the pipeline."""

    @abstractmethod
    def plain_call(self, prompts: Prompts, seed: int, steps: int) -> dict[str, Any]:
        """Arguments of a plain call of the pipeline for the engine's picture of a prompt."""


class PipelineModel(DiffusersModel):
    """A pipeline whose trained part the family calls itself."""

    inputs: ClassVar[Sequence[str]] = ("text", "pooled")
    """What `encode_texts` gives, in the order in which `velocity` takes it."""
    cfg: ClassVar[bool] = True
    """Whether guidance means a second, unconditional half of each call."""
    t5: ClassVar[str] = ""
    """The part that is a T5, for pipelines whose call takes its number of tokens."""

    @classmethod
    @abstractmethod
    def encode_texts(cls, pipe: Any, texts: list[str], config: Config, device: torch.device) -> dict[str, Tensor]:
        """Texts by the pipeline's own text encoders."""

    @abstractmethod
    def velocity(self, x: Tensor, t: Tensor, *cond: Tensor) -> Tensor:
        """One call of the trained part (for a diffusion model its noise or v)."""

    @classmethod
    def _check_settings(cls, source: Source, config: Config) -> None:
        """Checks common to all pipeline families."""
        cls._check_parts(source)
        scheduler, tokens = source.class_name("scheduler"), config.model.max_sequence_length
        if scheduler not in cls.schedulers:
            problem = f"what its {scheduler} says of noise levels is not known here"
            raise InputError("model.path", source.path, problem, f"one with a {', '.join(cls.schedulers)}")
        if cls.t5 in source.parts and tokens == 0:
            raise InputError(
                "model.max_sequence_length", tokens, "this pipeline has a T5, which needs tokens", "1..512"
            )
        if cls.t5 and tokens > 512:
            raise InputError("model.max_sequence_length", tokens, "this pipeline takes no more", "at most 512")
        if config.sample.negative_prompt and not cls.guides(config):
            problem = "without classifier-free guidance nothing leads away from it"
            raise InputError("sample.negative_prompt", config.sample.negative_prompt, problem, "an empty one")

    @classmethod
    def embeddings(cls, config: Config, device: torch.device) -> Embeddings | None:
        if config.prompts.cache == "none":
            return None
        source = cls.open(config)
        files = [file for part in source.parts if is_text(part) for file in (source.folder / part).glob("*")]
        precision = dtypes((), config, device)["default"]
        with source.reading("text encoders"):
            encoders = fingerprint([file for file in files if file.is_file()], source.folder)
        settings = {
            "pipeline": cls.pipeline,
            "encoders": encoders,
            "max_sequence_length": config.model.max_sequence_length,
            "dtype": str(precision).removeprefix("torch."),
        }
        encoder = partial(_text_encoders, cls, config, device)
        return Embeddings(cache_folder(config.prompts.cache), settings, encoder, cls.negative_texts(config))

    @classmethod
    def guides(cls, config: Config) -> bool:
        return cls.cfg and config.sample.guidance_scale > 1

    @classmethod
    def negative_texts(cls, config: Config) -> list[str]:
        """The text that every prompt needs beside it, if there is guidance."""
        return [config.sample.negative_prompt] if cls.guides(config) else []

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        texts = [*prompts, *self.negative_texts(self.config)]
        if self.embedding_cache:
            found = self.embedding_cache.get(texts, self.config.prompts.batch_size)
        else:
            found = self.encode_texts(self.pipe, texts, self.config, self.device)
        found = {name: tensor.to(self.device) for name, tensor in found.items()}
        count = len(prompts)
        tensors = {name: tensor[:count] for name, tensor in found.items()}
        if self.guides(self.config):
            negative = self.negative({name: tensor[count:] for name, tensor in found.items()})
            tensors |= {f"negative_{name}": row.expand(count, *row.shape[1:]) for name, row in negative.items()}
        return Cond(tensors)

    def negative(self, encoded: dict[str, Tensor]) -> dict[str, Tensor]:
        """The unconditional half of guidance: one row, given as the negative prompt encodes."""
        return encoded

    def predict(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        def call(x: Tensor, t: Tensor, *inputs: Tensor) -> Tensor:
            # Frozen weights may be bfloat16 while trained ones are float32; autocast, if on, takes it from there.
            return self.velocity(x.to(self.dtype), t, *(tensor.to(self.dtype) for tensor in inputs)).float()

        scale = self.config.sample.guidance_scale if self.cfg else 1.0
        return guided(call, x, t, cond, self.inputs, scale, self.config.train.cfg_grad)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        if self.decoder_compiled and len(latents) == 1 and self.config.sample.decode_batch_size != 1:
            return self.decode(latents.expand(2, *latents.shape[1:]))[:1]  # a single row would be compiled anew
        half = self.decode_dtype != torch.float32
        with torch.autocast(latents.device.type, self.decode_dtype, enabled=half):
            pixels = self.pixels(latents.float())
        return (pixels.float() / 2 + 0.5).clamp(0, 1)

    def pixels(self, latents: Tensor) -> Tensor:
        """Latents decoded by the VAE, in [-1, 1]."""
        vae = self.pipe.vae
        shift = vae.config.shift_factor or 0.0
        return vae.decode(latents / vae.config.scaling_factor + shift, return_dict=False)[0]

    @classmethod
    def pipeline_schedule(cls, config: Config, steps: int) -> Schedule:
        scheduler = cls.ode_scheduler(config)
        shift = cls.dynamic_shift(scheduler, config)
        with cls.reading_scheduler(config):
            scheduler.set_timesteps(steps, **shift)
        return Schedule.from_sigmas(scheduler.sigmas.tolist())

    @classmethod
    def default_shift(cls, config: Config) -> float:
        scheduler = cls.ode_scheduler(config)
        dynamic = cls.dynamic_shift(scheduler, config)
        with cls.reading_scheduler(config):
            if not dynamic:
                return float(scheduler.config["shift"])
            return math.exp(dynamic["mu"]) if scheduler.config["time_shift_type"] == "exponential" else dynamic["mu"]

    @classmethod
    def dynamic_shift(cls, scheduler: Any, config: Config) -> dict[str, float]:
        """μ, linear in the number of picture tokens, where the scheduler asks for it (as FLUX.1-dev's does)."""
        knobs = scheduler.config
        if not knobs["use_dynamic_shifting"]:
            return {}
        tokens = cls.tokens(config)
        with cls.reading_scheduler(config):
            low, high = knobs["base_image_seq_len"], knobs["max_image_seq_len"]
            slope = (knobs["max_shift"] - knobs["base_shift"]) / (high - low)
            return {"mu": knobs["base_shift"] + slope * (tokens - low)}

    @classmethod
    def tokens(cls, config: Config) -> int:
        """Patches of 2×2 latent pixels in a picture."""
        *_, height, width = cls.latent_shape_for(cls.open(config), config)
        return (height // 2) * (width // 2)

    def as_pipeline_latents(self, latents: Tensor) -> Tensor:
        """Latents as the pipeline's own call takes them."""
        return latents

    def plain_call(self, prompts: Prompts, seed: int, steps: int) -> dict[str, Any]:
        """Arguments of a plain call of the pipeline for the engine's picture of a prompt."""
        noise = self.as_pipeline_latents(self.noise_of_seed(seed))
        return {"prompt": prompts.texts, "latents": noise, "num_inference_steps": steps} | self.call_options()

    def call_options(self) -> dict[str, Any]:
        """Arguments, besides prompt, noise and steps, of a plain call of the pipeline for the engine's picture."""
        sample = self.config.sample
        height, width = picture_size(self.config)
        options: dict[str, Any] = {"height": height, "width": width, "guidance_scale": sample.guidance_scale}
        if sample.negative_prompt:
            options["negative_prompt"] = sample.negative_prompt
        if self.t5:
            options["max_sequence_length"] = self.config.model.max_sequence_length
        return options


def is_text(part: str) -> bool:
    return part.startswith(("text_encoder", "tokenizer"))


def is_encoder(part: str) -> bool:
    """Whether a part encodes what the model is given, and is not needed once that is kept."""
    return is_text(part) or part.startswith(("image_encoder", "image_processor", "feature_extractor", "processor"))


@contextmanager
def _text_encoders(family: type[PipelineModel], config: Config, device: torch.device) -> Iterator[Encode]:
    """The text encoders alone, on the device, for as long as they are needed."""
    source, part = family.open(config), family.trained_component
    given = {part: source.skeleton_of(part)}  # an encoder may ask for its sizes, never for its weights
    pipe = source.load(dtypes((), config, device), lambda name: is_text(name) or name == "scheduler", **given)

    @torch.no_grad()
    def encode(requests: Sequence[Request]) -> list[dict[str, Tensor]]:
        with quiet_libraries():  # they print every long prompt's end, which CLIP never sees and T5 does
            found = family.encode_texts(pipe, [each.text for each in requests], config, device)
        return [{name: values[row] for name, values in found.items()} for row in range(len(requests))]

    with released(pipe, device):
        yield encode


@contextmanager
def released(pipe: Any, device: torch.device) -> Iterator[None]:
    """Inside, the parts of a pipeline are on the device, those that have weights at all; then their memory is free."""
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    loaded = [part for part in modules if not any(p.is_meta for p in part.parameters())]
    try:
        for part in loaded:
            part.eval().requires_grad_(False).to(device)
        yield
    finally:
        for part in loaded:  # whoever still holds the pipeline holds no weights
            part.to("meta")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def picture_size(config: Config) -> tuple[int, int]:
    """(height, width) in pixels."""
    return config.sample.resolution, config.sample.width or config.sample.resolution


def latent_size(config: Config, factor: int, patch: int, largest: int | None = None) -> tuple[int, int]:
    """(height, width) of a latent whose VAE shrinks by `factor` and whose model takes patches of that many pixels."""
    sides = {"sample.resolution": config.sample.resolution, "sample.width": config.sample.width}
    for key, side in sides.items():
        if side is not None and (side % (factor * patch) or (largest and side > largest)):
            most = f" up to {largest}" if largest else ""
            raise InputError(key, side, "this model cannot make such a picture", f"multiples of {factor * patch}{most}")
    height, width = picture_size(config)
    return height // factor, width // factor


def vae_factor(source: Source) -> int:
    """An AutoencoderKL's downsampling factor: a picture's side over its latent's."""
    vae = source.config("vae")
    if vae.get("latents_mean") is not None:
        raise InputError("model.path", source.path, "latents with a mean of their own are not supported")
    return 2 ** (len(vae.wholes("block_out_channels")) - 1)


def dtypes(parts: Sequence[str], config: Config, device: torch.device) -> dict[str, torch.dtype]:
    """The precision to load each part of a pipeline in.

    The VAE's weights stay in float32, whatever they are used in (`model.vae_dtype`); so do weights that are trained:
    bfloat16 would round the checkpoint before the first step.
    """
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    frozen = auto if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    trained = torch.float32 if config.model.train == "full" else frozen
    return {"default": frozen, **dict.fromkeys(parts, trained), "vae": torch.float32}
