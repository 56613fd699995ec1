"""Loss curves: spikes, outcomes and thresholds of curves made for the purpose."""

import math

import numpy as np
import pytest

from records import around_guess
from reslab.curves import (
    Bracket,
    Label,
    bracket,
    context_free_losses,
    early_loss,
    excess_losses,
    excess_rise,
    failures,
    first_below,
    first_use_of_context,
    label,
    largest_rise,
    spikes,
)
from reslab.training import Outcome, RunConfig, RunRecord, train

FALLING = np.linspace(5.5, 2.5, 120)


def record(config: RunConfig, losses: np.ndarray, outcome: Outcome) -> RunRecord:
    return RunRecord(
        config=config,
        outcome=outcome,
        parameters=1,
        train_loss=tuple(map(float, losses)),
        gradient_norm=(1.0,) * len(losses),
        context_free_loss=3.2,
        validation_loss=None,
        test_loss=None,
        test_accuracy=None,
        profile_before={},
        profile_after={},
    )


# --- spikes ---------------------------------------------------------------------------------------


def test_a_falling_curve_has_no_spike() -> None:
    assert spikes(list(FALLING)) == []
    assert largest_rise(list(FALLING)) == 0


def test_batch_noise_is_no_spike() -> None:
    """Of the size that a loss on 256 bytes has, ten thousand steps long."""
    noise = np.random.default_rng(0).normal(3.2, 0.18, 10_000)
    assert spikes(list(noise)) == []


def test_a_jump_that_comes_back_is_one_spike() -> None:
    losses = FALLING.copy()
    losses[60:70] += 2.0  # the mean of ten is 0.2 higher at step 60, 0.4 at 61, 0.6 at 62; and falls by 0.025 a step
    assert spikes(list(losses)) == [62]
    losses[90:100] += 2.0
    assert spikes(list(losses)) == [62, 92]


def test_a_jump_that_stays_is_one_spike() -> None:
    losses = np.where(np.arange(120) < 50, 2.5, 3.2)
    assert spikes(list(losses)) == [57]  # eight tenths of 0.7 are the first above 0.5
    assert largest_rise(list(losses)) == pytest.approx(0.7)


def test_a_spike_ends_half_way_down() -> None:
    """Without smoothing: up by 0.6, down to 0.3 (not yet over), up again (the same), down to 0.25, up (another)."""
    assert spikes([1.0, 1.6, 1.3, 1.6, 1.25, 1.6], window=1) == [1, 5]


def test_a_jump_of_half_a_nat_or_less_is_none() -> None:
    assert spikes([1.0, 1.5], window=1) == []
    assert spikes([1.0, 1.501], window=1) == [1]


def test_curves_of_no_and_one_step() -> None:
    assert spikes([]) == spikes([5.0]) == spikes([1.0] * 8 + [9.0]) == []
    assert math.isnan(largest_rise([5.0] * 9))
    assert largest_rise([5.0] * 10) == 0


# --- how soon -------------------------------------------------------------------------------------


def test_first_step_below_a_level() -> None:
    assert first_below([4.0, 3.0, 2.0, 1.0], 2.5, window=1) == 2
    assert first_below([4.0, 3.0, 2.0, 1.0], 2.5, window=3) == 3  # means 4, 3.5, 3, 2
    assert math.isnan(first_below([4.0, 3.0], 2.5))
    assert math.isnan(first_below([], 2.5))


def test_early_loss_is_the_mean_of_the_first_steps() -> None:
    assert early_loss([4.0, 2.0, 9.0], 2) == 3
    assert math.isnan(early_loss([4.0, 2.0], 3))
    assert math.isnan(early_loss([4.0, 2.0], 0))


# --- outcomes -------------------------------------------------------------------------------------

SPIKED = np.where((np.arange(120) > 60) & (np.arange(120) < 70), FALLING + 2, FALLING)
PLATEAU = np.where(np.arange(120) < 30, np.linspace(5.5, 3.2, 120)[0], 3.2)

LABELLED: list[tuple[str, np.ndarray, Outcome, Label]] = [
    ("fell", FALLING, "trained", "trained"),
    ("fell with a jump", SPIKED, "trained", "spiked"),
    ("plateau", PLATEAU, "stalled", "stalled"),
    ("jump, then plateau", np.concatenate([FALLING[:50], np.full(70, 4.9)]), "stalled", "stalled"),
    ("still falling", np.linspace(5.5, 3.3, 120), "stalled", "slow"),
    ("falling by 0.09 from quarter to quarter", np.linspace(3.55, 3.2, 120), "stalled", "stalled"),
    ("falling by 0.11 from quarter to quarter", np.linspace(3.64, 3.2, 120), "stalled", "slow"),
    ("not finite after a few steps", FALLING[:7], "diverged", "diverged"),
    ("not finite at once", FALLING[:0], "diverged", "diverged"),
    ("two steps", FALLING[:2], "stalled", "stalled"),
]


@pytest.mark.parametrize(
    ("losses", "outcome", "wanted"), [row[1:] for row in LABELLED], ids=[row[0] for row in LABELLED]
)
def test_outcome_of_a_curve(tiny: RunConfig, losses: np.ndarray, outcome: Outcome, wanted: Label) -> None:
    assert label(record(tiny, losses, outcome)) == wanted


# --- thresholds -----------------------------------------------------------------------------------

T, X, S, D, W = "trained", "stalled", "spiked", "diverged", "slow"


@pytest.mark.parametrize(
    ("by_rate", "bears", "fails", "words"),
    [
        ((T, T, X, X), 0.01, 0.1, "0.01 to 0.1"),
        ((T, S, T, D), 0.001, 0.01, "0.001 to 0.01"),  # what higher rates do does not count
        ((W, T, T, S), 0.1, 1.0, "0.1 to 1"),
        ((X, T, D, D), 0.01, 0.1, "0.01 to 0.1"),  # a lower rate that got nowhere does not count either
        ((T, T, T, T), 1.0, None, "above 1"),
        ((W, W, W, T), 1.0, None, "above 1"),
        ((X, X, X, D), None, 0.001, "below 0.001"),
        ((W, W, X, D), None, 0.1, "below 0.1"),
        ((W, W, W, W), None, None, "none trains"),
        ((T, W, T, T), 0.001, 0.01, "0.001 to 0.01"),
    ],
)
def test_threshold_lies_between_two_rates(
    by_rate: tuple[Label, ...], bears: float | None, fails: float | None, words: str
) -> None:
    found = bracket(dict(zip((0.001, 0.01, 0.1, 1.0), by_rate, strict=True)))
    assert found == (bears, fails)
    assert str(found) == words


@pytest.mark.parametrize(
    ("by_rate", "failed"),
    [
        ((T, X, S, D), (False, True, True, True)),
        ((W, T, T, X), (False, False, False, True)),
        ((T, W, T, W), (False, True, False, True)),  # a lower rate trains: it is the rate that is too high
        ((W, S, W, X), (False, True, True, True)),  # one that trained with a jump did train
        ((W, W, W, W), (False, False, False, False)),  # no rate trains
        ((W, X, W, D), (False, True, False, True)),
        ((X, T, T, D), (False, False, False, True)),  # a lower rate that got nowhere was slow
        ((X, S, D, D), (False, True, True, True)),  # a run that jumped did get somewhere
        ((D, T, T, T), (True, False, False, False)),
        ((X, X, X, D), (True, True, True, True)),  # no rate trains: none was too slow
    ],
)
def test_below_the_rates_that_train_runs_are_slow(by_rate: tuple[Label, ...], failed: tuple[bool, ...]) -> None:
    found = failures(dict(zip((0.001, 0.01, 0.1, 1.0), by_rate, strict=True)))
    assert tuple(found.values()) == failed


def test_a_censored_threshold_is_not_a_number() -> None:
    assert Bracket(0.01, 0.04).threshold == pytest.approx(0.02)
    assert all(math.isnan(b.threshold) for b in (Bracket(0.01, None), Bracket(None, 0.01), Bracket(None, None)))


# --- against the best context-free guess ----------------------------------------------------------


def test_context_free_losses_are_of_the_runs_own_batches(tiny: RunConfig) -> None:
    """A run of 6 steps at batch 4: as many losses, near the entropy of the text, and the same for the same seed."""
    losses = context_free_losses(train(tiny))
    assert len(losses) == 6
    other = train(tiny.model_copy(update={"learning_rate": 1e-4}))
    assert context_free_losses(other) == losses
    assert np.mean(losses) == pytest.approx(other.context_free_loss, abs=0.3)


def test_what_the_batches_do_is_taken_off(tiny: RunConfig) -> None:
    """Whatever the batches: a run as good as the guess never uses the context and never rises."""
    run = record(tiny, np.zeros(200), "stalled")
    idle = around_guess(run, [0.0] * 200)
    assert np.std(idle.train_loss) > 0.01
    assert excess_losses(idle) == pytest.approx([0.0] * 200)
    assert math.isnan(first_use_of_context(idle))
    assert excess_rise(idle) == pytest.approx(0)
    assert excess_rise(around_guess(run, [1.0] * 50 + [1.7] * 150)) == pytest.approx(0.7)


def test_first_use_of_context_is_where_the_mean_of_twenty_is_a_margin_below_the_guess(tiny: RunConfig) -> None:
    """From step 20 on 0.11 below: ten such steps of twenty make -0.055."""
    run = around_guess(record(tiny, np.zeros(60), "trained"), [0.0] * 20 + [-0.11] * 40)
    assert first_use_of_context(run) == 29
