"""Configuration: Hydra's compose API over the dataclasses of `schema.py`, with one-line errors."""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ..core.errors import InputError, shortened
from .bounds import check_bounds, check_path, check_text, kind_of, nearest
from .interpolation import check_interpolations, literal, only_named_variables
from .schema import Config, RewardConfig

RENAMED = {
    "train.max_broken": "train.max_nonfinite_steps",
    "train.clip": "loss.clip",
    "train.kl": "loss.kl",
    "train.edge_weight": "loss.edge_weight",
    "train.adv_clip": "loss.adv_clip",
}
"""Settings that had another name. A run's own settings may have either; on the command line the old one is an error
that names the new.
"""
ADDED = {
    "eval.num_between": (0, None),
    "prompts.held_out": (0.0, "prompts.path"),
    "tree.siblings": ("independent", None),
}
"""Settings that are newer than some runs, with the values by which these ran, and what they say nothing without."""
FOLDER = Path(__file__).parent
DEFAULT = "tree_fast"
"""The preset of a command that names none."""
ConfigStore.instance().store(name="schema", node=Config)
MOST_BYTES, MOST_VALUES = 2**17, 10_000
"""Of a user's yaml file, its aliases written out; what is longer is no configuration, and could fill the memory."""


def presets() -> list[str]:
    """Names that `--config-name` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def options(group: str) -> list[str]:
    """Names that `group=…` takes."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def groups() -> list[str]:
    return sorted({path.parent.name for path in FOLDER.glob("*/*.yaml")})


def knobs(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every (dotted key, field) of the schema; those of a reward appear under `rewards.<name>`."""
    for item in dataclasses.fields(cls):
        if item.name == "rewards" and cls is Config:
            yield from knobs(RewardConfig, "rewards.<name>.")
        elif get_origin(item.type) is dict:
            yield f"{prefix}{item.name}.<name>", item
        elif dataclasses.is_dataclass(item.type):
            yield from knobs(cast(type, item.type), f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def load_config(name: str = DEFAULT, overrides: Sequence[str] = ()) -> Config:
    """Compose a preset (or a yaml file of the user's own) with overrides; an `InputError` says what does not fit."""
    overrides = [_bracketed(text) for text in overrides]
    keys = [_check_override(text).key_or_group for text in overrides]
    given = dict(zip(keys, overrides, strict=True))
    chosen = [text for key, text in zip(keys, overrides, strict=True) if key in groups()]
    with _one_line_errors("--config-name", name, overrides):
        composed = _compose(name, chosen)
        if "model.path" in given and "model" not in given:
            if "model.family" in given:
                family = str(_parse(given["model.family"]).value())
                family = family if family in options("model") else composed.model.family  # one of the user's own
            else:
                family = _family_at(_resolved(composed, "model.path", _parse(given["model.path"]).value()))
            if family != composed.model.family:  # another kind than the preset's: with settings of its own
                composed = _compose(name, [*chosen, f"model={family}"])
        composed = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), composed))
        # Single keys come last, on the whole schema: a reward's name is the user's own, a preset may lack parts.
        for text in overrides:
            if text not in chosen:
                _apply(composed, text)
        config = _as_object(composed)
    check_run_name(config.run_name)
    return config


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration a run was started with, from its folder, with overrides on top."""
    overrides = [_bracketed(text) for text in overrides]
    with _one_line_errors("config", path, overrides):
        _check_yaml("config", path)
        found = OmegaConf.load(path)
        check_interpolations("", OmegaConf.to_container(found, resolve=False))
        merged = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), _as_of_now(found)))
        for text in overrides:
            key = _check_override(text).key_or_group
            if key in groups():
                raise InputError(key, text.split("=", 1)[-1], "a run keeps its groups", cure="overrides of single keys")
            _apply(merged, text)
        return _as_object(merged)


def _as_of_now(settings: Any) -> Any:
    """The settings of a run, which may be older than some of them and than the names they have now; where both names
    are given, the new counts.
    """
    for old, new in RENAMED.items():
        section, name = old.rsplit(".", 1)
        found = OmegaConf.select(settings, section)
        if OmegaConf.is_dict(found) and name in found:
            value = found.pop(name)
            if OmegaConf.select(settings, new) is None:
                OmegaConf.update(settings, new, value)
    for key, (value, needed) in ADDED.items():
        if OmegaConf.select(settings, key) is None and (needed is None or OmegaConf.select(settings, needed)):
            OmegaConf.update(settings, key, value)
    return settings


def read_before(path: Path) -> list[str]:
    """The settings that a run's file lacks because it is older than they are."""
    found = OmegaConf.load(path)
    return [key for key in ADDED if OmegaConf.select(found, key) is None]


def save_config(config: Config, path: Path) -> None:
    OmegaConf.save(OmegaConf.create(literal(dataclasses.asdict(config))), path)


def _compose(name: str, groups: Sequence[str]) -> DictConfig:
    """A preset or a file with the groups chosen for it, before single keys."""
    folder, name, search = _locate(name)
    if folder == FOLDER:
        return _composed_once(name, tuple(groups))
    return _compose_in(folder, name, [*search, *groups])


@cache
def _composed_once(name: str, groups: tuple[str, ...]) -> DictConfig:
    """Of what is shipped, which stays as it is: a comparison asks for the same presets again and again."""
    return _compose_in(FOLDER, name, groups)


def _compose_in(folder: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    # Without `_self_` in its defaults list a file's own settings come last, which needs no warning.
    quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
    own = only_named_variables(f"{folder / name}.yaml")
    with quiet, own, initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return compose(config_name=name, overrides=list(overrides))


def _locate(name: str) -> tuple[Path, str, list[str]]:
    if name.endswith((".yaml", ".yml")) or (name not in presets() and Path(f"{name}.yaml").is_file()):
        path = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml").resolve()
        if not path.is_file():
            raise InputError("--config-name", name, "there is no such file")
        if path.suffix != ".yaml":
            raise InputError(
                "--config-name", name, "Hydra knows a file by its ending", cure=f"to rename it {path.stem}.yaml"
            )
        _check_yaml("--config-name", path)
        return path.parent, path.stem, [f"hydra.searchpath=['file://{FOLDER}']"]
    if name not in presets():
        raise InputError("--config-name", name, f"no such preset{nearest(name, presets())}", ", ".join(presets()))
    return FOLDER, name, []


def _check_yaml(key: str, path: Path) -> None:
    """A file of settings by name, of moderate size, before anything makes copies of what is in it."""
    if path.stat().st_size > MOST_BYTES:
        raise InputError(key, path, "is too long for a configuration", f"at most {MOST_BYTES} bytes")
    document = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    if not isinstance(document, yaml.MappingNode):
        raise InputError(key, path, "holds no settings", "yaml with a key and a value a line")
    if _values(document, {}) > MOST_VALUES:
        raise InputError(key, path, "its aliases make it too large", f"at most {MOST_VALUES} values")


def _values(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values in a document whose aliases are written out; infinite where one holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        known[id(node)] = 1 + sum(
            _values(each, known) for part in parts for each in (part if isinstance(part, tuple) else (part,))
        )
    return known[id(node)]


def _resolved(composed: DictConfig, key: str, value: Any) -> str:
    """What an override's value comes to, which may name another setting or a folder of the environment."""
    check_interpolations(key, value)
    check_interpolations("", OmegaConf.to_container(composed, resolve=False))  # which it may name
    changed = composed.copy()
    with open_dict(changed):
        OmegaConf.update(changed, key, value)
    return str(OmegaConf.select(changed, key))


def _family_at(path: str) -> str:
    """The family of the pipeline at a path; its settings are in the group `model` under that name."""
    from ..models import family_of

    check_text("model.path", path)
    check_path("model.path", path)
    return family_of(path)


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError):  # also lists in lists without end, numbers of 5000 digits
        raise InputError("override", text, "cannot be read", "key=value") from None


def _bracketed(text: str) -> str:
    """An override of a list with its brackets, a pattern to some shells: `a,b`, and `a` alone, are lists too."""
    if "=" not in text:
        return text
    override = _parse(text)
    given, value = text.split("=", 1)
    item, found = dict(knobs()).get(_generic(override.key_or_group)), override.value()
    is_list = item is not None and get_origin(item.type) is list
    if isinstance(found, ChoiceSweep) and found.simple_form and not found.shuffle:
        takes_several = given == "rewards" or is_list or (item is not None and item.type is Any)
        return f"{given}=[{value}]" if takes_several else text
    single = isinstance(found, str | int) and found != "" and "$" not in str(found)
    return f"{given}=[{value}]" if is_list and single else text


def _generic(key: str) -> str:
    """A key as `knobs` has it, whatever a reward or an option is called."""
    key = re.sub(r"^rewards\.[^.]+\.", "rewards.<name>.", key)
    return re.sub(r"^(loss\.options|model\.call)\.[^.]+$", r"\1.<name>", key)


def _apply(config: DictConfig, text: str) -> None:
    """One override of a single key, put into a composed configuration."""
    override = _parse(text)
    key, parts = override.key_or_group, override.key_or_group.split(".")
    with open_dict(config), _one_line_errors(key, text.split("=", 1)[-1], [text]):
        if override.is_delete():
            if parts[1] not in config.rewards:
                raise InputError(key, None, "there is no such reward", ", ".join(map(str, config.rewards)))
            del config.rewards[parts[1]]
            return
        if parts[0] == "rewards" and parts[1] not in config.rewards:
            config.rewards[parts[1]] = RewardConfig()
        OmegaConf.update(config, key, override.value())


def _check_override(text: str) -> Override:
    """The parsed override, or an error that names the nearest valid key."""
    if "=" not in text and not text.startswith("~"):
        raise InputError("argument", text, "is not an override", "key=value or group=option")
    override = _parse(text)
    key = override.key_or_group
    value = text.split("=", 1)[-1]
    if override.is_delete():
        if not re.fullmatch(r"rewards\.[^.]+", key):
            raise InputError(key, None, "cannot be deleted", "~rewards.<name>")
        return override
    if key in groups():
        names = value.removeprefix("[").removesuffix("]").split(",") if key == "rewards" else [value]
        for name in map(str.strip, names):
            if name not in options(key):
                raise InputError(key, value, f"no such option{nearest(name, options(key))}", ", ".join(options(key)))
        return override
    if override.is_sweep_override():
        raise InputError(key, value, "is more than one value", "a single one", cure="quotes around a text with commas")
    known = [name for name, _ in knobs()]
    generic = _generic(key)
    if key in RENAMED:
        raise InputError(key, value, f"is called {RENAMED[key]} now", cure=f"{RENAMED[key]}={value}")
    if generic not in known:
        inside = [name for name in known if name.startswith(key + ".")]
        if inside:
            raise InputError(key, value, "is a section, not a value", ", ".join(inside))
        raise InputError(key, value, f"unknown key{nearest(generic, [*known, *groups()])}")
    return override


@contextmanager
def _one_line_errors(key: str, name: object, overrides: Sequence[str]) -> Iterator[None]:
    """Inside, what Hydra, OmegaConf and yaml report of a user's settings becomes an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise _one_line(error, overrides) from None
    except yaml.YAMLError as error:
        raise InputError(key, name, f"is not yaml ({shortened(' '.join(str(error).split()))})") from None
    except RecursionError:
        raise InputError(key, name, "holds something that is nested too deeply, or that names itself") from None
    except (OSError, ValueError, OverflowError, AttributeError, AssertionError) as error:  # yaml's and Hydra's own
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(key, name, f"cannot be read ({shortened(reason)})") from None


def _one_line(error: Exception, overrides: Sequence[str]) -> InputError:
    """Hydra's and OmegaConf's reports run over several lines; keep the reason and the key."""
    cause: BaseException = error
    while isinstance(cause.__cause__, OmegaConfBaseException):
        cause = cause.__cause__
    if isinstance(error, MissingConfigException):
        return InputError("config", error.missing_cfg_file, "is named in the defaults list but does not exist")
    text = str(cause)
    key = getattr(cause, "full_key", None) or (re.search(r"full_key: (\S+)", text) or [None, ""])[1] or "config"
    key = re.sub(r"\[\d+\]$", "", str(key))  # of a list, not of its item
    if re.search(r"[Kk]ey '\w+' (is )?not in ", text):
        known = [*(name for name, _ in knobs()), *groups()]
        if key in RENAMED:
            return InputError(key, None, f"is called {RENAMED[key]} now", cure=RENAMED[key])
        return InputError(key, None, f"unknown key in a yaml file{nearest(key, known)}")
    reason = shortened(re.sub(r"^In .* composing config:\n", "", text).partition("\n")[0])
    value = next((o.split("=", 1)[1] for o in reversed(overrides) if o.lstrip("+").startswith(f"{key}=")), None)
    item = dict(knobs()).get(_generic(key))
    return InputError(key, value, reason[:1].lower() + reason[1:], kind_of(item) if item else None)


def _as_object(composed: DictConfig) -> Config:
    check_interpolations("", OmegaConf.to_container(composed, resolve=False))
    config = cast(Config, OmegaConf.to_object(composed))
    # What yaml takes on and off for.
    switches = {"True": "on", "False": "off"}
    modes = {"0": "off", "False": "off", "1": "best", "2": "best_and_worst"}  # yaml takes a bare off for False
    found = {"compile": switches.get(config.compile, config.compile)}
    found["prune.width_mode"] = modes.get(config.prune.width_mode, config.prune.width_mode)
    config = with_settings(config, found)
    check_bounds(config)
    return config


def with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """The same settings but for some, by their keys. They are taken as they are given."""
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(section, dict):
        return {**section, name: _with(section[name], rest, value) if rest else value}
    return dataclasses.replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})


def check_run_name(name: str) -> None:
    """The name of a new run becomes a folder: one plain component, so that it cannot leave the runs folder. The folder
    of a run that is there may be called anything: whoever renamed it knows why.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        allowed = "up to 100 letters, digits, '.', '_' and '-', not starting with '.' or '-'"
        raise InputError("run_name", name, "cannot be a folder's name", allowed)
