"""Claim 15: its counts, what it makes of measured times, and its figure."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from records import diverged
from reslab import params, paths
from reslab.comparison import Runs
from reslab.experiments import attention_residual_cost as claim
from reslab.experiments import attention_residual_cost_figure as figure
from reslab.params import Params
from reslab.schema import UserError


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}})


@pytest.fixture(scope="module")
def measured(settings: Params) -> tuple[pd.DataFrame, pd.DataFrame]:
    return claim.measure(settings)


@pytest.fixture(scope="module")
def trained(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    names = [arm.name for arm in claim.arms(settings)]
    chosen = pd.DataFrame({"arm": names, "setting": "", "rate": 3e-3, "chosen": True})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        return claim.runs(settings, chosen)


def made_up(settings: Params, full: float, others: float) -> pd.DataFrame:
    """Times of every arm: pre-norm's is the number of blocks, with an extra share of the same for the others."""
    extra = {claim.PRENORM: 0.0, claim.FULL: full, claim.PLAIN: 3 * full}
    rows: list[dict[str, Any]] = []
    for blocks, width, sequences in claim.sizes(settings):
        for arm in claim.connections(settings.claims.attention_residual_cost.variants, 2 * blocks, width):
            for number in range(3):
                noise = 1 + 0.001 * number
                share = extra.get(arm, others) * blocks
                rows.append(
                    {
                        "arm": arm,
                        "blocks": blocks,
                        "width": width,
                        "sequences": sequences,
                        "round": number,
                        "ms": blocks * (1 + share) * noise,
                    }
                )
    return pd.DataFrame(rows)


ALONE = pd.DataFrame({"standard": [1.0, 1.1], claim.FULL: [4.0, 4.4], claim.BLOCK: [1.5, 1.65]})


def test_every_question_is_answered_once(
    settings: Params, measured: tuple[pd.DataFrame, pd.DataFrame], trained: Runs
) -> None:
    times, peaks = measured
    checks = claim.checks_model(settings, claim.planned(settings)) + claim.checks_memory(settings, peaks)
    checks += claim.checks_time(settings, times, ALONE) + claim.checks_loss(settings, trained)
    names = [check.name for check in checks]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {c.name for c in checks if c.role == "measured"} == {n for n in names if n.split("_")[0] in MEASURED}
    assert all(check.outcome == "holds" for check in checks if check.name.startswith("traffic_"))

    assert {c.name for c in checks if c.role == "control"} == {n for n in names if n.startswith("traffic_")}


MEASURED = ("time", "residual")


def test_times_are_compared_within_a_round(settings: Params) -> None:
    """Extra shares that grow with the depth make the extra time grow as its square."""
    estimates = {c.name: c for c in claim.checks_time(settings, made_up(settings, 0.2, 0.05), ALONE)}
    deepest = settings.claims.attention_residual_cost.measured.depths[-1]
    assert estimates["time_full"].estimate.value == pytest.approx(1 + 0.2 * deepest)
    assert estimates["time_growth"].estimate.value == pytest.approx(2)
    assert estimates["time_window"].estimate.value == pytest.approx(0.05 * deepest - 0.1 * deepest)
    assert claim.plain_over_kernel(settings, made_up(settings, 0.2, 0.05)).value == pytest.approx(3)
    assert estimates["residual_full"].estimate.value == pytest.approx(4)
    assert estimates["residual_block"].estimate.value == pytest.approx(0.375)
    held = {name for name, check in estimates.items() if check.outcome == "holds"}
    assert held == set(estimates) - {"time_block_published"}
    assert estimates["time_block_published"].estimate.value == pytest.approx(1 + 0.05 * deepest)


def test_a_variant_as_slow_as_full_is_not_in_check(settings: Params) -> None:
    estimates = {c.name: c.outcome for c in claim.checks_time(settings, made_up(settings, 0.2, 0.2), ALONE)}
    assert {estimates[name] for name in ("time_block", "time_window", "time_stride")} == {"fails"}


def test_memory_is_the_same_at_every_run(settings: Params, measured: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    _, again = claim.measure(settings)
    pd.testing.assert_frame_equal(measured[1], again)


def test_full_keeps_every_row_without_gradients(settings: Params, measured: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    peaks = claim.at_depths(settings, measured[1]).pivot(index="blocks", columns="arm", values="inference")
    assert (peaks[claim.FULL] > peaks[claim.PRENORM]).all()
    assert (peaks[claim.WINDOW] < peaks[claim.FULL]).all()


@pytest.mark.parametrize(("offset", "kept"), [(0, 1.0), (10**6, 1.25), (0, 0.5)])
def test_memory_grows_by_what_each_sublayer_keeps(
    settings: Params, measured: tuple[pd.DataFrame, pd.DataFrame], offset: int, kept: float
) -> None:
    """Whatever else Full needs at every depth; an activation is 4 sequences of 16 tokens and 16 channels."""
    peaks = measured[1].copy()
    full = peaks["arm"] == claim.FULL
    peaks["inference"] = 1000.0
    peaks.loc[full, "inference"] += offset + kept * 2 * peaks["blocks"] * (4 * 4 * 16 * 16)
    found = {check.name: check for check in claim.checks_memory(settings, peaks)}["memory_inference"]
    assert found.estimate.value == pytest.approx(kept)
    assert found.outcome == ("holds" if kept > 0.9 else "fails")


def test_figure_draws_also_where_a_run_diverged(
    settings: Params, measured: tuple[pd.DataFrame, pd.DataFrame], trained: Runs
) -> None:
    broken = {name: [diverged(records[0]), *records[1:]] for name, records in trained.items()}
    alone, bandwidth = claim.residual_alone(settings)
    traffic = claim.traffic_table(settings, alone, bandwidth)
    assert list(traffic) == ["published", "planned", "measured"]
    for records in (trained, broken):
        drawn = figure.draw(settings, *measured, traffic, records)
        assert len(drawn.axes) == 6
        plt.close(drawn)
    checks = claim.checks_loss(settings, broken)
    assert {check.outcome for check in checks} == {"undecided"}
    assert {check.estimate.value for check in checks} == {None}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"depth": 7}, r"depth 7 is none of measured.depths \[2, 3\]; add it"),
        ({"variants": {"key_reduction": 1}}, "key_reduction: input should be greater than or equal to 2, got 1"),
        ({"variants": {"blocks": 1}}, "variants.blocks: input should be greater than or equal to 2, got 1"),
        ({"measured": {"depths": [3]}}, "measured.depths: tuple should have at least 2 items"),
        ({"measured": {"depths": [3, 2]}}, r"measured.depths: give increasing numbers from 1, got \[3, 2\]"),
        ({"measured": {"widths": []}}, "measured.widths: tuple should have at least 1 item"),
        ({"measured": {"rounds": 1}}, "measured.rounds: input should be greater than or equal to 2, got 1"),
        ({"learning_rates": []}, "learning_rates: tuple should have at least 1 item"),
        ({"criteria": {"time_full": {}}}, None),
        ({"criteria": {"time_ful": {"above": 1.0}}}, "criteria.time_ful: unknown parameter; did you mean 'time_full'"),
    ],
)
def test_bad_settings_are_refused(changed: dict[str, Any], message: str | None) -> None:
    content = {"claims": {"attention_residual_cost": changed}}
    if message is None:  # nothing changed
        assert params.load("smoke", content) == params.preset("smoke")
        return
    with pytest.raises(UserError, match=message):
        params.load("smoke", content)


def test_extra_multiplications_are_those_of_the_reads(settings: Params) -> None:
    """Sources of 2 B reads and the output's: 1 + 2 + ... + (2 B + 1), 2 d multiplications a token each."""
    [check] = [c for c in claim.checks_model(settings, claim.planned(settings)) if c.name == "flops_full"]
    deepest = settings.claims.attention_residual_cost.measured.depths[-1]
    width, context = settings.decoder.width, settings.decoder.context
    reads = 2 * width * sum(range(1, 2 * deepest + 2))
    model = deepest * width * (12 * width + 2 * context) + width * 256
    assert check.estimate.value == pytest.approx(reads / model, rel=1e-5)
    assert np.isfinite(check.estimate.value or np.nan)
