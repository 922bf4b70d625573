"""geglu of the halves of what one matrix product gives, and of two tensors; widths of a Llama's and of GPT-2's."""

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda


def composed(gate, value=None):
    gate, value = gate.chunk(2, -1) if value is None else (gate, value)
    return torch.nn.functional.gelu(gate) * value


def cases(rows, cols):
    elements = (3 * rows * cols, 5 * rows * cols)
    yield Case(f"halves of {rows}x{2 * cols}", lambda make: (make(rows, 2 * cols),), elements=elements)
    yield Case(f"two of {rows}x{cols}", lambda make: (make(rows, cols), make(rows, cols)), elements=elements)


BENCH = Bench(
    op="geglu",
    native=[Implementation("eager", composed)],
    cases=[*cases(8192, 11008), *cases(8192, 2048), *cases(256, 768)],
    beside=compiled_on_cuda(composed),
)
