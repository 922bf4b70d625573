"""What the tests of conv2d share."""

import torch

native = torch.nn.functional.conv2d
FORMATS = [torch.contiguous_format, torch.channels_last]
PASSES = ("forward", "backward_input", "backward_weight")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def is_channels_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
