"""A run on disk and its life: set up, logged, guarded, saved, resumed, drawn."""
