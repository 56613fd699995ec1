"""Claim 09's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from torch import nn

from records import diverged
from reslab import params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import depth_scaled_init as claim
from reslab.experiments import depth_scaled_init_exact as exact
from reslab.experiments import depth_scaled_init_figure as figure
from reslab.params import Params
from reslab.schema import UserError

SECTION = "depth_scaled_init"


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}})


@pytest.fixture(scope="module")
def trained_once(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    names = [arm.name for arm in claim.arms(settings)]
    assert len(set(names)) == len(names)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        yield claim.runs(settings, pd.DataFrame({"arm": names, "setting": "", "rate": 1e-2, "chosen": True}))


@pytest.fixture
def trained(trained_once: Runs) -> Runs:
    """A copy that a test may change, in which every run has learnt."""
    return {
        name: [record.model_copy(update={"outcome": "trained"}) for record in records]
        for name, records in trained_once.items()
    }


@pytest.fixture(scope="module")
def table(settings: Params) -> pd.DataFrame:
    return claim.initial(settings)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_every_question_is_answered_once(settings: Params, table: pd.DataFrame, trained: Runs) -> None:
    checks = [
        *claim.checks_initial(settings, table),
        *claim.checks_variance(settings, trained),
        *claim.checks_harm(settings, trained),
    ]
    names = [check.name for check in checks]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {check.sentence for check in checks} == {"A6.1a", "A6.1b"}
    assert not [check.statement for check in checks if "{" in check.statement]
    estimates = [str(by_name(checks)[name].estimate) for name in ("writers_std", "branch_ratio")]
    assert [row.ours for row in claim.published(checks)] == estimates


# --- exact ----------------------------------------------------------------------------------------


def test_exact_checks_hold_their_known_values(settings: Params, table: pd.DataFrame) -> None:
    found = by_name(claim.checks_initial(settings, table))
    assert found["adam_step"].estimate.value == pytest.approx(1, abs=1e-3)
    assert found["writers_std"].estimate.value == pytest.approx(1, abs=0.05)
    assert found["branch_ratio"].estimate.value == pytest.approx(1, abs=0.15)
    assert found["predicted_loss"].estimate.value == pytest.approx(1, abs=0.1)
    assert found["exponent_small"].estimate.value == pytest.approx(0, abs=0.25)


def test_table_is_the_same_every_time(settings: Params, table: pd.DataFrame) -> None:
    small = settings.claims.depth_scaled_init.exact.model_copy(update={"depths": (2,), "seeds": 1})
    again = exact.start(small)
    kept = table[(table["seed"] == 0) & (table["depth"] == 2)].reset_index(drop=True)
    pd.testing.assert_frame_equal(again, kept)


def test_norm_before_the_head_changes_no_branch(table: pd.DataFrame) -> None:
    for column in ("written", "branches", "saturated", "dead", "writers"):
        behind, bare = (table[table["norm"] == norm][column].tolist() for norm in ("norm", "bare"))
        assert behind == bare, column


def test_predicted_loss() -> None:
    assert exact.predicted_loss(512, 128, 0.2) == pytest.approx(8.798, abs=1e-3)
    assert exact.predicted_loss(256, 64, 0.0) == math.log(256)


def test_saturated_rows() -> None:
    zero = torch.zeros(1, 3, 6)
    assert exact.saturated_rows(zero, heads=1) == 0  # equal weights
    sharp = torch.zeros(1, 3, 6)
    sharp[0, 1:, 0] = 100.0  # queries of the second and third token
    sharp[0, 0, 2] = 1.0  # the key of the first: score 100/sqrt(2) against 0
    assert exact.saturated_rows(sharp, heads=1) == 1
    sharp[0, 2, 0] = 0.0  # the third looks at all alike
    assert exact.saturated_rows(sharp, heads=1) == 0.5


def test_dead_units() -> None:
    inputs = torch.tensor([[[-4.0, -4.0, 0.0, 5.0], [-3.5, -2.0, 0.0, -9.0]]])
    assert exact.dead_units(inputs) == 0.25


def test_adam_update_by_hand() -> None:
    """Logits (w, 0): the gradient of -ln p(0) is p - 1 = -1/2 in the bias of class 0 and 1/2 in that of class 1."""

    class Biases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.bias.expand(*tokens.shape, 2)

    tokens = torch.zeros(1, 3, dtype=torch.long)
    found = exact.adam_update(Biases(), tokens, tokens, 0.1)
    assert found["gradient"] == pytest.approx(0.5**0.5)
    assert found["largest_step"] == pytest.approx(1, abs=1e-6)
    changes = [math.log(1 / (1 + math.exp(-0.2))) - math.log(0.5), math.log(1 / (1 + math.exp(0.2))) - math.log(0.5)]
    assert found["function"] == pytest.approx((sum(change**2 for change in changes) / 2) ** 0.5, rel=1e-6)


def test_estimates_take_the_right_rows(settings: Params) -> None:
    small = settings.claims.depth_scaled_init.exact
    rows = [
        {
            "init": init,
            "norm": norm,
            "depth": depth,
            "seed": seed,
            "writers": (2 * depth) ** -0.5,
            "loss": std * depth * (10 if norm == "bare" else 1),
            "written": float(depth),
            "branches": 1.0 if "scaled" in init else 2.0 * depth,
            "saturated": 0.25,
            "dead": 0.75,
            "gradient": std * depth,
            "largest_step": 1.0,
            "function": std**2,
        }
        for number, init in enumerate(exact.INITS)
        for norm in exact.NORMS
        for depth in (2, 4)
        for seed in (0, 1)
        for std in [1.0 if init == "0.02" else 10.0 + number]
    ]
    found = {name: e.value for name, e in exact.exact_estimates(small, pd.DataFrame(rows)).items()}
    assert found["branch_ratio"] == found["writers_std"] == found["exponent_plain"] == 1
    assert (found["loss_shallow_norm"], found["loss_deep_norm"], found["loss_depth_norm"]) == (22, 44, 24)
    assert found["loss_depth_bare"] == 240
    assert found["sgd_deep_norm"] == pytest.approx(math.log10(12), rel=1e-5)
    assert found["sgd_depth_norm"] == pytest.approx(math.log10(2), rel=1e-5)
    assert found["adam_depth_bare"] == 0
    assert (found["saturated"], found["dead_wide"]) == (0.25, 0.75)


# --- runs -----------------------------------------------------------------------------------------


def test_longest_flat() -> None:
    assert claim.longest_flat([4, 3, 2, 1], 1) == 0
    assert claim.longest_flat([1, 2, 3, 4], 1) == 0.75
    assert claim.longest_flat([5, 4, 6, 6, 3, 3], 1) == pytest.approx(2 / 6)
    assert claim.longest_flat([4, 4, 2, 2], 2) == 0


def test_arms_differ_in_the_start_and_the_final_norm_alone(settings: Params) -> None:
    models = {arm.name: arm.config.model for arm in claim.arms(settings)}
    bare = models[claim.arm_name("0.2", 2, "bare")]
    behind = models[claim.arm_name("0.2", 2)]
    assert bare.model_copy(update={"final_norm": True}) == behind
    assert behind.model_copy(update={"init_std": 0.02}) == models[claim.arm_name("0.02", 2)]
    assert behind.model_copy(update={"weight_init": "depth_scaled"}) == models[claim.arm_name("0.2 scaled", 2)]


def test_diverged_run_leaves_its_checks_undecided(settings: Params, trained: Runs) -> None:
    name = claim.arm_name("0.2", 2, "bare")
    trained[name][0] = diverged(trained[name][0])
    found = by_name(claim.checks_harm(settings, trained))
    for check in ("harm_deep_bare", "harm_depth_bare", "flat_bare"):
        assert found[check].estimate.value is None, check
        assert found[check].outcome == "undecided"
    assert found["harm_deep_norm"].estimate.value is not None
    assert found["stalls_bare"].estimate.value is not None


def test_run_that_diverges_is_a_run_that_stalls(settings: Params, trained: Runs) -> None:
    name = claim.arm_name("0.2", 2)
    assert by_name(claim.checks_harm(settings, trained))["stalls_norm"].estimate.value == 0
    trained[name][1] = diverged(trained[name][1])
    assert by_name(claim.checks_harm(settings, trained))["stalls_norm"].estimate.value == 0.5


def test_nothing_is_compared_with_a_baseline_that_learnt_nothing(settings: Params, trained: Runs) -> None:
    name = claim.arm_name("0.02", 2)
    losses = [record.test_loss for record in trained[name]]
    trained[name][1] = trained[name][1].model_copy(update={"outcome": "stalled"})
    found = by_name(claim.checks_harm(settings, trained))
    for check in ("harm_deep_norm", "harm_depth_norm", "flat_norm"):
        assert found[check].estimate.value is None, check
        assert found[check].outcome == "undecided"
    assert found["harm_shallow_norm"].estimate.value is not None
    large = trained[claim.arm_name("0.2", 2)][0].test_loss
    assert claim.harm(trained, 2, "norm")[0] == pytest.approx((large or 0) - (losses[0] or 0))
    assert math.isnan(claim.harm(trained, 2, "norm")[1])
    assert "not measured" in claim.harm_table(settings, trained).to_string()


def test_large_start_that_stalls_is_harm_and_no_missing_value(settings: Params, trained: Runs) -> None:
    name = claim.arm_name("0.2", 2)
    trained[name] = [record.model_copy(update={"outcome": "stalled"}) for record in trained[name]]
    assert by_name(claim.checks_harm(settings, trained))["harm_deep_norm"].estimate.value is not None


def test_diverged_run_leaves_the_variance_undecided(settings: Params, trained: Runs) -> None:
    name = claim.arm_name("0.2 scaled", 2)
    trained[name][0] = diverged(trained[name][0])
    found = by_name(claim.checks_variance(settings, trained))
    assert found["trained_large"].outcome == "undecided"
    assert found["trained_large"].estimate.value is None
    assert found["trained_small"].estimate.value is not None


def test_variance_of_runs_that_learnt_nothing_has_no_value(settings: Params, trained: Runs) -> None:
    for name, check, other in (("0.02", "trained_small", "trained_large"), ("0.2 scaled", "trained_large", "")):
        arm = claim.arm_name(name, 2)
        trained[arm][1] = trained[arm][1].model_copy(update={"outcome": "stalled"})
        found = by_name(claim.checks_variance(settings, trained))
        assert found[check].estimate.value is None
        assert found[check].outcome == "undecided"
        assert not other or found[other].estimate.value is not None


def test_comparison_without_value_is_marked_in_the_figure(settings: Params, table: pd.DataFrame, trained: Runs) -> None:
    def marked() -> int:
        axes = figure.draw(settings, table, trained).axes[5]
        return [text.get_text() for text in axes.texts].count("no value")

    assert marked() == 0
    for norm in ("norm", "bare"):
        name = claim.arm_name("0.02", 2, norm)
        trained[name][1] = trained[name][1].model_copy(update={"outcome": "stalled"})
    assert marked() == 2
    plt.close("all")


def test_figure_draws_with_and_without_diverged_runs(settings: Params, table: pd.DataFrame, trained: Runs) -> None:
    figure.draw(settings, table, trained)
    name = claim.arm_name("0.2", 2, "bare")
    empty = {"train_loss": (), "gradient_norm": ()}
    trained[name] = [diverged(record).model_copy(update=empty) for record in trained[name]]
    drawn = figure.draw(settings, table, trained)
    assert [axes.get_title() for axes in drawn.axes if not axes.lines] == []
    assert "not measured" in claim.harm_table(settings, trained).to_string()
    plt.close("all")


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"depths": [4]}, "depths must be two or more that increase"),
        ({"depths": [4, 4]}, "depths must be two or more that increase"),
        ({"learning_rates": []}, "at least 1 item"),
        ({"window": 3}, "window 3 must be at most a quarter of steps 8"),
        ({"exact": {"depths": [4]}}, "depths must be two or more that increase"),
        ({"exact": {"width": 18}}, "multiple of 4"),
        ({"criteria": {"dead": {"above": 2.0, "below": 1.0}}}, "no value can lie between"),
    ],
)
def test_settings_that_make_no_sense_are_refused(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        params.load("smoke", {"claims": {SECTION: section}})


def test_depths_that_the_sentence_does_not_speak_of_are_refused() -> None:
    with pytest.raises(UserError, match="more than 16 layers; the deepest are 16 and 48"):
        params.load("cpu", {"claims": {SECTION: {"depths": [4, 16]}}})


def test_one_seed_leaves_all_that_is_random_undecided(settings: Params, trained: Runs) -> None:
    one = {name: records[:1] for name, records in trained.items()}
    found = by_name(claim.checks_harm(settings, one))
    assert found["harm_deep_norm"].outcome == "undecided"
    assert found["harm_deep_norm"].estimate.low is None
