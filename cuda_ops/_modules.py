"""Parameters and buffers of a module, for functions that small calls do feel.

To Python they are no attributes: it looks through all classes, makes an AttributeError and only then asks
torch.nn.Module.__getattr__, which for the twenty tensors of a small network takes longer than an op.
"""


def parameter(module, name: str):
    """module.<name>, found where a parameter usually is."""
    try:
        return module._parameters[name]
    except KeyError:
        return getattr(module, name)


def buffer(module, name: str):
    """module.<name>, found where a buffer usually is."""
    try:
        return module._buffers[name]
    except KeyError:
        return getattr(module, name)
