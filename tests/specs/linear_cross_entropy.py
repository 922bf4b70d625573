import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def sample(make, leading, in_features, classes, name="", bias=True, target=None, **kwargs):
    if target is None:
        target = make.integers(*leading, high=classes)
    # Logits stay below 20 where all features are alike (the layout 'expanded'): the rounding of larger ones would be
    # most of the gradients' error.
    bound = 8 / max(in_features, 4)
    tensors = make(*leading, in_features), make(classes, in_features, low=-bound, high=bound), target
    return Sample((*tensors, make(classes)) if bias else tensors, kwargs, name)


def samples(make):
    # (leading shape, in_features, classes). On the GPU one kernel does up to 16 classes of up to 1024 features: one
    # row, rows around its tiles of 32, features that four at a time fit and not, one block, a cluster of blocks, more
    # blocks than a cluster. The others take matrix products: around the tiles of 64 and 128; lengths that 16-byte loads
    # fit and not. On the CPU, several chunks of rows.
    for leading, in_features, classes in [
        ((1,), 1, 1),
        ((1,), 8, 2),
        ((31,), 7, 3),
        ((33,), 130, 16),
        ((64,), 128, 10),
        ((250,), 33, 10),
        ((1100,), 20, 10),
        ((40,), 1024, 10),
        ((9,), 1025, 4),
        ((5000,), 3, 5),
        ((33,), 24, 17),
        ((65,), 72, 129),
        ((7,), 17, 1031),
        ((), 6, 4),
        ((2, 3), 4, 5),
    ]:
        yield sample(make, leading, in_features, classes, f"{leading} {in_features} -> {classes}")
    for reduction in ("none", "mean", "sum"):
        for classes in (10, 40):
            name = f"{classes} classes, {reduction}"
            yield sample(make, (37,), 24, classes, f"{name}, ignore_index", reduction=reduction, ignore_index=3)
            yield sample(
                make, (6, 5), 12, classes, f"{name}, smoothing", bias=False, reduction=reduction, label_smoothing=0.1
            )
    for classes in (10, 40):
        name = f"{classes} classes"
        ignore = {"ignore_index": 3}
        yield sample(make, (37,), 24, classes, f"{name}, z_loss", z_loss=0.1, **ignore)
        yield sample(make, (6, 5), 12, classes, f"{name}, z_loss, none", reduction="none", z_loss=0.1, **ignore)
        yield sample(make, (37,), 24, classes, f"{name}, softcap", logit_softcap=2.0, reduction="sum", **ignore)
        options = {"z_loss": 0.01, "logit_softcap": 1.5, "label_smoothing": 0.1}
        yield sample(make, (37,), 24, classes, f"{name}, all options", bias=False, **options)
    # Large enough for the path of Hopper's tensor cores in fp16 and bf16: ragged tiles of rows and classes, and each
    # option that has code of its own there.
    for kwargs in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"logit_softcap": 2.0, "reduction": "sum"}):
        yield sample(make, (513,), 264, 1001, f"a language model's, {kwargs}", ignore_index=7, **kwargs)
    for classes in (10, 40):
        nothing = torch.full((3,), 2, device=make.device)
        yield sample(make, (3,), 4, classes, f"a mean over nothing, {classes}", target=nothing, ignore_index=2)
        some = torch.tensor([3, -100, 2], device=make.device)
        yield sample(make, (3,), 4, classes, f"the default ignore_index, {classes}", target=some)
        yield sample(make, (3,), 4, classes, f"uint8, {classes}", target=some.clamp(0).to(torch.uint8))
        for frozen in range(3):
            tensors = [make(9, 8, requires_grad=False), make(classes, 8, requires_grad=False)]
            tensors.append(make(classes, requires_grad=False))
            for i, tensor in enumerate(tensors):
                tensor.requires_grad_(make.requires_grad and i != frozen)
            input, weight, bias = tensors
            target = make.integers(9, high=classes)
            yield Sample((input, weight, target, bias), name=f"argument {frozen} frozen, {classes}")


def reference(
    input,
    weight,
    target,
    bias=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    logit_softcap=0.0,
):
    if target.shape != input.shape[:-1]:  # which the reshapes below would not see of no elements
        raise RuntimeError(f"{tuple(target.shape)} targets of {tuple(input.shape[:-1])} rows")
    logits = torch.nn.functional.linear(input, weight, bias).reshape(target.numel(), weight.shape[0])
    # An ignored row's gradient is 0 whatever its logits are; PyTorch multiplies it by their softmax, NaN of NaN.
    logits = logits.masked_fill((target == ignore_index).reshape(-1, 1), 0)
    if logit_softcap > 0:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    loss = torch.nn.functional.cross_entropy(
        logits,
        target.reshape(-1).long(),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if z_loss > 0:
        counts = target.reshape(-1) != ignore_index
        of_rows = torch.where(counts, z_loss * logits.logsumexp(1) ** 2, 0)
        loss = loss + (of_rows if reduction == "none" else of_rows.sum() / (counts.sum() if reduction == "mean" else 1))
    return loss.reshape(target.shape) if reduction == "none" else loss


def small_samples(make):
    target = torch.tensor([1, -100, 3], device=make.device)
    for reduction in ("none", "mean", "sum"):
        yield sample(make, (3,), 3, 4, f"bias, {reduction}", target=target, reduction=reduction)
    yield sample(make, (3,), 3, 4, "smoothing", bias=False, label_smoothing=0.2)
    yield sample(make, (3,), 3, 4, "z_loss", target=target, z_loss=0.2)
    yield sample(make, (3,), 3, 4, "softcap", target=target, logit_softcap=1.5)
    yield sample(make, (3,), 3, 4, "both", z_loss=0.2, logit_softcap=1.5, reduction="none")
    yield sample(make, (2, 2), 3, 4, "more dimensions")
    yield sample(make, (), 3, 4, "one row")
    yield sample(make, (2,), 2, 17, "more classes")


def empty_samples(make):
    for reduction in ("none", "mean", "sum"):
        yield sample(make, (0,), 3, 2, reduction=reduction)
        yield sample(make, (2, 0), 3, 2, reduction=reduction)
        yield sample(make, (3,), 0, 2, reduction=reduction)
    ignored = torch.full((2,), -100, device=make.device)
    yield sample(make, (2,), 3, 0, "no classes", target=ignored)


def op_samples(make):
    forward, scale = torch.ops.cuda_ops.linear_cross_entropy_forward, torch.ops.cuda_ops.linear_cross_entropy_scale
    target = make.integers(3, high=4)
    for bias, row_scale, reduction, smoothing, z_loss, softcap, wanted in [
        (None, None, 0, 0.0, 0.0, 0.0, (False, False, False)),
        (make(4), make(3), 0, 0.1, 0.0, 0.0, (True, True, True)),
        (make(4), None, 1, 0.0, 0.1, 0.0, (True, False, True)),
        (None, None, 2, 0.0, 0.0, 2.0, (True, True, False)),
    ]:
        arguments = (
            make(3, 5),
            make(4, 5),
            target,
            bias,
            row_scale,
            reduction,
            -100,
            smoothing,
            z_loss,
            softcap,
            *wanted,
        )
        yield forward, arguments
        if reduction == 0:
            continue
        loss, total_weight, *grads = [t.detach() for t in forward(*arguments)]
        yield scale, (torch.ones_like(loss), total_weight, *grads, reduction)


linear_cross_entropy = cuda_ops.functional.linear_cross_entropy


def bad(name, call, match, error=RuntimeError):
    def run(device):
        return call(
            lambda *shape, **kwargs: torch.ones(shape, device=device, **kwargs),
            lambda *values: torch.tensor(values, device=device),
        )

    return Bad(name, run, error, match)


SPEC = OpSpec(
    name="linear_cross_entropy",
    function=linear_cross_entropy,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    # Weights that are the same for all classes would make the gradient of input a sum that cancels to nothing.
    expanded_dim=-1,
    bad=[
        bad(
            "integers",
            lambda ones, target: linear_cross_entropy(
                ones(2, 3, dtype=torch.int64), ones(4, 3, dtype=torch.int64), target(1, 2)
            ),
            "linear_cross_entropy: expected input to be floating point, got int64",
        ),
        bad(
            "features that do not fit",
            lambda ones, target: linear_cross_entropy(ones(2, 4), ones(3, 5), target(1, 2)),
            r"linear_cross_entropy: expected the last dimension of input to be the in_features of weight, 5 "
            r"\(weight has shape \[3, 5\]\), got input of shape \[2, 4\]",
        ),
        bad(
            "a weight of another dtype",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5, dtype=torch.float64), target(1, 2)),
            "linear_cross_entropy: expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "a bias of another size",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5), target(1, 2), ones(4)),
            r"linear_cross_entropy: expected bias to have shape \[3\], the classes of weight, got \[4\]",
        ),
        bad(
            "floating target",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5), ones(2)),
            r"linear_cross_entropy: expected target to be int64 \(or uint8\) for class indices, got float32",
        ),
        bad(
            "another number of targets",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5), target(1, 2, 0)),
            r"linear_cross_entropy: expected target to have shape \[2\] for an input of shape \[2, 5\], got \[3\]",
            ValueError,
        ),
        bad(
            "smoothing out of range",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5), target(1, 2), label_smoothing=1.5),
            r"linear_cross_entropy: expected label_smoothing to be in \[0, 1\], got 1.5",
        ),
        bad(
            "a negative z_loss",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5), target(1, 2), z_loss=-1.0),
            r"linear_cross_entropy: expected z_loss to be at least 0, got -1",
        ),
        bad(
            "a negative softcap",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5), target(1, 2), logit_softcap=-1.0),
            r"linear_cross_entropy: expected logit_softcap to be at least 0, got -1",
        ),
        bad(
            "an unknown reduction",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5), target(1, 2), reduction="max"),
            "linear_cross_entropy: expected reduction to be 'none', 'mean' or 'sum', got 'max'",
            ValueError,
        ),
        bad(
            "no tensor",
            lambda ones, target: linear_cross_entropy(ones(2, 5), [1.0], target(1, 2)),
            "linear_cross_entropy: expected weight to be a Tensor, got list",
            TypeError,
        ),
        bad(
            "ignore_index is no int",
            lambda ones, target: linear_cross_entropy(ones(2, 5), ones(3, 5), target(1, 2), ignore_index=1.5),
            "linear_cross_entropy: expected ignore_index to be an int, got 1.5",
            TypeError,
        ),
    ],
)
