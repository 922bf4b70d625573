"""The model of a race, with inputs and a loss."""

import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._errors import UserError

CLASSES = 1000
# What a race takes where nothing is said: sizes that a CPU computes in a second or so.
DEFAULTS = {"cpu": {"batch": 4, "size": 64, "tokens": 32}, "cuda": {"batch": 64, "size": 224, "tokens": 128}}


@dataclass(frozen=True)
class Subject:
    """A model, on the CPU in float32, and the batch that it is trained with."""

    name: str
    model: torch.nn.Module
    batch: tuple[Tensor, ...]
    call: Callable
    """call(model, *batch) gives the output that `loss` takes."""
    loss: Callable
    """loss(functional, output, *batch) gives one number, by torch.nn.functional or by ours."""
    note: str = ""

    def in_channels_last(self) -> "Subject":
        """With images, and the weights of convolutions, in channels_last; itself where there are no images."""
        if all(tensor.dim() != 4 for tensor in self.batch):
            return self
        model = self.model.to(memory_format=torch.channels_last)
        batch = tuple(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in self.batch)
        note = ", ".join(filter(None, (self.note, "channels_last")))
        return dataclasses.replace(self, model=model, batch=batch, note=note)


def find(text: str, device: str, batch: int | None, size: int | None) -> Subject:
    """The subject of that name: a classification model of torchvision, a class of transformers, or module:function.

    Raises:
        UserError: there is none, or it cannot be made.
    """
    defaults = DEFAULTS[device]
    batch = batch or defaults["batch"]
    torch.manual_seed(0)
    if ":" in text:
        return _of_function(text)
    try:
        import torchvision
    except ImportError:
        torchvision = None
    if torchvision and text in torchvision.models.list_models(module=torchvision.models):
        return _of_torchvision(torchvision, text, batch, size or defaults["size"])
    kind = _transformers_class(text)
    if kind is not None:
        return _of_transformers(kind, batch, size or defaults["tokens"], small=device == "cpu")
    raise UserError(
        f"{text} is neither a classification model of torchvision's{'' if torchvision else ' (which is missing)'}, nor "
        "a class of models of transformers', nor module:function"
    )


def _of_torchvision(torchvision, name, batch, size):
    options = {}
    if name in ("googlenet", "inception_v3"):  # whose other outputs have losses of their own
        options = {"aux_logits": False, "init_weights": False}
    if name.startswith("vit"):
        options["image_size"] = size
    if name.startswith("maxvit"):
        options["input_size"] = (size, size)
    try:
        model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"{name} cannot be made for images of {size} × {size}: {error}") from error
    images, labels = torch.rand(batch, 3, size, size), torch.randint(CLASSES, (batch,))

    def call(model, images, labels):
        return model(images)

    def loss(functional, output, images, labels):
        return functional.cross_entropy(output, labels)

    return Subject(name, model, (images, labels), call, loss, f"batch {batch}, {size} × {size}")


def _transformers_class(name):
    try:
        import transformers
    except ImportError:
        return None
    try:
        kind = getattr(transformers, name, None)
    except (ImportError, RuntimeError):
        return None
    return kind if isinstance(kind, type) and getattr(kind, "config_class", None) else None


def _of_transformers(kind, batch, tokens, small):
    config = kind.config_class()
    if small:
        for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, min(2, getattr(config, name)))
    config.use_cache = False
    try:
        model = kind(config)
    except Exception as error:
        raise UserError(f"{kind.__name__} cannot be made of its default configuration: {error}") from error
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", 224)
        inputs = {"pixel_values": torch.rand(batch, getattr(config, "num_channels", 3), side, side)}
        note = f"batch {batch}, {side} × {side}"
    else:
        inputs = {"input_ids": torch.randint(getattr(config, "vocab_size", 100), (batch, tokens))}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"].clone()
        note = f"batch {batch}, {tokens} tokens"
    names = list(inputs)

    def call(model, *batch):
        return model(**dict(zip(names, batch, strict=True)))

    return Subject(kind.__name__, model, tuple(inputs.values()), call, _mean_square, note + (", 2 layers" * small))


def _of_function(text):
    module, _, function = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{text} cannot be imported: {error}") from error
        try:
            made = make()
        except Exception as error:
            raise UserError(f"{text}() does not run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module)):
        raise UserError(f"{text} has to return a model and its inputs, and if wanted a loss of its output")
    model, inputs, *rest = made
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise UserError(f"{text} has to return the inputs as tensors")
    loss = functools.partial(_given, rest[0]) if rest else _mean_square
    return Subject(text, model.cpu(), tuple(t.cpu() for t in inputs), lambda model, *batch: model(*batch), loss)


def _given(function, functional, output, *batch):
    return function(output)


def _mean_square(functional, output, *batch):
    """The mean square of the first output that is a tensor of numbers."""
    output = first_tensor(output)
    return (output if output.dtype == torch.float64 else output.float()).square().mean()


def first_tensor(output) -> Tensor:
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise UserError("the model's output holds no tensor of floating point numbers")
