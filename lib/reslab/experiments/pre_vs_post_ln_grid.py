"""The grid of claim 02: norm placement x depth x learning rate, and the threshold learning rates it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from reslab.comparison import Runs, held_out
from reslab.curves import Bracket, bracket, failures, label, spikes
from reslab.experiments.runs import decoder_run
from reslab.residuals import ConnectionConfig, Placement
from reslab.stats import mean_of
from reslab.sweep import run_all
from reslab.training import RunConfig, RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

METHODS: dict[str, tuple[Placement, bool]] = {
    "Pre-LN": ("pre", False),
    "Post-LN": ("post", False),
    "Post-LN, long warm-up": ("post", True),
}
"""The grid's methods: where the norm stands, and whether the warm-up is long."""

Cell = tuple[str, int, float]
"""A method, a depth and a learning rate."""

Grid = Mapping[Cell, Sequence[RunRecord]]
"""The records of each cell, in the order of the seeds."""


def run_config(
    params: Params,
    depth: int,
    placement: Placement = "pre",
    connection: ConnectionConfig | None = None,
    *,
    long_warmup: bool = False,
    **shape: Any,
) -> RunConfig:
    """A decoder whose matrices all start alike, as in Xiong et al. 2020.

    Not scaled down with depth: that is a cure for depth by itself, and would be taken for a merit of the norm's place.
    """
    section = params.claims.pre_vs_post_ln
    config = decoder_run(params, depth, connection, placement, steps=section.steps, **{"weight_init": "plain"} | shape)
    if not long_warmup:
        return config
    recipe = config.optimisation.model_copy(update={"warmup": section.long_warmup})
    return config.model_copy(update={"optimisation": recipe})


def cells(params: Params, *methods: str) -> list[Cell]:
    section = params.claims.pre_vs_post_ln
    return [(m, d, rate) for m in methods or METHODS for d in section.depths for rate in section.learning_rates]


def grid(params: Params) -> dict[Cell, list[RunRecord]]:
    """Every method at every depth and rate, on all seeds."""
    configs = []
    for method, depth, rate in cells(params):
        placement, long_warmup = METHODS[method]
        config = run_config(params, depth, placement, long_warmup=long_warmup)
        configs += [config.model_copy(update={"learning_rate": rate, "seed": seed}) for seed in params.seeds]
    records = run_all(configs, params.execution, "norm x depth x learning rate")
    n = len(params.seeds)
    return {cell: records[i * n : (i + 1) * n] for i, cell in enumerate(cells(params))}


def arm_name(method: str, depth: int) -> str:
    return f"{method}, {depth} blocks"


def best_rate(params: Params, tried: Grid, method: str, depth: int) -> float:
    """The grid as a sweep: the rate of the lowest validation loss, in the mean over seeds.

    One at which a run diverged is not chosen unless all are such; then the lowest is.
    """
    rates = params.claims.pre_vs_post_ln.learning_rates
    means = [float(np.mean(held_out(tried[method, depth, rate], "validation_loss"))) for rate in rates]
    return rates[int(np.nan_to_num(means, nan=math.inf).argmin())]


def choices(params: Params, tried: Grid) -> pd.DataFrame:
    """One row a cell of the grid, with the columns of `comparison.choose_rates`; outcomes are in words."""
    rows = [
        {
            "arm": arm_name(method, depth),
            "setting": "",
            "rate": rate,
            "validation_loss": float(np.mean(held_out(records, "validation_loss"))),
            "outcome": outcomes(records),
            "chosen": rate == best_rate(params, tried, method, depth),
        }
        for (method, depth, rate), records in tried.items()
    ]
    return pd.DataFrame(rows)


def best(params: Params, tried: Grid, method: str, depth: int) -> list[RunRecord]:
    """The records of a method and depth at its best rate."""
    return list(tried[method, depth, best_rate(params, tried, method, depth)])


def at_best(params: Params, tried: Grid) -> Runs:
    """The grid's arms at their best rates."""
    arms = [(m, d) for m in METHODS for d in params.claims.pre_vs_post_ln.depths]
    return {arm_name(method, depth): best(params, tried, method, depth) for method, depth in arms}


def outcomes(records: Sequence[RunRecord]) -> str:
    """What became of some runs, in words: "trained 2, stalled 1"."""
    labels = [label(record) for record in records]
    return ", ".join(f"{name} {labels.count(name)}" for name in dict.fromkeys(labels))


def brackets(params: Params, tried: Grid, method: str, depth: int) -> list[Bracket]:
    """Where the threshold learning rate lies, by seed."""
    rates = params.claims.pre_vs_post_ln.learning_rates
    by_rate = [[label(record) for record in tried[method, depth, rate]] for rate in rates]
    return [bracket(dict(zip(rates, labels, strict=True))) for labels in zip(*by_rate, strict=True)]


def thresholds(params: Params, tried: Grid) -> pd.DataFrame:
    """The threshold learning rate of each method and depth: by seed, and the mean of its log10 with its interval.

    A threshold below the lowest or above the highest rate tried is censored: then there is no mean.
    """
    rows = []
    for method in METHODS:
        for depth in params.claims.pre_vs_post_ln.depths:
            found = brackets(params, tried, method, depth)
            logs = [math.log10(b.threshold) for b in found if math.isfinite(b.threshold)]
            mean = (
                str(mean_of(logs))
                if len(logs) == len(found)
                else f"censored ({len(found) - len(logs)} of {len(found)})"
            )
            rows.append({"method": method, "depth": depth, "by seed": "; ".join(map(str, found)), "log10": mean})
    return pd.DataFrame(rows).set_index(["method", "depth"])


def share(tried: Grid, chosen: Sequence[Cell], test: Callable[[RunRecord], bool]) -> list[float]:
    """By seed: the share of the cells whose run passes `test`; not a number for no cells."""
    by_seed = zip(*[tried[cell] for cell in chosen], strict=True)
    return [float(np.mean([test(record) for record in records])) for records in by_seed]


def failed(tried: Grid) -> dict[Cell, list[bool]]:
    """Of each run, whether it failed: see `curves.failures`, over the rates of its method, depth and seed."""
    found: dict[Cell, list[bool]] = {cell: [] for cell in tried}
    for method, depth in dict.fromkeys(cell[:2] for cell in tried):
        rates = [rate for m, d, rate in tried if (m, d) == (method, depth)]
        by_seed = zip(*([label(record) for record in tried[method, depth, rate]] for rate in rates), strict=True)
        for labels in by_seed:
            for rate, its in failures(dict(zip(rates, labels, strict=True))).items():
                found[method, depth, rate].append(its)
    return found


def share_failed(tried: Grid, chosen: Sequence[Cell]) -> list[float]:
    """By seed: the share of the cells whose run failed."""
    found = failed(tried)
    return [float(np.mean(of_seed)) for of_seed in zip(*(found[cell] for cell in chosen), strict=True)]


def jumps(record: RunRecord) -> bool:
    return label(record) == "diverged" or bool(spikes(record.train_loss))


def bears_less_fails(params: Params, bearing: Sequence[Bracket], failing: Sequence[Bracket]) -> list[float]:
    """By seed, in places of the list of rates: the highest rate that the one bears less the lowest at which the other
    fails. One before the list where it bears none, one behind it where the other does not fail.
    """
    rates = params.claims.pre_vs_post_ln.learning_rates

    def place(rate: float | None, otherwise: int) -> int:
        return otherwise if rate is None else rates.index(rate)

    pairs = zip(bearing, failing, strict=True)
    return [float(place(one.bears, -1) - place(other.fails, len(rates))) for one, other in pairs]


def tuned_post(params: Params, tried: Grid) -> list[RunRecord]:
    """Post-LN at the greatest depth, at its best rate and warm-up by validation loss."""
    deep = params.claims.pre_vs_post_ln.depths[-1]
    found = [best(params, tried, method, deep) for method in ("Post-LN", "Post-LN, long warm-up")]
    means = [float(np.mean(held_out(records, "validation_loss"))) for records in found]
    return found[int(np.nan_to_num(means, nan=math.inf).argmin())]
