"""Measurements on the residual stream of a model. Letters: B batch, T tokens, d width, L blocks."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.residuals import Stack

__all__ = [
    "effective_rank",
    "evaluating",
    "mean_shift",
    "neighbour_cosine",
    "outputs_of",
    "stacks",
    "stream_places",
    "stream_profile",
    "streams",
    "token_cosine",
]


def token_cosine(x: Tensor) -> float:
    """Mean cosine between two different tokens of a sequence, of x [B, T, d]; 1 when all point one way.

    Not a number for a single token.
    """
    if x.shape[-2] < 2:
        return math.nan
    units = F.normalize(x, dim=-1)
    tokens = x.shape[-2]
    pairs = units.sum(-2).square().sum(-1) - units.square().sum((-2, -1))
    return float((pairs / (tokens * (tokens - 1))).mean())


def effective_rank(x: Tensor) -> float:
    """exp(entropy) of the normalised singular values of each sequence x [B, T, d], averaged over B.

    Between 1 (all tokens on one line, or all zero) and min(T, d); not a number when x is not finite.
    Roy & Vetterli 2007, "The effective rank".
    """
    if not x.isfinite().all():
        return math.nan
    values = torch.linalg.svdvals(x)
    shares = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return float(torch.special.entr(shares).sum(-1).exp().mean())


def neighbour_cosine(x: Tensor, y: Tensor) -> float:
    """Mean cosine between the same token in two layers' outputs x and y, both [B, T, d]."""
    return float(F.cosine_similarity(x, y, dim=-1).mean())


def mean_shift(x: Tensor, y: Tensor) -> float:
    """How far a layer moves the centre of its token distribution: |mean(y) - mean(x)| / rms(x), x and y [B, T, d]."""
    moved = y.mean((0, 1)) - x.mean((0, 1))  # not a number when x is zero or not finite
    return float(moved.norm() / x.square().sum(-1).mean().sqrt())


def outputs_of(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """What `model` puts out for its input, or for its several inputs."""
    out: Tensor = model(inputs) if isinstance(inputs, Tensor) else model(*inputs)
    return out


def stacks(model: nn.Module) -> list[Stack]:
    """The stacks of a model, in the order they run; one in all but a U-Net."""
    return [module for module in model.modules() if isinstance(module, Stack)]


def stream_places(model: nn.Module) -> list[nn.Module]:
    """The modules whose input is the stream, as sublayers read it, before each block and at the end: L + 1 of them.

    `model` is one of this package: its stacks have blocks, whose first sublayer reads; its `norm` ends the stream.
    """
    return [*(place for stack in stacks(model) for place in stack.block_inputs()), model.get_submodule("norm")]


@contextmanager
def streams(places: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collects the inputs of `places` during a forward pass, in the order they run; see `stream_places`.

    The hooks are gone when the context ends, also after an exception. Compiled blocks run uncompiled meanwhile, for
    what was compiled before a hook was set does not call it.
    """
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    handles = [place.register_forward_pre_hook(keep) for place in places]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has the mode it had, also after an exception."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


Profile = dict[str, list[float]]


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def stream_profile(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    targets: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor] = _cross_entropy,
) -> Profile:
    """One list a measure, from what the first block reads to what the head does, L + 1 values.

    `model` is one of this package; `inputs` are what it is called with, a tuple where it takes several.
    `gradient_norm` is the Frobenius norm of the mean loss's gradient by the stream at that place;
    `mean_square` is the mean of the stream's squared entries, E|x|^2 / d;
    `neighbour_cosine` and `mean_shift` compare with the place before and have L values.
    Measures over tokens treat the last axis as width and need a stream [B, T, d].
    A value is not a number or infinite where the stream is. Leaves the model's gradients and modes as they were.
    """
    with evaluating(model), streams(stream_places(model)) as seen:
        loss = loss_of(outputs_of(model, inputs), targets)
        gradients = torch.autograd.grad(loss, seen)
    places = [place.detach().float() for place in seen]
    pairs = list(itertools.pairwise(places))
    profile = {"gradient_norm": [float(g.double().norm()) for g in gradients]}
    if places[0].ndim == 3:
        profile["mean_square"] = [float(x.double().square().mean()) for x in places]
        profile["token_cosine"] = [token_cosine(x) for x in places]
        profile["effective_rank"] = [effective_rank(x) for x in places]
        profile["neighbour_cosine"] = [neighbour_cosine(x, y) for x, y in pairs]
        profile["mean_shift"] = [mean_shift(x, y) for x, y in pairs]
    return profile
