"""What the specifications of index_add and scatter_add share, out of place and in place."""

import functools

import torch

import cuda_ops

from .opspec import Bad, OpSpec, Sample

KWARGS = {"alpha": -0.75}


def checked_index_add(input, dim, index, source, **kwargs):
    """PyTorch's looks at no index where input is empty."""
    rows = input.size(dim) if input.dim() else 1
    if input.numel() == 0 and index.numel() and not (index.min() >= 0 and index.max() < rows):
        raise IndexError(f"index out of range in {rows} rows")
    return torch.index_add(input, dim, index, source, **kwargs)


def scatter_add_of_a_part(input, dim, index, src):
    """torch.scatter_add, with a gradient of a `src` that is larger than `index`; PyTorch's has a wrong shape."""
    torch.sum(input.detach(), dim)  # which refuses what is no dimension, without an index too
    if index.numel() == 0:
        return input + 0 * src.sum()
    for d, size in enumerate(index.shape):
        src = src.narrow(d, 0, size)
    return torch.scatter_add(input, dim, index, src)


def in_place(function):
    """`function` on a copy, so that the sample's own tensor is left alone and may be a leaf."""

    @functools.wraps(function)
    def on_copy(input, *args, **kwargs):
        copy = input.clone()
        result = function(copy, *args, **kwargs)
        assert result is copy
        return result

    return on_copy


def row_sample(make, *shape, dim, count, name="", dtype=torch.int64, **kwargs):
    """A call of index_add."""
    source_shape = [*shape]
    source_shape[dim] = count
    index = make.integers(count, high=max(shape[dim], 1)).to(dtype)
    return Sample((make(*shape), dim, index, make(*source_shape)), kwargs, name or f"{count} into {shape} along {dim}")


def element_sample(make, *shape, dim, index_shape, src_shape=None, dtype=torch.int64, name=""):
    index = make.integers(*index_shape, high=max(shape[dim], 1)).to(dtype)
    src = make(*(src_shape or index_shape))
    return Sample((make(*shape), dim, index, src), name=name or f"{index_shape} into {shape} along {dim}")


def rows_of_several_kinds(make):
    # Rows of one element, of no whole vector, of vectors, of several segments; sums in chunks; several passes.
    for cols in [1, 3, 8, 100, 1600]:
        yield row_sample(make, 11, cols, dim=0, count=15)
    for rows, count in [(1, 1), (2, 130), (255, 64), (300, 1000), (70_000, 300), (3, 2100)]:
        yield row_sample(make, rows, 4, dim=0, count=count)
    yield row_sample(make, 4, 768, dim=0, count=300, name="long rows of several chunks")
    yield row_sample(make, 5, 6, 8, dim=1, count=9, dtype=torch.int32)
    yield row_sample(make, 5, 3, 4, dim=1, count=200, name="chunks in each of several parts")
    yield row_sample(make, 40, 7, dim=-1, count=30)
    yield row_sample(make, 9, dim=0, count=500)


def index_add_samples(make):
    yield from rows_of_several_kinds(make)
    yield row_sample(make, 6, 8, dim=0, count=10, **KWARGS)
    yield row_sample(make, 3, 6, 5, dim=1, count=100, **KWARGS)
    yield Sample((make(), 0, make.integers(1, high=1)[0], make()), KWARGS, "without dimensions")


def index_add_small(make):
    yield row_sample(make, 4, 3, dim=0, count=3, **KWARGS)
    yield row_sample(make, 2, 3, 2, dim=-2, count=4)


def index_add_empty(make):
    yield row_sample(make, 4, 3, dim=0, count=0)
    yield row_sample(make, 4, 0, dim=0, count=2)
    yield row_sample(make, 0, 3, dim=1, count=2)
    yield row_sample(make, 0, 3, dim=0, count=0)


def scatter_add_samples(make):
    for count in [1, 33, 1025, 5000]:
        yield element_sample(make, 40, dim=0, index_shape=(count,))
    yield element_sample(make, 30_000, dim=0, index_shape=(50,), name="fewer values than places")
    yield element_sample(make, 7, 9, dim=0, index_shape=(20, 9))
    yield element_sample(make, 7, 9, dim=1, index_shape=(7, 40), dtype=torch.int32)
    yield element_sample(make, 5, 6, 8, dim=-2, index_shape=(5, 11, 8))
    yield element_sample(make, 1, 300, dim=0, index_shape=(65, 300))
    yield element_sample(make, 7, 9, dim=0, index_shape=(4, 5), src_shape=(6, 8), name="a part of both")
    yield element_sample(make, 7, 9, dim=1, index_shape=(4, 20), src_shape=(6, 20), name="a part of both along 1")
    yield Sample((make(), 0, make.integers(1, high=1)[0], make()), name="without dimensions")
    for sample in rows_of_several_kinds(make):
        input, dim, index, source = sample.args
        shape = [1] * input.dim()
        shape[dim] = -1
        yield Sample((input, dim, index.view(shape).expand(source.shape), source), name=f"expanded: {sample.name}")


def scatter_add_small(make):
    yield element_sample(make, 4, 3, dim=0, index_shape=(5, 3))
    yield element_sample(make, 3, 2, dim=1, index_shape=(2, 3), src_shape=(3, 4))
    index = make.integers(3, high=4).view(3, 1).expand(3, 2)
    yield Sample((make(4, 2), 0, index, make(3, 2)), name="expanded")


def scatter_add_empty(make):
    yield element_sample(make, 4, 3, dim=0, index_shape=(0, 3))
    yield element_sample(make, 4, 3, dim=0, index_shape=(0,), src_shape=(1, 3))
    yield element_sample(make, 4, 0, dim=0, index_shape=(2, 0))


def index_add_ops(make):
    ops, index = torch.ops.cuda_ops, make.integers(6, high=4)
    yield ops.index_add_forward, (make(4, 5), 0, index, make(6, 5), 0.5)
    yield ops.index_add_backward, (make(4, 5), 0, index, 0.5)
    yield ops.index_add_backward, (make(5, 4).t(), 0, index.int(), 1.0)
    yield ops.index_add_inplace, (make(4, 5), 0, index, make(6, 5), 0.5)


def scatter_add_ops(make):
    ops, index = torch.ops.cuda_ops, make.integers(6, 5, high=4)
    yield ops.scatter_add_forward, (make(4, 5), 0, index, make(6, 5))
    yield ops.scatter_add_backward, (make(4, 5), 0, index, [6, 5])
    yield ops.scatter_add_backward, (make(5, 4).t(), 0, index[:, :3], [7, 4])
    yield ops.scatter_add_inplace, (make(4, 5), 0, index, make(6, 5))


def caller(name, source_name):
    """A call of the functional that fits but for what is given."""
    function = getattr(cuda_ops.functional, name)

    def call(device, dim=0, index=(0, 1), **changed):
        tensors = {"input": torch.zeros(3), source_name: torch.ones(2), **changed}
        tensors = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in tensors.items()
        }
        index = torch.tensor(index, device=device) if isinstance(index, (tuple, list)) else index
        return function(dim=dim, index=index, **tensors)

    return call


def scatter_spec(name):
    """The specification of cuda_ops.functional.<name>."""
    base, is_rows = name.removesuffix("_"), name.startswith("index")
    source = "source" if is_rows else "src"
    call = caller(name, source)
    function, reference = getattr(cuda_ops.functional, name), checked_index_add if is_rows else scatter_add_of_a_part
    shapes = "source to have the shape of input" if is_rows else "index to be no larger than src"
    bad = [
        Bad(
            "integers",
            lambda device: call(device, input=torch.zeros(3, dtype=torch.int64)),
            RuntimeError,
            f"^{name}: expected input to be floating point, got int64",
        ),
        Bad(
            "values of another dtype",
            lambda device: call(device, **{source: torch.ones(2, dtype=torch.float64)}),
            RuntimeError,
            f"^{name}: expected {source} to have the dtype of input",
        ),
        Bad(
            "floating indices",
            lambda device: call(device, index=(0.0, 1.0)),
            RuntimeError,
            f"^{name}: expected index to be int64 or int32, got float32",
        ),
        Bad(
            "no such dimension",
            lambda device: call(device, dim=1),
            IndexError,
            rf"^{name}: expected dim to be in \[-1, 0\] for an input of shape \[3\], got 1",
        ),
        Bad(
            "a broken dimension",
            lambda device: call(device, dim=0.5),
            TypeError,
            f"^{name}: expected dim to be an int, got 0.5",
        ),
        Bad(
            "fewer values than indices",
            lambda device: call(device, index=(0, 1, 2)),
            RuntimeError,
            f"^{name}: expected {shapes}",
        ),
        Bad(
            "values of more dimensions",
            lambda device: call(device, **{source: torch.ones(2, 1)}),
            RuntimeError,
            f"^{name}: expected {shapes}",
        ),
        Bad(
            "no tensor",
            lambda device: call(device, **{source: 1.0}),
            TypeError,
            f"^{base}: expected {source} to be a Tensor, got float",
        ),
    ]
    if is_rows:
        bad += [
            Bad(
                "indices of two dimensions",
                lambda device: call(device, index=((0, 1),)),
                IndexError,
                rf"^{name}: expected index to have 1 dimension, got shape \[1, 2\]",
            ),
            Bad(
                "a factor that is none",
                lambda device: call(device, alpha="1"),
                TypeError,
                f"^{name}: expected alpha to be a number, got '1'",
            ),
        ]
    kinds = (index_add_samples, index_add_small, index_add_empty, index_add_ops)
    if not is_rows:
        kinds = (scatter_add_samples, scatter_add_small, scatter_add_empty, scatter_add_ops)
    samples, small, empty, ops = kinds
    return OpSpec(
        name=name,
        function=in_place(function) if name.endswith("_") else function,
        reference=reference,
        samples=samples,
        small_samples=small,
        empty_samples=empty,
        op_samples=ops,
        gradgrad=True,
        bad=bad,
        stem=base,
    )
