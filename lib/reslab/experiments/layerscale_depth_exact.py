"""What claim 03 computes without training: closed networks, and Jacobians by depth; all in float64.

Letters: L blocks, T tokens, d width, a the scale on every branch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from reslab import data
from reslab.isometry import jacobian, mean_squared_singular_value, pulled_back
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.opening import set_scales, stack_parameters
from reslab.residuals import ConnectionConfig, Placement
from reslab.schema import Settings
from reslab.stats import Estimate, deterministic, mean_of
from reslab.training import build

HEADS = 2


class Exact(Settings):
    """Size of what is computed at initial weights."""

    depths: tuple[int, ...] = Field(min_length=2)
    """Blocks of the stacks whose Jacobian is taken, increasing."""
    seeds: int = Field(ge=2)
    tokens: int = Field(ge=2)
    width: int = Field(ge=4, multiple_of=HEADS)

    @field_validator("depths")
    @classmethod
    def _depths_increase(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        if min(depths) < 1 or list(depths) != sorted(set(depths)):
            raise ValueError(f"depths must increase from at least 1, got {list(depths)}")
        return depths


JACOBIANS: dict[str, tuple[ConnectionConfig, Placement]] = {
    "Post-LN": (ConnectionConfig("add"), "post"),
    "Pre-LN": (ConnectionConfig("add"), "pre"),
    "ReZero": (ConnectionConfig("rezero"), "none"),
    "ReZero 0.1": (ConnectionConfig("skipinit", initial=0.1), "none"),
}
"""The arms of Bachlechner et al. 2020, arXiv 2003.04887: ReZero without norms, at its start and with a = 0.1."""


def _decoder(exact: Exact, depth: int, seed: int, **settings: object) -> Decoder:
    config = DecoderConfig.model_validate(
        {
            "width": exact.width,
            "heads": HEADS,
            "context": exact.tokens,
            "vocabulary": data.VOCABULARY,
            "depth": depth,
            "init_std": 0.55 * exact.width**-0.5,
            **settings,
        }
    )
    model = build(config, seed).double()
    assert isinstance(model, Decoder)
    return model


def _stream(exact: Exact, seed: int) -> Tensor:
    """A random start of the stream, [1, T, d], of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, exact.tokens, exact.width, generator=generator, dtype=torch.float64)


def jacobians(exact: Exact) -> pd.DataFrame:
    """Mean squared singular value of the whole stack's Jacobian, [T d, T d]; a row for each arm, depth and seed.

    Matrices have Xavier's variance for an MLP, 2 / (5 d), not scaled down with depth, as in the authors' code.
    """
    rows = []
    for arm, (connection, placement) in JACOBIANS.items():
        for depth in exact.depths:
            for seed in range(exact.seeds):
                model = _decoder(
                    exact,
                    depth,
                    seed,
                    init_std=(0.4 / exact.width) ** 0.5,
                    weight_init="plain",
                    connection=connection,
                    placement=placement,
                )
                chi = mean_squared_singular_value(jacobian(model.stack, _stream(exact, seed)))
                rows.append({"arm": arm, "depth": depth, "seed": seed, "chi": chi})
    return pd.DataFrame(rows)


SCALES = (0.0, 1e-4, 1.0)
"""ReZero's start, that of LayerScale 1e-4, and plain Pre-LN: at initial weights they differ in this number alone."""


def closed_networks(exact: Exact, depths: Sequence[int]) -> pd.DataFrame:
    """Pre-norm decoders whose branches all have the scale a; one row for each depth and seed.

    At a = 0: `loss`; `branch_gradient`, the largest gradient of any weight in the branches and their norms;
    `scale_gradient`, the smallest of any a; all as magnitudes. `passed at a`: |J^T u|^2 / |u|^2 of the stack.
    All depths of a seed have the same embedding and head.
    """
    rows = []
    for seed in range(exact.seeds):
        ends: dict[str, Tensor] = {}
        for depth in depths:
            model = _decoder(exact, depth, seed, connection=ConnectionConfig("rezero"))
            ends = ends or {name: w for name, w in model.state_dict().items() if not name.startswith("stack.")}
            model.load_state_dict(ends, strict=False)
            row = {"depth": depth, "seed": seed, **_closed(model, exact, seed)}
            for scale in SCALES:
                set_scales(model, scale)
                row[f"passed at {scale:g}"] = pulled_back(model.stack, _stream(exact, seed), seed)
            rows.append(row)
    return pd.DataFrame(rows)


def _closed(model: Decoder, exact: Exact, seed: int) -> dict[str, float]:
    """Loss and gradients on random tokens."""
    drawn = np.random.default_rng(seed).integers(0, data.VOCABULARY, (2, exact.tokens + 1))
    tokens = torch.from_numpy(drawn)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    branches, scales = stack_parameters(model)
    gradients = torch.autograd.grad(loss, [*branches, *scales])
    return {
        "loss": float(loss.detach()),
        "branch_gradient": max(float(g.abs().max()) for g in gradients[: len(branches)]),
        "scale_gradient": min(float(g.abs().min()) for g in gradients[len(branches) :]),
    }


def exact_estimates(chis: pd.DataFrame, closed: pd.DataFrame) -> dict[str, Estimate]:
    """What the two tables say, by the names of the claim's questions."""
    deepest = chis[chis["depth"] == chis["depth"].max()]
    at_zero = chis[chis["arm"] == "ReZero"]["chi"]
    thousand = closed[closed["depth"] == closed["depth"].max()]
    losses = closed.groupby("seed")["loss"]

    def powers(arm: str) -> Estimate:
        return mean_of(np.log10(deepest[deepest["arm"] == arm]["chi"]).tolist())

    return {
        "closed_loss": deterministic(float((losses.max() - losses.min()).max())),
        "closed_branches": deterministic(float(closed["branch_gradient"].max())),
        "closed_scales": deterministic(float(closed["scale_gradient"].min())),
        "jacobian_zero": deterministic(float((at_zero - 1).abs().max())),
        "jacobian_rezero": powers("ReZero 0.1"),
        "jacobian_pre": powers("Pre-LN"),
        "jacobian_post": powers("Post-LN"),
        "thousand_passes": mean_of((thousand[f"passed at {SCALES[1]:g}"] - 1).abs().tolist()),
    }
