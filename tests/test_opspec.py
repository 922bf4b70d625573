"""The judge is judged: what assert_close must not let pass, and what it must."""

import pytest
import torch
from support.opspec import RELATIVE_NORM, assert_close

TOLERANCE = RELATIVE_NORM[torch.float32]
NAN, INF = float("nan"), float("inf")


def values(**replaced):
    """1000 numbers around 1, of which some are replaced by position."""
    tensor = torch.linspace(0.5, 1.5, 1000, dtype=torch.float64)
    for position, value in replaced.items():
        tensor[int(position[1:])] = value
    return tensor


WRONG = {
    "nan": (values(_7=NAN).float(), values(), "values differ|not finite"),
    "all nan": (torch.full((1000,), NAN), values(), "not finite"),
    "inf": (values(_7=INF).float(), values(), "not finite"),
    "a number for nan": (values().float(), values(_7=NAN), "non-finite values differ"),
    "the other inf": (values(_7=-INF).float(), values(_7=INF), "non-finite values differ"),
    "inf for nan": (values(_7=INF).float(), values(_7=NAN), "non-finite values differ"),
    "shape": (values()[None].float(), values(), "shape"),
    "zeros": (torch.zeros(1000), values(), "relative norm"),
    "something for zeros": (torch.full((1000,), 1e-3), torch.zeros(1000, dtype=torch.float64), "relative norm"),
    "all a little": (values().float() * (1 + 2 * TOLERANCE), values(), "relative norm"),
    "one element": (values(_7=1e3).float(), values(), "relative norm"),
    "one element, whose share of the norm is small": (
        torch.cat([values()] * 400).index_fill(0, torch.tensor(7), 0.507 + 1e-4).float(),
        torch.cat([values()] * 400),
        "element 7",
    ),
    "an index": (torch.tensor([1, 2]), torch.tensor([1, 3]), "differs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails(name):
    actual, expected, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, expected, TOLERANCE)


@pytest.mark.parametrize("dtype", RELATIVE_NORM, ids=str)
def test_rounding_passes(dtype):
    for expected in (values(), values(_3=NAN, _4=INF, _5=-INF), values()[:0], torch.zeros(3, dtype=torch.float64)):
        assert_close(expected.to(dtype), expected, RELATIVE_NORM[dtype])


def test_what_no_half_can_hold_is_an_infinity():
    assert_close(torch.tensor([INF, 1.0]).half(), torch.tensor([1e6, 1.0], dtype=torch.float64), 1e-3)
