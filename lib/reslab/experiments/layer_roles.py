"""Claim 12: layers specialise and neighbouring layers share a space, only with residual connections (A3.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from pydantic import Field, model_validator

from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, train_arms
from reslab.experiments import layer_roles_exact as untrained
from reslab.experiments import layer_roles_seen as seen
from reslab.experiments.layer_roles_exact import Exact
from reslab.experiments.layer_roles_seen import CURRENT, DISTANT, NEXT, PREVIOUS, Look, Seen, hop_name
from reslab.experiments.runs import decoder_run, hops_run
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.stats import Estimate, detectable, mean_of, paired_difference
from reslab.training import RunConfig

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Do layers specialise, and neighbours share a space, only with residuals?"
STATEMENT = (
    "Layers specialise: the first are local and lexical, then come semantic and at last abstract ones. Neighbouring "
    "layers share a space. Both only with residual connections."
)
KEY = "shared_only"

CLIPPED = "share of what can be read (a probe that misleads counts as 0)"
"""Unit where it is likely that probes mislead; see `reading.kept_share`."""

QUESTIONS = {
    # untrained; what Taylor's theorem gives the skip is a control
    "skip_order": Question(
        "A3.3",
        "control",
        "power of the branches' size",
        "untrained, with residuals, leaving out a block changes the output in the first order of the branches",
    ),
    "swap_order": Question(
        "A3.3",
        "control",
        "power of the branches' size",
        "untrained, with residuals, exchanging neighbours changes it in the second order only",
    ),
    "swap_none": Question(
        "A3.3",
        "exact",
        "change / size of the output",
        "untrained, without residuals, exchanging neighbours makes another function",
    ),
    "shared_untrained": Question(
        "A3.3",
        "exact",
        "share of what can be read",
        "untrained, with residuals, the next layer already reads as its neighbour does ({depth} blocks)",
    ),
    "unshared_untrained": Question(
        "A3.3",
        "exact",
        CLIPPED,
        "untrained, without residuals, it does not ({shallow} blocks)",
    ),
    # controls
    "gain_text": Question(
        "A3.3", "control", "nats below unigram entropy", "on text the {depth} residual blocks have learned something"
    ),
    "gain_hops": Question(
        "A3.3",
        "control",
        "nats below ln {symbols}",
        "at pointer chasing the {depth_hops} blocks have learned something",
    ),
    "gain_shallow": Question(
        "A3.3",
        "control",
        "nats below unigram entropy",
        "{shallow} blocks have learned something, with residuals and without",
    ),
    # with residuals: layers specialise
    "lexical_early": Question(
        "A3.3",
        "trained",
        "skill, slope over depth",
        "on text, the current byte is read off less well the later the layer",
    ),
    "lexical_early_learned": Question(
        "A3.3",
        "trained",
        "skill, slope over depth, difference",
        "on text, it fades more steeply than before training",
    ),
    "abstract_late": Question(
        "A3.3", "trained", "skill, slope over depth", "on text, the next byte is read off better the later the layer"
    ),
    "abstract_late_learned": Question(
        "A3.3",
        "trained",
        "skill, slope over depth, difference",
        "on text, it rises more steeply than before training",
    ),
    "local_first": Question(
        "A3.3",
        "trained",
        "depth, difference",
        "on text, the previous byte is found at a lesser depth than the byte {distant} back",
    ),
    "local_before_abstract": Question(
        "A3.3",
        "trained",
        "depth, difference",
        "on text, the previous byte is found at a lesser depth than the next byte",
    ),
    "lexical_early_hops": Question(
        "A3.3", "trained", "skill, slope over depth", "chasing pointers, the symbol asked for fades with depth"
    ),
    "steps_in_order": Question(
        "A3.3",
        "trained",
        "depth, difference",
        "chasing pointers, one hop is found at a lesser depth than {hops} hops",
    ),
    "own_place": Question(
        "A3.3",
        "trained",
        "share of the gain, difference",
        "on text, exchanging blocks half the depth apart costs more than exchanging neighbours",
    ),
    "own_place_hops": Question(
        "A3.3",
        "trained",
        "share of the gain, difference",
        "chasing pointers, exchanging blocks half the depth apart costs more than exchanging neighbours",
    ),
    # with residuals: neighbours share a space
    "shared_text": Question(
        "A3.3", "trained", "share of what can be read", "on text, a layer's probe reads the next layer nearly as well"
    ),
    "shared_hops": Question(
        "A3.3",
        "trained",
        "share of what can be read",
        "chasing pointers, a layer's probe reads the next layer nearly as well",
    ),
    "shared_text_recentred": Question(
        "A3.3",
        "trained",
        "share of what can be read",
        "on text, it does so where the layers' means are made equal",
    ),
    "shared_hops_recentred": Question(
        "A3.3",
        "trained",
        "share of what can be read",
        "chasing pointers, it does so where the layers' means are made equal",
    ),
    "neighbours_text": Question(
        "A3.3", "trained", "share of the gain lost", "on text, exchanging two neighbours costs little"
    ),
    "neighbours_hops": Question(
        "A3.3", "trained", "share of the gain lost", "chasing pointers, exchanging two neighbours costs little"
    ),
    "lens_text": Question(
        "A3.3",
        "trained",
        "share of the prediction missing",
        "on text, the head reads the layer before the last nearly as well as the last",
    ),
    "lens_hops": Question(
        "A3.3",
        "trained",
        "share of the prediction missing",
        "chasing pointers, the head reads the layer before the last nearly as well as the last",
    ),
    # only with residuals, same depth
    "lexical_only": Question(
        "A3.3",
        "trained",
        "skill, slope over depth, difference",
        "the current byte's skill falls more steeply from embedding to last block with residuals than without, where "
        "what is lost counts as fallen ({shallow} blocks)",
    ),
    "abstract_only": Question(
        "A3.3",
        "trained",
        "skill, slope over depth, difference",
        "the next byte rises more steeply with residuals than without ({shallow} blocks)",
    ),
    "lexical_only_deep": Question(
        "A3.3",
        "trained",
        "skill, slope over depth, difference",
        "the current byte's skill falls more steeply with residuals than without ({depth} blocks; no value where the "
        "latter learnt nothing)",
    ),
    "abstract_only_deep": Question(
        "A3.3",
        "trained",
        "skill, slope over depth, difference",
        "the next byte rises more steeply with residuals than without ({depth} blocks; no value where the latter "
        "learnt nothing)",
    ),
    "unshared_none": Question(
        "A3.3",
        "trained",
        CLIPPED,
        "without residuals, a layer's probe reads less than half in the next ({shallow} blocks)",
    ),
    "shared_shallow": Question(
        "A3.3",
        "trained",
        "share of what can be read",
        "with residuals, a layer's probe reads the next layer nearly as well ({shallow} blocks)",
    ),
    "shared_only": Question(
        "A3.3",
        "trained",
        "share of what can be read, add - none",
        "with residuals, a layer's probe reads more in the next than without ({shallow} blocks)",
    ),
    "unshared_none_recentred": Question(
        "A3.3",
        "trained",
        CLIPPED,
        "without residuals, it does not where the layers' means are made equal ({shallow} blocks)",
    ),
    "shared_only_recentred": Question(
        "A3.3",
        "trained",
        "share of what can be read, add - none",
        "with residuals, it reads more, where the layers' means are made equal ({shallow} blocks)",
    ),
    "neighbours_only": Question(
        "A3.3",
        "trained",
        "share of the gain lost, none - add",
        "without residuals, exchanging two neighbours costs more ({shallow} blocks)",
    ),
    "skip_only": Question(
        "A3.3",
        "trained",
        "share of the gain lost, none - add",
        "without residuals, leaving out a block costs more ({shallow} blocks)",
    ),
    "repeat_only": Question(
        "A3.3",
        "trained",
        "share of the gain lost, none - add",
        "without residuals, running a block twice costs more ({shallow} blocks)",
    ),
    "lens_only": Question(
        "A3.3",
        "trained",
        "ln share of the prediction missing, none - add",
        "without residuals, the head reads the layer before the last less well ({shallow} blocks)",
    ),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------

FEWEST = 3
"""Blocks of a model that can have early, middle and late ones."""


class TextArms(Settings):
    """Next-byte prediction, with residuals and without."""

    depth: int = Field(ge=FEWEST)
    steps: int | None = Field(default=None, ge=1)
    """Null for those of all claims, which shares runs with them."""
    learning_rates: Rates


class ShallowArms(Settings):
    """Next-byte prediction at a depth at which a model without residuals may learn something, too."""

    depth: int = Field(ge=FEWEST)
    steps: int = Field(ge=1)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates
    wide: float = Field(gt=0)
    """The other start that each arm may choose: matrices of std `wide` / sqrt(width), not smaller with depth. Sharp
    attention from the start keeps tokens apart, without which a model without residuals hardly learns."""


class HopsArms(Settings):
    """Pointer chasing: what has to be found first is known."""

    depth: int = Field(ge=FEWEST)
    hops: int = Field(ge=2)
    batch: int = Field(ge=1)
    steps: int = Field(ge=1)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates


class Parameters(Section):
    """The section claims.layer_roles of params.yaml."""

    text: TextArms
    shallow: ShallowArms
    hops: HopsArms
    look: Look
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _shallow_is_shallower(self) -> Parameters:
        if self.shallow.depth >= self.text.depth:
            raise ValueError(
                f"shallow.depth {self.shallow.depth} is not less than text.depth {self.text.depth}; make it smaller"
            )
        return self

    def require(self, params: Params) -> None:
        if self.look.distant >= params.decoder.context:
            raise ValueError(
                f"look.distant {self.look.distant} is not within decoder.context {params.decoder.context}; lower it"
            )


def _judged(params: Params, **estimates: Estimate) -> list[Check]:
    section = params.claims.layer_roles
    task = hops_arm(params).config.task
    numbers = {
        "depth": section.text.depth,
        "shallow": section.shallow.depth,
        "depth_hops": section.hops.depth,
        "hops": section.hops.hops,
        "symbols": getattr(task, "symbols", 0),
        "distant": section.look.distant,
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- arms -----------------------------------------------------------------------------------------

KINDS = ("add", "none")
"""With residuals and without."""

HOPS = "hops: add"


def text_name(kind: str) -> str:
    return f"text: {kind}"


def shallow_name(params: Params, kind: str) -> str:
    return f"text: {kind}, {params.claims.layer_roles.shallow.depth} blocks"


def text_arms(params: Params) -> list[Arm]:
    """The runs that other claims train, too."""
    text = params.claims.layer_roles.text

    def config(kind: str) -> RunConfig:
        return decoder_run(params, text.depth, ConnectionConfig(kind), steps=text.steps)

    return [Arm(text_name(kind), config(kind), text.learning_rates) for kind in KINDS]


def shallow_arms(params: Params) -> list[Arm]:
    """Each may choose how it starts along with its rate."""
    shallow = params.claims.layer_roles.shallow

    def config(kind: str, **shape: Any) -> RunConfig:
        return decoder_run(params, shallow.depth, ConnectionConfig(kind), steps=shallow.steps, **shape)

    wide = {"weight_init": "plain", "init_std": shallow.wide / params.decoder.width**0.5}
    return [
        Arm(
            shallow_name(params, kind),
            config(kind),
            shallow.learning_rates,
            settings={"wide start": config(kind, **wide)},
        )
        for kind in KINDS
    ]


def hops_arm(params: Params) -> Arm:
    hops = params.claims.layer_roles.hops
    config = hops_run(params, hops.depth, hops=hops.hops, steps=hops.steps, batch=hops.batch)
    return Arm(HOPS, config, hops.learning_rates)


def arms(params: Params) -> list[Arm]:
    return [*text_arms(params), *shallow_arms(params), hops_arm(params)]


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm, and a start for the shallow ones."""
    section, sweep = params.claims.layer_roles, params.sweep
    stages = (
        (text_arms(params), sweep.steps),
        (shallow_arms(params), section.shallow.sweep_steps),
        ([hops_arm(params)], section.hops.sweep_steps),
    )
    return pd.concat(
        [choose_rates(some, sweep.model_copy(update={"steps": steps}), params.execution) for some, steps in stages],
        ignore_index=True,
    )


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds; the trained weights are kept."""
    return train_arms(arms(params), chosen, params.seeds, params.execution, weights=True)


# --- what was seen --------------------------------------------------------------------------------

Models = dict[str, list[Seen]]
"""What was seen in each arm's models, in the order of the seeds."""


def models(params: Params, trained: Runs, *, after: bool = True) -> Models:
    """The models of all arms, after training or before."""
    look, flat = params.claims.layer_roles.look, [record for records in trained.values() for record in records]
    found = iter(seen.see_all(flat, look, params.execution, trained=after))
    return {name: [next(found) for _ in records] for name, records in trained.items()}


# --- checks ---------------------------------------------------------------------------------------


def initial_changes(params: Params) -> pd.DataFrame:
    """See `layer_roles_exact.initial_changes`."""
    torch.set_num_threads(params.device.threads)
    return untrained.initial_changes(params.claims.layer_roles.exact)


def checks_initial(params: Params, changes: pd.DataFrame) -> list[Check]:
    """What the skip alone makes of blocks left out or exchanged."""
    return _judged(
        params,
        skip_order=mean_of(untrained.exponents(changes, "skip")),
        swap_order=mean_of(untrained.exponents(changes, "swap")),
        swap_none=mean_of(changes[changes["kind"] == "none"]["swap"].tolist()),
    )


def checks_controls(params: Params, found: Models, before: Models) -> list[Check]:
    """What must hold for the rest to mean anything; and how far a space is shared before training."""
    shallow = [found[shallow_name(params, kind)] for kind in KINDS]
    return _judged(
        params,
        shared_untrained=mean_of(_kept(before[text_name("add")])),
        unshared_untrained=mean_of(_kept(before[shallow_name(params, "none")])),
        gain_text=mean_of([model.gain for model in found[text_name("add")]]),
        gain_hops=mean_of([model.gain for model in found[HOPS]]),
        gain_shallow=mean_of([min(pair, key=_nan_first) for pair in zip(*map(_gains, shallow), strict=True)]),
    )


def _gains(found: Sequence[Seen]) -> list[float]:
    return [model.gain for model in found]


def _nan_first(value: float) -> float:
    """So that the least of values is not a number where one of them is not."""
    return value if value == value else float("-inf")


def checks_roles(params: Params, found: Models, before: Models) -> list[Check]:
    """Do layers specialise, with residuals?"""
    text, hops, start = found[text_name("add")], found[HOPS], before[text_name("add")]
    return _judged(
        params,
        lexical_early=mean_of(_slopes(text, CURRENT)),
        lexical_early_learned=paired_difference(_slopes(text, CURRENT), _slopes(start, CURRENT)),
        abstract_late=mean_of(_slopes(text, NEXT)),
        abstract_late_learned=paired_difference(_slopes(text, NEXT), _slopes(start, NEXT)),
        local_first=paired_difference(_centres(text, DISTANT), _centres(text, PREVIOUS)),
        local_before_abstract=paired_difference(_centres(text, NEXT), _centres(text, PREVIOUS)),
        lexical_early_hops=mean_of(_slopes(hops, hop_name(0))),
        steps_in_order=paired_difference(
            _centres(hops, hop_name(params.claims.layer_roles.hops.hops)), _centres(hops, hop_name(1))
        ),
        own_place=mean_of([model.cost(model.far) - model.cost(model.neighbours) for model in text]),
        own_place_hops=mean_of([model.cost(model.far) - model.cost(model.neighbours) for model in hops]),
    )


def _slopes(found: Sequence[Seen], name: str) -> list[float]:
    return [model.slope(name) for model in found]


def _centres(found: Sequence[Seen], name: str) -> list[float]:
    return [model.centre(name) for model in found]


def _kept(found: Sequence[Seen], *, recentred: bool = False) -> list[float]:
    return [model.kept(recentred=recentred) for model in found]


def checks_space(params: Params, found: Models) -> list[Check]:
    """Do neighbouring layers share a space, with residuals?"""
    text, hops = found[text_name("add")], found[HOPS]
    return _judged(
        params,
        shared_text=mean_of(_kept(text)),
        shared_hops=mean_of(_kept(hops)),
        shared_text_recentred=mean_of(_kept(text, recentred=True)),
        shared_hops_recentred=mean_of(_kept(hops, recentred=True)),
        neighbours_text=mean_of([model.cost(model.neighbours) for model in text]),
        neighbours_hops=mean_of([model.cost(model.neighbours) for model in hops]),
        lens_text=mean_of([model.lens[-2] for model in text]),
        lens_hops=mean_of([model.lens[-2] for model in hops]),
    )


def _slopes_of_learnt(params: Params, found: Sequence[Seen], name: str) -> list[float]:
    """Not a number for a model whose gain is at most what the control `gain_shallow` asks for."""
    least = params.claims.layer_roles.criteria.gain_shallow.above or 0.0  # type: ignore[attr-defined]
    return [model.slope(name) if model.gain > least else math.nan for model in found]


def comparisons(params: Params, found: Models) -> dict[str, tuple[list[float], list[float]]]:
    """What is compared at the same depth, by seed; the criterion is on the first less the second."""
    add, none = (found[shallow_name(params, kind)] for kind in KINDS)
    deep, deep_none = (found[text_name(kind)] for kind in KINDS)
    return {
        "lexical_only": (_slopes(add, CURRENT), _slopes(none, CURRENT)),
        "abstract_only": (_slopes(add, NEXT), _slopes(none, NEXT)),
        "lexical_only_deep": (_slopes(deep, CURRENT), _slopes_of_learnt(params, deep_none, CURRENT)),
        "abstract_only_deep": (_slopes(deep, NEXT), _slopes_of_learnt(params, deep_none, NEXT)),
        "shared_only": (_kept(add), _kept(none)),
        "shared_only_recentred": (_kept(add, recentred=True), _kept(none, recentred=True)),
        "neighbours_only": ([m.cost(m.neighbours) for m in none], [m.cost(m.neighbours) for m in add]),
        "skip_only": ([m.cost(m.skip) for m in none], [m.cost(m.skip) for m in add]),
        "repeat_only": ([m.cost(m.repeat) for m in none], [m.cost(m.repeat) for m in add]),
        "lens_only": ([math.log(m.lens[-2]) for m in none], [math.log(m.lens[-2]) for m in add]),
    }


def checks_only(params: Params, found: Models) -> list[Check]:
    """Only with residuals?"""
    differences = {name: paired_difference(*pair) for name, pair in comparisons(params, found).items()}
    add, none = (found[shallow_name(params, kind)] for kind in KINDS)
    return _judged(
        params,
        shared_shallow=mean_of(_kept(add)),
        unshared_none=mean_of(_kept(none)),
        unshared_none_recentred=mean_of(_kept(none, recentred=True)),
        **differences,
    )


# --- tables ---------------------------------------------------------------------------------------


def skill_table(found: Models) -> pd.DataFrame:
    """Mean skill of the probes of each place: a row an arm and property, a column a place."""
    rows = {
        (arm, name): pd.DataFrame([model.own(name) for model in each]).mean(skipna=False)
        for arm, each in found.items()
        for name in each[0].skills
    }
    return pd.DataFrame(rows).T


def cost_table(found: Models) -> pd.DataFrame:
    """Mean cost of each kind of surgery, a share of the gain, and what neighbours share; a row an arm."""
    measures = {
        "gain (nats)": lambda m: m.gain,
        "left out": lambda m: m.cost(m.skip),
        "run twice": lambda m: m.cost(m.repeat),
        "neighbours exchanged": lambda m: m.cost(m.neighbours),
        "far ones exchanged": lambda m: m.cost(m.far),
        "read by the neighbour's probe": lambda m: m.kept(),
        "the same, recentred": lambda m: m.kept(recentred=True),
        "lens: missing at the last but one": lambda m: m.lens[-2],
    }
    return pd.DataFrame(
        {
            name: {arm: str(mean_of([of(m) for m in each])) for arm, each in found.items()}
            for name, of in measures.items()
        }
    )


def power_table(params: Params, found: Models) -> pd.DataFrame:
    """The smallest true difference that each comparison would show in 4 of 5 such trials."""
    pairs = comparisons(params, found).items()
    smallest = {name: detectable([a - b for a, b in zip(*pair, strict=True)]) for name, pair in pairs}
    return pd.DataFrame({"smallest detectable difference": smallest})


# --- published numbers ----------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    return [
        Published(
            what="share of accuracy lost when a layer is deleted or two neighbours are exchanged",
            published="0.05 to 0.28",
            ours=ours["neighbours_text"] + " of the gain lost, neighbours exchanged",
            source="Lad et al. 2024, arXiv 2406.19384 (second-hand)",
        ),
        Published(
            what="order in which a language model finds things",
            published="from local syntax to semantics, as in the classical pipeline",
            ours=ours["local_first"] + " of the depth later for the distant byte",
            source="Tenney et al. 2019, arXiv 1905.05950",
        ),
        Published(
            what="blocks of a trained residual net reordered",
            published="error rises smoothly with the number of exchanges",
            ours=ours["own_place"] + " of the gain more for far exchanges than for near ones",
            source="Veit et al. 2016, arXiv 1605.06431",
        ),
    ]
