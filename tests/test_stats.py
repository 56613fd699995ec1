"""Estimates: Student's interval, and measures of oscillation against series whose answer is known."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from reslab.stats import (
    Estimate,
    detectable,
    deterministic,
    detrended,
    fisher_g,
    folded,
    mean_of,
    median_of,
    paired_difference,
    share_of,
    slope,
    unexplained_share,
)

VALUES = [2.31, 2.45, 2.38, 2.29, 2.52]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_interval_is_students(n: int) -> None:
    values = VALUES[:n]
    found = mean_of(values)
    low, high = scipy_stats.t.interval(0.95, n - 1, loc=np.mean(values), scale=scipy_stats.sem(values))
    assert found.n == n
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high), rel=1e-5)


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(1.5, 2, (1000, 3))
    intervals = [mean_of(row) for row in draws.tolist()]
    covered = sum(i.low < 1.5 < i.high for i in intervals if i.low is not None and i.high is not None)
    assert 0.93 < covered / 1000 < 0.97


def test_one_value_has_no_interval() -> None:
    assert mean_of([2.5]) == Estimate(value=2.5, low=None, high=None, n=1)
    assert str(mean_of([2.5])) == "2.5 (n=1, no interval)"


def test_estimate_is_written_with_interval_and_n() -> None:
    assert str(Estimate(value=0.12345, low=0.1, high=0.15, n=3)) == "0.123 [0.1, 0.15] (n=3)"


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.inf], [math.inf, -math.inf, 1.0]])
def test_mean_with_a_value_that_is_not_finite_is_unmeasured(values: list[float]) -> None:
    found = mean_of(values)
    assert (found.value, found.low, found.high, found.n) == (None, None, None, len(values))
    assert "not measured" in str(found)


def test_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_of([])


def test_equal_values_have_a_point_for_an_interval() -> None:
    found = mean_of([0.5, 0.5, 0.5])
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (17, 5)])
def test_interval_of_a_median_is_the_sign_tests(n: int, rank: int) -> None:
    """Ranks of tables of the sign test, and what they promise: the next one would cover less than 95 %."""
    values = np.random.default_rng(n).permutation(n) + 1.0
    found = median_of(values.tolist())
    assert (found.value, found.low, found.high, found.n) == ((n + 1) / 2, rank, n + 1 - rank, n)
    coverage = [1 - 2 * scipy_stats.binom.cdf(k - 1, n, 0.5) for k in (rank, rank + 1)]
    assert coverage[0] >= 0.95 > coverage[1]


def test_interval_of_a_median_covers_it_as_often_as_it_says() -> None:
    """Also where values are far from normal: of a lognormal with median 1, at 1 - 20/512."""
    draws = np.random.default_rng(0).lognormal(0, 2, (4000, 9))
    intervals = [median_of(row) for row in draws.tolist()]
    covered = sum(i.low < 1 < i.high for i in intervals if i.low is not None and i.high is not None)
    assert covered / 4000 == pytest.approx(1 - 20 / 512, abs=0.01)


def test_one_disturbed_value_of_nine_hardly_moves_a_median() -> None:
    calm = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08]
    disturbed = median_of([*calm[:-1], 50.0])
    assert disturbed == median_of(calm)
    assert (disturbed.value, disturbed.low, disturbed.high) == (1.04, 1.01, 1.07)


def test_fewer_than_six_values_give_a_median_no_interval() -> None:
    assert median_of([3.0, 1.0, 2.0, 5.0, 4.0]) == Estimate(value=3.0, low=None, high=None, n=5)
    assert median_of([2.0, 1.0]).value == 1.5


def test_median_of_nothing_or_of_what_is_not_finite() -> None:
    assert median_of([1.0] * 8 + [math.nan]) == Estimate(value=None, low=None, high=None, n=9)
    with pytest.raises(ValueError, match="a median needs at least one"):
        median_of([])


def test_difference_is_paired() -> None:
    """Seeds differ much more than arms do: pairing takes that out."""
    ours, theirs = [1.1, 5.2, 9.3], [1.0, 5.0, 9.0]
    found = paired_difference(ours, theirs)
    test = scipy_stats.ttest_rel(ours, theirs).confidence_interval()
    assert (found.value, found.low, found.high) == pytest.approx((0.2, test.low, test.high), rel=1e-5)
    assert paired_difference(theirs, ours).value == -0.2


def test_difference_of_unequal_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0, 2.0], [1.0])


def test_deterministic_value_is_a_point() -> None:
    assert deterministic(3) == Estimate(value=3, low=3, high=3, n=1)


def test_estimates_have_six_digits() -> None:
    assert mean_of([1 / 3]).value == 0.333333
    assert deterministic(1e6 / 3).value == 333333.0


@pytest.mark.parametrize(("k", "n"), [(0, 3), (1, 3), (3, 3), (0, 1), (1, 1), (17, 40)])
def test_share_has_the_exact_interval(k: int, n: int) -> None:
    found = share_of([True] * k + [False] * (n - k))
    wanted = scipy_stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    assert (found.value, found.low, found.high) == pytest.approx((k / n, wanted.low, wanted.high), rel=1e-5)
    assert found.n == n


def test_three_of_three_runs_are_little_evidence() -> None:
    assert str(share_of([True] * 3)) == "1 [0.292, 1] (n=3)"
    with pytest.raises(ValueError, match="at least one run"):
        share_of([])


# --- oscillation ----------------------------------------------------------------------------------

TIME = np.arange(200)


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=200)


def test_detrending_takes_the_line_out() -> None:
    np.testing.assert_allclose(detrended(list(3 - 0.5 * TIME)), 0, atol=1e-10)
    wave = np.sin(2 * np.pi * TIME / 10)
    np.testing.assert_allclose(detrended(list(wave + 3 - 0.5 * TIME)), detrended(list(wave)), atol=1e-10)


def test_sine_has_all_its_power_at_one_frequency() -> None:
    assert fisher_g(list(np.sin(2 * np.pi * TIME / 10))) > 0.99
    assert fisher_g(list(np.sin(2 * np.pi * TIME / 10) + 0.1 * TIME)) > 0.99


def test_two_sines_share_the_power() -> None:
    both = np.sin(2 * np.pi * TIME / 10) + np.sin(2 * np.pi * TIME / 4)
    assert fisher_g(list(both)) == pytest.approx(0.5, abs=0.02)


def test_noise_has_power_at_all_frequencies() -> None:
    found = [fisher_g(list(noise(seed))) for seed in range(20)]
    assert np.mean(found) == pytest.approx(math.log(100) / 100, rel=0.35)
    assert max(found) < 0.12


def test_series_explains_itself() -> None:
    series = list(noise(0))
    assert unexplained_share(series, series) == pytest.approx(0, abs=1e-12)
    assert unexplained_share(list(2 - 3 * noise(0) + 0.1 * TIME), series) == pytest.approx(0, abs=1e-12)


def test_unrelated_series_explains_nothing() -> None:
    assert unexplained_share(list(noise(0)), list(noise(1))) > 0.95


def test_half_of_the_variance_is_explained() -> None:
    half = noise(0) + noise(1)
    assert unexplained_share(list(half), list(noise(0))) == pytest.approx(0.5, abs=0.1)


def test_detectable_is_the_mean_whose_interval_is_clear_of_zero_four_times_in_five() -> None:
    """By simulation: means of that size, with the spread of the values given."""
    values = [0.1, 0.25, 0.15]
    spread = float(np.std(values, ddof=1))
    drawn = np.random.default_rng(0).normal(detectable(values), spread, (20_000, 3))
    lows = drawn.mean(1) - 4.302653 * drawn.std(1, ddof=1) / 3**0.5
    assert abs((lows > 0).mean() - 0.8) < 0.01
    assert math.isnan(detectable([0.1] * 4))
    assert math.isnan(detectable([0.1]))
    assert math.isnan(detectable([0.1, math.nan]))


def test_slope_is_the_exponent_of_a_power_law() -> None:
    depths = np.array([6, 12, 24])
    assert slope(np.log(depths).tolist(), np.log(3 * depths**-0.5).tolist()) == pytest.approx(-0.5)


def test_folded_is_never_negative() -> None:
    assert folded([-1.0, -3.0]).value == 2
    assert folded([-1.0, -3.0]).low == -(mean_of([-1.0, -3.0]).high or 0)
    assert folded([1.0, 3.0]) == mean_of([1.0, 3.0])
    assert folded([1.0, math.nan]).value is None
