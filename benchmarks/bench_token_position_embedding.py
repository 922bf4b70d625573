"""token_position_embedding: what GPT-2 begins with, and its like for letters."""

import torch
from harness import Bench, Case, Implementation


def composed(tokens, token_weight, position_weight):
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    embedding = torch.nn.functional.embedding
    return embedding(tokens, token_weight) + embedding(positions, position_weight)


def case(batch, length, rows, cols):
    count = batch * length
    return Case(
        f"{batch}x{length} of {rows}x{cols}",
        lambda make: (make.integers(batch, length, high=rows), make(rows, cols), make(length, cols)),
        elements=((2 * count + length) * cols, (count + rows + length) * cols),
        bytes=(8 * count, 8 * count),
    )


BENCH = Bench(
    op="token_position_embedding",
    native=[Implementation("eager", composed)],
    cases=[case(32, 1024, 50304, 768), case(128, 256, 65, 384), case(8, 1024, 50304, 1600)],
)
