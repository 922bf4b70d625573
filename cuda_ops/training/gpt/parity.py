"""Whether a backend computes what PyTorch computes, up to rounding: the gradients of the first batch, without dropout,
tensor by tensor and beside those of native layers in float64; what the optimizer makes of them; and the loss curves.

training/parity.py says what rounding may do. A GPT has nothing that rounding decides, no ReLU and no max-pool, so that
a gradient has rounding's limit alone; where a backend is beyond it, it passes if it is as close to float64 as native
is, within a factor of two. Adam's first step has the size of the learning rate whatever the gradient's, so that the
sign of what is rounding alone decides: it is compared with what AdamW's formula makes of the backend's own gradient.
With dropout the backends draw different numbers, and of the loss curves the ends alone are compared.
"""

import dataclasses
import math

import torch
from torch import Tensor

from ...models import GPT
from ..parity import LIMITS, Parity, Row, compare_losses, norm, over
from .learner import Learner, learning_rate
from .run import Run, alone

# Tokens of the first batch that gradients are compared by, at most: float64 takes a GPU 20 times as long.
COMPARED_TOKENS = 4096
# TF32 rounds the factors of a product to 10 bits.
TF32_ROUNDING = 5e-3
# A rounding to bfloat16, as a share of the number.
BFLOAT16_ROUNDING = 2.0**-9
# Of the mean losses of the last quarter: what another seed changes.
LAST_LOSS = 0.1


def limits_of(run: Run):
    """What rounding, and dropout, may do in the run's precision."""
    recipe = run.settings.recipe
    limits = LIMITS[run.settings.autocast or run.settings.parameter_dtype]
    changes = {"last_loss": LAST_LOSS}
    if recipe.precision == "bf16":
        # Autocast keeps the sum that all blocks add to in float32. The fused model stores it in bfloat16, and so rounds
        # it at each of two additions a block; these errors add up as a random walk does.
        steps = 2 * recipe.config.n_layer
        changes["rounding"] = limits.rounding + BFLOAT16_ROUNDING * math.sqrt(steps)
    if recipe.precision == "tf32":
        changes |= {"rounding": TF32_ROUNDING, "early_loss": LIMITS[torch.bfloat16].early_loss}
    if recipe.config.dropout:
        changes["early_loss"] = math.inf
    return dataclasses.replace(limits, **changes)


def exact_gradients(run: Run, inputs: Tensor, targets: Tensor) -> dict[str, Tensor] | None:
    """By native layers in float64; None where the device's memory is too small for it."""
    model = GPT("native", run.settings.recipe.config)
    model.load_state_dict(run.initial_state)
    try:
        model.to(run.settings.device, torch.float64).eval()
        model(inputs, targets).backward()
        return {name: p.grad.cpu() for name, p in model.named_parameters()}
    except torch.OutOfMemoryError:
        return None


def compare_backends(run: Run):
    """Fills in `run.parity`, before the training, on models of their own."""
    others = [name for name in run.backends if name != "native"]
    if "native" not in run.backends or not others:
        return
    inputs, targets = run.batch(0)
    rows = max(1, COMPARED_TOKENS // inputs.shape[1])
    inputs, targets = inputs[:rows], targets[:rows]
    exact = exact_gradients(run, inputs, targets)
    native, _ = first_step(run, "native", inputs, targets)
    limits = limits_of(run)
    for name in others:
        gradients, update = first_step(run, name, inputs, targets)
        parity = run.parity[name] = Parity([update])
        for tensor, expected in native.items():
            scale = norm([expected])
            row = Row(tensor, "gradient", scale, over(norm([gradients[tensor] - expected]), scale), limits.rounding)
            if exact:
                exact_scale = norm([exact[tensor]])
                row.from_exact = over(norm([gradients[tensor] - exact[tensor]]), exact_scale)
                row.native_from_exact = over(norm([expected - exact[tensor]]), exact_scale)
            parity.rows.append(row)
        for row in parity.rows:
            if not row.ok:
                parity.problems.append(
                    f"{row.kind} {row.name} is {row.distance:.2g} away, and rounding explains {row.limit:.1g}"
                )


def first_step(run: Run, name: str, inputs: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Row]:
    """(gradients in float64 on the CPU, what the step made of the weights beside AdamW's formula)."""
    learner = Learner(alone(run.settings), name, run.initial_state)
    learner.model.eval()  # without dropout
    learner.forward(inputs, targets).backward()
    parameters = dict(learner.model.named_parameters())
    gradients = {tensor: p.grad.to("cpu", torch.float64, copy=True) for tensor, p in parameters.items()}
    learner.set_rate()
    total = learner.update().item()
    recipe = run.settings.recipe
    rate, factor = learning_rate(0, recipe), min(1.0, recipe.clip / (total + 1e-6))
    distance = scale = 0.0
    for tensor, p in parameters.items():
        before, gradient = run.initial_state[tensor].double(), factor * gradients[tensor]
        decay = recipe.weight_decay if p.dim() >= 2 else 0.0
        step = rate * (gradient / (gradient.abs() + 1e-8) + decay * before)
        distance += norm([p.detach().cpu().double() - (before - step)]) ** 2
        scale += (norm([before]) + norm([step])) ** 2
    # The new weights are rounded to their own dtype; what is expected is in float64.
    limit = 4 * torch.finfo(run.settings.parameter_dtype).eps
    return gradients, Row("of all weights", "update", scale**0.5, over(distance**0.5, scale**0.5), limit)


def compare_curves(run: Run):
    """Adds the loss curves to `run.parity`, after the training."""
    for name, parity in run.parity.items():
        losses, native = run.backends[name].losses, run.backends["native"].losses
        compare_losses(parity, losses, native, limits_of(run), not run.interrupted)
