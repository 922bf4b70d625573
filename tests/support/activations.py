"""What the specifications of the activation functions share."""

import torch

import cuda_ops

from .opspec import Bad, OpSpec, Sample


def activation_spec(name, reference, parameters=({},), *, saved="input", inplace=False, module=None, reach=8.0, **more):
    """The specification of cuda_ops.functional.<name>(input, **parameters). `parameters`: the dictionaries to sample;
    `saved`: what <name>_backward takes; `reach`: how far from 0 samples go, beyond the last place where the function
    changes its form."""
    function = getattr(cuda_ops.functional, name)

    def samples(make):
        # One element, a warp less and more one, a block less and more one, several blocks; 0 to 4 dimensions.
        for shape in [(), (1,), (31,), (33,), (1023,), (1025,), (3, 5), (70_001,), (2, 3, 4, 5)]:
            yield Sample((make(*shape, low=-reach, high=reach),), parameters[0], name=f"{shape}")
        for keywords in parameters[1:]:
            yield Sample((make(3, 1025, low=-reach, high=reach),), keywords, name=f"{keywords}")
        # Where exponentials of float32 overflow.
        yield Sample((make(1025, low=-120.0, high=120.0),), parameters[0], name="far")
        yield Sample((make(1025, low=-1e-3, high=1e-3),), parameters[0], name="near")

    def small_samples(make):
        for keywords in parameters:
            yield Sample((make(2, 3, low=-reach, high=reach),), keywords)
            yield Sample((make(2, 3, 2, 2),), keywords)

    def empty_samples(make):
        yield Sample((make(0),))
        yield Sample((make(2, 0, 3),))

    ops = torch.ops.cuda_ops
    forward, backward = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")
    schema = forward.default._schema
    # What the functional's defaults are: the arguments of a call without keywords.
    values = more.pop("defaults", ())
    assert len(schema.arguments) == 1 + len(values), f"{name}: {schema}"

    def op_samples(make):
        yield forward, (make(3, 5), *values)
        yield forward, (make(3, 5).t(), *values)
        yield backward, (make(3, 5), make(3, 5), *values)
        if inplace:
            yield getattr(ops, f"{name}_inplace"), (make(3, 5), *values)
            yield getattr(ops, f"{name}_inplace"), (make(3, 10)[:, ::2], *values)

    def ones(*shape, device, **options):
        return torch.ones(shape, device=device, **options)

    bad = [
        Bad(
            "integers",
            lambda device: function(torch.arange(3, device=device)),
            RuntimeError,
            f"{name}: expected input to be floating point, got int64",
        ),
        Bad(
            "no tensor",
            lambda device: function(1.0),
            TypeError,
            f"{name}: expected input to be a Tensor, got float",
        ),
        Bad(
            "grad_output of another shape",
            lambda device: backward(ones(2, device=device), ones(3, device=device), *values),
            RuntimeError,
            rf"{name}_backward: expected grad_output to have the shape of {saved}, \[3\], got \[2\]",
        ),
        Bad(
            "grad_output of another dtype",
            lambda device: backward(ones(3, device=device, dtype=torch.float64), ones(3, device=device), *values),
            RuntimeError,
            f"{name}_backward: expected grad_output to have the dtype of {saved}, float32, got float64",
        ),
    ]
    if inplace:
        bad += [
            Bad(
                "integers, in place",
                lambda device: function(torch.arange(3, device=device), inplace=True),
                RuntimeError,
                f"{name}: expected input to be floating point, got int64",
            ),
            Bad(
                "a leaf that requires grad, in place",
                lambda device: function(ones(3, device=device, requires_grad=True), inplace=True),
                RuntimeError,
                "a leaf Variable that requires grad is being used in an in-place operation",
            ),
            Bad(
                "elements that share memory, in place",
                lambda device: function(ones(1, device=device).expand(3), inplace=True),
                RuntimeError,
                "more than one element of the written-to tensor refers to a single memory location",
            ),
        ]
    return OpSpec(
        name=name,
        function=function,
        reference=reference,
        samples=samples,
        small_samples=small_samples,
        empty_samples=empty_samples,
        op_samples=op_samples,
        gradgrad=True,
        bad=[*bad, *more.pop("bad", [])],
        **more,
    )
