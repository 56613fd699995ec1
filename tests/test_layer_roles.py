"""Claim 12's checks, on models that were trained and on runs that diverged; its measures by hand."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from records import diverged
from reslab import data, params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import layer_drop_redundancy, no_residual_collapse
from reslab.experiments import layer_roles as claim
from reslab.experiments import layer_roles_figure as figure
from reslab.experiments import layer_roles_seen as seen
from reslab.experiments.layer_drop_measured import Part
from reslab.models.decoder import Decoder
from reslab.params import Params
from reslab.schema import UserError
from reslab.surgery import skipped, swapped
from reslab.sweep import trained_model
from reslab.training import build, evaluate


class Experiment(NamedTuple):
    trained: Runs
    found: claim.Models
    before: claim.Models


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale with fewer steps, trained in this process."""
    section = {
        "text": {"steps": 8},
        "shallow": {"steps": 8},
        "hops": {"steps": 8},
        "look": {"windows": 8, "judging": 8},
    }
    return params.load("smoke", {"execution": {"workers": 1}, "claims": {"layer_roles": section}})


@pytest.fixture(scope="module")
def done(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    table = pd.DataFrame({"arm": [arm.name for arm in claim.arms(settings)], "setting": "", "rate": 1e-2})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        trained = claim.runs(settings, table.assign(chosen=True))
        found = claim.models(settings, trained)
        check_surgery(trained, found)
        return Experiment(trained, found, claim.models(settings, trained, after=False))


def check_surgery(trained: Runs, found: claim.Models) -> None:
    """What was measured are the losses of models without these blocks or with others in their place."""
    record, model = trained["text: add"][0], found["text: add"][0]
    part, decoder = Part(data.load(record.config.task), 8), trained_model(record.config)

    def loss() -> float:
        measured = evaluate(record.config, part, decoder, "test")
        assert measured is not None
        return measured[0]

    whole = loss()
    assert model.gain == pytest.approx(part.context_free_loss("test") - whole)
    blocks = decoder.get_submodule("stack.blocks")
    assert isinstance(blocks, torch.nn.ModuleList)
    with skipped(blocks, 2):
        assert model.skip[2] == pytest.approx(loss() - whole)
    with swapped(blocks, 1, 3):
        assert model.far[1] == pytest.approx(loss() - whole)
    with swapped(blocks, 0, 1):
        assert model.neighbours[0] == pytest.approx(loss() - whole)


def trained_checks(settings: Params, run: Experiment) -> list[Check]:
    return [
        *claim.checks_controls(settings, run.found, run.before),
        *claim.checks_roles(settings, run.found, run.before),
        *claim.checks_space(settings, run.found),
        *claim.checks_only(settings, run.found),
    ]


# --- the claim ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(settings: Params, done: Experiment) -> None:
    exact = claim.checks_initial(settings, claim.initial_changes(settings))
    checks = [*exact, *trained_checks(settings, done)]
    assert sorted(check.name for check in checks) == sorted(claim.QUESTIONS)
    assert claim.KEY in claim.QUESTIONS
    sources = [row.source for row in claim.published(checks)]
    assert [source for source in sources if "second-hand" in source] == [sources[0]]
    assert len(sources) == 3
    assert all("{" not in check.statement for check in checks)
    assert {check.sentence for check in checks} == {"A3.3"}
    plt.close(figure.draw(settings, done.found, done.before))


def test_orders_at_the_start_are_as_theory_has_them() -> None:
    """At the size of the cpu preset."""
    settings = params.preset("cpu")
    checks = {check.name: check for check in claim.checks_initial(settings, claim.initial_changes(settings))}
    assert {check.outcome for check in checks.values()} == {"holds"}
    assert {name for name, check in checks.items() if check.role == "control"} == {"skip_order", "swap_order"}
    assert checks["skip_order"].estimate.value == pytest.approx(1, abs=0.02)
    assert checks["swap_order"].estimate.value == pytest.approx(2, abs=0.02)


def test_runs_are_shared_with_the_other_claims() -> None:
    cpu = params.preset("cpu")
    own = {arm.name: arm for arm in claim.arms(cpu)}
    theirs = {arm.name: arm for arm in layer_drop_redundancy.text_arms(cpu) + layer_drop_redundancy.hops_arms(cpu)}
    collapse = no_residual_collapse.decoder_arm(cpu, 0.0)
    for ours, other in (
        (own["text: add"], theirs["text: add"]),
        (own["hops: add"], theirs["hops: add"]),
        (own["text: none"], collapse),
    ):
        assert ours.config == other.config
        assert ours.rates == other.rates
    section = cpu.claims
    assert section.layer_roles.hops.sweep_steps == section.layer_drop_redundancy.hops.sweep_steps


def test_shallow_arms_choose_their_start_and_differ_in_the_skip_alone(settings: Params) -> None:
    add, none = claim.shallow_arms(settings)
    assert list(add.settings) == list(none.settings) == ["wide start"]
    for ours, theirs in zip(add.candidates.values(), none.candidates.values(), strict=True):
        assert ours.model.model_copy(update={"connection": theirs.model.connection}) == theirs.model
    assert add.settings["wide start"].model.model_dump()["init_std"] == pytest.approx(2 / 16**0.5)


@pytest.mark.parametrize(
    ("arm", "touched"),
    [
        (
            "text: add",
            ["gain_text", "lexical_early", "lexical_early_learned", "local_first", "shared_text", "lens_text"],
        ),
        ("text: none", ["lexical_only_deep", "abstract_only_deep"]),
        ("hops: add", ["gain_hops", "lexical_early_hops", "steps_in_order", "shared_hops", "neighbours_hops"]),
        ("text: add, 3 blocks", ["gain_shallow", "shared_only", "skip_only", "lens_only"]),
        ("text: none, 3 blocks", ["gain_shallow", "unshared_none", "abstract_only", "repeat_only", "lens_only"]),
    ],
)
def test_diverged_run_is_not_dropped_silently(settings: Params, done: Experiment, arm: str, touched: list[str]) -> None:
    record = diverged(done.trained[arm][0])
    [lost] = seen.see_all([record], settings.claims.layer_roles.look, settings.execution)
    found = done.found | {arm: [lost, *done.found[arm][1:]]}
    checks = {check.name: check for check in trained_checks(settings, done._replace(found=found))}
    for name in touched:
        assert checks[name].estimate.value is None, name
        assert checks[name].outcome == "undecided"
    plt.close(figure.draw(settings, found, done.before))
    assert "not measured" in claim.cost_table(found)["gain (nats)"].loc[arm]
    assert claim.skill_table(found).loc[[arm]].isna().to_numpy().all()


def test_nothing_is_compared_with_what_learnt_nothing(settings: Params, done: Experiment) -> None:
    """The gain of the deep net without residuals, moved to the control's threshold and above it."""
    least = settings.claims.layer_roles.criteria.gain_shallow.above  # type: ignore[attr-defined]
    deep = {"lexical_only_deep", "abstract_only_deep"}
    for gain, measured in ((least, False), (least + 1e-6, True)):
        found = done.found | {"text: none": [replace(model, gain=gain) for model in done.found["text: none"]]}
        checks = {check.name: check for check in claim.checks_only(settings, found)}
        assert {name for name in deep if checks[name].estimate.value is not None} == (deep if measured else set())
        assert measured or {checks[name].outcome for name in deep} == {"undecided"}
        assert checks["lexical_only"].estimate.value is not None


def test_residual_blocks_are_held_to_nearly_as_well_at_every_depth(settings: Params, done: Experiment) -> None:
    """Residual blocks whose probes read 0.5 of the next layer: more than without residuals, and not nearly all."""
    table = np.full((4, 4), 0.2) + np.diag([0.2] * 4)
    moved = {"text: add, 3 blocks": table, "text: none, 3 blocks": np.diag([0.5] * 4) - 0.1}
    found = dict(done.found)
    for arm, skills in moved.items():
        tables = dict.fromkeys((seen.CURRENT, seen.NEXT), skills)
        found[arm] = [replace(model, skills=tables) for model in done.found[arm]]
    checks = {check.name: check for check in claim.checks_only(settings, found)}
    values = {name: checks[name].estimate.value for name in ("shared_shallow", "shared_only", "unshared_none")}
    assert values == {"shared_shallow": 0.5, "shared_only": 0.5, "unshared_none": 0}
    assert [checks[name].outcome for name in values] == ["fails", "holds", "holds"]
    assert "counts as 0" in checks["unshared_none"].unit


def test_one_seed_is_undecided(settings: Params, done: Experiment) -> None:
    found, before = ({arm: each[:1] for arm, each in models.items()} for models in done[1:])
    one = Experiment(done.trained, found, before)
    assert {check.outcome for check in trained_checks(settings, one)} == {"undecided"}
    assert claim.power_table(settings, found)["smallest detectable difference"].isna().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": {"depth": 2}}, "text.depth: input should be greater than or equal to 3"),
        ({"shallow": {"depth": 4}}, "shallow.depth 4 is not less than text.depth 4; make it smaller"),
        ({"shallow": {"learning_rates": []}}, "shallow.learning_rates"),
        ({"hops": {"hops": 1}}, "hops.hops: input should be greater than or equal to 2"),
        ({"look": {"distant": 16}}, "look.distant 16 is not within decoder.context 16; lower it"),
        ({"exact": {"branches": [0.1]}}, "branches must be two sizes or more, increasing within (0, 1], got [0.1]"),
        ({"exact": {"branches": [0.1, 0.01]}}, "branches must be two sizes or more"),
    ],
)
def test_refused_settings(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        params.load("smoke", {"claims": {"layer_roles": changed}})
    assert message in str(refused.value)


# --- measures by hand -----------------------------------------------------------------------------


def test_labels_on_text_are_of_the_same_tokens(settings: Params) -> None:
    inputs = torch.arange(12).view(2, 6)
    asked = seen.labels(claim.text_arms(settings)[0].config.task, inputs, inputs + 1, distant=3)
    assert {name: classes[1].tolist() for name, classes in asked.items()} == {
        seen.CURRENT: [9, 10, 11],
        seen.PREVIOUS: [8, 9, 10],
        seen.DISTANT: [6, 7, 8],
        seen.NEXT: [10, 11, 12],
    }


def test_labels_of_pointers_end_at_the_target() -> None:
    config = data.HopsConfig(hops=3)
    inputs, targets = next(data.load(config).held_out("test"))
    assert isinstance(inputs, torch.Tensor)
    asked = seen.labels(config, inputs, targets, distant=2)
    assert list(asked) == seen.properties(config) == ["symbol", "1 hop", "2 hops", "3 hops"]
    assert torch.equal(asked["3 hops"], targets[:, config.symbols :])
    assert torch.equal(asked["symbol"], inputs[:, config.symbols :] - config.symbols)


def test_lens_is_the_missing_share_of_the_prediction(settings: Params, done: Experiment) -> None:
    """What the head makes of the embedding, against the final prediction."""
    record = done.trained["text: add"][0]
    model = build(record.config.model, 3)
    assert isinstance(model, Decoder)
    inputs = torch.arange(32).view(2, 16)
    with torch.no_grad():
        for matrix in model.stream_writers():
            matrix.mul_(5.0)
        first = model.head(model.norm(model.token_embedding(inputs) + model.position_embedding.weight))
        final = model(inputs).log_softmax(-1)[:, 4:]
        mean = final.exp().mean((0, 1)).log().expand_as(final)
        missing = F.kl_div(first.log_softmax(-1)[:, 4:], final, reduction="sum", log_target=True)
        known = F.kl_div(mean, final, reduction="sum", log_target=True)
    lens = seen._lens(record.config, model, inputs, distant=4)
    assert len(lens) == 5
    assert lens[0] == pytest.approx(float(missing / known), rel=1e-4)
    assert lens[0] > 0.01
    assert lens[-1] == 0


def test_costs_and_slopes_by_hand() -> None:
    tables = {"a": np.diag([0.5, 0.3, 0.1]), "b": np.diag([0.0, 0.0, 0.3])}
    model = seen.Seen(2.0, tables, tables, (0.4, 0.2, 0.0), (0.2, 0.4), (0.1, 0.1), (0.5,), (0.5,))
    assert model.slope("a") == pytest.approx(-0.4)
    assert model.centre("b") == pytest.approx(1)
    assert model.cost(model.skip) == pytest.approx(0.15)
    assert model.kept() == 0
    nothing = seen.Seen(-0.1, tables, tables, (), (0.2, 0.4), (), (), ())
    assert math.isnan(nothing.cost(nothing.skip)), "what learned nothing must not look robust"
