"""What a loss curve shows: whether it fell, jumped, stood still, and how soon.

Losses are one a step, in nats, of that step's batch.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from reslab import data
from reslab.stats import moving_average
from reslab.training import STALL_MARGIN, RunRecord

__all__ = [
    "LABELS",
    "Bracket",
    "Label",
    "bracket",
    "context_free_losses",
    "early_loss",
    "excess_losses",
    "excess_rise",
    "failures",
    "first_below",
    "first_use_of_context",
    "label",
    "largest_rise",
    "spikes",
]

Label = Literal["trained", "spiked", "slow", "stalled", "diverged"]
"""What became of a run; the first of these that holds:

`diverged` the loss is not finite (`training.Outcome`);
`spiked` the run is trained in the end, and has at least one of `spikes`;
`trained` it ends more than `training.STALL_MARGIN` below the best context-free guess, on validation data;
`slow` it does not, but is still falling: the mean of the last quarter of its losses lies more than `STILL_FALLING`
below that of the quarter before;
`stalled` it does not, and is not.
"""

LABELS: tuple[Label, ...] = ("trained", "spiked", "slow", "stalled", "diverged")

SMOOTHING = 10
"""Steps that a loss is averaged over, so that a few hard batches are no spike."""

SPIKE = 0.5
"""Nats. An event, not noise: the best context-free guess on 256 bytes of text varies by 0.18 (standard deviation) from
batch to batch, its mean over ten batches by 0.06; from guessing blindly (5.5) to that guess (3.2) it is 2.3 nats."""

STILL_FALLING = 0.1
"""Nats between the last two quarters of a run's losses: two to three times what batches differ by over 30 steps."""


def _means(losses: Sequence[float], window: int) -> np.ndarray:
    """Means of each `window` losses in a row."""
    return moving_average(losses, window)[window - 1 :]


def spikes(losses: Sequence[float], rise: float = SPIKE, window: int = SMOOTHING) -> list[int]:
    """The steps (from 0) at which a spike begins; none in a curve of fewer than `window` steps.

    A spike begins where the mean of the last `window` losses lies more than `rise` above its lowest value so far. It
    lasts until that mean is back within `rise` / 2 of that value; a loss that jumps and stays up is one spike.
    """
    begins: list[int] = []
    lowest, up = math.inf, False
    for step, value in enumerate(_means(losses, window), start=window - 1):
        lowest = min(lowest, float(value))
        if not up and value > lowest + rise:
            begins.append(step)
            up = True
        elif up and value <= lowest + rise / 2:
            up = False
    return begins


def largest_rise(losses: Sequence[float], window: int = SMOOTHING) -> float:
    """How far the mean of the last `window` losses ever lies above its lowest value so far; not a number for
    fewer than `window` losses."""
    means = _means(losses, window)
    if not len(means):
        return math.nan
    return float((means - np.minimum.accumulate(means)).max())


def first_below(losses: Sequence[float], level: float, window: int = 20) -> float:
    """The first step (from 0) at which the mean of the last `window` losses is below `level`; not a number if none."""
    below = np.flatnonzero(moving_average(losses, window) < level)
    return float(below[0]) if len(below) else math.nan


def early_loss(losses: Sequence[float], steps: int) -> float:
    """Mean loss of the first `steps`; not a number where the run has fewer."""
    return float(np.mean(losses[:steps])) if 0 < steps <= len(losses) else math.nan


def label(record: RunRecord) -> Label:
    """See `Label`."""
    if record.outcome == "diverged":
        return "diverged"
    if record.outcome == "trained":
        return "spiked" if spikes(record.train_loss) else "trained"
    quarter = len(record.train_loss) // 4
    if not quarter:
        return "stalled"
    before, last = record.train_loss[-2 * quarter : -quarter], record.train_loss[-quarter:]
    return "slow" if np.mean(before) - np.mean(last) > STILL_FALLING else "stalled"


def failures(labels: Mapping[float, Label]) -> dict[float, bool]:
    """Which of runs that are alike but for their rate failed, by rate: all that did not train without a spike, but for
    those that were merely too slow.

    Too slow is a run below the lowest rate that trains (with or without a spike) that is slow, or that came to stand
    still, as its rate falls with the steps, before it got anywhere. Above that rate both are failures: there a lower
    rate trains, and this one is more than the model bears. Where no rate trains, runs that are slow did not fail, and
    those that stand still did.
    """
    lowest = min((rate for rate, its in labels.items() if its in ("trained", "spiked")), default=math.inf)
    too_slow = {"slow"} if lowest == math.inf else {"slow", "stalled"}
    return {rate: its != "trained" and not (its in too_slow and rate < lowest) for rate, its in labels.items()}


# --- the threshold learning rate ------------------------------------------------------------------


class Bracket(NamedTuple):
    """Between which of the rates tried the threshold lies, above which training fails."""

    bears: float | None
    """The highest rate below the threshold; None where no rate trained."""
    fails: float | None
    """The lowest rate above it; None where none of the higher rates failed."""

    @property
    def threshold(self) -> float:
        """The geometric mean of the two; not a number where the threshold is censored."""
        return math.nan if self.bears is None or self.fails is None else math.sqrt(self.bears * self.fails)

    def __str__(self) -> str:
        if self.bears is None:
            return "none trains" if self.fails is None else f"below {self.fails:g}"
        return f"above {self.bears:g}" if self.fails is None else f"{self.bears:g} to {self.fails:g}"


def bracket(labels: Mapping[float, Label]) -> Bracket:
    """The threshold learning rate of runs that are alike but for their rate, by rate.

    Going up from the lowest rate that trained without a spike, it lies below the first that did not; what still higher
    rates do does not count, and lower ones (too slow to get there) neither. Where no rate trained it lies below the
    lowest that was not merely slow.
    """
    rates = sorted(labels)
    trained = [rate for rate in rates if labels[rate] == "trained"]
    if not trained:
        return Bracket(None, next((rate for rate in rates if labels[rate] != "slow"), None))
    fails = next((rate for rate in rates if rate > trained[0] and labels[rate] != "trained"), None)
    return Bracket(max(rate for rate in trained if fails is None or rate < fails), fails)


# --- against the best context-free guess ----------------------------------------------------------


def context_free_losses(record: RunRecord) -> list[float]:
    """Loss of the best context-free guess on the very batches a text run was trained on, step by step.

    The noise-matched control: whatever this series shows comes from the batches, not from the model.
    """
    config = record.config
    assert isinstance(config.task, data.TextConfig)
    return list(_context_free(config.task, config.seed, config.optimisation.batch, len(record.train_loss)))


@cache
def _context_free(config: data.TextConfig, seed: int, batch: int, steps: int) -> tuple[float, ...]:
    task = data.load(config)
    assert isinstance(task, data.Text)
    logs = task.corpus.unigram()
    return tuple(float(-logs[task.batch(seed, step, batch)[1].numpy()].mean()) for step in range(steps))


def excess_losses(record: RunRecord) -> list[float]:
    """By how much each step's loss lies above that of the best context-free guess on the same batch."""
    return [loss - guess for loss, guess in zip(record.train_loss, context_free_losses(record), strict=True)]


def excess_rise(record: RunRecord) -> float:
    """`largest_rise` of a run's `excess_losses`."""
    return largest_rise(excess_losses(record))


def first_use_of_context(record: RunRecord) -> float:
    """The first step (from 0) at which the mean of a run's last 20 `excess_losses` is below -`STALL_MARGIN`; not a
    number if none."""
    return first_below(excess_losses(record), -STALL_MARGIN)
