"""The measure that kernels of depth attention are held to: it is the definition, and finds what is wrong."""

from collections.abc import Callable

import pytest
import torch

from depth_attention_floor import Parts, assert_within, of_read
from test_depth_attention_kernel import DTYPES, made, of_definition, random, with_huge_values


def by_definition(leaves: list[torch.Tensor], grad: torch.Tensor, dtype: torch.dtype) -> Parts:
    h, dw, *dv = of_definition(leaves, dtype, grad)
    return Parts(h, dw, torch.stack(dv))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_the_first_draw_is_the_definition(scale: float) -> None:
    leaves, grad = made(5, 7, 6, scale=scale), random(7, 6, seed=7)
    for draws, exact in zip(of_read(leaves, grad), by_definition(leaves, grad, torch.float64), strict=True):
        torch.testing.assert_close(draws[0], exact, rtol=1e-9, atol=1e-12)


def test_other_draws_are_off_as_float32_is() -> None:
    leaves, grad = made(5, 7, 6), random(7, 6, seed=7)
    for first, *others in of_read(leaves, grad):
        off = [float((draw - first).norm() / first.norm()) for draw in others]
        assert len(set(off)) == len(off) >= 16
        assert all(2**-25 < each < 2**-19 for each in off)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_definition_is_within_it(dtype: torch.dtype, scale: float) -> None:
    """In float32, its rows rounded once."""
    leaves, grad = made(12, 20, 16, dtype, scale), random(20, 16, seed=7).to(dtype)
    h, dw, dv = by_definition(leaves, grad, torch.float32)
    found = Parts(h.to(dtype), dw, dv.to(dtype))
    assert_within(found, of_read(leaves, grad), dtype, times=1.5)


def _a_row_of_h_off(parts: Parts) -> None:
    parts.h[1] *= 1 + 2**-5


def _garbage_in_a_row_of_dv(parts: Parts) -> None:
    parts.dv[0, 1] = 1.0


def _query_summed_in_sixteen_bits(parts: Parts) -> None:
    parts.dw.copy_(parts.dw.bfloat16())


def _nan(parts: Parts) -> None:
    parts.dv[1, 2, 3] = torch.nan


DEFECTS = [_a_row_of_h_off, _garbage_in_a_row_of_dv, _query_summed_in_sixteen_bits, _nan]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoil", DEFECTS)
def test_a_defect_beside_a_huge_row_is_found(spoil: Callable[[Parts], None], dtype: torch.dtype) -> None:
    leaves, (_, grad) = with_huge_values(dtype)
    h, dw, dv = by_definition(leaves, grad, torch.float32)
    found = Parts(h.to(dtype), dw, dv.to(dtype))
    assert_within(found, of_read(leaves, grad), dtype)
    spoil(found)
    with pytest.raises(AssertionError, match="times as far off as rounding costs"):
        assert_within(found, of_read(leaves, grad), dtype)
