"""Weights split over the processes: torch's FSDP2, where the launcher's accelerate config or `train.shard` asks for it.

We call `fully_shard` ourselves: accelerate's own way turns into DDP on a CPU without a word, casts timesteps to
bfloat16 with the other inputs, and leaves weights outside the blocks gathered after a rollout.
"""

import os
from functools import cache

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..config.schema import Config
from ..core.errors import InputError
from ..models.compile import outermost


@cache
def launcher_requests_fsdp() -> bool:
    """Whether the launch's accelerate config requests FSDP. Its flags are cleared: accelerate would shard too, in its
    own way, and transformers would leave text encoders and rewards empty on all ranks but the first.
    """
    asked = parse_flag_from_env("ACCELERATE_USE_FSDP")
    if asked and os.environ.get("FSDP_VERSION", "1") != "2":
        raise InputError(
            "fsdp_version", os.environ.get("FSDP_VERSION", "1"), "of the accelerate config is too old", "2"
        )
    if asked and parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
        raise InputError("fsdp_offload_params", "true", "weights on the host are not trained here", "false")
    os.environ["ACCELERATE_USE_FSDP"] = os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return asked


def sharding_mode(config: Config, accelerator: Accelerator) -> str:
    """As `train.shard` says; where that is auto, as the accelerate config does. A process by itself has nobody to split
    with.
    """
    if accelerator.num_processes == 1 and not torch.distributed.is_initialized():
        return "no"
    return {"auto": "full" if launcher_requests_fsdp() else "no"}.get(config.train.shard, config.train.shard)


def mesh_of(accelerator: Accelerator, how: str) -> DeviceMesh:
    """The processes that share one copy of the weights: all of them, or those of a machine."""
    kind, everyone = accelerator.device.type, accelerator.num_processes
    if how == "full":
        return init_device_mesh(kind, (everyone,))
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or everyone)
    if everyone % here:
        raise InputError("train.shard", "node", f"{everyone} processes are not {here} on every machine", "full")
    return init_device_mesh(kind, (everyone // here, here), mesh_dim_names=("copies", "parts"))


def shard(module: nn.Module, accelerator: Accelerator, how: str) -> None:
    """Split a module's weights in place, a block at a time: only the block at work is ever whole."""
    mesh = mesh_of(accelerator, how)
    half = accelerator.mixed_precision == "bf16"
    # Inputs are not cast: autocast does that where it is right, and a timestep in bfloat16 is another one.
    blocks = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None,
        reduce_dtype=torch.float32 if half else None,
        cast_forward_inputs=False,
    )
    for block in outermost(module):
        fully_shard(block, mesh=mesh, mp_policy=blocks, reshard_after_forward=True)
    # Split again after each forward, unlike by default: what a rollout left gathered would be stale after a step.
    whole_precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=whole_precision, reshard_after_forward=True)


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def replicas_and_shards(tensor: Tensor, processes: int) -> tuple[int, int]:
    """(copies of a tensor, parts of each copy); processes are numbered copy by copy."""
    parts = tensor.device_mesh.size(-1) if isinstance(tensor, DTensor) else 1
    return processes // parts, parts


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """A tensor in one piece; all processes must ask for it where it is split."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered_on_host(tensor: Tensor) -> Tensor:
    """The same on the host."""
    return gathered(tensor).detach().cpu().contiguous()


def to_sharding_of(tensor: Tensor, values: Tensor) -> Tensor:
    """`values`, which every process has, on `tensor`'s device and sharded like it."""
    if not isinstance(tensor, DTensor) or isinstance(values, DTensor):
        return values.to(tensor.device)
    values = values.to(tensor.device)
    return distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None)
