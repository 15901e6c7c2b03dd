"""A diffusers pipeline in a folder or on the hub: found, looked into, and loaded in parts."""

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..core.errors import InputError, first_line, shortened
from ..tools.quiet import quiet_libraries

BROKEN = (
    *(OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, AssertionError),
    ImportError,
)
"""What diffusers and transformers raise over files that are not what they should be; and `StrictDataclassError`."""
DEVICE_ERRORS = torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
"""RuntimeErrors for which no file is to blame; the second is newer than some versions of torch."""


class PartConfig(dict[str, Any]):
    """The index, or the configuration of a part. A missing value is an error that names it."""

    def __init__(self, path: str, part: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.path, self.part = path, part

    def __missing__(self, key: str) -> Any:
        raise InputError("model.path", self.path, f"is incomplete (its {self.part} names no {key})")

    def whole(self, key: str, default: int | None = None) -> int:
        """A number of things, such as channels."""
        return self._checked(key, self[key] if default is None else self.get(key, default))

    def wholes(self, key: str) -> list[int]:
        """Several, such as the channels of each block."""
        values = self[key]
        if not isinstance(values, list) or not values:
            raise self._wrong(key, "a list of whole numbers")
        return [self._checked(key, value) for value in values]

    def check_number(self, key: str) -> None:
        """Refuse what is no number; it may be missing."""
        if self.get(key) is not None and _kinds(self[key]) != {"number"}:
            raise self._wrong(key, "a number")

    def _checked(self, key: str, value: Any) -> int:
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(key, "a whole number above 0")
        return value

    def _wrong(self, key: str, allowed: str) -> InputError:
        return InputError("model.path", self.path, f"its {self.part} says {key}={_shown(self.get(key))}", allowed)


class Source:
    """A pipeline by its `model.path`. Single files of one on the hub are fetched alone; `folder` fetches all of it."""

    def __init__(self, path: str, may_fetch: bool = True) -> None:
        if not path:
            raise InputError("model.path", None, "is not set", "a folder with a diffusers pipeline, or a hub id")
        self.path, self.may_fetch, self.local = path, may_fetch, os.path.isdir(path)
        if not self.local and (Path(path).is_absolute() or path.startswith(".") or path.count("/") != 1):
            raise InputError("model.path", path, "there is no such folder")

    @cached_property
    def index(self) -> PartConfig:
        """The pipeline's model_index.json."""
        if self.local and not os.path.isfile(Path(self.path) / "model_index.json"):
            raise InputError("model.path", self.path, "the folder holds no diffusers pipeline (no model_index.json)")
        index = PartConfig(self.path, "index", self.read("model_index.json"))
        if not isinstance(index["_class_name"], str):
            problem = f"its index names {_shown(index['_class_name'])} as the pipeline's class"
            raise InputError("model.path", self.path, problem, "the name of a class in diffusers")
        for name, kind in index.items():  # a part is looked for in the folder of its name, and nowhere else
            if _is_part(kind) and not re.fullmatch(r"[a-zA-Z]\w*", name):
                raise InputError("model.path", self.path, f"its index names a part {_shown(name)}", "plain names")
        return index

    def read(self, name: str) -> dict[str, Any]:
        """One of the pipeline's JSON files."""
        file = self._file(name)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError("model.path", self.path, f"is incomplete (it has no {name})") from None
        except (OSError, ValueError, RecursionError) as error:  # also bytes that are no text, numbers without end
            raise InputError("model.path", self.path, f"its {name} cannot be read ({first_line(error)})") from None
        if not isinstance(found, dict):
            raise InputError("model.path", self.path, f"its {name} holds no settings", "names and their values")
        return found

    def config(self, part: str) -> PartConfig:
        """The configuration of one of its parts."""
        name = f"{part}/{'scheduler_config' if part == 'scheduler' else 'config'}.json"
        return PartConfig(self.path, part, self.read(name))

    @property
    def parts(self) -> list[str]:
        """Names of the parts that the index says are there."""
        return [name for name, kind in self.index.items() if _is_part(kind)]

    def class_name(self, part: str) -> str:
        """The class of a part, by the index."""
        kind = self.index[part]
        if not _is_part(kind):
            problem = f"its index names {_shown(kind)} as its {part}"
            raise InputError("model.path", self.path, problem, "a library and the name of a class")
        return kind[1]

    def class_of(self, part: str) -> Any:
        """The class of one of diffusers' own parts."""
        import diffusers

        name = self.class_name(part)
        found = None if name.startswith("_") else getattr(diffusers, name, None)
        kind = diffusers.SchedulerMixin if part == "scheduler" else torch.nn.Module
        if not (isinstance(found, type) and issubclass(found, kind) and hasattr(found, "from_config")):
            raise InputError(
                "model.path", self.path, f"its index names {_shown(name)} as its {part}", "what diffusers has"
            )
        return found

    def check_kinds(self, part: str) -> None:
        """Refuse a part's settings where they are of another kind than those its class has by default."""
        config = self.config(part)
        for name, parameter in inspect.signature(self.class_of(part).__init__).parameters.items():
            known = set() if parameter.default is inspect.Parameter.empty else _kinds(parameter.default)
            found = _kinds(config.get(name))
            if not found <= (known or found) or "no number" in found - known:
                problem = f"its {part} says {name}={_shown(config[name])}"
                raise InputError("model.path", self.path, problem, f"such as {parameter.default}" if known else None)

    def skeleton_of(self, part: str) -> Any:
        """One of diffusers' own parts without its weights."""
        with torch.device("meta"), self.reading(f"{part}'s settings"):
            return self.class_of(part).from_config(self.config(part))

    def skeleton(self) -> Any:
        """Its diffusers pipeline without any weights; parts of other libraries, which only encode, are None."""
        import diffusers

        cls = getattr(diffusers, self.index["_class_name"])
        takes = inspect.signature(cls.__init__).parameters
        given = {name: value for name, value in self.index.items() if name in takes and not isinstance(value, list)}
        for name, parameter in takes.items():
            if name in self.parts and self.index[name][0] == "diffusers":
                given[name] = self._settings_only(name)
            elif name not in (*given, "self") and (name in self.index or parameter.default is parameter.empty):
                given[name] = None
        return cls(**given)

    def _settings_only(self, part: str) -> Any:
        import diffusers

        found = getattr(diffusers, self.class_name(part), None)
        file = getattr(found, "config_name", None)
        if isinstance(found, type) and not issubclass(found, torch.nn.Module) and file not in (None, "config.json"):
            return found.from_config(self.read(f"{part}/{file}"))  # pyright: ignore[reportAttributeAccessIssue]
        return self.skeleton_of(part)

    def check_no_code(self) -> None:
        """A pipeline or a part that is code in the model's folder is never run."""
        import diffusers

        for part in self.parts:
            library = self.index[part][0]
            if library not in ("diffusers", "transformers") and not hasattr(diffusers.pipelines, library):
                problem = f"its {part} is code of its own ({library}), and no code from a model's folder is run"
                raise InputError("model.path", self.path, problem, "parts of diffusers and transformers")

    @contextmanager
    def reading(self, what: str = "settings") -> Iterator[None]:
        """Inside, what libraries raise over a broken pipeline is one line."""
        from huggingface_hub.errors import StrictDataclassError

        try:
            yield
        except (InputError, *DEVICE_ERRORS):
            raise
        except (*BROKEN, StrictDataclassError) as error:
            problem = f"its {what} cannot be used ({type(error).__name__}: {first_line(error)})"
            raise InputError("model.path", self.path, problem) from error

    @cached_property
    def folder(self) -> Path:
        """The whole pipeline on this machine."""
        if self.local:
            return Path(self.path)
        if not self.may_fetch:
            raise self.missing()
        with quiet_libraries():
            from diffusers import DiffusionPipeline

            try:
                return Path(DiffusionPipeline.download(self.path))
            except (OSError, ValueError) as error:
                raise self.missing(error) from None

    def load(self, dtypes: Mapping[str, torch.dtype], wanted: Callable[[str], bool], **given: Any) -> Any:
        """Its diffusers pipeline, with the parts that are wanted; others are None, or what is `given` for them."""
        self.check_no_code()
        parts = [name for name, kind in self.index.items() if _is_part(kind) or kind == [None, None]]
        used = [name for name in self.parts if wanted(name) and name not in given]
        if lacking := [name for name in used if not (self.folder / name).is_dir()]:
            raise InputError("model.path", self.path, f"is incomplete (it has no {lacking[0]}/)")
        absent = {name: None for name in parts if name not in used}
        with quiet_libraries(), self.reading("parts"):
            import diffusers

            try:
                family = getattr(diffusers, self.index["_class_name"])
                pipe = family.from_pretrained(self.folder, dtype=dict(dtypes), **(absent | given))
            except (OSError, ValueError, SafetensorError) as error:
                if not self.local:
                    raise self.missing(error) from None
                raise InputError("model.path", self.path, f"is incomplete ({first_line(error)})") from None
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def missing(self, error: Exception | None = None) -> InputError:
        problem = "these weights are not here (no such folder, not whole in the hub's cache) and were not fetched"
        if error is not None and str(error):
            problem += f" ({first_line(error)})"
        cure = f"a folder made with `hf download {self.path} --local-dir FOLDER` (gated models: `hf auth login` first)"
        return InputError("model.path", self.path, problem, cure=cure)

    def _file(self, name: str) -> Path:
        if self.local:
            return Path(self.path) / name
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(self.path, name)
            if isinstance(cached, str):
                return Path(cached)
            if self.may_fetch and not constants.HF_HUB_OFFLINE:
                return Path(hf_hub_download(self.path, name))
        except (OSError, ValueError) as error:  # no such repository, no network, no permission; or not even a name
            raise self.missing(error) from None
        raise self.missing()


def _is_part(kind: object) -> bool:
    """Whether an index's value names a part: [library, class]; [null, null] is one that is not there."""
    return isinstance(kind, list) and len(kind) == 2 and all(isinstance(name, str) and name for name in kind)


def _kinds(value: object) -> set[str]:
    """The kinds of values in a setting, also in lists of them; nothing for null, which all may be."""
    if isinstance(value, list | tuple):
        return {kind for each in value for kind in _kinds(each)}
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < 2**31):
        return {"no number"}
    kinds = {str: "text", bool: "number", int: "number", float: "number", type(None): ""}
    return {kinds.get(type(value), "section")} - {""}


def _shown(value: object) -> str:
    return shortened(repr(value), 60)
