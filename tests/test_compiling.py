"""What a build compiles for which architecture (build_backend/compiling.py)."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))
import compiling  # noqa: E402

FLAGS = ["-O3", *(f"-gencode=arch=compute_{a},code={c}" for a, c in (("75", "sm_75"), ("90", "compute_90")))]
HOPPER = "-gencode=arch=compute_90,code=sm_90"


def uses_sm90a(source):
    """Whether a build compiles the file for sm_90a alone."""
    (folder,) = (folder for folder, sources, _ in compiling.rounds([source], [*FLAGS, HOPPER]) if sources)
    return folder == "sm_90a"


def test_files_for_sm90a_are_found_through_their_headers(tmp_path):
    (tmp_path / "tile.cuh").write_text("#if defined(CUDA_OPS_SM90A)\n#endif\n")
    (tmp_path / "middle.cuh").write_text('#include "tile.cuh"\n#include "middle.cuh"\n')
    (tmp_path / "hopper.cu").write_text('#include <cuda.h>\n#include "middle.cuh"\n#include "missing.h"\n')
    (tmp_path / "plain.cu").write_text('#include "common.cuh"\n#include "cuda_ops/core.h"\n')
    assert uses_sm90a(tmp_path / "hopper.cu")
    assert not uses_sm90a(tmp_path / "plain.cu")


@pytest.mark.parametrize("name", ["gemm/12_tma_wgmma.cu", "conv_bn_relu_pool_sm90.cu"])
def test_wgmma_is_for_sm90a(name):
    assert uses_sm90a(ROOT / "csrc/cuda" / name)


@pytest.mark.parametrize("name", ["square.cu", "gemm.cu", "linear_relu.cu", "conv2d_layout.cu", "conv2d_mma_pixels.cu"])
def test_what_other_devices_run_is_for_all(name):
    assert not uses_sm90a(ROOT / "csrc/cuda" / name)


def test_flags_for_sm90a():
    assert compiling.for_sm90a([*FLAGS, HOPPER]) == [
        "-O3",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-DCUDA_OPS_SM90A=1",
    ]


def test_flags_stay_where_9_0_is_not_asked_for():
    assert compiling.for_sm90a(FLAGS) == FLAGS


# The default: 7.5, 8.0 and 9.0, and PTX for newer devices.
DEFAULT = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (75, 80, 90)] + [
    "-gencode=arch=compute_90,code=compute_90"
]
COMPUTE_80 = [f"-gencode=arch=compute_80,code={code}" for code in ("sm_80", "sm_90", "compute_80")]


def test_one_front_end_serves_all_from_8_0_on():
    assert compiling.from_one_front_end(["-O3", *DEFAULT]) == ["-O3", DEFAULT[0], *COMPUTE_80]
    newer = [f"-gencode=arch=compute_{a},code={c}" for a, c in ((90, "sm_90"), (120, "sm_120"), (120, "compute_120"))]
    ours = [f"-gencode=arch=compute_90,code={c}" for c in ("sm_90", "sm_120", "compute_90")]
    assert compiling.from_one_front_end(newer) == ours
    for alone in (["-O3"], DEFAULT[:1], ["-gencode=arch=compute_90a,code=sm_90a"]):
        assert compiling.from_one_front_end(alone) == alone


def test_turing_is_left_out_where_there_is_more():
    assert compiling.without_turing(["-O3", *DEFAULT]) == ["-O3", *DEFAULT[1:]]
    assert compiling.without_turing(["-O3", DEFAULT[0]]) == ["-O3", DEFAULT[0]]
    assert compiling.without_turing(["-gencode=arch=compute_120,code=sm_120"]) == [
        "-gencode=arch=compute_120,code=sm_120"
    ]


def test_rounds(tmp_path):
    (tmp_path / "common.cuh").write_text("#if __CUDA_ARCH__ >= 900\n#endif\n")
    sources = {
        "hopper.cu": "#if defined(CUDA_OPS_SM90A)\n",
        "plain.cu": '#include "common.cuh"\n',
        "longer.cu": '#include "common.cuh"\n// more\n',
        "dependent.cu": '#include "common.cuh"\nwait_for_predecessor();\n',
        "chooses.cu": "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\n",
        "ampere.cu": "#define CUDA_OPS_LEAST_CAPABILITY 80 // cp.async\n",
        "both.cu": "#define CUDA_OPS_LEAST_CAPABILITY 80\n    release_successor();\n",
        "glue.cpp": "// CUDA_OPS_SM90A\n",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in sources]

    def names(flags):
        return {folder: [Path(s).name for s in some] for folder, some, _ in compiling.rounds(paths, flags) if some}

    assert names(DEFAULT) == {
        "sm_90a": ["hopper.cu"],
        "compute_80": ["longer.cu", "plain.cu"],
        "ampere": ["both.cu"],
        "ampere_compute_80": ["ampere.cu"],
        "": ["dependent.cu", "chooses.cu", "glue.cpp"],
    }
    flags = {folder: flags for folder, _, flags in compiling.rounds(paths, DEFAULT)}
    assert flags[""] == DEFAULT
    assert flags["ampere_compute_80"] == COMPUTE_80
    # One architecture: nothing to tell apart, and all in one round.
    assert list(names(DEFAULT[:1])) == [""]
    assert list(names(["-gencode=arch=compute_90a,code=sm_90a"])) == [""]
