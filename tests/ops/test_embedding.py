"""embedding and token_position_embedding beyond their specifications: bad indices, rows that are not finite, float32
weights beside half outputs, the module."""

import pytest
import torch
from support.opspec import assert_close

import cuda_ops
from cuda_ops.functional import embedding, token_position_embedding


def lookups(weight):
    """Both functions, of indices in rows of two."""
    places = torch.zeros(2, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return [
        ("embedding", "input", lambda i: embedding(i, weight)),
        ("token_position_embedding", "tokens", lambda i: token_position_embedding(i, weight, places)),
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
def test_bad_index_is_an_error_on_the_cpu(bad, dtype):
    for op, argument, look_up in lookups(torch.ones(3, 4)):
        message = rf"^{op}: expected {argument} to be in \[0, 3\), got {bad} at position 1$"
        with pytest.raises(IndexError, match=message):
            look_up(torch.tensor([[0, bad]], dtype=dtype))


def test_an_empty_table_has_no_rows():
    with pytest.raises(IndexError, match=r"expected input to be in \[0, 0\), got 0 at position 0"):
        embedding(torch.zeros(1, dtype=torch.int64), torch.ones(0, 4))


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_bad_index_on_cuda_is_no_address_and_is_told_later(bad):
    weight = torch.ones(3, 20, device="cuda", requires_grad=True)
    indices = torch.tensor([[2, bad], [0, 2]], device="cuda")
    for op, argument, look_up in lookups(weight):
        output = look_up(indices)
        torch.cuda.synchronize()
        assert output[0, 1].isnan().all()
        assert (output[[0, 1, 1], [0, 0, 1]] == 1).all()
        message = rf"^{op}: expected {argument} to be in \[0, 3\), got {bad} at position 1 of an earlier call"
        with pytest.raises(IndexError, match=message):
            look_up(indices[1:])
        look_up(indices[1:])
    grad = torch.ops.cuda_ops.embedding_backward(
        torch.ones(2, 2, 20).cuda(), indices, [3, 20], torch.float32, -1, False
    )
    assert grad[:, 0].tolist() == [1, 0, 2]


@pytest.mark.cuda
def test_bad_index_raises_at_once_where_the_environment_asks(monkeypatch):
    monkeypatch.setenv("CUDA_OPS_CHECK_INDICES", "1")
    for _, _, look_up in lookups(torch.ones(3, 20, device="cuda")):
        with pytest.raises(IndexError, match=r"got 7 at position 0$"):
            look_up(torch.tensor([[7, 0]], device="cuda"))


@pytest.mark.parametrize("cols", [3, 16])
def test_rows_that_are_not_finite(device, cols):
    weight = torch.ones(3, cols, device=device)
    weight[1] = float("nan")
    weight[2, 0] = float("inf")
    indices = torch.tensor([[0, 1], [2, 0]], device=device)
    for _, _, look_up in lookups(weight):
        torch.testing.assert_close(look_up(indices), weight[indices], equal_nan=True)
    leaf = torch.ones(3, cols, device=device, requires_grad=True)
    embedding(indices, leaf).backward(weight[indices])
    torch.testing.assert_close(leaf.grad[1:], weight[1:], equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cols", [5, 768])
@pytest.mark.parametrize("batch", [2, 100])
def test_half_outputs_of_float32_weights(dtype, cols, batch):
    tokens = torch.randint(9, (batch, 6), device="cuda")
    token_weight = torch.randn(9, cols, device="cuda", requires_grad=True)
    position_weight = torch.randn(8, cols, device="cuda", requires_grad=True)
    output = token_position_embedding(tokens, token_weight, position_weight, dtype)
    exact = token_weight.double()[tokens] + position_weight[:6].double()
    assert output.dtype == dtype
    assert torch.equal(output, exact.float().to(dtype))
    grad_output = torch.randn(batch, 6, cols, device="cuda").to(dtype)
    grads = torch.autograd.grad(output, (token_weight, position_weight), grad_output, create_graph=True)
    expected = torch.autograd.grad(exact, (token_weight, position_weight), grad_output.double())
    for grad, wanted in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float32
        assert_close(grad, wanted, 2e-6)


# Rows that many tokens name are added up by chunks.
@pytest.mark.parametrize("cols", [5, 768])
@pytest.mark.parametrize("count", [7, 2000])
def test_a_gradient_that_is_added_to(device_dtype, cols, count):
    """To the last bit, in the dtype of the table; rows that no index names stay as they are."""
    device, dtype = device_dtype
    indices = torch.randint(0, 11, (count,), device=device)
    grad_output = torch.randn(count, cols, device=device).to(dtype)
    for table in {dtype, torch.float32} if dtype in (torch.float16, torch.bfloat16) else {dtype}:
        before = torch.randn(20, cols, device=device).to(table)
        before[15] = float("nan")
        added = torch.ops.cuda_ops.embedding_backward(grad_output, indices, [20, cols], table, -1, False)

        grad_weight = before.clone()
        torch.ops.cuda_ops.embedding_backward_add(grad_weight, grad_output, indices)
        assert torch.equal(grad_weight[11:].nan_to_num(7.0), before[11:].nan_to_num(7.0))
        if table == grad_output.dtype and table in (torch.float16, torch.bfloat16):
            assert_close(grad_weight[:11], (before.double() + added.double())[:11], 1e-2)
        else:
            assert torch.equal(grad_weight[:11], (before + added)[:11])
        rows_apart = torch.stack([before, before], 1)[:, 0]
        torch.ops.cuda_ops.embedding_backward_add(rows_apart, grad_output, indices)
        assert_close(rows_apart[:11], grad_weight[:11].double(), 1e-2)


def test_the_module_is_that_of_pytorch(device):
    for options in ({}, {"padding_idx": 3}, {"scale_grad_by_freq": True}):
        ours, theirs = cuda_ops.nn.Embedding(7, 6, **options), torch.nn.Embedding(7, 6, **options)
        ours.load_state_dict(theirs.state_dict())
        assert repr(ours) == repr(theirs)
        indices = torch.randint(7, (4, 5))
        grad_output = torch.randn(4, 5, 6)
        for module, where in ((ours, device), (theirs, "cpu")):
            module.to(where)(indices.to(where)).backward(grad_output.to(where))
        torch.testing.assert_close(ours.weight.grad.cpu(), theirs.weight.grad)
    pretrained = cuda_ops.nn.Embedding.from_pretrained(torch.ones(2, 3))
    assert type(pretrained) is cuda_ops.nn.Embedding and not pretrained.weight.requires_grad
    with pytest.raises(NotImplementedError, match="max_norm"):
        cuda_ops.nn.Embedding(2, 3, max_norm=1.0)(torch.zeros(1, dtype=torch.int64))


OPTIONS = [
    {"padding_idx": 0},
    {"padding_idx": 1},
    {"scale_grad_by_freq": True},
    {"padding_idx": -3, "scale_grad_by_freq": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_gradients_that_are_not_those_of_the_function(device, options):
    indices = torch.tensor([[0, 1, 0], [2, 2, 0]], device=device)
    weight = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    grad_output = torch.randn(2, 3, 5, dtype=torch.float64, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(embedding(indices, weight, **options), weight, grad_output, create_graph=True)
    factors = torch.ones(2, 3, 1, dtype=torch.float64, device=device)
    if "scale_grad_by_freq" in options:
        factors = torch.tensor([[3.0, 1, 3], [2, 2, 3]], dtype=torch.float64, device=device).reciprocal().unsqueeze(-1)
    if "padding_idx" in options:
        factors = factors * (indices != options["padding_idx"] % 4).unsqueeze(-1)
    expected = torch.zeros_like(weight).index_add(0, indices.view(-1), (grad_output * factors).view(6, 5))
    torch.testing.assert_close(grad, expected)
    direction = torch.randn(4, 5, dtype=torch.float64, device=device)
    (second,) = torch.autograd.grad(grad, grad_output, direction)
    torch.testing.assert_close(second, torch.autograd.grad(expected, grad_output, direction)[0])
