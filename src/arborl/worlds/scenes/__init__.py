"""A small world that comes with the package: captions, pictures, a scorer, and a pipeline that draws half right."""

from pathlib import Path

FOLDER = Path(__file__).parent / "pipeline"
"""A `StableDiffusion3Pipeline`, saved with `save_pretrained` by `python -m arborl.worlds.scenes.pretrain`."""
