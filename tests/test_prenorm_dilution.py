"""Claim 11's checks, on runs that were trained and on runs that diverged."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from records import diverged
from reslab import params, paths
from reslab.claims import Check
from reslab.comparison import Runs
from reslab.dilution import Dilution
from reslab.experiments import prenorm_dilution as claim
from reslab.experiments import prenorm_dilution_exact as exact
from reslab.experiments import prenorm_dilution_figure as figure
from reslab.params import Params
from reslab.schema import UserError

SECTION = "prenorm_dilution"


@pytest.fixture(scope="module")
def settings() -> Params:
    """Smoke scale, trained in this process."""
    return params.load("smoke", {"execution": {"workers": 1}})


def chosen_at(settings: Params, rates: dict[str, float]) -> pd.DataFrame:
    """Stage one's table, had each arm chosen this rate, or 0.01."""
    names = [arm.name for arm in claim.arms(settings)]
    assert len(set(names)) == len(names)
    rows = [{"arm": name, "setting": "", "rate": rate} for name in names for rate in (1e-2, *rates.values())]
    table = pd.DataFrame(rows).drop_duplicates()
    return table.assign(chosen=table["rate"] == table["arm"].map(lambda name: rates.get(name, 1e-2)))


@pytest.fixture(scope="module")
def trained_once(settings: Params, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths, "RUNS", tmp_path_factory.mktemp("runs"))
        yield claim.runs(settings, chosen_at(settings, {}))


@pytest.fixture(scope="module")
def seen_once(settings: Params, trained_once: Runs) -> claim.Seen:
    return claim.inside(settings, trained_once)


@pytest.fixture(scope="module")
def initial(settings: Params) -> pd.DataFrame:
    return claim.initial(settings)


@pytest.fixture
def trained(trained_once: Runs) -> Runs:
    """A copy that a test may change."""
    return {name: list(records) for name, records in trained_once.items()}


@pytest.fixture
def seen(seen_once: claim.Seen) -> claim.Seen:
    return {name: list(pairs) for name, pairs in seen_once.items()}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def of_powers(blocks: int, outputs: float, reads: float, embedding: float = 1.0) -> Dilution:
    """A model whose blocks put out b^outputs and read b^reads, with the embedding's part everywhere the same."""
    numbers = np.arange(1, blocks + 1).repeat(2).astype(float)
    read = np.append(numbers, blocks + 1) ** (2 * reads)
    parts = np.where(np.tri(2 * blocks + 1, dtype=bool), embedding, np.nan)
    return Dilution(reads=read, outputs=numbers ** (2 * outputs) / 2, parts=parts, unexplained=0.0)


# --- questions ------------------------------------------------------------------------------------


def test_every_question_is_answered_once(
    settings: Params, initial: pd.DataFrame, trained: Runs, seen: claim.Seen
) -> None:
    checks = [*claim.checks_initial(settings, initial), *claim.checks_inside(settings, trained, seen, seen, seen)]
    names = [check.name for check in checks]
    assert sorted(names) == sorted(claim.QUESTIONS)
    assert claim.KEY in names
    assert {check.sentence for check in checks} == {"B2a", "B2b", "A4.1c"}
    assert not [check.statement for check in checks if "{" in check.statement]
    assert all(row.ours for row in claim.published(checks))
    measured = [check.name for check in checks if check.estimate.value is None]
    assert measured == []


# --- exact ----------------------------------------------------------------------------------------


def test_controls_hold_their_known_values(settings: Params, initial: pd.DataFrame) -> None:
    found = by_name(claim.checks_initial(settings, initial))
    assert found["adds_up"].outcome == found["full_starts_alike"].outcome == "holds"
    standard = initial[initial["arm"].isin([exact.PRE, exact.PLAIN, exact.LNS])]
    assert (standard["embedding_left"] == 1).all()
    assert (standard["embedding"] * standard["growth"]).tolist() == pytest.approx([1.0] * len(standard))


def test_untrained_streams_are_as_theory_says() -> None:
    """At width 64: plain init grows by the block, scaled init by the same at every depth, Post-LN keeps its size."""
    size = exact.Exact(depths=(3, 9), seeds=2, tokens=16, width=64)
    table = exact.initial_table(size).groupby(["arm", "depth"]).mean()
    mean = {(name, at, measure): float(table[measure][name, at]) for name, at in table.index for measure in table}
    for depth in size.depths:
        low, high = exact.growth_band(depth)
        assert low < mean[exact.PLAIN, depth, "growth"] < high
        assert mean[exact.POST, depth, "growth"] == pytest.approx(1, abs=0.1)
    assert mean[exact.PRE, 9, "growth"] == pytest.approx(mean[exact.PRE, 3, "growth"], rel=0.15)
    assert mean[exact.LNS, 9, "growth"] < mean[exact.PLAIN, 9, "growth"] / 2
    assert mean[exact.POST, 9, "embedding_left"] < 2e-2


def test_exponents_by_hand() -> None:
    table = pd.DataFrame(
        [
            {"arm": "one", "depth": depth, "seed": seed, "share": depth**-exponent, "lost": depth - 4.0}
            for depth in (2, 4, 8)
            for seed, exponent in ((0, 1.0), (1, 0.5))
        ]
    )
    assert exact.depth_exponents(table, "one", "share") == pytest.approx([-1, -0.5])
    assert all(map(math.isnan, exact.depth_exponents(table, "one", "lost")))
    assert exact.growth_band(4) == (3, 7)
    assert claim.layer_exponent([1, 2, 3]) == pytest.approx(1)


# --- inside ---------------------------------------------------------------------------------------


def test_estimates_of_models_that_are_known(settings: Params, trained: Runs) -> None:
    """Pre-LN learns to put out b on a stream of b; Full to put out b^(1/2) and to read more of all sources."""
    flat = of_powers(3, 0.0, 0.0)
    deep = {
        exact.PRE: claim.Pair(flat, of_powers(3, 1.0, 1.0)),
        exact.PLAIN: claim.Pair(flat, flat),
        exact.LNS: claim.Pair(flat, of_powers(3, 0.0, 0.5)),
        exact.FULL: claim.Pair(flat, of_powers(3, 0.5, 1.0, embedding=10.0)),
    }
    seen: claim.Seen = {claim.at_depth(method, 3): [pair, pair] for method, pair in deep.items()}
    shallow = claim.Pair(of_powers(2, 0.0, 0.0), of_powers(2, 0.0, 1.0))
    seen |= {claim.at_depth(method, 2): [shallow, shallow] for method in (exact.PRE, exact.POST)}
    same = dict(seen) | {claim.at_depth(exact.PRE, 2): [claim.Pair(flat, of_powers(2, 0.0, 0.5))] * 2}
    same |= {claim.at_depth(exact.LNS, 3): [claim.Pair(flat, of_powers(3, 0.0, 1.5))] * 2}
    same |= {claim.at_depth(exact.FULL, 3): [claim.Pair(flat, of_powers(3, 0.25, 1.0, embedding=100.0))] * 2}
    at_deep = dict(seen) | {claim.at_depth(exact.PRE, 2): [claim.Pair(flat, of_powers(2, 0.0, 0.0))] * 2}
    at_deep |= {claim.at_depth(exact.LNS, 3): [claim.Pair(flat, of_powers(3, 0.0, 2.0))] * 2}
    del at_deep[claim.at_depth(exact.FULL, 3)]
    found = by_name(claim.checks_inside(settings, trained, seen, same, at_deep))
    expected = {
        "stream_grows": 16,
        "pre_controlled_trained": 9,
        "post_accumulates_trained": 9,
        "post_keeps_trained": 1,
        "embedding_same_rate": -math.log(16 / 3) / math.log(3 / 2),
        "embedding_deep_rate": -math.log(16) / math.log(3 / 2),
        "embedding_trained": -math.log(16 / 9) / math.log(3 / 2),
        "first_same_rate": -math.log(16 / 3) / math.log(3 / 2),
        "first_deep_rate": -math.log(16) / math.log(3 / 2),
        "first_trained": -math.log(16 / 9) / math.log(3 / 2),
        "embedding_full_same_rate": 2,
        "embedding_full": 1,
        "first_full_same_rate": 2,
        "first_full": 1,
        "growth_lns_same_rate": math.log10(64 / 16),
        "growth_lns_deep_rate": math.log10(256 / 16),
        "growth_lns_trained": math.log10(4 / 16),
        "outputs_grow": 1,
        "outputs_grow_plain": 0,
        "ratio_kept": 0,
        "outputs_full_same_rate": -0.75,
        "outputs_full": -0.5,
    }
    values = {name: found[name].estimate.value for name in expected}
    assert values == pytest.approx(expected, abs=1e-5)
    assert found["outputs_grow_plain"].outcome == "fails"
    assert found["outputs_full"].outcome == "holds"


def test_what_is_compared_at_one_rate_is_trained_at_it(settings: Params, trained: Runs) -> None:
    """Pre-LN of 3 blocks has a best rate of its own; the others are the runs of stage two."""
    own = chosen_at(settings, {"Pre-LN, 3 blocks": 3e-3})
    table = claim.at_same_rate(settings, own)
    assert set(own[own["chosen"]]["rate"]) == {1e-2, 3e-3}
    chosen = table[table["chosen"]]
    compared = ["Pre-LN, 2 blocks", "Pre-LN, 3 blocks", "LayerNorm scaling, 3 blocks", "Full, 3 blocks"]
    assert chosen["arm"].tolist() == compared
    assert set(chosen["rate"]) == {claim.same_rate(settings)} == {1e-2}
    assert claim.runs(settings, table) == {name: trained[name] for name in chosen["arm"]}
    assert claim.same_rate(params.preset("cpu")) == 1e-2


def test_the_other_rate_is_the_best_of_the_deepest(settings: Params) -> None:
    """Which 3 blocks of Pre-LN alone have tried here, as a rate beyond the list may be."""
    own = chosen_at(settings, {"Pre-LN, 3 blocks": 3e-3})
    own = own[(own["rate"] == 1e-2) | (own["arm"] == "Pre-LN, 3 blocks")]
    assert claim.deep_rate(settings, own) == 3e-3
    table = claim.at_deep_rate(settings, own)
    chosen = table[table["chosen"]]
    assert chosen["arm"].tolist() == ["Pre-LN, 2 blocks", "Pre-LN, 3 blocks", "LayerNorm scaling, 3 blocks"]
    assert set(chosen["rate"]) == {3e-3}
    assert set(table["rate"]) == {3e-3, 1e-2}


def test_losses_are_told_at_every_rate(trained: Runs) -> None:
    """Pre-LN of 3 blocks once more, as if at 0.003, where it ends at a loss of 1."""
    again = [
        record.model_copy(update={"config": record.config.model_copy(update={"learning_rate": 3e-3}), "test_loss": 1.0})
        for record in trained["Pre-LN, 3 blocks"]
    ]
    table = claim.losses(trained, trained, {"Pre-LN, 3 blocks": again})
    assert list(table.index) == list(trained)
    assert (table["own best rate"] == "0.01").all()
    assert table["test loss"].tolist() == table["test loss at 0.01"].tolist()
    assert [name for name, told in table["test loss at 0.003"].items() if told] == ["Pre-LN, 3 blocks"]
    assert table.loc["Pre-LN, 3 blocks", "test loss at 0.003"] == "1 [1, 1] (n=2)"


def test_post_ln_keeps_less_than_pre_ln(seen: claim.Seen) -> None:
    for post, pre in zip(seen["Post-LN, 2 blocks"], seen["Pre-LN, 2 blocks"], strict=True):
        assert post is not None
        assert pre is not None
        assert pre.trained.embedding_left == 1 != post.trained.embedding_left
        assert max(post.trained.unexplained, pre.trained.unexplained) < 1e-5


def test_taking_apart_is_the_same_twice(settings: Params, trained: Runs, seen: claim.Seen) -> None:
    again = claim.inside(settings, trained)
    assert claim.inside_table(again).equals(claim.inside_table(seen))


# --- runs that diverged ---------------------------------------------------------------------------


def test_diverged_run_is_not_measured(settings: Params, trained: Runs, initial: pd.DataFrame) -> None:
    for name in ("Pre-LN, 3 blocks", "Post-LN, 2 blocks"):
        trained[name][0] = diverged(trained[name][0])
    seen = claim.inside(settings, trained)
    assert seen["Pre-LN, 3 blocks"][0] is None
    found = by_name(claim.checks_inside(settings, trained, seen, seen, seen))
    left = {"outputs_grow_plain", "pre_controlled_trained"}
    for name, check in found.items():
        assert (check.estimate.value is None) == (name not in left), name
        assert check.outcome == "undecided" or name in left, name
    assert claim.inside_table(seen).loc[[("Pre-LN, 3 blocks", "trained")]].isna().all(axis=None)
    drawn = figure.draw(settings, initial, trained, seen, seen)
    drawn.canvas.draw()
    plt.close(drawn)


def test_one_seed_is_undecided(settings: Params, trained: Runs, seen: claim.Seen) -> None:
    first = {name: records[:1] for name, records in trained.items()}
    one = {name: pairs[:1] for name, pairs in seen.items()}
    found = claim.checks_inside(settings, first, one, one, one)
    assert {check.outcome for check in found} == {"undecided"}
    assert "no interval" in str(found[0].estimate)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"depths": [2]}, "depths must be two or more that increase from at least 2, got [2]"),
        ({"depths": []}, "depths must be two or more"),
        ({"depths": [3, 2]}, "depths must be two or more that increase from at least 2, got [3, 2]"),
        ({"depths": [1, 2]}, "depths must be two or more that increase from at least 2, got [1, 2]"),
        ({"middle": 4}, "middle 4 must be one of depths, [2, 3]"),
        ({"learning_rates": []}, "learning_rates: "),
        ({"post_learning_rates": [-1.0]}, "post_learning_rates"),
        ({"exact": {"depths": [4]}}, "exact.depths: "),
        ({"exact": {"seeds": 1}}, "exact.seeds: "),
        (
            {"criteria": {"outputs_gro": {"above": 0}}},
            "criteria.outputs_gro: unknown parameter; did you mean 'outputs_grow'?",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_settings_are_refused_by_sentence(section: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        params.load("smoke", {"claims": {SECTION: section}})
    assert words in str(refused.value)


def test_scaled_init_is_needed_beside_plain_init() -> None:
    with pytest.raises(UserError, match="weight_init is plain; it must be depth_scaled"):
        params.load("smoke", {"decoder": {"weight_init": "plain"}})


def test_cpu_preset_keeps_to_its_budget() -> None:
    """Blocks times steps of what no other claim trains: Pre-LN's shallowest with two arms at one rate and with one arm
    at the other, three arms."""
    settings = params.preset("cpu")
    section, seeds = settings.claims.prenorm_dilution, len(settings.seeds)
    cost = seeds * settings.optimisation.steps * (2 * section.depths[0] + 3 * section.depths[-1])
    for arm in claim.arms(settings):
        if arm.name.startswith((exact.PLAIN, exact.LNS, exact.POST)):
            steps = seeds * settings.optimisation.steps + len(arm.rates) * settings.sweep.steps
            cost += arm.config.model.depth * steps
    assert cost < 106_000
