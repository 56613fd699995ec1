"""Claim 05: layers of deep residual models can be dropped; attention over depth leaves fewer to drop (B2c, B8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from pydantic import Field, model_validator

from reslab import data
from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, arms_summary, choose_rates, each, held_out, train_arms
from reslab.experiments import layer_drop_exact as untrained
from reslab.experiments import layer_drop_measured as measured
from reslab.experiments.layer_drop_costs import (
    cost_slopes,
    free_pair,
    influence_slopes,
    influence_table,
    interaction_sizes,
    mean_cost,
    quarter_cost,
)
from reslab.experiments.layer_drop_exact import Exact
from reslab.experiments.layer_drop_measured import BY_INFLUENCE, BY_LOSS, Healed, Look, Measured, quarter
from reslab.experiments.runs import ENDS, decoder_run, ends_run, hops_run
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.stats import Estimate, detectable, deterministic, mean_of, paired_difference

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Can residual layers be dropped, and does attention over depth leave fewer to drop?"
STATEMENT = (
    "In deep models with standard residual connections a considerable part of the layers can be deleted with little "
    "effect, as late layers contribute less and less. With attention over depth each layer contributes independently, "
    "so that fewer layers can be deleted free of charge."
)
KEY = "fewer_text_full"

SHARE = "share of the blocks' gain lost"

QUESTIONS = {
    # untrained
    "influence_predicted": Question(
        "B2c",
        "exact",
        "measured / predicted",
        "untrained, Block Influence, summed over {exact} blocks, follows from the stream: 1 - sqrt(S_l / S_(l+1))",
    ),
    "influence_falls_untrained": Question(
        "B2c",
        "exact",
        "last quarter / first quarter",
        "untrained, late blocks already have less influence than early ones ({exact} blocks, plain start)",
    ),
    "same_at_start": Question(
        "B8",
        "control",
        "largest difference of logits",
        "untrained, Full and Block are the standard model, also with blocks dropped: what differs later is learned",
    ),
    # trained: the standard residual connection
    "gain_text": Question(
        "B2c", "control", "nats below unigram entropy", "on text every arm has learned something that can be lost"
    ),
    "blocks_text": Question(
        "B2c",
        "control",
        "nats per byte",
        "on text {depth} blocks gain something: the standard model ends below embedding and head alone",
    ),
    "gain_hops": Question(
        "B2c", "control", "nats below ln {symbols}", "at pointer chasing every arm has learned something to lose"
    ),
    "shallow_hops": Question(
        "B2c",
        "control",
        "accuracy lost",
        "pointer chasing needs more than {shallow} block: a model of that depth is clearly worse",
    ),
    "quarter_text": Question(
        "B2c",
        "trained",
        SHARE,
        "on text, of {depth} blocks, needed or not, the {quarter} that validation loss misses least cost little",
    ),
    "quarter_text_influence": Question(
        "B2c",
        "trained",
        SHARE,
        "on text, of {depth} blocks, needed or not, the {quarter} of lowest Block Influence cost little",
    ),
    "quarter_hops": Question(
        "B2c",
        "trained",
        SHARE,
        "at pointer chasing, of {depth_hops} blocks, needed or not, the {quarter_hops} that validation loss misses "
        "least cost little",
    ),
    "quarter_hops_influence": Question(
        "B2c",
        "trained",
        SHARE,
        "at pointer chasing, of {depth_hops} blocks, needed or not, the {quarter_hops} of lowest Block Influence cost "
        "little",
    ),
    "quarter_deep": Question(
        "B2c",
        "trained",
        SHARE,
        "on text, of {deep} blocks, needed or not, the {quarter_deep} that validation loss misses least cost little",
    ),
    "deeper": Question(
        "B2c",
        "trained",
        f"{SHARE}, difference",
        "the deeper the model, the less its most dispensable quarter costs: {deep} blocks against {depth}",
    ),
    "healed_text": Question(
        "B2c",
        "trained",
        SHARE,
        "on text, {healing} more steps make up for the {quarter} blocks of lowest Block Influence",
    ),
    "late_cost_text": Question(
        "B2c",
        "trained",
        "share of the blocks' gain, slope over depth",
        "on text, the later a block, the less is lost by deleting it alone",
    ),
    "late_cost_inner_text": Question(
        "B2c",
        "trained",
        "share of the blocks' gain, slope over depth",
        "on text, this holds also without the first and the last block",
    ),
    "late_cost_deep": Question(
        "B2c",
        "trained",
        "share of the blocks' gain, slope over depth",
        "on text with {deep} blocks, the later a block, the less is lost by deleting it alone",
    ),
    "late_cost_hops": Question(
        "B2c",
        "trained",
        "share of the blocks' gain, slope over depth",
        "at pointer chasing, the later a block, the less is lost by deleting it alone",
    ),
    "late_influence_text": Question(
        "B2c",
        "trained",
        "ln BI, slope over depth",
        "on text, the later a block, the lower its Block Influence",
    ),
    "late_influence_learned": Question(
        "B2c",
        "trained",
        "ln BI, slope over depth, difference",
        "on text, training makes Block Influence fall more steeply with depth than it did at the start",
    ),
    # trained: attention over depth against it
    "fewer_text_full": Question(
        "B8",
        "trained",
        f"{SHARE}, Full - add",
        "on text, dropping 1 to {half} blocks costs more on average with Full attention over depth",
    ),
    "fewer_text_block": Question(
        "B8",
        "trained",
        f"{SHARE}, Block - add",
        "on text, dropping 1 to {half} blocks costs more on average with attention over depth in Block form",
    ),
    "fewer_hops_full": Question(
        "B8",
        "trained",
        f"{SHARE}, Full - add",
        "at pointer chasing, dropping 1 to {half_hops} blocks costs more on average with Full attention over depth",
    ),
    "free_text": Question(
        "B8",
        "trained",
        "blocks, Full - add",
        "on text, of {depth} blocks, dropped until one is left, fewer go free (for {free:.0%} of the gain at most) "
        "with Full attention over depth",
    ),
    "free_text_same_rate": Question(
        "B8",
        "trained",
        "blocks, Full - add",
        "on text, fewer go free with Full attention over depth also where both train at one learning rate, Full's",
    ),
    "free_hops": Question(
        "B8",
        "trained",
        "blocks, Full - add",
        "at pointer chasing, of {depth_hops} blocks, dropped until one is left, fewer go free (for {free:.0%} of the "
        "gain at most) with Full attention over depth",
    ),
    "independent_text": Question(
        "B8",
        "trained",
        "share of the joint cost",
        "on text, with Full attention over depth blocks lost together cost what they cost one by one",
    ),
    "more_independent_text": Question(
        "B8",
        "trained",
        "size of the share, Full - add",
        "on text, they are closer to that with Full attention over depth than with the standard connection",
    ),
    "independent_hops": Question(
        "B8",
        "trained",
        "share of the joint cost",
        "at pointer chasing, with Full attention over depth blocks lost together cost what they cost one by one",
    ),
    "more_independent_hops": Question(
        "B8",
        "trained",
        "size of the share, Full - add",
        "at pointer chasing, they are closer to that with Full attention over depth than with the standard connection",
    ),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------

FEWEST = 4
"""Blocks of a model of which a quarter can be dropped."""


class TextArms(Settings):
    """Next-byte prediction."""

    depth: int = Field(ge=FEWEST)
    deep: int = Field(ge=FEWEST)
    """Blocks of a deeper model with the standard connection."""
    steps: int | None = Field(default=None, ge=2)
    """Of each run, half of them for choosing rates; null is as in `optimisation` and `sweep`, which shares runs."""
    learning_rates: Rates
    ends_learning_rates: Rates
    """Of embedding and head alone."""
    look: Look

    @model_validator(mode="after")
    def _deep_is_deeper(self) -> TextArms:
        if self.deep <= self.depth:
            raise ValueError(f"deep {self.deep} is no deeper than depth {self.depth}; make it larger")
        return self


class HopsArms(Settings):
    """Pointer chasing, a task that needs depth."""

    depth: int = Field(ge=FEWEST)
    shallow: tuple[int, ...] = Field(min_length=1)
    """Blocks of the shallow models of the control, increasing; the first is judged."""
    hops: int = Field(ge=2)
    batch: int = Field(ge=1)
    steps: int = Field(ge=1)
    sweep_steps: int = Field(ge=1)
    """The loss falls late, so that rates need longer runs than on text."""
    learning_rates: Rates
    look: Look

    @model_validator(mode="after")
    def _shallow_is_shallower(self) -> HopsArms:
        shallow = list(self.shallow)
        if shallow != sorted(set(shallow)) or shallow[0] < 1 or shallow[-1] >= self.depth:
            raise ValueError(f"shallow must increase from at least 1 to less than depth {self.depth}, got {shallow}")
        return self


class Parameters(Section):
    """The section claims.layer_drop_redundancy of params.yaml."""

    text: TextArms
    hops: HopsArms
    block: int = Field(ge=2)
    """Sublayers a block of the Block form."""
    layerscale: float = Field(gt=0)
    """LayerScale's start."""
    free: float = Field(gt=0, lt=1)
    """Share of the blocks' gain up to which blocks go free of charge."""
    healing_steps: int = Field(ge=1)
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    def require(self, params: Params) -> None:
        for depth in (self.text.depth, self.hops.depth, self.exact.depth):
            if self.block > 2 * depth:
                raise ValueError(f"block {self.block} is larger than the {2 * depth} sublayers; make it smaller")


def _judged(params: Params, **estimates: Estimate) -> list[Check]:
    section = params.claims.layer_drop_redundancy
    numbers = {
        "exact": section.exact.depth,
        "depth": section.text.depth,
        "deep": section.text.deep,
        "depth_hops": section.hops.depth,
        "shallow": section.hops.shallow[0],
        "symbols": data.HopsConfig(hops=section.hops.hops).symbols,
        "quarter": quarter(section.text.depth),
        "quarter_deep": quarter(section.text.deep),
        "quarter_hops": quarter(section.hops.depth),
        "half": section.text.depth // 2,
        "half_hops": section.hops.depth // 2,
        "healing": section.healing_steps,
        "free": section.free,
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- exact checks at initial weights --------------------------------------------------------------


def initial_influences(params: Params) -> pd.DataFrame:
    """See `layer_drop_exact.initial_influences`."""
    torch.set_num_threads(params.device.threads)
    return untrained.initial_influences(params.claims.layer_drop_redundancy.exact)


def checks_initial(params: Params, initial: pd.DataFrame) -> list[Check]:
    """What holds without training."""
    exact = params.claims.layer_drop_redundancy.exact
    part = quarter(exact.depth)
    sums = initial.groupby("seed")[["measured", "predicted"]].sum()  # block by block x . f(x) is far from its mean of 0
    falls = [by_block["measured"].tolist() for _, by_block in initial.sort_values("block").groupby("seed")]
    kinds, dropped = [methods(params)[name] for name in ("add", "Full", "Block")], (0, 1, part, exact.depth // 2)
    differences = [untrained.difference_at_start(exact, kinds, dropped, seed) for seed in range(exact.seeds)]
    return _judged(
        params,
        influence_predicted=mean_of((sums["measured"] / sums["predicted"]).tolist()),
        influence_falls_untrained=mean_of([sum(bi[-part:]) / sum(bi[:part]) for bi in falls]),
        same_at_start=deterministic(max(differences)),
    )


# --- arms -----------------------------------------------------------------------------------------


def methods(params: Params) -> dict[str, ConnectionConfig]:
    section = params.claims.layer_drop_redundancy
    return {
        "add": ConnectionConfig(),
        "Full": ConnectionConfig("attnres"),
        "Block": ConnectionConfig("attnres", block=section.block),
        f"LayerScale {section.layerscale:g}": ConnectionConfig("layerscale", initial=section.layerscale),
    }


HOPS_METHODS = ("add", "Full")
"""The methods that are also trained to chase pointers."""


def text_name(method: str) -> str:
    return f"text: {method}"


def hops_name(method: str) -> str:
    return f"hops: {method}"


def deep_name(params: Params) -> str:
    return f"text: add, {params.claims.layer_drop_redundancy.text.deep} blocks"


def shallow_name(depth: int) -> str:
    return f"hops: add, {depth} block{'s' if depth > 1 else ''}"


def half_name(params: Params) -> str:
    """Half as many blocks as those that blocks are dropped from."""
    return f"text: add, {params.claims.layer_drop_redundancy.text.depth // 2} blocks"


SAME_RATE = text_name("add at Full's rate")


def text_arms(params: Params) -> list[Arm]:
    """The deep model first, as it takes longest; embedding and head alone last."""
    text = params.claims.layer_drop_redundancy.text

    def arm(name: str, depth: int, kind: ConnectionConfig) -> Arm:
        return Arm(name, decoder_run(params, depth, kind, steps=text.steps), text.learning_rates)

    deep = arm(deep_name(params), text.deep, ConnectionConfig())
    half = arm(half_name(params), text.depth // 2, ConnectionConfig())
    alone = Arm(text_name(ENDS), ends_run(params, steps=text.steps), text.ends_learning_rates)
    return [deep, half, *(arm(text_name(name), text.depth, kind) for name, kind in methods(params).items()), alone]


def same_rate_arm(params: Params, chosen: pd.DataFrame) -> Arm:
    """The standard model on text at the rate that Full chose: the same runs where both chose alike."""
    [rate] = chosen.loc[chosen["chosen"] & (chosen["arm"] == text_name("Full")), "rate"]
    [add] = [arm for arm in text_arms(params) if arm.name == text_name("add")]
    return replace(add, name=SAME_RATE, rates=(float(rate),))


def hops_arms(params: Params) -> list[Arm]:
    hops = params.claims.layer_drop_redundancy.hops

    def arm(name: str, depth: int, kind: ConnectionConfig) -> Arm:
        config = hops_run(params, depth, kind, hops=hops.hops, steps=hops.steps, batch=hops.batch)
        return Arm(name, config, hops.learning_rates)

    full = [arm(hops_name(name), hops.depth, methods(params)[name]) for name in HOPS_METHODS]
    return [*full, *(arm(shallow_name(depth), depth, ConnectionConfig()) for depth in hops.shallow)]


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm, and Full's for the standard model, too."""
    section = params.claims.layer_drop_redundancy
    short = params.sweep if section.text.steps is None else params.sweep.of(section.text.steps // 2)
    longer = params.sweep.of(section.hops.sweep_steps)
    text = choose_rates(text_arms(params), short, params.execution)
    same = choose_rates([same_rate_arm(params, text)], short, params.execution)
    return pd.concat([text, same, choose_rates(hops_arms(params), longer, params.execution)], ignore_index=True)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds; the trained weights are kept."""
    arms = [*text_arms(params), same_rate_arm(params, chosen), *hops_arms(params)]
    return train_arms(arms, chosen, params.seeds, params.execution, weights=True)


# --- what dropping does ---------------------------------------------------------------------------

Models = dict[str, list[Measured]]
"""What was measured of each arm, in the order of the seeds."""


def models(params: Params, trained: Runs) -> Models:
    """The trained models with blocks dropped.

    What the blocks gained is on text the loss of embedding and head alone less the model's own. At pointer chasing,
    where these see no table and can only guess, it is the best guess's loss less the model's own.
    """
    text, hops = params.claims.layer_drop_redundancy.text, params.claims.layer_drop_redundancy.hops
    measure = partial(measured.measure_all, execution=params.execution)
    half, deep = text.depth // 2, deep_name(params)
    names = map(text_name, methods(params))
    found = {name: measure(trained[name], text.look, most=half, to_the_last=True) for name in names}
    found[SAME_RATE] = measure(trained[SAME_RATE], text.look, kinds=(BY_LOSS,), most=half, to_the_last=True)
    found[deep] = measure(trained[deep], text.look, kinds=(BY_LOSS, BY_INFLUENCE), most=quarter(text.deep))
    ends = measured.whole_losses(trained[text_name(ENDS)], text.look, params.execution)
    found = {name: measured.above_the_ends(models, ends) for name, models in found.items()}
    for name in map(hops_name, HOPS_METHODS):
        found[name] = measure(trained[name], hops.look, most=hops.depth // 2, to_the_last=True)
    return found


def on_text(params: Params, found: Models) -> Models:
    """By method, what was measured of its models on text, all of the same depth."""
    return {method: found[text_name(method)] for method in methods(params)}


def untrained_models(params: Params, trained: Runs) -> list[Measured]:
    """The same models with the standard connection on text before training."""
    text = params.claims.layer_drop_redundancy.text
    records, most = trained[text_name("add")], text.depth // 2
    return measured.measure_all(records, text.look, params.execution, kinds=(BY_INFLUENCE,), most=most, trained=False)


def healed(params: Params, trained: Runs, found: Models) -> dict[str, list[Healed]]:
    """The models on text, trained on with a quarter of the blocks gone, by method."""
    section = params.claims.layer_drop_redundancy
    return {
        method: measured.heal_all(
            trained[text_name(method)],
            found[text_name(method)],
            trained[text_name(ENDS)],
            section.text.look,
            section.healing_steps,
            params.execution,
        )
        for method in ("add", "Full", "Block")
    }


# --- checks on trained arms -----------------------------------------------------------------------


def checks_controls(params: Params, trained: Runs, found: Models) -> list[Check]:
    """What must hold for the rest to mean anything."""
    text = [found[name] for name in (*map(text_name, methods(params)), deep_name(params))]
    hops = [found[hops_name(method)] for method in HOPS_METHODS]
    shallow = shallow_name(params.claims.layer_drop_redundancy.hops.shallow[0])
    accuracies = [held_out(trained[name], "test_accuracy") for name in (hops_name("add"), shallow)]
    ends, add = (held_out(trained[text_name(name)]) for name in (ENDS, "add"))
    return _judged(
        params,
        gain_text=mean_of(_least_gain(text)),
        blocks_text=paired_difference(ends, add),
        gain_hops=mean_of(_least_gain(hops)),
        shallow_hops=paired_difference(*accuracies),
    )


def _least_gain(arms: Sequence[Sequence[Measured]]) -> list[float]:
    """The smallest gain of the arms, by seed; not a number where one diverged."""
    gains = np.array([[model.gain for model in found] for found in arms])
    least: list[float] = gains.min(axis=0).tolist()
    return least


def checks_quarter(params: Params, found: Models, after: dict[str, list[Healed]]) -> list[Check]:
    """Sentence B2c: what a quarter of the blocks costs, with the standard connection."""
    text, hops, deep = (found[name] for name in (text_name("add"), hops_name("add"), deep_name(params)))
    return _judged(
        params,
        quarter_text=mean_of(quarter_cost(text, BY_LOSS)),
        quarter_text_influence=mean_of(quarter_cost(text, BY_INFLUENCE)),
        quarter_hops=mean_of(quarter_cost(hops, BY_LOSS)),
        quarter_hops_influence=mean_of(quarter_cost(hops, BY_INFLUENCE)),
        quarter_deep=mean_of(quarter_cost(deep, BY_LOSS)),
        deeper=paired_difference(quarter_cost(deep, BY_LOSS), quarter_cost(text, BY_LOSS)),
        healed_text=mean_of([each.cost(healed=True) for each in after["add"]]),
    )


def checks_late(params: Params, found: Models, before: Sequence[Measured]) -> list[Check]:
    """Sentence B2c: do late blocks contribute less, with the standard connection?"""
    text, hops, deep = (found[name] for name in (text_name("add"), hops_name("add"), deep_name(params)))
    return _judged(
        params,
        late_cost_text=mean_of(cost_slopes(text)),
        late_cost_inner_text=mean_of(cost_slopes(text, ends=1)),
        late_cost_deep=mean_of(cost_slopes(deep)),
        late_cost_hops=mean_of(cost_slopes(hops)),
        late_influence_text=mean_of(influence_slopes(text)),
        late_influence_learned=paired_difference(influence_slopes(text), influence_slopes(before)),
    )


def comparisons(params: Params, found: Models) -> dict[str, tuple[list[float], list[float]]]:
    """Sentence B8: what is compared, depth attention's values first and the standard connection's after, by seed."""
    free = params.claims.layer_drop_redundancy.free
    add, full, block = (found[text_name(method)] for method in ("add", "Full", "Block"))
    hops_add, hops_full = (found[hops_name(method)] for method in HOPS_METHODS)
    return {
        "fewer_text_full": (mean_cost(full), mean_cost(add)),
        "fewer_text_block": (mean_cost(block), mean_cost(add)),
        "fewer_hops_full": (mean_cost(hops_full), mean_cost(hops_add)),
        "free_text": free_pair(full, add, free),
        "free_text_same_rate": free_pair(full, found[SAME_RATE], free),
        "free_hops": free_pair(hops_full, hops_add, free),
        "more_independent_text": (interaction_sizes(full), interaction_sizes(add)),
        "more_independent_hops": (interaction_sizes(hops_full), interaction_sizes(hops_add)),
    }


def checks_depth_attention(params: Params, found: Models) -> list[Check]:
    """Sentence B8: attention over depth against the standard connection."""
    differences = {name: paired_difference(*pair) for name, pair in comparisons(params, found).items()}
    text, hops = found[text_name("Full")], found[hops_name("Full")]
    return _judged(
        params,
        independent_text=mean_of([model.interaction for model in text]),
        independent_hops=mean_of([model.interaction for model in hops]),
        **differences,
    )


# --- tables ---------------------------------------------------------------------------------------


def blocks_gain(trained: Runs, name: str) -> list[float]:
    """What an arm's blocks gained by seed, in nats of its runs' own test losses; see `models`."""
    if name.startswith(text_name("")):
        without = held_out(trained[text_name(ENDS)])
    else:
        without = each(trained[name], lambda record: record.context_free_loss)
    return [loss - own for loss, own in zip(without, held_out(trained[name]), strict=True)]


def fewer_blocks(params: Params, trained: Runs) -> pd.DataFrame:
    """What models with the standard connection and fewer blocks lose that were trained so from the start.

    As a share of what the deeper one's blocks gained, like what its dropped blocks cost; below 0 where the shallower
    one is better, so that these blocks were not needed.
    """
    shallow = [shallow_name(depth) for depth in params.claims.layer_drop_redundancy.hops.shallow]
    pairs = [(deep_name(params), text_name("add")), (text_name("add"), half_name(params))]
    pairs += [(hops_name("add"), name) for name in shallow]
    rows = []
    for deep, fewer in pairs:
        gains = blocks_gain(trained, deep)
        lost = [f - d for f, d in zip(held_out(trained[fewer]), held_out(trained[deep]), strict=True)]
        shares = [cost / gain if gain > 0 else math.nan for cost, gain in zip(lost, gains, strict=True)]
        rows.append({"in place of": deep, "trained": fewer, SHARE: str(mean_of(shares))})
    return pd.DataFrame(rows).set_index(["in place of", "trained"])


def power_table(params: Params, found: Models) -> pd.DataFrame:
    """What each comparison of B8 could have shown: the smallest true difference that 4 of 5 such trials would find."""
    pairs = comparisons(params, found).items()
    smallest = {name: detectable([a - b for a, b in zip(*pair, strict=True)]) for name, pair in pairs}
    return pd.DataFrame({"smallest detectable difference": smallest})


def summary(params: Params, chosen: pd.DataFrame, trained: Runs, found: Models) -> dict[str, object]:
    """For the record: every arm, and the Block Influence after training of each block, a mean over seeds."""
    by_method = influence_table(on_text(params, found)).items()
    known = {method: [None if math.isnan(value) else value for value in column] for method, column in by_method}
    return {**arms_summary(chosen, trained), "Block Influence on text": known}


# --- published numbers ----------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    return [
        Published(
            what="share of a benchmark score lost with a quarter of the layers of lowest Block Influence",
            published="0.084 (Llama2-13B less 24.6 % of its layers), 0.137 (7B less 27.1 %)",
            ours=ours["quarter_text_influence"],
            source="Men et al. 2024, ShortGPT, arXiv 2403.03853",
        ),
        Published(
            what="layers removed, with healing, before question answering breaks down",
            published="up to half",
            ours=ours["healed_text"] + " of the gain lost at a quarter, healed",
            source="Gromov et al. 2024, arXiv 2403.17887, second-hand",
        ),
        Published(
            what="fewer layers deleted free of charge with attention over depth",
            published="said, without a number",
            ours=ours["fewer_text_full"] + " more of the gain lost",
            source="the article on attention residuals that sentence B8 is from",
        ),
    ]
