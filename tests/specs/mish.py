import torch
from support.activations import activation_spec

SPEC = activation_spec("mish", torch.nn.functional.mish, inplace=True)
