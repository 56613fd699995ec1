"""Claim 02: where the norm stands decides how a Transformer trains (sentences A4.1a to A4.2c)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pydantic import Field, field_validator

from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, each, held_out, profile_of, train_arms
from reslab.curves import context_free_losses, early_loss, first_below, spikes
from reslab.experiments.pre_vs_post_ln_exact import block_angles, initial_measures, log_slopes, stream_band
from reslab.experiments.pre_vs_post_ln_grid import (
    Grid,
    bears_less_fails,
    best,
    best_rate,
    brackets,
    cells,
    failed,
    jumps,
    run_config,
    share,
    share_failed,
    tuned_post,
)
from reslab.experiments.runs import ENDS, ends_run
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.stats import deterministic, mean_of, paired_difference
from reslab.training import STALL_MARGIN, RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "How does the place of the norm decide how a Transformer trains?"
STATEMENT = (
    "Post-LN learns faster at first but jumps or stalls above some learning rate and can hardly be trained beyond 20 "
    "layers; Pre-LN trains calmly and ends level or slightly better, at the price of small updates by deep blocks, "
    "which a larger norm gain or a learnt branch weight makes up for."
)
KEY = "threshold_gap"


QUESTIONS = {
    # untrained
    "gradient_post": Question(
        "A4.1a",
        "exact",
        "exponent of the depth",
        "Post-LN's gradient at the last MLP is as large in deep models as in shallow ones: it does not fit the depth",
    ),
    "gradient_pre": Question(
        "A4.1a",
        "exact",
        "exponent of the depth",
        "Pre-LN's gradient at the last MLP falls as the root of the depth: it is kept in bounds by itself",
    ),
    "post_accumulates": Question(
        "A4.1c",
        "exact",
        "mean square of the stream, last / first",
        "Post-LN's main path accumulates: it grows over {exact_deep} untrained blocks",
    ),
    "pre_controlled": Question(
        "A4.1c",
        "exact",
        "mean square of the stream, last / first",
        "Pre-LN's main path is scale-controlled: it does not grow over {exact_deep} untrained blocks",
    ),
    "growth_band": Question(
        "A4.1c",
        "control",
        "place between the bounds (0 to 1)",
        "measured right: untrained Pre-LN's stream lies between 1 + L/2 and 1 + 3L/2, as proved ({exact_deep} blocks)",
    ),
    "update_slope_pre": Question(
        "A4.2a",
        "exact",
        "exponent of the depth",
        "an untrained Pre-LN model's last block turns the stream the less, the deeper the model",
    ),
    "update_slope_post": Question(
        "A4.2a", "exact", "exponent of the depth", "an untrained Post-LN model's last block turns it alike at any depth"
    ),
    # trained: norm x depth x learning rate
    "no_false_spikes": Question(
        "A4.1a", "control", "spikes", "the best context-free guess on the same batches shows no spikes"
    ),
    "falls_faster": Question(
        "A4.1a",
        "trained",
        "nats per byte, Post - Pre",
        "Post-LN's loss falls faster at first: the first quarter of the steps, {shallow} blocks, each at its best rate",
    ),
    "falls_faster_same_rate": Question(
        "A4.1a", "trained", "nats per byte, Post - Pre", "so it does at the same rate, Post-LN's best"
    ),
    "post_unstable": Question(
        "A4.1a",
        "trained",
        "share of the depths",
        "above a threshold Post-LN fails (jumps, stalls or diverges): at a rate of {highest:g} "
        "({depths} depths a seed)",
    ),
    "post_spikes": Question(
        "A4.1a",
        "trained",
        "share of the failed runs",
        "where Post-LN fails its loss jumps, rather than merely standing still",
    ),
    "pre_calm": Question(
        "A4.1a",
        "trained",
        "share of the runs",
        "Pre-LN is calm throughout: at no depth and rate does its loss jump ({cells} runs a seed)",
    ),
    "threshold_gap": Question(
        "A4.1a",
        "trained",
        "steps in the list of rates",
        "the highest rate that Pre-LN bears lies above the lowest at which Post-LN fails, in whole steps "
        "({shallow} blocks)",
    ),
    "ends_level": Question(
        "A4.1a",
        "trained",
        "nats per byte, Pre - Post",
        "Pre-LN ends level or slightly better ({shallow} blocks, each at its best rate)",
    ),
    "post_deep": Question(
        "A4.1b",
        "trained",
        "share of the rates",
        "with {deep} blocks Post-LN hardly trains at usual rates ({rates} of them, {lowest:g} to {highest:g})",
    ),
    "pre_deep": Question("A4.1b", "trained", "share of the rates", "with {deep} blocks Pre-LN does (of {rates} rates)"),
    "pre_over_ends": Question(
        "A4.1b",
        "trained",
        "nats per byte gained",
        "Pre-LN with {deep} blocks ends below embedding and head trained alone: the blocks train, too",
    ),
    "threshold_falls": Question(
        "A4.1b",
        "trained",
        "steps in the list of rates",
        "the highest rate that Post-LN bears with {shallow} blocks lies above the lowest at which it fails with {deep} "
        "(whole steps)",
    ),
    "post_deepnet": Question(
        "A4.1b",
        "trained",
        "nats below unigram entropy",
        "it is the norm's place: Post-LN does not train with {deep} blocks from DeepNet's initial weights either",
    ),
    "deepnorm_learns": Question(
        "A4.1b",
        "control",
        "nats below unigram entropy",
        "with {deep} blocks and a norm on the stream training is possible: DeepNorm learns",
    ),
    "post_accumulates_trained": Question(
        "A4.1c",
        "trained",
        "mean square of the stream, last / first",
        "after training too Post-LN's main path has grown over {deep} blocks",
    ),
    "pre_controlled_trained": Question(
        "A4.1c",
        "trained",
        "mean square of the stream, last / first",
        "after training too Pre-LN's main path has not grown over {deep} blocks",
    ),
    "update_deep": Question(
        "A4.2a",
        "trained",
        "mean turn, {deep} / {shallow} blocks",
        "Pre-LN's blocks turn the stream less in deep models than in shallow ones",
    ),
    "update_pre_post": Question(
        "A4.2a",
        "trained",
        "mean turn, Pre / Post",
        "the deep half of Pre-LN's blocks turns the stream less than Post-LN's ({shallow} blocks)",
    ),
    "features_late": Question(
        "A4.2a",
        "trained",
        "steps, Pre - Post",
        "Pre-LN needs longer until its blocks are of use: until its loss is below that of embedding and head alone, "
        "trained on the same batches ({shallow} blocks, each at its best rate)",
    ),
    "features_late_same_rate": Question(
        "A4.2a", "trained", "steps, Pre - Post", "so it does at the same rate, Post-LN's best"
    ),
    # trained: what is said to make up for it
    "gain_updates_start": Question(
        "A4.2b",
        "exact",
        "mean turn, with / without",
        "norm gains that start at {gain:g} make the deep half's updates larger before training (Pre-LN, {deep} blocks)",
    ),
    "gain_updates": Question(
        "A4.2b", "trained", "mean turn, with / without", "they make them larger after training, too"
    ),
    "gain_early": Question(
        "A4.2b", "trained", "nats per byte, with - without", "they speed up the first quarter of the steps"
    ),
    "gain_loss": Question("A4.2b", "trained", "nats per byte, with - without", "they lower the test loss"),
    "weight_updates": Question(
        "A4.2b",
        "trained",
        "mean turn, with / without",
        "learnt branch weights that start at 1, and change nothing there, make the deep half's updates larger after "
        "training (Pre-LN, {deep} blocks)",
    ),
    "weight_early": Question(
        "A4.2b", "trained", "nats per byte, with - without", "they speed up the first quarter of the steps"
    ),
    "weight_loss": Question("A4.2b", "trained", "nats per byte, with - without", "they lower the test loss"),
    "ceiling": Question(
        "A4.2c",
        "trained",
        "nats per byte, Post - Pre",
        "with rate ({lowest:g} to {highest:g}) and warm-up tuned Post-LN ends lower than Pre-LN ({deep} blocks)",
    ),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


def _require_rising(name: str, values: Sequence[float]) -> None:
    if len(values) < 2 or list(values) != sorted(set(values)):
        raise ValueError(f"{name} must be at least two and increase, got {list(values)}")


class Exact(Settings):
    """Size of the checks at initial weights."""

    depths: tuple[int, ...]
    seeds: int = Field(ge=2)
    tokens: int = Field(ge=8)
    width: int = Field(ge=8)

    @field_validator("depths")
    @classmethod
    def _depths_increase(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        _require_rising("depths", depths)
        if depths[0] < 1:
            raise ValueError(f"depths must be at least 1, got {list(depths)}")
        return depths


FEWEST_STEPS = 12
"""A quarter of them is to have a few steps."""


class Parameters(Section):
    """The section claims.pre_vs_post_ln of params.yaml."""

    depths: tuple[int, ...]
    """Blocks, increasing; the first is "shallow" and the last "deep"."""
    learning_rates: Rates
    """The grid's columns, increasing, and what the arms at the greatest depth choose from."""
    steps: int = Field(ge=FEWEST_STEPS)
    long_warmup: float = Field(gt=0, lt=1)
    """Fraction of the steps: what Post-LN is tried with besides optimisation.warmup."""
    norm_gain: float = Field(gt=1)
    """What Pre-LN's gains start at where they are larger."""
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    def require(self, params: Params) -> None:
        if self.long_warmup <= params.optimisation.warmup:
            raise ValueError(
                f"long_warmup {self.long_warmup:g} is not longer than optimisation.warmup "
                f"{params.optimisation.warmup:g}; raise it"
            )

    @field_validator("depths")
    @classmethod
    def _depths_increase(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        _require_rising("depths", depths)
        if depths[0] < 2:
            raise ValueError(f"depths must be at least 2, for a deep half of the blocks, got {list(depths)}")
        return depths

    @field_validator("learning_rates")
    @classmethod
    def _rates_increase(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        _require_rising("learning_rates", rates)
        return rates


def _section(params: Params) -> Parameters:
    return params.claims.pre_vs_post_ln


def _judged(params: Params, **estimates: Any) -> list[Check]:
    section = _section(params)
    numbers = {
        "shallow": section.depths[0],
        "deep": section.depths[-1],
        "exact_deep": section.exact.depths[-1],
        "depths": len(section.depths),
        "rates": len(section.learning_rates),
        "cells": len(section.depths) * len(section.learning_rates),
        "lowest": section.learning_rates[0],
        "highest": section.learning_rates[-1],
        "gain": section.norm_gain,
    }
    checks = judge(QUESTIONS, section.criteria, estimates, numbers)
    return [check.model_copy(update={"unit": check.unit.format(**numbers)}) for check in checks]


# --- exact checks at initial weights --------------------------------------------------------------


def measures(params: Params) -> pd.DataFrame:
    """`initial_measures` at the sizes of params.yaml."""
    exact = _section(params).exact
    return initial_measures(exact.depths, exact.seeds, exact.tokens, exact.width)


def checks_initial(params: Params, initial: pd.DataFrame) -> list[Check]:
    """Sentences A4.1a, A4.1c and A4.2a without training."""
    deep = _section(params).exact.depths[-1]
    at_deep = initial[initial["depth"] == deep].sort_values("seed")

    def measured(arm: str, column: str) -> list[float]:
        values: list[float] = at_deep[at_deep["arm"] == arm][column].tolist()
        return values

    low, high = stream_band(deep)
    return _judged(
        params,
        gradient_post=mean_of(log_slopes(initial, "Post-LN", "gradient")),
        gradient_pre=mean_of(log_slopes(initial, "Pre-LN", "gradient")),
        post_accumulates=mean_of(measured("Post-LN", "growth")),
        pre_controlled=mean_of(measured("Pre-LN", "growth")),
        growth_band=mean_of([(square - low) / (high - low) for square in measured("Pre-LN", "mean_square")]),
        update_slope_pre=mean_of(log_slopes(initial, "Pre-LN", "last_angle")),
        update_slope_post=mean_of(log_slopes(initial, "Post-LN", "last_angle")),
    )


# --- arms at the greatest depth -------------------------------------------------------------------

GAIN, WEIGHT = "larger norm gain", "learnt branch weight"


def arms(params: Params) -> list[Arm]:
    """What is tried at the greatest depth: controls, cures for small updates; and no block at all."""
    section = _section(params)
    depth, rates = section.depths[-1], section.learning_rates
    per_block = run_config(params, depth, connection=ConnectionConfig("skipinit", initial=1.0))
    per_channel = run_config(params, depth, connection=ConnectionConfig("layerscale", initial=1.0))
    return [
        Arm("Pre-LN", run_config(params, depth), rates),
        Arm("DeepNorm", run_config(params, depth, "deepnorm", weight_init="deepnorm"), rates),
        Arm("Post-LN, DeepNet init", run_config(params, depth, "post", weight_init="deepnorm"), rates),
        Arm(GAIN, run_config(params, depth, norm_gain=section.norm_gain), rates),
        Arm(WEIGHT, per_block, rates, {"one a channel": per_channel}),
        Arm(ENDS, ends_run(params, steps=section.steps, weight_init="plain"), rates),
    ]


def rates(params: Params) -> pd.DataFrame:
    """A learning rate for each of `arms`, by short runs."""
    steps = min(params.sweep.steps, _section(params).steps)
    return choose_rates(arms(params), params.sweep.model_copy(update={"steps": steps}), params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """The arms at their rates on all seeds; Pre-LN's runs are the grid's."""
    return train_arms(arms(params), chosen, params.seeds, params.execution)


# --- checks on the grid ---------------------------------------------------------------------------


def _early(params: Params, records: Sequence[RunRecord]) -> list[float]:
    """Mean training loss of the first quarter of the steps."""
    return each(records, lambda record: early_loss(record.train_loss, _section(params).steps // 4))


def _pre_at_posts_rate(params: Params, tried: Grid) -> list[RunRecord]:
    """Pre-LN's shallow runs at the rate that is Post-LN's best."""
    shallow = _section(params).depths[0]
    return list(tried["Pre-LN", shallow, best_rate(params, tried, "Post-LN", shallow)])


def _failed_with_a_jump(params: Params, tried: Grid) -> list[float]:
    """By seed: the share of Post-LN's failed runs whose loss jumped; not a number where none failed."""
    found = failed(tried)
    runs = [pair for cell in cells(params, "Post-LN") for pair in zip(tried[cell], found[cell], strict=True)]
    shares = []
    for seed in params.seeds:
        jumped = [jumps(record) for record, ill in runs if ill and record.config.seed == seed]
        shares.append(float(np.mean(jumped)) if jumped else math.nan)
    return shares


def checks_stability(params: Params, tried: Grid) -> list[Check]:
    """Sentence A4.1a: how the losses fall, and at which rates."""
    section = _section(params)
    shallow, highest = section.depths[0], section.learning_rates[-1]
    pre, post = (best(params, tried, method, shallow) for method in ("Pre-LN", "Post-LN"))
    same = _pre_at_posts_rate(params, tried)
    seen = tried["Pre-LN", shallow, section.learning_rates[0]]
    gap = bears_less_fails(params, *(brackets(params, tried, m, shallow) for m in ("Pre-LN", "Post-LN")))
    at_highest = [("Post-LN", depth, highest) for depth in section.depths]
    return _judged(
        params,
        no_false_spikes=deterministic(sum(len(spikes(context_free_losses(record))) for record in seen)),
        falls_faster=paired_difference(_early(params, post), _early(params, pre)),
        falls_faster_same_rate=paired_difference(_early(params, post), _early(params, same)),
        post_unstable=mean_of(share_failed(tried, at_highest)),
        post_spikes=mean_of(_failed_with_a_jump(params, tried)),
        pre_calm=mean_of(share(tried, cells(params, "Pre-LN"), jumps)),
        threshold_gap=mean_of(gap),
        ends_level=paired_difference(held_out(pre), held_out(post)),
    )


def checks_depth(params: Params, tried: Grid, trained: Runs) -> list[Check]:
    """Sentences A4.1b and A4.2c: what becomes of deep models."""
    section = _section(params)
    shallow, deep = section.depths[0], section.depths[-1]
    at_deep = {m: [cell for cell in cells(params, m) if cell[1] == deep] for m in ("Pre-LN", "Post-LN")}
    falls = bears_less_fails(params, *(brackets(params, tried, "Post-LN", depth) for depth in (shallow, deep)))
    return _judged(
        params,
        post_deep=mean_of(share(tried, at_deep["Post-LN"], _learns)),
        pre_deep=mean_of(share(tried, at_deep["Pre-LN"], _learns)),
        pre_over_ends=paired_difference(held_out(trained[ENDS]), held_out(best(params, tried, "Pre-LN", deep))),
        threshold_falls=mean_of(falls),
        post_deepnet=mean_of(each(trained["Post-LN, DeepNet init"], _below_context_free)),
        deepnorm_learns=mean_of(each(trained["DeepNorm"], _below_context_free)),
        ceiling=paired_difference(held_out(tuned_post(params, tried)), held_out(best(params, tried, "Pre-LN", deep))),
    )


def _learns(record: RunRecord) -> bool:
    return record.outcome == "trained"


def _below_context_free(record: RunRecord) -> float:
    assert record.test_loss is not None
    return record.context_free_loss - record.test_loss


# --- checks on the stream and on its updates ------------------------------------------------------


def turns(record: RunRecord, *, trained: bool = True) -> list[float]:
    """By how many degrees each block turns the stream, after or before training."""
    return block_angles(profile_of(record, "neighbour_cosine", trained=trained))


def _mean_turn(records: Sequence[RunRecord]) -> list[float]:
    return each(records, lambda record: float(np.mean(turns(record))))


def _deep_turn(records: Sequence[RunRecord], *, trained: bool = True) -> list[float]:
    """The mean over the deep half of the blocks."""
    found = [turns(record, trained=trained) for record in records]
    return [float(np.mean(blocks[len(blocks) // 2 :])) if blocks else math.nan for blocks in found]


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b if b else math.nan for a, b in zip(ours, theirs, strict=True)]


def _growth(record: RunRecord) -> float:
    """Mean square of the stream after the last block over that before the first."""
    squares = profile_of(record, "mean_square")
    return squares[-1] / squares[0]


def first_use_of_blocks(records: Sequence[RunRecord], ends: Sequence[RunRecord]) -> list[float]:
    """By seed: the first step (from 0) at which the mean of 20 losses is `STALL_MARGIN` below that of embedding and
    head alone on the same batches; not a number if none."""
    pairs = zip(records, ends, strict=True)
    return [
        first_below([a - b for a, b in zip(ours.train_loss, theirs.train_loss, strict=False)], -STALL_MARGIN)
        if ours.outcome != "diverged"
        else math.nan
        for ours, theirs in pairs
    ]


def checks_stream(params: Params, tried: Grid, trained: Runs) -> list[Check]:
    """Sentences A4.1c and A4.2a after training."""
    shallow, deep = _section(params).depths[0], _section(params).depths[-1]
    pre, post = (best(params, tried, method, shallow) for method in ("Pre-LN", "Post-LN"))
    deep_pre, deep_post = (best(params, tried, method, deep) for method in ("Pre-LN", "Post-LN"))
    at_posts_rate = _pre_at_posts_rate(params, tried)
    ends = trained[ENDS]
    own_first, same_first, post_first = (first_use_of_blocks(r, ends) for r in (pre, at_posts_rate, post))
    return _judged(
        params,
        post_accumulates_trained=mean_of(each(deep_post, _growth)),
        pre_controlled_trained=mean_of(each(deep_pre, _growth)),
        update_deep=mean_of(_ratios(_mean_turn(deep_pre), _mean_turn(pre))),
        update_pre_post=mean_of(_ratios(_deep_turn(pre), _deep_turn(post))),
        features_late=paired_difference(own_first, post_first),
        features_late_same_rate=paired_difference(same_first, post_first),
    )


def checks_remedies(params: Params, trained: Runs) -> list[Check]:
    """Sentence A4.2b: what is said to make up for small updates, against Pre-LN chosen in the same way."""
    plain, gain, weight = (trained[name] for name in ("Pre-LN", GAIN, WEIGHT))
    return _judged(
        params,
        gain_updates_start=mean_of(_ratios(_deep_turn(gain, trained=False), _deep_turn(plain, trained=False))),
        gain_updates=mean_of(_ratios(_deep_turn(gain), _deep_turn(plain))),
        gain_early=paired_difference(_early(params, gain), _early(params, plain)),
        gain_loss=paired_difference(held_out(gain), held_out(plain)),
        weight_updates=mean_of(_ratios(_deep_turn(weight), _deep_turn(plain))),
        weight_early=paired_difference(_early(params, weight), _early(params, plain)),
        weight_loss=paired_difference(held_out(weight), held_out(plain)),
    )


# --- published numbers ---------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    xiong = "Xiong et al. 2020, arXiv 2002.04745"
    return [
        Published(
            what="exponent of the depth in the last MLP's gradient at the start, Post-LN",
            published="0",
            ours=ours["gradient_post"],
            source=f"{xiong}, theorem 1",
        ),
        Published(
            what="the same, Pre-LN",
            published="-1/2",
            ours=ours["gradient_pre"],
            source=f"{xiong}, theorem 1",
        ),
        Published(
            what="mean square of Pre-LN's stream at the start, from 0 (1 + L/2) to 1 (1 + 3L/2)",
            published="0 to 1",
            ours=ours["growth_band"],
            source=f"{xiong}, lemma 2",
        ),
    ]
