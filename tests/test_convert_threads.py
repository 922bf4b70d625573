"""cuda_ops.convert in one thread of several: torch.fx traces by functions that it puts in the place of all modules'."""

import sys
import threading

import pytest
import torch

import cuda_ops

nn = torch.nn
F = torch.nn.functional
IMAGES = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 3)
        self.head, self.gain = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), 2.0

    def forward(self, x):
        return self.head(self.linear(F.relu(self.norm(self.conv(x))).mean((2, 3)))) * self.gain


@pytest.fixture(autouse=True)
def threads_in_short_turns():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(functions, until=None):
    """Runs these beside each other, and raises what one of them did; `until` in this thread."""
    errors = []

    def run(function):
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    try:
        if until is not None:
            until()
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def convert_and_check():
    """All that is fused is, and goes by what the model has at the call."""
    model = Net().eval()
    report = cuda_ops.convert(model)
    assert not report.untraced
    assert {"conv_bn_act", "linear_relu"} <= {fusion.op for fusion in report.fusions}
    output = model(IMAGES)
    model.gain = 4.0
    torch.testing.assert_close(model(IMAGES), 2 * output)


def test_forwards_of_other_threads_go_on():
    done = threading.Event()

    def forwards():
        model = Net().eval()
        expected = model(IMAGES)
        while not done.is_set():
            assert torch.equal(model(IMAGES), expected)

    def conversions():
        try:
            for _ in range(12):
                convert_and_check()
        finally:
            done.set()

    in_threads([forwards, forwards], until=conversions)


def test_conversions_wait_for_each_other():
    in_threads([lambda: [convert_and_check() for _ in range(6)]] * 4)
