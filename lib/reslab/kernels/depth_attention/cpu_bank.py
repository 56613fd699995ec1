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
from reslab.kernels.depth_attention.threads import call
from reslab.schema import UserError

__all__ = ["CpuHistory"]

TILE = 2 * LANES
"""Widths are padded to multiples of it."""

TOGETHER = 16
"""Tokens whose part of the queries' gradient is summed before it goes to memory."""

AT_A_TIME = 64
"""Tokens that go through several kernels before the next ones do."""

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""All that lets sums be reordered, and nothing that assumes away infinities."""


def _kernel(function: Any) -> Any:
    return numba.njit(function, fastmath=FAST, error_model="numpy", nogil=True, cache=True)


def _inline(function: Any) -> Any:
    return numba.njit(function, fastmath=FAST, error_model="numpy", inline="always")


@_inline
def _take(row: Any, j: Any, width: Any, tag: Any) -> Any:
    """Eight numbers from column j of a row `width` long; 0 behind its end."""
    if j + LANES <= width:
        return load(0, row + j, tag)
    return load_part(0, row + j, max(width - j, 0), tag)


@_inline
def _put(row: Any, j: Any, width: Any, value: Any, tag: Any) -> None:
    if j + LANES <= width:
        store(0, row + j, value, tag)
    else:
        store_part(0, row + j, max(width - j, 0), value, tag)


@_kernel
def write(
    source: Any, width: Any, before: Any, place: Any, padded: Any,
    queries: Any, across: Any, count: Any, scores: Any, at: Any, segment: Any,
    scale: Any, slot: Any, normed: Any, eps: Any, tag: Any, wide: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Row `place` becomes `source` [T, d], added to row `before` unless that is -1; its scores for `count` queries.

    Nothing is copied where `source` is `place`. `queries` [d, L] across; scores go to [T, segment] at `at`, 1/rms to
    `scale` [R, T].
    """
    memory = np.empty((4, padded), scale.dtype)
    row = memory.ctypes.data
    for t in range(start, stop, 4):
        here = min(4, stop - t)
        for u in range(here):
            squares = splat(wide)
            for j in range(0, padded, LANES):
                value = _take(source + (t + u) * width, j, width, tag)
                if before >= 0:
                    value = value + load(0, before + (t + u) * padded + j, tag)
                if source != place:
                    store(0, place + (t + u) * padded + j, value, tag)
                    value = load(0, place + (t + u) * padded + j, tag)  # as rounded
                store(row, u * padded + j, value, wide)
                squares = fma(value, value, squares)
            if normed:
                scale[slot, t + u] = 1 / np.sqrt(total(squares) / scale.dtype.type(width) + eps)
            else:
                scale[slot, t + u] = 1
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
            to = at + t * segment + q
            store(scores, to, a0, wide)
            if two:
                store(scores, to + LANES, a1, wide)
            if here > 1:
                store(scores, to + segment, b0, wide)
                if two:
                    store(scores, to + segment + LANES, b1, wide)
            if here > 2:
                store(scores, to + 2 * segment, c0, wide)
                if two:
                    store(scores, to + 2 * segment + LANES, c1, wide)
            if here > 3:
                store(scores, to + 3 * segment, d0, wide)
                if two:
                    store(scores, to + 3 * segment + LANES, d1, wide)


@_kernel
def mix_common(
    places: Any, padded: Any, scores: Any, at: Any, segments: Any, scale: Any, slots: Any,
    queries: Any, largest: Any, sums: Any, parts: Any, apart: Any, tag: Any, wide: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """For up to eight queries at once, of the rows they all read: the largest score, and, relative to it, sums of
    exponentials and of rows weighted by them: [T, 8], [T, 8], [T, 8, d]."""
    memory = np.empty((len(places), LANES), scale.dtype)
    a = memory.ctypes.data
    for t in range(start, stop):
        ahead = min(t + 1, stop - 1)
        for i in range(len(places)):
            prefetch(scores, at[i] + ahead * segments[i], wide)
            for j in range(0, padded, 16):
                prefetch(0, places[i] + ahead * padded + j, tag)
        top = splat(scale.dtype.type(-np.inf))
        for i in range(len(places)):
            score = load(scores, at[i] + t * segments[i], wide) * splat(scale[slots[i], t])
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
                    at_row = places[i] + t * padded + j
                    x, y = load(0, at_row, tag), load(0, at_row + LANES, tag)
                    k = splat(load_one(a, i * LANES + q, wide))
                    a0, a1 = fma(k, x, a0), fma(k, y, a1)
                    k = splat(load_one(a, i * LANES + q + 1, wide))
                    b0, b1 = fma(k, x, b0), fma(k, y, b1)
                    k = splat(load_one(a, i * LANES + q + 2, wide))
                    c0, c1 = fma(k, x, c0), fma(k, y, c1)
                    k = splat(load_one(a, i * LANES + q + 3, wide))
                    d0, d1 = fma(k, x, d0), fma(k, y, d1)
                to, far = q * apart + t * padded + j, apart
                store(parts, to, a0, wide)
                store(parts, to + LANES, a1, wide)
                store(parts, to + far, b0, wide)
                store(parts, to + far + LANES, b1, wide)
                store(parts, to + 2 * far, c0, wide)
                store(parts, to + 2 * far + LANES, c1, wide)
                store(parts, to + 3 * far, d0, wide)
                store(parts, to + 3 * far + LANES, d1, wide)


@_kernel
def mix(
    places: Any, padded: Any, scores: Any, at: Any, segments: Any, scale: Any, slots: Any,
    begun: Any, largest: Any, sums: Any, parts: Any, apart: Any, out: Any, width: Any, logs: Any, query: Any,
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
                prefetch(0, places[i] + ahead * padded + j, tag)
        if begun >= 0:
            for j in range(0, padded, 16):
                prefetch(parts, begun * apart + ahead * padded + j, wide)
        top = scale.dtype.type(-np.inf)
        if begun >= 0:
            top = largest[t, begun]
        for i in range(count):
            score = load_one(scores, at[i] + t * segments[i], wide) * scale[slots[i], t]
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
        logs[query, t] = top + np.log(whole)
        inverse = scale.dtype.type(1) / whole
        for i in range(0, count, LANES):
            store(a, i, load(a, i, wide) * splat(inverse), wide)
        share *= inverse
        for j in range(0, padded, TILE):
            x = y = splat(wide)
            if begun >= 0:
                part = begun * apart + t * padded + j
                k = splat(share)
                x, y = k * load(parts, part, wide), k * load(parts, part + LANES, wide)
            for i in range(count):
                at_row = places[i] + t * padded + j
                k = splat(load_one(a, i, wide))
                x, y = fma(k, load(0, at_row, tag), x), fma(k, load(0, at_row + LANES, tag), y)
            _put(out + t * width, j, width, x, wide)
            _put(out + t * width, j + LANES, width, y, wide)


@_kernel
def keep_gradient(
    source: Any, h: Any, width: Any, place: Any, padded: Any, means: Any, query: Any,
    tag: Any, wide: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """g [T, d] into its row, unless it is there, and <g, h> into row `query` of `means` [L, T]."""
    for t in range(start, stop):
        product = splat(wide)
        for j in range(0, padded, LANES):
            g = _take(source + t * width, j, width, tag)
            if source != place:
                store(0, place + t * padded + j, g, tag)
            product = fma(g, _take(h + t * width, j, width, wide), product)
        means[query, t] = total(product)


@_kernel
def pull(
    places: Any, padded: Any, scores: Any, at: Any, segments: Any, scale: Any, slots: Any,
    sources: Any, events: Any, logs: Any, means: Any, queries: Any, by_query: Any, by_chunk: Any,
    parts: Any, apart: Any, begun: Any, norms: Any, above: Any, extra: Any, out: Any, width: Any, normed: Any, chunk: Any,
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
            for k in range(len(events)):
                of_events[0, k] = logs[events[k], t]
                of_events[1, k] = means[events[k], t]
            for i in range(count):
                norms[i if begun < 0 else LANES, t] = norms[begun, t] if 0 <= begun < LANES else 0
            base = t * padded
            ahead = min(t + 2, stop - 1)
            if True:
                for i in range(count):
                    for j in range(0, padded, 16):
                        prefetch(0, places[i] + ahead * padded + j, tag)
                for i in range(count):
                    for k in range(0, len(events), 16):
                        prefetch(scores, at[i] + ahead * segments[i] + k, wide)
                for k in range(len(events)):
                    for j in range(0, padded, 16):
                        prefetch(0, sources[k] + ahead * padded + j, tag)
                if 0 <= begun < LANES:
                    for j in range(0, padded, 16):
                        prefetch(parts, begun * apart + ahead * padded + j, wide)
            for k in range(0, len(events), LANES):
                g0, g1 = base + sources[k], base + sources[min(k + 1, last)]
                g2, g3 = base + sources[min(k + 2, last)], base + sources[min(k + 3, last)]
                g4, g5 = base + sources[min(k + 4, last)], base + sources[min(k + 5, last)]
                g6, g7 = base + sources[min(k + 6, last)], base + sources[min(k + 7, last)]
                for i in range(count):
                    p0 = p1 = p2 = p3 = p4 = p5 = p6 = p7 = splat(wide)
                    v_at = places[i] + t * padded
                    if len(events) - k > 4:
                        for j in range(0, padded, LANES):
                            v = load(0, v_at + j, tag)
                            p0, p1 = fma(v, load(0, g0 + j, tag), p0), fma(v, load(0, g1 + j, tag), p1)
                            p2, p3 = fma(v, load(0, g2 + j, tag), p2), fma(v, load(0, g3 + j, tag), p3)
                            p4, p5 = fma(v, load(0, g4 + j, tag), p4), fma(v, load(0, g5 + j, tag), p5)
                            p6, p7 = fma(v, load(0, g6 + j, tag), p6), fma(v, load(0, g7 + j, tag), p7)
                    elif len(events) - k > 1:
                        for j in range(0, padded, LANES):
                            v = load(0, v_at + j, tag)
                            p0, p1 = fma(v, load(0, g0 + j, tag), p0), fma(v, load(0, g1 + j, tag), p1)
                            p2, p3 = fma(v, load(0, g2 + j, tag), p2), fma(v, load(0, g3 + j, tag), p3)
                    else:
                        for j in range(0, padded, LANES):
                            p0 = fma(load(0, v_at + j, tag), load(0, g0 + j, tag), p0)
                    r = splat(scale[slots[i], t])
                    s = first(load(scores, at[i] + t * segments[i] + k, wide), len(events) - k)
                    weight = first(exp(s * r - load(lse, k, wide)), len(events) - k)
                    by_score = weight * (totals(p0, p1, p2, p3, p4, p5, p6, p7) - load(mean, k, wide)) * r
                    by_score = first(by_score, len(events) - k)
                    store(a, i * events_padded + k, weight, wide)
                    store(c, (u * 8 + i) * events_padded + k, by_score, wide)
                    norms[i if begun < 0 else LANES, t] += total(by_score * s)
            if begun < 0:
                for i in range(0, count, 4):
                    a_at, c_at = i * events_padded, (u * 8 + i) * events_padded
                    for j in range(0, padded, TILE):
                        x0 = x1 = y0 = y1 = z0 = z1 = w0 = w1 = splat(wide)
                        for k in range(len(events)):
                            g = base + sources[k] + j
                            g0, g1 = load(0, g, tag), load(0, g + LANES, tag)
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
                        to, far = i * apart + t * padded + j, apart
                        store(parts, to, x0, wide)
                        store(parts, to + LANES, x1, wide)
                        store(parts, to + far, y0, wide)
                        store(parts, to + far + LANES, y1, wide)
                        store(parts, to + 2 * far, z0, wide)
                        store(parts, to + 2 * far + LANES, z1, wide)
                        store(parts, to + 3 * far, w0, wide)
                        store(parts, to + 3 * far + LANES, w1, wide)
            else:
                r = scale[slots[0], t]
                by_norm = real.type(0)
                if normed:
                    by_norm = -norms[LANES, t] * r * r / real.type(width)
                for j in range(0, padded, LANES):
                    x = splat(by_norm) * load(0, places[0] + t * padded + j, tag)
                    if begun < LANES:
                        x = x + load(parts, begun * apart + t * padded + j, wide)
                    for k in range(len(events)):
                        f, e = splat(load_one(a, k, wide)), splat(load_one(c, u * 8 * events_padded + k, wide))
                        g, q = base + sources[k] + j, events[k] * padded + j
                        x = fma(e, load(queries, q, wide), fma(f, load(0, g, tag), x))
                    if above != 0:
                        x = x + _take(above + t * width, j, width, tag)
                    if extra != 0:
                        x = x + _take(extra + t * width, j, width, tag)
                    _put(out + t * width, j, width, x, tag)
        chunk_at = block // chunk * by_chunk
        for i in range(count):
            for k in range(0, len(events) - 3, 4):
                for j in range(0, padded, TILE):
                    x0 = x1 = y0 = y1 = z0 = z1 = w0 = w1 = splat(wide)
                    for u in range(here):
                        v = places[i] + (block + u) * padded + j
                        v0, v1 = load(0, v, tag), load(0, v + LANES, tag)
                        c_at = (u * 8 + i) * events_padded + k
                        f = splat(load_one(c, c_at, wide))
                        x0, x1 = fma(f, v0, x0), fma(f, v1, x1)
                        f = splat(load_one(c, c_at + 1, wide))
                        y0, y1 = fma(f, v0, y0), fma(f, v1, y1)
                        f = splat(load_one(c, c_at + 2, wide))
                        z0, z1 = fma(f, v0, z0), fma(f, v1, z1)
                        f = splat(load_one(c, c_at + 3, wide))
                        w0, w1 = fma(f, v0, w0), fma(f, v1, w1)
                    _add(by_query, chunk_at + events[k] * padded + j, x0, x1, wide)
                    _add(by_query, chunk_at + events[k + 1] * padded + j, y0, y1, wide)
                    _add(by_query, chunk_at + events[k + 2] * padded + j, z0, z1, wide)
                    _add(by_query, chunk_at + events[k + 3] * padded + j, w0, w1, wide)
            for k in range(len(events) // 4 * 4, len(events)):
                for j in range(0, padded, TILE):
                    x0 = x1 = splat(wide)
                    for u in range(here):
                        v = places[i] + (block + u) * padded + j
                        f = splat(load_one(c, (u * 8 + i) * events_padded + k, wide))
                        x0, x1 = fma(f, load(0, v, tag), x0), fma(f, load(0, v + LANES, tag), x1)
                    _add(by_query, chunk_at + events[k] * padded + j, x0, x1, wide)


@_inline
def _add(address: Any, offset: Any, x: Any, y: Any, wide: Any) -> None:
    store(address, offset, load(address, offset, wide) + x, wide)
    store(address, offset + LANES, load(address, offset + LANES, wide) + y, wide)


# --- one after the other on a few tokens at a time, which so stay in the cache ---------------------


def _threaded(function: Any) -> Any:
    return numba.njit(function, parallel=True, fastmath=FAST, error_model="numpy", nogil=True, cache=True)


@_threaded
def _forward(
    writes: Any, written: Any, begins: Any, common: Any, mixes: Any, mixed: Any, tokens: Any, chunk: Any
) -> None:
    """Those of `write`, `mix_common` and `mix` that are asked for."""
    for part in numba.prange((tokens + chunk - 1) // chunk):
        for start in range(part * chunk, min((part + 1) * chunk, tokens), AT_A_TIME):
            stop = min(start + AT_A_TIME, tokens)
            if writes:
                write(*written, start, stop)
            if begins:
                mix_common(*common, start, stop)
            if mixes:
                mix(*mixed, start, stop)


@_threaded
def _backward(
    keeps: Any, kept: Any, begins: Any, common: Any, pulls: Any, pulled: Any, tokens: Any, chunk: Any
) -> None:
    """Those of `keep_gradient`, and `pull` for a group and for a row, that are asked for."""
    for part in numba.prange((tokens + chunk - 1) // chunk):
        for start in range(part * chunk, min((part + 1) * chunk, tokens), AT_A_TIME):
            stop = min(start + AT_A_TIME, tokens)
            if keeps:
                keep_gradient(*kept, start, stop)
            if begins:
                pull(*common, start, stop)
            if pulls:
                pull(*pulled, start, stop)


# --- the memory of a pass -------------------------------------------------------------------------


CHUNK = 128
"""Tokens whose part of the queries' gradient is summed by one thread, at least."""

APART = 80
"""Numbers between rows, so that those of one token do not fall on each other in a cache."""

CHUNKS = 64
"""Such parts, at most."""

Index = np.ndarray
_Step = tuple[Any, ...]
"""A kernel's arguments."""
_Waiting = tuple[_Step, tuple[Tensor | None, ...]]
"""A step that the next one takes along, and the tensors that it needs until then."""


@dataclass(frozen=True)
class _Rows:
    """Some rows, as kernels take them, and where their scores are."""

    rows: Index
    columns: Index
    segments: Index


@dataclass(frozen=True)
class _Layout:
    """The plan in numbers, for so many tokens."""

    plan: Plan
    tokens: int

    def begin(self, row: int) -> int:
        """Where the scores of a row are."""
        return self.plan.columns[row] * self.tokens + row * APART

    def rows(self, rows: Sequence[int], reads: Sequence[int]) -> _Rows:
        """With the columns of their scores for the first of `reads`."""
        begins = [self.plan.columns[row] for row in rows]
        segments = [self.plan.columns[row + 1] - begin for row, begin in zip(rows, begins, strict=True)]
        behind = [self.plan.column(row, reads[0]) - begin if reads else 0 for row, begin in zip(rows, begins, strict=True)]
        columns = [self.begin(row) + column for row, column in zip(rows, behind, strict=True)]
        return _Rows(_integers(rows), _integers(columns), _integers(segments))

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
def _layout(plan: Plan, tokens: int) -> _Layout:
    return _Layout(plan, tokens)


def _integers(numbers: Sequence[int]) -> Index:
    return np.array(numbers, dtype=np.int64)


class _Tensors:
    """Tensors [T, d] one by one, and where each begins, in numbers from address 0."""

    def __init__(self, count: int) -> None:
        self.kept: list[Tensor | None] = [None] * count
        self.versions = [0] * count
        self.places = np.zeros(count, dtype=np.int64)

    def keep(self, number: int, tensor: Tensor) -> None:
        self.kept[number], self.versions[number], self.places[number] = tensor, tensor._version, _place(tensor)

    def drop(self, number: int) -> None:
        self.kept[number] = None

    def require_unchanged(self, number: int) -> None:
        tensor = self.kept[number]
        if tensor is not None and tensor._version != self.versions[number]:
            raise UserError(
                "depth attention: what a sublayer put out was changed in place after it had joined the stream, which keeps "
                "it; change a copy of it"
            )


def _place(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr() // tensor.itemsize


class CpuHistory:
    """Rows, scores and gradients of one pass, and what is computed from them. `queries` [L, d]; T tokens of `like`.

    Tensors are kept as they come where their width is whole tiles, and copied to padded ones where not.
    """

    name = "numba"

    def __init__(self, plan: Plan, like: Tensor, queries: Tensor, eps: float, normed: bool) -> None:
        self.tokens, self.width = like.shape
        self.padded = -(-self.width // TILE) * TILE
        self.apart = self.tokens * self.padded + APART
        self.chunk = max(CHUNK, -(-self.tokens // (CHUNKS * TOGETHER)) * TOGETHER)
        self.plan, self.layout, self.normed = plan, _layout(plan, self.tokens), normed
        self.dtype = like.dtype
        self.exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.tag, self.wide = tag_of(self.dtype), tag_of(self.exact)
        self.eps = self.wide.dtype.type(eps)
        self.rows = _Tensors(len(plan.joins))
        self.scores = self._empty(self.layout.begin(len(plan.joins)) + LANES)
        self.scale = self._empty(len(plan.joins), self.tokens).numpy()
        self.logs = self._empty(len(plan.reads), self.tokens).fill_(torch.inf).numpy()
        self.queries = F.pad(queries.to(self.exact), (0, self.padded - self.width)).contiguous()
        self.across = F.pad(self.queries.T, (0, TILE + LANES)).contiguous()
        self.none = self._empty(0, 0)
        self.begun: tuple[Group, Tensor, Tensor, Tensor] | None = None
        """A group of reads and what is summed for it: largest scores, sums of exponentials, sums of rows."""
        self.writing: _Waiting | None = None
        self.keeping: _Waiting | None = None
        self._make_nothings()

    def _make_nothings(self) -> None:
        """Arguments for steps that are not asked for: kernels want some of the right types."""
        none, zeros, real = np.zeros(0, dtype=np.int64), (0,) * 5, self.none.numpy()
        kinds = (self.tag, self.wide)
        self.no_write = (*zeros, *zeros, 0, self.scale, 0, self.normed, self.eps, *kinds)
        begin = (none, 0, 0, none, none, self.scale, none)
        self.no_mix_common = (*begin, *zeros, *kinds)
        self.no_mix = (*begin, 0, real, real, 0, 0, 0, 0, self.logs, 0, *kinds)
        self.no_keep = (*zeros, real, 0, *kinds)
        self.no_pull = (*begin, none, none, self.logs, real, *zeros, 0, real, *zeros[:3], 0, self.normed, 0, *kinds)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.exact)

    def _own(self, tensor: Tensor) -> Tensor:
        """`tensor` itself where kernels can take it, else a place for its copy."""
        return tensor if self.width == self.padded else tensor.new_empty(self.tokens, self.padded)

    def write(self, row: int, update: Tensor) -> None:
        """`update` [T, d] becomes a row, added to the row before where the plan says so."""
        readers = self.plan.readers[row]
        if readers[-1] - readers[0] + 1 == len(readers):
            queries, first_query = self.across, readers[0]
        else:
            queries, first_query = F.pad(self.across[:, list(readers)], (0, TILE + LANES)).contiguous(), 0
        update = update.contiguous()
        before = self.rows.kept[row - 1] if self.plan.joins[row] else None
        kept = self._own(update) if before is None else update.new_empty(self.tokens, self.padded)
        self.rows.keep(row, kept)
        self.flush()
        self.writing = (
            _place(update), self.width, -1 if before is None else _place(before), _place(kept), self.padded,
            queries.data_ptr() + first_query * queries.itemsize, queries.shape[1], len(readers),
            self.scores.data_ptr(), self.layout.begin(row), self.plan.columns[row + 1] - self.plan.columns[row],
            self.scale, row, self.normed, self.eps, self.tag, self.wide,
        ), (update, before, queries)  # fmt: skip
        for spent in self.plan.spent[row]:
            self.rows.drop(spent)

    def mix(self, read: int) -> Tensor:
        """h [T, d] of a read, in float32 or float64."""
        number, group, common, own = self.layout.mixing[read]
        begins = common is not None and (self.begun is None or self.begun[0] is not group)
        if begins:
            parts = self._empty(LANES, self.apart) if self.begun is None else self.begun[3]
            self.begun = group, self._empty(self.tokens, LANES), self._empty(self.tokens, LANES), parts
        sums = (self.none, self.none, self.none) if common is None or self.begun is None else self.begun[1:]
        shared = own if common is None else common
        out = self._empty(self.tokens, self.width)
        self._forward(begins, (
            self.rows.places[shared.rows], self.padded, self.scores.data_ptr(), shared.columns, shared.segments,
            self.scale, shared.rows, len(group.members), *(part.data_ptr() for part in sums), self.apart,
            self.tag, self.wide,
        ), (
            self.rows.places[own.rows], self.padded, self.scores.data_ptr(), own.columns, own.segments, self.scale,
            own.rows, -1 if common is None else number, sums[0].numpy(), sums[1].numpy(), sums[2].data_ptr(), self.apart,
            _place(out), self.width, self.logs, read, self.tag, self.wide,
        ))  # fmt: skip
        return out

    def _forward(self, begins: bool, common: _Step, mixed: _Step | None = None) -> None:
        """A read, and the write that waits for it."""
        waiting, self.writing = self.writing, None
        written = self.no_write if waiting is None else waiting[0]
        mixes = mixed is not None
        call(_forward, waiting is not None, written, begins, common, mixes, mixed or self.no_mix, self.tokens, self.chunk)

    def _backward(self, begins: bool, common: _Step, pulled: _Step | None = None) -> None:
        """The gradient of a row, and what waits for it: that of a read is kept."""
        waiting, self.keeping = self.keeping, None
        kept = self.no_keep if waiting is None else waiting[0]
        pulls = pulled is not None
        call(_backward, waiting is not None, kept, begins, common, pulls, pulled or self.no_pull, self.tokens, self.chunk)

    def flush(self) -> None:
        """Do what waits for a next step."""
        if self.writing is not None:
            self._forward(False, self.no_mix_common)
        if self.keeping is not None:
            self._backward(False, self.no_pull)

    def row(self, row: int) -> Tensor | None:
        """A copy of a row, [T, d]; None where it is gone."""
        self.flush()
        kept = self.rows.kept[row]
        return None if kept is None else kept[:, : self.width].clone()

    # --- backward

    def begin_backward(self) -> None:
        """Make room for a backward pass."""
        self.flush()
        reads = len(self.plan.reads)
        self.gradients = _Tensors(reads)
        self.means, self.norms = self._empty(reads, self.tokens).numpy(), self._empty(LANES + 1, self.tokens).numpy()
        self.by_query = torch.zeros(-(-self.tokens // self.chunk), reads, self.padded, dtype=self.exact)
        self.begun, self.pulled = None, None
        self.pulled_parts = self._empty(LANES, self.apart)

    def receive(self, read: int, gradient: Tensor, h: Tensor) -> None:
        """The gradient [T, d] of what `mix` gave for a read."""
        gradient = gradient.contiguous()
        kept = self._own(gradient)
        self.gradients.keep(read, kept)
        self.flush()
        self.keeping = (
            _place(gradient), _place(h), self.width, _place(kept), self.padded, self.means, read, self.tag, self.wide,
        ), (gradient, h)  # fmt: skip

    def receive_nothing(self, read: int) -> None:
        """A read that the loss does not depend on."""
        self.gradients.keep(read, torch.zeros(self.tokens, self.padded, dtype=self.dtype))
        self.means[read] = 0

    def pull(self, row: int, above: Tensor | None, extra: Tensor | None) -> Tensor:
        """The gradient [T, d] of a row, all its reads' being there; `above` is that of the row that it joined."""
        number, group, together, alone, common, own = self.layout.pulling[row]
        out = torch.empty(self.tokens, self.width, dtype=self.dtype)
        self.rows.require_unchanged(row)
        begins = len(common) > 0 and self.pulled is not group
        if begins:
            self.pulled = group
        first = self._pulled(together, common, -1, None, None, out) if begins else self.no_pull
        self._backward(begins, first, self._pulled(alone, own, number if len(common) else LANES, above, extra, out))
        return out

    def _pulled(
        self, rows: _Rows, reads: Index, begun: int, above: Tensor | None, extra: Tensor | None, out: Tensor
    ) -> tuple[Any, ...]:
        return (
            self.rows.places[rows.rows], self.padded, self.scores.data_ptr(), rows.columns, rows.segments, self.scale,
            rows.rows, self.gradients.places[reads], reads, self.logs, self.means, self.queries.data_ptr(),
            self.by_query.data_ptr(), self.by_query.stride(0), self.pulled_parts.data_ptr(), self.apart, begun,
            self.norms, _place(above), _place(extra), _place(out), self.width, self.normed, self.chunk,
            self.tag, self.wide,
        )  # fmt: skip

    def query_gradient(self) -> Tensor:
        """[L, d], once all rows are pulled."""
        return self.by_query.sum(0)[:, : self.width]
