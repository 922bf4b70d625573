"""Calls of registered ops that no functional makes, but torch.ops.cuda_ops lets everyone make: what `make fuzz-raw`
found, each with its message where it once ended the process or wrote beyond its output."""

import random
import re

import pytest
import torch
from support.opspec import Make

import cuda_ops.functional  # registers the ops
from cuda_ops import _library

ops = torch.ops.cuda_ops
make = Make("cpu", torch.float32)
H200 = [90, 132, 232448]  # what the tables of paths ask of a device: architecture, multiprocessors, shared memory


def argument_of(kind):
    """One that the dispatcher takes for such an argument of a schema."""
    kind = kind.removeprefix("Optional[").split("]")[0]
    values = {"Tensor": make(2, 3), "bool": True, "str": "none", "float": 1.0, "ScalarType": torch.float32}
    return values.get(kind, 1 if kind in ("int", "SymInt") else [1])


@pytest.mark.parametrize("longer", [True, False])
def test_as_many_results_are_asked_for_as_there_are(longer):
    """An implementation in Python is given lists of any length. What was returned beyond the schema's results was
    written beyond the end of their types; a result too few is one that the caller reads all the same."""
    count = 0
    for schema in torch._C._jit_get_all_schemas():
        kinds = [str(argument.real_type) for argument in schema.arguments]
        name = schema.name.removeprefix("cuda_ops::")
        where = kinds.index("List[bool]") if "List[bool]" in kinds else None
        size = None if where is None else schema.arguments[where].N
        if name == schema.name or size is None:
            continue
        arguments = [argument_of(kind) for kind in kinds]
        arguments[where] = [True] * (size + 1 if longer else size - 1)
        with pytest.raises(RuntimeError, match=f"{name}: expected wanted to have|Tried to convert a List"):
            getattr(ops, name)(*arguments)
        count += 1
    assert count > 15


def test_tangents_without_what_they_multiply():
    x, w = make(2, 3), make(4, 3)
    target, total = torch.tensor([0, 1]), torch.ones(())
    for call, message in [
        (lambda: ops.linear_relu_tangent(None, w, None, make(2, 4)), "linear_relu_tangent: expected input to be a"),
        (lambda: ops.linear_relu_tangent(x, None, None, make(2, 4)), "linear_relu_tangent: expected weight to be a"),
        (
            lambda: ops.linear_cross_entropy_tangent(
                None, None, None, x, w, target, None, total, 1, -100, 0.0, 0.0, 0.0
            ),
            "linear_cross_entropy_tangent: expected a tangent to be a Tensor, got None",
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize(
    ("missing", "wanted", "message"),
    [
        ((0, 1), (True, False, False), "expected grad_output or grad_preactivation to be a Tensor, got None"),
        ((3,), (True, False, False), "expected weight to be a Tensor, got None"),
        ((2,), (False, True, False), "expected input to be a Tensor, got None"),
    ],
)
def test_gradients_of_linear_gelu_without_what_they_need(missing, wanted, message):
    arguments = [make(2, 4), make(2, 4), make(2, 3), make(4, 3)]
    arguments = [None if i in missing else a for i, a in enumerate(arguments)]
    with pytest.raises(RuntimeError, match=f"linear_gelu_gradients: {message}"):
        ops.linear_gelu_gradients(*arguments, make(2, 4), "none", wanted)


@pytest.mark.parametrize("size", [[], [3]])
def test_channels_are_spread_over_a_shape_that_has_them(size):
    with pytest.raises(RuntimeError, match="expand_channels: expected size to have a dimension of channels, got"):
        ops.expand_channels(make(3), size)


GEOMETRY = (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0)


@pytest.mark.parametrize("bias", [make(3), make(8), make(4).to(torch.uint8), make(4).double()])
def test_backward_of_the_block_checks_bias(bias):
    """Of which it made a gradient to write to."""
    x, w = make(2, 3, 6, 6), make(4, 3, 3, 3)
    output, *saved = ops.conv_bn_relu_pool_forward(x, w, *[None] * 6, 0.1, 1e-5, GEOMETRY)
    with pytest.raises((RuntimeError, ValueError), match=r"conv_bn_relu_pool_backward: expected bias to"):
        ops.conv_bn_relu_pool_backward(output, x, w, bias, None, None, *saved, 1e-5, GEOMETRY, True)


@pytest.mark.parametrize("input", [torch.ones(2, 3, 6, 6, dtype=torch.int64), make(1, 3, 6, 6)])
def test_tangent_of_the_block_checks_its_dtype_and_shape(input):
    tangent = input if input.dtype == torch.int64 else make(2, 3, 6, 6)
    tangents, parameters = (tangent, *[None] * 4), (make(4, 3, 3, 3), *[None] * 5)
    with pytest.raises(RuntimeError, match="conv_bn_relu_pool: expected input to"):
        ops.conv_bn_relu_pool_tangent(*tangents, input, *parameters, 1e-5, GEOMETRY)


@pytest.mark.parametrize("which", range(3))
def test_block_writes_into_negative_views(which):
    """Of statistics or parameters whose negation is still to be done, PyTorch's own handling of which reads what an op
    returns for what it has written."""

    def tensors():
        return [make(3, low=0.5), make(3, requires_grad=False), make(3, low=0.25)]

    make.generator.manual_seed(0)
    x, w = make(2, 2, 6, 6), make(3, 2, 3, 3)
    bn_weight, mean, variance = tensors()
    negated = [torch._neg_view(-t) if i == which else t.clone() for i, t in enumerate((bn_weight, mean, variance))]
    outputs = [
        cuda_ops.functional.conv_bn_relu_pool(x, w, None, m, v, scale)
        for scale, m, v in ((bn_weight, mean, variance), negated)
    ]
    assert torch.equal(*outputs)
    assert torch.equal(mean, negated[1]) and torch.equal(variance, negated[2])


def test_ops_that_write_take_negative_views_themselves():
    """PyTorch's handling of a view of a negative expects what it wrote to be among what the op returns."""
    written = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("cuda_ops::"):
            written[schema.name] = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    assert sum(written.values()) > 20
    for name in (name for name, writes in written.items() if writes):
        assert re.search(r"\nNegative: .*registered at \./csrc", torch._C._dispatch_dump(name)), name


def negated(tensor):
    return torch._neg_view(-tensor)


def test_embeddings_are_added_to_a_negative_view(device):
    weight, grad = torch.ones(5, 3, device=device), torch.rand(2, 3, device=device)
    index = torch.tensor([1, 4], device=device)
    expected = weight.index_add(0, index, grad)
    for to, of in ((negated(weight), grad), (weight.clone(), negated(grad)), (negated(weight), negated(grad))):
        ops.embedding_backward_add(to, of, index)
        torch.testing.assert_close(to, expected)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), (2,), (3,)])
def test_a_concatenations_statistics_may_be_negative_views(which, device):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 4, 4, generator=generator), torch.rand(3, generator=generator)
    x = x.to(device, memory_format=torch.channels_last)
    results = []
    for view in (torch.Tensor.clone, negated):
        mean, variance = torch.zeros(3, device=device), torch.ones(3, device=device)
        tensors = [mean, variance, weight.to(device), x]
        mean, variance, scale, images = (view(t) if i in which else t for i, t in enumerate(tensors))
        count = torch.zeros((), dtype=torch.int64, device=device)
        arguments = scale, None, mean, variance, count, "relu"
        outputs = [ops.concat_batch_norm_act([images, images[:, :0]], [], *arguments, True, 0.1, 1e-5)[0]]
        outputs.append(ops.concat_batch_norm_act_forward_training([images], [], *arguments, 0.1, 1e-5)[0])
        results.append([*outputs, mean.clone(), variance.clone(), count])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    assert results[0][-1] == 2


@pytest.mark.parametrize("backend", ["cpu", "meta"])
@pytest.mark.parametrize("channels", [0, 3])
@pytest.mark.parametrize("size", [[], [-1], [-(2**63)], [2**40, 3], [3, 1]])
def test_size_of_the_gradient_of_a_convolutions_bias(backend, channels, size):
    grad_output = make(2, channels, 4, 4).to(backend)
    with pytest.raises(RuntimeError, match=f"conv2d_backward_bias: expected size to be \\[{channels}\\], got"):
        ops.conv2d_backward_bias(grad_output, size)
    assert ops.conv2d_backward_bias(grad_output, [channels]).shape == (channels,)


@pytest.mark.parametrize("size", [-1, 2**61, 2**63 - 1, -(2**63)])
def test_sizes_that_no_tensor_has(size):
    """Which the tables of paths would round up to tiles and multiply: a division by zero ended the process."""
    for op, before, after in [
        (ops.gemm_paths, (torch.float32, 5), (5, 1, False, False, True, "")),
        (ops.linear_relu_paths, (False, torch.float32, torch.float32, 5), (5, True)),
        (ops.linear_gelu_paths, (torch.float32, 5), (5, False, True)),
        (ops.linear_cross_entropy_paths, (torch.float32, 5), (5, 0.0, 0.0, 0.0)),
        (ops.batch_norm_paths, (0, False, torch.float32, 5), (5,)),
        (ops.log_softmax_paths, (False, torch.float32, 5), (5,)),
        (ops.cross_entropy_paths, (torch.float32, 5), (5, 0)),
        (ops.mnist_step_paths, (), ()),
    ]:
        name = op.__name__
        with pytest.raises(RuntimeError, match=f"{name}: expected sizes to be non-negative, and their product"):
            op(*before, size, *after, [])
    # batch, groups, channels, extents, kernel, strides, paddings (which may be below 0), dilations, Winograd's tile
    for i in range(16):
        sizes = [2, 1, 3, 8, 8, 4, 8, 8, 3, 3, 1, 1, 1, 1, 1, 1, 4]
        sizes[i] = size
        if (i, size) not in ((12, -1), (13, -1)):
            with pytest.raises(RuntimeError, match="conv2d_paths: expected"):
                ops.conv2d_paths(0, torch.float32, sizes, [0, 0, 0], True, "", [])


@pytest.mark.skipif(not _library.has_cuda(), reason="a build without CUDA has no tables of paths")
@pytest.mark.parametrize("direction", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_paths_of_convolutions_over_nothing(direction, dtype):
    """An H200's table of paths, asked for sizes with a 0 among them: a division by zero ended the process."""
    rng = random.Random(direction)
    for _ in range(3000):
        groups = rng.choice([1, 1, 1, 2, 3])
        channels, out_channels = (groups * rng.choice([0, 1, 2, 4, 8, 16]) for _ in range(2))
        extents = [
            rng.choice([0, 1, 5]),
            rng.choice([0, 4, 9]),
            out_channels,
            rng.choice([0, 1, 5]),
            rng.choice([0, 3]),
        ]
        window = [rng.choice([1, 3]), rng.choice([1, 2]), 1, rng.choice([1, 2]), rng.choice([0, 1]), 0, 1, 1]
        window.append(rng.choice([0, 2, 4]))
        sizes = [rng.choice([0, 1, 5]), groups, channels, *extents, *window]
        formats = [rng.randrange(2) for _ in range(3)]
        names, _, _, reasons, flags = ops.conv2d_paths(direction, dtype, sizes, formats, True, "", H200)
        ops.conv2d_wants_channels_last(direction, dtype, sizes, formats, True, "", H200)
        if 0 in sizes[:8]:
            *others, simt = zip(names, reasons, flags, strict=True)
            assert simt == ("simt", "", 7), sizes
            assert all(row[1:] == ("there are no channels, or no pixels", 0) for row in others), sizes


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_derivatives_of_gates_check_their_halves(name):
    more = ("none",) if name == "geglu" else ()
    odd = r"expected gate to have an even last dimension, of gate and value, got shape \[2, 3\]"
    with pytest.raises(RuntimeError, match=f"{name}_tangent: {odd}"):
        getattr(ops, f"{name}_tangent")(make(2, 3), make(2, 3), None, *more)
    with pytest.raises(
        RuntimeError, match=rf"{name}_backward_tangents: expected tangent to have the shape of gate, \[2, 4\]"
    ):
        getattr(ops, f"{name}_backward_tangents")(make(4), make(2, 2), make(2, 4), None, *more)
    with pytest.raises(RuntimeError, match=f"{name}_gradients: {odd}"):
        getattr(ops, f"{name}_gradients")(make(2, 3), None, make(2, 1), make(2, 3), None, *more, [True, True, False])


def test_rows_of_positions_are_of_a_table():
    with pytest.raises(RuntimeError, match="position_embedding_rows: expected weight to have 2 dimensions and size at"):
        ops.position_embedding_rows(make(3), [2], torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about the GPU that is there")
def test_tables_of_paths_need_a_device():
    if " CUDA " not in ops.build_info():
        with pytest.raises(NotImplementedError, match="explain: this build of cuda_ops has no CUDA kernels"):
            ops.linear_gelu_paths(torch.float32, 0, 7, 2, True, False, [])
        return
    with pytest.raises(
        RuntimeError, match=r"explain: expected device to be .*since there is no GPU whose they could be"
    ):
        ops.linear_gelu_paths(torch.float32, 0, 7, 2, True, False, [])
    for device in ([90, 0, 0], [90, 2**40, 0], [2**31, 132, 0], [90, 132, 2**33], [90, 132]):
        with pytest.raises(RuntimeError, match="explain: expected device to be capability, multiprocessors and bytes"):
            ops.linear_gelu_paths(torch.float32, 0, 7, 2, True, False, device)


@pytest.mark.parametrize("size", [[5] * 8, [2, 5], [-1], [3, 0]])
def test_a_masks_gradient_has_a_size_that_broadcasts(size):
    with pytest.raises(RuntimeError, match="masked_softmax_backward_mask: expected size to be one that broadcasts"):
        ops.masked_softmax_backward_mask(make(3, 5), make(3, 5).softmax(1), size)


@pytest.mark.parametrize("size", [[2**62, 7], [7, 2**62], [2**63 - 1, 2**31]])
def test_planes_whose_product_is_beyond_64_bits(size):
    nothing = torch.ones(0, 3, 2, 3)
    with pytest.raises(RuntimeError, match="adaptive_avg_pool2d_backward: expected planes of less than 2"):
        ops.adaptive_avg_pool2d_backward(nothing, size, False)
    with pytest.raises(RuntimeError, match="adaptive_max_pool2d_backward: expected planes of less than 2"):
        ops.adaptive_max_pool2d_backward(nothing, nothing.long(), size)


def test_fakes_of_sizes_that_no_tensor_has_name_their_op():
    grad_output = torch.ones(2, 3, 2, 3, device="meta")
    with pytest.raises(RuntimeError, match=r"^adaptive_avg_pool2d_backward: .*negative dimension -1"):
        ops.adaptive_avg_pool2d_backward(grad_output, [6, -1], False)
    with pytest.raises(RuntimeError, match=r"^adaptive_avg_pool2d_backward: required rank 4"):
        ops.adaptive_avg_pool2d_backward(grad_output[0], [6, 7], True)


def test_what_the_block_kept_has_its_shape():
    """And not only as many elements."""
    x, weight = make(2, 1, 6, 5), make(4, 1, 3, 3)
    geometry = [1] * 9 + [2] * 4 + [0, 0, True]
    output, *kept = ops.conv_bn_relu_pool_forward(x, weight, None, None, None, None, None, None, 0.1, 1e-5, geometry)
    for i in range(3):
        if kept[i].numel():
            wrong = [t[..., None] if j == i else t for j, t in enumerate(kept)]
            with pytest.raises(
                RuntimeError, match=r"conv_bn_relu_pool_backward: expected .* to be the one that forward"
            ):
                ops.conv_bn_relu_pool_backward(output, x, weight, None, None, None, *wrong, 1e-5, geometry, True)


def test_what_a_write_overlaps_is_refused_by_name():
    x, index = make(6, 5).detach(), torch.arange(6)
    with pytest.raises(RuntimeError, match="index_add_: expected source to share no memory with input"):
        ops.index_add_inplace(x, 0, index, x, 1.0)
    with pytest.raises(RuntimeError, match="scatter_add_: expected src to share no memory with input"):
        ops.scatter_add_inplace(x, 0, index[:, None].expand(6, 5), x)
    with pytest.raises(RuntimeError, match="relu: expected input to have a place in memory for each element"):
        ops.relu_inplace(x[:, :1].expand(6, 5))


@pytest.mark.parametrize("shape", [(3,), (1, 3)])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_batch_norm_act_is_named(shape, place):
    input, vector = torch.ones(shape, device=place), torch.ones(3, device=place)
    with pytest.raises((RuntimeError, ValueError), match=r"^batch_norm_act: "):
        ops.batch_norm_act_forward_training(input, vector, vector, None, "relu", 1e-5)
