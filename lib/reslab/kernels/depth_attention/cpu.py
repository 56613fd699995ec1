"""Depth attention on the CPU, by Numba: each token's sources are read from memory once, forward and backward.

Letters: n sources, T tokens, d width; s_i scores, r_i = 1/rms, a_i weights. Sources are separate tensors [T, d] of
contiguous float32, handed over as addresses, so that none is copied. Every token is computed by itself and query
gradients are summed over chunks of fixed size, so that results do not depend on the number of threads.
"""

import math
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from reslab.kernels.depth_attention.threads import call

__all__ = ["backward", "forward"]

CHUNK = 64
"""Tokens whose part of the query's gradient is summed by one thread."""

FLOAT = np.int64(4)
"""Bytes of a float32."""

# All that lets sums be vectorised, and nothing that assumes away infinities.
FAST = {"reassoc", "contract", "arcp", "nsz"}


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An integer as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@numba.njit(inline="always")
def _row(address: Any, token: Any, width: Any) -> Any:
    """One token of a source, [d]."""
    return carray(_pointer(address + FLOAT * token * width), (width,), np.float32)  # type: ignore[call-arg]


@numba.njit(parallel=True, fastmath=FAST, error_model="numpy", cache=True)
def _forward(sources: Any, query: Any, eps: Any, out: Any, weights: Any, scale: Any, scores: Any) -> None:
    """Fills out [T, d], and a, r and s [T, n]."""
    tokens, width = out.shape
    for t in numba.prange(tokens):
        largest = np.float32(-np.inf)
        for i in range(len(sources)):
            value = _row(sources[i], t, width)
            dot, square = np.float32(0), np.float32(0)
            for j in range(width):
                dot += value[j] * query[j]
                square += value[j] * value[j]
            scale[t, i] = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
            scores[t, i] = dot * scale[t, i]
            largest = max(largest, scores[t, i])
        total = np.float64(0)
        for i in range(len(sources)):
            weights[t, i] = np.exp(scores[t, i] - largest)
            total += weights[t, i]
        for j in range(width):
            out[t, j] = np.float32(0)
        for i in range(len(sources)):
            weights[t, i] = np.float32(weights[t, i] / total)
            weight = weights[t, i]
            value = _row(sources[i], t, width)
            for j in range(width):
                out[t, j] += weight * value[j]


@numba.njit(parallel=True, fastmath=FAST, error_model="numpy", cache=True)
def _backward(
    sources: Any, gradients: Any, query: Any, grad: Any, weights: Any, scale: Any, scores: Any, parts: Any
) -> None:
    """Fills the sources' gradients, each [T, d], and the chunks' parts of the query's, [chunks, d].

    With g the gradient of h and p_i = g . v_i: ds_i = a_i (p_i - sum_k a_k p_k), and
    dv_i = a_i g + ds_i (r_i w - s_i r_i^2 v_i / d), dw = sum_i ds_i r_i v_i.
    """
    tokens, width = grad.shape
    for chunk in numba.prange(len(parts)):
        part = parts[chunk]
        of_value = np.empty(len(sources), dtype=np.float32)
        for j in range(width):
            part[j] = np.float64(0)
        for t in range(chunk * CHUNK, min(tokens, (chunk + 1) * CHUNK)):
            mean = np.float64(0)
            for i in range(len(sources)):
                value = _row(sources[i], t, width)
                product = np.float32(0)
                for j in range(width):
                    product += grad[t, j] * value[j]
                of_value[i] = product
                mean += np.float64(weights[t, i]) * product
            for i in range(len(sources)):
                value, gradient = _row(sources[i], t, width), _row(gradients[i], t, width)
                weight = weights[t, i]
                by_score = np.float64(weight) * (of_value[i] - mean)
                by_query = np.float32(by_score * scale[t, i])
                by_norm = np.float32(by_score * scores[t, i] * scale[t, i] * scale[t, i] / width)
                for j in range(width):
                    gradient[j] = weight * grad[t, j] + by_query * query[j] - by_norm * value[j]
                    part[j] += np.float64(by_query) * value[j]


def _addresses(tensors: list[Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def _run(kernel: Any, *arguments: Any) -> None:
    call(kernel, *(part.numpy() if isinstance(part, Tensor) else part for part in arguments))


def forward(query: Tensor, sources: list[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [T, d], and a, r and s [T, n], of a query [d] and sources [T, d]; all contiguous float32."""
    out = torch.empty_like(sources[0])
    weights, scale, scores = (query.new_empty(len(out), len(sources)) for _ in range(3))
    _run(_forward, _addresses(sources), query, np.float32(eps), out, weights, scale, scores)
    return out, weights, scale, scores


def backward(
    grad: Tensor, query: Tensor, sources: list[Tensor], weights: Tensor, scale: Tensor, scores: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the query [d] and of each source [T, d], of `grad` [T, d], that of h, and what `forward` gave."""
    tokens, width = grad.shape
    gradients = [torch.empty_like(source) for source in sources]
    parts = query.new_empty(math.ceil(tokens / CHUNK), width, dtype=torch.float64)
    _run(_backward, _addresses(sources), _addresses(gradients), query, grad, weights, scale, scores, parts)
    return parts.sum(0).float(), gradients
