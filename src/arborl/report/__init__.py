"""One page that shows a run."""
