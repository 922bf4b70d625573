"""The teaching ladders: the same op from plain Python loops, or a naive kernel, to the fastest, a rung at a time.

cuda_ops.ladder.gemm        matrix multiplication
cuda_ops.ladder.reduce      the sum of all elements
cuda_ops.ladder.transpose   a matrix, rows for columns
cuda_ops.ladder.histogram   how often each of 256 numbers is there
cuda_ops.ladder.softmax     softmax of the rows of a matrix
cuda_ops.ladder.layer_norm  layer normalisation of rows, forward and backward
cuda_ops.ladder.attention   softmax(query key^T) value, of heads
cuda_ops.ladder.adamw       an optimizer's step over a list of parameters
cuda_ops.ladder.simulator   a CUDA device in Python, to step through a kernel without one

`ladders()` has all but gemm's, by name: `ladders()["reduce"].rungs["shuffles"](x)`.
"""

from ._ladder import Case, Ladder, Numbers, Rung, Simulated, ladders

__all__ = ["Case", "Ladder", "Numbers", "Rung", "Simulated", "ladders"]
