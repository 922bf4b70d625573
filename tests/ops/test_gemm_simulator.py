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


def test_atomics_add_up_and_do_not_race():
    """A shared counter for each of four; 16 lanes of a request meet in each, and then two blocks in memory's."""

    def kernel(t, counts):
        mine = t.shared("mine", 4, np.int32)
        if t.threadIdx.x < 4:
            mine[t.threadIdx.x] = 0
        yield
        t.atomic_add(mine, t.threadIdx.x % 4, 1)
        yield
        if t.threadIdx.x < 4:
            t.atomic_add(counts, t.threadIdx.x, mine[t.threadIdx.x])

    counts = np.zeros(4, np.int32)
    report = launch(kernel, 2, 32, counts)
    assert counts.tolist() == [16] * 4
    assert report.races == []
    assert (report.traffic["shared atomic"].requests, report.traffic["shared atomic"].passes_per_request) == (2, 8)
    assert (report.traffic["global atomic"].requests, report.traffic["global atomic"].passes_per_request) == (2, 1)
    assert "shared atomic" in str(report)
    assert "atomic" not in str(launch(copy_kernel, 1, 32, np.zeros(32, np.float32), np.zeros(32, np.float32), 1))


def test_atomics_return_what_was_there():
    seen = []
    launch(lambda t, a: seen.append(t.atomic_add(a, 0, 2)), 1, 3, np.zeros(1, np.int64))
    assert seen == [0, 2, 4]


@pytest.mark.parametrize("first", ["load", "store"])
def test_atomics_race_with_ordinary_accesses(first):
    def kernel(t, a):
        if t.threadIdx.x == 0:
            if first == "load":
                a[0]
            else:
                a[0] = 1
        else:
            t.atomic_add(a, 0, 1)

    (race,) = launch(kernel, 1, 2, np.zeros(1, np.int32)).races
    assert race.array == "a"

    def turned(t, a):
        if t.threadIdx.x == 0:
            t.atomic_add(a, 0, 1)
        elif first == "load":
            a[0]
        else:
            a[0] = 1

    assert len(launch(turned, 1, 2, np.zeros(1, np.int32)).races) == 1


def test_lanes_exchange():
    """Two warps, each for itself; beyond its end a lane keeps its own value."""
    found = {}

    def kernel(t):
        x = t.threadIdx.x
        down = yield t.shfl_down(x, 16)
        across = yield t.shfl_xor(x, 1)
        same = yield t.match_any(x % 4)
        found[x] = down, across, same

    launch(kernel, 1, 64)
    assert [found[x][0] for x in range(64)] == [x + 16 if x % 32 < 16 else x for x in range(64)]
    assert [found[x][1] for x in range(64)] == [x ^ 1 for x in range(64)]
    assert [found[x][2] for x in range(64)] == [0x11111111 << x % 4 for x in range(64)]


@pytest.mark.parametrize(("barrier", "races"), [("none", True), ("warp", False), ("block", False)])
def test_syncwarp_orders_a_warp(barrier, races):
    def kernel(t, output):
        x = t.threadIdx.x
        tile = t.shared("tile", 64)
        tile[x] = x
        if barrier == "warp":
            yield t.syncwarp()
        elif barrier == "block":
            yield
        output[x] = tile[x ^ 1]

    report = launch(kernel, 1, 64, np.zeros(64, np.float32))
    assert bool(report.races) == races


def test_syncwarp_orders_no_other_warp():
    def kernel(t, output):
        x = t.threadIdx.x
        tile = t.shared("tile", 64)
        tile[x] = x
        yield t.syncwarp()
        output[x] = tile[x ^ 32]

    assert launch(kernel, 1, 64, np.zeros(64, np.float32)).races


def test_lanes_that_do_not_come_are_errors():
    def half_of_them(t):
        if t.threadIdx.x < 16:
            yield t.shfl_down(1, 1)

    def some_at_a_barrier(t):
        if t.threadIdx.x < 16:
            yield t.syncwarp()
        else:
            yield

    def two_places(t):
        if t.threadIdx.x < 16:
            yield t.syncwarp()
        else:
            yield t.syncwarp()

    message = r"is not reached by all lanes: not by "
    with pytest.raises(SimulationError, match=rf"shfl_down in line \d+ {message}\(16, 0, 0\)"):
        launch(half_of_them, 1, 32)
    with pytest.raises(SimulationError, match=rf"syncwarp in line \d+ {message}\(16, 0, 0\)"):
        launch(some_at_a_barrier, 1, 32)
    with pytest.raises(SimulationError, match=rf"{message}another lane"):
        launch(two_places, 1, 32)


def test_dim3():
    assert tuple(simulator.dim3(3)) == (3, 1, 1)
    assert tuple(simulator.dim3((3, 2))) == (3, 2, 1)
