"""How trained networks opened, for claim 03: what their branches contribute over training, and at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch

from reslab import data
from reslab.opening import branch_scales, branch_shares, effective_depth, set_scales
from reslab.sweep import trained_model
from reslab.training import Model, RunConfig, RunRecord, build, evaluate, optimisation_steps

__all__ = ["closing_cost", "effective_depths", "opening_table"]

SEQUENCES = 16
"""Held-out sequences that shares are measured on."""


def opening_table(records: Mapping[str, Sequence[RunRecord]], stages: Sequence[int]) -> pd.DataFrame:
    """Share and scale of every branch after each of `stages` updates; the last stage is the end of the run.

    One row for each method, seed, step and sublayer (from 1). Earlier stages are taken from the very training that
    the record tells of, run again to there; the last from the weights that were kept. Of a run that diverged
    nothing is measured: its shares and scales are not numbers.
    """
    rows = []
    for method, of_method in records.items():
        for record in of_method:
            for step, shares, scales in _opening(record, stages):
                for sublayer, (share, scale) in enumerate(zip(shares, scales, strict=True), start=1):
                    place = {"method": method, "seed": record.config.seed, "step": step, "sublayer": sublayer}
                    rows.append(place | {"share": share, "scale": scale})
    return pd.DataFrame(rows)


def _opening(record: RunRecord, stages: Sequence[int]) -> list[tuple[int, list[float], list[float]]]:
    """Shares and scales of all branches at each stage of a run."""
    config, device = record.config, record.config.device
    if record.outcome == "diverged":
        lost = [math.nan] * (2 * config.model.depth)
        return [(stage, lost, lost) for stage in stages]
    task = data.load(config.task)
    held_out, _ = next(task.held_out("validation"))
    assert isinstance(held_out, torch.Tensor)
    inputs = held_out[:SEQUENCES].to(device.kind)
    eager = config.model_copy(update={"device": device.model_copy(update={"compile": False})})
    model = build(config.model, config.seed).to(device.kind)
    found = []
    for step, _ in enumerate(optimisation_steps(eager, task, model)):  # each is yielded before its update
        if step in stages:
            found.append((step, branch_shares(model, inputs), branch_scales(model)))
        if step >= stages[-2]:
            break
    last = _trained(config)
    return [*found, (stages[-1], branch_shares(last, inputs), branch_scales(last))]


def _trained(config: RunConfig) -> Model:
    model: Model = trained_model(config).to(config.device.kind)
    return model


def effective_depths(opened: pd.DataFrame, method: str, step: int) -> list[float]:
    """Effective depth in sublayers after so many updates, seed by seed."""
    chosen = opened[(opened["method"] == method) & (opened["step"] == step)]
    return [effective_depth(seed["share"]) for _, seed in chosen.groupby("seed", sort=False)]


def closing_cost(record: RunRecord) -> float:
    """By how much the test loss of a trained model rises when all its scales are set to 0."""
    if record.test_loss is None:
        return math.nan
    model = _trained(record.config)
    set_scales(model, 0.0)
    closed = evaluate(record.config, data.load(record.config.task), model, "test")
    return closed[0] - record.test_loss if closed else math.nan
