"""python -m cuda_ops bench host: what an eager call costs the host, ours beside PyTorch's.

Tensors are tiny, so that a call is all host: arguments parsed, the dispatcher, autograd, allocation, and on CUDA the
launch. On CUDA nothing waits for the GPU while the clock runs, and the queue is emptied before each sample, which is a
few calls long: what is measured is the time of enqueueing. Ours and PyTorch's samples alternate, so that both meet the
same clock rate and the same neighbours.

Whole training steps of torchvision's small models, where it is installed, have two rows: the time of enqueueing, which
waits where the queue is full, and the time until the GPU is done.
"""

import argparse
import csv
import datetime
import gc
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as native

import cuda_ops
from cuda_ops import functional as ours
from cuda_ops._table import print_table

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "densenet121")


@dataclass
class Settings:
    device: torch.device
    samples: int = 200
    calls: int = 20
    """Of a sample. With a dozen launches each they stay far below the 1024 that a CUDA queue holds."""
    steps: int = 20
    """Samples of a training step, of which each is a single one."""
    batch: int = 64
    size: int = 96
    models: tuple[str, ...] = MODELS


def quick(settings: Settings) -> Settings:
    settings.samples, settings.calls, settings.steps = 5, 3, 2
    settings.models = ("squeezenet1_1",)
    return settings


@dataclass
class Case:
    """The same call of both; `tensors` are those that may require grad."""

    name: str
    ours: Callable
    native: Callable
    tensors: tuple[torch.Tensor, ...] = ()


def cases(device) -> Iterator[Case]:
    """Every functional, each in the way it is called most."""

    def make(*shape):
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)

    x, weight, bias = make(4, 4), make(4, 4), make(4)
    images, filters, channels = make(2, 4, 8, 8), make(4, 4, 3, 3), make(4)
    target = torch.tensor([1, 0, 3, 2], device=device)
    table = torch.arange(32, dtype=torch.uint8, device=device).view(8, 4)
    indices = torch.tensor([5, 0], device=device)
    mean, variance = torch.zeros(4, device=device), torch.ones(4, device=device)

    yield Case("square", ours.square, torch.square, (x,))
    yield Case("add2", ours.add2, torch.add, (x, weight))
    yield Case("polynomial", ours.polynomial, lambda x: x * x + x + 1, (x,))
    yield Case("relu", ours.relu, native.relu, (x,))
    for name in (
        "gelu",
        "silu",
        "elu",
        "leaky_relu",
        "softplus",
        "hardtanh",
        "relu6",
        "hardsigmoid",
        "hardswish",
        "mish",
    ):
        yield Case(name, getattr(ours, name), getattr(native, name), (x,))
    yield Case("prelu", ours.prelu, native.prelu, (x, bias))
    yield Case("swiglu", ours.swiglu, lambda x, y: native.silu(x) * y, (x, weight))
    yield Case("geglu", ours.geglu, lambda x, y: native.gelu(x) * y, (x, weight))
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
        yield Case(name, getattr(ours, name), getattr(native, name), (x, weight))
    yield Case(
        "kl_div",
        lambda x, t: ours.kl_div(x, t, reduction="sum"),
        lambda x, t: native.kl_div(x, t, reduction="sum"),
        (x, weight),
    )
    yield Case("logsumexp", lambda x: ours.logsumexp(x, 1), lambda x: torch.logsumexp(x, 1), (x,))
    yield Case("sigmoid", ours.sigmoid, torch.sigmoid, (x,))
    yield Case("tanh", ours.tanh, torch.tanh, (x,))
    tokens = torch.arange(4, device=device).view(2, 2)
    yield Case("embedding", lambda w: ours.embedding(tokens, w), lambda w: native.embedding(tokens, w), (weight,))
    yield Case(
        "token_position_embedding",
        lambda table, places: ours.token_position_embedding(tokens, table, places),
        lambda table, places: native.embedding(tokens, table) + places[:2],
        (weight, x),
    )
    yield Case("dropout", lambda x: ours.dropout(x, 0.5), lambda x: native.dropout(x, 0.5), (x,))
    rows = make(2, 3, 8)
    for name, like in (("dropout1d", rows), ("dropout2d", images), ("dropout3d", images)):
        mine, theirs = getattr(ours, name), getattr(native, name)
        yield Case(name, lambda x, f=mine: f(x, 0.5), lambda x, f=theirs: f(x, 0.5), (like,))
    # What torchvision.ops.stochastic_depth does with rows.
    yield Case(
        "stochastic_depth",
        lambda x: ours.stochastic_depth(x, 0.5, "row"),
        lambda x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5).div_(0.5),
        (images,),
    )
    yield Case(
        "dropout_add",
        lambda x, r: ours.dropout_add(x, r, 0.5),
        lambda x, r: native.dropout(x, 0.5) + r,
        (x, weight),
    )
    yield Case("log_softmax", lambda x: ours.log_softmax(x, 1), lambda x: native.log_softmax(x, 1), (x,))
    yield Case(
        "masked_softmax",
        lambda x: ours.masked_softmax(x, None, 0.5),
        lambda x: native.softmax(x * 0.5, -1),
        (x,),
    )
    yield Case("softmax", lambda x: ours.softmax(x, 1), lambda x: native.softmax(x, 1), (x,))
    yield Case("nll_loss", lambda x: ours.nll_loss(x, target), lambda x: native.nll_loss(x, target), (x,))
    yield Case(
        "cross_entropy", lambda x: ours.cross_entropy(x, target), lambda x: native.cross_entropy(x, target), (x,)
    )
    yield Case("matmul", ours.matmul, torch.matmul, (x, weight))
    yield Case("linear", ours.linear, native.linear, (x, weight, bias))
    yield Case("linear_relu", ours.linear_relu, lambda *t: native.relu(native.linear(*t)), (x, weight, bias))
    yield Case("linear_gelu", ours.linear_gelu, lambda *t: native.gelu(native.linear(*t)), (x, weight, bias))
    yield Case(
        "linear_cross_entropy",
        lambda x, weight, bias: ours.linear_cross_entropy(x, weight, target, bias),
        lambda *t: native.cross_entropy(native.linear(*t), target),
        (x, weight, bias),
    )
    yield Case("max_pool2d", lambda x: ours.max_pool2d(x, 2), lambda x: native.max_pool2d(x, 2), (images,))
    yield Case("avg_pool2d", lambda x: ours.avg_pool2d(x, 2), lambda x: native.avg_pool2d(x, 2), (images,))
    for name in ("adaptive_avg_pool2d", "adaptive_max_pool2d"):
        mine, theirs = getattr(ours, name), getattr(native, name)
        yield Case(name, lambda x, f=mine: f(x, 2), lambda x, f=theirs: f(x, 2), (images,))
    yield Case(
        "conv2d",
        lambda x, w, b: ours.conv2d(x, w, b, padding=1),
        lambda x, w, b: native.conv2d(x, w, b, padding=1),
        (images, filters, channels),
    )
    rows, taps = make(2, 4, 8), make(4, 4, 3)
    for name in ("conv1d", "conv_transpose1d"):
        mine, theirs = getattr(ours, name), getattr(native, name)
        yield Case(
            name,
            lambda x, w, b, f=mine: f(x, w, b, padding=1),
            lambda x, w, b, f=theirs: f(x, w, b, padding=1),
            (rows, taps, channels),
        )
    yield Case(
        "conv_transpose2d",
        lambda x, w, b: ours.conv_transpose2d(x, w, b, stride=2, padding=1),
        lambda x, w, b: native.conv_transpose2d(x, w, b, stride=2, padding=1),
        (images, filters, channels),
    )
    yield Case(
        "batch_norm",
        lambda x, w, b: ours.batch_norm(x, mean, variance, w, b, training=True),
        lambda x, w, b: native.batch_norm(x, mean, variance, w, b, training=True),
        (images, channels, bias),
    )
    yield Case(
        "batch_norm_act",
        lambda x, w, b: ours.batch_norm_act(x, mean, variance, w, b, activation="relu", training=True),
        lambda x, w, b: native.relu(native.batch_norm(x, mean, variance, w, b, training=True)),
        (images, channels, bias),
    )
    yield Case(
        "conv_bn_act",
        lambda x, w, b: ours.conv_bn_act(x, w, b, mean, variance, channels, bias),
        lambda x, w, b: native.relu(native.batch_norm(native.conv2d(x, w, b), mean, variance, channels, bias)),
        (images, filters, bias),
    )
    yield Case(
        "layer_scale_add",
        lambda x, y, w: ours.layer_scale_add(x, y, w),
        lambda x, y, w: y + x * w,
        (images, images.clone(), channels.view(4, 1, 1)),
    )
    cos, sin = images[:1, 0].detach(), images[:1, 1].detach()  # without gradients
    yield Case(
        "rotary_embedding",
        lambda x: ours.rotary_embedding(x, cos, sin),
        lambda x: x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin,
        (images,),
    )
    yield Case(
        "excitation",
        lambda x, w, b, v, c: ours.excitation(x, w, b, v, c),
        lambda x, w, b, v, c: native.linear(native.relu(native.linear(x, w, b)), v, c),
        (x, weight, bias, weight.clone(), bias.clone()),
    )
    yield Case(
        "interleave",
        lambda x, y: ours.interleave(x, y),
        lambda x, y: torch.stack((x, y), 2).flatten(1, 2),
        (images, images.clone()),
    )
    pixels = images.detach().new_ones(2, 4, 4, 24).requires_grad_(images.requires_grad)
    yield Case(
        "window_attention",
        lambda x: ours.window_attention(x, None, 2, 4),
        lambda x: (
            native.scaled_dot_product_attention(*x.view(2, 16, 3, 2, 4).permute(2, 0, 3, 1, 4))
            .transpose(1, 2)
            .reshape(2, 4, 4, 8)
        ),
        (pixels,),
    )
    yield Case(
        "scale_channels",
        lambda x, s: ours.scale_channels(x, s, "sigmoid"),
        lambda x, s: x * native.sigmoid(s),
        (images, images.detach()[:, :, :1, :1].clone().requires_grad_(images.requires_grad)),
    )
    for name in ("layer_norm", "rms_norm"):
        mine, added, theirs = getattr(ours, name), getattr(ours, f"add_{name}"), getattr(native, name)
        yield Case(
            name,
            lambda x, w, norm=mine: norm(x, (4,), w),
            lambda x, w, norm=theirs: norm(x, (4,), w),
            (x, bias),
        )
        yield Case(
            f"add_{name}",
            lambda x, r, w, norm=added: norm(x, r, (4,), w)[0],
            lambda x, r, w, norm=theirs: norm(x + r, (4,), w),
            (x, weight, bias),
        )
    yield Case(
        "permute_contiguous",
        lambda x: ours.permute_contiguous(x, (1, 0)),
        lambda x: torch.permute(x, (1, 0)).contiguous(),
        (x,),
    )
    for name in ("sum", "mean", "prod", "amax", "amin", "var", "std"):
        mine, theirs = getattr(ours, name), getattr(torch, name)
        yield Case(name, lambda x, f=mine: f(x, 1), lambda x, f=theirs: f(x, 1), (x,))
    for name in ("concat", "cat"):
        mine = getattr(ours, name)
        yield Case(name, lambda x, y, f=mine: f((x, y)), lambda x, y: torch.cat((x, y)), (x, weight))
    yield Case("cumsum", lambda x: ours.cumsum(x, 1), lambda x: torch.cumsum(x, 1), (x,))
    yield Case("norm", ours.norm, torch.linalg.vector_norm, (x,))
    rows = torch.tensor([1, 0], device=device)
    columns = rows.view(1, 2).repeat(2, 1)
    for name, chosen in (("index_add", rows), ("scatter_add", columns)):
        mine, theirs = getattr(ours, name), getattr(torch, name)
        yield Case(
            name,
            lambda x, y, f=mine, i=chosen: f(x, 0, i, y[:2, :2] if i.dim() > 1 else y[:2]),
            lambda x, y, f=theirs, i=chosen: f(x, 0, i, y[:2, :2] if i.dim() > 1 else y[:2]),
            (x, weight),
        )
        mine, theirs = getattr(ours, f"{name}_"), getattr(torch.Tensor, f"{name}_")
        yield Case(
            f"{name}_",
            lambda x, y, f=mine, i=chosen: f(x * 1, 0, i, y[:2, :2] if i.dim() > 1 else y[:2]),
            lambda x, y, f=theirs, i=chosen: f(x * 1, 0, i, y[:2, :2] if i.dim() > 1 else y[:2]),
            (x, weight),
        )
    yield Case("histc", lambda: ours.histc(x.detach(), 4, -1, 1), lambda: torch.histc(x.detach(), 4, -1, 1))
    yield Case("bincount", lambda: ours.bincount(tokens.view(-1)), lambda: torch.bincount(tokens.view(-1)))
    for name in ("argmax", "argmin"):
        mine, theirs = getattr(ours, name), getattr(torch, name)
        yield Case(name, lambda f=mine: f(x.detach(), 1), lambda f=theirs: f(x.detach(), 1))
    starts = torch.tensor([0, 8, 16], dtype=torch.int32, device=x.device)
    heads = make(2, 2, 8, 16), make(2, 2, 8, 16), make(2, 2, 8, 16)
    for name in ("scaled_dot_product_attention", "flash_attention"):
        yield Case(name, getattr(ours, name), native.scaled_dot_product_attention, heads)
    yield Case(
        "flash_attention_varlen",
        lambda q, k, v: ours.flash_attention_varlen(q, k, v, starts, starts, 8, 8),
        lambda *qkv: native.scaled_dot_product_attention(*(t.view(2, 8, 2, 16).transpose(1, 2) for t in qkv))
        .transpose(1, 2)
        .reshape(16, 2, 16),
        (make(16, 2, 16), make(16, 2, 16), make(16, 2, 16)),
    )
    token, *caches = (make(2, length, 2, 16).detach() for length in (1, 8, 8))
    yield Case(
        "flash_attention_with_kvcache",
        lambda: ours.flash_attention_with_kvcache(token, *caches),
        lambda: native.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (token, *caches))).transpose(1, 2),
    )
    rows, packed, packed_bias, out = make(8, 2, 16), make(48, 16), make(48), make(16, 16)

    def multi_head(function):
        def run(x, weight, bias, out):
            arguments = x, x, x, 16, 2, weight, bias, None, None, False, 0.0, out, None
            return function(*arguments, need_weights=False)[0]

        return run

    name = "multi_head_attention_forward"
    sides = (multi_head(getattr(module, name)) for module in (ours, native))
    yield Case(name, *sides, (rows, packed, packed_bias, out))
    yield Case(
        "flash_attention_qkvpacked",
        ours.flash_attention_qkvpacked,
        lambda qkv: native.scaled_dot_product_attention(*qkv.transpose(1, 3).unbind(2)).transpose(1, 2),
        (make(2, 8, 3, 2, 16),),
    )
    yield Case(
        "group_norm",
        lambda x, w, b: ours.group_norm(x, 2, w, b),
        lambda x, w, b: native.group_norm(x, 2, w, b),
        (images, channels, bias),
    )
    yield Case(
        "instance_norm",
        lambda x, w, b: ours.instance_norm(x, None, None, w, b),
        lambda x, w, b: native.instance_norm(x, None, None, w, b),
        (images, channels, bias),
    )
    yield Case(
        "conv_bn_relu_pool",
        lambda x, w, b: ours.conv_bn_relu_pool(x, w, b, None, None, padding=1),
        lambda x, w, b: native.max_pool2d(
            native.relu(native.batch_norm(native.conv2d(x, w, b, padding=1), None, None, training=True)), 2
        ),
        (images, filters, channels),
    )
    yield Case(
        "gather_normalize",
        lambda: ours.gather_normalize(table, indices, 0.1, 0.3),
        lambda: (table[indices].float() / 255 - 0.1) / 0.3,
    )


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(settings: Settings, calls: tuple[Callable, Callable], samples: int, count: int, wait: bool = False):
    """(microseconds of ours, of PyTorch's) of one call in each sample. wait: until the GPU is done."""
    times = [], []
    for call in calls:
        for _ in range(3):
            call()
    collecting = gc.isenabled()
    gc.disable()  # as timeit does: what it collects belongs to whoever left it there
    try:
        for sample in range(samples):
            for side in (0, 1) if sample % 2 == 0 else (1, 0):
                call = calls[side]
                synchronize(settings.device)
                start = time.perf_counter()
                for _ in range(count):
                    call()
                if wait:
                    synchronize(settings.device)
                times[side].append((time.perf_counter() - start) * 1e6 / count)
    finally:
        synchronize(settings.device)
        if collecting:
            gc.enable()
    return times


def percentile(values, percent):
    values = sorted(values)
    return values[round((len(values) - 1) * percent / 100)]


def row(name, mode, times):
    result = {"call": name, "mode": mode, "samples": len(times[0])}
    for side, values in zip(("ours", "pytorch"), times, strict=True):
        result[f"{side}_us"] = statistics.median(values)
        result[f"{side}_p10_us"], result[f"{side}_p90_us"] = percentile(values, 10), percentile(values, 90)
    result["ratio"] = result["ours_us"] / result["pytorch_us"]
    return result


def call_rows(settings: Settings) -> Iterator[dict]:
    """Forward without a gradient, with one, and with its backward; on CUDA the same under autocast."""
    device = settings.device
    autocasts = [None, torch.bfloat16] if device.type == "cuda" else [None]
    for case in cases(device):
        for dtype in autocasts:
            suffix = "" if dtype is None else ", autocast"

            def context(dtype=dtype):
                return nullcontext() if dtype is None else torch.autocast("cuda", dtype)

            functions = case.ours, case.native
            calls = tuple(partial(f, *case.tensors) for f in functions)
            with context():
                yield row(case.name, f"forward{suffix}", measure(settings, calls, settings.samples, settings.calls))
            if not case.tensors:
                continue
            leaves = [tensor.detach().clone().requires_grad_() for tensor in case.tensors]
            calls = tuple(partial(f, *leaves) for f in functions)
            with context():
                times = measure(settings, calls, settings.samples, settings.calls)
                yield row(case.name, f"forward, with grad{suffix}", times)
                grad = torch.ones_like(calls[0]())

            def both(function, leaves=leaves, grad=grad, context=context):
                for leaf in leaves:
                    leaf.grad = None
                with context():
                    output = function(*leaves)
                output.backward(grad.to(output.dtype) if output.dtype != grad.dtype else grad)

            calls = tuple(partial(both, f) for f in functions)
            times = measure(settings, calls, settings.samples, settings.calls)
            yield row(case.name, f"forward + backward{suffix}", times)


def optimizer_rows(settings: Settings) -> Iterator[dict]:
    for momentum in (0.0, 0.9):
        steps = []
        for optimizer, options in ((cuda_ops.optim.SGD, {}), (torch.optim.SGD, {"fused": True})):
            parameters = [nn.Parameter(torch.zeros(4, 4, device=settings.device)) for _ in range(20)]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            steps.append(optimizer(parameters, lr=0.1, momentum=momentum, **options).step)
        times = measure(settings, tuple(steps), settings.samples, settings.calls)
        yield row(f"SGD, 20 parameters, momentum {momentum:g}", "step", times)


def our_layer(layer: nn.Module) -> nn.Module | None:
    """Our module with the arguments and the state of PyTorch's; None where there is none of ours."""
    kind = type(layer)
    if kind is nn.Conv2d:
        made = cuda_ops.nn.Conv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
            layer.bias is not None,
            layer.padding_mode,
        )
    elif kind is nn.BatchNorm2d:
        made = cuda_ops.nn.BatchNorm2d(
            layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
        )
    elif kind is nn.Linear:
        made = cuda_ops.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    elif kind is nn.ReLU:
        made = cuda_ops.nn.ReLU(layer.inplace)
    elif kind is nn.Dropout:
        made = cuda_ops.nn.Dropout(layer.p, layer.inplace)
    elif kind is nn.MaxPool2d:
        made = cuda_ops.nn.MaxPool2d(
            layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.return_indices, layer.ceil_mode
        )
    elif kind is nn.AvgPool2d:
        made = cuda_ops.nn.AvgPool2d(
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.ceil_mode,
            layer.count_include_pad,
            layer.divisor_override,
        )
    else:
        return None
    made.load_state_dict(layer.state_dict())
    return made.train(layer.training)


def with_our_layers(model: nn.Module) -> nn.Module:
    """The model, its layers replaced by ours where there are such."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            made = our_layer(child)
            if made is not None:
                setattr(parent, name, made)
    return model


def training_step(model, loss_function, optimizer, images, target):
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_function(model(images), target).backward()
        optimizer.step()

    return step


def model_rows(settings: Settings) -> Iterator[dict]:
    """Eager training steps in float32, contiguous: SGD with momentum and cross-entropy, PyTorch's SGD fused."""
    try:
        from torchvision import models
    except ImportError:
        print("host: torchvision is not installed, so that there are no rows of its models", file=sys.stderr)
        return
    device, batch, size = settings.device, settings.batch, settings.size
    images = torch.rand(batch, 3, size, size, device=device)
    target = torch.arange(batch, device=device) % 1000
    for name in settings.models:
        torch.manual_seed(0)
        theirs = getattr(models, name)(weights=None)
        mine = getattr(models, name)(weights=None)
        mine.load_state_dict(theirs.state_dict())
        mine, theirs = with_our_layers(mine).to(device).train(), theirs.to(device).train()
        steps = (
            training_step(
                mine,
                ours.cross_entropy,
                cuda_ops.optim.SGD(mine.parameters(), lr=1e-3, momentum=0.9),
                images,
                target,
            ),
            training_step(
                theirs,
                native.cross_entropy,
                torch.optim.SGD(theirs.parameters(), lr=1e-3, momentum=0.9, fused=True),
                images,
                target,
            ),
        )
        title = f"{name}, batch {batch} at {size}x{size}"
        if device.type == "cuda":
            yield row(title, "training step, enqueued", measure(settings, steps, settings.steps, 1))
        yield row(title, "training step", measure(settings, steps, settings.steps, 1, wait=True))


COLUMNS = ["call", "mode", "ours, µs", "p10 – p90", "PyTorch, µs", "p10 – p90", "ours / PyTorch"]


def cells(result) -> list[str]:
    def spread(side):
        return f"{result[f'{side}_p10_us']:.1f} – {result[f'{side}_p90_us']:.1f}"

    return [
        result["call"],
        result["mode"],
        f"{result['ours_us']:.1f}",
        spread("ours"),
        f"{result['pytorch_us']:.1f}",
        spread("pytorch"),
        f"{result['ratio']:.2f}",
    ]


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def write(folder: Path, settings: Settings, results: list[dict]):
    device = settings.device
    facts = {
        "cpu": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "host.csv", "w", newline="") as file:
        for name, value in facts.items():
            file.write(f"# {name}: {value}\n")
        writer = csv.DictWriter(file, list(results[0]))
        writer.writeheader()
        for result in results:
            writer.writerow({k: f"{v:.3f}" if isinstance(v, float) else v for k, v in result.items()})
    lines = [
        "# Host time of eager calls",
        "",
        "Microseconds, median of samples that alternate between ours and PyTorch's; made by "
        "`python -m cuda_ops bench host`.",
        "",
        *[f"- {name}: {value}" for name, value in facts.items()],
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
        *[f"| {' | '.join(cells(result))} |" for result in results],
        "",
    ]
    (folder / "host.md").write_text("\n".join(lines))


def run(settings: Settings, out: Path) -> list[dict]:
    """Measures all rows on one thread, prints them, and writes <out>/host.csv and <out>/host.md."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = [*call_rows(settings), *optimizer_rows(settings)]
        torch.set_num_threads(threads)
        results += model_rows(settings)
        write(out, settings, results)
    finally:
        torch.set_num_threads(threads)
    slower = [None if result["ratio"] <= 1.0 else "yellow" for result in results]
    print_table(f"Host time of eager calls ({settings.device.type})", COLUMNS, list(map(cells, results)), slower)
    print(f"\nwritten: {out / 'host.csv'}, {out / 'host.md'}")
    return results


def main(device: torch.device, out: Path | None, is_quick: bool):
    settings = Settings(device)
    if device.type == "cpu":  # where the host's calls do not bound a step of 64 images
        settings.batch, settings.size, settings.steps = 2, 64, 5
    run(quick(settings) if is_quick else settings, out or ROOT / "runs" / "host")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for host.csv and host.md; default: runs/host")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    main(torch.device(given.device), given.out, given.quick)
