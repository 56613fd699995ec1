"""Claim 10 at the initial weights: the law of the ratio, and faults that were planted, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch.nn.utils import get_total_norm

from reslab import data
from reslab.experiments.residual_health_measured import multiply_writer, ratios_of
from reslab.health import HealthRule
from reslab.models.decoder import DecoderConfig
from reslab.models.initialisation import stream_writers
from reslab.probes import stacks
from reslab.ratio_rules import law
from reslab.schema import Settings
from reslab.training import Model, build, loss_of

__all__ = ["Exact", "Planted", "fresh", "law_error", "law_of", "planted"]

HEADS = 4


class Exact(Settings):
    """Size of the checks at initial weights."""

    depth: int = Field(ge=2)
    """Blocks, of two sublayers each."""
    seeds: int = Field(ge=2)
    tokens: int = Field(ge=8)
    width: int = Field(ge=8, multiple_of=HEADS)


def _model(exact: Exact, seed: int) -> tuple[Model, torch.Tensor, torch.Tensor]:
    """A plain Pre-LN decoder, matrices of std 1/sqrt(d); two sequences of random tokens and their targets."""
    config = DecoderConfig(
        width=exact.width,
        heads=HEADS,
        context=exact.tokens,
        vocabulary=data.VOCABULARY,
        depth=exact.depth,
        init_std=exact.width**-0.5,
        weight_init="plain",
    )
    drawn = np.random.default_rng(seed).integers(0, data.VOCABULARY, (2, exact.tokens + 1))
    tokens = torch.from_numpy(drawn)
    return build(config, seed).double(), tokens[:, :-1], tokens[:, 1:]


def fresh(exact: Exact) -> pd.DataFrame:
    """Measured ratios of untrained decoders and those of the law; a row for each seed and sublayer."""
    tables = []
    for seed in range(exact.seeds):
        model, inputs, _ = _model(exact, seed)
        table = ratios_of(model, inputs)
        tables.append(table.assign(seed=seed, sublayer=range(len(table)), law=law_of(table)))
    return pd.concat(tables, ignore_index=True)


def law_of(table: pd.DataFrame) -> list[float]:
    """The law with the mean squared update of each kind, and the stream's squared norm at the start, of this table."""
    squares = (table["update_norm"] ** 2).groupby(table["kind"]).mean()
    known = {str(kind): float(value) for kind, value in squares.items()}
    return law(table["kind"].tolist(), known, float(table["stream_norm"].iloc[0]) ** 2)


def law_error(table: pd.DataFrame) -> float:
    """Mean size of ln(measured / law)."""
    return float(np.abs(np.log(table["ratio"] / table["law"])).mean())


class Planted(NamedTuple):
    """What a rule makes of two faults in one untrained decoder."""

    dead_wrong: int
    """Sublayers that "ratio near 0" takes for what they are not."""
    exploding_wrong: int
    """The same of "ratio above 1"."""
    dead_gradient: float
    """Gradient norm of all the dead sublayer's matrices but the writing one, relative to that before it was planted."""
    writer_gradient: float
    """The same of the writing matrix, the one that is zero."""


def planted(exact: Exact, seed: int, factor: float) -> Planted:
    """The middle block's attention writes nothing, the last block's MLP `factor` times as much."""
    dead, exploding = exact.depth // 2 * 2, 2 * exact.depth - 1
    before, after = (_gradients(exact, seed, dead, of_writer) for of_writer in (1.0, 0.0))
    model, inputs, _ = _model(exact, seed)
    multiply_writer(model, dead, 0.0)
    multiply_writer(model, exploding, factor)
    ratios, rule = ratios_of(model, inputs)["ratio"].tolist(), HealthRule()
    return Planted(
        dead_wrong=sum((ratio < rule.dead_below) != (i == dead) for i, ratio in enumerate(ratios)),
        exploding_wrong=sum((ratio > rule.rewriting_above) != (i == exploding) for i, ratio in enumerate(ratios)),
        dead_gradient=after.others / before.others,
        writer_gradient=after.writer / before.writer,
    )


class _Gradients(NamedTuple):
    """Norms of the gradients of one sublayer's matrices: of the one that writes to the stream, and of all others."""

    writer: float
    others: float


def _gradients(exact: Exact, seed: int, sublayer: int, factor: float) -> _Gradients:
    """With the sublayer's writing matrix multiplied by `factor`."""
    model, inputs, targets = _model(exact, seed)
    multiply_writer(model, sublayer, factor)
    loss_of(model(inputs), targets).backward()
    [stack], writer = stacks(model), stream_writers(model)[sublayer]
    others = [p for p in stack.sublayers()[sublayer].branch.parameters() if p.ndim == 2 and p is not writer]
    return _Gradients(_norm([writer]), _norm(others))


def _norm(matrices: Sequence[torch.Tensor]) -> float:
    """Of their gradients, taken together."""
    return float(get_total_norm([matrix.grad for matrix in matrices if matrix.grad is not None]))
