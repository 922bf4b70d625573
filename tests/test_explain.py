"""cuda_ops.explain: what it says of calls on GPUs that are assumed, and how its command reads them."""

import re
from pathlib import Path

import pytest
import torch

import cuda_ops
from cuda_ops import _explain, _library
from cuda_ops.__main__ import main
from cuda_ops._errors import UserError

ops = _library.ops
needs_tables = pytest.mark.skipif(not _library.has_cuda(), reason="needs a build with CUDA, whose tables these are")


def meta(*size, dtype=torch.float32, channels_last=False):
    tensor = torch.empty(size, dtype=dtype, device="meta")
    return tensor.to(memory_format=torch.channels_last) if channels_last else tensor


@pytest.mark.parametrize(
    "text, op, shapes, dtypes, named, tf32",
    [
        ("relu(3x4)", "relu", [(3, 4)], [torch.float32], {}, False),
        ("relu( 7 , bf16 )", "relu", [(7,)], [torch.bfloat16], {}, False),
        ("linear_relu(8x3:fp16, 5x3:float32)", "linear_relu", [(8, 3), (5, 3)], [torch.half, torch.float32], {}, False),
        ("matmul(2x3, 3x4, tf32)", "matmul", [(2, 3), (3, 4)], [torch.float32] * 2, {}, True),
        (
            "conv2d(1x8x9x9, 4x8x3x3, stride=(2, 1), padding=same, groups=1)",
            "conv2d",
            [(1, 8, 9, 9), (4, 8, 3, 3)],
            [torch.float32] * 2,
            {"stride": (2, 1), "padding": "same", "groups": 1},
            False,
        ),
    ],
)
def test_the_command_reads_a_call(text, op, shapes, dtypes, named, tf32):
    found, args, kwargs, allow_tf32 = _explain.parse_call(text)
    assert (found, kwargs, allow_tf32) == (op, named, tf32)
    assert [tuple(arg.shape) for arg in args] == shapes and [arg.dtype for arg in args] == dtypes
    assert all(arg.device.type == "meta" for arg in args)


def test_channels_last_is_of_all_images():
    _, (image, weight), _, _ = _explain.parse_call("conv2d(2x8x5x5, 4x8x3x3, channels_last)")
    assert image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous()
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "text, message",
    [
        ("relu", "expected a call such as"),
        ("relu(3x4, banana)", "got 'banana'"),
        ("relu(3x4:int8)", "expected a dtype of float32"),
        ("banana(3)", "expected a function of cuda_ops.functional, one of adaptive_avg_pool2d"),
    ],
)
def test_the_command_says_what_it_cannot_read(text, message):
    with pytest.raises(UserError, match=message):
        _explain.parse_call(text)


def test_every_functional_is_described():
    described = set(_explain.DESCRIBED) | set(_explain.ONE_KERNEL)
    assert described == set(cuda_ops.functional.__all__)
    assert not set(_explain.DESCRIBED) & set(_explain.ONE_KERNEL)


@pytest.mark.skipif(_library.has_cuda(), reason="needs a build without CUDA")
def test_a_build_without_cuda_says_so(capsys):
    with pytest.raises(NotImplementedError, match="this build of cuda_ops has no CUDA kernels"):
        cuda_ops.explain(cuda_ops.functional.relu, meta(3), capability="9.0")
    assert main(["explain", "relu(3)", "--capability", "9.0"]) == 2
    assert "this build of cuda_ops has no CUDA kernels" in capsys.readouterr().err


@needs_tables
@pytest.mark.parametrize("capability", ["9", "nine", "9.0.1"])
def test_a_capability_has_two_numbers(capability):
    with pytest.raises(UserError, match=r"expected capability to be such as 9\.0"):
        cuda_ops.explain("relu", meta(3), capability=capability)


@needs_tables
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["7.0"], "cuda_ops runs on compute capability 7.5 and newer, got 7.0"),
        (["9.0", "--multiprocessors", "0"], "expected multiprocessors to be a whole number of at least 1, got 0"),
        (["9.0", "--shared-memory", "-5"], "expected shared_memory to be a whole number of at least 1, got -5"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_device_that_there_is_none_of(options, message, capsys):
    assert main(["explain", "relu(4)", "--capability", *options]) == 2
    printed = capsys.readouterr()
    assert not printed.out and f"error: explain: {message}" in printed.err


@needs_tables
def test_a_path_that_there_is_none_of(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", "nosuch")
    assert main(["explain", "conv2d(1x3x8x8, 4x3x3x3)", "--capability", "9.0"]) == 2
    assert "error: explain: there is no path of the name nosuch" in capsys.readouterr().err


@needs_tables
@pytest.mark.parametrize(
    "call, message",
    {
        "matmul(2x3, 5x6)": "matmul: expected",
        "linear(2x3, 4x5)": "linear: expected",
        "conv2d(1x4x8x8, 4x3x3x3)": "conv2d: expected",
        "conv2d(1x1x1x1, 1x1x3x3)": "conv2d: expected",
        "max_pool2d(1x1x4x4, kernel_size=9)": "max_pool2d: expected",
        "softmax(3x4, dim=7)": "softmax: expected dim",
        "sum(3x4, dim=5)": "sum: expected dim",
        "layer_norm(3x4, normalized_shape=7)": "layer_norm: expected",
        "add2(2x3, 4x5)": "add2: expected",
        "cross_entropy(4x3, 5:int64)": "cross_entropy: expected",
        "scaled_dot_product_attention(1x2x4x8, 1x2x5x9, 1x2x5x8)": "attention: expected",
    }.items(),
)
def test_no_kernel_takes_a_call_that_is_an_error(call, message, capsys):
    """With arguments left out, or of values that a call looks at, the answer is by what there is."""
    assert main(["explain", call, "--capability", "9.0"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and f"error: explain: this call is an error: {message}" in printed.err


@needs_tables
@pytest.mark.parametrize(
    "call", ["cross_entropy(4x3, 4:int64)", "embedding(7:int32, 5x3)", "relu()", "bincount(9:int64)"]
)
def test_labels_and_indices_have_a_dtype_of_their_own(call, capsys):
    assert main(["explain", call, "--capability", "9.0"]) == 0
    assert capsys.readouterr().out


@needs_tables
def test_without_a_gpu_one_has_to_be_assumed():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="say which one to assume"):
        cuda_ops.explain("relu", meta(3))


def chosen(function, *args, **kwargs):
    """{product: name of the path that runs}"""
    explanation = cuda_ops.explain(function, *args, show=False, **kwargs)
    return {product.name: product.chosen.name for product in explanation.products}


F = cuda_ops.functional
half = {"dtype": torch.bfloat16}


@needs_tables
def test_what_hopper_and_older_gpus_take():
    image, weight = meta(64, 64, 14, 14, channels_last=True, **half), meta(128, 64, 3, 3, channels_last=True, **half)
    for capability, name in (("9.0", "sm90"), ("8.0", "mma"), ("7.5", "simt")):
        paths = chosen(F.conv2d, image, weight, padding=1, capability=capability)
        assert paths == dict.fromkeys(("forward", "gradient of input", "gradient of weight"), name)
    few = meta(64, 32, 28, 28, channels_last=True, **half), meta(64, 32, 3, 3, channels_last=True, **half)
    assert chosen(F.conv2d, *few, padding=1, capability="9.0")["forward"] == "sm90_halo"
    assert chosen(F.conv2d, meta(8, 6, 9, 9), meta(6, 1, 3, 3), groups=6, capability="9.0")["forward"] == "depthwise"
    large = meta(1024, 3136, **half), meta(128, 3136)
    assert chosen(F.linear_relu, *large, capability="9.0") == {"forward": "sm90", "gradients": "sm90"}
    assert chosen(F.linear_relu, *large, capability="8.0") == {"forward": "skinny", "gradients": "skinny"}
    for capability, name in (("9.0", "gemm"), ("8.0", "skinny")):  # float32 of many weights, few rows
        paths = chosen(F.linear_relu, meta(64, 3136), meta(128, 3136), capability=capability)
        assert paths == {"forward": name, "gradients": name}
    square = meta(16384, 1024, **half), meta(1024, 1024, **half)
    assert chosen(F.linear_relu, *square, capability="9.0") == {"forward": "gemm", "gradients": "gemm"}
    block = meta(64, 32, 14, 14, **half), meta(64, 32, 3, 3)
    assert chosen(F.conv_bn_relu_pool, *block, padding=1, capability="9.0") == {"forward and gradients": "sm90"}
    assert chosen(F.conv_bn_relu_pool, *block, padding=1, capability="8.0") == {"forward and gradients": "general"}
    block = meta(64, 32, 14, 14), meta(64, 32, 3, 3)
    assert chosen(F.conv_bn_relu_pool, *block, padding=1, capability="8.0") == {"forward and gradients": "tiled"}
    one = meta(64, 1, 28, 28), meta(32, 1, 3, 3)
    assert chosen(F.conv_bn_relu_pool, *one, padding=1, capability="7.5") == {"forward and gradients": "one_channel"}


@needs_tables
def test_rows_of_no_whole_16_bytes_are_copied_where_that_pays():
    a, b = meta(777, 555, **half), meta(555, 1333, **half)
    assert chosen(F.matmul, a, b, capability="9.0") == {
        "forward": "padded",
        "gradient of input": "padded",
        "gradient of other": "padded",
    }
    assert set(chosen(F.matmul, a, b, capability="8.0").values()) == {"mma"}
    aligned = meta(776, 552, **half), meta(552, 1336, **half)
    assert chosen(F.matmul, *aligned, capability="9.0")["forward"] == "sm90"
    with _explain.tf32(True):
        assert chosen(F.matmul, meta(777, 555), meta(555, 1333), capability="9.0")["forward"] == "padded"
    assert "padded" not in chosen(F.matmul, meta(777, 555), meta(555, 1333), capability="9.0").values()
    # A weight that one row reads is not worth a copy.
    assert chosen(F.linear, meta(1, 4099, **half), meta(4099, 4099, **half), capability="9.0")["forward"] == "direct"
    batch = meta(64, 200, 100, **half), meta(64, 100, 77, **half)
    assert chosen(F.matmul, *batch, capability="9.0")["forward"] == "padded"
    relu = meta(2000, 555, **half), meta(1333, 555, **half)
    assert chosen(F.linear_relu, *relu, capability="9.0") == {"forward": "gemm", "gradients": "gemm"}
    # Nor does a product of few columns, which is streamed instead, lead away from it.
    few = meta(230400, 34, **half), meta(14, 34, **half)
    assert chosen(F.linear_relu, *few, capability="9.0") == {"forward": "gemm", "gradients": "gemm"}
    # The preactivation is kept by the same kernel.
    gelu = meta(2000, 555, **half), meta(1333, 555, **half)
    assert chosen(F.linear_gelu, *gelu, capability="9.0")["forward, for a gradient"] == "fused"


@needs_tables
def test_what_the_size_decides():
    assert chosen(F.batch_norm, meta(8, 16, 7, 7), training=True, capability="9.0") == {
        "forward": "resident",
        "gradients": "resident",
    }
    many = {"training": True, "capability": "9.0"}
    assert chosen(F.batch_norm, meta(8, 3024, 7, 7), **many) == {"forward": "resident", "gradients": "groups"}
    for shape in [(8, 3024, 8, 8), (64, 3024, 7, 7), (8, 2048, 7, 7)]:
        assert set(chosen(F.batch_norm, meta(*shape), **many).values()) == {"resident"}
    last = meta(128, 2304, 5, 5).to(memory_format=torch.channels_last)
    assert set(chosen(F.batch_norm, last, **many).values()) == {"cluster"}
    assert set(chosen(F.batch_norm, last, training=True, capability="8.0").values()) == {"rows"}
    few = meta(16, 224, 3, 3).to(memory_format=torch.channels_last)
    assert set(chosen(F.batch_norm, few, training=True, capability="8.0").values()) == {"cluster"}
    # 94 KB beside what the kernel declares are more than a block has there.
    assert chosen(F.batch_norm, meta(750, 64), training=True, capability="8.6") == {
        "forward": "cluster",
        "gradients": "rows",
    }
    assert set(chosen(F.batch_norm, meta(1500, 64), training=True, capability="8.6").values()) == {"rows"}
    large = meta(64, 64, 56, 56).to(memory_format=torch.channels_last)
    assert set(chosen(F.batch_norm, large, **many).values()) == {"rows"}
    assert set(chosen(F.batch_norm, meta(512, 16, 56, 56), training=True, capability="9.0").values()) == {"split"}
    assert set(chosen(F.batch_norm, meta(8, 16, 7, 7), capability="9.0").values()) == {"split"}
    assert chosen(F.log_softmax, meta(8, 1000), 1, capability="9.0")["forward"] == "row"
    assert chosen(F.log_softmax, meta(8, 1000), 0, capability="9.0")["forward"] == "thread_group"
    assert set(chosen(F.log_softmax, meta(8, 1001), 1, capability="9.0").values()) == {"unaligned_row"}
    assert set(chosen(F.log_softmax, meta(8, 10), 1, capability="9.0").values()) == {"row"}
    for function in (F.softmax, F.log_softmax):
        assert set(chosen(function, meta(8, 50257), 1, capability="9.0").values()) == {"cluster"}
        assert set(chosen(function, meta(8, 16384), 1, capability="9.0").values()) == {"cluster"}
        assert set(chosen(function, meta(64, 16384), 1, capability="9.0").values()) == {"row"}
        assert set(chosen(function, meta(8, 8192), 1, capability="9.0").values()) == {"row"}
        assert set(chosen(function, meta(8, 1_000_000), 1, capability="9.0").values()) == {"split"}
        assert set(chosen(function, meta(2048, 50257), 1, capability="9.0").values()) == {"cluster"}
        assert set(chosen(function, meta(2048, 50257), 1, capability="8.0").values()) == {"thread_group"}
        assert set(chosen(function, meta(64, 50257), 1, capability="8.0").values()) == {"split"}
        assert set(chosen(function, meta(50257, 8), 0, capability="9.0").values()) == {"split"}
    assert chosen(F.masked_softmax, meta(8, 50257), capability="9.0")["forward"] == "split"
    assert chosen(F.masked_softmax, meta(8, 8192), capability="9.0")["forward"] == "row"
    assert set(chosen(F.layer_norm, meta(8, 768), (768,), capability="9.0").values()) == {"registers"}
    for rows, forward in [(8, "streamed"), (300, "registers"), (8192, "unaligned_row")]:
        assert chosen(F.layer_norm, meta(rows, 1156, dtype=torch.bfloat16), (1156,), capability="9.0") == {
            "forward": forward,
            "gradients": "registers",
        }
    assert chosen(F.layer_norm, meta(8, 8192), (8192,), capability="9.0") == {
        "forward": "registers",
        "gradients": "cluster",
    }
    assert set(chosen(F.rms_norm, meta(8, 65536), (65536,), capability="9.0").values()) == {"cluster", "streamed"}
    assert set(chosen(F.rms_norm, meta(8, 65536), (65536,), capability="8.0").values()) == {"streamed"}
    assert chosen(F.cross_entropy, meta(64, 10), capability="9.0")["forward"] == "one_block"
    assert chosen(F.cross_entropy, meta(64, 10), reduction="none", capability="9.0")["forward"] == "blocks"
    assert chosen(F.linear_cross_entropy, meta(64, 128), meta(10, 128), capability="9.0") == {
        "forward and gradients": "few_classes"
    }
    assert chosen(F.linear_cross_entropy, meta(64, 128), meta(17, 128), capability="9.0") == {
        "forward and gradients": "chunks"
    }
    head = meta(2048, 768, **half), meta(50257, 768, **half)
    for kwargs, path in [({}, "sm90"), ({"logit_softcap": 30.0, "label_smoothing": 0.1}, "chunks")]:
        assert set(chosen(F.linear_cross_entropy, *head, capability="9.0", **kwargs).values()) == {path}
    assert set(chosen(F.linear_cross_entropy, *head, capability="8.0").values()) == {"chunks"}
    capped = chosen(F.linear_cross_entropy, meta(64, 128), meta(10, 128), logit_softcap=30.0, capability="9.0")
    assert set(capped.values()) == {"chunks"}


@needs_tables
def test_what_attention_takes():
    attention, rows = F.scaled_dot_product_attention, [meta(2, 4, 64, 64, **half)] * 3
    assert set(chosen(attention, *rows, is_causal=True, capability="8.0").values()) == {"mma"}
    assert set(chosen(attention, *rows, capability="7.5").values()) == {"simt"}
    # In float32 gradients of up to 64 queries, of a mask, and of rows that blocks have no room for are simt's.
    assert chosen(attention, *[meta(2, 4, 64, 64)] * 3, capability="8.6") == {"forward": "float32", "gradients": "simt"}
    assert set(chosen(attention, *[meta(2, 4, 65, 64)] * 3, capability="8.6").values()) == {"float32"}
    # By three products in TF32 for one where tensor cores are faster than CUDA cores; long rows' gradients are not.
    assert set(chosen(attention, *[meta(2, 4, 65, 64)] * 3, capability="8.0").values()) == {"mma_3xtf32"}
    found = chosen(attention, *[meta(2, 4, 65, 128)] * 3, capability="9.0")
    assert found == {"forward": "mma_3xtf32", "gradients": "float32"}
    assert set(chosen(attention, *[meta(2, 4, 65, 64)] * 3, capability="7.5").values()) == {"simt"}
    assert set(chosen(attention, *[meta(2, 4, 65, 62)] * 3, capability="8.0").values()) == {"simt"}
    doubles = [meta(2, 4, 65, 64, dtype=torch.float64)] * 3
    assert set(chosen(attention, *doubles, capability="8.0").values()) == {"simt"}
    explanation = cuda_ops.explain(attention, *doubles, capability="7.5", show=False)
    assert [product.chosen for product in explanation.products] == [None, None] and "shared memory" in str(explanation)
    mask = meta(65, 65)
    assert set(chosen(attention, *[meta(2, 4, 65, 64)] * 3, mask, capability="8.0").values()) == {"mma_3xtf32"}
    found = chosen(attention, *[meta(2, 4, 65, 64)] * 3, mask.requires_grad_(), capability="8.0")
    assert found == {"forward": "mma_3xtf32", "gradients": "simt"}
    assert set(chosen(attention, *[meta(2, 4, 65, 128)] * 3, capability="8.6").values()) == {"simt"}
    assert set(chosen(attention, *[meta(2, 4, 64, 60, **half)] * 3, capability="8.0").values()) == {"simt"}
    mask = meta(64, 64, **half).requires_grad_()
    assert set(chosen(attention, *rows, mask, capability="8.0").values()) == {"mma"}
    # Hopper's tiles take boolean masks, and add those whose pairs of keys are aligned.
    for dtype in (torch.bool, torch.bfloat16, torch.float32):
        assert set(chosen(attention, *rows, meta(64, 64, dtype=dtype), capability="9.0").values()) == {"sm90"}
    assert set(chosen(attention, *rows, mask, capability="9.0").values()) == {"sm90"}
    assert set(chosen(attention, *rows, mask, dropout_p=0.1, capability="9.0").values()) == {"sm90"}
    for unaligned in (meta(64, 64, **half).mT, meta(64, 65, **half)[:, :64], meta(64, 1, **half)):
        assert set(chosen(attention, *rows, unaligned, capability="9.0").values()) == {"mma"}
    packed = meta(2, 64, 3, 4, 64, **half).permute(2, 0, 3, 1, 4).unbind()
    assert set(chosen(F.flash_attention, *packed, softcap=30.0, capability="8.0").values()) == {"mma"}
    # Backward has four tiles of 64 rows of 256 elements, of which such a GPU has room for three.
    long = [meta(1, 1, 64, 256, **half)] * 3
    assert chosen(attention, *long, capability="8.6") == {"forward": "mma", "gradients": "simt"}


@needs_tables
def test_what_multi_head_attention_is_made_of():
    attention, x = F.multi_head_attention_forward, meta(64, 2, 256, **half)
    rest = 256, 4, None, None, None, None, False, 0.0, None, None
    found = chosen(attention, x, x, x, *rest, need_weights=False, capability="8.0")
    of_linear = "forward", "gradient of input", "gradient of weight"
    names = [f"projection of query, key and value: {name}" for name in of_linear]
    names += ["attention: forward", "attention: gradients"]
    assert list(found) == names + [f"projection of output: {name}" for name in of_linear]
    assert found["attention: forward"] == "mma"
    memory = meta(32, 2, 256, **half)
    stored = chosen(attention, x, memory, memory, *rest, capability="8.0")
    assert {"projection of key and value: forward", "scores: forward", "weights: forward"} <= set(stored)


CALLS = [
    ("conv2d", (meta(4, 8, 9, 9), meta(8, 8, 3, 3))),
    ("conv2d", (meta(4, 8, 9, 9, channels_last=True, **half), meta(8, 8, 1, 1, **half))),
    ("conv_bn_act", (meta(4, 8, 9, 9), meta(8, 8, 1, 1))),
    ("conv_bn_relu_pool", (meta(4, 8, 8, 8), meta(8, 8, 3, 3))),
    ("batch_norm", (meta(4, 8, 9, 9),)),
    ("batch_norm_act", (meta(4, 8, 9, 9),)),
    ("embedding", (meta(4), meta(8, 3))),
    ("token_position_embedding", (meta(4), meta(8, 3), meta(4, 3))),
    ("group_norm", (meta(4, 8, 9, 9), 2)),
    ("group_norm", (meta(4, 8, 9, 9, channels_last=True), 2)),
    ("instance_norm", (meta(4, 8, 9, 9),)),
    ("layer_norm", (meta(4, 8), (8,))),
    ("rms_norm", (meta(4, 8), (8,))),
    ("add_layer_norm", (meta(4, 8), meta(4, 8), (8,))),
    ("add_rms_norm", (meta(4, 8), meta(4, 8), (8,))),
    ("log_softmax", (meta(4, 8), 1)),
    ("masked_softmax", (meta(4, 8),)),
    ("softmax", (meta(4, 8), 0)),
    *((op, (meta(4, 8), 1)) for op in ("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "var", "std")),
    ("norm", (meta(4, 8),)),
    *((op, (meta(4, 8), 0, meta(3), meta(3, 8))) for op in ("index_add", "index_add_")),
    *((op, (meta(4, 8), 0, meta(3, 8), meta(3, 8))) for op in ("scatter_add", "scatter_add_")),
    ("histc", (meta(4, 8),)),
    ("bincount", (meta(4),)),
    ("bincount", (meta(4), meta(4))),
    *(("permute_contiguous", (meta(*shape), (1, 0))) for shape in ((40, 8), (40, 3), (9, 4000), (80, 4001), (1, 8))),
    *(
        (op, (meta(2, 3, 8, 9), size))
        for op in ("adaptive_avg_pool2d", "adaptive_max_pool2d")
        for size in (1, (None, 4))
    ),
    ("concat", ([meta(4, 8), meta(4, 8)],)),
    ("cumsum", (meta(4, 8), 0)),
    ("cumsum", (meta(4, 8), 1)),
    ("prelu", (meta(4, 8), meta(8))),
    ("prelu", (meta(4, 8), meta(1))),
    ("sum", (meta(4, 8), 0)),
    ("cross_entropy", (meta(4, 8),)),
    ("linear", (meta(4, 8), meta(3, 8))),
    ("linear_relu", (meta(4, 8), meta(3, 8))),
    ("linear_gelu", (meta(4, 8), meta(3, 8))),
    ("linear_cross_entropy", (meta(4, 8), meta(3, 8))),
    ("matmul", (meta(4, 8), meta(8, 3))),
    ("matmul", (meta(5, 4, 8, **half), meta(8, 3, **half))),
    ("scaled_dot_product_attention", (meta(2, 4, 9, 8), meta(2, 4, 7, 8), meta(2, 4, 7, 16))),
    ("flash_attention_qkvpacked", (meta(2, 9, 3, 4, 8, **half),)),
    ("flash_attention", (meta(2, 4, 9, 8, **half), meta(2, 2, 7, 8, **half), meta(2, 2, 7, 16, **half))),
    ("flash_attention_varlen", (*[meta(9, 4, 8, **half)] * 3, *[meta(3, dtype=torch.int32)] * 2, 5, 5)),
    ("flash_attention_with_kvcache", (meta(2, 1, 4, 8, **half), *[meta(2, 9, 2, 8, **half)] * 2)),
    ("multi_head_attention_forward", (meta(9, 2, 8), meta(7, 2, 8), meta(7, 2, 8), 8, 4)),
    ("multi_head_attention_forward", (*[meta(9, 2, 8, **half)] * 3, 8, 4)),
    *((op, (meta(4, 8),)) for op in sorted(_explain.ONE_KERNEL)),
]


@needs_tables
@pytest.mark.parametrize("op, args", CALLS, ids=[f"{op}{i}" for i, (op, _) in enumerate(CALLS)])
@pytest.mark.parametrize("capability", ["7.5", "8.0", "9.0", "10.0"])
def test_one_row_runs_and_the_others_say_why_not(op, args, capability, capsys):
    explanation = cuda_ops.explain(op, *args, capability=capability)
    assert explanation.products
    for product in explanation.products:
        assert [path.chosen for path in product.paths].count(True) == 1
        names = [path.name for path in product.paths]
        assert len(set(names)) == len(names)
        for path in product.paths:
            assert path.file.startswith("csrc/cuda/")
            if path.chosen:
                assert path.supports and path.is_fast and not path.reason
            else:
                assert bool(path.reason) == (not path.supports or not path.is_fast)
    printed = capsys.readouterr().out
    assert f"capability {capability}" in printed and explanation.products[0].chosen.name in printed


@needs_tables
def test_files_and_kernels_are_those_of_the_sources():
    root = Path(__file__).resolve().parent.parent
    sources = [*(root / "csrc/cuda").rglob("*.cu"), *(root / "csrc/cuda").rglob("*.cuh")]
    if not sources:
        pytest.skip("needs the repository, whose sources these are")
    texts = (re.sub(r'"[^"\n]*"', "", source.read_text()) for source in sources)  # less the tables' own words
    words = set(re.findall(r"\w+", "\n".join(texts)))
    for op, args in CALLS:
        for product in cuda_ops.explain(op, *args, capability="9.0", show=False).products:
            for path in product.paths:
                assert (root / path.file).exists(), path
                assert words.issuperset(path.kernels), path


@needs_tables
def test_a_path_can_be_forced(monkeypatch):
    call = meta(64, 64), meta(10, 64)
    monkeypatch.setenv("CUDA_OPS_LINEAR_RELU_PATH", "gemm")
    try:
        ops.reload_paths()
        assert set(chosen(F.linear_relu, *call, capability="9.0").values()) == {"gemm"}
        monkeypatch.setenv("CUDA_OPS_LINEAR_RELU_PATH", "banana")
        assert set(chosen_names(F.linear_relu, *call)) == {"gemm"}  # read once
        ops.reload_paths()
        assert set(chosen_names(F.linear_relu, *call)) == {None}
        monkeypatch.delenv("CUDA_OPS_LINEAR_RELU_PATH")
        ops.reload_paths()
        assert set(chosen_names(F.linear_relu, *call)) == {"skinny"}
    finally:
        monkeypatch.undo()
        ops.reload_paths()


def chosen_names(function, *args):
    explanation = cuda_ops.explain(function, *args, capability="9.0", show=False)
    return [product.chosen and product.chosen.name for product in explanation.products]


@needs_tables
def test_the_command_prints_each_call(capsys):
    assert main(["explain", "relu(3x4)", "matmul(64x64, 64x64, bf16)", "--capability", "9.0"]) == 0
    printed = capsys.readouterr().out
    assert "relu on capability 9.0, 132 SMs" in printed and "matmul on" in printed
    assert main(["explain", "conv2d(3x4)", "--capability", "9.0"]) == 2
    assert "needs the argument 'weight'" in capsys.readouterr().err


@needs_tables
def test_facts_that_are_given_decide():
    block = meta(64, 32, 14, 14), meta(64, 32, 3, 3)
    for shared_memory, name in ((227 << 10, "tiled"), (99 << 10, "general")):
        paths = chosen(F.conv_bn_relu_pool, *block, padding=1, capability="9.0", shared_memory=shared_memory)
        assert paths == {"forward and gradients": name}


@pytest.mark.skipif(not torch.cuda.is_available() or not _library.has_cuda(), reason="needs a GPU")
def test_kernels_of_the_path_that_runs_are_known():
    explanation = cuda_ops.explain(F.relu, torch.empty(3, device="cuda"), show=False)
    assert set(explanation.kernels) == {"relu_forward", "relu_backward"}
    for kernel in explanation.kernels.values():
        assert 0 < kernel.registers[0] <= kernel.registers[1] <= 255
