"""Depth attention on CUDA, by Triton: sources stay where they are, handed over as a table of addresses.

Letters: n sources, T tokens, d width; s_i scores, r_i = 1/rms, a_i weights. Sources are tensors [T, d] of one dtype,
with rows any distance apart; sums are float32. One compiled kernel serves any n and T. Forward, a row is read once
(twice above `WIDEST`). Backward, twice, the second time in reverse order, while the latest are in a cache; each program
sums its tokens' part of the query's gradient, and these parts are added in a fixed order: no atomics, so that results
are the same each time on one kind of device.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from reslab.schema import UserError

__all__ = ["aligned", "backward", "element", "forward", "one", "places", "table", "values"]

WIDEST = 8192
"""Columns that a program holds at once; wider rows are gone through in blocks of half as many."""

PER_THREAD = 16
"""Columns that a thread holds at once."""

TOGETHER = 2
"""Sources that a program holds at once: with more, rows of `WIDEST` columns do not fit into registers."""

WARPS = 16
"""Warps that one multiprocessor is given in the backward pass: its registers suffice for no more."""

# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def places(numbers, first, count, t, SOURCES: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the rows of token t begin in the sources from `first` on, [SOURCES], and which of them there are.

    `numbers` are those of `table`.
    """
    i = first + tl.arange(0, SOURCES)
    there = i < count
    address = tl.load(numbers + i, mask=there, other=0) + t * tl.load(numbers + count + i, mask=there, other=0)
    rows = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        rows = tl.multiple_of(rows, [16])
    return rows, there


@triton.jit
def values(rows, there, columns, WIDTH: tl.constexpr):
    """These columns of these rows, [SOURCES, BLOCK] in float32; 0 where there is none."""
    mask = there[:, None] & (columns < WIDTH)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def one(row, columns, WIDTH: tl.constexpr):
    """These columns of one row, [BLOCK] in float32; 0 where there is none."""
    return tl.load(row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _forward(
    sources, query, out, logs, scale, scores, count, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SOURCES: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One token: its row of out [T, d]; its largest s, and ln sum exp of s less that, [T, 2]; r and s [T, n]."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest, total = float("-inf"), 0.0
    mixed = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, SOURCES):
        rows, there = places(sources, first, count, t, SOURCES, DTYPE, ALIGNED)
        dot, square = tl.zeros([SOURCES], tl.float32), tl.zeros([SOURCES], tl.float32)
        for j in tl.static_range(0, WIDTH, BLOCK):
            value = values(rows, there, j + columns, WIDTH)
            dot += tl.sum(value * one(query, j + columns, WIDTH)[None, :], 1)
            square += tl.sum(value * value, 1)
        inverse = 1.0 / tl.sqrt_rn(square / WIDTH + eps)
        score = tl.where(there, dot * inverse, float("-inf"))
        at = t * count + first + tl.arange(0, SOURCES)
        tl.store(scale + at, inverse, mask=there)
        tl.store(scores + at, score, mask=there)
        before, largest = largest, tl.maximum(largest, tl.max(score, 0))
        shrink, weight = tl.exp(before - largest), tl.exp(score - largest)
        total = total * shrink + tl.sum(weight, 0)
        if WIDTH <= BLOCK:
            mixed = mixed * shrink + tl.sum(weight[:, None] * value, 0)
    log = tl.log(total)
    tl.store(logs + 2 * t, largest)
    tl.store(logs + 2 * t + 1, log)
    if WIDTH <= BLOCK:
        tl.store(out + t * WIDTH + columns, mixed / total, mask=columns < WIDTH)
    else:
        tl.debug_barrier()  # all scores are in memory
        for j in range(0, WIDTH, BLOCK):
            mixed = tl.zeros([BLOCK], tl.float32)
            for first in range(0, count, SOURCES):
                rows, there = places(sources, first, count, t, SOURCES, DTYPE, ALIGNED)
                at = t * count + first + tl.arange(0, SOURCES)
                weight = tl.exp(tl.load(scores + at, mask=there, other=float("-inf")) - largest - log)
                mixed += tl.sum(weight[:, None] * values(rows, there, j + columns, WIDTH), 0)
            tl.store(out + t * WIDTH + j + columns, mixed, mask=j + columns < WIDTH)


@triton.jit(do_not_specialize=["tokens", "count"])
def _backward(
    sources, gradients, query, grad, logs, scale, scores, products, parts, tokens, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SOURCES: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Some tokens: their rows of the sources' gradients, and their part of the query's, in `parts` [programs, d].

    With g the gradient of h and p_i = g . v_i (`products` [T, n], to write in): ds_i = a_i (p_i - sum_k a_k p_k), and
    dv_i = a_i g + ds_i (r_i w - s_i r_i^2 v_i / d), dw = sum_i ds_i r_i v_i.
    """
    program = tl.program_id(0).to(tl.int64)
    columns, number = tl.arange(0, BLOCK), tl.arange(0, SOURCES)
    by_query = tl.zeros([BLOCK], tl.float32)
    for t in range(program, tokens, tl.num_programs(0)):
        largest, log = tl.load(logs + 2 * t), tl.load(logs + 2 * t + 1)
        mean, total = 0.0, 0.0  # the total is 1, but for rounding
        for first in range(0, count, SOURCES):
            rows, there = places(sources, first, count, t, SOURCES, DTYPE, ALIGNED)
            product = tl.zeros([SOURCES], tl.float32)
            for j in range(0, WIDTH, BLOCK):
                g = one(grad + t * WIDTH, j + columns, WIDTH)
                product += tl.sum(values(rows, there, j + columns, WIDTH) * g[None, :], 1)
            at = t * count + first + number
            tl.store(products + at, product, mask=there)
            weight = tl.exp(tl.load(scores + at, mask=there, other=float("-inf")) - largest - log)
            mean += tl.sum(weight * product, 0)
            total += tl.sum(weight, 0)
        mean /= total
        tl.debug_barrier()  # all products are in memory
        for j in range(0, WIDTH, BLOCK):
            g = one(grad + t * WIDTH, j + columns, WIDTH)
            w = one(query, j + columns, WIDTH)
            for behind in range(0, count, SOURCES):
                first = (count - 1) // SOURCES * SOURCES - behind
                rows, there = places(sources, first, count, t, SOURCES, DTYPE, ALIGNED)
                at = t * count + first + number
                score, inverse = tl.load(scores + at, mask=there, other=0.0), tl.load(scale + at, mask=there, other=0.0)
                weight = tl.where(there, tl.exp(score - largest - log) / total, 0.0)
                by_score = weight * (tl.load(products + at, mask=there, other=0.0) - mean) * inverse
                value = values(rows, there, j + columns, WIDTH)
                gradient = weight[:, None] * g[None, :] + by_score[:, None] * w[None, :]
                gradient -= (by_score * score * inverse / WIDTH)[:, None] * value
                by_query += tl.sum(by_score[:, None] * value, 0)
                to, _ = places(gradients, first, count, t, SOURCES, DTYPE, ALIGNED)
                mask = there[:, None] & (j + columns < WIDTH)[None, :]
                tl.store(to[:, None] + (j + columns)[None, :], gradient.to(DTYPE), mask=mask)
            if WIDTH > BLOCK:
                part = parts + program * WIDTH + j + columns
                tl.store(part, tl.load(part, mask=j + columns < WIDTH) + by_query, mask=j + columns < WIDTH)
                by_query = tl.zeros([BLOCK], tl.float32)
    if WIDTH <= BLOCK:
        tl.store(parts + program * WIDTH + columns, by_query, mask=columns < WIDTH)


# --- launches ---------------------------------------------------------------------------------------------------------


def table(tensors: Sequence[Tensor], device: torch.device, *more: Sequence[int]) -> Tensor:
    """Addresses of n tensors [T, d], bytes from row to row, and `more` numbers of each: [2 + more, n], on their device.

    From pinned memory, so that nothing waits for the device. A UserError while a CUDA graph is captured, which would
    replay the addresses of now.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UserError(
            "depth attention: addresses of tensors do not go into CUDA graphs; leave it out of what is captured, or "
            "build the model with ConnectionConfig('attnres', kernel='naive')"
        )
    numbers = [[x.data_ptr() for x in tensors], [x.stride(0) * x.itemsize for x in tensors], *more]
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=pinned)


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether each row begins at a multiple of 16 bytes, so that it is read in pieces as large."""
    return all(x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0 for x in tensors)


def element(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def settings(width: int, dtype: torch.dtype, in_pieces: bool) -> dict[str, Any]:
    """What a kernel is compiled for: constants, and options of the compiler."""
    block = triton.next_power_of_2(width) if width <= WIDEST else WIDEST // 2
    return {
        "WIDTH": width,
        "BLOCK": block,
        "SOURCES": TOGETHER,
        "DTYPE": element(dtype),
        "ALIGNED": in_pieces,
        "num_warps": max(1, block // (32 * PER_THREAD)),
        "enable_fp_fusion": True,
    }


def _programs(tokens: int, warps: int, device: torch.device) -> int:
    """As many as run at once, and no more than there are tokens; a few where Triton is interpreted."""
    if device.type != "cuda":
        return min(tokens, 2)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tokens, processors * max(1, WARPS // warps))


def _dense(rows: Tensor) -> Tensor:
    """Rows whose columns lie side by side; the same tensor where they do."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def forward(query: Tensor, sources: list[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [T, d] in the sources' dtype; in float32 the largest s and ln sum exp of s less that [T, 2], r and s [T, n].

    `query` [d] is contiguous float32; sources [T, d] are float32, bfloat16 or float16.
    """
    sources = [_dense(source) for source in sources]
    tokens, width = sources[0].shape
    out = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    logs, (scale, scores) = query.new_empty(tokens, 2), (query.new_empty(tokens, len(sources)) for _ in range(2))
    if out.numel():
        compiled_for = settings(width, out.dtype, aligned(sources))
        arguments = (table(sources, out.device), query, out, logs, scale, scores, len(sources), eps)
        with torch.cuda.device_of(out):
            _forward[(tokens,)](*arguments, **compiled_for)
    return out, logs, scale, scores


def backward(
    grad: Tensor, query: Tensor, sources: list[Tensor], logs: Tensor, scale: Tensor, scores: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the query [d] in float32, and of each source [T, d] in its dtype.

    `grad` [T, d], that of h, is contiguous and of any floating-point dtype up to float32; the rest is what `forward`
    took and gave.
    """
    sources = [_dense(source) for source in sources]
    tokens, width = grad.shape
    gradients = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]
    if not grad.numel():
        return torch.zeros_like(query), gradients
    compiled_for = settings(width, sources[0].dtype, aligned([*sources, *gradients]))
    parts = query.new_zeros(_programs(tokens, compiled_for["num_warps"], grad.device), width)
    tables = table(sources, grad.device), table(gradients, grad.device)
    arguments = (query, grad, logs, scale, scores, torch.empty_like(scores), parts, tokens, len(sources))
    with torch.cuda.device_of(grad):
        _backward[(len(parts),)](*tables, *arguments, **compiled_for)
    return parts.sum(0), gradients
