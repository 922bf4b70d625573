"""One small case of every kernel, for compute-sanitizer:

    PYTHONPATH=.:tests python -m support.kernel_cases [--list] [case ...]

Each op's small samples and its odd-sized ones (or those that its specification names), float32 with and without TF32,
in contiguous and channels_last order, forward and backward (double backward has no kernels of its own); in float64 and
bfloat16, whose kernels are float32's and float16's templates, every third sample;
then conv2d's paths, each forced in a case of its own, since these are the longest, the optimizer, and the rungs of the
GEMM ladder; and those of the tests whose sizes and plans reach what small samples do not (tiles that clusters share,
long rows of attention, channels of batch_norm that a block keeps). --list prints the cases' names. Values are the
tests' business, not this program's: it only has to reach the kernels.
"""

import functools
import itertools
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from support.opspec import Make, as_tuple, load_specs

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# The ops that have other kernels for float32 where TF32 is allowed.
TF32 = {"conv2d", "conv_bn_relu_pool", "linear", "linear_relu", "matmul"}
# compute-sanitizer slows a kernel by two orders of magnitude: the largest samples are for the tests.
LARGEST = 20_000
# Of these dtypes one sample in so many, since another dtype has the same templates.
THINNED = {torch.float64: 3, torch.bfloat16: 3}


def run(spec, sample):
    outputs = [o for o in as_tuple(spec.function(*sample.args, **sample.kwargs)) if o.requires_grad]
    inputs = sample.differentiable()
    if not (outputs and inputs):
        return
    torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)


def channels_last(tensor):
    if tensor.dim() != 4:
        return tensor
    return tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


def run_spec(spec):
    for dtype, tf32 in [*((dtype, False) for dtype in DTYPES), *((torch.float32, True) for _ in TF32 & {spec.name})]:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        make = Make("cuda", dtype, requires_grad=True)
        samples = [*spec.small_samples(make), *spec.samples(make)][:: THINNED.get(dtype, 1)]
        for sample in samples if spec.kernel_samples is None else spec.kernel_samples(make):
            if max(t.numel() for t in sample.tensors()) > LARGEST:
                continue
            run(spec, sample)
            if spec.kernel_samples is None and any(t.dim() == 4 for t in sample.tensors()):
                run(spec, sample.map(channels_last))


def run_optimizer():
    import cuda_ops

    for dtype in DTYPES:
        parameters = [torch.randn(n, device="cuda", dtype=dtype, requires_grad=True) for n in (0, 1, 33, 1025)]
        for options in ({}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}):
            optimizer = cuda_ops.optim.SGD(parameters, lr=0.1, **options)
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()


def run_adam():
    """Aligned and misaligned parameters, counters on the host and on the device, every option."""
    import cuda_ops

    for dtype, state_dtype in itertools.product(DTYPES, [None, torch.float32]):
        parameters = [
            torch.randn(n, device="cuda", dtype=dtype)[n % 2 :].requires_grad_() for n in (0, 1, 34, 1025, 4100)
        ]
        for options in (
            {},
            {"amsgrad": True, "weight_decay": 0.1, "fused": True},
            {"maximize": True, "capturable": True},
        ):
            for kind in (cuda_ops.optim.Adam, cuda_ops.optim.AdamW):
                optimizer = kind(parameters, lr=0.1, state_dtype=state_dtype, **options)
                if "fused" in options:
                    optimizer.grad_scale = torch.full((), 2.0, device="cuda")
                    optimizer.found_inf = torch.zeros((), device="cuda")
                for _ in range(2):
                    for parameter in parameters:
                        parameter.grad = torch.randn_like(parameter)
                    optimizer.step()


def run_clip_grad_norm():
    """Whole chunks, aligned and not, and parts of one; every kind of norm; more chunks than blocks."""
    from cuda_ops.nn.utils import clip_grad_norm_

    for dtype, norm_type in itertools.product(DTYPES, [1, 2, 3, float("inf")]):
        parameters = [torch.randn(n, device="cuda", dtype=dtype)[n % 2 :].requires_grad_() for n in (0, 3, 4096, 9001)]
        for parameter in parameters:
            storage = torch.randn(parameter.numel() + 1, device="cuda", dtype=dtype)
            parameter.grad = storage[1:] if parameter.numel() == 9000 else storage[:-1]
        clip_grad_norm_(parameters, 1e-3, norm_type)
    big = torch.zeros(1100 * 4096 + 5, device="cuda", requires_grad=True)
    big.grad = torch.ones_like(big)
    clip_grad_norm_(big, 1.0)


def run_rungs():
    """Each rung of the GEMM ladder, at a size that no tile divides and at one that whole tiles do."""
    from cuda_ops.functional import matmul
    from cuda_ops.ladder import gemm

    for rung in gemm.rungs.values():
        if rung.device != "cuda":
            continue
        for dtype, tf32, (m, n, k) in itertools.product(DTYPES, [False, True], [(35, 79, 19), (136, 264, 96)]):
            if tf32 and dtype != torch.float32:
                continue
            torch.backends.cuda.matmul.allow_tf32 = tf32
            a, b = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype)
            for operands in ((a, b.T), (a, b.T.contiguous()), (a.T.contiguous().T, b.T)):
                if rung.runs(*operands):
                    rung(*operands)
    torch.backends.cuda.matmul.allow_tf32 = False
    for m in (60, 124):  # simt's tiles for batches
        a, b = torch.randn(300, m, 36, device="cuda"), torch.randn(300, 36, 60, device="cuda")
        matmul(a, b)
        matmul(a, b.mT.contiguous().mT)


def run_conv_path(path, dtype, channels, kernel, size=(9, 7), groups=1, memory_format=torch.channels_last, stride=1):
    """The products of one convolution that the path can make, at a size that no tile divides."""
    from cuda_ops._library import ops

    inputs, outputs = channels
    last = memory_format == torch.channels_last
    image = torch.randn(2, inputs, *size, device="cuda").to(dtype).to(memory_format=memory_format)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, device="cuda").to(dtype)
    bias = torch.randn(outputs, device="cuda").to(dtype)
    padding = kernel // 2
    size = [(extent + 2 * padding - kernel) // stride + 1 for extent in size]
    grad = torch.randn(2, outputs, *size, device="cuda").to(dtype).to(memory_format=memory_format)
    parameters = (stride,) * 2, (padding,) * 4, (1, 1), groups
    os.environ["CUDA_OPS_CONV2D_PATH"] = path
    for name, op, arguments in [
        ("forward", ops.conv2d_forward, (image, weight, bias)),
        ("backward_input", ops.conv2d_backward_input, (grad, weight, image.shape, last)),
        ("backward_weight", ops.conv2d_backward_weight, (grad, image, weight.shape, last)),
    ]:
        if ops.conv2d_path(image, weight, name, *parameters) == path:
            op(*arguments, *parameters)
    del os.environ["CUDA_OPS_CONV2D_PATH"]


def run_tensor_cores(path):
    """conv2d's paths that are tiles of a matrix product: sizes and channels that no tile divides."""
    torch.backends.cudnn.allow_tf32 = True
    for dtype, kernel in itertools.product(DTYPES, [1, 3]):
        run_conv_path(path, dtype, (40, 72), kernel)
    if path in ("gemm_1x1", "sm90", "mma"):
        for dtype, kernel, groups in itertools.product(DTYPES, [1, 3], [1, 3]):
            run_conv_path(path, dtype, (24, 168), kernel, groups=groups, stride=2)
    if path == "grouped":
        for dtype, kernel, stride in itertools.product(DTYPES, [1, 3], [1, 2]):
            run_conv_path(path, dtype, (24, 168), kernel, groups=3, stride=stride)
    if path == "padded":
        formats = torch.contiguous_format, torch.channels_last
        for dtype, groups, memory_format in itertools.product(DTYPES, [1, 3], formats):
            run_conv_path(path, dtype, (21, 69), 3, memory_format=memory_format, groups=groups, stride=2)


# Sizes whose rows are whole 16-byte vectors, and others; in either memory format.
DIRECT = list(itertools.product([(9, 7), (10, 24)], [torch.contiguous_format, torch.channels_last]))


def run_few_channels():
    for dtype, allowed in [
        (torch.float32, False),
        (torch.float32, True),
        (torch.float16, True),
        (torch.bfloat16, True),
    ]:
        torch.backends.cudnn.allow_tf32 = allowed
        for (size, memory_format), (channels, kernel) in itertools.product(
            DIRECT, [((1, 33), 3), ((3, 64), 7), ((3, 40), 3), ((4, 8), 1), ((3, 8), 5)]
        ):
            run_conv_path("few_channels", dtype, channels, kernel, size, 1, memory_format)
        # Rows so long that the data gradient goes down the image in a loop.
        run_conv_path("few_channels", dtype, (3, 8), 3, (9, 230), 1, torch.contiguous_format)
        for (size, memory_format), kernel in itertools.product(DIRECT, [7, 3]):
            run_conv_path("few_channels", dtype, (3, 40), kernel, size, 1, memory_format, stride=2)


def run_patches():
    for dtype, (size, memory_format) in itertools.product([torch.float16, torch.bfloat16], DIRECT):
        for channels, kernel, stride in [((3, 40), 4, 4), ((5, 24), 3, 3), ((3, 33), 7, 2), ((1, 8), 8, 8)]:
            run_conv_path("patches", dtype, channels, kernel, size, 1, memory_format, stride=stride)


def run_depthwise():
    for dtype, (size, memory_format) in itertools.product(DTYPES, DIRECT):
        for channels, kernel in [((36, 36), 3), ((68, 68), 5), ((8, 8), 7), ((3, 6), 3), ((3, 3), 1)]:
            run_conv_path("depthwise", dtype, channels, kernel, size, channels[0], memory_format)


def run_plans():
    """Tiles of mma (float64), sm90, sm90_skinny, padded, direct, narrow, k whole and split, at a size none divides; a
    batch."""
    from cuda_ops._library import ops

    plans = [(13, tile, splits, 0) for tile in range(8) for splits in (1, 2)] + [(13, 4, 1, 1)]
    plans += [(13, tile, splits, 0) for tile in range(10, 16) for splits in (1, 2)]  # without gelu
    plans += [(13, tile, 1, 0) for tile in (*range(16, 22), 25, 26)]  # two to four blocks to a tile, in a cluster
    plans += [(14, tile, splits, swapped) for tile in range(3) for splits in (1, 2) for swapped in (0, 1)]
    for plan, dtype in itertools.product(plans, [torch.float32, torch.float16, torch.bfloat16]):
        a, b = (torch.randn(lines, 200, device="cuda").to(dtype) for lines in (72, 136))
        for operands in ((a, b.T), (a, b.T.contiguous()), (a.T.contiguous().T, b.T.contiguous())):
            try:
                ops.gemm_planned(*operands, plan, allow_tf32=True)
            except NotImplementedError:  # not for this dtype and these storage orders
                continue
    # An odd number of rows of tiles, of which a cluster takes two at a time.
    for tile, dtype in itertools.product([*range(4), *range(10, 16)], [torch.float32, torch.bfloat16]):
        a, b = (torch.randn(lines, 200, device="cuda").to(dtype) for lines in (520, 392))
        try:
            ops.gemm_planned(a, b.T, (13, tile, 1, 0), allow_tf32=True)
        except NotImplementedError:
            continue
    # More tiles than two a multiprocessor, so that blocks loop over them.
    for tile, dtype in itertools.product(range(4, 8), [torch.float32, torch.bfloat16]):
        a, b = (torch.randn(300, 16, 72, device="cuda").to(dtype) for _ in range(2))
        for operands in ((a, b.mT), (a.mT, b), (a, b.mT.contiguous())):
            try:
                ops.gemm_planned(*operands, (13, tile, 1, 0), allow_tf32=True)
            except NotImplementedError:
                continue
    # Rows of no whole 16 bytes, which are copied first; of D too.
    padded = [(16, tile, splits, swapped) for tile in (0, 1, 4, 6, 33) for splits in (1, 2) for swapped in (0, 1)]
    for plan, dtype in itertools.product([*padded, (16, 16, 1, 0)], [torch.float32, torch.float16, torch.bfloat16]):
        a, b = (torch.randn(3, lines, 201, device="cuda").to(dtype) for lines in (71, 137))
        for operands in ((a, b.mT), (a, b.mT.contiguous()), (a.mT.contiguous().mT, b.mT.contiguous())):
            try:
                ops.gemm_planned(*operands, plan, allow_tf32=True)
            except NotImplementedError:
                continue
    for tile, splits in itertools.product(range(3), (1, 2)):
        a, b = (torch.randn(lines, 200, device="cuda", dtype=torch.float64) for lines in (72, 134))
        for operands in ((a, b.T), (a, b.T.contiguous()), (a.T.contiguous().T, b.T.contiguous())):
            ops.gemm_planned(*operands, (11, tile, splits, 0))
    for tile, splits, dtype in itertools.product(range(6), (1, 4), [torch.float32, torch.float64]):
        a, b = (torch.randn(lines, 200, device="cuda", dtype=dtype) for lines in (72, 134))
        for operands in ((a, b.T), (a, b.T.contiguous()), (a.T.contiguous().T, b.T.contiguous())):
            ops.gemm_planned(*operands, (15, tile, splits, 0))
    # narrow: rows of several alignments, and a k that several blocks share.
    for width, dtype in itertools.product((33, 34, 40), [torch.float32, torch.float16, torch.bfloat16]):
        a, b, c = (torch.randn(lines, width, device="cuda").to(dtype) for lines in (999, 72, 999))
        ops.gemm_planned(a, b.T, (17, 0, 1, 0))
        ops.gemm_planned(a.T, c, (17, 0, 3, 0))


def run_mnist_step():
    """Images that two blocks share, where some have none; images of a block alone, where some have two or none; and
    in rounds, where blocks have four or five. Two steps, so that all phases repeat."""
    import cuda_ops
    from cuda_ops.models import MnistCNN
    from cuda_ops.training import MnistStep

    for batch in (5, 130, 70, 600):
        if MnistStep.why_not("cuda", batch) is not None:
            continue
        model = MnistCNN("fused").cuda()
        images = torch.randint(256, (100, 28, 28), dtype=torch.uint8, device="cuda")
        labels = torch.randint(10, (100,), device="cuda")
        step = MnistStep(model, cuda_ops.optim.SGD(model.parameters(), lr=0.01), images, labels, label_smoothing=0.1)
        step(torch.randint(100, (2, batch), device="cuda"))


CASES = {spec.name: functools.partial(run_spec, spec) for spec in load_specs()}
for path in ("simt", "gemm_1x1", "sm90", "sm90_halo", "mma", "grouped", "padded", "im2col"):
    CASES[f"conv2d_{path}"] = functools.partial(run_tensor_cores, path)
CASES |= {"conv2d_few_channels": run_few_channels, "conv2d_depthwise": run_depthwise, "conv2d_patches": run_patches}
CASES |= {"sgd": run_optimizer, "adam": run_adam, "clip_grad_norm": run_clip_grad_norm}


def run_ladders():
    """Each rung of the other ladders, on their test cases."""
    from cuda_ops.ladder import Numbers, ladders

    for ladder in ladders().values():
        for rung, dtype, case in itertools.product(ladder.rungs.values(), ladder.dtypes, ladder.tests):
            if rung.device != "cuda" or case.elements > LARGEST:
                continue
            inputs = case.inputs(Numbers("cuda", dtype))
            if rung.runs(*inputs):
                rung(*inputs)


# Case: (file in tests, pytest's -k).
TESTS = {
    "conv2d_tiles": (
        "ops/test_conv2d_paths.py",
        "cluster or few_columns or no_query or im2col or tensor_cores or long_sums",
    ),
    "conv2d_odd_channels": ("ops/test_conv2d_paths.py", "odd_channels"),
    "conv2d_winograd": ("ops/test_conv2d_winograd.py", "test_values or nonfinite"),
    "gemm_padded": ("ops/test_gemm_padded.py", "test_plans or test_layouts or k_major"),
    "gemm_tiles": ("ops/test_gemm_rungs.py", "test_plans or test_pairs or simt_plans"),
    "gemm_narrow": ("ops/test_gemm_narrow.py", "rows or columns or short_k"),
    "gemm_3xtf32": ("ops/test_gemm_3xtf32.py", "test_plans or amid_others"),
    "concat_batch_norm_act": ("ops/test_concat_batch_norm_act.py", "is_concat or second_derivatives or frozen"),
    "batch_norm_act_forked": ("ops/test_batch_norm_act_forked.py", "sum_of_two or not_dense"),
    "layer_norm_rounded": ("test_convert_autocast.py", "test_rounded_norms or test_rounded_rms"),
    "batch_norm_kept": (
        "ops/test_batch_norm.py",
        "whole_vectors or one_block_keeps or come_of_the_forward or of_a_cluster",
    ),
    "attention_float32": ("ops/test_attention.py", "paths_of_float32"),
    "attention_long_rows": ("ops/test_attention.py", "rows_on_hopper"),
    "attention_gradients": ("ops/test_attention.py", "many_blocks or test_paths_of_halves"),
}


def run_tests(file, chosen):
    arguments = ["-q", "-x", "-m", "cuda", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
    status = pytest.main([*arguments, str(Path(__file__).parents[1] / file)])
    if status != pytest.ExitCode.OK:
        sys.exit(f"tests of {file} ended with {status}")


CASES |= {name: functools.partial(run_tests, *test) for name, test in TESTS.items()}
CASES |= {"ladder_rungs": run_ladders, "gemm_rungs": run_rungs, "gemm_plans": run_plans, "mnist_step": run_mnist_step}


def main():
    if "--list" in sys.argv[1:]:
        print("\n".join(CASES))
        return
    chosen = sys.argv[1:] or list(CASES)
    if unknown := [name for name in chosen if name not in CASES]:
        sys.exit(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    # Backward in this thread. A thread of PyTorch's autograd that waits for Python while the process ends is killed by
    # Python in the midst of C++ ("terminate called without an active exception", pytorch/pytorch#38228), which the
    # sanitizer, under which all is slow, makes likely.
    torch.autograd.set_multithreading_enabled(False)
    for name in chosen:
        start = time.perf_counter()
        CASES[name]()
        torch.cuda.synchronize()
        print(f"# {name}: {time.perf_counter() - start:.1f} s\n{name}", flush=True)


if __name__ == "__main__":
    main()
