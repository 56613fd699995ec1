"""Claim 15: attention over depth needs more memory and more compute, and variants keep both in check (B7a, B7b).

Letters: S sublayers, N blocks of the Block form, d width, T tokens, X one activation (T d numbers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator

from reslab import data, traffic
from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, held_out, train_arms
from reslab.experiments.runs import decoder_run
from reslab.models.decoder import DecoderConfig
from reslab.residuals import ConnectionConfig
from reslab.residuals.depth_attention import AttnResOptions
from reslab.schema import Settings
from reslab.stats import Estimate, deterministic, mean_of, median_of, paired_difference, slope
from reslab.timing import TrainingStep, allocated_peak, interleaved

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "What does attention over depth cost, and what keeps it in check?"
STATEMENT = (
    "Attention over depth needs more memory and more compute than the standard residual. Without gradients, summaries "
    "of blocks, low-rank values and a window keep in check how its memory grows with depth; blocks, a window and a "
    "sampled history keep the compute in check."
)
KEY = "time_full"

PRENORM, FULL, PLAIN, BLOCK = "Pre-LN", "Full", "Full, plain form", "Block"
WINDOW, STRIDE, KEYS, VALUES = "window", "every 4th source", "low-rank keys", "low-rank values"
SAVING = {BLOCK: "block", WINDOW: "window", STRIDE: "stride", KEYS: "key_rank", VALUES: "value_rank"}
"""The variants that are to save something, and the names of their checks."""

KEEP_LESS = (BLOCK, WINDOW, VALUES)
"""The variants that keep less than every row whole."""


def _loss_question(sentence: str, what: str) -> Question:
    return Question(sentence, "trained", "nats per byte", f"{what}: the loss stays that of Full at equal steps")


def _memory_question(what: str) -> Question:
    return Question(
        "B7a",
        "exact",
        "share of Full's growth",
        f"{what}: without gradients memory grows with depth at most half as fast as Full's, by the same code",
    )


def _time_question(what: str) -> Question:
    return Question(
        "B7b",
        "measured",
        "extra time less half of Full's, in pre-norm steps",
        f"{what}: saves at least half of Full's extra time in training",
    )


QUESTIONS = {
    # the byte model
    "traffic_standard": Question(
        "B7b", "control", "d a token and sublayer", "the published traffic of the standard residual, counted again"
    ),
    "traffic_mhc": Question(
        "B7b", "control", "d a token and sublayer", "the published traffic of mHC with 4 streams, counted again"
    ),
    "traffic_full": Question(
        "B7b", "control", "d a token and sublayer", "the published traffic of Full at 128 sublayers, counted again"
    ),
    "traffic_block": Question(
        "B7b", "control", "d a token and sublayer", "the published traffic of Block (8 blocks of 16), counted again"
    ),
    "growth_full": Question("B7b", "exact", "exponent", "planned traffic of a pass, Full: grows faster than the depth"),
    "growth_block": Question("B7b", "exact", "exponent", "planned traffic of a pass, Block: grows as the depth"),
    "growth_window": Question("B7b", "exact", "exponent", "planned traffic of a pass, window: grows as the depth"),
    "flops_full": Question(
        "B7b", "exact", "share of pre-norm's", "Full's reads add multiplications ({deepest} blocks, forward)"
    ),
    # memory, as the allocator counts: the same at every run
    "memory_training": Question(
        "B7a", "exact", "times pre-norm's", "a training step of Full has a higher peak of memory ({deepest} blocks)"
    ),
    "memory_inference": Question(
        "B7a",
        "exact",
        "activations a sublayer",
        "without gradients Full needs more memory the deeper the model: about one activation or more for each sublayer",
    ),
    "memory_block": _memory_question("summaries of blocks"),
    "memory_window": _memory_question("a window"),
    "memory_key_rank": Question(
        "B7a",
        "control",
        "share of Full's growth saved",
        "low-rank keys, by the kernel: whole rows are kept as in Full, so that less than half of its growth is saved",
    ),
    "memory_value_rank": _memory_question("low-rank values"),
    # time
    "time_full": Question(
        "B7b", "measured", "times pre-norm's", "a training step of Full takes longer ({deepest} blocks)"
    ),
    "time_block_published": Question(
        "B7b",
        "measured",
        "times pre-norm's",
        "a training step of Block takes less than 4 % longer, as published ({deepest} blocks)",
    ),
    "time_growth": Question("B7b", "measured", "exponent", "Full's extra time grows faster than the depth"),
    "time_block": _time_question("grouping in blocks"),
    "time_window": _time_question("a sliding window"),
    "time_stride": _time_question("a sampled history"),
    "residual_full": Question(
        "B7b", "measured", "times the standard residual's", "reading and joining the stream alone takes Full longer"
    ),
    "residual_block": Question(
        "B7b", "measured", "times Full's", "reading and joining the stream alone: Block takes at most half of it"
    ),
    # loss
    "loss_block": _loss_question("B7a", "summaries of blocks"),
    "loss_window": _loss_question("B7a", "a window"),
    "loss_key_rank": _loss_question("B7a", "low-rank keys (of whole rows)"),
    "loss_value_rank": _loss_question("B7a", "low-rank values"),
    "loss_stride": _loss_question("B7b", "a sampled history"),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Variants(Settings):
    """How far the variants shrink what is read or kept."""

    blocks: int = Field(ge=2)
    """N, of the Block form."""
    window: int = Field(ge=2)
    key_reduction: int = Field(ge=2)
    """The rank of keys is the width divided by this."""
    value_reduction: int = Field(ge=2)
    """The rank of values is the width divided by this."""


class Measured(Settings):
    """Sizes of the training steps that are timed: each axis in turn, the others at their first value but depth's.

    Along the other axes there are as many blocks as in the trained arms.
    """

    depths: tuple[int, ...] = Field(min_length=2)
    """Blocks, increasing; what is judged at one depth is judged at the last."""
    widths: tuple[int, ...] = Field(min_length=1)
    """Multiples of the decoder's."""
    sequences: tuple[int, ...] = Field(min_length=1)
    """Of the decoder's context, in a batch."""
    rounds: int = Field(ge=2)
    """Each has every arm once; fewer than six give medians without an interval."""

    @field_validator("depths", "widths", "sequences")
    @classmethod
    def _increase(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if min(values) < 1 or list(values) != sorted(set(values)):
            raise ValueError(f"give increasing numbers from 1, got {list(values)}")
        return values


class ResidualAlone(Settings):
    """The stream of a deep model without its sublayers."""

    sublayers: int = Field(ge=4)
    tokens: int = Field(ge=1)
    width: int = Field(ge=8, multiple_of=4)


class Parameters(Section):
    """The section claims.attention_residual_cost of params.yaml."""

    variants: Variants
    modelled_sublayers: tuple[int, ...] = Field(min_length=2)
    """Depths over which the planned traffic's growth is fitted."""
    measured: Measured
    residual: ResidualAlone
    depth: int = Field(ge=2)
    """Blocks of the trained arms."""
    learning_rates: Rates
    criteria: Criteria  # type: ignore[valid-type]

    def require(self, params: Params) -> None:
        if self.depth not in self.measured.depths:
            raise ValueError(f"depth {self.depth} is none of measured.depths {list(self.measured.depths)}; add it")
        shallowest, reach = self.measured.depths[0], max(self.variants.blocks, self.variants.window)
        if 2 * shallowest <= reach:
            raise ValueError(
                f"measured.depths begin at {shallowest}: of {2 * shallowest} sublayers Block (blocks: "
                f"{self.variants.blocks}) or the window ({self.variants.window}) reads all, as Full does; begin at "
                f"{reach // 2 + 1} or more"
            )


def _section(params: Params) -> Parameters:
    return params.claims.attention_residual_cost


def _judged(params: Params, **estimates: Estimate) -> list[Check]:
    section = _section(params)
    return judge(QUESTIONS, section.criteria, estimates, {"deepest": section.measured.depths[-1]})


# --- the arms -------------------------------------------------------------------------------------


def connections(variants: Variants, sublayers: int, width: int) -> dict[str, ConnectionConfig]:
    """What is compared, by name, for a model of so many sublayers and this width."""
    block = -(-sublayers // min(variants.blocks, sublayers))
    return {
        PRENORM: ConnectionConfig("add"),
        FULL: ConnectionConfig("attnres"),
        PLAIN: ConnectionConfig("attnres", kernel="naive"),
        BLOCK: ConnectionConfig("attnres", block=block),
        WINDOW: ConnectionConfig("attnres", window=variants.window),
        STRIDE: ConnectionConfig("attnres", stride=4),
        KEYS: ConnectionConfig("attnres", key_rank=max(1, width // variants.key_reduction)),
        VALUES: ConnectionConfig("attnres", value_rank=max(1, width // variants.value_reduction)),
    }


def in_plain_form(params: Params, arm: str) -> bool:
    """Whether an arm that attends over depth runs without the kernel."""
    compared = connections(_section(params).variants, 2 * _section(params).depth, params.decoder.width)
    options = compared[arm].options
    return isinstance(options, AttnResOptions) and not options.fused


def arms(params: Params) -> list[Arm]:
    """The trained arms: all but the plain form, which computes the same as Full."""
    section = _section(params)
    compared = connections(section.variants, 2 * section.depth, params.decoder.width)
    return [
        Arm(name, decoder_run(params, section.depth, connection), section.learning_rates)
        for name, connection in compared.items()
        if name != PLAIN
    ]


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    return choose_rates(arms(params), params.sweep, params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds."""
    return train_arms(arms(params), chosen, params.seeds, params.execution)


# --- the byte model -------------------------------------------------------------------------------


def planned(params: Params) -> pd.DataFrame:
    """Rows read and written by one pass, by arm and number of sublayers; `rows` for the whole, `each` a sublayer."""
    section = _section(params)
    rows = []
    for sublayers in section.modelled_sublayers:
        for name, connection in connections(section.variants, sublayers, params.decoder.width).items():
            moved = traffic.of_connection(connection, sublayers)
            if moved is not None:
                rows.append({"arm": name, "sublayers": sublayers, "rows": moved, "each": moved / sublayers})
    return pd.DataFrame(rows)


def published_traffic() -> dict[str, float]:
    """Residual traffic at 128 sublayers and 8 blocks in units of d, by the schedules of the paper."""
    return {
        "standard": traffic.standard(),
        "mHC": traffic.hyper_connections(streams=4),
        FULL: traffic.two_phase_full(sublayers=128, group=16),
        BLOCK: traffic.two_phase_block(sublayers=128, blocks=8),
    }


def checks_model(params: Params, plan: pd.DataFrame) -> list[Check]:
    """Sentence B7b without a clock: bytes and multiplications."""

    def growth(arm: str) -> Estimate:
        chosen = plan[plan["arm"] == arm]
        return deterministic(slope(np.log(chosen["sublayers"]).tolist(), np.log(chosen["rows"]).tolist()))

    counted = published_traffic()
    return _judged(
        params,
        traffic_standard=deterministic(counted["standard"]),
        traffic_mhc=deterministic(counted["mHC"]),
        traffic_full=deterministic(counted[FULL]),
        traffic_block=deterministic(counted[BLOCK]),
        growth_full=growth(FULL),
        growth_block=growth(BLOCK),
        growth_window=growth(WINDOW),
        flops_full=deterministic(_extra_multiplications(params)),
    )


def _extra_multiplications(params: Params) -> float:
    """Of Full's reads, as a share of a pre-norm decoder's: for each source read d for its score and d for the sum."""
    blocks = _section(params).measured.depths[-1]
    decoder = _decoder(params, blocks, params.decoder.width, ConnectionConfig("attnres"))
    options = cast(AttnResOptions, decoder.connection.options)
    sources = sum(len(read) for read in options.plan(decoder.sublayers, keep=True).reads)
    reads = 2 * sources * decoder.width * decoder.context
    return reads / (blocks * decoder.relative_cost + decoder.context * decoder.width * decoder.vocabulary)


# --- time and memory of training steps ------------------------------------------------------------


def _decoder(params: Params, blocks: int, width: int, connection: ConnectionConfig) -> DecoderConfig:
    shape = params.decoder.model_dump() | {"width": width, "init_std": 0.55 / width**0.5}
    return DecoderConfig(
        **shape,
        vocabulary=data.VOCABULARY,
        depth=blocks,
        connection=connection,
    )


def sizes(params: Params) -> list[tuple[int, int, int]]:
    """Blocks, width and sequences of the measured steps: each axis in turn, depth first."""
    measured, depth = _section(params).measured, _section(params).depth
    widths = [multiple * params.decoder.width for multiple in measured.widths]
    width, sequences = widths[0], measured.sequences[0]
    along = [(blocks, width, sequences) for blocks in measured.depths]
    along += [(depth, each, sequences) for each in widths]
    along += [(depth, width, each) for each in measured.sequences]
    return list(dict.fromkeys(along))


Size = tuple[int, int, int]


def measure(params: Params) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training steps of every arm at every size: times by round, in ms, and peaks of memory, in bytes.

    Times: columns arm, blocks, width, sequences, round, ms. Peaks: arm, blocks, width, sequences, training, inference
    (a forward pass without gradients, beyond the weights). One model lives at a time but for those of one size.
    """
    torch.set_num_threads(params.device.threads)
    times, peaks = [], []
    for size in sizes(params):
        timed, weighed = _measure_size(params, size)
        times += timed
        peaks += weighed
    return pd.DataFrame(times), pd.DataFrame(peaks)


Row = dict[str, object]


def _measure_size(params: Params, size: Size) -> tuple[list[Row], list[Row]]:
    blocks, width, sequences = size
    section, device = _section(params), params.device
    steps = {
        name: TrainingStep(
            _decoder(params, blocks, width, connection), sequences, device.kind, getattr(torch, device.precision)
        )
        for name, connection in connections(section.variants, 2 * blocks, width).items()
    }
    laps = interleaved({name: step.step for name, step in steps.items()}, section.measured.rounds)
    here = {"blocks": blocks, "width": width, "sequences": sequences}
    times: list[Row] = [
        {"arm": name, **here, "round": number, "ms": float(row.sum())}
        for name, rows in laps.items()
        for number, row in enumerate(rows)
    ]
    peaks: list[Row] = [
        {
            "arm": name,
            **here,
            "training": steps[name].peak_bytes(),
            "inference": allocated_peak(steps[name].infer, device.kind),
        }
        for name in laps
    ]
    return times, peaks


def at_depths(params: Params, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `table` along the axis of depth."""
    _, width, sequences = sizes(params)[0]
    return table[(table["width"] == width) & (table["sequences"] == sequences)]


def checks_memory(params: Params, peaks: pd.DataFrame) -> list[Check]:
    """Sentence B7a: allocated bytes, which are the same at every run.

    Growth with depth is judged by increments from one depth to the next, in which cancels what the kernel needs
    whatever the depth; of Full by the least, of a variant by its largest share of Full's.
    """
    training = _peaks_by_depth(params, peaks, "training")
    inference = _peaks_by_depth(params, peaks, "inference")
    grown = inference.sub(inference[PRENORM], axis=0).diff().iloc[1:]
    _, width, sequences = sizes(params)[0]
    activation = 4 * width * sequences * params.decoder.context
    added = grown[FULL] / (2 * np.diff(inference.index)) / activation
    share = {arm: (grown[arm] / grown[_same_code(params, arm)]).max(skipna=False) for arm in (*KEEP_LESS, KEYS)}
    return _judged(
        params,
        memory_training=deterministic(training[FULL].iloc[-1] / training[PRENORM].iloc[-1]),
        memory_inference=deterministic(float(added.min())),
        memory_key_rank=_counted(1 - share[KEYS]),
        **{f"memory_{SAVING[arm]}": _counted(share[arm]) for arm in KEEP_LESS},
    )


def _counted(share: float) -> Estimate:
    """As `deterministic`; nothing measured where Full does not grow, as its peak is elsewhere, in a tiny model."""
    return deterministic(share) if math.isfinite(share) else mean_of([share])


def _peaks_by_depth(params: Params, peaks: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Peaks of `training` or `inference` along the axis of depth: a row a depth, a column an arm."""
    return at_depths(params, peaks).pivot(index="blocks", columns="arm", values=phase)


def _same_code(params: Params, arm: str) -> str:
    """The form of Full that `arm` is held against: by the kernel, or in plain form as it is itself."""
    return PLAIN if in_plain_form(params, arm) else FULL


def memory_table(params: Params, peaks: pd.DataFrame) -> pd.DataFrame:
    """Peaks of all arms at the deepest in times pre-norm's: in training (with weights and optimiser) and without
    gradients (beyond the weights), and the form of Full that runs the same code."""
    times = {
        name: _peaks_by_depth(params, peaks, phase).iloc[-1]
        for name, phase in (("training", "training"), ("without gradients", "inference"))
    }
    table = pd.DataFrame({name: (row / row[PRENORM]).round(4) for name, row in times.items()})
    table["beside"] = [PRENORM if arm == PRENORM else _same_code(params, arm) for arm in map(str, table.index)]
    return table


FLOOR = 0.01
"""Of pre-norm's step: for exponents, extra times are taken as at least this, below which noise rules."""


def checks_time(params: Params, times: pd.DataFrame, alone: pd.DataFrame) -> list[Check]:
    """Sentence B7b: measured times, which differ from run to run. n is the number of rounds.

    Estimates are medians over rounds, each of which is compared within itself. What else runs on the machine now and
    then slows one step of a round several times over: a mean goes with it, and Student's interval, made for normal
    values, becomes as wide as that one value is far. The sign test's interval holds for any distribution, and with nine
    rounds leaves out the smallest and the largest value.
    """
    table = _by_round(params, times)
    extra = _extra_times(table)
    deepest = extra.xs(_section(params).measured.depths[-1], level="blocks")
    floored = extra[FULL].clip(lower=FLOOR) * table[PRENORM]
    halves = {
        f"time_{SAVING[arm]}": median_of((deepest[arm] - deepest[FULL] / 2).tolist()) for arm in (BLOCK, WINDOW, STRIDE)
    }
    return _judged(
        params,
        time_full=median_of((1 + deepest[FULL]).tolist()),
        time_block_published=median_of((1 + deepest[BLOCK]).tolist()),
        time_growth=median_of([_growth(one) for _, one in floored.groupby(level="round")]),
        residual_full=median_of((alone[FULL] / alone["standard"]).tolist()),
        residual_block=median_of((alone[BLOCK] / alone[FULL]).tolist()),
        **halves,
    )


def _by_round(params: Params, times: pd.DataFrame) -> pd.DataFrame:
    """Times along the axis of depth: rows (round, blocks), a column an arm."""
    return at_depths(params, times).pivot(index=["round", "blocks"], columns="arm", values="ms")


def _extra_times(table: pd.DataFrame) -> pd.DataFrame:
    """Each time beyond pre-norm's, as a share of it."""
    return table.sub(table[PRENORM], axis=0).div(table[PRENORM], axis=0)


def plain_beyond_kernel(params: Params, times: pd.DataFrame) -> Estimate:
    """How much longer Full's step takes in plain form than by the kernel, in pre-norm steps of the round (deepest).

    Of this package, so that it tests nothing. A difference: in a ratio of extra times, rounds in which the kernel's is
    near zero would be all that counts.
    """
    extra = _extra_times(_by_round(params, times))
    deepest = extra.xs(_section(params).measured.depths[-1], level="blocks")
    return median_of((deepest[PLAIN] - deepest[FULL]).tolist())


def _growth(extra: pd.Series) -> float:
    """Exponent of one round's extra times over the depth."""
    return slope(np.log(extra.index.get_level_values("blocks")).tolist(), np.log(extra).tolist())


# --- the residual alone ---------------------------------------------------------------------------


def residual_alone(params: Params) -> tuple[pd.DataFrame, float]:
    """Time in ms of a pass of the stream alone, [rounds, arms], and the bandwidth of reading in bytes a second.

    Sublayers put out tensors that were made beforehand, so that only reading and joining the stream takes time.
    """
    torch.set_num_threads(params.device.threads)
    section, kind = _section(params), params.device.kind
    size = section.residual
    block = -(-size.sublayers // min(section.variants.blocks, size.sublayers))
    compared = {
        "standard": ConnectionConfig("add"),
        "mHC": ConnectionConfig("hyper", doubly_stochastic=True),
        FULL: ConnectionConfig("attnres"),
        PLAIN: ConnectionConfig("attnres", kernel="naive"),
        BLOCK: ConnectionConfig("attnres", block=block),
    }
    passes = traffic.stream_passes(compared, size.sublayers, size.tokens, size.width, kind)
    laps = interleaved(passes, section.measured.rounds)
    bandwidth = traffic.bandwidth(kind)
    return pd.DataFrame({name: rows.sum(1) for name, rows in laps.items()}), bandwidth


def traffic_table(params: Params, alone: pd.DataFrame, bandwidth: float) -> pd.DataFrame:
    """Traffic in d a token and sublayer: published at 128 sublayers, planned by this package, and what was measured.

    `measured` is the median time times the bandwidth: what could have been read in that time.
    """
    size = _section(params).residual
    unit = 4 * size.tokens * size.width * size.sublayers
    blocks = -(-size.sublayers // min(_section(params).variants.blocks, size.sublayers))
    own: Mapping[str, ConnectionConfig] = {
        "standard": ConnectionConfig("add"),
        FULL: ConnectionConfig("attnres"),
        PLAIN: ConnectionConfig("attnres", kernel="naive"),
        BLOCK: ConnectionConfig("attnres", block=blocks),
    }
    planned_here = {name: traffic.of_connection(c, size.sublayers) for name, c in own.items()}
    counted = published_traffic()
    return pd.DataFrame(
        {
            name: {
                "published": counted.get(name, math.nan),
                "planned": (planned_here.get(name) or math.nan) / size.sublayers,
                "measured": float(np.median(alone[name])) / 1e3 * bandwidth / unit,
            }
            for name in map(str, alone)
        }
    ).T


# --- loss -----------------------------------------------------------------------------------------


def checks_loss(params: Params, trained: Runs) -> list[Check]:
    """What each variant costs in held-out loss against Full, at equal steps."""
    full = held_out(trained[FULL])
    return _judged(
        params,
        **{f"loss_{name}": paired_difference(held_out(trained[arm]), full) for arm, name in SAVING.items()},
    )


def losses(trained: Runs) -> pd.DataFrame:
    """Each arm's held-out loss beside pre-norm's and Full's, paired by seed."""
    prenorm, full = held_out(trained[PRENORM]), held_out(trained[FULL])
    return pd.DataFrame(
        {
            arm: {
                "test loss": str(mean_of(held_out(records))),
                "minus pre-norm's": str(paired_difference(held_out(records), prenorm)),
                "minus Full's": str(paired_difference(held_out(records), full)),
            }
            for arm, records in trained.items()
        }
    ).T


# --- published numbers ----------------------------------------------------------------------------

PAPER = "Kimi Team 2026, arXiv 2603.15031"


def published(checks: Sequence[Check]) -> list[Published]:
    ours: Callable[[str], str] = {c.name: str(c.estimate) for c in checks}.__getitem__
    rows = [
        ("traffic of the standard residual a token and sublayer, 128 sublayers", "3 d", "traffic_standard"),
        ("the same of mHC", "34 d", "traffic_mhc"),
        ("the same of Full", "24 d", "traffic_full"),
        ("the same of Block, 8 blocks", "5.5 d", "traffic_block"),
        ("time of training, Block over the baseline (a cluster of GPUs)", "< 1.04", "time_block_published"),
        ("loss of a window of 8 and the embedding minus Full's, 436M parameters", "0.027", "loss_window"),
        ("loss of Block (8 blocks of 4) minus Full's, 436M parameters", "0.009", "loss_block"),
    ]
    return [Published(what=what, published=number, ours=ours(name), source=PAPER) for what, number, name in rows]
