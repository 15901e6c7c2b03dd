"""Any diffusers pipeline of flow matching, by its own loop: no code for a single one, and none for the next."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import with_settings
from ..config.schema import Config
from ..core.errors import InputError, first_line
from ..core.noise import fold
from ..core.schedule import Schedule
from ..core.tensors import floats, to_device
from ..data.embedding_cache import Embeddings, Encode, Request, cache_folder, fingerprint
from ..data.prompts import HELDOUT_PICTURES, HELDOUT_VIDEOS, PICTURES, VIDEOS, Prompts
from ..tools.quiet import quiet_libraries
from . import call, lora
from .base import Cond
from .conditions import REFUSED, SHORT, Blank, encoder, opened, stand_in
from .flux import keep_gradients_whole
from .loop import Levels, Loop, Prepared, UsedDirectlyError, calling, denoisers, is_denoiser
from .pipeline import DiffusersModel, dtypes, is_encoder, picture_size, released
from .prepared import collate, signature
from .source import DEVICE_ERRORS, Source
from .stepping import Stepper, Style

EULER = "FlowMatchEulerDiscreteScheduler"
MULTISTEP = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
"""Schedulers of flow models that remember steps: Euler goes through their levels in their place."""
MEASURED = ("Flux2KleinPipeline", "QwenImagePipeline", "StableDiffusion3Pipeline", "ZImagePipeline")
"""Pipelines whose compiled code has been run and measured on a GPU."""
FP16_SAFE = ("StableDiffusion3Pipeline",)
"""Pipelines whose VAE is known to decode in float16 without overflow."""
OFF_AT_ZERO = ("ZImagePipeline",)
"""Pipelines whose guidance is off at 0, and not at 1."""
JOINED_BLOCKS = ("ChromaTransformer2DModel", "FluxTransformer2DModel")
"""Transformers with FLUX's single blocks, whose gradient cuDNN's attention does not bear as it comes."""


class AnyPipelineModel(DiffusersModel):
    """One call of the model is one step of the pipeline's own call. Latents are those that go round in its loop; where
    it is given some of their elements, such as a video's first frame, those that are left.
    """

    takes_call_settings = True
    timesteps_on_host = True
    cls: ClassVar[type]
    """The pipeline's class."""

    # Which pipeline.

    @classmethod
    def of(cls, config: Config) -> type["AnyPipelineModel"]:
        return cls._of(cls.open(config).index["_class_name"], cls.path(config))

    @classmethod
    @cache
    def _of(cls, name: str, path: str) -> type["AnyPipelineModel"]:
        found = call.pipeline_class(name, path)
        video = call.frames_argument(found) is not None
        lists = (VIDEOS, HELDOUT_VIDEOS) if video else (PICTURES, HELDOUT_PICTURES)
        own = {"pipeline": name, "cls": found, "video": video, "auto_compile": name in MEASURED}
        own |= {"vae_fp16_safe": name in FP16_SAFE}
        own |= {"default_prompts": lists[0], "heldout_prompts": lists[1], "__module__": cls.__module__}
        return type(cls.__name__, (cls,), own)

    @classmethod
    def open(cls, config: Config, may_fetch: bool = True) -> Source:
        return Source(cls.path(config), may_fetch)

    @classmethod
    def components(cls, config: Config) -> list[str]:
        there = [part for part in cls.open(config).parts if is_denoiser(part)]
        for part in config.model.components:
            if part not in there:
                problem = f"{cls.pipeline} has no such part to train"
                raise InputError("model.components", part, problem, ", ".join(there))
        return [part for part in there if part in (config.model.components or there)]

    @classmethod
    def lora_layers(cls, module: nn.Module) -> Sequence[str]:
        return lora.attention_layers(module)

    @classmethod
    def _check_settings(cls, source: Source, config: Config) -> None:
        source.check_no_code()
        check_scheduler(source)
        if not cls.components(config):
            raise InputError("model.path", source.path, "has no transformer to train")
        if config.train.cfg_grad == "cond":
            problem = "guidance is the pipeline's own here, and its halves cannot be told apart"
            raise InputError("train.cfg_grad", "cond", problem, "both")
        cls._check_guidance(source, config)
        call.check_call(cls.cls, config.model.call)

    @classmethod
    def _check_guidance(cls, source: Source, config: Config) -> None:
        """A scale or a negative prompt that the call would ignore is an error."""
        scale, negative, taken = config.sample.guidance_scale, config.sample.negative_prompt, call.takes(cls.cls)
        guider = source.class_name("guider") if "guider" in source.parts else "ClassifierFreeGuidance"
        if guider != "ClassifierFreeGuidance" and scale > 1:
            problem = f"its {guider} may look at earlier steps, and a node of a tree has none of its own"
            raise InputError("sample.guidance_scale", scale, problem, "1")
        if scale > 1 and source.index.get("is_distilled"):
            raise InputError("sample.guidance_scale", scale, "this model was distilled to do without guidance", "1")
        key = "sample.negative_prompt"
        if negative and "negative_prompt" not in taken:
            raise InputError(key, negative, f"{cls.pipeline}'s call takes none", "an empty one")
        if negative and not cls.guides(config):
            problem = "without classifier-free guidance nothing leads away from it"
            raise InputError(key, negative, problem, "an empty one")
        true = "true_cfg_scale" in taken and call.guidance_argument(cls.cls) != "true_cfg_scale"
        if negative and true and not config.model.call.get("true_cfg_scale", 1) > 1:
            problem = "this model is told its guidance, which leads away from nothing"
            raise InputError(key, negative, problem, cure="model.call.true_cfg_scale above 1")

    # Levels and shapes, before there are weights.

    @classmethod
    def latent_shape_for(cls, source: Source, config: Config) -> tuple[int, ...]:
        shape = tuple(cls.dry_run(config, config.sample.num_steps).latents.shape[1:])
        cls._check_size("sample.resolution", config.sample.resolution, config)
        if config.sample.width:
            cls._check_size("sample.width", config.sample.width, config)
        pipe, frames = cls._skeleton(cls.path(config), repr(source.index)), config.sample.num_frames
        strides = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
        stride = next((getattr(pipe, name) for name in strides if isinstance(getattr(pipe, name, None), int)), 1)
        if (frames - 1) % stride:
            near = (frames - 1) // stride * stride + 1
            problem = f"this model's videos have {stride}·n + 1 frames"
            raise InputError("sample.num_frames", frames, problem, f"{near} or {near + stride}, say")
        return shape

    @classmethod
    def _check_size(cls, key: str, size: int, config: Config) -> None:
        """A size that the call would make another of, without an error, is one."""

        def elements(size: int) -> int | None:
            try:
                return cls.dry_run(with_settings(config, {key: size}), config.sample.num_steps).latents.numel()
            except (InputError, *REFUSED):
                return None

        def is_exact(size: int) -> bool:
            return size < 2 or elements(size) != elements(size - 1) or elements(size) != elements(size + 1)

        if not is_exact(size):
            below = next((n for n in range(size - 1, max(0, size - 130), -1) if is_exact(n)), None)
            problem = f"{cls.pipeline} would make another size of it"
            raise InputError(key, size, problem, f"{below}, say" if below else None)

    @classmethod
    def dry_run(cls, config: Config, steps: int) -> Prepared:
        """The call up to its loop, with parts that have no weights, and nothing encoded."""
        index = repr(cls.open(config).index)
        key = (cls.path(config), index, steps, repr(cls.arguments(config)), repr(call.columns(config.model.call)))
        if key not in _DRY_RUNS:
            _DRY_RUNS[key] = cls._dry_run(config, steps)
        return _DRY_RUNS[key]

    @classmethod
    def _dry_run(cls, config: Config, steps: int) -> Prepared:
        source, meta = cls.open(config), torch.device("meta")
        cls._check_settings(source, config)
        levels = Levels(torch.linspace(1000, 1, steps), torch.linspace(1, 0, steps + 1), None)
        arguments = cls.arguments(config) | cls.blanks(config) | {"prompt": SHORT}
        with quiet_libraries(), torch.no_grad():
            pipe = cls._skeleton(cls.path(config), repr(source.index))
            try:
                return Loop(pipe, meta).prepare(levels, arguments, is_encoder, pretend=torch.float32)
            except InputError:
                raise
            except UsedDirectlyError as error:
                raise InputError("model.path", source.path, str(error)) from None
            except REFUSED as error:
                problem = f"{cls.pipeline}'s call cannot be begun ({type(error).__name__}: {first_line(error)})"
                left = [name for name in call.takes(cls.cls) if call.is_pictures(name) and call.is_settable(name)]
                left = [name for name in left if name not in config.model.call]
                cure = (
                    f"model.call.{left[0]}=column:NAME, a column of the prompt file"
                    if left
                    else "other sizes (sample.resolution, sample.width, sample.num_frames)"
                )
                raise InputError("model.path", source.path, problem, cure=cure) from error

    @classmethod
    @cache
    def _skeleton(cls, path: str, index: str) -> Any:
        source = Source(path)
        with source.reading("parts"):
            return source.skeleton()

    @classmethod
    def ode_scheduler(cls, config: Config) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        source = cls.open(config)
        check_scheduler(source)
        own = source.config("scheduler")
        with cls.reading_scheduler(config):
            if source.class_name("scheduler") == EULER:
                return FlowMatchEulerDiscreteScheduler.from_config(own)
            shift = own.get("flow_shift", own.get("shift", 1.0))  # multistep schedulers call it another name
            return FlowMatchEulerDiscreteScheduler(own.get("num_train_timesteps", 1000), shift)

    @classmethod
    def adjust(cls, pipe: Any, config: Config) -> None:
        super().adjust(pipe, config)
        if (guider := _guider(pipe, config.sample.guidance_scale)) is not None:
            pipe.guider = guider

    @classmethod
    def pipeline_schedule(cls, config: Config, steps: int) -> Schedule:
        scheduler, asked = cls.ode_scheduler(config), cls.dry_run(config, steps).asked
        if asked is None:
            raise InputError("model.path", cls.path(config), f"{cls.pipeline}'s loop asks its scheduler for no levels")
        given = {name: value for name, value in asked.items() if value is not None}
        if "sigmas" in given or "timesteps" in given:
            given.pop("num_inference_steps", None)
        if not scheduler.config["use_dynamic_shifting"]:
            given.pop("mu", None)
        with cls.reading_scheduler(config):
            scheduler.set_timesteps(**given)
            sigmas, timesteps = scheduler.sigmas.double(), scheduler.timesteps.double()
            Schedule.from_sigmas(floats(sigmas))  # falls strictly, from at most 1 to 0
        return Schedule(sigmas[:-1], sigmas[1:], timesteps)

    @classmethod
    def default_shift(cls, config: Config) -> float:
        scheduler = cls.ode_scheduler(config)
        mu = (cls.dry_run(config, config.sample.num_steps).asked or {}).get("mu")
        if not scheduler.config["use_dynamic_shifting"] or mu is None:
            return float(scheduler.config["shift"])
        return math.exp(mu) if scheduler.config["time_shift_type"] == "exponential" else float(mu)

    # What the call is given.

    @classmethod
    def columns(cls, config: Config) -> dict[str, bool]:
        return {column: call.is_pictures(name) for name, column in call.columns(config.model.call).items()}

    @classmethod
    def blanks(cls, config: Config) -> dict[str, Any]:
        """Something in the place of each column."""
        height, width = picture_size(config)
        return {
            name: Blank((width, height)).picture() if call.is_pictures(name) else SHORT
            for name in call.columns(config.model.call)
        }

    @classmethod
    def guides(cls, config: Config) -> bool:
        return config.sample.guidance_scale > (0 if cls.pipeline in OFF_AT_ZERO else 1)

    @classmethod
    def arguments(cls, config: Config) -> dict[str, Any]:
        """What is the same in every call."""
        taken, (height, width) = call.takes(cls.cls), picture_size(config)
        guidance, negative = call.guidance_argument(cls.cls), config.sample.negative_prompt
        found: dict[str, Any] = {"height": height, "width": width}
        if frames := call.frames_argument(cls.cls):
            found[frames] = config.sample.num_frames
        found |= {"max_area": height * width, "use_resolution_binning": False}  # the size is the one that is asked for
        if config.model.max_sequence_length:
            found["max_sequence_length"] = config.model.max_sequence_length
        if guidance:
            found[guidance] = config.sample.guidance_scale
        if negative or (cls.guides(config) and guidance == "true_cfg_scale"):
            found["negative_prompt"] = negative or " "  # without one there is no guidance
        found |= call.constants(config.model.call)
        return {name: value for name, value in found.items() if name in taken}

    # Prompts.

    @classmethod
    def embeddings(cls, config: Config, device: torch.device) -> Embeddings | None:
        if config.prompts.cache == "none":
            return None
        source, columns, arguments = cls.open(config), cls.columns(config), cls.arguments(config)
        parts = [part for part in source.parts if is_encoder(part) or (columns and part == "vae")]
        files = [file for part in parts for file in (source.folder / part).glob("*")]
        with source.reading("text encoders"):
            encoders = fingerprint([file for file in files if file.is_file()], source.folder)
        unseen = () if columns else ("height", "width", "num_frames", "frames", "max_area")
        for name in (*filter(None, [call.guidance_argument(cls.cls)]), *unseen):
            arguments.pop(name, None)
        scale = config.sample.guidance_scale  # whether there is guidance decides what is encoded, and not how much
        settings = {
            "pipeline": cls.pipeline,
            "encoders": encoders,
            "guidance": repr((scale > 0, scale > 1)),
            "seed": config.seed if columns else 0,  # a picture's encoding may be drawn
            "arguments": repr(sorted(arguments.items())),
            "index": repr(sorted((name, value) for name, value in source.index.items() if name not in source.parts)),
            "dtype": str(dtypes((), config, device)["default"]).removeprefix("torch."),
        }
        return Embeddings(cache_folder(config.prompts.cache), settings, partial(_encoders, cls, config, device))

    @classmethod
    def requests(cls, prompts: Prompts, config: Config) -> list[Request]:
        columns = call.columns(config.model.call).items()
        rows = [tuple((name, prompts.columns[column][i]) for name, column in columns) for i in range(len(prompts))]
        return [Request(text, given) for text, given in zip(prompts.texts, rows, strict=True)]

    @classmethod
    def example_prompts(cls, config: Config) -> Prompts:
        columns, blanks = call.columns(config.model.call), cls.blanks(config)
        given: dict[str, list[object]] = {column: [blanks[name]] for name, column in columns.items()}
        return Prompts([cls.heldout_prompts[0]], given)

    def encode(self, prompts: Sequence[str]) -> Cond:
        return self.encode_prompts(Prompts(list(prompts), {}))

    @torch.no_grad()
    def encode_prompts(self, prompts: Prompts) -> Cond:
        asked = self.requests(prompts, self.config)
        rows = self.embedding_cache.rows(asked) if self.embedding_cache else self.encoder(asked)
        tensors, forms = collate(rows)
        stands = [{name: stand_in(name, value) for name, value in each.given} for each in asked]
        keys = [(signature(form), repr(stand)) for form, stand in zip(forms, stands, strict=True)]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        host = {"form": forms, "given": stands, "alike": [number[key] for key in keys]}
        cond = Cond({name: tensor.to(self.device) for name, tensor in tensors.items()}, host)
        if self.example is None:
            self._try(cond[torch.tensor([0])])
        return cond

    # The model.

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        fixed, self.trained = self.arguments(config), self.components(config)
        self.denoisers = denoisers(self.pipe)
        for part in self.denoisers.values():
            if type(part).__name__ in JOINED_BLOCKS:
                keep_gradients_whole(part)
        self.guider = _guider(self.pipe, config.sample.guidance_scale)
        self.encoder: Encode = encoder(self.loop(), fixed, config.seed)
        self.stepper = Stepper(self.loop, self.cls, fixed, self.dtype, device)
        self.example: Cond | None = None
        self.decodes_alone = False
        self.said = [f"{self.pipeline} by its own loop; trained: {', '.join(self.trained)}"]
        if config.model.train == "lora":
            chosen = config.model.lora.targets or self.lora_layers(self.module)
            self.said.append(f"LoRA on the layers {', '.join(chosen)}")

    @property
    def messages(self) -> Sequence[str]:
        return self.said

    def loop(self) -> Loop:
        """The pipeline with the policy that is asked now in it: wrapped, another one's, or its own."""
        parts: dict[str, Any] = {}
        for name, own in self.denoisers.items():
            inside = self.module if len(self.trained) == 1 else getattr(self.module, name, own)
            parts[name] = calling(own, inside) if name in self.trained and inside is not own else own
        if self.guider is not None:
            parts["guider"] = copy.copy(self.guider)
        return Loop(self.pipe, self.device, parts)

    def schedule(self, steps: int) -> Schedule:
        found = super().schedule(steps)
        self.stepper.add(found)
        return found

    def call_groups(self, t: Tensor) -> Tensor:
        return self.stepper.groups(t)

    def predict(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        return self.stepper.velocity(x, t, cond)

    def _try(self, cond: Cond) -> None:
        """Find out how rows share a call, and which elements of the latents are free."""
        high, low = self.schedule(self.config.sample.num_steps).timestep.float()[[0, -1]].tolist()
        rows = torch.tensor([[0, 0, 0], [1, 0, 0]], device=self.device)
        with quiet_libraries():
            free = self.stepper.find_free(self.noise(fold(0, 0), rows[:1]), high, cond)
            if free:
                given = math.prod(self.latent_shape) - len(free.place)
                self.latent_shape = (len(free.place),)
                self.said.append(f"{given} of the latents' elements are given; the other {len(free.place)} are free")
            both = cond[torch.tensor([0, 0])]
            self.said.append(str(self.stepper.find_style(self.noise(fold(0, 0), rows), high, low, both)))
        self.example = cond

    # Pictures.

    @torch.no_grad()
    def decode_for(self, latents: Tensor, prompts: Prompts | None = None) -> Tensor:
        """Where elements of the latents are given, what the pipeline makes of them depends on the prompts."""
        cond = self.example and self.example[torch.zeros(len(latents), dtype=torch.long)]
        if self.stepper.free and prompts is not None:
            cond = self.encode_prompts(prompts)
        if not self.decodes_alone and (cond is None or cond.is_alike):
            try:
                return self._decoded(latents, cond)
            except DEVICE_ERRORS:
                raise
            except REFUSED:
                if len(latents) == 1:
                    raise
                self.decodes_alone = True  # as HunyuanVideo 1.5's decoder takes one video at a time
        rows = torch.arange(len(latents)).split(1)
        return torch.cat([self._decoded(latents[to_device(i, latents.device)], cond and cond[i]) for i in rows])

    def decode(self, latents: Tensor) -> Tensor:
        return self.decode_for(latents)

    def _decoded(self, latents: Tensor, cond: Cond | None) -> Tensor:
        if self.decoder_compiled and len(latents) == 1 and self.config.sample.decode_batch_size != 1:
            twice = torch.zeros(2, dtype=torch.long)  # a single row would be compiled anew
            return self._decoded(latents.expand(2, *latents.shape[1:]), cond and cond[twice])[:1]
        count, style = len(latents), self.stepper.style or Style()
        if self.columns(self.config) and cond is not None:
            results, given = self.stepper.results(cond), cond.host["given"][0]
        else:  # nothing of a text is in a decoded picture
            results, given = self.dry_run(self.config, self.config.sample.num_steps).results, {}
        own = self.stepper.arguments(count, style, given)
        # What a decoder draws is the same for every picture.
        own["generator"] = [torch.Generator(self.device).manual_seed(0) for _ in range(count)]
        half = self.decode_dtype != torch.float32
        with torch.autocast(latents.device.type, self.decode_dtype, enabled=half):
            return self.loop().decode(partial(self.stepper.place, latents.float()), results, own).float()

    def compile_decoder(self) -> list[str]:
        return super().compile_decoder() if type(self.pipe.vae).__name__ == "AutoencoderKL" else []

    # Plain calls.

    def own_call(self, x: Tensor, prompts: Prompts, steps: int) -> tuple[Tensor, Tensor]:
        """What the pipeline's own call makes of one noise, taking its steps by Euler's scheduler, and the levels that
        it goes through. What is kept of the prompt is taken as it is.
        """
        cond, scheduler, place = self.encode_prompts(prompts), self.ode_scheduler(self.config), self.stepper.place
        arguments = self.stepper.arguments(1, Style(), cond.host["given"][0])
        with quiet_libraries():
            found = self.loop().whole(partial(place, x), scheduler, steps, self.stepper.results(cond), arguments)
        return found.float(), scheduler.sigmas

    def noise_of_seed(self, seed: int) -> Tensor:
        levels, generator = Levels(torch.tensor([1000.0]), torch.tensor([1.0, 0.0]), None), torch.Generator()
        own = {"prompt": SHORT, "generator": generator.manual_seed(seed)}
        arguments = {**self.stepper.fixed, **self.blanks(self.config), **own}
        with quiet_libraries(), torch.no_grad():
            found = self.loop().prepare(levels, arguments, is_encoder, pretend=self.dtype).latents
        return found.flatten(1)[:, self.stepper.free.place] if self.stepper.free else found

    def plain_call(self, prompts: Prompts, seed: int, steps: int) -> dict[str, Any]:
        given = {name: opened(value) for name, value in self.requests(prompts, self.config)[0].given}
        own = {"prompt": prompts.texts[0], "num_inference_steps": steps}
        return {**self.stepper.fixed, **given, **own, "generator": torch.Generator().manual_seed(seed)}


@contextmanager
def _encoders(family: type[AnyPipelineModel], config: Config, device: torch.device) -> Iterator[Encode]:
    """Whatever encodes prompts and pictures, on the device, for as long as it is needed."""
    source, needs_vae = family.open(config), bool(family.columns(config))
    away = [part for part in source.parts if is_denoiser(part) or (part == "vae" and not needs_vae)]
    with quiet_libraries():
        skeletons = {part: source.skeleton_of(part) for part in away}
        pipe = source.load(dtypes((), config, device), lambda part: True, **skeletons)
    with released(pipe, device):
        guider = _guider(pipe, config.sample.guidance_scale)
        yield encoder(Loop(pipe, device, {"guider": guider} if guider else {}), family.arguments(config), config.seed)


def check_scheduler(source: Source) -> None:
    """It is one of flow matching, whose levels are known."""
    scheduler, known = source.class_name("scheduler"), (EULER, *MULTISTEP)
    if scheduler not in known:
        problem = f"what its {scheduler} says of noise levels is not known here"
        raise InputError("model.path", source.path, problem, f"one with a {', '.join(known)}")
    if scheduler in MULTISTEP and not source.config("scheduler").get("use_flow_sigmas"):
        problem = f"its {scheduler} is none of flow matching (it says no use_flow_sigmas)"
        raise InputError("model.path", source.path, problem)


def _guider(pipe: Any, scale: float) -> Any:
    """Guidance of that scale, for a pipeline whose guidance is a part."""
    if (own := getattr(pipe, "guider", None)) is None:
        return None
    with quiet_libraries():
        return own.new(enabled=False) if scale <= 1 else own.new(guidance_scale=scale)


_DRY_RUNS: dict[tuple[str, str, int, str, str], Prepared] = {}
