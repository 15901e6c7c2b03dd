"""Presets side by side: the same model, prompts and seeds, equal compute or equal seconds, one table."""

from .results import Comparison, read, write
from .runs import Cell, PlannedRun, Protocol, execute, plan_runs

__all__ = ["Cell", "Comparison", "PlannedRun", "Protocol", "execute", "plan_runs", "read", "write"]
