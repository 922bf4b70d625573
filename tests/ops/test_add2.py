"""add2: what broadcasting does to the gradients, and the two other ways of building it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_ops

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "add2"
add2 = cuda_ops.functional.add2


def python(*command):
    result = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def example_libraries(tmp_path_factory):
    """The libraries of the JIT and of the CMake way, built by the scripts, which also run what they built."""
    folder = tmp_path_factory.mktemp("add2")
    output = python(EXAMPLE / "add2_jit.py", "--build-dir", folder / "jit")
    assert "torch.ops.add2_jit.add2 on cpu agrees with PyTorch" in output
    output = python(EXAMPLE / "add2_cmake.py", "--build-dir", folder / "cmake")
    assert "torch.ops.add2_cmake.add2 on cpu agrees with PyTorch" in output
    return [folder / "jit" / "add2_jit.so", folder / "cmake" / "libadd2_cmake.so"]


def test_all_three_builds_live_in_one_process(example_libraries):
    """The project's own library and both examples, loaded together, with a refused call for each."""
    script = f"""
import torch, cuda_ops
for path in {[str(path) for path in example_libraries]!r}:
    torch.ops.load_library(path)
a, b = torch.randn(2, 5, 7).unbind()
for op in (torch.ops.cuda_ops.add2_forward, torch.ops.add2_jit.add2, torch.ops.add2_cmake.add2):
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(op(a.to(dtype), b.to(dtype)), a.to(dtype) + b.to(dtype)), op
        assert torch.equal(op(a.to(dtype).t(), b.to(dtype).t()), a.t().to(dtype) + b.t().to(dtype)), op
    assert op(a[:0], b[:0]).shape == (0, 7)
    try:
        op(a, b.double())
    except RuntimeError as error:
        assert "add2: expected" in str(error)
    else:
        raise AssertionError(f"{{op}} took two dtypes")
print("done")
"""
    assert python("-c", script).strip() == "done"


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_broadcasting_is_pytorchs(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    shapes = []
    for _ in range(2):
        kept = [data.draw(st.sampled_from([size, 1])) for size in shape]
        shapes.append(kept[data.draw(st.integers(0, len(kept))) :])
    a, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    output, expected = add2(a, b), a + b
    assert torch.equal(output, expected)
    grad_output = torch.randn_like(expected)
    for actual, wanted in zip(
        torch.autograd.grad(output, (a, b), grad_output),
        torch.autograd.grad(expected, (a, b), grad_output),
        strict=True,
    ):
        assert torch.equal(actual, wanted)


def test_the_same_tensor_twice():
    a = torch.randn(3, dtype=torch.float64, requires_grad=True)
    add2(a, a).sum().backward()
    assert torch.equal(a.grad, torch.full((3,), 2.0, dtype=torch.float64))


def test_gradients_are_not_shared():
    """Both addends get the same gradient; changing one in place must leave the other alone."""
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    add2(a, b).backward(torch.ones(3))
    a.grad.zero_()
    assert torch.equal(b.grad, torch.ones(3))


@pytest.mark.cuda
@pytest.mark.parametrize("way", ["jit", "cmake"])
def test_example_on_cuda(way, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc on PATH")
    output = python(EXAMPLE / f"add2_{way}.py", "--cuda", "--build-dir", tmp_path / way)
    assert f"torch.ops.add2_{way}.add2 on cuda agrees with PyTorch" in output
