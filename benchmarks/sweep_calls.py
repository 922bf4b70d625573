"""Collects the calls of real models, from which `python -m cuda_ops bench sweep` draws:

    python benchmarks/sweep_calls.py        writes benchmarks/sweep_calls.csv

Each of torchvision's classification and segmentation models runs forward on the meta device, one image at each of its
resolutions, and what it calls of torch.nn.functional is written down: convolutions, linear layers, norms and poolings,
with the number of such calls in all models. Transformers are a matter of a few widths, which are listed here.
"""

import collections
import csv
import json
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

CALLS = Path(__file__).with_suffix(".csv")
RESOLUTIONS = (160, 224)
# Layers, width, width of the feed-forward layer, vocabulary, and lengths of texts.
TRANSFORMERS = {
    "bert-base": (12, 768, 3072, 30522, (128, 512)),
    "bert-large": (24, 1024, 4096, 30522, (128, 384)),
    "distilbert": (6, 768, 3072, 30522, (128,)),
    "gpt2": (12, 768, 3072, 50257, (512, 1024)),
    "gpt2-medium": (24, 1024, 4096, 50257, (1024,)),
    "gpt2-xl": (48, 1600, 6400, 50257, (1024,)),
    "t5-small": (12, 512, 2048, 32128, (128, 512)),
    "t5-base": (24, 768, 3072, 32128, (512,)),
    "vit-base-16": (12, 768, 3072, 1000, (197,)),
    "vit-large-14": (24, 1024, 4096, 1000, (257,)),
    "llama-1b": (16, 2048, 8192, 128256, (512,)),
    "llama-7b": (32, 4096, 11008, 32000, (512,)),
}
GATED = ("llama",)


def pair(value):
    return [value, value] if isinstance(value, int) else list(value)


class WithoutWeights(TorchFunctionMode):
    """Layers made within have parameters on the meta device; what their constructors compute, they do compute."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "meta"}
        return function(*args, **kwargs)


class Recorder(TorchFunctionMode):
    """Counts the calls of the ops that the sweep knows, of one image each."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        call = self.call(getattr(function, "__name__", ""), args, kwargs)
        if call is not None:
            self.calls[call] += 1
        return function(*args, **kwargs)

    @staticmethod
    def call(name, args, kwargs):
        def argument(index, name, default=None):
            return args[index] if len(args) > index else kwargs.get(name, default)

        if name not in SIZES or not args or not isinstance(args[0], torch.Tensor):
            return None
        shape, found = list(args[0].shape), None
        if name == "conv2d":
            weight, padding = argument(1, "weight"), argument(4, "padding", 0)
            if isinstance(padding, str) or len(shape) != 4:
                return None
            found = {"input": shape[1:], "out": weight.shape[0], "kernel": list(weight.shape[2:])}
            found |= {"bias": argument(2, "bias") is not None, "stride": pair(argument(3, "stride", 1))}
            found |= {"padding": pair(padding), "dilation": pair(argument(5, "dilation", 1))}
            found["groups"] = argument(6, "groups", 1)
        elif name == "linear":
            rows = torch.Size(shape[:-1]).numel()
            found = {"rows": rows, "in": shape[-1], "out": argument(1, "weight").shape[0]}
            found["bias"] = argument(2, "bias") is not None
        elif name in ("batch_norm", "group_norm"):
            if len(shape) != 4:
                return None
            found = {"input": shape[1:]} | ({"groups": argument(1, "num_groups")} if name == "group_norm" else {})
        elif name == "layer_norm":
            size = torch.Size(argument(1, "normalized_shape")).numel()
            found = {"rows": torch.Size(shape).numel() // size, "size": size}
        elif name in ("max_pool2d", "avg_pool2d"):
            kernel = argument(1, "kernel_size")
            stride = argument(2, "stride") or kernel
            found = {"input": shape[1:], "kernel": pair(kernel), "stride": pair(stride)}
            found["padding"] = pair(argument(3, "padding", 0))
        elif name == "adaptive_avg_pool2d":
            found = {"input": shape[1:], "output": pair(argument(1, "output_size"))}
        return name, text_of(name, found)


# What is known of a call, by op, in the order in which the file has it.
SIZES = {
    "conv2d": ("input", "out", "kernel", "bias", "stride", "padding", "dilation", "groups"),
    "linear": ("rows", "in", "out", "bias"),
    "batch_norm": ("input",),
    "group_norm": ("input", "groups"),
    "layer_norm": ("rows", "size"),
    "rms_norm": ("rows", "size"),
    "max_pool2d": ("input", "kernel", "stride", "padding"),
    "avg_pool2d": ("input", "kernel", "stride", "padding"),
    "adaptive_avg_pool2d": ("input", "output"),
}


def text_of(op: str, call: dict) -> str:
    return json.dumps([call[name] for name in SIZES[op]], separators=(",", ":"))


def call_of(op: str, text: str) -> dict:
    return dict(zip(SIZES[op], json.loads(text), strict=True))


def calls_of_model(model, resolutions=RESOLUTIONS) -> collections.Counter:
    """{(op, its sizes as text): how many}, of one image at each of the resolutions that the model takes."""
    found = collections.Counter()
    model = model.eval()  # batches of one; batch_norm is a call all the same
    for resolution in resolutions:
        with Recorder() as recorder, torch.no_grad():
            try:
                model(torch.empty(1, 3, resolution, resolution, device="meta"))
            except (RuntimeError, AssertionError, ValueError):  # of one resolution alone, or a larger one
                continue
        found += recorder.calls
    return found


def calls_of_transformers() -> collections.Counter:
    found = collections.Counter()
    for name, (layers, width, hidden, vocabulary, lengths) in TRANSFORMERS.items():
        gated = name.startswith(GATED)
        for rows in lengths:

            def linear(inputs, outputs, count, rows=rows, bias=not gated):
                found["linear", text_of("linear", {"rows": rows, "in": inputs, "out": outputs, "bias": bias})] += count

            linear(width, width, layers * (4 if gated else 1))
            if not gated:
                linear(width, 3 * width, layers)
            linear(width, hidden, layers * (2 if gated else 1))
            linear(hidden, width, layers)
            linear(width, vocabulary, 1)
            norm = "rms_norm" if gated or name.startswith("t5") else "layer_norm"
            found[norm, text_of(norm, {"rows": rows, "size": width})] += 2 * layers + 1
    return found


def collect() -> collections.Counter:
    import torchvision

    found = calls_of_transformers()
    for module in (torchvision.models, torchvision.models.segmentation):
        for name in torchvision.models.list_models(module=module):
            options = {"weights": None} | ({"weights_backbone": None} if "segmentation" in module.__name__ else {})
            with WithoutWeights():
                if name in ("googlenet", "inception_v3"):
                    options["init_weights"] = False  # which take minutes
                model = torchvision.models.get_model(name, **options).to("meta")
            found += calls_of_model(model)
    return found


def main() -> int:
    found = collect()
    with CALLS.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";", lineterminator="\n")
        writer.writerow(["op", "count", "call"])
        writer.writerows((op, count, call) for (op, call), count in sorted(found.items()))
    print(f"{CALLS}: {len(found)} different calls of {sum(found.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
