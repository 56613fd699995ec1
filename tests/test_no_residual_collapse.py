"""Claim 01's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from records import around_guess, diverged
from reslab import params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import no_residual_collapse as claim
from reslab.experiments import no_residual_collapse_figure as figure
from reslab.experiments.runs import ENDS
from reslab.params import Params
from reslab.schema import UserError


def checks_loss(settings: Params, trained: Runs, swept: str = "trained") -> list[Check]:
    """With this outcome of all runs that chose a rate."""
    return claim.checks_loss(settings, pd.DataFrame({"arm": list(trained), "outcome": swept}), trained)


TRAINED = (checks_loss, claim.checks_stream, claim.checks_oscillation)


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}})


@pytest.fixture(scope="module")
def trained_once(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    names = [arm.name for arm in claim.arms(settings)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        return claim.runs(settings, pd.DataFrame({"arm": names, "setting": "", "rate": 3e-3, "chosen": True}))


@pytest.fixture
def trained(trained_once: Runs) -> Runs:
    """A copy that a test may change."""
    return {name: list(records) for name, records in trained_once.items()}


def all_checks(settings: Params, trained: Runs) -> list[Check]:
    return [check for checks in TRAINED for check in checks(settings, trained)]


def test_every_question_is_answered_once(settings: Params, trained: Runs) -> None:
    initial = claim.checks_initial(settings, claim.initial_profiles(settings))
    names = [check.name for check in [*initial, *all_checks(settings, trained)]]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert next(check for check in initial if check.name == "cosine_rezero").outcome == "holds"


def test_arms_share_their_seeds(settings: Params, trained: Runs) -> None:
    assert list(trained) == ["skip 0", "skip 0.3", "skip 1", ENDS, "ResNet skip 0", "ResNet skip 0.3", "ResNet skip 1"]
    assert all([record.config.seed for record in records] == [0, 1] for records in trained.values())


@pytest.mark.parametrize("arm", ["skip 0", "skip 1", ENDS, "ResNet skip 0.3"])
@pytest.mark.parametrize("checks", TRAINED, ids=lambda checks: checks.__name__)
def test_diverged_run_is_an_outcome(
    settings: Params, trained: Runs, arm: str, checks: Callable[[Params, Runs], list[Check]]
) -> None:
    """A claim that says "the loss does not blow up" must be able to find that it did."""
    trained[arm][0] = diverged(trained[arm][0])
    found = {check.name: check for check in checks(settings, trained)}
    if "never_diverges" in found:
        wanted = "fails" if arm == "skip 0" else "holds"
        assert found["never_diverges"].outcome == found["never_spikes"].outcome == wanted
        assert (found["blocks_take_part"].estimate.value is None) == (arm in ("skip 1", ENDS))


def test_runs_that_chose_the_rate_count_as_blown_up(settings: Params, trained: Runs) -> None:
    """The rate of the full runs is one that did not diverge."""
    found = {check.name: check for check in checks_loss(settings, trained, "diverged")}
    assert found["never_diverges"].estimate.value == 1
    assert found["never_diverges"].outcome == "fails"


def test_a_jump_of_the_loss_counts_once_a_run(settings: Params, trained: Runs) -> None:
    """One run lies 3 nats above the guess for ten steps, the other 0.4 for its second half."""
    jump = [0.0] * 15 + [3.0] * 10 + [0.0] * 15
    trained["skip 0"] = [
        around_guess(trained["skip 0"][0], jump),
        around_guess(trained["skip 0"][1], [0.0] * 20 + [0.4] * 20),
    ]
    found = {check.name: check for check in checks_loss(settings, trained)}
    assert (found["never_spikes"].estimate.value, found["never_spikes"].outcome) == (1, "fails")
    assert found["never_diverges"].outcome == "holds"
    trained["skip 0"] = trained["skip 0"][1:] * 2
    assert {c.name: c.outcome for c in checks_loss(settings, trained)}["never_spikes"] == "holds"


def test_blocks_take_part_by_what_they_gain_over_their_ends(settings: Params, trained: Runs) -> None:
    for arm, losses in {"skip 1": (2.5, 2.7), ENDS: (2.6, 2.9)}.items():
        pairs = zip(trained[arm], losses, strict=True)
        trained[arm] = [record.model_copy(update={"test_loss": loss}) for record, loss in pairs]
    found = {check.name: check for check in checks_loss(settings, trained)}
    assert found["blocks_take_part"].estimate.value == pytest.approx(0.15)


def test_identities_are_controls_and_no_sentence_rests_on_them_alone() -> None:
    assert {claim.QUESTIONS[name].role for name in ("hull_excess", "causal_halving", "cosine_rezero")} == {"control"}
    counting = {question.sentence for question in claim.QUESTIONS.values() if question.role != "control"}
    assert counting == {question.sentence for question in claim.QUESTIONS.values()}


def test_calm_is_what_the_batches_do_not_explain(settings: Params, trained: Runs) -> None:
    """Without skips the loss swings twice as far about the guess's on the same batches."""
    wave = np.sin(np.arange(40.0))
    for name, size in (("skip 0", 0.2), ("skip 1", 0.1)):
        trained[name] = [around_guess(record, list(size * wave)) for record in trained[name]]
    found = {check.name: check for check in claim.checks_oscillation(settings, trained)}
    assert found["less_calm"].estimate.value == pytest.approx(2)


@pytest.mark.parametrize("arm", ["skip 0", "skip 1", ENDS])
def test_diverged_run_is_drawn(settings: Params, trained: Runs, arm: str) -> None:
    trained[arm] = [diverged(record) for record in trained[arm][:1]] + ([] if arm == ENDS else trained[arm][1:])
    plt.close(figure.draw(settings, claim.initial_profiles(settings), trained))


def test_runs_of_one_step_are_judged_unless_refused(settings: Params, trained: Runs) -> None:
    """A plateau of one value has no spread and no frequency."""
    try:
        params.load("smoke", {"optimisation": {"steps": 1}})
    except UserError:
        return
    for name, records in trained.items():
        trained[name] = [record.model_copy(update={"train_loss": record.train_loss[:1]}) for record in records]
    assert claim.checks_oscillation(settings, trained)


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_gradients_are_finite_at_the_depths_of_every_scale(scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without skips and norms the stream grows to 1e9 in 64 blocks, which attention must bear."""
    settings = params.preset(scale)
    section = settings.claims.no_residual_collapse
    exact = section.exact.model_copy(update={"seeds": 1, "depths": section.exact.depths[-1:]})
    claims = settings.claims.model_copy(update={"no_residual_collapse": section.model_copy(update={"exact": exact})})
    monkeypatch.setattr(claim, "INITIAL_ARMS", {"no skip, no norm": ("none", "none")})
    profiles = claim.initial_profiles(settings.model_copy(update={"claims": claims}))
    assert all(math.isfinite(value) for value in profiles["gradient_slope"])
