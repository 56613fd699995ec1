"""The Triton kernels of depth attention, interpreted on the CPU.

`test_depth_attention_triton` runs this in a process of its own, as Triton has to know before it is imported that it is
to interpret.
"""

import pytest
import torch
from torch import Tensor

from reslab.kernels.depth_attention import depth_attention, op, triton_op
from test_depth_attention_kernel import DTYPES, EPS, assert_at_the_rounding_floor, made, random, with_gradients

TOGETHER = triton_op.TOGETHER


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "implementation", lambda source: "triton")
    monkeypatch.setattr(triton_op, "TOGETHER", 4)  # faster than 2 where interpreted


def gradients(leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """h, and what it makes of `grad`."""
    return with_gradients(lambda query, sources: depth_attention(query, sources, EPS), leaves, grad)


@pytest.mark.parametrize("width", [1, 3, 80, 1000])
@pytest.mark.parametrize("count", [1, 2, 29])
def test_shapes(count: int, width: int) -> None:
    assert_at_the_rounding_floor(made(count, 2, width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_dtypes(dtype: torch.dtype, scale: float) -> None:
    assert_at_the_rounding_floor(made(5, 4, 80, dtype, scale))


def test_as_many_sources_at_once_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_op, "TOGETHER", TOGETHER)
    assert_at_the_rounding_floor(made(5, 3, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_wider_than_a_block(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(triton_op, "WIDEST", 16)
    assert_at_the_rounding_floor(made(5, 3, 40, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_ten_thousand(dtype: torch.dtype) -> None:
    assert_at_the_rounding_floor(made(6, 3, 16, dtype, scale=1e4))


def test_rows_of_zeros_and_rows_of_huge_values() -> None:
    leaves = made(4, 6, 16)
    with torch.no_grad():
        leaves[1][2] = 0
        leaves[2].zero_()
        leaves[3][4] *= 1e15
    assert_at_the_rounding_floor(leaves)


def test_no_tokens() -> None:
    leaves = made(3, 0, 8)
    out, by_query, *by_sources = gradients(leaves, random(0, 8))
    assert out.shape == (0, 8)
    assert torch.count_nonzero(by_query) == 0
    assert all(gradient.shape == (0, 8) for gradient in by_sources)


def test_rows_apart_are_read_where_they_are() -> None:
    query, *sources = (leaf.detach() for leaf in made(3, 2, 16))
    apart = [torch.cat([source, random(2, 3)], 1)[:, :16] for source in sources]
    apart[1] = torch.cat([random(2, 1), sources[1], random(2, 2)], 1)[:, 1:17]
    assert all(triton_op._dense(source) is source for source in apart)
    across = [source.T.contiguous().T for source in sources]
    grad = random(2, 16)
    plain = triton_op.forward(query, sources, EPS)
    for others in (apart, across):
        found = triton_op.forward(query, others, EPS)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        by_query, by_sources = triton_op.backward(grad, query, others, *found[1:])
        plain_query, plain_sources = triton_op.backward(grad, query, sources, *plain[1:])
        assert torch.equal(by_query, plain_query)
        assert all(torch.equal(a, b) for a, b in zip(by_sources, plain_sources, strict=True))


def test_gradients_of_an_expanded_sum() -> None:
    leaves = made(3, 2, 8)
    by_triton = torch.autograd.grad(depth_attention(leaves[0], leaves[1:]).sum(), leaves)
    again = gradients(leaves, torch.ones(2, 8))[1:]
    assert all(torch.equal(a.double(), b) for a, b in zip(by_triton, again, strict=True))


def test_all_is_written_and_the_same_again() -> None:
    leaves, grad = made(5, 5, 20), random(5, 20, seed=7)
    first = gradients(leaves, grad)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        again = gradients(leaves, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_operations_as_traced() -> None:
    leaves = made(3, 2, 8, torch.bfloat16)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op._forward, (leaves[0], leaves[1:], EPS), test_utils=checks)
    query, *sources = (leaf.detach() for leaf in leaves)
    _, *saved = op._forward(query, sources, EPS)
    grad = random(2, 8).to(torch.bfloat16)
    torch.library.opcheck(op._backward, (grad, query, sources, saved, EPS), test_utils=checks)
