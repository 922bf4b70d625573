import torch
from support.activations import activation_spec

SPEC = activation_spec(
    "leaky_relu",
    torch.nn.functional.leaky_relu,
    [{}, {"negative_slope": 0.25}, {"negative_slope": -0.5}],
    inplace=True,
    defaults=(0.01,),
)
