import torch
from support.activations import activation_spec

SPEC = activation_spec(
    "elu", torch.nn.functional.elu, [{}, {"alpha": 1.75}], inplace=True, nan_gradient=False, defaults=(1.0,)
)
