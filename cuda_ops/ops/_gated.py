"""What swiglu and geglu share: fake kernels."""

import torch

from .._arguments import expect
from .._fakes import register_fake, require_ops


def gated_fakes(name: str):
    require_ops(f"{name}_gradients", f"{name}_tangent", f"{name}_backward_tangents", f"{name}_backward_tangent_value")

    def check(op, gate, value):
        if value is None:
            message = "gate to have an even last dimension, of gate and value, got shape {}"
            expect(gate.dim() >= 1, op, message, list(gate.shape))
            expect(gate.shape[-1] % 2 == 0, op, message, list(gate.shape))
        else:
            message = "value to have the shape of gate, {}, got {}"
            expect(gate.dim() == value.dim(), op, message, list(gate.shape), list(value.shape))
            for size, wanted in zip(value.shape, gate.shape, strict=True):
                expect(size == wanted, op, message, list(gate.shape), list(value.shape))

    @register_fake(f"cuda_ops::{name}_forward")
    def _(gate, value, *parameters):
        check(name, gate, value)
        return torch.empty_like(gate) if value is not None else gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))

    @register_fake(f"cuda_ops::{name}_backward")
    def _(grad_output, gate, value, *parameters):
        check(f"{name}_backward", gate, value)
        if value is None:
            return torch.empty_like(gate, memory_format=torch.contiguous_format), gate.new_empty((0,))
        return torch.empty_like(gate), torch.empty_like(gate)
