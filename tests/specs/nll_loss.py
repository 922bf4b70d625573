import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def weights(make, classes):
    return make(classes, low=0.1, high=1.0, requires_grad=False)


def samples(make):
    for reduction in ("none", "mean", "sum"):
        kwargs = {"reduction": reduction}
        yield Sample((make(7, 10), make.integers(7, high=10)), kwargs, f"rows, {reduction}")
        yield Sample((make(5, 3, 65), make.integers(5, 65, high=3)), kwargs, f"columns, {reduction}")
        yield Sample((make(2, 33, 3, 4), make.integers(2, 3, 4, high=33)), kwargs, f"images, {reduction}")
        yield Sample(
            (make(7, 10), make.integers(7, high=10)),
            {**kwargs, "weight": weights(make, 10), "ignore_index": 3},
            f"weight, ignore_index among the classes, {reduction}",
        )
        yield Sample((make(9), make.integers(high=9)), kwargs, f"one sample without a batch, {reduction}")
    yield Sample((make(4, 1), make.integers(4, high=1)), name="one class")
    yield Sample((make(5, 4), torch.tensor([0, -100, 3, -100, 1], device=make.device)), name="the default ignore_index")
    yield Sample(
        (make(3, 4), torch.tensor([255, 0, 2], device=make.device)), {"ignore_index": 255}, "ignore_index past the end"
    )
    yield Sample((make(3, 4), torch.tensor([3, 0, 2], device=make.device, dtype=torch.uint8)), name="uint8")
    yield Sample((make(3, 4), torch.full((3,), 2, device=make.device)), {"ignore_index": 2}, "a mean over nothing")
    yield Sample(
        (make(3, 4), torch.full((3,), 2, device=make.device)),
        {"ignore_index": 2, "reduction": "sum"},
        "a sum over nothing",
    )
    yield Sample((make(3001, 3), make.integers(3001, high=3)), name="several blocks")
    yield Sample((make(3, 1500), make.integers(3, high=1500)), name="many classes")
    yield Sample((make(2, 3, 2, 2, 2), make.integers(2, 2, 2, 2, high=3)), name="five dimensions")
    yield Sample((make(40, 3), make.integers(80, high=3)[::2]), name="a strided target")


def small_samples(make):
    for reduction in ("none", "mean", "sum"):
        yield Sample(
            (make(3, 4), torch.tensor([1, -100, 3], device=make.device), weights(make, 4)), {"reduction": reduction}
        )
    yield Sample((make(2, 3, 2), make.integers(2, 2, high=3)))


def empty_samples(make):
    for reduction in ("none", "mean", "sum"):
        kwargs = {"reduction": reduction}
        yield Sample((make(0, 3), make.integers(0, high=3)), kwargs)
        yield Sample((make(2, 3, 0), make.integers(2, 0, high=3)), kwargs)
        yield Sample((make(2, 0), torch.full((2,), -100, device=make.device)), kwargs)


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.nll_loss_forward, torch.ops.cuda_ops.nll_loss_backward
    target = make.integers(3, high=4)
    pixels = make.integers(2, 5, high=3)
    total = make(low=1.0, requires_grad=False).to(torch.float32)
    yield forward, (make(3, 4), target, None, 0, -100)
    yield forward, (make(3, 4), target, weights(make, 4), 1, 2)
    yield forward, (make(2, 5, 3).transpose(1, 2), pixels, None, 2, -100)
    yield backward, (make(), make(3, 4), target, weights(make, 4), total, 1, 2)
    yield backward, (make(2, 5), make(2, 5, 3).transpose(1, 2), pixels, None, total[None][:0], 0, -100)


def call(device, *target, shape=(2, 10), classes=None, dtype=torch.int64, **kwargs):
    input = torch.ones(shape, device=device)
    if classes is not None:
        kwargs["weight"] = torch.ones(classes, device=device)
    return cuda_ops.functional.nll_loss(input, torch.tensor(target, device=device, dtype=dtype), **kwargs)


def reference(input, *args, **kwargs):
    """PyTorch's own backward refuses inputs [N, C, d1, ...] with permuted strides on the CPU; ours take them."""
    return torch.nn.functional.nll_loss(input.contiguous(), *args, **kwargs)


SPEC = OpSpec(
    name="nll_loss",
    function=cuda_ops.functional.nll_loss,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers",
            lambda device: cuda_ops.functional.nll_loss(
                torch.ones(2, 3, device=device, dtype=torch.int64), torch.zeros(2, device=device, dtype=torch.int64)
            ),
            RuntimeError,
            "nll_loss: expected input to be floating point, got int64",
        ),
        Bad(
            "int32 target",
            lambda device: call(device, 1, 2, dtype=torch.int32),
            RuntimeError,
            r"nll_loss: expected target to be int64 \(or uint8\) for class indices, got int32",
        ),
        Bad(
            "floating target",
            lambda device: call(device, 1, 2, dtype=torch.float32),
            RuntimeError,
            r"nll_loss: expected target to be int64 \(or uint8\) for class indices, got float32",
        ),
        Bad(
            "another number of samples",
            lambda device: call(device, 1, 2, 3),
            ValueError,
            r"nll_loss: expected target to have shape \[2\] for an input of shape \[2, 10\], got \[3\]",
        ),
        Bad(
            "several targets for one sample",
            lambda device: call(device, 1, 2, shape=(10,)),
            ValueError,
            r"nll_loss: expected target to have shape \[\] for an input of shape \[10\], got \[2\]",
        ),
        Bad(
            "another number of pixels",
            lambda device: call(device, [1], [2], shape=(2, 10, 3)),
            RuntimeError,
            r"nll_loss: expected target to have shape \[2, 3\] for an input of shape \[2, 10, 3\], got \[2, 1\]",
        ),
        Bad(
            "another number of dimensions",
            lambda device: call(device, [1], [2]),
            RuntimeError,
            r"nll_loss: expected target to have shape \[2\] for an input of shape \[2, 10\], got \[2, 1\]",
        ),
        Bad(
            "no classes",
            lambda device: cuda_ops.functional.nll_loss(
                torch.tensor(1.0, device=device), torch.tensor(0, device=device)
            ),
            ValueError,
            r"nll_loss: expected input to have a dimension of classes, got shape \[\]",
        ),
        Bad(
            "weight of another size",
            lambda device: call(device, 1, 2, classes=9),
            RuntimeError,
            r"nll_loss: expected weight to have shape \[10\], one element for each class, got \[9\]",
        ),
        Bad(
            "weight of another dtype",
            lambda device: call(device, 1, 2, weight=torch.ones(10, device=device, dtype=torch.float64)),
            RuntimeError,
            "nll_loss: expected weight to have the dtype of input, float32, got float64",
        ),
        Bad(
            "weight that requires grad",
            lambda device: call(device, 1, 2, weight=torch.ones(10, device=device, requires_grad=True)),
            RuntimeError,
            "nll_loss: expected weight not to require grad with class indices; it is not differentiable",
        ),
        Bad(
            "unknown reduction",
            lambda device: call(device, 1, 2, reduction="median"),
            ValueError,
            "nll_loss: expected reduction to be 'none', 'mean' or 'sum', got 'median'",
        ),
    ],
)
