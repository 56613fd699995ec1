"""Ratios |f| / |x| of one run's model: while it trains, by replaying the run, and once it is trained.

A replay is the run itself, bit for bit on the CPU: the same weights, batches and steps, with the probe on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from reslab import data
from reslab.branches import known_branches
from reslab.experiments.layer_drop_measured import Part
from reslab.health import ResidualHealth
from reslab.models.initialisation import stream_writers
from reslab.probes import outputs_of
from reslab.side_by_side import side_by_side
from reslab.sweep import Execution, trained_model
from reslab.training import RunConfig, RunRecord, build, evaluate, optimisation_steps

__all__ = ["Plant", "Replay", "Watch", "look_all", "multiply_writer", "ratios_of", "replay_all", "without_branch"]


@torch.no_grad()
def multiply_writer(model: nn.Module, sublayer: int, factor: float) -> None:
    """Multiply the matrix by which a sublayer (counted from 0) writes to the stream, in place."""
    stream_writers(model)[sublayer].mul_(factor)


@contextmanager
def without_branch(model: nn.Module, sublayer: int) -> Iterator[None]:
    """Within the context this sublayer's update is zero: the stream passes it unchanged (connection `add`, Pre-LN)."""
    update = known_branches(model)[sublayer].update
    handle = update.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    try:
        yield
    finally:
        handle.remove()


def kind_of(name: str) -> str:
    """What a branch is, attention or mlp, by its name."""
    return name.rpartition(".")[2]


# --- while a run trains ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plant:
    """A fault made before the first step: a sublayer's writing matrix, multiplied."""

    sublayer: int
    factor: float


@dataclass(frozen=True)
class Watch:
    """What to replay: a run, recorded each `every` steps from 0, up to step `last` included."""

    config: RunConfig
    every: int
    last: int
    plant: Plant | None = None
    judged: bool = False
    """Also measure the validation loss where it ends."""


@dataclass(frozen=True)
class Replay:
    """What was seen of it."""

    ratios: pd.DataFrame
    """Columns step, layer, kind, ratio; none of a pass that the run did not reach."""
    losses: tuple[float, ...]
    """Of each step, as far as they are finite."""
    gradients: tuple[float, ...]
    """Norm of the whole gradient of each of these steps."""
    validation_loss: float
    """Not a number where it was not asked for, or is not finite."""

    def at(self, step: int) -> list[float]:
        """The ratios at a recorded step, in the order of the sublayers; none where the run was lost before."""
        values: list[float] = self.ratios.loc[self.ratios["step"] == step, "ratio"].tolist()
        return values if step < len(self.losses) else []

    def largest(self, step: int) -> float:
        """The largest ratio at a step; infinite where the run was lost before, or a ratio is no number."""
        values = self.at(step)
        return math.inf if not values or not all(map(math.isfinite, values)) else max(values)

    def series(self) -> pd.DataFrame:
        """ln of the ratios, a row a recorded step, a column a sublayer."""
        table = self.ratios[self.ratios["step"] < len(self.losses)]
        return table.assign(log=np.log(table["ratio"].clip(lower=1e-12))).pivot(
            index="step", columns="layer", values="log"
        )


def _replay(watch: Watch) -> Replay:
    config = watch.config
    task = data.load(config.task)
    model = build(config.model, config.seed).to(config.device.kind)
    if watch.plant is not None:
        multiply_writer(model, watch.plant.sublayer, watch.plant.factor)
    losses, gradients = [], []
    with ResidualHealth(model, every=watch.every, sequences=0) as health:
        for step, (loss, gradient) in enumerate(optimisation_steps(config, task, model)):
            if not math.isfinite(loss):
                break
            losses.append(loss)
            gradients.append(gradient)
            if step == watch.last < config.optimisation.steps - 1:
                break  # a run's own last step is to be taken
    judged = evaluate(config, task, model, "validation") if watch.judged and len(losses) > watch.last else None
    return Replay(
        ratios=_ratios(health)[["step", "layer", "kind", "ratio"]],
        losses=tuple(losses),
        gradients=tuple(gradients),
        validation_loss=math.nan if judged is None else judged[0],
    )


def replay_all(watches: Sequence[Watch], execution: Execution, label: str) -> list[Replay]:
    """Each replayed, in their order."""
    return side_by_side(_replay, watches, execution, label)


def _ratios(health: ResidualHealth) -> pd.DataFrame:
    table = health.table()
    return table.assign(kind=[kind_of(name) for name in table["name"]])


# --- a model as it is -----------------------------------------------------------------------------


def ratios_of(model: nn.Module, inputs: Tensor) -> pd.DataFrame:
    """One row a sublayer with columns kind, ratio, update_norm, stream_norm, block_influence; inputs [N, T]."""
    model.eval()
    with ResidualHealth(model, sequences=0) as health, torch.no_grad():
        outputs_of(model, inputs)
    return _ratios(health)[["kind", "ratio", "update_norm", "stream_norm", "block_influence"]]


@dataclass(frozen=True)
class Looked:
    """One trained model; empty, with gain not a number, where its run diverged."""

    before: pd.DataFrame
    """`ratios_of` the initial weights, on validation examples."""
    after: pd.DataFrame
    """The same of the trained weights."""
    costs: tuple[float, ...]
    """Validation loss added by leaving out each sublayer alone, in nats."""
    gain: float
    """The context-free loss less that of the whole model."""

    @property
    def lost(self) -> bool:
        return math.isnan(self.gain)

    def column(self, name: str, *, trained: bool = True) -> list[float]:
        values: list[float] = (self.after if trained else self.before)[name].tolist()
        return values


def _look(asked: tuple[RunRecord, int]) -> Looked:
    record, examples = asked
    config = record.config
    if record.outcome == "diverged":
        return Looked(pd.DataFrame(), pd.DataFrame(), (), math.nan)
    task = Part(data.load(config.task), examples)
    inputs = task.examples_of("validation")[0].to(config.device.kind)
    model = trained_model(config).to(config.device.kind)

    def loss() -> float:
        found = evaluate(config, task, model, "validation")
        return math.inf if found is None else found[0]

    whole, costs = loss(), []
    for sublayer in range(len(known_branches(model))):
        with without_branch(model, sublayer):
            costs.append(loss() - whole)
    return Looked(
        before=ratios_of(build(config.model, config.seed).to(config.device.kind), inputs),
        after=ratios_of(model, inputs),
        costs=tuple(costs),
        gain=task.context_free_loss("validation") - whole,
    )


def look_all(records: Sequence[RunRecord], examples: int, execution: Execution) -> list[Looked]:
    """Each run's model, whose weights were kept, on so many validation examples; in the order of the records."""
    return side_by_side(_look, [(record, examples) for record in records], execution, "leaving out sublayers")
