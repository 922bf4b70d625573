"""Muon: torch.optim.Muon, with the matrices of equal shape orthogonalised together."""

import math

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._arguments import flag, integer, numbers
from .._library import ops
from .._optimizer import WithoutEntries, check_numbers, loss_of, number_or_tensor, option, refuse_sparse
from .matmul import matmul

ADJUSTMENTS = (None, "original", "match_rms_adamw")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, coefficients, steps: int, eps: float) -> Tensor:
    """Newton and Schulz's iteration: each singular value becomes one near 1, the singular vectors stay.

    Args:
        matrices: (count, rows, columns), rows <= columns, in half precision.
        coefficients: of the polynomial a x + b x^3 + c x^5, which all singular values take in each step.
        steps, eps: how often; the least norm that is divided by.
    """
    a, b, c = coefficients
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = matrices * norms.clamp(min=eps).reciprocal().to(matrices.dtype)
    for _ in range(steps):
        gram = matmul(x, x.mT)
        polynomial = torch.add(gram * b, matmul(gram, gram), alpha=c)
        # Not with a on its diagonal: bfloat16 rounds 3.4 by as much as what would be added to it.
        x = matmul(polynomial, x).add_(x, alpha=a)
    return x


def adjustment(kind: str | None, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(WithoutEntries, getattr(torch.optim, "Muon", torch.optim.Optimizer)):
    r"""Muon, like :class:`torch.optim.Muon`: same arguments, same `state_dict`, which either loads from the other at
    any step. The step of a matrix is the nearest one with orthonormal rows or columns to its momentum, about.

    Args:
        params: parameters of two dimensions, or named ones, or dicts of parameter groups. It is for the weights of
            hidden layers: embeddings, heads and vectors are better left to :class:`AdamW`.
        lr: learning rate, a number or a tensor of one element. A tensor on the parameters' CUDA device is read there,
            without a wait, so that a captured CUDA graph follows its value.
        weight_decay: shrinks the parameters themselves, by `lr * weight_decay`.
        momentum, nesterov: of the average of gradients, as for :class:`torch.optim.Muon`.
        ns_coefficients, ns_steps, eps: of the iteration; see :class:`torch.optim.Muon`.
        adjust_lr_fn: "original" or None, the learning rate times :math:`\sqrt{\max(1, \text{rows} / \text{columns})}`;
            "match_rms_adamw", times :math:`0.2 \sqrt{\max(\text{rows}, \text{columns})}`, by which lr and weight_decay
            are those of AdamW.
        matrices: into how many matrices of as many rows each parameter of the group is cut: 3 for a weight that makes
            queries, keys and values at once. In the `state_dict` it stays what this optimizer was made with.

    Raises:
        ValueError: a value that :class:`torch.optim.Muon` refuses as well; rows that `matrices` does not divide.
        NotImplementedError: a distributed parameter; on :meth:`step`, a sparse gradient.
        RuntimeError: a complex parameter; on :meth:`step`, a CUDA graph is being captured before the first step.

    The iteration is done in bfloat16, as PyTorch does it, for all matrices of a group that have the same sizes (or
    each other's transposed) in one batch of products. A CUDA graph may capture :meth:`step` from the second one on.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> optimizer = cuda_ops.optim.Muon([weight], lr=0.5, weight_decay=0.0)
        >>> weight.grad = torch.tensor([[0.0, 3.0], [0.0, 0.0]])
        >>> optimizer.step()
        >>> weight[0, 1].item() < -0.3, weight[1].tolist()
        (True, [0.0, 1.0])
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        matrices: int = 1,
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        check_options({**defaults, "matrices": matrices})
        # An option of the groups only where it is asked for: without it a state_dict is PyTorch's to the letter.
        if matrices != 1:
            defaults["matrices"] = matrices
        # Not PyTorch's Muon's own, which looks at the shapes after the groups are made, and is not in every PyTorch.
        torch.optim.Optimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group):
        """Adds a parameter group with options of its own. See :meth:`torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):  # else PyTorch says so
            check_options(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for p in group["params"]:
                check_parameter(p, group.get("matrices", 1))
        except Exception:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict):
        """Loads a state_dict of ours or of torch.optim's. `matrices` stays what this optimizer was made with."""
        cuts = [group.get("matrices") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, cut in zip(self.param_groups, cuts, strict=True):
            group.pop("matrices", None)
            if cut is not None:
                group["matrices"] = cut

    def step(self, closure=None):
        """Updates the parameters that have a gradient.

        Args:
            closure: called first, with gradients enabled, if it is given; it computes the loss anew.

        Returns:
            What `closure` returned, or None.
        """
        loss = loss_of(closure)
        with torch.no_grad():
            for group in self.param_groups:
                alike = {}
                for p in group["params"]:
                    if p.grad is not None:
                        refuse_sparse("Muon", p, p.grad)
                        alike.setdefault((p.device, p.dtype, p.grad.dtype), []).append(p)
                for params in alike.values():
                    self._step_alike(group, params)
        return loss

    def _momentum_buffer(self, p):
        state = self.state[p]
        if "momentum_buffer" not in state:
            if p.is_cuda and not is_compiling() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "Muon: expected every parameter to have its state before step() is captured in a CUDA graph, which "
                    "would make it anew each time; run a step before"
                )
            state["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
        return state["momentum_buffer"]

    def _step_alike(self, group, params):
        """The step of parameters of one group that share device and dtype."""
        momentum, grads = option("Muon", group, "momentum"), [p.grad for p in params]
        buffers = [self._momentum_buffer(p) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        if flag("Muon", "nesterov", group["nesterov"]):
            updates = torch._foreach_lerp(grads, buffers, momentum)
        else:
            updates = [buffer.clone() for buffer in buffers]
        matrices = integer("Muon", "matrices", group.get("matrices", 1))
        lr, device_lr = number_or_tensor(group["lr"], params[0].device)
        # By rows and columns: parameters and their updates.
        shapes = {}
        for p, update in zip(params, updates, strict=True):
            if p.numel() == 0:  # nothing to step, and no columns to divide by
                continue
            lists = shapes.setdefault((len(p) // matrices, p.shape[1]), ([], []))
            lists[0].append(p)
            lists[1].append(update)
        for shape, made in orthogonal(shapes, matrices, group).items():
            alike, updates = shapes[shape]
            torch._foreach_copy_(updates, made)
            factor = adjustment(group["adjust_lr_fn"], *shape)
            # Plain SGD's step is p (1 - rate decay) - rate update: decay is of lr, without the factor.
            rate = None if device_lr is None else device_lr * factor
            decay = option("Muon", group, "weight_decay") / factor
            ops.sgd_(alike, updates, [], [], rate, lr * factor, 0.0, 0.0, decay, False, False)


def orthogonal(shapes: dict, matrices: int, group) -> dict:
    """What becomes of the updates, for each of the `shapes` a list of views, of the sizes of the parameters. Tall
    matrices are transposed, and go with the wide ones of their sizes."""
    coefficients = numbers("Muon", "ns_coefficients", group["ns_coefficients"])
    steps, eps = integer("Muon", "ns_steps", group["ns_steps"]), option("Muon", group, "eps")
    found = {}
    for rows, columns in sorted({(min(shape), max(shape)) for shape in shapes}):
        wide = shapes.get((rows, columns), ((), ()))[1]
        tall = shapes.get((columns, rows), ((), ()))[1] if columns > rows else ()
        count = matrices * len(wide)
        first = (*wide, *tall)[0]
        stack = torch.empty((count + matrices * len(tall), rows, columns), dtype=torch.bfloat16, device=first.device)
        torch._foreach_copy_(views(stack[:count], wide), wide) if wide else None
        if tall:
            upright = torch.empty((matrices * len(tall), columns, rows), dtype=stack.dtype, device=stack.device)
            torch._foreach_copy_(views(upright, tall), tall)
            stack[count:].copy_(upright.mT)
        made = orthogonalize(stack, coefficients, steps, eps)
        if wide:
            found[rows, columns] = views(made[:count], wide)
        if tall:
            found[columns, rows] = views(upright.copy_(made[count:].mT), tall)
    return found


def views(stack: Tensor, like) -> list[Tensor]:
    """The parts of a stack of matrices of which each of the tensors `like` is made."""
    return [part.view(t.shape) for part, t in zip(stack.chunk(len(like)), like, strict=True)]


def check_options(group):
    """Types and ranges, of those options that are there."""
    check_numbers("Muon", group, "weight_decay", "momentum", "eps")
    for name in ("lr", "weight_decay", "momentum"):
        value = group.get(name, 0.0)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Muon: expected {name} to have one element, got shape {list(value.shape)}")
        if not value >= 0.0:
            raise ValueError(f"Muon: expected {name} to be at least 0, got {value}")
    if "nesterov" in group:
        flag("Muon", "nesterov", group["nesterov"])
    if "ns_coefficients" in group and len(numbers("Muon", "ns_coefficients", group["ns_coefficients"])) != 3:
        raise ValueError(f"Muon: expected ns_coefficients to be 3 numbers, got {group['ns_coefficients']!r}")
    if not 0 <= integer("Muon", "ns_steps", group.get("ns_steps", 0)) < 100:
        raise ValueError(f"Muon: expected ns_steps to be from 0 to 99, got {group['ns_steps']}")
    if group.get("adjust_lr_fn") not in ADJUSTMENTS:
        names = ", ".join(map(repr, ADJUSTMENTS))
        raise ValueError(f"Muon: expected adjust_lr_fn to be one of {names}, got {group['adjust_lr_fn']!r}")
    if integer("Muon", "matrices", group.get("matrices", 1)) < 1:
        raise ValueError(f"Muon: expected matrices to be at least 1, got {group['matrices']}")


def check_parameter(p, matrices):
    if hasattr(p, "to_local"):
        raise NotImplementedError("Muon: distributed parameters are not supported: a step needs whole matrices")
    if p.is_complex():
        raise RuntimeError("Muon: complex parameters are not supported")
    if p.dim() != 2:
        raise ValueError(f"Muon: expected parameters of 2 dimensions, got shape {list(p.shape)}")
    if len(p) % matrices:
        raise ValueError(f"Muon: expected matrices to divide the rows of a parameter, {len(p)}, got {matrices}")
