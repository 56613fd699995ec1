"""The bank of a whole pass by itself, on rows that are leaves, against its definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depth_attention_floor import EPS, Order, Parts, assert_within, of_pass
from reslab.kernels.depth_attention.bank import Bank
from reslab.kernels.depth_attention.plan import Plan
from reslab.residuals.depth_attention import AttnResOptions
from test_depth_attention_kernel import DTYPES, HUGE, random

ORDER = Order(lanes=1, logs=True)
"""Scores are summed for all queries at once, channel by channel, and weights are made anew from ln sum exp s.

Both cost more than the definition's order, in float32, where weights are not equal: on average over rows 1.3 to 1.7
times as much at width 64, 1.8 to 3.7 at 256, two to six at 500 to 1 000, seven to twenty at 7 186. Where scores are
1e4, single rows of dv and single dw are hundreds of times as far off, and some rows thousands of times.
"""

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
    leaves: list[Tensor], options: AttnResOptions = OPTIONS["full"], grads: list[Tensor] | None = None
) -> None:
    """No row of any read or gradient, and no query's gradient, is farther off than twice what rounding costs."""
    plan = options.plan(len(leaves) - 2, keep=True)
    given_back = gradients_of_reads(leaves) if grads is None else grads
    found = through_bank(plan, leaves, given_back)
    assert_within(found, of_pass(plan, leaves, given_back, ORDER), leaves[1].dtype)


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
    """Backward its weight is exp(s - ln exp s), off by the rounding of s."""
    leaves = made(2, 6, 20, dtype, scale=30.0)
    grads = [torch.zeros_like(grad) if read else grad for read, grad in enumerate(gradients_of_reads(leaves))]
    found = through_bank(OPTIONS["full"].plan(2, keep=True), leaves, grads)
    assert torch.equal(found.h[0], leaves[1])
    torch.testing.assert_close(found.dv[0], grads[0], rtol=1e-5 + torch.finfo(dtype).eps, atol=0)
    assert torch.count_nonzero(found.dv[1:]) == 0
    assert torch.count_nonzero(found.dw) == 0
