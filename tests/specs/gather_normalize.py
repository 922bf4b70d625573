import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops

MEAN, STD = 0.1307, 0.3081


def pictures(make, *shape):
    return make.integers(*shape, high=256).to(torch.uint8)


def sample(make, count, rows, *shape, labels=None, index_dtype=torch.int64, name=""):
    kwargs = {"dtype": make.dtype}
    if labels is not None:
        kwargs["labels"] = make.integers(count, high=10).to(labels)
    indices = make.integers(rows, high=count).to(index_dtype)
    return Sample((pictures(make, count, *shape), indices, MEAN, STD), kwargs, name or f"{rows} of {count} x {shape}")


def samples(make):
    # Rows of a multiple of 16 bytes and not, of one vector, of several segments of a warp, and of none.
    for shape in [(1, 28, 28), (3, 5, 7), (16,), (), (1025,), (3, 64, 64)]:
        yield sample(make, 9, 33, *shape)
    yield sample(make, 100, 64, 1, 28, 28, labels=torch.int64, name="labels")
    yield sample(make, 100, 65, 8, labels=torch.uint8, index_dtype=torch.int32, name="uint8 labels, int32 indices")
    yield sample(make, 1, 1, 4, name="a single image")
    yield sample(make, 300, 5000, 8, labels=torch.int64, name="several blocks")
    first = sample(make, 12, 7, 3, 4, 4, name="channels_last")
    yield first.map(lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)
    strided = sample(make, 12, 14, 6, 8, name="strided images and indices")
    yield strided.map(lambda t: t.transpose(1, 2) if t.dim() == 3 else t[::2])
    # A base that is no multiple of 16 bytes.
    misaligned = sample(make, 12, 5, 16, name="misaligned")
    yield misaligned.map(lambda t: t % 11 if t.dim() == 1 else t.view(-1)[3:-13].view(11, 16))


def small_samples(make):
    yield sample(make, 4, 3, 2, 4)
    yield sample(make, 4, 3, 2, 4, labels=torch.int64)


def empty_samples(make):
    yield sample(make, 4, 0, 2, 3, labels=torch.int64)
    yield sample(make, 4, 3, 0, labels=torch.int64)


def op_samples(make):
    forward = torch.ops.cuda_ops.gather_normalize_forward
    images, indices = pictures(make, 5, 3, 2, 2), make.integers(4, high=5)
    yield forward, (images, indices, MEAN, STD, None, torch.float32)
    yield forward, (images, indices.int(), MEAN, STD, make.integers(5, high=9), torch.float64)
    yield forward, (images.contiguous(memory_format=torch.channels_last), indices, MEAN, STD, None, torch.float32)
    yield forward, (images.transpose(1, 3), indices, MEAN, STD, None, torch.float32)


def reference(images, indices, mean, std, dtype=None, labels=None):
    indices = indices.long()
    output = (images[indices].double() / 255 - mean) / std
    return output if labels is None else (output, labels[indices].long())


def call(device, images=None, indices=None, mean=MEAN, std=STD, **kwargs):
    images = torch.zeros(3, 2, dtype=torch.uint8) if images is None else images
    indices = torch.tensor([0, 2]) if indices is None else indices
    kwargs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    return cuda_ops.functional.gather_normalize(images.to(device), indices.to(device), mean, std, **kwargs)


SPEC = OpSpec(
    name="gather_normalize",
    function=cuda_ops.functional.gather_normalize,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    nonfinite=False,  # bytes are never that
    bad=[
        Bad(
            "floating images",
            lambda device: call(device, torch.zeros(3, 2)),
            RuntimeError,
            "gather_normalize: expected images to be uint8, got float32",
        ),
        Bad(
            "images without a dimension",
            lambda device: call(device, torch.zeros((), dtype=torch.uint8)),
            RuntimeError,
            r"gather_normalize: expected images to have at least one dimension, got shape \[\]",
        ),
        Bad(
            "floating indices",
            lambda device: call(device, indices=torch.zeros(2)),
            RuntimeError,
            "gather_normalize: expected indices to be int64 or int32, got float32",
        ),
        Bad(
            "indices of two dimensions",
            lambda device: call(device, indices=torch.zeros(2, 2, dtype=torch.int64)),
            RuntimeError,
            r"gather_normalize: expected indices to have 1 dimension, got shape \[2, 2\]",
        ),
        Bad(
            "too few labels",
            lambda device: call(device, labels=torch.zeros(2, dtype=torch.int64)),
            RuntimeError,
            r"gather_normalize: expected labels to have shape \[3\], one for each image, got \[2\]",
        ),
        Bad(
            "floating labels",
            lambda device: call(device, labels=torch.zeros(3)),
            RuntimeError,
            "gather_normalize: expected labels to be int64 or uint8, got float32",
        ),
        Bad(
            "std of 0", lambda device: call(device, std=0.0), ValueError, "expected std to be above 0 and finite, got 0"
        ),
        Bad("mean of NaN", lambda device: call(device, mean=float("nan")), ValueError, "expected mean to be finite"),
        Bad(
            "a mean for each channel",
            lambda device: call(device, mean=[0.1, 0.2]),
            NotImplementedError,
            "gather_normalize: expected mean to be one number, got list of 2",
        ),
        Bad("mean in words", lambda device: call(device, mean="x"), TypeError, "expected mean to be a number, got 'x'"),
        Bad(
            "integers",
            lambda device: call(device, dtype=torch.int32),
            RuntimeError,
            "gather_normalize: expected dtype to be floating point, got int32",
        ),
    ],
)
