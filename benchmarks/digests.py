"""Whether two builds give the same results bit by bit, and how fast each is: for changes that are to change neither.

    python benchmarks/digests.py --out before.json       in the tree of one build, on a GPU
    python benchmarks/digests.py --out after.json        in that of the other
    python benchmarks/digests.py --compare before.json after.json

Runs our side of every benchmark's cases and of every specification's samples, forward and backward, in each dtype, and
writes for each a checksum of outputs and gradients, and for the benchmarks' the microseconds of a CUDA graph's replay.
Exits with 1 if results differ that both have.
"""

import argparse
import importlib
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

import torch  # noqa: E402
from harness.spec import DTYPES, BenchError, Make  # noqa: E402

CHUNK = 1 << 26


def checksum(tensor) -> int:
    """Of the bits and of where they lie, in the order of dimensions, whatever the strides; modulo 2^64."""
    flat = tensor.detach().resolve_neg().contiguous().view(-1)
    flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = tensor.dim() + 1
    for begin in range(0, flat.numel(), CHUNK):
        bits = flat[begin : begin + CHUNK].long()
        position = torch.arange(begin, begin + bits.numel(), device=bits.device) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01
        total = (total * 31 + int((bits * (position ^ (position >> 29))).sum())) % (1 << 64)
    return total


def tensors_of(value):
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def gradients(outputs, inputs, seed=1):
    with_grad = [o for o in outputs if o.requires_grad]
    if not with_grad or not inputs:
        return []
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    grads = [torch.randn(o.shape, generator=generator, device=o.device, dtype=o.dtype) for o in with_grad]
    found = torch.autograd.grad(with_grad, inputs, grads, allow_unused=True)
    return [g for g in found if g is not None]


def replay_time(function, repeats=7) -> float:
    """Median microseconds of a replay; NaN where the call cannot be captured."""
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
    except RuntimeError:
        return float("nan")
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 500)
    return statistics.median(times)


def of_benchmarks(only, results):
    for path in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        bench = getattr(importlib.import_module(path.stem), "BENCH", None)
        if bench is None or bench.random or bench.op == "gemm" or (only and bench.op not in only):
            continue
        try:
            ours = [i for i in bench.implementations() if i.name.startswith("ours")]
        except BenchError:
            continue
        for dtype in DTYPES:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
            for case in bench.cases:
                for implementation in ours:
                    key = f"bench {bench.op} {dtype} {case.name} {implementation.name}"
                    try:
                        results[key] = one_of_benchmarks(bench, case, implementation, DTYPES[dtype])
                    except (NotImplementedError, RuntimeError, TypeError) as error:
                        results[key] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
                    torch.cuda.empty_cache()


def one_of_benchmarks(bench, case, implementation, dtype):
    arguments = implementation.prepare(*case.make(Make("cuda", dtype)))
    outputs = tensors_of(implementation.function(*arguments))
    inputs = [a for a in tensors_of(arguments) if a.requires_grad] if bench.backward else []
    result = {"sum": [checksum(t) for t in [*outputs, *gradients(outputs, inputs)]]}
    with torch.no_grad():
        result["forward_us"] = replay_time(lambda: implementation.function(*arguments))
    if inputs:
        grads = [torch.ones_like(o) for o in outputs if o.requires_grad]

        def both():
            found = [o for o in tensors_of(implementation.function(*arguments)) if o.requires_grad]
            torch.autograd.grad(found, inputs, grads, allow_unused=True)

        result["both_us"] = replay_time(both)
    return result


def of_specifications(only, results):
    try:
        from support import opspec
    except ImportError:
        import opspec

    for spec in opspec.load_specs():
        if spec.random or (only and spec.name not in only):
            continue
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            make = opspec.Make("cuda", dtype, requires_grad=True)
            for number, sample in enumerate(spec.samples(make)):
                key = f"spec {spec.name} {str(dtype)[6:]} {number} {sample.name}"
                try:
                    outputs = tensors_of(spec.function(*sample.args, **sample.kwargs))
                    found = [*outputs, *gradients(outputs, sample.differentiable())]
                    results[key] = {"sum": [checksum(t) for t in found]}
                except (NotImplementedError, RuntimeError) as error:
                    results[key] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def compare(before, after) -> int:
    common = [key for key in before if key in after]
    differ = [key for key in common if before[key].get("sum") != after[key].get("sum")]
    for key in differ:
        print("differs:", key, before[key].get("error", ""), after[key].get("error", ""))
    print(f"{len(common)} results in both, {len(differ)} differ; {len(before)} and {len(after)} in all")
    for name in ("forward_us", "both_us"):
        ratios = {
            k: after[k][name] / before[k][name] for k in common if before[k].get(name, 0) > 0 < after[k].get(name, 0)
        }
        if ratios:
            median = statistics.median(ratios.values())
            print(f"{name}: after / before, median {median:.3f} of {len(ratios)}; the most:")
            for key in sorted(ratios, key=ratios.get, reverse=True)[:12]:
                print(f"  {ratios[key]:.3f}  {before[key][name]:9.1f} {after[key][name]:9.1f}  {key}")
    return 1 if differ else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--only", nargs="+", default=[], metavar="OP", help="these ops alone")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return compare(*(json.loads(path.read_text()) for path in options.compare))
    if options.out is None or not torch.cuda.is_available():
        parser.error("expected --out FILE on a machine with a GPU, or --compare BEFORE AFTER")
    results = {}
    of_specifications(options.only, results)
    of_benchmarks(options.only, results)
    options.out.write_text(json.dumps(results, indent=0))
    errors = sum("error" in result for result in results.values())
    print(f"{len(results)} results, {errors} refused or failed, written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
