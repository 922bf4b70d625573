"""histc: how many elements lie in each of some bins of equal width."""

from torch import Tensor

from .._arguments import expect, integer, number
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::histc_forward")
def _(input, bins, min, max):
    expect(bins >= 1, "histc", "bins to be at least 1, got {}", bins)
    return input.new_empty((bins,))


histc_forward = operator("histc_forward")


def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    r"""The histogram of all elements: how many :math:`v` with :math:`\text{min} \le v \le \text{max}` lie in each of
    `bins` bins of equal width, :math:`\lfloor (v - \text{min}) \cdot \text{bins} / (\text{max} - \text{min}) \rfloor`;
    max itself in the last one. As :func:`torch.histc`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16. NaN is in no bin.
        bins: their number, at least 1.
        min: the lower end. Where it is equal to `max`, both are those of the elements, and on CUDA the host waits for
            them; of elements that are all the same, one less and one more.
        max: the upper end.

    Returns:
        A tensor of `bins` counts, of the dtype of `input`, rounded to it. They are counted as integers: exactly, and
        the same in every run.

    Raises:
        TypeError: `input` is no tensor, `bins` no int, `min` or `max` no number.
        RuntimeError: `input` is not floating point, `bins` below 1, `min` above `max`, or an end not finite.
        NotImplementedError: 2^31 bins or more.

    Counts have no gradient.

    Example:
        >>> cuda_ops.functional.histc(torch.tensor([1.0, 2.0, 1.0]), bins=4, min=0, max=3)
        tensor([0., 2., 1., 0.])
    """
    return histc_forward(
        input, integer("histc", "bins", bins), number("histc", "min", min), number("histc", "max", max)
    )
