"""The processes that torchrun starts: which of them this one is, and what they exchange."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """The processes of a run, and which of them this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> "World":
        """As torchrun says in RANK, WORLD_SIZE and LOCAL_RANK; one process alone without it."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        return cls(*(int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    def join(self, device: torch.device):
        """Joins the process group: over NCCL on GPUs, over gloo on CPUs."""
        if self.size > 1:
            if device.type == "cuda":
                dist.init_process_group("nccl", device_id=device)
            else:
                dist.init_process_group("gloo")

    def leave(self):
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """The model in DistributedDataParallel if there are several processes."""
        if self.size == 1:
            return model
        device_ids = [device.index] if device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=device_ids)

    def share(self, batch: Tensor) -> Tensor:
        """This process's part of a batch of indices."""
        return batch[self.rank :: self.size]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes."""
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
