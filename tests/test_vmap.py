"""vmap of every op beside PyTorch's: batches anywhere, of nothing, within each other; how often an op is called."""

import pytest
import torch
from support.opspec import as_tuple, assert_close
from test_torch_func import SLOW, TOLERANCE, every, loss, problems
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_ops

F = cuda_ops.functional
pytestmark = pytest.mark.filterwarnings(f"ignore:{SLOW}", f"error:{SLOW}cuda_ops")


def of_each(spec):
    if spec.random:
        pytest.skip("has a test of its own")
    found = [problem for problem in problems(spec) if problem[3]]
    if not found:
        pytest.skip(f"{spec.name} has nothing to differentiate")
    yield from found


def compare(ours, native, arguments, in_dims, what):
    try:
        expected = as_tuple(torch.func.vmap(native, in_dims)(*arguments))
    except RuntimeError as error:  # batch_norm's running statistics, smooth_l1_loss of shapes that are broadcast
        assert "updated in place" in str(error) or "must match the size of tensor b" in str(error)
        return
    actual = as_tuple(torch.func.vmap(ours, in_dims)(*arguments))
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, e, TOLERANCE, f"{what}: result {index}")


def test_all_arguments_have_a_batch_anywhere(spec):
    for name, ours, native, primals, tangents in of_each(spec):
        last = [torch.stack([p, t, p - t], -1) for p, t in zip(primals, tangents, strict=True)]
        compare(ours, native, last, (-1,) * len(last), name)
        grads = [torch.func.grad(loss(function), every(primals)) for function in (ours, native)]
        compare(*grads, last, (-1,) * len(last), f"gradients of {name}")


def test_batches_within_batches(spec):
    for name, ours, native, primals, tangents in of_each(spec):
        pairs = [torch.stack([p, t]) for p, t in zip(primals, tangents, strict=True)]
        arguments = torch.stack([pairs[0], pairs[0] + 1], 1), *pairs[1:]
        inner = [torch.func.vmap(function, (0, *[None] * (len(pairs) - 1))) for function in (ours, native)]
        compare(*inner, arguments, 0, name)


def test_a_batch_of_no_elements(spec):
    """As many dimensions as of a batch of any: PyTorch's own are not always that, or an error."""
    for name, ours, native, primals, _ in of_each(spec):
        shapes = [tuple(output.shape) for output in as_tuple(native(*primals))]
        for rest_dim in (0, None):
            in_dims = 0, *[rest_dim] * (len(primals) - 1)
            first, *rest = [
                p if d is None else p.new_empty((0, *p.shape)) for p, d in zip(primals, in_dims, strict=True)
            ]
            try:
                outputs = as_tuple(torch.func.vmap(ours, in_dims)(first, *rest))
            except RuntimeError as error:  # batch_norm's running statistics
                assert "which writes into its arguments" in str(error)
                continue
            assert [tuple(output.shape) for output in outputs] == [(0, *shape) for shape in shapes], name
            assert all(output.dtype == torch.float64 for output in outputs)
            grads = torch.func.vmap(torch.func.vjp(lambda *p, ours=ours: ours(*p), *primals)[1])
            try:
                found = grads(tuple(torch.empty((0, *shape), dtype=torch.float64) for shape in shapes))
            except IndexError as error:  # PyTorch's own products of numbers, of which some gradients are composed
                assert "select(): index 0 out of range" in str(error) and spec.name == "cross_entropy"
                continue
            assert [tuple(grad.shape) for grad in found] == [(0, *p.shape) for p in primals], name


def test_nothing_of_halves():
    x = torch.empty(0, 3, 4, dtype=torch.bfloat16)
    assert torch.func.vmap(lambda x: F.cumsum(x, 0))(x).dtype == torch.bfloat16
    output = torch.func.vmap(F.linear_gelu, (0, None))(x, torch.ones(5, 4, dtype=torch.bfloat16))
    assert output.shape == (0, 3, 5) and output.dtype == torch.bfloat16


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cuda_ops":
            self.names.append(function._schema.name.removeprefix("cuda_ops::"))
        return function(*args, **(kwargs or {}))


W, K = torch.randn(6, 4), torch.randn(5, 3, 2, 2)
ONCE = {
    "relu": (F.relu, (7,)),
    "relu of scalars": (F.relu, ()),
    "gelu": (F.gelu, (2, 4)),
    "relu_": (lambda x: F.relu(x, inplace=True), (3,)),
    "softmax": (lambda x: F.softmax(x, 0), (3, 4)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), (3, 4)),
    "logsumexp": (lambda x: F.logsumexp(x, 1), (3, 4)),
    "sum": (F.sum, (3, 4)),
    "amax": (lambda x: F.amax(x, (0, -1)), (3, 4, 2)),
    "std": (lambda x: F.std(x, 0), (3, 4)),
    "cumsum": (lambda x: F.cumsum(x, 0), (3, 4)),
    "concat": (lambda x: F.concat((x, torch.ones(2, 4)), 0), (3, 4)),
    "linear": (lambda x: F.linear(x, W), (4,)),
    "matmul": (lambda x: F.matmul(x, x.mT), (3, 4)),
    "matmul of batches": (lambda x: F.matmul(x, x.mT), (2, 3, 4)),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), (2, 3, 4)),
    "conv2d": (lambda x: F.conv2d(x, K), (2, 3, 5, 5)),
    "conv2d of an image": (lambda x: F.conv2d(x, K), (3, 5, 5)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (3, 5, 5)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (2, 3, 5, 5)),
    "group_norm": (lambda x: F.group_norm(x, 2), (3, 4, 5)),
    "embedding": (lambda x: F.embedding((x.abs() * 10).long() % 6, W), (3, 4)),
}


@pytest.mark.parametrize("name", ONCE)
def test_ops_that_take_a_batch_are_called_once(name):
    function, shape = ONCE[name]
    x = torch.randn((*shape[:1], 5, *shape[1:]))
    batch_dim = 1 if shape else 0
    expected = torch.stack([function(slice.clone()) for slice in x.unbind(batch_dim)])
    with Calls() as calls:
        actual = torch.func.vmap(function, batch_dim)(x.clone())
    assert len(calls.names) == 1, calls.names
    torch.testing.assert_close(actual, expected)


def test_gradients_of_these_are_too():
    x = torch.randn(5, 2, 3, 6, 6)

    def gradient(x):
        return torch.func.grad(lambda x: F.sum(F.softmax(F.max_pool2d(F.relu(F.conv2d(x, K)), 2), 1).square()))(x)

    with Calls() as calls:
        actual = torch.func.vmap(gradient)(x)
    assert len(calls.names) == len(set(calls.names)), calls.names
    torch.testing.assert_close(actual, torch.stack([gradient(image) for image in x]))


def test_what_a_slice_may_not_is_refused_of_a_batch():
    """A batch makes no rows of what has none."""
    x = torch.randn(4)
    with pytest.raises(RuntimeError, match="linear: expected input to have at least 1 dimension"):
        torch.func.vmap(lambda x: F.linear(x, W))(x)
    with pytest.raises(RuntimeError, match="layer_norm: expected"):
        torch.func.vmap(lambda x: F.layer_norm(x, (4, 3)))(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="matmul: expected"):
        torch.func.vmap(lambda x: torch.ops.cuda_ops.matmul_forward(x, W))(torch.randn(6, 6))


def test_ops_in_place():
    """The batch is written to; an argument without one has no room for it."""
    x = torch.randn(3, 4)
    y = x.clone()
    torch.func.vmap(lambda x: F.relu(x, inplace=True))(y)
    torch.testing.assert_close(y, x.relu())
    with pytest.raises(
        RuntimeError, match="Batching rule not implemented for cuda_ops::index_add_inplace, which writes"
    ):
        torch.func.vmap(lambda s: torch.ops.cuda_ops.index_add_inplace(x, 0, torch.tensor([0]), s, 1))(y[:, None])


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_add": lambda x: F.dropout_add(x, torch.zeros_like(x), 0.5),
    "add_layer_norm": lambda x: F.add_layer_norm(x, torch.zeros_like(x), (64,), p=0.5)[1],
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers(name):
    """As vmap's randomness says: refused, other ones for each slice, or the same ones."""
    x, function = torch.rand(64).expand(3, 64) + 1, RANDOM[name]
    with pytest.raises(RuntimeError, match=f"{name}: vmap: called random operation while in randomness error mode"):
        torch.func.vmap(function)(x)
    one, two, _ = torch.func.vmap(function, randomness="different")(x)
    assert not torch.equal(one, two)
    torch.manual_seed(0)
    one, two, three = torch.func.vmap(function, randomness="same")(x)
    torch.manual_seed(0)
    assert torch.equal(one, two) and torch.equal(one, three) and torch.equal(one, function(x[0]))
    one, two = torch.func.vmap(lambda _: function(x[0]), randomness="different")(torch.zeros(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("name", RANDOM)
def test_nothing_random_is_drawn_with_a_probability_of_0(name):
    x = torch.rand(2, 64)
    if name == "dropout":
        assert torch.equal(torch.func.vmap(lambda x: F.dropout(x, 0.5, training=False))(x), x)
    elif name == "attention":
        y = x.view(2, 1, 1, 8, 8)
        attention = torch.func.vmap(lambda y: F.scaled_dot_product_attention(y, y, y))
        torch.testing.assert_close(attention(y)[:, 0], F.scaled_dot_product_attention(*[y[:, 0]] * 3))
    elif name == "dropout_add":
        assert torch.equal(torch.func.vmap(lambda x: F.dropout_add(x, x, 0.0))(x), x + x)
    else:
        sum = torch.func.vmap(lambda x: F.add_layer_norm(x, x, (64,))[1])(x)
        assert torch.equal(sum, x + x)


def test_gradients_of_each_sample():
    """The use that vmap was made for."""
    model = torch.nn.Sequential(
        cuda_ops.nn.Conv2d(1, 4, 3), cuda_ops.nn.ReLU(), torch.nn.Flatten(), cuda_ops.nn.Linear(64, 3)
    )
    parameters, images, labels = dict(model.named_parameters()), torch.randn(5, 1, 6, 6), torch.arange(5) % 3

    def error(parameters, image, label):
        return F.cross_entropy(torch.func.functional_call(model, parameters, image[None]), label[None])

    grads = torch.func.vmap(torch.func.grad(error), (None, 0, 0))(parameters, images, labels)
    for i in range(5):
        for name, grad in torch.func.grad(error)(parameters, images[i], labels[i]).items():
            torch.testing.assert_close(grads[name][i], grad)


def test_compiled():
    x = torch.randn(4, 3, 5)
    function = torch.func.vmap(lambda x: F.softmax(F.linear(x, torch.ones(5, 5)), 0))
    torch.testing.assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


def test_every_op_with_tensors_has_a_kernel():
    """Else vmap warns, or, of ops that return lists, has none."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("cuda_ops::")]
    names = {s.name for s in schemas if any("Tensor" in str(a.type) for a in (*s.arguments, *s.returns))}
    assert "cuda_ops::attention_gradients" in names
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    without = {"cuda_ops::sgd_step_"}  # the optimizer's own, which calls sgd_
    assert {n for n in names if not has_kernel(n, "FuncTorchBatched")} == without
