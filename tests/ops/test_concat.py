"""concat: what is special to it beside the properties that hold for every op."""

import torch
from support.opspec import Make

import cuda_ops

concat = cuda_ops.functional.concat


def test_empty_vectors_are_passed_over(device):
    """As PyTorch does, whatever the others' dimensions; their gradient is empty too."""
    empty = torch.empty(0, device=device, requires_grad=True)
    x = Make(device, requires_grad=True)(2, 3)
    output = concat([empty, x, empty], 1)
    assert torch.equal(output, x)
    grads = torch.autograd.grad(output.sum(), (empty, x))
    assert grads[0].shape == (0,) and torch.equal(grads[1], torch.ones_like(x))
    assert concat([empty, empty]).shape == (0,)


def test_empty_vectors_alone_have_every_dimension(device):
    """As PyTorch does, which looks at a dimension only of what is not passed over; also in a trace."""
    empty = torch.empty(0, device=device, requires_grad=True)
    for call in (concat, torch.compile(concat, fullgraph=True, backend="aot_eager")):
        for dim in (2, -3):
            output = call([empty, empty], dim)
            assert output.shape == torch.cat([empty, empty], dim).shape == (0,)
            assert torch.autograd.grad(output.sum(), empty)[0].shape == (0,)


def test_memory_format(device):
    """channels_last where all are, else contiguous."""
    x = Make(device)(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    for dim in range(4):
        both, mixed = concat([last, last], dim), concat([last, x], dim)
        assert both.is_contiguous(memory_format=torch.channels_last) and mixed.is_contiguous()
        assert torch.equal(both, torch.cat([x, x], dim)) and torch.equal(mixed, both)


def test_one_tensor_twice(device):
    x = Make(device, requires_grad=True)(3)
    (grad,) = torch.autograd.grad(concat((x, x)), x, torch.arange(6.0, device=device))
    assert grad.tolist() == [3, 5, 7]


def test_more_tensors_than_a_launch_takes(device_dtype):
    device, dtype = device_dtype
    tensors = [Make(device, dtype, seed=i)(3, i % 5) for i in range(600)]
    assert torch.equal(concat(tensors, 1), torch.cat(tensors, 1))


def test_storage_that_starts_anywhere(device_dtype):
    device, dtype = device_dtype
    storage = Make(device, dtype)(1000)
    tensors = [storage[i : i + 24].view(3, 8) for i in range(9)]
    for dim in (0, 1):
        assert torch.equal(concat(tensors, dim), torch.cat(tensors, dim))


def test_forward_mode_of_some(device):
    x, y = Make(device)(2, 3), Make(device, seed=1)(1, 3)
    output, tangent = torch.func.jvp(lambda x: concat([x, y]), (x,), (torch.ones_like(x),))
    assert torch.equal(output, torch.cat([x, y]))
    assert torch.equal(tangent, torch.cat([torch.ones_like(x), torch.zeros_like(y)]))


def test_forward_mode_of_the_second_alone(device):
    x, y = Make(device)(2, 3), Make(device, seed=1)(1, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(y, torch.ones_like(y))
        tangent = torch.autograd.forward_ad.unpack_dual(concat([x, dual])).tangent
    assert torch.equal(tangent, torch.cat([torch.zeros_like(x), torch.ones_like(y)]))


def test_cat_is_concat():
    assert cuda_ops.functional.cat is concat


def test_threads_begin_anywhere_within_the_inputs():
    """Of sizes which no number of threads divides."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.rand(3, cols, 10_007, generator=generator) for cols in (5, 1, 7)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(concat(parts, 1), torch.cat(parts, 1))
    finally:
        torch.set_num_threads(before)
