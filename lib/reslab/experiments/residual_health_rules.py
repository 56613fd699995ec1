"""Claim 10: three bands of equal width about what is taken for a healthy ratio, and what they keep and find."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from reslab.experiments.residual_health_measured import Looked
from reslab.ratio_rules import inside, law
from reslab.stats import mean_of

__all__ = ["RULES", "centres", "detections", "kept_inside", "rules_table"]

RULES = ("told band", "calibrated band", "band about the law")
"""`told band` as told; the others are as wide (in the logarithm). `calibrated band` lies about the geometric mean of
the ratios of healthy models of other seeds; `band about the law` about the law with their updates and embeddings."""

TOO_LARGE = 10.0
"""An ill update is so many times too large, or zero."""

Band = tuple[float, float]


def centres(models: Sequence[Looked], seed: int, rule: str, band: Band) -> list[float]:
    """The middle of a rule's band for each sublayer of the model in place `seed`; none without a model to go by."""
    own = models[seed]
    others = [model for i, model in enumerate(models) if i != seed and not model.lost]
    if own.lost or (rule != RULES[0] and not others):
        return []
    kinds = own.after["kind"].tolist()
    if rule == RULES[0]:
        return [math.sqrt(band[0] * band[1])] * len(kinds)
    table = pd.concat([model.after for model in others])
    if rule == RULES[1]:
        return [float(np.exp(np.log(table["ratio"].clip(lower=1e-12)).mean()))] * len(kinds)
    squares = (table["update_norm"] ** 2).groupby(table["kind"]).mean()
    start = float(np.mean([model.after["stream_norm"].iloc[0] ** 2 for model in others]))
    return law(kinds, {str(kind): float(value) for kind, value in squares.items()}, start)


def kept_inside(models: Sequence[Looked], rule: str, band: Band) -> list[float]:
    """By seed: the share of healthy sublayers in the band; not a number where it cannot be said."""
    return [_share(models, seed, rule, band, 1.0) for seed in range(len(models))]


def detections(models: Sequence[Looked], rule: str, band: Band) -> list[float]:
    """By seed: share outside the band of updates ten times too large and of zero updates (their mean), less that of
    healthy ones. What is ill is one sublayer at a time; the stream that comes in is then unchanged, so that its ratio
    is the measured one times 10 or 0."""
    return [
        _share(models, seed, rule, band, 1.0)
        - (_share(models, seed, rule, band, TOO_LARGE) + _share(models, seed, rule, band, 0.0)) / 2
        for seed in range(len(models))
    ]


def _share(models: Sequence[Looked], seed: int, rule: str, band: Band, factor: float) -> float:
    middle = centres(models, seed, rule, band)
    if not middle:
        return math.nan
    ratios = [factor * ratio for ratio in models[seed].column("ratio")]
    return float(np.mean(inside(ratios, middle, math.sqrt(band[1] / band[0]))))


def rules_table(models: Sequence[Looked], band: Band) -> pd.DataFrame:
    """What each rule flags."""
    seeds = range(len(models))
    rows = {
        rule: {
            f"{name} flagged": str(mean_of([1 - _share(models, seed, rule, band, factor) for seed in seeds]))
            for name, factor in (("healthy", 1.0), ("ten times too large", TOO_LARGE), ("zero", 0.0))
        }
        for rule in RULES
    }
    return pd.DataFrame(rows).T.rename_axis("share of sublayers")
