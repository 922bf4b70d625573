"""Whether the converted model computes what it did: outputs, gradients and running statistics of one step, or
the outputs of inference.

Modules are in evaluation mode, since ours and PyTorch's dropout draw different numbers, but batch norms in training
where that is raced.
Distances are relative norms: of outputs, of all gradients together, of all running statistics together; the tensor that
is farthest is named. In float32 a decision of a ReLU at a tie moves a gradient of a small batch by more than rounding
does, so that ours also passes where it is as close to float64 as PyTorch's own is, within a factor of two
(training/parity.py says more).
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import functional
from ...conversion import convert
from ..parity import LIMITS
from .measure import Conditions
from .subject import Subject, first_tensor

FACTOR = 2.0


@dataclass(frozen=True)
class Row:
    """One kind of tensors."""

    name: str
    distance: float
    """Between ours and PyTorch's."""
    ours_from_exact: float | None
    native_from_exact: float | None
    """From PyTorch's in float64; None where there is no memory for it."""
    farthest: str
    limit: float

    @property
    def ok(self) -> bool:
        if self.distance <= self.limit:
            return True
        exact = self.ours_from_exact, self.native_from_exact
        return None not in exact and exact[0] <= FACTOR * exact[1] + self.limit


def compare(subject: Subject, conditions: Conditions, dtype: torch.dtype) -> list[Row]:
    """The rows for outputs and, of training, gradients and, if the model has any, running statistics. `dtype` is that
    of the products, by whose rounding is judged."""
    native = _one_step(subject, conditions, ours=False)
    ours = _one_step(subject, conditions, ours=True)
    benchmark = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = False  # to try all algorithms of float64 takes longer than the step
        exact = _one_step(subject, conditions, ours=False, exact=True)
    except torch.OutOfMemoryError:
        exact = None
    finally:
        torch.backends.cudnn.benchmark = benchmark
    limits, batch = LIMITS[dtype], len(subject.batch[0])
    rows = []
    for name in native:
        if not native[name]:
            continue
        limit = limits.gradient(batch) if name == "gradients" else limits.rounding
        distance, farthest = _distance(ours[name], native[name])
        from_exact = [None if exact is None else _distance(each[name], exact[name])[0] for each in (ours, native)]
        rows.append(Row(name, distance, *from_exact, farthest, limit))
    return rows


def _one_step(subject, conditions, ours, exact=False) -> dict[str, dict[str, Tensor]]:
    dtype = torch.float64 if exact else torch.float32
    model = copy.deepcopy(subject.model).to(conditions.device, dtype).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.train(conditions.training)
    if ours:
        convert(model)
    batch = [t.to(conditions.device, dtype if t.is_floating_point() else None) for t in subject.batch]
    autocast = torch.autocast(
        conditions.device.type, conditions.autocast, enabled=conditions.autocast is not None and not exact
    )
    if not conditions.training:
        with torch.inference_mode(), autocast:
            output = first_tensor(subject.call(model, *batch))
        return {"output": {"output": output.cpu().double()}}
    with autocast:
        output = subject.call(model, *batch)
        loss = subject.loss(functional if ours else torch.nn.functional, output, *batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    statistics = {name: b for name, b in model.named_buffers() if name.endswith(("running_mean", "running_var"))}
    found = {"output": {"output": first_tensor(output)}, "gradients": gradients, "running statistics": statistics}
    return {kind: {name: t.detach().cpu().double() for name, t in tensors.items()} for kind, tensors in found.items()}


def _distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The relative norm of the difference, of all tensors together, and whose difference is the greatest."""
    if actual.keys() != expected.keys():
        missing = sorted(actual.keys() ^ expected.keys())
        return float("inf"), missing[0]
    differences = {name: (actual[name] - tensor).norm() for name, tensor in expected.items()}
    scale = torch.stack([tensor.norm() for tensor in expected.values()]).norm().item()
    distance = torch.stack(list(differences.values())).norm().item()
    # NaN is farther than anything.
    farthest = max(
        differences, key=lambda name: float("inf") if differences[name].isnan() else differences[name].item()
    )
    if distance != distance:
        return float("inf"), farthest
    return (distance / scale if scale else distance), farthest
