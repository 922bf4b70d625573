"""The processes that torchrun starts: which of them this one is, what they exchange, and how they share a model's
training.

Each takes its share of every batch, and gradients are means over all of them, so that what is trained is what one
process makes of the whole batch, up to the order of sums (and but for batch norms, which see a share alone). `ddp`
keeps the whole model in each process: DistributedDataParallel, or where a step is a CUDA graph GradientBuckets, which
tells why. `fsdp2` leaves each process a shard of every parameter: fully_shard.
"""

import gc
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import UserError

PARALLEL = ("ddp", "fsdp2")
DISAGREEMENT = "the processes have come to different weights: their gradients were not the same bit by bit"


@dataclass(frozen=True)
class World:
    """The processes of a run, which of them this is, and how they share the training."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Processes on this machine."""
    parallel: str = "ddp"
    """One of PARALLEL."""
    bf16_reduce: bool = False
    """Whether gradients are rounded to bfloat16 to be summed over processes: half the bytes."""

    @classmethod
    def from_environment(cls) -> "World":
        """As torchrun says in RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; one process alone without it."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        rank, size, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return cls(rank, size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", size)))

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether a process has shards of the parameters alone."""
        return self.size > 1 and self.parallel == "fsdp2"

    def facts(self) -> dict:
        """Of a report."""
        if self.size == 1:
            return {"processes": 1}
        return {"processes": self.size, "parallel": self.parallel, "bf16_reduce": self.bf16_reduce}

    def join(self, device: torch.device):
        """Joins the process group: over NCCL on GPUs, over gloo on CPUs."""
        if self.size == 1:
            return
        if device.type == "cuda":
            # Sums in the NVLink switch need multicast memory, which a machine may have without being able to use it:
            # containers and virtual machines without the fabric manager's rights fail in the first collective.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")

    def leave(self):
        """Leaves the process group. After an exception NCCL's is left as it is: its end would wait for the sums that
        the other processes wait in for this one, and nobody would be told of the exception. The process's own end
        aborts them, and torchrun ends the others."""
        if self.size > 1 and dist.is_initialized():
            # A CUDA graph that holds a collective holds the communicator, whose end would wait for it for ever; after
            # an exception the frames that it has left hold graphs.
            error = failure = sys.exc_info()[1]
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error = error.__cause__ or error.__context__
            gc.collect()
            if failure is None or dist.get_backend() != "nccl":
                dist.destroy_process_group()

    # A model.

    def shard(self, model: torch.nn.Module, device: torch.device):
        """With fsdp2, in place: parameters become shards, gathered for their module's forward and backward. Each member
        of a ModuleList, as a GPT's blocks are, is a unit, and so is what is left."""
        if not self.is_sharded:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (self.size,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if self.bf16_reduce else None)
        units = [unit for module in model.modules() if isinstance(module, torch.nn.ModuleList) for unit in module]
        for module in (*units, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """With ddp, the model in DistributedDataParallel if there are several processes; else the model."""
        if self.size == 1 or self.parallel != "ddp":
            return model
        device_ids = [device.index] if device.type == "cuda" else None
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=device_ids)
        if self.bf16_reduce:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    # What processes exchange. All of them have to ask.

    def share(self, batch: Tensor) -> Tensor:
        """This process's part of a batch of indices."""
        return batch[self.rank :: self.size]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes; `values` itself may be overwritten."""
        if self.size > 1:
            dist.all_reduce(values)
        return values / self.size

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        count = torch.tensor(int(flag), device=device)
        dist.all_reduce(count)
        return count.item() > 0

    def gather(self, value) -> list:
        """The value of each process, which pickle knows."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def alike(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the tensors of all processes are the same bit by bit. Of sharded ones there is nothing to compare:
        each shard is there once."""
        if self.size == 1 or self.is_sharded:
            return True
        return len(set(self.gather(digest(tensors)))) == 1

    def first_alone(self, function: Callable[[], object]):
        """What `function` returns in the first process, which alone calls it while the others wait: torchrun ends all
        as soon as one ends with an error. Where it fails, so do the others, by an exception that nobody prints."""
        if self.size == 1:
            return function()
        done, result = False, None
        try:
            if self.is_first:
                result = function()
            done = True
        finally:
            done, result = self.gather((done, result))[0]
        if not done:
            raise UserError("the first process has failed")
        return result


def digest(tensors: Iterable[Tensor]) -> str:
    """Of the bits of all of them, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def whole(tensor: Tensor) -> Tensor:
    """What fsdp2 has sharded as one process has it, for which all processes have to ask; other tensors as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a tensor that all processes have, as that of `like` if that is sharded: its inverse."""
    if not hasattr(like, "full_tensor") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
