"""torch.compile, a block at a time: blocks of one kind share their code, so compiling takes a minute and not ten.

The first axis of what a block is given, the batch, is left open: one graph serves calls of every size but 1.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import InputError
from ..tools.cache import cache_home

BACKEND = "inductor"
"""torch.compile's backend."""
CACHE_DIR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MAX_GRAPHS = 64
"""Graphs that one piece of code may be compiled to: kinds of blocks, with and without gradients and adapters."""


def compile_blocks(module: nn.Module) -> None:
    """Compile a module's repeated blocks in place; one that has none, as a whole."""
    for block in [*blocks(module)] or [module]:
        compile_forward(block)


def compile_forward(module: nn.Module) -> None:
    """Have a module called as compiled code. Names of weights stay, and hooks around the call are outside of it."""
    configure_compiler()
    plain = module.forward
    run = torch.compile(plain, backend=BACKEND)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if _OFF:
            return plain(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim:
                torch._dynamo.maybe_mark_dynamic(value, 0)
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
                raise
            why = next(iter(str(error).split("\n")), "")
            raise InputError("compile", "on", f"the model cannot be compiled ({why})", "off") from error

    module.forward = forward


_OFF: list[bool] = []  # one for each `uncompiled` that is open


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, nothing runs as compiled code: hooks inside modules are called, and single rows cost no compiling."""
    _OFF.append(True)
    try:
        yield
    finally:
        _OFF.pop()


def configure_compiler() -> None:
    """Room for every graph a run needs; and a place for them that outlives the run, unless the user has one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # a second of imports

    torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    # It would cut blocks at DDP's buckets, to send gradients while others are computed; blocks are apart anyway.
    torch._dynamo.config.optimize_ddp = False
    if os.environ.get(CACHE_DIR_VARIABLE, default_cache_dir()) == default_cache_dir():
        os.environ[CACHE_DIR_VARIABLE] = str(cache_home() / "compiled")


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that a module repeats: those that its class names, as diffusers' may; else the outermost lists."""
    named = set(getattr(module, "_repeated_blocks", None) or [])
    if named:
        yield from (layer for layer in module.modules() if type(layer).__name__ in named)
    else:
        yield from outermost(module)


def outermost(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated layers, such as a transformer's blocks."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from outermost(child)
