"""The law of the ratio and the measures of an alarm, against values worked out by hand."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from reslab.ratio_rules import auc, detection, inside, law, rank_correlation, stratified_auc


def test_law_of_one_kind_is_the_formula() -> None:
    assert law(["f"] * 4, {"f": 2.0}, 3.0) == pytest.approx([math.sqrt(2 / (3 + 2 * i)) for i in range(4)])


def test_law_of_two_kinds_adds_each_ones_square() -> None:
    assert law(["a", "m", "a"], {"a": 1.0, "m": 4.0}, 4.0) == pytest.approx([0.5, math.sqrt(4 / 5), 1 / 3])


def test_inside_is_symmetric_in_the_logarithm() -> None:
    assert inside([0.5, 2.0, 0.49, 2.1, math.nan, math.inf], [1.0] * 6, 2.0) == [True, True, False, False, False, False]


def test_auc_is_scikit_learns() -> None:
    drawn = np.random.default_rng(0)
    scores, failed = drawn.integers(0, 6, 40).astype(float), drawn.random(40) < 0.4
    assert auc(scores.tolist(), failed.tolist()) == pytest.approx(roc_auc_score(failed, scores))


def test_auc_counts_ties_half_and_bears_infinite_scores() -> None:
    assert auc([1.0, 1.0], [True, False]) == 0.5
    assert auc([math.inf, 3.0, 2.0], [True, False, True]) == 0.5
    assert auc([math.inf, 3.0], [True, False]) == 1


@pytest.mark.parametrize(("scores", "failed"), [([1.0, 2.0], [True, True]), ([math.nan, 1.0], [True, False]), ([], [])])
def test_auc_without_both_kinds_is_not_measured(scores: list[float], failed: list[bool]) -> None:
    assert math.isnan(auc(scores, failed))


def test_strata_hide_what_lies_between_them() -> None:
    """All failures are of the second stratum, whose scores are higher; within strata the score knows nothing."""
    scores, strata = [1.0, 1.0, 5.0, 5.0, 5.0], ["a", "a", "b", "b", "b"]
    failed = [False, False, True, True, False]
    assert auc(scores, failed) == pytest.approx(5 / 6)
    assert stratified_auc(scores, failed, strata) == 0.5
    assert math.isnan(stratified_auc(scores[:4], failed[:4], strata[:4]))


def test_strata_weigh_by_their_pairs() -> None:
    """One stratum of one pair in the right order, one of two pairs in the wrong one."""
    scores, failed, strata = [2.0, 1.0, 1.0, 2.0, 2.0], [True, False, True, False, False], [0, 0, 1, 1, 1]
    assert stratified_auc(scores, failed, strata) == pytest.approx(1 / 3)


def test_detection_is_hits_less_false_alarms() -> None:
    assert detection([True, False, True, False, False], [True, True, False, False, False]) == pytest.approx(
        1 / 2 - 1 / 3
    )
    assert math.isnan(detection([True], [True]))


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))
    assert math.isnan(rank_correlation([1, math.nan], [1, 2]))
