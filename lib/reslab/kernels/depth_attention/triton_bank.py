"""Depth attention across layers on CUDA: what `bank` does to its memory, by Triton and PyTorch's matrix products.

Letters: T tokens, d width, L queries; v_i rows, r_i = 1/rms, s_li = r_i w_l . v_i, g_l the gradient of h_l. Rows and
gradients are kept as the tensors they come in, and handed over as addresses. All scores of a token lie together, in
`Plan.columns`, so that kernels take a token and a block of columns each, and no width is too large. Nothing is added up
by several programs at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from reslab.kernels.depth_attention.plan import MOST, Group, Plan
from reslab.kernels.depth_attention.triton_op import aligned, element, one, places, table, values
from reslab.schema import UserError

__all__ = ["TritonHistory"]

BLOCK = 512
"""Columns of a row that a program goes through."""

TILE = 32
"""Tokens, and columns, of a tile of a row that is multiplied by queries."""

MOST_QUERIES = 64
"""Queries that such a tile is multiplied by at once."""

SLICE = 128
"""Columns of several rows and gradients that a program multiplies at once."""

# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "count", "across", "column", "height", "slot"])
def _write(
    update, before, kept, queries, scores, scale, tokens, count, across, column, height, slot, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr,
    JOINS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Scores of TOKENS tokens of a row for `count` queries [count, d], to `scores` [T, across] from `column` on.

    The row is `update` [T, d], or, where it JOINS the one `before`, their sum, which goes to `kept`. 1/rms, or 1 where
    not NORMED, goes to column `slot` of `scale` [T, height].
    """
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns, k = tl.arange(0, BLOCK), tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    dot, square = tl.zeros([TOKENS, QUERIES], tl.float32), tl.zeros([TOKENS], tl.float32)
    for j in range(0, WIDTH, BLOCK):
        inside = j + columns < WIDTH
        mask, at = (t < tokens)[:, None] & inside[None, :], t[:, None] * WIDTH + (j + columns)[None, :]
        value = tl.load(update + at, mask=mask, other=0.0)
        if JOINS:
            value = (value.to(tl.float32) + tl.load(before + at, mask=mask, other=0.0).to(tl.float32)).to(value.dtype)
            if tl.program_id(1) == 0:
                tl.store(kept + at, value, mask=mask)
        wide = value.to(tl.float32)
        query = queries + k[None, :] * WIDTH + (j + columns)[:, None]
        w = tl.load(query, mask=(k < count)[None, :] & inside[:, None], other=0.0)
        dot = tl.dot(wide, w, dot, input_precision="tf32x3")  # as exact as float32
        square += tl.sum(wide * wide, 1)
    inverse = tl.full([TOKENS], 1.0, tl.float32)
    if NORMED:
        inverse = 1.0 / tl.sqrt_rn(square / WIDTH + eps)
    if tl.program_id(1) == 0:
        tl.store(scale + t * height + slot, inverse, mask=t < tokens)
    mask = (t < tokens)[:, None] & (k < count)[None, :]
    tl.store(scores + (t * across + column)[:, None] + k[None, :], dot * inverse[:, None], mask=mask)


@triton.jit(do_not_specialize=["tokens", "count", "members", "across", "number", "read", "reads"])
def _mix(
    rows, scores, largest, sums, parts, out, logs, tokens, count, members, across, number, read, reads,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, BEGUN: tl.constexpr, DONE: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows weighted for `members` neighbouring queries, by their scores in `scores` [T, across].

    Where not DONE, the largest scores, and relative to them sums of exponentials and of rows: [QUERIES, T], the same,
    and [QUERIES, T, d]. Where DONE, for one query, which goes on from sum `number` where it is BEGUN: h [T, d], and
    its largest score and ln sum exp of scores less that, to column `read` of `logs` [T, 2, reads].
    """
    t, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, q = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, QUERIES)
    mask = (q < members)[:, None] & (columns < WIDTH)[None, :]
    top, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK], tl.float32)
    sums_at = (q + number) * tokens + t
    parts_at = parts + sums_at[:, None] * WIDTH + columns[None, :]
    if BEGUN:
        top, total = tl.load(largest + sums_at), tl.load(sums + sums_at)
        mixed = tl.load(parts_at, mask=mask, other=0.0)
    for i in range(count):
        row, there = places(rows, i, count, t, 1, DTYPE, ALIGNED)
        value = values(row, there, columns, WIDTH)
        score = tl.load(scores + t * across + tl.load(rows + 3 * count + i) + q, mask=q < members, other=0.0)
        before = top
        top = tl.maximum(top, score)
        shrink, weight = tl.exp(before - top), tl.exp(score - top)
        total = total * shrink + weight
        mixed = mixed * shrink[:, None] + weight[:, None] * value
    if DONE:
        tl.store(out + (t + q)[:, None] * WIDTH + columns[None, :], mixed / total[:, None], mask=mask)
        if block == 0:
            tl.store(logs + 2 * t * reads + read + q, top)
            tl.store(logs + (2 * t + 1) * reads + read + q, tl.log(total))
    else:
        if block == 0:
            tl.store(largest + sums_at, top, mask=q < members)
            tl.store(sums + sums_at, total, mask=q < members)
        tl.store(parts_at, mixed, mask=mask)


@triton.jit(do_not_specialize=["read", "reads"])
def _project(gradient, h, means, read, reads, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """<g, h> of a token, to column `read` of `means` [T, reads]."""
    t = tl.program_id(0).to(tl.int64)
    columns, product = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    for j in range(0, WIDTH, BLOCK):
        product += one(gradient + t * WIDTH, j + columns, WIDTH) * one(h + t * WIDTH, j + columns, WIDTH)
    tl.store(means + t * reads + read, tl.sum(product, 0))


@triton.jit(do_not_specialize=["count", "events", "across", "height", "reads"])
def _differentiate(
    rows, gradients, scores, scale, logs, means, by_score, count, events, across, height, reads,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, READS: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """c_li = a_li (<g_l, v_i> - <g_l, h_l>) r_i of up to ROWS rows and READS of the reads, to `by_score` [T, across].

    a_li = exp(s_li - ln sum exp s_l); `scale` [T, height].
    """
    t = tl.program_id(0).to(tl.int64)
    columns, i, k = tl.arange(0, BLOCK), tl.arange(0, ROWS), tl.program_id(1) * READS + tl.arange(0, READS)
    row, row_there = places(rows, 0, count, t, ROWS, DTYPE, ALIGNED)
    gradient, there = places(gradients, tl.program_id(1) * READS, events, t, READS, DTYPE, ALIGNED)
    product = tl.zeros([ROWS, READS, BLOCK], tl.float32)
    for j in range(0, WIDTH, BLOCK):
        value, g = values(row, row_there, j + columns, WIDTH), values(gradient, there, j + columns, WIDTH)
        product += value[:, None, :] * g[None, :, :]
    read = tl.load(gradients + 2 * events + k, mask=there, other=0)
    slot = t * height + tl.load(rows + 2 * count + i, mask=row_there, other=0)
    at = t * across + tl.load(rows + 3 * count + i, mask=row_there, other=0)[:, None] + k[None, :]
    mask = row_there[:, None] & there[None, :]
    top = tl.load(logs + 2 * t * reads + read, mask=there, other=0.0)
    log = tl.load(logs + (2 * t + 1) * reads + read, mask=there, other=0.0)
    weight = tl.exp(tl.load(scores + at, mask=mask, other=0.0) - top[None, :] - log[None, :])
    excess = tl.sum(product, 2) - tl.load(means + t * reads + read, mask=there, other=0.0)[None, :]
    tl.store(by_score + at, weight * excess * tl.load(scale + slot, mask=row_there, other=0.0)[:, None], mask=mask)


@triton.jit(do_not_specialize=["tokens", "count", "events", "across", "number", "reads"])
def _gather(
    rows, gradients, scores, logs, norms, parts, out, tokens, count, events, across, number, reads,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BEGUN: tl.constexpr, DONE: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """sum_l a_li g_l over the reads, of up to ROWS rows, to `parts` [ROWS, T, d].

    Where DONE, of one row, which goes on from part `number` where it is BEGUN, less `norms` [T] times the row: to
    `out` [T, d].
    """
    t = tl.program_id(0).to(tl.int64)
    columns, i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    row, row_there = places(rows, 0, count, t, ROWS, DTYPE, ALIGNED)
    mask = row_there[:, None] & (columns < WIDTH)[None, :]
    parts_at = parts + ((i + number) * tokens + t)[:, None] * WIDTH + columns[None, :]
    gathered = tl.zeros([ROWS, BLOCK], tl.float32)
    if BEGUN:
        gathered = tl.load(parts_at, mask=mask, other=0.0)
    at = t * across + tl.load(rows + 3 * count + i, mask=row_there, other=0)
    for k in range(events):
        gradient, there = places(gradients, k, events, t, 1, DTYPE, ALIGNED)
        read = tl.load(gradients + 2 * events + k)
        top, log = tl.load(logs + 2 * t * reads + read), tl.load(logs + (2 * t + 1) * reads + read)
        weight = tl.exp(tl.load(scores + at + k, mask=row_there, other=0.0) - top - log)
        gathered += weight[:, None] * values(gradient, there, columns, WIDTH)
    if DONE:
        gathered -= tl.load(norms + t) * values(row, row_there, columns, WIDTH)
        tl.store(out + (t + i)[:, None] * WIDTH + columns[None, :], gathered, mask=mask)
    else:
        tl.store(parts_at, gathered, mask=mask)


# --- the memory of a pass ---------------------------------------------------------------------------------------------


class _Places:
    """Of each read and each row of a plan, its number in its group, and the group."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def mixing(self) -> dict[int, tuple[int, Group]]:
        return {read: (at, group) for group in self.plan.mixing for at, read in enumerate(group.members)}

    @cached_property
    def pulling(self) -> dict[int, tuple[int, Group]]:
        return {row: (at, group) for group in self.plan.pulling for at, row in enumerate(group.members)}


_places = lru_cache(maxsize=64)(_Places)


def _version(tensor: Tensor) -> int:
    """Number of changes in place; those in inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


class TritonHistory:
    """Rows, scores and gradients of one pass, and what is computed from them. `queries` [L, d]; T tokens of `like`.

    Sums are taken in float32; the backward pass's matrix products follow PyTorch's setting of their precision.
    """

    name = "triton"

    def __init__(self, plan: Plan, like: Tensor, queries: Tensor, eps: float, normed: bool) -> None:
        self.plan, self.groups, self.eps, self.normed = plan, _places(plan), eps, normed
        self.tokens, self.width = like.shape
        self.dtype, self.device = like.dtype, like.device
        self.queries = queries.detach().float().contiguous()
        self.rows: list[Tensor | None] = [None] * len(plan.joins)
        self.versions = [0] * len(plan.joins)
        self.scores = self._empty(self.tokens, plan.columns[-1])
        self.scale = self._empty(self.tokens, len(plan.joins))
        self.logs = self._empty(self.tokens, 2, len(plan.reads)).fill_(torch.inf)  # no weight, unless it is read
        self.none = self._empty(1)
        self.begun: tuple[Group, Tensor, Tensor, Tensor] | None = None
        """A group of reads and what is summed for it: largest scores, sums of exponentials, sums of rows."""

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _columns(self, row: int) -> slice:
        """Of `scores`, those of a row."""
        first = self.plan.columns[row]
        return slice(first, first + len(self.plan.readers[row]))

    def _readers(self, row: int) -> slice | list[int]:
        """The reads of a row; a slice, which costs no copy, where they are neighbours."""
        readers = self.plan.readers[row]
        if readers[-1] - readers[0] + 1 == len(readers):
            return slice(readers[0], readers[-1] + 1)
        return list(readers)

    def _kept(self, row: int) -> Tensor:
        kept = self.rows[row]
        assert kept is not None
        return kept

    def _rows(self, rows: Sequence[int], read: int) -> tuple[list[Tensor], Tensor]:
        """Some rows, and their table: addresses, strides, numbers, and the columns of their scores for `read`."""
        kept = [self._kept(row) for row in rows]
        columns = [self.plan.column(row, read) for row in rows]
        return kept, table(kept, self.device, rows, columns)

    def _run(
        self, kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], rows: list[Tensor], **constants: Any
    ) -> None:
        """A kernel on a grid of tokens and blocks of each; `rows` are what it has addresses of."""
        common = {"WIDTH": self.width, "enable_fp_fusion": True}
        if rows:
            common |= {"DTYPE": element(self.dtype), "ALIGNED": aligned(rows)}
        if self.tokens and self.width:
            with torch.cuda.device_of(self.scores):
                kernel[grid](*arguments, **common, **constants)

    # --- forward

    def write(self, row: int, update: Tensor) -> None:
        """`update` [T, d] becomes a row, added to the row before where the plan says so."""
        update = update.contiguous()
        before = self._kept(row - 1) if self.plan.joins[row] else None
        kept = update if before is None else torch.empty_like(update)
        queries = self.queries[self._readers(row)]
        block = max(16, min(MOST_QUERIES, triton.next_power_of_2(len(queries))))  # a matrix product takes 16 or more
        arguments = (
            update, update if before is None else before, kept, queries, self.scores, self.scale, self.tokens,
            len(queries), self.plan.columns[-1], self.plan.columns[row], len(self.plan.joins), row, self.eps,
        )  # fmt: skip
        constants = {
            "BLOCK": TILE,
            "TOKENS": TILE,
            "QUERIES": block,
            "JOINS": before is not None,
            "NORMED": self.normed,
        }
        grid = -(-self.tokens // TILE), -(-len(queries) // block)
        self._run(_write, grid, arguments, [], num_warps=4, **constants)
        self.rows[row], self.versions[row] = kept, _version(kept)
        for spent in self.plan.spent[row]:
            self.rows[spent] = None

    def mix(self, read: int) -> Tensor:
        """h [T, d] of a read, in float32."""
        number, group = self.groups.mixing[read]
        if group.common and (self.begun is None or self.begun[0] is not group):
            self._mix_common(group)
        begun = self.begun[1:] if group.common and self.begun is not None else (self.none,) * 3
        out = self._empty(self.tokens, self.width)
        self._mix(group.own[number], (read,), begun, out, number if group.common else -1)
        return out

    def _mix_common(self, group: Group) -> None:
        """What the reads of a group have in common."""
        sums = [self._empty(MOST, self.tokens) for _ in range(2)]
        parts = self._empty(MOST, self.tokens, self.width) if self.begun is None else self.begun[3]
        self.begun = group, sums[0], sums[1], parts
        self._mix(group.common, group.members, self.begun[1:], None, -1)

    def _mix(
        self, rows: Sequence[int], reads: tuple[int, ...], sums: tuple[Tensor, ...], out: Tensor | None, begun: int
    ) -> None:
        kept, numbers = self._rows(rows, reads[0])
        arguments = (
            numbers, self.scores, *sums, self.none if out is None else out, self.logs, self.tokens, len(rows),
            len(reads), self.plan.columns[-1], max(begun, 0), reads[0], len(self.plan.reads),
        )  # fmt: skip
        constants = {"QUERIES": triton.next_power_of_2(len(reads)), "BEGUN": begun >= 0, "DONE": out is not None}
        blocks, block = self._blocks()
        self._run(_mix, (self.tokens, blocks), arguments, kept or [self.none], BLOCK=block, num_warps=2, **constants)

    def _blocks(self) -> tuple[int, int]:
        """How many blocks a row has, and of how many columns."""
        block = min(BLOCK, triton.next_power_of_2(self.width))
        return -(-self.width // block), block

    def row(self, row: int) -> Tensor | None:
        """A copy of a row, [T, d]; None where it is gone."""
        kept = self.rows[row]
        return None if kept is None else kept.clone()

    # --- backward

    def begin_backward(self) -> None:
        """Make room for a backward pass."""
        self.gradients: list[Tensor | None] = [None] * len(self.plan.reads)
        self.means = self._empty(self.tokens, len(self.plan.reads))
        self.by_score = torch.empty_like(self.scores)
        self.by_query = torch.zeros_like(self.queries)
        self.begun = None
        self.pulled: tuple[Group, Tensor] | None = None
        """A group of rows, and what is summed for it."""
        self._fill_gaps()

    def _fill_gaps(self) -> None:
        """Something finite for rows that are not there, as layers were skipped or are yet to run: kernels go through a
        group of rows as a whole. No read has a weight for them."""
        missing = [row for row, kept in enumerate(self.rows) if kept is None]
        ones = torch.ones(self.tokens, self.width, dtype=self.dtype, device=self.device) if missing else None
        for row in missing:
            self.rows[row] = ones
            self.scores[:, self._columns(row)] = 0
            self.scale[:, row] = 1

    def receive(self, read: int, gradient: Tensor, h: Tensor) -> None:
        """The gradient [T, d] of what `mix` gave for a read."""
        kept = gradient.contiguous()
        self.gradients[read] = kept
        arguments = kept, h, self.means, read, len(self.plan.reads)
        self._run(_project, (self.tokens, 1), arguments, [], BLOCK=self._blocks()[1], num_warps=2)

    def receive_nothing(self, read: int) -> None:
        """A read that the loss does not depend on."""
        self.gradients[read] = torch.zeros(self.tokens, self.width, dtype=self.dtype, device=self.device)
        self.means[:, read] = 0

    def pull(self, row: int, above: Tensor | None, extra: Tensor | None) -> Tensor:
        """The gradient [T, d] of a row, all its reads' being there; `above` is that of the row that it joined.

        dv_i = sum_l (a_li g_l + c_li w_l) - (r_i / d) (sum_l c_li s_li) v_i, and dw_l = sum_i c_li v_i.
        """
        number, group = self.groups.pulling[row]
        kept, columns = self._kept(row), self._columns(row)
        if _version(kept) != self.versions[row]:
            raise UserError(
                "depth attention: what a sublayer put out was changed in place after it had joined the stream, which "
                "keeps it; change a copy of it"
            )
        if group.common and (self.pulled is None or self.pulled[0] is not group):
            parts = self._empty(MOST, self.tokens, self.width) if self.pulled is None else self.pulled[1]
            self.pulled = group, parts
            self._pull(group.members, group.common, parts, None, -1)
        out = self._empty(self.tokens, self.width)
        parts = self.pulled[1] if group.common and self.pulled is not None else self.none
        self._pull((row,), group.own[number], parts, out, number if group.common else -1)
        by_score, readers = self.by_score[:, columns], self._readers(row)
        out.addmm_(by_score, self.queries[readers])
        for more in (above, extra):
            if more is not None:
                out += more
        self.by_query[readers] = self.by_query[readers].addmm_(by_score.T, kept.float())  # in place: no autocast
        return out.to(self.dtype)

    def _pull(self, rows: Sequence[int], reads: tuple[int, ...], parts: Tensor, out: Tensor | None, begun: int) -> None:
        """What reads, neighbours among those of each row, add to the gradients of rows.

        `by_score` is filled in, and all that is not by way of the queries goes to `parts`, or to `out`.
        """
        kept, of_rows = self._rows(rows, reads[0] if reads else self.plan.readers[rows[0]][0])
        gradients = [gradient for gradient in (self.gradients[read] for read in reads) if gradient is not None]
        of_reads = table(gradients, self.device, reads)
        tensors, block = [*kept, *gradients], self._blocks()[1]
        counts = len(rows), len(reads), self.plan.columns[-1]
        constants = {"ROWS": triton.next_power_of_2(len(rows))}
        arguments: tuple[Any, ...] = (
            of_rows, of_reads, self.scores, self.scale, self.logs, self.means, self.by_score, *counts,
            len(self.plan.joins), len(self.plan.reads),
        )  # fmt: skip
        if reads:
            grid, tile = (self.tokens, -(-len(reads) // MOST)), {"BLOCK": min(SLICE, block), "READS": MOST}
            self._run(_differentiate, grid, arguments, tensors, num_warps=4, **tile, **constants)
        norms, to = (self.none, self.none) if out is None else (self._norms(rows[0]), out)
        arguments = (
            of_rows, of_reads, self.scores, self.logs, norms, parts, to, self.tokens, *counts, max(begun, 0),
            len(self.plan.reads),
        )  # fmt: skip
        constants |= {"BEGUN": begun >= 0, "DONE": out is not None, "BLOCK": block}
        self._run(_gather, (self.tokens, self._blocks()[0]), arguments, tensors, num_warps=2, **constants)

    def _norms(self, row: int) -> Tensor:
        """(r_i / d) sum_l c_li s_li, [T]: what a row's norm takes back; 0 where keys have none."""
        if not self.normed:
            return torch.zeros_like(self.scale[:, row])
        columns = self._columns(row)
        return (self.by_score[:, columns] * self.scores[:, columns]).sum(1) * self.scale[:, row] / self.width

    def query_gradient(self) -> Tensor:
        """[L, d], once all rows are pulled."""
        return self.by_query
