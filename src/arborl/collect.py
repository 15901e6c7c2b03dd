"""Small host tensors, and words, of all ranks."""

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from .shard import is_sharded


def gather(values: Tensor, accelerator: Accelerator | None) -> Tensor:
    """A host tensor of every rank, one after the other, on every rank. Shapes and dtypes must be equal."""
    if accelerator is None or accelerator.num_processes == 1:
        return values
    gathered = accelerator.gather(values.to(accelerator.device))
    assert isinstance(gathered, torch.Tensor)
    return gathered.cpu()


def gather_words(words: Sequence[str], accelerator: Accelerator | None) -> list[str]:
    """The words that any rank has, each once, sorted: the same list on every rank."""
    if accelerator is None or accelerator.num_processes == 1:
        return sorted(set(words))
    return sorted(set(gather_object(list(words))))


def unequal_weights(weights: Mapping[str, Tensor], accelerator: Accelerator) -> list[str]:
    """Names of float32 weights whose bits are not the same on all ranks; those that are split have no copies."""
    held = {name: values.detach() for name, values in weights.items() if not is_sharded(values)}
    if accelerator.num_processes == 1 or not held:
        return []
    sums = torch.stack([values.view(torch.int32).sum(dtype=torch.int64) for values in held.values()]).cpu()
    everyone = gather(sums[None], accelerator)
    return [name for name, differs in zip(held, (everyone != everyone[0]).any(0).tolist(), strict=True) if differs]
