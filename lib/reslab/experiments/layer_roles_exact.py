"""Untrained decoders with blocks left out or exchanged: what the skip alone makes of it.

With a skip a stack of blocks is a product of maps 1 + e f_l, e the size of the branches. To leave out one block changes
what comes out in the first order of e; to exchange two neighbours only in the second, as their difference is a
commutator of the f_l. Without a skip there is no small quantity: blocks in another order are another function.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator
from torch import Tensor

from reslab import data
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.surgery import skipped, swapped
from reslab.training import build

__all__ = ["Exact", "exponents", "initial_changes"]

HEADS = 4


class Exact(Settings):
    """Size of the checks at initial weights."""

    depth: int = Field(ge=3)
    seeds: int = Field(ge=2)
    tokens: int = Field(ge=8)
    width: int = Field(ge=8, multiple_of=HEADS)
    branches: tuple[float, ...]
    """Sizes e of the branches, increasing."""

    @field_validator("branches")
    @classmethod
    def _branches_increase(cls, branches: tuple[float, ...]) -> tuple[float, ...]:
        if len(branches) < 2 or list(branches) != sorted(set(branches)) or not 0 < branches[0] <= branches[-1] <= 1:
            raise ValueError(f"branches must be two sizes or more, increasing within (0, 1], got {list(branches)}")
        return branches


def _model(exact: Exact, kind: str, seed: int) -> Decoder:
    """Matrices of std 1/sqrt(d), not smaller with depth; norms without eps; float64."""
    config = DecoderConfig(
        width=exact.width,
        heads=HEADS,
        context=exact.tokens,
        vocabulary=data.VOCABULARY,
        depth=exact.depth,
        init_std=exact.width**-0.5,
        weight_init="plain",
        norm_eps=0.0,
        connection=ConnectionConfig(kind),
    )
    model = build(config, seed).double().eval()
    assert isinstance(model, Decoder)
    return model


@torch.no_grad()
def _changes(exact: Exact, kind: str, branch: float, seed: int) -> dict[str, float]:
    """Norm of what the surgery changes in the output, over the norm of the output; the middle blocks."""
    model = _model(exact, kind, seed)
    for matrix in model.stream_writers():
        matrix.mul_(branch)
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, data.VOCABULARY, (4, exact.tokens)))
    middle, whole = (exact.depth - 1) // 2, model(tokens)

    def changed(logits: Tensor) -> float:
        return float((logits - whole).norm() / whole.norm())

    with skipped(model.blocks, middle):
        without = changed(model(tokens))
    with swapped(model.blocks, middle, middle + 1):
        return {"skip": without, "swap": changed(model(tokens))}


def initial_changes(exact: Exact) -> pd.DataFrame:
    """Relative change of untrained logits: columns kind, branch, seed, skip, swap.

    `none` at branches of size 1 alone, since the norms undo any other.
    """
    cases: Sequence[tuple[str, float]] = [*(("add", branch) for branch in exact.branches), ("none", 1.0)]
    return pd.DataFrame(
        [
            {"kind": kind, "branch": branch, "seed": seed, **_changes(exact, kind, branch, seed)}
            for kind, branch in cases
            for seed in range(exact.seeds)
        ]
    )


def exponents(changes: pd.DataFrame, surgery: str) -> list[float]:
    """By seed, the power of the branches' size with which the change of `add` grows: slope of the logarithms."""
    add = changes[changes["kind"] == "add"]
    return [
        float(np.polyfit(np.log(of_seed["branch"]), np.log(of_seed[surgery]), 1)[0])
        for _, of_seed in add.groupby("seed")
    ]
