"""Claim 13's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

from records import diverged
from reslab import params, paths, sweep
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import diffusion_residuals as claim
from reslab.experiments import diffusion_residuals_arms as networks
from reslab.experiments import diffusion_residuals_exact as exact
from reslab.experiments import diffusion_residuals_figure as figure
from reslab.experiments import diffusion_residuals_pictures as looks
from reslab.params import Params
from reslab.sampling import Path
from reslab.schema import UserError
from reslab.training import build

SECTION = "diffusion_residuals"


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}, "claims": {SECTION: {"pictures": 20, "samples": 2}}})


@pytest.fixture(scope="module")
def trained_once(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        chosen = pd.DataFrame({"arm": networks.ARMS, "setting": "", "rate": 1e-2, "chosen": True})
        yield claim.runs(settings, chosen)


@pytest.fixture
def trained(trained_once: Runs) -> Runs:
    """A copy that a test may change, in which every run has learnt."""
    return {
        name: [record.model_copy(update={"outcome": "trained"}) for record in records]
        for name, records in trained_once.items()
    }


Initial = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]


@pytest.fixture(scope="module")
def initial(settings: Params) -> Initial:
    return (
        claim.initial_starts(settings),
        claim.initial_gradients(settings),
        claim.initial_gradients(settings, residual=False),
        claim.initial_readings(settings),
    )


class Looks:
    """All that is looked at in trained networks."""

    def __init__(self, settings: Params, trained: Runs) -> None:
        self.kept = claim.structures(settings, trained)
        self.read = claim.readings(settings, trained)
        self.path = claim.paths(settings, trained)
        self.made: dict[str, Path] = claim.samples(settings, trained)

    def checks(self, settings: Params, trained: Runs) -> list[Check]:
        return [
            *claim.checks_noise(settings, trained),
            *claim.checks_structure(settings, trained, self.kept),
            *claim.checks_inside(settings, trained, self.read),
            *claim.checks_path(settings, trained, self.path),
        ]


@pytest.fixture(scope="module")
def looked(settings: Params, trained_once: Runs) -> Looks:
    return Looks(settings, trained_once)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# --- questions ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(settings: Params, trained: Runs, initial: Initial, looked: Looks) -> None:
    checks = [*claim.checks_initial(settings, *initial), *looked.checks(settings, trained)]
    names = [check.name for check in checks]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {check.sentence for check in checks} == {"A5.3a"}
    assert not [check.statement for check in checks if "{" in check.statement]
    assert all(row.ours for row in claim.published(checks))


def test_a_second_look_sees_the_same(settings: Params, trained: Runs, looked: Looks) -> None:
    arm = networks.UNET
    again = {arm: trained[arm]}
    section = settings.claims.diffusion_residuals
    pairs = (
        (looked.kept, looks.structures(again, section.times, section.pictures, "cpu")),
        (looked.read, looks.readings(looks.trained_models(again), section.looked_at, section.pictures)),
        (looked.path, looks.paths(again, section.path_from, section.sampling_steps, section.pictures, "cpu")),
    )
    for first, second in pairs:
        ours, theirs = (table[table["arm"] == arm].reset_index(drop=True) for table in (first, second))
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    made = looks.samples(again, section.sample_from, section.sampling_steps, section.samples, "cpu")
    assert torch.equal(made[arm].states[-1], looked.made[arm].states[-1])


# --- exact ----------------------------------------------------------------------------------------


def test_exact_checks_hold_their_known_values(settings: Params, initial: Initial) -> None:
    found = by_name(claim.checks_initial(settings, *initial))
    for name in ("start_error", "unlock_order", "start_keeps", "start_closed"):
        assert found[name].estimate.value == 0, name
        assert found[name].outcome == "holds", name
        assert found[name].role == "control", name
    assert {check.role for name, check in found.items() if name.startswith("untrained")} == {"exact"}


def test_open_network_fails_the_exact_checks(settings: Params) -> None:
    """Plain adaLN predicts something, moves the stream, and lets branches learn at once."""
    section = settings.claims.diffusion_residuals
    dit = networks.model_of(section.transformer, section.unet, networks.DIT_NONE)
    assert dit.kind == "diffusion_transformer"
    start = exact.starts(dit, [0], 4)
    assert abs(start["loss"] / start["noise"] - 1).item() > 1e-3
    assert start["moved"].item() > 0.1
    opening = exact.gradients(dit, [0], 4)
    assert exact.first_updates(opening).loc["branches", 0] == 0
    estimates = exact.exact_estimates(start, opening, opening)
    assert (estimates["unlock_order"].value or 0) > 0
    assert (estimates["start_closed"].value or 0) > 1e-6


def test_a_part_that_never_opens_is_out_of_order(initial: Initial) -> None:
    start, _, closed, _ = initial
    assert exact.first_updates(closed).loc["branches"].isna().all()
    found = exact.exact_estimates(start, closed, closed)["unlock_order"].value
    assert found is not None
    assert found >= (len(exact.UNLOCKS_AT) - 1) * 2  # all but the head, of two seeds


# --- arms -----------------------------------------------------------------------------------------


def test_arms_of_the_cpu_preset_differ_in_residuals_alone() -> None:
    settings = params.preset("cpu")
    configs = {arm.name: arm.config for arm in networks.arms(settings)}
    assert tuple(configs) == networks.ARMS
    assert len(settings.seeds) >= 3
    for part in ("dit", "unet"):
        ours, without = (configs[arm].model for arm in networks.COMPARISONS[part])
        assert ours.connection.kind == "add"
        assert without == ours.model_copy(update={"connection": without.connection})
        sizes = [sum(p.numel() for p in build(model, 0).parameters()) for model in (ours, without)]
        assert sizes[0] == sizes[1]
    kinds = {name: (c.model.connection.kind, getattr(c.model, "skips", None)) for name, c in configs.items()}
    assert kinds["U-Net, no long skips"] == ("add", False)
    assert kinds["U-Net, no residuals"] == ("none", True)
    assert kinds["U-Net, neither"] == ("none", False)
    assert getattr(configs["DiT, adaLN-Zero"].model, "conditioning", "") == "adaln_zero"
    assert getattr(configs["DiT"].model, "conditioning", "") == "adaln"


def test_weights_are_kept(trained: Runs) -> None:
    for records in trained.values():
        assert [record.config.seed for record in records] == [0, 1]
        sweep.trained_model(records[0].config)


# --- looks ----------------------------------------------------------------------------------------


def test_controls_of_the_structure(settings: Params, looked: Looks) -> None:
    """No noise predicted: an error of the noise's square, and the same as adaLN-Zero at its start."""
    nothing = looked.kept[looked.kept["arm"] == looks.UNTRAINED]
    assert nothing["error"].tolist() == pytest.approx([1.0] * 3, abs=0.15)
    linear = looked.kept[looked.kept["arm"] == looks.LINEAR]
    assert (linear["error"].to_numpy() < nothing["error"].to_numpy()).all()
    assert (linear["structure"].to_numpy()[1:] > nothing["structure"].to_numpy()[1:]).all()
    assert nothing["structure"].is_monotonic_decreasing


def test_linear_loss_lies_between_perfect_and_guessing() -> None:
    assert 0.05 < looks.linear_loss() < 0.5


def test_stream_that_is_the_embedding_holds_the_input(settings: Params, initial: Initial) -> None:
    """adaLN-Zero hands on its embedding, of which width 8 holds the four pixels of a patch."""
    read = initial[3]
    zero = read[read["arm"] == networks.ZERO]
    by_place = zero[zero["seed"] == 0].sort_values("place")["share"]
    assert by_place.tolist() == [by_place.iloc[0]] * 3
    assert len(claim.last_share(read, networks.ZERO)) == 2


def test_places_of_a_unet_are_those_of_full_resolution(initial: Initial) -> None:
    """One block down, one block up at the upper of two levels, and the head's norm."""
    read = initial[3]
    assert len(read[(read["arm"] == networks.UNET) & (read["seed"] == 0)]) == 3


def test_path_begins_with_the_noisy_picture(settings: Params, looked: Looks) -> None:
    begun = looked.path[looked.path["step"] == 0]
    assert set(begun["arm"]) == set(figure.SAMPLED)
    assert (begun["structure"] == begun["structure"].iloc[0]).all()
    assert len(looked.path) == 4 * 2 * (settings.claims.diffusion_residuals.sampling_steps + 1)


def test_structure_checks_by_hand(settings: Params, trained: Runs) -> None:
    """With: 0.5 and 0.7 (seed means over two times); without: 0.25 and 0.2."""
    values = {True: [(0.6, 0.4), (0.8, 0.6)], False: [(0.3, 0.2), (0.3, 0.1)]}
    kept = pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "time": time, "structure": value}
            for arm in networks.ARMS
            for seed, pair in enumerate(values[arm in (networks.ZERO, networks.DIT, networks.UNET)])
            for time, value in zip((0.1, 0.5), pair, strict=True)
        ]
    )
    found = by_name(claim.checks_structure(settings, trained, kept))
    assert {check.estimate.value for check in found.values()} == {0.375}


def test_noise_checks_by_hand(settings: Params, trained: Runs) -> None:
    for arm, losses in ((networks.DIT, [0.25, 0.5]), (networks.DIT_NONE, [0.5, 1.0])):
        pairs = zip(trained[arm], losses, strict=True)
        trained[arm] = [record.model_copy(update={"test_loss": loss}) for record, loss in pairs]
    found = by_name(claim.checks_noise(settings, trained))
    assert found["noise_dit"].estimate.value == 0.375
    assert found["learns_dit"].estimate.value == 0.375
    assert found["beats_linear_dit"].estimate.value == pytest.approx(looks.linear_loss() - 0.375, abs=1e-5)


@pytest.mark.parametrize(("gain", "outcome"), [(0.02, "holds"), (0.005, "fails"), (-0.05, "fails")])
def test_networks_are_held_against_the_best_linear_predictor(
    settings: Params, trained: Runs, gain: float, outcome: str
) -> None:
    for arm in (networks.DIT, networks.UNET):
        loss = looks.linear_loss() - gain
        trained[arm] = [record.model_copy(update={"test_loss": loss}) for record in trained[arm]]
    found = by_name(claim.checks_noise(settings, trained))
    for name in ("beats_linear_dit", "beats_linear_unet"):
        assert (found[name].role, found[name].outcome) == ("trained", outcome)


def test_path_and_inside_checks_by_hand(settings: Params, trained: Runs) -> None:
    ours = (networks.DIT, networks.UNET)
    path = pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "step": step, "structure": 0.5 + (0.125 if arm in ours else -0.125) * step}
            for arm in figure.SAMPLED
            for seed in (0, 1)
            for step in (0, 1, 2)
        ]
    )
    found = by_name(claim.checks_path(settings, trained, path))
    assert {check.estimate.value for check in found.values()} == {0.5}
    read = path.rename(columns={"step": "place", "structure": "share"})
    inside = by_name(claim.checks_inside(settings, trained, read))
    assert (inside["kept_dit"].estimate.value, inside["read_both"].estimate.value) == (0.75, 0.5)


def test_nothing_is_compared_with_a_network_that_learnt_nothing(settings: Params, trained: Runs, looked: Looks) -> None:
    """But for the noise, of which it is to say how much was found; networks with residuals are judged as they are."""
    for arm in (networks.DIT_NONE, networks.DIT):
        trained[arm][1] = trained[arm][1].model_copy(update={"outcome": "stalled"})
    found = by_name(looked.checks(settings, trained))
    unmeasured = {name for name, check in found.items() if check.estimate.value is None}
    assert unmeasured == {"structure_zero", "structure_dit", "read_dit", "path_dit"}
    assert {found[name].outcome for name in unmeasured} == {"undecided"}
    assert claim.loss_table(trained)["learnt"].loc[[networks.DIT_NONE, networks.UNET]].tolist() == ["1 of 2", "2 of 2"]
    kept = claim.difference_table(trained, looked.kept).xs("structure", level="what")["difference [95 % interval]"]
    assert [name for name, value in kept.items() if "not measured" in value] == [
        claim.WORDS["zero"],
        claim.WORDS["dit"],
    ]


def test_runs_in_any_order_of_seeds_are_matched_with_their_looks(
    settings: Params, trained: Runs, looked: Looks
) -> None:
    trained[networks.DIT_NONE][0] = trained[networks.DIT_NONE][0].model_copy(update={"outcome": "stalled"})
    turned = trained | {networks.DIT_NONE: trained[networks.DIT_NONE][::-1]}
    for runs in (trained, turned):
        _, without = claim.compared_structure(runs, looked.kept, "dit")
        assert [math.isnan(value) for value in without] == [True, False]


# --- runs that diverged ---------------------------------------------------------------------------


def test_diverged_runs_are_not_measured_and_drawn(settings: Params, trained: Runs, initial: Initial) -> None:
    for arm in (networks.DIT_NONE, networks.UNET):
        trained[arm][0] = diverged(trained[arm][0])
    looked = Looks(settings, trained)
    found = by_name(looked.checks(settings, trained))
    unmeasured = ("noise_dit", "structure_dit", "structure_both", "read_dit", "kept_both", "path_dit", "path_both")
    for name in (*unmeasured, "beats_linear_unet"):
        assert found[name].estimate.value is None, name
        assert found[name].outcome == "undecided", name
    for name in ("learns_dit", "kept_dit"):
        assert found[name].estimate.value is not None, name
    assert "not measured" in claim.loss_table(trained).to_string()
    assert "not measured" in claim.difference_table(trained, looked.kept).to_string()
    assert bool(claim.structure_table(looked.kept).loc[[networks.UNET]].isna().iloc[0, 0])
    assert bool(claim.reading_table(initial[3], looked.read).loc[[networks.UNET], "trained"].isna().all())
    assert networks.UNET not in looked.made
    drawn = figure.draw(settings, initial[3], looked.read, looked.kept, looked.path, looked.made, trained)
    drawn.canvas.draw()
    plt.close(drawn)


def test_network_whose_arm_diverged_throughout_is_drawn(settings: Params, trained: Runs, initial: Initial) -> None:
    lost = {
        arm: [diverged(r).model_copy(update={"train_loss": ()}) for r in records] for arm, records in trained.items()
    }
    looked = Looks(settings, lost)
    drawn = figure.draw(settings, initial[3], looked.read, looked.kept, looked.path, looked.made, lost)
    drawn.canvas.draw()
    plt.close(drawn)


def test_one_seed_is_undecided(settings: Params, trained: Runs, looked: Looks) -> None:
    one = {name: records[:1] for name, records in trained.items()}
    found = by_name(claim.checks_noise(settings, one))
    found |= by_name(claim.checks_structure(settings, one, looked.kept[looked.kept["seed"] < 1]))
    assert {check.outcome for check in found.values()} == {"undecided"}
    assert "no interval" in str(found["structure_dit"].estimate)


def test_readings_of_a_stream_that_is_not_finite_are_not_numbers(settings: Params) -> None:
    section = settings.claims.diffusion_residuals

    def broken() -> torch.nn.Module:
        model = build(networks.model_of(section.transformer, section.unet, networks.DIT), 0)
        with torch.no_grad():
            model.get_submodule("patch_embedding").get_parameter("weight").fill_(math.inf)
        return model

    with np.errstate(all="raise"):
        table = looks.readings([("DiT", 0, broken), ("DiT", 1, None)], 0.25, 4)
    assert table["share"].isna().all()
    assert sorted(table["seed"].unique()) == [0, 1]


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"times": [0.5]}, "times must be two or more that increase between 0 and 1, got [0.5]"),
        ({"times": []}, "times must be two or more that increase between 0 and 1, got []"),
        ({"times": [0.5, 1.0]}, "times must be two or more that increase between 0 and 1, got [0.5, 1.0]"),
        ({"transformer": {"heads": 3}}, "width 8 is not divisible by heads 3"),
        ({"unet": {"levels": 1}}, "unet.levels: input should be greater than or equal to 2"),
        ({"batch": 5000}, "batch: input should be less than or equal to 1197"),
        ({"learning_rates": []}, "learning_rates: "),
        ({"sample_from": 1.0}, "sample_from: input should be less than 1"),
        ({"pictures": 301}, "pictures: input should be less than or equal to 300"),
    ],
)
def test_bad_settings_are_refused_by_sentence(section: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        params.load("smoke", {"claims": {SECTION: section}})
    assert words.lower() in str(error.value).lower()
