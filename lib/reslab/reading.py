"""What can be read off a layer, linearly, and whether the next layer writes it in the same way.

A probe of a layer is the ridge regression of one-hot classes on the layer's normalised output (Alain & Bengio 2016,
arXiv 1610.01644; in closed form, with no learning rate that could favour one model). It is judged by its Brier skill: 1
where it says each class with certainty, 0 where it says no more than the classes' frequencies, below 0 where it
misleads. Accuracy would not do: a model may know a lot without its likeliest class ever changing.

A probe of one layer applied to another tells whether both share a space. The cosine between the layers does not: with
skips it is high before anything is learned (see `influence.predicted_influences`).

Letters: N examples, d width, C classes, P places of the stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Moments", "centre", "kept_share", "moments", "normalised", "probe", "skill", "skills"]

Array = NDArray[np.float64]

PENALTY = 1.0
"""Of the ridge regression; beside N examples of normalised features it only keeps the solution finite."""

LEAST = 0.01
"""Skill below which nothing is said to be read: less than a hundredth of the classes' variance."""


@dataclass(frozen=True)
class Moments:
    """All that a linear probe of one place and its score depend on."""

    gram: Array
    """Second moments of the features and a constant 1, [d + 1, d + 1]."""
    cross: Array
    """Products of these with one-hot classes, [d + 1, C]; the last row has how often each class occurs."""

    @property
    def frequencies(self) -> Array:
        """Share of each class, [C]."""
        shares: Array = self.cross[-1] / self.gram[-1, -1]
        return shares


def normalised(x: Array) -> Array:
    """x [..., d] as behind a LayerNorm without gain: each vector with mean 0 and variance 1; 0 where all are equal."""
    centred = x - x.mean(-1, keepdims=True)
    size = np.sqrt(np.square(centred).mean(-1, keepdims=True))
    return np.divide(centred, size, out=np.zeros_like(centred), where=size > 0)


def moments(features: Array, classes: NDArray[np.int64], count: int) -> Moments:
    """Of features [N, d] with classes [N] in 0 .. count - 1."""
    extended = np.concatenate([features, np.ones((len(features), 1))], 1)
    cross = np.zeros((count, extended.shape[1]))
    np.add.at(cross, classes, extended)
    return Moments(extended.T @ extended, cross.T)


def probe(fitted: Moments) -> Array:
    """Weights [d + 1, C] of the ridge regression; the constant is not penalised."""
    penalty = np.diag([PENALTY] * (len(fitted.gram) - 1) + [0.0])
    weights: Array = np.linalg.solve(fitted.gram + penalty, fitted.cross).astype(np.float64, copy=False)
    return weights


def skill(weights: Array, frequencies: Array, test: Moments) -> float:
    """1 - (squared error of the probe) / (that of always saying `frequencies`), on the examples of `test`.

    The Brier skill score (Brier 1950, "Verification of forecasts expressed in terms of probability").
    """
    constant = np.zeros_like(weights)
    constant[-1] = frequencies
    return 1 - _squared_error(weights, test) / _squared_error(constant, test)


def _squared_error(weights: Array, test: Moments) -> float:
    """Sum of |W x - y|^2 = tr W'GW - 2 tr W'C + N over the examples, y their one-hot classes."""
    return float((weights * (test.gram @ weights)).sum() - 2 * (weights * test.cross).sum() + test.gram[-1, -1])


def skills(fitted: Sequence[Moments], test: Sequence[Moments], *, recentred: bool = False) -> Array:
    """Skill [P, P] of the probe of place i (row) applied at place j (column).

    With `recentred` the mean feature of place j (that of `fitted`) is first moved to that of place i: places that write
    in the same directions then read alike, whatever constant a layer adds.
    """
    probes, means = [probe(one) for one in fitted], [one.gram[-1] / one.gram[-1, -1] for one in fitted]

    def weights(i: int, j: int) -> Array:
        moved = probes[i].copy()
        moved[-1] += (means[i] - means[j]) @ probes[i] if recentred else 0.0
        return moved

    return np.array(
        [
            [skill(weights(i, j), fitted[i].frequencies, there) for j, there in enumerate(test)]
            for i in range(len(probes))
        ]
    )


def kept_share(tables: Sequence[Array], distance: int = 1) -> float:
    """Of what can be read, how much a place's probe reads `distance` places on: 1 all, 0 nothing.

    Sums over places, and over several properties (tables [P, P] of `skills`), of the skill of the probe there over the
    smaller of the two places' own, which is the most that they can have in common. Skills below 0 count as 0, so that a
    share of exactly 0 at every seed says that probes mislead there, and not that they are known to read nothing without
    any spread. Not a number where two places have less than LEAST in common on average, all properties taken together.
    """
    found, possible = 0.0, 0.0
    for table in tables:
        own = np.maximum(np.diag(table), 0)
        common = np.minimum(own[:-distance], own[distance:])
        found += float(np.minimum(np.maximum(np.diag(table, distance), 0), common).sum())
        possible += float(common.sum())
    return found / possible if possible > LEAST * (len(tables[0]) - distance) else float("nan")


def centre(own: Sequence[float]) -> float:
    """Depth (0 to 1) around which it is found what the input alone does not tell: sum of depth x gain / sum of gain.

    `own` are the skills of a property by place, P values; the gain of a place is its skill beyond that of place 0,
    where positive. The centre of gravity of Tenney et al. 2019 (arXiv 1905.05950), with gains in place of mixing
    weights. Not a number where the mean gain is below LEAST: then nothing was found.
    """
    gains = np.maximum(np.asarray(own)[1:] - own[0], 0)
    if gains.mean() < LEAST:
        return float("nan")
    depths = np.arange(1, len(own)) / (len(own) - 1)
    return float((depths * gains).sum() / gains.sum())
