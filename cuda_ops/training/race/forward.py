"""A forward pass in evaluation, as one CUDA graph."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor


class GraphedForward:
    """Calls a function under torch.inference_mode: the first time as it is, on a side stream, where libraries choose
    algorithms and allocate what they need once; the second time it is captured; from then on the graph is replayed,
    which reads the tensors of the second call where they lie. With `graph=False`, and on the CPU, every call is plain.

    Args:
        call: of the batch. Whatever it returns is written anew by the next call.
        device: of the batch.
        autocast: the dtype for torch.autocast around `call`, or None.
        graph: whether to capture.
        pool: of torch.cuda.graph_pool_handle(), for the graph's memory; default: its own.
    """

    def __init__(
        self,
        call: Callable,
        device: torch.device,
        autocast: torch.dtype | None = None,
        graph: bool = True,
        pool: tuple | None = None,
    ):
        self.call, self.pool = call, pool
        self.context = torch.autocast(device.type, autocast) if autocast else contextlib.nullcontext()
        self.graph = graph and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.graph else None
        self.captured: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self, *batch: Tensor):
        if not self.graph:
            return self._call(batch)
        self.calls += 1
        if self.calls == 1:
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):
                    output = self._call(batch)
            finally:
                current.wait_stream(self.stream)
            return output
        if self.captured is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                self.output = self._call(batch)
            self.captured, self.batch = graph, batch
        elif any(new is not old for new, old in zip(batch, self.batch, strict=True)):
            raise ValueError("GraphedForward: expected the tensors that were captured")
        self.captured.replay()
        return self.output

    def _call(self, batch):
        with torch.inference_mode(), self.context:
            return self.call(*batch)
