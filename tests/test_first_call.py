"""What a thread's first call of CUDA is like: nothing of the runtime has bound a context to it before."""

import subprocess
import sys
import threading

import pytest
import torch

import cuda_ops

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a thread's context is CUDA's"),
]

# Run in a process of its own, in which autograd's thread has called nothing yet: the first backward has the last one's
# kernels and bits.
PROGRAM = """
import sys, torch, cuda_ops

def attention():
    query, key, value, grad = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [t.requires_grad_() for t in (query, key, value)]
    return inputs, grad, lambda: cuda_ops.functional.scaled_dot_product_attention(*inputs)

def linear():
    inputs = [torch.randn(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    return inputs, torch.randn_like(inputs[0]), lambda: cuda_ops.functional.linear(*inputs)

torch.manual_seed(1)
inputs, grad, call = {"attention": attention, "linear": linear}[sys.argv[1]]()
names = []
for _ in range(3):
    output = call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        grads = torch.autograd.grad(output, inputs, grad)
        torch.cuda.synchronize()
    events = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names.append((sorted(events), [g.clone() for g in grads]))
assert names[0][0] == names[-1][0], (names[0][0], names[-1][0])
assert all(torch.equal(a, b) for a, b in zip(names[0][1], names[-1][1], strict=True))
"""


@pytest.mark.parametrize("op", ["attention", "linear"])
def test_first_gradients_of_a_process(op):
    subprocess.run([sys.executable, "-c", PROGRAM, op], check=True, timeout=120)


def test_first_call_of_a_thread():
    torch.manual_seed(2)
    query, key, value = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    left, right = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    results = []

    def call():
        results.append(cuda_ops.functional.scaled_dot_product_attention(query, key, value))
        results.append(cuda_ops.functional.linear(left, right))

    call()
    torch.cuda.synchronize()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
