"""What ops that memory bounds cost the processor, ours beside PyTorch's, the worst first:

    python benchmarks/cpu_time.py                          float32, all such ops
    python benchmarks/cpu_time.py cumsum --dtype bfloat16  some of them

One thread, and the processor's time, which other work on the machine changes least; calls alternate, and what is shown
are lower quartiles of short samples, since other work empties the caches. Cases are those of the benches that are not
larger than --elements, and freed memory is kept, so that no side pays for pages. `cuda_ops bench --device cpu`
has the host's clock, more threads and larger cases.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # this repository's cuda_ops, whichever is installed

from harness import Make, all_ops, interleaved, keep_freed_memory, load_bench  # noqa: E402
from harness.runner import backward_call, copy_arguments, forward_call  # noqa: E402
from harness.spec import DTYPES, BenchError  # noqa: E402


def sampler(call, least_seconds):
    def run(count):
        start = time.process_time()
        for _ in range(count):
            call()
        return (time.process_time() - start) / count

    run(1)
    count = max(1, round(least_seconds / max(run(2), 1e-7)))
    return lambda: run(count)


def ratio_of(bench, case, dtype, direction, rounds, least_seconds):
    """(PyTorch's time over ours, our microseconds, PyTorch's fastest variant)."""
    arguments, calls = case.make(Make("cpu", dtype)), {}
    for implementation in bench.implementations():
        make_call = forward_call if direction == "forward" else backward_call
        calls[implementation.name] = make_call(implementation, implementation.prepare(*copy_arguments(arguments)))
    samples = interleaved({name: sampler(call, least_seconds) for name, call in calls.items()}, rounds)
    times = {name: statistics.quantiles(some, n=4)[0] for name, some in samples.items()}
    ours = min(seconds for name, seconds in times.items() if name.startswith("ours"))
    native, seconds = min(((n, s) for n, s in times.items() if not n.startswith("ours")), key=lambda item: item[1])
    return seconds / ours, 1e6 * ours, native


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="*")
    parser.add_argument("--dtype", action="append", choices=["float32", "float16", "bfloat16", "float64"])
    parser.add_argument("--elements", type=int, default=1 << 24, help="the most that a case reads and writes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.002, help="the least time of a sample")
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    rows = []
    try:
        benches = [(op, load_bench(op)) for op in settings.op or all_ops()]
    except BenchError as error:
        sys.exit(f"cpu_time: {error}")
    for op, bench in benches:
        for case in bench.cases:
            if (
                "cpu" not in case.devices
                or max(case.elements) > settings.elements
                or not (settings.op or case.elements[0])
            ):
                continue
            if max(case.flops) > 0 and not settings.op:
                continue
            for dtype in settings.dtype or ["float32"]:
                for direction in ["forward", "backward"] if bench.backward else ["forward"]:
                    what = (op, case.name, dtype, direction)
                    try:
                        row = ratio_of(bench, case, DTYPES[dtype], direction, settings.rounds, settings.seconds)
                    except (BenchError, RuntimeError, NotImplementedError, TypeError) as error:
                        print(*what, "left out:", str(error).splitlines()[0][:100], flush=True)
                        continue
                    rows.append((row, what))
                    print(f"{row[0]:6.2f} {row[1]:10.1f} us  {' '.join(what)}  ({row[2]})", flush=True)
    print("\nThe worst first:")
    for (ratio, microseconds, native), what in sorted(rows):
        print(f"{ratio:6.2f} {microseconds:10.1f} us  {' '.join(what)}  ({native})")


if __name__ == "__main__":
    main()
