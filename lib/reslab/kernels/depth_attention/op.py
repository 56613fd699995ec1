"""Depth attention as one operation of PyTorch: picks what runs it, and is differentiable, traceable and compilable.

Letters as in `naive`.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from reslab.kernels.depth_attention import naive
from reslab.schema import UserError

__all__ = ["depth_attention", "implementation", "triton_module"]


_FUSED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a kernel takes."""

_TAGS = (torch.Tag.cudagraph_unsafe,)  # a graph would replay the addresses of the sources


def implementation(source: Tensor) -> str:
    """What runs depth attention of sources like this one: `numba` on the CPU, `triton` on CUDA, else `naive`.

    A UserError where it takes no such source.
    """
    _require_form("the source", source)
    fused = {"cpu": "numba", "cuda": "triton"}
    return "naive" if source.dtype not in _FUSED else fused.get(source.device.type, "naive")


def depth_attention(query: Tensor, sources: Sequence[Tensor], eps: float = 1e-6, gain: Tensor | None = None) -> Tensor:
    """h [..., d] of a query [d] and n sources [..., d]; see `naive.depth_attention` for the formula.

    `gain` [d] is that of the keys' norm. Sources have one shape, dtype and device, any strides. Sums are taken in
    float32 (float64 where the sources are); gradients are the same for any number of threads. A UserError says
    what does not fit.
    """
    _require(query, sources, eps)
    if gain is not None:
        _require_vector("gain", gain, sources[0])
    weighted = query if gain is None else query * gain
    shape = sources[0].shape
    if implementation(sources[0]) == "naive":
        return naive.depth_attention(weighted, sources, eps)[0]
    rows = [source.reshape(-1, shape[-1]) for source in sources]
    out: Tensor = _forward(weighted.float(), rows, eps)[0]
    return out.view(shape)


def _require(query: Tensor, sources: Sequence[Tensor], eps: float) -> None:
    if isinstance(sources, Tensor) or not isinstance(sources, Sequence):
        raise UserError(
            f"depth_attention: sources is a {type(sources).__name__}; give a list of tensors [..., d], such as "
            f"list(stacked)"
        )
    if not sources:
        raise UserError("depth_attention: there is no source; give at least one")
    first = sources[0]
    _require_form("source 0", first)
    for number, source in enumerate(sources):
        if not isinstance(source, Tensor):
            raise _no_tensor(f"source {number}", source)
        if (source.shape, source.dtype, source.device) != (first.shape, first.dtype, first.device):
            raise UserError(
                f"depth_attention: source {number} is {list(source.shape)} {source.dtype} on {source.device}, source 0 "
                f"{list(first.shape)} {first.dtype} on {first.device}; give sources of one kind"
            )
    if not isinstance(eps, int | float) or not eps >= 0:
        raise UserError(f"depth_attention: eps is {eps!r}; give a number, 0 or more")
    _require_vector("query", query, first)


def _require_form(name: str, source: Tensor) -> None:
    """[..., d], floating."""
    if not isinstance(source, Tensor):
        raise _no_tensor(name, source)
    if source.ndim == 0 or source.shape[-1] == 0:
        raise UserError(f"depth_attention: {name} is {list(source.shape)}; give [..., d] with d of 1 or more")
    if not source.is_floating_point():
        raise UserError(f"depth_attention: {name} is {source.dtype}; give a floating-point one")


def _no_tensor(name: str, source: object) -> UserError:
    return UserError(f"depth_attention: {name} is a {type(source).__name__}; give a tensor [..., d]")


def _require_vector(name: str, vector: Tensor, source: Tensor) -> None:
    """[d], floating, and on the sources' device: kernels take its address."""
    if not isinstance(vector, Tensor):
        raise UserError(f"depth_attention: {name} is a {type(vector).__name__}; give a tensor [{source.shape[-1]}]")
    if vector.shape != source.shape[-1:]:
        raise UserError(f"depth_attention: {name} is {list(vector.shape)}, sources have width {source.shape[-1]}")
    if vector.device != source.device or not vector.is_floating_point():
        raise UserError(
            f"depth_attention: {name} is {vector.dtype} on {vector.device}, sources are {source.dtype} on "
            f"{source.device}; give a floating-point one there"
        )


def _wide(x: Tensor) -> Tensor:
    """Contiguous float32; the same tensor where it is that already."""
    return x.detach().float().contiguous()


def triton_module(name: str) -> ModuleType:
    """A module of kernels for CUDA, `triton_op` or `triton_bank`; a UserError where Triton is missing."""
    try:
        return import_module(f"reslab.kernels.depth_attention.{name}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"depth attention on CUDA runs by Triton, which is not here ({error}); install it with `pip install "
            f"'triton>=3.6'`, or build the model with ConnectionConfig('attnres', kernel='naive')"
        ) from error


@torch.library.custom_op("reslab::depth_attention", mutates_args=(), tags=_TAGS)
def _forward(query: Tensor, sources: list[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [T, d] in the sources' dtype, and for the backward pass, in float32, 1/rms and s [T, n] after what gives a:
    Numba's a [T, n], or Triton's largest s and ln sum exp of s less that [T, 2]."""
    if implementation(sources[0]) == "triton":
        return triton_module("triton_op").forward(_wide(query), [source.detach() for source in sources], eps)
    from reslab.kernels.depth_attention import cpu  # it takes a second to import

    return cpu.forward(_wide(query), [source.detach() for source in sources], eps)


@_forward.register_fake
def _(query: Tensor, sources: list[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    shape = out.shape[0], len(sources)
    weights = query.new_empty((shape[0], 2) if implementation(sources[0]) == "triton" else shape)
    return out, weights, query.new_empty(shape), query.new_empty(shape)


@torch.library.custom_op("reslab::depth_attention_backward", mutates_args=(), tags=_TAGS)
def _backward(
    grad: Tensor, query: Tensor, sources: list[Tensor], saved: list[Tensor], eps: float
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the query [d] and of each source [T, d], in their dtypes."""
    if implementation(sources[0]) == "triton":
        narrow = [source.detach() for source in sources]
        by_query, by_source = triton_module("triton_op").backward(
            grad.detach().contiguous(), _wide(query), narrow, *saved
        )
        return by_query.to(query.dtype), by_source
    from reslab.kernels.depth_attention import cpu

    rows = [source.detach() for source in sources]
    by_query, by_source = cpu.backward(grad.detach(), _wide(query), rows, *saved)
    return by_query.to(query.dtype), by_source


@_backward.register_fake
def _(
    grad: Tensor, query: Tensor, sources: list[Tensor], saved: list[Tensor], eps: float
) -> tuple[Tensor, list[Tensor]]:
    contiguous = torch.contiguous_format
    return torch.empty_like(query), [torch.empty_like(source, memory_format=contiguous) for source in sources]


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    query, sources, eps = inputs
    ctx.eps, ctx.count = eps, len(sources)  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(query, *sources, *output[1:])


def _pull(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, *unused: Tensor) -> tuple:
    query, *rest = ctx.saved_tensors  # type: ignore[attr-defined]
    sources, saved = rest[: ctx.count], rest[ctx.count :]  # type: ignore[attr-defined]
    by_query, by_sources = _backward(grad, query, sources, saved, ctx.eps)  # type: ignore[attr-defined]
    return by_query, by_sources, None


_forward.register_autograd(_pull, setup_context=_save)


def _save_for_second(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    grad, query, sources, _, eps = inputs
    ctx.eps = eps  # type: ignore[attr-defined]
    ctx.save_for_backward(grad, query, *sources)


def _pull_second(ctx: torch.autograd.function.FunctionCtx, by_query: Tensor, by_sources: list[Tensor]) -> tuple:
    """Second derivatives by those of the definition: they are rare."""
    saved = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]  # type: ignore[attr-defined]
    with torch.enable_grad():
        grad, query, *sources = saved
        out, _ = naive.depth_attention(query, sources, ctx.eps)  # type: ignore[attr-defined]
        first = torch.autograd.grad(out, [query, *sources], grad, create_graph=True)
        seconds = torch.autograd.grad(first, saved, [by_query, *by_sources], allow_unused=True)
    return seconds[0], seconds[1], list(seconds[2:]), [None, None, None], None


_backward.register_autograd(_pull_second, setup_context=_save_for_second)
