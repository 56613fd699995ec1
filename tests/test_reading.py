"""Linear probes of layers: against numbers worked out by hand and against scikit-learn."""

import math

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from reslab import reading

RANDOM = np.random.default_rng(0)
CLASSES = RANDOM.integers(0, 3, 400)
FEATURES = np.eye(3)[CLASSES] @ RANDOM.normal(size=(3, 5)) + RANDOM.normal(size=(400, 5))


def test_normalised_vectors_have_mean_zero_and_variance_one() -> None:
    x = reading.normalised(np.array([[1.0, 3.0], [5.0, 5.0]]))
    assert x.tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_probe_and_skill_are_those_of_ridge_regression() -> None:
    there, classes = FEATURES[300:], CLASSES[300:]
    fitted, test = (reading.moments(FEATURES[part], CLASSES[part], 3) for part in (slice(300), slice(300, None)))
    ridge = Ridge(alpha=reading.PENALTY).fit(FEATURES[:300], np.eye(3)[CLASSES[:300]])
    weights = reading.probe(fitted)
    assert weights[:-1] == pytest.approx(ridge.coef_.T)
    assert weights[-1] == pytest.approx(ridge.intercept_)
    wrong = np.square(ridge.predict(there) - np.eye(3)[classes]).sum()
    frequencies = np.bincount(CLASSES[:300], minlength=3) / 300
    guessed = np.square(frequencies - np.eye(3)[classes]).sum()
    assert fitted.frequencies == pytest.approx(frequencies)
    assert reading.skill(weights, frequencies, test) == pytest.approx(1 - wrong / guessed)


def test_skill_is_one_where_certain_and_zero_at_the_frequencies() -> None:
    test = reading.moments(np.eye(2)[[0, 1, 1, 0]], np.array([0, 1, 1, 0]), 2)
    half = np.array([0.5, 0.5])
    assert reading.skill(np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), half, test) == pytest.approx(1)
    assert reading.skill(np.array([[0.0, 0.0], [0.0, 0.0], [0.5, 0.5]]), half, test) == pytest.approx(0)
    assert reading.skill(np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]), half, test) == pytest.approx(-3)


def test_probes_cross_places_that_differ_by_a_shift_only_when_recentred() -> None:
    places = [FEATURES, FEATURES + 4.0, FEATURES @ np.linalg.qr(RANDOM.normal(size=(5, 5)))[0]]
    moments = [reading.moments(place, CLASSES, 3) for place in places]
    raw, recentred = (reading.skills(moments, moments, recentred=moved) for moved in (False, True))
    assert np.diag(raw) == pytest.approx(np.diag(recentred))
    assert raw[0, 1] < 0.5 * raw[0, 0]
    assert recentred[0, 1] == pytest.approx(raw[0, 0], rel=1e-3)
    assert recentred[0, 2] < 0.5 * raw[0, 0]


def test_kept_share_is_of_what_two_places_have_in_common() -> None:
    table = np.array([[0.8, 0.3, -2.0], [0.0, 0.4, 0.4], [0.0, 0.0, 0.6]])
    assert reading.kept_share([table]) == pytest.approx((0.3 + 0.4) / (0.4 + 0.4))
    assert reading.kept_share([table], 2) == 0
    assert reading.kept_share([table, np.zeros((3, 3))]) == reading.kept_share([table])
    assert math.isnan(reading.kept_share([np.full((3, 3), 0.001)]))
    assert math.isnan(reading.kept_share([np.full((3, 3), math.nan)]))


def test_centre_is_that_of_the_gain_over_the_embedding() -> None:
    assert reading.centre([0.2, 0.2, 0.4]) == pytest.approx(1)
    assert reading.centre([0.2, 0.4, 0.4]) == pytest.approx(0.75)
    assert reading.centre([0.2, 0.4, 0.1]) == pytest.approx(0.5)
    assert math.isnan(reading.centre([0.2, 0.2, 0.1]))
    assert math.isnan(reading.centre([math.nan, math.nan, math.nan]))
