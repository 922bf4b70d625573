import torch
from support.gated import gated_spec

SPEC = gated_spec("swiglu", torch.nn.functional.silu)
