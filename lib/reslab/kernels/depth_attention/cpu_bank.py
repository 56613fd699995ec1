"""Depth attention across layers on the CPU: what `bank` does to its memory, by Numba.

Letters: T tokens, d width, R slots, L queries; v_i rows, r_i = 1/rms, s_li = w_l . v_i (not divided by the rms), g_l the
gradient of h_l. All numbers of a token lie together: rows [T, R, d], d padded to a multiple of 16 with zeros. What is
computed for a token depends on nothing else, and query gradients are summed over chunks of fixed size, so that no
result depends on the number of threads. Kernels run without the interpreter's lock, over a range of tokens each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from reslab.kernels.depth_attention.plan import Group, Plan
from reslab.kernels.depth_attention.simd import (
    LANES, exp, first, fma, load, load_one, load_part, maximum, prefetch, splat, store, store_part, tag_of, total, totals,
)  # fmt: skip
from reslab.kernels.depth_attention.threads import spread

__all__ = ["CpuHistory"]

TILE = 2 * LANES
"""Widths are padded to multiples of it."""

TOGETHER = 16
"""Tokens whose part of the queries' gradient is summed before it goes to memory."""

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""All that lets sums be reordered, and nothing that assumes away infinities."""


def _kernel(function: Any) -> Any:
    return numba.njit(function, fastmath=FAST, error_model="numpy", nogil=True, cache=True)


def _inline(function: Any) -> Any:
    return numba.njit(function, fastmath=FAST, error_model="numpy", inline="always")


@_inline
def _take(address: Any, offset: Any, j: Any, width: Any, tag: Any) -> Any:
    """Eight numbers from column j of a row `width` long; 0 behind its end."""
    if j + LANES <= width:
        return load(address, offset + j, tag)
    return load_part(address, offset + j, max(width - j, 0), tag)


@_inline
def _put(address: Any, offset: Any, j: Any, width: Any, value: Any, tag: Any) -> None:
    if j + LANES <= width:
        store(address, offset + j, value, tag)
    else:
        store_part(address, offset + j, max(width - j, 0), value, tag)


@_kernel
def write(
    update: Any, width: Any, before: Any, rows: Any, stride: Any, place: Any, padded: Any,
    queries: Any, across: Any, count: Any, scores: Any, behind: Any, at: Any,
    scale: Any, slot: Any, normed: Any, eps: Any, tag: Any, wide: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Row `place` becomes `update` [T, d], added to row `before` unless that is -1; its scores for `count` queries.

    `queries` [d, L] across; scores go to [T, P] from column `at` on, 1/rms to `scale` [T, R].
    """
    memory = np.empty((4, padded), scale.dtype)
    row = memory.ctypes.data
    for t in range(start, stop, 4):
        here = min(4, stop - t)
        for u in range(here):
            squares = splat(wide)
            for j in range(0, padded, LANES):
                value = _take(update, (t + u) * width, j, width, tag)
                if before >= 0:
                    value = value + load(rows, (t + u) * stride + before + j, tag)
                store(rows, (t + u) * stride + place + j, value, tag)
                value = load(rows, (t + u) * stride + place + j, tag)  # as rounded
                store(row, u * padded + j, value, wide)
                squares = fma(value, value, squares)
            if normed:
                scale[t + u, slot] = 1 / np.sqrt(total(squares) / scale.dtype.type(width) + eps)
            else:
                scale[t + u, slot] = 1
        for q in range(0, count, TILE):
            a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = splat(wide)
            for j in range(width):
                x, y = load(queries, j * across + q, wide), load(queries, j * across + q + LANES, wide)
                k = splat(load_one(row, j, wide))
                a0, a1 = fma(k, x, a0), fma(k, y, a1)
                k = splat(load_one(row, padded + j, wide))
                b0, b1 = fma(k, x, b0), fma(k, y, b1)
                k = splat(load_one(row, 2 * padded + j, wide))
                c0, c1 = fma(k, x, c0), fma(k, y, c1)
                k = splat(load_one(row, 3 * padded + j, wide))
                d0, d1 = fma(k, x, d0), fma(k, y, d1)
            two = q + LANES < count
            to = t * behind + at + q
            store(scores, to, a0, wide)
            if two:
                store(scores, to + LANES, a1, wide)
            if here > 1:
                store(scores, to + behind, b0, wide)
                if two:
                    store(scores, to + behind + LANES, b1, wide)
            if here > 2:
                store(scores, to + 2 * behind, c0, wide)
                if two:
                    store(scores, to + 2 * behind + LANES, c1, wide)
            if here > 3:
                store(scores, to + 3 * behind, d0, wide)
                if two:
                    store(scores, to + 3 * behind + LANES, d1, wide)


@_kernel
def mix_common(
    rows: Any, stride: Any, places: Any, padded: Any, scores: Any, behind: Any, at: Any, scale: Any, slots: Any,
    queries: Any, largest: Any, sums: Any, parts: Any, tag: Any, wide: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """For up to eight queries at once, of the rows they all read: the largest score, and, relative to it, sums of
    exponentials and of rows weighted by them: [T, 8], [T, 8], [T, 8, d]."""
    memory = np.empty((len(places), LANES), scale.dtype)
    a = memory.ctypes.data
    for t in range(start, stop):
        ahead = min(t + 1, stop - 1)
        for i in range(len(places)):
            prefetch(scores, ahead * behind + at[i], wide)
            for j in range(0, padded, 16):
                prefetch(rows, ahead * stride + places[i] + j, tag)
        top = splat(scale.dtype.type(-np.inf))
        for i in range(len(places)):
            score = load(scores, t * behind + at[i], wide) * splat(scale[t, slots[i]])
            store(a, i * LANES, score, wide)
            top = maximum(score, top)
        weight = splat(wide)
        for i in range(len(places)):
            e = exp(load(a, i * LANES, wide) - top)
            store(a, i * LANES, e, wide)
            weight = weight + e
        store(largest, t * LANES, top, wide)
        store(sums, t * LANES, weight, wide)
        for q in range(0, queries, 4):
            for j in range(0, padded, TILE):
                a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = splat(wide)
                for i in range(len(places)):
                    at_row = t * stride + places[i] + j
                    x, y = load(rows, at_row, tag), load(rows, at_row + LANES, tag)
                    k = splat(load_one(a, i * LANES + q, wide))
                    a0, a1 = fma(k, x, a0), fma(k, y, a1)
                    k = splat(load_one(a, i * LANES + q + 1, wide))
                    b0, b1 = fma(k, x, b0), fma(k, y, b1)
                    k = splat(load_one(a, i * LANES + q + 2, wide))
                    c0, c1 = fma(k, x, c0), fma(k, y, c1)
                    k = splat(load_one(a, i * LANES + q + 3, wide))
                    d0, d1 = fma(k, x, d0), fma(k, y, d1)
                to = (t * LANES + q) * padded + j
                store(parts, to, a0, wide)
                store(parts, to + LANES, a1, wide)
                store(parts, to + padded, b0, wide)
                store(parts, to + padded + LANES, b1, wide)
                store(parts, to + 2 * padded, c0, wide)
                store(parts, to + 2 * padded + LANES, c1, wide)
                store(parts, to + 3 * padded, d0, wide)
                store(parts, to + 3 * padded + LANES, d1, wide)


@_kernel
def mix(
    rows: Any, stride: Any, places: Any, padded: Any, scores: Any, behind: Any, at: Any, scale: Any, slots: Any,
    begun: Any, largest: Any, sums: Any, parts: Any, out: Any, width: Any, logs: Any, query: Any,
    tag: Any, wide: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """h [T, d] of one query, to `out`, and ln sum exp s, to column `query` of `logs` [T, L].

    Of the rows at `places`, and of those that `mix_common` has summed for query `begun` of eight, unless that is -1.
    """
    count = len(places)
    memory = np.empty(count + LANES, scale.dtype)
    a = memory.ctypes.data
    for t in range(start, stop):
        ahead = min(t + 2, stop - 1)
        for i in range(count):
            for j in range(0, padded, 16):
                prefetch(rows, ahead * stride + places[i] + j, tag)
        if begun >= 0:
            for j in range(0, padded, 16):
                prefetch(parts, (ahead * LANES + begun) * padded + j, wide)
        top = scale.dtype.type(-np.inf)
        if begun >= 0:
            top = largest[t, begun]
        for i in range(count):
            score = load_one(scores, t * behind + at[i], wide) * scale[t, slots[i]]
            memory[i] = score
            if not score <= top:
                top = score
        weight = splat(wide)
        for i in range(0, count, LANES):
            e = first(exp(load(a, i, wide) - splat(top)), count - i)
            store(a, i, e, wide)
            weight = weight + e
        share = scale.dtype.type(0)
        whole = total(weight)
        if begun >= 0:
            share = np.exp(largest[t, begun] - top)
            whole += share * sums[t, begun]
        logs[t, query] = top + np.log(whole)
        inverse = scale.dtype.type(1) / whole
        for i in range(0, count, LANES):
            store(a, i, load(a, i, wide) * splat(inverse), wide)
        share *= inverse
        for j in range(0, padded, TILE):
            x = y = splat(wide)
            if begun >= 0:
                part = (t * LANES + begun) * padded + j
                k = splat(share)
                x, y = k * load(parts, part, wide), k * load(parts, part + LANES, wide)
            for i in range(count):
                at_row = t * stride + places[i] + j
                k = splat(load_one(a, i, wide))
                x, y = fma(k, load(rows, at_row, tag), x), fma(k, load(rows, at_row + LANES, tag), y)
            _put(out, t * width, j, width, x, wide)
            _put(out, t * width, j + LANES, width, y, wide)


@_kernel
def keep_gradient(
    gradient: Any, h: Any, width: Any, gradients: Any, stride: Any, place: Any, padded: Any, means: Any, query: Any,
    tag: Any, exact: Any, wide: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """g [T, d] into its row, and <g, h> into column `query` of `means` [T, L]."""
    for t in range(start, stop):
        product = splat(wide)
        for j in range(0, padded, LANES):
            g = _take(gradient, t * width, j, width, tag)
            store(gradients, t * stride + place + j, g, tag)
            product = fma(g, _take(h, t * width, j, width, exact), product)
        means[t, query] = total(product)


@_kernel
def pull(
    rows: Any, stride: Any, places: Any, padded: Any, scores: Any, behind: Any, at: Any, scale: Any, slots: Any,
    gradients: Any, across: Any, events: Any, logs: Any, means: Any, queries: Any, by_query: Any,
    parts: Any, begun: Any, norms: Any, above: Any, extra: Any, out: Any, width: Any, normed: Any, chunk: Any,
    tag: Any, wide: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """What reads `events` add to the gradients of up to eight rows, and these rows to the gradients of the queries.

    With a_li = exp(s_li r_i - lse_l) and c_li = a_li (<g_l, v_i> - <g_l, h_l>) r_i:
    dv_i = sum_l (a_li g_l + c_li w_l) - (r_i^2 / d) (sum_l c_li s_li) v_i, and dw_l = sum_i c_li v_i.
    Sums go to `parts` [T, 8, d] and `norms` [T, 8]; where `begun` is not -1 there is one row, whose sums of that
    number are completed (begun = 8: nothing is begun), and its gradient goes to `out`, with `above` and `extra` added.
    """
    count, events_padded = len(places), -(-len(events) // LANES) * LANES
    real = scale.dtype
    a_memory, c_memory = np.empty((count + 3, events_padded), real), np.zeros((TOGETHER, 8, events_padded), real)
    of_events = np.empty((2, events_padded), real)
    a, c, lse, mean = a_memory.ctypes.data, c_memory.ctypes.data, of_events[0].ctypes.data, of_events[1].ctypes.data
    last = len(events) - 1
    for block in range(start, stop, TOGETHER):
        here = min(TOGETHER, stop - block)
        for u in range(here):
            t = block + u
            for k in range(events_padded):
                of_events[0, k] = logs[t, events[min(k, last)]]
                of_events[1, k] = means[t, events[min(k, last)]]
            for i in range(count):
                norms[t, i if begun < 0 else LANES] = norms[t, begun] if 0 <= begun < LANES else 0
            base = t * across
            ahead = min(t + 2, stop - 1)
            if True:
                for i in range(count):
                    for j in range(0, padded, 16):
                        prefetch(rows, ahead * stride + places[i] + j, tag)
                for i in range(count):
                    for k in range(0, len(events), 16):
                        prefetch(scores, ahead * behind + at[i] + k, wide)
                for k in range(len(events)):
                    for j in range(0, padded, 16):
                        prefetch(gradients, ahead * across + events[k] * padded + j, tag)
                if 0 <= begun < LANES:
                    for j in range(0, padded, 16):
                        prefetch(parts, (ahead * LANES + begun) * padded + j, wide)
            for k in range(0, len(events), LANES):
                g0, g1 = base + events[k] * padded, base + events[min(k + 1, last)] * padded
                g2, g3 = base + events[min(k + 2, last)] * padded, base + events[min(k + 3, last)] * padded
                g4, g5 = base + events[min(k + 4, last)] * padded, base + events[min(k + 5, last)] * padded
                g6, g7 = base + events[min(k + 6, last)] * padded, base + events[min(k + 7, last)] * padded
                for i in range(count):
                    p0 = p1 = p2 = p3 = p4 = p5 = p6 = p7 = splat(wide)
                    for j in range(0, padded, LANES):
                        v = load(rows, t * stride + places[i] + j, tag)
                        p0, p1 = fma(v, load(gradients, g0 + j, tag), p0), fma(v, load(gradients, g1 + j, tag), p1)
                        p2, p3 = fma(v, load(gradients, g2 + j, tag), p2), fma(v, load(gradients, g3 + j, tag), p3)
                        p4, p5 = fma(v, load(gradients, g4 + j, tag), p4), fma(v, load(gradients, g5 + j, tag), p5)
                        p6, p7 = fma(v, load(gradients, g6 + j, tag), p6), fma(v, load(gradients, g7 + j, tag), p7)
                    r = splat(scale[t, slots[i]])
                    s = first(load(scores, t * behind + at[i] + k, wide), len(events) - k)
                    weight = first(exp(s * r - load(lse, k, wide)), len(events) - k)
                    by_score = weight * (totals(p0, p1, p2, p3, p4, p5, p6, p7) - load(mean, k, wide)) * r
                    by_score = first(by_score, len(events) - k)
                    store(a, i * events_padded + k, weight, wide)
                    store(c, (u * 8 + i) * events_padded + k, by_score, wide)
                    norms[t, i if begun < 0 else LANES] += total(by_score * s)
            if begun < 0:
                for i in range(0, count, 4):
                    a_at, c_at = i * events_padded, (u * 8 + i) * events_padded
                    for j in range(0, padded, TILE):
                        x0 = x1 = y0 = y1 = z0 = z1 = w0 = w1 = splat(wide)
                        for k in range(len(events)):
                            g = base + events[k] * padded + j
                            g0, g1 = load(gradients, g, tag), load(gradients, g + LANES, tag)
                            q = events[k] * padded + j
                            q0, q1 = load(queries, q, wide), load(queries, q + LANES, wide)
                            f, e = splat(load_one(a, a_at + k, wide)), splat(load_one(c, c_at + k, wide))
                            x0, x1 = fma(e, q0, fma(f, g0, x0)), fma(e, q1, fma(f, g1, x1))
                            f = splat(load_one(a, a_at + events_padded + k, wide))
                            e = splat(load_one(c, c_at + events_padded + k, wide))
                            y0, y1 = fma(e, q0, fma(f, g0, y0)), fma(e, q1, fma(f, g1, y1))
                            f = splat(load_one(a, a_at + 2 * events_padded + k, wide))
                            e = splat(load_one(c, c_at + 2 * events_padded + k, wide))
                            z0, z1 = fma(e, q0, fma(f, g0, z0)), fma(e, q1, fma(f, g1, z1))
                            f = splat(load_one(a, a_at + 3 * events_padded + k, wide))
                            e = splat(load_one(c, c_at + 3 * events_padded + k, wide))
                            w0, w1 = fma(e, q0, fma(f, g0, w0)), fma(e, q1, fma(f, g1, w1))
                        to = (t * LANES + i) * padded + j
                        store(parts, to, x0, wide)
                        store(parts, to + LANES, x1, wide)
                        store(parts, to + padded, y0, wide)
                        store(parts, to + padded + LANES, y1, wide)
                        store(parts, to + 2 * padded, z0, wide)
                        store(parts, to + 2 * padded + LANES, z1, wide)
                        store(parts, to + 3 * padded, w0, wide)
                        store(parts, to + 3 * padded + LANES, w1, wide)
            else:
                r = scale[t, slots[0]]
                by_norm = real.type(0)
                if normed:
                    by_norm = -norms[t, LANES] * r * r / real.type(width)
                for j in range(0, padded, LANES):
                    x = splat(by_norm) * load(rows, t * stride + places[0] + j, tag)
                    if begun < LANES:
                        x = x + load(parts, (t * LANES + begun) * padded + j, wide)
                    for k in range(len(events)):
                        f, e = splat(load_one(a, k, wide)), splat(load_one(c, u * 8 * events_padded + k, wide))
                        g, q = base + events[k] * padded + j, events[k] * padded + j
                        x = fma(e, load(queries, q, wide), fma(f, load(gradients, g, tag), x))
                    if above != 0:
                        x = x + _take(above, t * width, j, width, tag)
                    if extra != 0:
                        x = x + _take(extra, t * width, j, width, tag)
                    _put(out, t * width, j, width, x, tag)
        chunk_at = block // chunk * by_query[1]
        for i in range(count):
            for k in range(0, len(events), 4):
                e0, e1 = chunk_at + events[k] * padded, chunk_at + events[min(k + 1, last)] * padded
                e2, e3 = chunk_at + events[min(k + 2, last)] * padded, chunk_at + events[min(k + 3, last)] * padded
                for j in range(0, padded, TILE):
                    x0 = x1 = y0 = y1 = z0 = z1 = w0 = w1 = splat(wide)
                    for u in range(here):
                        v = (block + u) * stride + places[i] + j
                        v0, v1 = load(rows, v, tag), load(rows, v + LANES, tag)
                        c_at = (u * 8 + i) * events_padded + k
                        f = splat(load_one(c, c_at, wide))
                        x0, x1 = fma(f, v0, x0), fma(f, v1, x1)
                        f = splat(load_one(c, c_at + 1, wide))
                        y0, y1 = fma(f, v0, y0), fma(f, v1, y1)
                        f = splat(load_one(c, c_at + 2, wide))
                        z0, z1 = fma(f, v0, z0), fma(f, v1, z1)
                        f = splat(load_one(c, c_at + 3, wide))
                        w0, w1 = fma(f, v0, w0), fma(f, v1, w1)
                    _add(by_query[0], e0 + j, x0, x1, wide)
                    if k + 1 <= last:
                        _add(by_query[0], e1 + j, y0, y1, wide)
                    if k + 2 <= last:
                        _add(by_query[0], e2 + j, z0, z1, wide)
                    if k + 3 <= last:
                        _add(by_query[0], e3 + j, w0, w1, wide)


@_inline
def _add(address: Any, offset: Any, x: Any, y: Any, wide: Any) -> None:
    store(address, offset, load(address, offset, wide) + x, wide)
    store(address, offset + LANES, load(address, offset + LANES, wide) + y, wide)


# --- the memory of a pass -------------------------------------------------------------------------


CHUNK = 128
"""Tokens whose part of the queries' gradient is summed by one thread, at least."""

CHUNKS = 64
"""Such parts, at most."""

Index = np.ndarray


@dataclass(frozen=True)
class _Rows:
    """Some rows, as kernels take them: where their numbers, scores and norms are."""

    places: Index
    columns: Index
    slots: Index


@dataclass(frozen=True)
class _Layout:
    """The plan in numbers; `padded` is the width of a row."""

    plan: Plan
    padded: int

    def rows(self, rows: Sequence[int], reads: Sequence[int]) -> _Rows:
        """With the columns of their scores for the first of `reads`."""
        slots = [self.plan.slots[row] for row in rows]
        columns = [self.plan.column(row, reads[0]) if reads else 0 for row in rows]
        return _Rows(_integers([slot * self.padded for slot in slots]), _integers(columns), _integers(slots))

    @cached_property
    def mixing(self) -> dict[int, tuple[int, Group, _Rows | None, _Rows]]:
        """Of each read: its number in its group, the group, what is common there, and what it reads by itself."""
        found = {}
        for group in self.plan.mixing:
            common = self.rows(group.common, group.members) if group.common else None
            for number, read in enumerate(group.members):
                found[read] = number, group, common, self.rows(group.own[number], [read])
        return found

    @cached_property
    def pulling(self) -> dict[int, tuple[int, Group, _Rows, _Rows, Index, Index]]:
        """Of each row: its number in its group, the group, its rows, itself, and the common and its own reads."""
        found = {}
        for group in self.plan.pulling:
            together = self.rows(group.members, group.common)
            for number, row in enumerate(group.members):
                own = group.own[number]
                found[row] = number, group, together, self.rows([row], own), _integers(group.common), _integers(own)
        return found


@lru_cache(maxsize=64)
def _layout(plan: Plan, padded: int) -> _Layout:
    return _Layout(plan, padded)


def _integers(numbers: Sequence[int]) -> Index:
    return np.array(numbers, dtype=np.int64)


class CpuHistory:
    """Rows, scores and gradients of one pass, and what is computed from them. `queries` [L, d]; T tokens of `like`."""

    name = "numba"

    def __init__(self, plan: Plan, like: Tensor, queries: Tensor, eps: float, normed: bool) -> None:
        self.tokens, self.width = like.shape
        self.padded = -(-self.width // TILE) * TILE
        self.plan, self.layout, self.normed = plan, _layout(plan, self.padded), normed
        self.dtype = like.dtype
        self.exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.tag, self.wide = tag_of(self.dtype), tag_of(self.exact)
        self.eps = self.wide.dtype.type(eps)
        slots, reads = max(plan.slots) + 1, len(plan.reads)
        self.rows = like.new_empty(self.tokens, slots, self.padded)
        self.scores = self._empty(self.tokens, plan.columns[-1] + LANES)
        self.scale = self._empty(self.tokens, slots).numpy()
        self.logs = self._empty(self.tokens, reads).fill_(torch.inf).numpy()
        self.queries = F.pad(queries.to(self.exact), (0, self.padded - self.width)).contiguous()
        self.across = F.pad(self.queries.T, (0, TILE + LANES)).contiguous()
        self.none = self._empty(0, 0)
        self.begun: tuple[Group, Tensor, Tensor, Tensor] | None = None
        """A group of reads and what is summed for it: largest scores, sums of exponentials, sums of rows."""

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.exact)

    def write(self, row: int, update: Tensor) -> None:
        """`update` [T, d] becomes a row, added to the row before where the plan says so."""
        before = self.plan.slots[row - 1] * self.padded if self.plan.joins[row] else -1
        readers = self.plan.readers[row]
        if readers[-1] - readers[0] + 1 == len(readers):
            queries, first_query = self.across, readers[0]
        else:
            queries, first_query = F.pad(self.across[:, list(readers)], (0, TILE + LANES)).contiguous(), 0
        update = update.contiguous()
        slot = self.plan.slots[row]
        spread(
            write, self.tokens, CHUNK, update.data_ptr(), self.width, before, self.rows.data_ptr(),
            self.rows.stride(0), slot * self.padded, self.padded, queries.data_ptr() + first_query * queries.itemsize,
            queries.shape[1], len(readers), self.scores.data_ptr(), self.scores.stride(0), self.plan.columns[row],
            self.scale, slot, self.normed, self.eps, self.tag, self.wide,
        )  # fmt: skip

    def mix(self, read: int) -> Tensor:
        """h [T, d] of a read, in float32 or float64."""
        number, group, common, own = self.layout.mixing[read]
        if common is None:
            number, sums = -1, (self.none, self.none, self.none)
        else:
            sums = self._begun(group, common)
        out = self._empty(self.tokens, self.width)
        spread(
            mix, self.tokens, CHUNK, self.rows.data_ptr(), self.rows.stride(0), own.places, self.padded,
            self.scores.data_ptr(), self.scores.stride(0), own.columns, self.scale, own.slots,
            number, sums[0].numpy(), sums[1].numpy(), sums[2].data_ptr(), out.data_ptr(), self.width,
            self.logs, read, self.tag, self.wide,
        )  # fmt: skip
        return out

    def _begun(self, group: Group, common: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        if self.begun is None or self.begun[0] is not group:
            largest, sums = self._empty(self.tokens, LANES), self._empty(self.tokens, LANES)
            parts = self._empty(self.tokens, LANES, self.padded) if self.begun is None else self.begun[3]
            spread(
                mix_common, self.tokens, CHUNK, self.rows.data_ptr(), self.rows.stride(0), common.places, self.padded,
                self.scores.data_ptr(), self.scores.stride(0), common.columns, self.scale, common.slots,
                len(group.members), largest.data_ptr(), sums.data_ptr(), parts.data_ptr(), self.tag, self.wide,
            )  # fmt: skip
            self.begun = group, largest, sums, parts
        return self.begun[1:]

    def row(self, row: int) -> Tensor:
        """A copy of a row, [T, d]."""
        return self.rows[:, self.plan.slots[row], : self.width].clone()

    # --- backward

    def begin_backward(self) -> None:
        """Make room for a backward pass."""
        self.chunk = max(CHUNK, -(-self.tokens // (CHUNKS * TOGETHER)) * TOGETHER)
        reads = len(self.plan.reads)
        self.gradients = self.rows.new_empty(self.tokens, reads, self.padded)
        self.means, self.norms = self._empty(self.tokens, reads).numpy(), self._empty(self.tokens, LANES + 1).numpy()
        self.by_query = torch.zeros(-(-self.tokens // self.chunk), reads, self.padded, dtype=self.exact)
        self.begun = self.pulled = None
        self.pulled_parts = self._empty(self.tokens, LANES, self.padded)

    def receive(self, read: int, gradient: Tensor, h: Tensor) -> None:
        """The gradient [T, d] of what `mix` gave for a read."""
        gradient = gradient.contiguous()
        spread(
            keep_gradient, self.tokens, CHUNK, gradient.data_ptr(), h.data_ptr(), self.width,
            self.gradients.data_ptr(), self.gradients.stride(0), read * self.padded, self.padded, self.means, read,
            self.tag, self.wide, self.wide,
        )  # fmt: skip

    def receive_nothing(self, read: int) -> None:
        """A read that the loss does not depend on."""
        self.gradients[:, read] = 0
        self.means[:, read] = 0

    def pull(self, row: int, above: Tensor | None, extra: Tensor | None) -> Tensor:
        """The gradient [T, d] of a row, all its reads' being there; `above` is that of the row that it joined."""
        number, group, together, alone, common, own = self.layout.pulling[row]
        out = self.rows.new_empty(self.tokens, self.width)
        if len(common) and self.pulled is not group:
            self._pull(together, common, -1, None, None, out)
            self.pulled = group
        self._pull(alone, own, number if len(common) else LANES, above, extra, out)
        return out

    def _pull(
        self, rows: _Rows, reads: Index, begun: int, above: Tensor | None, extra: Tensor | None, out: Tensor
    ) -> None:
        spread(
            pull, self.tokens, self.chunk, self.rows.data_ptr(), self.rows.stride(0), rows.places, self.padded,
            self.scores.data_ptr(), self.scores.stride(0), rows.columns, self.scale, rows.slots,
            self.gradients.data_ptr(), self.gradients.stride(0), reads, self.logs, self.means,
            self.queries.data_ptr(), (self.by_query.data_ptr(), self.by_query.stride(0)),
            self.pulled_parts.data_ptr(), begun, self.norms, _address(above), _address(extra), out.data_ptr(), self.width,
            self.normed, self.chunk, self.tag, self.wide,
        )  # fmt: skip

    def query_gradient(self) -> Tensor:
        """[L, d], once all rows are pulled."""
        return self.by_query.sum(0)[:, : self.width]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
