"""Claim 03's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

from records import diverged
from reslab import data, params, paths, sweep
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import layerscale_depth as claim
from reslab.experiments import layerscale_depth_exact as exact
from reslab.experiments import layerscale_depth_figure as figure
from reslab.experiments import layerscale_depth_opening as opening
from reslab.experiments.runs import ENDS
from reslab.opening import branch_shares, set_scales
from reslab.params import Params
from reslab.residuals import ConnectionConfig
from reslab.schema import UserError
from reslab.stats import share_of
from reslab.training import build, evaluate, train_model

SECTION = "layerscale_depth"


def changed(**section: Any) -> dict[str, Any]:
    return {"claims": {SECTION: section}}


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
def trained_once(settings: Params, store: None) -> Runs:
    arms = [*claim.decoder_arms(settings), *claim.image_arms(settings), *claim.thousand_arms(settings)]
    names = [arm.name for arm in arms]
    assert len(set(names)) == len(names)
    return claim.runs(settings, pd.DataFrame({"arm": names, "setting": "", "rate": 1e-2, "chosen": True}))


@pytest.fixture(scope="module")
def opened(settings: Params, trained_once: Runs) -> pd.DataFrame:
    return claim.openings(settings, trained_once)


@pytest.fixture(scope="module")
def chis(settings: Params) -> pd.DataFrame:
    return claim.initial_jacobians(settings)


@pytest.fixture(scope="module")
def closed(settings: Params) -> pd.DataFrame:
    return claim.initial_closed(settings)


@pytest.fixture
def trained(trained_once: Runs) -> Runs:
    """A copy that a test may change."""
    return {name: list(records) for name, records in trained_once.items()}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def thousand_checks(settings: Params, trained: Runs) -> list[Check]:
    return claim.checks_thousand(settings, trained, claim.closing_costs(settings, trained))


# --- questions ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(
    settings: Params, trained: Runs, chis: pd.DataFrame, closed: pd.DataFrame, opened: pd.DataFrame
) -> None:
    checks = [
        *claim.checks_initial(settings, chis, closed),
        *thousand_checks(settings, trained),
        *claim.checks_opening(settings, opened),
        *claim.checks_gain(settings, trained),
    ]
    names = [check.name for check in checks]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {check.sentence for check in checks} == {"A4.3c", "A5.1a", "A5.1b"}
    assert not [check.statement for check in checks if "{" in check.statement]
    assert all(row.ours for row in claim.published(checks))


def test_identities_are_controls_and_no_sentence_rests_on_them_alone() -> None:
    assert {claim.QUESTIONS[name].role for name in ("closed_loss", "closed_branches", "jacobian_zero")} == {"control"}
    counting = {question.sentence for question in claim.QUESTIONS.values() if question.role != "control"}
    assert counting == {question.sentence for question in claim.QUESTIONS.values()}


# --- exact ----------------------------------------------------------------------------------------


def test_exact_checks_hold_their_known_values(settings: Params, chis: pd.DataFrame, closed: pd.DataFrame) -> None:
    found = by_name(claim.checks_initial(settings, chis, closed))
    assert found["closed_loss"].estimate.value == 0
    assert found["closed_branches"].estimate.value == 0
    assert found["jacobian_zero"].estimate.value == 0
    for name in ("closed_loss", "closed_branches", "closed_scales", "jacobian_zero", "thousand_passes"):
        assert found[name].outcome == "holds", name


def test_open_network_is_not_taken_for_a_closed_one(settings: Params) -> None:
    """The checks of closed networks can fail: at scale 1 depths differ, and branches have gradients."""
    small = settings.claims.layerscale_depth.exact
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exact, "ConnectionConfig", lambda kind: ConnectionConfig("skipinit", initial=1.0))
        table = exact.closed_networks(small, [2, 4])
    estimates = exact.exact_estimates(exact.jacobians(small), table)
    assert (estimates["closed_loss"].value or 0) > 1e-3
    assert (estimates["closed_branches"].value or 0) > 1e-6


def test_jacobian_grows_with_a_scale_of_one_and_not_with_zero(chis: pd.DataFrame, closed: pd.DataFrame) -> None:
    assert (chis[chis["arm"] == "ReZero"]["chi"] == 1).all()
    assert (chis[chis["arm"] == "Pre-LN"]["chi"] > 1.1).all()
    assert (closed["passed at 0"] == 1).all()
    assert ((closed["passed at 1"] - 1).abs() > 1e-3).all()


def test_estimates_are_of_the_deepest() -> None:
    chis = pd.DataFrame(
        [
            {"arm": arm, "depth": depth, "seed": seed, "chi": chi**depth}
            for arm, chi in (("Post-LN", 0.1), ("Pre-LN", 10.0), ("ReZero", 1.0), ("ReZero 0.1", 1.0))
            for depth in (1, 2)
            for seed in (0, 1)
        ]
    )
    closed = pd.DataFrame(
        {
            "depth": [2, 1000, 2, 1000],
            "seed": [0, 0, 1, 1],
            "loss": [5.0, 5.25, 6.0, 6.5],
            "branch_gradient": [0.0, 0.0, 0.0, 0.125],
            "scale_gradient": [1.0, 0.5, 2.0, 3.0],
            "passed at 0.0001": [2.0, 1.25, 2.0, 0.75],
        }
    )
    found = {name: estimate.value for name, estimate in exact.exact_estimates(chis, closed).items()}
    assert found == pytest.approx(
        {
            "closed_loss": 0.5,
            "closed_branches": 0.125,
            "closed_scales": 0.5,
            "jacobian_zero": 0,
            "jacobian_rezero": 0,
            "jacobian_pre": 2,
            "jacobian_post": -2,
            "thousand_passes": 0.25,
        }
    )


# --- arms -----------------------------------------------------------------------------------------


def test_arms_of_the_cpu_preset() -> None:
    settings = params.preset("cpu")
    section = settings.claims.layerscale_depth
    decoders = {arm.name: arm.config for arm in claim.decoder_arms(settings)}
    assert len(decoders) == 5 * len(section.depths)
    assert decoders["SkipInit, 48 blocks"].model.connection.model_dump()["initial"] == pytest.approx(48**-0.5)
    assert decoders["LayerScale 1e-4, 6 blocks"].model.connection.model_dump()["initial"] == 1e-4
    assert {config.optimisation.steps for config in decoders.values()} == {section.steps}
    images = claim.image_arms(settings)
    assert len(images) == 3 * len(section.images.depths)
    assert {arm.config.task.kind for arm in images} == {"digits"}
    assert {getattr(arm.config.model, "weight_init", "") for arm in images} == {"plain"}
    assert {getattr(arm.config.model, "weight_init", "") for arm in claim.decoder_arms(settings)} == {"depth_scaled"}
    deep = claim.thousand_arms(settings)
    assert [arm.config.model.depth for arm in deep] == [1000] * 3 + [1]
    assert all(getattr(arm.config.task, "context", 0) == 8 for arm in deep)


def test_arms_share_their_seeds(settings: Params, trained: Runs) -> None:
    assert all([record.config.seed for record in records] == [0, 1] for records in trained.values())
    assert "LayerScale 1e-4, 2 blocks, images" in trained
    assert "ReZero, 2 blocks, images" not in trained


def test_weights_are_kept_where_they_are_looked_into(settings: Params, trained: Runs) -> None:
    for name in ("ReZero, 2 blocks", "ReZero, 8 blocks", "LayerScale 1e-4, 8 blocks"):
        sweep.trained_model(trained[name][0].config)
    with pytest.raises(UserError, match="no weights"):
        sweep.trained_model(trained["ReZero, 1 blocks"][0].config)


# --- opening --------------------------------------------------------------------------------------


def test_early_stages_are_those_of_the_run_itself(trained: Runs, opened: pd.DataFrame) -> None:
    """Run again to its end, the shares are those of the kept weights."""
    record = trained["ReZero, 2 blocks"][0]
    task = data.load(record.config.task)
    inputs, _ = next(task.held_out("validation"))
    assert isinstance(inputs, torch.Tensor)
    again, model = train_model(record.config)
    assert again.train_loss == record.train_loss
    last = opened[(opened["method"] == "ReZero") & (opened["seed"] == 0) & (opened["step"] == 8)]
    assert last["share"].tolist() == branch_shares(model, inputs[: opening.SEQUENCES])


def test_rezero_opens_from_nothing(settings: Params, opened: pd.DataFrame) -> None:
    stages = settings.claims.layerscale_depth.stages
    assert stages == (0, 1, 2, 4, 8)
    assert sorted(opened["step"].unique()) == list(stages)
    assert opening.effective_depths(opened, "ReZero", 0) == [0, 0]
    assert min(opening.effective_depths(opened, "ReZero", 8)) > 0
    assert min(opening.effective_depths(opened, "Pre-LN", 0)) > 0
    start = opened[(opened["method"] == "LayerScale 1e-4") & (opened["step"] == 0)]
    assert start["scale"].tolist() == pytest.approx([1e-4] * len(start))


def test_closing_cost_is_what_the_test_loss_rises_by(settings: Params, trained: Runs) -> None:
    record = trained["ReZero, 8 blocks"][0]
    model = sweep.trained_model(record.config)
    set_scales(model, 0.0)
    shut = evaluate(record.config, data.load(record.config.task), model, "test")
    assert shut is not None
    assert opening.closing_cost(record) == shut[0] - (record.test_loss or 0) != 0


def test_embedding_and_head_alone_are_the_narrow_decoder_closed(settings: Params, trained: Runs) -> None:
    """Its one block never changes, and adds nothing to the stream."""
    config = trained[ENDS][0].config
    deep = trained["ReZero, 8 blocks"][0].config
    assert config.optimisation == deep.optimisation
    differ = {"depth": 1, "connection": ConnectionConfig("scaled", scale=0.0)}
    assert config.model == deep.model.model_copy(update=differ)
    model = train_model(config)[1]
    x = torch.randn(2, 4, 8)
    assert torch.equal(model.get_submodule("stack")(x), x)
    untrained = build(config.model, config.seed).state_dict()
    moved = {name.split(".")[0] for name, w in model.state_dict().items() if not torch.equal(w, untrained[name])}
    assert {"token_embedding", "head"} <= moved


def test_thousand_blocks_are_judged_against_their_ends(settings: Params, trained: Runs) -> None:
    """Embedding and head alone end at 4.5, plain at 5, LayerScale at 4.25, ReZero at 3.5; closed at 4.75 and 4.5."""
    losses = {"Pre-LN, 8 blocks": 5.0, "LayerScale 1e-4, 8 blocks": 4.25, "ReZero, 8 blocks": 3.5, ENDS: 4.5}
    for name, loss in losses.items():
        with_losses(trained, name, [loss, loss])
    costs = {"LayerScale 1e-4": [0.5, 0.5], "ReZero": [1.0, 1.0]}
    found = {
        name: check.estimate.value for name, check in by_name(claim.checks_thousand(settings, trained, costs)).items()
    }
    assert (found["thousand_used"], found["thousand_used_layerscale"]) == (1.0, 0.5)
    gained = {"rezero": 1.0, "layerscale": 0.25, "plain": -0.5}
    assert {name: found[f"thousand_over_ends_{name}"] for name in gained} == gained
    table = claim.thousand_table(settings, trained, costs)["closed again"]
    assert [text.split()[0] if text else "" for text in table] == ["", "4.75", "4.5", ""]


# --- gain -----------------------------------------------------------------------------------------


def with_losses(trained: Runs, name: str, losses: list[float], measure: str = "test_loss") -> None:
    pairs = zip(trained[name], losses, strict=True)
    trained[name] = [record.model_copy(update={measure: loss}) for record, loss in pairs]


def test_gain_and_its_slope_by_hand(settings: Params, trained: Runs) -> None:
    for depth, plain, ours in ((1, [2.0, 3.0], [2.5, 3.0]), (2, [2.0, 3.0], [1.75, 2.0])):
        with_losses(trained, f"Pre-LN, {depth} blocks", plain)
        with_losses(trained, f"LayerScale 0.1, {depth} blocks", ours)
    assert claim.gain(trained, "LayerScale 0.1", 1) == [-0.5, 0.0]
    assert claim.gain(trained, "LayerScale 0.1", 2) == [0.25, 1.0]
    assert claim.gain_slopes(trained, "LayerScale 0.1", (1, 2)) == pytest.approx([0.75, 1.0])
    found = by_name(claim.checks_gain(settings, trained))
    assert found["deep_large"].estimate.value == 0.625
    assert found["shallow_large"].estimate.value == -0.25
    assert found["slope_large"].estimate.value == pytest.approx(0.875)


def test_gain_of_images_is_in_points_of_accuracy(trained: Runs) -> None:
    with_losses(trained, "Pre-LN, 2 blocks, images", [0.5, 0.75], "test_accuracy")
    with_losses(trained, "LayerScale 1e-4, 2 blocks, images", [0.75, 0.5], "test_accuracy")
    assert claim.gain(trained, "LayerScale 1e-4", 2, images=True) == [25, -25]


def test_trains_needs_a_loss_below_guessing(settings: Params, trained: Runs) -> None:
    record = trained["ReZero, 8 blocks"][0]
    guess = math.log(256)
    assert claim.trains(settings, record.model_copy(update={"test_loss": guess - 0.51}))
    assert not claim.trains(settings, record.model_copy(update={"test_loss": guess - 0.49}))
    assert not claim.trains(settings, diverged(record))


# --- runs that diverged ---------------------------------------------------------------------------


def test_diverged_run_leaves_the_gain_unmeasured(settings: Params, trained: Runs) -> None:
    for name in ("LayerScale 0.1, 2 blocks", "Pre-LN, 2 blocks, images"):
        trained[name][0] = diverged(trained[name][0])
    found = by_name(claim.checks_gain(settings, trained))
    for name in ("deep_large", "appears_large", "slope_large", "image_deep_small", "image_slope_large"):
        assert found[name].outcome == "undecided", name
        assert found[name].estimate.value is None, name
    assert found["shallow_large"].estimate.value is not None
    assert "not measured" in claim.gain_table(settings, trained).to_string()


def test_diverged_run_of_a_thousand_blocks_has_not_trained(settings: Params, trained: Runs) -> None:
    for method, shares in (("Pre-LN", [5.0, 5.0]), ("ReZero", [4.0, 4.0])):
        with_losses(trained, f"{method}, 8 blocks", shares)
    for method in ("Pre-LN", "ReZero"):
        trained[f"{method}, 8 blocks"][0] = diverged(trained[f"{method}, 8 blocks"][0])
    found = by_name(thousand_checks(settings, trained))
    assert found["thousand_rezero"].estimate == found["thousand_plain"].estimate == share_of([False, True])
    assert found["thousand_gain"].estimate.value is None
    for name in ("thousand_used", "thousand_over_ends_rezero", "thousand_over_ends_plain"):
        assert found[name].estimate.value is None


def test_a_few_runs_refute_a_share_and_prove_none(settings: Params, trained: Runs) -> None:
    """None of two is refuted; two of two may be chance."""
    with_losses(trained, "ReZero, 8 blocks", [4.0, 4.0])
    with_losses(trained, "LayerScale 1e-4, 8 blocks", [5.4, 5.4])
    found = by_name(thousand_checks(settings, trained))
    assert (found["thousand_rezero"].estimate.value, found["thousand_rezero"].outcome) == (1, "undecided")
    assert (found["thousand_layerscale"].estimate.value, found["thousand_layerscale"].outcome) == (0, "fails")


def test_diverged_run_does_not_open(settings: Params, trained: Runs) -> None:
    trained["ReZero, 2 blocks"][1] = diverged(trained["ReZero, 2 blocks"][1])
    table = claim.openings(settings, trained)
    found = by_name(claim.checks_opening(settings, table))
    assert found["early_rezero"].estimate.value is None
    assert found["gradual_rezero"].outcome == "undecided"
    assert found["early_small"].estimate.value is not None


def test_diverged_runs_are_drawn(settings: Params, trained: Runs, chis: pd.DataFrame) -> None:
    for name in ("ReZero, 2 blocks", "LayerScale 1e-4, 2 blocks", "Pre-LN, 2 blocks, images", "Pre-LN, 8 blocks"):
        trained[name][0] = diverged(trained[name][0])
    drawn = figure.draw(settings, chis, claim.openings(settings, trained), trained)
    drawn.canvas.draw()
    plt.close(drawn)


def test_one_seed_is_undecided(settings: Params, trained: Runs) -> None:
    found = by_name(claim.checks_gain(settings, {name: records[:1] for name, records in trained.items()}))
    assert {check.outcome for check in found.values()} == {"undecided"}
    assert "no interval" in str(found["deep_small"].estimate)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"depths": [2]}, "depths must be two or more that increase from at least 1, got [2]"),
        ({"depths": []}, "depths must be two or more"),
        ({"depths": [2, 1]}, "depths must be two or more that increase from at least 1, got [2, 1]"),
        ({"images": {"depths": [2]}}, "images.depths: depths must be two or more"),
        ({"appears_at": 3}, "appears_at 3 must be one of depths after the first, [1, 2]"),
        ({"appears_at": 1}, "appears_at 1 must be one of depths after the first, [1, 2]"),
        ({"images": {"depths": [1, 4]}}, "appears_at 2 must be one of images.depths after the first, [1, 4]"),
        ({"thousand": {"depth": 2}}, "thousand.depth 2 must be larger than the deepest of [1, 2]"),
        ({"thousand": {"heads": 3}}, "width 8 is not divisible by heads 3"),
        ({"images": {"heads": 3}}, "width 8 is not divisible by heads 3"),
        ({"images": {"batch": 5000}}, "images.batch: input should be less than or equal to 1197"),
        ({"early": 0.1}, "early 0.1 of 8 steps is too short; it needs at least 2 steps"),
        ({"early": 0.5}, "early: input should be less than 0.5"),
        ({"learning_rates": []}, "learning_rates: "),
        ({"exact": {"depths": [4]}}, "exact.depths: "),
        ({"exact": {"depths": [4, 2]}}, "depths must increase from at least 1, got [4, 2]"),
        (
            {"criteria": {"deep_smal": {"above": 0}}},
            "criteria.deep_smal: unknown parameter; did you mean 'deep_small'?",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_settings_are_refused_by_sentence(section: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        params.load("smoke", changed(**section))
    assert words in str(refused.value)


def test_cpu_preset_keeps_to_its_budget() -> None:
    """Blocks times steps of all runs, those of images at a half and of the narrow ones at three eighths."""
    settings = params.preset("cpu")
    section, seeds = settings.claims.layerscale_depth, len(settings.seeds)
    parts = (
        (claim.decoder_arms(settings), section.sweep_steps, 1.0),
        (claim.image_arms(settings), section.images.sweep_steps, 0.5),
        (claim.thousand_arms(settings), section.thousand.sweep_steps, 0.375),
    )
    cost = 0.0
    for arms, sweep_steps, weight in parts:
        for arm in arms:
            steps = seeds * arm.config.optimisation.steps + len(arm.rates) * sweep_steps
            cost += weight * arm.config.model.depth * steps
    again = section.appears_at * section.stages[-2] * seeds * len(claim.OPENING_METHODS)
    assert cost + again < 330_000
