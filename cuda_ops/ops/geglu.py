"""geglu: gelu(gate) * value, of two tensors or of the halves of one."""

from torch import Tensor

from .._autograd import autograd_function
from .._operators import operator
from ._gated import gated_fakes

gated_fakes("geglu")
geglu_forward = operator("geglu_forward")
GEGLUFunction = autograd_function("geglu_forward", "GEGLUFunction")


def geglu(gate: Tensor, value: Tensor | None = None, approximate: str = "none") -> Tensor:
    r"""Gated linear unit of gelu, :math:`\text{gelu}(\text{gate}) \cdot \text{value}`, elementwise: one pass forward,
    and one backward that gives both gradients (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        gate: any shape, any strides; float32, float64, float16 or bfloat16.
        value: of the shape and dtype of `gate`. None: the first half of gate's last dimension is the gate and the
            second half the value, as one matrix product gives them; they are not copied, and have one gradient.
        approximate: ``"none"`` or ``"tanh"``, as of :func:`cuda_ops.functional.gelu`.

    Returns:
        A tensor like `gate`; without `value` a contiguous one, whose last dimension is half as long.

    Raises:
        TypeError: `gate` or `value` is no tensor.
        RuntimeError: `gate` is not floating point, or its last dimension odd where it is to be halved; `approximate` is
            neither of the two; a mismatch of shapes, dtypes or devices.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.geglu(torch.tensor([1.0, -3.0]), torch.tensor([2.0, 10.0]))
        tensor([ 1.6827, -0.0405])
    """
    return geglu_forward(gate, value, approximate)
