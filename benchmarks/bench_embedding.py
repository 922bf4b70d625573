"""embedding: tokens of GPT-2's vocabulary, and letters, of which there are 65, each a long row of the gradient."""

import torch
from harness import Bench, Case, Implementation


def case(count, rows, cols):
    """Backward reads the gradient of the output and writes that of the whole table."""
    return Case(
        f"{count} of {rows}x{cols}",
        lambda make: (make.integers(count, high=rows), make(rows, cols)),
        elements=(2 * count * cols, (count + rows) * cols),
        bytes=(8 * count, 8 * count),
    )


BENCH = Bench(
    op="embedding",
    native=[Implementation("eager", torch.nn.functional.embedding)],
    cases=[case(32768, 50304, 768), case(32768, 65, 384), case(8192, 50304, 1600), case(32768, 50304, 64)],
)
