"""How much of a gradient is left after T steps of a recurrence, in float64 and without training (claim 14)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from reslab.models.state_space import DiagonalMixer, IncrementMixer, Mixer, StateMixer, state_gradient
from reslab.schema import Settings
from reslab.stats import Estimate, deterministic, mean_of, slope

__all__ = [
    "DIAGONAL",
    "FIXED",
    "INCREMENT",
    "KINDS",
    "LEAKY",
    "SHORT_DIAGONAL",
    "SHORT_INCREMENT",
    "START",
    "STATE",
    "SUM",
    "WIDE",
    "WIDE_STATE",
    "Exact",
    "LeakyMixer",
    "exact_estimates",
    "gradients_over_time",
    "log_gradient",
]

STATE = "state"
WIDE_STATE = "state, wide start"
INCREMENT = "increment 1/T"
SUM = "increment 1"
DIAGONAL = "diagonal"
FIXED = "increment 0.1"
LEAKY = "leaky 1/T"
SHORT_INCREMENT = "increment, set short"
SHORT_DIAGONAL = "diagonal, set short"
KINDS = (STATE, WIDE_STATE, INCREMENT, SUM, DIAGONAL, FIXED, LEAKY, SHORT_INCREMENT, SHORT_DIAGONAL)
"""The recurrences whose gradient is computed; those set short are made for the shortest length and run on."""

START, WIDE = 0.55, 1.0
"""Standard deviation of all matrices times sqrt(d), as in GPT-2, and of the replaced state's other start.

By the circular law it is about the spectral radius of W: at 0.55 a replaced state shrinks by construction, at 1 W alone
neither shrinks it nor lets it grow, and what shrinks it is the slope of tanh."""

FLOOR = 1e-300
"""Smaller gradients count as this, so that their logarithm is a number."""


class Exact(Settings):
    """Sizes of the exact checks."""

    lengths: tuple[int, ...]
    """T, steps of the recurrence, increasing."""
    width: int = Field(ge=2)
    seeds: int = Field(ge=1)

    @field_validator("lengths")
    @classmethod
    def _lengths_increase(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if len(lengths) < 2 or min(lengths) < 2 or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths must be two or more that increase from at least 2, got {list(lengths)}")
        return lengths


class LeakyMixer(StateMixer):
    """s_t = (1 - rate) s_{t-1} + rate tanh(W s_{t-1} + U x_t): the increment with a leak (Jaeger et al. 2007).

    With rate 1/T the identity's part shrinks to (1 - 1/T)^T, about 1/e, over T steps.
    """

    def __init__(self, width: int, rate: float) -> None:
        super().__init__(width)
        self.rate = rate

    def step(self, state: Tensor, fed: Tensor) -> Tensor:
        return (1 - self.rate) * state + self.rate * super().step(state, fed)


def _mixer(kind: str, width: int, length: int, shortest: int) -> Mixer:
    if kind in (STATE, WIDE_STATE):
        return StateMixer(width)
    if kind == LEAKY:
        return LeakyMixer(width, 1 / length)
    if kind in (DIAGONAL, SHORT_DIAGONAL):
        return DiagonalMixer(width, shortest if kind == SHORT_DIAGONAL else length)
    rates = {INCREMENT: 1 / length, SUM: 1.0, FIXED: 0.1, SHORT_INCREMENT: 1 / shortest}
    return IncrementMixer(width, rates[kind])


def log_gradient(mixer: Mixer, inputs: Tensor) -> float:
    """log10 of `state_gradient`, ||d s_T / d s_0||_F / sqrt(d), for inputs [T, d]; -300 for all that is smaller."""
    found = state_gradient(mixer, inputs)
    return math.log10(max(found, FLOOR)) if math.isfinite(found) else math.nan


def gradients_over_time(exact: Exact) -> pd.DataFrame:
    """log10 of the gradient over T steps, one row a kind, length and seed: columns kind, length, seed, gradient.

    Inputs are white noise of variance 1, as a norm leaves them; matrices have the decoders' standard deviation,
    START/sqrt(d). All kinds of a seed have the same W, U and inputs, but that W and U of the wide start are larger,
    WIDE/sqrt(d); nothing of a seed enters the diagonal ones, which have one row a length.
    """
    rows = []
    for seed in range(exact.seeds):
        generator = torch.Generator().manual_seed(seed)
        std = START * exact.width**-0.5
        state_map, input_map = (torch.randn(exact.width, exact.width, generator=generator) * std for _ in range(2))
        inputs = torch.randn(exact.lengths[-1], exact.width, generator=generator)
        for kind in KINDS if seed == 0 else [kind for kind in KINDS if kind not in (DIAGONAL, SHORT_DIAGONAL)]:
            for length in exact.lengths:
                mixer = _mixer(kind, exact.width, length, exact.lengths[0])
                wider = WIDE / START if kind == WIDE_STATE else 1.0
                mixer.input_map.weight = nn.Parameter(wider * input_map)
                if isinstance(mixer, StateMixer):
                    mixer.state_map.weight = nn.Parameter(wider * state_map)
                found = log_gradient(mixer, inputs[:length])
                rows.append({"kind": kind, "length": length, "seed": seed, "gradient": found})
    return pd.DataFrame(rows)


def exact_estimates(table: pd.DataFrame) -> dict[str, Estimate]:
    """What the checks need of `gradients_over_time`: rates and exponents fitted over all lengths, or the longest."""
    lengths = np.array(sorted(table["length"].unique()))
    by_seed = {
        kind: part.pivot(index="seed", columns="length", values="gradient") for kind, part in table.groupby("kind")
    }

    def last(kind: str) -> Estimate:
        return mean_of(by_seed[kind][lengths[-1]].tolist())

    def fitted(kind: str, against: np.ndarray) -> Estimate:
        return mean_of([slope(against.tolist(), row.tolist()) for row in by_seed[kind].to_numpy()])

    share = 10 ** (by_seed[LEAKY][lengths[-1]] - by_seed[INCREMENT][lengths[-1]])
    return {
        "state_rate": fitted(STATE, lengths),
        "state_rate_wide": fitted(WIDE_STATE, lengths),
        "leaky_share": mean_of(share.tolist()),
        "fixed_grows": last(FIXED),
        "increment_kept": last(INCREMENT),
        "increment_flat": fitted(INCREMENT, np.log10(lengths)),
        "sum_kept": last(SUM),
        "sum_steady": last(SUM),
        "diagonal_flat": deterministic(slope(np.log10(lengths).tolist(), by_seed[DIAGONAL].iloc[0].tolist())),
        "increment_beyond": last(SHORT_INCREMENT),
        "increment_beyond_steady": last(SHORT_INCREMENT),
        "diagonal_beyond": deterministic(float(by_seed[SHORT_DIAGONAL][lengths[-1]].iloc[0])),
    }
