"""What dropping blocks does to one run's model: drop curves, single deletions, and a short healing.

Jobs over runs go side by side. Orders are chosen on validation data; what dropping costs is the test loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from reslab import data, influence
from reslab.models.decoder import Decoder
from reslab.schema import Settings
from reslab.side_by_side import side_by_side
from reslab.surgery import skipped
from reslab.sweep import Execution, trained_model
from reslab.training import RunConfig, RunRecord, build, evaluate, optimisation_steps

__all__ = [
    "ANGULAR",
    "BY_INFLUENCE",
    "BY_INFLUENCE_AGAIN",
    "BY_LOSS",
    "LAST_FIRST",
    "ORDERS",
    "Healed",
    "Look",
    "Measured",
    "Part",
    "above_the_ends",
    "heal_all",
    "measure_all",
    "quarter",
    "random_name",
    "whole_losses",
]

BY_LOSS = "validation loss"
BY_INFLUENCE = "Block Influence"
BY_INFLUENCE_AGAIN = "Influence again"
ANGULAR = "angular distance"
LAST_FIRST = "last first"
ORDERS = (BY_LOSS, BY_INFLUENCE, BY_INFLUENCE_AGAIN, ANGULAR, LAST_FIRST)
"""How it is decided which blocks go, besides at random."""


def random_name(number: int) -> str:
    return f"random {number}"


def quarter(depth: int) -> int:
    """A quarter of the blocks, and at least one."""
    return max(1, depth // 4)


class Look(Settings):
    """How closely a model is looked at."""

    choosing: int = Field(ge=2)
    """Validation examples by which orders are chosen."""
    judging: int = Field(ge=2)
    """Test examples on which a loss is measured."""
    random_orders: int = Field(ge=1)


class Part:
    """A task with fewer held-out examples, evenly spaced, and with the training batches from `first_step` on."""

    CHUNK = 64
    """Held-out examples at once."""

    def __init__(self, task: data.Task, examples: int, first_step: int = 0) -> None:
        self.task, self.examples, self.first_step = task, examples, first_step

    def context_free_loss(self, split: data.Split) -> float:
        """That of the best guess without context, on these very examples of the split."""
        if not isinstance(self.task, data.Text):
            return self.task.context_free_loss(split)
        return float(-self.task.corpus.unigram()[self.examples_of(split)[1].numpy()].mean())

    def batch(self, seed: int, step: int, size: int) -> data.Batch:
        return self.task.batch(seed, self.first_step + step, size)

    def examples_of(self, split: data.Split) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the chosen examples, [N, T] each; all where there are no more than asked for."""
        batches = list(self.task.held_out(split))
        inputs = torch.cat([part for part, _ in batches if isinstance(part, Tensor)])
        targets = torch.cat([part for _, part in batches])
        count = min(self.examples, len(inputs))
        places = torch.linspace(0, len(inputs) - 1, count, dtype=torch.float64).round().long()
        return inputs[places], targets[places]

    def held_out(self, split: data.Split) -> Iterator[data.Batch]:
        inputs, targets = self.examples_of(split)
        yield from zip(inputs.split(self.CHUNK), targets.split(self.CHUNK), strict=True)


# --- drop curves ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One model, whole and with blocks missing. Losses are test losses in nats; not numbers where the run diverged."""

    loss: float
    """Of the whole model."""
    gain: float
    """What the whole model gained: the context-free loss less its own."""
    worth: float
    """What its blocks gained, of which costs are shares: see `above_the_ends`, without which it is `gain`."""
    influence: tuple[float, ...]
    """BI of each block, on validation data."""
    predicted: tuple[float, ...]
    """1 - sqrt(S_l / S_{l+1}) of each block; see `influence.predicted_influences`. Of connection `add` alone."""
    single: tuple[float, ...]
    """Loss added by dropping each block alone."""
    curves: dict[str, tuple[float, ...]]
    """Loss added by dropping 1, 2, ... blocks, by order."""
    dropped: dict[str, tuple[tuple[int, ...], ...]]
    """Which blocks these are."""
    greedy: tuple[float, ...] = ()
    """Loss added by dropping 1, 2, ... blocks by validation loss, as far as the order was followed."""

    def share(self, cost: float) -> float:
        """A cost as a share of what the blocks gained; not a number where that is nothing, so that none can be lost."""
        return cost / self.worth if self.worth > 0 else math.nan

    def shares(self, order: str) -> list[float]:
        """A drop curve as shares of what the blocks gained."""
        return [self.share(cost) for cost in self.curves[order]]

    def random_curve(self) -> list[float]:
        """The mean over the random orders, in nats."""
        drawn = [curve for name, curve in self.curves.items() if name.startswith("random")]
        return [sum(costs) / len(costs) for costs in zip(*drawn, strict=True)]

    @property
    def interaction(self) -> float:
        """1 - (sum of the costs of dropping each block alone) / (cost of dropping them together), a quarter of them.

        Both are sums over the random sets. 0 where blocks contribute independently; above 0 where they stand in for
        each other (alone each is dispensable, together they are not), below where one is worthless without another.
        """
        sets = [sets[quarter(len(self.single)) - 1] for name, sets in self.dropped.items() if name.startswith("random")]
        together = sum(c[quarter(len(self.single)) - 1] for n, c in self.curves.items() if n.startswith("random"))
        alone = sum(self.single[block] for blocks in sets for block in blocks)
        return 1 - alone / together if together else math.nan


def _measure(
    config: RunConfig, look: Look, kinds: Collection[str], most: int, trained: bool, to_the_last: bool
) -> Measured:
    """The model of a run, after training or before, with up to `most` blocks dropped in orders of these kinds.

    With `to_the_last` the order by validation loss is followed until one block is left.
    """
    model = _decoder(config, trained)
    task = data.load(config.task)
    choosing, judging = Part(task, look.choosing), Part(task, look.judging)
    inputs = choosing.examples_of("validation")[0].to(config.device.kind)
    depth = config.model.depth

    def without(gone: Collection[int], split: data.Split) -> float:
        with skipped(model.blocks, gone):
            found = evaluate(config, choosing if split == "validation" else judging, model, split)
        return math.inf if found is None else found[0]

    xs = influence.reads(model, inputs)
    influences = influence.block_influences(xs)
    known: dict[frozenset[int], float] = {}
    by_loss: tuple[int, ...] = ()
    orders = {random_name(number): influence.random_order(depth, number) for number in range(look.random_orders)}
    if BY_INFLUENCE in kinds:
        orders[BY_INFLUENCE] = influence.by_influence(influences)
    if BY_INFLUENCE_AGAIN in kinds:
        orders[BY_INFLUENCE_AGAIN] = influence.by_influence_again(model, model.blocks, inputs, most)
    if BY_LOSS in kinds:
        reach = depth - 1 if to_the_last else most
        orders[BY_LOSS] = by_loss = influence.by_loss(lambda gone: without(gone, "validation"), depth, reach)
    if LAST_FIRST in kinds:
        orders[LAST_FIRST] = tuple(reversed(range(depth)))
    sets = {name: influence.first_of(order, most) for name, order in orders.items()}
    if ANGULAR in kinds:
        sets[ANGULAR] = [influence.nearest_run(xs, length) for length in range(1, most + 1)]
    whole = without((), "test")

    def added(gone: frozenset[int]) -> float:
        if gone not in known:
            known[gone] = without(gone, "test") - whole
        return known[gone]

    gain = judging.context_free_loss("test") - whole
    return Measured(
        loss=whole,
        gain=gain,
        worth=gain,
        influence=tuple(influences),
        predicted=tuple(influence.predicted_influences(xs)),
        single=tuple(added(frozenset({block})) for block in range(depth)),
        curves={name: tuple(map(added, gone)) for name, gone in sets.items()},
        dropped={name: tuple(tuple(sorted(blocks)) for blocks in gone) for name, gone in sets.items()},
        greedy=tuple(map(added, influence.first_of(by_loss, len(by_loss)))),
    )


def _decoder(config: RunConfig, trained: bool) -> Decoder:
    model = trained_model(config) if trained else build(config.model, config.seed)
    assert isinstance(model, Decoder)
    return model.to(config.device.kind)


def _unmeasured(depth: int, look: Look, kinds: Collection[str], most: int) -> Measured:
    """Of a run that diverged: no number, and no set of blocks."""
    names = [*map(random_name, range(look.random_orders)), *kinds]
    lost = math.nan
    none, curves = (lost,) * depth, dict.fromkeys(names, (lost,) * most)
    return Measured(lost, lost, lost, none, none, none, curves, dict.fromkeys(names, ((),) * most), none[1:])


def measure_all(
    records: Sequence[RunRecord],
    look: Look,
    execution: Execution,
    *,
    kinds: Sequence[str] = ORDERS,
    most: int,
    trained: bool = True,
    to_the_last: bool = False,
) -> list[Measured]:
    """Each run's model, after training or before, with 1 to `most` blocks dropped; in the order of the records.

    With `to_the_last` the order by validation loss is followed until one block is left: see `Measured.greedy`.
    """

    def job(record: RunRecord) -> Measured:
        if trained and record.outcome == "diverged":
            return _unmeasured(record.config.model.depth, look, kinds, most)
        return _measure(record.config, look, kinds, most, trained, to_the_last)

    return side_by_side(job, records, execution, "dropping blocks")


def whole_losses(records: Sequence[RunRecord], look: Look, execution: Execution) -> list[float]:
    """Test loss of each run's model, on the examples that `measure_all` judges on; not a number where it diverged."""

    def job(record: RunRecord) -> float:
        if record.outcome == "diverged":
            return math.nan
        task = Part(data.load(record.config.task), look.judging)
        found = evaluate(record.config, task, _decoder(record.config, trained=True), "test")
        return math.inf if found is None else found[0]

    return side_by_side(job, records, execution, "measuring whole models")


def above_the_ends(found: Sequence[Measured], ends: Sequence[float]) -> list[Measured]:
    """The same models, whose blocks are worth what they end below the loss of embedding and head alone, by seed."""
    return [replace(model, worth=loss - model.loss) for model, loss in zip(found, ends, strict=True)]


# --- healing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Healed:
    """Test losses in nats before and after some more steps: whole, with blocks dropped, of embedding and head alone.

    Not numbers where one of the runs diverged, infinite where training on did.
    """

    whole_before: float
    dropped_before: float
    whole_after: float
    dropped_after: float
    ends_before: float
    ends_after: float

    def cost(self, *, healed: bool) -> float:
        """What the dropped blocks cost, as a share of what all blocks gained; all three trained on where `healed`."""
        whole, dropped, ends = self.whole_before, self.dropped_before, self.ends_before
        if healed:
            whole, dropped, ends = self.whole_after, self.dropped_after, self.ends_after
        worth = ends - whole
        return (dropped - whole) / worth if worth > 0 else math.nan


def heal_all(
    records: Sequence[RunRecord],
    measured: Sequence[Measured],
    ends: Sequence[RunRecord],
    look: Look,
    steps: int,
    execution: Execution,
) -> list[Healed]:
    """Each run trained on for `steps` steps, once whole and once without the quarter of lowest Block Influence.

    So is the same seed's run of embedding and head alone, one of `ends`. All on the batches that would have come
    next, at the rate at which the schedule ended (a thousandth of its peak where that is 0), with AdamW's averages
    anew.
    """

    def job(of_one_seed: tuple[RunRecord, Measured, RunRecord]) -> Healed:
        record, model, alone = of_one_seed
        if "diverged" in (record.outcome, alone.outcome):
            return Healed(*[math.nan] * 6)
        gone = model.dropped[BY_INFLUENCE][quarter(record.config.model.depth) - 1]
        whole, dropped = (_heal(record.config, blocks, look, steps) for blocks in ((), gone))
        without = _heal(alone.config, (), look, steps)
        return Healed(whole[0], dropped[0], whole[1], dropped[1], *without)

    return side_by_side(job, list(zip(records, measured, ends, strict=True)), execution, "healing")


def _heal(config: RunConfig, gone: Collection[int], look: Look, steps: int) -> tuple[float, float]:
    """Test loss of the run's model without the blocks `gone`, before and after `steps` more steps without them."""
    model = _decoder(config, trained=True)
    recipe = config.optimisation
    after = config.model_copy(
        update={
            "learning_rate": config.learning_rate * max(recipe.final_rate, 1e-3),
            "optimisation": recipe.model_copy(update={"steps": steps, "warmup": 0.0, "final_rate": 1.0}),
            "device": config.device.model_copy(update={"compile": False}),
        }
    )
    task = Part(data.load(config.task), look.judging, first_step=recipe.steps)
    with skipped(model.blocks, gone):
        before = evaluate(after, task, model, "test")
        for loss, _ in optimisation_steps(after, task, model):
            if not math.isfinite(loss):
                break
        healed = evaluate(after, task, model, "test")
    return tuple(math.inf if found is None else found[0] for found in (before, healed))  # type: ignore[return-value]
