"""What the specifications of swiglu and geglu share."""

import torch

import cuda_ops

from .opspec import Bad, OpSpec, Sample


def gated_spec(name, activation, parameters=({},), defaults=(), bad=()):
    """Of cuda_ops.functional.<name>(gate, value, **parameters), activation(gate, **parameters) * value."""
    function = getattr(cuda_ops.functional, name)

    def reference(gate, value=None, **keywords):
        if value is None:
            if gate.shape[-1] % 2:
                raise ValueError("no halves")
            gate, value = gate.chunk(2, -1)
        return activation(gate, **keywords) * value

    def samples(make):
        # One element, a warp less and more one, a block less and more one, several blocks; 0 to 4 dimensions.
        for shape in [(), (1,), (31,), (33,), (1025,), (3, 5), (70_001,), (2, 3, 4, 5)]:
            yield Sample((make(*shape, low=-8.0, high=8.0), make(*shape)), parameters[0], name=f"{shape}")
        # Halves of no whole vector, of one, of a warp of them and of several blocks; one row and several.
        for shape in [(2,), (6,), (16,), (3, 2), (3, 66), (5, 64), (2, 3, 1040), (2, 5000), (300, 16), (1, 10_000)]:
            yield Sample((make(*shape, low=-8.0, high=8.0),), parameters[0], name=f"halves of {shape}")
        for keywords in parameters[1:]:
            yield Sample((make(3, 1025, low=-8.0, high=8.0), make(3, 1025)), keywords, name=f"{keywords}")
            yield Sample((make(3, 66, low=-8.0, high=8.0),), keywords, name=f"halves, {keywords}")

    def small_samples(make):
        for keywords in parameters:
            yield Sample((make(2, 3), make(2, 3)), keywords)
            yield Sample((make(2, 6),), keywords)
            yield Sample((make(2, 3), make(2, 3, requires_grad=False)), keywords)
            yield Sample((make(2, 3, requires_grad=False), make(2, 3)), keywords)

    def empty_samples(make):
        yield Sample((make(0), make(0)))
        yield Sample((make(2, 0, 4),))
        yield Sample((make(2, 0),))

    ops = torch.ops.cuda_ops
    forward, backward = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")

    def op_samples(make):
        yield forward, (make(3, 5), make(3, 5), *defaults)
        yield forward, (make(3, 5).t(), make(5, 3), *defaults)
        yield forward, (make(3, 6), None, *defaults)
        yield forward, (make(6, 4).t(), None, *defaults)
        yield backward, (make(3, 5), make(3, 5), make(3, 5), *defaults)
        yield backward, (make(3, 3), make(3, 6), None, *defaults)

    def case(label, call, match, error=RuntimeError):
        return Bad(label, lambda device: call(lambda *s: torch.ones(s, device=device)), error, f"{name}{match}")

    return OpSpec(
        name=name,
        function=function,
        reference=reference,
        samples=samples,
        small_samples=small_samples,
        empty_samples=empty_samples,
        op_samples=op_samples,
        gradgrad=True,
        # An infinity times a slope of 0 is a NaN or not, by the order of the factors.
        nonfinite_gradient=False,
        bad=[
            case("integers", lambda ones: function(ones(3).long()), ": expected gate to be floating point, got int64"),
            case("no tensor", lambda ones: function(1.0), ": expected gate to be a Tensor, got float", TypeError),
            case(
                "a value of another shape",
                lambda ones: function(ones(3), ones(4)),
                r": expected value to have the shape of gate, \[3\], got \[4\]",
            ),
            case(
                "a value of another dtype",
                lambda ones: function(ones(3), ones(3).double()),
                ": expected value to have the dtype of gate, float32, got float64",
            ),
            case(
                "no halves",
                lambda ones: function(ones(2, 3)),
                r": expected gate to have an even last dimension, of gate and value, got shape \[2, 3\]",
            ),
            case(
                "a number to be halved",
                lambda ones: function(ones()),
                r": expected gate to have an even last dimension, of gate and value, got shape \[\]",
            ),
            case(
                "grad_output of another shape",
                lambda ones: backward(ones(4), ones(4), None, *defaults),
                r"_backward: expected grad_output to have the shape of the output, \[2\], got \[4\]",
            ),
            *(case(*b) for b in bad),
        ],
    )
