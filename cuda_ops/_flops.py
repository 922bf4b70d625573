"""What torch.utils.flop_counter.FlopCounterMode counts of our ops: as many operations as of the ops of PyTorch's that
they stand in for, by PyTorch's own formulas. Of what only elementwise work is, it counts nothing, here as there.

Importing the counter imports Triton, so the formulas wait until somebody else does.
"""

import importlib.abc
import importlib.util
import sys
from math import prod

import torch

COUNTER = "torch.utils.flop_counter"


def _convolution_of_block(input, weight, geometry):
    """The output's shape of the convolution in conv_bn_relu_pool."""
    from .ops.conv2d import output_size
    from .ops.conv_bn_relu_pool import Geometry

    stride, padding, dilation, _ = Geometry.of(geometry).convolution
    return output_size(input, weight, stride, padding, dilation)


def _lengths(starts, longest):
    """Of packed sequences; where there are no values, all are taken for the longest, as PyTorch's counter does."""
    if isinstance(starts, torch._subclasses.FakeTensor) or starts.device.type == "meta":
        return [longest] * (starts.shape[0] - 1)
    return starts.diff().tolist()


def register_formulas(flop_counter):
    """Registers them with the module `flop_counter`. They are given shapes, and raw tensors where it says so."""
    convolution, attention = flop_counter.conv_flop_count, flop_counter.sdpa_flop_count
    attention_backward = flop_counter.sdpa_backward_flop_count

    def register(*names, get_raw=False):
        # A library may have been built of some of the ops alone.
        packets = [getattr(torch.ops.cuda_ops, name) for name in names if hasattr(torch.ops.cuda_ops, name)]
        return flop_counter.register_flop_formula(packets, get_raw=get_raw)

    def gradient_of_weight(grad_output, input, weight):
        def transposed(shape):
            return [shape[1], shape[0], *shape[2:]]

        return convolution(transposed(input), transposed(grad_output), transposed(weight))

    def of_heads(query, key, value):
        """The shapes with as many heads of keys as of queries, which share them."""
        return query, [key[0], query[1], *key[2:]], [value[0], query[1], *value[2:]]

    @register("matmul_forward")
    def _(input, other, out_shape=None):
        return 2 * prod(input) * other[-1]

    @register("gemm_rung", "gemm_planned")
    def _(a, b, *args, out_shape=None, **kwargs):
        return 2 * prod(a) * b[-1]

    @register("linear_forward", "linear_relu_forward", "linear_gelu_forward")
    def _(input, weight, *args, out_shape=None):
        return 2 * prod(input) * weight[0]

    @register("linear_untransposed_forward")
    def _(input, weight, *args, out_shape=None):
        return 2 * prod(input) * weight[1]

    @register("linear_rounded_forward")
    def _(input, weight, *args, out_shape=None):
        return 2 * prod(input) * prod(weight) // max(1, input[-1])

    @register("excitation_forward")
    def _(input, weight1, bias1, weight2, *args, out_shape=None):
        return 2 * input[0] * weight1[0] * (weight1[1] + weight2[0])

    @register("window_attention_forward")
    def _(qkv, bias, num_heads, window_size, *args, out_shape=None):
        return 4 * prod(qkv) // 3 * prod(window_size)

    @register("window_attention_backward")
    def _(grad_output, qkv, bias, num_heads, window_size, *args, out_shape=None):
        return 10 * prod(qkv) // 3 * prod(window_size)

    @register("linear_backward_input", "gelu_linear_backward")
    def _(grad_output, weight, *args, out_shape=None):
        return 2 * prod(grad_output) * weight[1]

    @register("linear_backward_weight", "linear_backward_float32_weight")
    def _(grad_output, input, out_shape=None):
        return 2 * prod(grad_output) * input[-1]

    @register("linear_relu_backward")
    def _(grad_output, output, input, weight, with_input, with_weight, with_bias, out_shape=None):
        return 2 * prod(grad_output) * weight[1] * (with_input + with_weight)

    # Gradients are made beside the loss, and count there.
    @register("linear_cross_entropy_forward")
    def _(input, weight, *args, out_shape=None):
        with_input, with_weight = args[-3:-1]
        return 2 * prod(input) * weight[0] * (1 + with_input + with_weight)

    @register("conv1d_forward", "conv2d_forward", "conv_bn_act_inference")
    def _(input, weight, *args, out_shape=None):
        return convolution(input, weight, out_shape)

    @register("conv_transpose1d_forward", "conv_transpose2d_forward")
    def _(input, weight, *args, out_shape=None):
        return convolution(input, weight, out_shape, transposed=True)

    @register("conv1d_backward_input", "conv2d_backward_input")
    def _(grad_output, weight, *args, out_shape=None):
        return convolution(grad_output, weight, out_shape, transposed=True)

    @register("conv1d_backward_weight", "conv2d_backward_weight")
    def _(grad_output, input, *args, out_shape=None):
        return gradient_of_weight(grad_output, input, out_shape)

    @register("conv_bn_relu_pool_forward", "conv_bn_relu_pool_inference")
    def _(input, weight, *args, out_shape=None):
        return convolution(input, weight, _convolution_of_block(input, weight, args[-1]))

    @register("conv_bn_relu_pool_backward")
    def _(grad_output, input, weight, *args, out_shape=None):
        geometry, needs_grad_input = args[-2:]
        output = _convolution_of_block(input, weight, geometry)
        flops = gradient_of_weight(output, input, weight)
        return flops + (convolution(output, weight, input, transposed=True) if needs_grad_input else 0)

    # As PyTorch counts: all keys for each query, whatever masks, windows or causality hide, and in backward the scores
    # once more.
    @register("attention_forward")
    def _(query, key, value, *args, out_shape=None):
        return attention(*of_heads(query, key, value))

    @register("attention_backward")
    def _(grad_output, grad_logsumexp, query, key, value, *args, out_shape=None):
        return attention_backward(grad_output, *of_heads(query, key, value))

    def packed(qkv):
        batch, length, _, heads, head_dim = qkv
        return [batch, heads, length, head_dim]

    @register("attention_packed_forward")
    def _(qkv, *args, out_shape=None):
        return attention(*[packed(qkv)] * 3)

    @register("attention_packed_backward")
    def _(grad_output, grad_logsumexp, qkv, *args, out_shape=None):
        return attention_backward(*[packed(qkv)] * 4)

    def sequences(query, key, value, starts, longest):
        """(query, key, value) of each packed sequence."""
        lengths = [_lengths(*each) for each in zip(starts, longest, strict=True)]
        for queries, keys in zip(*lengths, strict=True):
            heads = query.shape[1]
            yield [[1, heads, n, t.shape[2]] for n, t in zip((queries, keys, keys), (query, key, value), strict=True)]

    @register("attention_varlen_forward", get_raw=True)
    def _(query, key, value, starts_q, starts_k, slopes, longest_q, longest_k, *args, out_val=None):
        found = sequences(query, key, value, (starts_q, starts_k), (longest_q, longest_k))
        return sum(attention(*shapes) for shapes in found)

    @register("attention_varlen_backward", get_raw=True)
    def _(
        grad_output, grad_logsumexp, query, key, value, starts_q, starts_k, slopes, output, logsumexp, longest_q,
        longest_k, *args, out_val=None,
    ):  # fmt: skip
        found = sequences(query, key, value, (starts_q, starts_k), (longest_q, longest_k))
        return sum(attention_backward([*q[:3], v[3]], q, k, v) for q, k, v in found)

    # What the cache has room for, since its lengths are on the device.
    @register("attention_cache_forward")
    def _(query, key_cache, value_cache, lengths, block_table, *args, out_shape=None):
        batch, length, heads, head_dim = query
        keys = key_cache[1] * (1 if block_table is None else block_table[1])
        key, value = [batch, heads, keys, head_dim], [batch, heads, keys, value_cache[3]]
        return attention([batch, heads, length, head_dim], key, value)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds PyTorch's counter as it would be found without us, and registers the formulas once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        register_formulas(module)


def register_with_counter():
    """Registers the formulas now if the counter is loaded, else when it is."""
    if COUNTER in sys.modules:
        register_formulas(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _Finder())
