"""Methods compared fairly: each at its own best learning rate, on the same seeds.

Two stages. The rate is chosen on validation loss, by short runs at one seed that is used for nothing
else; then fresh seeds run in full at the chosen rate. All arms of a seed see the same batches and start
from the same values of the weights they have in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from reslab.sweep import Execution, run_all
from reslab.training import RunConfig, RunRecord

__all__ = ["Arm", "Runs", "choose_rates", "train_arms"]

Runs = dict[str, list[RunRecord]]
"""The records of each arm, in the order of the seeds."""


@dataclass(frozen=True)
class Arm:
    """One method: a run in all but its seed and learning rate, and the rates to choose from."""

    name: str
    config: RunConfig
    rates: tuple[float, ...]

    def at(self, rate: float, seed: int, steps: int | None = None) -> RunConfig:
        recipe = self.config.optimisation
        recipe = recipe.model_copy(update={"steps": steps or recipe.steps})
        return self.config.model_copy(update={"learning_rate": rate, "seed": seed, "optimisation": recipe})


def choose_rates(arms: Sequence[Arm], seed: int, steps: int, execution: Execution) -> pd.DataFrame:
    """Stage one: every arm at every rate, for `steps` steps at `seed`.

    One row a run, with columns arm, rate, validation_loss, outcome and chosen. A diverged run is
    never chosen unless all of an arm's are; then the lowest rate is.
    """
    trials = [(arm, rate) for arm in arms for rate in sorted(arm.rates)]
    records = run_all([arm.at(rate, seed, steps) for arm, rate in trials], execution, "choosing learning rates")
    table = pd.DataFrame(
        {
            "arm": [arm.name for arm, _ in trials],
            "rate": [rate for _, rate in trials],
            "validation_loss": [record.validation_loss for record in records],
            "outcome": [record.outcome for record in records],
        }
    )
    losses = table["validation_loss"].astype(float).fillna(float("inf"))
    table["chosen"] = table.index.isin(losses.groupby(table["arm"]).idxmin())
    return table


def train_arms(arms: Sequence[Arm], rates: pd.DataFrame, seeds: Sequence[int], execution: Execution) -> Runs:
    """Stage two: every arm at its chosen rate, in full, at every seed."""
    chosen = rates[rates["chosen"]].set_index("arm")["rate"]
    configs = [arm.at(float(chosen[arm.name]), seed) for arm in arms for seed in seeds]
    records = run_all(configs, execution, "training")
    return {arm.name: records[i * len(seeds) : (i + 1) * len(seeds)] for i, arm in enumerate(arms)}
