"""The Triton kernels of depth attention, interpreted on the CPU.

`test_depth_attention_triton` runs this in a process of its own, as Triton has to know before it is imported that it is
to interpret.
"""

import pytest
import torch
from torch import Tensor

from depth_attention_floor import EPS
from reslab.kernels.depth_attention import bank, depth_attention, naive, op, triton_bank, triton_op
from reslab.residuals.depth_attention import AttnResOptions
from reslab.schema import UserError
from test_depth_attention_kernel import (
    DTYPES,
    assert_at_the_rounding_floor,
    made,
    random,
    with_gradients,
    with_huge_values,
    with_zeros,
)

TOGETHER = triton_op.TOGETHER


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "implementation", lambda source: "triton")
    monkeypatch.setattr(triton_op, "TOGETHER", 8)  # faster than 2 where interpreted


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
    assert_at_the_rounding_floor(made(5, 3, 80, dtype, scale))


def test_as_many_sources_at_once_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_op, "TOGETHER", TOGETHER)
    assert_at_the_rounding_floor(made(5, 3, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_wider_than_a_block(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(triton_op, "WIDEST", 16)
    assert_at_the_rounding_floor(made(10, 2, 40, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_ten_thousand(dtype: torch.dtype) -> None:
    assert_at_the_rounding_floor(made(6, 3, 16, dtype, scale=1e4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros(dtype: torch.dtype) -> None:
    assert_at_the_rounding_floor(with_zeros(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_huge_values(dtype: torch.dtype) -> None:
    leaves, grads = with_huge_values(dtype)
    for grad in grads:
        assert_at_the_rounding_floor(leaves, grad)


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


# --- across layers --------------------------------------------------------------------------------

SUBLAYERS, WIDTH = 6, 24
VARIANTS = {
    "full": AttnResOptions(),
    "block": AttnResOptions(block=2),
    "window": AttnResOptions(window=3),
    "stride": AttnResOptions(stride=2),
    "no norm": AttnResOptions(key_norm=False),
}


@pytest.fixture
def _bank_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank, "_history", triton_bank.TritonHistory)


def pass_leaves(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Embedding [T, d], queries [L, d], and a weight [d, d] a sublayer: all leaves."""
    queries = random(SUBLAYERS + 1, WIDTH, seed=50) / WIDTH**0.5
    weights = [random(WIDTH, WIDTH, seed=60 + i) / WIDTH**0.5 for i in range(SUBLAYERS)]
    leaves = [random(tokens, WIDTH, seed=51).to(dtype), queries, *(weight.to(dtype) for weight in weights)]
    return [leaf.requires_grad_() for leaf in leaves]


def through_bank(options: AttnResOptions, leaves: list[Tensor], skip: int = -1) -> Tensor:
    """What the output reads of a stack of sublayers tanh(h M); `skip` one of them, that makes nothing of its h."""
    x, queries, *weights = leaves
    rows, token = bank.Bank.start(options.plan(SUBLAYERS, torch.is_grad_enabled()), x, queries, EPS, options.key_norm)
    for index, weight in enumerate(weights):
        h = rows.read(token, index)
        token = rows.write(token, index + 1, torch.tanh((x if index == skip else h) @ weight))
    return rows.read(token, SUBLAYERS)


def by_definition(options: AttnResOptions, leaves: list[Tensor], skip: int = -1) -> Tensor:
    """The same, in float64, with the rows as tensors."""
    x, queries, *weights = leaves
    plan, rows = options.plan(SUBLAYERS, True), [x]

    def read(index: int) -> Tensor:
        values = torch.stack([rows[row] for row in plan.reads[index]])
        keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS) if options.key_norm else values
        return ((keys @ queries[index]).softmax(0).unsqueeze(-1) * values).sum(0)

    for index, weight in enumerate(weights):
        update = torch.tanh((x if index == skip else read(index)) @ weight)
        rows.append(rows[index] + update if plan.joins[index + 1] else update)
    return read(SUBLAYERS)


def assert_as_defined(options: AttnResOptions, leaves: list[Tensor], bound: float, skip: int = -1) -> None:
    """h and all gradients, relative to their size."""
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    grad = random(*leaves[0].shape, seed=7)
    out, plain = through_bank(options, leaves, skip), by_definition(options, exact, skip)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)]
    wanted = [plain.detach(), *torch.autograd.grad(plain, exact, grad.double(), allow_unused=True)]
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a is not None
        b = torch.zeros_like(a) if b is None else b
        assert float((a.double() - b).norm()) <= bound * float(b.norm()), number


@pytest.mark.usefixtures("_bank_by_triton")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pass(variant: str) -> None:
    assert_as_defined(VARIANTS[variant], pass_leaves(5 if variant == "full" else 1), 1e-5)


@pytest.mark.usefixtures("_bank_by_triton")
def test_a_pass_over_rows_wider_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_bank, "BLOCK", 16)
    assert_as_defined(VARIANTS["full"], pass_leaves(1), 1e-5)


@pytest.mark.usefixtures("_bank_by_triton")
def test_a_pass_in_bfloat16() -> None:
    assert_as_defined(VARIANTS["full"], pass_leaves(1, torch.bfloat16), 2e-2)


@pytest.mark.usefixtures("_bank_by_triton")
def test_a_pass_with_a_read_that_nothing_depends_on() -> None:
    assert_as_defined(VARIANTS["block"], pass_leaves(1), 1e-5, skip=2)


@pytest.mark.usefixtures("_bank_by_triton")
def test_a_pass_without_gradients_gives_the_same() -> None:
    leaves = pass_leaves(2)
    with torch.no_grad():
        out = through_bank(VARIANTS["window"], leaves)
    torch.testing.assert_close(out, through_bank(VARIANTS["window"], leaves))


@pytest.mark.usefixtures("_bank_by_triton")
def test_a_pass_of_no_tokens() -> None:
    leaves = pass_leaves(0)
    gradients = torch.autograd.grad(through_bank(VARIANTS["full"], leaves).sum(), leaves)
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients)


@pytest.mark.usefixtures("_bank_by_triton")
def test_a_row_changed_in_place_is_refused() -> None:
    x, queries, *_ = pass_leaves(1)
    rows, token = bank.Bank.start(AttnResOptions().plan(1, True), x, queries[:2], EPS, True)
    update = 2 * rows.read(token, 0)
    out = rows.read(rows.write(token, 1, update), 1)
    update.detach().mul_(2)
    with pytest.raises(UserError, match="changed in place"):
        out.sum().backward()


@pytest.mark.usefixtures("_bank_by_triton")
def test_a_loss_on_an_early_read_of_a_pass_that_goes_no_further() -> None:
    """Rows of one group with it were never written."""
    plan = AttnResOptions().plan(12, True)
    x, queries = torch.randn(1, 24).requires_grad_(), torch.randn(13, 24).requires_grad_()
    updates = [torch.randn(1, 24).requires_grad_() for _ in range(5)]
    group = next(group for group in plan.pulling if len(group.members) > 1 and max(group.members) > 5)
    assert min(group.members) <= 5
    rows, token = bank.Bank.start(plan, x, queries, EPS, True)
    for row, update in enumerate(updates, 1):
        token = rows.write(token, row, update)
    found = torch.autograd.grad(rows.read(token, 5).square().sum(), [x, queries, *updates])
    h, _ = naive.depth_attention(queries[5], [x, *updates], EPS)
    for a, b in zip(found, torch.autograd.grad(h.square().sum(), [x, queries, *updates]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
