import torch
from support.activations import activation_spec

# The gradient comes of the output, as in PyTorch: of one near 1, few digits of the distance from 1 are left.
SPEC = activation_spec("sigmoid", torch.sigmoid, saved="output", reach=2.0)
