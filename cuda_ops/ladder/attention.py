"""attention, forward, rung by rung.

    >>> import torch
    >>> from cuda_ops.ladder import attention
    >>> one = torch.ones(1, 1, 2, 64)
    >>> attention.LADDER.rungs["simulated online softmax"](one, one, one, True)[0, 0, :, 0]
    tensor([1., 1.])

The kernels are in csrc/cuda/attention/ladder/; `python -m cuda_ops bench ladder attention` measures them, and
notebooks/attention.ipynb walks them.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import functional
from . import simulator
from ._ladder import Case, Ladder, Simulated

# --- kernels for the simulator ---------------------------------------------------------------------------------------
# Written as the .cu files of the same names are, of one head and of tiles that fit a laptop: 16 threads, 4 queries by 4
# keys, a thread a score; `t` is the thread, `yield` is __syncthreads().

SIDE = 4  # queries and keys of a tile


def load_tile(t, tile, rows, first, count, d):
    for i in range(t.threadIdx.x, SIDE * d, SIDE * SIDE):
        row = first + i // d
        tile[i] = rows[row * d + i % d] if row < count else 0


def score_of(query_tile, key_tile, query, key, row, column, d, keys, causal):
    """That of a thread; -inf where there is no key, or the query does not see it."""
    if key >= keys or (causal and key > query):
        return np.float32(-np.inf)
    total = np.float32(0)
    for p in range(d):
        total += query_tile[row * d + p] * key_tile[column * d + p]
    return total / np.float32(math.sqrt(d))


def scores_kernel(t, scores, query, key, queries, keys, d, causal):
    """csrc/cuda/attention/ladder/01_stored_scores.cu, the first of three: a block makes a tile of scores."""
    row, column = t.threadIdx.x // SIDE, t.threadIdx.x % SIDE
    first_query, first_key = t.blockIdx.y * SIDE, t.blockIdx.x * SIDE
    query_tile, key_tile = t.shared("query_tile", SIDE * d), t.shared("key_tile", SIDE * d)
    load_tile(t, query_tile, query, first_query, queries, d)
    load_tile(t, key_tile, key, first_key, keys, d)
    yield
    i, j = first_query + row, first_key + column
    score = score_of(query_tile, key_tile, i, j, row, column, d, keys, causal)
    if i < queries and j < keys:
        scores[i * keys + j] = score


def softmax_kernel(t, scores, queries, keys):
    """The second: rows of scores become weights, a thread a row here."""
    row = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
    if row >= queries:
        return
    maximum, total = np.float32(-np.inf), np.float32(0)
    for key in range(keys):
        maximum = max(maximum, scores[row * keys + key])
    for key in range(keys):
        total += np.exp(scores[row * keys + key] - maximum)
    for key in range(keys):
        scores[row * keys + key] = np.exp(scores[row * keys + key] - maximum) / total


def values_kernel(t, output, weights, value, queries, keys, d):
    """The third: weights times values, a thread every sixteenth number of the block's queries."""
    for i in range(t.threadIdx.x, SIDE * d, SIDE * SIDE):
        query, column = t.blockIdx.x * SIDE + i // d, i % d
        if query < queries:
            total = np.float32(0)
            for key in range(keys):
                total += weights[query * keys + key] * value[key * d + column]
            output[query * d + column] = total


def online_softmax_kernel(t, output, query, key, value, queries, keys, d, causal):
    """csrc/cuda/attention/ladder/03_online_softmax.cu: a row's largest score and its sum are those so far, and a larger
    score makes what was added smaller."""
    row, column = t.threadIdx.x // SIDE, t.threadIdx.x % SIDE
    first_query = t.blockIdx.x * SIDE
    query_tile, other_tile = t.shared("query_tile", SIDE * d), t.shared("other_tile", SIDE * d)
    weights = t.shared("weights", SIDE * SIDE)
    load_tile(t, query_tile, query, first_query, queries, d)
    maximum, total = np.float32(-np.inf), np.float32(0)
    mine = np.zeros(d // SIDE, np.float32)  # of the row's output, every fourth number
    for first_key in range(0, min(keys, first_query + SIDE) if causal else keys, SIDE):
        load_tile(t, other_tile, key, first_key, keys, d)
        yield
        i, j = first_query + row, first_key + column
        score = score_of(query_tile, other_tile, i, j, row, column, d, keys, causal)
        largest = max(maximum, score)
        for apart in (2, 1):  # the four threads of a row
            other = yield t.shfl_xor(largest, apart)
            largest = max(largest, other)
        factor, maximum = np.exp(maximum - largest), largest
        weight = np.exp(score - largest)
        total = total * factor + weight
        weights[row * SIDE + column] = weight
        yield  # the keys have been read: values take their place
        load_tile(t, other_tile, value, first_key, keys, d)
        yield
        mine *= factor
        for k in range(SIDE):
            w = weights[row * SIDE + k]
            for c in range(d // SIDE):
                mine[c] += w * other_tile[k * d + SIDE * c + column]
        yield
    for apart in (2, 1):
        total += yield t.shfl_xor(total, apart)
    if first_query + row < queries:
        for c in range(d // SIDE):
            output[(first_query + row) * d + SIDE * c + column] = mine[c] / total


def launch(kernel, query: np.ndarray, key: np.ndarray, value: np.ndarray, causal: bool):
    """Head by head; the report is of all of them. Rung 1's kernel stands for the three."""
    queries, keys, d = query.shape[2], key.shape[2], query.shape[3]
    output, report = np.full(query.shape, np.nan, np.float32), simulator.Report()
    tiles, threads = -(-queries // SIDE), SIDE * SIDE

    def run(*arguments):
        for _ in simulator.steps(*arguments, report=report):
            pass

    for place in np.ndindex(query.shape[:2]):
        q, k, v = (np.ascontiguousarray(array[place]) for array in (query, key, value))
        if keys == 0:
            output[place] = 0  # as the launcher has it
        elif kernel is scores_kernel:
            scores = np.full((queries, keys), np.nan, np.float32)
            run(scores_kernel, (-(-keys // SIDE), tiles), threads, scores, q, k, queries, keys, d, causal)
            run(softmax_kernel, -(-queries // threads), threads, scores, queries, keys)
            run(values_kernel, tiles, threads, output[place], scores, v, queries, keys, d)
        else:
            run(kernel, tiles, threads, output[place], q, k, v, queries, keys, d, causal)
    return output, report


# --- models ----------------------------------------------------------------------------------------------------------


def online() -> None:
    """Online softmax with values, of one query and a key at a time. The output so far, over the sum so far, is always
    what it would be if no more keys came; a larger score scales down what is there. Softmax's ladder does so with the
    sum alone."""
    scores = np.array([1.0, 3.0, 2.0, 5.0])
    values = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
    maximum, total, output = -np.inf, 0.0, np.zeros(2)
    for score, value in zip(scores, values, strict=True):
        larger = max(maximum, score)
        factor, weight = np.exp(maximum - larger), np.exp(score - larger)
        total, output, maximum = total * factor + weight, output * factor + weight * value, larger
        print(f"score {score:.0f}: factor {factor:.3f}, sum {total:.4f}, output / sum = {output / total}")
    weights = np.exp(scores - scores.max())
    print(f"with all scores at hand: {weights @ values / weights.sum()}")


def bytes_moved() -> None:
    """What each rung moves to and from memory, of 64 heads of 4096 tokens, 128 numbers each: four tensors of bfloat16,
    and the matrix of scores in float32, each time it is written or read."""
    heads, length, d = 64, 4096, 128
    tensors, scores = 4 * heads * length * d * 2, heads * length**2 * 4
    for rung, times in ((1, 6), (2, 2), (3, 0)):
        total = tensors + times * scores
        print(f"rung {rung}: {total / 1e9:5.2f} GB, at 4.2 TB/s {total / 4.2e9:5.2f} ms")
    products = 4 * heads * length**2 * d
    print(f"and its {products / 1e12:.2f} TFLOP at 800 TFLOP/s take {products / 800e9:.2f} ms")


class Timeline:
    """Of two consumers who share the tensor cores: a line of letters each."""

    def __init__(self):
        self.lines, self.free, self.busy = [[], []], 0, 0

    def put(self, consumer, letter, start, length) -> int:
        line = self.lines[consumer]
        line += [" "] * (start + length - len(line))
        line[start : start + length] = [letter if place == " " else "*" for place in line[start : start + length]]
        return start + length

    def multiply(self, consumer, letter, earliest, length) -> int:
        """When the product is done, which begins as soon as the tensor cores are free."""
        self.free = self.put(consumer, letter, max(self.free, earliest), length)
        self.busy += length
        return self.free

    def show(self):
        units = max(map(len, self.lines))
        for consumer, line in enumerate(self.lines):
            print(f"  consumer {consumer}: {''.join(line)}")
        print(f"  tensor cores busy {100 * self.busy / units:.0f} % of {units} units")


def timeline(product: int = 4, softmax: int = 5, blocks: int = 4) -> None:
    """Two consumers and one set of tensor cores, as they meet in rungs 5 and 6. A block of keys costs a consumer two
    products (S, scores; O, output), for which it needs the tensor cores, and a softmax (x) between them, for which it
    does not. In rung 5 both ask for the same at the same time, are served at half the speed each, and so are at their
    softmax together too, when the tensor cores have nothing to do. In rung 6 they ask in turns, each for the next
    block's scores and for this block's output at once, and do the softmax of those scores while their own output (*),
    or the other's product, is being made. Each column is a unit of time."""
    print("rung 5")
    of, now = Timeline(), 0
    for _ in range(blocks):
        for letter, length in (("S", 2 * product), ("x", softmax), ("O", 2 * product)):
            for consumer in (0, 1):
                of.put(consumer, letter, now, length)
            of.busy += length if letter != "x" else 0
            now += length
    of.show()
    print("rung 6")
    of, ready = Timeline(), [0, 0]
    for block in range(blocks + 1):
        for consumer in (0, 1):  # in turns
            now = ready[consumer]
            if block < blocks:
                scored = of.multiply(consumer, "S", now, product)
                ready[consumer] = of.put(consumer, "x", scored, softmax)
            if block > 0:
                ready[consumer] = max(ready[consumer], of.multiply(consumer, "O", now, product))
    of.show()


# --- the ladder ------------------------------------------------------------------------------------------------------


def attention(batch: int, heads: int, queries: int, keys: int, d: int, causal: bool, factor: float = 1) -> Case:
    lengths = f"{queries}" if queries == keys else f"{queries}x{keys}"
    name = f"{batch}x{heads}x{lengths}x{d} {'causal' if causal else 'full'}"

    def inputs(make):
        query = make.normal(batch, heads, queries, d) * factor
        return query, make.normal(batch, heads, keys, d), make.normal(batch, heads, keys, d), causal

    # Half of the products where each query sees the keys before it alone, as everybody counts them.
    return Case(
        name if factor == 1 else f"{name}, scores times {factor}",
        inputs,
        elements=2 * batch * heads * (queries + keys) * d,
        flops=4.0 * batch * heads * queries * keys * d / (2 if causal else 1),
    )


def misaligned(length: int, d: int) -> Case:
    """From addresses that are no multiples of 16 bytes."""

    def inputs(make):
        return *(make.normal(2 * length * d + 1)[1:].view(1, 2, length, d) for _ in range(3)), True

    return Case(f"1x2x{length}x{d} causal, misaligned", inputs, elements=8 * length * d)


def in_double(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Weights in float64, and what a score's rounding errors are relative to."""
    q, k = query.double() / math.sqrt(query.shape[3]), key.double()
    scores, sizes = q @ k.mT, q.abs() @ k.abs().mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores, sizes = scores.masked_fill(hidden, -torch.inf), sizes.masked_fill(hidden, 0)
    return torch.softmax(scores, 3), sizes


def reference(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return in_double(query, key, value, causal)[0] @ value.double()


def bound(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Relative to the sum of |weight * value|: errors of scores, which are those of their exponentials, and of sums
    over keys, in float32; and with bfloat16 tensors, of weights and of the output that are rounded to it."""
    weights, sizes = in_double(query, key, value, causal)
    keys = key.shape[2]
    worst = sizes.amax(3, keepdim=True) if keys else 0.0
    in_float32 = torch.finfo(torch.float32).eps * (16 + 2 * keys**0.5 + 4 * worst)
    rounded = 0.0 if query.dtype == torch.float32 else torch.finfo(query.dtype).eps  # twice half of it
    return (in_float32 + rounded) * (weights @ value.double().abs())


def native(backend: SDPBackend):
    def run(query, key, value, causal):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return run


def peers(dtype: torch.dtype):
    if dtype == torch.float32:
        return {"efficient": native(SDPBackend.EFFICIENT_ATTENTION)}
    return {"flash": native(SDPBackend.FLASH_ATTENTION), "cuDNN": native(SDPBackend.CUDNN_ATTENTION)}


def arguments(query, key, value, causal):
    return [torch.empty_like(query)], [query, key, value], [float(causal)]


HALVES = (torch.bfloat16,)
LADDER = Ladder(
    name="attention",
    formula=r"\text{output} = \text{softmax}\left(\frac{1}{\sqrt{d}}\, Q K^\top\right) V",
    introduction="""Two products with a softmax between them. Written down as it stands, the softmax wants whole rows of
a matrix that has as many numbers as there are pairs of tokens, and all time goes into moving that matrix. What there is
to learn: how it need never exist; how softmax then fits between two products in registers; and, once products run at
the tensor cores' speed, how the exponentials, which run elsewhere, are hidden beside them.""",
    kernels=["stored scores", "fused softmax", "online softmax", "mma", "tma wgmma", "overlap"],
    dtypes=(torch.float32, torch.bfloat16),
    dtypes_of={4: HALVES, 5: HALVES, 6: HALVES},
    arguments=arguments,
    reference=reference,
    bound=bound,
    tests=[
        *(attention(*sizes) for sizes in [(1, 1, 1, 1, 64, False), (1, 2, 5, 7, 64, True), (1, 1, 9, 3, 64, False)]),
        *(attention(1, 1, 3, 5, 128, causal) for causal in (False, True)),
        *(attention(0, 2, 5, 5, 64, False), attention(1, 3, 0, 5, 64, True), attention(2, 1, 5, 0, 128, False)),
        *(attention(2, 3, 65, 63, d, causal) for d in (64, 128) for causal in (False, True)),
        *(attention(1, 2, 127, 129, d, causal) for d in (64, 128) for causal in (False, True)),
        *(attention(1, 2, 256, 256, d, causal) for d in (64, 128) for causal in (False, True)),
        attention(1, 2, 300, 1, 128, True),
        attention(2, 2, 1, 300, 64, False),
        attention(3, 2, 200, 333, 64, False),
        attention(1, 2, 1000, 1000, 64, True),
        attention(1, 1, 777, 1025, 128, True),
        attention(1, 1, 1025, 777, 128, True),
        attention(2, 9, 500, 400, 128, False, 4),
        attention(2, 9, 400, 500, 64, True, 4),
        misaligned(67, 64),
        misaligned(129, 128),
    ],
    cases=[
        attention(1, 1, 9, 9, 64, True),
        *(attention(4, 2048 // d, 4096, 4096, d, causal) for d in (64, 128) for causal in (True, False)),
    ],
    shown="4x16x4096x128 full",
    native={"eager": native(SDPBackend.MATH)},
    ours=lambda query, key, value, causal: functional.scaled_dot_product_attention(query, key, value, is_causal=causal),
    simulated={1: Simulated(scores_kernel, launch), 3: Simulated(online_softmax_kernel, launch)},
    compiled=False,
    peers=peers,
    yardstick="peer cuDNN",
    models=(online, bytes_moved, timeline),
)
