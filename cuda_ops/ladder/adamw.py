"""A step of AdamW over a list of parameters, rung by rung.

    >>> import torch
    >>> from cuda_ops.ladder import adamw
    >>> param, exp_avg, exp_avg_sq = adamw.LADDER.rungs["simulated fused"](
    ...     torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
    ... )
    >>> param
    tensor([0.9994, 0.9994])

Its inputs are n parameters, n gradients, n exp_avgs and n exp_avg_sqs, in this order; all but the gradients are written
in place, and returned. The kernels are in csrc/cuda/adamw/ladder/; `python -m cuda_ops bench ladder adamw` measures
them, and notebooks/adamw.ipynb walks them.
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from .._library import ops
from . import simulator
from ._ladder import Case, Ladder, Numbers, Simulated

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 3


def lists(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Params, grads, exp_avgs, exp_avg_sqs."""
    count = len(tensors) // 4
    return [tensors[first : first + count] for first in range(0, len(tensors), count)]


def outputs(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Those that a step writes."""
    params, _, exp_avgs, exp_avg_sqs = lists(tensors)
    return (*params, *exp_avgs, *exp_avg_sqs)


def numbers() -> tuple[float, ...]:
    """What does not depend on the element: keep, fresh1, beta2, fresh2, size, correction, eps of step.cuh."""
    size, correction = LR / (1 - BETA1**STEP), 1 / math.sqrt(1 - BETA2**STEP)
    return 1 - LR * WEIGHT_DECAY, 1 - BETA1, BETA2, 1 - BETA2, size, correction, EPS


# --- kernels for the simulator ---------------------------------------------------------------------------------------
# Written as the .cu files of the same names are; `t` is the thread.


def step_at(param, grad, exp_avg, exp_avg_sq, i, step):
    """step.cuh: element i."""
    keep, fresh1, beta2, fresh2, size, correction, eps = (np.float32(number) for number in step)
    p, g, m, v = param[i], grad[i], exp_avg[i], exp_avg_sq[i]
    m += fresh1 * (g - m)
    v = beta2 * v + fresh2 * g * g
    param[i] = p * keep - size * (m / (np.sqrt(v) * correction + eps))
    exp_avg[i], exp_avg_sq[i] = m, v


def op_kernel(t, to, count, op, *operands):
    """csrc/cuda/adamw/ladder/01_op_at_a_time.cu: any of its kernels, which have a thread for each element."""
    i = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
    if i < count:
        to[i] = op(*(operand[i] for operand in operands))


def launch_ops(kernel, *arrays: np.ndarray, threads: int = 64) -> tuple[tuple[np.ndarray, ...], simulator.Report]:
    """Eight launches for each parameter; the report is of all of them."""
    keep, fresh1, beta2, fresh2, size, correction, eps = (np.float32(number) for number in numbers())
    report = simulator.Report()
    for p, g, m, v in zip(*lists(arrays), strict=True):
        root = np.full_like(p, np.nan)
        for to, op, *operands in (
            (p, lambda p: p * keep, p),
            (m, lambda m, g: m + fresh1 * (g - m), m, g),
            (v, lambda v: v * beta2, v),
            (v, lambda v, g: v + fresh2 * g * g, v, g),
            (root, np.sqrt, v),
            (root, lambda root: root * correction, root),
            (root, lambda root: root + eps, root),
            (p, lambda p, m, root: p - size * (m / root), p, m, root),
        ):
            # To the simulator an array under two names is two: the result goes into one of its own first.
            result, blocks = np.full_like(to, np.nan), -(-p.size // threads)
            for _ in simulator.steps(kernel, blocks, threads, result, p.size, op, *operands, report=report):
                pass
            to[:] = result
    return outputs(arrays), report


def fused_kernel(t, param, grad, exp_avg, exp_avg_sq, count, step):
    """csrc/cuda/adamw/ladder/02_fused.cu: an element is read, stepped, and written."""
    i = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
    if i < count:
        step_at(param, grad, exp_avg, exp_avg_sq, i, step)


def launch(kernel, *arrays: np.ndarray, threads: int = 64) -> tuple[tuple[np.ndarray, ...], simulator.Report]:
    """A launch for each parameter; the report is of all of them."""
    report = simulator.Report()
    for tensors in zip(*lists(arrays), strict=True):
        count = tensors[0].size
        if count:
            steps = simulator.steps(kernel, -(-count // threads), threads, *tensors, count, numbers(), report=report)
            for _ in steps:
                pass
    return outputs(arrays), report


# --- models ----------------------------------------------------------------------------------------------------------


def numbers_moved() -> None:
    """How many numbers an op at a time moves for an element, and how many one kernel for all of them does."""
    ops = {
        "param *= keep": (1, 1),
        "exp_avg += fresh1 * (grad - exp_avg)": (2, 1),
        "exp_avg_sq *= beta2": (1, 1),
        "exp_avg_sq += fresh2 * grad * grad": (2, 1),
        "root = sqrt(exp_avg_sq)": (1, 1),
        "root *= correction": (1, 1),
        "root += eps": (1, 1),
        "param -= size * exp_avg / root": (3, 1),
    }
    for op, (reads, writes) in ops.items():
        print(f"{op:<38} reads {reads}, writes {writes}")
    print(f"together {sum(map(sum, ops.values()))}; in one kernel 4 + 3 = 7")


def launches_of_a_model() -> None:
    """A model of 12 layers of width 768: most of its parameters are so small that a launch of 2 microseconds takes
    longer than their bytes do at 4 TB/s."""
    sizes = [*LAYER_OF_GPT2 * 12]
    small = sum(28 * size / 4e12 < 2e-6 for size in sizes)
    print(f"{len(sizes)} parameters, of which {small} take less than 2 microseconds of memory's time")
    for rung, launches in ((1, 8 * len(sizes)), (2, len(sizes)), (3, len(sizes)), (4, -(-len(sizes) // 80))):
        print(f"rung {rung}: {launches} launches")


# --- the ladder ------------------------------------------------------------------------------------------------------

# The 12 parameters of a layer: two norms, the projections of attention, and two layers of an MLP.
LAYER_OF_GPT2 = [768, 768, 2304 * 768, 2304, 768 * 768, 768, 768, 768, 3072 * 768, 3072, 768 * 3072, 768]


def parameters(name: str, sizes: list[int]) -> Case:
    def inputs(make: Numbers):
        made = [[make.normal(size) for size in sizes] for _ in range(4)]
        made[3] = [tensor.square() for tensor in made[3]]
        return tuple(tensor for tensors in made for tensor in tensors)

    return Case(name, inputs, elements=7 * sum(sizes))


def misaligned(size: int) -> Case:
    """Arrays that are no multiples of 16 bytes, or one of them alone, beside one that is."""

    def inputs(make: Numbers):
        whole = [[make.normal(size + 1) for _ in range(3)] for _ in range(4)]
        made = [
            [tensors[0][1:], tensors[1][1 if k == 2 else 0 :][:size], tensors[2][:size]]
            for k, tensors in enumerate(whole)
        ]
        made[3] = [tensor.square_() for tensor in made[3]]
        return tuple(tensor for tensors in made for tensor in tensors)

    return Case(f"3 of {size} misaligned", inputs, elements=21 * size)


def arguments(*tensors: Tensor):
    return [*outputs(tensors)], [*lists(tensors)[1]], [LR, BETA1, BETA2, EPS, WEIGHT_DECAY, STEP]


def reference(*tensors: Tensor):
    keep, fresh1, beta2, fresh2, size, correction, eps = numbers()
    params, grads, exp_avgs, exp_avg_sqs = ([t.double() for t in some] for some in lists(tensors))
    exp_avgs = [m + fresh1 * (g - m) for m, g in zip(exp_avgs, grads, strict=True)]
    exp_avg_sqs = [beta2 * v + fresh2 * g * g for v, g in zip(exp_avg_sqs, grads, strict=True)]
    params = [
        p * keep - size * m / (v.sqrt() * correction + eps)
        for p, m, v in zip(params, exp_avgs, exp_avg_sqs, strict=True)
    ]
    return (*params, *exp_avgs, *exp_avg_sqs)


def bound(*tensors: Tensor):
    """A few roundings of each term; the quotient has all of them, relatively, and exp_avg those of its terms."""
    _, _, beta2, fresh2, size, correction, eps = numbers()
    params, grads, exp_avgs, exp_avg_sqs = ([t.double() for t in some] for some in lists(tensors))
    ulps = 8 * torch.finfo(tensors[0].dtype).eps
    of_exp_avgs = [ulps * (m.abs() + g.abs()) for m, g in zip(exp_avgs, grads, strict=True)]
    of_exp_avg_sqs = [ulps * (v + g * g) for v, g in zip(exp_avg_sqs, grads, strict=True)]
    fresh = [beta2 * v + fresh2 * g * g for v, g in zip(exp_avg_sqs, grads, strict=True)]
    of_params = [
        ulps * p.abs() + ulps * size * (m.abs() + g.abs()) / (v.sqrt() * correction + eps)
        for p, m, g, v in zip(params, exp_avgs, grads, fresh, strict=True)
    ]
    return (*of_params, *of_exp_avgs, *of_exp_avg_sqs)


# --- PyTorch's ways ---


def op_at_a_time(*tensors: Tensor):
    keep, fresh1, beta2, fresh2, size, correction, eps = numbers()
    for param, grad, exp_avg, exp_avg_sq in zip(*lists(tensors), strict=True):
        param.mul_(keep)
        exp_avg.lerp_(grad, fresh1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=fresh2)
        param.addcdiv_(exp_avg, exp_avg_sq.sqrt().mul_(correction).add_(eps), value=-size)
    return outputs(tensors)


def foreach(*tensors: Tensor):
    keep, fresh1, beta2, fresh2, size, correction, eps = numbers()
    params, grads, exp_avgs, exp_avg_sqs = (list(some) for some in lists(tensors))
    torch._foreach_mul_(params, keep)
    torch._foreach_lerp_(exp_avgs, grads, fresh1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=fresh2)
    roots = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_mul_(roots, correction)
    torch._foreach_add_(roots, eps)
    torch._foreach_addcdiv_(params, exp_avgs, roots, value=-size)
    return outputs(tensors)


@functools.cache
def steps(count: int, device: torch.device, start: int) -> list[Tensor]:
    """Counters, as torch.optim.AdamW has them for each parameter."""
    return [torch.tensor(float(start), device=device) for _ in range(count)]


def fused(*tensors: Tensor):
    """torch.optim.AdamW(fused=True), but for the counters, which stay where they are."""
    params, grads, exp_avgs, exp_avg_sqs = (list(some) for some in lists(tensors))
    options = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "weight_decay": WEIGHT_DECAY, "eps": EPS}
    counters = steps(len(params), params[0].device, STEP)
    torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], counters, **options, amsgrad=False, maximize=False)
    return outputs(tensors)


def ours(*tensors: Tensor):
    """cuda_ops.optim.AdamW's step, with counters on the host."""
    params, grads, exp_avgs, exp_avg_sqs = (list(some) for some in lists(tensors))
    counters = [torch.tensor(float(STEP - 1)) for _ in params]
    more = None, None, None, LR, BETA1, BETA2, EPS, WEIGHT_DECAY, False, True, False
    ops.adam_(params, grads, exp_avgs, exp_avg_sqs, [], counters, *more)
    return outputs(tensors)


LADDER = Ladder(
    name="adamw",
    formula=r"m \mathrel{+}= (1 - \beta_1)(g - m), \quad v = \beta_2 v + (1 - \beta_2) g^2, \quad "
    r"p = (1 - \eta\lambda)\,p - \frac{\eta}{1 - \beta_1^t} \cdot \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}",
    introduction="""An optimizer's step has next to no arithmetic for what it moves: of each element four numbers are
read and three written. All there is to learn is how to move them once, in large pieces, enough of them at a time, and
how not to start a kernel for each of a model's hundreds of parameters.""",
    kernels=["op at a time", "fused", "vectors", "one launch", "in flight"],
    dtypes=(torch.float32,),
    arguments=arguments,
    reference=reference,
    bound=bound,
    tests=[
        *(parameters(f"1 of {size}", [size]) for size in (1, 65, 257)),
        parameters("3 small", [5, 1, 37]),
        parameters("with none", [0, 3, 0, 1000]),
        parameters("1 of 0", [0]),
        parameters("chunks", [1023, 1024, 1025, 2047, 2048, 2049, 4096, 70001]),
        parameters("200", [n + 1 for n in range(200)]),
        parameters("1 of 1000003", [1000003]),
        misaligned(5003),
    ],
    cases=[
        parameters("2 of 42", [5, 37]),
        parameters("72 of 4.7M", [size // 9 for size in LAYER_OF_GPT2] * 6),
        parameters("12 of 7M", LAYER_OF_GPT2),
        parameters("1 of 67M", [1 << 26]),
    ],
    shown="1 of 67M",
    native={"op at a time": op_at_a_time, "foreach": foreach, "fused": fused},
    ours=ours,
    simulated={1: Simulated(op_kernel, launch_ops), 2: Simulated(fused_kernel, launch)},
    in_place=True,
    models=(numbers_moved, launches_of_a_model),
)
