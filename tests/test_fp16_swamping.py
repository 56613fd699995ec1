"""Claim 04's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.text import Annotation

from records import diverged
from reslab import data, params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import fp16_swamping as claim
from reslab.experiments import fp16_swamping_arms as of_arms
from reslab.experiments import fp16_swamping_exact as exact
from reslab.experiments import fp16_swamping_figure as figure
from reslab.experiments import fp16_swamping_twins as inside
from reslab.experiments.runs import decoder_run
from reslab.models.decoder import DecoderConfig
from reslab.params import Params
from reslab.schema import UserError
from reslab.sweep import trained_model
from reslab.training import evaluate, train

SECTION = "fp16_swamping"


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}, "evaluation_windows": 8})


@pytest.fixture(scope="module")
def trained_once(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    names = [arm.name for arm in of_arms.arms(settings)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        yield claim.runs(settings, pd.DataFrame({"arm": names, "setting": "", "rate": 3e-3, "chosen": True}))


@pytest.fixture
def trained(trained_once: Runs) -> Runs:
    """A copy that a test may change."""
    return {name: list(records) for name, records in trained_once.items()}


@pytest.fixture(scope="module")
def tables(settings: Params) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    return exact.absorption_curve(settings), exact.accumulation_curve(settings), exact.growth(settings)


def trained_checks(settings: Params, trained: Runs) -> list[Check]:
    return [
        *claim.checks_twins(settings, inside.twins(settings, trained)),
        *claim.checks_losses(settings, trained),
        *claim.checks_scaled_back(settings, trained, inside.recipe_losses(settings, trained)),
        *claim.checks_ratios(settings, inside.block_ratios(settings, trained)),
    ]


def exact_checks(settings: Params, tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]) -> list[Check]:
    curve, errors, grown = tables
    return [
        *claim.checks_one_addition(settings, curve),
        *claim.checks_many_additions(settings, errors, grown),
        *claim.checks_recipe(settings, exact.recipe_errors(settings)),
    ]


Tables = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]


# --- without training -----------------------------------------------------------------------------


def test_every_question_is_answered_once(settings: Params, tables: Tables, trained: Runs) -> None:
    done = [*exact_checks(settings, tables), *trained_checks(settings, trained)]
    assert sorted(check.name for check in done) == sorted(claim.QUESTIONS)
    assert claim.KEY in claim.QUESTIONS
    assert len(claim.published(done)) == 3
    assert {check.sentence for check in done} == {"A6.2a", "A6.2b", "A6.2c", "A6.2d"}


def test_identities_are_controls_and_no_sentence_rests_on_them_alone() -> None:
    assert {claim.QUESTIONS[name].role for name in ("growth_plain", "law", "power_of_two")} == {"control"}
    counting = {question.sentence for question in claim.QUESTIONS.values() if question.role != "control"}
    assert counting == {question.sentence for question in claim.QUESTIONS.values()}


def test_exact_checks_have_their_known_values(settings: Params, tables: Tables) -> None:
    found = {check.name: check for check in exact_checks(settings, tables)}
    assert found["swallowed"].estimate.value == 0
    assert found["swallowed_bf16"].estimate.value == 1
    assert found["law"].estimate.value == found["power_of_two"].estimate.value == 0
    assert found["growth_plain"].estimate.value == pytest.approx(1, abs=0.05)
    for name, wanted in {"lost": 0.21, "cost_bf16_two": 0.16, "cost_fp16_two": 0.021}.items():
        assert found[name].estimate.value == pytest.approx(wanted, rel=0.3), name


def test_updates_alone_times_ten_are_those_of_a_tenth_of_the_gap(settings: Params, tables: Tables) -> None:
    """So that this reading of the recipe is what two orders of magnitude cost, and counts there alone."""
    scaled, errors = exact.recipe_errors(settings), tables[1]
    for name in ("fp16", "bf16"):
        two = errors[(errors["format"] == name) & (errors["method"] == "plain") & (errors["ratio"] == 0.01)]
        only = scaled[scaled["format"] == name]["branch only"]
        assert only.tolist() == pytest.approx(two["error"].tolist(), rel=1e-3)


def test_tables_hold_the_worked_values(settings: Params) -> None:
    table, sums = exact.format_table(settings), exact.examples(settings)
    assert table["100 + 0.1"].to_dict()["fp16"] == 100.125
    assert table["ulp(100)"].tolist()[1:] == [0.0625, 0.5, 8.0, 16.0]
    assert sums["plain"].to_dict() == {"fp16": 112.0, "bf16": 100.0}
    assert sums["true sum"].tolist() == pytest.approx([109.6, 109.6])


def test_measured_share_follows_the_law(tables: Tables) -> None:
    curve = tables[0]
    assert float((curve["measured"] - curve["law"]).abs().max()) < 0.12  # 256 elements: four standard errors
    assert curve["measured"].between(0, 1).all()


# --- arms -----------------------------------------------------------------------------------------


def test_arms_are_paired_and_the_ordinary_one_is_shared(settings: Params, trained: Runs) -> None:
    arms = {arm.name: arm for arm in of_arms.arms(settings)}
    assert len(arms) == 13
    assert all([record.config.seed for record in records] == [0, 1] for records in trained.values())
    assert arms["ordinary fp32"].config == decoder_run(settings, settings.claims.fp16_swamping.ordinary_depth)
    kinds = {name: arm.config.model.connection.kind for name, arm in arms.items()}
    assert (kinds["100:0.1 Kahan"], kinds["100:0.1 stochastic"]) == ("kahan", "stochastic")


@pytest.mark.parametrize("arm", ["100:0.1 fp16", "100:0.1 Kahan", "100:0.1 stochastic"])
def test_a_second_run_is_equal_bit_for_bit(trained: Runs, arm: str) -> None:
    assert train(trained[arm][0].config) == trained[arm][0]


def test_low_precision_streams_are_not_compiled() -> None:
    """A compiler may leave out the rounding between two additions."""
    arms = of_arms.arms(params.load("gpu", {"device": {"compile": True}}))
    assert {arm.name for arm in arms if arm.config.device.compile} == {"ordinary fp32"}


def test_forced_models_have_the_forced_ratio(settings: Params, trained: Runs) -> None:
    ratios = inside.block_ratios(settings, trained).groupby("arm")["ratio"].mean()
    assert ratios["100:0.1 fp32"] == pytest.approx(1e-3, rel=0.2)
    assert ratios["100:1 fp32"] == pytest.approx(1e-2, rel=0.2)


# --- twins ----------------------------------------------------------------------------------------


def test_twins_differ_by_rounding_alone(settings: Params, trained: Runs) -> None:
    found = inside.twins(settings, trained)

    def mean(stream: str, measure: str, update: float = 0.1) -> float:
        chosen = found[(found["stream"] == stream) & (found["update"] == update)]
        return float(chosen[measure].mean())

    errors = {stream: mean(stream, "stream_error") for stream in of_arms.STREAMS}
    assert errors["fp32"] < 1e-3
    assert abs(mean("fp32", "loss_change")) < 1e-4
    assert mean("fp32", "gradient_cosine") == pytest.approx(1, abs=1e-5)
    assert errors["fp16"] < errors["bf16"]
    assert errors["Kahan"] < 0.3 < 0.8 < errors["bf16"]
    assert all(mean(stream, "stream_error", 1.0) < error for stream, error in errors.items())


def test_recipe_runs_the_same_weights_with_smaller_branches(settings: Params, trained: Runs) -> None:
    recipe = inside.recipe_losses(settings, trained)
    record = trained["100:1 fp32"][1]
    [row] = recipe[(recipe["format"] == "fp32") & (recipe["seed"] == 1)].to_dict("records")
    assert row["as trained"] == record.test_loss
    assert row["scaled back"] == row["scaled back, fp32"] != row["as trained"]
    model = trained_model(record.config)
    assert isinstance(record.config.model, DecoderConfig)
    for sublayer in model.get_submodule("stack").sublayers():  # type: ignore[operator]
        sublayer.connection.options = sublayer.connection.options.model_copy(update={"scale": 0.1})
    found = evaluate(record.config, data.load(record.config.task), model, "test")
    assert found is not None
    assert row["scaled back"] == pytest.approx(found[0])


# --- losses ---------------------------------------------------------------------------------------


def with_losses(trained: Runs, arm: str, *losses: float) -> None:
    """The runs of an arm, had they ended at these test losses."""
    pairs = zip(trained[arm], losses, strict=True)
    trained[arm] = [record.model_copy(update={"test_loss": loss}) for record, loss in pairs]


def test_what_branches_are_not_worth_no_format_can_cost(settings: Params, trained: Runs) -> None:
    """With FP32 they are worth 0.1 and 0.25 at 100:1; in the other kind 0.04 in one seed."""
    with_losses(trained, "embedding alone", 3.0, 3.0)
    with_losses(trained, "100:1 fp32", 2.9, 2.75)
    with_losses(trained, "100:1 fp16", 3.0, 2.95)
    with_losses(trained, "embedding times 100, :1 fp32", 2.96, 2.5)
    with_losses(trained, "embedding times 100, :1 bf16", 2.96, 2.5)
    found = {check.name: check.estimate.value for check in claim.checks_losses(settings, trained)}
    assert found["loss_cost_fp16"] == pytest.approx(0.15)
    assert found["spread_cost_bf16"] is None
    assert claim.worth(trained, "100:1 fp32") == pytest.approx([0.1, 0.25])
    kinds = claim.costs(settings, trained, "embedding times 100, :1 bf16", "embedding times 100, :1 fp32")
    assert (math.isnan(kinds[0]), kinds[1]) == (True, 0.0)
    table = claim.worth_table(settings, trained)
    assert table["seeds above 0.05"].tolist()[1:] == ["2 of 2", "1 of 2"]


def test_gradient_errors_are_told_by_size_and_stream(settings: Params, trained: Runs) -> None:
    twins = inside.twins(settings, trained)
    found = claim.gradient_errors(twins)
    assert len(found) == 2 * len(of_arms.STREAMS)
    chosen = twins[(twins["update"] == 0.1) & (twins["stream"] == "bf16")]["gradient_error"]
    assert found["updates of 0.1, bf16"].split()[0] == f"{chosen.mean():.3g}"


# --- runs that diverged ---------------------------------------------------------------------------

MEASURED = {
    "100:0.1 fp32": {"branches_matter", "branches_lost", "fp32_cures", "recipe_fp16", "recipe_bf16"}
    | {"trained_lost", "fp32_exact", "ratio_kept"},
    "100:0.1 fp16": {"branches_lost"},
    "100:0.1 bf16": {"fp32_cures", "recipe_gain"},
    "100:1 fp32": {"loss_cost_fp16", "loss_cost_bf16", "trained_cost_fp16", "trained_cost_bf16"},
    "100:1 bf16": {"loss_cost_bf16", "recipe_bf16", "recipe_gain"},
    "embedding alone": {"branches_matter", "branches_lost", "loss_cost_fp16", "loss_cost_bf16", "spread_cost_bf16"},
}
"""What cannot be known where a run of this arm diverged."""


@pytest.mark.parametrize("arm", MEASURED)
def test_diverged_run_leaves_its_checks_undecided(settings: Params, trained: Runs, arm: str) -> None:
    with_losses(trained, "embedding alone", 9.0, 9.0)
    trained[arm][0] = diverged(trained[arm][0])
    done = trained_checks(settings, trained)
    assert {check.name for check in done if check.estimate.value is None} == MEASURED[arm]
    assert all(check.outcome == "undecided" for check in done if check.estimate.value is None)


def test_ordinary_models_are_context(settings: Params, trained: Runs) -> None:
    """Two sublayers and seeds; a BF16 stream that ends a tenth of a nat higher."""
    for name, loss in {"ordinary fp32": 2.0, "ordinary bf16": 2.1}.items():
        trained[name] = [record.model_copy(update={"test_loss": loss}) for record in trained[name]]
    rows = [
        {"arm": arm, "seed": seed, "sublayer": at, "ratio": ratio}
        for arm, ratios in (("ordinary fp32", (0.01, 0.02, 0.06)), ("100:0.1 fp32", (0.001,)))
        for seed in (0, 1)
        for at, ratio in enumerate(ratios)
    ]
    found = [text.split()[0] for text in claim.ordinary(trained, pd.DataFrame(rows)).values()]
    assert found == ["0.01", "0.02", "0.1"]
    trained["ordinary fp32"][0] = diverged(trained["ordinary fp32"][0])
    lost = claim.ordinary(trained, inside.block_ratios(settings, trained)).values()
    assert {text.split(" in ")[0] for text in lost} == {"not measured"}


@pytest.mark.parametrize("arm", ["", "100:0.1 fp32", "100:1 bf16", "embedding alone", "ordinary fp32"])
def test_figure_is_drawn(settings: Params, tables: Tables, trained: Runs, arm: str) -> None:
    for at in range(2 if arm == "embedding alone" else 1 if arm else 0):
        trained[arm][at] = diverged(trained[arm][at])
    curve, errors, grown = tables
    recipe, ratios = inside.recipe_losses(settings, trained), inside.block_ratios(settings, trained)
    plt.close(figure.draw(settings, curve, errors, grown, trained, recipe, ratios))


def test_losses_beyond_the_axis_are_told_in_words(settings: Params, trained: Runs) -> None:
    """The recipe's columns lie nats above all else: the axis ends before them, with an arrow each."""
    with_losses(trained, "embedding alone", 3.0, 3.0)
    recipe = pd.DataFrame(
        {"format": ["fp16", "fp16", "bf16", "bf16"], "seed": [0, 1, 0, 1], "scaled back": [3.1, 4.5, 5.25, 5.0]}
    )
    for arm in of_arms.arms(settings)[:8]:
        with_losses(trained, arm.name, 2.9, 2.95)
    drawn, axes = plt.subplots()
    figure._draw_losses(axes, settings, trained, recipe)
    assert axes.get_ylim()[1] == pytest.approx(3.3)
    beyond = {text.get_text(): text.xy[0] for text in axes.texts if isinstance(text, Annotation)}
    assert sorted(beyond) == ["4.50", "5.00 to 5.25"]
    places = [place for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if label.get_text()]
    assert list(beyond.values()) == places[-2:]
    plt.close(drawn)


def test_one_seed_has_no_interval(settings: Params, trained: Runs) -> None:
    single = settings.model_copy(update={"seeds": (0,)})
    with_losses(trained, "embedding alone", 9.0, 9.0)
    alone = {name: records[:1] for name, records in trained.items()}
    done = trained_checks(single, alone)
    assert {check.outcome for check in done} == {"undecided"}
    assert all(check.estimate.value is not None and math.isfinite(check.estimate.value) for check in done)


# --- settings -------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"exact": {"ratios": []}}, "ratios must increase from above 0 and have 0.01, 0.1 and another"),
    ({"exact": {"ratios": [0.01, 0.1]}}, "ratios must increase from above 0 and have 0.01, 0.1 and another"),
    ({"exact": {"ratios": [0.001, 0.02, 0.1]}}, "ratios must increase from above 0 and have 0.01, 0.1 and another"),
    ({"exact": {"ratios": [0.01, 0.1, 1.0]}}, "exact.ratios must have update / stream, 0.001"),
    ({"update": 20.0}, "update 20 times factor 10 is no longer below the stream"),
    ({"stream": 2000.0}, "leaves the range of FP16; make it smaller"),
    ({"factor": 1.0}, "greater than 1"),
    ({"learning_rates": []}, "at least 1 item"),
    ({"depth": 1}, "greater than or equal to 2"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        params.load("smoke", {"claims": {SECTION: changed}})
