"""Small host tensors, and words, of all ranks."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor


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
