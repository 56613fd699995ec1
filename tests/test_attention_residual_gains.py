"""Claim 06's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from torch import nn

from records import diverged
from reslab import data, params, paths
from reslab.comparison import Runs
from reslab.experiments import attention_residual_gains as claim
from reslab.experiments import attention_residual_gains_arms as arms
from reslab.experiments import attention_residual_gains_exact as exact
from reslab.experiments import attention_residual_gains_figure as figure
from reslab.experiments import attention_residual_gains_inside as inside
from reslab.experiments.attention_residual_gains_inside import Inside
from reslab.experiments.runs import ENDS
from reslab.flops import forward_flops
from reslab.models.decoder import DecoderConfig
from reslab.params import Params
from reslab.probes import stacks
from reslab.residuals import ConnectionConfig
from reslab.schema import UserError
from reslab.training import build
from variants import decoder, tokens

Seen = dict[str, list[Inside | None]]


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}})


@pytest.fixture(scope="module")
def chosen(settings: Params) -> pd.DataFrame:
    """Rates as a sweep would give them, without the sweep."""
    hops, image = arms.other_arms(settings)
    names = [arm.name for arm in [*arms.text_arms(settings), *hops, *image]]
    return pd.DataFrame({"arm": names, "setting": "", "rate": 3e-3, "chosen": True})


@pytest.fixture(scope="module")
def looked(
    settings: Params, chosen: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Runs, Seen]]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        trained = claim.runs(settings, chosen)
        yield trained, claim.inside(settings, trained)


@pytest.fixture
def trained(looked: tuple[Runs, Seen]) -> Runs:
    """A copy that a test may change."""
    return {name: list(records) for name, records in looked[0].items()}


# --- the claim ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(settings: Params, looked: tuple[Runs, Seen]) -> None:
    initial, losses = exact.checks_initial(settings), claim.checks_loss(settings, looked[0])
    checks = [*initial, *losses, *claim.checks_inside(settings, looked[1])]
    assert sorted(check.name for check in checks) == sorted(claim.QUESTIONS)
    assert claim.KEY in claim.QUESTIONS
    assert all("{" not in check.statement for check in checks)
    found = {check.name: check for check in initial}
    for name in ("full_starts_as_standard", "block_starts_as_standard", "rescaled_is_held_full", "source_counts"):
        assert found[name].outcome == "holds"
    assert found["parameters_exact"].estimate.value == 0
    assert found["uniform_untrained"].outcome == "holds"
    assert len(claim.published(checks)) > 5


def test_every_sentence_has_a_check() -> None:
    asked = {question.sentence for question in claim.QUESTIONS.values()}
    assert asked == {"B3a", "B3b", "B3c", "B4", "B5", "B6", "B7c", "B7d"}


def test_the_eps_trap_is_as_large_as_published() -> None:
    """At the size of the shipped preset: some 30 % where all starts at 0.02 and eps is 1e-6, nothing at 1e-12."""
    cpu = params.preset("cpu")
    differences = {}
    for eps in (1e-6, 1e-12):
        shape = {"norm_eps": eps, **exact.GPT2}
        own, other = (exact.decoder_of(cpu, kind, **shape) for kind in (arms.full(), ConnectionConfig()))
        differences[eps] = exact.start_difference(own, other, seeds=1)
    assert differences[1e-6] == pytest.approx(0.3, abs=0.1)
    assert differences[1e-12] < 1e-5


def test_arms_are_paired_and_share_their_runs(settings: Params, looked: tuple[Runs, Seen]) -> None:
    trained = looked[0]
    assert all([record.config.seed for record in records] == [0, 1] for records in trained.values())
    middle = arms.at_depth("Full", settings.claims.attention_residual_gains.middle)
    assert trained["Full, fast queries"] == trained[middle]
    made = {arm.name: arm for arm in arms.text_arms(settings)}
    assert list(made[middle].candidates) == [
        "",
        "query rate 0.1",
        "embedding 0.02",
        "embedding 0.02, query rate 0.1",
    ]
    assert list(made["Peri-LN"].candidates) == [""]
    assert list(made[ENDS].candidates) == ["", "embedding 0.02"], "as Pre-LN's"


def test_equal_compute_is_equal() -> None:
    cpu = params.preset("cpu")
    made = {arm.name: arm.config for arm in arms.text_arms(cpu)}
    ours, theirs = made["Full, equal compute"], made[arms.at_depth("Pre-LN", 24)]
    assert isinstance(ours.model, DecoderConfig)
    assert isinstance(theirs.model, DecoderConfig)
    spent = forward_flops(ours.model) * ours.optimisation.steps
    assert spent == pytest.approx(forward_flops(theirs.model) * theirs.optimisation.steps, rel=0.005)
    assert ours.optimisation.steps < theirs.optimisation.steps


def test_estimates_from_losses_by_hand(settings: Params, trained: Runs) -> None:
    """Pre-LN at 2 and 3 blocks loses 1.0 and 1.5, Full 0.9 and 1.2; half the steps' loss is early."""
    for name, loss in {"Pre-LN, 2": 1.0, "Pre-LN, 3": 1.5, "Full, 2": 0.9, "Full, 3": 1.2}.items():
        records = trained[f"{name} blocks"]
        trained[f"{name} blocks"] = [record.model_copy(update={"test_loss": loss}) for record in records]
    for name, loss in {"Pre-LN, plain init": 2.0, "Full, plain init": 1.95}.items():
        trained[name] = [record.model_copy(update={"test_loss": loss}) for record in trained[name]]
    found = {check.name: check.estimate.value for check in claim.checks_loss(settings, trained)}
    assert found["full_gain"] == pytest.approx(0.3)
    assert found["shallow_full"] == pytest.approx(0.1)
    assert found["gain_grows"] == pytest.approx(0.2 / math.log2(1.5), rel=1e-5)
    assert found["adds_to_init"] == pytest.approx(0.1 - 0.05)
    record = trained["Full, 2 blocks"][0].model_copy(update={"train_loss": (4.0, 2.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0)})
    assert claim.early_loss([record]) == [3.0]


def test_what_blocks_are_worth_by_hand(settings: Params, trained: Runs) -> None:
    """Embedding and head alone lose 1.03, deep Pre-LN 1.0; their operations are those of the head."""
    with_losses(trained, ENDS, [1.03, 1.03])
    with_losses(trained, "Pre-LN, 3 blocks", [1.0, 1.0])
    found = {check.name: check for check in claim.checks_loss(settings, trained)}
    assert found["blocks_matter"].estimate.value == pytest.approx(0.03)
    assert (found["blocks_matter"].role, found["blocks_matter"].outcome) == ("control", "holds")
    losses = claim.losses_by_depth(settings, trained)
    assert list(losses.index) == [0, 2, 3]
    assert (losses.to_numpy()[0] == 1.03).all()
    assert losses.loc[3, "Pre-LN"] == 1.0
    rows = claim.compute(settings, trained).set_index("method")
    recipe = trained[ENDS][0].config.optimisation
    assert rows.loc[ENDS, "flops"] == 3 * 2 * 16 * data.VOCABULARY * 16 * recipe.steps * recipe.batch
    trained[ENDS][0] = diverged(trained[ENDS][0])
    lost = {check.name: check for check in claim.checks_loss(settings, trained)}
    assert lost["blocks_matter"].outcome == "undecided"
    assert np.isnan(claim.losses_by_depth(settings, trained).to_numpy()[0]).all()


def test_full_is_held_against_peers_at_their_depths(settings: Params, trained: Runs) -> None:
    """At smoke scale DenseFormer and mHC have two blocks, static weights three."""
    for name, losses in {
        "Full, 2 blocks": [1.0, 2.0],
        "Full, 3 blocks": [5.0, 5.0],
        "DenseFormer, 2 blocks": [1.1, 2.1],
        "mHC, 2 blocks": [0.9, 1.8],
        "static, 3 blocks": [5.5, 5.5],
    }.items():
        with_losses(trained, name, losses)
    found = claim.gains(settings, trained)
    assert found["full_over_denseformer"] == pytest.approx([0.1, 0.1])
    assert found["full_over_mhc"] == pytest.approx([-0.1, -0.2])
    assert found["full_over_static"] == pytest.approx([0.5, 0.5])


def with_losses(trained: Runs, name: str, losses: list[float], measure: str = "test_loss") -> None:
    pairs = zip(trained[name], losses, strict=True)
    trained[name] = [record.model_copy(update={measure: loss}) for record, loss in pairs]


def test_nothing_is_gained_where_both_reach_the_ceiling(settings: Params, trained: Runs) -> None:
    for name, losses in {"Pre-LN": [0.03, 0.5], "Full": [0.01, 0.2], "Block": [0.02, 0.3]}.items():
        with_losses(trained, f"{name}, hops", losses)
    for name, reached in {"Pre-LN": [0.995, 0.8], "Full": [1.0, 0.9], "Block": [0.98, 0.9]}.items():
        with_losses(trained, f"{name}, hops", reached, "test_accuracy")
    found = claim.gains(settings, trained)
    assert math.isnan(found["hops_full"][0])
    assert found["hops_full"][1] == pytest.approx(0.3)
    assert found["hops_block"] == pytest.approx([0.01, 0.2])
    checks = {check.name: check for check in claim.checks_loss(settings, trained)}
    assert (checks["hops_full"].estimate.value, checks["hops_full"].outcome) == (None, "undecided")
    assert checks["hops_block"].estimate.value == pytest.approx(0.105)
    assert math.isnan(claim.power(settings, trained)["detectable"]["hops_full"])


@pytest.mark.parametrize("sign", [1, -1])
def test_rate_of_the_queries_matters_whichever_way(settings: Params, trained: Runs, sign: int) -> None:
    slow = trained["Full, slow queries"]
    length = len(slow[0].train_loss)
    with_losses(trained, "Full, slow queries", [2.0, 2.0])
    with_losses(trained, "Full, fast queries", [2.0 + sign * 0.08, 2.0 + sign * 0.12])
    for name, early in {"slow": 3.0, "fast": 3.0 + sign * 0.2}.items():
        curve = {"train_loss": (early,) * length}
        trained[f"Full, {name} queries"] = [
            record.model_copy(update=curve) for record in trained[f"Full, {name} queries"]
        ]
    found = {check.name: check for check in claim.checks_loss(settings, trained)}
    assert found["fast_queries"].estimate.value == pytest.approx(0.1)
    assert found["fast_queries_early"].estimate.value == pytest.approx(0.2)
    assert found["fast_queries_early"].outcome == "holds"
    with_losses(trained, "Full, fast queries", [2.0 + sign * 0.01, 2.0 + sign * 0.011])
    again = {check.name: check for check in claim.checks_loss(settings, trained)}
    assert again["fast_queries"].outcome == "fails"


def test_identities_of_the_implementation_are_no_evidence() -> None:
    identities = ("full_starts", "block_starts", "rescaled_is", "source_counts", "parameters_exact")
    asked = {name: question.role for name, question in claim.QUESTIONS.items() if name.startswith(identities)}
    assert list(asked.values()) == ["control"] * 5


@pytest.mark.parametrize(
    ("arm", "lost"),
    [
        ("Pre-LN, 3 blocks", ["full_gain", "block_gain", "gain_grows", "equal_compute_gain"]),
        ("Full, 2 blocks", ["shallow_full", "gain_grows", "adds_to_init", "adds_to_norm", "key_norm"]),
        ("Full, digits", ["digits_full"]),
        ("Full, random queries", ["random_queries", "random_queries_early"]),
    ],
)
def test_diverged_run_is_an_outcome(settings: Params, trained: Runs, arm: str, lost: list[str]) -> None:
    trained[arm][0] = diverged(trained[arm][0])
    found = {check.name: check for check in claim.checks_loss(settings, trained)}
    for name in lost:
        assert found[name].estimate.value is None
        assert found[name].outcome == "undecided"
    assert math.isnan(claim.power(settings, trained)["detectable"].get(lost[0], math.nan))


def test_diverged_article_is_counted(settings: Params, trained: Runs) -> None:
    name = arms.at_depth("article's form", settings.claims.attention_residual_gains.peers.article)
    outcomes = {0: "trained", 1: "stalled", 2: "diverged"}
    for bad, outcome in outcomes.items():
        first = trained[name][0].model_copy(update={"outcome": outcome})
        second = trained[name][1].model_copy(update={"outcome": "trained"})
        trained[name] = [diverged(first) if bad == 2 else first, second]
        found = {check.name: check for check in claim.checks_loss(settings, trained)}
        assert found["article_trains"].estimate.value == min(bad, 1)


def test_what_a_diverged_model_is_like_inside_is_not_measured(settings: Params, trained: Runs) -> None:
    name = arms.at_depth("Full", 3)
    trained[name][1] = diverged(trained[name][1])
    seen = claim.inside(settings, trained)
    assert seen["Full"][1] is None
    found = {check.name: check for check in claim.checks_inside(settings, seen)}
    assert found["embedding_kept"].outcome == "undecided"
    assert found["embedding_kept"].estimate.value is None
    assert found["magnitude_block"].estimate.value is not None


def test_runs_are_drawn_also_when_some_or_all_diverged(settings: Params, trained: Runs) -> None:
    plt.close(figure.draw(settings, trained, claim.inside(settings, trained)))
    for name in ("Full, 3 blocks", "mHC, 2 blocks", "Pre-LN, hops"):
        trained[name] = [diverged(record) for record in trained[name]]
    plt.close(figure.draw(settings, trained, claim.inside(settings, trained)))


def test_summary_is_plain_json(settings: Params, trained: Runs, chosen: pd.DataFrame) -> None:
    trained["Full, digits"][0] = diverged(trained["Full, digits"][0])
    found = claim.summary(settings, chosen, trained)
    smallest = found["smallest detectable gain"]
    assert isinstance(smallest, dict)
    assert smallest["digits_full"] is None
    assert smallest["full_gain"] > 0
    table = claim.compute(settings, trained)
    assert (table.loc[table["method"].isin(["Full", "Block"]), "relative_cost"] > 1).all()


def test_one_seed_is_undecided(settings: Params, trained: Runs) -> None:
    assert params.load("smoke", {"seeds": [0]}).seeds == (0,)
    found = claim.checks_loss(settings, {name: records[:1] for name, records in trained.items()})
    assert {check.outcome for check in found if check.name != "article_trains"} == {"undecided"}


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"depths": [3]}, "depths must be at least two, increasing from at least 2"),
        ({"depths": []}, "depths must be at least two"),
        ({"depths": [3, 2]}, "depths must be at least two, increasing"),
        ({"middle": 5}, "middle 5 is none of the depths"),
        ({"peers": {"mhc": 7}}, "peers.mhc 7 is none of the depths"),
        ({"block": 5}, "block 5 is larger than the 4 sublayers at 2 blocks"),
        ({"query_rates": [0.1, 1.0]}, "query_rates must be two, the higher first"),
        ({"learning_rates": []}, "learning_rates"),
        ({"image": {"heads": 3}}, "width 8 is not divisible by heads 3"),
        ({"hops": {"steps": 1}}, "hops.steps"),
        ({"hops": {"ceiling": 1.5}}, "hops.ceiling"),
        ({"peers": {"resnet": 2}}, "unknown parameter"),
    ],
)
def test_bad_settings_are_refused_by_sentence(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        params.load("smoke", {"claims": {"attention_residual_gains": changed}})


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match="steps"):
        params.load("smoke", {"optimisation": {"steps": 3}})


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_arms_of_every_scale_can_be_built(scale: str) -> None:
    preset = params.preset(scale)
    hops, image = arms.other_arms(preset)
    names = [arm.name for arm in [*arms.text_arms(preset), *hops, *image]]
    assert len(set(names)) == len(names)
    assert set(arms.looked_into(preset)) <= set(names)


# --- what a model is like inside -------------------------------------------------------------------


def example(weights: Any = None) -> Inside:
    return Inside([1.0, 2.0, 2.0, 3.0, 5.0], [1.0, 4.0], 0.5, weights)


def test_measures_by_hand() -> None:
    nan = math.nan
    weights = np.array(
        [
            [1.0, nan, nan, nan, nan],
            [0.4, 0.6, nan, nan, nan],
            [1 / 3, 1 / 3, 1 / 3, nan, nan],
            [0.25, 0.25, 0.0, 0.5, nan],
            [0.2, 0.2, 0.2, 0.2, 0.2],
        ]
    )
    one = example(weights)
    assert one.growth() == 2.5
    assert one.unevenness() == 1
    assert one.newest() == pytest.approx((1.2 + 1 + 2) / 3)
    assert one.embedding_late() == pytest.approx(1)  # the last of four sublayers
    entropy = [-0.4 * math.log(0.4) - 0.6 * math.log(0.6), 1.5 * math.log(2)]
    sharp = [1 - entropy[0] / math.log(2), 1 - entropy[1] / math.log(4)]
    assert one.mlp_sharper() == pytest.approx(np.mean(sharp))
    across = (0.1 + 1 / 3) / 2  # (0.4, 0.6) from halves; thirds from (1/2, 1/2, 0)
    assert one.kinds_apart() == pytest.approx(across - 0.1)
    assert math.isnan(inside.column([None], Inside.growth)[0])


def test_gradients_are_those_of_each_blocks_weights() -> None:
    model = decoder("attnres block")
    inputs = tokens()
    (stack,) = stacks(model)
    found = inside.block_gradients(model, stack, inputs, inputs)
    nn.functional.cross_entropy(model(inputs).flatten(0, -2), inputs.flatten()).backward()
    for block, norm in zip(stack.blocks, found, strict=True):
        names = {n: p for n, p in block.named_parameters() if ".branch." in n and p.grad is not None}
        assert len(names) == 4
        squares = [float(p.grad.double().square().sum()) for p in names.values() if p.grad is not None]
        assert norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)


def test_untrained_full_and_standard_are_read_off_alike(settings: Params) -> None:
    """Their reads differ by a factor alone, and features are normed: the control of what is read off."""
    runs = [arm.config for arm in arms.text_arms(settings)[:2]]
    task = data.load(runs[0].task)
    assert isinstance(task, data.Text)
    standard, full = (inside.look(build(run.model, 0), task) for run in runs)
    assert full.decodability == pytest.approx(standard.decodability, abs=0.02)
    assert standard.weights is None
    assert full.magnitudes[1] < standard.magnitudes[1]


def test_decodability_by_hand() -> None:
    classes = np.array([0, 1, 2] * 10)
    features = np.eye(3)[classes]
    assert inside.decodability((features, classes), (features, classes)) == 1
    assert inside.decodability((features, classes), (features, (classes + 1) % 3)) == 0
