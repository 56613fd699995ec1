"""Depth attention of one query on the CPU, by Numba: each token's sources are read once, forward and backward.

Letters: n sources, T tokens, d width; s_i scores, r_i = 1/rms, a_i weights. Sources are separate tensors [T, d], handed
over as addresses and distances between tokens, so that none is copied. Every token is computed by itself and query
gradients are summed over a fixed number of tokens, so that results do not depend on the number of threads.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from reslab.kernels.depth_attention.simd import (
    FAST,
    LANES,
    alive,
    exp,
    first,
    fma,
    integer,
    integers,
    load,
    load_one,
    load_part,
    prefetch,
    real,
    settle,
    splat,
    store,
    store_one,
    store_part,
    stream,
    tag_of,
    total,
)  # fmt: skip
from reslab.kernels.depth_attention.threads import call, entry

__all__ = ["backward", "forward", "inline", "put", "take"]

SUMMED = 16
"""Tokens whose part of the query's gradient is summed in float32."""

CHUNK = 64
"""Tokens that a thread takes at a time."""

CACHED = 2**25
"""Bytes: of more than this, caches keep little of what is written until it is read (measured; see docs/log.md)."""

tag: Any = None
wide: Any = None
"""The format of sources, and that of arithmetic: `_entries` compiles a kernel for each, where they are constants."""


def inline(function: Any) -> Any:
    """A part of kernels."""
    return numba.njit(function, fastmath=FAST, error_model="numpy", inline="always")


@inline
def take(row: Any, j: Any, width: Any, tag: Any) -> Any:
    """Eight numbers from column j of a row `width` long; 0 behind its end."""
    if j + LANES <= width:
        return load(0, row + j, tag)
    return load_part(0, row + j, max(width - j, 0), tag)


@inline
def put(row: Any, j: Any, width: Any, value: Any, tag: Any) -> None:
    """Eight numbers to column j of a row `width` long, but not behind its end."""
    if j + LANES <= width:
        store(0, row + j, value, tag)
    else:
        store_part(0, row + j, max(width - j, 0), value, tag)


def attend(arguments: Any, start: Any, stop: Any) -> None:
    """Fills out [T, d] in the sources' format, and a, r and s [T, n]."""
    sources, strides, count, query, eps, out, weights, scale, scores, width = integers(arguments, 10)
    one = wide + np.float32(1)
    for t in range(start, stop):
        ahead, saved = min(t + 1, stop - 1), t * count
        top = wide - np.float32(np.inf)
        for i in range(count):
            row, next_row = (
                integer(sources, i) + t * integer(strides, i),
                integer(sources, i) + ahead * integer(strides, i),
            )
            dot = square = more_dot = more_square = splat(wide)
            for j in range(0, width, 2 * LANES):
                prefetch(0, next_row + j, tag)
                v, w = take(row, j, width, tag), take(row, j + LANES, width, tag)
                dot, square = fma(v, load(query, j, wide), dot), fma(v, v, square)
                more_dot, more_square = fma(w, load(query, j + LANES, wide), more_dot), fma(w, w, more_square)
            r = one / np.sqrt(total(square + more_square) / real(width, wide) + load_one(eps, 0, wide))
            s = total(dot + more_dot) * r
            store_one(0, scale + saved + i, r, wide)
            store_one(0, scores + saved + i, s, wide)
            if not s <= top:
                top = s
        sums = splat(wide)
        for i in range(0, count, LANES):
            e = first(exp(take(scores + saved, i, count, wide) - splat(top)), count - i)
            put(weights + saved, i, count, e, wide)
            sums = sums + e
        inverse = one / total(sums)
        for i in range(count):
            store_one(0, weights + saved + i, load_one(0, weights + saved + i, wide) * inverse, wide)
        for j in range(0, width, 2 * LANES):
            x = y = splat(wide)
            for i in range(count):
                row, a = integer(sources, i) + t * integer(strides, i), splat(load_one(0, weights + saved + i, wide))
                x, y = fma(a, take(row, j, width, tag), x), fma(a, take(row, j + LANES, width, tag), y)
            put(out + t * width, j, width, x, tag)
            put(out + t * width, j + LANES, width, y, tag)


def differentiate(arguments: Any, start: Any, stop: Any) -> None:
    """Fills the sources' gradients, each [T, d], and the parts of the query's, [T / 16, padded d].

    With g the gradient of h and p_i = g . v_i: ds_i = a_i (p_i - sum_k a_k p_k), and
    dv_i = a_i g + ds_i (r_i w - s_i r_i^2 v_i / d), dw = sum_i ds_i r_i v_i.
    """
    (
        sources, strides, gradients, count, query, grad, weights, scale, scores, parts, width, padded, past_caches,
    ) = integers(arguments, 13)  # fmt: skip
    p_memory, u_memory = np.empty(count), np.empty(padded)
    products, of_token = p_memory.ctypes.data, u_memory.ctypes.data
    for t in range(start, stop):
        ahead, saved, part = min(t + 1, stop - 1), t * count, t // SUMMED * padded
        g, mean = grad + t * width, wide
        for j in range(0, padded, LANES):
            store(of_token, j, splat(wide), wide)
        for i in range(count):
            row, next_row = (
                integer(sources, i) + t * integer(strides, i),
                integer(sources, i) + ahead * integer(strides, i),
            )
            x = y = splat(wide)
            for j in range(0, width, 2 * LANES):
                prefetch(0, next_row + j, tag)
                x = fma(take(g, j, width, tag), take(row, j, width, tag), x)
                y = fma(take(g, j + LANES, width, tag), take(row, j + LANES, width, tag), y)
            product = total(x + y)
            store_one(products, i, product, wide)
            mean += load_one(0, weights + saved + i, wide) * product
        for i in range(count):
            row, to = integer(sources, i) + t * integer(strides, i), integer(gradients, i) + t * width
            a, r = load_one(0, weights + saved + i, wide), load_one(0, scale + saved + i, wide)
            by_score = a * (load_one(products, i, wide) - mean)
            by_query = splat(by_score * r)
            by_norm = splat(-by_score * load_one(0, scores + saved + i, wide) * r * r / real(width, wide))
            for j in range(0, width, LANES):
                v = take(row, j, width, tag)
                value = fma(splat(a), take(g, j, width, tag), fma(by_query, load(query, j, wide), by_norm * v))
                if past_caches:
                    stream(0, to + j, value, tag)
                else:
                    put(to, j, width, value, tag)
                store(of_token, j, fma(by_query, v, load(of_token, j, wide)), wide)
        for j in range(0, padded, LANES):  # first by token, then over tokens: short sums round less
            before = load(parts, part + j, wide) if t % SUMMED else splat(wide)
            store(parts, part + j, before + load(of_token, j, wide), wide)
    settle()
    alive(p_memory)
    alive(u_memory)


@cache
def _entries(dtype: torch.dtype) -> dict[str, int]:
    """Addresses of the kernels for sources of this format, to be called by `threads.call`."""
    formats = {"tag": tag_of(dtype), "wide": tag_of(torch.float32)}
    return {kernel.__name__: entry(kernel, formats, str(dtype)).address for kernel in (attend, differentiate)}


def _places(tensors: Sequence[Tensor]) -> np.ndarray:
    """Where each begins, in numbers from address 0."""
    return np.array([tensor.data_ptr() // tensor.itemsize for tensor in tensors], dtype=np.int64)


def _padded(query: Tensor) -> Tensor:
    """Zeros behind its end, up to whole steps of the kernels."""
    return torch.nn.functional.pad(query, (0, -len(query) % (2 * LANES)))


def _rows(sources: Sequence[Tensor]) -> tuple[list[Tensor], np.ndarray, np.ndarray]:
    """Sources whose numbers of a token lie side by side, where they are, and how far tokens are apart."""
    rows = [source if source.stride(-1) == 1 or source.shape[-1] == 1 else source.contiguous() for source in sources]
    return rows, _places(rows), np.array([row.stride(0) for row in rows], dtype=np.int64)


def forward(query: Tensor, sources: list[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [T, d], and a, r and s [T, n] in float32, of a float32 query [d] and sources [T, d]."""
    rows, places, strides = _rows(sources)
    (tokens, width), padded = rows[0].shape, _padded(query)
    out = rows[0].new_empty(tokens, width)
    weights, scale, scores = (query.new_empty(tokens, len(rows)) for _ in range(3))
    small = query.new_full((1,), eps)
    arguments = (
        places.ctypes.data, strides.ctypes.data, len(rows), padded.data_ptr(), small.data_ptr(), *_places([out]),
        *_places([weights, scale, scores]), width,
    )  # fmt: skip
    call([(_entries(out.dtype)["attend"], arguments)], tokens, CHUNK)
    return out, weights, scale, scores


def past_caches(written: Sequence[Tensor]) -> bool:
    """Whether tensors [T, d] are written past the caches, which spares reading what is overwritten."""
    vector = LANES * written[0].itemsize
    whole = written[0].shape[-1] % LANES == 0 and all(each.data_ptr() % vector == 0 for each in written)
    return whole and sum(each.nbytes for each in written) > CACHED


def backward(
    grad: Tensor, query: Tensor, sources: list[Tensor], weights: Tensor, scale: Tensor, scores: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the query [d], in float32, and of each source [T, d]; `grad` [T, d] is that of h."""
    rows, places, strides = _rows(sources)
    (tokens, width), padded, grad = grad.shape, _padded(query), grad.contiguous()
    gradients = [grad.new_empty(tokens, width) for _ in rows]
    of_gradients = _places(gradients)
    parts = query.new_empty(-(-tokens // SUMMED), len(padded))
    arguments = (
        places.ctypes.data, strides.ctypes.data, of_gradients.ctypes.data, len(rows), padded.data_ptr(),
        *_places([grad, weights, scale, scores]), parts.data_ptr(), width, len(padded),
        past_caches(gradients),
    )  # fmt: skip
    call([(_entries(grad.dtype)["differentiate"], arguments)], tokens, CHUNK)
    return parts.double().sum(0)[:width].float(), gradients
