"""The registered ops of cuda_ops.nn.init: random numbers into a tensor, uniform and normal."""

from .._fakes import register_fake
from .._library import ops


@register_fake("cuda_ops::uniform_")
def _(tensor, a, b, generator):
    return None


@register_fake("cuda_ops::normal_")
def _(tensor, mean, std, generator):
    return None


# A generator is no argument that the bound functions of operator() take.
uniform_ = ops.uniform_
normal_ = ops.normal_
