"""What the specifications of the reductions share."""

import torch

import cuda_ops

from .opspec import Bad, OpSpec, Sample, bad

# (shape, dim). Rows that a thread, a part of a warp, a warp, a block and several blocks have, of vectors and not;
# columns of vectors and of single elements, of one tile and several, in one part and several; both; runs in odd order.
CASES = [
    ((1,), 0),
    ((7,), None),
    ((33,), -1),
    ((1025,), None),
    ((20_011,), None),
    ((5, 1), 1),
    ((5, 3), 1),
    ((6, 8), 1),
    ((3, 31), 1),
    ((700, 64), -1),
    ((4, 1000), 1),
    ((2, 1027), 1),
    ((2, 20_000), 1),
    ((4, 6), 0),
    ((33, 31), 0),
    ((40, 264), 0),
    ((700, 3), 0),
    ((2, 5, 7), 1),
    ((3, 17, 24), 1),
    ((2, 2100, 8), -2),
    ((3, 4, 5, 6), (0, 2, 3)),  # two runs
    ((3, 4, 5, 6), (0, 2)),
    ((4, 3, 40, 2), (2, 0)),
    ((2, 3, 2, 3, 2, 3), (0, 2, 4)),  # three
    ((2, 1, 3), 1),
    ((2, 3, 4), (0, 1, 2)),
    ((3, 5), ()),
]


def reduction_spec(name, reference, parameters=({},), *, values="any", dims="any", cases=CASES, empty=True, **more):
    """The specification of cuda_ops.functional.<name>(input, dim=..., keepdim=..., **parameters). `parameters`: the
    dictionaries to sample; `values`: "any", "distinct" or "near 1"; `dims`: "one" of argmax and argmin; `empty`:
    whether the reduction of no elements has a value."""
    function = getattr(cuda_ops.functional, name)
    if dims == "one":
        cases = [case for case in cases if not isinstance(case[1], tuple)]

    def tensor(make, *shape):
        if dims == "one":  # an index has no gradient
            return make.distinct(*shape, requires_grad=False)
        if values == "distinct":
            return make.distinct(*shape)
        return make(*shape, low=0.75, high=1.25) if values == "near 1" else make(*shape)

    def samples(make):
        for shape, dim in cases:
            keywords = {"dim": dim, **parameters[0]}
            yield Sample((tensor(make, *shape),), keywords, name=f"{shape} along {dim}")
        for keywords in parameters:
            for shape, dim in [((3, 50), 1), ((2, 50, 24), 1)]:
                for keepdim in (False, True):
                    yield Sample(
                        (tensor(make, *shape),), {"dim": dim, "keepdim": keepdim, **keywords}, name=f"{keywords}"
                    )

    def small_samples(make):
        for keywords in parameters:
            yield Sample((tensor(make, 2, 3),), {"dim": 1, **keywords})
            yield Sample((tensor(make, 2, 3, 2),), {"dim": 1, "keepdim": True, **keywords})
            yield Sample((tensor(make, 2, 3),), keywords)
        if dims != "one":
            yield Sample((tensor(make, 2, 3, 2),), {"dim": (0, 2), **parameters[0]})

    def empty_samples(make):
        for shape, dim in [((0, 3), 1), ((3, 0), 0), *([((0, 3), 0), ((2, 0, 3), 1), ((0,), None)] if empty else [])]:
            input = make(*shape, requires_grad=False) if dims == "one" else make(*shape)
            yield Sample((input,), {"dim": dim, **parameters[0]}, name=f"{shape} along {dim}")

    forward = getattr(torch.ops.cuda_ops, f"{name}_forward")
    arguments = more.pop("arguments")  # (dim, keepdim) -> the rest of the op's

    def op_samples(make):
        for keepdim in (False, True):
            yield forward, (make(3, 5), *arguments(1, keepdim))
            yield forward, (make(3, 5).t(), *arguments(0, keepdim))
        yield forward, (make(2, 3, 4, 5).to(memory_format=torch.channels_last), *arguments(2, False))

    empty_bad = [
        bad(
            "no elements",
            lambda ones: function(ones(2, 0), dim=1),
            f"{name}: expected the dimensions that are reduced to have elements, got an input of shape ",
            IndexError,
        )
    ]
    return OpSpec(
        name=name,
        function=function,
        reference=reference,
        samples=samples,
        small_samples=small_samples,
        empty_samples=empty_samples,
        op_samples=op_samples,
        gradgrad=more.pop("gradgrad", True),
        bad=[
            Bad(
                "integers",
                lambda device: function(torch.arange(3, device=device)),
                RuntimeError,
                f"{name}: expected input to be floating point, got int64",
            ),
            Bad(
                "no tensor",
                lambda device: function(1.0),
                TypeError,
                f"{name}: expected input to be a Tensor, got float",
            ),
            bad(
                "no such dimension",
                lambda ones: function(ones(2, 3), dim=2),
                rf"{name}: expected dim to be in \[-2, 1\] for an input of shape \[2, 3\], got 2",
                IndexError,
            ),
            bad(
                "a fraction of a dimension",
                lambda ones: function(ones(2, 3), dim=0.5),
                f"{name}: expected dim to be an int",
                TypeError,
            ),
            *([] if empty else empty_bad),
            *more.pop("bad", []),
            *(
                []
                if dims == "one"
                else [
                    bad(
                        "a dimension twice",
                        lambda ones: function(ones(2, 3), dim=(1, -1)),
                        rf"{name}: expected dim to name each dimension once, got \[1, -1\]",
                    )
                ]
            ),
        ],
        **more,
    )
