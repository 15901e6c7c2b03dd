"""Where the project keeps what is worth keeping between runs."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Where this package keeps what it can make again."""
    home = os.environ.get("ARBORL_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "arborl"
