"""scatter_add: elements of one tensor added to those of another that indices name, out of place and in place."""

from torch import Tensor

from .._arguments import integer
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator
from ._scatter import inplace_operator, wrapped_dim

require_ops("scatter_add_zeros")


@register_fake("cuda_ops::scatter_add_forward")
def _(input, dim, index, src):
    wrapped_dim("scatter_add", dim, input)
    return input.new_empty(input.shape)


@register_fake("cuda_ops::scatter_add_backward")
def _(grad_output, dim, index, size):
    wrapped_dim("scatter_add_backward", dim, grad_output)
    return grad_output.new_empty(size)


@register_fake("cuda_ops::scatter_add_inplace")
def _(input, dim, index, src):
    wrapped_dim("scatter_add_", dim, input)


scatter_add_forward = operator("scatter_add_forward")
scatter_add_inplace = inplace_operator("scatter_add", scatter_add_forward)
ScatterAddFunction = autograd_function("scatter_add_forward", "ScatterAddFunction")


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    r"""`input`, to which each element of `src` is added at the place along `dim` that `index` has for it, as
    :func:`torch.scatter_add`; of matrices along the first dimension
    :math:`\text{output}_{rj} = \text{input}_{rj} + \sum_{k : \text{index}_{kj} = r} \text{src}_{kj}`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: the dimension along which indices point.
        index: int64 or int32, in [0, R) where R is the size of `input` along `dim`; as many dimensions as `input`, none
            longer than that of `src` nor, but for `dim`, than that of `input`. One that is expanded along all other
            dimensions names whole rows, and costs what :func:`index_add` does.
        src: the values, any strides; elements beyond the shape of `index` are not added.

    Returns:
        A contiguous tensor of the shape of `input`.

    Raises:
        IndexError: an index is not in [0, R), or `input` has no dimension `dim`. On CUDA an index is told of late, as
            :func:`embedding` does; its element is added nowhere.
        TypeError: an argument is of another type.
        RuntimeError: a mismatch of shapes, dtypes or devices.
        NotImplementedError: 2^31 elements of `index` or more.

    On CUDA values are added in the order in which they come, as PyTorch does, halves in float32: the last digits may
    differ from run to run. Under :func:`torch.use_deterministic_algorithms` they are added as integers that have at
    least 31 bits (62 of float64) below the largest one of their place, and results repeat bit by bit, as on the CPU.
    Differentiable any number of times by `input` and `src`.

    Example:
        >>> cuda_ops.functional.scatter_add(torch.zeros(3), 0, torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 4.0]))
        tensor([2., 0., 5.])
    """
    return scatter_add_forward(input, integer("scatter_add", "dim", dim), index, src)


def scatter_add_(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    r"""As :func:`scatter_add`, written into `input`, as :meth:`torch.Tensor.scatter_add_`. Elements that no index names
    are not touched.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: the dimension along which indices point.
        index: as :func:`scatter_add` has it.
        src: the values, any strides; elements beyond the shape of `index` are not added.

    Returns:
        `input`.

    Raises:
        RuntimeError: `input` is a leaf that requires grad, has elements that share memory, or shares it with the
            others; and what :func:`scatter_add` raises.

    Example:
        >>> x = torch.zeros(3)
        >>> cuda_ops.functional.scatter_add_(x, 0, torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 4.0]))
        tensor([2., 0., 5.])
    """
    return scatter_add_inplace(input, integer("scatter_add_", "dim", dim), index, src)
