"""cuda_ops.optim.Adam and AdamW beside torch.optim's: values, state, layouts, lists of every kind, refusals."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adam_cases import OPTIONS, assert_same_run, named, reference_of
from support.opspec import RELATIVE_NORM, assert_close
from support.sgd_cases import SHAPES, parameters, random_tensors, set_grads

import cuda_ops

NAMES = ["Adam", "AdamW"]
both = pytest.mark.parametrize("name", NAMES)
all_options = pytest.mark.parametrize("options", OPTIONS, ids=named)


def pair(name):
    return getattr(cuda_ops.optim, name), getattr(torch.optim, name)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    lr=st.sampled_from([0.0, 1e-3, 0.5]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.5), (0.99, 0.9)]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0, 0.01, 1]),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    missing=st.lists(st.sets(st.integers(0, len(SHAPES) - 1), max_size=4), min_size=1, max_size=5),
)
def test_run_is_that_of_pytorch(name, missing, **options):
    """Runs of float64 with any options; parameters go without a gradient now and then."""
    mine, theirs = parameters(), parameters()
    kinds = pair(name)
    ours, native = kinds[0](mine, **options), kinds[1](theirs, **options)
    for step, without in enumerate(missing):
        set_grads(mine, step + 1, without)
        set_grads(theirs, step + 1, without)
        ours.step()
        native.step()
        assert_same_run(ours, native)


@both
@all_options
def test_fifty_steps(device, name, options):
    """Rounding does not add up: float64 stays with PyTorch's float64, float32 near it."""
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-4)):
        mine, theirs = parameters(device=device, dtype=dtype), parameters()
        for m, t in zip(mine, theirs, strict=True):
            t.data.copy_(m.data)
        kinds = pair(name)
        ours, native = kinds[0](mine, lr=0.01, **options), kinds[1](theirs, lr=0.01, **options)
        for step in range(50):
            set_grads(mine, step)
            for m, t in zip(mine, theirs, strict=True):
                t.grad = m.grad.cpu().double()
            ours.step()
            native.step()
        assert_same_run(ours, native, tolerance)


@both
@all_options
def test_each_step_in_every_dtype(device_dtype, name, options):
    """Three steps, each against a float64 step from the same values and states."""
    device, dtype = device_dtype
    params = parameters(device=device, dtype=dtype)
    for state_dtype in (None, torch.float32):
        ours = pair(name)[0](params, lr=0.1, state_dtype=state_dtype, **options)
        for step in range(3):
            set_grads(params, step + 1, missing={2} if step == 0 else ())
            native = reference_of(ours)
            grads = [None if p.grad is None else p.grad.clone() for p in params]
            ours.step()
            native.step()
            assert_same_run(ours, native, RELATIVE_NORM[dtype])
            for p, grad in zip(params, grads, strict=True):
                assert grad is None or torch.equal(p.grad, grad), "a gradient was changed"
        half = dtype in (torch.float16, torch.bfloat16)
        wanted = state_dtype if half and state_dtype else dtype
        assert {s.dtype for p in params for k, s in ours.state[p].items() if k != "step"} == {wanted}


@both
@all_options
@pytest.mark.parametrize("direction", ["ours to native", "native to ours"])
def test_state_dict_changes_hands_in_the_middle_of_a_run(device, direction, name, options):
    """Two steps with one, two with the other from its state_dict, against four steps with PyTorch's."""
    kinds = pair(name) if direction == "ours to native" else pair(name)[::-1]
    params, expected = parameters(device=device), parameters(device=device)
    reference = pair(name)[1](expected, **options)
    optimizer = kinds[0](params, **options)
    for step in range(4):
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            assert state.keys() == reference.state_dict().keys()
            assert state["param_groups"] == reference.state_dict()["param_groups"]
            kinds_of_step = {(s["step"].dtype, s["step"].device.type, s["step"].shape) for s in state["state"].values()}
            assert kinds_of_step == {(torch.float32, "cpu", ())}
            optimizer = kinds[1](params, lr=123.0)
            optimizer.load_state_dict(state)
        set_grads(params, step)
        set_grads(expected, step)
        optimizer.step()
        reference.step()
    assert_same_run(optimizer, reference)


def test_layouts(device):
    """Strides of parameter, gradient and states that differ from one another's."""

    def layouts_of(t):
        yield t.transpose(0, 1).contiguous().transpose(0, 1)
        if t.dim() == 4:
            yield t.contiguous(memory_format=torch.channels_last)
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), device=t.device, dtype=t.dtype)
        wide[..., ::2] = t
        yield wide[..., ::2]
        storage = torch.full((t.numel() + 1,), float("nan"), device=t.device, dtype=t.dtype)
        storage[1:] = t.reshape(-1)
        yield storage[1:].view(t.shape)

    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    for shape in [(3, 5), (4, 3, 2, 5), (4, 1, 3, 3), (60, 70)]:
        values = random_tensors([shape] * 5, 0, device)
        values[3:] = [v.abs() for v in values[3:]]
        for which in (0, 1, 2, 3, 4, "all"):
            for other in range(len(list(layouts_of(values[0])))):
                runs = []
                for strange in (True, False):
                    tensors = [
                        list(layouts_of(v.clone()))[other] if strange and which in (i, "all") else v.clone()
                        for i, v in enumerate(values)
                    ]
                    param = torch.nn.Parameter(tensors[0])
                    param.grad = tensors[1]
                    kind = cuda_ops.optim.AdamW if strange else torch.optim.AdamW
                    optimizer = kind([param], lr=0.1, amsgrad=True)
                    state = dict(zip(names, tensors[2:], strict=True), step=torch.tensor(3.0))
                    optimizer.state[param] = state
                    strides = [t.stride() for t in tensors]
                    optimizer.step()
                    assert [t.stride() for t in tensors] == strides
                    assert all(optimizer.state[param][n] is t for n, t in zip(names, tensors[2:], strict=True))
                    runs.append(optimizer)
                assert_same_run(*runs)


def test_nonfinite_values_travel_as_in_pytorch(device):
    """In parameters, gradients and states at once; averages of infinities from either end."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0], device=device)
    for options in OPTIONS:
        runs = []
        for kind, dtype in ((cuda_ops.optim.Adam, torch.float32), (torch.optim.Adam, torch.float64)):
            param = torch.nn.Parameter(values.repeat(5).to(dtype))
            optimizer = kind([param], lr=0.1, **options)
            for _ in range(3):
                param.grad = values.repeat_interleave(5).to(dtype)
                optimizer.step()
            largest = optimizer.state[param].get("max_exp_avg_sq", param.new_zeros(()))
            runs.append((param.detach(), largest))
        for ours, theirs in zip(*runs, strict=True):
            assert_close(ours, theirs, 1e-5)


def test_a_parameter_of_infinity_without_decay_keeps_its_state_finite(device):
    param = torch.nn.Parameter(torch.tensor([float("inf"), 1.0], device=device))
    optimizer = cuda_ops.optim.Adam([param], lr=0.1)
    param.grad = torch.tensor([1.0, 1.0], device=device)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].isfinite().all()
    assert param[0] == float("inf")


def test_groups_and_mixed_dtypes(device):
    runs = []
    for kind in pair("AdamW"):
        a, b, c = parameters([(3,), (4, 5), (2,)], device=device)
        d = parameters([(0,), (7,)], 1, device, torch.float32)
        optimizer = kind([{"params": [a, *d]}, {"params": [b], "lr": 0.01, "betas": (0.5, 0.6)}], lr=0.1)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [c], "weight_decay": 0.3, "maximize": True, "amsgrad": True})
            set_grads([a, b, c, *d], step)
            optimizer.step()
        runs.append(optimizer)
    for group, expected in zip(runs[0].param_groups, runs[1].param_groups, strict=True):
        for p, e in zip(group["params"], expected["params"], strict=True):
            assert_close(p.detach(), e.detach().double(), 1e-6)


@both
def test_closure_hooks_pickle_and_schedulers(name):
    ours, native = pair(name)
    model = torch.nn.Linear(3, 2)
    optimizer = ours(model.named_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert seen == [1]
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    expected = native(model.named_parameters(), lr=0.1)
    assert repr(ours(model.named_parameters(), lr=0.1)) == repr(expected)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step(closure)
    assert f"Optimizer.step#{name}.step" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lr_may_be_a_tensor(device, shape, dtype):
    for where in {"cpu", device}:
        lr = torch.full(shape, 0.125, dtype=dtype, device=where)
        mine, theirs = parameters(device=device), parameters(device=device)
        ours, native = cuda_ops.optim.AdamW(mine, lr=lr), torch.optim.AdamW(theirs, lr=0.125)
        for step in range(2):
            set_grads(mine, step)
            set_grads(theirs, step)
            ours.step()
            native.step()
        assert_same_run(ours, native)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}], ids=named
)
def test_choices_of_implementation_are_kept_and_change_nothing(options):
    mine, theirs = parameters(), parameters()
    ours, native = cuda_ops.optim.Adam(mine, **options), torch.optim.Adam(theirs)
    for step in range(2):
        set_grads(mine, step)
        set_grads(theirs, step)
        ours.step()
        native.step()
    assert_same_run(ours, native)
    (key,) = options
    assert ours.state_dict()["param_groups"][0][key] is options[key]
    assert getattr(ours, "_step_supports_amp_scaling", False) is bool(options.get("fused"))


def test_gradient_scaling_as_in_pytorchs_fused_step(device):
    """GradScaler hands the scale and what it found to the step: unscaled in place, or nothing at all is changed."""
    for value in (1.5, float("inf")):
        runs = []
        for kind in pair("Adam"):
            params = parameters([(3,), (33,)], device=device, dtype=torch.float32)
            optimizer = kind(params, lr=0.1, fused=True)
            set_grads(params, 1)
            optimizer.step()  # so that there is a state
            scaler = torch.amp.GradScaler(device, init_scale=8.0)
            scaler.scale(torch.zeros((), device=device))
            set_grads(params, 2)
            params[0].grad[0] = value
            scaler.step(optimizer)
            scaler.update()
            runs.append((optimizer, [p.grad for p in params], scaler.get_scale()))
        assert runs[0][2] == runs[1][2]
        # PyTorch's fused step takes 1 - beta2 of a float32 on CUDA, which is off by 1.3e-5.
        assert_same_run(runs[0][0], runs[1][0], 2e-5 if device == "cuda" else 1e-6)
        for mine, theirs in zip(runs[0][1], runs[1][1], strict=True):
            assert torch.equal(mine, theirs)


@both
@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_max_grad_norm_is_clip_grad_norm_before_the_step(device, name, limit, amsgrad):
    """Of all groups together; and the gradients stay."""
    clipped, plain = ([p.requires_grad_() for p in parameters(device=device)] for _ in range(2))
    kind = pair(name)[0]
    mine, theirs = (
        kind([{"params": p[:1], "lr": 0.05}, {"params": p[1:]}], lr=0.1, amsgrad=amsgrad, max_grad_norm=norm)
        for p, norm in ((clipped, limit), (plain, None))
    )
    for step in range(3):
        set_grads(clipped, step + 1)
        set_grads(plain, step + 1)
        before = [p.grad.clone() for p in clipped]
        norm = cuda_ops.nn.utils.clip_grad_norm_(plain, limit)
        mine.step()
        theirs.step()
        assert_close(mine.grad_norm, norm, 1e-6)
        for p, expected, grad in zip(clipped, plain, before, strict=True):
            assert torch.equal(p.grad, grad)
            assert_close(p.detach(), expected.detach(), 1e-5)
    assert "max_grad_norm" not in str(mine.state_dict())
    assert pickle.loads(pickle.dumps(mine)).max_grad_norm == limit


def test_max_grad_norm_is_of_gradients_without_their_scale(device):
    """By GradScaler as without: the first step's gradients are not clipped, the second one's are."""
    runs = []
    for scale in (None, 8.0):
        params = parameters([(3,), (33,)], device=device, dtype=torch.float32)
        optimizer = cuda_ops.optim.AdamW(params, lr=0.1, fused=True, max_grad_norm=20.0)
        norms = []
        for step, size in ((1, 1.0), (2, 10.0)):
            set_grads(params, step)
            for p in params:
                p.grad *= size * (scale or 1)
            if scale is None:
                optimizer.step()
            else:
                scaler = torch.amp.GradScaler(device, init_scale=scale)
                scaler.scale(torch.zeros((), device=device))
                scaler.step(optimizer)
            norms.append(optimizer.grad_norm.item())
        runs.append((norms, params))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-6)
    assert runs[0][0][0] < 20 < runs[0][0][1]
    for plain, scaled in zip(runs[0][1], runs[1][1], strict=True):
        assert_close(scaled.detach(), plain.detach(), 1e-6)
        # As where the scaler unscales: without the scale, and not clipped.
        assert_close(scaled.grad, plain.grad, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_left_out_leaves_parameters_and_gradients(device, dtype):
    params = parameters([(3,), (33,)], device=device, dtype=dtype)
    optimizer = cuda_ops.optim.AdamW(params, lr=0.1, fused=True, max_grad_norm=0.1)
    for grads_are_finite in (True, False):
        set_grads(params, 1)
        if not grads_are_finite:
            params[0].grad[1] = float("inf")
        before = [(p.detach().clone(), p.grad.clone()) for p in params]
        # What GradScaler leaves for the optimizer.
        optimizer.grad_scale = torch.tensor(8.0, device=device)
        optimizer.found_inf = torch.tensor(0.0 if grads_are_finite else 1.0, device=device)
        optimizer.step()
        for p, (value, grad) in zip(params, before, strict=True):
            assert torch.equal(p.detach(), value) is not grads_are_finite
            assert torch.equal(p.grad, grad / 8 if grads_are_finite else grad)


def test_norms_that_are_none_are_refused():
    for limit in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="AdamW: expected max_grad_norm to be greater than 0, got"):
            cuda_ops.optim.AdamW(parameters(), max_grad_norm=limit)
    with pytest.raises(TypeError, match="max_grad_norm"):
        cuda_ops.optim.AdamW(parameters(), max_grad_norm="1")


def test_float32_state_survives_a_state_dict(device):
    """Beside bfloat16 parameters."""
    param = torch.nn.Parameter(torch.ones(5, device=device, dtype=torch.bfloat16))
    optimizer = cuda_ops.optim.AdamW([param], state_dtype=torch.float32)
    exact = torch.linspace(0, 1, 5, device=device)
    optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": exact, "exp_avg_sq": exact + 1e-4}
    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"][0]["state_dtype"] is torch.float32
    again = cuda_ops.optim.AdamW([param], state_dtype=torch.float32)
    again.load_state_dict(state)
    assert torch.equal(again.state[param]["exp_avg"], exact)
    assert torch.equal(again.state[param]["exp_avg_sq"], exact + 1e-4)
    assert again.state[param]["exp_avg"].data_ptr() != state["state"][0]["exp_avg"].data_ptr()
    # To PyTorch's, and to ours without the option: in the parameter's dtype. From there back: float32 again.
    for kind in (torch.optim.AdamW, cuda_ops.optim.AdamW):
        other = kind([param])
        other.load_state_dict(copy.deepcopy(state))
        assert other.state[param]["exp_avg"].dtype == torch.bfloat16
        again.load_state_dict(copy.deepcopy(other.state_dict()))
        assert again.state[param]["exp_avg"].dtype == torch.float32
    assert "state_dtype" not in other.param_groups[0]
    assert again.param_groups[0]["state_dtype"] is torch.float32
    assert pickle.loads(pickle.dumps(again)).param_groups[0]["state_dtype"] is torch.float32


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"eps": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"weight_decay": -0.1},
        {"lr": torch.ones(2)},
        {"lr": torch.ones(()), "foreach": True},
    ],
    ids=named,
)
@both
def test_values_that_pytorch_refuses(options, name):
    ours, native = pair(name)
    with pytest.raises(ValueError) as theirs:
        native(parameters(), **options)
    with pytest.raises(ValueError) as mine:
        ours(parameters(), **options)
    assert str(mine.value) == str(theirs.value)


@both
def test_what_is_not_supported_is_refused_by_name(name):
    kind, native = pair(name)
    message = f"{name}: differentiable=True is not supported"
    with pytest.raises(NotImplementedError, match=message):
        kind(parameters(), differentiable=True)
    with pytest.raises(NotImplementedError, match=message):
        kind([{"params": parameters(), "differentiable": True}])
    with pytest.raises(NotImplementedError, match=message):
        kind(parameters()).load_state_dict(native(parameters(), differentiable=True).state_dict())
    with pytest.raises(NotImplementedError, match=f"{name}: expected state_dtype to be None or torch.float32, got"):
        kind(parameters(), state_dtype=torch.float64)
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        NotImplementedError, match=rf"{name}: expected dense gradients, got one of layout torch\.sparse"
    ):
        kind(embedding.parameters()).step()


@pytest.mark.parametrize("value", ["0.1", [0.1], None], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["eps", "weight_decay"])
def test_options_that_are_no_numbers(name, value):
    message = f"Adam: expected {name} to be a number, got "
    with pytest.raises(TypeError, match=message):
        cuda_ops.optim.Adam(parameters(), **{name: value})
    with pytest.raises(TypeError, match=message):
        cuda_ops.optim.Adam([{"params": parameters(), name: value}])
    with pytest.raises(TypeError, match="AdamW: expected amsgrad to be a bool, got 'True'"):
        cuda_ops.optim.AdamW(parameters(), amsgrad="True")


def test_a_refused_step_leaves_no_state():
    for dtype in (torch.complex64, torch.complex128):
        params = parameters([(3,)], dtype=dtype)
        set_grads(params, 1)
        optimizer = cuda_ops.optim.Adam(params)
        with pytest.raises(RuntimeError, match="adam: expected params to be floating point, got complex"):
            optimizer.step()
        assert optimizer.state_dict()["state"] == {}


def test_backward_through_values_from_before_the_step_is_refused():
    param = torch.nn.Parameter(torch.ones(3))
    loss = (param**2).sum()
    param.grad = torch.ones(3)
    cuda_ops.optim.Adam([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_a_step_writes_counts_as_modified():
    for amsgrad in (False, True):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = cuda_ops.optim.Adam([param], amsgrad=amsgrad)
        param.grad = torch.ones(3)
        optimizer.step()
        written = {"param": param, **optimizer.state[param]}
        assert len(written) == 4 + amsgrad
        before = {name: tensor._version for name, tensor in written.items()}
        optimizer.step()
        for name, tensor in written.items():
            assert tensor._version > before[name], name


def test_negative_views():
    whole = torch.tensor([1 + 2j, 3 - 4j])
    param = whole.conj().imag.requires_grad_()  # its memory holds 2 and -4
    assert param.is_neg()
    param.grad = torch.tensor([1.0, -2.0])
    cuda_ops.optim.Adam([param], lr=0.5).step()
    assert_close(param.detach(), torch.tensor([-2.5, 4.5], dtype=torch.float64), 1e-6)
    assert_close(whole.imag, torch.tensor([2.5, -4.5], dtype=torch.float64), 1e-6)


def test_sharded_parameters():
    """FSDP2 over one process: parameters, gradients and states are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).double()
        sharded = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).double()
        sharded.load_state_dict(plain.state_dict())
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        ours = cuda_ops.optim.AdamW(sharded.parameters(), lr=0.1, amsgrad=True)
        native = torch.optim.AdamW(plain.parameters(), lr=0.1, amsgrad=True)
        for _ in range(3):
            for model, optimizer in ((sharded, ours), (plain, native)):
                optimizer.zero_grad()
                model(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
                optimizer.step()
        for p, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert isinstance(ours.state[p]["max_exp_avg_sq"], DTensor)
            assert_close(p.detach().full_tensor(), expected.detach(), 1e-12)
    finally:
        torch.distributed.destroy_process_group()


def call_op(device="cpu", *, amsgrad=False, shapes=((3,), (2, 2), (0,)), steps_on="cpu", **replaced):
    lists = {
        "params": random_tensors(shapes, 1, device),
        "grads": random_tensors(shapes, 2, device),
        "exp_avgs": random_tensors(shapes, 3, device),
        "exp_avg_sqs": [t.abs() for t in random_tensors(shapes, 4, device)],
        "max_exp_avg_sqs": [t.abs() for t in random_tensors(shapes, 5, device)] if amsgrad else [],
        "steps": [torch.tensor(2.0, device=steps_on) for _ in shapes],
        "device_lr": None,
        "grad_scale": None,
        "found_inf": None,
        **replaced,
    }
    return *lists.values(), 0.1, 0.9, 0.99, 1e-8, 0.1, amsgrad, True, False


def test_opcheck(device):
    calls = [call_op(device), call_op(device, amsgrad=True)]
    calls.append(call_op(device, shapes=[(3, 5)], grads=[t.t() for t in random_tensors([(5, 3)], 2, device)]))
    one = torch.ones((), device=device)
    calls.append(call_op(device, steps_on=device, grad_scale=2 * one, found_inf=0 * one))
    for call in calls:
        torch.library.opcheck(torch.ops.cuda_ops.adam_, call)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"grads": [torch.ones(3)]}, "adam: expected as many grads as params, 3, got 1"),
        ({"exp_avgs": []}, "adam: expected as many exp_avgs as params, 3, got 0"),
        ({"steps": []}, "adam: expected as many steps as params, 3, got 0"),
        (
            {"steps": [torch.tensor(1)] * 3},
            "adam: expected steps to be one float32 or float64 each, all of them on the CPU or on the device of params",
        ),
        (
            {"exp_avg_sqs": random_tensors([(3,), (2, 3), (0,)], 0)},
            r"adam: expected exp_avg_sqs to have the shape of params, \[2, 2\], got \[2, 3\]",
        ),
        (
            {"exp_avgs": random_tensors([(3,), (2, 2), (0,)], 0, dtype=torch.float32)},
            "adam: expected exp_avgs to have the dtype of params, float64, got float32",
        ),
        ({"max_exp_avg_sqs": [torch.ones(3)]}, "adam: expected no max_exp_avg_sqs without amsgrad, got 1"),
        ({"device_lr": torch.tensor(0.1)}, "adam: expected device_lr to be on a CUDA device"),
        ({"found_inf": torch.ones(2)}, r"adam: expected found_inf to be one float32, got Float of shape \[2\]"),
    ],
)
def test_bad_lists_are_refused_by_name(replaced, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.cuda_ops.adam_(*call_op(**replaced))


def test_compiled_step():
    mine, theirs = parameters([(3,), (4, 5)]), parameters([(3,), (4, 5)])
    ours, native = cuda_ops.optim.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    compiled = torch.compile(ours.step, backend="eager")
    for step in range(3):
        set_grads(mine, step)
        set_grads(theirs, step)
        compiled()
        native.step()
    assert_same_run(ours, native)
