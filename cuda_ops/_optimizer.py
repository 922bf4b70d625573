"""What the optimizers share: options of a parameter group, lists of parameters of one kind, sharded parameters, and a
step and a zero_grad without the profiler's entries where nobody looks."""

import functools

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ._arguments import number

PLAIN = {Tensor, torch.nn.Parameter}
NO_STATE = {}


class WithoutEntries:
    """For a subclass of one of torch.optim's, in front of it."""

    @staticmethod
    def profile_hook_step(func):
        """What torch.optim puts around :meth:`step`, for hooks and for an entry in profiles; left out where there are
        neither, since it takes half as long as the step."""
        hooked = Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self, *args, **kwargs):
            hooks = (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
            )
            return (hooked if hooks or torch.autograd._profiler_enabled() else func)(self, *args, **kwargs)

        return step

    def zero_grad(self, set_to_none: bool = True):
        """Drops the gradients, or makes them 0. See :meth:`torch.optim.Optimizer.zero_grad`, whose entry in profiles
        would take longer than dropping them."""
        if not set_to_none:
            return super().zero_grad(False)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def loss_of(closure):
    """What a step's closure returns, called with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_differentiable(op: str, group):
    if group.get("differentiable"):
        raise NotImplementedError(f"{op}: differentiable=True is not supported")


def refuse_sparse(op: str, param, grad):
    if grad.layout is not torch.strided:
        raise NotImplementedError(
            f"{op}: expected dense gradients, got one of layout {grad.layout} for a parameter of shape "
            f"{list(param.shape)}"
        )


def option(op: str, group, name: str) -> float:
    """A number among the options of a parameter group."""
    return number(op, name, group[name])


def check_numbers(op: str, group, *names: str):
    """Types, of those options that are there: a text would be taken for a number."""
    for name in names:
        if name in group:
            option(op, group, name)
    if not isinstance(group.get("lr", 0.0), Tensor):
        number(op, "lr", group.get("lr", 0.0))


def number_or_tensor(lr, device):
    """(lr as a number, None), or (0.0, lr) for a tensor that the kernel can read where it is."""
    if isinstance(lr, Tensor) and lr.is_cuda and lr.device == device:
        readable = lr.dtype in (torch.float32, torch.float64)
        lr = lr.detach().resolve_neg()
        return 0.0, lr if readable else lr.to(torch.float32)
    return float(lr), None


def local(op: str, tensors, params):
    """The tensors themselves, or what this process holds of distributed ones (FSDP), since the step is elementwise."""
    if PLAIN.issuperset(map(type, tensors)):
        return tensors
    return [local_part(op, tensor, param) for tensor, param in zip(tensors, params, strict=True)]


def local_part(op: str, tensor, param):
    if not hasattr(tensor, "to_local"):
        return tensor
    if tensor.placements != param.placements:
        raise NotImplementedError(
            f"{op}: expected gradients and state to be placed like their parameter, {param.placements}, got "
            f"{tensor.placements}"
        )
    return tensor.to_local()
