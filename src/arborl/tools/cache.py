"""The user's cache folder."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Folder of this package in the user's cache."""
    home = os.environ.get("ARBORL_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "arborl"
