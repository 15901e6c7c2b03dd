"""Activations that are computed again in the backward pass instead of kept: all of a block's, or the cheap ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..core.errors import InputError

SAVED_OPERATIONS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
"""Operations whose results `selective` keeps: products and attention take the time, the rest takes the memory."""
BUDGET = 0.5
"""In compiled code, which keeps no cheap activations anyway, the share of its activations that `selective` leaves."""


def checkpoint_activations(module: nn.Module, how: bool | str, compiled: bool = False) -> None:
    """Have a diffusers module do without some of its activations: `selective` ones, or (true) all inside its blocks."""
    if compiled:
        functorch.activation_memory_budget = BUDGET if how == "selective" else 1.0
    if not how:
        return
    if not hasattr(module, "enable_gradient_checkpointing"):
        key = "train.gradient_checkpointing"
        raise InputError(key, how, "this model cannot recompute its activations", "false")
    switch: Any = module
    if how is True:
        switch.enable_gradient_checkpointing()
    elif compiled:
        switch.disable_gradient_checkpointing()  # the compiler's own way, by the budget, takes its place
    else:
        switch.enable_gradient_checkpointing(_selective)


def _selective(block: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(block, *args, use_reentrant=False, context_fn=CONTEXTS)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = partial(create_selective_checkpoint_contexts, _policy)
