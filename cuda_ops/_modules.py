"""Fast access to a module's parameters and buffers, for calls whose host time matters.

To Python they are no attributes: it looks through all classes, makes an AttributeError and only then asks
torch.nn.Module.__getattr__, which for the twenty tensors of a small network takes longer than an op.
"""


def parameter(module, name: str):
    """module.<name>, found where a parameter usually is."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def buffer(module, name: str):
    """module.<name>, found where a buffer usually is."""
    buffers = module._buffers
    return buffers[name] if name in buffers else getattr(module, name)
