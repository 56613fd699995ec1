"""Untrained decoders with blocks dropped: Block Influence against its prediction, and depth attention against `add`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from reslab import data, influence
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.surgery import skipped
from reslab.training import build

__all__ = ["Exact", "difference_at_start", "initial_influences"]

HEADS = 4


class Exact(Settings):
    """Size of the checks at initial weights."""

    depth: int = Field(ge=4)
    seeds: int = Field(ge=2)
    tokens: int = Field(ge=8)
    width: int = Field(ge=8, multiple_of=HEADS)


def _model(exact: Exact, kind: ConnectionConfig, seed: int) -> Decoder:
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
        connection=kind,
    )
    model = build(config, seed).double().eval()
    assert isinstance(model, Decoder)
    return model


def _tokens(exact: Exact, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, data.VOCABULARY, (4, exact.tokens)))


def initial_influences(exact: Exact) -> pd.DataFrame:
    """BI of untrained decoders with connection `add`, `measured` and `predicted`; one row a `seed` and `block`."""
    rows = []
    for seed in range(exact.seeds):
        xs = influence.reads(_model(exact, ConnectionConfig(), seed), _tokens(exact, seed))
        pairs = zip(influence.block_influences(xs), influence.predicted_influences(xs), strict=True)
        rows += [{"seed": seed, "block": at, "measured": m, "predicted": p} for at, (m, p) in enumerate(pairs)]
    return pd.DataFrame(rows)


def difference_at_start(exact: Exact, kinds: Sequence[ConnectionConfig], dropped: Sequence[int], seed: int) -> float:
    """Largest difference of untrained logits between the first kind of connection and the others.

    For each number in `dropped`, with so many blocks dropped in a random order.
    """
    order = influence.random_order(exact.depth, seed)
    models = [_model(exact, kind, seed) for kind in kinds]
    largest = 0.0
    for number in dropped:
        logits = []
        for model in models:
            with torch.no_grad(), skipped(model.blocks, order[:number]):
                logits.append(model(_tokens(exact, seed)))
        largest = max(largest, *(float((other - logits[0]).abs().max()) for other in logits[1:]))
    return largest
