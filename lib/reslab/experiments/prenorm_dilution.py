"""Claim 11: does the residual stream dilute early layers and drown late ones (B2a, B2b, A4.1c)?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from pydantic import field_validator, model_validator
from torch import Tensor, nn

from reslab import data
from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, each, held_out, train_arms
from reslab.dilution import Dilution, dilution
from reslab.experiments.prenorm_dilution_exact import (
    FULL,
    LNS,
    PLAIN,
    POST,
    PRE,
    Exact,
    exact_estimates,
    initial_table,
    require_depths,
)
from reslab.experiments.runs import decoder_run
from reslab.residuals import ConnectionConfig
from reslab.stats import Estimate, mean_of, paired_difference, slope
from reslab.sweep import trained_model
from reslab.training import RunRecord, build

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does Pre-LN dilute early layers, so that late ones put out more?"
STATEMENT = (
    "A plain residual stream adds all outputs with equal weights. So it dilutes early layers more and more with depth, "
    "and its magnitude grows, so that later layers must put out more to matter. As told, it is Post-LN's main path "
    "that accumulates, while Pre-LN's is scale-controlled and does not grow."
)
KEY = "outputs_grow"

EXPONENT = "exponent of the depth"
LAYER_EXPONENT = "exponent of the block's number"
GROWTH = "mean square of the stream, last / first"
SHARE = "log10 of the share, difference"

QUESTIONS = {
    # untrained
    "adds_up": Question(
        "B2a", "control", "|what is read - its parts| / |what is read|", "what the head reads is the sum of its parts"
    ),
    "full_starts_alike": Question(
        "B2a", "control", "difference of shares", "attention over depth starts from the same shares as Pre-LN"
    ),
    "embedding_plain": Question(
        "B2a",
        "exact",
        EXPONENT,
        "the embedding's share in what the head reads falls with the model's depth (untrained, plain init)",
    ),
    "embedding_scaled": Question("B2a", "exact", EXPONENT, "it does so with depth-scaled init, too (untrained)"),
    "first_plain": Question(
        "B2a", "exact", EXPONENT, "the first block's share falls with the model's depth (untrained, plain init)"
    ),
    "first_scaled": Question("B2a", "exact", EXPONENT, "it does so with depth-scaled init, too (untrained)"),
    "growth_band": Question(
        "B2b",
        "control",
        "place between the bounds (0 to 1)",
        "measured right: the stream lies between 1 + L/2 and 1 + 3L/2, as proved ({exact_deep} untrained blocks)",
    ),
    "growth_plain": Question(
        "B2b", "exact", EXPONENT, "what the blocks add to the stream grows with depth (untrained, plain init)"
    ),
    "growth_scaled": Question("B2b", "exact", EXPONENT, "it does so with depth-scaled init, too (untrained)"),
    "growth_lns": Question("B2b", "exact", EXPONENT, "LayerNorm scaling curbs that growth (untrained, plain init)"),
    "output_untrained": Question(
        "B2b",
        "exact",
        LAYER_EXPONENT,
        "before training all blocks put out alike, so that growth after it is learnt ({exact_deep} blocks)",
    ),
    "post_keeps": Question(
        "A4.1c",
        "exact",
        "mean square, last / first",
        "Post-LN's main path accumulates: the embedding is still in it at full size ({exact_deep} untrained blocks)",
    ),
    "pre_controlled": Question(
        "A4.1c", "exact", GROWTH, "Pre-LN's main path does not grow ({exact_deep} untrained blocks, plain init)"
    ),
    "pre_controlled_scaled": Question(
        "A4.1c", "exact", GROWTH, "Pre-LN's main path does not grow ({exact_deep} untrained blocks, depth-scaled init)"
    ),
    # trained
    "learns": Question(
        "B2a", "control", "nats below unigram entropy", "Pre-LN of {deep} blocks has learnt from the context"
    ),
    "embedding_same_rate": Question(
        "B2a",
        "trained",
        EXPONENT,
        "after training the embedding's share in what the head reads (1 / growth) falls with depth, all at {rate:g}",
    ),
    "embedding_deep_rate": Question(
        "B2a", "trained", EXPONENT, "it does so with all at the best rate of {deep} blocks"
    ),
    "embedding_trained": Question("B2a", "trained", EXPONENT, "it does so with each depth at its own best rate"),
    "first_same_rate": Question(
        "B2a", "trained", EXPONENT, "after training the first block's share falls with depth, all at {rate:g}"
    ),
    "first_deep_rate": Question("B2a", "trained", EXPONENT, "it does so with all at the best rate of {deep} blocks"),
    "first_trained": Question("B2a", "trained", EXPONENT, "it does so with each depth at its own best rate"),
    "embedding_full_same_rate": Question(
        "B2a",
        "trained",
        SHARE,
        "it comes of equal weights: with learnt ones (Full) deep layers read more of the embedding "
        "({deep} blocks, both at {rate:g})",
    ),
    "embedding_full": Question("B2a", "trained", SHARE, "they do so with each at its own best rate ({deep} blocks)"),
    "first_full_same_rate": Question(
        "B2a",
        "trained",
        SHARE,
        "with learnt weights (Full) deep layers read more of the first block ({deep} blocks, both at {rate:g})",
    ),
    "first_full": Question("B2a", "trained", SHARE, "they do so with each at its own best rate ({deep} blocks)"),
    "stream_grows": Question("B2b", "trained", GROWTH, "after training Pre-LN's stream has grown over {deep} blocks"),
    "growth_lns_same_rate": Question(
        "B2b",
        "trained",
        "log10 of the growth, difference",
        "LayerNorm scaling curbs it ({deep} trained blocks, both at {rate:g})",
    ),
    "growth_lns_deep_rate": Question(
        "B2b",
        "trained",
        "log10 of the growth, difference",
        "LayerNorm scaling curbs it ({deep} trained blocks, both at the best rate of Pre-LN)",
    ),
    "growth_lns_trained": Question(
        "B2b",
        "trained",
        "log10 of the growth, difference",
        "LayerNorm scaling curbs it ({deep} trained blocks, each at its own best rate)",
    ),
    "outputs_grow": Question(
        "B2b",
        "trained",
        f"{LAYER_EXPONENT}, trained less untrained",
        "later layers learn to put out more ({deep} blocks)",
    ),
    "outputs_grow_plain": Question(
        "B2b", "trained", f"{LAYER_EXPONENT}, trained less untrained", "with plain init they do so, too ({deep} blocks)"
    ),
    "ratio_kept": Question(
        "B2b",
        "trained",
        LAYER_EXPONENT,
        "so they go on to matter: what they put out keeps up with the stream ({deep} trained blocks)",
    ),
    "outputs_full_same_rate": Question(
        "B2b",
        "trained",
        f"{LAYER_EXPONENT}, Full less Pre-LN",
        "they must because the stream grows: where nothing accumulates (Full) outputs grow less "
        "({deep} blocks, both at {rate:g})",
    ),
    "outputs_full": Question(
        "B2b",
        "trained",
        f"{LAYER_EXPONENT}, Full less Pre-LN",
        "they grow less in Full with each at its own best rate ({deep} blocks)",
    ),
    "post_accumulates_trained": Question(
        "A4.1c", "trained", GROWTH, "after training Post-LN's main path has grown over {middle} blocks"
    ),
    "post_keeps_trained": Question(
        "A4.1c",
        "trained",
        "mean square, last / first",
        "after training the embedding is still in Post-LN's main path at full size ({middle} blocks)",
    ),
    "pre_controlled_trained": Question(
        "A4.1c", "trained", GROWTH, "after training Pre-LN's main path has not grown over {middle} blocks"
    ),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Parameters(Section):
    """The section claims.prenorm_dilution of params.yaml."""

    depths: tuple[int, ...]
    """Blocks of the Pre-LN decoders, increasing; the other methods run at the deepest."""
    middle: int
    """Blocks of Post-LN, and of the Pre-LN that it is held against."""
    learning_rates: Rates
    """Of all but Post-LN; depths are also compared at the middle one."""
    post_learning_rates: Rates
    """Post-LN's, which needs smaller ones."""
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    _depths_increase = field_validator("depths")(require_depths)

    @model_validator(mode="after")
    def _middle_is_a_depth(self) -> Parameters:
        if self.middle not in self.depths:
            raise ValueError(f"middle {self.middle} must be one of depths, {list(self.depths)}")
        return self

    def require(self, params: Params) -> None:
        if params.decoder.weight_init != "depth_scaled":
            raise ValueError(
                f"decoder.weight_init is {params.decoder.weight_init}; it must be depth_scaled, beside which the arm "
                f"with plain init is held"
            )


def section_of(params: Params) -> Parameters:
    return params.claims.prenorm_dilution


def _judged(params: Params, estimates: dict[str, Estimate]) -> list[Check]:
    section = section_of(params)
    numbers = {
        "deep": section.depths[-1],
        "middle": section.middle,
        "exact_deep": section.exact.depths[-1],
        "rate": same_rate(params),
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- exact checks ---------------------------------------------------------------------------------


def initial(params: Params) -> pd.DataFrame:
    """See `prenorm_dilution_exact.initial_table`."""
    torch.set_num_threads(params.device.threads)
    return initial_table(section_of(params).exact)


def checks_initial(params: Params, table: pd.DataFrame) -> list[Check]:
    """All sentences without training."""
    return _judged(params, exact_estimates(table))


# --- trained arms ---------------------------------------------------------------------------------


def at_depth(method: str, depth: int) -> str:
    return f"{method}, {depth} blocks"


def arms(params: Params) -> list[Arm]:
    """Pre-LN at every depth, Post-LN at the middle one, all else at the deepest; alike in all but that."""
    section = section_of(params)
    deep, middle, rates = section.depths[-1], section.middle, section.learning_rates
    standard = [Arm(at_depth(PRE, depth), decoder_run(params, depth), rates) for depth in section.depths]
    scaling, full = ConnectionConfig("layernorm_scaling"), ConnectionConfig("attnres")
    return [
        *standard,
        Arm(at_depth(PLAIN, deep), decoder_run(params, deep, weight_init="plain"), rates),
        Arm(at_depth(LNS, deep), decoder_run(params, deep, scaling), rates),
        Arm(at_depth(FULL, deep), decoder_run(params, deep, full), rates),
        Arm(at_depth(POST, middle), decoder_run(params, middle, placement="post"), section.post_learning_rates),
    ]


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    return choose_rates(arms(params), params.sweep, params.execution)


def same_rate(params: Params) -> float:
    """The rate at which what differs in depth or method is also compared: the middle one of those to choose from."""
    rates = sorted(section_of(params).learning_rates)
    return rates[len(rates) // 2]


def at_same_rate(params: Params, chosen: pd.DataFrame) -> pd.DataFrame:
    """A table of rates for `runs`: Pre-LN at every depth, LayerNorm scaling and Full, all at that rate."""
    return _all_at(params, chosen, same_rate(params), LNS, FULL)


def deep_rate(params: Params, chosen: pd.DataFrame) -> float:
    """The other rate at which depths, and Pre-LN and LayerNorm scaling, are compared: the best of the deepest Pre-LN.

    `same_rate` may lie above the best rates of deep models and at those of the others, which are then better tuned.
    """
    deepest = chosen[chosen["arm"] == at_depth(PRE, section_of(params).depths[-1])]
    return float(deepest.loc[deepest["chosen"], "rate"].item())


def at_deep_rate(params: Params, chosen: pd.DataFrame) -> pd.DataFrame:
    """A table of rates for `runs`: Pre-LN at every depth and LayerNorm scaling, all at that rate."""
    return _all_at(params, chosen, deep_rate(params, chosen), LNS)


def _all_at(params: Params, chosen: pd.DataFrame, rate: float, *methods: str) -> pd.DataFrame:
    """Pre-LN at every depth and the methods at the deepest, with `rate` chosen of it and all that stage one tried."""
    depths, tried = section_of(params).depths, chosen.groupby("arm")["rate"].agg(set)
    names = [*(at_depth(PRE, depth) for depth in depths), *(at_depth(method, depths[-1]) for method in methods)]
    rows = [(name, "", own, own == rate) for name in names for own in sorted({*tried[name], rate})]
    return pd.DataFrame(rows, columns=["arm", "setting", "rate", "chosen"])


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: the arms of a table at their rates on all seeds, with the weights to look into."""
    wanted = [arm for arm in arms(params) if arm.name in set(chosen["arm"])]
    return train_arms(wanted, chosen, params.seeds, params.execution, weights=True)


# --- inside the models ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One run's model on held-out text before and after training."""

    untrained: Dilution
    trained: Dilution


Seen = dict[str, list[Pair | None]]
"""By arm and seed; None where the run diverged."""


def inside(params: Params, trained: Runs) -> Seen:
    """Takes every model apart, on the first held-out windows."""
    torch.set_num_threads(params.device.threads)
    return {name: [_pair(record) for record in records] for name, records in trained.items()}


def _pair(record: RunRecord) -> Pair | None:
    if record.outcome == "diverged":
        return None
    config = record.config
    inputs, _ = next(data.load(config.task).held_out("test"))
    assert isinstance(inputs, Tensor)
    tokens = inputs.to(config.device.kind)

    def taken_apart(model: nn.Module) -> Dilution:
        return dilution(model.to(config.device.kind), tokens)

    return Pair(taken_apart(build(config.model, config.seed)), taken_apart(trained_model(config)))


def column(pairs: Sequence[Pair | None], measure: Callable[[Pair], float]) -> list[float]:
    """`measure` of each; not a number for a run that diverged."""
    return [math.nan if pair is None else measure(pair) for pair in pairs]


def layer_exponent(values: Sequence[float] | np.ndarray) -> float:
    """Exponent of a value by block as a power of the block's number, which counts from 1."""
    return slope(np.log(np.arange(1, len(values) + 1)), np.log(values))


def embedding_share(one: Dilution) -> float:
    """In what the head reads."""
    return float(one.share(0)[-1])


def first_share(one: Dilution) -> float:
    """The first block's (its attention's and its MLP's) in what the head reads."""
    return float(one.share(1, 2)[-1])


def late_share(one: Dilution, *sources: int) -> float:
    """log10 of the sources' mean share in what the last quarter of the sublayers reads."""
    shares = one.share(*sources)[:-1]
    return math.log10(float(shares[-max(1, len(shares) // 4) :].mean()))


def over_depth(
    params: Params, seen: Seen, measure: Callable[[Dilution], float], *, trained: bool = True
) -> list[float]:
    """By seed, the exponent of Pre-LN's measure as a power of depth; not a number where a run diverged."""
    depths = section_of(params).depths
    by_depth = [
        column(seen[at_depth(PRE, depth)], lambda pair: measure(pair.trained if trained else pair.untrained))
        for depth in depths
    ]
    by_seed = zip(*by_depth, strict=True)
    logs = np.log(depths).tolist()
    return [slope(logs, np.log(values)) if all(map(math.isfinite, values)) else math.nan for values in by_seed]


def _learnt_growth(pair: Pair) -> float:
    """By how much training raises the exponent of what blocks put out."""
    return layer_exponent(pair.trained.block_outputs) - layer_exponent(pair.untrained.block_outputs)


def _log_growth(pair: Pair) -> float:
    return math.log10(pair.trained.growth)


def checks_inside(params: Params, trained: Runs, seen: Seen, same: Seen, same_deep: Seen) -> list[Check]:
    """All sentences after training; `seen` in models at their own best rates, `same` in those of `at_same_rate`,
    `same_deep` in those of `at_deep_rate`."""
    section = section_of(params)
    deep, middle = section.depths[-1], section.middle
    pre, plain = (seen[at_depth(method, deep)] for method in (PRE, PLAIN))
    post, pre_middle = seen[at_depth(POST, middle)], seen[at_depth(PRE, middle)]

    def over_pre(models: Seen, method: str, measure: Callable[[Pair], float]) -> Estimate:
        ours, theirs = (column(models[at_depth(one, deep)], measure) for one in (method, PRE))
        return paired_difference(ours, theirs)

    def compared(models: Seen, ending: str) -> dict[str, Estimate]:
        return {
            f"embedding_full{ending}": over_pre(models, FULL, lambda pair: late_share(pair.trained, 0)),
            f"first_full{ending}": over_pre(models, FULL, lambda pair: late_share(pair.trained, 1, 2)),
            f"outputs_full{ending}": over_pre(models, FULL, lambda pair: layer_exponent(pair.trained.block_outputs)),
        }

    return _judged(
        params,
        {
            "learns": mean_of(each(trained[at_depth(PRE, deep)], _below_unigram)),
            "embedding_same_rate": mean_of(over_depth(params, same, embedding_share)),
            "embedding_deep_rate": mean_of(over_depth(params, same_deep, embedding_share)),
            "embedding_trained": mean_of(over_depth(params, seen, embedding_share)),
            "first_same_rate": mean_of(over_depth(params, same, first_share)),
            "first_deep_rate": mean_of(over_depth(params, same_deep, first_share)),
            "first_trained": mean_of(over_depth(params, seen, first_share)),
            "stream_grows": mean_of(column(pre, lambda pair: pair.trained.growth)),
            "growth_lns_same_rate": over_pre(same, LNS, _log_growth),
            "growth_lns_deep_rate": over_pre(same_deep, LNS, _log_growth),
            "growth_lns_trained": over_pre(seen, LNS, _log_growth),
            "outputs_grow": mean_of(column(pre, _learnt_growth)),
            "outputs_grow_plain": mean_of(column(plain, _learnt_growth)),
            "ratio_kept": mean_of(column(pre, lambda pair: layer_exponent(pair.trained.ratios))),
            **compared(same, "_same_rate"),
            **compared(seen, ""),
            "post_accumulates_trained": mean_of(column(post, lambda pair: pair.trained.growth)),
            "post_keeps_trained": mean_of(column(post, lambda pair: pair.trained.embedding_left)),
            "pre_controlled_trained": mean_of(column(pre_middle, lambda pair: pair.trained.growth)),
        },
    )


def _below_unigram(record: RunRecord) -> float:
    """How far the test loss is below the best guess without context, in nats."""
    assert record.test_loss is not None
    return record.context_free_loss - record.test_loss


# --- tables ---------------------------------------------------------------------------------------


def losses(trained: Runs, *at_one_rate: Runs) -> pd.DataFrame:
    """Each arm's own best rate and its test loss there; its test loss in `at_one_rate`, in a column for each rate."""
    rows = {
        name: {"own best rate": f"{_rate(records):g}", "test loss": str(mean_of(held_out(records)))}
        for name, records in trained.items()
    }
    for compared in at_one_rate:
        for name, records in compared.items():
            rows[name][f"test loss at {_rate(records):g}"] = str(mean_of(held_out(records)))
    return pd.DataFrame(rows).T.fillna("").rename_axis("arm")


def _rate(records: Sequence[RunRecord]) -> float:
    """The one of all seeds."""
    return records[0].config.learning_rate


def inside_table(seen: Seen) -> pd.DataFrame:
    """Of every arm, before and after training, the mean over seeds of what the checks are made of."""
    measures: dict[str, Callable[[Dilution], float]] = {
        "growth": lambda one: one.growth,
        "embedding's share": embedding_share,
        "first block's share": first_share,
        "sum of all shares": lambda one: float(np.nansum(one.parts[-1]) / one.reads[-1]),
        "output exponent": lambda one: layer_exponent(one.block_outputs),
        "ratio exponent": lambda one: layer_exponent(one.ratios),
        "mean ratio": lambda one: float(one.ratios.mean()),
    }
    rows: list[dict[str, object]] = []
    for name, pairs in seen.items():
        for stage in ("untrained", "trained"):
            values = {
                what: mean_of(column(pairs, lambda pair, m=measure, s=stage: m(getattr(pair, s)))).value  # type: ignore[misc]
                for what, measure in measures.items()
            }
            rows.append({"arm": name, "stage": stage, **values})
    return pd.DataFrame(rows).set_index(["arm", "stage"]).astype(float)


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    kimi = "Kimi Team 2026, arXiv 2603.15031, dynamics"
    xiong = "Xiong et al. 2020, arXiv 2002.04745, lemma 2"
    return [
        Published(
            what=what,
            published=value,
            ours=ours[name],
            source=source,
        )
        for what, value, name, source in (
            ("place of Pre-LN's stream between its bounds", "0 to 1, proved", "growth_band", xiong),
            ("Post-LN's mean square, last / first (ours: trained)", "1 untrained", "post_accumulates_trained", xiong),
            (
                "growth of Pre-LN's stream (ours: mean square, last / first)",
                "output magnitude 0 to 12 over 27 blocks",
                "stream_grows",
                kimi,
            ),
            (
                "growth of GPT2-XL's stream (ours: mean square, last / first)",
                "68 over 48 layers (1.045 a layer in norm)",
                "stream_grows",
                "Heimersheim & Turner 2023 (second-hand)",
            ),
        )
    ]
