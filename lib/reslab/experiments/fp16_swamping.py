"""Claim 04: a low-precision stream swallows small updates (sentences A6.2a to A6.2d)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
from pydantic import Field, field_validator, model_validator

from reslab.claims import Check, Criterion, Published, Question, Section, criteria_model, judge
from reslab.comparison import Rates, Runs, choose_rates, held_out, train_arms
from reslab.experiments import fp16_swamping_exact as exact
from reslab.experiments.fp16_swamping_arms import (
    ALONE,
    ORDINARY,
    PLAIN,
    arms,
    forced_name,
    spread_name,
)
from reslab.precision import FORMATS
from reslab.schema import Settings
from reslab.stats import Estimate, deterministic, mean_of, paired_difference

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does a low-precision stream swallow small updates?"
STATEMENT = (
    "In FP16 a stream near 100 swallows an update near 0.1 almost entirely, and a gap of one to two orders of "
    "magnitude nearly always costs precision; enlarging the branch tenfold in training and scaling it back at "
    "inference restores the result; keeping the accumulation in FP32 is the cure."
)
KEY = "lost"

MATTER = "branches_matter"
"""The control whose margin says what branches have to be worth."""

QUESTIONS = {
    # untrained
    "swallowed": Question(
        "A6.2a", "exact", "share of updates", "in FP16 updates near {update:g} leave values near {stream:g} as they are"
    ),
    "swallowed_vector": Question(
        "A6.2a",
        "exact",
        "share of updates",
        "in FP16 they do so too where only the root mean squares are {stream:g} and {update:g}",
    ),
    "lost": Question(
        "A6.2a", "exact", "share lost", "in FP16 what {additions} such updates add up to is lost almost entirely"
    ),
    "swallowed_bf16": Question(
        "A6.2a", "control", "share of updates", "where theory says so, in BF16, near values do swallow such updates"
    ),
    "law": Question(
        "A6.2a", "control", "exceptions", "an update is absorbed exactly where the half-ulp law says so, in all formats"
    ),
    "cost_fp16_one": Question(
        "A6.2b", "exact", "share lost", "one order of magnitude costs FP16 precision ({additions} updates)"
    ),
    "cost_fp16_two": Question(
        "A6.2b", "exact", "share lost", "two orders of magnitude cost FP16 precision ({additions} updates)"
    ),
    "cost_bf16_one": Question(
        "A6.2b", "exact", "share lost", "one order of magnitude costs BF16 precision ({additions} updates)"
    ),
    "cost_bf16_two": Question(
        "A6.2b", "exact", "share lost", "two orders of magnitude cost BF16 precision ({additions} updates)"
    ),
    "growth_plain": Question(
        "A6.2b",
        "control",
        "log-log slope",
        "in BF16, where each is swallowed, the error grows in proportion to the number of updates",
    ),
    "growth_stochastic": Question(
        "A6.2d", "control", "log-log slope", "with stochastic rounding it grows as the root of their number: no bias"
    ),
    "along_restores": Question(
        "A6.2c", "exact", "share lost", "stream and updates times {factor:g}, the sum scaled back: FP16 is precise"
    ),
    "power_of_two": Question(
        "A6.2c", "control", "share changed", "times a power of two they give the same sums, bit for bit"
    ),
    "fp32_keeps": Question(
        "A6.2d", "exact", "share lost", "accumulated in FP32, what {additions} BF16 updates add up to is kept"
    ),
    # trained
    "ratio_kept": Question(
        "A6.2a", "control", "times the forced ratio", "after training the forced models still have the forced ratio"
    ),
    MATTER: Question("A6.2a", "control", "nats per byte", "without its small updates the forced model would be worse"),
    "trained_lost": Question(
        "A6.2a", "trained", "share lost", "a trained model's updates at {stream:g}:{update:g} are lost in FP16"
    ),
    "branches_lost": Question(
        "A6.2a",
        "trained",
        "share of their worth",
        "trained with an FP16 stream at {stream:g}:{update:g}, all branches together are worth almost nothing",
    ),
    "trained_cost_fp16": Question(
        "A6.2b", "trained", "share lost", "a trained model's updates at {stream:g}:{large:g} lose precision in FP16"
    ),
    "trained_cost_bf16": Question(
        "A6.2b", "trained", "share lost", "a trained model's updates at {stream:g}:{large:g} lose precision in BF16"
    ),
    "loss_cost_fp16": Question(
        "A6.2b", "trained", "nats per byte", "at {stream:g}:{large:g} training with an FP16 stream costs test loss"
    ),
    "loss_cost_bf16": Question(
        "A6.2b", "trained", "nats per byte", "at {stream:g}:{large:g} training with a BF16 stream costs test loss"
    ),
    "spread_cost_bf16": Question(
        "A6.2b",
        "trained",
        "nats per byte",
        "it does so too where the embedding itself is {stream:g} times larger, and there is no offset",
    ),
    "recipe_fp16": Question(
        "A6.2c", "trained", "nats per byte", "branch times {factor:g}, scaled back: FP16 ends at FP32's test loss"
    ),
    "recipe_bf16": Question(
        "A6.2c", "trained", "nats per byte", "branch times {factor:g}, scaled back: BF16 ends at FP32's test loss"
    ),
    "recipe_gain": Question(
        "A6.2c", "trained", "nats per byte", "branch times {factor:g}, scaled back: BF16 ends better than without"
    ),
    "fp32_cures": Question(
        "A6.2d", "trained", "nats per byte", "at {stream:g}:{update:g} an FP32 stream ends better than a BF16 one"
    ),
    "fp32_exact": Question(
        "A6.2d", "trained", "nats per byte", "at {stream:g}:{update:g} an FP32 stream's loss is that of FP64"
    ),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Exact(Settings):
    """Size of the checks without training."""

    elements: int = Field(ge=64)
    """Numbers in a vector."""
    seeds: int = Field(ge=2)
    additions: int = Field(ge=2)
    """Updates that are accumulated: two a block."""
    growth_additions: int = Field(ge=8)
    """Up to how many the growth of the error is followed, in powers of two."""
    ratios: tuple[float, ...]
    """Update over stream, both as root mean squares; one and two orders of magnitude among them."""

    @field_validator("ratios")
    @classmethod
    def _one_and_two_orders(cls, ratios: tuple[float, ...]) -> tuple[float, ...]:
        if len(ratios) < 3 or list(ratios) != sorted(set(ratios)) or ratios[0] <= 0 or not {0.1, 0.01} <= set(ratios):
            raise ValueError(f"ratios must increase from above 0 and have 0.01, 0.1 and another, got {list(ratios)}")
        return ratios


HALF = 65504.0
"""The largest number of FP16."""


class Parameters(Section):
    """The section claims.fp16_swamping of params.yaml."""

    stream: float = Field(gt=0)
    """Size of the stream."""
    update: float = Field(gt=0)
    """Size of an update."""
    factor: float = Field(gt=1)
    """The recipe enlarges updates so much in training; models are also trained at this larger size without it."""
    depth: int = Field(ge=2)
    """Blocks of the models with a forced ratio."""
    ordinary_depth: int = Field(ge=2)
    """Blocks of the ordinary models."""
    learning_rates: Rates
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    @property
    def large(self) -> float:
        """Size of an update times `factor`."""
        return float(f"{self.update * self.factor:.6g}")

    @model_validator(mode="after")
    def _fit_fp16(self) -> Parameters:
        if self.large >= self.stream:
            raise ValueError(f"update {self.update:g} times factor {self.factor:g} is no longer below the stream")
        most = max(self.factor, exact.POWER_OF_TWO) * self.stream
        if 6 * most > HALF:
            raise ValueError(f"a stream of {most:g} (scaled along) leaves the range of FP16; make it smaller")
        return self

    @model_validator(mode="after")
    def _curve_has_the_forced_ratio(self) -> Parameters:
        forced = self.update / self.stream
        if not any(math.isclose(ratio, forced) for ratio in self.exact.ratios):
            raise ValueError(f"exact.ratios must have update / stream, {forced:g}; got {list(self.exact.ratios)}")
        return self


def _judged(params: Params, **estimates: Estimate) -> list[Check]:
    section = params.claims.fp16_swamping
    numbers = {
        "stream": section.stream,
        "update": section.update,
        "large": section.large,
        "factor": section.factor,
        "additions": section.exact.additions,
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- checks without training ----------------------------------------------------------------------


def checks_one_addition(params: Params, curve: pd.DataFrame) -> list[Check]:
    """Sentence A6.2a: which updates does one addition swallow?"""
    forced = params.claims.fp16_swamping.update / params.claims.fp16_swamping.stream
    at_forced = curve[(curve["format"] == "fp16") & ((curve["ratio"] / forced - 1).abs() < 1e-6)]
    return _judged(
        params,
        swallowed=mean_of(exact.near_values(params, FORMATS["fp16"])),
        swallowed_vector=mean_of(at_forced["measured"].tolist()),
        swallowed_bf16=mean_of(exact.near_values(params, FORMATS["bf16"])),
        law=deterministic(float(curve["exceptions"].sum())),
    )


def checks_many_additions(params: Params, errors: pd.DataFrame, grown: pd.DataFrame) -> list[Check]:
    """Sentences A6.2a, A6.2b and A6.2d: what is lost of many updates?"""
    section = params.claims.fp16_swamping
    forced = section.update / section.stream

    def lost(name: str, ratio: float, method: str = "plain") -> Estimate:
        chosen = errors[(errors["format"] == name) & (errors["method"] == method)]
        return mean_of(chosen[(chosen["ratio"] / ratio - 1).abs() < 1e-6]["error"].tolist())

    exponents = exact.growth_exponents(grown)

    def exponent(method: str) -> Estimate:
        chosen = exponents[(exponents["format"] == "bf16") & (exponents["method"] == method)]
        return mean_of(chosen["exponent"].tolist())

    return _judged(
        params,
        lost=lost("fp16", forced),
        cost_fp16_one=lost("fp16", 0.1),
        cost_fp16_two=lost("fp16", 0.01),
        cost_bf16_one=lost("bf16", 0.1),
        cost_bf16_two=lost("bf16", 0.01),
        growth_plain=exponent("plain"),
        growth_stochastic=exponent("stochastic"),
        fp32_keeps=lost("bf16", forced, "fp32"),
    )


def checks_recipe(params: Params, errors: pd.DataFrame) -> list[Check]:
    """Sentence A6.2c in numbers alone.

    With the updates alone enlarged the numbers are those of a larger update, which sentence A6.2b is about.
    """
    half = errors[errors["format"] == "fp16"]
    return _judged(
        params,
        along_restores=mean_of(half["scaled along"].tolist()),
        power_of_two=deterministic(float(errors["changed by 16"].max())),
    )


# --- trained arms ---------------------------------------------------------------------------------


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    return choose_rates(arms(params), params.sweep, params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds; their weights are kept."""
    return train_arms(arms(params), chosen, params.seeds, params.execution, weights=True)


def checks_twins(params: Params, twins: pd.DataFrame) -> list[Check]:
    """What a low-precision stream does to a trained model's numbers: `twins` is that of `fp16_swamping_twins`."""
    section = params.claims.fp16_swamping

    def of(update: float, stream: str, column: str) -> list[float]:
        chosen = twins[(twins["update"] == update) & (twins["stream"] == stream)]
        values: list[float] = chosen[column].tolist()
        return values

    return _judged(
        params,
        trained_lost=mean_of(of(section.update, "fp16", "stream_error")),
        trained_cost_fp16=mean_of(of(section.large, "fp16", "stream_error")),
        trained_cost_bf16=mean_of(of(section.large, "bf16", "stream_error")),
        fp32_exact=mean_of(of(section.update, "fp32", "loss_change")),
    )


def worth(trained: Runs, arm: str) -> list[float]:
    """Nats per byte by which an arm's branches bring it below the embedding alone, seed by seed.

    The constant or the factor that the embedding comes with is taken off by the final norm, so that the same run
    without branches serves for both kinds of arm.
    """
    return [alone - own for alone, own in zip(held_out(trained[ALONE]), held_out(trained[arm]), strict=True)]


def margin(params: Params) -> float:
    """Nats per byte that branches have to be worth, or there is nothing to lose: the criterion of a control."""
    criterion: Criterion = getattr(params.claims.fp16_swamping.criteria, MATTER)
    return criterion.above or 0.0


def costs(params: Params, trained: Runs, low: str, full: str) -> list[float]:
    """What the stream of arm `low` costs in held-out loss beside that of `full`, seed by seed.

    Not a number where the branches of `full` are worth no more than `margin`: swallowing what is worth nothing costs
    nothing, in any format.
    """
    least = margin(params)
    differences = zip(held_out(trained[low]), held_out(trained[full]), worth(trained, full), strict=True)
    return [own - other if own_worth > least else math.nan for own, other, own_worth in differences]


def worth_table(params: Params, trained: Runs) -> pd.DataFrame:
    """What the branches are worth with an FP32 stream, and in how many seeds enough to lose."""
    section, least = params.claims.fp16_swamping, margin(params)
    forced = [forced_name(params, size, "fp32") for size in (section.update, section.large)]
    rows = {}
    for arm in (*forced, spread_name(params, "fp32")):
        by_seed = worth(trained, arm)
        rows[arm] = {
            "worth of the branches (nats per byte)": str(mean_of(by_seed)),
            f"seeds above {least:g}": f"{sum(value > least for value in by_seed)} of {len(by_seed)}",
        }
    return pd.DataFrame(rows).T


def checks_losses(params: Params, trained: Runs) -> list[Check]:
    """What a low-precision stream costs in held-out loss, each arm at its own rate, paired by seed."""
    section = params.claims.fp16_swamping

    def name(stream: str) -> str:
        return forced_name(params, section.large, stream)

    small = {stream: held_out(trained[forced_name(params, section.update, stream)]) for stream in PLAIN}
    alone = held_out(trained[ALONE])
    shares = [(f - e) / (a - e) for f, e, a in zip(small["fp16"], small["fp32"], alone, strict=True)]
    spread = costs(params, trained, spread_name(params, "bf16"), spread_name(params, "fp32"))
    return _judged(
        params,
        branches_matter=paired_difference(alone, small["fp32"]),
        branches_lost=mean_of(shares),
        loss_cost_fp16=mean_of(costs(params, trained, name("fp16"), name("fp32"))),
        loss_cost_bf16=mean_of(costs(params, trained, name("bf16"), name("fp32"))),
        spread_cost_bf16=mean_of(spread),
        fp32_cures=paired_difference(small["bf16"], small["fp32"]),
    )


def checks_scaled_back(params: Params, trained: Runs, recipe: pd.DataFrame) -> list[Check]:
    """Sentence A6.2c as told: branches enlarged in training and scaled back at inference."""
    update = params.claims.fp16_swamping.update
    wanted = held_out(trained[forced_name(params, update, "fp32")])
    back = {name: recipe[recipe["format"] == name]["scaled back"].tolist() for name in PLAIN}
    return _judged(
        params,
        recipe_fp16=paired_difference(back["fp16"], wanted),
        recipe_bf16=paired_difference(back["bf16"], wanted),
        recipe_gain=paired_difference(held_out(trained[forced_name(params, update, "bf16")]), back["bf16"]),
    )


def checks_ratios(params: Params, ratios: pd.DataFrame) -> list[Check]:
    """Are updates as small beside the stream as they were forced to be?"""
    section = params.claims.fp16_swamping
    forced = ratios[ratios["arm"] == forced_name(params, section.update, "fp32")]
    nominal = section.update / section.stream
    by_seed = forced.groupby("seed", sort=True)["ratio"].mean()
    return _judged(params, ratio_kept=mean_of([value / nominal for value in by_seed]))


def ordinary(trained: Runs, ratios: pd.DataFrame) -> dict[str, str]:
    """Of ordinary models, of which no sentence speaks: updates beside the stream, and what a BF16 stream costs."""
    by_seed = ratios[ratios["arm"] == ORDINARY["fp32"]].groupby("seed", sort=True)["ratio"]
    low, high = (held_out(trained[ORDINARY[stream]]) for stream in ("bf16", "fp32"))
    return {
        "smallest update / stream": str(mean_of(by_seed.min().tolist())),
        "median update / stream": str(mean_of(by_seed.median().tolist())),
        "nats per byte that a BF16 stream costs": str(paired_difference(low, high)),
    }


def gradient_errors(twins: pd.DataFrame) -> dict[str, str]:
    """Relative error of the blocks' gradient against the twin in float64, by size of update and stream."""
    groups = twins.groupby(["update", "stream"], sort=False)["gradient_error"]
    return {f"updates of {update:g}, {stream}": str(mean_of(errors.tolist())) for (update, stream), errors in groups}


# --- published numbers ---------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    return [
        Published(
            what="100 + 0.1 in FP16 and BF16",
            published="100.125 and 100.0: ulp(100) is 0.0625 and 0.5",
            ours=f"absorbed share in FP16 {ours['swallowed']}, in BF16 {ours['swallowed_bf16']}",
            source="IEEE 754-2019; Higham 2002, Accuracy and Stability of Numerical Algorithms, section 2.1",
        ),
        Published(
            what="growth of the error with stochastic rounding of n terms",
            published="n^(1/2), plain rounding n",
            ours=f"{ours['growth_stochastic']}, plain {ours['growth_plain']}",
            source="Croci et al. 2022, Stochastic rounding: implementation, error analysis and applications",
        ),
        Published(
            what="float32 residual stream in frameworks",
            published="an option: fp32_residual_connection in Megatron-LM, residual_in_fp32 in Mamba",
            ours=f"gained over a BF16 stream at the forced ratio {ours['fp32_cures']} nats per byte",
            source="NVIDIA Megatron-Core documentation; Gu & Dao 2023, arXiv 2312.00752 (code)",
        ),
    ]
