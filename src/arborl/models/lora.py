"""LoRA (arXiv 2106.09685, eq. 3) on any module, by peft: injected, switched off, merged, read out."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..core.errors import InputError


def inject(module: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Adapt every linear layer whose name ends in one of `targets`, in float32, starting as a no-op."""
    from peft import LoraConfig, inject_adapter_in_model

    check_targets(module, targets)
    # By whole names: another kind of module may end in the same word (FLUX.2's attn.to_out is a layer, and a list).
    adapted = [name for name in linear_layers(module) if any(_ends_in(name, target) for target in targets)]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=adapted, init_lora_weights="gaussian")  # pyright: ignore[reportArgumentType]
    inject_adapter_in_model(config, module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def linear_layers(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def attention_layers(module: nn.Module) -> list[str]:
    """The linear layers of a transformer's attention, by the ends of their names: what is adapted most often."""
    matches = (re.search(r"(?:^|\.)((?:\w*att?n\w*|\w*attention\w*)\.[\w.]+)$", name) for name in linear_layers(module))
    found = {match[1] for match in matches if match and "norm" not in match[1]}
    return sorted(found)


def check_targets(module: nn.Module, targets: Sequence[str]) -> None:
    """Every name must end that of a linear layer."""
    linear = linear_layers(module)
    unmatched = [target for target in targets if not any(_ends_in(name, target) for name in linear)]
    if not targets:
        raise InputError("model.lora.targets", [], "this model names no layers to adapt", "names of its linear layers")
    if unmatched:
        # The end of a name that says something: to_q, to_out.0, ff.net.2.
        ends = {re.search(r"[^.]+(\.net)?(\.\d+)?(\.proj)?$", name)[0] for name in linear}  # pyright: ignore[reportOptionalSubscript]
        raise InputError(
            "model.lora.targets", unmatched, "no linear layer of the model has such a name", ", ".join(sorted(ends))
        )


def _layers(module: nn.Module) -> list[nn.Module]:
    if not is_injected(module):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


def is_injected(module: nn.Module) -> bool:
    return any(".lora_A." in name for name, _ in module.named_parameters())


def matrices(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Each adapted layer's two matrices on the host, the scale in the second: b·a is what is added to its weight."""
    from peft.tuners.lora import LoraLayer

    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            (adapter,) = layer.active_adapters
            a, b = (half[adapter].get_parameter("weight").detach().cpu() for half in (layer.lora_A, layer.lora_B))
            found[name] = a.contiguous(), (b * layer.scaling[adapter]).contiguous()
    return found


@contextmanager
def merged(module: nn.Module) -> Iterator[None]:
    """Inside, adapters are part of the weights they adapt: no products of their own, and the weights' own rounding.

    What is put back are the very tensors that were there, so nothing wears off.
    """
    from peft.tuners.lora import LoraLayer

    kept: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for layer in module.modules():
            if isinstance(layer, LoraLayer):
                weight, (adapter,) = layer.get_base_layer().get_parameter("weight"), layer.active_adapters
                change = layer.get_delta_weight(adapter).detach()  # pyright: ignore[reportCallIssue]
                sum_of_both = (weight.data.float() + change.float()).to(weight.dtype)
                kept.append((weight, weight.data))
                weight.data = sum_of_both
        with disabled(module):
            yield
    finally:
        for weight, before in kept:
            weight.data = before


@contextmanager
def perturbed(module: nn.Module) -> Iterator[None]:
    """Inside, every adapter does something, also a fresh one: nothing of use, but how it is rounded shows."""
    kept = [(p.data, p.detach().clone()) for name, p in module.named_parameters() if ".lora_B." in name]
    try:
        for values, _ in kept:  # in place, as optimizers do it, also where weights are split
            values.add_(0.01)
        yield
    finally:
        for values, before in kept:
            values.copy_(before)


@contextmanager
def disabled(module: nn.Module) -> Iterator[None]:
    """The base model, exactly."""
    layers = _layers(module)
    trained = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]  # which peft would forget
    try:
        for layer in layers:
            layer.enable_adapters(False)  # pyright: ignore[reportCallIssue]
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)  # pyright: ignore[reportCallIssue]
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
