"""ArboRL: reinforcement learning on denoising trees for diffusion and flow models.

What notebooks and scripts need is here by name (`from arborl import load_config, train`) and imported when it is asked
for, so that `import arborl`, and with it the command line, stays quick.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import load_config as load_config
    from .config import presets as presets
    from .config.schema import Config as Config
    from .core.errors import InputError as InputError
    from .core.tree import Plan as Plan
    from .draw import sketch as sketch
    from .log import read_metrics as read_metrics
    from .models import Model as Model
    from .plan import plan_at as plan_at
    from .record import RecordedTree as RecordedTree
    from .report import write_report as write_report
    from .train import train as train

__version__ = "0.1.0"

_HOMES = {
    "Config": ".config.schema",
    "InputError": ".core.errors",
    "Model": ".models",
    "Plan": ".core.tree",
    "RecordedTree": ".record",
    "load_config": ".config",
    "plan_at": ".plan",
    "presets": ".config",
    "read_metrics": ".log",
    "sketch": ".draw",
    "train": ".train",
    "write_report": ".report",
}
__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class _Package(ModuleType):
    """This package. Importing its module `train` would put that in the function's place; so the place is taken."""

    train = property(lambda self: __getattr__("train"), lambda self, module: None)


sys.modules[__name__].__class__ = _Package
