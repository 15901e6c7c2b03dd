"""A model as the engine uses it: wrapped, split, compiled, called in certain sizes; and the policies beside it."""

import copy
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..config.schema import Config
from ..core.errors import InputError
from ..core.losses import EdgeLoss, Loss, Who
from ..core.schedule import Schedule
from ..core.tensors import to_device
from ..data.prompts import Prompts
from ..distributed.accelerator import Accelerator, no_sync
from ..distributed.fsdp import local, shard
from ..models import Cond, Model, lora
from ..models.activation_checkpointing import checkpoint_activations
from ..models.base import parts_of
from ..models.compile import compile_blocks
from .batches import BATCH_SIZE_SETTINGS, BatchSizes
from .state import Shadow, copies_of, copy_into


class Policy:
    """The policy that is trained, and those that its loss asks besides: `old`, which follows it, and `reference`, the
    untrained one. With LoRA these are adapters that are exchanged or switched off; else each is a copy of the module.
    """

    def __init__(self, model: Model, config: Config, accelerator: Accelerator, loss: Loss | None = None) -> None:
        self.model, self.config, self.accelerator = model, config, accelerator
        self.sampler: Who = loss.sampler if loss else "policy"
        self.compares_densities = loss is not None and loss.needs_densities and self.sampler == "policy"
        """Whether the update takes the rollout's density to be the policy's own, so that both must round alike."""
        self.keeps_answers = isinstance(loss, EdgeLoss) and loss.needs_old_answers
        """Whether the rollout keeps what the policy answered at trained parents, for the update."""
        self.compiled = self.split = False
        self.bitwise_batch_sizes: tuple[int, ...] = ()
        """Sizes of calls that the update's code rounds alike, in order (see `find_bitwise_batch_sizes`)."""
        self.old: Shadow | None = None
        self.asks = loss.asks if loss else ()
        beside: list[Who] = [who for who in ("old", "reference") if who in (*self.asks, self.sampler)]
        self.adapted = lora.is_injected(model.module)
        self.copies: dict[Who, nn.Module] = {}
        """The modules of policies that are no adapters."""
        if not self.adapted:
            for who in beside:
                self.copies[who] = copy.deepcopy(model.module).requires_grad_(False)
        self.has_old = "old" in beside
        self._sizes: BatchSizes | None = None

    # What a model can do, as it stands.

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @property
    def parts(self) -> dict[str, nn.Module]:
        """What is wrapped, split and compiled by itself, by name: of one module alone the name is empty."""
        return parts_of(self.module)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.model.latent_shape

    def encode(self, prompts: Prompts | Sequence[str]) -> Cond:
        cond = self.model.encode_prompts(prompts if isinstance(prompts, Prompts) else Prompts(list(prompts), {}))
        if self.split and not cond.is_alike:
            problem = "prompts with pictures of several sizes are calls of their own, and processes would make others"
            raise InputError(
                "train.shard", self.config.train.shard, problem, cure="pictures of one size, or no sharding"
            )
        return cond

    def decode(
        self, latents: Float[Tensor, "n *latent"], prompts: Prompts | None = None
    ) -> Float[Tensor, "n *picture"]:
        return self.model.decode_for(latents, prompts)

    def call_groups(self, t: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        return self.model.call_groups(t)

    def schedule(self) -> Schedule:
        """The denoising steps of training."""
        return self.model.schedule(self.config.sample.num_steps)

    # Whose answers.

    def predict(
        self, x: Float[Tensor, "n *latent"], t: Float[Tensor, " n"], cond: Cond, who: Who = "policy"
    ) -> Float[Tensor, "n *latent"]:
        """What a policy answers; another than the trained one without gradients."""
        t = t.cpu() if self.model.timesteps_on_host else to_device(t, x.device)
        if who == "policy":
            return self.model.predict(x, t, cond)
        with torch.no_grad(), self.acting(who):
            return self.model.predict(x, t, cond)

    @contextmanager
    def acting(self, who: Who) -> Generator[None]:
        """Inside, the model is that policy."""
        if who in self.copies:
            trained, self.model.module = self.model.module, self.copies[who]
            try:
                yield
            finally:
                self.model.module = trained
        elif who == "reference":
            with lora.disabled(self.module):
                yield
        elif who == "old":
            if self.old is None:
                raise RuntimeError("no loss has asked for an old policy")
            with self.old.applied():
                yield
        elif who == "policy":
            yield
        else:
            raise ValueError(f"there is no policy called {who!r}")

    def keep_beside(self, parameters: dict[str, nn.Parameter]) -> Shadow | None:
        """Begin the further policies as the one that is trained, once its weights are where they stay and the same on
        all processes; returns the old one's weights, where somebody asks for it.
        """
        held = {who: trained_of(module, parameters) for who, module in self.copies.items()}
        for weights in held.values():
            copy_into(weights, parameters)
        if self.has_old:
            self.old = Shadow(parameters, held.get("old") or copies_of(parameters))
        return self.old

    def bytes_beside(self) -> dict[Who, int]:
        """What the weights of further policies take on this process, where they take anything."""
        held: dict[Who, int] = {who: _bytes(module.parameters()) for who, module in self.copies.items()}
        return {"old": _bytes(self.old.weights.values()), **held} if self.old else held

    # How it is held.

    def compile(self) -> list[str]:
        """Run `predict` as compiled code from now on, and `decode` where a family says how; returns messages for the
        user.
        """
        for module in (self.module, *self.copies.values()):
            for part in parts_of(module).values():
                compile_blocks(part)
        for part in self.parts.values():
            checkpoint_activations(part, self.config.train.gradient_checkpointing, compiled=True)
        self.compiled = True
        return self.model.compile_decoder()

    def shard(self, how: str) -> None:
        """Split the weights over the processes."""
        for module in (self.module, *self.copies.values()):
            for part in parts_of(module).values():
                shard(part, self.accelerator, how)

    def prepare(self, split: bool = False) -> None:
        """Wrap for the processes that there are, in the precision of the run."""
        # Without training in mind: what is split needs no wrapper, and a copy none either. All need the precision.
        self.split = split
        self.model.module = self._prepared(self.module, split, evaluation=split)
        for who, module in self.copies.items():
            self.copies[who] = self._prepared(module, split, evaluation=True)

    def _prepared(self, module: nn.Module, split: bool, evaluation: bool) -> nn.Module:
        def prepared(part: nn.Module) -> nn.Module:
            prepare: Callable[..., nn.Module] = self.accelerator.prepare_model
            return prepare(part, device_placement=not split, evaluation_mode=evaluation)

        if not isinstance(module, nn.ModuleDict):
            return prepared(module)
        module.update({name: prepared(part) for name, part in parts_of(module).items()})
        return module

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Inside, gradients stay a process's own."""
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(no_sync(part, self.accelerator))
            yield

    # In which sizes, and by which code.

    @property
    def batch_sizes(self) -> BatchSizes:
        if self._sizes is None:
            found = (self.config.sample.batch_size, self.config.sample.decode_batch_size, self.config.train.batch_size)
            for key, size in zip(BATCH_SIZE_SETTINGS, found, strict=True):
                if not isinstance(size, int):
                    raise RuntimeError(f"{key} is still {size!r}; find_batch_sizes() finds one")
            self._sizes = BatchSizes(*map(int, found))
        return self._sizes

    @batch_sizes.setter
    def batch_sizes(self, sizes: BatchSizes) -> None:
        self._sizes = sizes

    @property
    def min_batch_size(self) -> int:
        """The smallest batch of a call, unless micro-batches are of one row: compiled code would need another
        graph for a single row, which rounds differently and takes as long to compile.
        """
        return 2 if self.compiled else 1

    @property
    def update_batch_sizes(self) -> tuple[int, ...]:
        """Sizes that calls of trained nodes are padded to, so that rollout and update round alike."""
        return self.bitwise_batch_sizes or (self.min_batch_size,)

    @contextmanager
    def update_numerics(self) -> Generator[None]:
        """Inside, `predict` runs the code that the update runs. Compiled, that is other code than without gradients,
        and it rounds differently.
        """
        with torch.set_grad_enabled(self.compiled), ExitStack() as alone:
            for part in self.parts.values():
                if isinstance(part, DistributedDataParallel):
                    alone.enter_context(part.no_sync())  # no backward pass follows: no rank is to wait for one
            yield

    @contextmanager
    def fast_sampling(self) -> Generator[None]:
        """Inside, `predict` is the policy as fast as it can be, to the rounding of its weights, and without gradients.

        Compiled, adapters are merged into the weights for that: beside them they cost an eighth of a forward.
        """
        split = any(isinstance(p, DTensor) for p in self.module.parameters())
        merges = self.compiled and lora.is_injected(self.module) and not split
        with torch.no_grad(), lora.merged(self.module) if merges else nullcontext():
            yield


def trained_of(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The weights of a copy of the module, by the names of those that are trained."""
    return {name: p.detach() for name, p in module.named_parameters() if name in parameters}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)
