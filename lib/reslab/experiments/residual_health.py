"""Claim 10: the ratio |update| / |input| of a residual branch as a sign of its health (A6.3a, A6.3b)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator, model_validator

from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, train_arms
from reslab.experiments import layer_drop_redundancy as claim05
from reslab.experiments import pre_vs_post_ln_grid as grid02
from reslab.experiments import residual_health_exact as untrained
from reslab.experiments.residual_health_exact import Exact
from reslab.experiments.residual_health_measured import Looked, Plant, Replay, Watch, look_all, replay_all
from reslab.experiments.residual_health_rules import RULES, detections, kept_inside
from reslab.experiments.runs import decoder_run
from reslab.ratio_rules import auc, detection, rank_correlation, stratified_auc
from reslab.stats import Estimate, deterministic, mean_of, paired_difference
from reslab.sweep import run_all
from reslab.training import RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does the ratio of update to input tell which layers and runs are ill?"
STATEMENT = (
    "A ratio |update| / |input| of 0.01 to 0.1 is healthy; above 1 training is unstable, near 0 the layer is dead. "
    "Ratios are large early in training and settle small; a layer whose ratio stays high is unsettled."
)
KEY = "predicts_failure"


QUESTIONS = {
    # untrained
    "law_untrained": Question(
        "A6.3a",
        "exact",
        "mean |ln(measured / law)|",
        "untrained, the healthy ratio depends on depth: sqrt(c / (s0 + c l)) gives it ({exact} blocks)",
    ),
    "dead_found": Question(
        "A6.3a",
        "exact",
        "sublayers taken wrongly",
        "untrained, the one branch that writes nothing is the only one with a ratio near 0",
    ),
    "exploding_found": Question(
        "A6.3a",
        "exact",
        "sublayers taken wrongly",
        "untrained, the one branch that writes {factor:g} times too much is the only one with a ratio above 1",
    ),
    # controls
    "dead_gradient": Question(
        "A6.3a",
        "control",
        "gradient, planted / before",
        "untrained, the matrices of a branch with a ratio of 0 get no gradient, but for the one that writes",
    ),
    "zero_writer_learns": Question(
        "A6.3a", "control", "gradient, planted / before", "untrained, the matrix of zeros that writes gets its gradient"
    ),
    "replayed": Question(
        "A6.3a", "control", "nats, largest difference", "the replayed runs are those whose outcome is on record"
    ),
    "learned": Question(
        "A6.3a", "control", "nats below unigram entropy", "the models on text taken for healthy have learned something"
    ),
    # the bands, on trained models
    "band_text": Question(
        "A6.3a",
        "trained",
        "share of sublayers",
        "on text, most sublayers of healthy models of {deep} blocks have ratios of {low:g} to {high:g}",
    ),
    "band_hops": Question(
        "A6.3a",
        "trained",
        "share of sublayers",
        "at pointer chasing, most sublayers of healthy models have ratios of {low:g} to {high:g}",
    ),
    "healthy_below_one": Question(
        "A6.3a", "trained", "largest ratio", "on text, no sublayer of a healthy model of {deep} blocks is above 1"
    ),
    "healthy_below_one_hops": Question(
        "A6.3a", "trained", "largest ratio", "at pointer chasing, no sublayer of a healthy model is above 1"
    ),
    "law_over_band": Question(
        "A6.3a",
        "trained",
        "share of sublayers, difference",
        "a band as wide about the law, calibrated on other seeds, keeps more healthy sublayers than the told one",
    ),
    "law_over_flat": Question(
        "A6.3a",
        "trained",
        "share of sublayers, difference",
        "it also keeps more than a band as wide at one height, calibrated on other seeds",
    ),
    "law_separates": Question(
        "A6.3a",
        "trained",
        "share flagged, ill - healthy",
        "the band about the law tells ten times too large and zero updates from healthy ones",
    ),
    # which runs fail
    "predicts_failure": Question(
        "A6.3a",
        "trained",
        "area under the ROC curve",
        "the largest ratio after {early:.0%} of the steps, the higher the worse, tells the runs that fail, "
        "over placement, depth and rate",
    ),
    "predicts_within": Question(
        "A6.3a",
        "trained",
        "area under the ROC curve",
        "it does so among the {within} runs of one norm placement, depth and warm-up, which differ in learning rate "
        "alone",
    ),
    "above_one_fails": Question(
        "A6.3a",
        "trained",
        "share above 1, failed - others",
        "the rule as told, some ratio above 1 after {early:.0%} of the steps, tells the runs that fail",
    ),
    "beats_start": Question(
        "A6.3a",
        "trained",
        "area under the ROC curve, difference",
        "training tells more: the ratio at the initial weights predicts failure less well, each read the way round "
        "that other seeds show",
    ),
    "beats_loss": Question(
        "A6.3a",
        "trained",
        "area under the ROC curve, difference",
        "the ratio predicts failure better than the training loss of the steps so far, each read the way round that "
        "other seeds show",
    ),
    "beats_rate": Question(
        "A6.3a",
        "trained",
        "area under the ROC curve, difference",
        "the ratio predicts failure better than the learning rate does, each read the way round that other seeds show",
    ),
    "exploding_hurts": Question(
        "A6.3a",
        "trained",
        "nats, planted - healthy",
        "a sublayer planted with a ratio above 1 spoils training ({shallow} blocks)",
    ),
    "dead_stays": Question(
        "A6.3a",
        "trained",
        "ratio at the end",
        "a sublayer planted with a ratio of 0 is dead: it stays near 0 ({shallow} blocks)",
    ),
    # which layers can be removed
    "removable_text": Question(
        "A6.3a",
        "trained",
        "rank correlation",
        "on text, the nearer a sublayer's ratio is to 0, the less is lost by leaving it out",
    ),
    "removable_inner": Question(
        "A6.3a", "trained", "rank correlation", "on text, this holds also without the first and the last block"
    ),
    "removable_hops": Question(
        "A6.3a",
        "trained",
        "rank correlation",
        "at pointer chasing, the nearer a sublayer's ratio is to 0, the less is lost by leaving it out",
    ),
    "removable_learned": Question(
        "A6.3a",
        "trained",
        "rank correlation, difference",
        "on text, the ratio at the initial weights says less about what leaving out will cost",
    ),
    # over training
    "falls_shallow": Question(
        "A6.3b", "trained", "ln(end / early)", "ratios are larger early than at the end, with {shallow} blocks"
    ),
    "falls_deep": Question(
        "A6.3b", "trained", "ln(end / early)", "ratios are larger early than at the end, with {deep} blocks"
    ),
    "falls_plain": Question(
        "A6.3b",
        "trained",
        "ln(end / early)",
        "this holds also from initial weights that are not scaled down with depth ({plain} blocks)",
    ),
    "ends_small": Question(
        "A6.3b", "trained", "ratio at the end", "ratios end small, at {high:g} at most ({deep} blocks)"
    ),
    "settles": Question(
        "A6.3b",
        "trained",
        "mean |ln change|",
        "ratios settle: over the last quarter of training they hardly change ({deep} blocks)",
    ),
    "high_is_unsettled": Question(
        "A6.3b",
        "trained",
        "rank correlation",
        "the higher a sublayer's ratio ends, the more it still changed over the last quarter ({deep} blocks)",
    ),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------

FEWEST_RECORDINGS = 8
"""Two of them lie in the last quarter."""


class Parameters(Section):
    """The section claims.residual_health of params.yaml."""

    shallow: int = Field(ge=3)
    deep: int = Field(ge=3)
    """Blocks of the models that are recorded over all of training; the deep ones are also looked into."""
    learning_rates: Rates
    steps: int | None = Field(default=None, ge=1)
    """Of the runs on text; null for those of all claims, which shares runs with them."""
    recordings: int = Field(ge=FEWEST_RECORDINGS)
    """How often a run is recorded."""
    early: float = Field(gt=0, lt=0.5)
    """What part of the steps counts as early."""
    band: tuple[float, float]
    """The ratios told to be healthy."""
    grid_depths: tuple[int, ...] = Field(min_length=1)
    """Depths of claim 02's grid whose runs are replayed up to the early step."""
    plain_depth: int
    """Depth in that grid of the Pre-LN run that is recorded over all of training."""
    factor: float = Field(gt=1)
    """By which the branch that is planted as exploding writes too much."""
    examples: int = Field(ge=2)
    """Validation examples on which a trained model is looked into."""
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _deep_is_deeper(self) -> Parameters:
        if self.deep <= self.shallow:
            raise ValueError(f"deep {self.deep} is no deeper than shallow {self.shallow}; make it larger")
        return self

    @field_validator("band")
    @classmethod
    def _band_is_a_range(cls, band: tuple[float, float]) -> tuple[float, float]:
        if not 0 < band[0] < band[1]:
            raise ValueError(f"band must go from a ratio above 0 to a larger one, got {list(band)}")
        return band

    def require(self, params: Params) -> None:
        for depth in (*self.grid_depths, self.plain_depth):
            if depth not in params.claims.pre_vs_post_ln.depths:
                known = list(params.claims.pre_vs_post_ln.depths)
                raise ValueError(f"depth {depth} is not in claim 02's grid; choose among its depths {known}")
        for steps in (self.steps or params.optimisation.steps, params.claims.pre_vs_post_ln.steps):
            if steps < self.recordings:
                raise ValueError(f"{steps} steps are fewer than its recordings, {self.recordings}; record less often")


def _judged(params: Params, **estimates: Estimate) -> list[Check]:
    section = params.claims.residual_health
    numbers = {
        "exact": section.exact.depth,
        "factor": section.factor,
        "shallow": section.shallow,
        "deep": section.deep,
        "plain": section.plain_depth,
        "low": section.band[0],
        "high": section.band[1],
        "early": section.early,
        "within": len(params.claims.pre_vs_post_ln.learning_rates),
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- exact checks at initial weights --------------------------------------------------------------


def initial_ratios(params: Params) -> pd.DataFrame:
    """See `residual_health_exact.fresh`."""
    torch.set_num_threads(params.device.threads)
    return untrained.fresh(params.claims.residual_health.exact)


def checks_initial(params: Params, initial: pd.DataFrame) -> list[Check]:
    """What holds without training."""
    section = params.claims.residual_health
    planted = [untrained.planted(section.exact, seed, section.factor) for seed in range(section.exact.seeds)]
    return _judged(
        params,
        law_untrained=mean_of([untrained.law_error(table) for _, table in initial.groupby("seed")]),
        dead_found=mean_of([found.dead_wrong for found in planted]),
        exploding_found=mean_of([found.exploding_wrong for found in planted]),
        dead_gradient=mean_of([found.dead_gradient for found in planted]),
        zero_writer_learns=mean_of([found.writer_gradient for found in planted]),
    )


# --- arms -----------------------------------------------------------------------------------------

HOPS = "hops: add"


def text_name(depth: int) -> str:
    return f"text: add, {depth} blocks"


def text_arms(params: Params) -> list[Arm]:
    """The standard model on text, which other claims train too; the deep one first, as it takes longest."""
    section = params.claims.residual_health
    return [
        Arm(text_name(depth), decoder_run(params, depth, steps=section.steps), section.learning_rates)
        for depth in (section.deep, section.shallow)
    ]


def hops_arm(params: Params) -> Arm:
    """Claim 05's pointer chasing with the standard connection."""
    [arm] = [arm for arm in claim05.hops_arms(params) if arm.name == HOPS]
    return arm


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    longer = params.sweep.of(params.claims.layer_drop_redundancy.hops.sweep_steps)
    return pd.concat(
        [
            choose_rates(text_arms(params), params.sweep, params.execution),
            choose_rates([hops_arm(params)], longer, params.execution),
        ],
        ignore_index=True,
    )


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds; the trained weights are kept."""
    arms = [*text_arms(params), hops_arm(params)]
    return train_arms(arms, chosen, params.seeds, params.execution, weights=True)


def models(params: Params, trained: Runs) -> dict[str, list[Looked]]:
    """The trained models, looked into: ratios, and the cost of leaving out each sublayer alone."""
    section = params.claims.residual_health
    names = [text_name(section.deep), HOPS]
    found = look_all([r for name in names for r in trained[name]], section.examples, params.execution)
    n = len(params.seeds)
    return {name: found[i * n : (i + 1) * n] for i, name in enumerate(names)}


# --- replays: ratios over all of training ---------------------------------------------------------

HEALTHY, DEAD, EXPLODING = "healthy", "dead", "exploding"
PLAIN = "plain start"

Replays = Mapping[str, Sequence[Replay]]
"""Of each sort, in the order of the seeds."""


def replays(params: Params, trained: Runs, tried: grid02.Grid) -> dict[str, list[Replay]]:
    """The text arms and claim 02's Pre-LN run at its best rate, recorded over all of training."""
    section = params.claims.residual_health
    records = {text_name(depth): trained[text_name(depth)] for depth in (section.deep, section.shallow)}
    records[PLAIN] = grid02.best(params, tried, "Pre-LN", section.plain_depth)
    return _recorded(params, records, dict.fromkeys(records), "recording ratios over training")


def plantings(params: Params, trained: Runs, seen: Replays) -> dict[str, list[Replay]]:
    """The shallow runs with the middle MLP dead or exploding from the start, beside those with nothing planted."""
    section = params.claims.residual_health
    factors = {DEAD: 0.0, EXPLODING: section.factor}
    plants: dict[str, Plant | None] = {name: Plant(planted_sublayer(params), f) for name, f in factors.items()}
    records = dict.fromkeys(plants, trained[text_name(section.shallow)])
    return {HEALTHY: list(seen[text_name(section.shallow)])} | _recorded(params, records, plants, "planting faults")


def planted_sublayer(params: Params) -> int:
    """The MLP of the middle block."""
    return params.claims.residual_health.shallow // 2 * 2 + 1


def _recorded(params: Params, records: Runs, plants: Mapping[str, Plant | None], label: str) -> dict[str, list[Replay]]:
    watches = []
    for name, of_arm in records.items():
        for record in of_arm:
            steps = record.config.optimisation.steps
            every = max(1, steps // params.claims.residual_health.recordings)
            watches.append(Watch(record.config, every, steps - 1, plants[name], judged=True))
    seen, n = replay_all(watches, params.execution, label), len(params.seeds)
    return {name: seen[i * n : (i + 1) * n] for i, name in enumerate(records)}


# --- replays: the first steps of claim 02's runs --------------------------------------------------


@dataclass(frozen=True)
class Early:
    """One run of claim 02's grid at the early step, and what became of it."""

    cell: grid02.Cell
    seed: int
    failed: bool
    """It jumped, stalled or diverged later, and was not merely too slow: `curves.failures`."""
    ratio: float
    """The largest over the sublayers; infinite where the run was lost before."""
    ratio_start: float
    """The same at the initial weights."""
    loss: float
    """Mean training loss of the steps from the second on; infinite where the run was lost before."""
    gradient: float
    """Largest gradient norm of these steps."""
    difference: float
    """The largest between a step's loss in the replay and on record."""


def grid_runs(params: Params) -> dict[grid02.Cell, list[RunRecord]]:
    """Those of claim 02's runs that are asked for here, on all seeds."""
    section = params.claims.residual_health
    cells = [cell for cell in grid02.cells(params) if cell[1] in (*section.grid_depths, section.plain_depth)]
    configs = []
    for method, depth, rate in cells:
        placement, long_warmup = grid02.METHODS[method]
        config = grid02.run_config(params, depth, placement, long_warmup=long_warmup)
        configs += [config.model_copy(update={"learning_rate": rate, "seed": seed}) for seed in params.seeds]
    records, n = run_all(configs, params.execution, "norm x depth x learning rate"), len(params.seeds)
    return {cell: records[i * n : (i + 1) * n] for i, cell in enumerate(cells)}


def early_runs(params: Params, tried: grid02.Grid) -> list[Early]:
    """The first steps of claim 02's grid, replayed; over cells, then seeds."""
    section = params.claims.residual_health
    step = early_step(params)
    cells = [cell for cell in tried if cell[1] in section.grid_depths]
    records = [(cell, record) for cell in cells for record in tried[cell]]
    watches = [Watch(record.config, step, step) for _, record in records]
    seen = replay_all(watches, params.execution, "first steps of claim 02's runs")
    ill = [its for cell, of_cell in grid02.failed(tried).items() if cell in cells for its in of_cell]
    rows = zip(records, seen, ill, strict=True)
    return [_early(cell, record, replay, step, failed=its) for (cell, record), replay, its in rows]


def early_step(params: Params) -> int:
    """The step (from 0) of claim 02's runs that is looked at."""
    return max(1, round(params.claims.residual_health.early * params.claims.pre_vs_post_ln.steps))


def _early(cell: grid02.Cell, record: RunRecord, replay: Replay, step: int, *, failed: bool) -> Early:
    lost = len(replay.losses) <= step
    pairs = zip(replay.losses, record.train_loss, strict=False)
    return Early(
        cell=cell,
        seed=record.config.seed,
        failed=failed,
        ratio=replay.largest(step),
        ratio_start=replay.largest(0),
        loss=math.inf if lost else float(np.mean(replay.losses[1:])),
        gradient=math.inf if lost else max(replay.gradients[1:]),
        difference=max((abs(ours - theirs) for ours, theirs in pairs), default=math.inf),
    )


SIGNS: dict[str, Callable[[Early], float]] = {
    "ratio": lambda run: run.ratio,
    "ratio at start": lambda run: run.ratio_start,
    "loss": lambda run: run.loss,
    "gradient norm": lambda run: run.gradient,
    "learning rate": lambda run: run.cell[2],
}
"""What a failure could be foretold by."""


def _by_seed(early: Sequence[Early]) -> list[list[Early]]:
    return [[run for run in early if run.seed == seed] for seed in sorted({run.seed for run in early})]


def _area(early: Sequence[Early], sign: str, *, within: bool, low: bool) -> float:
    """Of some runs, the lower the worse where `low`; one that was lost before is the worst either way."""
    values = [SIGNS[sign](run) for run in early]
    scores = [-value if low and math.isfinite(value) else value for value in values]
    failed, strata = [run.failed for run in early], [run.cell[:2] for run in early]
    return stratified_auc(scores, failed, strata) if within else auc(scores, failed)


def reads_low(early: Sequence[Early], sign: str, *, within: bool = False) -> list[bool]:
    """By seed: whether a sign tells the failures of the *other* seeds better where low is taken for the worse."""
    groups = _by_seed(early)
    found = []
    for own in range(len(groups)):
        others = [run for i, group in enumerate(groups) if i != own for run in group]
        low, high = (_area(others, sign, within=within, low=low) for low in (True, False))
        found.append(low > high)
    return found


def areas(early: Sequence[Early], sign: str, *, within: bool = False, told: bool = False) -> list[float]:
    """By seed: the area under the ROC curve of a sign; `within`, over pairs of one method and depth alone.

    `told`: the higher, the worse. Otherwise a sign is read the way round that the other seeds show (`reads_low`); below
    0.5 it then misleads.
    """
    groups = _by_seed(early)
    lows = [False] * len(groups) if told else reads_low(early, sign, within=within)
    return [_area(group, sign, within=within, low=low) for group, low in zip(groups, lows, strict=True)]


def areas_table(early: Sequence[Early]) -> pd.DataFrame:
    """Every sign, over all runs of a seed and within one method and depth, and in how many seeds low is the worse."""
    rows: dict[str, dict[str, str]] = {}
    for sign in SIGNS:
        rows[sign] = row = {}
        for within, name in ((False, "over all"), (True, "within placement, warm-up and depth")):
            lows = reads_low(early, sign, within=within)
            row[name] = str(mean_of(areas(early, sign, within=within)))
            row[f"{name}: read as low"] = f"{sum(lows)} of {len(lows)}"
    return pd.DataFrame(rows).T.rename_axis("area under the ROC curve of")


def outcomes_table(early: Sequence[Early]) -> pd.DataFrame:
    """How many runs of each method and depth failed, and their early ratios."""
    rows = [(*run.cell[:2], run.failed, run.ratio, run.ratio > 1) for run in early]
    table = pd.DataFrame(rows, columns=["method", "depth", "failed", "ratio", "above"])
    groups = table.groupby(["method", "depth", "failed"], sort=False)
    summary = groups.agg(runs=("ratio", "size"), median=("ratio", "median"), above=("above", "sum"))
    return summary.rename(columns={"median": "median of the largest ratio", "above": "above 1"})


# --- checks on trained arms -----------------------------------------------------------------------


def checks_controls(params: Params, early: Sequence[Early], found: Mapping[str, Sequence[Looked]]) -> list[Check]:
    """What must hold for the rest to mean anything."""
    gains = [model.gain for model in found[text_name(params.claims.residual_health.deep)]]
    return _judged(params, replayed=deterministic(max(run.difference for run in early)), learned=mean_of(gains))


def checks_bands(params: Params, found: Mapping[str, Sequence[Looked]]) -> list[Check]:
    """Sentence A6.3a: which band keeps what is healthy, and finds what is ill."""
    section = params.claims.residual_health
    text, hops = found[text_name(section.deep)], found[HOPS]
    told, flat, law = (kept_inside(text, rule, section.band) for rule in RULES)
    return _judged(
        params,
        band_text=mean_of(told),
        band_hops=mean_of(kept_inside(hops, RULES[0], section.band)),
        healthy_below_one=mean_of(_largest_ratios(text)),
        healthy_below_one_hops=mean_of(_largest_ratios(hops)),
        law_over_band=paired_difference(law, told),
        law_over_flat=paired_difference(law, flat),
        law_separates=mean_of(detections(text, RULES[2], section.band)),
    )


def _largest_ratios(models: Sequence[Looked]) -> list[float]:
    return [math.nan if model.lost else max(model.column("ratio")) for model in models]


def checks_failure(params: Params, early: Sequence[Early]) -> list[Check]:
    """Sentence A6.3a: does the ratio foretell which runs fail?"""
    ratio = areas(early, "ratio")
    alarms = [detection([run.ratio > 1 for run in group], [run.failed for run in group]) for group in _by_seed(early)]
    return _judged(
        params,
        predicts_failure=mean_of(areas(early, "ratio", told=True)),
        predicts_within=mean_of(areas(early, "ratio", within=True, told=True)),
        above_one_fails=mean_of(alarms),
        beats_start=paired_difference(ratio, areas(early, "ratio at start")),
        beats_loss=paired_difference(ratio, areas(early, "loss")),
        beats_rate=paired_difference(ratio, areas(early, "learning rate")),
    )


def checks_planted(params: Params, seen: Replays) -> list[Check]:
    """Sentence A6.3a: what becomes of a run with a fault planted."""
    sublayer = planted_sublayer(params)
    losses = {name: [replay.validation_loss for replay in group] for name, group in seen.items()}
    ends = [_end(replay, lambda logs: float(np.exp(logs[-1, sublayer]))) for replay in seen[DEAD]]
    return _judged(
        params,
        exploding_hurts=paired_difference(losses[EXPLODING], losses[HEALTHY]),
        dead_stays=mean_of(ends),
    )


def checks_removal(params: Params, found: Mapping[str, Sequence[Looked]]) -> list[Check]:
    """Sentence A6.3a: does a ratio near 0 mark a layer that does nothing?"""
    text, hops = found[text_name(params.claims.residual_health.deep)], found[HOPS]
    trained = [removal(model) for model in text]
    return _judged(
        params,
        removable_text=mean_of(trained),
        removable_inner=mean_of([removal(model, ends=2) for model in text]),
        removable_hops=mean_of([removal(model) for model in hops]),
        removable_learned=paired_difference(trained, [removal(model, trained=False) for model in text]),
    )


def removal(model: Looked, measure: str = "ratio", *, trained: bool = True, ends: int = 0) -> float:
    """Rank correlation over sublayers of a measure with the cost of leaving out, but for `ends` at either end.

    Not a number where the run diverged, or learned nothing that could be lost.
    """
    if not model.gain > 0:
        return math.nan
    inner = slice(ends, len(model.costs) - ends)
    return rank_correlation(model.column(measure, trained=trained)[inner], model.costs[inner])


def removal_table(found: Mapping[str, Sequence[Looked]]) -> pd.DataFrame:
    """How well each measure, trained and at the start, ranks what leaving out costs."""
    columns = {
        "ratio": ("ratio", True),
        "ratio at start": ("ratio", False),
        "Block Influence": ("block_influence", True),
        "update norm": ("update_norm", True),
    }
    rows = {
        name: {
            column: str(mean_of([removal(model, measure, trained=after) for model in group]))
            for column, (measure, after) in columns.items()
        }
        for name, group in found.items()
    }
    return pd.DataFrame(rows).T.rename_axis("rank correlation with the cost")


def checks_time(params: Params, seen: Replays) -> list[Check]:
    """Sentence A6.3b: ratios over training."""
    section = params.claims.residual_health
    deep = seen[text_name(section.deep)]
    return _judged(
        params,
        falls_shallow=mean_of([fall(replay, section.early) for replay in seen[text_name(section.shallow)]]),
        falls_deep=mean_of([fall(replay, section.early) for replay in deep]),
        falls_plain=mean_of([fall(replay, section.early) for replay in seen[PLAIN]]),
        ends_small=mean_of([_end(replay, lambda logs: float(np.exp(logs[-1].mean()))) for replay in deep]),
        settles=mean_of([float(np.mean(late_change(replay))) for replay in deep]),
        high_is_unsettled=mean_of([_high_is_unsettled(replay) for replay in deep]),
    )


def _end(replay: Replay, measure: Callable[[np.ndarray], float]) -> float:
    """`measure` of ln ratios [recordings, sublayers]; not a number where the run was lost before its end."""
    return math.nan if math.isnan(replay.validation_loss) else measure(replay.series().to_numpy())


def fall(replay: Replay, early: float) -> float:
    """Mean over sublayers of ln(last ratio / geometric mean of the ratios in the part `early` of the steps)."""
    first = replay.series().index <= early * len(replay.losses)
    return _end(replay, lambda logs: float(logs[-1].mean() - logs[first].mean()))


def late_change(replay: Replay) -> list[float]:
    """Of each sublayer: |ln(last ratio / ratio at three quarters of the steps)|; [NaN] where the run was lost."""
    if math.isnan(replay.validation_loss):
        return [math.nan]
    series = replay.series()
    begin = series[series.index <= 0.75 * len(replay.losses)].iloc[-1]
    changes: list[float] = (series.iloc[-1] - begin).abs().tolist()
    return changes


def _high_is_unsettled(replay: Replay) -> float:
    return _end(replay, lambda logs: rank_correlation(logs[-1].tolist(), late_change(replay)))


# --- published numbers ----------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    return [
        Published(
            what="healthy ratios",
            published="0.01 to 0.1 (often told; no primary source found)",
            ours=ours["band_text"] + " of the sublayers are in it",
            source="the article that sentence A6.3a is from",
        ),
        Published(
            what="growth of GPT2-XL's stream",
            published="1.045 a layer of two sublayers, a ratio of about 0.21 a sublayer if updates are at right angles",
            ours=ours["ends_small"] + " a sublayer at the end of training",
            source="Heimersheim & Turner 2023, Residual stream norms grow exponentially over the forward pass "
            "(second-hand)",
        ),
    ]
