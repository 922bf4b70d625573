"""torch.autograd.Function, without the bookkeeping in Python, which takes longer than many an op: all of it where no
gradient is recorded, and where one is, what is there for functorch's transforms and for `setup_context`."""

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad


class Function(torch.autograd.Function):
    """Like torch.autograd.Function, for forwards that take a ctx and return new tensors alone. (torch.compile does not
    see `apply`; it traces forward and backward.)"""

    @classmethod
    def apply(cls, *args):
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # which refuses
        if torch.is_grad_enabled():
            for argument in args:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    # What torch.autograd.Function.apply comes to.
                    return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))
        return cls.forward(Unrecorded(len(args)), *args)


class Unrecorded:
    """The ctx of a forward that has no backward."""

    def __init__(self, arguments: int):
        self.needs_input_grad = (False,) * arguments

    def save_for_backward(self, *tensors):
        pass

    def mark_non_differentiable(self, *outputs):
        pass

    def set_materialize_grads(self, value):
        pass
