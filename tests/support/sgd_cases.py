"""What the tests of SGD share: lists of parameters, their gradients, and the comparison of two optimizers."""

import torch

from support.opspec import assert_close

# A scalar, nothing, one warp more one, a chunk of the kernel (2048) less and more one, several chunks, images.
SHAPES = [(), (0,), (3,), (33,), (2047,), (2049,), (5000,), (4, 3, 2, 5), (2, 0, 3)]


def random_tensors(shapes, seed, device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes]


def parameters(shapes=SHAPES, seed=0, device="cpu", dtype=torch.float64):
    return [torch.nn.Parameter(t) for t in random_tensors(shapes, seed, device, dtype)]


def set_grads(params, seed, missing=()):
    for i, grad in enumerate(random_tensors([p.shape for p in params], seed)):
        params[i].grad = None if i in missing else grad.to(params[i].dtype).to(params[i].device)


def buffers(optimizer):
    return {i: s["momentum_buffer"] for i, s in optimizer.state_dict()["state"].items()}


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def assert_same_run(ours, native, tolerance=1e-14):
    """All parameters of a group together, and all buffers: a lone element may be all but zero after a few steps, and
    its rounding, which is that of the values before, no small part of it."""
    for group, expected in zip(ours.param_groups, native.param_groups, strict=True):
        if group["params"]:
            assert [p.shape for p in group["params"]] == [e.shape for e in expected["params"]]
            assert_close(flat(group["params"]), flat(expected["params"]).double(), tolerance, "parameters")
    mine, theirs = buffers(ours), buffers(native)
    assert mine.keys() == theirs.keys()
    held = [i for i, buffer in theirs.items() if buffer is not None]
    assert held == [i for i, buffer in mine.items() if buffer is not None]
    if held:
        assert_close(flat(mine[i] for i in held), flat(theirs[i] for i in held).double(), tolerance, "momentum buffers")
