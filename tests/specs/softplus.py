import torch
from support.activations import activation_spec

SPEC = activation_spec(
    "softplus",
    torch.nn.functional.softplus,
    [{}, {"beta": 3.0, "threshold": 4.0}, {"beta": -0.5}],
    defaults=(1.0, 20.0),
)
