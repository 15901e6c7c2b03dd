"""A diffusers pipeline's own denoising loop, driven one model call at a time.

Classic pipelines have one shape: encode the prompt, prepare latents, ask the scheduler for timesteps; then, for each of
them, call the transformer, guide, and hand the velocity to `scheduler.step`. So one call of the pipeline can answer for
one step: a scheduler of ours names the noise level and ends the call once the velocity arrives. Packing, position ids,
guidance, timestep conventions and signs are the pipeline's own code.

Nothing of the pipeline is ever changed. What is called is a twin of it: another object that shares its parts, with some
attributes of its own.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn


class Levels(NamedTuple):
    """The table of noise levels that a call goes through, and the one step of it that is wanted (none: all are passed
    over, and the latents are decoded as they are).
    """

    timesteps: Tensor
    sigmas: Tensor  # one more, the last is 0
    step: int | None


class RowTimesteps(Tensor):
    """A timestep for each row, where a loop has one for all of them. Where guidance doubles the rows, the loop expands
    it to twice as many: each half has its own. Whatever else is done with it gives a plain tensor.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.expand and own.ndim == 1 and len(args) == 2 and args[1] % len(own) == 0:
                return own.as_subclass(Tensor).repeat(args[1] // len(own))
            found = function(*args, **(kwargs or {}))
        if function in (Tensor.unbind, torch.unbind):
            return tuple(row.as_subclass(cls) for row in found)
        return found.as_subclass(Tensor) if isinstance(found, cls) else found

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind())


class Begun(BaseException):
    """A call has come to its loop: everything is prepared."""


class Stepped(BaseException):
    """A call has come to `scheduler.step`: the velocity, and the latents that would be moved by it."""

    def __init__(self, velocity: Tensor, latents: Tensor) -> None:
        super().__init__()
        self.velocity, self.latents = velocity, latents


class _Scheduler(FlowMatchEulerDiscreteScheduler):
    """In the place of the pipeline's scheduler, whose settings a loop may read."""

    def __init__(self, settings: Any, levels: Levels) -> None:  # not the parent's: there is nothing to compute
        self._internal_dict = settings
        self.timesteps, self.sigmas = levels.timesteps, levels.sigmas
        self.init_noise_sigma = 1.0
        self.asked: dict[str, Any] | None = None

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        """Loops look at the names of these arguments before they give them."""
        self.asked = {"num_inference_steps": num_inference_steps, "sigmas": sigmas, "mu": mu, "timesteps": timesteps}

    def set_begin_index(self, begin_index: int = 0) -> None:
        pass

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise Stepped(model_output, sample)

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        return sample


class Part:
    """A part of the pipeline as the twin sees it: calls go elsewhere, and whatever else is asked of it to itself."""

    def __init__(self, part: Any, call: Callable[..., Any], own: Callable[[str], Callable[..., Any] | None]) -> None:
        self.__dict__.update(_part=part, _call=call, _own=own)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.__dict__["_part"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_call"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__["_own"](name)
        return getattr(self.__dict__["_part"], name) if found is None else found


def calling(part: Any, call: Callable[..., Any]) -> Part:
    """A part that is called by `call`."""
    return Part(part, call, lambda name: None)


def watched(part: Any, used: Callable[[], None]) -> Part:
    """A part that says when it is put to work: called itself, or by a method of its own (`vae.encode`)."""
    # A VAE's weights may be float32 where the pipeline hands it pictures in half precision.
    dtype: torch.dtype | None = part.dtype if hasattr(part, "encode") and hasattr(part, "dtype") else None

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and dtype is not None else value

    def first(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        used()
        return work(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    def own(name: str) -> Callable[..., Any] | None:
        found = getattr(part, name)
        plain = hasattr(nn.Module, name) or not inspect.isroutine(found)
        return None if plain else partial(first, found)

    return Part(part, partial(first, part), own)


@cache
def _twin_class(cls: type) -> type:
    """The pipeline's class with a loop that passes over all steps but one."""

    def interrupt(twin: Any) -> bool:
        return twin._passes_over()

    extra = {
        "interrupt": property(interrupt),
        "_execution_device": property(lambda twin: twin._device),
        "progress_bar": lambda twin, iterable=None, total=None: _NoBar(iterable),
        "maybe_free_model_hooks": lambda twin: None,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), extra)


class _NoBar:
    """A progress bar that nobody sees."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def __enter__(self) -> "_NoBar":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: int = 1) -> None:
        pass

    def set_postfix(self, *args: Any, **kwargs: Any) -> None:
        pass


class Anything:
    """In the place of an embedding where only shapes and levels are asked: what is done with it gives another one."""

    device, shape, ndim = torch.device("meta"), torch.Size((1, 8, 8)), 3

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "Anything":
        return cls()

    def __getattr__(self, name: str) -> Callable[..., "Anything"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: Anything()

    def __getitem__(self, key: object) -> "Anything":
        return Anything()

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator["Anything"]:
        return iter((self,))

    def _other(self, *others: object) -> "Anything":
        return Anything()

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __neg__ = __truediv__ = _other


@cache
def number_of_results(cls: type, method: str) -> int:
    """How many values the pipeline's call takes from one of its methods, by its text; 0 where it takes one as it is."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.__call__))))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        function, (target, *_) = node.value.func, node.targets
        if isinstance(function, ast.Attribute) and function.attr == method:
            return len(target.elts) if isinstance(target, ast.Tuple) else 0
    return 0


@cache
def own_methods(cls: type) -> tuple[str, ...]:
    """The methods that make this pipeline another than others."""
    shared = set(dir(DiffusionPipeline))
    own = [name for name in dir(cls) if name not in shared and not name.startswith("__")]
    return tuple(name for name in own if callable(getattr(cls, name)))


@cache
def can_pass_over(cls: type) -> bool:
    """Whether the loop asks `self.interrupt`, and so can be led past other steps to the one that is wanted."""
    return "interrupt" in inspect.unwrap(cls.__call__).__code__.co_names


Results = Mapping[str, list[Any]]
"""What methods of a pipeline returned, call by call."""
Place = Callable[[Tensor], Tensor]
"""From the latents that a pipeline has prepared to those that go into its loop."""


@dataclass
class Loop:
    """A pipeline, and whatever of it is exchanged for its twin: parts by name."""

    pipe: Any
    device: torch.device
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def call(self) -> Callable[..., Any]:
        """The pipeline's `__call__` without its decorators, so that gradients flow."""
        return inspect.unwrap(type(self.pipe).__call__)

    def velocity(self, place: Place, levels: Levels, results: Results, arguments: Mapping[str, Any]) -> Stepped:
        """One model call: what arrives at the scheduler. `results` of methods are taken as they are, and `place` puts
        latents in the place of those that the pipeline prepares.
        """
        try:
            self._go(place, levels, results, arguments)
        except Stepped as answer:
            return answer.with_traceback(None)  # which holds on to all that the call has made
        raise RuntimeError(f"{type(self.pipe).__name__} came to its end without a step of its scheduler")

    def decode(self, place: Place, results: Results, arguments: Mapping[str, Any]) -> Tensor:
        """What the pipeline makes of latents at the end of its loop: pictures or videos in [0, 1]."""
        none = Levels(torch.empty(0, device=self.device), torch.zeros(1), None)
        options = {"num_inference_steps": 1, "output_type": "pt", "return_dict": False}
        return self._go(place, none, results, {**arguments, **options})[0]

    def whole(self, place: Place, scheduler: Any, steps: int, results: Results, arguments: Mapping[str, Any]) -> Tensor:
        """The pipeline's own call from its first step to its pictures, by a scheduler that takes the steps."""
        options = {"num_inference_steps": steps, "output_type": "pt", "return_dict": False}
        methods = partial(self._given, place, results)
        with torch.no_grad():
            return self._run(scheduler, lambda: False, {**arguments, **options}, methods, self.parts)[0]

    def prepare(
        self,
        levels: Levels,
        arguments: Mapping[str, Any],
        absent: Callable[[str], bool],
        pretend: torch.dtype | None = None,
    ) -> "Prepared":
        """Everything up to the loop, with the parts that are `absent` later put to work for the last time: returns what
        they had a hand in. To `pretend` is to do without them already, as if their answers were of that type: only
        shapes, levels and noise are of use then.
        """
        pipe, made = self.pipe, list[Any]()
        recorder, scheduler = Recorder(type(pipe), pretend), _Scheduler(pipe.scheduler.config, levels)

        def methods(twin: Any) -> dict[str, Callable[..., Any]]:
            wrapped = {name: recorder.recorded(name, getattr(twin, name)) for name in own_methods(type(pipe))}
            prepare_latents = wrapped["prepare_latents"]

            def looked_at(*args: Any, **kwargs: Any) -> Any:
                made.append(prepare_latents(*args, **kwargs))
                return made[-1]

            return wrapped | {"prepare_latents": looked_at}

        def begun(*args: Any, **kwargs: Any) -> bool:
            raise Begun

        parts = dict(self.parts) | {name: calling(part, begun) for name, part in denoisers(pipe).items()}
        for name, part in pipe.components.items():
            if absent(name):
                parts[name] = Missing(name) if pretend else part and watched(part, partial(recorder.work, name))
            elif name == "vae" and part is not None:
                parts[name] = watched(part, lambda: None)
        try:
            self._run(scheduler, begun, arguments, methods, parts)
        except Begun:
            pass
        except AwayError as error:
            raise UsedDirectlyError(_used_directly(type(pipe), str(error))) from None
        except Exception:
            if not (pretend and made and scheduler.asked):
                raise
        if not made:
            raise RuntimeError(f"{type(pipe).__name__} has no loop that calls prepare_latents before it")
        return Prepared(recorder.results(), first_of(made[-1]), scheduler.asked)

    def _go(self, place: Place, levels: Levels, results: Results, arguments: Mapping[str, Any]) -> Any:
        """The call, with latents and results given."""
        steps = iter(range(len(levels.timesteps)))
        scheduler, methods = _Scheduler(self.pipe.scheduler.config, levels), partial(self._given, place, results)
        return self._run(scheduler, lambda: next(steps, None) != levels.step, arguments, methods, self.parts)

    def _given(self, place: Place, results: Results, twin: Any) -> dict[str, Callable[..., Any]]:
        found = {name: _in_turn(values) for name, values in results.items()}
        prepare_latents = found.get("prepare_latents") or twin.prepare_latents

        def with_ours(*args: Any, **kwargs: Any) -> Any:
            own = prepare_latents(*args, **kwargs)
            ours = place(first_of(own))
            return (ours, *own[1:]) if isinstance(own, tuple) else ours

        return found | {"prepare_latents": with_ours}

    def _run(
        self,
        scheduler: Any,
        passes_over: Callable[[], bool],
        arguments: Mapping[str, Any],
        methods: Callable[[Any], dict[str, Callable[..., Any]]],
        parts: Mapping[str, Any],
    ) -> Any:
        twin = object.__new__(_twin_class(type(self.pipe)))
        twin.__dict__.update(self.pipe.__dict__)
        twin.__dict__.update(parts, scheduler=scheduler, _device=self.device, _passes_over=passes_over)
        twin.__dict__.update(methods(twin))
        # Whatever is drawn on the way is thrown away, or the same each time; nobody else's numbers are used up.
        generator = torch.Generator("cpu" if self.device.type == "meta" else self.device).manual_seed(0)
        options = {"num_inference_steps": max(1, len(scheduler.timesteps)), "generator": generator}
        try:
            return self.call(twin, **(options | dict(arguments)))
        finally:  # its methods know it, and would keep it, and the latents with it, until somebody looks for cycles
            twin.__dict__.clear()


def denoisers(pipe: Any) -> dict[str, nn.Module]:
    """The parts that a loop calls, by name."""
    return {name: part for name, part in pipe.components.items() if is_denoiser(name) and isinstance(part, nn.Module)}


def is_denoiser(part: str) -> bool:
    return part.startswith(("transformer", "unet"))


def first_of(results: Any) -> Tensor:
    """The latents among what `prepare_latents` returned."""
    return results[0] if isinstance(results, tuple) else results


def _in_turn(values: list[Any]) -> Callable[..., Any]:
    each = iter(values)
    return lambda *args, **kwargs: next(each)


class Prepared(NamedTuple):
    """What a call has made before its loop."""

    results: dict[str, list[Any]]  # of the methods that put to work what is absent later
    latents: Tensor
    asked: dict[str, Any] | None  # of the scheduler: the arguments of set_timesteps


class UsedDirectlyError(Exception):
    """A call puts a part to work itself, and not in a method whose result could be kept."""


def _used_directly(pipeline: type, part: str) -> str:
    return f"{pipeline.__name__}'s call uses its {part} itself, and in no method whose result could be kept"


class AwayError(Exception):
    """A part that is away was asked for something."""


class Missing:
    """In the place of a part that is away."""

    def __init__(self, part: str) -> None:
        self.__dict__["_part"] = part

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise AwayError(self.__dict__["_part"])

    def __getattr__(self, name: str) -> None:
        raise AwayError(self.__dict__["_part"])


class Recorder:
    """Results of the methods that a pipeline's call calls itself, and which of them put absent parts to work."""

    def __init__(self, pipeline: type, pretend: torch.dtype | None) -> None:
        self.pipeline, self.inside, self.pretend = pipeline, "", pretend or torch.float32
        self.found: dict[str, list[Any]] = {}
        self.worked: set[str] = set()

    def work(self, part: str) -> None:
        if not self.inside:
            raise UsedDirectlyError(_used_directly(self.pipeline, part))
        self.worked.add(self.inside)

    def recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return method(*args, **kwargs)
            self.inside = name
            try:
                result = method(*args, **kwargs)
            except AwayError:
                self.worked.add(name)
                count = number_of_results(self.pipeline, name)
                result = tuple(Anything(self.pretend) for _ in range(count)) if count else Anything(self.pretend)
            finally:
                self.inside = ""
            self.found.setdefault(name, []).append(result)
            return result

        return call

    def results(self) -> dict[str, list[Any]]:
        return {name: values for name, values in self.found.items() if name in self.worked}
