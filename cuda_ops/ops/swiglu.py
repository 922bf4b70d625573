"""swiglu: silu(gate) * value, of two tensors or of the halves of one."""

from torch import Tensor

from .._autograd import autograd_function
from .._operators import operator
from ._gated import gated_fakes

gated_fakes("swiglu")
swiglu_forward = operator("swiglu_forward")
SwiGLUFunction = autograd_function("swiglu_forward", "SwiGLUFunction")


def swiglu(gate: Tensor, value: Tensor | None = None) -> Tensor:
    r"""Gated linear unit of silu, :math:`\text{silu}(\text{gate}) \cdot \text{value}`, elementwise: one pass forward,
    and one backward that gives both gradients (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        gate: any shape, any strides; float32, float64, float16 or bfloat16.
        value: of the shape and dtype of `gate`. None: the first half of gate's last dimension is the gate and the
            second half the value, as one matrix product gives them; they are not copied, and have one gradient.

    Returns:
        A tensor like `gate`; without `value` a contiguous one, whose last dimension is half as long.

    Raises:
        TypeError: `gate` or `value` is no tensor.
        RuntimeError: `gate` is not floating point, or its last dimension odd where it is to be halved; a mismatch of
            shapes, dtypes or devices.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.swiglu(torch.tensor([1.0, -3.0]), torch.tensor([2.0, 10.0]))
        tensor([ 1.4621, -1.4228])
        >>> cuda_ops.functional.swiglu(torch.tensor([1.0, -3.0, 2.0, 10.0]))
        tensor([ 1.4621, -1.4228])
    """
    return swiglu_forward(gate, value)
