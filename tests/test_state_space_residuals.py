"""Claim 14's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from torch import nn

from records import diverged
from reslab import data, params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import state_space_residuals as claim
from reslab.experiments import state_space_residuals_exact as exact
from reslab.experiments import state_space_residuals_figure as figure
from reslab.models.state_space import DiagonalMixer, IncrementMixer, StateMixer
from reslab.params import Params
from reslab.schema import UserError
from reslab.sweep import trained_model

SECTION = "state_space_residuals"


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}})


@pytest.fixture(scope="module")
def trained_once(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        names = [arm.name for arm in claim.recall_arms(settings)]
        assert len(set(names)) == len(names)
        yield claim.runs(settings, pd.DataFrame({"arm": names, "setting": "", "rate": 1e-2, "chosen": True}))


@pytest.fixture(scope="module")
def initial(settings: Params) -> pd.DataFrame:
    return claim.initial_gradients(settings)


@pytest.fixture
def trained(trained_once: Runs) -> Runs:
    """A copy that a test may change."""
    return {name: list(records) for name, records in trained_once.items()}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def with_accuracies(trained: Runs, name: str, values: list[float]) -> None:
    pairs = zip(trained[name], values, strict=True)
    trained[name] = [record.model_copy(update={"test_accuracy": value}) for record, value in pairs]


# --- questions ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(settings: Params, trained: Runs, initial: pd.DataFrame) -> None:
    after = claim.trained_gradients(settings, trained)
    checks = [
        *claim.checks_initial(settings, initial),
        *claim.checks_recall(settings, trained),
        *claim.checks_gradients(settings, after),
    ]
    names = [check.name for check in checks]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {check.sentence for check in checks} == {"A5.3b"}
    assert not [check.statement for check in checks if "{" in check.statement]
    assert claim.published(checks) == []
    assert claim.trained_gradients(settings, trained).equals(after)


# --- exact ----------------------------------------------------------------------------------------


def test_one_step_of_each_recurrence_by_hand() -> None:
    """W = w times the identity, no input: every Jacobian is a number times the identity."""
    w, rate, steps = 0.5, 0.25, 3
    wanted = {StateMixer: w, IncrementMixer: 1 + rate * w, exact.LeakyMixer: 1 - rate + rate * w}
    for kind, factor in wanted.items():
        mixer = kind(4) if kind is StateMixer else kind(4, rate)
        mixer.state_map.weight = nn.Parameter(w * torch.eye(4))
        assert exact.log_gradient(mixer, torch.zeros(steps, 4)) == pytest.approx(steps * math.log10(factor))


def test_leak_of_zero_is_no_leak_and_leak_of_one_replaces() -> None:
    torch.manual_seed(0)
    state, fed = torch.randn(2, 4), torch.randn(2, 4)
    mixer = exact.LeakyMixer(4, 1.0)
    plain = StateMixer(4)
    plain.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(mixer.step(state, fed), plain.step(state, fed))
    mixer.rate = 0.0
    torch.testing.assert_close(mixer.step(state, fed), state)


def test_gradient_that_vanishes_has_a_logarithm() -> None:
    mixer = StateMixer(4)
    mixer.state_map.weight = nn.Parameter(torch.zeros(4, 4))
    assert exact.log_gradient(mixer, torch.zeros(3, 4)) == -300


def test_exact_checks_hold_their_known_values() -> None:
    table = exact.gradients_over_time(exact.Exact(lengths=(10, 40), width=16, seeds=2))
    found = {name: estimate.value for name, estimate in exact.exact_estimates(table).items()}
    assert (found["state_rate"] or 0) < math.log10(0.6)
    assert math.log10(0.6) < (found["state_rate_wide"] or 0) < 0
    assert found["leaky_share"] == pytest.approx(math.exp(-1), rel=0.1)
    assert abs(found["increment_flat"] or 1) < 0.05
    assert abs(found["increment_kept"] or 1) < 0.3
    decays = DiagonalMixer(16, 10).decay_logit.detach().double().sigmoid()
    wanted = float((decays**80).mean().sqrt().log10())
    assert found["diagonal_beyond"] == pytest.approx(wanted, rel=1e-5)
    assert len(table[table["kind"] == exact.DIAGONAL]) == 2


def test_estimates_are_fitted_and_of_the_longest() -> None:
    """A gradient of 10^(-T/2) for the replaced state, of 10^(T/4) from the wide start, of T^c for all others."""
    powers = dict(zip(exact.KINDS[2:], (0.0, 1.0, -0.5, 2.0, math.log10(0.5), 3.0, -4.0), strict=True))
    rows = [
        {"kind": kind, "length": length, "seed": seed, "gradient": powers[kind] * math.log10(length)}
        for kind in powers
        for length in (10, 100)
        for seed in (0, 1)
    ]
    rows += [
        {"kind": kind, "length": length, "seed": seed, "gradient": rate * length}
        for kind, rate in ((exact.STATE, -0.5), (exact.WIDE_STATE, 0.25))
        for length in (10, 100)
        for seed in (0, 1)
    ]
    found = {name: estimate.value for name, estimate in exact.exact_estimates(pd.DataFrame(rows)).items()}
    assert found == pytest.approx(
        {
            "state_rate": -0.5,
            "state_rate_wide": 0.25,
            "leaky_share": 0.25,
            "fixed_grows": 4,
            "increment_kept": 0,
            "increment_flat": 0,
            "sum_kept": 2,
            "sum_steady": 2,
            "diagonal_flat": -0.5,
            "increment_beyond": 6,
            "increment_beyond_steady": 6,
            "diagonal_beyond": -8,
        }
    )


def test_wide_start_is_the_same_start_but_wider() -> None:
    """The same draws, with a standard deviation of 1/sqrt(4)."""
    table = exact.gradients_over_time(exact.Exact(lengths=(2, 3), width=4, seeds=1)).set_index(["kind", "length"])
    generator = torch.Generator().manual_seed(0)
    state_map, input_map = (torch.randn(4, 4, generator=generator) * 0.5 for _ in range(2))
    inputs = torch.randn(3, 4, generator=generator)
    mixer = StateMixer(4)
    mixer.state_map.weight, mixer.input_map.weight = nn.Parameter(state_map), nn.Parameter(input_map)
    for length in (2, 3):
        wanted = exact.log_gradient(mixer, inputs[:length])
        assert table.loc[(exact.WIDE_STATE, length), "gradient"] == pytest.approx(wanted, rel=1e-5)


def test_explosion_keeps_from_decaying_and_is_no_steadiness(settings: Params, initial: pd.DataFrame) -> None:
    for gradient, kept, steady in ((4.0, "holds", "fails"), (0.1, "holds", "holds"), (-2.0, "fails", "fails")):
        found = by_name(claim.checks_initial(settings, initial.assign(gradient=gradient)))
        for name, other in (("sum_kept", "sum_steady"), ("increment_beyond", "increment_beyond_steady")):
            assert (found[name].outcome, found[other].outcome) == (kept, steady)


# --- arms -----------------------------------------------------------------------------------------


def test_arms_of_the_cpu_preset() -> None:
    settings = params.preset("cpu")
    section = settings.claims.state_space_residuals
    arms = {arm.name: arm.config for arm in claim.recall_arms(settings)}
    assert len(arms) == 5 * len(section.lengths) + 4
    for config in arms.values():
        assert isinstance(config.task, data.RecallConfig)
        assert getattr(config.model, "context", 0) == config.task.length + 2
    assert getattr(arms["increment 1, 8 tokens"].model, "rate", 0) == 1
    assert getattr(arms["increment 1/T, 8 tokens"].model, "rate", 0) is None
    assert arms["attention, 8 tokens"].model.kind == "decoder"
    assert arms["state, 32 tokens, 2 blocks, no skip"].model.connection.kind == "none"


def test_replaced_state_alone_may_choose_a_wide_start(settings: Params) -> None:
    for arm in claim.recall_arms(settings):
        if not arm.name.startswith("state,"):
            assert arm.settings == {}
            continue
        wide = arm.settings["wide start"].model
        assert wide.model_dump()["init_std"] == pytest.approx(8**-0.5)
        assert wide.model_copy(update={"init_std": 0.55 * 8**-0.5}) == arm.config.model


def test_cpu_preset_keeps_to_its_budget() -> None:
    """Core milliseconds: 1.5 a step and block, and 0.3 more a token where time is a loop; five minutes of two cores."""
    settings = params.preset("cpu")
    section, spent = settings.claims.state_space_residuals, 0.0
    for arm in claim.recall_arms(settings):
        steps = len(settings.seeds) * section.steps + len(arm.rates) * len(arm.candidates) * section.sweep_steps
        loop = getattr(arm.config.model, "mixer", "diagonal") != "diagonal"
        length = getattr(arm.config.task, "length", 0)
        spent += arm.config.model.depth * steps * (5 + (0.3 if loop else 0.08) * length)
    assert spent < 600_000


# --- recall ---------------------------------------------------------------------------------------


def test_gains_and_slopes_by_hand(settings: Params, trained: Runs) -> None:
    for method, short, long in (("state", [1.0, 0.75], [0.25, 0.25]), ("increment 1/T", [1.0, 1.0], [1.0, 0.5])):
        with_accuracies(trained, claim.arm_name(method, 1), short)
        with_accuracies(trained, claim.arm_name(method, 4), long)
    with_accuracies(trained, "increment 1/T, 4 tokens, 2 blocks, no skip", [0.5, 0.75])
    with_accuracies(trained, "state, 4 tokens, 2 blocks", [0.25, 1.0])
    found = {name: check.estimate.value for name, check in by_name(claim.checks_recall(settings, trained)).items()}
    assert found["short_recalls"] == 0.875
    assert found["increment_gain"] == 0.5
    assert found["increment_slope"] == pytest.approx(-0.125)
    assert found["slope_gap"] == pytest.approx((0.375 + 0.0) / 2)
    assert found["time_not_depth"] == 0
    table = claim.recall_table(settings, trained)
    assert str(table.loc[(4, "increment 1/T"), "gain over state"]).startswith("0.5 [")
    assert table.loc[(4, "state"), "gain over state"] == ""


def test_trained_gradient_is_that_of_what_the_recurrence_is_fed(trained: Runs) -> None:
    record = trained["diagonal, 4 tokens"][0]
    mixer, fed = claim.mixer_inputs(trained_model(record.config), torch.zeros(3, 6, dtype=torch.int64))
    assert isinstance(mixer, DiagonalMixer)
    assert fed.shape == (3, 6, 8)
    decays = mixer.decay_logit.detach().double().sigmoid()
    wanted = float((decays**12).mean().sqrt().log10())
    assert claim.trained_gradient(record) == pytest.approx(wanted, rel=1e-9)


# --- runs that diverged ---------------------------------------------------------------------------


def test_diverged_run_is_not_measured(settings: Params, trained: Runs, initial: pd.DataFrame) -> None:
    for name in ("increment 1, 4 tokens", "increment 1/T, 1 tokens", "state, 4 tokens, 2 blocks"):
        trained[name][0] = diverged(trained[name][0])
    after = claim.trained_gradients(settings, trained)
    found = by_name([*claim.checks_recall(settings, trained), *claim.checks_gradients(settings, after)])
    for name in ("sum_recalls", "sum_gain", "increment_slope", "slope_gap", "time_not_depth", "trained_sum"):
        assert found[name].estimate.value is None, name
        assert found[name].outcome == "undecided", name
    assert found["increment_gain"].estimate.value is not None
    assert "not measured" in claim.recall_table(settings, trained).to_string()
    drawn = figure.draw(settings, initial, trained, after)
    drawn.canvas.draw()
    plt.close(drawn)


def test_one_seed_is_undecided(settings: Params, trained: Runs) -> None:
    found = by_name(claim.checks_recall(settings, {name: records[:1] for name, records in trained.items()}))
    assert {check.outcome for check in found.values()} == {"undecided"}
    assert "no interval" in str(found["increment_gain"].estimate)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"lengths": [4]}, "lengths must be two or more that increase from at least 1, got [4]"),
        ({"lengths": []}, "lengths must be two or more"),
        ({"lengths": [4, 1]}, "lengths must be two or more that increase from at least 1, got [4, 1]"),
        ({"deep_length": 3}, "deep_length 3 must be one of lengths [1, 4]"),
        ({"heads": 3}, "width 8 is not divisible by heads 3"),
        ({"learning_rates": []}, "learning_rates: "),
        ({"exact": {"lengths": [8]}}, "lengths must be two or more that increase from at least 2, got [8]"),
        ({"exact": {"lengths": [1, 8]}}, "lengths must be two or more that increase from at least 2, got [1, 8]"),
        ({"criteria": {"sum_gian": {"above": 0}}}, "sum_gian: unknown parameter; did you mean 'sum_gain'?"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_settings_are_refused_by_sentence(section: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        params.load("smoke", {"claims": {SECTION: section}})
    assert words in str(refused.value)
