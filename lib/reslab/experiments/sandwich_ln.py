"""Claim 08: a second norm on the branch: equal to Pre-LN, at a little time, and worth it where scales differ (A5.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from pydantic import Field, field_validator, model_validator

from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, each, held_out, train_arms
from reslab.curves import Bracket, bracket, excess_rise, label
from reslab.experiments.runs import decoder_run
from reslab.experiments.sandwich_ln_exact import Exact, exact_estimates, growth, seen_scales
from reslab.experiments.sandwich_ln_mismatch import Mismatched
from reslab.flops import forward_flops, norm_flops
from reslab.models.decoder import DecoderConfig
from reslab.residuals import ConnectionConfig, Placement
from reslab.schema import Settings
from reslab.stats import Estimate, detectable, deterministic, mean_of, median_of, paired_difference
from reslab.sweep import run_all
from reslab.timing import TrainingStep, interleaved
from reslab.training import RunConfig, RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Is Sandwich-LN Pre-LN's equal, and of worth where scales differ?"
STATEMENT = (
    "Sandwich-LN, a second norm on every branch, equals Pre-LN in stability and accuracy and costs a little time; its "
    "worth lies in scale-sensitive blocks, such as mixed attention kinds or an external memory."
)
KEY = "gain_mismatch"

PRE = "Pre-LN"
SANDWICH = "Sandwich-LN"
SUM = "Norm after the sum"
PERI = "Peri-LN"

METHODS: dict[str, Placement] = {PRE: "pre", SANDWICH: "sandwich", SUM: "sandwich_sum", PERI: "peri"}
"""Where each method has its norms; see `residuals.Placement`."""

SHORT = {SANDWICH: "sandwich", SUM: "sum", PERI: "peri"}
"""By their part of a check's name."""

STABILITY_METHODS = (PRE, SANDWICH, SUM)
MISMATCH_METHODS = (PRE, SANDWICH)

QUESTIONS = {
    # untrained
    "growth_sandwich": Question(
        "A5.2a",
        "exact",
        "E|x|^2/d over s0 + 2L",
        "a norm on the branch's output makes the stream grow as s0 + 2L predicts ({exact} blocks)",
    ),
    "growth_peri": Question("A5.2a", "exact", "E|x|^2/d over s0 + 2L", "so it does in Peri-LN, from s0 = 1"),
    "sum_unit": Question(
        "A5.2a", "control", "E|x|^2/d", "a norm after the sum keeps the stream at 1: it is another network"
    ),
    "unseen_sandwich": Question(
        "A5.2b",
        "control",
        "relative change of the logits",
        "Sandwich-LN does not see that foreign branches put out 30 times as much",
    ),
    "seen_pre": Question("A5.2b", "exact", "relative change of the logits", "Pre-LN does see it"),
    "seen_sum": Question(
        "A5.2b", "exact", "relative change of the logits", "with a norm after the sum it is seen, too"
    ),
    "extra_flops": Question(
        "A5.2a", "exact", "share of a forward pass", "the second norm costs almost no operations ({depth} blocks)"
    ),
    # a time of this machine
    "time_sandwich": Question(
        "A5.2a",
        "measured",
        "times Pre-LN's",
        "a training step of Sandwich-LN takes a little longer (width {width})",
    ),
    "time_wide": Question("A5.2a", "measured", "times Pre-LN's", "and so it does at width {wide}"),
    # trained
    "learns": Question(
        "A5.2a", "control", "nats below unigram entropy", "Pre-LN of {depth} blocks has learnt from the context"
    ),
    **{
        f"equal_{short}": Question(
            "A5.2a", "trained", "nats per byte, less Pre-LN's", f"{method} ends level with Pre-LN ({{depth}} blocks)"
        )
        for method, short in SHORT.items()
    },
    **{
        f"calm_{short}": Question(
            "A5.2a",
            "trained",
            "nats, less Pre-LN's",
            f"{method}: the training loss, less the context-free guess's on the same batches, rises as little as "
            "Pre-LN's ({depth} blocks)",
        )
        for method, short in SHORT.items()
    },
    **{
        f"threshold_{SHORT[method]}": Question(
            "A5.2a",
            "trained",
            "rates of the grid, less Pre-LN's",
            f"{method} bears the same largest learning rate ({{small}} blocks, whole steps of the grid)",
        )
        for method in STABILITY_METHODS[1:]
    },
    "harm_pre": Question(
        "A5.2b", "trained", "nats per byte lost", "foreign branches of {factor:g} times the size harm Pre-LN"
    ),
    "harm_sandwich": Question("A5.2b", "control", "nats per byte lost", "the second norm hides them in training, too"),
    "gain_ordinary": Question(
        "A5.2b",
        "trained",
        "nats per byte gained",
        "without foreign branches Sandwich-LN gains nothing ({small} blocks)",
    ),
    "gain_mismatch": Question(
        "A5.2b", "trained", "nats per byte gained", "with foreign branches Sandwich-LN beats Pre-LN ({small} blocks)"
    ),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Stability(Settings):
    """Which learning rates are borne."""

    steps: int = Field(ge=4)
    learning_rates: Rates
    """Increasing, up to rates that nothing bears."""

    @field_validator("learning_rates")
    @classmethod
    def _rates_increase(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if len(rates) < 2 or list(rates) != sorted(set(rates)):
            raise ValueError(f"learning_rates must be two or more that increase, got {list(rates)}")
        return rates


class Timed(Settings):
    """Training steps whose time is taken."""

    rounds: int = Field(ge=2)
    widen: int = Field(ge=2)
    """The wider model has so many times the decoder's width."""


class Parameters(Section):
    """The section claims.sandwich_ln of params.yaml."""

    depth: int = Field(ge=1)
    """Blocks where losses are compared."""
    small_depth: int = Field(ge=2)
    """Blocks where learning rates, foreign branches and time are looked at."""
    steps: int = Field(ge=1)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates
    factor: float = Field(gt=0)
    """c: the attention of every second block puts out so many times as much."""
    stability: Stability
    timed: Timed
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _mismatch_is_one(self) -> Parameters:
        if self.factor == 1:
            raise ValueError("factor 1 makes no branch foreign; give a factor far from 1, such as 30")
        return self

    def require(self, params: Params) -> None:
        if params.decoder.norm_gain != 1:
            raise ValueError(
                f"claims.sandwich_ln: decoder.norm_gain {params.decoder.norm_gain:g} would scale every update of "
                f"Sandwich-LN at the start; set it to 1"
            )


def _judged(params: Params, estimates: dict[str, Estimate]) -> list[Check]:
    section = params.claims.sandwich_ln
    numbers = {
        "depth": section.depth,
        "small": section.small_depth,
        "factor": section.factor,
        "exact": section.exact.depths[-1],
        "width": params.decoder.width,
        "wide": params.decoder.width * section.timed.widen,
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- exact checks ---------------------------------------------------------------------------------


def initial_growth(params: Params) -> pd.DataFrame:
    """See `sandwich_ln_exact.growth`."""
    torch.set_num_threads(params.device.threads)
    return growth(params.claims.sandwich_ln.exact)


def initial_scales(params: Params) -> pd.DataFrame:
    """See `sandwich_ln_exact.seen_scales`."""
    torch.set_num_threads(params.device.threads)
    return seen_scales(params.claims.sandwich_ln.exact)


def operations(params: Params) -> pd.DataFrame:
    """Operations a token of a forward pass, of each method at both widths: matrices, norms, and more than Pre-LN's."""
    rows = []
    for width in _widths(params):
        plain = 0
        for method in METHODS:
            config = _timed_config(params, method, width, params.claims.sandwich_ln.depth)
            matrices, norms = forward_flops(config), norm_flops(config)
            plain = plain or matrices + norms
            extra = (matrices + norms) / plain - 1
            rows.append({"method": method, "width": width, "matrices": matrices, "norms": norms, "extra": extra})
    return pd.DataFrame(rows)


def checks_initial(params: Params, grown: pd.DataFrame, seen: pd.DataFrame, counted: pd.DataFrame) -> list[Check]:
    """Both sentences without training."""
    trained_width = counted[counted["width"] == params.decoder.width].set_index("method")
    extra = deterministic(float(trained_width.loc[[SANDWICH], "extra"].iloc[0]))
    return _judged(params, {**exact_estimates(grown, seen), "extra_flops": extra})


# --- time -----------------------------------------------------------------------------------------


def _widths(params: Params) -> tuple[int, int]:
    return params.decoder.width, params.decoder.width * params.claims.sandwich_ln.timed.widen


def _timed_config(params: Params, method: str, width: int, depth: int) -> DecoderConfig:
    config = decoder_run(params, depth, placement=METHODS[method], width=width).model
    assert isinstance(config, DecoderConfig)
    return config


def times(params: Params) -> pd.DataFrame:
    """Milliseconds of a training step, one row a round, width and method; differs from run to run."""
    torch.set_num_threads(params.device.threads)
    section, device = params.claims.sandwich_ln, params.device
    dtype = getattr(torch, device.precision)
    steps = {
        (width, method): TrainingStep(
            _timed_config(params, method, width, section.small_depth), params.optimisation.batch, device.kind, dtype
        ).step
        for width in _widths(params)
        for method in METHODS
    }
    laps = interleaved(steps, section.timed.rounds)
    return pd.DataFrame(
        [
            {"width": width, "method": method, "round": number, "ms": float(total)}
            for (width, method), rows in laps.items()
            for number, total in enumerate(rows.sum(1))
        ]
    )


def ratios(timed: pd.DataFrame, method: str, width: int) -> list[float]:
    """Time of a step over Pre-LN's of the same round."""
    table = timed[timed["width"] == width].pivot(index="round", columns="method", values="ms")
    if method not in table or PRE not in table:
        return [math.nan]
    found: list[float] = (table[method] / table[PRE]).tolist()
    return found


def checks_time(params: Params, timed: pd.DataFrame) -> list[Check]:
    """Sentence A5.2a: the time of a step, in the median of rounds; n is their number."""
    narrow, wide = _widths(params)
    return _judged(
        params,
        {
            "time_sandwich": median_of(ratios(timed, SANDWICH, narrow)),
            "time_wide": median_of(ratios(timed, SANDWICH, wide)),
        },
    )


# --- trained arms ---------------------------------------------------------------------------------


def arm_name(method: str, depth: int, *, foreign: bool = False) -> str:
    return f"{method}, {depth} blocks" + (", foreign branches" if foreign else "")


def _foreign_run(params: Params, method: str) -> RunConfig:
    """With foreign branches; Sandwich-LN's second norm stands inside the connection, behind the factor."""
    section, decoder = params.claims.sandwich_ln, params.decoder
    norm = decoder.norm if method == SANDWICH else None
    connection = ConnectionConfig("mismatched", factor=section.factor, norm=norm, eps=decoder.norm_eps)
    assert connection.type is Mismatched
    return decoder_run(params, section.small_depth, connection, steps=section.steps)


def arms(params: Params) -> list[Arm]:
    """All methods at `depth`; Pre-LN and Sandwich-LN at `small_depth`, without and with foreign branches."""
    section = params.claims.sandwich_ln
    plain = dict.fromkeys([(method, section.depth) for method in METHODS])
    plain |= dict.fromkeys([(method, section.small_depth) for method in MISMATCH_METHODS])
    configs = {
        arm_name(method, depth): decoder_run(params, depth, placement=METHODS[method], steps=section.steps)
        for method, depth in plain
    }
    for method in MISMATCH_METHODS:
        configs[arm_name(method, section.small_depth, foreign=True)] = _foreign_run(params, method)
    return [Arm(name, config, section.learning_rates) for name, config in configs.items()]


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    sweep = params.sweep.of(params.claims.sandwich_ln.sweep_steps)
    return choose_rates(arms(params), sweep, params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds."""
    return train_arms(arms(params), chosen, params.seeds, params.execution)


def losses(params: Params, trained: Runs) -> pd.DataFrame:
    """Each arm's test loss, and how far Pre-LN's of the same depth and branches lies above it, paired by seed."""
    section = params.claims.sandwich_ln
    rows = {}
    for name, records in trained.items():
        other = PRE + name[name.index(",") :]
        gained = [a - b for a, b in zip(held_out(trained[other]), held_out(records), strict=True)]
        rows[name] = {
            "test loss": str(mean_of(held_out(records))),
            "gain over Pre-LN": "" if name == other else str(mean_of(gained)),
            "detectable": math.nan if name == other else detectable(gained),
            "largest rise": str(mean_of(rises(records))),
        }
    assert arm_name(PRE, section.depth) in rows
    return pd.DataFrame(rows).T


def rises(records: Sequence[RunRecord]) -> list[float]:
    """How far each run's loss, less the guess's on the same batches, ever rises; not a number for one that diverged."""
    return each(records, excess_rise)


def checks_equal(params: Params, trained: Runs) -> list[Check]:
    """Sentence A5.2a: accuracy, and calm at each method's own rate."""
    depth = params.claims.sandwich_ln.depth
    plain = trained[arm_name(PRE, depth)]
    estimates = {
        "learns": mean_of(each(plain, lambda record: record.context_free_loss - (record.test_loss or math.nan)))
    }
    for method, short in SHORT.items():
        records = trained[arm_name(method, depth)]
        estimates[f"equal_{short}"] = paired_difference(held_out(records), held_out(plain))
        estimates[f"calm_{short}"] = paired_difference(rises(records), rises(plain))
    return _judged(params, estimates)


def gains(params: Params, trained: Runs, *, foreign: bool) -> list[float]:
    """Nats that Sandwich-LN gains over Pre-LN at `small_depth`, by seed."""
    depth = params.claims.sandwich_ln.small_depth
    pre, sandwich = (held_out(trained[arm_name(method, depth, foreign=foreign)]) for method in MISMATCH_METHODS)
    return [a - b for a, b in zip(pre, sandwich, strict=True)]


def harms(params: Params, trained: Runs, method: str) -> list[float]:
    """Nats that foreign branches cost a method, by seed."""
    depth = params.claims.sandwich_ln.small_depth
    with_them, without = (held_out(trained[arm_name(method, depth, foreign=foreign)]) for foreign in (True, False))
    return [a - b for a, b in zip(with_them, without, strict=True)]


def checks_mismatch(params: Params, trained: Runs) -> list[Check]:
    """Sentence A5.2b: what Sandwich-LN gains with foreign branches, and without.

    How much more it gains with them is no check of its own: it is Pre-LN's harm less Sandwich-LN's, 0 in theory.
    """
    ordinary, mismatch = (gains(params, trained, foreign=foreign) for foreign in (False, True))
    return _judged(
        params,
        {
            "harm_pre": mean_of(harms(params, trained, PRE)),
            "harm_sandwich": mean_of(harms(params, trained, SANDWICH)),
            "gain_ordinary": mean_of(ordinary),
            "gain_mismatch": mean_of(mismatch),
        },
    )


# --- which learning rates are borne ---------------------------------------------------------------

Grid = Mapping[tuple[str, float], Sequence[RunRecord]]
"""The records of each method and learning rate, in the order of the seeds."""


def grid(params: Params) -> dict[tuple[str, float], list[RunRecord]]:
    """Short runs at rates up to those that nothing bears, on all seeds."""
    section = params.claims.sandwich_ln
    cells = [(method, rate) for method in STABILITY_METHODS for rate in section.stability.learning_rates]
    configs = []
    for method, rate in cells:
        config = decoder_run(params, section.small_depth, placement=METHODS[method], steps=section.stability.steps)
        configs += [config.model_copy(update={"learning_rate": rate, "seed": seed}) for seed in params.seeds]
    records, n = run_all(configs, params.execution, "largest learning rate"), len(params.seeds)
    return {cell: records[i * n : (i + 1) * n] for i, cell in enumerate(cells)}


def brackets(params: Params, tried: Grid, method: str) -> list[Bracket]:
    """Between which rates the largest that trains lies, by seed; see `curves.bracket`."""
    rates = params.claims.sandwich_ln.stability.learning_rates
    by_rate = [[label(record) for record in tried[method, rate]] for rate in rates]
    return [bracket(dict(zip(rates, labels, strict=True))) for labels in zip(*by_rate, strict=True)]


def threshold_differences(params: Params, tried: Grid, method: str) -> list[float]:
    """By seed: the place in the grid of the largest rate that trains, less Pre-LN's.

    Where no rate trains the place is one before the grid. Not a number where both thresholds lie beyond the same end
    of the grid, for then they may differ without showing it; where one does, the difference is the least it can be.
    """
    rates = params.claims.sandwich_ln.stability.learning_rates

    def place(found: Bracket) -> int:
        return -1 if found.bears is None else rates.index(found.bears)

    pairs = zip(brackets(params, tried, method), brackets(params, tried, PRE), strict=True)
    ends = (-1, len(rates) - 1)
    return [
        math.nan if place(own) == place(other) and place(own) in ends else float(place(own) - place(other))
        for own, other in pairs
    ]


def thresholds(params: Params, tried: Grid) -> pd.DataFrame:
    """Per method what became of its runs at each rate, and where the threshold lies by seed."""
    rows = {}
    for method in STABILITY_METHODS:
        row = {}
        for rate in params.claims.sandwich_ln.stability.learning_rates:
            labels = [label(record) for record in tried[method, rate]]
            row[f"{rate:g}"] = ", ".join(f"{name} {labels.count(name)}" for name in dict.fromkeys(labels))
        rows[method] = row | {"threshold by seed": "; ".join(map(str, brackets(params, tried, method)))}
    return pd.DataFrame(rows).T


def checks_stability(params: Params, tried: Grid) -> list[Check]:
    """Sentence A5.2a: the largest learning rate that trains."""
    return _judged(
        params,
        {
            f"threshold_{SHORT[method]}": mean_of(threshold_differences(params, tried, method))
            for method in STABILITY_METHODS[1:]
        },
    )


# --- published numbers ----------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    return [
        Published(
            what="loss of Sandwich-LN less Pre-LN's, nats",
            published="-0.008 a token (perplexity 26.51 and 26.73, 130M parameters)",
            ours=ours["equal_sandwich"],
            source="Sun et al. 2025, arXiv 2502.05795",
        ),
        Published(
            what="Peri-LN against Pre-LN",
            published="mean score on benchmarks 51.57 and 49.69 (Post-LN 42.45), 400M parameters, 5 seeds",
            ours=f"loss less Pre-LN's, nats: {ours['equal_peri']}",
            source="Kim et al. 2025, Peri-LN, arXiv 2502.02732 (second-hand)",
        ),
    ]
