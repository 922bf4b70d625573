"""What the tests of Adam share: the options to run it with, and the comparison of two optimizers."""

import torch

from support.opspec import assert_close
from support.sgd_cases import flat

OPTIONS = [
    {},
    {"weight_decay": 0.2},
    {"amsgrad": True},
    {"maximize": True},
    {"betas": (0.5, 0.9), "eps": 1e-3},
    {"betas": (0.2, 0.99), "amsgrad": True, "weight_decay": 0.1, "maximize": True},
    {"betas": (0.0, 0.0), "eps": 0.1},
]


def named(options):
    return "-".join(f"{key}={value}" for key, value in options.items()) or "default"


def assert_same_run(ours, native, tolerance=1e-13):
    """All parameters of a group together, and each of the states; counters alike."""
    for group, expected in zip(ours.param_groups, native.param_groups, strict=True):
        if group["params"]:
            assert_close(flat(group["params"]), flat(expected["params"]).double(), tolerance, "parameters")
    mine, theirs = ours.state_dict()["state"], native.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for i in mine:
        assert mine[i].keys() == theirs[i].keys()
        assert mine[i]["step"].item() == theirs[i]["step"].item()
    for name in next(iter(theirs.values()), {}):
        if name != "step":
            states = [[run[i][name] for i in sorted(run) if name in run[i]] for run in (mine, theirs)]
            assert_close(flat(states[0]), flat(states[1]).double(), tolerance, name)


def reference_of(optimizer, **replaced):
    """torch.optim's, in float64 on the CPU, with the values and states that `optimizer` has."""
    kind = torch.optim.AdamW if isinstance(optimizer, torch.optim.AdamW) else torch.optim.Adam
    groups = []
    for group in optimizer.param_groups:
        params = []
        for p in group["params"]:
            copy = torch.nn.Parameter(p.detach().cpu().double().clone())
            copy.grad = None if p.grad is None else p.grad.cpu().double().clone()
            params.append(copy)
        kept = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
        groups.append({"params": params, "lr": float(group["lr"]), **{name: group[name] for name in kept}})
    native = kind(groups, **replaced)
    for group, copies in zip(optimizer.param_groups, native.param_groups, strict=True):
        for p, copy in zip(group["params"], copies["params"], strict=True):
            for name, value in optimizer.state.get(p, {}).items():
                native.state[copy][name] = (
                    value.detach().cpu().clone().to(torch.float32 if name == "step" else torch.float64)
                )
    return native
