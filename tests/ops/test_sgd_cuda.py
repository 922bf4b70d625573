"""SGD on CUDA: launches, alignment, graphs, streams, devices, gradient scaling, more than 2^31 elements."""

import pytest
import torch
from support.opspec import RELATIVE_NORM, assert_close
from support.sgd_cases import SHAPES, assert_same_run, parameters, random_tensors, set_grads

import cuda_ops

SGD = cuda_ops.optim.SGD
pytestmark = pytest.mark.cuda


def count_kernels(function):
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        function()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if "sgd_kernel" in e.name]


@pytest.mark.parametrize(("tensors", "launches"), [(1, 1), (96, 1), (97, 2), (200, 3)])
def test_one_launch_for_the_whole_list(tensors, launches):
    mine = parameters([(7, i % 5) for i in range(tensors)], device="cuda", dtype=torch.float32)
    theirs = parameters([(7, i % 5) for i in range(tensors)], device="cuda", dtype=torch.float32)
    ours, native = SGD(mine, momentum=0.9), torch.optim.SGD(theirs, momentum=0.9)
    for step in range(2):
        set_grads(mine, step)
        set_grads(theirs, step)
        kernels = count_kernels(ours.step)
        native.step()
    empty = sum(1 for p in mine if p.numel() == 0)
    assert len(kernels) == -(-(tensors - empty) // 96) <= launches
    assert_same_run(ours, native, 1e-6)


def test_misaligned_parameters():
    """Contiguous, but off by one element: no 16-byte loads."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        storage, other = (torch.randn(5001, device="cuda", dtype=dtype) for _ in range(2))
        expected = torch.nn.Parameter(storage[1:].double().clone())
        expected.grad = other[1:].double().clone()
        param = torch.nn.Parameter(storage[1:])
        param.grad = other[1:]
        torch.optim.SGD([expected], lr=0.1, momentum=0.9, nesterov=True).step()
        SGD([param], lr=0.1, momentum=0.9, nesterov=True).step()
        assert_close(param.detach(), expected.detach(), RELATIVE_NORM[dtype])


def test_cuda_graph_follows_lr_and_gradients():
    lr = torch.tensor(0.1, device="cuda")
    mine, theirs = parameters(device="cuda"), parameters(device="cuda")
    ours = SGD(mine, lr=lr, momentum=0.9, weight_decay=0.1)
    native = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.1)
    set_grads(mine, 0)
    set_grads(theirs, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours.step()
    native.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for step, value in enumerate([0.1, 0.02, 0.3]):
        lr.fill_(value)
        native.param_groups[0]["lr"] = value
        for p, e, grad in zip(mine, theirs, random_tensors(SHAPES, step + 1, "cuda"), strict=True):
            p.grad.copy_(grad)
            e.grad.copy_(grad)
        graph.replay()
        native.step()
    # lr is 0.1f on the device and 0.1 beside, and each of the steps rounds to float32.
    assert_same_run(ours, native, 1e-6)


def test_side_stream():
    mine, theirs = parameters(device="cuda"), parameters(device="cuda")
    set_grads(theirs, 1)
    torch.optim.SGD(theirs, lr=0.1).step()
    grads = random_tensors(SHAPES, 1, "cuda")
    for p in mine:
        p.grad = torch.zeros_like(p)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for p, grad in zip(mine, grads, strict=True):
            p.grad.copy_(grad)
        SGD(mine, lr=0.1).step()
    stream.synchronize()
    for p, e in zip(mine, theirs, strict=True):
        assert_close(p.detach(), e.detach().double(), 1e-14)


def test_parameters_on_both_devices():
    here, there = parameters([(3,), (5,)]), parameters([(3,), (5,)], device="cuda")
    optimizer = SGD(here + there, lr=0.1, momentum=0.9)
    for step in range(2):
        set_grads(here, step)
        set_grads(there, step)
        optimizer.step()
    for p, q in zip(here, there, strict=True):
        assert_close(q.detach(), p.detach(), 1e-14)


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    params = parameters([(3,)], device="cuda:1")
    expected = parameters([(3,)])
    set_grads(params, 1)
    set_grads(expected, 1)
    with torch.cuda.device(0):
        SGD(params, lr=torch.tensor(0.5, device="cuda:0")).step()
    torch.optim.SGD(expected, lr=0.5).step()
    assert_close(params[0].detach(), expected[0].detach(), 1e-14)


def test_gradient_scaler():
    """GradScaler unscales for us, and skips the step where a gradient is infinite."""
    for fused in (None, True):
        params = parameters([(3,)], device="cuda", dtype=torch.float32)
        optimizer = SGD(params, lr=1.0, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        before = params[0].detach().clone()
        scaler.scale(params[0].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(params[0], before - 1)
        params[0].grad.fill_(float("inf"))
        scaler.scale(params[0].sum())
        scaler.step(optimizer)
        assert torch.equal(params[0], before - 1)


@pytest.mark.large
def test_more_than_2_31_elements():
    param = torch.nn.Parameter(torch.zeros(2**31 + 5, device="cuda", dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    param.grad[-7:] = 1
    SGD([param], lr=1.0).step()
    assert (param.detach()[-7:] == -1).all()
    assert (param.detach()[:-7] == 0).all()
