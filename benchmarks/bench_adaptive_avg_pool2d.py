"""Means of whole planes, as classifiers and squeeze-and-excitation have them, and of a pyramid's windows."""

import torch
from harness import Bench, Implementation, adaptive_pool_cases, in_channels_last

import cuda_ops

BENCH = Bench(
    op="adaptive_avg_pool2d",
    ours=[
        Implementation("ours", cuda_ops.functional.adaptive_avg_pool2d),
        Implementation("ours channels_last", cuda_ops.functional.adaptive_avg_pool2d, in_channels_last),
    ],
    native=[
        Implementation("eager", torch.nn.functional.adaptive_avg_pool2d),
        Implementation("eager channels_last", torch.nn.functional.adaptive_avg_pool2d, in_channels_last),
    ],
    cases=adaptive_pool_cases(),
)
