import functools

import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def with_statistics(block):
    """The block on copies of the running statistics, which it returns beside its output: so that the tests see what
    became of them, and the sample's own tensors stay as they are."""

    @functools.wraps(block)
    def function(input, weight, bias, running_mean, running_var, *args, **kwargs):
        running_mean = None if running_mean is None else running_mean.clone()
        running_var = None if running_var is None else running_var.clone()
        output = block(input, weight, bias, running_mean, running_var, *args, **kwargs)
        return output if running_mean is None else (output, running_mean, running_var)

    return function


def reference(
    input,
    weight,
    bias,
    running_mean,
    running_var,
    bn_weight=None,
    bn_bias=None,
    training=True,
    momentum=0.1,
    eps=1e-5,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    pool_kernel_size=2,
    pool_stride=None,
    pool_padding=0,
    channels_last=None,
):
    functional = torch.nn.functional
    x = functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
    x = functional.batch_norm(x, running_mean, running_var, bn_weight, bn_bias, training, momentum, eps)
    return functional.max_pool2d(functional.relu(x), pool_kernel_size, pool_stride, pool_padding)


def whole(make, *shape, largest=2, requires_grad=None):
    """Whole numbers up to `largest`. What is convolved of them is exact in every dtype, so that the maximum of a window
    is taken from the same position whatever the rounding, and ties are ties for the reference too."""
    values = make(*shape, low=-largest - 0.5, high=largest + 0.5, requires_grad=False).round()
    return values.requires_grad_(make.requires_grad if requires_grad is None else requires_grad)


def arguments(
    make,
    input,
    weight,
    *,
    bias=True,
    statistics=True,
    affine=True,
    training=True,
    numbers=whole,
    largest=2,
    images=None,
):
    """input, weight, bias, running_mean, running_var, bn_weight, bn_bias. In training the gradient of bias is 0 but for
    rounding, of which nothing can be compared: test_conv_bn_relu_pool.py has a test of it. images=False: input does not
    require grad, as that of a first layer."""
    channels = weight[0]
    return (
        numbers(make, *input, requires_grad=images),
        numbers(make, *weight, **({"largest": largest} if numbers is whole else {})),
        numbers(make, channels, requires_grad=False if training else None) if bias else None,
        make(channels, requires_grad=False) if statistics else None,
        make(channels, low=0.25, requires_grad=False) if statistics else None,
        make(channels) if affine else None,
        make(channels) if affine else None,
    )


def block(make, input, weight, *, name="", **options):
    of_tensors = ("bias", "statistics", "affine", "largest", "training", "numbers", "images")
    tensors = {key: options[key] for key in of_tensors if key in options}
    kwargs = {key: value for key, value in options.items() if key not in of_tensors or key == "training"}
    return Sample(arguments(make, input, weight, **tensors), kwargs, name or f"{input} {weight} {options}")


def samples(make):
    for training in (True, False):
        # The two blocks of the MNIST CNN, in both memory formats of the output; channels off a vector of 8 too.
        for last in (False, True):
            yield block(make, (3, 1, 28, 28), (32, 1, 3, 3), padding=1, channels_last=last, training=training)
            yield block(
                make, (2, 32, 14, 14), (64, 32, 3, 3), padding=1, channels_last=last, training=training, largest=1
            )
            yield block(make, (3, 1, 9, 13), (33, 1, 3, 3), padding=1, channels_last=last, training=training)
            # One input channel and no gradient for it: on the GPU nothing of the convolution is kept. Odd sizes;
            # channels that are no multiple of 8, or more than a block's 32; several bands of rows.
            for shape, channels in (
                ((3, 1, 28, 28), 32),
                ((2, 1, 7, 9), 5),
                ((5, 1, 2, 2), 40),
                ((2, 1, 66, 70), 8),
                ((1, 1, 3, 300), 3),
            ):
                if training or shape[3] < 10:
                    weight = (channels, 1, 3, 3)
                    yield block(make, shape, weight, padding=1, channels_last=last, training=training, images=False)
            # Windows that overlap, hang over the edge, leave gaps; several rows and columns unused.
            pool = {"pool_kernel_size": 3, "pool_stride": (2, 1), "pool_padding": 1}
            yield block(make, (2, 3, 8, 9), (5, 3, 3, 3), channels_last=last, training=training, **pool)
            pool = {"pool_kernel_size": (2, 3), "pool_stride": (3, 4), "pool_padding": (1, 0)}
            yield block(make, (2, 2, 9, 12), (3, 2, 2, 3), channels_last=last, training=training, **pool)
        # A convolution with every argument: groups, strides, dilation, paddings of both kinds, no bias.
        yield block(make, (2, 6, 9, 8), (9, 2, 3, 3), groups=3, stride=(1, 2), padding=(2, 1), training=training)
        yield block(make, (2, 2, 10, 9), (4, 2, 3, 2), dilation=(2, 3), padding="same", bias=False, training=training)
        yield block(make, (2, 2, 7, 6), (4, 2, 3, 2), padding="valid", pool_kernel_size=1, training=training)
        # Neither parameters of batch_norm nor running statistics; an eps that matters.
        yield block(make, (2, 2, 7, 6), (3, 2, 2, 2), affine=False, eps=0.5, training=training)
    yield block(make, (2, 2, 7, 6), (3, 2, 2, 2), statistics=False)
    for momentum in (0.0, 1.0, 0.375):
        yield block(make, (2, 2, 7, 6), (3, 2, 2, 2), momentum=momentum)
    # One channel with more images than a block of the GPU takes at once; the largest window; one window in all.
    yield block(make, (70, 1, 6, 6), (4, 1, 3, 3), padding=1)
    # A kernel of 2x2: the gradient of one of 1x1 has no part along the weight, and with a single window an image
    # little beside it: rounding the convolution's gradient to a half, as PyTorch does, is 0.8 % of what is left.
    yield block(make, (2, 2, 19, 17), (3, 2, 2, 2), pool_kernel_size=(17, 15))
    yield block(make, (1, 1, 3, 3), (2, 1, 2, 2))


def real(make, *shape, requires_grad=None):
    return make(*shape, requires_grad=requires_grad)


def small_samples(make):
    yield block(make, (2, 1, 4, 4), (2, 1, 3, 3), padding=1, numbers=real)
    yield block(make, (2, 2, 4, 5), (2, 2, 2, 2), bias=False, pool_stride=1, numbers=real, channels_last=True)
    yield block(make, (2, 2, 4, 4), (2, 1, 3, 3), groups=2, padding="same", affine=False, numbers=real)
    yield block(make, (2, 2, 4, 4), (2, 2, 2, 2), padding="same", numbers=real, eps=0.1)
    yield block(make, (2, 1, 5, 4), (8, 1, 3, 3), padding=1, numbers=real, images=False, channels_last=True)
    yield block(make, (1, 1, 4, 5), (2, 1, 2, 2), training=False, numbers=real)


def kernel_samples(make):
    """For compute-sanitizer, under which all samples would take hours: each path, in both formats of the output."""
    for last in (False, True):
        yield block(make, (3, 1, 9, 13), (33, 1, 3, 3), padding=1, channels_last=last)  # one channel
        yield block(make, (3, 1, 9, 13), (33, 1, 3, 3), padding=1, channels_last=last, images=False)
        # Tensor cores for fp16 and bf16; tiles for float32, then tiles with neighbours, of which one is a row high.
        yield block(make, (2, 32, 14, 14), (64, 32, 3, 3), padding=1, channels_last=last)
        yield block(make, (1, 16, 15, 18), (72, 16, 3, 3), padding=1, channels_last=last)
        yield block(make, (2, 3, 8, 9), (5, 3, 3, 3), channels_last=last, pool_kernel_size=3, pool_stride=1)
    yield block(make, (1, 80, 5, 4), (24, 80, 3, 3), padding=1)  # weights that do not fit at once
    yield block(make, (2, 6, 9, 8), (9, 2, 3, 3), groups=3, stride=(1, 2), padding=(2, 1))
    yield block(make, (2, 2, 7, 6), (3, 2, 2, 2), affine=False, training=False)


def empty_samples(make):
    for training in (True, False):
        yield block(make, (0, 2, 5, 4), (3, 2, 3, 3), training=training, padding=1)


def op_samples(make):
    ops = torch.ops.cuda_ops
    geometry = (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0)  # a 3x3 convolution, padded, and a 2x2 pooling
    for input, weight in (((2, 1, 6, 5), (4, 1, 3, 3)), ((2, 3, 6, 5), (4, 3, 3, 3))):
        x, w, bias, mean, variance, bn_weight, bn_bias = arguments(make, input, weight)
        batches = torch.zeros((), dtype=torch.int64, device=x.device)
        for last in (False, True):
            running = mean.clone(), variance.clone(), batches.clone()
            forward = x, w, bias, bn_weight, bn_bias, *running, 0.1, 1e-5, (*geometry, last)
            yield ops.conv_bn_relu_pool_forward, forward
            none = x, w, None, None, None, None, None, None, 0.1, 1e-5, (*geometry, last)
            yield ops.conv_bn_relu_pool_forward, none
            yield (
                ops.conv_bn_relu_pool_inference,
                (x, w, bias, bn_weight, bn_bias, *running[:2], 1e-5, (*geometry, last)),
            )
            output, *saved = ops.conv_bn_relu_pool_forward(*forward)
            grad = make(*output.shape)
            for needs in (False, True):
                yield (
                    ops.conv_bn_relu_pool_backward,
                    (grad, x, w, bias, bn_weight, bn_bias, *saved, 1e-5, (*geometry, last), needs),
                )
            _, *saved = ops.conv_bn_relu_pool_forward(*none)
            yield (
                ops.conv_bn_relu_pool_backward,
                (grad, x, w, None, None, None, *saved, 1e-5, (*geometry, last), True),
            )


def call(input=(2, 2, 6, 5), weight=(4, 2, 3, 3), dtype=torch.float32, replace=None, **kwargs):
    """A call with the given shapes and arguments, all else being right; `replace` names another shape or dtype."""

    def run(device):
        tensors = {
            "input": torch.ones(input, dtype=dtype, device=device),
            "weight": torch.ones(weight, dtype=dtype, device=device),
        }
        for name in ("bias", "running_mean", "running_var", "bn_weight", "bn_bias"):
            tensors[name] = torch.ones(weight[0], dtype=dtype, device=device)
        for name, value in (replace or {}).items():
            if isinstance(value, torch.dtype):
                tensors[name] = tensors[name].to(value)
            else:
                tensors[name] = None if value is None else torch.ones(value, dtype=dtype, device=device)
        return cuda_ops.functional.conv_bn_relu_pool(**tensors, **kwargs)

    return run


def backward(device):
    """A backward pass whose saved tensors are of another call."""
    x, w, grad = (torch.ones(shape, device=device) for shape in ((2, 1, 6, 6), (4, 1, 3, 3), (2, 4, 3, 3)))
    geometry = (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, False)
    ops = torch.ops.cuda_ops
    _, *saved = ops.conv_bn_relu_pool_forward(x[:1], w, *[None] * 6, 0.1, 1e-5, geometry)
    return ops.conv_bn_relu_pool_backward(grad, x, w, None, None, None, *saved, 1e-5, geometry, False)


def bad(name, run, match, error=RuntimeError):
    return Bad(name, run, error, "conv_bn_relu_pool.*: " + match)


SPEC = OpSpec(
    name="conv_bn_relu_pool",
    function=with_statistics(cuda_ops.functional.conv_bn_relu_pool),
    reference=with_statistics(reference),
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    kernel_samples=kernel_samples,
    gradgrad=True,
    cancels=True,
    exact_sums=True,
    # Batch_norm takes the mean, and the part along what it normalised, off the gradient of the convolution's output: in
    # weight's gradient large sums cancel.
    relative_norm={torch.float64: 1e-11, torch.float32: 1e-5},
    # As in batch_norm: running statistics that become infinite in PyTorch on the CPU are NaN here. The outputs are
    # compared in test_conv_bn_relu_pool.py.
    nonfinite=False,
    bad=[
        bad("integers", call(dtype=torch.int64), "expected input to be floating point, got int64"),
        bad("no batch", call(input=(2, 6, 5)), r"expected input to have 4 dimensions, .*\[2, 6, 5\]"),
        bad("channels", call(input=(2, 3, 6, 5)), r"expected input to have 2 channels in dimension 1"),
        bad("no channels", call(input=(2, 0, 6, 5), weight=(4, 0, 3, 3)), "expected input to have channels"),
        bad("weight", call(weight=(4, 2, 3)), r"expected weight to have 4 dimensions, got shape \[4, 2, 3\]"),
        bad("groups", call(groups=0), "expected groups to be positive, got 0"),
        bad("stride", call(stride=0), r"expected stride to be positive, got \[0, 0\]"),
        bad("padding", call(padding=-1), "expected padding to be zero or more"),
        bad("word", call(padding="full"), "expected padding to be 'same', 'valid'"),
        bad("'same' with a stride", call(padding="same", stride=2), r"expected stride to be 1 with padding='same'"),
        bad("stride of another type", call(stride=1.5), "expected stride to be an int or two of them", TypeError),
        bad(
            "kernel greater than input", call(dilation=4), "expected the kernel to be no greater than the padded input"
        ),
        bad("pool_kernel_size", call(pool_kernel_size=0), "expected kernel_size to be positive 32-bit integers"),
        bad("pool_stride", call(pool_stride=(1, 0)), "expected stride to be positive 32-bit integers"),
        bad("pool_padding", call(pool_padding=2), "expected padding to be at most half of kernel_size"),
        bad("no room for a window", call(pool_kernel_size=5), "expected input to have room for a window"),
        bad(
            "a large window",
            call(input=(2, 2, 22, 22), pool_kernel_size=16),
            r"expected pool_kernel_size to be a window of at most 255 values, got \[16, 16\]",
            NotImplementedError,
        ),
        bad("size of bias", call(replace={"bias": (3,)}), r"expected bias to have one element for each output channel"),
        bad(
            "size of bn_bias", call(replace={"bn_bias": (4, 1)}), r"expected bn_bias to have one .* got shape \[4, 1\]"
        ),
        bad("size of running_var", call(replace={"running_var": (5,)}), "expected running_var to have one element"),
        bad(
            "dtype of weight",
            call(replace={"weight": torch.float64}),
            "expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "dtype of bn_weight",
            call(replace={"bn_weight": torch.float64}),
            "expected bn_weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "dtype of running_mean",
            call(replace={"running_mean": torch.float64}, training=False),
            "expected running_mean to have the dtype of input, float32, got float64",
        ),
        bad(
            "no running_mean in evaluation",
            call(replace={"running_mean": None}, training=False),
            "running_mean must be defined in evaluation mode",
        ),
        bad(
            "one running statistic",
            call(replace={"running_var": None}),
            "expected running_mean and running_var to be both None or neither",
            ValueError,
        ),
        bad(
            "one value per channel",
            call(input=(1, 2, 3, 3), pool_kernel_size=1),
            "expected more than 1 value per channel in training",
            ValueError,
        ),
        bad("eps of 0", call(eps=0.0), "expected eps to be positive, got 0.0", ValueError),
        bad("saved tensors of another call", backward, "expected .* to be the one that forward returned"),
    ],
)
