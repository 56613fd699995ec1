"""Claim 15: its counts, what it makes of measured times, and its figure."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

from records import diverged
from reslab import params, paths
from reslab.comparison import Runs
from reslab.experiments import attention_residual_cost as claim
from reslab.experiments import attention_residual_cost_figure as figure
from reslab.params import Params
from reslab.residuals import ConnectionConfig, ResidualSettings, Stack
from reslab.residuals.depth_attention import DepthEnds
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


ROUNDS = 9
"""Medians of nine have an interval."""


def made_up(settings: Params, full: float, others: float) -> pd.DataFrame:
    """Times of every arm: pre-norm's is the number of blocks, with an extra share of the same for the others."""
    extra = {claim.PRENORM: 0.0, claim.FULL: full, claim.PLAIN: 3 * full}
    rows: list[dict[str, Any]] = []
    for blocks, width, sequences in claim.sizes(settings):
        for arm in claim.connections(settings.claims.attention_residual_cost.variants, 2 * blocks, width):
            for number in range(ROUNDS):
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


ALONE = pd.DataFrame({"standard": [1.0] * ROUNDS, claim.FULL: [4.0] * ROUNDS, claim.BLOCK: [1.5] * ROUNDS})


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

    controls = {n for n in names if n.startswith("traffic_")} | {"memory_key_rank"}
    assert {c.name for c in checks if c.role == "control"} == controls


MEASURED = ("time", "residual")


def test_times_are_compared_within_a_round(settings: Params) -> None:
    """Extra shares that grow with the depth make the extra time grow as its square."""
    estimates = {c.name: c for c in claim.checks_time(settings, made_up(settings, 0.2, 0.05), ALONE)}
    deepest = settings.claims.attention_residual_cost.measured.depths[-1]
    assert estimates["time_full"].estimate.value == pytest.approx(1 + 0.2 * deepest)
    assert estimates["time_growth"].estimate.value == pytest.approx(2)
    assert estimates["time_window"].estimate.value == pytest.approx(0.05 * deepest - 0.1 * deepest)
    beyond = claim.plain_beyond_kernel(settings, made_up(settings, 0.2, 0.05))
    assert beyond.value == pytest.approx((3 - 1) * 0.2 * deepest)
    assert estimates["residual_full"].estimate.value == pytest.approx(4)
    assert estimates["residual_block"].estimate.value == pytest.approx(0.375)
    held = {name for name, check in estimates.items() if check.outcome == "holds"}
    assert held == set(estimates) - {"time_block_published"}
    assert estimates["time_block_published"].estimate.value == pytest.approx(1 + 0.05 * deepest)


@pytest.mark.parametrize("arm", [claim.PRENORM, claim.FULL, claim.BLOCK, claim.WINDOW, claim.PLAIN])
@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_one_disturbed_round_moves_no_estimate(settings: Params, arm: str, factor: float) -> None:
    calm = made_up(settings, 0.2, 0.05)
    disturbed = calm.copy()
    disturbed.loc[(disturbed["arm"] == arm) & (disturbed["round"] == 4), "ms"] *= factor

    def found(times: pd.DataFrame) -> list[list[float | None]]:
        estimates = [check.estimate for check in claim.checks_time(settings, times, ALONE)]
        estimates.append(claim.plain_beyond_kernel(settings, times))
        return [[each.low, each.value, each.high] for each in estimates]

    np.testing.assert_allclose(np.array(found(disturbed), float), np.array(found(calm), float), rtol=1e-4, atol=1e-6)


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
    peaks = with_inference(measured[1], {claim.FULL: (offset, kept)})
    found = {check.name: check for check in claim.checks_memory(settings, peaks)}["memory_inference"]
    assert found.estimate.value == pytest.approx(kept)
    assert found.outcome == ("holds" if kept > 0.9 else "fails")


def with_inference(peaks: pd.DataFrame, given: dict[str, tuple[float, float]]) -> pd.DataFrame:
    """Peaks without gradients that are 1000 bytes, and beyond pre-norm's `offset` bytes and so many activations a
    sublayer: of some arms as given, of the others (0, 1)."""
    peaks = peaks.copy()
    peaks["inference"] = 1000.0
    for arm in set(peaks["arm"]) - {claim.PRENORM}:
        offset, kept = given.get(arm, (0, 1.0))
        rows = peaks["arm"] == arm
        peaks.loc[rows, "inference"] += offset + kept * 2 * peaks["blocks"] * (4 * 4 * 16 * 16)
    return peaks


@pytest.mark.parametrize("scratch", [0, 10**6])
def test_a_variant_saves_of_the_full_that_runs_the_same_code(
    settings: Params, measured: tuple[pd.DataFrame, pd.DataFrame], scratch: float
) -> None:
    """By how much memory grows, and not by what the kernel has at once."""
    given = {
        claim.FULL: (scratch, 2.0),
        claim.BLOCK: (scratch, 0.5),
        claim.WINDOW: (scratch, 1.5),
        claim.KEYS: (scratch, 2.0),
        claim.PLAIN: (0, 1.0),
        claim.VALUES: (0, 0.75),
    }
    checks = {c.name: c for c in claim.checks_memory(settings, with_inference(measured[1], given))}
    found = {name: check.estimate.value for name, check in checks.items()}
    assert found["memory_block"] == pytest.approx(0.25)
    assert found["memory_window"] == pytest.approx(0.75)
    assert found["memory_value_rank"] == pytest.approx(0.75)
    assert found["memory_key_rank"] == pytest.approx(0)
    assert checks["memory_block"].outcome == checks["memory_key_rank"].outcome == "holds"
    assert checks["memory_window"].outcome == checks["memory_value_rank"].outcome == "fails"
    given[claim.KEYS] = (scratch, 0.5)
    checks = {c.name: c for c in claim.checks_memory(settings, with_inference(measured[1], given))}
    assert checks["memory_key_rank"].outcome == "fails"


def test_a_share_of_no_growth_is_not_measured(settings: Params, measured: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    peaks = with_inference(measured[1], {claim.PLAIN: (500, 0.0)})
    check = {c.name: c for c in claim.checks_memory(settings, peaks)}["memory_value_rank"]
    assert (check.estimate.value, check.outcome) == (None, "undecided")


def what_runs(connection: ConnectionConfig, width: int) -> str:
    """The code that reads the stream of a stack of four sublayers, `numba` or `naive`."""
    branches = [{"given": torch.nn.Identity()} for _ in range(4)]
    stack = Stack(branches, width, ResidualSettings(connection=connection, placement="none"), torch.nn.Identity)
    assert isinstance(stack.ends, DepthEnds)
    return stack.ends.implementation(torch.zeros(1, 2, width))


def test_memory_is_shown_beside_the_full_that_runs_the_same_code(
    settings: Params, measured: tuple[pd.DataFrame, pd.DataFrame]
) -> None:
    compared = claim.connections(settings.claims.attention_residual_cost.variants, 4, settings.decoder.width)
    form = {"numba": claim.FULL, "naive": claim.PLAIN}
    ran = {arm: form[what_runs(connection, 16)] for arm, connection in compared.items() if arm != claim.PRENORM}
    table = claim.memory_table(settings, measured[1])
    assert dict(table["beside"]) == ran | {claim.PRENORM: claim.PRENORM}
    assert set(ran.values()) == {claim.FULL, claim.PLAIN}
    assert (table.loc[claim.PRENORM, ["training", "without gradients"]] == 1).all()
    peaks = claim.at_depths(settings, measured[1]).query("blocks == 6").set_index("arm")["training"]
    assert table.loc[claim.VALUES, "training"] == pytest.approx(peaks[claim.VALUES] / peaks[claim.PRENORM], abs=1e-4)


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
        ({"variants": {"window": 4}}, r"measured.depths begin at 2: of 4 sublayers .*the window \(4\) reads all"),
        ({"variants": {"blocks": 5}}, r"depths begin at 2: of 4 sublayers Block \(blocks: 5\).*begin at 3 or more"),
        ({"depth": 7}, r"depth 7 is none of measured.depths \[2, 6\]; add it"),
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
