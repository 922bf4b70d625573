"""Forward mode and the transforms of torch.func, over every op, against PyTorch's own."""

import pytest
import torch
from support.opspec import Make, as_tuple, assert_close
from torch import Tensor

# PyTorch's own ops may have no batching rule; ours all have one.
SLOW = "There is a performance drop because we have not yet implemented the batching rule for "
pytestmark = pytest.mark.filterwarnings(f"ignore:{SLOW}", f"error:{SLOW}cuda_ops")


def flattened(value) -> tuple[Tensor, ...]:
    return tuple(t for v in value for t in flattened(v)) if isinstance(value, (tuple, list)) else (value,)


def loss(function):
    """A number of which all second derivatives are there. Elements count differently: the squares of what is normalised
    have a sum that depends on nothing."""

    def weighted(output):
        weights = torch.linspace(0.5, 2, output.numel(), dtype=output.dtype).view(output.shape)
        return (output.square() * weights).sum()

    def call(*primals):
        return sum(map(weighted, function(*primals)))

    return call


def every(primals):
    return tuple(range(len(primals)))


def vjp(function, primals, tangents):
    outputs, backward = torch.func.vjp(function, *primals)
    return outputs, backward(tuple(output.detach().cos() for output in outputs))


def batched(primals, tangents):
    """Two values for the first of the primals, and one for the others."""
    return (torch.stack([primals[0], tangents[0]]), *primals[1:]), (0, *[None] * (len(primals) - 1))


def vmap(function, primals, tangents):
    arguments, in_dims = batched(primals, tangents)
    return torch.func.vmap(function, in_dims)(*arguments)


def vmap_of_grad(function, primals, tangents):
    arguments, in_dims = batched(primals, tangents)
    return torch.func.vmap(torch.func.grad(loss(function), every(primals)), in_dims)(*arguments)


def jvp_of_grad(function, primals, tangents):
    return torch.func.jvp(torch.func.grad(loss(function), every(primals)), primals, tangents)


def jacrev_of_grad(function, primals, tangents):
    return torch.func.jacrev(torch.func.grad(loss(function), every(primals)))(*primals)


TRANSFORMS = {
    "jvp": torch.func.jvp,
    "vjp": vjp,
    "jacrev": lambda function, primals, tangents: torch.func.jacrev(function, every(primals))(*primals),
    "grad": lambda function, primals, tangents: torch.func.grad(loss(function), every(primals))(*primals),
    "vmap": vmap,
    "vmap of grad": vmap_of_grad,
    "jvp of grad": jvp_of_grad,
    "jacrev of grad": jacrev_of_grad,
    "hessian": lambda function, primals, tangents: torch.func.hessian(loss(function))(*primals),
}
# Both sides compute in float64, by formulas whose sums cancel in ways of their own.
TOLERANCE = 1e-9
OF_SECOND_ORDER = ("jvp of grad", "jacrev of grad", "hessian")

# What an op refuses, by transform: the message. A refusal is an error that names the op and never a wrong number.
REFUSED: dict[str, dict[str, str]] = {}


def of_primals(function, sample):
    """The function of the sample's tensors that require grad, to the outputs that have gradients."""

    def call(*primals):
        given = iter(primals)
        replaced = sample.map(lambda tensor: next(given) if tensor.requires_grad else tensor)
        outputs = as_tuple(function(*replaced.args, **replaced.kwargs))
        return tuple(output for output in outputs if output.is_floating_point())

    return call


def problems(spec):
    """(name, ours, PyTorch's, primals, tangents) of the small samples."""
    make = Make(dtype=torch.float64, requires_grad=True)
    direction = Make(dtype=torch.float64, seed=1)
    for sample in spec.small_samples(make):
        primals = tuple(tensor.detach() for tensor in sample.differentiable())
        tangents = tuple(direction.distinct(*primal.shape) for primal in primals)
        yield sample.name, of_primals(spec.function, sample), of_primals(spec.reference, sample), primals, tangents


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(spec, transform):
    if spec.random:
        pytest.skip("has a test of its own")
    if transform in OF_SECOND_ORDER and not spec.gradgrad:
        pytest.skip(f"{spec.name} is differentiable once")
    apply, compared = TRANSFORMS[transform], 0
    differentiable = [problem for problem in problems(spec) if problem[3]]
    if not differentiable:
        pytest.skip(f"{spec.name} has nothing to differentiate")
    for name, ours, native, primals, tangents in differentiable:
        if refusal := REFUSED.get(spec.name, {}).get(transform):
            with pytest.raises((RuntimeError, NotImplementedError), match=refusal):
                apply(ours, primals, tangents)
            compared += 1
            continue
        try:
            expected = flattened(apply(native, primals, tangents))
        except RuntimeError as error:  # batch_norm's running statistics under vmap
            assert "updated in place" in str(error)
            with pytest.raises(RuntimeError, match="Batching rule not implemented for cuda_ops::"):
                apply(ours, primals, tangents)
            continue
        actual = flattened(apply(ours, primals, tangents))
        assert len(actual) == len(expected)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, TOLERANCE, f"{name}: result {index} of {transform}")
        compared += 1
    assert compared > 0
