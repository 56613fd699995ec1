"""Rank collapse of attention without a residual connection, exactly, in float64 and without training.

Letters: T tokens, d width, X [T, d] the tokens, P [T, T] attention weights whose rows sum to 1.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "attention_only_residuals",
    "attention_only_spread",
    "causal_uniform_residuals",
    "collapse_exponent",
    "hull_excess",
    "residual_from_rank_one",
]


def residual_from_rank_one(x: Tensor) -> float:
    """|X - 1 m| / |X| with m the mean token and |.| = sqrt(l1-norm times linf-norm); 0 when all tokens are equal.

    Dong et al. 2021, arXiv 2103.03404, section 2 and its public code.
    """
    return _mixed_norm(x - x.mean(0)) / _mixed_norm(x)


def _mixed_norm(x: Tensor) -> float:
    return math.sqrt(float(x.abs().sum(0).max()) * float(x.abs().sum(1).max()))


def _orthogonal(width: int, generator: torch.Generator) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return q


def _attend(x: Tensor, score: Tensor, causal: bool) -> Tensor:
    """softmax(X S X^T / sqrt(d)) X: every row is a convex combination of rows of X."""
    logits = x @ score @ x.T / math.sqrt(x.shape[1])
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
    return logits.softmax(-1) @ x


def _start(tokens: int, width: int, seed: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator, dtype=torch.float64), generator


def attention_only_residuals(layers: int, tokens: int, width: int, seed: int, start: float = 1.0) -> list[float]:
    """`residual_from_rank_one` before and after each of `layers` bidirectional attention layers, no skip, no MLP.

    Random scores and orthogonal values (which keep |X|), the same for every `start`, the size of the
    tokens' differences from their mean relative to the mean. Ends above FLOOR.
    """
    x, generator = _start(tokens, width, seed)
    x = x[:1] + start * (x - x.mean(0))
    residuals = [residual_from_rank_one(x)]
    for _ in range(layers):
        score = torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
        x = _attend(x, score, causal=False) @ _orthogonal(width, generator)
        residuals.append(residual_from_rank_one(x))
        if residuals[-1] < FLOOR:
            return residuals[:-1]
    return residuals


FLOOR = 1e-13
"""Residuals below this are rounding noise in float64."""

STARTS = (0.1, 0.05, 0.02, 0.01, 0.005)


def collapse_exponent(layers: int, tokens: int, width: int, seed: int) -> float:
    """Slope of log residual after a layer against log residual before it; mean over the layers that allow it.

    3 where each layer cubes the residual (Dong et al. 2021, theorem 2.2), 1 where it divides it by a
    constant. The stack starts from several sizes, so that each layer is seen at several residuals.
    """
    stacks = [attention_only_residuals(layers, tokens, width, seed, start) for start in STARTS]
    slopes = []
    for layer in range(layers):
        pairs = [(math.log(r[layer]), math.log(r[layer + 1])) for r in stacks if len(r) > layer + 1]
        if len(pairs) >= 2:
            (x0, y0), (x1, y1) = pairs[0], pairs[-1]
            slopes.append((y1 - y0) / (x1 - x0))
    if not slopes:
        raise ValueError(f"no layer of {layers} stays above {FLOOR}; use fewer tokens or layers")
    return sum(slopes) / len(slopes)


def causal_uniform_residuals(layers: int, tokens: int, width: int, seed: int) -> list[float]:
    """The same for causal attention with equal weights, P_ij = 1/i for j <= i, as with zero scores."""
    x, _ = _start(tokens, width, seed)
    residuals = [residual_from_rank_one(x)]
    for _ in range(layers):
        x = _attend(x, torch.zeros(width, width, dtype=torch.float64), causal=True)
        residuals.append(residual_from_rank_one(x))
    return residuals


def hull_excess(tokens: int, width: int, seed: int) -> float:
    """By how much an attention output leaves the box of its values, largest over coordinates; <= 0 inside."""
    x, generator = _start(tokens, width, seed)
    score = torch.randn(width, width, generator=generator, dtype=torch.float64)
    y = _attend(x, score, causal=False)
    return float(torch.maximum(y.amax(0) - x.amax(0), x.amin(0) - y.amin(0)).max())


def attention_only_spread(layers: int, tokens: int, width: int, seed: int) -> list[float]:
    """Range over tokens (max - min), averaged over coordinates, by layer; causal attention, values kept as they are."""
    x, generator = _start(tokens, width, seed)
    spread = [float((x.amax(0) - x.amin(0)).mean())]
    for _ in range(layers):
        score = torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
        x = _attend(x, score, causal=True)
        spread.append(float((x.amax(0) - x.amin(0)).mean()))
    return spread
