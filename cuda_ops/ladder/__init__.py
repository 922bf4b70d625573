"""The teaching ladders: the same op from plain Python loops to the fastest kernel, a rung at a time.

cuda_ops.ladder.gemm        matrix multiplication
cuda_ops.ladder.simulator   a CUDA device in Python, to step through a kernel without one
"""
