"""accelerate's `Accelerator`, whose package says nothing of its types, and its methods that the engine calls."""

from contextlib import AbstractContextManager

from accelerate import Accelerator as Accelerator
from torch import Tensor, nn


def backward(loss: Tensor, accelerator: Accelerator) -> None:
    accelerator.backward(loss)


def no_sync(module: nn.Module, accelerator: Accelerator) -> AbstractContextManager[None]:
    """Inside, gradients stay a process's own."""
    return accelerator.no_sync(module)
