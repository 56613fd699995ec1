"""Depth attention across layers on the CPU: what `bank` does to its memory, by Numba.

Letters: T tokens, d width, R rows, L queries; v_i rows, r_i = 1/rms, s_li = w_l . v_i (not divided by the rms), g_l
the gradient of h_l. Rows and gradients are tensors [T, d] of their own, handed over as addresses, d padded to a
multiple of 16 with zeros where it is none. What is computed for a token depends on nothing else, and query gradients
are summed over chunks of fixed size, so that no result depends on the number of threads.

Scratch begins as zeros where lanes without a number are computed from it: what lies in fresh memory is often subnormal,
and one operation on a subnormal number takes as long as a hundred others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from reslab.kernels.depth_attention.cpu import inline, put, take
from reslab.kernels.depth_attention.plan import Group, Plan
from reslab.kernels.depth_attention.simd import (
    LANES,
    alive,
    exp,
    first,
    fma,
    integer,
    integers,
    load,
    load_one,
    maximum,
    minus,
    prefetch,
    real,
    splat,
    store,
    store_one,
    tag_of,
    total,
    totals,
)  # fmt: skip
from reslab.kernels.depth_attention.threads import call, entry
from reslab.schema import UserError

__all__ = ["CpuHistory"]

TILE = 2 * LANES
"""Widths are padded to multiples of it."""

TOGETHER = 16
"""Tokens whose part of the queries' gradient is summed before it goes to memory."""

SUMMED = 16
"""Terms of a score that are summed by themselves, and then these sums: a single chain rounds with each term."""

PIECE = 64 * LANES
"""Channels of a product of two rows that are summed by themselves, likewise."""

tag: Any = None
wide: Any = None
"""The format of rows, and that of arithmetic: `_entries` compiles a kernel for each, where they are constants."""


def write(arguments: Any, start: Any, stop: Any) -> None:
    """Row `place` becomes `source` [T, d], added to row `before` unless that is -1; its scores for `count` queries.

    Nothing is copied where `source` is `place`. `queries` [d, L] across; scores go to [T, segment] at `at`, 1/rms to
    `scale` [R, T].
    """
    (
        source, width, before, place, padded, queries, across, count, scores, at, segment, scale, slot, normed, eps,
        tokens,
    ) = integers(arguments, 16)  # fmt: skip
    memory = np.empty(4 * padded)
    row = memory.ctypes.data
    one = wide + np.float32(1)
    for t in range(start, stop, 4):
        here = min(4, stop - t)
        for u in range(here):
            squares = splat(wide)
            for j in range(0, padded, LANES):
                value = take(source + (t + u) * width, j, width, tag)
                if before >= 0:
                    value = value + load(0, before + (t + u) * padded + j, tag)
                if source != place:
                    store(0, place + (t + u) * padded + j, value, tag)
                    value = load(0, place + (t + u) * padded + j, tag)  # as rounded
                store(row, u * padded + j, value, wide)
                squares = fma(value, value, squares)
            if normed:
                mean = total(squares) / real(width, wide)
                store_one(scale, slot * tokens + t + u, one / np.sqrt(mean + load_one(eps, 0, wide)), wide)
            else:
                store_one(scale, slot * tokens + t + u, one, wide)
        for q in range(0, count, TILE):
            p0 = p1 = r0 = r1 = s0 = s1 = t0 = t1 = splat(wide)
            for begin in range(0, width, SUMMED):
                a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = splat(wide)
                for j in range(begin, min(begin + SUMMED, width)):
                    x, y = load(queries, j * across + q, wide), load(queries, j * across + q + LANES, wide)
                    k = splat(load_one(row, j, wide))
                    a0, a1 = fma(k, x, a0), fma(k, y, a1)
                    k = splat(load_one(row, padded + j, wide))
                    b0, b1 = fma(k, x, b0), fma(k, y, b1)
                    k = splat(load_one(row, 2 * padded + j, wide))
                    c0, c1 = fma(k, x, c0), fma(k, y, c1)
                    k = splat(load_one(row, 3 * padded + j, wide))
                    d0, d1 = fma(k, x, d0), fma(k, y, d1)
                p0, p1, r0, r1 = p0 + a0, p1 + a1, r0 + b0, r1 + b1
                s0, s1, t0, t1 = s0 + c0, s1 + c1, t0 + d0, t1 + d1
            a0, a1, b0, b1, c0, c1, d0, d1 = p0, p1, r0, r1, s0, s1, t0, t1
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
    alive(memory)


def mix_common(arguments: Any, start: Any, stop: Any) -> None:
    """For up to eight queries at once, of the rows they all read: the largest score, and, relative to it, sums of
    exponentials and of rows weighted by them: [T, 8], [T, 8], [8, T, d]."""
    (
        table, rows, padded, scores, slots, at, segments, scale, queries, largest, sums, parts, apart, tokens
    ) = integers(arguments, 14)  # fmt: skip
    memory, where = np.empty(rows * LANES), _looked_up(table, slots, rows)
    a, places = memory.ctypes.data, where.ctypes.data
    for t in range(start, stop):
        ahead = min(t + 1, stop - 1)
        for i in range(rows):
            prefetch(scores, integer(at, i) + ahead * integer(segments, i), wide)
        _ahead(places, rows, ahead * padded, padded, tag)
        top = splat(wide - np.float32(np.inf))
        for i in range(rows):
            score = load(scores, integer(at, i) + t * integer(segments, i), wide) * splat(
                load_one(scale, integer(slots, i) * tokens + t, wide)
            )
            store(a, i * LANES, score, wide)
            top = maximum(score, top)
        weight = splat(wide)
        for i in range(rows):
            e = exp(minus(load(a, i * LANES, wide), top))
            store(a, i * LANES, e, wide)
            weight = weight + e
        store(largest, t * LANES, top, wide)
        store(sums, t * LANES, weight, wide)
        for q in range(0, queries, 4):
            for j in range(0, padded, TILE):
                a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = splat(wide)
                for i in range(rows):
                    at_row = integer(places, i) + t * padded + j
                    x, y = load(0, at_row, tag), load(0, at_row + LANES, tag)
                    k = splat(load_one(a, i * LANES + q, wide))
                    a0, a1 = fma(k, x, a0), fma(k, y, a1)
                    k = splat(load_one(a, i * LANES + q + 1, wide))
                    b0, b1 = fma(k, x, b0), fma(k, y, b1)
                    k = splat(load_one(a, i * LANES + q + 2, wide))
                    c0, c1 = fma(k, x, c0), fma(k, y, c1)
                    k = splat(load_one(a, i * LANES + q + 3, wide))
                    d0, d1 = fma(k, x, d0), fma(k, y, d1)
                to = parts + q * apart + t * padded + j
                _store_two(to, a0, a1, wide)
                _store_two(to + apart, b0, b1, wide)
                _store_two(to + 2 * apart, c0, c1, wide)
                _store_two(to + 3 * apart, d0, d1, wide)
    alive(memory)
    alive(where)


def mix(arguments: Any, start: Any, stop: Any) -> None:
    """h [T, d] of one query, to `out`; its largest score, and ln sum exp of scores less that, to `logs` [L, 2, T].

    Of the rows `slots`, and of those that `mix_common` has summed for query `begun` of eight, unless that is -1.
    """
    (
        table, count, padded, scores, slots, at, segments, scale, begun, largest, sums, parts, apart, out, width,
        logs, query, tokens
    ) = integers(arguments, 18)  # fmt: skip
    one = wide + np.float32(1)
    memory, where = np.zeros(count + LANES), _looked_up(table, slots, count)
    a, places = memory.ctypes.data, where.ctypes.data
    for t in range(start, stop):
        ahead = min(t + 2, stop - 1)
        _ahead(places, count, ahead * padded, padded, tag)
        if begun >= 0:
            for j in range(0, padded, 16):
                prefetch(0, parts + begun * apart + ahead * padded + j, wide)
        top = wide - np.float32(np.inf)
        if begun >= 0:
            top = load_one(largest, t * LANES + begun, wide)
        for i in range(count):
            score = load_one(scores, integer(at, i) + t * integer(segments, i), wide) * load_one(
                scale, integer(slots, i) * tokens + t, wide
            )
            store_one(a, i, score, wide)
            if not score <= top:
                top = score
        weight = splat(wide)
        for i in range(0, count, LANES):
            e = first(exp(minus(load(a, i, wide), splat(top))), count - i)
            store(a, i, e, wide)
            weight = weight + e
        share = wide
        whole = total(weight)
        if begun >= 0:
            share = np.exp(load_one(largest, t * LANES + begun, wide) - top)
            whole += share * load_one(sums, t * LANES + begun, wide)
        store_one(logs, 2 * query * tokens + t, top, wide)
        store_one(logs, (2 * query + 1) * tokens + t, np.log(whole), wide)
        inverse = one / whole
        for i in range(0, count, LANES):
            store(a, i, load(a, i, wide) * splat(inverse), wide)
        share *= inverse
        for j in range(0, padded, TILE):
            x = y = splat(wide)
            if begun >= 0:
                part = parts + begun * apart + t * padded + j
                k = splat(share)
                x, y = k * load(0, part, wide), k * load(0, part + LANES, wide)
            for i in range(count):
                at_row = integer(places, i) + t * padded + j
                k = splat(load_one(a, i, wide))
                x, y = fma(k, load(0, at_row, tag), x), fma(k, load(0, at_row + LANES, tag), y)
            put(out + t * width, j, width, x, wide)
            put(out + t * width, j + LANES, width, y, wide)
    alive(memory)
    alive(where)


def keep_gradient(arguments: Any, start: Any, stop: Any) -> None:
    """g [T, d] into its row, unless it is there, and <g, h> into row `query` of `means` [L, T]."""
    (
        source, h, width, place, padded, means, query, tokens
    ) = integers(arguments, 8)  # fmt: skip
    for t in range(start, stop):
        whole = wide
        for begin in range(0, padded, PIECE):  # in the order of `_products`: equal rows have equal products
            product = splat(wide)
            for j in range(begin, min(begin + PIECE, padded), LANES):
                g = take(source + t * width, j, width, tag)
                if source != place:
                    store(0, place + t * padded + j, g, tag)
                product = fma(g, take(h + t * width, j, width, wide), product)
            whole += total(product)
        store_one(means, query * tokens + t, whole, wide)


@inline
def _looked_up(table: Any, numbers: Any, count: Any) -> Any:
    """What a table of int64 has at each of some numbers."""
    found = np.empty(count, np.int64)
    for i in range(count):
        found[i] = integer(table, integer(numbers, i))
    return found


@inline
def _ahead(places: Any, count: Any, from_number: Any, padded: Any, tag: Any) -> None:
    """Begin to bring some rows of a token to the cache."""
    for i in range(count):
        for j in range(0, padded, 2 * LANES):
            prefetch(0, integer(places, i) + from_number + j, tag)


@inline
def _products(v: Any, sources: Any, base: Any, k: Any, reads: Any, padded: Any, tag: Any, wide: Any) -> Any:
    """<v, g_l> of a row and up to eight gradients from the k-th on; those behind the last are anything."""
    whole = splat(wide)
    for begin in range(0, padded, PIECE):
        stop = min(begin + PIECE, padded)
        whole = whole + _products_of_piece(v, sources, base, k, reads, begin, stop, tag, wide)
    return whole


@inline
def _products_of_piece(
    v: Any, sources: Any, base: Any, k: Any, reads: Any, begin: Any, stop: Any, tag: Any, wide: Any
) -> Any:
    last = reads - 1
    p0 = p1 = p2 = p3 = p4 = p5 = p6 = p7 = splat(wide)
    g0, g1 = base + integer(sources, k), base + integer(sources, min(k + 1, last))
    g2, g3 = base + integer(sources, min(k + 2, last)), base + integer(sources, min(k + 3, last))
    if reads - k > 4:
        g4, g5 = base + integer(sources, min(k + 4, last)), base + integer(sources, min(k + 5, last))
        g6, g7 = base + integer(sources, min(k + 6, last)), base + integer(sources, min(k + 7, last))
        for j in range(begin, stop, LANES):
            x = load(0, v + j, tag)
            p0, p1 = fma(x, load(0, g0 + j, tag), p0), fma(x, load(0, g1 + j, tag), p1)
            p2, p3 = fma(x, load(0, g2 + j, tag), p2), fma(x, load(0, g3 + j, tag), p3)
            p4, p5 = fma(x, load(0, g4 + j, tag), p4), fma(x, load(0, g5 + j, tag), p5)
            p6, p7 = fma(x, load(0, g6 + j, tag), p6), fma(x, load(0, g7 + j, tag), p7)
    elif reads - k > 1:
        for j in range(begin, stop, LANES):
            x = load(0, v + j, tag)
            p0, p1 = fma(x, load(0, g0 + j, tag), p0), fma(x, load(0, g1 + j, tag), p1)
            p2, p3 = fma(x, load(0, g2 + j, tag), p2), fma(x, load(0, g3 + j, tag), p3)
    else:
        for j in range(begin, stop, LANES):
            p0 = fma(load(0, v + j, tag), load(0, g0 + j, tag), p0)
    return totals(p0, p1, p2, p3, p4, p5, p6, p7)


@inline
def _gather_rows(
    count: Any, padded: Any, sources: Any, events: Any, reads: Any, queries: Any, base: Any, a: Any, c: Any,
    c_at: Any, events_padded: Any, to: Any, apart: Any, tag: Any, wide: Any,
) -> None:  # fmt: skip
    """sum_l (a_li g_l + c_li w_l) of a token, for four rows at once, to memory `to`, rows `apart`."""
    for i in range(0, count, 4):
        at = i * events_padded
        for j in range(0, padded, TILE):
            x0 = x1 = y0 = y1 = z0 = z1 = w0 = w1 = splat(wide)
            for k in range(reads):
                g = base + integer(sources, k) + j
                g0, g1 = load(0, g, tag), load(0, g + LANES, tag)
                q = integer(events, k) * padded + j
                q0, q1 = load(queries, q, wide), load(queries, q + LANES, wide)
                f, e = splat(load_one(a, at + k, wide)), splat(load_one(c, c_at + at + k, wide))
                x0, x1 = fma(e, q0, fma(f, g0, x0)), fma(e, q1, fma(f, g1, x1))
                n = at + events_padded + k
                f, e = splat(load_one(a, n, wide)), splat(load_one(c, c_at + n, wide))
                y0, y1 = fma(e, q0, fma(f, g0, y0)), fma(e, q1, fma(f, g1, y1))
                n = at + 2 * events_padded + k
                f, e = splat(load_one(a, n, wide)), splat(load_one(c, c_at + n, wide))
                z0, z1 = fma(e, q0, fma(f, g0, z0)), fma(e, q1, fma(f, g1, z1))
                n = at + 3 * events_padded + k
                f, e = splat(load_one(a, n, wide)), splat(load_one(c, c_at + n, wide))
                w0, w1 = fma(e, q0, fma(f, g0, w0)), fma(e, q1, fma(f, g1, w1))
            _store_two(to + i * apart + j, x0, x1, wide)
            _store_two(to + (i + 1) * apart + j, y0, y1, wide)
            _store_two(to + (i + 2) * apart + j, z0, z1, wide)
            _store_two(to + (i + 3) * apart + j, w0, w1, wide)


@inline
def _store_two(place: Any, x: Any, y: Any, wide: Any) -> None:
    store(0, place, x, wide)
    store(0, place + LANES, y, wide)


@inline
def _add_two(place: Any, x: Any, y: Any, wide: Any) -> None:
    store(0, place, load(0, place, wide) + x, wide)
    store(0, place + LANES, load(0, place + LANES, wide) + y, wide)


@inline
def _add_to_queries(
    v: Any, padded: Any, here: Any, c: Any, c_at: Any, apart: Any, events: Any, reads: Any, to: Any, tag: Any, wide: Any
) -> None:
    """c_li v_i of one row and a few tokens (`here`), those of a token `apart`, added to each w_l's gradient at `to`."""
    for k in range(0, reads - 3, 4):
        for j in range(0, padded, TILE):
            x0 = x1 = y0 = y1 = z0 = z1 = w0 = w1 = splat(wide)
            for u in range(here):
                v0, v1 = load(0, v + u * padded + j, tag), load(0, v + u * padded + j + LANES, tag)
                f = splat(load_one(c, c_at + u * apart + k, wide))
                x0, x1 = fma(f, v0, x0), fma(f, v1, x1)
                f = splat(load_one(c, c_at + u * apart + k + 1, wide))
                y0, y1 = fma(f, v0, y0), fma(f, v1, y1)
                f = splat(load_one(c, c_at + u * apart + k + 2, wide))
                z0, z1 = fma(f, v0, z0), fma(f, v1, z1)
                f = splat(load_one(c, c_at + u * apart + k + 3, wide))
                w0, w1 = fma(f, v0, w0), fma(f, v1, w1)
            _add_two(to + integer(events, k) * padded + j, x0, x1, wide)
            _add_two(to + integer(events, k + 1) * padded + j, y0, y1, wide)
            _add_two(to + integer(events, k + 2) * padded + j, z0, z1, wide)
            _add_two(to + integer(events, k + 3) * padded + j, w0, w1, wide)
    for k in range(reads // 4 * 4, reads):
        for j in range(0, padded, TILE):
            x0 = x1 = splat(wide)
            for u in range(here):
                f, n = splat(load_one(c, c_at + u * apart + k, wide)), v + u * padded + j
                x0, x1 = fma(f, load(0, n, tag), x0), fma(f, load(0, n + LANES, tag), x1)
            _add_two(to + integer(events, k) * padded + j, x0, x1, wide)


def pull(arguments: Any, start: Any, stop: Any) -> None:
    """What reads `events` add to the gradients of up to eight rows, and these rows to the gradients of the queries.

    With a_li = exp((s_li r_i - top_l) - log_l) (`logs` [L, 2, T]) and c_li = a_li (<g_l, v_i> - <g_l, h_l>) r_i:
    dv_i = sum_l (a_li g_l + c_li w_l) - (r_i^2 / d) (sum_l c_li s_li) v_i, and dw_l = sum_i c_li v_i.
    Sums go to `parts` [8, T, d] and `norms` [9, T]; where `begun` is not -1 there is one row, whose sums of that
    number are completed (begun = 8: nothing is begun), and its gradient goes to `out`, with `above` and `extra` added.
    """
    (
        table, count, padded, scores, slots, at, segments, scale, gradients, events, reads, logs, means, queries,
        by_query, by_chunk, parts, apart, begun, norms, above, extra, out, width, normed, chunk, tokens
    ) = integers(arguments, 27)  # fmt: skip
    where, whose = _looked_up(table, slots, count), _looked_up(gradients, events, reads)
    places, sources = where.ctypes.data, whose.ctypes.data
    events_padded = (reads + LANES - 1) // LANES * LANES
    a_memory, c_memory = np.zeros((count + 3) * events_padded), np.zeros(TOGETHER * LANES * events_padded)
    of_reads = np.zeros(3 * events_padded)
    a, c = a_memory.ctypes.data, c_memory.ctypes.data
    top = of_reads.ctypes.data
    log, mean = top + 8 * events_padded, top + 16 * events_padded
    of_token = LANES * events_padded
    for block in range(start, stop, TOGETHER):
        here = min(TOGETHER, stop - block)
        for u in range(here):
            t, ahead = block + u, min(block + u + 2, stop - 1)
            c_at, base = u * of_token, t * padded
            _ahead(places, count, ahead * padded, padded, tag)
            _ahead(sources, reads, ahead * padded, padded, tag)
            for k in range(reads):
                at_event = integer(events, k) * tokens + t
                store_one(top, k, load_one(logs, at_event + integer(events, k) * tokens, wide), wide)
                store_one(log, k, load_one(logs, at_event + (integer(events, k) + 1) * tokens, wide), wide)
                store_one(mean, k, load_one(means, at_event, wide), wide)
            for i in range(count):
                norm = load_one(norms, begun * tokens + t, wide) if 0 <= begun < LANES else wide
                r = splat(load_one(scale, integer(slots, i) * tokens + t, wide))
                for k in range(0, reads, LANES):
                    left = reads - k
                    p = _products(integer(places, i) + base, sources, base, k, reads, padded, tag, wide)
                    s = first(load(scores, integer(at, i) + t * integer(segments, i) + k, wide), left)
                    weight = first(exp(minus(minus(s * r, load(top, k, wide)), load(log, k, wide))), left)
                    by_score = first(weight * (p - load(mean, k, wide)) * r, left)
                    store(a, i * events_padded + k, weight, wide)
                    store(c, c_at + i * events_padded + k, by_score, wide)
                    norm += total(by_score * s)
                store_one(norms, (i if begun < 0 else LANES) * tokens + t, norm, wide)
            if begun < 0:
                _gather_rows(
                    count, padded, sources, events, reads, queries, base, a, c, c_at, events_padded, parts + base,
                    apart, tag, wide,
                )  # fmt: skip
            else:
                r_one = load_one(scale, integer(slots, 0) * tokens + t, wide)
                by_norm = wide
                if normed:
                    by_norm = -load_one(norms, LANES * tokens + t, wide) * r_one * r_one / real(width, wide)
                for j in range(0, padded, LANES):
                    x = splat(by_norm) * load(0, integer(places, 0) + base + j, tag)
                    if begun < LANES:
                        x = x + load(0, parts + begun * apart + base + j, wide)
                    for k in range(reads):
                        f, e = splat(load_one(a, k, wide)), splat(load_one(c, c_at + k, wide))
                        g, q = base + integer(sources, k) + j, integer(events, k) * padded + j
                        x = fma(e, load(queries, q, wide), fma(f, load(0, g, tag), x))
                    if above != 0:
                        x = x + take(above + t * width, j, width, tag)
                    if extra != 0:
                        x = x + take(extra + t * width, j, width, tag)
                    put(out + t * width, j, width, x, tag)
        to = by_query + block // chunk * by_chunk
        for i in range(count):
            v = integer(places, i) + block * padded
            _add_to_queries(v, padded, here, c, i * events_padded, of_token, events, reads, to, tag, wide)
    alive(where)
    alive(whose)
    alive(a_memory)
    alive(c_memory)
    alive(of_reads)


# --- compiled for a format ------------------------------------------------------------------------


@cache
def _entries(dtype: torch.dtype) -> dict[str, int]:
    """Addresses of the kernels for rows of this format, to be called by `threads.call`."""
    formats = {"tag": tag_of(dtype), "wide": tag_of(torch.float64 if dtype == torch.float64 else torch.float32)}
    kernels = {"write": write, "mix_common": mix_common, "mix": mix, "keep": keep_gradient, "pull": pull}
    return {name: entry(kernel, formats, str(dtype)).address for name, kernel in kernels.items()}


# --- the memory of a pass -------------------------------------------------------------------------


CHUNK = 128
"""Tokens whose part of the queries' gradient is summed by one thread, at least."""

APART = 80
"""Numbers between rows, so that those of one token do not fall on each other in a cache."""

CHUNKS = 64
"""Chunks of tokens, at most."""

Step = tuple[str, tuple[int, ...]]
"""A kernel's name and its arguments."""


class _Numbers:
    """Some int64 numbers, and where they are."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = np.array(numbers, dtype=np.int64)
        self.address = _address(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class _Rows:
    """Some rows, as kernels take them, and where their scores are."""

    rows: _Numbers
    columns: _Numbers
    segments: _Numbers

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        return self.rows.address, self.columns.address, self.segments.address


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
        behind = [
            self.plan.column(row, reads[0]) - begin if reads else 0 for row, begin in zip(rows, begins, strict=True)
        ]
        columns = [self.begin(row) + column for row, column in zip(rows, behind, strict=True)]
        return _Rows(_Numbers(rows), _Numbers(columns), _Numbers(segments))

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
    def pulling(self) -> dict[int, tuple[int, Group, _Rows, _Rows, _Numbers, _Numbers]]:
        """Of each row: its number in its group, the group, its rows, itself, and the common and its own reads."""
        found = {}
        for group in self.plan.pulling:
            together = self.rows(group.members, group.common)
            for number, row in enumerate(group.members):
                own = group.own[number]
                found[row] = number, group, together, self.rows([row], own), _Numbers(group.common), _Numbers(own)
        return found


@lru_cache(maxsize=64)
def _layout(plan: Plan, tokens: int) -> _Layout:
    return _Layout(plan, tokens)


def _require_version(tensor: Tensor, version: int) -> None:
    if _version(tensor) != version:
        raise UserError(
            "depth attention: what a sublayer put out was changed in place after it had joined the stream, which keeps "
            "it; change a copy of it"
        )


class _Tensors:
    """Tensors [T, d] one by one, and where each begins, in numbers from address 0."""

    def __init__(self, count: int) -> None:
        self.kept: list[Tensor | None] = [None] * count
        self.versions = [0] * count
        self.places = np.zeros(count, dtype=np.int64)
        self.address = _address(self.places)

    def keep(self, number: int, tensor: Tensor) -> None:
        self.kept[number], self.versions[number], self.places[number] = tensor, _version(tensor), _place(tensor)

    def drop(self, number: int) -> None:
        self.kept[number] = None

    def require_unchanged(self, number: int) -> None:
        tensor = self.kept[number]
        if tensor is not None:
            _require_version(tensor, self.versions[number])


def _version(tensor: Tensor) -> int:
    """Number of changes in place; those in inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _address(numbers: np.ndarray) -> int:
    return numbers.ctypes.data


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
        self.entries = _entries(like.dtype)
        self.rows = _Tensors(len(plan.joins))
        self.scores = self._empty(self.layout.begin(len(plan.joins)) + LANES)
        self.scale = self._empty(len(plan.joins), self.tokens)
        self.eps = self._empty(1).fill_(eps)
        self.logs = self._empty(len(plan.reads), 2, self.tokens).fill_(torch.inf)  # no weight, unless it is read
        self.queries = F.pad(queries.to(self.exact), (0, self.padded - self.width)).contiguous()
        self.across = F.pad(self.queries.T, (0, TILE + LANES)).contiguous()
        self.begun: tuple[Group, Tensor, Tensor, Tensor] | None = None
        """A group of reads and what is summed for it: largest scores, sums of exponentials, sums of rows."""
        self.waiting: tuple[Step, tuple[Any, ...], int] | None = None
        """A step that the next one takes along, what it needs until then, and the version of the first of it."""

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
        self._wait(("write", (
            _place(update), self.width, -1 if before is None else _place(before), _place(kept), self.padded,
            queries.data_ptr() + first_query * queries.itemsize, queries.shape[1], len(readers),
            self.scores.data_ptr(), self.layout.begin(row), self.plan.columns[row + 1] - self.plan.columns[row],
            self.scale.data_ptr(), row, self.normed, self.eps.data_ptr(), self.tokens,
        )), update, before, queries)  # fmt: skip
        for spent in self.plan.spent[row]:
            self.rows.drop(spent)

    def mix(self, read: int) -> Tensor:
        """h [T, d] of a read, in float32 or float64."""
        number, group, common, own = self.layout.mixing[read]
        steps: list[Step] = []
        out = self._empty(self.tokens, self.width)
        if common is None:
            number, sums = -1, [0, 0, 0]
        else:
            if self.begun is None or self.begun[0] is not group:
                steps.append(self._begin(group, common))
            assert self.begun is not None
            sums = self._begun()
        steps.append(("mix", (
            self.rows.address, len(own), self.padded, self.scores.data_ptr(), *own.addresses, self.scale.data_ptr(),
            number, *sums, self.apart, _place(out), self.width, self.logs.data_ptr(), read, self.tokens,
        )))  # fmt: skip
        self._run(steps)
        return out

    def _begin(self, group: Group, common: _Rows) -> Step:
        """Sum what a group of reads has in common."""
        parts = self._empty(LANES, self.apart) if self.begun is None else self.begun[3]
        self.begun = group, self._empty(self.tokens, LANES), self._empty(self.tokens, LANES), parts
        return "mix_common", (
            self.rows.address, len(common), self.padded, self.scores.data_ptr(), *common.addresses,
            self.scale.data_ptr(), len(group.members), *self._begun(), self.apart, self.tokens,
        )  # fmt: skip

    def _begun(self) -> list[int]:
        """Where the largest scores and the sums of exponentials are, and, in numbers, the sums of rows."""
        assert self.begun is not None
        _, largest, sums, parts = self.begun
        return [largest.data_ptr(), sums.data_ptr(), _place(parts)]

    def _wait(self, step: Step, *needed: Any) -> None:
        """Leave a step to the next one, which takes it along; `needed` is kept until then."""
        self.flush()
        self.waiting = step, needed, _version(needed[0])

    def _run(self, steps: list[Step]) -> None:
        """What waits, and then these steps, on a few tokens at a time, which so stay in the cache."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            step, (source, *_), version = waiting
            if step[0] == "write":
                _require_version(source, version)
            steps = [step, *steps]
        if steps:
            call([(self.entries[name], arguments) for name, arguments in steps], self.tokens, self.chunk)

    def flush(self) -> None:
        """Do what waits for a next step."""
        self._run([])

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
        self.means, self.norms = self._empty(reads, self.tokens), self._empty(LANES + 1, self.tokens)
        self.by_query = torch.zeros(-(-self.tokens // self.chunk), reads, self.padded, dtype=self.exact)
        self.begun = None
        self.pulled: Group | None = None
        self.pulled_parts = self._empty(LANES, self.apart)
        self._fill_gaps()

    def _fill_gaps(self) -> None:
        """Something finite for rows that are not there, as layers were skipped or are yet to run: kernels go through a
        group of rows as a whole. No read has a weight for them."""
        missing = [row for row, kept in enumerate(self.rows.kept) if kept is None]
        if missing:
            ones = torch.ones(self.tokens, self.padded, dtype=self.dtype)
        for row in missing:
            self.rows.keep(row, ones)
            self.scores[self.layout.begin(row) : self.layout.begin(row + 1)] = 0
            self.scale[row] = 1

    def receive(self, read: int, gradient: Tensor, h: Tensor) -> None:
        """The gradient [T, d] of what `mix` gave for a read."""
        gradient = gradient.contiguous()
        kept = self._own(gradient)
        self.gradients.keep(read, kept)
        self._wait(("keep", (
            _place(gradient), _place(h), self.width, _place(kept), self.padded, self.means.data_ptr(), read,
            self.tokens,
        )), gradient, h)  # fmt: skip

    def receive_nothing(self, read: int) -> None:
        """A read that the loss does not depend on."""
        self.gradients.keep(read, torch.zeros(self.tokens, self.padded, dtype=self.dtype))
        self.means[read] = 0

    def pull(self, row: int, above: Tensor | None, extra: Tensor | None) -> Tensor:
        """The gradient [T, d] of a row, all its reads' being there; `above` is that of the row that it joined."""
        number, group, together, alone, common, own = self.layout.pulling[row]
        out = torch.empty(self.tokens, self.width, dtype=self.dtype)
        self.rows.require_unchanged(row)
        steps: list[Step] = []
        if len(common) and self.pulled is not group:
            self.pulled = group
            steps.append(self._pull(together, common, -1))
        steps.append(self._pull(alone, own, number if len(common) else LANES, above, extra, out))
        self._run(steps)
        return out

    def _pull(
        self, rows: _Rows, reads: _Numbers, begun: int,
        above: Tensor | None = None, extra: Tensor | None = None, out: Tensor | None = None,
    ) -> Step:  # fmt: skip
        return "pull", (
            self.rows.address, len(rows), self.padded, self.scores.data_ptr(), *rows.addresses, self.scale.data_ptr(),
            self.gradients.address, reads.address, len(reads), self.logs.data_ptr(),
            self.means.data_ptr(), self.queries.data_ptr(), _place(self.by_query), self.by_query.stride(0),
            _place(self.pulled_parts), self.apart, begun, self.norms.data_ptr(), _place(above), _place(extra),
            _place(out), self.width, self.normed, self.chunk, self.tokens,
        )  # fmt: skip

    def query_gradient(self) -> Tensor:
        """[L, d], once all rows are pulled."""
        return self.by_query.sum(0)[:, : self.width]
