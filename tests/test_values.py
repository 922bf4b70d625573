"""Outputs and gradients of every op against float64 PyTorch, in every dtype, layout and mix of layouts."""

import pytest
import torch
from support.opspec import (
    Make,
    as_tuple,
    assert_close,
    random_grad_outputs,
    run_with_gradients,
    upcast,
)


def in_layout(tensor, layout, expanded_dim=0):
    """A tensor with the values of `tensor` (but for 'expanded') whose strides or address are unusual."""
    t = tensor.detach()
    if t.dim() == 0 or not t.is_floating_point():
        return tensor
    if layout == "transposed" and t.dim() >= 2:
        t = t.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif layout == "reversed" and t.dim() >= 2:  # as after .permute: the first dimension has the smallest stride
        order = tuple(reversed(range(t.dim())))
        t = t.permute(order).contiguous().permute(order)
    elif layout == "strided":  # every other element of a larger tensor, as after x[..., ::2]
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
        wide[..., ::2] = t
        t = wide[..., ::2]
    elif layout == "chunk":  # a slice of a larger tensor along dimension 1, as after .chunk(2, 1)
        if t.dim() >= 2:
            both = torch.cat([torch.full_like(t, float("nan")), t], 1)
            t = both[:, t.shape[1] :]
    elif layout == "misaligned":  # contiguous, but one element past an aligned address
        buffer = t.new_empty(t.numel() + 1)
        buffer[1:] = t.reshape(-1)
        t = buffer[1:].view(t.shape)
    elif layout == "expanded":  # stride 0
        if t.shape[expanded_dim] > 0:
            t = t.narrow(expanded_dim, 0, 1).expand(t.shape)
    elif layout == "channels_last" and t.dim() == 4:
        t = t.contiguous(memory_format=torch.channels_last)
    return t.requires_grad_(tensor.requires_grad)


def changes(layout, tensors, expanded_dim=0):
    """Whether any of them lies otherwise in that layout. If not, `check` would repeat another test's call: a row alone
    has no transposed layout, and what is no image no channels_last."""

    def place(tensor):
        return tensor.data_ptr(), tensor.stride()

    return any(place(in_layout(t, layout, expanded_dim)) != place(t) for t in tensors)


LAYOUTS = ["transposed", "reversed", "strided", "chunk", "misaligned", "expanded", "channels_last"]


def test_layouts_that_change_nothing_are_known():
    row, matrix, image = torch.rand(6), torch.rand(2, 3), torch.rand(2, 3, 4, 5)
    unchanged = {layout: [t.dim() for t in (row, matrix, image) if not changes(layout, [t])] for layout in LAYOUTS}
    of_no_row = {layout: [1] for layout in ("transposed", "reversed", "chunk")}
    assert unchanged == {layout: of_no_row.get(layout, []) for layout in LAYOUTS} | {"channels_last": [1, 2]}
    assert changes("channels_last", [row, image]) and not changes("strided", [torch.arange(3)])


def check(spec, sample, dtype, grad_layout=None):
    tolerance = spec.tolerance(dtype)
    before = [t.detach().clone() for t in sample.tensors()]
    expected_sample = upcast(sample)
    outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
    grad_outputs = random_grad_outputs(outputs)
    if grad_layout:
        if not changes(grad_layout, grad_outputs, spec.expanded_dim):
            return
        grad_outputs = [in_layout(g, grad_layout, spec.expanded_dim) for g in grad_outputs]
    differentiable = sample.differentiable()
    grads = ()
    if differentiable and grad_outputs:
        grads = torch.autograd.grad(
            [o for o in outputs if o.requires_grad], differentiable, grad_outputs, allow_unused=True
        )
    expected_outputs, expected_grads = run_with_gradients(
        spec.reference, expected_sample, [g.detach().cpu().double() for g in grad_outputs] or None
    )
    assert len(outputs) == len(expected_outputs)
    for i, (output, expected) in enumerate(zip(outputs, expected_outputs, strict=True)):
        if output.is_floating_point():
            assert output.dtype == dtype, f"output {i} is {output.dtype}"
        assert_close(output, expected, tolerance, f"{sample.name}: output {i}")
    for i, (grad, expected) in enumerate(zip(grads, expected_grads, strict=True)):
        assert (grad is None) == (expected is None), f"gradient {i}"
        if grad is not None:
            assert_close(grad, expected, tolerance, f"{sample.name}: gradient {i}")
    for tensor, copy in zip(sample.tensors(), before, strict=True):
        assert torch.equal(tensor.detach().nan_to_num(), copy.nan_to_num()), f"{sample.name}: an input was changed"


def test_values_and_gradients(spec, device_dtype):
    device, dtype = device_dtype
    if spec.random:
        pytest.skip("random: has tests of its own")
    for sample in spec.samples(Make(device, dtype, requires_grad=True)):
        check(spec, sample, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(spec, device_dtype, layout):
    """All inputs in the layout, then only the first one (a mix), contiguous grad_output."""
    device, dtype = device_dtype
    if spec.random:
        pytest.skip("random: has tests of its own")
    for sample in spec.samples(Make(device, dtype, requires_grad=True)):

        def convert(tensor):
            return in_layout(tensor, layout, spec.expanded_dim)

        first, *others = sample.tensors()
        if changes(layout, [first, *others], spec.expanded_dim):
            check(spec, sample.map(convert), dtype)
        if changes(layout, [first], spec.expanded_dim) and changes(layout, others, spec.expanded_dim):
            check(spec, sample.map(lambda t, first=first: convert(t) if t is first else t), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_grad_outputs(spec, device_dtype, layout):
    device, dtype = device_dtype
    if spec.random:
        pytest.skip("random: has tests of its own")
    for sample in spec.samples(Make(device, dtype, requires_grad=True)):
        check(spec, sample, dtype, grad_layout=layout)


def test_empty(spec, device_dtype):
    device, dtype = device_dtype
    for sample in spec.empty_samples(Make(device, dtype, requires_grad=True)):
        check(spec, sample, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_values_travel_as_in_pytorch(spec, device_dtype, value, monkeypatch):
    device, dtype = device_dtype
    # Which makes NaN of a whole tile, as cuDNN's does; test_conv2d_winograd.py has a test of it.
    monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", "0")
    if spec.random or not spec.nonfinite:
        pytest.skip("the specification has tests of its own for it")
    for sample in spec.samples(Make(device, dtype)):
        first = sample.tensors()[0]
        if first.numel() == 0:
            continue
        with torch.no_grad():
            first.view(-1)[first.numel() // 2] = value
        outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
        expected_outputs, _ = run_with_gradients(spec.reference, upcast(sample))
        for output, expected in zip(outputs, expected_outputs, strict=True):
            assert_close(output, expected, spec.tolerance(dtype), f"{sample.name} with {value}")


def test_repeats_bitwise(spec, device):
    """The same call gives the same bits, forward and backward, thirty times over."""
    make = Make(device, torch.float32, requires_grad=True)
    samples = list(spec.samples(make))
    if spec.random:
        pytest.skip("random: has tests of its own")
    for sample in samples:
        first = None
        for _ in range(30 if device == "cuda" else 3):
            outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
            grads = ()
            grad_outputs = random_grad_outputs(outputs)
            if grad_outputs:
                with_grad = [o for o in outputs if o.requires_grad]
                grads = torch.autograd.grad(with_grad, sample.differentiable(), grad_outputs, allow_unused=True)
            now = [t.detach().nan_to_num() for t in (*outputs, *grads) if t is not None]
            first = first or now
            assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True)), sample.name
