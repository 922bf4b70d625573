import torch
from support.activations import activation_spec

SPEC = activation_spec("relu6", torch.nn.functional.relu6, saved="output", inplace=True, nan_gradient=False)
