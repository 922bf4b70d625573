import torch
from support.activations import activation_spec

# The gradient comes of the output, as in PyTorch: of one near 1, few digits of the distance from 1 are left.
SPEC = activation_spec("tanh", torch.tanh, saved="output", reach=1.0)
