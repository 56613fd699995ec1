"""Claim 06: attention over depth gains over equal-weight accumulation (sentences B3a to B6, B7c, B7d)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
from pydantic import Field, field_validator, model_validator

from reslab import data
from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import (
    Rates,
    Runs,
    arms_summary,
    choose_rates,
    each,
    held_out,
    train_arms,
)
from reslab.experiments.attention_residual_gains_arms import (
    at_depth,
    looked_into,
    main_methods,
    other_arms,
    section_of,
    text_arms,
)
from reslab.experiments.attention_residual_gains_inside import Inside, column, look_inside
from reslab.experiments.runs import ENDS
from reslab.flops import forward_flops, modelled_cost, training_flops
from reslab.models.decoder import DecoderConfig
from reslab.schema import Settings
from reslab.stats import Estimate, detectable, deterministic, folded, mean_of, paired_difference, slope
from reslab.training import RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does attention over depth beat equal-weight accumulation?"
STATEMENT = (
    "Give every sublayer a query and let it read a softmax-weighted sum of all earlier outputs instead of their plain "
    "sum: deep models gain at almost no extra parameters, shallow ones do not; attention and MLP sublayers choose "
    "different histories, early information is kept, and it combines with norm placement and initialisation."
)
KEY = "full_gain"

QUESTIONS = {
    # untrained
    "full_starts_as_standard": Question(
        "B3a",
        "control",
        "relative difference of logits",
        "with queries of zero and norms without eps, Full is the Pre-LN model at the start",
    ),
    "block_starts_as_standard": Question(
        "B3a", "control", "relative difference of logits", "and so is Block (blocks of {block} sublayers)"
    ),
    "rescaled_is_held_full": Question(
        "B3a",
        "control",
        "relative difference of logits",
        "with queries of zero, Full is the rescaled residual at the start, at any eps",
    ),
    "source_counts": Question(
        "B3a",
        "control",
        "reads with another number",
        "four sublayers in blocks of two, and the output, read 1, 2, 2, 3 and 3 sources",
    ),
    "parameters_exact": Question(
        "B3a",
        "control",
        "parameters",
        "Full has one query for each sublayer and one for the output more, and nothing else",
    ),
    "parameter_share": Question(
        "B3a", "exact", "share of Pre-LN's parameters", "the extra parameters are almost none ({deep} blocks)"
    ),
    "eps_trap": Question(
        "B7c",
        "exact",
        "relative difference of logits",
        "it needs a suitable norm: where all weights start at std 0.02 and eps is 1e-6 Full starts far from Pre-LN",
    ),
    "eps_here": Question(
        "B7c",
        "control",
        "relative difference of logits",
        "at the embedding and eps that are trained here Full starts as Pre-LN ({deep} blocks)",
    ),
    "uniform_untrained": Question(
        "B3b",
        "control",
        "weight times n, less 1",
        "untrained, attention and MLP sublayers read the same: all weights are 1/n",
    ),
    # trained
    "blocks_matter": Question(
        "B3a",
        "control",
        "nats per byte",
        "blocks are worth something here: Pre-LN at {deep} blocks ends below embedding and head alone",
    ),
    "full_gain": Question("B3a", "trained", "nats per byte", "Full ends below Pre-LN at {deep} blocks (test loss)"),
    "block_gain": Question("B3a", "trained", "nats per byte", "Block ends below Pre-LN at {deep} blocks (test loss)"),
    "full_over_equal": Question(
        "B3a",
        "trained",
        "nats per byte",
        "Full ends below the mean of all outputs with equal weights (rescaled residual, {rescaled_depth} blocks)",
    ),
    "full_over_static": Question(
        "B3a",
        "trained",
        "nats per byte",
        "it is selection, not parameters: Full ends below learnt weights that do not look at the content "
        "({static_depth} blocks)",
    ),
    "full_over_denseformer": Question(
        "B3a",
        "trained",
        "nats per byte",
        "no other learnt mixing over depth does as well: Full ends below DenseFormer's static weights over blocks "
        "({denseformer_depth} blocks)",
    ),
    "full_over_mhc": Question(
        "B3a",
        "trained",
        "nats per byte",
        "no other learnt mixing over depth does as well: Full ends below mHC of {streams} streams ({mhc_depth} blocks)",
    ),
    "equal_compute_gain": Question(
        "B3a", "trained", "nats per byte", "Full ends below Pre-LN at equal training compute ({deep} blocks)"
    ),
    "gain_grows": Question("B3a", "trained", "nats per doubling of depth", "Full's gain over Pre-LN grows with depth"),
    "magnitude_standard": Question(
        "B3a", "trained", "rms at the end / half-way", "Pre-LN's stream grows from half-way to the end ({deep} blocks)"
    ),
    "magnitude_full": Question("B3a", "trained", "rms at the end / half-way", "what Full reads does not grow"),
    "magnitude_block": Question("B3a", "trained", "rms at the end / half-way", "what Block reads does not grow"),
    "gradient_flatter": Question(
        "B3a",
        "trained",
        "std of log2, Pre-LN less Full",
        "Full's weight gradients are spread more evenly over the blocks than Pre-LN's",
    ),
    "kinds_differ": Question(
        "B3b",
        "trained",
        "total variation, across less within",
        "neighbouring attention and MLP sublayers weigh their sources more differently than two of one kind do",
    ),
    "sharper_before_mlp": Question(
        "B3b", "trained", "sharpness, MLP less attention", "MLP sublayers choose more sharply than attention ones"
    ),
    "newest_preferred": Question(
        "B3b",
        "trained",
        "weight times n",
        "sublayers weigh the newest output above an equal share (diagonal dominance)",
    ),
    "embedding_kept": Question(
        "B3c",
        "trained",
        "weight times n",
        "the last quarter of the sublayers weigh the embedding above an equal share",
    ),
    "token_decodable": Question(
        "B3c",
        "trained",
        "accuracy, Full less Pre-LN",
        "from what the last block reads the input token is easier to read off linearly than under Pre-LN",
    ),
    "article_trains": Question(
        "B4", "trained", "runs stalled or diverged", "the article's own loop trains ({article_depth} blocks)"
    ),
    "article_gain": Question(
        "B4", "trained", "nats per byte", "the article's own loop ends below Pre-LN ({article_depth} blocks)"
    ),
    "digits_full": Question(
        "B5", "trained", "nats", "encoders: one of images gains from Full (digits, {image_depth} blocks)"
    ),
    "digits_block": Question("B5", "trained", "nats", "encoders: it gains from Block"),
    "hops_full": Question(
        "B5",
        "trained",
        "nats",
        "beyond the parts named: a decoder at another task gains from Full (pointer chasing, {hops} hops, {hops_depth} "
        "blocks; no value where both reach an accuracy of {ceiling:g})",
    ),
    "hops_block": Question("B5", "trained", "nats", "beyond the parts named: it gains from Block"),
    "adds_to_init": Question(
        "B6",
        "trained",
        "nats per byte",
        "Full's gain is as large from a depth-scaled start as from a plain one ({middle} blocks)",
    ),
    "adds_to_norm": Question(
        "B6",
        "trained",
        "nats per byte",
        "Full's gain is as large with norms placed as in Peri-LN as in Pre-LN ({middle} blocks)",
    ),
    "random_queries_early": Question(
        "B7c",
        "trained",
        "nats per byte",
        "random queries (std 1) for zero ones cost loss in the first quarter of training ({middle} blocks)",
    ),
    "random_queries": Question("B7c", "trained", "nats per byte", "random queries cost test loss at the end"),
    "fast_queries_early": Question(
        "B7c",
        "trained",
        "nats per byte, |difference|",
        "the learning rate of the queries matters: {fast:g} and {slow:g} of the model's differ in early training loss",
    ),
    "fast_queries": Question(
        "B7c", "trained", "nats per byte, |difference|", "these two rates differ in test loss at the end"
    ),
    "key_norm_early": Question("B7c", "trained", "nats per byte", "keys without norm cost early training loss"),
    "key_norm": Question("B7c", "trained", "nats per byte", "keys without norm cost test loss at the end"),
    "shallow_full": Question("B7d", "trained", "nats per byte", "at {shallow} blocks Full and Pre-LN end alike"),
    "shallow_block": Question("B7d", "trained", "nats per byte", "at {shallow} blocks Block and Pre-LN end alike"),
}
"""What is asked, by the name of its criterion in params.yaml. Gains are other less ours: above 0 if ours is better.

Sentence B7c says that a suitable learning rate is needed but not which: the estimates of `fast_queries` are folded."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Peers(Settings):
    """At how many blocks each other method runs; each has Pre-LN and Full beside it."""

    rescaled: int = Field(ge=2)
    static: int = Field(ge=2)
    denseformer: int = Field(ge=2)
    mhc: int = Field(ge=2)
    article: int = Field(ge=2)


class HopsArms(Settings):
    """Pointer chasing of sentence B5."""

    hops: int = Field(ge=1)
    depth: int = Field(ge=2)
    batch: int = Field(ge=1)
    steps: int = Field(ge=4)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates
    ceiling: float = Field(gt=0, le=1)
    """Accuracy from which on nothing is left to gain; between two methods that both reach it no gain is measured."""


class ImageArms(Settings):
    """The image encoder of sentence B5."""

    depth: int = Field(ge=2)
    width: int = Field(ge=4)
    heads: int = Field(ge=1)
    batch: int = Field(ge=1, le=data.DIGITS_FOR_TRAINING)
    steps: int = Field(ge=4)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ImageArms:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        return self


class Exact(Settings):
    """Size of the checks at initial weights."""

    depth: int = Field(ge=2)
    width: int = Field(ge=8, multiple_of=4)
    tokens: int = Field(ge=4)
    seeds: int = Field(ge=1)


class Parameters(Section):
    """The section claims.attention_residual_gains of params.yaml."""

    depths: tuple[int, ...]
    """Blocks of Pre-LN, Full and Block on text, from shallow to deep."""
    middle: int = Field(ge=2)
    """Of these depths, the one at which what it needs and what it combines with are tested."""
    peers: Peers
    block: int = Field(ge=2)
    """Sublayers a block of Block."""
    streams: int = Field(ge=2)
    """Of mHC."""
    query_rates: tuple[float, float]
    """Learning rates of the queries over the model's, the higher first; each arm chooses."""
    learning_rates: Rates
    ends_learning_rates: Rates
    """Of embedding and head alone."""
    steps: int | None = Field(ge=4)
    """Of each run on text, half of them for choosing rates; null is as in `optimisation` and `sweep`."""
    balance: float = Field(gt=0)
    """Floating-point operations of the machine in the time that one byte takes, for the modelled cost."""
    hops: HopsArms
    image: ImageArms
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    def require(self, params: Params) -> None:
        if params.optimisation.steps < 4:
            raise ValueError("early loss is that of the first quarter; it needs optimisation.steps of at least 4")

    @field_validator("depths")
    @classmethod
    def _from_shallow_to_deep(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        if len(depths) < 2 or list(depths) != sorted(set(depths)) or depths[0] < 2:
            raise ValueError(f"depths must be at least two, increasing from at least 2, got {list(depths)}")
        return depths

    @field_validator("query_rates")
    @classmethod
    def _fast_then_slow(cls, rates: tuple[float, float]) -> tuple[float, float]:
        if not rates[0] > rates[1] > 0:
            raise ValueError(f"query_rates must be two, the higher first, above 0, got {list(rates)}")
        return rates

    @model_validator(mode="after")
    def _depths_fit(self) -> Parameters:
        for name, depth in {"middle": self.middle, **{f"peers.{n}": d for n, d in self.peers}}.items():
            if depth not in self.depths:
                raise ValueError(f"{name} {depth} is none of the depths {list(self.depths)}, where it has no baseline")
        smallest = min(self.depths[0], self.hops.depth, self.image.depth)
        if self.block > 2 * smallest:
            raise ValueError(
                f"block {self.block} is larger than the {2 * smallest} sublayers at {smallest} blocks; make it smaller"
            )
        return self


# --- runs ------------------------------------------------------------------------------------------


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate, and where there are some a setting, for every arm."""
    section = section_of(params)
    text = params.sweep if section.steps is None else params.sweep.of(section.steps // 2)
    hops, image = other_arms(params)
    tables = [
        choose_rates(text_arms(params), text, params.execution),
        choose_rates(hops, params.sweep.of(section.hops.sweep_steps), params.execution),
        choose_rates(image, params.sweep.of(section.image.sweep_steps), params.execution),
    ]
    return pd.concat(tables, ignore_index=True)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds."""
    hops, image = other_arms(params)
    arms = [*text_arms(params), *hops, *image]
    kept = [arm for arm in arms if arm.name in looked_into(params)]
    others = [arm for arm in arms if arm.name not in looked_into(params)]
    trained = train_arms(kept, chosen, params.seeds, params.execution, weights=True)
    return trained | train_arms(others, chosen, params.seeds, params.execution)


def inside(params: Params, trained: Runs) -> dict[str, list[Inside | None]]:
    """What the trained deepest models of Pre-LN, Full and Block are like inside, by method and seed."""
    deep = section_of(params).depths[-1]
    return {name: look_inside(trained[at_depth(name, deep)]) for name in main_methods(params)}


# --- checks on trained arms -----------------------------------------------------------------------


def judged(params: Params, **estimates: Estimate) -> list[Check]:
    section = section_of(params)
    numbers = {
        "block": section.block,
        "streams": section.streams,
        "shallow": section.depths[0],
        "middle": section.middle,
        "deep": section.depths[-1],
        "fast": section.query_rates[0],
        "slow": section.query_rates[1],
        "hops": section.hops.hops,
        "ceiling": section.hops.ceiling,
        "hops_depth": section.hops.depth,
        "image_depth": section.image.depth,
        **{f"{name}_depth": depth for name, depth in section.peers},
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


def gains(params: Params, trained: Runs) -> dict[str, list[float]]:
    """By check, each seed's test loss of the other method less that of ours, in nats; above 0 where ours is better.

    At pointer chasing not a number where both reach the ceiling: then nothing was left to gain.
    """
    section = section_of(params)
    deep, shallow, peers = section.depths[-1], section.depths[0], section.peers

    def less(other: str, ours: str) -> list[float]:
        pairs = zip(held_out(trained[other]), held_out(trained[ours]), strict=True)
        return [theirs - own for theirs, own in pairs]

    def at(depth: int, other: str, ours: str) -> list[float]:
        return less(at_depth(other, depth), at_depth(ours, depth))

    def chasing(ours: str) -> list[float]:
        reached = [held_out(trained[arm], "test_accuracy") for arm in ("Pre-LN, hops", ours)]
        lowest = map(min, *reached)
        pairs = zip(less("Pre-LN, hops", ours), lowest, strict=True)
        return [math.nan if accuracy >= section.hops.ceiling else gain for gain, accuracy in pairs]

    middle = at_depth("Full", section.middle)
    return {
        "blocks_matter": less(ENDS, at_depth("Pre-LN", deep)),
        "full_gain": at(deep, "Pre-LN", "Full"),
        "block_gain": at(deep, "Pre-LN", "Block"),
        "full_over_equal": at(peers.rescaled, "rescaled", "Full"),
        "full_over_static": at(peers.static, "static", "Full"),
        "full_over_denseformer": at(peers.denseformer, "DenseFormer", "Full"),
        "full_over_mhc": at(peers.mhc, "mHC", "Full"),
        "equal_compute_gain": less(at_depth("Pre-LN", deep), "Full, equal compute"),
        "article_gain": at(peers.article, "Pre-LN", "article's form"),
        "digits_full": less("Pre-LN, digits", "Full, digits"),
        "digits_block": less("Pre-LN, digits", "Block, digits"),
        "hops_full": chasing("Full, hops"),
        "hops_block": chasing("Block, hops"),
        "random_queries": less("Full, random queries", middle),
        "fast_queries": less("Full, fast queries", "Full, slow queries"),
        "key_norm": less("Full, keys without norm", middle),
        "shallow_full": at(shallow, "Pre-LN", "Full"),
        "shallow_block": at(shallow, "Pre-LN", "Block"),
    }


def interplay(params: Params, trained: Runs) -> dict[str, tuple[list[float], list[float]]]:
    """Of the two crossed pairs, by check: Full's gain by seed with the usual choice, and with the other one."""
    middle = section_of(params).middle

    def gain(other: str, ours: str) -> list[float]:
        pairs = zip(held_out(trained[other]), held_out(trained[ours]), strict=True)
        return [theirs - own for theirs, own in pairs]

    usual = gain(at_depth("Pre-LN", middle), at_depth("Full", middle))
    return {
        "adds_to_init": (usual, gain("Pre-LN, plain init", "Full, plain init")),
        "adds_to_norm": (usual, gain("Peri-LN", "Full, Peri-LN")),
    }


def gain_by_depth(params: Params, trained: Runs, method: str) -> dict[int, list[float]]:
    """Test loss of Pre-LN less that of `method`, by depth and seed."""
    by_depth = {}
    for depth in section_of(params).depths:
        pairs = zip(
            held_out(trained[at_depth("Pre-LN", depth)]), held_out(trained[at_depth(method, depth)]), strict=True
        )
        by_depth[depth] = [theirs - own for theirs, own in pairs]
    return by_depth


def growth(params: Params, trained: Runs) -> list[float]:
    """By seed, Full's gain per doubling of the depth; not a number where a run diverged."""
    by_depth = gain_by_depth(params, trained, "Full")
    doublings = [math.log2(depth) for depth in by_depth]
    by_seed = list(zip(*by_depth.values(), strict=True))
    return [slope(doublings, seed) if all(map(math.isfinite, seed)) else math.nan for seed in by_seed]


def early_loss(records: Sequence[RunRecord]) -> list[float]:
    """Mean training loss over the first quarter of the steps, by seed."""
    return each(records, lambda r: sum(r.train_loss[: len(r.train_loss) // 4]) / (len(r.train_loss) // 4))


def checks_loss(params: Params, trained: Runs) -> list[Check]:
    """All sentences, by what the runs lose."""
    section, found = section_of(params), gains(params, trained)
    article = trained[at_depth("article's form", section.peers.article)]
    early = {name: early_loss(records) for name, records in trained.items()}
    middle = early[at_depth("Full", section.middle)]
    means = {name: mean_of(values) for name, values in found.items()}
    rates_early = zip(early["Full, fast queries"], early["Full, slow queries"], strict=True)
    return judged(
        params,
        **means | {"fast_queries": folded(found["fast_queries"])},
        **{name: paired_difference(*pair) for name, pair in interplay(params, trained).items()},
        gain_grows=mean_of(growth(params, trained)),
        article_trains=deterministic(sum(record.outcome != "trained" for record in article)),
        random_queries_early=paired_difference(early["Full, random queries"], middle),
        fast_queries_early=folded([fast - slow for fast, slow in rates_early]),
        key_norm_early=paired_difference(early["Full, keys without norm"], middle),
    )


def checks_inside(params: Params, seen: dict[str, list[Inside | None]]) -> list[Check]:
    """Sentences B3a to B3c in the trained models themselves."""
    ours, theirs, block = seen["Full"], seen["Pre-LN"], seen["Block"]
    return judged(
        params,
        magnitude_standard=mean_of(column(theirs, Inside.growth)),
        magnitude_full=mean_of(column(ours, Inside.growth)),
        magnitude_block=mean_of(column(block, Inside.growth)),
        gradient_flatter=paired_difference(column(theirs, Inside.unevenness), column(ours, Inside.unevenness)),
        kinds_differ=mean_of(column(ours, Inside.kinds_apart)),
        sharper_before_mlp=mean_of(column(ours, Inside.mlp_sharper)),
        newest_preferred=mean_of(column(ours, Inside.newest)),
        embedding_kept=mean_of(column(ours, Inside.embedding_late)),
        token_decodable=paired_difference(
            column(ours, lambda one: one.decodability), column(theirs, lambda one: one.decodability)
        ),
    )


# --- tables ---------------------------------------------------------------------------------------


def power(params: Params, trained: Runs) -> pd.DataFrame:
    """By check, the mean gain and the smallest true one that these seeds would have shown, four times in five."""
    crossed = {name: [a - b for a, b in zip(*pair, strict=True)] for name, pair in interplay(params, trained).items()}
    differences = {**gains(params, trained), "gain_grows": growth(params, trained), **crossed}
    rows = {
        name: {"mean": mean_of(values).value, "detectable": detectable(values)} for name, values in differences.items()
    }
    return pd.DataFrame(rows).T.astype(float)


def losses_by_depth(params: Params, trained: Runs) -> pd.DataFrame:
    """Mean test loss in nats of Pre-LN, Full and Block (columns) by blocks; at 0 that of embedding and head alone."""
    rows = {0: dict.fromkeys(main_methods(params), mean_of(held_out(trained[ENDS])).value)}
    for depth in section_of(params).depths:
        arms = {method: trained[at_depth(method, depth)] for method in main_methods(params)}
        rows[depth] = {method: mean_of(held_out(records)).value for method, records in arms.items()}
    return pd.DataFrame(rows).T.astype(float).rename_axis("blocks")


def compute(params: Params, trained: Runs) -> pd.DataFrame:
    """By depth, mean test loss, training operations, and the modelled cost over Pre-LN's of that depth.

    Of embedding and head alone, and of Pre-LN, Full and Block.
    """
    rows = [_without_blocks(trained[ENDS])]
    for depth in section_of(params).depths:
        for method in main_methods(params):
            records = trained[at_depth(method, depth)]
            standard = trained[at_depth("Pre-LN", depth)][0].config.model
            recipe, model = records[0].config.optimisation, records[0].config.model
            assert isinstance(model, DecoderConfig)
            assert isinstance(standard, DecoderConfig)
            balance = section_of(params).balance
            rows.append(
                {
                    "method": method,
                    "depth": depth,
                    "test_loss": mean_of(held_out(records)).value,
                    "flops": training_flops(model, recipe.steps, recipe.batch),
                    "relative_flops": forward_flops(model) / forward_flops(standard),
                    "relative_cost": modelled_cost(model, balance) / modelled_cost(standard, balance),
                }
            )
    return pd.DataFrame(rows)


def _without_blocks(records: Sequence[RunRecord]) -> dict[str, object]:
    """The row of embedding and head alone, whose one block, multiplied by 0, is not counted."""
    recipe, model = records[0].config.optimisation, records[0].config.model
    assert isinstance(model, DecoderConfig)
    flops = training_flops(model.model_copy(update={"depth": 0}), recipe.steps, recipe.batch)
    return {"method": ENDS, "depth": 0, "test_loss": mean_of(held_out(records)).value, "flops": flops}


def summary(params: Params, chosen: pd.DataFrame, trained: Runs) -> dict[str, object]:
    """For the record: every arm, and what this experiment could have seen."""
    seen = power(params, trained)["detectable"]
    known = {name: None if math.isnan(value) else float(value) for name, value in seen.items()}
    return {**arms_summary(chosen, trained), "smallest detectable gain": known}


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    source = "Kimi Team 2026, arXiv 2603.15031"
    gains_436m = f"{source}, ablation at 436M, 32 sublayers, one seed"
    return [
        Published(
            what=what,
            published=value,
            ours=ours[name],
            source=where,
        )
        for what, value, name, where in (
            ("gain of Full over Pre-LN", "0.029 (1.766 to 1.737)", "full_gain", gains_436m),
            ("gain of Block over Pre-LN", "0.020 (1.766 to 1.746; 8 blocks)", "block_gain", f"{source}, 436M"),
            ("gain of Full over static mixing", "0.012 (1.749 to 1.737)", "full_over_static", gains_436m),
            ("gain of Full over DenseFormer", "0.030 (1.767 to 1.737)", "full_over_denseformer", gains_436m),
            ("gain of Full over mHC", "0.010 (1.747 to 1.737)", "full_over_mhc", gains_436m),
            ("cost of keys without norm", "0.006 (1.737 to 1.743)", "key_norm", gains_436m),
            ("gain at equal compute", "1.25 times the compute", "equal_compute_gain", f"{source}, fit of five points"),
            (
                "magnitude over depth (ours: end over half-way)",
                "baseline 0 to 12 over 27 blocks",
                "magnitude_standard",
                f"{source}, dynamics",
            ),
            (
                "magnitude over depth, Block (ours: end over half-way)",
                "at most 2, saw-toothed",
                "magnitude_block",
                f"{source}, dynamics",
            ),
            (
                "gain at 16 and 32 blocks, 3 seeds (ours: deepest)",
                "0.026 and 0.025",
                "full_gain",
                "attnres4babylm2026, code",
            ),
            ("gain at 6 blocks of width 384, 3 seeds", "0.079 (2.479 to 2.400)", "shallow_full", "AttnResGPT, code"),
            (
                "gain of a gated hybrid at 12 to 14 blocks (ours: Full, deepest)",
                "none (one seed)",
                "full_gain",
                "nanochat, discussion 646",
            ),
        )
    ]
