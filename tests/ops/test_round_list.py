"""round_list: each tensor is what `.to` makes of it, bit by bit, in one launch for 128 of them."""

import math

import pytest
import torch

from cuda_ops.ops.round_list import round_list

HALVES = [torch.bfloat16, torch.float16]
# A scalar, nothing, a chunk of the kernel (4096) less and more one, several chunks, a matrix.
SHAPES = [(), (0,), (3,), (4095,), (4096,), (4097,), (70_001,), (40, 3, 129)]


def random_tensors(shapes, device):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def check(tensors, dtype):
    outputs = round_list(tensors, dtype)
    assert len(outputs) == len(tensors)
    for output, tensor in zip(outputs, tensors, strict=True):
        expected = tensor.detach().to(dtype)
        assert output.is_contiguous() and not output.requires_grad and output.device == tensor.device
        assert torch.equal(output.view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
def test_values(device, dtype):
    tensors = random_tensors(SHAPES, device)
    check(tensors, dtype)
    check([tensor.requires_grad_() for tensor in tensors], dtype)
    assert round_list([], dtype) == []


def test_vmap(device):
    (stack,) = random_tensors([(5, 3, 4)], device)
    found = torch.func.vmap(lambda row: tuple(round_list([row, row[0]], torch.bfloat16)))(stack)
    assert torch.equal(found[0], stack.bfloat16()) and torch.equal(found[1], stack[:, 0].bfloat16())


@pytest.mark.parametrize("dtype", HALVES)
def test_layouts(device, dtype):
    """Gaps, an address off by one element, permuted strides."""
    wide, line, images = random_tensors([(40, 60), (9000,), (3, 4, 5, 6)], device)
    tensors = [
        wide[:, 1:50],
        line[1:],
        images.permute(0, 2, 3, 1),
        images.contiguous(memory_format=torch.channels_last),
    ]
    check(tensors, dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_ends_of_numbers(device, dtype):
    """Ties, what overflows and underflows, infinities; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    values = [
        0.0,
        -0.0,
        1 + 2**-8,
        1 + 3 * 2**-9,
        1 + 2**-11,
        2**-24,
        2**-25,
        1e-40,
        largest,
        largest * (1 + 2**-9),
        3e38,
    ]
    line = torch.tensor([*values, *(-value for value in values), math.inf, -math.inf] * 300, device=device)
    check([line, line[:7]], dtype)
    line[4], line[-1] = math.nan, math.nan
    assert torch.equal(round_list([line], dtype)[0].isnan(), line.isnan())


@pytest.mark.cuda
def test_launches():
    tensors = random_tensors([(100 + i,) for i in range(129)], "cuda")
    check(tensors, torch.bfloat16)
    for count, launches in ((128, 1), (129, 2)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            round_list(tensors[:count], torch.bfloat16)
            torch.cuda.synchronize()
        assert sum("round_list_kernel" in event.name for event in profile.events()) == launches


def test_the_compiler_sees_it(device):
    tensors = random_tensors([(3, 4), (5,)], device)
    torch.library.opcheck(torch.ops.cuda_ops.round_list.default, (tensors, torch.bfloat16))


@pytest.mark.parametrize(
    ("tensors", "dtype", "message"),
    [
        ([torch.ones(2)], torch.float32, "round_list: expected dtype to be float16 or bfloat16, got float32"),
        ([torch.ones(2).double()], torch.float16, "round_list: expected tensors to be float32, got float64"),
    ],
)
def test_refusals(tensors, dtype, message):
    with pytest.raises(RuntimeError, match=message):
        round_list(tensors, dtype)
