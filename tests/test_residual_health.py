"""Claim 10's checks, on runs that were trained and on runs that diverged; its measures by hand."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

from records import diverged
from reslab import params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import residual_health as claim
from reslab.experiments import residual_health_exact as untrained
from reslab.experiments import residual_health_figure as figure
from reslab.experiments import residual_health_measured as measured
from reslab.experiments import residual_health_rules as rules
from reslab.experiments.residual_health import Early, text_name
from reslab.experiments.residual_health_measured import Looked, Replay, Watch
from reslab.experiments.runs import decoder_run
from reslab.params import Params
from reslab.ratio_rules import rank_correlation
from reslab.schema import UserError
from reslab.training import RunConfig, build, train

BAND = (0.01, 0.1)


class Experiment(NamedTuple):
    trained: Runs
    early: list[Early]
    found: dict[str, list[Looked]]
    seen: dict[str, list[Replay]]
    planted: dict[str, list[Replay]]


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale with fewer runs, trained in this process."""
    section: dict[str, Any] = {
        "layer_drop_redundancy": {"hops": {"steps": 4, "sweep_steps": 4}},
    }
    changed = {"execution": {"workers": 1}, "evaluation_windows": 4, "claims": section}
    return params.load("smoke", changed)


@pytest.fixture(scope="module")
def initial(settings: Params) -> pd.DataFrame:
    return claim.initial_ratios(settings)


@pytest.fixture(scope="module")
def done(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    names = [arm.name for arm in [*claim.text_arms(settings), claim.hops_arm(settings)]]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        trained = claim.runs(settings, pd.DataFrame({"arm": names, "setting": "", "rate": 1e-2, "chosen": True}))
        tried = claim.grid_runs(settings)
        early, seen = claim.early_runs(settings, tried), claim.replays(settings, trained, tried)
        planted = claim.plantings(settings, trained, seen)
        return Experiment(trained, early, claim.models(settings, trained), seen, planted)


def trained_checks(settings: Params, run: Experiment) -> dict[str, Check]:
    checks = [
        *claim.checks_controls(settings, run.early, run.found),
        *claim.checks_bands(settings, run.found),
        *claim.checks_failure(settings, run.early),
        *claim.checks_planted(settings, run.planted),
        *claim.checks_removal(settings, run.found),
        *claim.checks_time(settings, run.seen),
    ]
    return {check.name: check for check in checks}


# --- the claim ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(settings: Params, initial: pd.DataFrame, done: Experiment) -> None:
    checks = [*claim.checks_initial(settings, initial), *trained_checks(settings, done).values()]
    assert sorted(check.name for check in checks) == sorted(claim.QUESTIONS)
    assert claim.KEY in claim.QUESTIONS
    assert {check.sentence for check in checks} == {"A6.3a", "A6.3b"}
    assert len(claim.published(checks)) == 2
    assert all("{" not in check.statement for check in checks)


def test_replays_are_the_runs_on_record(settings: Params, done: Experiment) -> None:
    assert trained_checks(settings, done)["replayed"].estimate.value == 0
    deep = text_name(settings.claims.residual_health.deep)
    for replay, record in zip(done.seen[deep], done.trained[deep], strict=True):
        assert replay.losses == record.train_loss
        assert replay.validation_loss == record.validation_loss


def test_runs_are_shared_with_other_claims() -> None:
    cpu = params.preset("cpu")
    assert [arm.config for arm in claim.text_arms(cpu)] == [decoder_run(cpu, 12), decoder_run(cpu, 6)]
    assert claim.text_arms(cpu)[0].rates == cpu.claims.no_residual_collapse.learning_rates


LOST_LOOK = Looked(pd.DataFrame(), pd.DataFrame(), (), math.nan)


def lost(replay: Replay) -> Replay:
    """The same run, had its loss become infinite after the second step."""
    return replace(replay, losses=replay.losses[:2], gradients=replay.gradients[:2], validation_loss=math.nan)


def test_diverged_run_is_not_dropped_silently(settings: Params, done: Experiment) -> None:
    deep, shallow = (
        text_name(settings.claims.residual_health.deep),
        text_name(settings.claims.residual_health.shallow),
    )
    found = {name: [LOST_LOOK, *models[1:]] for name, models in done.found.items()}
    seen = {name: [lost(group[0]), *group[1:]] for name, group in done.seen.items()}
    planted = {name: [lost(group[0]), *group[1:]] for name, group in done.planted.items()}
    checks = trained_checks(settings, done._replace(found=found, seen=seen, planted=planted))
    unmeasured = {name for name, check in checks.items() if check.estimate.value is None}
    assert unmeasured >= {
        *("learned", "band_text", "band_hops", "healthy_below_one", "healthy_below_one_hops"),
        *("law_over_band", "law_over_flat", "law_separates", "removable_text", "removable_inner", "removable_hops"),
        *("removable_learned", "exploding_hurts", "dead_stays", "ends_small", "settles", "high_is_unsettled"),
        *("falls_shallow", "falls_deep", "falls_plain"),
    }
    assert all(checks[name].outcome == "undecided" for name in unmeasured)
    assert set(seen) >= {deep, shallow}
    plt.close(figure.draw(settings, found, done.early, seen, planted))


def test_diverged_record_is_looked_into_as_lost(settings: Params, done: Experiment) -> None:
    [record, *_] = done.trained[claim.HOPS]
    [looked] = measured.look_all([diverged(record)], 4, settings.execution)
    assert looked.lost
    assert looked.costs == ()


def test_figure_draws(settings: Params, done: Experiment) -> None:
    drawn = figure.draw(settings, done.found, done.early, done.seen, done.planted)
    assert len(drawn.axes) == 6
    gone = [replace(run, ratio=math.inf, failed=True) for run in done.early]
    plt.close(figure.draw(settings, done.found, gone, done.seen, done.planted))


def test_one_seed_is_undecided(settings: Params, done: Experiment) -> None:
    first = settings.seeds[0]
    one = Experiment(
        {name: records[:1] for name, records in done.trained.items()},
        [run for run in done.early if run.seed == first],
        {name: models[:1] for name, models in done.found.items()},
        {name: group[:1] for name, group in done.seen.items()},
        {name: group[:1] for name, group in done.planted.items()},
    )
    checks = trained_checks(settings, one)
    assert {check.outcome for name, check in checks.items() if name != "replayed"} == {"undecided"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"deep": 3}, "deep 3 is no deeper than shallow 3"),
        ({"band": [0.1, 0.01]}, "band must go from a ratio above 0 to a larger one"),
        ({"grid_depths": []}, "grid_depths"),
        ({"learning_rates": []}, "learning_rates"),
        ({"grid_depths": [5]}, r"depth 5 is not in claim 02's grid; choose among its depths \[2, 3\]"),
        ({"recordings": 13}, "12 steps are fewer than its recordings, 13; record less often"),
        ({"recordings": 7}, "recordings"),
        ({"early": 0.5}, "early"),
    ],
)
def test_bad_settings_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        params.load("smoke", {"claims": {"residual_health": changed}})


# --- exact checks ---------------------------------------------------------------------------------


def test_planted_faults_have_the_ratios_they_were_given(settings: Params) -> None:
    exact = settings.claims.residual_health.exact
    model, inputs, _ = untrained._model(exact, 0)
    before = measured.ratios_of(model, inputs)["ratio"].to_numpy()
    measured.multiply_writer(model, 2, 0.0)
    measured.multiply_writer(model, 7, 50.0)
    after = measured.ratios_of(model, inputs)["ratio"].to_numpy()
    assert after[2] == 0
    assert after[:2] == pytest.approx(before[:2], rel=1e-12)
    found = untrained.planted(exact, 0, 100.0)
    assert found.dead_wrong == 0
    assert found.dead_gradient == 0
    assert found.writer_gradient == pytest.approx(1, abs=0.5)


def test_gradient_of_a_living_branch_does_not_vanish(settings: Params) -> None:
    """A writing matrix of a thousandth hands on a thousandth of the gradient, and keeps its own."""
    exact = settings.claims.residual_health.exact
    before, after = (untrained._gradients(exact, 0, 2, factor) for factor in (1.0, 1e-3))
    assert after.others / before.others == pytest.approx(1e-3, rel=0.5)
    assert after.writer / before.writer == pytest.approx(1, abs=0.5)


def test_law_holds_for_updates_at_right_angles() -> None:
    squares, start = {"attention": 1.0, "mlp": 3.0}, 4.0
    kinds = ["attention", "mlp"] * 3
    streams = [4, 5, 8, 9, 12, 13]
    table = pd.DataFrame(
        {
            "kind": kinds,
            "update_norm": [math.sqrt(squares[kind]) for kind in kinds],
            "stream_norm": [math.sqrt(square) for square in streams],
        }
    )
    table["ratio"] = table["update_norm"] / table["stream_norm"]
    table["law"] = untrained.law_of(table)
    assert start == table["stream_norm"].iloc[0] ** 2
    assert untrained.law_error(table) == pytest.approx(0, abs=1e-12)
    assert untrained.law_error(table.assign(law=2 * table["law"])) == pytest.approx(math.log(2))


# --- measures -------------------------------------------------------------------------------------


def replay_of(ratios: dict[int, list[float]], steps: int = 100) -> Replay:
    rows = [(step, i, "mlp", r) for step, values in ratios.items() for i, r in enumerate(values)]
    table = pd.DataFrame(rows, columns=["step", "layer", "kind", "ratio"])
    return Replay(table, (1.0,) * steps, (1.0,) * steps, 1.0)


def test_fall_and_change_by_hand() -> None:
    replay = replay_of({0: [1.0, 4.0], 10: [4.0, 1.0], 50: [9.0, 9.0], 75: [1.0, 2.0], 90: [0.5, 2.0]})
    assert claim.fall(replay, 0.1) == pytest.approx(math.log(1.0) - math.log(2.0))
    assert claim.late_change(replay) == pytest.approx([math.log(2), 0.0])
    assert claim._high_is_unsettled(replay) == pytest.approx(-1)
    assert claim._end(replay, lambda logs: float(np.exp(logs[-1, 1]))) == pytest.approx(2.0)


def test_largest_ratio_is_infinite_where_the_run_was_lost_before() -> None:
    replay = replay_of({0: [0.2, 0.3], 10: [0.1, 2.0]}, steps=11)
    assert replay.largest(10) == 2.0
    assert replay_of({0: [0.2, 0.3]}, steps=5).largest(10) == math.inf
    assert replay_of({0: [0.2, 0.3], 10: [0.1, math.nan]}, steps=11).largest(10) == math.inf
    assert replace(replay, losses=(1.0,) * 10).largest(10) == math.inf


def model_of(ratios: list[float], stream: float = 2.0) -> Looked:
    updates = [ratio * stream for ratio in ratios]
    table = pd.DataFrame({"kind": "mlp", "ratio": ratios, "update_norm": updates, "stream_norm": stream})
    return Looked(table, table, tuple(float(i) for i in range(len(ratios))), 1.0)


def test_bands_by_hand() -> None:
    models = [model_of([0.05, 0.2]), model_of([0.4, 0.4])]
    told, flat, law = rules.RULES
    assert rules.kept_inside(models, told, BAND) == [0.5, 0.0]
    assert rules.centres(models, 0, flat, BAND) == pytest.approx([0.4, 0.4])
    assert rules.centres(models, 0, law, BAND) == pytest.approx([0.4, 0.4 / math.sqrt(1 + 0.16)])
    assert rules.kept_inside(models, flat, BAND) == [0.5, 0.0]
    # told, first model: healthy flagged 1/2; times ten both flagged, zero both flagged
    assert rules.detections(models, told, BAND) == [0.5, 0.0]
    # the only model it could go by is the first; of one alone nothing can be said
    assert math.isnan(rules.kept_inside(models[:1], flat, BAND)[0])
    assert math.isnan(rules.kept_inside([LOST_LOOK, models[1]], law, BAND)[1])


def test_largest_ratio_is_asked_of_either_task(settings: Params) -> None:
    deep = text_name(settings.claims.residual_health.deep)
    models = {deep: [model_of([0.05, 0.5])] * 2, claim.HOPS: [model_of([2.0, 0.05])] * 2}
    found = {check.name: check for check in claim.checks_bands(settings, models)}
    assert (found["healthy_below_one"].estimate.value, found["healthy_below_one"].outcome) == (0.5, "holds")
    assert (found["healthy_below_one_hops"].estimate.value, found["healthy_below_one_hops"].outcome) == (2.0, "fails")


def test_removal_ranks_and_leaves_out_the_ends() -> None:
    model = replace(model_of([0.1, 0.2, 0.3, 0.4, 0.05, 0.01]), costs=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0))
    assert claim.removal(model, ends=1) == pytest.approx(rank_correlation([2, 3, 4, 1], [1, 2, 3, 4]))
    assert math.isnan(claim.removal(replace(model, gain=-0.1)))
    assert math.isnan(claim.removal(LOST_LOOK))


def test_without_branch_the_stream_passes_unchanged(tiny: RunConfig) -> None:
    model = build(tiny.model, 0)
    inputs = torch.arange(16)[None]
    whole = model(inputs)
    with measured.without_branch(model, 1):
        less = model(inputs)
    zeroed = build(tiny.model, 0)
    measured.multiply_writer(zeroed, 1, 0.0)
    assert torch.equal(less, zeroed(inputs))
    assert not torch.equal(less, whole)
    assert torch.equal(model(inputs), whole)


def test_replay_stops_where_it_is_told(tiny: RunConfig, settings: Params) -> None:
    [replay] = measured.replay_all([Watch(tiny, 2, 2)], settings.execution, "test")
    assert replay.losses == train(tiny).train_loss[:3]
    assert sorted(set(replay.ratios["step"])) == [0, 2]
    assert math.isnan(replay.validation_loss)


def early_of(seed: int, method: str, ratio: float, failed: bool, loss: float = 1.0) -> Early:
    return Early((method, 2, 0.1), seed, failed, ratio, 0.1, loss, 1.0, 0.0)


def test_areas_are_by_seed() -> None:
    runs = [
        early_of(0, "Pre-LN", 0.1, False),
        early_of(0, "Post-LN", 2.0, True),
        early_of(1, "Pre-LN", 0.3, True),
        early_of(1, "Pre-LN", 0.5, False),
    ]
    assert claim.areas(runs, "ratio", told=True) == [1.0, 0.0]
    assert claim.areas(runs, "ratio at start") == [0.5, 0.5]
    within = claim.areas(runs, "ratio", within=True, told=True)
    assert math.isnan(within[0])
    assert within[1] == 0.0


@pytest.mark.parametrize("within", [False, True])
def test_signs_are_read_the_way_round_that_other_seeds_show(within: bool) -> None:
    """Planted: failures have the higher ratio and the lower loss, in every seed."""
    runs = [
        early_of(seed, "Pre-LN", 1.0 + place, place == 2, loss=3.0 - place) for seed in (0, 1, 2) for place in (0, 1, 2)
    ]
    for sign, low in (("ratio", False), ("loss", True)):
        assert claim.areas(runs, sign, within=within) == [1.0] * 3
        assert claim.areas(runs, sign, within=within, told=True) == [0.0 if low else 1.0] * 3
        assert claim.reads_low(runs, sign, within=within) == [low] * 3
    table = claim.areas_table(runs)
    assert table.loc["loss", "over all: read as low"] == "3 of 3"
    assert str(table.loc["ratio", "over all"]).startswith("1 [1, 1]")


def test_sign_that_points_another_way_in_other_seeds_misleads() -> None:
    """Failures of seed 0 have the higher loss, those of seed 1 the lower; a seed alone has no other to go by."""
    runs = [
        early_of(seed, "Pre-LN", 1.0, failed, loss)
        for seed in (0, 1)
        for failed, loss in ((True, 2.0 - seed), (False, 1.5 - seed / 10))
    ]
    assert claim.areas(runs, "loss", told=True) == [1.0, 0.0]
    assert claim.areas(runs, "loss") == [0.0, 0.0]
    assert claim.areas(runs[2:], "loss") == [0.0]


def test_ratio_is_held_against_loss_and_rate(settings: Params) -> None:
    """Failures have the higher rate and the lower loss in every seed; the ratio of a run that fails is 1, too."""
    runs = [
        replace(early_of(seed, "Pre-LN", 1.0, rate > 0.1, loss=1 / rate), cell=("Pre-LN", 2, rate))
        for seed in (0, 1)
        for rate in (0.03, 0.1, 0.3)
    ]
    found = {check.name: check for check in claim.checks_failure(settings, runs)}
    for name in ("beats_rate", "beats_loss"):
        assert (found[name].estimate.value, found[name].outcome) == (-0.5, "fails"), name
    assert found["beats_start"].estimate.value == 0


def test_run_that_was_lost_is_the_worst_either_way() -> None:
    runs = [early_of(seed, "Pre-LN", 1.0, loss != 2.0, loss) for seed in (0, 1) for loss in (1.0, 2.0, math.inf)]
    assert claim.reads_low(runs, "loss") == [True, True]
    assert claim.areas(runs, "loss") == [1.0, 1.0]
