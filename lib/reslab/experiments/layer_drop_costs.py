"""What drop curves come to, by seed: costs as shares of the blocks' gain, slopes over depth; and tables of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from reslab.experiments.layer_drop_measured import BY_LOSS, ORDERS, Healed, Measured, quarter
from reslab.stats import mean_of, slope

__all__ = [
    "cost_slopes",
    "cost_table",
    "free_blocks",
    "free_pair",
    "healing_table",
    "influence_slopes",
    "influence_table",
    "interaction_sizes",
    "mean_cost",
    "quarter_cost",
]


def quarter_cost(found: Sequence[Measured], order: str) -> list[float]:
    """Share of the blocks' gain that a quarter of the blocks costs, by seed."""
    return [model.shares(order)[quarter(len(model.single)) - 1] for model in found]


def mean_cost(found: Sequence[Measured], order: str = BY_LOSS) -> list[float]:
    """Share of the blocks' gain lost, averaged over the numbers of blocks dropped (the area under the curve)."""
    return [float(np.mean(model.shares(order))) for model in found]


def free_blocks(found: Sequence[Measured], free: float) -> list[float]:
    """The largest number of blocks that cost at most the share `free` of the gain of all, by seed; greedily by loss.

    All but one may go, as far as the order was followed.
    """
    return [_free([model.share(cost) for cost in model.greedy], free) for model in found]


def _free(shares: Sequence[float], free: float) -> float:
    if not all(map(math.isfinite, shares)):
        return math.nan
    return float(max((number for number, share in enumerate(shares, 1) if share <= free), default=0))


def free_pair(ours: Sequence[Measured], theirs: Sequence[Measured], free: float) -> tuple[list[float], list[float]]:
    """`free_blocks` of two methods, by seed; not numbers where both reach the end, beyond which they may differ."""
    ends = [(len(own.greedy), len(other.greedy)) for own, other in zip(ours, theirs, strict=True)]
    pairs = list(zip(free_blocks(ours, free), free_blocks(theirs, free), strict=True))
    kept = [(math.nan, math.nan) if pair == end else pair for pair, end in zip(pairs, ends, strict=True)]
    return [own for own, _ in kept], [other for _, other in kept]


def cost_slopes(found: Sequence[Measured], ends: int = 0) -> list[float]:
    """Slope of the cost of deleting one block against its place from 0 (first) to 1 (last), by seed.

    Costs are shares of the blocks' gain; the first and last `ends` blocks are left out.
    """
    return [_slope([model.share(cost) for cost in model.single], ends) for model in found]


def influence_slopes(found: Sequence[Measured]) -> list[float]:
    """Slope of ln BI against a block's place from 0 (first) to 1 (last), by seed."""
    tiny = 1e-12  # of a block that does nothing
    return [_slope([math.log(max(value, tiny)) for value in model.influence]) for model in found]


def _slope(values: Sequence[float], ends: int = 0) -> float:
    places = np.linspace(0, 1, len(values))
    kept = slice(ends, len(values) - ends)
    if not all(map(math.isfinite, values)):
        return math.nan
    return slope(places[kept].tolist(), list(values[kept]))


def interaction_sizes(found: Sequence[Measured]) -> list[float]:
    """How far blocks are from contributing independently, by seed; see `Measured.interaction`."""
    return [abs(model.interaction) for model in found]


# --- tables ---------------------------------------------------------------------------------------


def cost_table(found: Mapping[str, Sequence[Measured]]) -> pd.DataFrame:
    """Share of the blocks' gain lost, by arm and order: for a quarter of them, and on average over the drop curve."""
    rows = []
    for arm, seeds in found.items():
        for order in ORDERS:
            if order in seeds[0].curves:
                quarters, means = mean_of(quarter_cost(seeds, order)), mean_of(mean_cost(seeds, order))
                rows.append({"arm": arm, "order": order, "a quarter": str(quarters), "mean": str(means)})
        drawn = [[model.share(cost) for cost in model.random_curve()] for model in seeds]
        at = quarter(len(seeds[0].single)) - 1
        random = mean_of([curve[at] for curve in drawn]), mean_of([float(np.mean(curve)) for curve in drawn])
        rows.append({"arm": arm, "order": "random", "a quarter": str(random[0]), "mean": str(random[1])})
    return pd.DataFrame(rows).set_index(["arm", "order"])


def influence_table(found: Mapping[str, Sequence[Measured]]) -> pd.DataFrame:
    """Block Influence by block (from 0) and arm, a mean over seeds; not a number where a run diverged."""
    means = {
        arm: [mean_of(values).value for values in zip(*(model.influence for model in seeds), strict=True)]
        for arm, seeds in found.items()
    }
    return pd.DataFrame(means, dtype=float).rename_axis(index="block")


def healing_table(after: Mapping[str, Sequence[Healed]]) -> pd.DataFrame:
    """Share of the blocks' gain that the quarter of lowest Block Influence costs, at once and after training on."""
    rows = {
        method: {
            "at once": str(mean_of([each.cost(healed=False) for each in seeds])),
            "trained on": str(mean_of([each.cost(healed=True) for each in seeds])),
        }
        for method, seeds in after.items()
    }
    return pd.DataFrame(rows).T
