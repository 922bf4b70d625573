"""Every allocation of every op fails once, forward and backward: the call raises, leaves what it was given, and works
when it is repeated. Run by tests/test_faults.py with failing_allocations.c in LD_PRELOAD, which is the argument."""

import ctypes
import sys

import torch

import cuda_ops
from support.opspec import Make, as_tuple, load_specs, random_grad_outputs

# More than any op allocates, gradients included.
MOST = 200


def run(spec, sample):
    torch.manual_seed(0)
    outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
    inputs, grads = sample.differentiable(), ()
    with_grad = [o for o in outputs if o.requires_grad]
    if with_grad and inputs:
        grads = torch.autograd.grad(with_grad, inputs, random_grad_outputs(outputs), allow_unused=True)
    return [t.detach().clone() for t in (*outputs, *grads) if t is not None]


def same(first, second):
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def failures_of(library, call, expected, is_sound):
    """How many allocations of a call failed, one in each try."""
    for number in range(1, MOST):
        library.fail_allocation(number)
        try:
            call()
            untouched = library.allocations_left() > 0
        except RuntimeError as error:
            assert "memory" in str(error), error
            untouched = False
        finally:
            library.fail_allocation(0)
        if untouched:
            return number - 1
        assert torch.is_grad_enabled() and is_sound()
        assert same(expected, call()), f"allocation {number}"
    raise AssertionError(f"more than {MOST} allocations")


def sgd_step():
    """A step whose momentum buffers are there, and its results from the same start."""
    start = torch.arange(100.0)

    def call():
        weight = torch.nn.Parameter(start.clone())
        optimizer = cuda_ops.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
        for step in range(2):
            weight.grad = start * step + 1
            optimizer.step()
        return [weight.detach().clone()]

    return call


def main():
    library = ctypes.CDLL(sys.argv[1])
    library.allocations_left.restype = ctypes.c_long
    for spec in load_specs():
        count = 0
        for sample in list(spec.small_samples(Make(requires_grad=True)))[:3]:
            expected = run(spec, sample)
            before = [t.detach().clone() for t in sample.tensors()]

            def is_sound(sample=sample, before=before):
                return same(before, [t.detach() for t in sample.tensors()])

            count += failures_of(library, lambda spec=spec, s=sample: run(spec, s), expected, is_sound)
        print(spec.name, count, flush=True)
    print("SGD", failures_of(library, sgd_step(), sgd_step()(), lambda: True), flush=True)


if __name__ == "__main__":
    main()
