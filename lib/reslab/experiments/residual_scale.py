"""Claim 07: a fixed scale on the branches: stability, speed, effective depth and result (A4.3a, A4.3b, A7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator

from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, each, held_out, train_arms
from reslab.curves import (
    bracket,
    context_free_losses,
    early_loss,
    excess_rise,
    failures,
    first_use_of_context,
    label,
    spikes,
)
from reslab.experiments.pre_vs_post_ln_grid import outcomes
from reslab.experiments.residual_scale_exact import (
    HALF,
    LOW,
    MODERATE,
    ONE,
    SCALES,
    SMALL,
    Exact,
    built,
    constructed,
    exact_estimates,
    jacobians,
)
from reslab.experiments.residual_scale_inside import Inside, look_inside
from reslab.experiments.runs import decoder_run
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.stats import Estimate, deterministic, folded, mean_of, paired_difference
from reslab.sweep import run_all
from reslab.training import RunConfig, RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does a fixed scale on the branch buy stability with speed and depth?"
STATEMENT = (
    "In very deep models a fixed branch scale of 0.1 to 0.5 trains more stably than 1; too small a scale lowers the "
    "effective depth and the final result. Scales 0.3 and 1 end at nearly the same result but differ clearly in speed "
    "and stability."
)
KEY = "bears_moderate"

TOLD = {"half": HALF, "moderate": MODERATE, "low": LOW}
"""Scales of the range that sentence A4.3a speaks of, by their part of a check's name."""


def _stability_questions(name: str, scale: float) -> dict[str, Question]:
    """Sentence A4.3a for one scale, in three measures."""
    versus = f"1 - {scale:g}"
    asked = {
        f"calmer_{name}": (
            f"share of the rates, {versus}",
            f"scale {scale:g} jumps, stalls or diverges at fewer of the {{rates}} rates than scale 1; to be "
            "still falling is a failure only above a rate that trains ({deep} blocks)",
        ),
        f"bears_{name}": (
            f"steps in the list of rates, {scale:g} - 1",
            f"scale {scale:g} bears a higher learning rate than scale 1 ({{deep}} blocks, whole steps)",
        ),
        f"rise_{name}": (
            f"nats per byte, {versus}",
            f"the loss of scale {scale:g}, less the context-free guess's on the same batches, rises less above its "
            "lowest value, in the mean over the rates ({deep} blocks)",
        ),
    }
    return {key: Question("A4.3a", "trained", *question) for key, question in asked.items()}


QUESTIONS = {
    # untrained
    "stream_law": Question(
        "A4.3a",
        "control",
        "mean square of the stream / law",
        "with branches of unit variance the stream's is 1 + 2 L s^2 after {exact_deep} blocks, at every scale s",
    ),
    "jacobian_law": Question(
        "A4.3a",
        "control",
        "mean squared singular value / law",
        "the Jacobian of such a pre-norm stack grows alike ({jacobian_deep} blocks)",
    ),
    "gradient_law": Question(
        "A4.3a",
        "control",
        "squared gradient, first / last, over law",
        "so does the gradient on its way back to the first block ({exact_deep} blocks)",
    ),
    "stream_built": Question(
        "A4.3a",
        "exact",
        "mean square of the stream / law",
        "the untrained decoder follows the law with the variance its branches have ({exact_deep} blocks)",
    ),
    "growth_one": Question(
        "A4.3a",
        "exact",
        "mean square of the stream, last / first",
        "at scale 1 the untrained decoder's {exact_deep} blocks write more than the embedding",
    ),
    "growth_low": Question(
        "A4.3a", "control", "mean square of the stream, last / first", "at scale 0.1 they write less than the embedding"
    ),
    "effective_untrained": Question(
        "A4.3b",
        "control",
        "effective depth, 0.03 / 1",
        "at scale 0.03 the untrained decoder is effectively less than half as deep as at 1 ({exact_deep} blocks)",
    ),
    # very deep: scale x learning rate
    "no_false_spikes": Question(
        "A4.3a", "control", "spikes", "the best context-free guess on the same batches shows no spikes"
    ),
    **{name: question for size, scale in TOLD.items() for name, question in _stability_questions(size, scale).items()},
    # shallower, in full
    "learns": Question(
        "A4.3b", "control", "nats below unigram entropy", "scale 1 has learnt from the context ({shallow} blocks)"
    ),
    "effective_trained": Question(
        "A4.3b",
        "trained",
        "effective depth, 0.03 / 1",
        "after training scale 0.03 is effectively less deep than scale 1 ({shallow} blocks)",
    ),
    "skip_cost": Question(
        "A4.3b",
        "trained",
        "nats per byte, 0.03 - 1",
        "its trained blocks matter less: the mean loss of skipping one is lower",
    ),
    "result_one": Question(
        "A4.3b", "trained", "nats per byte, 0.03 - 1", "scale 0.03 ends with a higher test loss than scale 1"
    ),
    "result_moderate": Question("A4.3b", "trained", "nats per byte, 0.03 - 0.3", "so it does against scale 0.3"),
    "same_result": Question(
        "A7", "trained", "nats per byte, 0.3 - 1", "scales 0.3 and 1 end at nearly the same test loss"
    ),
    "speed_steps": Question(
        "A7",
        "trained",
        "|ln of the ratio of steps|",
        "they differ in speed: in the steps until the loss is below the context-free guess's on the same batches",
    ),
    "speed_early": Question(
        "A7", "trained", "nats per byte, |difference|", "they differ in speed: in the loss of the first quarter"
    ),
    "stability_bears": Question(
        "A7",
        "trained",
        "|steps in the list of rates|",
        "they differ in stability: in the highest rate they bear ({deep} blocks, whole steps)",
    ),
    "stability_fails": Question(
        "A7",
        "trained",
        "|share of the rates|",
        "they differ in stability: in at how many of the {rates} rates they fail, counted in the same way",
    ),
    "stability_rise": Question(
        "A7",
        "trained",
        "nats per byte, |difference|",
        "they differ in stability: in how far the loss, less the guess's on the same batches, rises",
    ),
}
"""What is asked, by the name of its criterion in params.yaml. Where a sentence says that two things differ but not
which way, the estimate is folded: see `stats.folded`. What must come out as it does is a control: the laws on a stack
that is built to obey them, and growth and effective depth of the untrained decoder at scales of 0.1 and 0.03."""

Criteria = criteria_model(QUESTIONS)

SHALLOW_SCALES = (ONE, MODERATE, SMALL)
DEEP_SCALES = (ONE, *TOLD.values())


# --- parameters -----------------------------------------------------------------------------------


FEWEST_STEPS = 12
"""A spike is seen in means of ten losses."""


class Deep(Settings):
    """The grid of scale and learning rate, in very deep models and short runs."""

    depth: int = Field(ge=2)
    """Blocks."""
    learning_rates: Rates
    """Increasing."""
    steps: int = Field(ge=FEWEST_STEPS)

    @field_validator("learning_rates")
    @classmethod
    def _rates_increase(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if len(rates) < 2 or list(rates) != sorted(set(rates)):
            raise ValueError(f"learning_rates must be at least two and increase, got {list(rates)}")
        return rates


class Parameters(Section):
    """The section claims.residual_scale of params.yaml."""

    depth: int = Field(ge=2)
    """Blocks of the models that are trained in full."""
    learning_rates: Rates
    """What each of their scales chooses from."""
    deep: Deep
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    def require(self, params: Params) -> None:
        if self.deep.depth <= self.depth:
            raise ValueError(f"deep.depth {self.deep.depth} is not more than depth {self.depth}; raise it")


def _judged(params: Params, estimates: Mapping[str, Estimate]) -> list[Check]:
    section = params.claims.residual_scale
    numbers = {
        "shallow": section.depth,
        "deep": section.deep.depth,
        "rates": len(section.deep.learning_rates),
        "exact_deep": section.exact.decoder.depth,
        "jacobian_deep": section.exact.jacobian.depth,
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- exact checks ---------------------------------------------------------------------------------


def law(params: Params) -> pd.DataFrame:
    """See `residual_scale_exact.constructed`."""
    torch.set_num_threads(params.device.threads)
    return constructed(params.claims.residual_scale.exact.stack, SCALES)


def chis(params: Params) -> pd.DataFrame:
    """See `residual_scale_exact.jacobians`."""
    torch.set_num_threads(params.device.threads)
    return jacobians(params.claims.residual_scale.exact.jacobian, SCALES)


def decoders(params: Params) -> pd.DataFrame:
    """See `residual_scale_exact.built`."""
    torch.set_num_threads(params.device.threads)
    return built(params.claims.residual_scale.exact.decoder, SCALES)


def checks_initial(
    params: Params, against_law: pd.DataFrame, singular: pd.DataFrame, untrained: pd.DataFrame
) -> list[Check]:
    """What scales do before any training."""
    return _judged(params, exact_estimates(against_law, singular, untrained))


# --- runs -----------------------------------------------------------------------------------------

Cell = tuple[float, float]
"""A scale and a learning rate."""

Grid = Mapping[Cell, Sequence[RunRecord]]
"""The records of each cell, in the order of the seeds."""


def scaled_run(params: Params, depth: int, scale: float, steps: int | None = None) -> RunConfig:
    """A Pre-LN decoder with s on every branch, whose matrices all start alike.

    Not smaller with depth (GPT-2's 1/sqrt(2L)): that is a scale on the branches by itself, of 0.1 at 48 blocks, so that
    "scale 1" would not be the textbook's.
    """
    return decoder_run(params, depth, ConnectionConfig("scaled", scale=scale), steps=steps, weight_init="plain")


def arm_name(scale: float) -> str:
    return f"scale {scale:g}"


def grid(params: Params) -> dict[Cell, list[RunRecord]]:
    """Every scale at every rate on all seeds, in very deep models."""
    deep, n = params.claims.residual_scale.deep, len(params.seeds)
    cells = [(scale, rate) for scale in DEEP_SCALES for rate in deep.learning_rates]
    configs = [
        scaled_run(params, deep.depth, scale, deep.steps).model_copy(update={"learning_rate": rate, "seed": seed})
        for scale, rate in cells
        for seed in params.seeds
    ]
    records = run_all(configs, params.execution, "scale x learning rate")
    return {cell: records[i * n : (i + 1) * n] for i, cell in enumerate(cells)}


def grid_table(tried: Grid) -> pd.DataFrame:
    """One row a cell: what became of its runs, their spikes in all seeds together (see `curves.spikes`), the mean of
    the largest rises (see `rises`), mean test loss."""
    rows = [
        {
            "scale": scale,
            "rate": rate,
            "outcomes": outcomes(records),
            "spikes": sum(len(spikes(record.train_loss)) for record in records),
            "largest rise": float(np.mean(each(records, excess_rise))),
            "test loss": float(np.mean(held_out(records))),
        }
        for (scale, rate), records in tried.items()
    ]
    return pd.DataFrame(rows).set_index(["scale", "rate"])


def arms(params: Params) -> list[Arm]:
    section = params.claims.residual_scale
    return [
        Arm(arm_name(scale), scaled_run(params, section.depth, scale), section.learning_rates)
        for scale in SHALLOW_SCALES
    ]


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every scale."""
    return choose_rates(arms(params), params.sweep, params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every scale at its rate on all seeds, with weights."""
    return train_arms(arms(params), chosen, params.seeds, params.execution, weights=True)


def inside(params: Params, trained: Runs) -> dict[str, list[Inside]]:
    """What the branches and blocks of each trained model are worth, seed by seed."""
    torch.set_num_threads(params.device.threads)
    return {name: [look_inside(record) for record in records] for name, records in trained.items()}


# --- checks on runs -------------------------------------------------------------------------------


def by_seed(tried: Grid, scale: float) -> list[dict[float, RunRecord]]:
    """A scale's records by rate, one dictionary a seed."""
    rates_ = [rate for s, rate in tried if s == scale]
    columns = zip(*(tried[scale, rate] for rate in rates_), strict=True)
    return [dict(zip(rates_, records, strict=True)) for records in columns]


def places_borne(tried: Grid, scale: float) -> list[float]:
    """By seed: the place (from 0) in the list of rates of the highest one borne (`curves.bracket`); -1 for none."""
    places = []
    for records in by_seed(tried, scale):
        borne = bracket({rate: label(record) for rate, record in records.items()}).bears
        places.append(-1.0 if borne is None else float(sorted(records).index(borne)))
    return places


def share_failed(tried: Grid, scale: float) -> list[float]:
    """By seed: the share of the rates at which a run fails (`curves.failures`)."""
    labels = [{rate: label(record) for rate, record in records.items()} for records in by_seed(tried, scale)]
    return [float(np.mean(list(failures(of_seed).values()))) for of_seed in labels]


def rises(tried: Grid, scale: float) -> list[float]:
    """By seed: how far the loss less the guess's on the same batches (mean of ten steps) ever rises above its lowest
    value, in the mean over the rates.

    Not a number where a run diverged.
    """
    return [float(np.mean(each(list(records.values()), excess_rise))) for records in by_seed(tried, scale)]


def _minus(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def checks_stability(params: Params, tried: Grid) -> list[Check]:
    """Sentence A4.3a, and the stability of A7, on the grid."""
    lowest = tried[ONE, params.claims.residual_scale.deep.learning_rates[0]]
    estimates = {"no_false_spikes": deterministic(sum(len(spikes(context_free_losses(r))) for r in lowest))}
    measures = {"calmer": share_failed, "bears": places_borne, "rise": rises}
    difference = {
        (measure, size): _minus(of(tried, ONE), of(tried, scale))
        for measure, of in measures.items()
        for size, scale in TOLD.items()
    }
    for (measure, size), values in difference.items():
        estimates[f"{measure}_{size}"] = mean_of([-value for value in values] if measure == "bears" else values)
    estimates["stability_bears"] = folded(difference["bears", "moderate"])
    estimates["stability_fails"] = folded(difference["calmer", "moderate"])
    estimates["stability_rise"] = folded(difference["rise", "moderate"])
    return _judged(params, estimates)


def steps_to_context(records: Sequence[RunRecord]) -> list[float]:
    """See `curves.first_use_of_context`; steps from 1."""
    return each(records, lambda record: 1 + first_use_of_context(record))


def _early(records: Sequence[RunRecord]) -> list[float]:
    return each(records, lambda r: early_loss(r.train_loss, r.config.optimisation.steps // 4))


def _below_context_free(record: RunRecord) -> float:
    assert record.test_loss is not None
    return record.context_free_loss - record.test_loss


def checks_result(params: Params, trained: Runs, seen: Mapping[str, Sequence[Inside]]) -> list[Check]:
    """Sentence A4.3b, and the result and speed of A7, on the models trained in full."""
    one, moderate, small = (trained[arm_name(scale)] for scale in SHALLOW_SCALES)
    of_one, of_small = seen[arm_name(ONE)], seen[arm_name(SMALL)]
    depths = [s.effective_depth / o.effective_depth for s, o in zip(of_small, of_one, strict=True)]
    logs = [[math.log(step) for step in steps_to_context(records)] for records in (moderate, one)]
    estimates = {
        "learns": mean_of(each(one, _below_context_free)),
        "effective_trained": mean_of(depths),
        "skip_cost": paired_difference([s.mean_cost for s in of_small], [o.mean_cost for o in of_one]),
        "result_one": paired_difference(held_out(small), held_out(one)),
        "result_moderate": paired_difference(held_out(small), held_out(moderate)),
        "same_result": paired_difference(held_out(moderate), held_out(one)),
        "speed_steps": folded(_minus(*logs)),
        "speed_early": folded(_minus(_early(moderate), _early(one))),
    }
    return _judged(params, estimates)


def inside_table(trained: Runs, seen: Mapping[str, Sequence[Inside]]) -> pd.DataFrame:
    """One row a scale, means over seeds; not a number where a run diverged."""
    rows = {
        name: {
            "test loss": np.mean(held_out(trained[name])),
            "steps to use context": np.mean(steps_to_context(trained[name])),
            "loss of the first quarter": np.mean(_early(trained[name])),
            "effective depth (sublayers)": np.mean([one.effective_depth for one in found]),
            "mean cost of skipping a block": np.mean([one.mean_cost for one in found]),
        }
        for name, found in seen.items()
    }
    return pd.DataFrame(rows).T


# --- published numbers ---------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours: dict[str, Any] = {c.name: str(c.estimate) for c in checks}
    return [
        Published(
            what="scales said to stabilise very wide residual networks: bears a higher rate at 0.3 than at 1",
            published="0.1 to 0.3 stabilise (in words)",
            ours=ours["bears_moderate"],
            source="Szegedy et al. 2017, arXiv 1602.07261, section 3.3",
        ),
        Published(
            what="final result with and without the scale: test loss at 0.3 - at 1",
            published="no harm to the final accuracy (in words)",
            ours=ours["same_result"],
            source="Szegedy et al. 2017, arXiv 1602.07261, section 3.3",
        ),
    ]
