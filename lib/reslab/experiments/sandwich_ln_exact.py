"""What claim 08 computes without training, in float64: how the stream grows, and who sees a branch's scale.

Letters: L blocks, T tokens, d width, s0 the mean square of the stream at the start, c the factor of a foreign branch.
"""

from __future__ import annotations

from typing import cast

import pandas as pd
import torch
from pydantic import Field, field_validator
from torch import Tensor

from reslab import data
from reslab.experiments.sandwich_ln_mismatch import is_foreign
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.models.initialisation import HasRoles
from reslab.probes import stream_places, streams
from reslab.residuals import Placement
from reslab.schema import Settings
from reslab.stats import Estimate, mean_of
from reslab.training import build

HEADS = 2

EPSILON = 1e-12
"""In the norms here, so small that it hides nothing: with it a norm's output has a mean square of 1."""

FACTORS = (0.1, 10.0, 30.0)
"""c; the check is of the largest."""

PLACEMENTS: tuple[Placement, ...] = ("pre", "sandwich", "sandwich_sum", "peri")


class Exact(Settings):
    """Size of what is computed at initial weights."""

    depths: tuple[int, ...] = Field(min_length=2)
    """Blocks, increasing; the checks are of the last."""
    seeds: int = Field(ge=2)
    tokens: int = Field(ge=2)
    width: int = Field(ge=4, multiple_of=HEADS)

    @field_validator("depths")
    @classmethod
    def _depths_increase(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        if min(depths) < 2 or list(depths) != sorted(set(depths)):
            raise ValueError(
                f"depths must increase from at least 2 (every second block is foreign), got {list(depths)}"
            )
        return depths


def _decoder(exact: Exact, placement: Placement, depth: int, seed: int) -> Decoder:
    config = DecoderConfig(
        width=exact.width,
        heads=HEADS,
        context=exact.tokens,
        depth=depth,
        vocabulary=data.VOCABULARY,
        init_std=0.55 / exact.width**0.5,
        norm_eps=EPSILON,
        placement=placement,
    )
    return cast(Decoder, build(config, seed)).double()


def _tokens(exact: Exact, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(data.VOCABULARY, (4, exact.tokens), generator=generator)


@torch.no_grad()
def growth(exact: Exact) -> pd.DataFrame:
    """Mean square of the stream, E|x|^2 / d, before each block and at the end: of each placement, depth and seed.

    `predicted` is s0 + 2 l after l blocks where a norm stands on the branch's output: every update has a mean square
    of 1, and at initial weights is uncorrelated with the stream. Elsewhere it is not a number.
    """
    rows = []
    for placement in PLACEMENTS:
        for depth in exact.depths:
            for seed in range(exact.seeds):
                model = _decoder(exact, placement, depth, seed)
                with streams(stream_places(model)) as seen:
                    model(_tokens(exact, seed))
                squares = [float(x.square().mean()) for x in seen]
                predicted = placement in ("sandwich", "peri")
                rows += [
                    {
                        "placement": placement,
                        "depth": depth,
                        "seed": seed,
                        "block": block,
                        "mean_square": square,
                        "predicted": squares[0] + 2 * block if predicted else float("nan"),
                    }
                    for block, square in enumerate(squares)
                ]
    return pd.DataFrame(rows)


@torch.no_grad()
def scale_foreign(model: Decoder, factor: float) -> None:
    """Multiply the matrix through which each foreign branch writes by `factor`, in place."""
    for number, sublayer in enumerate(model.stack.sublayers()):
        if is_foreign(number):
            for weight in cast(HasRoles, sublayer.branch).weights_by_role()["output"]:
                weight.mul_(factor)


@torch.no_grad()
def seen_scales(exact: Exact) -> pd.DataFrame:
    """How far the logits of the deepest decoder move when its foreign branches put out c times as much.

    `change` is |logits(c) - logits(1)| / |logits(1)|, of each placement, factor and seed.
    """
    rows = []
    for placement in PLACEMENTS:
        for seed in range(exact.seeds):
            tokens = _tokens(exact, seed)
            plain = _decoder(exact, placement, exact.depths[-1], seed)(tokens)
            for factor in FACTORS:
                model = _decoder(exact, placement, exact.depths[-1], seed)
                scale_foreign(model, factor)
                change = float((model(tokens) - plain).norm() / plain.norm())
                rows.append({"placement": placement, "factor": factor, "seed": seed, "change": change})
    return pd.DataFrame(rows)


def exact_estimates(grown: pd.DataFrame, seen: pd.DataFrame) -> dict[str, Estimate]:
    """By the name of the question; of the deepest decoders and the largest factor."""
    ends = grown[(grown["depth"] == grown["depth"].max()) & (grown["block"] == grown["depth"])]
    largest = seen[seen["factor"] == seen["factor"].max()]

    def end(placement: str) -> pd.DataFrame:
        return ends[ends["placement"] == placement]

    def ratio(placement: str) -> Estimate:
        return mean_of((end(placement)["mean_square"] / end(placement)["predicted"]).tolist())

    def change(placement: str) -> Estimate:
        return mean_of(largest[largest["placement"] == placement]["change"].tolist())

    return {
        "growth_sandwich": ratio("sandwich"),
        "growth_peri": ratio("peri"),
        "sum_unit": mean_of(end("sandwich_sum")["mean_square"].tolist()),
        "unseen_sandwich": change("sandwich"),
        "seen_pre": change("pre"),
        "seen_sum": change("sandwich_sum"),
    }
