"""cuda_ops.ladder.simulator: right results, counts that follow from the hardware's rules, and the mistakes it finds.
And rungs 1 and 2 of the ladder, which stand on it."""

import numpy as np
import pytest
import torch

from cuda_ops.ladder import gemm, simulator
from cuda_ops.ladder.simulator import Dim3, SimulationError, launch, steps

KERNELS = [gemm.naive_kernel, gemm.coalesced_kernel, gemm.shared_memory_kernel, gemm.register_tile_kernel]


def copy_kernel(t, output, input, stride):
    output[t.threadIdx.x * stride] = input[t.threadIdx.x * stride]


def reverse_kernel(t, output, input):
    tile = t.shared("tile", t.blockDim.x)
    tile[t.threadIdx.x] = input[t.blockIdx.x * t.blockDim.x + t.threadIdx.x]
    yield
    output[t.blockIdx.x * t.blockDim.x + t.threadIdx.x] = tile[t.blockDim.x - 1 - t.threadIdx.x]


def reverse_without_barrier(t, output, input):
    tile = t.shared("tile", t.blockDim.x)
    tile[t.threadIdx.x] = input[t.threadIdx.x]
    output[t.threadIdx.x] = tile[t.blockDim.x - 1 - t.threadIdx.x]
    yield


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (35, 79, 19), (16, 16, 16), (7, 33, 5), (17, 1, 31), (5, 4, 0)])
def test_kernels_multiply(kernel, sizes):
    m, n, k = sizes
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    d, report = gemm.simulate(kernel, a, b)
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)
    assert report.races == []
    assert report.traffic["global store"].elements == m * n


def test_python_loops():
    assert gemm.python_loops([[1.0, 2.0]], [[3.0, 0.0], [4.0, -1.0]]) == [[11.0, -2.0]]
    for sizes in [(35, 79, 19), (1, 1, 1), (3, 0, 2), (0, 3, 2), (3, 4, 0)]:
        m, n, k = sizes
        a, b = torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)
        torch.testing.assert_close(gemm.rungs["python"](a, b), a @ b)


def test_lines_of_a_warp():
    """32 neighbouring floats are one line of 128 bytes, every second one two lines, a column 32."""
    memory = np.zeros(32 * 32, np.float32)
    for stride, lines in [(1, 1), (2, 2), (32, 32)]:
        traffic = launch(copy_kernel, 1, 32, memory.copy(), memory, stride).traffic
        assert traffic["global load"].passes == traffic["global store"].passes == lines
        assert traffic["global load"].requests == 1
    # Lane after lane, whatever Python has made of the kernel's bytecode by then.
    for _ in range(3):
        assert launch(copy_kernel, 1, 128, memory.copy(), memory, 1).traffic["global store"].requests == 4
    # 48 threads are two warps, of which the second one asks for half a line.
    traffic = launch(copy_kernel, 1, 48, memory.copy(), memory, 1).traffic["global load"]
    assert (traffic.requests, traffic.elements, traffic.passes) == (2, 48, 2)
    # Doubles take two lines.
    doubles = np.zeros(32)
    assert launch(copy_kernel, 1, 32, doubles.copy(), doubles, 1).traffic["global load"].passes == 2


@pytest.mark.parametrize(("pitch", "passes"), [(32, 32), (33, 1), (36, 4), (1, 1), (0, 1), (2, 2)])
def test_bank_conflicts(pitch, passes):
    """Element lane * pitch: with 32 all lanes meet in one bank, with 33 none do, with 0 all want one word."""

    def kernel(t, output):
        tile = t.shared("tile", 32 * 36)
        output[t.threadIdx.x] = tile[t.threadIdx.x * pitch]

    report = launch(kernel, 1, 32, np.zeros(32, np.float32))
    assert report.traffic["shared load"].passes == passes


def test_coalescing_is_the_lesson_of_rung_5():
    a = np.ones((32, 32), np.float32)
    naive = gemm.simulate(gemm.naive_kernel, a, a, tile=32)[1].traffic
    coalesced = gemm.simulate(gemm.coalesced_kernel, a, a, tile=32)[1].traffic
    assert naive["global store"].passes_per_request == 32
    assert naive["global load"].passes_per_request == (32 + 1) / 2
    assert coalesced["global store"].passes_per_request == 1
    assert coalesced["global load"].passes_per_request == 1


def test_tiles_are_the_lesson_of_rungs_6_and_7():
    """Global loads fall by the side of the tile; shared loads by the tile of a thread."""
    a = np.ones((32, 32), np.float32)
    coalesced = gemm.simulate(gemm.coalesced_kernel, a, a)[1].traffic
    tiled = gemm.simulate(gemm.shared_memory_kernel, a, a)[1].traffic
    registers = gemm.simulate(gemm.register_tile_kernel, a, a)[1].traffic
    assert coalesced["global load"].elements == 8 * tiled["global load"].elements
    assert coalesced["global load"].elements == 16 * registers["global load"].elements
    assert tiled["shared load"].elements == 4 * registers["shared load"].elements


def test_barrier_orders_threads():
    input = np.arange(64, dtype=np.float32)
    output = np.zeros(64, np.float32)
    report = launch(reverse_kernel, 2, 32, output, input)
    assert report.races == []
    assert report.barriers == 2
    np.testing.assert_array_equal(output, np.concatenate([input[31::-1], input[:31:-1]]))


def test_race_without_barrier_is_found():
    report = launch(reverse_without_barrier, 1, 32, np.zeros(32, np.float32), np.ones(32, np.float32))
    assert report.races
    race = report.races[0]
    assert race.array == "tile"
    assert race.threads[0] != race.threads[1]
    assert "race for tile[" in str(report)


def test_missing_second_barrier_is_a_race():
    """The barrier at the end of the loop, which keeps the next tile from being written over the one in use."""

    def kernel(t, output, input):
        tile = t.shared("tile", t.blockDim.x)
        total = 0.0
        for p in range(2):
            tile[t.threadIdx.x] = input[p * t.blockDim.x + t.threadIdx.x]
            yield
            total += sum(tile[q] for q in range(t.blockDim.x))
        output[t.threadIdx.x] = total

    report = launch(kernel, 1, 4, np.zeros(4, np.float32), np.ones(8, np.float32))
    assert {race.array for race in report.races} == {"tile"}


def test_race_between_blocks_is_found():
    def kernel(t, output):
        output[t.threadIdx.x] = t.blockIdx.x

    report = launch(kernel, 2, 4, np.zeros(4, np.float32))
    assert len(report.races) == 4
    assert launch(kernel, 1, 4, np.zeros(4, np.float32)).races == []


def test_divergent_barriers_are_errors():
    def half_of_them(t):
        if t.threadIdx.x < 2:
            yield

    def two_places(t):
        if t.threadIdx.x < 2:
            yield
        else:
            yield

    with pytest.raises(SimulationError, match=r"thread \(2, 0, 0\) has ended, and thread \(0, 0, 0\) waits"):
        launch(half_of_them, 1, 4)
    with pytest.raises(SimulationError, match="different barriers"):
        launch(two_places, 1, 4)


@pytest.mark.parametrize("index", [-1, 8])
def test_bounds_are_checked(index):
    def kernel(t, output):
        output[index] = 1.0

    with pytest.raises(SimulationError, match=rf"output\[{index}\] is out of bounds, the array has 8 elements"):
        launch(kernel, 1, 1, np.zeros(8, np.float32))


def test_index_is_an_integer():
    with pytest.raises(TypeError, match="an index is one integer"):
        launch(lambda t, output: output[0, 0], 1, 1, np.zeros((8, 8), np.float32))


def test_shared_memory_starts_undefined():
    """As NaN, and anew in each block."""
    seen = []

    def kernel(t):
        tile = t.shared("tile", 1)
        seen.append(tile[0])
        tile[0] = 1.0

    launch(kernel, 3, 1)
    assert np.isnan(seen).all()


def test_steps_stop_at_barriers():
    a = np.arange(64, dtype=np.float32).reshape(8, 8)
    d = np.zeros((8, 8), np.float32)
    seen = list(steps(gemm.shared_memory_kernel, (2, 2), (4, 4), d, a, a, 8, 8, 8))
    # Two tiles along k, two barriers for each, four blocks.
    assert len(seen) == 16
    assert [step.barrier for step in seen[:4]] == [1, 2, 3, 4]
    # An index, unlike a size, is 0 in the dimensions that are not used.
    assert [step.block for step in seen[::4]] == [Dim3(0, 0, 0), Dim3(1, 0, 0), Dim3(0, 1, 0), Dim3(1, 1, 0)]
    np.testing.assert_array_equal(seen[0].shared["a_tile"].reshape(4, 4), a[:4, :4])
    np.testing.assert_array_equal(seen[2].shared["b_tile"].reshape(4, 4), a[4:, :4])
    np.testing.assert_allclose(d, a @ a)


def test_dim3():
    assert tuple(simulator.dim3(3)) == (3, 1, 1)
    assert tuple(simulator.dim3((3, 2))) == (3, 2, 1)
