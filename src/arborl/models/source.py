"""Where a diffusers pipeline lies, in a folder or on the hub: found, looked into, and loaded in parts."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..core.errors import InputError
from .quiet import quiet_libraries


class Source:
    """A pipeline by its `model.path`. Single files of one on the hub are fetched alone; `folder` fetches all of it."""

    def __init__(self, path: str, may_fetch: bool = True) -> None:
        if not path:
            raise InputError("model.path", None, "is not set", "a folder with a diffusers pipeline, or a hub id")
        self.path, self.may_fetch, self.local = path, may_fetch, Path(path).is_dir()
        if not self.local and (Path(path).is_absolute() or path.startswith(".") or path.count("/") != 1):
            raise InputError("model.path", path, "there is no such folder")

    @cached_property
    def index(self) -> dict[str, Any]:
        """The pipeline's model_index.json."""
        if self.local and not (Path(self.path) / "model_index.json").is_file():
            raise InputError("model.path", self.path, "the folder holds no diffusers pipeline (no model_index.json)")
        return self.read("model_index.json")

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

    def config(self, part: str) -> dict[str, Any]:
        """The configuration of one of its parts."""
        return self.read(f"{part}/{'scheduler_config' if part == 'scheduler' else 'config'}.json")

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
            except (OSError, ValueError):
                raise self.missing() from None

    def load(self, dtypes: Mapping[str, torch.dtype], wanted: Callable[[str], bool], **given: Any) -> Any:
        """Its diffusers pipeline, with the parts that are wanted; others are None, or what is `given` for them."""
        absent = {name: None for name, kind in self.index.items() if isinstance(kind, list) and not wanted(name)}
        absent |= {name: None for name, kind in self.index.items() if isinstance(kind, list) and kind[0] is None}
        with quiet_libraries():
            import diffusers

            try:
                family = getattr(diffusers, self.index["_class_name"])
                pipe = family.from_pretrained(self.folder, dtype=dict(dtypes), **(absent | given))
            except OSError as error:
                if not self.local:
                    raise self.missing() from None
                raise InputError("model.path", self.path, f"is incomplete ({str(error).splitlines()[0]})") from None
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def missing(self) -> InputError:
        problem = "these weights are not here (no such folder, not in the hub's cache) and were not fetched"
        fix = f"a folder made with `hf download {self.path} --local-dir FOLDER` (gated models: `hf auth login` first)"
        return InputError("model.path", self.path, problem, fix)

    def _file(self, name: str) -> Path:
        if self.local:
            return Path(self.path) / name
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(self.path, name)
            if not isinstance(cached, str) and self.may_fetch and not constants.HF_HUB_OFFLINE:
                cached = hf_hub_download(self.path, name)
        except (OSError, ValueError):  # no such repository, no network, no permission; or not even a name
            cached = None
        if not isinstance(cached, str):
            raise self.missing()
        return Path(cached)
