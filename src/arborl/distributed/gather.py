"""Small host tensors, and words, of all ranks."""

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.utils import get_total_norm

from .fsdp import local, replicas_and_shards


def gather(values: Tensor, accelerator: Accelerator | None) -> Tensor:
    """A host tensor of every rank, one after the other, on every rank. Shapes and dtypes must be equal."""
    if accelerator is None or accelerator.num_processes == 1:
        return values
    gathered = accelerator.gather(values.to(accelerator.device))
    assert isinstance(gathered, torch.Tensor)
    return gathered.cpu()


def any_rank(fact: bool, accelerator: Accelerator | None) -> bool:
    """Whether something holds on any rank: the same answer on all of them."""
    return bool(gather(torch.tensor([float(fact)]), accelerator).any())


def max_rank(value: float, accelerator: Accelerator | None) -> float:
    """The largest of all ranks' values: the same on all of them."""
    return float(gather(torch.tensor([value], dtype=torch.float64), accelerator).max())


def sum_ranks(value: float, accelerator: Accelerator | None) -> float:
    """The sum of all ranks' values: the same on all of them."""
    return float(gather(torch.tensor([value], dtype=torch.float64), accelerator).sum())


def gather_strings(words: Sequence[str], accelerator: Accelerator | None) -> list[str]:
    """The words that any rank has, each once, sorted: the same list on every rank."""
    if accelerator is None or accelerator.num_processes == 1:
        return sorted(set(words))
    return sorted(set(gather_object(list(words))))


def by_replica(everyone: Shaped[Tensor, "ranks n"], tensors: Sequence[Tensor]) -> list[Shaped[Tensor, "copies parts"]]:
    """Every rank's value for each tensor, arranged so that values that must be equal stand in a column."""
    shapes = [replicas_and_shards(tensor, len(everyone)) for tensor in tensors]
    return [column.view(shape) for column, shape in zip(everyone.T, shapes, strict=True)]


def nonfinite_weights(weights: Mapping[str, Tensor], accelerator: Accelerator) -> list[str]:
    """Names of weights that are not finite on any rank."""
    held = {name: local(values.detach()) for name, values in weights.items()}
    # The largest of them all in few kernels; which of them it is only matters where it is none.
    largest = get_total_norm([part for part in held.values() if part.numel()], torch.inf)
    if not any_rank(not bool(largest.isfinite()), accelerator):
        return []
    return gather_strings([name for name, part in held.items() if not bool(part.isfinite().all())], accelerator)


def unequal_weights(weights: Mapping[str, Tensor], accelerator: Accelerator) -> list[str]:
    """Names of float32 weights whose bits are not the same on all ranks that have a copy."""
    if accelerator.num_processes == 1:
        return []
    held = [local(values.detach()).view(torch.int32).sum(dtype=torch.int64) for values in weights.values()]
    found = by_replica(gather(torch.stack(held).cpu()[None], accelerator), list(weights.values()))
    return [name for name, sums in zip(weights, found, strict=True) if bool((sums != sums[0]).any())]
