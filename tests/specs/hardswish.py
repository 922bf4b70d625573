import torch
from support.activations import activation_spec

SPEC = activation_spec("hardswish", torch.nn.functional.hardswish, inplace=True, nan_gradient=False)
