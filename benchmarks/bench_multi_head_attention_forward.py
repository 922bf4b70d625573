"""multi_head_attention_forward of one tensor: the attention of a layer of GPT-2's sizes, of an encoder that pads, and
one whose weights are asked for."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def run(function):
    def call(x, weight, bias, out, out_bias, heads, options):
        width = x.shape[-1]
        arguments = x, x, x, width, heads, weight, bias, None, None, False, 0.0, out, out_bias
        output, weights = function(*arguments, **options)
        return output if weights is None else (output, weights)

    return call


def case(length, batch, width, heads, kind, devices=("cpu", "cuda")):
    def make(make):
        scale = width**-0.5  # what keeps scores small
        weight, out = ((make(rows * width, width, requires_grad=False) * scale).requires_grad_() for rows in (3, 1))
        options = {"need_weights": kind == "weights"}
        if kind == "causal":
            hidden = torch.ones(length, length, dtype=torch.bool, device=make.device).triu(1)
            options |= {"attn_mask": hidden, "is_causal": True}
        if kind == "padding":
            padding = torch.zeros(batch, length, dtype=torch.bool, device=make.device)
            padding[:, length - length // 4 :] = True
            options["key_padding_mask"] = padding
        x = make(length, batch, width)
        return x, weight, make(3 * width), out, make(width), heads, options

    tokens = length * batch
    projections = 8 * tokens * width * width
    attention = 4 * tokens * length * width * (0.5 if kind == "causal" else 1.0)
    moved = 2 * tokens * width + 4 * width * width
    return Case(
        f"{length}×{batch}×{width}, {heads} heads, {kind}",
        make,
        elements=(moved, 2 * moved),
        flops=(projections + attention, 2 * projections + 2.5 * attention),
        devices=devices,
    )


BENCH = Bench(
    op="multi_head_attention_forward",
    ours=Implementation("ours", run(cuda_ops.functional.multi_head_attention_forward)),
    native=[Implementation("eager", run(torch.nn.functional.multi_head_attention_forward))],
    cases=[
        case(64, 12, 128, 4, "causal"),
        case(64, 12, 128, 4, "weights"),
        case(197, 8, 384, 6, "plain", ("cpu",)),
        case(256, 8, 256, 4, "padding", ("cpu",)),
        case(512, 2, 512, 8, "causal", ("cpu",)),
        *[case(1024, 16, 768, 12, kind, ("cuda",)) for kind in ("plain", "causal", "padding")],
        case(512, 32, 1024, 16, "weights", ("cuda",)),
    ],
)
