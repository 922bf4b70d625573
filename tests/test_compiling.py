"""What a build compiles for which architecture (build_backend/compiling.py)."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))
import compiling  # noqa: E402

FLAGS = ["-O3", *(f"-gencode=arch=compute_{a},code={c}" for a, c in (("75", "sm_75"), ("90", "compute_90")))]
HOPPER = "-gencode=arch=compute_90,code=sm_90"


def test_files_for_sm90a_are_found_through_their_headers(tmp_path):
    (tmp_path / "tile.cuh").write_text("#if defined(CUDA_OPS_SM90A)\n#endif\n")
    (tmp_path / "middle.cuh").write_text('#include "tile.cuh"\n#include "middle.cuh"\n')
    (tmp_path / "hopper.cu").write_text('#include <cuda.h>\n#include "middle.cuh"\n#include "missing.h"\n')
    (tmp_path / "plain.cu").write_text('#include "common.cuh"\n#include "cuda_ops/core.h"\n')
    assert compiling.uses_sm90a(tmp_path / "hopper.cu")
    assert not compiling.uses_sm90a(tmp_path / "plain.cu")


@pytest.mark.parametrize("name", ["gemm/12_tma_wgmma.cu", "conv_bn_relu_pool_sm90.cu"])
def test_wgmma_is_for_sm90a(name):
    assert compiling.uses_sm90a(ROOT / "csrc/cuda" / name)


@pytest.mark.parametrize("name", ["square.cu", "gemm.cu", "linear_relu.cu", "conv_bn_relu_pool.cu"])
def test_what_other_devices_run_is_for_all(name):
    assert not compiling.uses_sm90a(ROOT / "csrc/cuda" / name)


def test_flags_for_sm90a():
    assert compiling.for_sm90a([*FLAGS, HOPPER]) == [
        "-O3",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-DCUDA_OPS_SM90A=1",
    ]


def test_flags_stay_where_9_0_is_not_asked_for():
    assert compiling.for_sm90a(FLAGS) == FLAGS
