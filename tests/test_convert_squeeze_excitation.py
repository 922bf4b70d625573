"""cuda_ops.convert: the gate of a squeeze-and-excitation block and its product with the image in one op."""

import copy

import pytest
import torch
from support.conversion import assert_converts

import cuda_ops
from cuda_ops.conversion import fusing

nn = torch.nn
F = torch.nn.functional


class SqueezeExcitation(nn.Module):
    """As torchvision's: the pooled image by two convolutions of 1x1, and a gate."""

    def __init__(self, gate=nn.Sigmoid, channels=6):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)
        self.activation, self.gate = nn.ReLU(), gate()

    def scale(self, input):
        return self.gate(self.fc2(self.activation(self.fc1(self.avgpool(input)))))

    def forward(self, input):
        return self.scale(input) * input


class WithFunction(SqueezeExcitation):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, input):
        return input.mul(self.function(self.fc2(self.activation(self.fc1(self.avgpool(input))))))


class Pointwise(SqueezeExcitation):
    """A gate for each pixel, which the op does not have."""

    def scale(self, input):
        return self.gate(self.fc2(self.activation(self.fc1(input))))


def count_scales(monkeypatch):
    calls, function = [], cuda_ops.functional.scale_channels
    monkeypatch.setattr(fusing.functional, "scale_channels", lambda *a: calls.append(a[2]) or function(*a))
    return calls


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("gate", [nn.Sigmoid, nn.Hardsigmoid])
def test_gate_and_product_are_one_op(gate, last, monkeypatch):
    torch.manual_seed(0)
    calls = count_scales(monkeypatch)
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    # The slope of PyTorch's hardsigmoid is a sixth in float32, for float64 too.
    tolerance = 1e-10 if gate is nn.Sigmoid else 1e-7
    assert_converts(SqueezeExcitation(gate).double(), (x,), ["scale_channels", "excitation"], tolerance)
    assert calls and set(calls) == {"sigmoid" if gate is nn.Sigmoid else "hardsigmoid"}


def test_the_products_are_one_op_without_gradients(monkeypatch):
    torch.manual_seed(0)
    calls, function = [], cuda_ops.functional.excitation
    monkeypatch.setattr(fusing.functional, "excitation", lambda *a: calls.append(a) or function(*a))
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    native = SqueezeExcitation().double()
    ours = copy.deepcopy(native)
    report = cuda_ops.convert(ours)
    assert {fusion.op: fusion.parts for fusion in report.fusions} == {
        "scale_channels": ("gate", "mul()"),
        "excitation": ("fc1", "activation", "fc2"),
    }
    torch.testing.assert_close(ours(x), native(x), rtol=1e-12, atol=1e-12)
    assert not calls  # which are kept for backward by the layers
    with torch.no_grad():
        torch.testing.assert_close(ours(x), native(x), rtol=1e-12, atol=1e-12)
        assert len(calls) == 1
        for name in ("fc1", "fc2"):  # what no longer is as it was
            hook = getattr(ours, name).register_forward_hook(lambda module, args, output: None)
            ours(x)
            hook.remove()
        assert len(calls) == 1
        ours, native = ours.float(), native.float()
        with torch.autocast("cpu", torch.bfloat16):
            output = ours(x.bfloat16())
            assert output.dtype is torch.bfloat16
            torch.testing.assert_close(output.float(), native(x.float()), rtol=2e-2, atol=2e-2)
            assert len(calls) == 2
            ours.fc1.to(torch.bfloat16)  # of two dtypes, which autocast makes one
            torch.testing.assert_close(ours(x.bfloat16()).float(), native(x.float()), rtol=4e-2, atol=4e-2)
        assert len(calls) == 2


def functions():
    return {"sigmoid": torch.sigmoid, "method": lambda x: x.sigmoid(), "hardsigmoid": F.hardsigmoid}


@pytest.mark.parametrize("name", functions())
def test_functions_are_gates_too(name, monkeypatch):
    calls = count_scales(monkeypatch)
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    native = WithFunction(functions()[name]).double()
    ours = copy.deepcopy(native)
    cuda_ops.convert(ours)
    torch.testing.assert_close(ours(x), native(x), rtol=1e-12, atol=1e-12)
    assert len(calls) == 1


def test_what_the_op_does_not_take_is_done_by_the_layers(monkeypatch):
    calls = count_scales(monkeypatch)
    x = torch.randn(2, 6, 5, 4)
    in_place = SqueezeExcitation(lambda: nn.Hardsigmoid(inplace=True))
    hooked = SqueezeExcitation()
    for native in (Pointwise(), in_place, hooked):
        ours = copy.deepcopy(native)
        cuda_ops.convert(ours)
        seen = []
        if native is hooked:
            ours.gate.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        torch.testing.assert_close(ours(x), native(x))
        assert len(seen) == (native is hooked)
    # Of two dtypes, as PyTorch promotes them.
    native = SqueezeExcitation().to(torch.bfloat16)
    ours = copy.deepcopy(native)
    cuda_ops.convert(ours)
    for model in (native, ours):
        model.gate.register_forward_hook(lambda module, args, output: output.float())
    assert ours(x.bfloat16()).dtype is native(x.bfloat16()).dtype is torch.float32
    assert not calls


def test_torchvision_has_such_blocks(monkeypatch):
    misc = pytest.importorskip("torchvision.ops.misc")
    calls = count_scales(monkeypatch)
    x = torch.randn(2, 8, 5, 4, dtype=torch.float64)
    block = misc.SqueezeExcitation(8, 2, activation=nn.SiLU).double()
    report = cuda_ops.convert(copy.deepcopy(block))
    (fusion,) = [fusion for fusion in report.fusions if fusion.op == "scale_channels"]
    assert fusion.parts[0] == "scale_activation"
    assert_converts(block, (x,), ["scale_channels"])
    assert set(calls) == {"sigmoid"}
