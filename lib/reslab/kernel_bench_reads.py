"""One read over n sources, by all that can compute it: the definition, a compiler, this package, installed peers.

Letters: n sources v_i [T, d], query w [d], h [T, d]. Peers are never required: one that is not installed, does not
run on the device or gives other values is skipped, and the reason is said.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from reslab.kernels.depth_attention import depth_attention, implementation, naive

__all__ = ["Implementation", "Problem", "implementations"]

EPS = 1e-6

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of a trial, relative to the largest value: finds another formula, not another order of sums."""

Read = Callable[[Any], Tensor]
"""Sources, as a list of n [T, d] or as [n, T, d], to h [T, d]."""


@dataclass(frozen=True)
class Implementation:
    """`prepare` makes the read of a query, which is what is timed."""

    name: str
    prepare: Callable[[Tensor], Read]
    stacked: bool = False
    """Takes the sources as one tensor [n, T, d], which is made beforehand: the copy is not counted against it."""


class Problem:
    """Random sources, a query and a gradient of h, the same for each implementation."""

    def __init__(self, count: int, tokens: int, width: int, device: str, dtype: torch.dtype) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        generator = torch.Generator().manual_seed(0)
        self.query = draw(width).requires_grad_()
        self.sources = [draw(tokens, width).requires_grad_() for _ in range(count)]
        self.gradient = draw(tokens, width)

    def given_to(self, chosen: Implementation) -> tuple[Read, Sequence[Tensor] | Tensor]:
        """Its read, and the sources as it takes them."""
        if not chosen.stacked:
            return chosen.prepare(self.query), self.sources
        stacked = torch.stack([source.detach() for source in self.sources]).requires_grad_()
        return chosen.prepare(self.query), stacked

    def differentiate(self, h: Tensor, sources: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
        """Gradients of the query and of the sources."""
        by = [sources] if isinstance(sources, Tensor) else list(sources)
        return torch.autograd.grad(h, [self.query, *by], self.gradient)


def implementations(problem: Problem) -> tuple[list[Implementation], dict[str, str]]:
    """Those that compute `problem`, and why the others do not, by name."""
    usable, skipped = [], {}
    expected = _outcome(problem, _NAIVE)
    for name, found in _candidates(problem):
        fault = found if isinstance(found, str) else _fault(problem, found, expected)
        if fault is None and isinstance(found, Implementation):
            usable.append(found)
        else:
            skipped[name] = str(fault)
    return usable, skipped


def _candidates(problem: Problem) -> Iterator[tuple[str, Implementation | str]]:
    """All by name; one that cannot run here with the reason instead."""
    yield _NAIVE.name, _NAIVE
    yield "compiled", Implementation("compiled", _compiled)
    own = implementation(problem.sources[0])
    device = problem.query.device.type
    reason = f"reslab has no kernel of one read for {device}: the same as naive"
    yield own if own != "naive" else "auto", Implementation(own, _own) if own != "naive" else reason
    for name, (package, load) in _PEERS.items():
        if find_spec(package) is None:
            yield name, f"not installed (no module {package})"
        elif device != "cuda":
            yield name, f"runs on CUDA only, not on {device}"
        else:
            yield name, _loaded(load)


def _loaded(load: Callable[[], Implementation]) -> Implementation | str:
    try:
        return load()
    except Exception as error:  # a peer may fail in any way; it is then skipped
        return _first_line(error)


def _fault(problem: Problem, candidate: Implementation, expected: tuple[Tensor, Tensor]) -> str | None:
    """What keeps it from being measured, if anything."""
    try:
        found = _outcome(problem, candidate)
    except Exception as error:  # as above
        return _first_line(error)
    for what, values, wanted in zip(("h", "the query's gradient"), found, expected, strict=True):
        off = float((values.float() - wanted.float()).abs().max() / wanted.float().abs().max())
        if not off <= TOLERANCE[problem.query.dtype]:
            return f"{what} is {off:.1e} off"
    return None


def _outcome(problem: Problem, chosen: Implementation) -> tuple[Tensor, Tensor]:
    """h and the query's gradient."""
    read, sources = problem.given_to(chosen)
    h = read(sources)
    return h.detach(), problem.differentiate(h, sources)[0]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# --- by this package and by PyTorch ---------------------------------------------------------------


def _own(query: Tensor) -> Read:
    return lambda sources: depth_attention(query, sources, EPS)


def algebra(query: Tensor, sources: list[Tensor]) -> Tensor:
    """The form that compiles best: the rms is divided out of the scores, and sources are not stacked."""
    wide = [source.float() for source in sources]
    scores = torch.stack([(v * query.float()).sum(-1) * torch.rsqrt(v.square().mean(-1) + EPS) for v in wide])
    weights = scores.softmax(0).unsqueeze(-1)
    h = weights[0] * wide[0]
    for weight, v in zip(weights[1:], wide[1:], strict=True):
        h = h + weight * v
    return h.to(sources[0].dtype)


def _compiled(query: Tensor) -> Read:
    read = torch.compile(algebra, dynamic=False)
    return lambda sources: read(query, sources)


_NAIVE = Implementation("naive", lambda query: lambda sources: naive.depth_attention(query, sources, EPS)[0])
"""The definition, as it stands: it stacks the sources each time."""


# --- by peers, as their documentation has it ------------------------------------------------------


def _flash_linear_attention() -> Implementation:
    read = import_module("fla.ops.attnres").fused_attnres

    def prepare(query: Tensor) -> Read:
        ones = torch.ones_like(query)
        return lambda sources: read(query, sources, ones, rms_eps=EPS)

    return Implementation("flash-linear-attention", prepare)


def _fast_attnres() -> Implementation:
    read = import_module("attnres").attnres
    return Implementation("fast-attnres", lambda query: lambda sources: read(sources, query, eps=EPS))


def _flash_attn_res() -> Implementation:
    """Its first phase, which reads finished blocks for several queries at once, with one query."""
    read = import_module("flash_attn_res").phase_1_batched_attention_triton_op

    def prepare(query: Tensor) -> Read:
        return lambda sources: read(sources.unsqueeze(1), query.unsqueeze(0), EPS)[0][0, 0]

    return Implementation("flash-attn-res", prepare, stacked=True)


def _liger() -> Implementation:
    read = import_module("liger_kernel.transformers.functional").liger_attn_res

    def prepare(query: Tensor) -> Read:
        ones = torch.ones_like(query)
        return lambda sources: read(sources.unsqueeze(1), query, ones, EPS)[0]

    return Implementation("Liger", prepare, stacked=True)


_PEERS: dict[str, tuple[str, Callable[[], Implementation]]] = {
    "flash-attn-res": ("flash_attn_res", _flash_attn_res),
    "fast-attnres": ("attnres", _fast_attnres),
    "flash-linear-attention": ("fla", _flash_linear_attention),
    "Liger": ("liger_kernel", _liger),
}
"""The module by which each is found, and how it is called. Sources: the packages' releases of 2026."""
