"""CUDA kernels on the host: each op's .cu files, compiled as C++ for an emulated device (tests/emulation/README.md), on
random sizes, dtypes and alignments, against the C11 kernels or a plain loop."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.c_programs import CSRC, ROOT

EMULATION = ROOT / "tests" / "emulation"
CXX = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-O0", "-g1", "-mf16c", "-fno-strict-aliasing", "-w"]
FLAGS += ["-fsanitize=address,alignment", "-fno-sanitize-recover=all"]

TILED = ("tiled", "convolve", "backward_weight", "winograd")  # those without wgmma
TENSOR_CORES = ("bfloat16", "float16", "tf32")
# The files of csrc/cuda that an op is made of, and how many cases a run of the suite takes.
PADDED = "padded", "pad_channels", "relayout", "split_k"
OPS = {
    "permute_contiguous": (["permute_contiguous"], 60),
    "concat": (["concat.cu"], 60),
    "interleave": (["interleave.cu"], 60),
    "window_attention": (["window_attention", "window_attention/mma", "common/paths.cu"], 60),
    "concat_batch_norm_act": (["concat_batch_norm_act.cu"], 40),
    "cumsum": (["cumsum"], 60),
    "gemm_align": (["gemm/align.cu"], 60),
    "gemm_mma": (
        ["gemm/direct/mma.cu", "gemm/mma/mma.cu", *(f"gemm/mma/{t}.cu" for t in TENSOR_CORES), "gemm/split_k.cu"],
        20,
    ),
    "gemm_narrow": (["gemm/narrow", "gemm/split_k.cu"], 40),
    "dropout": (["dropout.cu"], 60),
    "prelu": (["prelu.cu"], 40),
    "scatter": (["scatter.cu"], 40),
    "reduction": (["reduction"], 60),
    "histogram": (["histogram/histogram.cu"], 40),
    "adaptive_pool2d": (["adaptive_pool2d.cu", "reduction"], 60),
    "batch_norm": (["batch_norm", "common/paths.cu"], 40),
    "layer_norm": (["layer_norm", "common/paths.cu"], 40),
    "layer_scale_add": (["layer_scale_add.cu"], 60),
    "scale_channels": (["scale_channels.cu"], 60),
    "excitation": (["excitation.cu"], 60),
    "round_list": (["round_list.cu"], 60),
    "softmax": (
        ["softmax.cu", "log_softmax.cu", "logsumexp.cu", "masked_softmax.cu", "softmax", "common/paths.cu"],
        60,
    ),
    "winograd": (["conv2d/winograd"], 60),
    "conv2d_padded": (
        ["conv2d/mma", "conv2d/grouped", *(f"conv2d/{name}.cu" for name in PADDED), "transpose_images.cu"],
        60,
    ),
    "depthwise": (["conv2d/depthwise", "conv2d/split_k.cu"], 20),
    "few_channels": (["conv2d/few_channels"], 40),
    "im2col": (["conv2d/im2col.cu", "conv2d/relayout.cu"], 120),
    "patches": (["conv2d/patches", "transpose_images.cu"], 100),
    "conv_bn_relu_pool": (
        [
            "conv_bn_relu_pool/one_channel",
            *(f"conv_bn_relu_pool/tiled_sm80/{name}.cu" for name in TILED),
        ],
        24,
    ),
    "conv_bn_relu_pool_general": (["conv_bn_relu_pool/general.cu", "batch_norm", "common/paths.cu"], 80),
    "attention": (
        [
            "attention",
            *(f"attention/{path}" for path in ("mma", "mma_3xtf32", "decode", "float32", "simt")),
            "common/paths.cu",
        ],
        60,
    ),
    "attention_order": ([], 60),
    "attention_sequences": (["attention/sequences.cu"], 60),
}

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux" or shutil.which(CXX) is None,
    reason="fibers are switched by x86-64 instructions, on Linux",
)


def compile_objects(sources, translated, folder):
    """The object files of the sources, in that folder, which all programs share: several have the same files, and most
    of a program whose kernels are changed is as it was. An object is named after the text that it is compiled from."""
    include = [f"-I{EMULATION / 'include'}", f"-I{EMULATION}", "-I.", f"-I{CSRC / 'include'}"]

    def call(*command, **options):
        result = subprocess.run([CXX, *FLAGS, *map(str, command)], capture_output=True, cwd=translated, **options)
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout

    def compile_one(source):
        # Relative and without the folder, so that the text, which names its files, is the same wherever they lie.
        source = source.relative_to(translated) if source.is_relative_to(translated) else source
        text = call(*include, "-include", "cuda_runtime.h", "-fno-working-directory", "-x", "c++", "-E", source)
        target = folder / f"{source.stem}_{hashlib.sha256(text).hexdigest()}.o"
        if not target.exists():
            call("-x", "c++-cpp-output", "-c", "-", "-o", target, input=text)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, sources))


def translate(folder):
    """csrc/cuda as C++, in that folder."""
    subprocess.run([sys.executable, EMULATION / "translate.py", CSRC / "cuda", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The folder of what all programs are made of."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def common(c_kernels, compiled):
    """The objects that every program is linked with: the emulated device, and the C11 kernels."""
    sources = [EMULATION / f"{name}.cpp" for name in ("emulator", "device", "cases")]
    return [*compile_objects(sources, translate(compiled / "translated"), compiled), *c_kernels]


def build(op, paths, common, compiled, folder, change=lambda path, text: text):
    """The program of tests/emulation/test_<op>.cpp, of kernels whose text may be changed first."""
    translated, sources = translate(folder / "translated"), []
    for path in paths:
        sources += sorted((translated / path).glob("*.cu")) if "." not in path else [translated / path]
    headers = [header for path in paths if "." not in path for header in sorted((translated / path).glob("*.*h"))]
    for file in sources + headers:
        file.write_text(change(file, file.read_text()))
    program = folder / f"emulated_{op}"
    objects = compile_objects([*sources, EMULATION / f"test_{op}.cpp"], translated, compiled)
    sanitizers = [flag for flag in FLAGS if flag.startswith("-fsanitize")]
    command = [CXX, *sanitizers, "-fsanitize=undefined", *objects, *common, "-o", program, "-lm"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return program


def run(program, cases, first=0):
    return subprocess.run([program, str(first), str(cases)], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("op", OPS)
def test_kernels(op, common, compiled, tmp_path):
    paths, cases = OPS[op]
    result = run(build(op, paths, common, compiled, tmp_path), cases)
    assert result.returncode == 0, result.stderr


def test_what_is_the_same_is_compiled_once(common, compiled, tmp_path):
    objects = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        build("round_list", OPS["round_list"][0], common, compiled, folder)
        objects.append(sorted(compiled.glob("*.o")))
    assert objects[0] == objects[1]


# Sizes from which on kernels work otherwise, and choices, by file, made so here that small cases reach all of them.
SMALLER = {
    "scatter": {"scatter.cu": {"SLICE_BYTES = 32 << 20": "SLICE_BYTES = 512", "MOST_SLICES = 4": "MOST_SLICES = 1000"}},
    "winograd": {"winograd.cu": {" CHUNK_BYTES = 256 << 20": " CHUNK_BYTES = 64 << 10"}},
    "cumsum": {"long_rows.cuh": {"WANTED_ROW_BLOCKS = 396": "WANTED_ROW_BLOCKS = 5"}},
    # Clusters of eight blocks, and rows that do not fit into them.
    "batch_norm": {
        "cluster.cu": {"FEW_BYTES = 64 << 10": "FEW_BYTES = 256", "MOST_BYTES = 100 << 10": "MOST_BYTES = 2048"}
    },
    "adaptive_pool2d": {
        "adaptive_pool2d.cu": {
            "MANY_KEPT_BYTES = 132 * 32 << 10": "MANY_KEPT_BYTES = 1",
            "LONG_RUN = 64": "LONG_RUN = 1",
            "LARGEST_KEPT = 2 << 10": "LARGEST_KEPT = 256",
        }
    },
    # The largest cluster for a batch and key head's keys, or shares of all of them, by the number of keys.
    "attention": {
        "decode.cu": {
            "if (blocks > device.multiprocessors)": "if (blocks > 64)",
            "if (time < best)": "if (p.keys % 2 == 1 || time < best)",
            "const bool may_differ = ": "const bool may_differ = p.keys % 3 == 0 || ",
        }
    },
    # By way of shared memory wherever that takes them.
    "depthwise": {
        "staged_sm80.cu": {"expected < 0 || expected >= microseconds": "expected < 0"},
        "backward_weight.cu": {"expected < channels_last_microseconds": "0 * expected > channels_last_microseconds"},
    },
    # Groups by wgmma wherever that takes them.
    "conv2d_padded": {"grouped.cu": {"plan.microseconds < best.microseconds": "plan.wgmma > best.wgmma"}},
    "reduction": {
        "reduction.h": {"LEAST_FOLDED = 128": "LEAST_FOLDED = 1", "FOLDED_ELEMENTS = 1 << 20": "FOLDED_ELEMENTS = 1"}
    },
}


@pytest.mark.parametrize("op", SMALLER)
def test_parts(op, common, compiled, tmp_path):
    def change(path, text):
        for right, small in SMALLER[op].get(path.name, {}).items():
            assert right in text
            text = text.replace(right, small)
            changed.add(path.name)
        return text

    changed = set()
    paths, cases = OPS[op]
    result = run(build(op, paths, common, compiled, tmp_path, change), cases)
    assert changed == SMALLER[op].keys()
    assert result.returncode == 0, result.stderr


# What an error of each kind is reported as: in concat.cu, which has no barrier, in dropout.cu and in gemm/align.cu.
@pytest.mark.parametrize(
    ("op", "right", "wrong", "message"),
    [
        ("concat", "wait_for_predecessor();", "", "use-after-poison"),
        ("concat", "if (at >= input.words)", "if (at > input.words)", "AddressSanitizer"),
        ("dropout", "(product0 >> 32) ^ c3 ^ keys.key1[round]", "(product0 >> 32) ^ c3", "output["),
        ("dropout", "is_aligned_16(output) && ", "", "misaligned address"),
        ("gemm_align", " && are_readable_around(from[i], work.from, work.end)", "", "AddressSanitizer"),
        ("gemm_align", "(line - matrix * work.rows) * work.pitch", "line * work.pitch", "element"),
    ],
)
def test_errors_are_found(op, right, wrong, message, common, compiled, tmp_path):
    def change(path, text):
        assert right in text
        return text.replace(right, wrong)

    result = run(build(op, OPS[op][0], common, compiled, tmp_path, change), 60)
    assert result.returncode != 0
    assert message in result.stderr
