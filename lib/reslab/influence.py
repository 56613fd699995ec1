"""Which blocks of a model matter: Block Influence, angular distance, and the orders in which blocks are dropped.

Men et al. 2024 ("ShortGPT", arXiv 2403.03853) drop the blocks that turn the stream least; Gromov et al. 2024
("The Unreasonable Ineffectiveness of the Deeper Layers", arXiv 2403.17887) a run of neighbouring blocks across which it
turns least. Both look at the stream alone; `by_loss` looks at what the blocks are worth.

Letters: L blocks, counted from 0; x_l [B, T, d] the stream before block l, and x_L the one that the head reads. Of a
connection whose stream is no tensor (depth attention) x_l is what block l's first sublayer reads.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.probes import evaluating, outputs_of, stream_places, streams
from reslab.schema import UserError
from reslab.surgery import Blocks, skipped

__all__ = [
    "Cost",
    "angular_distance",
    "block_influence",
    "block_influences",
    "by_influence",
    "by_influence_again",
    "by_loss",
    "first_of",
    "nearest_run",
    "predicted_influences",
    "random_order",
    "reads",
]

Cost = Callable[[frozenset[int]], float]
"""The loss of a model that runs without these blocks."""


# --- how far a block turns the stream -------------------------------------------------------------


def block_influence(x: Tensor, y: Tensor) -> float:
    """BI = 1 - E cos(x, y) over the tokens of x and y, both [..., d] (ShortGPT, eq. 1).

    0 where y points as x does, 1 where it is at right angles. Not a number where either is not finite.
    """
    return 1 - float(_cosines(x, y).mean())


def angular_distance(x: Tensor, y: Tensor) -> float:
    """E arccos(cos(x, y)) / pi over the tokens of x and y, both [..., d]: 0 alike, 1/2 at right angles, 1 opposite.

    Gromov et al. 2024, eq. 7, who take the last token alone; here all tokens count.
    """
    return float(_cosines(x, y).clamp(-1, 1).arccos().mean()) / math.pi


def _cosines(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x.double(), y.double(), dim=-1)


def reads(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """x_0 ... x_L of a model of this package for `inputs`, without gradients; its modes stay as they were."""
    with torch.no_grad(), evaluating(model), streams(stream_places(model)) as seen:
        outputs_of(model, inputs)
    return list(seen)


def block_influences(xs: Sequence[Tensor]) -> list[float]:
    """BI of each block, of the L + 1 tensors of `reads`."""
    return [block_influence(x, y) for x, y in pairwise(xs)]


def predicted_influences(xs: Sequence[Tensor]) -> list[float]:
    """1 - sqrt(S_l / S_{l+1}) with S_l = E|x_l|^2: the BI of blocks whose updates are at right angles to the stream.

    So they are at initial weights, where x . f(x) has mean 0: then |x_{l+1}|^2 = |x_l|^2 + |f|^2, and cos(x_l, x_{l+1})
    = |x_l| / |x_{l+1}|. Where S grows by the same amount in each block, BI falls like 1/l without any training.
    """
    sizes = [float(x.double().square().sum(-1).mean()) for x in xs]
    return [1 - math.sqrt(before / after) for before, after in pairwise(sizes)]


# --- orders ---------------------------------------------------------------------------------------


def by_influence(influences: Sequence[float]) -> tuple[int, ...]:
    """The blocks from the lowest BI up, measured once (ShortGPT); of equal ones the earlier first."""
    return tuple(int(i) for i in np.argsort(influences, kind="stable"))


def by_influence_again(
    model: nn.Module, blocks: Blocks, inputs: Tensor | tuple[Tensor, ...], count: int
) -> tuple[int, ...]:
    """The first `count` blocks where BI is measured again after each block dropped."""

    def influence(gone: frozenset[int]) -> dict[int, float]:
        left = [i for i in range(len(blocks)) if i not in gone]
        with skipped(blocks, gone):
            return dict(zip(left, block_influences(reads(model, inputs)), strict=True))

    return _greedy(len(blocks), count, influence)


def by_loss(cost: Cost, blocks: int, count: int) -> tuple[int, ...]:
    """Greedy: the first `count` blocks, each the one without which the loss is lowest, after those before it.

    Takes blocks + (blocks - 1) + ... evaluations of `cost`. Not the best set of each size, which would take all sets.
    """
    return _greedy(blocks, count, lambda gone: {i: cost(gone | {i}) for i in range(blocks) if i not in gone})


def _greedy(blocks: int, count: int, worth: Callable[[frozenset[int]], dict[int, float]]) -> tuple[int, ...]:
    """`count` times the block of the lowest worth, of those left; of equal ones the earlier."""
    _require_some_left(blocks, count)
    order: list[int] = []
    for _ in range(count):
        left = worth(frozenset(order))
        order.append(min(left, key=lambda block: (left[block], block)))
    return tuple(order)


def random_order(blocks: int, seed: int) -> tuple[int, ...]:
    """A random order, the same for the same number of blocks and seed."""
    return tuple(int(i) for i in np.random.default_rng(seed).permutation(blocks))


# --- sets -----------------------------------------------------------------------------------------


def first_of(order: Sequence[int], count: int) -> list[frozenset[int]]:
    """The sets of the first 1, 2, ... `count` blocks of an order."""
    return [frozenset(order[:number]) for number in range(1, count + 1)]


def nearest_run(xs: Sequence[Tensor], length: int) -> frozenset[int]:
    """The `length` neighbouring blocks across which the stream turns least (Gromov et al. 2024, section 3).

    xs are the L + 1 tensors of `reads`; of equal runs the earlier.
    """
    blocks = len(xs) - 1
    _require_some_left(blocks, length)
    start = min(range(blocks - length + 1), key=lambda first: angular_distance(xs[first], xs[first + length]))
    return frozenset(range(start, start + length))


def _require_some_left(blocks: int, count: int) -> None:
    if not 1 <= count < blocks:
        raise UserError(f"{count} of {blocks} blocks to be dropped; drop at least one and keep at least one")
