"""Methods compared fairly: each at its own best learning rate, on the same seeds.

Two stages. The rate is chosen on validation loss, by short runs at one seed that is used for nothing
else; then fresh seeds run in full at the chosen rate. All arms of a seed see the same batches and start
from the same values of the weights they have in common.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import pandas as pd
from pydantic import AfterValidator, Field

from reslab.schema import Settings
from reslab.sweep import Execution, run_all
from reslab.training import RunConfig, RunRecord

__all__ = [
    "Arm",
    "RateSweep",
    "Rates",
    "Runs",
    "arms_summary",
    "choose_rates",
    "each",
    "held_out",
    "profile_of",
    "train_arms",
]

Runs = dict[str, list[RunRecord]]
"""The records of each arm, in the order of the seeds."""


def _differ(rates: tuple[float, ...]) -> tuple[float, ...]:
    if twice := sorted({rate for rate in rates if rates.count(rate) > 1}):
        raise ValueError(f"{twice[0]:g} is given more than once in {list(rates)}; give each learning rate once")
    return rates


Rates = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1), AfterValidator(_differ)]
"""Learning rates to choose from, all different."""


class RateSweep(Settings):
    """Stage one: how learning rates are chosen."""

    seed: int = Field(ge=0)
    """Used for nothing else: a rate chosen and judged at one seed would favour itself."""
    steps: int = Field(ge=1)
    beyond: int = Field(ge=0)
    """Rates tried beyond an end of an arm's list while the best of it is there, at most."""

    def of(self, steps: int) -> "RateSweep":
        """The same with other steps."""
        return self.model_copy(update={"steps": steps})


@dataclass(frozen=True)
class Arm:
    """One method: a run in all but its seed and learning rate, and the rates to choose from."""

    name: str
    config: RunConfig
    rates: tuple[float, ...]
    settings: Mapping[str, RunConfig] = field(default_factory=dict)
    """Further settings of the method that are swept along with the rate, by name; `config` is the one named ""."""

    @property
    def candidates(self) -> dict[str, RunConfig]:
        return {"": self.config, **self.settings}

    def at(self, rate: float, seed: int, steps: int | None = None, setting: str = "") -> RunConfig:
        config = self.candidates[setting]
        recipe = config.optimisation
        recipe = recipe.model_copy(update={"steps": steps or recipe.steps})
        return config.model_copy(update={"learning_rate": rate, "seed": seed, "optimisation": recipe})


Trial = tuple[Arm, str, float]
"""An arm in one of its settings at a rate."""


def choose_rates(arms: Sequence[Arm], sweep: RateSweep, execution: Execution) -> pd.DataFrame:
    """Stage one: every arm at every rate, for `sweep.steps` steps at `sweep.seed`.

    An arm's further settings are tried at its best rate, and the best setting at the next rates on both sides of its
    best one, until both are known. Beyond either end of an arm's list of several, that is done `sweep.beyond` times at
    most. One row a run, with columns arm, setting, rate, validation_loss, outcome and chosen. A diverged run is never
    chosen unless all of an arm's are; then the lowest rate is.
    """
    table = _swept([(arm, "", rate) for arm in arms for rate in sorted(arm.rates)], sweep, execution)
    further = [(arm, setting, _best_of(arm, table)[1]) for arm in arms for setting in arm.settings]
    while True:
        further += [trial for arm in arms for trial in _beside(arm, table, sweep.beyond) if trial not in further]
        if not further:
            return _with_choice(table, arms)
        table = pd.concat([table, _swept(further, sweep, execution)], ignore_index=True)
        further = []


def _swept(trials: Sequence[Trial], sweep: RateSweep, execution: Execution) -> pd.DataFrame:
    configs = [arm.at(rate, sweep.seed, sweep.steps, setting) for arm, setting, rate in trials]
    shortened = [config.model_copy(update={"validation_only": True}) for config in configs]
    records = run_all(shortened, execution, "choosing learning rates")
    return pd.DataFrame(
        {
            "arm": [arm.name for arm, _, _ in trials],
            "setting": [setting for _, setting, _ in trials],
            "rate": [rate for _, _, rate in trials],
            "validation_loss": [record.validation_loss for record in records],
            "outcome": [record.outcome for record in records],
        }
    )


def _with_choice(table: pd.DataFrame, arms: Sequence[Arm]) -> pd.DataFrame:
    """In the order of arms, settings and rates, with the column chosen."""
    order = {(arm.name, setting): place for place, (arm, setting) in enumerate(_settings(arms))}
    places = [order[pair] for pair in zip(table["arm"], table["setting"], strict=True)]
    table = table.assign(place=places).sort_values(["place", "rate"], ignore_index=True).drop(columns="place")
    return table.assign(chosen=table.index.isin(_best(table)))


def _settings(arms: Sequence[Arm]) -> list[tuple[Arm, str]]:
    return [(arm, setting) for arm in arms for setting in arm.candidates]


def _best(table: pd.DataFrame) -> pd.Series:
    """The row of each arm's lowest validation loss."""
    losses = table["validation_loss"].astype(float).fillna(math.inf)
    return losses.groupby(table["arm"]).idxmin()


def _best_of(arm: Arm, table: pd.DataFrame) -> tuple[str, float]:
    """The setting and the rate of an arm's lowest validation loss so far."""
    tried = table[table["arm"] == arm.name]
    best = tried.loc[_best(tried)].iloc[0]
    return str(best["setting"]), float(best["rate"])


def _beside(arm: Arm, table: pd.DataFrame, beyond: int) -> list[Trial]:
    """The next rates below and above the arm's best one in its setting, where not tried yet.

    They come from its list; beyond an end of a list of several by `next_rate`, as often as is allowed.
    """
    setting, best = _best_of(arm, table)
    rates = sorted(table["rate"][(table["arm"] == arm.name) & (table["setting"] == setting)])
    known = sorted({*rates, *arm.rates})
    below, above = known[: known.index(best)], known[known.index(best) + 1 :]
    outside = sum(not min(arm.rates) <= rate <= max(arm.rates) for rate in rates)
    wanted = below[-1:] + above[:1]
    if len(arm.rates) > 1 and outside < beyond:
        wanted += [next_rate(best, up=up) for up, there in ((False, below), (True, above)) if not there]
    return [(arm, setting, rate) for rate in sorted(wanted) if rate not in rates]


def next_rate(rate: float, *, up: bool) -> float:
    """The nearest of 1, 3, 10, 30, ... and their tenths, above or below a rate."""
    exponent = math.floor(math.log10(rate))
    steps = [float(f"{digit}e{power}") for power in range(exponent - 1, exponent + 2) for digit in (1, 3)]
    return min(step for step in steps if step > rate) if up else max(step for step in steps if step < rate)


def train_arms(
    arms: Sequence[Arm], rates: pd.DataFrame, seeds: Sequence[int], execution: Execution, *, weights: bool = False
) -> Runs:
    """Stage two: every arm at its chosen rate (and setting), in full, at every seed; `weights` as in `run_all`."""
    best = rates[rates["chosen"]]
    chosen = {
        arm: (rate, setting) for arm, rate, setting in zip(best["arm"], best["rate"], best["setting"], strict=True)
    }
    pairs = [(arm, *chosen[arm.name], seed) for arm in arms for seed in seeds]
    configs = [arm.at(rate, seed, setting=setting) for arm, rate, setting, seed in pairs]
    records = run_all(configs, execution, "training", weights=weights)
    return {arm.name: records[i * len(seeds) : (i + 1) * len(seeds)] for i, arm in enumerate(arms)}


# --- what the runs of an arm show -----------------------------------------------------------------


def each(records: Sequence[RunRecord], measure: Callable[[RunRecord], float]) -> list[float]:
    """`measure` of each record; not a number for one that diverged."""
    return [math.nan if record.outcome == "diverged" else measure(record) for record in records]


def held_out(records: Sequence[RunRecord], measure: str = "test_loss") -> list[float]:
    """Test loss or accuracy of each record; not a number for one that diverged."""
    return each(records, lambda record: getattr(record, measure))


def profile_of(record: RunRecord, measure: str, *, trained: bool = True) -> list[float]:
    """A run's profile by block, after or before training; not a number where it could not be measured."""
    places = (record.profile_after if trained else record.profile_before).get(measure, ())
    return [math.nan if value is None else value for value in places]


def arms_summary(chosen: pd.DataFrame, trained: Runs) -> dict[str, object]:
    """Per arm: the rate and whether it lies at the edge of its grid, outcomes and test losses by seed."""
    summary: dict[str, object] = {}
    for name, records in trained.items():
        grid = chosen[chosen["arm"] == name]
        best = grid[grid["chosen"]]
        rate, setting = float(best["rate"].item()), str(best["setting"].item())
        tried = grid["rate"][grid["setting"] == setting]
        summary[name] = {
            "learning_rate": rate,
            **({"setting": setting} if setting else {}),
            "at_edge_of_grid": rate in (tried.min(), tried.max()),
            "parameters": records[0].parameters,
            "outcomes": [record.outcome for record in records],
            "test_loss": [round(r.test_loss, 6) if r.test_loss is not None else None for r in records],
            "test_accuracy": [round(r.test_accuracy, 6) if r.test_accuracy is not None else None for r in records],
        }
    return summary
