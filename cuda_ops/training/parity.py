"""Whether a backend computes what PyTorch computes, up to rounding.

Compared are the gradients of the first step, tensor by tensor, what that step made of weights and running statistics,
the loss curves, and the logits in evaluation mode. What rounding alone may do to them:

Gradients. A rounding error is 1e-7 in float32, but where the inputs of a ReLU or a max-pool nearly tie, it decides, and
one image's gradient takes another path. One such decision in a batch of B moves a gradient of this network by up to
about 0.02 / sqrt(B) of its norm (seen between PyTorch's own memory formats: 2e-3 at B = 128); half as much again is
allowed, and never more than 5e-3. Beyond that there are gradients that are ill-conditioned: that of the weight before a
batch norm is a small difference of large sums, and PyTorch's own float32 is 1e-3 away from float64 at B = 512. So the
first step is also done by native layers in float64, and a backend that is far from native passes if it is as close to
float64 as native is, within a factor of two. A gradient that is one percent wrong passes neither.

A gradient that is zero but for rounding (the model names them) has no relative distance of its own: it is set against
the norm of all gradients together.

Loss curves diverge exponentially, as every step amplifies the differences of the one before. So the first steps are
judged strictly, and the rest by its end alone: a learning rate at the edge of stability makes the loss jump at some
step, in one run a few steps before the other, and both recover; their means over the last quarter were then 6 % apart.
A late error would also show in the logits, which are compared at the last weights.

Where the early losses are beyond their limit (in fp16 and bf16 native's own are several percent from those of float64),
a backend passes if it is as close to float64 as native is, within a factor of two, there too.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

EARLY_STEPS = 3
LAST_SHARE = 0.25
# A loss near zero comes from a few hard images, and a ratio of two such losses says little.
SMALL_LOSS = 0.1


@dataclass(frozen=True)
class Limits:
    """What rounding can do in a dtype."""

    rounding: float
    """Relative norm of a distance where nothing is undecided."""
    decisions: float
    """What a ReLU or max-pool that goes the other way adds, times 1 / sqrt(batch size); at most `most_decisions`."""
    most_decisions: float
    early_loss: float
    """Relative distance of the losses of the first EARLY_STEPS steps."""
    last_loss: float
    """Distance of the mean losses of the last quarter, relative to the loss, or to SMALL_LOSS where that is more."""

    def gradient(self, batch_size: int) -> float:
        return self.rounding + min(self.decisions / math.sqrt(batch_size), self.most_decisions)


LIMITS = {
    # 1e-16 decides nothing: no ReLU input and no two values under a max-pool are that close.
    torch.float64: Limits(1e-9, 0, 0, 1e-9, 0.25),
    torch.float32: Limits(1e-4, 0.03, 5e-3, 5e-4, 0.25),
    # A step of rounding is 2^-8 and 2^-11 here, at each of the layers; float64 is what then tells error from rounding.
    torch.bfloat16: Limits(1e-2, 0, 0, 2e-2, 0.25),
    torch.float16: Limits(2e-3, 0.03, 5e-3, 5e-3, 0.25),
}


@dataclass
class Snapshot:
    """The first step of a backend."""

    gradients: dict[str, Tensor]
    """float64, on the CPU, averaged over the processes, without the loss scale."""
    state: dict[str, Tensor]
    """state_dict after the step, on the CPU."""


@dataclass
class Row:
    """One tensor's distance to native's, as a relative norm."""

    name: str
    kind: str
    """gradient, update, statistic or logits."""
    scale: float
    """What the distances are relative to: native's norm, or that of all gradients."""
    distance: float
    limit: float
    from_exact: float | None = None
    """The backend's distance to float64."""
    native_from_exact: float | None = None

    @property
    def ok(self) -> bool:
        # Written so that a NaN fails.
        if self.distance <= self.limit:
            return True
        if self.from_exact is None or self.native_from_exact is None:
            return False
        return self.from_exact <= max(self.limit, 2 * self.native_from_exact)


@dataclass
class Parity:
    """How far a backend is from native, and which parts of it rounding cannot explain."""

    rows: list[Row] = field(default_factory=list)
    largest_loss_distance: float | None = None
    early_loss_distance: float | None = None
    last_loss_distance: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def norm(tensors) -> float:
    """The norm of all numbers in the tensors together."""
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def over(distance: float, scale: float) -> float:
    """Their quotient; where both are zero they agree."""
    return distance / scale if scale else math.inf if distance else 0.0


def compare_gradients(run, backend: Snapshot, native: Snapshot, exact: dict[str, Tensor] | None) -> list[Row]:
    """A row for each parameter's gradient."""
    limit = LIMITS[run.settings.dtype].gradient(run.settings.batch_size)
    rows = []
    for name, expected in native.gradients.items():
        zero = name in run.zero_gradients
        scale = norm(native.gradients.values()) if zero else norm([expected])
        row = Row(name, "gradient", scale, over(norm([backend.gradients[name] - expected]), scale), limit)
        if exact:
            exact_scale = norm(exact.values()) if zero else norm([exact[name]])
            row.from_exact = over(norm([backend.gradients[name] - exact[name]]), exact_scale)
            row.native_from_exact = over(norm([expected - exact[name]]), exact_scale)
        rows.append(row)
    return rows


def compare_updates(run, backend: Snapshot, lr: float) -> list[Row]:
    """A row for each parameter: whether the first step took lr times the backend's own gradient from it."""
    rows = []
    for name, gradient in backend.gradients.items():
        before = run.initial_state[name].double()
        step = lr * gradient
        distance = norm([backend.state[name].double() - (before - step)])
        # The new weights are rounded to their own dtype, and the step before that; in float64 so is what is expected.
        limit = 2 * torch.finfo(run.settings.tensor_dtype).eps
        scale = norm([before]) + norm([step])
        rows.append(Row(name, "update", scale, over(distance, scale), limit))
    return rows


def compare_statistics(run, backend: Snapshot, native: Snapshot) -> list[Row]:
    """A row for each buffer: the running mean, variance and count of the batch norms after the first step."""
    limit = LIMITS[run.settings.dtype].rounding
    rows = []
    for name, expected in native.state.items():
        if name not in backend.gradients:
            scale = norm([expected])
            distance = norm([backend.state[name].double() - expected.double()])
            rows.append(Row(name, "statistic", scale, over(distance, scale), limit))
    return rows


def early_distance(losses: list[float], expected: list[float]) -> float:
    """The largest relative distance of the losses of the first EARLY_STEPS steps."""
    pairs = list(zip(losses, expected, strict=False))[:EARLY_STEPS]
    return max((over(abs(a - b), abs(b)) for a, b in pairs), default=0.0)


def early_losses_agree(run, name: str) -> bool:
    """Whether a backend's early losses are native's within the limit of the dtype, or there is no native to compare."""
    native = run.backends.get("native")
    if native is None:
        return True
    return early_distance(run.backends[name].losses, native.losses) <= LIMITS[run.settings.dtype].early_loss


def compare_losses(
    parity: Parity,
    losses: list[float],
    native: list[float],
    limits: Limits,
    finished: bool = True,
    exact: list[float] | None = None,
):
    """Fills in the distances of the loss curves, and what of them is beyond rounding; their end only if it is one.
    `exact` are the early losses in float64."""
    pairs = list(zip(losses, native, strict=False))  # an interrupted run may have one backend ahead of the other
    if not pairs:
        return
    distances = [abs(a - b) for a, b in pairs]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return  # said elsewhere: training diverged
    parity.largest_loss_distance = max(distances)
    parity.early_loss_distance = early_distance(losses, native)
    close_to_exact = exact and early_distance(losses, exact) <= 2 * early_distance(native, exact)
    if not parity.early_loss_distance <= limits.early_loss and not close_to_exact:
        parity.problems.append(
            f"losses of the first {min(EARLY_STEPS, len(pairs))} steps are {parity.early_loss_distance:.2g} of "
            f"native's apart, and rounding explains {limits.early_loss:.0e}"
        )
    last = pairs[len(pairs) - int(LAST_SHARE * len(pairs)) :]
    if not (finished and last):
        return
    mean, native_mean = (sum(side) / len(last) for side in zip(*last, strict=True))
    parity.last_loss_distance = abs(mean - native_mean) / max(native_mean, SMALL_LOSS)
    if not parity.last_loss_distance <= limits.last_loss:
        parity.problems.append(
            f"mean losses of the last {len(last)} steps are {parity.last_loss_distance:.2g} of native's apart, and "
            f"rounding explains {limits.last_loss:.2g}"
        )


def judge(run, name: str) -> Parity | None:
    """Compares a backend of a run with native.

    Args:
        run: a compare.Run, finished or interrupted.
        name: of the backend.

    Returns:
        None if the run has no native side, or was interrupted before both had taken a step.
    """
    backend, native = run.backends[name], run.backends.get("native")
    if native is None or name == "native" or not (backend.first_step and native.first_step):
        return None
    limits = LIMITS[run.settings.dtype]
    parity = Parity()
    parity.rows += compare_gradients(run, backend.first_step, native.first_step, run.exact_gradients)
    parity.rows += compare_updates(run, backend.first_step, run.first_lr)
    parity.rows += compare_statistics(run, backend.first_step, native.first_step)
    if backend.logits is not None and native.logits is not None:
        scale = norm([native.logits])
        distance = norm([backend.logits - native.logits])
        parity.rows.append(Row("in evaluation mode", "logits", scale, over(distance, scale), limits.rounding))
    for row in parity.rows:
        if not row.ok:
            parity.problems.append(
                f"{row.kind} {row.name} is {row.distance:.2g} away, and rounding explains {row.limit:.1g}"
            )
    compare_losses(parity, backend.losses, native.losses, limits, not run.interrupted, run.exact_losses)
    return parity
