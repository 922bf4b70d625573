"""Which tables of paths an op's call asks: from the call's arguments to (product, rows)."""

import dataclasses
import math
import os

import torch
from torch._prims_common import suggest_memory_format

from .. import _library
from .._errors import UserError
from .explanation import Device, Path, Product

# Ops whose products have one kernel each (in instances for dtypes and alignment): the file, and the kernels of forward
# and backward, or the functors of elementwise_kernel.
ONE_KERNEL = {
    "add2": ("add2.cu", "add2_forward", None),
    "avg_pool2d": ("avg_pool2d.cu", "avg_pool2d_forward_kernel", "avg_pool2d_backward_kernel"),
    "dropout": ("dropout.cu", "dropout_kernel", "dropout_kernel"),
    # Of numbers for whole channels or rows, by which PyTorch multiplies.
    **dict.fromkeys(
        ("dropout1d", "dropout2d", "dropout3d", "stochastic_depth"), ("dropout.cu", "dropout_kernel", None)
    ),
    "dropout_add": ("dropout.cu", "dropout_kernel", "dropout_kernel"),
    "elu": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "excitation": ("excitation.cu", "excitation_kernel", None),
    "gather_normalize": ("gather_normalize.cu", "gather_normalize_kernel", None),
    "geglu": ("gated.cu", "gated_forward_kernel", "gated_backward_kernel"),
    "gelu": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "hardsigmoid": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "hardswish": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "hardtanh": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "layer_scale_add": ("layer_scale_add.cu", "layer_scale_add_forward_kernel", "layer_scale_add_backward_kernel"),
    "scale_channels": ("scale_channels.cu", "scale_channels_forward_kernel", "scale_channels_backward_kernel"),
    "interleave": ("interleave.cu", "interleave_forward_kernel", "interleave_backward_kernel"),
    "rotary_embedding": ("rotary_embedding.cu", "rotary_embedding_kernel", "rotary_embedding_kernel"),
    "leaky_relu": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "logsumexp": ("logsumexp.cu", "logsumexp_forward_kernel", "logsumexp_backward_kernel"),
    "max_pool2d": ("max_pool2d.cu", "max_pool2d_forward_kernel", "max_pool2d_backward_kernel"),
    "mish": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "nll_loss": ("nll_loss.cu", "nll_loss_forward_kernel", "nll_loss_backward_kernel"),
    "polynomial": ("polynomial.cu", "polynomial_forward", "polynomial_backward"),
    "relu": ("relu.cu", "relu_forward", "relu_backward"),
    "relu6": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "sigmoid": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "silu": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "softplus": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
    "square": ("square.cu", "square_forward", "square_backward"),
    "swiglu": ("gated.cu", "gated_forward_kernel", "gated_backward_kernel"),
    "binary_cross_entropy_with_logits": (
        "pointwise_loss.cu",
        "pointwise_loss_forward_kernel",
        "pointwise_loss_backward_kernel",
    ),
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div"),
        ("pointwise_loss.cu", "pointwise_loss_forward_kernel", "pointwise_loss_backward_kernel"),
    ),
    "tanh": ("activation.cu", "activation_forward_kernel", "activation_backward_kernel"),
}


def _dtype(tensor, lower=True):
    """The dtype that the op computes in: under CUDA's autocast its ops of lower precision cast."""
    casts = lower and tensor.dtype != torch.float64 and torch.is_autocast_enabled("cuda")
    return torch.get_autocast_dtype("cuda") if casts else tensor.dtype


def _rows(tensor):
    return math.prod(tensor.shape[:-1])


def _tf32_matmul():
    return torch.backends.cuda.matmul.allow_tf32


def _columns(shape, dim):
    """outer, size and inner of a dimension."""
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _gemm(ask, name, dtype, m, n, k, transpose_a, transpose_b, batch=1):
    forced = os.environ.get("CUDA_OPS_GEMM_PATH", "")
    arguments = (dtype, m, n, k, batch, transpose_a, transpose_b, _tf32_matmul(), forced)
    note = f"{'T' if transpose_a else 'N'}{'T' if transpose_b else 'N'}, m {m}, n {n}, k {k}"
    return ask(name, "gemm_paths", *arguments, note=note + (f", batch {batch}" if batch > 1 else ""))


def _winograd_tile() -> int:
    """The largest tile that conv2d's call may take, as its glue reads it."""
    value = os.environ.get("CUDA_OPS_CONV2D_WINOGRAD", "")
    if value not in ("", "0", "2", "4"):
        raise UserError(f"conv2d: expected CUDA_OPS_CONV2D_WINOGRAD to be 0, 2 or 4, got {value}")
    return int(value or 4)


def _conv2d(ask, a):
    from ..ops.conv2d import output_size

    input, weight, stride, padding, dilation = _image_of(a, "conv2d")
    size = output_size(input.shape, weight.shape, stride, padding, dilation)
    products = {"forward": 0, "gradient of input": 1, "gradient of weight": 2}
    yield from _conv2d_products(ask, a, products, input, weight, input.shape, size, stride, padding, dilation)


def _conv_bn_act(ask, a):
    from ..ops.conv2d import output_size

    input, weight, stride, padding, dilation = _image_of(a, "conv_bn_act")
    size = output_size(input.shape, weight.shape, stride, padding, dilation)
    products = {"forward": 0}
    yield from _conv2d_products(ask, a, products, input, weight, input.shape, size, stride, padding, dilation)


def _conv_transpose2d(ask, a):
    from .._arguments import pair

    input, weight, stride, padding, dilation = _image_of(a, "conv_transpose2d")
    extra = pair("conv_transpose2d", "output_padding", a.get("output_padding", 0))
    spans = [(input.shape[2 + i] - 1) * stride[i] + (weight.shape[2 + i] - 1) * dilation[i] + 1 for i in (0, 1)]
    plane = [spans[i] - padding[2 * i] - padding[2 * i + 1] + extra[i] for i in (0, 1)]
    size = (input.shape[0], weight.shape[1] * a.get("groups", 1), *plane)
    products = {"forward": 1, "gradient of input": 0, "gradient of weight": 2}
    yield from _conv2d_products(ask, a, products, input, weight, size, input.shape, stride, padding, dilation)


def _image_of(a, op):
    """Input and weight with a batch, and stride, the four paddings and dilation."""
    from .._arguments import pair
    from ..ops.conv2d import _four_paddings

    input, weight = a["input"], a["weight"]
    if input.dim() == 3:
        input = input.unsqueeze(0)
    stride, dilation = pair(op, "stride", a.get("stride", 1)), pair(op, "dilation", a.get("dilation", 1))
    return input, weight, stride, _four_paddings(a.get("padding", 0), weight, stride, dilation), dilation


def _conv2d_products(ask, a, products, input, weight, read, written, stride, padding, dilation):
    """The rows of conv2d's passes, of a convolution that reads and writes images of these sizes."""
    from ..ops.conv2d import is_channels_last

    sizes = [read[0], a.get("groups", 1), *read[1:], weight.shape[0], *written[2:], *weight.shape[2:], *stride]
    sizes += [padding[0], padding[2], *dilation, _winograd_tile()]
    formats = [is_channels_last(input), is_channels_last(weight)]
    formats.append(formats[0] or formats[1])
    # What is given has its own format, and what is made that of the op's output.
    images = [formats[0], formats[2]] if products["forward"] == 0 else [formats[2], formats[0]]
    forced = os.environ.get("CUDA_OPS_CONV2D_PATH", "")
    for name, number in products.items():
        layouts = [int(images[0]), int(formats[1]), int(images[1])]
        call = (number, _dtype(input), sizes, layouts, torch.backends.cudnn.allow_tf32, forced)
        note = "channels_last" if formats[2] else "contiguous"
        if ask.op("conv2d_wants_channels_last")(*call, ask.device):
            call = (*call[:3], [1, int(formats[1]), 1], *call[4:])
            note = "contiguous; images are copied to channels_last, and the result back"
        yield ask(name, "conv2d_paths", *call, note=note)


def _of_rows(describe):
    """The rows of an op of (N, C, L), which is one of images of one row."""

    def of_rows(ask, a):
        a = dict(a)
        for name in ("input", "weight"):
            a[name] = (a[name].unsqueeze(0) if a[name].dim() == 2 else a[name]).unsqueeze(2)
        for name, other in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            value = a.get(name, other)
            if not isinstance(value, str):
                a[name] = (other, *(value if isinstance(value, (tuple, list)) else [value]))
        yield from describe(ask, a)

    return of_rows


def _conv_bn_relu_pool(ask, a):
    from ..ops.conv_bn_relu_pool import _geometry

    if not a.get("training", True):
        yield from _conv2d(ask, a)
        return
    names = ("stride", "padding", "dilation", "groups", "pool_kernel_size", "pool_stride", "pool_padding")
    values = [a.get(name, default) for name, default in zip(names, (1, 0, 1, 1, 2, None, 0), strict=True)]
    geometry = _geometry(a["weight"], *values, a.get("channels_last"), a["input"])
    flat = []
    for value in geometry:
        flat.extend(value if isinstance(value, (tuple, list)) else [int(value)])
    shapes = list(a["input"].shape), list(a["weight"].shape)
    yield ask("forward and gradients", "conv_bn_relu_pool_paths", _dtype(a["input"]), *shapes, flat)


def _batch_norm(ask, a, act=False):
    input = a["input"]
    outer, channels, inner = _columns(input.shape, 1)
    if input.dim() == 4 and not input.is_contiguous() and input.is_contiguous(memory_format=torch.channels_last):
        outer, inner = outer * inner, 1
    training = a.get("training", False)
    for name, number in (("forward", 0 if training else 1), ("gradients", 2 if training else 3)):
        note = "training" if training else "running statistics"
        yield ask(name, "batch_norm_paths", number, act, _dtype(input, False), outer, channels, inner, note=note)


def _batch_norm_act(ask, a):
    yield from _batch_norm(ask, a, act=True)


def _groups(ask, a, groups):
    input = a["input"]
    images, channels, inner = _columns(input.shape, 1)
    last = not input.is_contiguous() and suggest_memory_format(input) != torch.contiguous_format
    yield ask("forward", "group_norm_paths", _dtype(input, False), images, channels, inner, groups or channels, last)
    name = f"group_norm_grad_input_{'columns' if last else 'rows'}_kernel"
    yield ask.single("gradients", "group_norm/backward.cu", name)


def _group_norm(ask, a):
    yield from _groups(ask, a, a["num_groups"])


def _instance_norm(ask, a):
    if not a.get("use_input_stats", True):
        yield from _batch_norm(ask, a)
        return
    yield from _groups(ask, a, 0)


def _layer_norm(ask, a):
    input, cols = a["input"], math.prod(a["normalized_shape"])
    for name, backward in (("forward", False), ("gradients", True)):
        rows = input.numel() // cols if cols else 0
        yield ask(name, "layer_norm_paths", backward, _dtype(input, False), rows, cols)


def _reduction(file):
    def describe(ask, a):
        input, dim = a["input"], a.get("dim")
        # From the outermost in memory on, without those of one element.
        order = sorted((d for d in range(input.dim()) if input.shape[d] > 1), key=lambda d: -input.stride(d))
        dims = range(input.dim()) if dim is None or dim == () else dim if isinstance(dim, (tuple, list)) else (dim,)
        rows = bool(order) and order[-1] in [d % input.dim() for d in dims]
        yield ask.single("forward", file, f"reduction_{'rows' if rows else 'columns'}_kernel")

    return describe


def _adaptive_pool(ask, a, largest=False):
    input, size = a["input"], a["output_size"]
    size = size if isinstance(size, (tuple, list)) else (size, size)
    outputs = [have if want is None else want for have, want in zip(input.shape[-2:], size, strict=True)]
    layout = "channels" if suggest_memory_format(input) == torch.channels_last else "planes"
    scattered = largest and input.shape[-2] * input.shape[-1] >= 16 * outputs[0] * outputs[1]
    spread = not largest and layout == "planes" and outputs == [1, 1]
    backward = "scatter" if scattered else "spread" if spread else f"backward_{layout}"
    plane = input.shape[-2] * input.shape[-1] * input.element_size()
    forward = "mean_kept" if spread and plane <= 2048 and plane % 16 != 0 else f"forward_{layout}"
    yield ask.single("forward", "adaptive_pool2d.cu", f"adaptive_{forward}_kernel")
    yield ask.single("gradient of input", "adaptive_pool2d.cu", f"adaptive_{backward}_kernel")


def _adaptive_max_pool(ask, a):
    yield from _adaptive_pool(ask, a, largest=True)


def _concat(ask, a):
    yield ask.single("forward", "concat.cu", "concat_kernel")


def _cumsum(ask, a):
    input, dim = a["input"], a["dim"]
    # Rows where nothing lies between the elements of one.
    rows = input.dim() == 0 or input.shape[dim] <= 1 or input.stride(dim) == 1
    # Which of the first two it is, and whether a row has parts, is a matter of lengths.
    of_rows = "cumsum_short_rows_kernel", "cumsum_long_rows_kernel", "sum_parts_kernel"
    for name in ("forward", "gradient of input"):
        yield ask.single(name, "cumsum/cumsum.cu", *(of_rows if rows else ("cumsum_columns_kernel",)))


def _prelu(ask, a):
    input, weight = a["input"], a["weight"]
    rows = weight.numel() > 1 and input.stride(1) == 1
    yield ask.single("forward", "prelu.cu", "prelu_forward_kernel")
    yield ask.single("gradients", "prelu.cu", f"prelu_backward_{'rows_' if rows else ''}kernel")


def _permute_contiguous(ask, a):
    input = a["input"]
    dims = [d for d in a["dims"] if input.shape[d] > 1]
    # Transposed are the dimension that is contiguous in input, k, and the last one of output, j; a row that stays one,
    # or elements of a few dimensions, are copied as they are.
    k, j = min(dims, key=lambda d: input.stride(d), default=None), dims[-1] if dims else None
    kernel, file = "rows", "permute_contiguous"
    if k != j:
        size = 16 // input.element_size()
        widths, heights = input.shape[k], input.shape[j]
        rows = [input.stride(d) for d in dims if d != k] + [widths]
        if min(widths, heights) >= 8:
            whole = heights % size == 0 and all(stride % size == 0 for stride in rows)
            kernel = file = "squares" if whole else "windows"
        elif dims[-2] == k if heights < widths else input.stride(j) == widths:
            kernel = file = "narrow"
    yield ask.single("forward", f"permute_contiguous/{file}.cu", f"permute_{kernel}_kernel")


def _softmax(ask, a, op="softmax_paths"):
    input, dim = a["input"], a.get("dim")
    dim = dim if dim is not None else 0 if input.dim() in (0, 1, 3) else 1
    sizes = _columns(input.shape, dim) if input.dim() else (1, 1, 1)
    for name, backward in (("forward", False), ("gradient of input", True)):
        yield ask(name, op, backward, a.get("dtype") or _dtype(input, False), *sizes)


def _log_softmax(ask, a):
    yield from _softmax(ask, a, "log_softmax_paths")


def _masked_softmax(ask, a):
    input = a["input"]
    yield ask("forward", "masked_softmax_paths", _dtype(input, False), _rows(input), input.shape[-1])
    sizes = _rows(input), input.shape[-1], 1
    yield ask("gradient of input", "softmax_paths", True, _dtype(input, False), *sizes)


def _attention(ask, a):
    from ..ops.attention import _in_four_dimensions

    op = "scaled_dot_product_attention"
    if "qkv" in a:
        query, key, value = (part.transpose(1, 2) for part in a["qkv"].unbind(2))
    else:
        query, key, value = a["query"], a["key"], a["value"]
    mask = a.get("attn_mask")
    if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[:1] == key.shape[:1] == value.shape[:1]):
        query, key, value, mask, _ = _in_four_dimensions(op, query, key, value, mask, a.get("enable_gqa", False))
    sizes = [*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], value.shape[3]]
    strides = [stride for tensor in (query, key, value) for stride in tensor.stride()[:3]]
    masked = []
    if mask is not None:
        kind = 1 if mask.dtype == torch.bool else 3 if _dtype(mask) == torch.float32 else 2
        masked = [kind, *mask.expand(*query.shape[:3], key.shape[2]).stride()]
    options = _attention_options(a, query.shape[3], masked)
    for name, backward in (("forward", False), ("gradients", True)):
        with_mask = backward and mask is not None and mask.requires_grad
        yield ask(name, "attention_paths", backward, with_mask, _dtype(query), sizes, strides, *options, 0)


def _attention_options(a, head_dim, mask=()):
    """Scale, window, softcap, the kind and strides of a mask, whether there are slopes, and dropout."""
    left, right = a.get("window", (-1, -1))
    scale = a.get("scale") if a.get("scale") is not None else 1.0 / math.sqrt(max(head_dim, 1))
    window = [left, 0 if a.get("is_causal", a.get("causal", False)) else right]
    slopes = a.get("alibi_slopes") is not None
    return scale, window, a.get("softcap", 0.0), list(mask), slopes, a.get("dropout_p", 0.0)


def _attention_varlen(ask, a):
    query, key, value = a["query"], a["key"], a["value"]
    longest = (min(a[f"max_seqlen_{x}"], t.shape[0]) for x, t in (("q", query), ("k", key)))
    sizes = [a["cu_seqlens_q"].shape[0] - 1, query.shape[1], key.shape[1], *longest, query.shape[2], value.shape[2]]
    sizes += [query.shape[0], key.shape[0]]
    strides = [stride for t in (query, key, value) for stride in (0, t.stride(1), t.stride(0))]
    options = _attention_options(a, query.shape[2])
    for name, backward in (("forward", False), ("gradients", True)):
        yield ask(name, "attention_paths", backward, False, _dtype(query), sizes, strides, *options, 1)


def _attention_cache(ask, a):
    query, key, value = a["query"], a["key_cache"], a["value_cache"]
    table = a.get("block_table")
    keys = key.shape[1] if table is None else table.shape[1] * key.shape[1]
    sizes = [query.shape[0], query.shape[2], key.shape[2], query.shape[1], keys, query.shape[3], value.shape[3]]
    strides = [stride for t in (query, key, value) for stride in (t.stride(0), t.stride(2), t.stride(1))]
    if a.get("key") is not None:
        yield ask.single("new keys", "attention/decode/append.cu", "attention_append_kernel")
    options = _attention_options(a, query.shape[3])
    yield ask("forward", "attention_paths", False, False, _dtype(query), sizes, strides, *options, 2)


def _multi_head_attention(ask, a):
    query, key, value, heads = a["query"], a["key"], a["value"], a["num_heads"]
    width = query.shape[-1]

    def projection(name, input, outputs):
        weight = input.new_empty(outputs, input.shape[-1], device="meta")
        for product in _linear(ask, {"input": input, "weight": weight}):
            yield dataclasses.replace(product, name=f"{name}: {product.name}")

    # Those of one tensor are one product, unless their weights are apart.
    if a.get("use_separate_proj_weight", False) or key is not value:
        parts = [("query", query, 1), ("key", key, 1), ("value", value, 1)]
    elif query is not key:
        parts = [("query", query, 1), ("key and value", key, 2)]
    else:
        parts = [("query, key and value", query, 3)]
    for name, input, count in parts:
        yield from projection(f"projection of {name}", input, count * width)

    batch = query.shape[1] if query.dim() == 3 else 1
    more = int(a.get("bias_k") is not None) + int(a.get("add_zero_attn", False))
    q, k = (
        query.new_empty(rows, batch, heads, width // heads, device="meta").permute(1, 2, 0, 3)
        for rows in (query.shape[0], key.shape[0] + more)
    )
    if a.get("need_weights", True):
        scores = q.new_empty(batch, heads, q.shape[2], k.shape[2])
        stages = [("scores", _matmul, {"input": q, "other": k.mT}), ("weights", _masked_softmax, {"input": scores})]
        stages.append(("sums of values", _matmul, {"input": scores, "other": k}))
    else:
        causal = a.get("is_causal", False) and a.get("key_padding_mask") is None
        mask = None
        if not causal and (a.get("attn_mask") is not None or a.get("key_padding_mask") is not None):
            mask = next(m for m in (a.get("attn_mask"), a.get("key_padding_mask")) if m is not None)
            mask = mask.new_empty(1, 1, q.shape[2], k.shape[2], device="meta").requires_grad_(mask.requires_grad)
        dropout = a.get("dropout_p", 0.0) if a.get("training", True) else 0.0
        options = {"query": q, "key": k, "value": k, "attn_mask": mask, "is_causal": causal, "dropout_p": dropout}
        stages = [("attention", _attention, options)]
    for name, describe, arguments in stages:
        for product in describe(ask, arguments):
            yield dataclasses.replace(product, name=f"{name}: {product.name}")
    yield from projection("projection of output", query, width)


def _cross_entropy(ask, a):
    input = a["input"]
    sizes = _columns(input.shape, 1 if input.dim() > 1 else 0)
    reduction = {"none": 0, "mean": 1, "sum": 2}[a.get("reduction", "mean")]
    yield ask("forward", "cross_entropy_paths", _dtype(input, False), *sizes, reduction)
    yield ask.single("gradient of input", "cross_entropy.cu", "cross_entropy_backward_kernel")


def _linear_cross_entropy(ask, a):
    input, weight = a["input"], a["weight"]
    classes, features = weight.shape
    options = [float(a.get(name, 0)) for name in ("label_smoothing", "z_loss", "logit_softcap")]
    sizes = _rows(input), features, classes
    yield ask("forward and gradients", "linear_cross_entropy_paths", _dtype(input), *sizes, *options)


def _linear(ask, a):
    input, weight, dtype = a["input"], a["weight"], _dtype(a["input"])
    m, (n, k) = _rows(input), weight.shape if weight.dim() == 2 else (1, weight.shape[0])
    yield _gemm(ask, "forward", dtype, m, n, k, False, True)
    yield _gemm(ask, "gradient of input", dtype, m, k, n, False, False)
    yield _gemm(ask, "gradient of weight", dtype, n, k, m, True, False)


def _window_attention(ask, a):
    from .._arguments import pair

    qkv, heads, grid = a["qkv"], a["num_heads"], bool(a.get("grid", False))
    window, shift = (pair("window_attention", name, a.get(name, 0)) for name in ("window_size", "shift_size"))
    shift = [0 if size == all_of else by for size, all_of, by in zip(window, qkv.shape[1:3], shift, strict=True)]
    sizes = [*qkv.shape[:3], heads, qkv.shape[3] // 3 // heads, *window, *shift]
    for name, backward in (("forward", False), ("gradients", True)):
        yield ask(name, "window_attention_paths", backward, _dtype(qkv), sizes, grid)


def _linear_gelu(ask, a):
    input, weight, dtype = a["input"], a["weight"], _dtype(a["input"])
    m, (n, k) = _rows(input), weight.shape
    for keeps in (True, False):
        name = "forward, for a gradient" if keeps else "forward alone"
        yield ask(name, "linear_gelu_paths", dtype, m, k, n, keeps, _tf32_matmul())
    yield _gemm(ask, "product of forward", dtype, m, n, k, False, True)
    yield ask.single("gradient of gelu and bias", "linear_gelu.cu", "linear_gelu_backward_kernel")
    yield _gemm(ask, "gradient of input", dtype, m, k, n, False, False)
    yield _gemm(ask, "gradient of weight", dtype, n, k, m, True, False)


def _linear_relu(ask, a):
    input, weight = a["input"], a["weight"]
    dtype = _dtype(input)
    parameter = dtype if weight.dtype == input.dtype and dtype == input.dtype else weight.dtype
    n, k = weight.shape
    for name, backward in (("forward", False), ("gradients", True)):
        yield ask(name, "linear_relu_paths", backward, dtype, parameter, _rows(input), k, n, _tf32_matmul())


def _matmul(ask, a):
    left, right, dtype = a["input"], a["other"], _dtype(a["input"])
    left = left.unsqueeze(0) if left.dim() == 1 else left
    right = right.unsqueeze(1) if right.dim() == 1 else right
    if right.dim() == 2:  # all rows of all matrices of input are those of one
        m, batch = math.prod(left.shape[:-1]), 1
    else:
        m, batch = left.shape[-2], math.prod(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))
    k, n = right.shape[-2:]
    # As they are stored: the transpose of a contiguous matrix is one that is read the other way round.
    turned = [t.dim() >= 2 and t.stride(-2) == 1 and t.shape[-2] > 1 and t.stride(-1) > 1 for t in (left, right)]
    yield _gemm(ask, "forward", dtype, m, n, k, *turned, batch)
    yield _gemm(ask, "gradient of input", dtype, m, k, n, False, not turned[1], batch)
    yield _gemm(ask, "gradient of other", dtype, k, n, m, not turned[0], False, batch)


def _embedding(ask, a):
    yield ask.single("forward", "embedding/embedding.cu", "embedding_forward_kernel")
    yield ask.single("gradient of weight", "embedding/backward.cu", "embedding_backward_kernel")


def _token_position_embedding(ask, a):
    yield ask.single("forward", "embedding/embedding.cu", "token_position_embedding_kernel")
    yield ask.single("gradients", "embedding/backward.cu", "embedding_backward_kernel")


def _histc(ask, a):
    yield ask.single("forward", "histogram/histogram.cu", "histogram_kernel")


def _sums_kernel():
    return "add_integers_kernel" if torch.are_deterministic_algorithms_enabled() else "add_atomically_kernel"


def _bincount(ask, a):
    if a.get("weights") is None:
        yield ask.single("forward", "histogram/histogram.cu", "histogram_kernel")
    else:
        yield ask.single("sums of few bins", "histogram/histogram.cu", "weight_parts_kernel")
        yield ask.single("sums of more", "common/ordered_sums.cuh", _sums_kernel())


def _index_add(ask, a):
    yield ask.single("forward", "scatter.cu", "index_add_kernel")
    yield ask.single("gradient of source", "scatter.cu", "index_add_backward_kernel")


def _scatter_add(ask, a):
    yield ask.single("forward, of an index that is expanded", "scatter.cu", "index_add_kernel")
    yield ask.single("forward, of others", "common/ordered_sums.cuh", _sums_kernel())
    yield ask.single("gradient of src", "scatter.cu", "scatter_add_backward_kernel")


DESCRIBED = {
    "adaptive_avg_pool2d": _adaptive_pool,
    "adaptive_max_pool2d": _adaptive_max_pool,
    "add_layer_norm": _layer_norm,
    "add_rms_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "batch_norm_act": _batch_norm_act,
    "bincount": _bincount,
    "cat": _concat,
    "concat": _concat,
    "conv1d": _of_rows(_conv2d),
    "conv2d": _conv2d,
    "conv_transpose1d": _of_rows(_conv_transpose2d),
    "conv_transpose2d": _conv_transpose2d,
    "conv_bn_act": _conv_bn_act,
    "conv_bn_relu_pool": _conv_bn_relu_pool,
    "cross_entropy": _cross_entropy,
    "cumsum": _cumsum,
    "flash_attention": _attention,
    "flash_attention_qkvpacked": _attention,
    "flash_attention_varlen": _attention_varlen,
    "flash_attention_with_kvcache": _attention_cache,
    "embedding": _embedding,
    "group_norm": _group_norm,
    "histc": _histc,
    "index_add": _index_add,
    "index_add_": _index_add,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_gelu": _linear_gelu,
    "linear_relu": _linear_relu,
    "log_softmax": _log_softmax,
    "masked_softmax": _masked_softmax,
    "matmul": _matmul,
    "multi_head_attention_forward": _multi_head_attention,
    "permute_contiguous": _permute_contiguous,
    "prelu": _prelu,
    "rms_norm": _layer_norm,
    "scaled_dot_product_attention": _attention,
    "scatter_add": _scatter_add,
    "scatter_add_": _scatter_add,
    "softmax": _softmax,
    "token_position_embedding": _token_position_embedding,
    "window_attention": _window_attention,
    **dict.fromkeys(("sum", "mean", "prod", "norm"), _reduction("reduction/total.cu")),
    **dict.fromkeys(("amax", "amin", "argmax", "argmin"), _reduction("reduction/extreme.cu")),
    **dict.fromkeys(("var", "std"), _reduction("reduction/moments.cu")),
}


def one_kernel(op):
    file, forward, backward = ONE_KERNEL[op]

    def describe(ask, arguments):
        yield ask.single("forward", file, forward)
        if backward:
            yield ask.single("gradient of input", file, backward)

    return describe


class Ask:
    """Asks the library's tables on one device."""

    def __init__(self, device: Device):
        self.device = list(dataclasses.astuple(device))

    @staticmethod
    def op(name):
        return getattr(_library.ops, name)

    def __call__(self, product, op, *arguments, note=""):
        names, files, kernels, reasons, flags = self.op(op)(*arguments, self.device)
        paths = [
            Path(name, f"csrc/cuda/{file}", tuple(kernel.split()), bool(f & 1), bool(f & 2), bool(f & 4), reason)
            for name, file, kernel, reason, f in zip(names, files, kernels, reasons, flags, strict=True)
        ]
        return Product(product, tuple(paths), note)

    @staticmethod
    def single(product, file, *kernels):
        return Product(product, (Path("the only one", f"csrc/cuda/{file}", kernels, True, True, True, ""),))
