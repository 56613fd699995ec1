"""Comparisons: every arm at the rate that was best for it, chosen apart from the seeds it is judged by."""

import math
from collections.abc import Sequence

import pandas as pd
import pytest

from reslab import comparison
from reslab.comparison import Arm, RateSweep, arms_summary, choose_rates, next_rate, train_arms
from reslab.sweep import Execution
from reslab.training import RunConfig, RunRecord

ALONE = Execution(workers=1)
SWEEP = RateSweep(seed=99, steps=5, beyond=0)


def record(config: RunConfig, loss: float | None) -> RunRecord:
    return RunRecord(
        config=config,
        outcome="diverged" if loss is None else "trained",
        parameters=1,
        train_loss=(),
        gradient_norm=(),
        context_free_loss=3.0,
        validation_loss=loss,
        test_loss=loss,
        test_accuracy=None if loss is None else 0.5,
        profile_before={},
        profile_after={},
    )


class Sweep:
    """Stands for `run_all`: each run's validation loss is looked up by the arm's batch size and the rate."""

    def __init__(self, losses: dict[tuple[int, float], float | None]) -> None:
        self.losses = losses
        self.asked: list[RunConfig] = []

    def __call__(
        self, configs: Sequence[RunConfig], execution: Execution, label: str, *, weights: bool = False
    ) -> list[RunRecord]:
        self.asked += configs
        return [record(c, self.losses.get((c.optimisation.batch, c.learning_rate), 9.0)) for c in configs]


def arm(config: RunConfig, name: str, batch: int, rates: tuple[float, ...]) -> Arm:
    recipe = config.optimisation.model_copy(update={"batch": batch})
    return Arm(name, config.model_copy(update={"optimisation": recipe}), rates)


def swept(monkeypatch: pytest.MonkeyPatch, losses: dict[tuple[int, float], float | None]) -> Sweep:
    sweep = Sweep(losses)
    monkeypatch.setattr(comparison, "run_all", sweep)
    return sweep


def chosen(table: pd.DataFrame) -> dict[str, float]:
    rows = table[table["chosen"]]
    assert rows["arm"].is_unique
    return dict(zip(rows["arm"], rows["rate"], strict=True))


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((2.0, 1.5, 1.8), 0.01),
        ((1.2, 1.5, 1.8), 0.001),
        ((2.0, 1.5, 1.4), 0.1),
        ((2.0, 1.5, None), 0.01),
        ((None, None, 5.0), 0.1),
        ((1.5, 1.5, 1.5), 0.001),
        ((None, None, None), 0.001),
    ],
)
def test_lowest_validation_loss_is_chosen(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch, losses: tuple[float | None, ...], best: float
) -> None:
    swept(monkeypatch, {(4, rate): loss for rate, loss in zip((0.001, 0.01, 0.1), losses, strict=True)})
    table = choose_rates([arm(tiny, "one", 4, (0.1, 0.001, 0.01))], SWEEP, ALONE)
    assert chosen(table) == {"one": best}


def test_each_arm_has_its_own_rate(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    swept(monkeypatch, {(4, 0.01): 1.0, (4, 0.1): 2.0, (5, 0.01): 2.0, (5, 0.1): None, (5, 0.5): 1.9})
    arms = [arm(tiny, "one", 4, (0.01, 0.1)), arm(tiny, "two", 5, (0.01, 0.1, 0.5))]
    table = choose_rates(arms, SWEEP, ALONE)
    assert chosen(table) == {"one": 0.01, "two": 0.5}
    assert table["arm"].tolist() == ["one", "one", "two", "two", "two"]
    assert table["outcome"].tolist() == ["trained", "trained", "trained", "diverged", "trained"]
    assert list(table) == ["arm", "setting", "rate", "validation_loss", "outcome", "chosen"]


def test_rates_are_chosen_at_their_own_seed_and_length(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = swept(monkeypatch, {})
    choose_rates([arm(tiny, "one", 4, (0.1, 0.01))], SWEEP, ALONE)
    assert [(c.seed, c.optimisation.steps, c.learning_rate) for c in sweep.asked] == [(99, 5, 0.01), (99, 5, 0.1)]
    assert {c.optimisation.batch for c in sweep.asked} == {4}
    assert all(c.validation_only for c in sweep.asked)


@pytest.mark.parametrize(
    ("losses", "tried"),
    [
        ({0.01: 1.0, 0.03: 1.1, 0.003: 1.1}, [0.003, 0.01, 0.03]),
        ({0.01: 1.2, 0.03: 1.1, 0.1: 1.0, 0.3: 1.1}, [0.01, 0.03, 0.1, 0.3]),
        ({0.01: 1.0, 0.03: None, 0.003: 0.9, 0.001: 0.8}, [0.0003, 0.001, 0.003, 0.01, 0.03]),
        ({0.01: 1.0, 0.03: 1.1, 0.003: 0.9, 0.001: 0.8, 0.0003: 0.7}, [0.0003, 0.001, 0.003, 0.01, 0.03]),
        ({0.01: None, 0.03: None, 0.003: 2.0}, [0.001, 0.003, 0.01, 0.03]),
    ],
)
def test_rates_beyond_the_list_are_tried_while_the_best_is_at_its_end(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch, losses: dict[float, float | None], tried: list[float]
) -> None:
    """At most three of them."""
    sweep = swept(monkeypatch, {(4, rate): loss for rate, loss in losses.items()})
    table = choose_rates([arm(tiny, "one", 4, (0.01, 0.03))], SWEEP.model_copy(update={"beyond": 3}), ALONE)
    assert table["rate"].tolist() == tried
    assert len(sweep.asked) == len(tried)
    best = min(losses, key=lambda rate: math.inf if losses[rate] is None else float(losses[rate] or 0))
    assert chosen(table) == {"one": best}


def test_only_arms_and_settings_whose_best_is_at_an_end_are_swept_further(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(monkeypatch, {(4, 0.01): 1.0, (5, 0.01): 2.0, (5, 0.1): 1.5, (6, 0.1): 1.2})
    inside = arm(tiny, "inside", 4, (0.001, 0.01, 0.1))
    two = Arm("two", arm(tiny, "", 5, ()).config, (0.01, 0.1), {"batch 6": arm(tiny, "", 6, ()).config})
    single = arm(tiny, "single", 7, (0.1,))
    table = choose_rates([inside, two, single], SWEEP.model_copy(update={"beyond": 3}), ALONE)
    rows = [table[table["arm"] == name] for name in ("inside", "two", "single")]
    tried = [each[["setting", "rate"]].to_numpy().tolist() for each in rows]
    assert tried[0] == [["", 0.001], ["", 0.01], ["", 0.1]]
    assert tried[1] == [["", 0.01], ["", 0.1], ["", 0.3], ["batch 6", 0.01], ["batch 6", 0.1], ["batch 6", 0.3]]
    assert tried[2] == [["", 0.1]]
    assert chosen(table) == {"inside": 0.01, "two": 0.1, "single": 0.1}


@pytest.mark.parametrize(
    ("rate", "below", "above"), [(0.003, 0.001, 0.01), (0.01, 0.003, 0.03), (1.0, 0.3, 3.0), (0.02, 0.01, 0.03)]
)
def test_next_rates_are_those_that_lists_have(rate: float, below: float, above: float) -> None:
    assert (next_rate(rate, up=False), next_rate(rate, up=True)) == (below, above)


def test_arms_are_trained_in_full_at_their_rates(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = swept(monkeypatch, {})
    arms = [arm(tiny, "one", 4, (0.01, 0.1)), arm(tiny, "two", 5, (0.01, 0.1))]
    rates = pd.DataFrame(
        {
            "arm": ["one", "one", "two", "two"],
            "setting": "",
            "rate": [0.01, 0.1, 0.01, 0.1],
            "chosen": [True, False, False, True],
        }
    )
    trained = train_arms(arms, rates, (7, 3), ALONE)
    asked = [(c.optimisation.batch, c.learning_rate, c.seed, c.optimisation.steps) for c in sweep.asked]
    assert asked == [(4, 0.01, 7, 6), (4, 0.01, 3, 6), (5, 0.1, 7, 6), (5, 0.1, 3, 6)]
    assert list(trained) == ["one", "two"]
    assert [[(r.config.optimisation.batch, r.config.seed) for r in records] for records in trained.values()] == [
        [(4, 7), (4, 3)],
        [(5, 7), (5, 3)],
    ]


def test_arms_of_a_seed_see_the_same_batches(tiny: RunConfig) -> None:
    one, two = arm(tiny, "one", 4, (0.01,)).at(0.01, 3), arm(tiny, "two", 4, (0.5,)).at(0.5, 3)
    assert (one.task, one.seed) == (two.task, two.seed)
    assert one.model_dump(exclude={"learning_rate"}) == two.model_dump(exclude={"learning_rate"})


def test_settings_are_swept_at_the_best_rate_and_those_beside_it(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best pair found is trained in full; a setting that loses at the rate that is best without it is left."""
    losses = {(4, 0.001): 2.0, (4, 0.01): 1.9, (4, 0.1): 1.8, (5, 0.1): 1.7, (5, 0.01): 1.5, (5, 0.001): 1.6}
    sweep = swept(monkeypatch, {**losses, (6, 0.1): 3.0, (6, 0.01): 0.1})
    plain = arm(tiny, "one", 4, (0.001, 0.01, 0.1))
    others = {f"batch {batch}": arm(tiny, "", batch, ()).config for batch in (5, 6)}
    both = Arm("one", plain.config, plain.rates, others)
    table = choose_rates([both], SWEEP, ALONE)
    tried = [(c.optimisation.batch, c.learning_rate) for c in sweep.asked]
    assert tried == [(4, 0.001), (4, 0.01), (4, 0.1), (5, 0.1), (6, 0.1), (5, 0.01), (5, 0.001)]
    assert table[table["chosen"]][["setting", "rate"]].to_numpy().tolist() == [["batch 5", 0.01]]
    trained = train_arms([both], table, (7,), ALONE)
    assert (sweep.asked[-1].optimisation.batch, sweep.asked[-1].learning_rate) == (5, 0.01)
    assert arms_summary(table, trained)["one"]["setting"] == "batch 5"  # type: ignore[index]
