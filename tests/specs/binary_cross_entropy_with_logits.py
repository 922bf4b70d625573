from support.losses import loss_spec
from support.opspec import Sample

import cuda_ops

function = cuda_ops.functional.binary_cross_entropy_with_logits


def probabilities(make, *shape):
    return make(*shape, low=0.0, high=1.0)


def more(make):
    """Weights for all, a class, a channel, an element, and broadcast along two dimensions in turns."""
    for shape in [(), (1,), (5,), (4, 1, 1), (3, 1, 1, 1), (3, 4, 2, 5), (4, 1, 5)]:
        for name in ("weight", "pos_weight"):
            weight = make(*shape, low=0.5, high=3.0, requires_grad=False)
            reduction = "mean" if name == "weight" else "none"
            sample = (make(3, 4, 2, 5), probabilities(make, 3, 4, 2, 5))
            yield Sample(sample, {name: weight, "reduction": reduction}, f"{name} of {shape}")
    weights = {name: make(16, low=0.5, high=3.0, requires_grad=False) for name in ("weight", "pos_weight")}
    yield Sample((make(300, 16), probabilities(make, 300, 16)), weights, "both")


SPEC = loss_spec(
    "binary_cross_entropy_with_logits",
    target=probabilities,
    more=more,
    bad=[
        (
            "a target of another shape",
            lambda ones: function(ones(3), ones(1)),
            r": expected target to have the shape of input, \[3\], got \[1\]",
            ValueError,
        ),
        (
            "a weight that is no tensor",
            lambda ones: function(ones(3), ones(3), weight=2.0),
            ": expected weight to be a Tensor or None, got float",
            TypeError,
        ),
        (
            "a pos_weight that does not broadcast",
            lambda ones: function(ones(3), ones(3), pos_weight=ones(2)),
            r": expected pos_weight to be of a shape that broadcasts to that of input, \[3\], got \[2\]",
        ),
    ],
)
