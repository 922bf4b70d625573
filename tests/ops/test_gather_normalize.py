"""gather_normalize beyond its specification: bad indices, and the memory format of what comes out."""

import pytest
import torch

from cuda_ops.functional import gather_normalize


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
def test_bad_index_is_an_error_on_the_cpu(bad, dtype):
    images = torch.zeros(3, 4, dtype=torch.uint8)
    with pytest.raises(IndexError, match=rf"expected indices to be in \[0, 3\), got {bad} at position 1$"):
        gather_normalize(images, torch.tensor([0, bad], dtype=dtype), 0.0, 1.0)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_bad_index_on_cuda_is_no_address_and_is_told_later(bad):
    images = torch.full((3, 20), 255, dtype=torch.uint8, device="cuda")
    labels = torch.tensor([4, 5, 6], device="cuda")
    indices = torch.tensor([2, bad, 0], device="cuda")
    batch, picked = gather_normalize(images, indices, 0.0, 1.0, labels=labels)
    torch.cuda.synchronize()
    assert batch[1].isnan().all()
    assert (batch[[0, 2]] == 1).all()
    assert picked.tolist() == [6, -1, 4]
    with pytest.raises(IndexError, match=rf"indices to be in \[0, 3\), got {bad} at position 1 of an earlier call"):
        gather_normalize(images, indices[:1], 0.0, 1.0)
    gather_normalize(images, indices[:1], 0.0, 1.0)


@pytest.mark.cuda
def test_bad_index_raises_at_once_where_the_environment_asks(monkeypatch):
    monkeypatch.setenv("CUDA_OPS_CHECK_INDICES", "1")
    images = torch.zeros(3, 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(IndexError, match=r"got 7 at position 0$"):
        gather_normalize(images, torch.tensor([7], device="cuda"), 0.0, 1.0)


def test_nothing_to_gather_from(device):
    empty = torch.zeros(0, 4, dtype=torch.uint8, device=device)
    assert gather_normalize(empty, torch.zeros(0, dtype=torch.int64, device=device), 0.0, 1.0).shape == (0, 4)


def test_the_batch_keeps_the_memory_format(device):
    images = torch.randint(256, (5, 3, 4, 6), dtype=torch.uint8, device=device)
    indices = torch.tensor([4, 0], device=device)
    for layout in (torch.contiguous_format, torch.channels_last):
        batch = gather_normalize(images.contiguous(memory_format=layout), indices, 0.0, 1.0)
        assert batch.is_contiguous(memory_format=layout)


def test_a_single_picture_with_a_gap_behind_it(device):
    """One channel of one image of three: contiguous, as there is no next image, and 12 elements to it."""
    images = torch.arange(12, dtype=torch.uint8, device=device).view(1, 3, 2, 2)[:, 1:2]
    assert images.is_contiguous() and images.stride(0) == 12
    indices = torch.zeros(3, dtype=torch.int64, device=device)
    batch = gather_normalize(images, indices, 0.0, 1 / 255)
    assert batch.is_contiguous() and batch.stride(0) == 4
    torch.testing.assert_close(batch, images.float().expand(3, 1, 2, 2))
    torch.library.opcheck(torch.ops.cuda_ops.gather_normalize_forward, (images, indices, 0.0, 1.0, None, torch.float32))


def test_default_dtype(device):
    images = torch.zeros(2, 4, dtype=torch.uint8, device=device)
    assert gather_normalize(images, torch.tensor([1], device=device), 0.0, 1.0).dtype == torch.get_default_dtype()


@pytest.mark.parametrize("rows", [0, 2])
def test_numbers_that_stand_for_no_dtype_are_refused(rows):
    """Of a raw call, which may hold any, before anything of that dtype is made."""
    images = torch.zeros(rows, 3, dtype=torch.uint8)
    indices = torch.zeros(min(rows, 1), dtype=torch.int64)
    for number, got in ((99, "the number 99"), (-1, "the number -1"), (torch.int64, "int64"), (torch.quint8, "quint8")):
        with pytest.raises(RuntimeError, match=f"gather_normalize: expected dtype to be floating point, got {got}"):
            torch.ops.cuda_ops.gather_normalize_forward(images, indices, 0.0, 1.0, None, number)
