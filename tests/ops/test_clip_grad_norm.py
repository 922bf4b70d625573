"""cuda_ops.nn.utils.clip_grad_norm_ beside torch.nn.utils': norms, scaling, layouts, refusals; launches on CUDA."""

import math

import pytest
import torch
from cuda_ops.nn.utils import clip_grad_norm_
from support.opspec import RELATIVE_NORM, assert_close
from support.sgd_cases import flat, random_tensors

# A scalar, nothing, a chunk of the kernel (4096) less and more one, several chunks and tasks, images.
SHAPES = [(), (0,), (3,), (4095,), (4096,), (4097,), (70_001,), (4, 3, 2, 5)]
TYPES = [2.0, 1.0, math.inf, 3, 0.5]


def parameters(device="cpu", dtype=torch.float64, shapes=SHAPES):
    params = [torch.nn.Parameter(t) for t in random_tensors(shapes, 0, device, dtype)]
    for p, grad in zip(params, random_tensors(shapes, 1, device, dtype), strict=True):
        p.grad = grad
    return [*params, torch.nn.Parameter(torch.ones(2, device=device, dtype=dtype))]  # one without a gradient


def reference(params, *args):
    copies = []
    for p in params:
        copies.append(torch.nn.Parameter(p.detach().cpu().double()))
        copies[-1].grad = None if p.grad is None else p.grad.cpu().double().clone()
    # PyTorch knows no largest element of nothing.
    norm = torch.nn.utils.clip_grad_norm_([c for c in copies if c.numel() > 0], *args)
    return norm, [c.grad for c in copies if c.grad is not None]


def check(params, dtype, *args):
    norm, grads = reference(params, *args)
    ours = clip_grad_norm_(params, *args)
    assert ours.dtype == dtype and ours.shape == () and ours.device == params[0].device
    assert_close(ours, norm, RELATIVE_NORM[dtype])
    assert_close(flat([p.grad for p in params if p.grad is not None]), flat(grads), RELATIVE_NORM[dtype])


@pytest.mark.parametrize("norm_type", TYPES)
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e9])
def test_values(device_dtype, norm_type, max_norm):
    device, dtype = device_dtype
    if dtype == torch.float16 and norm_type == 0.5:
        pytest.skip("the norm is beyond float16")
    check(parameters(device, dtype), dtype, max_norm, norm_type)


def test_gradients_below_the_limit_keep_their_bits(device):
    params = parameters(device, torch.float32)
    before = [p.grad.clone() for p in params if p.grad is not None]
    clip_grad_norm_(params, 1e9)
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=False))


def test_layouts(device):
    """Gaps, an address off by one element, permuted strides, negative views."""
    wide = random_tensors([(40, 60), (4097,), (3, 4, 5, 6), (5,)], 1, device)
    complex_ = torch.complex(*random_tensors([(7,), (7,)], 2, device))
    grads = [wide[0][:, ::2], wide[1][1:], wide[2].permute(0, 2, 3, 1), wide[3], complex_.conj().imag]
    assert grads[-1].is_neg()
    params = [torch.nn.Parameter(torch.zeros_like(g, memory_format=torch.preserve_format)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    untouched = wide[0][:, 1::2].clone()
    check(params, torch.float64, 0.5)
    assert torch.equal(wide[0][:, 1::2], untouched)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", TYPES)
def test_nonfinite(device, value, norm_type):
    params = parameters(device, torch.float32)
    params[5].grad[4095] = value
    grads = [p.grad.clone() for p in params if p.grad is not None]
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: expected gradients of a finite norm, got (nan|inf)"):
        clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    for p, g in zip(params, grads, strict=False):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)
    norm, expected = reference(params, 1.0, norm_type)
    ours = clip_grad_norm_(params, 1.0, norm_type)
    assert_close(ours, norm, 1e-6)
    for p, e in zip(params, expected, strict=False):
        assert torch.equal(p.grad.isnan().cpu(), e.isnan())


def test_mixed_dtypes(device):
    params = parameters(device, torch.float32) + parameters(device, torch.float64, [(5,), (5000,)])
    norm, grads = reference(params, 0.5)
    ours = clip_grad_norm_(params, 0.5)
    assert ours.dtype == torch.float64
    assert_close(ours, norm, 1e-6)
    for p, g in zip([p for p in params if p.grad is not None], grads, strict=True):
        assert_close(p.grad, g, 1e-6)


def test_single_tensors_generators_and_nothing():
    param = parameters(shapes=[(3,)])[0]
    norm = param.grad.norm()
    assert_close(clip_grad_norm_(param, 1.0), norm, 1e-12)
    assert_close(clip_grad_norm_((p for p in [param]), 1.0), param.grad.norm(), 1e-12)
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0) == 0
    with pytest.warns(UserWarning, match="empty generator"):
        assert clip_grad_norm_((p for p in []), 1.0) == 0


def test_what_is_not_supported_is_refused_by_name():
    params = parameters(shapes=[(3,)])
    for norm_type in (0, -1, -math.inf, math.nan):
        with pytest.raises(NotImplementedError, match="clip_grad_norm_: expected norm_type to be greater than 0, got"):
            clip_grad_norm_(params, 1.0, norm_type)
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        NotImplementedError, match=r"clip_grad_norm_: expected dense gradients, got one of layout torch"
    ):
        clip_grad_norm_(embedding.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="clip_grad_norm_: expected grads to be floating point, got complex64"):
        clip_grad_norm_(parameters(dtype=torch.complex64, shapes=[(3,)]), 1.0)


def test_any_number_of_threads_gives_the_same_bits():
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            params = parameters(dtype=torch.float32)
            norm = clip_grad_norm_(params, 1.0)
            results.append(torch.cat([norm[None], *[p.grad.reshape(-1) for p in params[:-1]]]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], r) for r in results)


def test_opcheck(device):
    grads = [p.grad for p in parameters(device, torch.float32, [(3,), (0,), (5000,)])[:-1]]
    torch.library.opcheck(torch.ops.cuda_ops.clip_grad_norm_partials, (grads, 2.0))
    partials = torch.ops.cuda_ops.clip_grad_norm_partials(grads, 2.0)
    torch.library.opcheck(torch.ops.cuda_ops.clip_grad_norm_scale_, (grads, partials, 2.0, 1.0, torch.float32))


@pytest.mark.cuda
@pytest.mark.parametrize(("tensors", "launches"), [(1, 1), (180, 1), (181, 2)])
def test_two_launches_without_a_wait(tensors, launches):
    params = parameters("cuda", torch.float32, [(7,)] * tensors)
    expected = reference(params, 1.0)[1]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            clip_grad_norm_(params, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    names = [e.name for e in profile.events()]
    assert sum("grad_norm_kernel" in name for name in names) == launches
    assert sum("clip_grads_kernel" in name for name in names) == launches
    assert_close(flat([p.grad for p in params[:-1]]), flat(expected), 1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_more_chunks_than_blocks_repeat_bitwise(dtype):
    """Blocks go through several chunks, of several gradients, aligned and not."""
    shapes = [(3_000_001,), (5,), (2_000_000,), (4096,)]
    results = []
    for _ in range(10):
        params = parameters("cuda", dtype, shapes)
        params[2].grad = torch.cat([params[2].grad, params[2].grad[:1]])[1:]
        params[2].data = params[2].data.clone()
        check(params, dtype, 0.5) if not results else clip_grad_norm_(params, 0.5)
        results.append(torch.cat([p.grad.reshape(-1) for p in params[:-1]]))
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.cuda
def test_cuda_graph():
    params = parameters("cuda", torch.float32)
    fresh = [p.grad.clone() for p in params[:-1]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        clip_grad_norm_(params, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(params, 1.0)
    for factor in (1.0, 1e-6, 3.0):
        for p, g in zip(params, fresh, strict=False):
            p.grad.copy_(g * factor)
        expected, grads = reference(params, 1.0)
        graph.replay()
        assert_close(norm, expected, 1e-6)
        assert_close(flat([p.grad for p in params[:-1]]), flat(grads), 1e-6)


@pytest.mark.cuda
def test_gradients_on_both_devices():
    params = parameters("cpu", torch.float64, [(5,), (5000,)])[:-1] + parameters("cuda", torch.float64, [(7,)])[:-1]
    norm, grads = reference(params, 0.5)
    ours = clip_grad_norm_(params, 0.5)
    assert ours.device.type == "cpu"
    assert_close(ours, norm, 1e-12)
    for p, g in zip(params, grads, strict=True):
        assert_close(p.grad, g, 1e-12)
