"""attention of 16384 tokens of 2048 elements, and a few sizes for the CPU; on CUDA beside PyTorch's kernels one by one,
and the one that it chooses."""

import torch
from harness import Bench, Case, Implementation
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuda_ops

ours = cuda_ops.functional.scaled_dot_product_attention
native = torch.nn.functional.scaled_dot_product_attention


def with_backend(backend):
    def run(query, key, value, causal):
        with sdpa_kernel(backend):
            return native(query, key, value, is_causal=causal)

    return run


def case(batch, heads, length, head_dim, causal, devices=("cpu", "cuda")):
    def make(make):
        # A projection's layout: heads within rows.
        rows = [make(batch, length, heads, head_dim, requires_grad=False).transpose(1, 2) for _ in range(3)]
        return (*[t.requires_grad_() for t in rows], causal)

    name = f"{batch}×{heads}×{length}×{head_dim} {'causal' if causal else 'full'}"
    elements = batch * heads * length * head_dim
    products = 4 * elements * length * (0.5 if causal else 1.0)
    return Case(name, make, elements=(4 * elements, 8 * elements), flops=(products, 2.5 * products), devices=devices)


def beside(device, dtype, case):
    if device.type != "cuda":
        return []
    names = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if dtype.itemsize > 2:
        names = {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    return [Implementation(f"peer {name}", with_backend(backend)) for name, backend in names.items()]


TOKENS, HIDDEN = 16384, 2048
BENCH = Bench(
    op="attention",
    ours=Implementation("ours", lambda query, key, value, causal: ours(query, key, value, is_causal=causal)),
    native=[Implementation("eager", lambda query, key, value, causal: native(query, key, value, is_causal=causal))],
    cases=[
        case(4, 8, 256, 64, True),
        *[case(2, 4, length, head_dim, True, ("cpu",)) for head_dim in (32, 64, 128) for length in (64, 256, 1024)],
        *[
            case(TOKENS // length, HIDDEN // head_dim, length, head_dim, causal, ("cuda",))
            for head_dim in (64, 128)
            for length in (1024, 4096, 16384)
            for causal in (True, False)
        ],
    ],
    beside=beside,
)
