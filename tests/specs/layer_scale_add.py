import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

layer_scale_add = cuda_ops.functional.layer_scale_add


def reference(input, residual, weight=None, row_scale=None):
    if weight is not None and sum(size > 1 for size in weight.shape) > 1:
        raise RuntimeError("the weight is of one dimension")
    branch = input if weight is None else weight * input
    if row_scale is not None:
        branch = branch * row_scale.view(-1, *[1] * (input.dim() - 1))
    return residual + branch


def samples(make):
    # Channels innermost, in whole vectors and not; rows around the four of a thread and those of a block; tiles.
    for shape in [(2, 9, 8), (3, 28, 5), (1, 81, 96), (33, 4, 24), (2, 15, 1032)]:
        scales = make(shape[0], requires_grad=False)
        yield Sample((make(*shape), make(*shape), make(shape[-1]), scales), name=f"channels innermost, {shape}")
    for shape in [(2, 8, 3, 3), (3, 5, 4, 7), (33, 24, 2, 2), (2, 3, 33, 32)]:
        scales = make(shape[0], requires_grad=False)
        yield Sample((make(*shape), make(*shape), make(shape[1], 1, 1), scales), name=f"channels of {shape}")
    for shape in [(4, 7, 16), (2, 3, 33), (3, 8), (1, 1, 4096)]:
        yield Sample((make(*shape), make(*shape), make(shape[-1])), name=f"last of {shape}")
    yield Sample((make(5, 3, 4), make(5, 3, 4), None, make(5, requires_grad=False)), name="rows alone")
    yield Sample((make(70_001), make(70_001)), name="a sum")
    yield Sample((make(3, 4), make(3, 4), make(1)), name="weight of one element")
    yield Sample((make(3, 4, 5), make(3, 4, 5), make(3, 1, 1)), name="weight of rows")


def small_samples(make):
    scales = make(2, requires_grad=False)
    yield Sample((make(2, 3, 2), make(2, 3, 2), make(3, 1), scales), name="weight of channels")
    yield Sample((make(2, 3), make(2, 3), make(3)), name="weight of the last")
    yield Sample((make(2, 3), make(2, 3)), name="a sum")


def empty_samples(make):
    yield Sample((make(0, 3, 4), make(0, 3, 4), make(3, 1)))
    yield Sample((make(2, 3, 0), make(2, 3, 0), make(3, 1), make(2, requires_grad=False)))


def op_samples(make):
    forward = torch.ops.cuda_ops.layer_scale_add_forward
    shape, scales = (2, 4, 3, 3), make(2, requires_grad=False)
    for view in (lambda t: t, lambda t: t.contiguous(memory_format=torch.channels_last), lambda t: t.transpose(1, 2)):
        x, residual = view(make(*shape)).detach(), view(make(*shape)).detach()
        weight = make(x.shape[1], 1, 1)
        yield forward, (x.requires_grad_(), residual.requires_grad_(), weight, scales, None)
        yield forward, (x, residual, None, None, None)
        if x.dtype == torch.float32:
            yield forward, (x, residual, weight, None, torch.bfloat16)


SPEC = OpSpec(
    name="layer_scale_add",
    function=layer_scale_add,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        bad(
            "integers",
            lambda ones: layer_scale_add(ones(3, 2).long(), ones(3, 2)),
            "layer_scale_add: expected input to be floating point, got int64",
        ),
        bad(
            "a residual of another shape",
            lambda ones: layer_scale_add(ones(3, 2), ones(1, 2)),
            r"layer_scale_add: expected residual to have the shape of input, \[3, 2\], got \[1, 2\]",
        ),
        bad(
            "a weight of two dimensions",
            lambda ones: layer_scale_add(ones(3, 2), ones(3, 2), ones(3, 2)),
            r"layer_scale_add: expected weight to have one size above 1, that of a dimension of input, \[3, 2\], with "
            r"which it broadcasts, got \[3, 2\]",
        ),
        bad(
            "row_scale of another size",
            lambda ones: layer_scale_add(ones(3, 2), ones(3, 2), ones(2), ones(2)),
            r"layer_scale_add: expected row_scale to have one element for each row of input, \[3\], got \[2\]",
        ),
        bad(
            "no residual",
            lambda ones: layer_scale_add(ones(3), 1.0),
            "layer_scale_add: expected residual to be a Tensor, got float",
            TypeError,
        ),
    ],
)
