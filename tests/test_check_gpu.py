"""benchmarks/check_gpu.py: what is read out of compute-sanitizer's logs."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import check_gpu  # noqa: E402

sys.path.remove(BENCHMARKS)

BEGIN = "========= COMPUTE-SANITIZER\n# relu: 1.0 s\nrelu\n"
FOUND = "========= Invalid __global__ read of size 4 bytes\n=========     at kernel\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    "text, status, expected",
    [
        (BEGIN + "sum\n" + CLEAN, 0, ["relu", "sum"]),
        (BEGIN + "sum\n========= RACECHECK SUMMARY: 0 hazards displayed\n", 0, ["relu", "sum"]),
        (BEGIN, None, ["relu"]),  # ended at the limit
        (BEGIN + FOUND, None, []),
        (BEGIN + FOUND + "sum\n========= ERROR SUMMARY: 1 error\n", 9, []),
        (BEGIN + CLEAN, 0, []),  # a case is missing
        (BEGIN + "sum\n", 0, []),  # no summary: the tool did not run
        (BEGIN + "sum\nRuntimeError: no\n" + CLEAN, 1, []),
    ],
)
def test_verdict(text, status, expected):
    clean, problem = check_gpu.verdict(text, ["relu", "sum"], status)
    assert clean == expected and (problem is None) == bool(expected)
