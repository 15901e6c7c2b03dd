"""A run on disk and its life: set up, logged, guarded, evaluated, saved, resumed, drawn."""
