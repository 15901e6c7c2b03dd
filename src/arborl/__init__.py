"""ArboRL: reinforcement learning on denoising trees for diffusion and flow models.

What notebooks and scripts need is here by name (`from arborl import load_config, train`) and imported when it is asked
for, so that `import arborl`, and with it the command line, stays quick.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import load_config as load_config
    from .config import presets as presets
    from .config import with_settings as with_settings
    from .config.schema import Config as Config
    from .core.errors import InputError as InputError
    from .core.tree import Plan as Plan
    from .engine.method import plan_at as plan_at
    from .models import Model as Model
    from .report import write_report as write_report
    from .run.drawings import sketch as sketch
    from .run.folder import read_metrics as read_metrics
    from .run.trees import TreeFile as TreeFile
    from .trainer import train as train

__version__ = "0.1.0"

_HOMES = {
    "Config": ".config.schema",
    "InputError": ".core.errors",
    "Model": ".models",
    "Plan": ".core.tree",
    "TreeFile": ".run.trees",
    "load_config": ".config",
    "plan_at": ".engine.method",
    "presets": ".config",
    "read_metrics": ".run.folder",
    "sketch": ".run.drawings",
    "train": ".trainer",
    "with_settings": ".config",
    "write_report": ".report",
}
__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
