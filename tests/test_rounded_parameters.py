"""Parameters under autocast, which the first layer that is called has rounded for all of them
(csrc/torch/rounded_parameters.h): they are what PyTorch's casts one by one give."""

import copy

import pytest
import torch

import cuda_ops

nn = cuda_ops.nn


class Model(torch.nn.Module):
    """Weights in both formats, with biases and without, of layers of several ops."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 4, 1, bias=False).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(4, 6)
        self.tied = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        self.takes_spare = True

    def forward(self, x):
        x = self.last(self.conv(x)).mean((2, 3))
        x = self.tied(torch.tanh(self.tied(self.linear(x))))
        return self.spare(x) if self.takes_spare else x


@pytest.fixture
def model(device):
    return Model().to(device)


@pytest.fixture
def images(device):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)


def autocast(images, together=True, dtype=torch.bfloat16):
    """Without its cache every layer casts its own."""
    return torch.autocast(images.device.type, dtype, cache_enabled=together)


def results(model, images, together, dtype=torch.bfloat16):
    model.zero_grad()
    with autocast(images, together, dtype):
        output = model(images)
    output.float().square().sum().backward()
    return [output, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@torch.no_grad()
def output_of(model, images, together, dtype=torch.bfloat16):
    with autocast(images, together, dtype):
        return model(images)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_those_of_casts_one_by_one(model, images, dtype):
    for step in range(3):  # the first learns which there are
        assert_same([output_of(model, images, True, dtype)], [output_of(model, images, False, dtype)])
        model.tied = nn.Linear(6, 6).to(images.device) if step == 1 else model.tied


def test_gradients_are_those_of_casts_one_by_one(model, images):
    model.tied = torch.nn.Identity()  # whose two gradients would be summed in float32 here, and in halves there
    expected = results(model, images, False)
    for _ in range(3):
        assert_same(results(model, images, True), expected)
    model.spare.weight.requires_grad_(False)
    expected = results(model, images, False)
    for _ in range(2):
        assert_same(results(model, images, True), expected)


def test_gradients_of_a_weight_that_two_calls_use(model, images):
    reference = results(copy.deepcopy(model), images, False)
    for _ in range(2):
        for a, b in zip(results(model, images, True), reference, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_what_is_written_between_passes_is_seen(model, images):
    def check():
        assert_same([output_of(model, images, True)], [output_of(model, images, False)])

    check()
    with torch.no_grad():
        model.linear.weight.mul_(2)
    check()
    model.linear.weight.data.mul_(2)
    check()
    model.linear.weight.data = model.linear.weight.data * 2
    check()
    model.linear.weight = torch.nn.Parameter(model.linear.weight.detach() * 2)
    check()
    model.takes_spare = False
    check(), check()
    model.takes_spare = True
    check(), check()
    model.double().float()
    check()


def test_what_is_written_under_the_same_autocast_is_seen(model, images):
    output_of(model, images, True)
    with torch.no_grad(), autocast(images):
        model.conv(images)  # and all others are rounded
        model.linear.weight.mul_(2)
        model.tied.weight.data = model.tied.weight.data * 2
        found = model(images)
    assert_same([found], [output_of(model, images, False)])


def test_parameters_whose_memory_comes_and_goes(model, images):
    """As FSDP's do: it is there while their layer runs, and no version tells."""
    weight = model.linear.weight
    expected, kept = output_of(model, images, False), weight.detach().clone()

    def bring(module, arguments):
        weight.untyped_storage().resize_(kept.untyped_storage().nbytes())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(kept)

    def drop(module, arguments, output):
        weight.untyped_storage().resize_(0)

    model.linear.register_forward_pre_hook(bring)
    model.linear.register_forward_hook(drop)
    for _ in range(4):
        assert_same([output_of(model, images, True)], [expected])


def test_gradients_after_a_pass_without_them(model, images):
    model.tied = torch.nn.Identity()
    expected = results(model, images, False)
    for without in (torch.no_grad, torch.inference_mode):
        model.zero_grad()
        with autocast(images):
            with without():
                model(images)
            output = model(images)
        output.float().square().sum().backward()
        assert_same([output, *(p.grad for p in model.parameters())], expected)


def test_second_derivatives(model, images):
    def penalty(together):
        model.zero_grad()
        x = images.clone().requires_grad_()
        with autocast(images, together):
            output = model(x)
        (grad,) = torch.autograd.grad(output.float().square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = penalty(False)
    penalty(True)
    for a, b in zip(penalty(True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * float(b.abs().max()))


def test_another_dtype_under_the_same_autocast(model, images):
    output_of(model, images, True)
    with torch.no_grad(), autocast(images):
        model(images)
        with autocast(images, dtype=torch.float16):
            found = model(images)
    assert_same([found], [output_of(model, images, False, torch.float16)])


def casts(function):
    """How often PyTorch casted a tensor."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(event.name == "aten::to" for event in profile.events())


def test_later_passes_cast_no_parameter_by_itself(model, images):
    x = images.to(torch.bfloat16)
    model.takes_spare = False
    alone = casts(lambda: output_of(model, x, False))
    assert alone >= 8
    output_of(model, x, True)
    # One of a tensor that tells when autocast is left.
    assert casts(lambda: output_of(model, x, True)) <= alone - 7
    assert casts(lambda: results(model, x, True)) < casts(lambda: results(model, x, False)) - 7


@pytest.fixture
def on_cuda():
    torch.manual_seed(1)
    return Model().cuda(), torch.randn(2, 3, 8, 8, device="cuda")


@pytest.mark.cuda
def test_copies_go_when_autocast_is_left(on_cuda):
    output_of(*on_cuda, True)
    before = torch.cuda.memory_allocated()
    output_of(*on_cuda, True)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.cuda
def test_copies_of_another_stream_are_not_taken(on_cuda):
    model, images = on_cuda
    expected = output_of(model, images, False)
    output_of(model, images, True)
    side = torch.cuda.Stream()
    with torch.no_grad(), autocast(images):
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(10_000_000)
        model(images)  # which rounds behind the sleep
        with torch.cuda.stream(side):
            found = model(images)
    torch.cuda.synchronize()
    assert_same([found], [expected])


@pytest.mark.cuda
def test_graphs_round_anew(on_cuda):
    model, images = on_cuda
    output_of(model, images, True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        output_of(model, images, True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = output_of(model, images, True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    graph.replay()
    assert_same([found], [output_of(model, images, False)])
