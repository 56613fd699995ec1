"""How much of something can be read off a stream by a linear map."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["RESOLUTION", "readable_share"]

RESOLUTION = 0.03
"""A difference between features smaller than this, in units of their own size, counts as hardly readable."""


def readable_share(
    features: NDArray[np.float64],
    targets: NDArray[np.float64],
    test_features: NDArray[np.float64],
    test_targets: NDArray[np.float64],
) -> float:
    """Share of the targets' variance (R^2) on test data that ridge regression reads off the features.

    Features [N, d], targets [N, k]. The penalty is RESOLUTION^2 times the features' mean square, so that a stream whose
    rows are nearly all alike does not count as readable by what sets them apart in the last digits; the result does
    not depend on the features' unit. 1 is all of it, 0 no more than the mean; below 0 it is worse than that. Not a
    number where the features are not finite.
    """
    if not np.isfinite(features).all() or not np.isfinite(test_features).all():
        return float("nan")
    centre, level = features.mean(0), targets.mean(0)
    x, y = features - centre, targets - level
    penalty = RESOLUTION**2 * np.square(features).mean() * len(features)
    gram = x.T @ x + max(penalty, np.finfo(float).tiny) * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, x.T @ y)
    left = test_targets - level - (test_features - centre) @ weights
    return float(1 - np.square(left).sum() / np.square(test_targets - test_targets.mean(0)).sum())
