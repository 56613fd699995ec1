"""Claim 08's checks, on runs that were trained and on runs that diverged."""

import math
from typing import Any, cast

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

from records import around_guess, diverged
from reslab import params, paths, sweep
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.experiments import sandwich_ln as claim
from reslab.experiments import sandwich_ln_exact as exact
from reslab.experiments import sandwich_ln_figure as figure
from reslab.experiments.runs import decoder_run
from reslab.experiments.sandwich_ln_mismatch import Mismatched, is_foreign
from reslab.flops import norm_flops
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.params import Params
from reslab.residuals import ConnectionConfig, Site
from reslab.schema import UserError
from reslab.training import RunConfig, RunRecord, build

SECTION = "sandwich_ln"
Tried = dict[tuple[str, float], list[RunRecord]]


def changed(**section: Any) -> dict[str, Any]:
    return {"claims": {SECTION: section}}


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smaller than smoke scale, trained in this process."""
    changes = {"execution": {"workers": 1}, "evaluation_windows": 4, "decoder": {"width": 8, "context": 8}}
    return params.load("smoke", changes | changed(depth=3, small_depth=2))


@pytest.fixture(scope="module")
def ran_once(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Tried]:
    names = [arm.name for arm in claim.arms(settings)]
    assert len(set(names)) == len(names)
    chosen = pd.DataFrame({"arm": names, "setting": "", "rate": 1e-2, "chosen": True})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        return claim.runs(settings, chosen), claim.grid(settings)


@pytest.fixture
def trained(ran_once: tuple[Runs, Tried]) -> Runs:
    """A copy that a test may change."""
    return {name: list(records) for name, records in ran_once[0].items()}


@pytest.fixture
def tried(ran_once: tuple[Runs, Tried]) -> Tried:
    return {cell: list(records) for cell, records in ran_once[1].items()}


@pytest.fixture(scope="module")
def grown(settings: Params) -> pd.DataFrame:
    return claim.initial_growth(settings)


@pytest.fixture(scope="module")
def seen(settings: Params) -> pd.DataFrame:
    return claim.initial_scales(settings)


TIMED = pd.DataFrame(
    [
        {"width": width, "method": method, "round": number, "ms": ms * (1 + number)}
        for width in (8, 16)
        for method, ms in ((claim.PRE, 10.0), (claim.SANDWICH, 10.5), (claim.SUM, 11.0), (claim.PERI, 12.0))
        for number in range(6)
    ]
)
"""Rounds, each slower for all than the one before."""


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# --- questions ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(
    settings: Params, trained: Runs, tried: Tried, grown: pd.DataFrame, seen: pd.DataFrame
) -> None:
    checks = [
        *claim.checks_initial(settings, grown, seen, claim.operations(settings)),
        *claim.checks_time(settings, TIMED),
        *claim.checks_equal(settings, trained),
        *claim.checks_stability(settings, tried),
        *claim.checks_mismatch(settings, trained),
    ]
    names = [check.name for check in checks]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {check.sentence for check in checks} == {"A5.2a", "A5.2b"}
    assert not [check.statement for check in checks if "{" in check.statement]
    assert all(row.ours for row in claim.published(checks))


# --- exact ----------------------------------------------------------------------------------------


def test_exact_checks_hold_their_known_values(settings: Params, grown: pd.DataFrame, seen: pd.DataFrame) -> None:
    found = by_name(claim.checks_initial(settings, grown, seen, claim.operations(settings)))
    for name in ("sum_unit", "unseen_sandwich"):
        assert found[name].outcome == "holds", name
    assert found["sum_unit"].estimate.value == pytest.approx(1, abs=1e-6)


def test_a_norm_on_the_branch_adds_two_a_block() -> None:
    """Wide and with many tokens, so that updates are nearly uncorrelated."""
    size = exact.Exact(depths=(2, 6), seeds=2, tokens=32, width=128)
    grown = exact.growth(size)
    ends = grown[(grown["placement"] == "sandwich") & (grown["block"] == grown["depth"])]
    assert (ends["mean_square"] / ends["predicted"]).between(0.8, 1.2).all()
    start = grown[(grown["placement"] == "peri") & (grown["block"] == 0)]["mean_square"]
    assert start.to_numpy() == pytest.approx(1, abs=1e-9)


def test_foreign_branches_are_the_attention_of_every_second_block() -> None:
    assert [number for number in range(12) if is_foreign(number)] == [2, 6, 10]
    config = DecoderConfig(width=8, heads=2, context=4, depth=4, vocabulary=5, init_std=0.2)
    model, plain = Decoder(config), Decoder(config)
    plain.load_state_dict(model.state_dict())
    exact.scale_foreign(model, 10.0)
    differing = [n for n, w in model.named_parameters() if not torch.equal(w, plain.get_parameter(n))]
    assert len(differing) == 2
    assert all("blocks.1.attention" in name or "blocks.3.attention" in name for name in differing)


def test_norms_are_counted() -> None:
    """Two blocks of width 8: 4 sublayers; a layernorm takes 7 operations a number, an RMS norm 4."""
    config = DecoderConfig(width=8, heads=2, context=4, depth=2, vocabulary=5, init_std=0.1)
    counted = {
        placement: norm_flops(config.model_copy(update={"placement": placement})) // (7 * 8)
        for placement in ("none", "pre", "post", "sandwich", "sandwich_sum", "peri")
    }
    assert counted == {"none": 1, "pre": 5, "post": 5, "sandwich": 9, "sandwich_sum": 9, "peri": 10}
    assert norm_flops(config.model_copy(update={"norm": "rmsnorm"})) == 5 * 4 * 8


# --- the connection with foreign branches ---------------------------------------------------------


def logits(config: RunConfig, tokens: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, build(config.model, 0)(tokens))


@pytest.mark.parametrize(("norm", "placement"), [(None, "pre"), ("layernorm", "sandwich")])
def test_without_a_factor_it_is_the_placement_itself(settings: Params, norm: str | None, placement: Any) -> None:
    tokens = torch.arange(8).view(1, 8)
    same = ConnectionConfig("mismatched", factor=1.0, norm=norm)
    ours = decoder_run(settings, 4, same)
    assert torch.equal(logits(ours, tokens), logits(decoder_run(settings, 4, placement=placement), tokens))


def test_the_factor_is_on_foreign_updates_and_inside_the_norm() -> None:
    update = torch.tensor([[1.0, 2.0, -3.0, 0.5]])
    stream = torch.ones(1, 4)

    def write(sublayer: int, **options: Any) -> torch.Tensor:
        config = ConnectionConfig("mismatched", factor=30.0, **options)
        made = Mismatched(Site(sublayer, 4, 4), cast(Any, config.options))
        made.reset_parameters()
        return made.write(stream, update)

    assert torch.equal(write(1), stream + update)
    assert torch.equal(write(2), stream + 30 * update)
    normed = torch.nn.functional.layer_norm(update, (4,), eps=0.0)
    assert torch.allclose(write(2, norm="layernorm"), stream + normed, atol=1e-4)


def test_runs_with_foreign_branches_are_named_by_its_code(settings: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    run = next(arm.config for arm in claim.arms(settings) if arm.name.endswith("foreign branches"))
    ordinary = decoder_run(settings, 2)
    assert sweep._outside(run) is Mismatched  # so that workers get to know it
    assert sweep._outside(ordinary) is None
    names = sweep.run_name(run), sweep.run_name(ordinary)
    monkeypatch.setattr(sweep, "_module_code", lambda module: f"other code of {module}")
    assert sweep.run_name(run) != names[0]
    assert sweep.run_name(ordinary) == names[1]


# --- arms -----------------------------------------------------------------------------------------


def test_arms_of_the_cpu_preset() -> None:
    settings = params.preset("cpu")
    configs = {arm.name: arm.config for arm in claim.arms(settings)}
    assert len(configs) == 8
    for depth in (6, 12):
        assert configs[f"Pre-LN, {depth} blocks"] == decoder_run(settings, depth)
    foreign = configs["Sandwich-LN, 6 blocks, foreign branches"].model
    assert foreign.connection.model_dump() == {"kind": "mismatched", "factor": 30.0, "norm": "layernorm", "eps": 1e-5}
    assert foreign.placement == "pre"
    assert configs["Norm after the sum, 12 blocks"].model.placement == "sandwich_sum"


# --- time -----------------------------------------------------------------------------------------


def test_time_is_compared_within_a_round(settings: Params) -> None:
    found = by_name(claim.checks_time(settings, TIMED))
    assert found["time_sandwich"].estimate.value == pytest.approx(1.05)
    assert found["time_sandwich"].outcome == "holds"
    assert math.isnan(claim.ratios(TIMED[TIMED["method"] != claim.PRE], claim.SANDWICH, 8)[0])


def test_every_method_is_timed_at_both_widths(settings: Params) -> None:
    timed = claim.times(settings)
    assert timed.groupby(["width", "method"]).size().tolist() == [2] * 8
    assert (timed["ms"] > 0).all()


# --- losses and stability -------------------------------------------------------------------------


def with_loss(records: list[RunRecord], *losses: float) -> list[RunRecord]:
    return [record.model_copy(update={"test_loss": loss}) for record, loss in zip(records, losses, strict=True)]


def test_harm_and_gains_are_paired_by_seed(settings: Params, trained: Runs) -> None:
    told = {
        "Pre-LN, 2 blocks": (3.0, 2.0),
        "Sandwich-LN, 2 blocks": (3.0, 2.01),
        "Pre-LN, 2 blocks, foreign branches": (3.4, 2.4),
        "Sandwich-LN, 2 blocks, foreign branches": (3.0, 2.01),
    }
    trained |= {name: with_loss(trained[name], *losses) for name, losses in told.items()}
    found = by_name(claim.checks_mismatch(settings, trained))
    assert found["harm_pre"].estimate.value == pytest.approx(0.4)
    assert found["harm_sandwich"].estimate.value == 0
    assert found["gain_ordinary"].estimate.value == pytest.approx(-0.005)
    assert found["gain_mismatch"].estimate.value == pytest.approx(0.395)
    assert found["gain_mismatch"].outcome == "holds"


def test_calm_is_what_the_batches_do_not_explain(settings: Params, trained: Runs) -> None:
    """Sandwich-LN jumps by 2 nats, no other."""
    for name, records in trained.items():
        jump = 12.0 if name == "Sandwich-LN, 3 blocks" else 2.0
        trained[name] = [around_guess(record, [2.0] * 10 + [jump] * 2) for record in records]
    found = by_name(claim.checks_equal(settings, trained))
    assert found["calm_sandwich"].estimate.value == pytest.approx(2)
    assert found["calm_sandwich"].outcome == "fails"
    assert found["calm_peri"].estimate.value == pytest.approx(0)
    assert found["calm_peri"].outcome == "holds"


def outcome(record: RunRecord, *, learns: bool) -> RunRecord:
    return record.model_copy(update={"outcome": "trained" if learns else "stalled", "train_loss": (3.0,) * 8})


def test_thresholds_are_compared_by_place_in_the_grid(settings: Params, tried: Tried) -> None:
    low, high = settings.claims.sandwich_ln.stability.learning_rates

    def told(pre: int, other: int) -> list[float]:
        """So many of the rates train, the lowest first."""
        bears = {claim.PRE: pre, claim.SANDWICH: other, claim.SUM: 0}
        made = {
            (method, rate): [outcome(r, learns=place < bears[method]) for r in tried[method, rate]]
            for method in bears
            for place, rate in enumerate((low, high))
        }
        return claim.threshold_differences(settings, made, claim.SANDWICH)

    assert told(1, 1) == [0, 0]
    assert told(1, 2) == [1, 1]
    assert told(2, 1) == [-1, -1]
    assert told(1, 0) == [-1, -1]
    assert all(map(math.isnan, [*told(2, 2), *told(0, 0)]))


def test_diverged_runs_are_not_dropped(settings: Params, trained: Runs, tried: Tried, grown: pd.DataFrame) -> None:
    for name in ("Sandwich-LN, 3 blocks", "Pre-LN, 2 blocks, foreign branches"):
        trained[name][0] = diverged(trained[name][0])
    found = by_name(claim.checks_equal(settings, trained) + claim.checks_mismatch(settings, trained))
    for name in ("equal_sandwich", "calm_sandwich", "harm_pre", "gain_mismatch"):
        assert found[name].estimate.value is None, name
        assert found[name].outcome == "undecided", name
    assert found["equal_sum"].estimate.value is not None
    low, high = settings.claims.sandwich_ln.stability.learning_rates
    for method in claim.STABILITY_METHODS:
        tried[method, low] = [outcome(record, learns=True) for record in tried[method, low]]
        tried[method, high] = [diverged(record) for record in tried[method, high]]
    assert claim.threshold_differences(settings, tried, claim.SUM) == [0, 0]
    assert "diverged 2" in claim.thresholds(settings, tried).to_string()
    assert "not measured" in claim.losses(settings, trained).to_string()
    drawn = figure.draw(settings, grown, TIMED, trained, tried)
    drawn.canvas.draw()
    plt.close(drawn)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"small_depth": 1}, "small_depth"),
        ({"factor": 1.0}, "factor 1 makes no branch foreign"),
        ({"learning_rates": []}, "learning_rates"),
        ({"stability": {"learning_rates": [0.1]}}, "two or more that increase"),
        ({"stability": {"learning_rates": [0.1, 0.01]}}, "two or more that increase"),
        ({"timed": {"rounds": 1}}, "rounds"),
        ({"exact": {"depths": [4]}}, "depths"),
        ({"exact": {"depths": [1, 4]}}, "every second block is foreign"),
        ({"exact": {"seeds": 1}}, "seeds"),
    ],
)
def test_bad_settings_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        params.load("smoke", changed(**section))


def test_another_norm_gain_is_refused() -> None:
    with pytest.raises(UserError, match="norm_gain"):
        params.load("smoke", {"decoder": {"norm_gain": 2.0}})
