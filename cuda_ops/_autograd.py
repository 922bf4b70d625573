"""torch.autograd.Function, without its bookkeeping where no gradient is recorded: in evaluation, and in a backward pass
whose Functions call others so that they can be differentiated further, which is rarely asked for."""

import torch
from torch.autograd import forward_ad


class Function(torch.autograd.Function):
    """Like torch.autograd.Function, for forwards that return new tensors alone. (torch.compile does not see `apply`; it
    traces forward and backward.)"""

    @classmethod
    def apply(cls, *args):
        watched = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()  # which are refused
        if watched or torch.is_grad_enabled():
            return super().apply(*args)
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
