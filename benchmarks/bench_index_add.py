"""index_add of messages to the nodes of a graph, of tokens to a vocabulary and of letters, of which there are 65."""

import torch
from harness import Bench, Case, Implementation


def case(count, rows, cols):
    """Forward reads input and source, and writes the output; backward reads and writes what source is."""
    return Case(
        f"{count} into {rows}x{cols}",
        lambda make: (make(rows, cols), 0, make.integers(count, high=rows), make(count, cols)),
        elements=((count + 2 * rows) * cols, 2 * count * cols),
        bytes=(8 * count, 8 * count),
    )


CASES = [case(1 << 20, 1 << 17, 64), case(32768, 50304, 768), case(32768, 65, 384), case(1 << 22, 1 << 20, 1)]
BENCH = Bench(op="index_add", native=[Implementation("eager", torch.index_add)], cases=CASES)
