"""Rules for the ratio |f(x)| / |x| of a residual branch, and how well such a rule sorts the ill from the healthy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

__all__ = ["auc", "detection", "inside", "law", "rank_correlation", "stratified_auc"]


# --- the depth-aware law --------------------------------------------------------------------------


def law(kinds: Sequence[str], update_square: dict[str, float], start: float) -> list[float]:
    """Ratio of each sublayer where updates are at right angles to the stream: sqrt(c_k / S_l).

    S_l is `start` (the mean squared norm of the embedding) plus the squares of the updates before l, and c_k the mean
    squared norm of updates of its kind. With one kind this is sqrt(c / (s0 + c l)).
    """
    ratios, square = [], start
    for kind in kinds:
        ratios.append(math.sqrt(update_square[kind] / square))
        square += update_square[kind]
    return ratios


def inside(ratios: Sequence[float], centres: Sequence[float], factor: float) -> list[bool]:
    """Which ratios lie within `factor` of their centre, up or down; one that is not finite does not."""
    return [centre / factor <= ratio <= centre * factor for ratio, centre in zip(ratios, centres, strict=True)]


# --- how well a rule sorts ------------------------------------------------------------------------


def auc(scores: Sequence[float], failed: Sequence[bool]) -> float:
    """Area under the ROC curve: the chance that a failed run scores above one that did not, ties counting half.

    Scores may be infinite (the run was lost before it was looked at). Not a number where there is no run of one kind,
    or where a score is not a number.
    """
    values, ill = np.asarray(scores, dtype=float), np.asarray(failed, dtype=bool)
    n, m = int(ill.sum()), int((~ill).sum())
    if not n or not m or np.isnan(values).any():
        return math.nan
    return float((pd.Series(values).rank()[ill].sum() - n * (n + 1) / 2) / (n * m))


def stratified_auc(scores: Sequence[float], failed: Sequence[bool], strata: Sequence[object]) -> float:
    """The same over pairs of runs of one stratum alone; not a number where no stratum has a pair."""
    total, pairs = 0.0, 0
    for stratum in dict.fromkeys(strata):
        places = [i for i, its in enumerate(strata) if its == stratum]
        ill = [failed[i] for i in places]
        count = sum(ill) * (len(ill) - sum(ill))
        if count:
            total += count * auc([scores[i] for i in places], ill)
            pairs += count
    return total / pairs if pairs else math.nan


def detection(flagged: Sequence[bool], failed: Sequence[bool]) -> float:
    """Youden's J of an alarm: the share of the failed that it flags less the share of the others that it flags.

    1 perfect, 0 chance; not a number where there is no run of one kind.
    """
    ill = [flag for flag, lost in zip(flagged, failed, strict=True) if lost]
    well = [flag for flag, lost in zip(flagged, failed, strict=True) if not lost]
    return float(np.mean(ill) - np.mean(well)) if ill and well else math.nan


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's; not a number where a value is none, or all of x or of y are the same."""
    values = np.array([x, y], dtype=float)
    if np.isnan(values).any() or values.shape[1] < 2:
        return math.nan
    ranks = pd.DataFrame(values).rank(axis=1).to_numpy()
    return math.nan if (np.ptp(ranks, axis=1) == 0).any() else float(np.corrcoef(ranks)[0, 1])
