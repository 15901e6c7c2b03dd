"""A diffusers pipeline in a folder or on the hub: found, looked into, and loaded in parts."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..core.errors import InputError, first_line
from ..tools.quiet import quiet_libraries


class PartConfig(dict[str, Any]):
    """The index, or the configuration of a part. A missing value is an error that names it."""

    def __init__(self, path: str, part: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.path, self.part = path, part

    def __missing__(self, key: str) -> Any:
        raise InputError("model.path", self.path, f"is incomplete (its {self.part} names no {key})")


class Source:
    """A pipeline by its `model.path`. Single files of one on the hub are fetched alone; `folder` fetches all of it."""

    def __init__(self, path: str, may_fetch: bool = True) -> None:
        if not path:
            raise InputError("model.path", None, "is not set", "a folder with a diffusers pipeline, or a hub id")
        self.path, self.may_fetch, self.local = path, may_fetch, Path(path).is_dir()
        if not self.local and (Path(path).is_absolute() or path.startswith(".") or path.count("/") != 1):
            raise InputError("model.path", path, "there is no such folder")

    @cached_property
    def index(self) -> PartConfig:
        """The pipeline's model_index.json."""
        if self.local and not (Path(self.path) / "model_index.json").is_file():
            raise InputError("model.path", self.path, "the folder holds no diffusers pipeline (no model_index.json)")
        return PartConfig(self.path, "index", self.read("model_index.json"))

    def read(self, name: str) -> dict[str, Any]:
        """One of the pipeline's JSON files."""
        file = self._file(name)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError("model.path", self.path, f"is incomplete (it has no {name})") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError("model.path", self.path, f"its {name} cannot be read ({error})") from None
        return found if isinstance(found, dict) else {}

    def config(self, part: str) -> PartConfig:
        """The configuration of one of its parts."""
        name = f"{part}/{'scheduler_config' if part == 'scheduler' else 'config'}.json"
        return PartConfig(self.path, part, self.read(name))

    @property
    def parts(self) -> list[str]:
        """Names of the parts that the index says are there."""
        return [name for name, kind in self.index.items() if isinstance(kind, list) and kind[0] is not None]

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
        parts = [name for name, kind in self.index.items() if isinstance(kind, list)]
        used = [name for name in self.parts if wanted(name) and name not in given]
        if lacking := [name for name in used if not (self.folder / name).is_dir()]:
            raise InputError("model.path", self.path, f"is incomplete (it has no {lacking[0]}/)")
        absent = {name: None for name in parts if name not in used}
        with quiet_libraries():
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
        fix = f"a folder made with `hf download {self.path} --local-dir FOLDER` (gated models: `hf auth login` first)"
        return InputError("model.path", self.path, problem, fix)

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
