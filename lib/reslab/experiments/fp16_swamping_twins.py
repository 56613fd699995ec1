"""Claim 04's trained models looked into: twins with the same weights and another stream, and the size of updates."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from reslab import data
from reslab.comparison import Runs
from reslab.experiments.fp16_swamping_arms import ORDINARY, PLAIN, STREAMS, forced_name, kept_in
from reslab.experiments.fp16_swamping_exact import STREAM_FORMATS
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.precision import FORMATS, absorbed
from reslab.probes import stacks, streams
from reslab.sweep import trained_model
from reslab.training import RunRecord, build, evaluate, loss_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["block_ratios", "recipe_losses", "twins"]


def _decoder(record: RunRecord, stream: str | None, scale: float) -> Decoder:
    """The trained weights of a run in a decoder with another stream; None: everything in float64."""
    settings = record.config.model
    assert isinstance(settings, DecoderConfig)
    changed = kept_in(settings, stream or "fp32", scale)
    if stream is None:
        changed = changed.model_copy(update={"stream_dtype": "float64"})
    model = build(changed, record.config.seed)
    model.load_state_dict(trained_model(record.config).state_dict())
    assert isinstance(model, Decoder)
    return (model.double() if stream is None else model).to(record.config.device.kind).eval()


def _batch(record: RunRecord) -> tuple[Tensor, Tensor]:
    """The first held-out test windows."""
    inputs, targets = next(data.load(record.config.task).held_out("test"))
    assert isinstance(inputs, Tensor)
    return inputs.to(record.config.device.kind), targets.to(record.config.device.kind)


# --- twins ----------------------------------------------------------------------------------------


def _measured(model: Decoder, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float, Tensor]:
    """What all branches together added to the stream [B, T, d], the loss, and the blocks' gradient [n]; float64."""
    blocks = list(model.blocks.parameters())
    with streams([model.stack.block_inputs()[0], model.norm]) as seen:
        loss = loss_of(model(inputs), targets)
    gradients = torch.autograd.grad(loss, blocks)
    added = (seen[-1].double() - seen[0].double()).detach()
    return added, float(loss.detach()), torch.cat([g.double().flatten() for g in gradients])


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def twins(params: Params, trained: Runs) -> pd.DataFrame:
    """Numerical errors by stream against a twin in float64, with the weights that an FP32 stream was trained to.

    One row a size of update, seed and stream: `stream_error`, of what all branches added to the stream, relative;
    `loss_change`, nats per byte; `gradient_error`, relative, and `gradient_cosine` of the blocks' gradient.
    Not numbers for a run that diverged.
    """
    section = params.claims.fp16_swamping
    torch.set_num_threads(params.device.threads)
    rows = []
    for update in (section.update, section.large):
        for record in trained[forced_name(params, update, "fp32")]:
            place = {"update": update, "seed": record.config.seed}
            rows += [place | errors for errors in _twin_errors(record, update)]
    return pd.DataFrame(rows)


def _twin_errors(record: RunRecord, update: float) -> list[dict[str, object]]:
    measures = ("stream_error", "loss_change", "gradient_error", "gradient_cosine")
    if record.outcome == "diverged":
        return [{"stream": stream, **dict.fromkeys(measures, math.nan)} for stream in STREAMS]
    batch = _batch(record)
    wanted, loss, gradient = _measured(_decoder(record, None, update), *batch)
    rows: list[dict[str, object]] = []
    for stream in STREAMS:
        added, own_loss, own_gradient = _measured(_decoder(record, stream, update), *batch)
        cosine = float(torch.cosine_similarity(own_gradient, gradient, dim=0))
        values = (_relative(added, wanted), own_loss - loss, _relative(own_gradient, gradient), cosine)
        rows.append({"stream": stream, **dict(zip(measures, values, strict=True))})
    return rows


# --- the recipe -----------------------------------------------------------------------------------


def recipe_losses(params: Params, trained: Runs) -> pd.DataFrame:
    """Test losses of models trained with branches times `factor`, as trained and with the branches scaled back.

    One row a format and seed: `as trained`; `scaled back`, in the same format; `scaled back, fp32`, with an FP32
    stream at inference. Not numbers for a run that diverged.
    """
    section = params.claims.fp16_swamping
    torch.set_num_threads(params.device.threads)
    rows = []
    for name in PLAIN:
        for record in trained[forced_name(params, section.large, name)]:
            rows.append(
                {
                    "format": name,
                    "seed": record.config.seed,
                    "as trained": math.nan if record.test_loss is None else record.test_loss,
                    "scaled back": _test_loss(record, name, section.update),
                    "scaled back, fp32": _test_loss(record, "fp32", section.update),
                }
            )
    return pd.DataFrame(rows)


def _test_loss(record: RunRecord, stream: str, scale: float) -> float:
    if record.outcome == "diverged":
        return math.nan
    found = evaluate(record.config, data.load(record.config.task), _decoder(record, stream, scale), "test")
    return math.nan if found is None else found[0]


# --- the size of updates --------------------------------------------------------------------------


def block_ratios(params: Params, trained: Runs) -> pd.DataFrame:
    """Size of each sublayer's update beside the stream in the trained FP32 models: ordinary and forced ones.

    One row an arm, seed and sublayer: `ratio`, the mean over tokens of |update| / |stream|, and the share of the
    update's elements that an FP16 and a BF16 stream would absorb. Not numbers for a run that diverged.
    """
    section = params.claims.fp16_swamping
    torch.set_num_threads(params.device.threads)
    names = [ORDINARY["fp32"], *(forced_name(params, update, "fp32") for update in (section.update, section.large))]
    return pd.DataFrame([row for arm in names for record in trained[arm] for row in _ratios(arm, record)])


@torch.no_grad()
def _ratios(arm: str, record: RunRecord) -> list[dict[str, object]]:
    model = trained_model(record.config).to(record.config.device.kind).eval()
    assert isinstance(model, Decoder)
    sublayers = [sublayer for stack in stacks(model) for sublayer in stack.sublayers()]
    with streams([*(sublayer.norm_input for sublayer in sublayers), model.norm]) as seen:
        model(_batch(record)[0])
    kept = [x.double() for x in seen]
    rows: list[dict[str, object]] = []
    for at, (x, after) in enumerate(itertools.pairwise(kept)):
        row: dict[str, object] = {"arm": arm, "seed": record.config.seed, "sublayer": at + 1}
        row["kind"] = "MLP" if at % 2 else "attention"
        lost = record.outcome == "diverged"
        row["ratio"] = math.nan if lost else float(((after - x).norm(dim=-1) / x.norm(dim=-1)).mean())
        for name in STREAM_FORMATS:
            share = float(absorbed(x, after - x, FORMATS[name]).double().mean())
            row[f"absorbed {name}"] = math.nan if lost else share
        rows.append(row)
    return rows
