"""Claim 13 without training: how DiT starts from zero, and in which order its parts begin to learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from reslab import data
from reslab.experiments.diffusion_residuals_arms import TASK
from reslab.models.diffusion import Conditioned, DiffusionConfig, DiffusionTransformer
from reslab.probes import outputs_of, stream_places, streams
from reslab.stats import Estimate, deterministic
from reslab.training import build

__all__ = ["UNLOCKS_AT", "exact_estimates", "first_updates", "gradients", "starts"]

UNLOCKS_AT = {
    "head": 0,
    "final modulation": 1,
    "gates": 1,
    "embedding of the picture": 1,
    "branches": 2,
    "shifts and scales": 2,
    "embedding of the time": 2,
}
"""Updates after which each part of DiT with adaLN-Zero first has a gradient: a product of two zeros has none at first,
and the residual lets the picture's embedding learn as soon as the head has opened."""

RATE = 0.1
"""Of gradient descent; any rate gives the same order."""


def _model(config: DiffusionConfig, seed: int) -> DiffusionTransformer:
    model = build(config, seed).double()
    assert isinstance(model, DiffusionTransformer)
    return model


def _batch(seed: int, step: int, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    inputs, noise = data.load(TASK).batch(seed, step, size)
    assert isinstance(inputs, tuple)
    return tuple(part.double() for part in inputs), noise.double()


def _parts(model: DiffusionTransformer) -> dict[str, list[Tensor]]:
    """The gradients of each part of `UNLOCKS_AT`, and of the head's bias apart."""
    width = model.config.width
    conditioned = [module for module in model.modules() if isinstance(module, Conditioned)]
    rows = [g for module in conditioned for g in _gradients(module.modulation)]
    return {
        "head": _gradients(model.head),
        "final modulation": _gradients(model.modulation),
        "gates": [g[2 * width :] for g in rows],
        "embedding of the picture": _gradients(model.patch_embedding),
        "branches": [g for module in conditioned for g in _gradients(module.branch)],
        "shifts and scales": [g[: 2 * width] for g in rows],
        "embedding of the time": _gradients(model.time_embedding),
    }


def _gradients(module: torch.nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def gradients(config: DiffusionConfig, seeds: Sequence[int], batch: int) -> pd.DataFrame:
    """Largest gradient of each part before each of the first updates: columns seed, update, part, gradient.

    Float64, plain gradient descent on the noise-prediction error. The part "all but the head's bias" is the whole net.
    """
    rows = []
    for seed in seeds:
        model = _model(config, seed)
        for update in range(max(UNLOCKS_AT.values()) + 1):
            inputs, noise = _batch(seed, update, batch)
            model.zero_grad()
            torch.nn.functional.mse_loss(outputs_of(model, inputs), noise).backward()
            parts = _parts(model)
            parts["all but the head's bias"] = [
                p.grad for p in model.parameters() if p.grad is not None and p is not model.head.bias
            ]
            for part, found in parts.items():
                largest = max((float(g.abs().max()) for g in found if g.numel()), default=0.0)
                rows.append({"seed": seed, "update": update, "part": part, "gradient": largest})
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(RATE * parameter.grad)
    return pd.DataFrame(rows)


def starts(config: DiffusionConfig, seeds: Sequence[int], batch: int) -> pd.DataFrame:
    """Of the initial network, in float64: columns seed, loss, noise (E[e^2] of the batch) and moved.

    `moved` is the largest difference between what the first block reads and what the head's norm does.
    """
    rows = []
    for seed in seeds:
        model = _model(config, seed)
        inputs, noise = _batch(seed, 0, batch)
        with torch.no_grad(), streams(stream_places(model)) as seen:
            error = outputs_of(model, inputs) - noise
        rows.append(
            {
                "seed": seed,
                "loss": float(error.square().mean()),
                "noise": float(noise.square().mean()),
                "moved": float((seen[-1] - seen[0]).abs().max()),
            }
        )
    return pd.DataFrame(rows)


def first_updates(table: pd.DataFrame) -> pd.DataFrame:
    """Parts by seeds: the update before which a part first has a gradient; not a number where it never has."""
    opened = table[table["gradient"] > 0]
    first = opened.groupby(["part", "seed"])["update"].min().unstack()
    return first.reindex(index=list(UNLOCKS_AT), columns=sorted(table["seed"].unique()))


def exact_estimates(start: pd.DataFrame, opening: pd.DataFrame, closed: pd.DataFrame) -> Mapping[str, Estimate]:
    """The worst of all seeds, by check."""
    first = first_updates(opening)
    expected: Any = pd.Series(UNLOCKS_AT)
    return {
        "start_error": deterministic(float((start["loss"] / start["noise"] - 1).abs().max())),
        "unlock_order": deterministic(float(first.ne(expected, axis=0).to_numpy().sum())),
        "start_keeps": deterministic(float(start["moved"].max())),
        "start_closed": deterministic(float(closed.loc[closed["part"] == "all but the head's bias", "gradient"].max())),
    }
