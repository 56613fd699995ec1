"""What the layers of one run's model hold and do: probes and lens by place, blocks skipped, repeated and exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from reslab import data, influence, reading
from reslab.experiments.layer_drop_measured import Part
from reslab.lens import lens_divergence, logit_lens
from reslab.models.decoder import Decoder
from reslab.probes import evaluating
from reslab.schema import Settings
from reslab.side_by_side import side_by_side
from reslab.surgery import repeated, skipped, swapped
from reslab.sweep import Execution, trained_model
from reslab.training import RunConfig, RunRecord, build, evaluate

__all__ = ["CURRENT", "DISTANT", "NEXT", "PREVIOUS", "Look", "Seen", "hop_name", "labels", "properties", "see_all"]

CURRENT, PREVIOUS, DISTANT, NEXT = "current byte", "previous byte", "distant byte", "next byte"
"""What is read off decoders on text, from lexical to abstract."""

KNOWN = 0.01
"""Nats a token that a prediction has to say beyond its mean."""


def far(depth: int) -> int:
    """The distance over which far blocks are exchanged: half the depth."""
    return depth // 2


def hop_name(hops: int) -> str:
    """What is read off decoders that chase pointers: the symbol asked for, and where so many hops from it lead."""
    return "symbol" if hops == 0 else f"{hops} hop{'s' if hops > 1 else ''}"


def properties(task: data.TaskConfig) -> list[str]:
    """What is read off, in the order in which the claim has it appear."""
    if isinstance(task, data.HopsConfig):
        return [hop_name(hops) for hops in range(task.hops + 1)]
    return [CURRENT, PREVIOUS, DISTANT, NEXT]


class Look(Settings):
    """How closely a model is looked at."""

    windows: int = Field(ge=2)
    """Windows of held-out text by which probes are fitted (validation) and scored (test). Pointers: all there are."""
    judging: int = Field(ge=2)
    """Test examples on which exchanged blocks and the lens are judged."""
    distant: int = Field(ge=2)
    """How many bytes back the distant byte lies."""


@dataclass(frozen=True)
class Seen:
    """One model of L blocks and P = L + 1 places. Losses are test losses in nats; no number where the run diverged."""

    gain: float
    """The context-free loss less the model's own."""
    skills: dict[str, NDArray[np.float64]]
    """By property, the skill [P, P] of the probe fitted at place i (row) at place j (column)."""
    recentred: dict[str, NDArray[np.float64]]
    """The same, with the mean of place j moved to that of place i."""
    lens: tuple[float, ...]
    """KL from the final prediction to the lens at each place, over that to the mean final prediction; P values.

    Not numbers where the final prediction says less than KNOWN beyond its mean, so that nothing can be missing."""
    skip: tuple[float, ...]
    """Loss added by leaving out each block."""
    repeat: tuple[float, ...]
    """Loss added by running each block twice."""
    neighbours: tuple[float, ...]
    """Loss added by exchanging blocks l and l + 1."""
    far: tuple[float, ...]
    """Loss added by exchanging blocks l and l + L // 2."""

    def own(self, name: str) -> list[float]:
        """Skill of each place's own probe."""
        return [float(value) for value in np.diag(self.skills[name])]

    def slope(self, name: str) -> float:
        """Skill over depth (0: the embedding, 1: after the last block), slope of the least-squares line."""
        own = self.own(name)
        if not all(map(math.isfinite, own)):
            return math.nan
        return float(np.polyfit(np.linspace(0, 1, len(own)), own, 1)[0])

    def centre(self, name: str) -> float:
        return reading.centre(self.own(name))

    def kept(self, distance: int = 1, *, recentred: bool = False) -> float:
        """Share of all that can be read off which a probe still reads `distance` places on."""
        tables = self.recentred if recentred else self.skills
        return reading.kept_share(list(tables.values()), distance)

    def cost(self, costs: Sequence[float]) -> float:
        """Mean of the costs as a share of the gain; not a number where nothing was gained."""
        return float(np.mean(costs)) / self.gain if self.gain > 0 else math.nan


# --- labels ---------------------------------------------------------------------------------------


def labels(task: data.TaskConfig, inputs: Tensor, targets: Tensor, distant: int) -> dict[str, Tensor]:
    """Classes [B, n] by property, of the last n tokens of inputs [B, T].

    On text n = T - `distant`, so that all properties are asked of the same tokens; at pointer chasing n is the number
    of queries.
    """
    if isinstance(task, data.HopsConfig):
        table, found = inputs[:, : task.symbols], inputs[:, task.symbols :] - task.symbols
        classes = {hop_name(0): found}
        for hops in range(1, task.hops + 1):
            found = table.gather(1, found)
            classes[hop_name(hops)] = found
        return classes
    return {
        CURRENT: inputs[:, distant:],
        PREVIOUS: inputs[:, distant - 1 : -1],
        DISTANT: inputs[:, :-distant],
        NEXT: targets[:, distant:],
    }


# --- one model ------------------------------------------------------------------------------------


@cache
def _load(task: data.TaskConfig) -> data.Task:
    """A text takes half a second to read, and many models are looked at on the same."""
    return data.load(task)


def _read(config: RunConfig, model: Decoder, look: Look, split: data.Split) -> dict[str, list[reading.Moments]]:
    """By property, the moments of the normalised stream at each place with the property's classes."""
    task = config.task
    if isinstance(task, data.TextConfig):
        task = task.model_copy(update={"evaluation_windows": look.windows})
    part = Part(_load(task), look.windows if isinstance(task, data.TextConfig) else data.Hops.HELD_OUT)
    inputs, targets = part.examples_of(split)
    asked = labels(task, inputs, targets, look.distant)
    count = task.symbols if isinstance(task, data.HopsConfig) else data.VOCABULARY
    streams = influence.reads(model, inputs.to(config.device.kind))
    length = next(iter(asked.values())).shape[1]
    found: dict[str, list[reading.Moments]] = {name: [] for name in asked}
    for stream in streams:
        features = reading.normalised(stream[:, -length:].flatten(0, 1).double().cpu().numpy())
        for name, classes in asked.items():
            found[name].append(reading.moments(features, classes.flatten().numpy(), count))
    return found


def _lens(config: RunConfig, model: Decoder, inputs: Tensor, distant: int) -> tuple[float, ...]:
    """KL(final || lens) by place over KL(final || mean final), on the tokens that are asked for."""
    logits = logit_lens(model, model.stack.block_inputs(), model.norm, model.head, inputs.to(config.device.kind))
    first = config.task.symbols if isinstance(config.task, data.HopsConfig) else distant
    logits = logits[:, :, first:].double()
    mean = F.softmax(logits[-1], dim=-1).mean((0, 1)).log().expand_as(logits[-1])
    known, *by_place = lens_divergence(torch.stack([mean, *logits]))
    return tuple(value / known if known > KNOWN else math.nan for value in by_place)


def _look(config: RunConfig, look: Look, trained: bool) -> Seen:
    model = trained_model(config) if trained else build(config.model, config.seed)
    assert isinstance(model, Decoder)
    model = model.to(config.device.kind)
    depth = config.model.depth
    judging = Part(_load(config.task), look.judging)
    fitted, test = (_read(config, model, look, split) for split in ("validation", "test"))

    def loss(surgery: AbstractContextManager[None]) -> float:
        with surgery:
            found = evaluate(config, judging, model, "test")
        return math.inf if found is None else found[0]

    whole = loss(nullcontext())

    def added(surgeries: Sequence[AbstractContextManager[None]]) -> tuple[float, ...]:
        return tuple(loss(surgery) - whole for surgery in surgeries)

    def exchanged(distance: int) -> tuple[float, ...]:
        return added([swapped(model.blocks, at, at + distance) for at in range(depth - distance)])

    with evaluating(model):
        return Seen(
            gain=judging.context_free_loss("test") - whole,
            skills={name: reading.skills(fitted[name], test[name]) for name in fitted},
            recentred={name: reading.skills(fitted[name], test[name], recentred=True) for name in fitted},
            lens=_lens(config, model, judging.examples_of("test")[0], look.distant),
            skip=added([skipped(model.blocks, at) for at in range(depth)]),
            repeat=added([repeated(model.blocks, at) for at in range(depth)]),
            neighbours=exchanged(1),
            far=exchanged(far(depth)),
        )


def _unmeasured(config: RunConfig) -> Seen:
    """Of a run that diverged."""
    depth = config.model.depth
    table = np.full((depth + 1, depth + 1), math.nan)
    lens, each, neighbours, apart = ((math.nan,) * count for count in (depth + 1, depth, depth - 1, depth - far(depth)))
    tables = dict.fromkeys(properties(config.task), table)
    return Seen(math.nan, tables, tables, lens, each, each, neighbours, apart)


def see_all(records: Sequence[RunRecord], look: Look, execution: Execution, *, trained: bool = True) -> list[Seen]:
    """Each run's model, after training or before, in the order of the records."""

    def job(record: RunRecord) -> Seen:
        if trained and record.outcome == "diverged":
            return _unmeasured(record.config)
        return _look(record.config, look, trained)

    return side_by_side(job, records, execution, "looking at layers")
