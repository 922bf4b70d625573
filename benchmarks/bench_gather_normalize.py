import torch
from harness import Bench, Case, Implementation

from cuda_ops.functional import gather_normalize

MEAN, STD = 0.1307, 0.3081


def eager(images, indices, dtype):
    return images[indices].to(dtype).sub_(MEAN * 255).div_(STD * 255)


def table(images, indices, dtype):
    """The conversion as a look-up of 256 values: two kernels."""
    values = torch.arange(256, device=images.device, dtype=torch.float32).sub_(MEAN * 255).div_(STD * 255).to(dtype)
    return values[images[indices].int()]


def case(count, rows, *shape):
    pixels = rows * torch.Size(shape).numel()
    return Case(
        f"{rows} of {count}x{'x'.join(map(str, shape))}",
        lambda make: (
            make.integers(count, *shape, high=256).to(torch.uint8),
            make.integers(rows, high=count),
            make.dtype,
        ),
        elements=(pixels, 0),
        bytes=(pixels + 8 * rows, 0),
    )


BENCH = Bench(
    op="gather_normalize",
    ours=Implementation("ours", lambda images, indices, dtype: gather_normalize(images, indices, MEAN, STD, dtype)),
    native=[Implementation("eager", eager), Implementation("table", table)],
    cases=[case(60000, rows, 1, 28, 28) for rows in (64, 1024, 16384)] + [case(2000, 64, 3, 224, 224)],
    backward=False,
)
