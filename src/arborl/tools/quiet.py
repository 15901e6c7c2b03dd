"""Quiet loading of pipelines, which print progress bars of tiny parts and hints about other packages."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, diffusers, transformers and the hub's client report errors only, and progress only to a terminal."""
    import transformers
    from huggingface_hub import logging as hub_logging

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    from diffusers.utils import logging as diffusers_logging

    before_diffusers = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    before_hub = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
        diffusers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        diffusers_logging.set_verbosity(before_diffusers)
        hub_logging.set_verbosity(before_hub)
