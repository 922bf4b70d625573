"""Layer normalisation of the rows of a matrix, forward and backward, rung by rung.

    >>> import torch
    >>> from cuda_ops.ladder import layer_norm
    >>> x, weight, bias = torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2)
    >>> output, grad_input, grad_weight, grad_bias = layer_norm.LADDER.rungs["simulated global atomics"](
    ...     x, weight, bias, torch.ones(1, 2)
    ... )
    >>> output
    tensor([[-1.0000,  1.0000]])

Its inputs are input, weight, bias and grad_output. The kernels are in csrc/cuda/layer_norm/ladder/; `python -m cuda_ops
bench ladder layer_norm` measures them, and notebooks/layer_norm.ipynb walks them.
"""

import numpy as np
import torch

from .._library import ops
from . import simulator
from ._ladder import Case, Ladder, Simulated

EPS = 1e-5

# --- kernels for the simulator ---------------------------------------------------------------------------------------
# Written as the .cu files of the same names are; `t` is the thread.


def warp_sum(t, value):
    for apart in (16, 8, 4, 2, 1):
        value += yield t.shfl_xor(value, apart)
    return value


def forward_by_warps_kernel(t, output, mean, rstd, input, weight, bias, rows, columns):
    """csrc/cuda/layer_norm/ladder/01_global_atomics.cu, forward."""
    lane, row = t.threadIdx.x % 32, (t.blockIdx.x * t.blockDim.x + t.threadIdx.x) // 32
    if row >= rows:
        return
    offset, total, squares = row * columns, np.float32(0), np.float32(0)
    for c in range(lane, columns, 32):
        total += input[offset + c]
    average = (yield from warp_sum(t, total)) / np.float32(columns)
    for c in range(lane, columns, 32):
        squares += (input[offset + c] - average) ** 2
    scale = 1 / np.sqrt((yield from warp_sum(t, squares)) / np.float32(columns) + np.float32(EPS))
    for c in range(lane, columns, 32):
        output[offset + c] = (input[offset + c] - average) * scale * weight[c] + bias[c]
    if lane == 0:
        mean[row], rstd[row] = average, scale


def backward_by_warps_kernel(
    t, grad_input, grad_weight, grad_bias, input, weight, grad_output, mean, rstd, rows, columns
):
    """csrc/cuda/layer_norm/ladder/01_global_atomics.cu, backward."""
    lane, row = t.threadIdx.x % 32, (t.blockIdx.x * t.blockDim.x + t.threadIdx.x) // 32
    if row >= rows:
        return
    offset, total, product = row * columns, np.float32(0), np.float32(0)
    average, scale = mean[row], rstd[row]
    for c in range(lane, columns, 32):
        h = grad_output[offset + c] * weight[c]
        total += h
        product += h * (input[offset + c] - average) * scale
    total = (yield from warp_sum(t, total)) / np.float32(columns)
    product = (yield from warp_sum(t, product)) / np.float32(columns)
    for c in range(lane, columns, 32):
        g, xhat = grad_output[offset + c], (input[offset + c] - average) * scale
        grad_input[offset + c] = scale * (g * weight[c] - total - xhat * product)
        t.atomic_add(grad_weight, c, g * xhat)
        t.atomic_add(grad_bias, c, g)


def persistent_grid_kernel(t, grad_input, partials, input, weight, grad_output, mean, rstd, rows, columns):
    """csrc/cuda/layer_norm/ladder/04_persistent_grid.cu: a block goes down the rows, and its threads keep what they
    have of grad_weight and grad_bias. Blocks are warps here, which need no shared memory for their sums."""
    mine = range(t.threadIdx.x, columns, 32)
    grad_weight, grad_bias = (np.zeros(len(mine), np.float32) for _ in range(2))
    for row in range(t.blockIdx.x, rows, t.gridDim.x):
        g = np.array([grad_output[row * columns + c] for c in mine], np.float32)
        xhat = np.array([(input[row * columns + c] - mean[row]) * rstd[row] for c in mine], np.float32)
        h = g * np.array([weight[c] for c in mine], np.float32)
        total = (yield from warp_sum(t, h.sum())) / np.float32(columns)
        product = (yield from warp_sum(t, (h * xhat).sum())) / np.float32(columns)
        for k, c in enumerate(mine):
            grad_input[row * columns + c] = rstd[row] * (h[k] - total - xhat[k] * product)
        grad_weight += g * xhat
        grad_bias += g
    for k, c in enumerate(mine):
        partials[t.blockIdx.x * 2 * columns + c] = grad_weight[k]
        partials[(t.blockIdx.x * 2 + 1) * columns + c] = grad_bias[k]


def blocks_of_rows(input: np.ndarray) -> int:
    """Of two warps, a warp a row."""
    rows, columns = input.shape
    return -(-rows // 2) if columns else 0


def forward(input, weight, bias):
    """Output, and what backward needs of it: mean and rstd."""
    output = np.full(input.shape, np.nan, np.float32)
    mean, rstd = (np.full(len(input), np.nan, np.float32) for _ in range(2))
    inputs = output, mean, rstd, input, weight, bias
    simulator.launch(forward_by_warps_kernel, blocks_of_rows(input), 64, *inputs, *input.shape)
    return output, mean, rstd


def launch(kernel, input, weight, bias, grad_output):
    """Forward, then the kernel, which is backward; the report is the kernel's."""
    output, mean, rstd = forward(input, weight, bias)
    grad_input, grad_weight, grad_bias = np.full_like(input, np.nan), np.zeros_like(weight), np.zeros_like(bias)
    gradients, inputs = (grad_input, grad_weight, grad_bias), (input, weight, grad_output, mean, rstd)
    report = simulator.launch(kernel, blocks_of_rows(input), 64, *gradients, *inputs, *input.shape)
    return (output, *gradients), report


def launch_persistent(kernel, input, weight, bias, grad_output, blocks: int = 4):
    """The same; then the partial sums are added."""
    output, mean, rstd = forward(input, weight, bias)
    blocks = blocks if len(weight) else 0
    grad_input, partials = np.full_like(input, np.nan), np.full((blocks, 2, len(weight)), np.nan, np.float32)
    inputs = input, weight, grad_output, mean, rstd
    report = simulator.launch(kernel, blocks, 32, grad_input, partials, *inputs, *input.shape)
    return (output, grad_input, *partials.sum(0)), report


# --- models ----------------------------------------------------------------------------------------------------------


def two_ways_to_a_variance() -> None:
    """The mean of squares less the square of the mean needs one pass over a row, and loses what the two have in
    common: all digits, where the mean is large. The mean of squared distances needs the mean first."""
    rng = np.random.default_rng(0)
    for mean in (0, 10, 1000, 10000):
        x = (mean + rng.normal(size=4096)).astype(np.float32)
        true = x.astype(np.float64).var()
        one_pass = (x * x).mean() - x.mean() ** 2
        two_passes = ((x - x.mean()) ** 2).mean()
        print(f"mean {mean:5d}: variance {true:.6f}, in one pass {one_pass:9.6f}, in two {two_passes:.6f}")


def where_the_gradients_of_weight_meet() -> None:
    """8192 rows of 4096 columns: additions to each element of grad_weight in memory, and what is written for them."""
    rows, columns, blocks = 8192, 4096, 132
    for rung, additions in (
        ("1, atomics", rows),
        ("2, slabs of 64 rows", rows // 64),
        (f"4, {blocks} blocks that stay", blocks),
    ):
        print(f"rung {rung:<24} {additions:5d} for each column, {2 * 4 * additions * columns / 1e6:7.1f} MB")


def times_a_tensor_is_moved() -> None:
    """Reads and writes of a whole tensor of rows x columns; from the L2, not from memory, where all of them fit."""
    for rung, forward, backward in (
        ("1 and 2 (less the sums)", "3 reads, 1 write", "4 reads, 1 write"),
        ("2, the sums", "", "2 reads"),
        ("3", "1 read, 1 write", "4 reads, 1 write"),
        ("4 and 5", "1 read, 1 write", "2 reads, 1 write"),
    ):
        print(f"rung {rung:<24} forward {forward or '-':<18} backward {backward}")


# --- the ladder ------------------------------------------------------------------------------------------------------


def matrix(rows: int, columns: int, mean: float = 0.25) -> Case:
    def inputs(make):
        input, grad_output = make.normal(rows, columns) + mean, make.normal(rows, columns)
        return input, 1 + 0.5 * make.normal(columns), make.normal(columns), grad_output

    return Case(
        f"{rows}x{columns}" + ("" if mean < 1 else f" of mean {mean:g}"),
        inputs,
        elements=5 * rows * columns,
        bytes=4 * 5 * columns,
    )


def misaligned(rows: int, columns: int) -> Case:
    """The same, from addresses that are no multiples of 16 bytes."""

    def inputs(make):
        matrices = [make.normal(rows * columns + 1)[1:].view(rows, columns) for _ in range(2)]
        return matrices[0], make.normal(columns + 1)[1:], make.normal(columns), matrices[1]

    return Case(f"{rows}x{columns} misaligned", inputs, elements=5 * rows * columns)


def arguments(input, weight, bias, grad_output):
    outputs = [torch.empty_like(t) for t in (input, input, weight, weight)]
    return outputs, [input, weight, bias, grad_output], [EPS]


def parts(input, weight, bias, grad_output):
    """xhat, rstd and h, in float64."""
    x, w, g = input.double(), weight.double(), grad_output.double()
    centred = x - x.mean(1, keepdim=True)
    rstd = (centred.square().mean(1, keepdim=True) + EPS).rsqrt()
    return centred * rstd, rstd, g * w


def reference(input, weight, bias, grad_output):
    if input.numel() == 0:
        return input.double(), input.double(), weight.double() * 0, weight.double() * 0
    xhat, rstd, h = parts(input, weight, bias, grad_output)
    g = grad_output.double()
    grad_input = rstd * (h - h.mean(1, keepdim=True) - xhat * (h * xhat).mean(1, keepdim=True))
    return xhat * weight.double() + bias.double(), grad_input, (g * xhat).sum(0), g.sum(0)


def bound(input, weight, bias, grad_output):
    """Sums of n terms are off by some roots of n roundings of their magnitudes' sum; xhat by that of the mean, which is
    as large as the elements, times rstd, and, relatively, by rstd's."""
    if input.numel() == 0:
        return (0,) * 4
    eps, (rows, columns) = torch.finfo(input.dtype).eps, input.shape
    xhat, rstd, h = parts(input, weight, bias, grad_output)
    w, g = weight.double().abs(), grad_output.double().abs()
    along, down = 8 + 4 * columns**0.5, 8 + 4 * rows**0.5
    largest = input.double().abs().amax(1, keepdim=True)
    of_xhat = eps * (along * xhat.abs() + 4 * (1 + columns**0.5 / 8) * largest * rstd)
    of_output = of_xhat * w + 4 * eps * (xhat.abs() * w + bias.double().abs())
    h_mean, product = h.abs().mean(1, keepdim=True), (h * xhat).abs().mean(1, keepdim=True)
    of_product = (h.abs() * of_xhat).mean(1, keepdim=True)
    of_grad_input = rstd * (
        eps * along * (h.abs() + h_mean + 2 * xhat.abs() * product) + of_xhat * product + xhat.abs() * of_product
    )
    of_grad_weight = eps * down * (g * xhat.abs()).sum(0) + (g * of_xhat).sum(0)
    return of_output, of_grad_input, of_grad_weight, eps * down * g.sum(0)


def eager(input, weight, bias, grad_output):
    shape = [input.shape[1]]
    output, mean, rstd = torch.native_layer_norm(input, shape, weight, bias, EPS)
    gradients = torch.ops.aten.native_layer_norm_backward(
        grad_output, input, shape, mean, rstd, weight, bias, [True, True, True]
    )
    return output, *gradients


def ours(input, weight, bias, grad_output):
    shape = [input.shape[1]]
    output, mean, rstd = ops.layer_norm_forward(input, shape, weight, bias, EPS)
    gradients = ops.layer_norm_backward(
        grad_output, None, input, shape, weight, mean, rstd, EPS, bias.dtype, [True, True, True]
    )
    return output, *gradients


LADDER = Ladder(
    name="layer_norm",
    formula=r"\hat{x} = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}}, \quad y = w\hat{x} + b, \quad "
    r"\frac{\partial}{\partial w_c} = \sum_r g_{rc}\hat{x}_{rc}, \quad \frac{\partial}{\partial b_c} = \sum_r g_{rc}",
    introduction="""Forward and backward in one call, as a training step has them. Rows are easy: mean, variance and
the gradient of the input are sums along a row, and a row has its own threads. The gradients of weight and bias are sums
down the columns, over all rows, and so over all blocks: that is what this ladder is about.""",
    kernels=["global atomics", "partial sums", "registers", "persistent grid", "row ahead"],
    dtypes=(torch.float32,),
    arguments=arguments,
    reference=reference,
    bound=bound,
    tests=[
        *(matrix(*sizes) for sizes in [(1, 1), (3, 33), (13, 37)]),
        *(matrix(*sizes) for sizes in [(0, 5), (5, 0), (1000, 1), (300, 10), (129, 128), (77, 250), (4097, 768)]),
        *(
            matrix(*sizes)
            for sizes in [(65, 1024), (7, 1028), (600, 2052), (5, 4096), (9, 8191), (10, 8192), (7, 8193)]
        ),
        *(matrix(*sizes) for sizes in [(3, 20000), (30001, 12)]),
        matrix(50, 1000, mean=1000.0),
        misaligned(300, 512),
    ],
    cases=[matrix(13, 37), matrix(8192, 768), matrix(8192, 4096), matrix(65537, 1023), matrix(16384, 8192)],
    shown="8192x4096",
    native={"eager": eager},
    ours=ours,
    simulated={
        1: Simulated(backward_by_warps_kernel, launch),
        4: Simulated(persistent_grid_kernel, launch_persistent),
    },
    unrepeatable=(1,),
    models=(two_ways_to_a_variance, where_the_gradients_of_weight_meet, times_a_tensor_is_moved),
)
