"""What other tools reach on the same problem, written as their own tutorials would have it.

A module whose package is not there, or does not run here, says so by an ImportError when it is imported, or by any
exception when it is first called; the benchmark then does without it.
"""

import math

import torch


def fastest(candidates, launch, m, n, k, dtype, device, refused=()):
    """Of `candidates` the one by which launch(candidate, d, a, b) takes the least of the GPU's time, for a @ b of m x k
    by k x n; those that raise `refused` are passed over. By replays of a graph: beside a small product eager calls
    would time the host."""
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    d = a.new_empty((m, n))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best, least = None, math.inf
    for candidate in candidates:
        try:
            launch(candidate, d, a, b)  # compiles the kernel, or brings it to the device
        except refused:
            continue
        start.record()
        launch(candidate, d, a, b)
        end.record()
        end.synchronize()
        calls = 10 if start.elapsed_time(end) < 20 else 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                launch(candidate, d, a, b)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken = start.elapsed_time(end) / calls
        if taken < least:
            best, least = candidate, taken
    if best is None:
        raise RuntimeError(f"none of its kernels takes a product of {m} x {n} x {k}")
    return best
