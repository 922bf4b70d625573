"""GraphedStep: a step as a CUDA graph is the same step; what it depends on is noticed; the CPU takes plain steps."""

import copy

import pytest
import torch

import cuda_ops
from cuda_ops.data import Batches
from cuda_ops.models import BACKENDS, MnistCNN
from cuda_ops.training import GraphedStep


def data(count=64, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images.to(device), torch.randint(10, (count,), generator=generator).to(device)


def net(nn, device):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), nn.Linear(4 * 49, 10)).to(device)


def criterion_of(nn, model):
    criterion = nn.CrossEntropyLoss()
    return lambda images, labels: criterion(model(images), labels)


def optimizer_of(optim, model, **options):
    if optim is torch.optim and next(model.parameters()).is_cuda:
        options = {"fused": True, **options}
    return optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def make(backend, device, **options):
    """(model, its step) for a small network."""
    nn, optim = (cuda_ops.nn, cuda_ops.optim) if backend == "custom" else (torch.nn, torch.optim)
    sgd = {name: options.pop(name) for name in ("lr", "momentum") if name in options}
    model = net(nn, device)
    return model, GraphedStep(model, criterion_of(nn, model), optimizer_of(optim, model, **sgd), **options)


def plain_losses(model, loss, optimizer, batches, rates):
    """The same steps written down."""
    losses = []
    for batch, lr in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        value = loss(*batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def batches_of(count, device, size=16):
    images, labels = data(count * size, device)
    images = images.float() / 255
    return list(zip(images.split(size), labels.split(size), strict=True))


def assert_same(state, expected, exact=True):
    for name, value in expected.items():
        if exact:
            assert torch.equal(state[name], value), name
        else:
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["custom", "native"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_of_a_plain_loop(backend, momentum, device):
    """Losses, parameters, running statistics and momentum, under a learning rate that changes."""
    nn, optim = (cuda_ops.nn, cuda_ops.optim) if backend == "custom" else (torch.nn, torch.optim)
    model, step = make(backend, device, momentum=momentum)
    twin = net(nn, device)
    batches, rates = batches_of(6, device), [0.1, 0.05, 0.2, 0.2, 0.1, 0.01]
    losses = torch.stack([step(*batch, lr=lr).clone() for batch, lr in zip(batches, rates, strict=True)])
    expected = plain_losses(twin, criterion_of(nn, twin), optimizer_of(optim, twin, momentum=momentum), batches, rates)
    exact = backend == "custom" or device == "cpu"
    assert_same({"loss": losses}, {"loss": expected}, exact)
    assert_same(model.state_dict(), twin.state_dict(), exact)
    assert model[1].num_batches_tracked.item() == 6
    assert all(p.grad is None for p in model.parameters())
    if device == "cuda":
        assert len(step._graphs) == 1


@pytest.mark.parametrize("table", [False, True])
def test_several_steps_in_one_graph(table, device):
    """In blocks of four, with a shorter one at the end, twice over; the learning rates as a table or as one number."""
    model, step = make("custom", device, steps_per_graph=4)
    twin, single = make("custom", device)
    batches = batches_of(6, device)
    images, labels = (torch.stack(tensors) for tensors in zip(*batches, strict=True))
    rates = torch.linspace(0.02, 0.2, 6, device=device) if table else torch.full((6,), 0.1)
    for _ in range(3):
        losses = step.run(images, labels, lr=rates if table else None)
        expected = torch.stack([single(*b, lr=r).clone() for b, r in zip(batches, rates.tolist(), strict=True)])
        assert torch.equal(losses, expected)
    assert_same(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("steps_per_graph", [1, 3])
def test_learning_rates_of_groups(steps_per_graph, device):
    """A table of [steps, groups]; it lies in host memory, as schedules do."""
    models, losses = [net(cuda_ops.nn, device) for _ in range(2)], []
    table = torch.tensor([[0.1, 0.0], [0.2, 0.1], [0.05, 0.3]]).repeat(3, 1)
    batches = batches_of(9, device)
    stacked = [torch.stack(tensors) for tensors in zip(*batches, strict=True)]
    optimizers = [
        cuda_ops.optim.SGD([{"params": m[0].parameters()}, {"params": m[1:].parameters()}], lr=0.5) for m in models
    ]
    step = GraphedStep(models[0], criterion_of(cuda_ops.nn, models[0]), optimizers[0], steps_per_graph=steps_per_graph)
    losses = step.run(*stacked, lr=table)
    expected, loss = [], criterion_of(cuda_ops.nn, models[1])
    for batch, rates in zip(batches, table.tolist(), strict=True):
        for group, rate in zip(optimizers[1].param_groups, rates, strict=True):
            group["lr"] = rate
        optimizers[1].zero_grad()
        expected.append(loss(*batch))
        expected[-1].backward()
        optimizers[1].step()
    assert torch.equal(losses, torch.stack(expected).detach())
    assert_same(models[0].state_dict(), models[1].state_dict())


def test_a_step_that_fails_leaves_the_learning_rates(device):
    images, labels = (torch.stack(tensors) for tensors in zip(*batches_of(2, device), strict=True))
    _, step = make("custom", device, steps_per_graph=2)
    loss, calls = step.loss, []

    def failing(*batch):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("the second step")
        return loss(*batch)

    step.loss = failing
    with pytest.raises(KeyError, match="the second step"):
        step(images, labels, lr=torch.tensor([0.25, 0.5], device=device))
    assert [float(group["lr"]) for group in step.optimizer.param_groups] == [pytest.approx(0.1)]
    assert step(images, labels).isfinite().all()


def test_the_source_is_part_of_the_step(device):
    images, labels = data(64, device)
    batches = Batches(images, labels, device, keep_on_device=True)
    model, step = make("custom", device, source=batches, steps_per_graph=2)
    twin, single = make("custom", device)
    order = torch.randperm(64, device=device).view(4, 16)
    for _ in range(2):
        losses = step.run(order)
        expected = torch.stack([single(*batches(row)).clone() for row in order])
        assert torch.equal(losses, expected)
    assert_same(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mnist_cnn_learns(backend, device):
    torch.manual_seed(0)
    model = MnistCNN(backend).to(device)
    optimizer = optimizer_of(BACKENDS[backend].optim, model, lr=0.05)
    batches = Batches(*data(64, device), device, keep_on_device=True)
    step = GraphedStep(model, model.loss, optimizer, source=batches)
    indices = torch.arange(64, device=device)
    losses = [step(indices).item() for _ in range(8)]
    assert losses[-1] < 0.95 * losses[0]  # of random labels


def test_new_shapes_modes_and_options_are_new_graphs(device):
    model, step = make("custom", device)
    twin = net(cuda_ops.nn, device)
    optimizer = optimizer_of(cuda_ops.optim, twin)
    loss = criterion_of(cuda_ops.nn, twin)
    (large, *_), (small, *_) = batches_of(1, device), batches_of(1, device, size=5)
    for batch, training, decay in [(large, 1, 0), (small, 1, 0), (large, 0, 0), (large, 1, 0.1)] * 3:
        model.train(bool(training))
        twin.train(bool(training))
        for group in (*step.optimizer.param_groups, *optimizer.param_groups):
            group["weight_decay"] = decay
        assert torch.equal(step(*batch), plain_losses(twin, loss, optimizer, [batch], [0.1])[0])
    assert_same(model.state_dict(), twin.state_dict())
    if device == "cuda":
        assert len(step._graphs) == 4


def test_state_loaded_in_between_is_followed(device):
    """Weights are loaded in place; the optimizer's state_dict brings other tensors, and another learning rate."""
    model, step = make("custom", device, momentum=0.9)
    batches = batches_of(4, device)
    start = copy.deepcopy(model.state_dict())
    first = [step(*batch).item() for batch in batches]
    saved = copy.deepcopy(step.optimizer.state_dict())
    middle = copy.deepcopy(model.state_dict())
    after = [step(*batch, lr=0.3).item() for batch in batches]
    model.load_state_dict(middle)
    step.optimizer.load_state_dict(saved)
    assert [step(*batch, lr=0.3).item() for batch in batches] == after
    model.load_state_dict(start)
    step.optimizer.state.clear()
    step.optimizer.param_groups[0]["lr"] = 0.1
    assert [step(*batch).item() for batch in batches] == first


def test_schedulers_of_pytorch(device):
    model, step = make("custom", device)
    twin = net(cuda_ops.nn, device)
    optimizer = optimizer_of(cuda_ops.optim, twin)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
    for i, batch in enumerate(batches_of(5, device)):
        loss = step(*batch).clone()
        scheduler.step()
        assert torch.equal(
            loss, plain_losses(twin, criterion_of(cuda_ops.nn, twin), optimizer, [batch], [0.1 / 2**i])[0]
        )
    assert_same(model.state_dict(), twin.state_dict())


def test_what_cannot_be():
    _, step = make("custom", "cpu", steps_per_graph=3)
    with pytest.raises(ValueError, match="GraphedStep: expected steps_per_graph to be at least 1, got 0"):
        make("custom", "cpu", steps_per_graph=0)
    with pytest.raises(ValueError, match="GraphedStep: expected a model with parameters"):
        GraphedStep(torch.nn.ReLU(), lambda x: x.sum(), step.optimizer)
    several = GraphedStep(step.model, lambda x: step.model(x).flatten(), step.optimizer)
    with pytest.raises(ValueError, match=r"expected the loss to be one number, got shape \[20\]"):
        several(torch.ones(2, 1, 28, 28))
    for batch in ([torch.ones(4, 2)], [torch.ones(2, 2), torch.ones(1, 2)], [torch.tensor(1.0)], []):
        with pytest.raises(ValueError, match="GraphedStep: expected 1 to 3 batches stacked along the first dimension"):
            step(*batch)
    with pytest.raises(TypeError, match=r"GraphedStep: expected steps_per_graph to be an int, got 1\.5"):
        make("custom", "cpu", steps_per_graph=1.5)
    with pytest.raises(TypeError, match="GraphedStep: expected a batch of Tensors, got Tensor, int"):
        step(torch.ones(3, 2), 7)
    stranger = cuda_ops.optim.SGD([torch.ones(2, device="meta", requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="expected the optimizer to hold a parameter on the model's device, cpu, got"):
        GraphedStep(step.model, step.loss, stranger)


def test_learning_rates_fit_the_steps(device):
    """More of them than steps would be left over in silence."""
    images, labels = (torch.stack(tensors) for tensors in zip(*batches_of(2, device), strict=True))
    for steps, batch in ((1, (images[0], labels[0])), (3, (images, labels))):
        model, step = make("custom", device, steps_per_graph=steps)
        before = copy.deepcopy(model.state_dict())
        for lr in (torch.full((3,), 0.1), torch.full((2, 3), 0.1), torch.full((1, 1), 0.1)):
            with pytest.raises(ValueError, match=r"GraphedStep: expected learning rates of \[.*, got shape \["):
                step(*batch, lr=lr)
        assert_same(model.state_dict(), before)
    with pytest.raises(TypeError, match=r"GraphedStep: expected autocast to be a torch\.dtype or None, got 'bf16'"):
        make("custom", device, autocast="bf16")


@pytest.mark.parametrize("steps_per_graph", [1, 3])
def test_run_wants_as_many_of_everything(steps_per_graph):
    model, step = make("custom", "cpu", steps_per_graph=steps_per_graph)
    before = copy.deepcopy(model.state_dict())
    images, labels = torch.ones(4, 2, 1, 28, 28), torch.zeros(4, 2, dtype=torch.int64)
    for batches, lr in [
        ([images, labels[:3]], None),
        ([images, labels], torch.ones(3)),
        ([images, labels], torch.tensor(0.1)),
        ([images[:0], labels[:0]], None),
        ([], None),
    ]:
        with pytest.raises(ValueError, match=r"GraphedStep\.run: expected batches .*for the same number of steps"):
            step.run(*batches, lr=lr)
    with pytest.raises(TypeError, match=r"GraphedStep\.run: expected Tensors, got Tensor, list"):
        step.run(images, [0, 1, 2, 3])
    assert_same(model.state_dict(), before)
    assert step.run(images, labels, lr=torch.full((4,), 0.1)).shape == (4,)


def test_repr_says_how_it_runs(device):
    _, step = make("custom", device, steps_per_graph=4)
    how = "one CUDA graph for 4 step(s)" if device == "cuda" else "plain steps, without a graph"
    assert repr(step) == f"GraphedStep(Sequential, SGD, {step.device}: {how})"


@pytest.mark.cuda
def test_a_learning_rate_that_is_read_on_the_host_is_refused():
    model = net(torch.nn, "cuda")
    for optimizer, cure in [
        (torch.optim.SGD(model.parameters(), lr=0.1), "fused=True"),
        (torch.optim.AdamW(model.parameters()), "capturable=True"),
    ]:
        with pytest.raises(ValueError, match=f"reads its learning rate on the host, .* make it with {cure}"):
            GraphedStep(model, criterion_of(torch.nn, model), optimizer)


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop", "NAdam"])
def test_optimizers_whose_state_does_not_start_at_zero(optimizer):
    results = []
    for graph in (True, False):
        model = net(torch.nn, "cuda")
        optim = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, capturable=True)
        step = GraphedStep(model, criterion_of(torch.nn, model), optim, graph=graph)
        results.append([step(*batch).item() for batch in batches_of(6, "cuda")])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
def test_a_wait_within_the_step_is_named():
    model = net(cuda_ops.nn, "cuda")
    loss = criterion_of(cuda_ops.nn, model)

    def curious(images, labels):
        value = loss(images, labels)
        if value.item() > 1e9:  # the culprit
            raise AssertionError
        return value

    step = GraphedStep(model, curious, optimizer_of(cuda_ops.optim, model))
    (batch,) = batches_of(1, "cuda")
    step(*batch)
    with pytest.raises(RuntimeError, match=r"waits for the device .*test_graph.py:\d+, `if value.item\(\) > 1e9"):
        step(*batch)
    # The context lives on, and so does the model.
    other = GraphedStep(model, loss, step.optimizer)
    assert all(other(*batch).isfinite().item() for _ in range(3))


@pytest.mark.cuda
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    results = []
    for graph in (True, False):
        torch.manual_seed(0)
        model = MnistCNN(backend).to("cuda")
        optimizer = optimizer_of(BACKENDS[backend].optim, model)
        step = GraphedStep(model, model.loss, optimizer, autocast=torch.bfloat16, graph=graph)
        results.append(torch.stack([step(*batch).clone() for batch in batches_of(5, "cuda")]))
    if backend == "native":
        torch.testing.assert_close(*results, rtol=0.05, atol=0.02)
    else:
        assert torch.equal(*results)


@pytest.mark.cuda
def test_random_numbers_go_on():
    """Each replay draws new ones."""
    dropout = cuda_ops.nn.Dropout(0.5)
    weight = torch.nn.Linear(1, 1).to("cuda")
    step = GraphedStep(
        weight, lambda x: dropout(x * weight.weight).sum(), cuda_ops.optim.SGD(weight.parameters(), lr=0)
    )
    x = torch.rand(1, 1000, device="cuda")
    assert len({step(x).item() for _ in range(8)}) == 8


@pytest.mark.cuda
def test_batches_from_the_host():
    _, step = make("custom", "cuda")
    _, other = make("custom", "cuda")
    for images, labels in batches_of(4, "cpu"):
        loss = step(images.pin_memory(), labels.pin_memory()).clone()
        assert torch.equal(loss, other(images.cuda(), labels.cuda()))


def test_gradients_can_be_clipped_inside_the_step(device):
    """on_gradients is called between backward and the update; in a graph it is part of it."""
    images, labels = data(16, device)
    images = images.float() / 255
    model = net(cuda_ops.nn, device)
    parameters = list(model.parameters())
    norms = []
    step = GraphedStep(
        model,
        criterion_of(cuda_ops.nn, model),
        cuda_ops.optim.SGD(parameters, lr=1.0),
        on_gradients=lambda: norms.append(cuda_ops.nn.utils.clip_grad_norm_(parameters, 1e-3)),
    )
    for _ in range(4):
        before = [p.detach().clone() for p in parameters]
        step(images, labels)
        moved = torch.stack([(p.detach() - b).norm() for p, b in zip(parameters, before, strict=True)]).norm()
        assert moved.item() == pytest.approx(1e-3, rel=1e-2)
    assert len(norms) == (4 if device == "cpu" else 2)
