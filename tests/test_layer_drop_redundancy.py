"""Claim 05's checks, on models that were trained and on runs that diverged; its measures by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

from records import diverged
from reslab import data, params, paths
from reslab.claims import Check
from reslab.comparison import Arm, RateSweep, Runs
from reslab.experiments import layer_drop_costs as costs
from reslab.experiments import layer_drop_measured as measured
from reslab.experiments import layer_drop_redundancy as claim
from reslab.experiments import layer_drop_redundancy_figure as figure
from reslab.experiments.layer_drop_measured import BY_INFLUENCE, BY_LOSS, Healed, Measured
from reslab.experiments.runs import ENDS, decoder_run, ends_run, hops_run
from reslab.params import Params
from reslab.schema import UserError
from reslab.sweep import Execution, run_all, trained_model
from reslab.training import RunConfig, RunRecord, evaluate, train_model

ALONE = Execution(workers=1)


class Experiment(NamedTuple):
    trained: Runs
    found: claim.Models
    untrained: list[Measured]
    healed: dict[str, list[Healed]]


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale with fewer steps, trained in this process."""
    section = {"text": {"steps": 8}, "hops": {"steps": 8}, "healing_steps": 2}
    return params.load("smoke", {"execution": {"workers": 1}, "claims": {"layer_drop_redundancy": section}})


@pytest.fixture(scope="module")
def initial(settings: Params) -> pd.DataFrame:
    return claim.initial_influences(settings)


@pytest.fixture(scope="module")
def done(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    names = [*(arm.name for arm in [*claim.text_arms(settings), *claim.hops_arms(settings)]), claim.SAME_RATE]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        trained = claim.runs(settings, pd.DataFrame({"arm": names, "setting": "", "rate": 1e-2, "chosen": True}))
        found = claim.models(settings, trained)
        healed = claim.healed(settings, trained, found)
        return Experiment(trained, found, claim.untrained_models(settings, trained), healed)


def trained_checks(settings: Params, run: Experiment) -> list[Check]:
    return [
        *claim.checks_controls(settings, run.trained, run.found),
        *claim.checks_quarter(settings, run.found, run.healed),
        *claim.checks_late(settings, run.found, run.untrained),
        *claim.checks_depth_attention(settings, run.found),
    ]


# --- the claim ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(settings: Params, initial: pd.DataFrame, done: Experiment) -> None:
    exact = claim.checks_initial(settings, initial)
    checks = [*exact, *trained_checks(settings, done)]
    assert sorted(check.name for check in checks) == sorted(claim.QUESTIONS)
    assert claim.KEY in claim.QUESTIONS
    assert next(check for check in exact if check.name == "same_at_start").outcome == "holds"
    assert len(claim.published(checks)) == 3
    assert all("{" not in check.statement for check in checks)


def test_influence_at_the_start_is_as_predicted() -> None:
    """At the size of the cpu preset, without the check that needs no seeds."""
    settings = params.preset("cpu")
    initial = claim.initial_influences(settings)
    sums = initial.groupby("seed")[["measured", "predicted"]].sum()
    assert (sums["measured"] / sums["predicted"]).mean() == pytest.approx(1, abs=0.1)
    by_block = initial.groupby("block")["measured"].mean()
    assert by_block[12:].sum() < 0.5 * by_block[:4].sum()


def test_arms_share_their_seeds_and_the_common_baseline(settings: Params, done: Experiment) -> None:
    assert all([record.config.seed for record in records] == [0, 1] for records in done.trained.values())
    cpu = params.preset("cpu")
    section = cpu.claims.layer_drop_redundancy
    [shared] = [arm for arm in claim.text_arms(cpu) if arm.name == "text: add"]
    assert shared.config == decoder_run(cpu, section.text.depth)
    assert shared.rates == cpu.claims.no_residual_collapse.learning_rates


def test_standard_model_is_also_trained_at_fulls_rate(settings: Params, done: Experiment) -> None:
    """Also where the standard model did not try it; at a rate that both chose these are the same runs."""
    rates = {claim.text_name("add"): [1e-3, 3e-3], claim.text_name("Full"): [3e-3, 1e-2]}
    rows = [(arm, rate, rate == max(tried)) for arm, tried in rates.items() for rate in tried]
    arm = claim.same_rate_arm(settings, pd.DataFrame(rows, columns=["arm", "rate", "chosen"]))
    assert arm.rates == (1e-2,)
    [add] = [arm for arm in claim.text_arms(settings) if arm.name == "text: add"]
    assert arm.config == add.config
    assert done.trained[claim.SAME_RATE] == done.trained["text: add"]


def test_rates_of_text_take_half_the_steps_of_its_runs(settings: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: dict[str, int] = {}

    def noted(arms: Sequence[Arm], sweep: RateSweep, execution: Execution) -> pd.DataFrame:
        lengths.update({arm.name: sweep.steps for arm in arms})
        return pd.DataFrame({"arm": [arm.name for arm in arms], "rate": 1e-2, "chosen": True})

    monkeypatch.setattr(claim, "choose_rates", noted)
    assert set(claim.rates(settings)["arm"]) == {*(n for n in lengths)}
    assert lengths[claim.SAME_RATE] == lengths["text: add"] == 4
    assert lengths["hops: add"] == settings.claims.layer_drop_redundancy.hops.sweep_steps
    cpu = params.preset("cpu")
    claim.rates(cpu)
    assert lengths["text: add"] == cpu.sweep.steps


def test_shares_on_text_are_of_what_the_blocks_gained(settings: Params, done: Experiment) -> None:
    """Over embedding and head alone, on the windows that judge dropped blocks; at pointer chasing over a guess."""
    text, hops = (done.found[name] for name in (claim.SAME_RATE, "hops: add"))
    assert done.trained[claim.text_name(ENDS)][0].config.model == ends_run(settings).model
    losses = [one.ends_before for one in done.healed["add"]]
    assert [model.worth for model in text] == [loss - model.loss for loss, model in zip(losses, text, strict=True)]
    assert [model.worth for model in hops] == [model.gain for model in hops]
    one = measured.above_the_ends([model_of((0.2,) * 4, validation_loss=(0.02, 0.6))], [1.5])[0]
    assert one.shares(BY_LOSS) == pytest.approx([0.04, 1.2])
    below = measured.above_the_ends([one], [0.9])
    assert all(map(math.isnan, below[0].shares(BY_LOSS))), "blocks that gained nothing must not look robust"
    assert math.isnan(costs.mean_cost(below)[0])


def test_control_asks_whether_blocks_beat_embedding_and_head(settings: Params, done: Experiment) -> None:
    trained = dict(done.trained)
    for worth, outcome in ((0.021, "holds"), (0.019, "fails")):
        for name, loss in {"text: add": 2.0, claim.text_name(ENDS): 2.0 + worth}.items():
            trained[name] = [record.model_copy(update={"test_loss": loss}) for record in trained[name]]
        checks = {check.name: check for check in claim.checks_controls(settings, trained, done.found)}
        assert (checks["blocks_text"].role, checks["blocks_text"].outcome) == ("control", outcome)


def test_record_has_the_influence_of_each_block(settings: Params, done: Experiment) -> None:
    names = [*done.trained]
    chosen = pd.DataFrame({"arm": names, "setting": "", "rate": 1e-2, "chosen": True})
    lost = with_diverged(settings, done, "text: Full")
    by_method = claim.summary(settings, chosen, done.trained, lost.found)["Block Influence on text"]
    assert isinstance(by_method, dict)
    assert list(by_method) == ["add", "Full", "Block", "LayerScale 0.1"]
    assert by_method["Full"] == [None] * 4
    models = done.found["text: add"]
    assert by_method["add"] == pytest.approx([sum(m.influence[b] for m in models) / 2 for b in range(4)], rel=1e-5)
    assert "NaN" not in json.dumps(by_method)


def with_diverged(settings: Params, run: Experiment, arm: str) -> Experiment:
    """The experiment in which the first run of this arm diverged."""
    section = settings.claims.layer_drop_redundancy
    record, most = diverged(run.trained[arm][0]), len(run.found[arm][0].curves[BY_LOSS])
    kinds = [name for name in run.found[arm][0].curves if not name.startswith("random")]
    [lost] = measured.measure_all([record], section.text.look, ALONE, kinds=kinds, most=most)
    healed = dict(run.healed)
    if (method := arm.removeprefix("text: ")) in healed:
        ends = run.trained[claim.text_name(ENDS)][:1]
        healed[method] = [*measured.heal_all([record], [lost], ends, section.text.look, 2, ALONE), *healed[method][1:]]
    trained = run.trained | {arm: [record, *run.trained[arm][1:]]}
    return run._replace(trained=trained, found=run.found | {arm: [lost, *run.found[arm][1:]]}, healed=healed)


@pytest.mark.parametrize("arm", ["text: add", "text: Full", "hops: add", "text: add, 5 blocks"])
def test_diverged_run_is_not_dropped_silently(
    settings: Params, initial: pd.DataFrame, done: Experiment, arm: str
) -> None:
    lost = with_diverged(settings, done, arm)
    checks = {check.name: check for check in trained_checks(settings, lost)}
    touched = {
        "text: add": [
            "gain_text",
            "blocks_text",
            "quarter_text",
            "deeper",
            "healed_text",
            "late_cost_text",
            "fewer_text_full",
        ],
        "text: Full": ["gain_text", "fewer_text_full", "free_text", "independent_text", "more_independent_text"],
        "hops: add": ["gain_hops", "shallow_hops", "quarter_hops_influence", "late_cost_hops", "free_hops"],
        "text: add, 5 blocks": ["gain_text", "quarter_deep", "deeper", "late_cost_deep"],
    }[arm]
    for name in touched:
        assert checks[name].estimate.value is None, name
        assert checks[name].outcome == "undecided"
    plt.close(figure.draw(settings, initial, lost.found, lost.untrained, lost.healed))
    assert "not measured" in costs.cost_table(lost.found)["mean"].loc[arm].iloc[0]


def test_one_seed_is_undecided(settings: Params, done: Experiment) -> None:
    one = Experiment(
        {name: records[:1] for name, records in done.trained.items()},
        {name: models[:1] for name, models in done.found.items()},
        done.untrained[:1],
        {name: models[:1] for name, models in done.healed.items()},
    )
    assert {check.outcome for check in trained_checks(settings, one)} == {"undecided"}
    assert claim.power_table(settings, one.found)["smallest detectable difference"].isna().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": {"depth": 3}}, "text.depth: input should be greater than or equal to 4"),
        ({"text": {"deep": 4}}, "deep 4 is no deeper than depth 4; make it larger"),
        ({"text": {"learning_rates": []}}, "text.learning_rates"),
        ({"text": {"look": {"random_orders": 0}}}, "random_orders"),
        ({"hops": {"shallow": [4]}}, "shallow must increase from at least 1 to less than depth 4, got [4]"),
        ({"hops": {"shallow": [2, 1]}}, "shallow must increase"),
        ({"hops": {"hops": 1}}, "hops.hops: input should be greater than or equal to 2"),
        ({"block": 9}, "block 9 is larger than the 8 sublayers; make it smaller"),
        ({"free": 1.0}, "free"),
    ],
)
def test_refused_settings(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        params.load("smoke", {"claims": {"layer_drop_redundancy": changed}})
    assert message in str(refused.value)


def test_hops_run_has_the_tasks_vocabulary_and_context(settings: Params) -> None:
    config = hops_run(settings, 3, hops=2, steps=5, batch=7, width=32)
    assert (config.model.depth, config.optimisation.steps, config.optimisation.batch) == (3, 5, 7)
    assert config.task == data.HopsConfig(hops=2)
    assert config.model.model_dump()["vocabulary"] == 12
    assert (config.model.model_dump()["context"], config.model.model_dump()["width"]) == (16, 32)


# --- measures by hand -----------------------------------------------------------------------------


def model_of(single: tuple[float, ...], gain: float = 2.0, **curves: tuple[float, ...]) -> Measured:
    named = {name.replace("_", " "): curve for name, curve in curves.items()}
    dropped = {name: tuple(tuple(range(n + 1)) for n in range(len(curve))) for name, curve in named.items()}
    return Measured(1.0, gain, gain, (0.4, 0.2, 0.1, 0.05), (0.0,) * 4, single, named, dropped)


def test_interaction_is_the_part_of_the_joint_cost_that_single_costs_do_not_explain() -> None:
    """Of eight blocks a quarter is two; the random sets are {0, 1} twice."""
    single = (0.1, 0.2, *(0.0,) * 6)
    model = model_of(single, random_0=(0.1, 0.5), random_1=(0.1, 0.7))
    assert model.interaction == pytest.approx(1 - 2 * 0.3 / 1.2)
    independent = model_of(single, random_0=(0.1, 0.3))
    assert independent.interaction == pytest.approx(0)
    assert model.random_curve() == pytest.approx([0.1, 0.6])


def test_costs_are_shares_of_the_gain() -> None:
    model = model_of((0.2,) * 4, validation_loss=(0.02, 0.6))
    assert model.shares(BY_LOSS) == pytest.approx([0.01, 0.3])
    assert costs.quarter_cost([model], BY_LOSS) == pytest.approx([0.01])
    assert costs.mean_cost([model]) == pytest.approx([0.155])
    nothing = model_of((0.2,) * 4, gain=-0.1, validation_loss=(-0.1, 0.6))
    assert all(map(math.isnan, nothing.shares(BY_LOSS))), "what learned nothing must not look robust"


def followed(*greedy: float) -> Measured:
    """A model whose blocks cost so much (of a gain of 2) as they go one after the other."""
    return replace(model_of((0.0,) * 4), greedy=greedy)


def test_free_blocks_are_the_most_that_cost_little() -> None:
    models = [followed(0.01, 0.5, 0.6), followed(0.01, 0.5, 0.03), followed(0.1, 0.5, 0.6)]
    assert costs.free_blocks(models, 0.02) == [1, 3, 0]
    assert math.isnan(costs.free_blocks([replace(models[0], worth=math.nan)], 0.02)[0])


def test_free_blocks_of_two_methods_differ_unseen_where_both_reach_the_end() -> None:
    all_free, one_free, none_free = followed(0.0, 0.0, 0.0), followed(0.0, 0.5, 0.5), followed(0.5, 0.5, 0.5)
    ours, theirs = costs.free_pair([one_free, all_free, none_free], [all_free, all_free, none_free], 0.02)
    assert (ours[0], theirs[0]) == (1, 3)
    assert math.isnan(ours[1])
    assert math.isnan(theirs[1])
    assert (ours[2], theirs[2]) == (0, 0)


def test_comparison_of_two_that_lose_all_blocks_free_of_charge_has_no_value(settings: Params, done: Experiment) -> None:
    unhurt = {
        name: [replace(model, worth=1.0, greedy=(0.0,) * 3) for model in models] for name, models in done.found.items()
    }
    checks = {check.name: check for check in claim.checks_depth_attention(settings, unhurt)}
    smallest = claim.power_table(settings, unhurt)["smallest detectable difference"]
    for name in ("free_text", "free_text_same_rate", "free_hops"):
        assert checks[name].outcome == "undecided"
        assert checks[name].estimate.value is None
        assert math.isnan(smallest[name])


def test_fewer_blocks_are_judged_like_dropped_ones(settings: Params, done: Experiment) -> None:
    """On text half of them lose a fifth of the gain over embedding and head, at pointer chasing one a tenth of its."""
    trained = dict(done.trained)
    losses = {"text: add": 2.0, "text: add, 2 blocks": 2.1, claim.text_name(ENDS): 2.5}
    for name, loss in (losses | {"hops: add": 2.0, "hops: add, 1 block": 2.1}).items():
        changed = {"test_loss": loss, "context_free_loss": 3.0}
        trained[name] = [record.model_copy(update=changed) for record in trained[name]]
    table = claim.fewer_blocks(settings, trained)[claim.SHARE]
    assert table["text: add", "text: add, 2 blocks"].startswith("0.2 [0.2, 0.2]")
    assert table["hops: add", "hops: add, 1 block"].startswith("0.1 [0.1, 0.1]")
    trained["text: add"] = [diverged(record) for record in trained["text: add"]]
    assert "not measured" in claim.fewer_blocks(settings, trained)[claim.SHARE].iloc[0]


def test_slopes_are_over_the_whole_depth() -> None:
    falling = model_of((0.8, 0.6, 0.4, 0.2))
    assert costs.cost_slopes([falling]) == pytest.approx([-0.3])
    peak_first = model_of((2.0, 0.2, 0.4, 0.6))
    assert costs.cost_slopes([peak_first])[0] < 0
    assert costs.cost_slopes([peak_first], ends=1) == pytest.approx([0.1 / (1 / 3)])
    assert costs.influence_slopes([falling]) == pytest.approx([3 * math.log(0.5)])


def test_healing_is_judged_against_the_whole_model_trained_on() -> None:
    """And against embedding and head alone, trained on, too."""
    healed = Healed(2.0, 2.5, whole_after=1.9, dropped_after=2.0, ends_before=3.0, ends_after=2.7)
    assert healed.cost(healed=False) == pytest.approx(0.5)
    assert healed.cost(healed=True) == pytest.approx(0.1 / 0.8)
    assert math.isnan(replace(healed, ends_after=1.8).cost(healed=True)), "blocks that gained nothing cannot lose it"


# --- models with blocks dropped -------------------------------------------------------------------


def test_part_has_evenly_spaced_examples_and_later_batches(tiny: RunConfig) -> None:
    task = data.load(tiny.task)
    part = measured.Part(task, 5, first_step=3)
    inputs = torch.cat([batch for batch, _ in task.held_out("test") if isinstance(batch, torch.Tensor)])
    chosen = torch.cat([batch for batch, _ in part.held_out("test") if isinstance(batch, torch.Tensor)])
    step = (len(inputs) - 1) / 4
    assert torch.equal(chosen, inputs[[round(i * step) for i in range(5)]])
    assert torch.equal(part.batch(0, 2, 4)[1], task.batch(0, 5, 4)[1])
    for split in get_args(data.Split):
        assert measured.Part(task, 10**6).context_free_loss(split) == pytest.approx(task.context_free_loss(split))


@pytest.fixture
def small(tiny: RunConfig, runs: Any) -> RunRecord:
    """A run of four blocks whose weights are kept."""
    config = tiny.model_copy(update={"model": tiny.model.model_copy(update={"depth": 4})})
    return run_all([config], ALONE, "training", weights=True)[0]


LOOK = measured.Look(choosing=8, judging=20, random_orders=1)


def test_measured_losses_are_those_of_the_model_without_these_blocks(small: RunRecord) -> None:
    [found] = measured.measure_all([small], LOOK, ALONE, most=2)
    model = train_model(small.config)[1]
    part = measured.Part(data.load(small.config.task), LOOK.judging)
    whole = evaluate(small.config, part, model, "test")
    assert whole is not None
    assert found.loss == whole[0]
    assert found.gain == found.worth == pytest.approx(part.context_free_loss("test") - found.loss)
    assert measured.whole_losses([small, diverged(small)], LOOK, ALONE) == pytest.approx(
        [whole[0], math.nan], nan_ok=True
    )
    [further] = measured.measure_all([small], LOOK, ALONE, most=2, to_the_last=True)
    assert replace(further, greedy=found.greedy) == found
    assert further.greedy[:2] == found.greedy == found.curves[BY_LOSS]
    assert len(further.greedy) == 3
    for order, sets in found.dropped.items():
        assert [len(blocks) for blocks in sets] == [1, 2]
        assert found.curves[order][0] == found.single[sets[0][0]]
    held = torch.nn.ModuleList(model.get_submodule("stack.blocks").children())
    keep = [held[i] for i in range(4) if i not in found.dropped[BY_INFLUENCE][1]]
    model.get_submodule("stack").blocks = torch.nn.ModuleList(keep)
    less = evaluate(small.config, part, model, "test")
    assert less is not None
    assert found.curves[BY_INFLUENCE][1] == pytest.approx(less[0] - found.loss, abs=1e-9)


def test_measuring_and_healing_give_the_same_numbers_again_and_leave_the_run_alone(small: RunRecord) -> None:
    before = trained_model(small.config).state_dict()
    first, second = (measured.measure_all([small], LOOK, ALONE, most=2) for _ in range(2))
    assert first == second
    one, other = (measured.heal_all([small], first, [small], LOOK, 3, ALONE)[0] for _ in range(2))
    assert one == other
    assert (one.ends_before, one.ends_after) == (one.whole_before, one.whole_after), "here the same run stands for both"
    assert one.whole_before == first[0].loss
    assert one.dropped_before == pytest.approx(first[0].loss + first[0].curves[BY_INFLUENCE][0])
    assert one.whole_after != one.whole_before
    assert one.dropped_after != one.dropped_before
    after = trained_model(small.config).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
