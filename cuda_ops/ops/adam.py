"""Adam and AdamW: torch.optim's, with the step of a whole parameter list in one kernel."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim.optimizer import _get_scalar_dtype

from .._arguments import flag, number
from .._library import ops
from .._optimizer import (
    NO_STATE,
    WithoutEntries,
    check_numbers,
    local,
    loss_of,
    number_or_tensor,
    option,
    refuse_differentiable,
    refuse_sparse,
)
from .clip_grad_norm import norm_of_gradients


# Not by register_fake of _fakes, which refuses tensors on different devices: steps may be on the CPU.
@torch.library.register_fake("cuda_ops::adam_")
def _(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    steps,
    device_lr,
    grad_scale,
    found_inf,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    amsgrad,
    decoupled,
    maximize,
    grad_norm=None,
    max_grad_norm=0.0,
):
    return None


class Step(WithoutEntries):
    """What Adam and AdamW have in place of torch.optim's step."""

    max_grad_norm = None
    """Of an optimizer that was made, or unpickled, without."""
    grad_norm = None

    def _prepare(self, state_dtype, max_grad_norm):
        """After the constructor of torch.optim's class: float32 state is an option of the groups only where it is
        asked for, so that a state_dict without it is PyTorch's to the letter."""
        name = type(self).__name__
        if max_grad_norm is not None:
            self.max_grad_norm = number(name, "max_grad_norm", max_grad_norm)
            if not self.max_grad_norm > 0:
                raise ValueError(f"{name}: expected max_grad_norm to be greater than 0, got {max_grad_norm}")
        if state_dtype is not None:
            if state_dtype is not torch.float32:
                raise NotImplementedError(
                    f"{name}: expected state_dtype to be None or torch.float32, got {state_dtype}"
                )
            self.defaults["state_dtype"] = state_dtype
            for group in self.param_groups:
                group.setdefault("state_dtype", state_dtype)

    def add_param_group(self, param_group):
        """Adds a parameter group with options of its own. See :meth:`torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):  # else PyTorch says so
            check_options(type(self).__name__, param_group)
            refuse_differentiable(type(self).__name__, {**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __getstate__(self):
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            refuse_differentiable(type(self).__name__, group)

    def load_state_dict(self, state_dict):
        """Loads a state_dict of ours or of torch.optim's. `state_dtype` stays what this optimizer was made with."""
        wanted = [group.get("state_dtype") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, saved, dtype in zip(self.param_groups, state_dict["param_groups"], wanted, strict=True):
            group.pop("state_dtype", None)
            if dtype is None:
                continue
            group["state_dtype"] = dtype
            # PyTorch has cast the state to its parameter's dtype: from what it was before.
            for p, number_of_p in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(number_of_p, NO_STATE).items():
                    if name != "step" and dtype_of_state(p, dtype) != p.dtype:
                        self.state[p][name] = value.to(device=p.device, dtype=dtype, copy=True)

    def step(self, closure=None):
        """Updates the parameters that have a gradient.

        Args:
            closure: called first, with gradients enabled, if it is given; it computes the loss anew.

        Returns:
            What `closure` returned, or None.
        """
        loss = loss_of(closure)
        with torch.no_grad():
            lists = [(group, *alike) for group in self.param_groups for alike in self._alike(group)]
            norm = None if self.max_grad_norm is None else self._norm([grads for *_, grads, _ in lists])
            if not is_compiling():  # torch.compile writes no attribute of an optimizer
                self.grad_norm = norm
            for group, params, grads, states in lists:
                self._step_alike(group, params, grads, states, norm)
        return loss

    def _norm(self, lists):
        """That of all gradients, as of one vector, after what torch.amp.GradScaler has them divided by."""
        by_device = {}
        for grads in lists:
            by_device.setdefault(grads[0].device, []).extend(grads)
        for grads in by_device.values():
            if any(hasattr(grad, "to_local") for grad in grads):
                raise NotImplementedError(
                    f"{type(self).__name__}: max_grad_norm of distributed gradients is not supported: clip them by "
                    "torch.nn.utils.clip_grad_norm_"
                )
        if not by_device:
            return None
        norm = norm_of_gradients(by_device)
        scale = getattr(self, "grad_scale", None)
        return norm if scale is None else norm / scale.to(norm.device)

    def _alike(self, group):
        """The parameters that have a gradient, their gradients and their states, new ones where they have none yet: in
        lists that share the device, the dtype and that of the states."""
        name, lists = type(self).__name__, {}
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            refuse_sparse(name, p, grad)
            state = self.state.get(p) or self._new_state(group, p)
            alike = lists.setdefault((p.device, p.dtype, state["exp_avg"].dtype), ([], [], []))
            for items, item in zip(alike, (p, grad, state), strict=True):
                items.append(item)
        return lists.values()

    def _new_state(self, group, p):
        if p.is_cuda and not is_compiling() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}: expected every parameter to have its state before step() is captured in a "
                "CUDA graph, which would make it anew each time; run a step before"
            )
        on_device = group["capturable"] or group["fused"]
        dtype = dtype_of_state(p, group.get("state_dtype"))
        state = {
            "step": torch.zeros((), dtype=_get_scalar_dtype(is_fused=group["fused"]), device=p.device)
            if on_device
            else torch.tensor(0.0, dtype=_get_scalar_dtype()),
            "exp_avg": torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format),
        }
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        return state

    def _step_alike(self, group, params, grads, states, norm):
        name, device = type(self).__name__, params[0].device
        amsgrad = flag(name, "amsgrad", group["amsgrad"])
        steps = [state["step"] for state in states]
        if params[0].is_cuda and steps[0].is_cpu and not is_compiling() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}: expected capturable=True for a step that is captured in a CUDA graph, got capturable=False, "
                "by which the steps are counted on the CPU"
            )
        beta1, beta2 = (beta(name, i, value) for i, value in enumerate(group["betas"]))
        lr, device_lr = number_or_tensor(group["lr"], device)
        # What torch.amp.GradScaler leaves for the step of an optimizer that unscales and skips by itself.
        scale, found_inf = (
            None if value is None else value.to(device=device, dtype=torch.float32)
            for value in (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )

        clipped = grads
        if norm is not None and device.type == "cuda":
            norm = norm.to(device)
        elif norm is not None:
            factor = (self.max_grad_norm / (norm.to(device) + 1e-6)).clamp(max=1.0)
            clipped, norm = [grad * factor.to(grad.dtype) for grad in grads], None

        def of(key):
            return local(name, [state[key] for state in states], params)

        ops.adam_(
            local(name, params, params),
            local(name, clipped, params),
            of("exp_avg"),
            of("exp_avg_sq"),
            of("max_exp_avg_sq") if amsgrad else [],
            steps,
            device_lr,
            scale,
            found_inf,
            lr,
            beta1,
            beta2,
            option(name, group, "eps"),
            option(name, group, "weight_decay"),
            amsgrad,
            flag(name, "decoupled_weight_decay", group["decoupled_weight_decay"]),
            flag(name, "maximize", group["maximize"]),
            norm,
            0.0 if norm is None else self.max_grad_norm,
        )
        # The kernel unscales what it is given, unless it leaves the step out; here that were copies.
        if clipped is not grads and scale is not None and not (found_inf is not None and found_inf.item()):
            torch._foreach_div_(grads, scale)
        # Not before the step, so that a step that is refused leaves no state.
        for p, state in zip(params, states, strict=True):
            if not self.state[p]:
                self.state[p] = state


def dtype_of_state(param, state_dtype):
    half = param.dtype in (torch.float16, torch.bfloat16)
    return state_dtype if half and state_dtype is not None else param.dtype


def beta(name, i, value) -> float:
    if isinstance(value, Tensor) and value.is_cuda:
        raise NotImplementedError(f"{name}: betas in the memory of a CUDA device are not supported")
    return number(name, f"betas[{i}]", value)


def check_options(name, group):
    """Types, of those options that are there: a text would be taken for a number, or for True."""
    check_numbers(name, group, "eps", "weight_decay")
    for option_name in ("amsgrad", "maximize", "capturable"):
        if option_name in group:
            flag(name, option_name, group[option_name])
    for i, value in enumerate(group.get("betas", ())):
        beta(name, i, value)


class Adam(Step, torch.optim.Adam):
    r"""Adam, like :class:`torch.optim.Adam`: same arguments, same `state_dict`, which either loads from the other at
    any step.

    Args:
        params: parameters, or named parameters, or dicts of parameter groups, as for :class:`torch.optim.Adam`.
        lr: learning rate, a number or a tensor of one element. A float32 or float64 tensor on the parameters' CUDA
            device is read by the kernel, without a wait, so that a captured CUDA graph follows its value.
        betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as for :class:`torch.optim.Adam`; betas are
            numbers, or tensors on the CPU.
        capturable: steps are counted on the device, so that a CUDA graph may capture :meth:`step`, from the second one
            on.
        fused: the same, and :class:`torch.amp.GradScaler` leaves unscaling, and skipping a step with infinite
            gradients, to the kernel, which waits for nothing. False or None else change nothing.
        foreach: accepted for the sake of `state_dict`. PyTorch chooses its implementation by it; here every choice is
            the one implementation.
        differentiable: must be False.
        state_dtype: None, and the state has the parameter's dtype, as in PyTorch; or `torch.float32`, for float32 state
            beside float16 and bfloat16 parameters (and in the `state_dict`).
        max_grad_norm: None, or a number: the step is that of gradients which
            :func:`cuda_ops.nn.utils.clip_grad_norm_` has scaled to this norm, of all groups as one vector, but
            `parameter.grad` is not clipped, which saves a pass over it. :attr:`grad_norm` is then the norm that they
            had. With :class:`torch.amp.GradScaler` both are without its scale. No part of the `state_dict`.

    Raises:
        ValueError: a value that :class:`torch.optim.Adam` refuses as well.
        NotImplementedError: `differentiable=True`, betas on a CUDA device, another `state_dtype`; on :meth:`step`, a
            sparse gradient.
        RuntimeError: on :meth:`step`, a CUDA graph is being captured without `capturable`, or before the first step.

    On CUDA the step of a parameter group is one launch for each dtype and device, up to 440 parameters, and another, of
    one block, where steps are counted on the device; more parameters take more launches. float16 and bfloat16
    parameters are updated in float32 and rounded once. Of distributed parameters (FSDP2) each process updates its
    shard.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = cuda_ops.optim.Adam([weight], lr=0.5)
        >>> weight.grad = torch.tensor([3.0, -0.1])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 2.5000])
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ):
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        check_options("Adam", {**options, "betas": betas, "capturable": capturable})
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._prepare(state_dtype, max_grad_norm)


class AdamW(Step, torch.optim.AdamW):
    r"""Adam with decoupled weight decay, like :class:`torch.optim.AdamW`: same arguments, same `state_dict`, which
    either loads from the other at any step.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused,
            state_dtype, max_grad_norm: as for :class:`Adam`, but that `weight_decay` is 0.01 unless it is given, and
            shrinks the parameters themselves.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as :class:`Adam`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = cuda_ops.optim.AdamW([weight], lr=0.5, weight_decay=0.5)
        >>> weight.grad = torch.tensor([3.0, -0.1])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.2500, 2.0000])
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ):
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        check_options("AdamW", {**options, "betas": betas, "capturable": capturable})
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._prepare(state_dtype, max_grad_norm)
