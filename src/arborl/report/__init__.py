"""One page that shows a run, or a comparison: `report.html`, self-contained, or served while the run goes on."""

from .page import read, write_report

__all__ = ["read", "write_report"]
