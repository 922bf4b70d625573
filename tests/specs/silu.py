import torch
from support.activations import activation_spec

SPEC = activation_spec("silu", torch.nn.functional.silu, inplace=True)
