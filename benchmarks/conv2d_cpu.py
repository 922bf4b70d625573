"""Convolutions of torchvision's classification models on the CPU, ours beside PyTorch's better layout.

    python benchmarks/conv2d_cpu.py --models resnet18 --batch 8 --resolution 64        # each convolution of a model
    python benchmarks/conv2d_cpu.py --count 100 --seed 0 --threads 1                   # a draw from all models

Forward and both gradients of each call, in float32: ours in the contiguous and in the channels_last format, each over
the faster of PyTorch's two, in calls that alternate. One thread is timed by its own processor time, so that other
processes on the machine count for little; several by the wall clock. The minimum of the repetitions is kept.
"""

import argparse
import math
import random
import time

import torch
import torchvision

import cuda_ops  # noqa: F401  (registers the ops)

PRODUCTS = ("forward", "backward_input", "backward_weight")
FORMATS = (torch.contiguous_format, torch.channels_last)


def calls_of(name, batch, resolution):
    """The convolutions of a model, each once: (batch, in, height, width, weight's shape, stride, padding, dilation,
    groups)."""
    if "regnet" in name and not name.endswith(("400mf", "800mf", "1_6gf")):
        return {}  # regnets cannot be made on the meta device, and the others are large
    with torch.device("cpu" if "regnet" in name else "meta"):
        arguments = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
        model = torchvision.models.get_model(name, **arguments).eval().to("meta")
    calls = {}

    def keep(layer, inputs, _):
        weight = tuple(layer.weight.shape)
        padding = layer.padding if isinstance(layer.padding, tuple) else (0, 0)
        call = (tuple(inputs[0].shape), weight, layer.stride, padding, layer.dilation, layer.groups)
        calls[call] = calls.get(call, 0) + 1

    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(keep)
    try:
        model(torch.empty(batch, 3, resolution, resolution, device="meta"))
    except (AssertionError, RuntimeError, ValueError):  # not a resolution of this model
        return {}
    return calls


def products(call, layout):
    """Ours and PyTorch's functions of no argument for each product."""
    shape, weight_shape, stride, padding, dilation, groups = call
    x = torch.randn(shape).contiguous(memory_format=layout)
    w = torch.randn(weight_shape).contiguous(memory_format=layout)
    last = layout == torch.channels_last
    four = (padding[0], padding[0], padding[1], padding[1])
    ops, aten = torch.ops.cuda_ops, torch.ops.aten
    forward = lambda: ops.conv2d_forward(x, w, None, stride, four, dilation, groups)  # noqa: E731
    native = lambda: aten.convolution(x, w, None, stride, padding, dilation, False, (0, 0), groups)  # noqa: E731
    g = torch.randn_like(native()).contiguous(memory_format=layout)

    def backward(mask):
        arguments = (g, x, w, None, stride, padding, dilation, False, (0, 0), groups, mask)
        return lambda: aten.convolution_backward(*arguments)[mask.index(True)]

    ours = {
        "forward": forward,
        "backward_input": lambda: ops.conv2d_backward_input(g, w, shape, last, stride, four, dilation, groups),
        "backward_weight": lambda: ops.conv2d_backward_weight(g, x, weight_shape, last, stride, four, dilation, groups),
    }
    theirs = {
        "forward": native,
        "backward_input": backward([True, False, False]),
        "backward_weight": backward([False, True, False]),
    }
    return ours, theirs


def measure(functions, clock, seconds):
    """The least time of each function in calls that alternate for about so long, at least three of each."""
    least = [math.inf] * len(functions)
    stop, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or (time.perf_counter() < stop and rounds < 200):
        for i, function in enumerate(functions):
            begin = clock()
            function()
            least[i] = min(least[i], clock() - begin)
        rounds += 1
    return least


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", help="take all convolutions of these models")
    parser.add_argument("--count", type=int, default=100, help="or draw so many from all models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.05, help="for each product of each call")
    parser.add_argument("--check", action="store_true", help="compare with float64 instead of timing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    if arguments.models:
        calls = {}
        for name in arguments.models:
            calls.update(calls_of(name, arguments.batch, arguments.resolution))
    else:
        random.seed(arguments.seed)
        names = torchvision.models.list_models(torchvision.models)
        calls = {}
        while len(calls) < arguments.count:
            batch, resolution = random.choice((1, 2, 4, 8)), random.choice((48, 64, 80, 96))
            found = calls_of(random.choice(names), batch, resolution)
            if found:
                call = random.choice(list(found))
                if 6 * call[0][0] * math.prod(call[1]) * call[0][2] * call[0][3] < 6e9 * call[2][0] * call[2][1]:
                    calls[call] = 1

    if arguments.check:
        for call in calls:
            for layout in FORMATS:
                ours, theirs = products(call, layout)
                for product in PRODUCTS:
                    a, b = ours[product](), theirs[product]()
                    error = ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
                    assert error < 1e-5, (call, layout, product, error)
        print(f"{len(calls)} convolutions agree")
        return

    ratios, total = [], {}
    for call, times in calls.items():
        results = {}
        both = [products(call, layout) for layout in FORMATS]
        for product in PRODUCTS:
            if product == "backward_input" and call[0][1] == 3:
                continue
            functions = [each[product] for pair in both for each in pair]
            results[product] = measure(functions, clock, arguments.seconds)
        shape, weight, stride, padding, _, groups = call
        text = f"{'x'.join(map(str, shape))} {'x'.join(map(str, weight))} s{stride[0]} p{padding[0]} g{groups} x{times}"
        flops = 2 * math.prod(weight) * shape[0] * shape[2] * shape[3] / stride[0] / stride[1]  # about
        row = [text.ljust(52)]
        for product, (ours, theirs, ours_last, theirs_last) in results.items():
            best = min(theirs, theirs_last)
            ratios += [(best / ours, "contiguous", product, text), (best / ours_last, "channels_last", product, text)]
            for key, value in zip(("ours", "torch", "ours_last", "torch_last"), results[product], strict=True):
                total[key, product] = total.get((key, product), 0) + times * value
            row.append(f"{best * 1e6:7.0f} us {best / ours:5.2f} {best / ours_last:5.2f} {flops / best / 1e9:5.0f} GF")
        print("  ".join(row), flush=True)
    print("\nratio of PyTorch's better layout to ours (above 1: ours is faster)")
    for layout in ("contiguous", "channels_last"):
        for product in PRODUCTS:
            values = sorted(r for r, *which in ratios if which[:2] == [layout, product])
            mean = math.exp(sum(map(math.log, values)) / len(values))
            print(
                f"{layout:14s} {product:16s} geometric mean {mean:.2f}, 5 % {values[len(values) // 20]:.2f}, "
                f"least {values[0]:.2f}"
            )
    for ratio, *which in sorted(ratios)[:12]:
        print(f"{ratio:.2f}", *which)
    print("sums in ms:")
    for (key, product), value in total.items():
        print(f"{key:10s} {product:16s} {value * 1e3:.2f}")


if __name__ == "__main__":
    main()
