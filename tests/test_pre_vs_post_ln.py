"""Claim 02's checks, on runs that were trained and on runs that diverged; its exact measures against theory."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from records import around_guess, diverged
from reslab import params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.curves import Bracket
from reslab.experiments import pre_vs_post_ln as claim
from reslab.experiments import pre_vs_post_ln_exact as exact
from reslab.experiments import pre_vs_post_ln_figure as figure
from reslab.experiments import pre_vs_post_ln_grid as grid
from reslab.experiments.pre_vs_post_ln_grid import Cell
from reslab.experiments.runs import ENDS
from reslab.models.decoder import DecoderConfig
from reslab.params import Params
from reslab.schema import UserError
from reslab.training import RunRecord

Tried = dict[Cell, list[RunRecord]]


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}})


@pytest.fixture(scope="module")
def ran_once(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tried, Runs]:
    names = [arm.name for arm in claim.arms(settings)]
    chosen = pd.DataFrame({"arm": names, "setting": "", "rate": 1e-2, "chosen": True})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        return grid.grid(settings), claim.runs(settings, chosen)


@pytest.fixture
def tried(ran_once: tuple[Tried, Runs]) -> Tried:
    """A copy that a test may change."""
    return {cell: list(records) for cell, records in ran_once[0].items()}


@pytest.fixture
def trained(ran_once: tuple[Tried, Runs]) -> Runs:
    return {name: list(records) for name, records in ran_once[1].items()}


@pytest.fixture(scope="module")
def initial(settings: Params) -> pd.DataFrame:
    return claim.measures(settings)


def made(record: RunRecord, outcome: str, test_loss: float = 2.5, jump: bool = False) -> RunRecord:
    """A run of 60 steps that fell to its loss in 30, and jumped in the last quarter or did not."""
    losses = np.interp(np.arange(60), [0, 30], [5.5, test_loss])
    losses[45:] += 3 if jump else 0
    update = {"outcome": outcome, "test_loss": test_loss, "validation_loss": test_loss}
    return record.model_copy(update={**update, "train_loss": tuple(map(float, losses))})


def as_told(tried: Tried, settings: Params) -> Tried:
    """Pre-LN trains everywhere; Post-LN at the lowest rate alone, and not at all when deep."""
    section = settings.claims.pre_vs_post_ln
    told: Tried = {}
    for (method, depth, rate), records in tried.items():
        learns = method == "Pre-LN" or (rate == section.learning_rates[0] and depth == section.depths[0])
        outcome = ("trained", 2.5) if learns else ("stalled", 3.2)
        told[method, depth, rate] = [made(r, *outcome, jump=not learns) for r in records]
    return told


def all_checks(settings: Params, tried: Tried, trained: Runs) -> dict[str, Check]:
    found = claim.checks_stability(settings, tried) + claim.checks_depth(settings, tried, trained)
    found += claim.checks_stream(settings, tried, trained) + claim.checks_remedies(settings, trained)
    return {check.name: check for check in found}


# --- the checks -----------------------------------------------------------------------------------


def test_every_question_is_answered_once(settings: Params, initial: pd.DataFrame, tried: Tried, trained: Runs) -> None:
    checks = claim.checks_initial(settings, initial)
    names = [check.name for check in checks] + list(all_checks(settings, tried, trained))
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {q.sentence for q in claim.QUESTIONS.values()} == {"A4.1a", "A4.1b", "A4.1c", "A4.2a", "A4.2b", "A4.2c"}
    everything = [*checks, *all_checks(settings, tried, trained).values()]
    assert not [check.name for check in everything if "{" in check.statement + check.unit]
    assert len(claim.published(everything)) == 3


def test_cells_share_their_seeds_and_batches(settings: Params, tried: Tried) -> None:
    assert len(tried) == 3 * 2 * 2
    for (method, depth, rate), records in tried.items():
        configs = [record.config for record in records]
        assert [config.seed for config in configs] == [0, 1]
        for config in configs:
            assert isinstance(config.model, DecoderConfig)
            assert (config.learning_rate, config.model.depth, config.model.weight_init) == (rate, depth, "plain")
            assert config.model.placement == ("pre" if method == "Pre-LN" else "post")
            assert config.optimisation.warmup == (0.3 if "long" in method else 0.1)


def test_pre_lns_runs_at_the_greatest_depth_are_the_grids(tried: Tried, trained: Runs) -> None:
    assert trained["Pre-LN"] == tried["Pre-LN", 3, 1e-2]


def test_what_is_told_is_found_where_it_is_so(settings: Params, tried: Tried, trained: Runs) -> None:
    found = all_checks(settings, as_told(tried, settings), trained)
    expected = {"post_unstable": 1.0, "post_spikes": 1, "pre_calm": 0, "threshold_gap": 0, "threshold_falls": 0}
    expected |= {"post_deep": 0, "pre_deep": 1, "ends_level": 0, "ceiling": 0.7}
    for name, value in expected.items():
        assert found[name].estimate.value == pytest.approx(value), name
    for name in ("post_unstable", "post_spikes", "pre_calm", "post_deep", "pre_deep", "ends_level"):
        assert found[name].outcome == "holds", name
    assert found["ceiling"].outcome == "fails"


def test_thresholds_are_compared_by_their_place_among_the_rates(settings: Params) -> None:
    """Rates 0.01 and 0.1. One bears both; the other fails at the first, at the second, at none."""
    bears = [Bracket(0.1, None)] * 3
    fails = [Bracket(None, 0.01), Bracket(0.01, 0.1), Bracket(0.1, None)]
    assert grid.bears_less_fails(settings, bears, fails) == [1, 0, -1]
    assert grid.bears_less_fails(settings, [Bracket(None, 0.01)], fails[:1]) == [-1]


def test_censored_thresholds_have_no_mean(settings: Params, tried: Tried) -> None:
    table = grid.thresholds(settings, as_told(tried, settings))
    assert table.loc[("Post-LN", 2), "by seed"] == "0.01 to 0.1; 0.01 to 0.1"
    assert table.loc[("Post-LN", 2), "log10"] == "-1.5 [-1.5, -1.5] (n=2)"
    assert table.loc[("Post-LN", 3), "log10"] == "censored (2 of 2)"
    assert table.loc[("Pre-LN", 2), "by seed"] == "above 0.1; above 0.1"


def test_the_best_rate_has_the_lowest_mean_validation_loss(settings: Params, tried: Tried) -> None:
    cell = "Post-LN", 2, 1e-1
    tried[cell] = [made(record, "trained", 1.0) for record in tried[cell]]
    assert grid.best_rate(settings, tried, "Post-LN", 2) == 1e-1
    tried[cell][0] = diverged(tried[cell][0])
    assert grid.best_rate(settings, tried, "Post-LN", 2) == 1e-2
    tried["Post-LN", 2, 1e-2][1] = diverged(tried["Post-LN", 2, 1e-2][1])
    assert grid.best_rate(settings, tried, "Post-LN", 2) == 1e-2
    table = grid.choices(settings, tried)
    assert table.groupby("arm")["chosen"].sum().tolist() == [1] * 6
    assert table[table["arm"] == "Post-LN, 2 blocks"]["outcome"].tolist()[1] == "diverged 1, trained 1"


def test_the_better_warm_up_is_taken(settings: Params, tried: Tried) -> None:
    cell = "Post-LN, long warm-up", 3, 1e-1
    tried[cell] = [made(record, "trained", 1.0) for record in tried[cell]]
    assert grid.tuned_post(settings, tried) == tried[cell]
    tried[cell][0] = diverged(tried[cell][0])
    assert grid.tuned_post(settings, tried) != tried[cell]


def test_blocks_are_of_use_later_at_the_own_and_at_the_same_rate(settings: Params, tried: Tried, trained: Runs) -> None:
    """Pre-LN at its best rate from step 30 on, at Post-LN's best from 20; Post-LN from 15. The ends are the guess."""
    trained[ENDS] = [around_guess(record, [0.0] * 60) for record in trained[ENDS]]
    for cell, first, validation_loss in (
        (("Pre-LN", 2, 1e-1), 30, 1.0),
        (("Pre-LN", 2, 1e-2), 20, 2.0),
        (("Post-LN", 2, 1e-2), 15, 1.0),
        (("Post-LN", 2, 1e-1), 50, 2.0),
    ):
        runs = [around_guess(record, [0.0] * first + [-1.5] * (60 - first)) for record in tried[cell]]
        tried[cell] = [run.model_copy(update={"validation_loss": validation_loss}) for run in runs]
    found = {check.name: check.estimate.value for check in claim.checks_stream(settings, tried, trained)}
    assert (found["features_late"], found["features_late_same_rate"]) == (15, 5)


def test_updates_are_looked_at_before_training(settings: Params, trained: Runs) -> None:
    """Turns of 90 degrees with the larger gain, of 60 without. A learnt weight of 1 changes nothing before training."""
    weight, plain = trained[claim.WEIGHT][0], trained["Pre-LN"][0]
    assert claim.turns(weight, trained=False) == pytest.approx(claim.turns(plain, trained=False))
    for name, cosine in ((claim.GAIN, 0.0), ("Pre-LN", 0.5)):
        before = {"profile_before": {"neighbour_cosine": (cosine,) * 3}}
        trained[name] = [record.model_copy(update=before) for record in trained[name]]
    found = {check.name: check for check in claim.checks_remedies(settings, trained)}
    assert found["gain_updates_start"].estimate.value == pytest.approx(1.5)
    assert found["gain_updates_start"].outcome == "holds"


# --- runs that diverged ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Pre-LN", "Post-LN"])
def test_diverged_runs_count_as_failures(settings: Params, tried: Tried, trained: Runs, method: str) -> None:
    for cell, records in tried.items():
        if cell[0] == method:
            tried[cell] = [diverged(records[0]), *records[1:]]
    found = all_checks(settings, tried, trained)
    lost = ["falls_faster", "falls_faster_same_rate", "ends_level", "update_pre_post", "ceiling"]
    for name in (*lost, "features_late", "features_late_same_rate"):
        if (method, name) != ("Post-LN", "ceiling"):  # the long warm-up's runs did not diverge
            assert found[name].estimate.value is None, name
            assert found[name].outcome == "undecided"
    growth = "pre_controlled_trained" if method == "Pre-LN" else "post_accumulates_trained"
    assert found[growth].estimate.value is None
    share = found["pre_calm" if method == "Pre-LN" else "post_spikes"].estimate.value
    assert share is not None
    assert share >= 0.5


@pytest.mark.parametrize("arm", ["Pre-LN", "DeepNorm", "Post-LN, DeepNet init", claim.GAIN, claim.WEIGHT])
def test_a_diverged_arm_leaves_its_checks_undecided(settings: Params, tried: Tried, trained: Runs, arm: str) -> None:
    trained[arm][0] = diverged(trained[arm][0])
    found = all_checks(settings, tried, trained)
    lost = {
        "DeepNorm": ["deepnorm_learns"],
        "Post-LN, DeepNet init": ["post_deepnet"],
        claim.GAIN: ["gain_updates", "gain_early", "gain_loss"],
        claim.WEIGHT: ["weight_updates", "weight_early", "weight_loss"],
        "Pre-LN": ["gain_updates", "gain_early", "gain_loss", "weight_updates", "weight_early", "weight_loss"],
    }[arm]
    assert all(found[name].estimate.value is None and found[name].outcome == "undecided" for name in lost)


def test_the_figure_is_drawn(settings: Params, initial: pd.DataFrame, tried: Tried, trained: Runs) -> None:
    plt.close(figure.draw(settings, initial, as_told(tried, settings), trained))
    for runs in (tried, trained):
        for name, records in runs.items():
            runs[name] = [diverged(records[0]), *records[1:]]  # type: ignore[index]
    plt.close(figure.draw(settings, initial, tried, trained))
    for cell, records in tried.items():
        tried[cell] = [diverged(record) for record in records]
    plt.close(figure.draw(settings, initial, tried, {name: [diverged(r) for r in rs] for name, rs in trained.items()}))


# --- exact measures -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep() -> pd.DataFrame:
    return exact.initial_measures((2, 8, 32), 2, 32, 64)


@pytest.mark.parametrize(
    ("arm", "column", "exponent"),
    [("Post-LN", "gradient", 0.0), ("Pre-LN", "gradient", -0.5), ("Post-LN", "last_angle", 0.0)],
)
def test_exponents_are_those_of_theory(deep: pd.DataFrame, arm: str, column: str, exponent: float) -> None:
    """Xiong et al. 2020, theorem 1; and each Post-LN block adds as much to a stream of the same size."""
    assert np.mean(exact.log_slopes(deep, arm, column)) == pytest.approx(exponent, abs=0.12)


def test_pre_norm_stream_grows_within_xiongs_bounds(deep: pd.DataFrame) -> None:
    assert exact.stream_band(4) == (3, 7)
    for _, row in deep[deep["arm"] == "Pre-LN"].iterrows():
        low, high = exact.stream_band(row["depth"])
        assert low <= row["mean_square"] <= high
    assert deep[deep["arm"] != "Pre-LN"]["mean_square"].to_numpy() == pytest.approx(1, abs=0.01)


def test_the_last_gradient_is_that_of_finite_differences() -> None:
    model = exact.xiong_decoder("post", "plain", 2, 8, 8, 0)
    text = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    weight = model.blocks[-1].get_submodule("mlp.branch.down").get_parameter("weight")

    def loss() -> float:
        return float(F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()))

    squares = 0.0
    with torch.no_grad():
        for at in range(weight.numel()):
            start, sides = float(weight.view(-1)[at]), []
            for step in (1e-5, -1e-5):
                weight.view(-1)[at] = start + step
                sides.append(loss())
            weight.view(-1)[at] = start
            squares += ((sides[0] - sides[1]) / 2e-5) ** 2
    assert exact.last_mlp_gradient(model, text[:, :-1], text[:, 1:]) == pytest.approx(math.sqrt(squares), rel=1e-6)


def test_turns_are_angles_in_degrees() -> None:
    assert exact.block_angles([1.0, 0.5, 0.0, -1.0, 1.0000001]) == pytest.approx([0, 60, 90, 180, 0])
    assert math.isnan(exact.block_angles([math.nan])[0])


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"depths": [6]}, "depths must be at least two and increase, got [6]"),
        ({"depths": []}, "depths must be at least two and increase"),
        ({"depths": [4, 2]}, "depths must be at least two and increase"),
        ({"depths": [1, 4]}, "depths must be at least 2, for a deep half of the blocks"),
        ({"learning_rates": []}, "learning_rates"),
        ({"learning_rates": [1e-3]}, "learning_rates must be at least two and increase, got [0.001]"),
        ({"learning_rates": [1e-2, 1e-3]}, "learning_rates must be at least two and increase"),
        ({"learning_rates": [0.0, 1e-3]}, "learning_rates"),
        ({"steps": 4}, "steps: input should be greater than or equal to 12"),
        ({"norm_gain": 1.0}, "norm_gain: input should be greater than 1"),
        ({"long_warmup": 0.1}, "long_warmup 0.1 is not longer than optimisation.warmup 0.1; raise it"),
        ({"exact": {"depths": [4]}}, "depths must be at least two and increase"),
        ({"exact": {"depths": [0, 4]}}, "depths must be at least 1"),
        ({"exact": {"seeds": 1}}, "exact.seeds: input should be greater than or equal to 2"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        params.load("smoke", {"claims": {"pre_vs_post_ln": changed}})
    assert words in str(caught.value)


def test_one_seed_is_allowed_and_undecided(settings: Params, tried: Tried, trained: Runs) -> None:
    one = {cell: records[:1] for cell, records in tried.items()}
    alone = {name: records[:1] for name, records in trained.items()}
    found = all_checks(settings, one, alone)
    assert {check.outcome for check in found.values() if check.role == "trained"} == {"undecided"}
