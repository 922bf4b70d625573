"""Analytic gradients against numeric differentiation, in float64."""

import torch
from support.opspec import Make, as_tuple, assert_close, upcast
from torch.autograd import gradcheck, gradgradcheck


def call(spec, sample):
    """The op as a function of its differentiable tensors alone, which is what gradcheck wants."""
    tensors = sample.differentiable()

    def function(*values):
        replace = dict(zip(map(id, tensors), values, strict=True))
        replaced = sample.map(lambda t: replace.get(id(t), t))
        outputs = as_tuple(spec.function(*replaced.args, **replaced.kwargs))
        return tuple(o for o in outputs if o.is_floating_point())

    return seeded(function) if spec.random else function, tensors


def test_gradcheck(spec, device):
    for sample in spec.small_samples(Make(device, torch.float64, requires_grad=True)):
        function, tensors = call(spec, sample)
        if tensors:
            assert gradcheck(function, tensors), sample.name


def test_gradgradcheck(spec, device):
    for sample in spec.small_samples(Make(device, torch.float64, requires_grad=True)):
        function, tensors = call(spec, sample)
        if not tensors:
            continue
        if spec.gradgrad:
            assert gradgradcheck(function, tensors), sample.name
            continue
        # Without a double backward the op must say so, and not give a wrong one.
        outputs = function(*tensors)
        grads = torch.autograd.grad(outputs, tensors, [torch.ones_like(o) for o in outputs], create_graph=True)
        try:
            torch.autograd.grad([g.sum() for g in grads], tensors)
        except RuntimeError as error:
            text = str(error)
            assert "once_differentiable" in text or "does not require grad" in text, text
        else:
            raise AssertionError("differentiable twice, but the specification says gradgrad=False")


def test_gradients_of_gradients_over_nothing(spec, device):
    """Samples without elements: PyTorch's zeros, or its NaN where a mean is over nothing."""

    def twice(function, sample):
        tensors = sample.differentiable()
        outputs = [o for o in as_tuple(function(*sample.args, **sample.kwargs)) if o.requires_grad]
        grads = torch.autograd.grad([o.square().sum() for o in outputs], tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), tensors, allow_unused=True)

    for sample in spec.empty_samples(Make(device, torch.float64, requires_grad=True)) if spec.gradgrad else ():
        ours = twice(spec.function, sample)
        try:
            native = twice(spec.reference, upcast(sample))
        except RuntimeError as error:
            # PyTorch's conv2d without input channels, whose output has none either; its embedding of nothing.
            assert "expanded size" in str(error) or "cannot reshape tensor of 0 elements" in str(error), error
            native = [None for _ in ours]
        for mine, expected in zip(ours, native, strict=True):
            mine, expected = (torch.zeros(()) if grad is None else grad for grad in (mine, expected))
            if mine.shape == expected.shape:
                assert_close(mine, expected, spec.tolerance(torch.float64), sample.name)
            else:  # None stands for zeros
                assert not mine.any() and not expected.any(), sample.name


def seeded(function):
    """The same random numbers on every call, as numeric differentiation needs."""

    def run(*values):
        torch.manual_seed(0)
        return function(*values)

    return run
