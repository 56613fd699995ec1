"""What the branches and blocks of a trained model are worth, for claim 07."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from reslab import data
from reslab.models.decoder import Decoder
from reslab.opening import branch_shares, effective_depth
from reslab.surgery import skipped
from reslab.sweep import trained_model
from reslab.training import RunRecord, evaluate

__all__ = ["Inside", "look_inside"]


class Inside(NamedTuple):
    """Of one trained model; not numbers where its run diverged."""

    shares: tuple[float, ...]
    """Share of each branch in the stream after it (`opening.branch_shares`), S values."""
    costs: tuple[float, ...]
    """By how much the held-out loss rises without each block, in nats; L values."""

    @property
    def effective_depth(self) -> float:
        """In sublayers; see `opening.effective_depth`."""
        return effective_depth(self.shares)

    @property
    def mean_cost(self) -> float:
        return float(np.mean(self.costs))


def look_inside(record: RunRecord) -> Inside:
    """A run's kept weights, looked into on validation data; a UserError where none were kept.

    Shares are those on the first batch, costs those on all.
    """
    config, depth = record.config, record.config.model.depth
    if record.outcome == "diverged":
        return Inside((math.nan,) * (2 * depth), (math.nan,) * depth)
    model = trained_model(config).to(config.device.kind)
    assert isinstance(model, Decoder)
    task = data.load(config.task)
    inputs, _ = next(task.held_out("validation"))
    assert isinstance(inputs, torch.Tensor)

    def loss() -> float:
        found = evaluate(config, task, model, "validation")
        return math.nan if found is None else found[0]

    whole, costs = loss(), []
    for block in range(depth):
        with skipped(model.blocks, block):
            costs.append(loss() - whole)
    return Inside(tuple(branch_shares(model, inputs.to(config.device.kind))), tuple(costs))
