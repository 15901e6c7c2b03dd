"""The scenes as a model: an SD3 pipeline like any other, that happens to lie in the package."""

from ...models.sd3 import SD3Model
from . import FOLDER
from .grammar import split


class ScenesModel(SD3Model):
    default_path = str(FOLDER)
    default_prompts, heldout_prompts = split()
