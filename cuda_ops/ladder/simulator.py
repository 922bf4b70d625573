"""A CUDA device in Python: runs a kernel function for every thread of a grid, one after the other, and tells what the
hardware would have had to do.

A kernel is a function whose first parameter is the thread. One that has barriers is a generator, and `yield` is its
``__syncthreads()``::

    def reverse(t, output, input, n):
        i = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
        shared = t.shared("tile", t.blockDim.x)
        shared[t.threadIdx.x] = input[i] if i < n else 0
        yield
        if i < n:
            output[n - 1 - i] = shared[t.threadIdx.x]

    report = launch(reverse, 2, 32, output, input, 64)

What the lanes of a warp do together is yielded too, and all of them have to come: ``other = yield t.shfl_down(x, 16)``,
``other = yield t.shfl_xor(x, 1)``, ``mask = yield t.match_any(x)``, ``yield t.syncwarp()``.
``t.atomic_add(array, i, x)`` is an ordinary call, and returns what was there.

Arrays of NumPy become global memory: flat, with bounds that are checked. Shared memory starts as NaN, as it starts as
anything on a device. What is reported:

- requests to memory by warp: how many 128-byte lines each touches (1 for neighbouring floats, 32 for a column of a
  matrix), and how many passes shared memory takes for it, because of its 32 banks; of atomics, how many lanes meet in
  one element;
- races: an element that one thread writes and another reads or writes with no barrier between them (within a warp,
  `syncwarp` is one); atomics do not race with each other;
- barriers that not all threads of a block, or of a warp, reach (an error).

`steps` is `launch` with a stop at each barrier, at which shared memory can be looked at.
"""

import bisect
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

WARP = 32
LINE_BYTES = 128
BANKS, BANK_BYTES = 32, 4


class SimulationError(RuntimeError):
    """What would be undefined on a device: an index out of bounds, a barrier that some threads miss."""


@dataclass(frozen=True)
class Dim3:
    x: int
    y: int = 1
    z: int = 1

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __str__(self):
        return f"({self.x}, {self.y}, {self.z})"


def dim3(value) -> Dim3:
    return value if isinstance(value, Dim3) else Dim3(*value) if isinstance(value, tuple) else Dim3(value)


@dataclass(frozen=True)
class Race:
    """Two threads that met at an element with no barrier between them."""

    array: str
    index: int
    block: Dim3
    threads: tuple[Dim3, Dim3]
    line: int
    """The line of the kernel's source at which it was seen."""

    def __str__(self):
        first, second = self.threads
        return (
            f"line {self.line}: threads {first} and {second} of block {self.block} race for {self.array}[{self.index}]"
        )


@dataclass
class Traffic:
    """Requests of one kind (global loads, ...). A request is what the lanes of a warp ask for by one instruction."""

    requests: int = 0
    elements: int = 0
    passes: int = 0
    """Global memory: 128-byte lines touched. Shared memory: passes over the banks. Atomics: the lanes that meet in the
    element that most of them want."""

    @property
    def passes_per_request(self) -> float:
        return self.passes / self.requests if self.requests else 0.0


KINDS = ("global load", "global store", "shared load", "shared store")
ATOMICS = ("global atomic", "shared atomic")


@dataclass
class Report:
    threads: int = 0
    barriers: int = 0
    traffic: dict[str, Traffic] = field(default_factory=lambda: {kind: Traffic() for kind in KINDS + ATOMICS})
    races: list[Race] = field(default_factory=list)

    def __str__(self):
        lines = [f"{self.threads} threads, {self.barriers} barriers"]
        for kind, traffic in self.traffic.items():
            if kind in ATOMICS and not traffic.requests:
                continue
            unit = "128-byte lines" if kind.startswith("global") else "passes"
            unit = "lanes in one element" if kind in ATOMICS else unit
            lines.append(
                f"{kind:>13}: {traffic.elements:7d} elements in {traffic.requests:6d} requests of warps, "
                f"{traffic.passes_per_request:5.2f} {unit} each"
            )
        lines += [f"{len(self.races)} races" + (f", the first: {self.races[0]}" if self.races else "")]
        return "\n".join(lines)


@dataclass
class Step:
    """Where a block stands at a barrier: what steps() yields."""

    block: Dim3
    barrier: int
    shared: dict[str, np.ndarray]


class Array:
    """Memory that threads index by one integer. Each access is checked and noted."""

    def __init__(self, name: str, data: np.ndarray, is_shared: bool, device: "_Device"):
        self.name, self.data, self.is_shared, self._device = name, data, is_shared, device
        self.kind = "shared" if is_shared else "global"
        self.serial = next(device.serials)  # an id() comes again when a block's arrays are gone

    def __len__(self):
        return self.data.size

    def _check(self, index):
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            raise TypeError(f"{self.name}: an index is one integer, as in C, got {index!r}")
        if not 0 <= index < self.data.size:
            device = self._device
            raise SimulationError(
                f"thread {device.thread.threadIdx} of block {device.thread.blockIdx}: {self.name}[{index}] is out of "
                f"bounds, the array has {self.data.size} elements"
            )
        return int(index)

    def __getitem__(self, index):
        index = self._check(index)
        self._device.note(self, index, "load", sys._getframe(1))
        return self.data[index]

    def __setitem__(self, index, value):
        index = self._check(index)
        self._device.note(self, index, "store", sys._getframe(1))
        self.data[index] = value


@dataclass(frozen=True)
class Together:
    """What the lanes of a warp do together: what a kernel yields beside barriers."""

    name: str
    value: object = None
    argument: int = 0

    def results(self, values: list) -> list:
        """What each lane gets, for the values of all of them."""
        lanes = range(len(values))
        if self.name == "match_any":
            return [sum(1 << other for other in lanes if values[other] == value) for value in values]
        if self.name == "syncwarp":
            return [None] * len(values)
        partners = [lane + self.argument if self.name == "shfl_down" else lane ^ self.argument for lane in lanes]
        # Beyond the warp a lane gets its own value back.
        return [
            values[partner if partner < len(values) else lane] for lane, partner in zip(lanes, partners, strict=True)
        ]


@dataclass
class Thread:
    """What a kernel sees of the device."""

    threadIdx: Dim3
    blockIdx: Dim3
    blockDim: Dim3
    gridDim: Dim3
    _device: "_Device"

    def shared(self, name: str, size: int, dtype=np.float32) -> Array:
        """`__shared__ float name[size]`: the same array for all threads of the block."""
        arrays = self._device.shared
        if name not in arrays:
            data = np.full(size, np.nan, dtype) if np.issubdtype(dtype, np.floating) else np.zeros(size, dtype)
            arrays[name] = Array(name, data, True, self._device)
        if len(arrays[name]) != size:
            raise SimulationError(
                f"shared array {name} has {len(arrays[name])} elements in one thread, {size} in another"
            )
        return arrays[name]

    def atomic_add(self, array: Array, index: int, value):
        """`atomicAdd(&array[index], value)`: what was there before."""
        index = array._check(index)
        self._device.note(array, index, "atomic", sys._getframe(1))
        before = array.data[index]
        array.data[index] += value
        return before

    def shfl_down(self, value, offset: int) -> Together:
        """To be yielded: `__shfl_down_sync(FULL_WARP, value, offset)`."""
        return Together("shfl_down", value, offset)

    def shfl_xor(self, value, mask: int) -> Together:
        """To be yielded: `__shfl_xor_sync(FULL_WARP, value, mask)`."""
        return Together("shfl_xor", value, mask)

    def match_any(self, value) -> Together:
        """To be yielded: `__match_any_sync(FULL_WARP, value)`, the mask of the lanes that have the same value."""
        return Together("match_any", value)

    def syncwarp(self) -> Together:
        """To be yielded: `__syncwarp()`."""
        return Together("syncwarp")


class _Device:
    """The state of one launch."""

    def __init__(self, report: Report):
        self.report = report
        self.serials = itertools.count()
        self.shared: dict[str, Array] = {}
        self.thread: Thread | None = None
        self.linear = 0  # of the thread within its block
        self.barrier = 0  # how many the block has passed
        self.warp_barriers: dict[int, int] = {}  # how many each warp has passed, beside those
        self.requests: dict[tuple, list] = {}
        self.counts: dict[tuple, int] = {}
        self.accesses: dict[tuple, tuple] = {}

    def start_block(self):
        self.shared, self.barrier, self.warp_barriers = {}, 0, {}

    def note(self, array: Array, index: int, direction: str, frame):
        # Lanes execute one instruction together: the same program position, the same iteration.
        position = (frame.f_code, _instruction(frame.f_code, frame.f_lasti), direction)
        count = self.counts.get((self.linear, position), 0)
        self.counts[self.linear, position] = count + 1
        key = (self.linear // WARP, position, count, array.serial)
        self.requests.setdefault(key, [array, direction, []])[2].append(index)
        self._note_race(array, index, direction, frame)

    def _note_race(self, array, index, direction, frame):
        block, warp = self.thread.blockIdx, self.linear // WARP
        me = (block, self.linear, self.barrier, self.warp_barriers.get(warp, 0))
        key = (array.serial, index)
        writer, readers, atomics = self.accesses.get(key, (None, (), ()))

        def meets(other):
            # Within a block a barrier orders the two, within a warp one of the warp's too; between blocks nothing does.
            if other is None or other[:2] == me[:2]:
                return False
            if other[0] != block:
                return True
            return other[2] == me[2] and (other[1] // WARP != warp or other[3] == me[3])

        def joined(some):
            recent = tuple(r for r in some if r[0] != block or r[2] == self.barrier)
            return (*recent[-1:], me)

        others = {"load": [writer, *atomics], "store": [writer, *readers, *atomics], "atomic": [writer, *readers]}[
            direction
        ]
        met = next(filter(meets, others), None)
        if met:
            here, there = self.thread.threadIdx, _thread_index(met[1], self.thread.blockDim)
            self.report.races.append(Race(array.name, index, block, (there, here), frame.f_lineno))
        if direction == "store":
            self.accesses[key] = (me, readers, atomics)
        elif direction == "atomic" and me not in atomics:
            self.accesses[key] = (writer, readers, joined(atomics))
        elif direction == "load" and me not in readers:
            self.accesses[key] = (writer, joined(readers), atomics)

    def end_of_phase(self):
        """At a barrier and at the end of a block: what the warps asked for since the last one is added up."""
        for array, direction, indices in self.requests.values():
            traffic = self.report.traffic[f"{array.kind} {direction}"]
            traffic.requests += 1
            traffic.elements += len(indices)
            if direction == "atomic":
                traffic.passes += max(map(indices.count, set(indices)))
            else:
                traffic.passes += (_bank_passes if array.is_shared else _lines)(indices, array.data.itemsize)
        self.requests.clear()
        self.counts.clear()
        self.barrier += 1


@functools.cache
def _instruction_offsets(code) -> list[int]:
    return [instruction.offset for instruction in dis.get_instructions(code)]


def _instruction(code, offset: int) -> int:
    """The start of the instruction that `offset` lies in. From Python 3.11 on an instruction is followed by caches, and
    once it has specialised itself, a frame that it has called from stands in those: other lanes, the same position."""
    offsets = _instruction_offsets(code)
    return offsets[bisect.bisect_right(offsets, offset) - 1]


def _thread_index(linear: int, block: Dim3) -> Dim3:
    return Dim3(linear % block.x, linear // block.x % block.y, linear // (block.x * block.y))


def _lines(indices, itemsize) -> int:
    """128-byte lines that hold these elements of an array that starts at one."""
    return len({index * itemsize // LINE_BYTES for index in indices})


def _bank_passes(indices, itemsize) -> int:
    """The most words that any bank is asked for. The same word for several lanes is one; 8-byte elements take two
    halves of a warp."""
    words = {index * itemsize // BANK_BYTES for index in indices}
    banks = [0] * BANKS
    for word in words:
        banks[word % BANKS] += 1
    return max(banks) * max(1, itemsize // BANK_BYTES)


def steps(kernel: Callable, grid, block, *arguments, report: Report | None = None) -> Iterator[Step]:
    """Runs a kernel and stops at each barrier of each block.

    Args:
        kernel: a function, or with barriers a generator, of a Thread and the arguments.
        grid, block: numbers of blocks, and of threads in a block: an int or up to three of them.
        arguments: NumPy arrays become global memory (they are written in place); anything else is passed on.
        report: is filled in.

    Yields:
        A Step for each barrier, with copies of the block's shared arrays; the threads of a block go on when all of
        them have reached it.

    Raises:
        SimulationError: an index out of bounds, or a barrier that not all threads of a block reach.
    """
    grid, block = dim3(grid), dim3(block)
    report = Report() if report is None else report
    device = _Device(report)
    names = list(inspect.signature(kernel).parameters)[1:]
    handed = []
    for name, argument in itertools.zip_longest(names[: len(arguments)], arguments):
        if isinstance(argument, np.ndarray):
            if not argument.flags.c_contiguous:
                raise ValueError(f"{name}: global memory is a C-contiguous array")
            argument = Array(name, argument.reshape(-1), False, device)
        handed.append(argument)
    for z, y, x in itertools.product(range(grid.z), range(grid.y), range(grid.x)):
        yield from _run_block(kernel, Dim3(x, y, z), grid, block, handed, device)


def _run_block(kernel, index, grid, block, arguments, device) -> Iterator[Step]:
    device.start_block()
    count = block.x * block.y * block.z
    threads = [Thread(_thread_index(i, block), index, block, grid, device) for i in range(count)]
    device.report.threads += count
    running = {}
    for i, thread in enumerate(threads):
        device.thread, device.linear = thread, i
        running[i] = kernel(thread, *arguments)
    if not inspect.isgeneratorfunction(kernel):
        device.end_of_phase()  # a plain function has run to its end
        return
    while True:
        waiting, ended = _run_to_barrier(running, threads, index, device)
        device.end_of_phase()
        if not waiting:
            return
        lines = sorted(set(waiting.values()))
        first = next(iter(waiting))
        if ended:
            raise SimulationError(
                f"block {index}: thread {threads[ended[0]].threadIdx} has ended, and thread {threads[first].threadIdx} "
                f"waits for it at the barrier in line {lines[0]}"
            )
        if len(lines) > 1:
            raise SimulationError(f"block {index}: threads wait at different barriers, in lines {lines}")
        device.report.barriers += 1
        yield Step(index, device.barrier, {name: array.data.copy() for name, array in device.shared.items()})


def _run_to_barrier(running, threads, index, device) -> tuple[dict[int, int], list[int]]:
    """All threads of a block up to the next barrier, or to their ends: {who waits: in which line}, and who has ended.
    What a warp does together is done as soon as all its lanes are there."""
    waiting, ended, together = {}, [], {}
    ready = dict.fromkeys(running)  # and what the yield that they wait at is to return
    while ready:
        for i, value in ready.items():
            device.thread, device.linear = threads[i], i
            try:
                request = running[i].send(value)
            except StopIteration:
                ended.append(i)
                continue
            if request is None:
                waiting[i] = running[i].gi_frame.f_lineno
            else:
                together[i] = (request, running[i].gi_frame.f_lineno)
        ready = {}
        for warp in {i // WARP for i in together}:
            lanes = [i for i in range(warp * WARP, (warp + 1) * WARP) if i in running]
            missing = [i for i in lanes if i not in together]
            here = {(request.name, line) for request, line in map(together.get, set(lanes) - set(missing))}
            if missing or len(here) > 1:
                (name, line), *_ = sorted(here)
                who = threads[missing[0]].threadIdx if missing else "another lane"
                raise SimulationError(f"block {index}: {name} in line {line} is not reached by all lanes: not by {who}")
            requests = [together.pop(i)[0] for i in lanes]
            ready |= zip(lanes, requests[0].results([request.value for request in requests]), strict=True)
            if requests[0].name == "syncwarp":
                device.warp_barriers[warp] = device.warp_barriers.get(warp, 0) + 1
    return waiting, ended


def launch(kernel: Callable, grid, block, *arguments) -> Report:
    """``kernel<<<grid, block>>>(arguments)``: runs it to the end.

    Args, Raises:
        as `steps`.

    Returns:
        What the threads asked of memory, and the races between them.
    """
    report = Report()
    for _ in steps(kernel, grid, block, *arguments, report=report):
        pass
    return report
