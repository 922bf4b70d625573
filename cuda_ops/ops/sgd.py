"""SGD: torch.optim.SGD with the step of a whole parameter list in one kernel."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._arguments import flag
from .._fakes import register_fake, require_ops
from .._library import ops
from .._optimizer import (
    NO_STATE,
    PLAIN,
    WithoutEntries,
    check_numbers,
    local,
    loss_of,
    number_or_tensor,
    refuse_differentiable,
    refuse_sparse,
)
from .._optimizer import option as option_of

require_ops("sgd_step_")


@register_fake("cuda_ops::sgd_")
def _(
    params,
    grads,
    momentum_buffers,
    first,
    device_lr,
    lr,
    momentum,
    dampening,
    weight_decay,
    nesterov,
    maximize,
):
    return None


class SGD(WithoutEntries, torch.optim.SGD):
    r"""Stochastic gradient descent, like :class:`torch.optim.SGD`: same arguments, same `state_dict`, which either
    loads from the other at any step.

    Args:
        params: parameters, or named parameters, or dicts of parameter groups, as for :class:`torch.optim.SGD`.
        lr: learning rate, a number or a tensor of one element. A float32 or float64 tensor on the parameters' CUDA
            device is read by the kernel, without a wait, so that a captured CUDA graph follows its value.
        momentum, dampening, weight_decay, nesterov, maximize: as for :class:`torch.optim.SGD`.
        foreach, fused: accepted for the sake of `state_dict`. PyTorch chooses its implementation by them; here every
            choice is the one implementation.
        differentiable: must be False.

    Raises:
        ValueError: a value that :class:`torch.optim.SGD` refuses as well.
        NotImplementedError: `differentiable=True`; on :meth:`step`, a sparse gradient or a float16 or bfloat16
            parameter on the CPU.

    On CUDA the step of a parameter group is one launch for each dtype and device, up to 96 parameters; more
    parameters take more launches. float16 and bfloat16 parameters are updated in float32 and rounded once, where
    PyTorch rounds after each operation. Of distributed parameters (FSDP2) each process updates its shard. A CUDA
    graph may capture :meth:`step` from the second step on; with momentum, the first one creates the buffers.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = cuda_ops.optim.SGD([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1.0, -2.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 3.0000])
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ):
        check_options(
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
            }
        )
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        # PyTorch's fused step unscales gradients itself; ours leaves it to GradScaler, as every other optimizer does.
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group):
        """Adds a parameter group with options of its own. See :meth:`torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):  # else PyTorch says so
            check_options(param_group)
            refuse_differentiable("SGD", {**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            refuse_differentiable("SGD", group)
        self._step_supports_amp_scaling = False

    def step(self, closure=None):
        """Updates the parameters that have a gradient.

        Args:
            closure: called first, with gradients enabled, if it is given; it computes the loss anew.

        Returns:
            What `closure` returned, or None.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            if not self._step_at_once(group):
                with torch.no_grad():
                    for params, grads in by_device_and_dtype(group["params"]):
                        self._step_alike(group, params, grads)
        return loss

    def _step_at_once(self, group) -> bool:
        """The step of a group by an op that looks for the gradients itself, since to Python each would be an object to
        make; or False where it is not for that op: with momentum not until every parameter has its buffer."""
        params = group["params"]
        if is_compiling() or not PLAIN.issuperset(map(type, params)):
            return False
        momentum, buffers = option(group, "momentum"), []
        if momentum != 0:
            state = self.state.get
            buffers = [state(p, NO_STATE).get("momentum_buffer") for p in params]
            if not PLAIN.issuperset(map(type, buffers)):
                return False
        lr = group["lr"]
        lr, device_lr = number_or_tensor(lr, lr.device) if isinstance(lr, Tensor) else (option(group, "lr"), None)
        return ops.sgd_step_(
            params,
            buffers,
            device_lr,
            lr,
            momentum,
            option(group, "dampening"),
            option(group, "weight_decay"),
            flag("SGD", "nesterov", group["nesterov"]),
            flag("SGD", "maximize", group["maximize"]),
        )

    def _step_alike(self, group, params, grads):
        """The step of parameters of one group that share device and dtype."""
        momentum = option(group, "momentum")
        buffers = [self.state.get(p, {}).get("momentum_buffer") for p in params] if momentum != 0 else []
        first = [buffer is None for buffer in buffers]
        buffers = [torch.empty_like(p) if b is None else b for p, b in zip(params, buffers, strict=False)]
        lr, device_lr = number_or_tensor(group["lr"], params[0].device)
        ops.sgd_(
            local("SGD", params, params),
            local("SGD", grads, params),
            local("SGD", buffers, params),
            first,
            device_lr,
            lr,
            momentum,
            option(group, "dampening"),
            option(group, "weight_decay"),
            flag("SGD", "nesterov", group["nesterov"]),
            flag("SGD", "maximize", group["maximize"]),
        )
        # Not before the step, so that a step that is refused leaves no buffer without a value.
        for p, buffer, is_first in zip(params, buffers, first, strict=False):
            if is_first:
                self.state[p]["momentum_buffer"] = buffer


def option(group, name) -> float:
    return option_of("SGD", group, name)


def check_options(group):
    """Types, of those options that are there: a text would be taken for a number, or for True."""
    check_numbers("SGD", group, "momentum", "dampening", "weight_decay")
    for name in ("nesterov", "maximize"):
        if name in group:
            flag("SGD", name, group[name])


def by_device_and_dtype(params):
    """The parameters that have a gradient, and their gradients: pairs of lists that share device and dtype, in the
    order of first appearance."""
    lists = {}
    for p in params:
        grad = p.grad
        if grad is None:
            continue
        refuse_sparse("SGD", p, grad)
        alike = lists.setdefault((p.device, p.dtype), ([], []))
        alike[0].append(p)
        alike[1].append(grad)
    return lists.values()
