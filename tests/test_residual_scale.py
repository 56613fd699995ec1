"""Claim 07's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

from records import around_guess, diverged
from reslab import params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import residual_scale as claim
from reslab.experiments import residual_scale_exact as exact
from reslab.experiments import residual_scale_figure as figure
from reslab.experiments.residual_scale_inside import Inside, look_inside
from reslab.params import Params
from reslab.schema import UserError
from reslab.training import RunRecord

SECTION = "residual_scale"
Tried = dict[claim.Cell, list[RunRecord]]
Seen = dict[str, list[Inside]]


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for the runs and their weights."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        yield


@pytest.fixture(scope="module")
def tried_once(settings: Params, store: None) -> Tried:
    return claim.grid(settings)


@pytest.fixture(scope="module")
def trained_once(settings: Params, store: None) -> Runs:
    return claim.runs(settings, claim.rates(settings))


@pytest.fixture(scope="module")
def seen(settings: Params, trained_once: Runs) -> Seen:
    return claim.inside(settings, trained_once)


@pytest.fixture(scope="module")
def tables(settings: Params) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    return claim.law(settings), claim.chis(settings), claim.decoders(settings)


@pytest.fixture
def tried(tried_once: Tried) -> Tried:
    """A copy that a test may change."""
    return {cell: list(records) for cell, records in tried_once.items()}


@pytest.fixture
def trained(trained_once: Runs) -> Runs:
    """A copy that a test may change."""
    return {name: list(records) for name, records in trained_once.items()}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# --- questions ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(
    settings: Params, tried: Tried, trained: Runs, seen: Seen, tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
) -> None:
    checks = [
        *claim.checks_initial(settings, *tables),
        *claim.checks_stability(settings, tried),
        *claim.checks_result(settings, trained, seen),
    ]
    names = [check.name for check in checks]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {check.sentence for check in checks} == {"A4.3a", "A4.3b", "A7"}
    assert not [check.statement for check in checks if "{" in check.statement]
    assert all(row.ours for row in claim.published(checks))


# --- exact ----------------------------------------------------------------------------------------


def test_growth_law_by_hand() -> None:
    assert exact.growth_law(1.0, 48) == 97
    assert exact.growth_law(0.1, 48) == pytest.approx(1.96)
    assert exact.growth_law(0.0, 5) == 1


def test_one_sublayer_by_hand() -> None:
    """x + s Q x / rms(x): branches have the mean square s^2 exactly, and the Jacobian at s = 0 is the identity."""
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0, 1.0, 2.0]], dtype=torch.float64)
    wrote = exact.orthogonal_stack(6, 1, 0.5, seed=7)(x) - x
    assert float(wrote.square().mean()) == pytest.approx(0.25, abs=1e-12)
    assert torch.equal(exact.orthogonal_stack(6, 4, 0.0, seed=7)(x), x)


def test_law_holds_at_a_width_at_which_it_is_exact_enough() -> None:
    table = exact.constructed(exact.Shape(depth=12, width=128, tokens=64, seeds=3), (1.0, 0.1)).groupby("scale").mean()
    chis = exact.jacobians(exact.Shape(depth=4, width=64, tokens=16, seeds=3), (1.0, 0.1)).groupby("scale").mean()
    assert (table["stream"] - 1).abs().max() < 0.05
    assert (chis["jacobian"] - 1).abs().max() < 0.1
    assert (table["gradient"] - 1).abs().max() < 0.1


def test_decoders_follow_the_variance_of_their_branches() -> None:
    table = exact.built(exact.Shape(depth=6, width=64, tokens=16, seeds=2), (1.0, 0.1)).groupby("scale").mean()
    assert (table["law"] - 1).abs().max() < 0.1
    assert table["growth"][1.0] > table["growth"][0.1] > 1
    assert table["effective_depth"][1.0] > table["effective_depth"][0.1] > 0


def test_exact_estimates_take_the_worst_scale() -> None:
    law = pd.DataFrame(
        {"scale": [1.0, 1.0, 0.1, 0.1], "stream": [1.0, 1.0, 0.5, 0.75], "jacobian": 1.0, "gradient": 2.0}
    )
    decoders = pd.DataFrame(
        {
            "scale": [1.0, 1.0, 0.1, 0.1, 0.03, 0.03],
            "law": [1.0] * 4 + [1.25, 1.75],
            "growth": [5.0, 7.0, 1.0, 3.0, 1.0, 1.0],
            "effective_depth": [4.0, 8.0, 1.0, 1.0, 1.0, 2.0],
        }
    )
    found = {name: estimate.value for name, estimate in exact.exact_estimates(law, law, decoders).items()}
    assert found == {
        "stream_law": 0.625,
        "jacobian_law": 1,
        "gradient_law": 2,
        "stream_built": 1.5,
        "growth_one": 6,
        "growth_low": 2,
        "effective_untrained": 0.25,
    }


# --- runs -----------------------------------------------------------------------------------------


def test_runs_of_the_cpu_preset() -> None:
    settings = params.preset("cpu")
    section = settings.claims.residual_scale
    arms = claim.arms(settings)
    assert [arm.name for arm in arms] == ["scale 1", "scale 0.3", "scale 0.03"]
    for arm in arms:
        assert getattr(arm.config.model, "weight_init", "") == "plain"
        assert arm.config.optimisation.steps == settings.optimisation.steps
    deep = claim.scaled_run(settings, section.deep.depth, 0.1, section.deep.steps)
    assert deep.model.connection.model_dump()["scale"] == 0.1
    assert (deep.model.depth, deep.optimisation.steps) == (48, 36)


def test_stability_by_hand(settings: Params, tried: Tried) -> None:
    """Scale 1 jumps by 2 nats at the higher rate, 0.3 at none, whatever the batches do."""
    calm, jump = [2.0] * 12, [2.0] * 10 + [12.0] * 2
    high = settings.claims.residual_scale.deep.learning_rates[-1]
    for cell, records in tried.items():
        tried[cell] = [around_guess(record, jump if cell == (1.0, high) else calm) for record in records]
    assert claim.share_failed(tried, 1.0) == [0.5, 0.5]
    assert claim.places_borne(tried, 1.0) == [0, 0]
    assert claim.places_borne(tried, 0.3) == [1, 1]
    assert claim.rises(tried, 1.0) == pytest.approx([1.0, 1.0])
    found = by_name(claim.checks_stability(settings, tried))
    for name, value in (("calmer_moderate", 0.5), ("bears_moderate", 1.0), ("rise_low", 1.0), ("stability_bears", 1.0)):
        assert found[name].estimate.value == pytest.approx(value), name
        assert found[name].outcome == "holds", name
    assert found["no_false_spikes"].outcome == "holds"


def test_equal_results_are_equal_and_not_faster(settings: Params, trained: Runs, seen: Seen) -> None:
    for name in trained:
        trained[name] = [r.model_copy(update={"train_loss": (2.0,) * 12, "test_loss": 2.0}) for r in trained["scale 1"]]
    found = by_name(claim.checks_result(settings, trained, dict.fromkeys(seen, seen["scale 1"])))
    assert found["same_result"].outcome == "holds"
    for name in ("result_one", "result_moderate", "speed_steps", "speed_early", "skip_cost", "effective_trained"):
        assert found[name].outcome == "fails", name


def test_speed_by_hand(trained: Runs) -> None:
    """Below the guess's loss on the same batches from the seventh step on."""
    runs = [around_guess(record, [0.0] * 6 + [-1.5] * 6) for record in trained["scale 1"]]
    assert claim.steps_to_context(runs) == [7, 7]


def test_inside_of_a_model(settings: Params, trained: Runs, seen: Seen) -> None:
    blocks = settings.claims.residual_scale.depth
    for found in seen.values():
        assert all(len(one.shares) == 2 * blocks and len(one.costs) == blocks for one in found)
    assert max(one.effective_depth for one in seen["scale 0.03"]) < min(one.effective_depth for one in seen["scale 1"])
    assert Inside((0.5, 0.25), (1.0, 3.0)).effective_depth == 0.75
    assert Inside((0.5, 0.25), (1.0, 3.0)).mean_cost == 2
    assert math.isnan(look_inside(diverged(trained["scale 1"][0])).mean_cost)


# --- runs that diverged ---------------------------------------------------------------------------


def test_diverged_run_counts_as_failed_and_leaves_losses_unmeasured(
    settings: Params, tried: Tried, trained: Runs, seen: Seen
) -> None:
    rate = settings.claims.residual_scale.deep.learning_rates[-1]
    tried[1.0, rate][0] = diverged(tried[1.0, rate][0])
    stability = by_name(claim.checks_stability(settings, tried))
    assert stability["rise_moderate"].estimate.value is None
    assert stability["rise_moderate"].outcome == "undecided"
    assert stability["calmer_moderate"].estimate.value is not None
    trained["scale 0.3"][0] = diverged(trained["scale 0.3"][0])
    result = by_name(claim.checks_result(settings, trained, seen))
    for name in ("same_result", "result_moderate", "speed_steps", "speed_early"):
        assert result[name].estimate.value is None, name
        assert result[name].outcome == "undecided", name


def test_figure_draws_also_where_all_diverged(
    settings: Params, tried: Tried, trained: Runs, seen: Seen, tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
) -> None:
    assert len(figure.draw(settings, tables[0], tables[2], tried, trained, seen).axes) == 6
    lost = {cell: [diverged(record) for record in records] for cell, records in tried.items()}
    gone = {name: [diverged(record) for record in records] for name, records in trained.items()}
    drawn = figure.draw(settings, tables[0], tables[2], lost, gone, claim.inside(settings, gone))
    drawn.canvas.draw()
    plt.close("all")


def test_tables_for_reading(tried: Tried, trained: Runs, seen: Seen) -> None:
    assert len(claim.grid_table(tried)) == len(tried)
    assert list(claim.inside_table(trained, seen).index) == list(trained)


def test_spikes_are_counted_by_cell(settings: Params, tried: Tried) -> None:
    """Scale 0.3 jumps once in either seed, at the highest rate alone."""
    calm, jump = (2.0,) * 12, (2.0,) * 10 + (9.0,) * 2
    jumping = (0.3, settings.claims.residual_scale.deep.learning_rates[-1])
    for cell, records in tried.items():
        losses = jump if cell == jumping else calm
        tried[cell] = [record.model_copy(update={"train_loss": losses}) for record in records]
    assert claim.grid_table(tried)["spikes"].to_dict() == dict.fromkeys(tried, 0) | {jumping: 2}


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"deep": {"depth": 2}}, "deep.depth 2 is not more than depth 2; raise it"),
        ({"deep": {"learning_rates": [1e-2]}}, "at least two and increase"),
        ({"deep": {"learning_rates": [1e-1, 1e-2]}}, "at least two and increase"),
        ({"deep": {"steps": 11}}, "steps"),
        ({"learning_rates": []}, "learning_rates"),
        ({"exact": {"stack": {"seeds": 1}}}, "seeds"),
        ({"exact": {"stack": {"depth": 5}}}, "stack.depth 5 and decoder.depth 4 must be the same"),
    ],
)
def test_bad_settings_are_refused_by_sentence(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        params.load("smoke", {"claims": {SECTION: section}})


def test_one_seed_is_undecided(settings: Params, tried: Tried) -> None:
    one = {cell: records[:1] for cell, records in tried.items()}
    found = by_name(claim.checks_stability(settings, one))
    assert found["rise_moderate"].outcome == "undecided"
    assert found["rise_moderate"].estimate.low is None
