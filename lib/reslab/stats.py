"""Estimates with 95 % intervals."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import bdtr, betaincinv, nctdtrinc, stdtrit

from reslab.schema import Settings

__all__ = [
    "Estimate",
    "detectable",
    "deterministic",
    "fisher_g",
    "folded",
    "mean_of",
    "median_of",
    "moving_average",
    "paired_difference",
    "share_of",
    "slope",
    "unexplained_share",
]


class Estimate(Settings):
    """A value with its 95 % interval over n independent seeds, or rounds of a measurement.

    No interval (None) when n is 1, or too small for an interval of its kind; no value either when one of the n could
    not be measured: its run diverged, or what was looked for did not come about.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int

    def __str__(self) -> str:
        if self.value is None:
            return f"not measured in all of n={self.n}"
        if self.low is None or self.high is None:
            return f"{self.value:.3g} (n={self.n}, no interval)"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}] (n={self.n})"


def _rounded(value: float) -> float:
    """Six significant digits: what a reader can use, and the same file on every rerun."""
    return float(f"{value:.6g}")


def deterministic(value: float) -> Estimate:
    """A value that no seed enters into: its interval is a point."""
    return Estimate(value=_rounded(value), low=_rounded(value), high=_rounded(value), n=1)


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean with Student's t interval.

    With three to ten seeds a percentile bootstrap is much too narrow; the t interval is exact for normal values.
    A value that is not finite (of a run that diverged) leaves the whole unmeasured: to drop it would flatter.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    n = len(values)
    if not all(map(math.isfinite, values)):
        return Estimate(value=None, low=None, high=None, n=n)
    mean = float(np.mean(values))
    if n == 1:
        return Estimate(value=_rounded(mean), low=None, high=None, n=1)
    half = float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n))
    return Estimate(value=_rounded(mean), low=_rounded(mean - half), high=_rounded(mean + half), n=n)


def median_of(values: Sequence[float]) -> Estimate:
    """Median with the interval of the sign test, for measured times: one disturbed value of nine moves neither far.

    From the k-th smallest to the k-th largest of n independent values: that has the median of any continuous
    distribution inside with probability 1 - 2 P(fewer than k heads of n coins), at least 95 % (Conover 1999, "Practical
    Nonparametric Statistics", section 3.2). Of nine they are the second and the eighth, at 96 %; fewer than six have no
    interval. A value that is not finite leaves the whole unmeasured, as in `mean_of`.
    """
    if not values:
        raise ValueError("a median needs at least one value")
    n = len(values)
    if not all(map(math.isfinite, values)):
        return Estimate(value=None, low=None, high=None, n=n)
    k = int(np.sum(bdtr(np.arange(n), n, 0.5) <= 0.025))
    ordered = sorted(values)
    low, high = (_rounded(ordered[k - 1]), _rounded(ordered[n - k])) if k else (None, None)
    return Estimate(value=_rounded(float(np.median(ordered))), low=low, high=high, n=n)


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of ours - theirs, seed by seed."""
    return mean_of([a - b for a, b in zip(ours, theirs, strict=True)])


def share_of(successes: Sequence[bool]) -> Estimate:
    """Share of runs that succeeded, with the exact interval for a share.

    Clopper & Pearson 1934, "The use of confidence or fiducial limits illustrated in the case of the binomial",
    Biometrika 26: the shares that a two-sided test at 5 % does not reject. Three of three runs say that it is at least
    0.29, no more.
    """
    if not successes:
        raise ValueError("a share needs at least one run")
    n, k = len(successes), sum(map(bool, successes))
    low = float(betaincinv(k, n - k + 1, 0.025)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 0.975)) if k < n else 1.0
    return Estimate(value=_rounded(k / n), low=_rounded(low), high=_rounded(high), n=n)


def folded(differences: Sequence[float]) -> Estimate:
    """The mean of differences with its interval, mirrored where the mean is negative: how large, whichever way.

    Where the interval lies above a margin the two-sided test rejects that the mean is within the margin; where it lies
    below the margin, the mean is within.
    """
    mean = mean_of(differences)
    return mean_of([-d for d in differences]) if mean.value is not None and mean.value < 0 else mean


def detectable(differences: Sequence[float], power: float = 0.8) -> float:
    """The smallest true mean whose 95 % interval would lie clear of 0 with this probability, given n values' spread.

    From the noncentral t distribution (Cohen 1988, "Statistical Power Analysis", chapter 2); not a number for n = 1,
    where a value is not finite, and where all are equal, as whole numbers may be: then their spread is not known.
    """
    n = len(differences)
    if n < 2 or not all(map(math.isfinite, differences)) or min(differences) == max(differences):
        return math.nan
    shift = nctdtrinc(n - 1, 1 - power, stdtrit(n - 1, 0.975))
    return _rounded(float(shift * np.std(differences, ddof=1) / math.sqrt(n)))


def slope(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Of the least-squares line through the points (x, y); of logarithms, the exponent of a power law."""
    return float(np.polyfit(x, y, 1)[0])


def fisher_g(series: Sequence[float]) -> float:
    """Largest share of the power at one frequency, of a linearly detrended series, between 0 and 1.

    1 for a pure oscillation; about ln(n/2) / (n/2) for n values of white noise (Fisher 1929).
    """
    power = np.abs(np.fft.rfft(detrended(series))[1:]) ** 2
    return float(power.max() / power.sum())


def detrended(series: Sequence[float]) -> np.ndarray:
    """The series less its least-squares line."""
    values = np.asarray(series, dtype=float)
    time = np.arange(len(values))
    line: np.ndarray = values - np.polyval(np.polyfit(time, values, 1), time)
    return line


def unexplained_share(series: Sequence[float], control: Sequence[float]) -> float:
    """Share of the variance of `series` that a straight line in `control` leaves (1 - R^2), both detrended."""
    return float(1 - np.corrcoef(detrended(series), detrended(control))[0, 1] ** 2)


def moving_average(series: Sequence[float], window: int) -> np.ndarray:
    """Mean over the last `window` values, or as many as there are."""
    values = np.asarray(series, dtype=float)
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    averaged: np.ndarray = (sums[ends] - sums[begins]) / (ends - begins)
    return averaged
