"""What the specifications of the losses of elements share."""

import torch

import cuda_ops

from .opspec import Bad, OpSpec, Sample

SHAPES = [(), (1,), (31,), (33,), (1025,), (3, 5), (4097,), (70_001,), (2, 3, 4, 5)]


def loss_spec(name, *, target=lambda make, *shape: make(*shape), keywords=({},), reference=None, more=(), bad=()):
    """The specification of cuda_ops.functional.<name>(input, target, **keywords). `target(make, *shape)` makes the
    targets; `more(make)` are samples beside those of the shapes."""
    function = getattr(cuda_ops.functional, name)

    def samples(make):
        # One element, a warp less and more one, one block and several, several in the second stage; each reduction.
        for shape in SHAPES:
            for reduction in ("none", "mean", "sum"):
                keyword = {"reduction": reduction, **keywords[0]}
                yield Sample((make(*shape), target(make, *shape)), keyword, f"{shape}, {reduction}")
        for other in keywords[1:]:
            for reduction in ("none", "mean"):
                keyword = {"reduction": reduction, **other}
                yield Sample((make(3, 1025), target(make, 3, 1025)), keyword, f"{keyword}")
        yield Sample((make(33, low=-120.0, high=120.0), target(make, 33)), {"reduction": "none"}, "far")
        yield from more(make) if more else ()

    def small_samples(make):
        for other in keywords:
            for reduction in ("none", "mean", "sum"):
                yield Sample((make(2, 3), target(make, 2, 3)), {"reduction": reduction, **other})
        yield Sample((make(2, 3), target(make, 2, 3).detach()), {"reduction": "sum"}, "a constant target")

    def empty_samples(make):
        for reduction in ("none", "mean", "sum"):
            yield Sample((make(2, 0), target(make, 2, 0)), {"reduction": reduction})

    ops = torch.ops.cuda_ops
    forward, backward = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")

    def op_samples(make):
        x, t, weight = make(3, 5), target(make, 3, 5), make(5, requires_grad=False)
        for reduction in (0, 1, 2):
            grad = make(3, 5) if reduction == 0 else make()
            yield forward, (x, t, None, None, reduction, 1.0)
            yield forward, (x.t(), t.t(), None, None, reduction, 1.0)
            yield backward, (grad, x, t, None, None, reduction, 1.0, False)
            yield backward, (grad, x, t, weight, None, reduction, 1.0, True)

    def case(label, call, match, error=RuntimeError):
        return Bad(label, lambda device: call(lambda *s: torch.ones(s, device=device)), error, f"{name}{match}")

    return OpSpec(
        name=name,
        function=function,
        reference=reference or getattr(torch.nn.functional, name),
        samples=samples,
        small_samples=small_samples,
        empty_samples=empty_samples,
        op_samples=op_samples,
        gradgrad=True,
        bad=[
            case(
                "integers",
                lambda ones: function(ones(3).long(), ones(3).long()),
                ": expected input to be floating point, got int64",
            ),
            case(
                "no tensor",
                lambda ones: function(1.0, ones(3)),
                ": expected input to be a Tensor, got float",
                TypeError,
            ),
            case(
                "a target of another dtype",
                lambda ones: function(ones(3), ones(3).double()),
                ": expected target to have the dtype of input, float32, got float64",
            ),
            case(
                "an unknown reduction",
                lambda ones: function(ones(3), ones(3), reduction="median"),
                ": expected reduction to be 'none', 'mean' or 'sum', got 'median'",
                ValueError,
            ),
            case(
                "grad_output of another shape",
                lambda ones: backward(ones(2), ones(3), ones(3), None, None, 0, 1.0, False),
                r"_backward: expected grad_output to have the shape of the loss, \[3\], got \[2\]",
            ),
            case(
                "targets of another shape in the op",
                lambda ones: forward(ones(3), ones(2), None, None, 0, 1.0),
                r": expected target to have the shape of input, \[3\], got \[2\]",
            ),
            case(
                "a weight that does not broadcast in the op",
                lambda ones: forward(ones(3), ones(3), ones(2), None, 0, 1.0),
                r": expected weight to be of a shape that broadcasts to that of input, \[3\], got \[2\]",
            ),
            *(case(*b) for b in bad),
        ],
    )


def reduced(losses, weight=None, reduction="mean", *, by_weights=True):
    """What references make of losses that they compose, since PyTorch's own has no forward mode, or a broken one."""
    losses = losses if weight is None else losses * weight
    if reduction == "mean":
        return losses.mean() if weight is None or not by_weights else losses.sum() / weight.sum()
    return losses if reduction == "none" else losses.sum()


def weighted(make):
    """Of the losses that take one: a weight for each element."""
    for reduction in ("none", "mean", "sum"):
        weight = make(7, 33, low=0.5, high=2.0, requires_grad=False)
        yield Sample((make(7, 33), make(7, 33)), {"reduction": reduction, "weight": weight}, f"weight, {reduction}")
