"""A whole training step as one CUDA graph."""

import contextlib
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .._arguments import integer

TORCH = Path(torch.__file__).parent
_set_multithreading_enabled = torch._C._set_multithreading_enabled


@dataclass
class _Captured:
    """A graph, the tensors that it reads and those that it writes; they live as long as it does."""

    graph: torch.cuda.CUDAGraph
    buffers: tuple[Tensor, ...]
    lr: Tensor | None
    loss: Tensor


class GraphedStep:
    r"""The whole training step (batch, forward, loss, backward, update) as one CUDA graph.

    A small model's step is dozens of kernels of microseconds each, and launching them from Python takes longer than
    running them. A graph is launched once. Any model, loss and optimizer will do whose step does not wait for the
    device, ours or PyTorch's.

    Args:
        model: what is trained, for its device and its modes; it is called by `loss` alone.
        loss: a function of the batch that returns the loss as one number, such as `lambda images, labels:
            criterion(model(images), labels)`.
        optimizer: its learning rates become tensors on the device, so that the graph follows them; schedulers of
            torch.optim.lr_scheduler go on working. Of torch.optim's it has to be one made with `fused=True` or
            `capturable=True`; cuda_ops.optim.SGD is ready as it is.
        source: None where the batch is handed to each step; else a function that makes the batch of what is handed,
            inside the graph: `source(indices)` gathers from data on the device (`cuda_ops.data.Batches` does).
        autocast: the dtype for torch.autocast around `loss`, or None.
        steps_per_graph: how many steps one graph holds. With more than one, what is handed to a call has a further
            dimension in front, of as many batches or fewer, and one launch and one copy serve them all.
        graph: False for the same steps without a graph. On the CPU, which has none, it is False in any case.
        on_gradients: called between backward and the update, inside the graph: to clip gradients, say.
        pool: of torch.cuda.graph_pool_handle(), to have the graph's memory in common with other steps, of which no two
            run at the same time; default: its own.

    Calling it takes the step (or steps) and returns the loss, detached, on the device (with several steps per graph:
    the loss of each). It is written anew by the next call: `.clone()` it to keep it.

    What is handed to a call is copied into buffers of the graph's own, from wherever it lies; shapes and dtypes may
    change between calls. For every new one (and after a change of `model.train()` or `.eval()`, of `requires_grad`, of
    the optimizer's options other than the learning rate, or of the tensors that hold the parameters) the first call
    takes its step without a graph, on a side stream, where libraries choose algorithms and allocate what they need
    once; the second is captured. Every step counts, so that nothing has to be restored: from the first call on,
    parameters, running statistics and the optimizer's state are what as many plain steps make of them.

    Backward runs in the calling thread, with or without a graph: to wake PyTorch's thread of the device takes longer
    than a small model's backward pass.

    Gradients live in the graph's memory and are dropped after each step: `parameter.grad` is None after a call, and
    nothing is spent on zeroing them.

    Raises:
        ValueError: the optimizer would read its learning rate on the host, or has no parameter on the model's device.
        RuntimeError: on a call: the step waits for the device (`.item()`, `.cpu()`, a branch on a tensor's value); the
            message names the line.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = cuda_ops.optim.SGD(model.parameters(), lr=0.1)
        >>> step = GraphedStep(model, lambda x, y: (model(x) - y).square().mean(), optimizer)
        >>> x, y = torch.tensor([[1.0, 2.0], [3.0, 1.0]]), torch.tensor([[1.0], [0.0]])
        >>> losses = [step(x, y).item() for _ in range(20)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        source: Callable[..., tuple] | None = None,
        autocast: torch.dtype | None = None,
        steps_per_graph: int = 1,
        graph: bool = True,
        on_gradients: Callable[[], object] | None = None,
        pool: tuple | None = None,
    ):
        if integer("GraphedStep", "steps_per_graph", steps_per_graph) < 1:
            raise ValueError(f"GraphedStep: expected steps_per_graph to be at least 1, got {steps_per_graph}")
        if autocast is not None and not isinstance(autocast, torch.dtype):
            raise TypeError(f"GraphedStep: expected autocast to be a torch.dtype or None, got {autocast!r}")
        self.model, self.loss, self.optimizer, self.source = model, loss, optimizer, source
        self.steps_per_graph, self.on_gradients = steps_per_graph, on_gradients
        first = next(model.parameters(), None)
        if first is None:
            raise ValueError("GraphedStep: expected a model with parameters, got one without")
        if not any(p.device == first.device for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"GraphedStep: expected the optimizer to hold a parameter on the model's device, {first.device}, got "
                "none: make it after the model was moved"
            )
        self.device = first.device
        self.graph = graph and self.device.type == "cuda"
        # Made once: that it asks the driver what the device can do takes longer than a small op.
        self._autocast = torch.autocast(self.device.type, autocast) if autocast else contextlib.nullcontext()
        self._modules = list(model.modules())
        self._graphs: dict[tuple, _Captured | None] = {}
        self._ones: dict[tuple, Tensor] = {}
        if self.graph:
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
            self._lr_to_device()

    def __call__(self, *batch: Tensor, lr: float | Tensor | None = None) -> Tensor:
        """Takes the step.

        Args:
            batch: what `loss`, or `source`, is called with; with several steps per graph stacked along a new first
                dimension.
            lr: the learning rate of all parameter groups for this call, or a tensor of one for each group; with several
                steps per graph it may be a tensor of one for each step, or of [steps, groups]. None leaves the
                optimizer's.

        Returns:
            The loss, without dimensions, or with several steps per graph one for each.
        """
        if not all(isinstance(tensor, Tensor) for tensor in batch):
            kinds = ", ".join(type(tensor).__name__ for tensor in batch)
            raise TypeError(f"GraphedStep: expected a batch of Tensors, got {kinds}")
        if self.steps_per_graph > 1:
            self._check_stacked(batch)
        if isinstance(lr, Tensor) and lr.dim() > 0:
            self._check_rates(lr, batch)
        if not self.graph:
            return self._plain(batch, lr)
        table = self.steps_per_graph > 1 and isinstance(lr, Tensor) and lr.dim() > 0
        self._update_lr(None if table else lr)
        key = self._key(batch, table)
        captured = self._graphs.get(key)
        if captured is None:
            with torch.cuda.device(self.device):
                if key not in self._graphs:
                    loss = self._first(batch, lr if table else None)
                    # The step may have made the optimizer's state, on which the key depends.
                    self._graphs[self._key(batch, table)] = None
                    return loss
                captured = self._graphs[key] = self._capture(batch, lr if table else None)
        for buffer, tensor in zip(captured.buffers, batch, strict=True):
            if buffer is not tensor:
                buffer.copy_(tensor, non_blocking=True)
        if table:
            captured.lr.copy_(lr, non_blocking=True)
        captured.graph.replay()
        return captured.loss

    def run(self, *batches: Tensor, lr: Tensor | None = None) -> Tensor:
        """Takes a step for each of the `batches`, which are stacked along their first dimension, in as many graphs as
        it takes: an epoch, where they are the rows of a permutation on the device.

        Args:
            batches: as for a call, any number of steps.
            lr: [steps] or [steps, groups], or None.

        Returns:
            The loss of each step, on the device.
        """
        stacked = [*batches, *([] if lr is None else [lr])]
        if not all(isinstance(tensor, Tensor) for tensor in stacked):
            raise TypeError(f"GraphedStep.run: expected Tensors, got {', '.join(type(t).__name__ for t in stacked)}")
        steps = [len(tensor) if tensor.dim() else 0 for tensor in stacked]
        if not batches or min(steps) < 1 or len(set(steps)) > 1:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in stacked) or "none"
            what = "batches" if lr is None else "batches and learning rates"
            raise ValueError(
                f"GraphedStep.run: expected {what} for the same number of steps, at least 1, along the first "
                f"dimension, got shapes {shapes}"
            )
        losses = []
        for begin in range(0, len(batches[0]), self.steps_per_graph):
            part = slice(begin, begin + self.steps_per_graph)
            if self.steps_per_graph == 1:
                loss = self(*(b[begin] for b in batches), lr=None if lr is None else lr[begin])
            else:
                loss = self(*(b[part] for b in batches), lr=None if lr is None else lr[part])
            losses.append(loss.reshape(-1).clone())
        return torch.cat(losses)

    def __repr__(self) -> str:
        how = f"one CUDA graph for {self.steps_per_graph} step(s)" if self.graph else "plain steps, without a graph"
        names = f"{type(self.model).__name__}, {type(self.optimizer).__name__}"
        return f"{type(self).__name__}({names}, {self.device}: {how})"

    # One step, as it runs eagerly and as it is captured.

    def _step(self, batch) -> Tensor:
        batch = self.source(*batch) if self.source else batch
        with self._autocast:
            loss = self.loss(*batch)
        if loss.numel() != 1:
            raise ValueError(f"GraphedStep: expected the loss to be one number, got shape {list(loss.shape)}")
        # The gradient of the loss itself, kept, so that no kernel has to make it in every step.
        kind = loss.dtype, loss.shape
        if kind not in self._ones:
            self._ones[kind] = torch.ones_like(loss, requires_grad=False)
        # In this thread: waking PyTorch's thread of the device, and being woken by it, takes longer than a small
        # model's backward pass.
        before = torch._C._is_multithreading_enabled()
        try:  # and not `with`, which an interrupt can leave as it is (see _grad_mode.py)
            _set_multithreading_enabled(False)
            loss.backward(self._ones[kind])
        finally:
            _set_multithreading_enabled(before)
        if self.on_gradients is not None:
            self.on_gradients()
        self.optimizer.step()
        # None, not zero: backward then writes the next gradients instead of adding them to zeros.
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _each(self, lr):
        """One learning rate for each parameter group."""
        several = isinstance(lr, list) or (isinstance(lr, Tensor) and lr.dim() > 0)
        return lr if several else [lr] * len(self.optimizer.param_groups)

    def _steps(self, batch, table) -> Tensor:
        """As many steps as `batch` holds, with the learning rates of `table`, if there is one."""
        if self.steps_per_graph == 1:
            return self._step(batch)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        losses = []
        try:
            for i in range(len(batch[0])):
                if table is not None:
                    for group, rate in zip(self.optimizer.param_groups, self._each(table[i]), strict=True):
                        group["lr"] = rate
                losses.append(self._step([tensor[i] for tensor in batch]))
        finally:  # a step that fails leaves no rate of the table behind
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        return torch.stack(losses)

    def _plain(self, batch, lr) -> Tensor:
        """Without a graph. The learning rate stays the number that the optimizer was made with."""
        batch = [tensor.to(self.device, non_blocking=True) for tensor in batch]
        if lr is None:
            return self._steps(batch, None)
        lr = lr.tolist() if isinstance(lr, Tensor) else lr
        if isinstance(lr, list) and self.steps_per_graph > 1:
            return self._steps(batch, lr)
        for group, rate in zip(self.optimizer.param_groups, self._each(lr), strict=True):
            group["lr"] = rate
        return self._steps(batch, None)

    def _first(self, batch, table) -> Tensor:
        """The step that is taken before one like it is captured."""
        self.optimizer.zero_grad(set_to_none=True)
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), warnings.catch_warnings():
                # torch.optim warns of the one step before the capture.
                warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
                batch = [tensor.to(self.device, non_blocking=True) for tensor in batch]
                loss = self._steps(batch, None if table is None else table.to(self.device))
        finally:  # also for what a step that fails has begun
            current.wait_stream(self._stream)
        loss.record_stream(current)
        return loss

    def _capture(self, batch, table) -> _Captured:
        buffers = tuple(torch.empty_like(tensor, device=self.device) for tensor in batch)
        for buffer, tensor in zip(buffers, batch, strict=True):
            buffer.copy_(tensor)  # a capture runs nothing, but may look at addresses and strides alone
        lr = None if table is None else table.to(self.device, copy=True)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: what other threads do meanwhile (a DataLoader's pins memory) is no part of the step.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                loss = self._steps(buffers, lr)
        except RuntimeError as error:
            raise self._explained(error) from error
        return _Captured(graph, buffers, lr, loss)

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """What went wrong in a capture. The first error is the cause; the end of the capture adds others."""
        self.optimizer.zero_grad(set_to_none=True)
        cause = error
        while cause.__context__ is not None:
            cause = cause.__context__
        text = str(cause).splitlines()[0]
        if "captur" not in str(cause):
            return RuntimeError(f"GraphedStep: the step failed while it was captured: {text}")
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if not Path(f.filename).is_relative_to(TORCH)]
        where = f"{frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else "backward"
        return RuntimeError(
            f"GraphedStep: the step does what a CUDA graph cannot hold, most likely it waits for the device (.item(), "
            f".cpu(), a branch on a tensor's value), in {where}: {text}. Take that out of the step, or graph=False"
        )

    # What a graph depends on, beside the values in its buffers.

    def _key(self, batch, table: bool) -> tuple:
        modules = self._modules
        return (
            table,
            tuple([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in batch]),
            tuple([module.training for module in modules]),
            # Addresses: a graph must not write to what has been freed.
            tuple([(p.data_ptr(), p.requires_grad) for m in modules for p in m._parameters.values() if p is not None]),
            tuple([b.data_ptr() for m in modules for b in m._buffers.values() if b is not None]),
            tuple([v.data_ptr() for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]),
            tuple([group[name] for group in self.optimizer.param_groups for name in self._options]),
        )

    def _check_stacked(self, batch):
        counts = [len(tensor) if tensor.dim() else 0 for tensor in batch]
        if not counts or not 1 <= counts[0] <= self.steps_per_graph or len(set(counts)) > 1:
            raise ValueError(
                f"GraphedStep: expected 1 to {self.steps_per_graph} batches stacked along the first dimension, "
                f"got {', '.join(map(str, counts)) or 'none'}"
            )

    def _check_rates(self, lr, batch):
        """Checks a tensor of learning rates before any of them is used."""
        groups = len(self.optimizer.param_groups)
        fits, wanted = tuple(lr.shape) == (groups,), "[groups] with one step"
        if self.steps_per_graph > 1:
            steps = len(batch[0])
            fits = tuple(lr.shape) in ((steps,), (steps, groups))
            wanted = f"[steps] or [steps, groups] with {steps} steps"
        if not fits:
            raise ValueError(
                f"GraphedStep: expected learning rates of {wanted} and {groups} groups, got shape {list(lr.shape)}"
            )

    # The learning rates: one tensor for each parameter group, which every graph reads.

    def _lr_to_device(self):
        for group in self.optimizer.param_groups:
            if type(self.optimizer).__module__.startswith("torch.optim") and not (
                group.get("fused") or group.get("capturable")
            ):
                cure = "capturable=True" if "capturable" in group else "fused=True"
                raise ValueError(
                    f"GraphedStep: torch.optim.{type(self.optimizer).__name__} reads its learning rate on the host, so "
                    f"that a graph would not follow it: make it with {cure}"
                )
        groups = self.optimizer.param_groups
        self._lrs = [torch.zeros((), dtype=torch.float32, device=self.device) for _ in groups]
        self._lr_set = None
        self._options = [
            name for name, value in groups[0].items() if isinstance(value, (int, float, type(None))) and name != "lr"
        ]
        self._options = [name for name in self._options if all(name in group for group in groups)]

    def _update_lr(self, lr):
        """Takes over rates that a user or load_state_dict has put into the groups instead of our tensors, then `lr`."""
        for group, mine in zip(self.optimizer.param_groups, self._lrs, strict=True):
            if group["lr"] is not mine:
                mine.copy_(group["lr"]) if isinstance(group["lr"], Tensor) else mine.fill_(group["lr"])
                group["lr"] = mine
        if lr is None or (not isinstance(lr, Tensor) and (lr, self._lr_versions()) == self._lr_set):
            return
        for mine, rate in zip(self._lrs, self._each(lr), strict=True):
            mine.copy_(rate, non_blocking=True) if isinstance(rate, Tensor) else mine.fill_(rate)
        self._lr_set = None if isinstance(lr, Tensor) else (lr, self._lr_versions())

    def _lr_versions(self):
        return [mine._version for mine in self._lrs]
