"""The bank of a whole pass by itself, on rows that are leaves, against its definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depth_attention_floor import EPS, Parts, assert_within, of_pass
from reslab.kernels.depth_attention.bank import Bank
from reslab.kernels.depth_attention.plan import Plan
from reslab.residuals.depth_attention import AttnResOptions
from test_depth_attention_kernel import DTYPES, HUGE, random

OPTIONS = {
    "full": AttnResOptions(),
    "block": AttnResOptions(block=3),
    "window": AttnResOptions(window=3),
    "stride": AttnResOptions(stride=2),
}


def made(sublayers: int, tokens: int, width: int, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Queries [L, d] whose scores have about `scale`, and what each row is written with [T, d]."""
    queries = scale * width**-0.5 * random(sublayers + 1, width, seed=99)
    return [queries, *(random(tokens, width, seed=row).to(dtype) for row in range(sublayers + 1))]


def gradients_of_reads(leaves: list[Tensor]) -> list[Tensor]:
    """Of the reads [L, T, d], as the loss of a pass would send them."""
    return list(random(len(leaves[0]), *leaves[1].shape, seed=7).to(leaves[1].dtype))


def through_bank(plan: Plan, leaves: list[Tensor], grads: list[Tensor]) -> Parts:
    queries, *updates = copies = [leaf.clone().requires_grad_() for leaf in leaves]
    bank, token = Bank.start(plan, updates[0], queries, EPS, True)
    reads = [bank.read(token, 0)]
    for row, update in enumerate(updates[1:], 1):
        token = bank.write(token, row, update)
        reads.append(bank.read(token, row))
    by_query, *by_row = torch.autograd.grad(reads, copies, grads)
    return Parts(torch.stack(reads).detach(), by_query, torch.stack(by_row))


def assert_at_the_rounding_floor(
    leaves: list[Tensor],
    options: AttnResOptions = OPTIONS["full"],
    grads: list[Tensor] | None = None,
    times: float = 2,
) -> None:
    """No row of any read or gradient, and no query's gradient, is farther off than twice what rounding costs,
    or other `times`."""
    plan = options.plan(len(leaves) - 2, keep=True)
    given_back = gradients_of_reads(leaves) if grads is None else grads
    found = through_bank(plan, leaves, given_back)
    assert_within(found, of_pass(plan, leaves, given_back), leaves[1].dtype, times)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    sublayers=st.integers(3, 12),
    tokens=st.integers(1, 20),
    width=st.sampled_from([1, 3, 80]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    options=st.sampled_from(list(OPTIONS)),
)
def test_random_passes(sublayers: int, tokens: int, width: int, dtype: torch.dtype, scale: float, options: str) -> None:
    assert_at_the_rounding_floor(made(sublayers, tokens, width, dtype, scale), OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("width", [64, 256, 1000])
def test_wide_rows(width: int, options: str, dtype: torch.dtype) -> None:
    assert_at_the_rounding_floor(made(12, 9, width, dtype), OPTIONS[options])


@pytest.mark.parametrize("width", [64, 256, 1000])
def test_wide_rows_where_one_source_has_nearly_all_weight(width: int) -> None:
    """<g, v_i> - <g, h> is a small difference there, of products that round apart: single rows of dv are farther off
    than with the definition's sum over sources, which takes all rows before it knows any gradient."""
    assert_at_the_rounding_floor(made(12, 9, width, torch.float32, scale=30.0), OPTIONS["stride"], times=12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sublayers", "width"), [(128, 3), (48, 80), (8, 1000), (2, 7186), (1, 1)])
def test_awkward_shapes(sublayers: int, width: int, dtype: torch.dtype) -> None:
    """129 sources at the most."""
    assert_at_the_rounding_floor(made(sublayers, 2, width, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_ten_thousand(dtype: torch.dtype) -> None:
    assert_at_the_rounding_floor(made(6, 9, 16, dtype, scale=1e4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ["full", "block"])
def test_rows_of_zeros(options: str, dtype: torch.dtype) -> None:
    leaves = made(6, 5, 16, dtype)
    leaves[1][2] = 0
    leaves[2].zero_()
    assert_at_the_rounding_floor(leaves, OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ["full", "block"])
def test_rows_of_huge_values(options: str, dtype: torch.dtype) -> None:
    """With gradients at that token, and without, where the other tokens' share of the queries' gradients is seen."""
    leaves = made(6, 5, 16, dtype)
    leaves[3][4] *= HUGE[dtype]
    grads = gradients_of_reads(leaves)
    assert_at_the_rounding_floor(leaves, OPTIONS[options], grads)
    for grad in grads:
        grad[4] = 0
    assert_at_the_rounding_floor(leaves, OPTIONS[options], grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_source_is_passed_through(dtype: torch.dtype) -> None:
    leaves = made(2, 6, 20, dtype, scale=30.0)
    grads = [torch.zeros_like(grad) if read else grad for read, grad in enumerate(gradients_of_reads(leaves))]
    found = through_bank(OPTIONS["full"].plan(2, keep=True), leaves, grads)
    assert torch.equal(found.h[0], leaves[1])
    assert torch.equal(found.dv[0], grads[0])
    assert torch.count_nonzero(found.dv[1:]) == 0
    assert torch.count_nonzero(found.dw) == 0
