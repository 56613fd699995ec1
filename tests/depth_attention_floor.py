"""What rounding costs depth attention: its definition in float64 with every step off by a random rounding.

By the largest of some draws it is known for each token's row of h and of the sources' gradients, and for each query's
gradient. What the definition in float32 is off by on one row is near zero as often as not, and would be no measure.

Letters: D draws, of which the first is exact; n sources v_i [D, T, d], query w [D, d], h [D, T, d]; L reads and R rows
of a pass.
"""

from collections.abc import Sequence
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from reslab.kernels.depth_attention.plan import Plan

EPS = 1e-6
DRAWS = 17


class Parts(NamedTuple):
    """Of a read: h [T, d], dw [d], dv [n, T, d]. Of a pass: [L, T, d], [L, d], [R, T, d]. By draws: [D, ...]."""

    h: Tensor
    dw: Tensor
    dv: Tensor


class Rounding:
    """Random rounding errors, the same ones for each new object."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x: Tensor, times: float = 1, back: float = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        """x [D, ...] off by so many roundings to `dtype`, and its gradient by `back` of them."""
        off: Tensor = _Off.apply(x, self._factor(x, times, dtype), self._factor(x, back, dtype))
        return off

    def _factor(self, x: Tensor, times: float, dtype: torch.dtype) -> Tensor | float:
        if not times:
            return 1.0
        unit = torch.finfo(dtype).eps / 2
        factor = torch.randn(x.shape, generator=self.generator, dtype=x.dtype).mul_(unit * times**0.5)
        factor[0] = 0
        return factor.add_(1)


class _Off(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor | float, by_back: Tensor | float) -> Tensor:
        ctx.by_back = by_back
        return x * by

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.by_back, None, None


def in_a_row(terms: float) -> float:
    """How often a term of a sum is rounded where one is added after another: partial sums grow as the root of their
    number, so that all their roundings together are those of half as many whole sums."""
    return 1 + terms / 2


LANES = 16
"""The definition's sums over channels are so many sums at once, which are added up in pairs."""


def read(query: Tensor, sources: Sequence[Tensor], off: Rounding, reads: int = 1) -> Tensor:
    """h, each source being part of so many reads."""
    v = torch.stack(list(sources), 1)
    _, count, tokens, width = v.shape
    channels = in_a_row(width / LANES + log2(min(width, LANES)))
    v = off(v, 0, in_a_row(reads))
    w = off(query[:, None, None].expand_as(v), 0, in_a_row(count + tokens))
    mean_square = off(off(v.square(), channels).mean(-1, keepdim=True))
    inverse_rms = off(1 / off((mean_square + EPS).sqrt()))
    score = off(off(off(w * v, channels).sum(-1, keepdim=True)) * inverse_rms)
    weight = off(off(score - score.detach().amax(1, keepdim=True)).exp())
    share = off(weight / off(weight.sum(1, keepdim=True), 1, in_a_row(count)))
    h: Tensor = off(off(share * v, in_a_row(count), channels).sum(1))
    return h


def drawn(leaf: Tensor) -> Tensor:
    """The same in each draw, [D, ...]."""
    return leaf.detach().double().expand(DRAWS, *leaf.shape).clone().requires_grad_()


def of_read(leaves: Sequence[Tensor], grad: Tensor) -> Parts:
    """By draws, of a query [d] and sources [T, d]."""
    query, *sources = copies = [drawn(leaf) for leaf in leaves]
    h = read(query, sources, Rounding())
    by_query, *by_source = torch.autograd.grad(h, copies, grad.double().expand_as(h))
    return Parts(h.detach(), by_query, torch.stack(by_source, 1))


def of_pass(plan: Plan, leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> Parts:
    """By draws, of queries [L, d] and what each row is written with, which is rounded to its format once it has joined.

    The bank's memory is in that format, so that what it keeps is exact.
    """
    queries, *updates = copies = [drawn(leaf) for leaf in leaves]
    off, rows = Rounding(), list[Tensor]()
    kept = leaves[1].detach()
    for joins, update, leaf in zip(plan.joins, updates, leaves[1:], strict=True):
        kept = kept + leaf.detach() if joins else leaf.detach()
        row = off(rows[-1] + update, 0, 1, leaf.dtype) if joins else update
        rows.append(row + (kept - row).detach())
    reads = [
        read(query, [rows[row] for row in needed], off, max(len(plan.readers[row]) for row in needed))
        for query, needed in zip(queries.unbind(1), plan.reads, strict=True)
    ]
    back = [grad.double().expand_as(h) for grad, h in zip(grads, reads, strict=True)]
    by_query, *by_row = torch.autograd.grad(reads, copies, back)
    return Parts(torch.stack(reads, 1).detach(), by_query, torch.stack(by_row, 1))


def assert_within(found: Parts, draws: Parts, dtype: torch.dtype, times: float = 2) -> None:
    """No row, and no query's gradient, is farther from the exact one than so many times what rounding costs it.

    Rows are results in `dtype`, queries' gradients in float32.
    """
    for name, mine, (exact, *others) in zip(Parts._fields, found, draws, strict=True):
        floor = torch.stack([(other - exact).norm(dim=-1) for other in others]).amax(0)
        floor += _last(exact, torch.float32 if name == "dw" else dtype)
        share = (mine.double() - exact).norm(dim=-1) / floor
        assert (share <= times).all(), f"{name} is {float(share.max()):.3g} times as far off as rounding costs"


def _last(exact: Tensor, dtype: torch.dtype) -> Tensor | float:
    """What the last rounding, to a result's own format, costs each row; that to float32 is among the draws.

    And 1e-30, as float32 has fewer digits below 1e-38, or none.
    """
    if dtype == torch.float32:
        return 1e-30
    format_ = torch.finfo(dtype)
    return (format_.eps / 2 * exact.abs().clamp(min=format_.smallest_normal)).norm(dim=-1) + 1e-30
