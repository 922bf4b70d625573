import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def weights(make, classes, requires_grad=False):
    return make(classes, low=0.1, high=1.0, requires_grad=requires_grad)


def probabilities(make, *shape):
    return make(*shape, low=0.0, high=1.0)


def samples(make):
    for reduction in ("none", "mean", "sum"):
        kwargs = {"reduction": reduction}
        yield Sample((make(7, 10), make.integers(7, high=10)), kwargs, f"rows, {reduction}")
        yield Sample((make(3, 40, 65), make.integers(3, 65, high=40)), kwargs, f"columns, {reduction}")
        yield Sample(
            (make(7, 10), make.integers(7, high=10)),
            {**kwargs, "weight": weights(make, 10), "ignore_index": 3},
            f"weight, ignore_index among the classes, {reduction}",
        )
        yield Sample(
            (make(2, 5, 3, 4), make.integers(2, 3, 4, high=5)),
            {**kwargs, "weight": weights(make, 5), "ignore_index": 1, "label_smoothing": 0.1},
            f"images, weight, ignore_index, smoothing, {reduction}",
        )
        yield Sample(
            (make(6, 33), make.integers(6, high=33)), {**kwargs, "label_smoothing": 0.3}, f"smoothing, {reduction}"
        )
        yield Sample((make(5, 12), probabilities(make, 5, 12)), kwargs, f"probabilities, {reduction}")
        yield Sample(
            (make(2, 5, 3, 4), probabilities(make, 2, 5, 3, 4)),
            {**kwargs, "weight": weights(make, 5, make.requires_grad), "label_smoothing": 0.2},
            f"probabilities of images, weight, smoothing, {reduction}",
        )
        yield Sample((make(9), make.integers(high=9)), kwargs, f"one sample without a batch, {reduction}")
    # Rows around the sizes where another kernel takes over; long ones, also as columns.
    for classes in (1, 2, 31, 32, 1023, 1024, 1025, 5003):
        yield Sample((make(3, classes), make.integers(3, high=classes)), name=f"{classes} classes")
    yield Sample(
        (make(3, 1500), make.integers(3, high=1500), weights(make, 1500)), {"label_smoothing": 0.1}, "many, smoothed"
    )
    yield Sample((make(2, 1100, 3), probabilities(make, 2, 1100, 3)), name="many probabilities as columns")
    yield Sample((make(2000, 10), make.integers(2000, high=10)), name="several blocks and tasks")
    yield Sample((make(3, 4), torch.tensor([3, -100, 2], device=make.device)), name="the default ignore_index")
    yield Sample((make(3, 4), torch.tensor([3, 0, 2], device=make.device, dtype=torch.uint8)), name="uint8")
    yield Sample((make(3, 4), make.integers(3, high=4)), {"label_smoothing": 1.0}, "nothing but smoothing")
    yield Sample((make(3, 4), torch.full((3,), 2, device=make.device)), {"ignore_index": 2}, "a mean over nothing")
    yield Sample(
        (make(3, 4), torch.full((3,), 2, device=make.device), weights(make, 4)),
        {"ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1},
        "a sum over nothing",
    )
    yield Sample((make(4, 10, low=-1e4, high=1e4), make.integers(4, high=10)), name="huge")
    yield Sample((make(4, 10, low=9999, high=10001), make.integers(4, high=10)), name="huge, but near each other")


def small_samples(make):
    target = torch.tensor([1, -100, 3], device=make.device)
    for reduction in ("none", "mean", "sum"):
        kwargs = {"reduction": reduction}
        yield Sample((make(3, 4), target, weights(make, 4)), kwargs, f"weight, {reduction}")
        yield Sample(
            (make(3, 4), target, weights(make, 4)), {**kwargs, "label_smoothing": 0.2}, f"smoothing, {reduction}"
        )
        yield Sample(
            (make(2, 3), probabilities(make, 2, 3), weights(make, 3, make.requires_grad)),
            {**kwargs, "label_smoothing": 0.1},
            f"probabilities, {reduction}",
        )
    yield Sample((make(2, 3, 2), make.integers(2, 2, high=3)), name="columns")
    yield Sample((make(2, 3, 2), probabilities(make, 2, 3, 2)), name="probabilities of columns")
    yield Sample((make(4), make.integers(high=4)), name="one sample without a batch")
    yield Sample((make(4), probabilities(make, 4)), name="probabilities of one sample")


def empty_samples(make):
    for reduction in ("none", "mean", "sum"):
        kwargs = {"reduction": reduction}
        yield Sample((make(0, 3), make.integers(0, high=3)), kwargs)
        yield Sample((make(0, 3), probabilities(make, 0, 3)), kwargs)
        yield Sample((make(2, 3, 0), make.integers(2, 0, high=3)), kwargs)
        yield Sample((make(2, 0), torch.full((2,), -100, device=make.device)), kwargs)
        yield Sample((make(2, 0), probabilities(make, 2, 0)), kwargs)


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.cross_entropy_forward, torch.ops.cuda_ops.cross_entropy_backward
    target, pixels = make.integers(3, high=4), make.integers(2, 5, high=3)
    for arguments in [
        (make(3, 4), target, None, 0, -100, 0.0),
        (make(3, 4), target, weights(make, 4), 1, 2, 0.1),
        (make(2, 5, 3).transpose(1, 2), pixels, None, 2, -100, 0.0),
        (make(3, 4).t(), probabilities(make, 4, 3), None, 1, -100, 0.0),
    ]:
        yield forward, arguments
        input, target, weight, *rest = arguments
        loss, statistics, total_weight = forward(*arguments)
        yield backward, (torch.ones_like(loss), input, target, weight, statistics, total_weight, *rest)


def call(device, *target, shape=(2, 10), dtype=torch.int64, **kwargs):
    input = torch.ones(shape, device=device)
    return cuda_ops.functional.cross_entropy(input, torch.tensor(target, device=device, dtype=dtype), **kwargs)


def call_probabilities(device, *shape, dtype=torch.float32, **kwargs):
    input, target = torch.ones(2, 3, device=device), torch.ones(shape, device=device, dtype=dtype)
    return cuda_ops.functional.cross_entropy(input, target, **kwargs)


SPEC = OpSpec(
    name="cross_entropy",
    function=cuda_ops.functional.cross_entropy,
    reference=torch.nn.functional.cross_entropy,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers beside probabilities",
            lambda device: cuda_ops.functional.cross_entropy(
                torch.ones(2, 3, device=device, dtype=torch.int64), torch.ones(2, 3, device=device)
            ),
            RuntimeError,
            "cross_entropy: expected input to be floating point, got int64",
        ),
        Bad(
            "integers",
            lambda device: cuda_ops.functional.cross_entropy(
                torch.ones(2, 3, device=device, dtype=torch.int64), torch.zeros(2, device=device, dtype=torch.int64)
            ),
            RuntimeError,
            "cross_entropy: expected input to be floating point, got int64",
        ),
        Bad(
            "int32 target",
            lambda device: call(device, 1, 2, dtype=torch.int32),
            RuntimeError,
            r"cross_entropy: expected target to be int64 \(or uint8\) for class indices, got int32",
        ),
        Bad(
            "floating indices",
            lambda device: call(device, 1, 2, dtype=torch.float32),
            RuntimeError,
            r"cross_entropy: expected target to be int64 of shape \[2\] \(class indices\) or floating point of shape "
            r"\[2, 10\] \(class probabilities\), got float32 of shape \[2\]",
        ),
        Bad(
            "integer probabilities",
            lambda device: call_probabilities(device, 2, 3, dtype=torch.int64),
            RuntimeError,
            "cross_entropy: expected target, which has the shape of input, to hold class probabilities in "
            "floating point, got int64",
        ),
        Bad(
            "ignore_index with probabilities",
            lambda device: call_probabilities(device, 2, 3, ignore_index=1),
            RuntimeError,
            "cross_entropy: expected ignore_index to be negative with class probabilities, which have no index to "
            "ignore, got 1",
        ),
        Bad(
            "another number of samples",
            lambda device: call(device, 1, 2, 3),
            ValueError,
            r"cross_entropy: expected target to have shape \[2\] for an input of shape \[2, 10\], got \[3\]",
        ),
        Bad(
            "another number of pixels",
            lambda device: call(device, [1], [2], shape=(2, 10, 3)),
            RuntimeError,
            r"cross_entropy: expected target to have shape \[2, 3\] for an input of shape \[2, 10, 3\], got \[2, 1\]",
        ),
        Bad(
            "no classes",
            lambda device: cuda_ops.functional.cross_entropy(
                torch.tensor(1.0, device=device), torch.tensor(0, device=device)
            ),
            ValueError,
            r"cross_entropy: expected input to have a dimension of classes, got shape \[\]",
        ),
        Bad(
            "weight of another size",
            lambda device: call(device, 1, 2, weight=torch.ones(9, device=device)),
            RuntimeError,
            r"cross_entropy: expected weight to have shape \[10\], one element for each class, got \[9\]",
        ),
        Bad(
            "weight of another size with probabilities",
            lambda device: call_probabilities(device, 2, 3, weight=torch.ones(2, device=device)),
            RuntimeError,
            r"cross_entropy: expected weight to have shape \[3\], one element for each class, got \[2\]",
        ),
        Bad(
            "weight that requires grad",
            lambda device: call(device, 1, 2, weight=torch.ones(10, device=device, requires_grad=True)),
            RuntimeError,
            "cross_entropy: expected weight not to require grad with class indices; it is not differentiable",
        ),
        Bad(
            "label_smoothing above 1",
            lambda device: call(device, 1, 2, label_smoothing=1.1),
            RuntimeError,
            r"cross_entropy: expected label_smoothing to be in \[0, 1\], got 1.1",
        ),
        Bad(
            "negative label_smoothing",
            lambda device: call_probabilities(device, 2, 3, label_smoothing=-0.1),
            RuntimeError,
            r"cross_entropy: expected label_smoothing to be in \[0, 1\], got -0.1",
        ),
        Bad(
            "unknown reduction",
            lambda device: call(device, 1, 2, reduction="median"),
            ValueError,
            "cross_entropy: expected reduction to be 'none', 'mean' or 'sum', got 'median'",
        ),
    ],
)
