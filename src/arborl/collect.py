"""Small host tensors of all ranks."""

import torch
from accelerate import Accelerator
from torch import Tensor


def gather(values: Tensor, accelerator: Accelerator | None) -> Tensor:
    """A host tensor of every rank, one after the other, on every rank. Shapes and dtypes must be equal."""
    if accelerator is None or accelerator.num_processes == 1:
        return values
    gathered = accelerator.gather(values.to(accelerator.device))
    assert isinstance(gathered, torch.Tensor)
    return gathered.cpu()
