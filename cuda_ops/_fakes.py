"""torch.library.register_fake, with the check that every fake kernel needs."""

import torch
from torch import Tensor


def register_fake(name: str):
    """As torch.library.register_fake; the fake is called once all tensors are known to be on one device.

    Others than fake tensors meet fakes too: one tensor on `meta`, of a layer that was left there say, sends the whole
    call here, and what a fake makes "like input" would be memory of the CPU that nobody has written to.

    What PyTorch says of sizes that no tensor has is told with the op's name.
    """
    op = name.removeprefix("cuda_ops::").removesuffix("_").removesuffix("_forward")

    def register(fake):
        schema = getattr(torch.ops.cuda_ops, name.removeprefix("cuda_ops::")).default._schema
        arguments = [argument.name for argument in schema.arguments]

        def checked(*args, **kwargs):
            check_devices(op, {**dict(zip(arguments, args, strict=False)), **kwargs})
            try:
                return fake(*args, **kwargs)
            except (RuntimeError, IndexError, ValueError) as error:
                # Others, of their subclasses, are those of symbolic sizes.
                ours = type(error) in (RuntimeError, IndexError, ValueError)
                if not ours or op.removesuffix("_backward") in str(error) or op.startswith(str(error).split(":")[0]):
                    raise
                raise type(error)(f"{op}: {error}") from error

        return torch.library.register_fake(name)(checked)

    return register


def require_ops(*names: str):
    """For ops that have no fake, being made of others: an error at import, as a fake would be, where the library is too
    old to have them."""
    for name in names:
        if not hasattr(torch.ops.cuda_ops, name):
            raise RuntimeError(f"operator cuda_ops::{name} does not exist")


def check_devices(op: str, arguments: dict):
    """Refuses tensors, alone or in lists, on different devices."""
    first = None
    for argument, value in arguments.items():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            if first is None:
                first = argument, tensor.device
            elif tensor.device != first[1]:
                raise RuntimeError(
                    f"{op}: expected {argument} to be on the device of {first[0]}, {first[1]}, got {tensor.device}"
                )
