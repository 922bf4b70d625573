"""Gradients averaged over processes while backward is still going on, also inside a CUDA graph."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed import World

# As in DistributedDataParallel: large enough for the links' full speed, small enough that most of backward is left when
# the first one is sent.
BUCKET_BYTES = 25 << 20
# Where a gradient begins in a bucket: kernels read 16 bytes at a time from addresses that allow it.
ALIGNMENT = 16


@dataclass
class _Bucket:
    """Gradients that are sent together."""

    parameters: list[Tensor]
    offsets: list[int]
    """Of their gradients, in elements."""
    size: int
    """Elements, padding included."""
    missing: int = 0
    """Gradients that backward has still to make."""

    @property
    def is_padded(self) -> bool:
        return self.size > sum(p.numel() for p in self.parameters)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The part of each gradient, laid out as its parameter."""
        pairs = zip(self.parameters, self.offsets, strict=True)
        return [flat.as_strided(p.shape, strides(p), offset) for p, offset in pairs]


def strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's, if it is dense; else those of a contiguous tensor."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


class GradientBuckets:
    """Averages gradients over all processes, in buckets that are sent while backward goes on.

    DistributedDataParallel does the same, but holds on to the nodes that accumulate gradients. These belong to the
    stream that was current when they were made, so that a capture on another one is invalid unless DDP was made on that
    stream and has taken eleven steps there. Here each forward makes them anew, on its own stream: a step is captured
    after one like it, as it is without processes.

    Hooks of the parameters see each gradient when it is complete. A bucket whose gradients are all there is copied into
    one tensor and sent, over NCCL on a stream of its own; buckets go in their order, since all processes have to send
    the same ones. `finish` waits (on a GPU, its stream does) and puts the means where the gradients were.

    Args:
        parameters: of the model. Each that requires grad has to get a gradient in each backward.
        world: the processes, and whether gradients are rounded to bfloat16 on the way.
        bucket_bytes: a bucket is closed when it has so many.

    Example:
        >>> buckets = GradientBuckets(model.parameters(), world)
        >>> step = GraphedStep(model, model, optimizer, on_gradients=buckets.finish)
    """

    def __init__(self, parameters: Iterable[Tensor], world: World, bucket_bytes: int = BUCKET_BYTES):
        self.world = world
        self.buckets: list[_Bucket] = []
        # Backward reaches the last parameters first.
        for p in reversed([p for p in dict.fromkeys(parameters) if p.requires_grad]):
            last = self.buckets[-1] if self.buckets else None
            like = last.parameters[0] if last else None
            full = last is None or last.size * like.element_size() >= bucket_bytes
            if full or (like.dtype, like.device) != (p.dtype, p.device):
                last = _Bucket([], [], 0)
                self.buckets.append(last)
            step = ALIGNMENT // min(p.element_size(), ALIGNMENT)
            last.size = (last.size + step - 1) // step * step
            last.parameters.append(p)
            last.offsets.append(last.size)
            last.size += p.numel()
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._arrived)
        self._begin()

    def _begin(self):
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self._sent: list[tuple[_Bucket, Tensor, dist.Work]] = []

    def _arrived(self, p: Tensor):
        self._bucket_of[p].missing -= 1
        while len(self._sent) < len(self.buckets) and self.buckets[len(self._sent)].missing == 0:
            self._send(self.buckets[len(self._sent)])

    def _send(self, bucket: _Bucket):
        first = bucket.parameters[0]
        dtype = torch.bfloat16 if self.world.bf16_reduce else first.dtype
        make = torch.zeros if bucket.is_padded else torch.empty  # padding is summed as well
        flat = make(bucket.size, dtype=dtype, device=first.device)
        torch._foreach_copy_(bucket.views(flat), [p.grad for p in bucket.parameters])
        for p in bucket.parameters:
            p.grad = None
        if first.is_cuda:
            operation = dist.ReduceOp.AVG
        else:  # gloo has none
            operation = dist.ReduceOp.SUM
            flat.div_(self.world.size)
        self._sent.append((bucket, flat, dist.all_reduce(flat, operation, async_op=True)))

    def finish(self):
        """Call it between backward and what reads the gradients.

        Raises:
            RuntimeError: a parameter has got no gradient, which the other processes would wait for.
        """
        if len(self._sent) < len(self.buckets):
            late = self.buckets[len(self._sent)]
            without = [list(p.shape) for p in late.parameters if p.grad is None]
            self._begin()
            raise RuntimeError(
                "GradientBuckets: expected backward to reach every parameter that requires grad, got no gradient for "
                f"one of shape {without[0]}"
            )
        for bucket, flat, work in self._sent:
            work.wait()
            flat = flat.to(bucket.parameters[0].dtype)
            for p, gradient in zip(bucket.parameters, bucket.views(flat), strict=True):
                p.grad = gradient
        self._begin()
