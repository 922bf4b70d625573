"""Times our ops against PyTorch's own. What makes the result hard to doubt:

- Both sides run in the same process on the same inputs, sample by sample (ours, PyTorch, ours, ...), and what
  is shown are medians, with the 10th and 90th percentile beside them in the CSV.
- Before anything is timed, outputs and gradients of the two are compared; a result that is NaN is no result.
- Inputs are random, and calls cycle over so many sets of them that together they exceed three times the largest cache
  ("cold"). Where that would take too many sets, the row says "hot".
- Two clocks on CUDA. `kernel`: a CUDA graph of many calls, replayed between two events; that is the GPU's time, and
  what remains when a training step is captured into a graph. `wall`: eager calls by the host's clock, with the cost
  of Python and of launching. On the CPU there is only `wall`.
- PyTorch is shown in its strongest simple variant: where a case knows several (layouts, fused), all are timed and
  written down, and the ratio is against the fastest.
- TF32 is off on both sides; allowed on both in rows of the dtype "tf32", which is float32 with TF32. cuDNN may try its
  algorithms and keep the fastest (cudnn.benchmark).
- "spread, %" in the table is the distance of the 10th and 90th percentile of the noisier side, relative to its median;
  --quick, which takes few samples, says how large it was.
- What is timed beside the two sides, rungs of a ladder and other tools ("peers"), has on CUDA the kernel's clock alone;
  a call of it that takes milliseconds is sampled SLOW_SAMPLES times, alone, on CUDA between two events, and no more.
  A peer whose package is missing, whose first call fails or whose result is wrong is left out, and that is said; a rung
  that fails ends the run.
- % of ceiling: the least time in which the bytes and floating-point operations that the op cannot do without could be
  moved and done, by a copy and a torch.mm timed in the same run, as a fraction of the time taken.

A bench_<op>.py declares one `BENCH = Bench(...)`; `python -m cuda_ops bench` runs them.
"""

from .results import COLUMNS, comparison, device_name, environment, noise, print_comparison, read_csv, slug, write_csv
from .runner import QUICK, Settings, all_ops, load_bench, run, run_bench
from .spec import (
    MATRIX_SHAPES,
    MNIST_SHAPES,
    Bench,
    BenchError,
    Case,
    Implementation,
    Make,
    adaptive_pool_cases,
    compiled_on_cuda,
    elementwise_cases,
    in_channels_last,
    reduction_cases,
)
from .timing import Ceiling, interleaved, keep_freed_memory, measure_ceiling, summarize, synchronize

__all__ = [
    "COLUMNS",
    "MATRIX_SHAPES",
    "MNIST_SHAPES",
    "QUICK",
    "Bench",
    "BenchError",
    "Case",
    "Ceiling",
    "Implementation",
    "Make",
    "Settings",
    "adaptive_pool_cases",
    "all_ops",
    "comparison",
    "compiled_on_cuda",
    "device_name",
    "elementwise_cases",
    "environment",
    "in_channels_last",
    "interleaved",
    "keep_freed_memory",
    "load_bench",
    "measure_ceiling",
    "noise",
    "print_comparison",
    "read_csv",
    "reduction_cases",
    "run",
    "run_bench",
    "slug",
    "summarize",
    "synchronize",
    "write_csv",
]
