"""Claim 03: branches that start near zero: who gains from them, and at which depth (A4.3c, A5.1a, A5.1b)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator, model_validator

from reslab import data
from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, each, held_out, train_arms
from reslab.experiments.layerscale_depth_exact import Exact, closed_networks, exact_estimates, jacobians
from reslab.experiments.layerscale_depth_opening import closing_cost, effective_depths, opening_table
from reslab.experiments.runs import ENDS, decoder_run, ends_run, image_run, require_depths
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.stats import Estimate, detectable, mean_of, paired_difference, share_of, slope
from reslab.training import RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does LayerScale pay in deep models, and does ReZero open from zero?"
STATEMENT = (
    "A learnt scale on every branch that starts near zero makes 1000 layers trainable: the network starts effectively "
    "shallow and opens up gradually. LayerScale gains from about 24 layers on; shallow models may lose by it."
)
KEY = "deep_small"

PLAIN = "Pre-LN"
LARGE = "LayerScale 0.1"
SMALL = "LayerScale 1e-4"
REZERO = "ReZero"
SKIPINIT = "SkipInit"

METHODS: dict[str, Callable[[int], ConnectionConfig]] = {
    PLAIN: lambda depth: ConnectionConfig("add"),
    LARGE: lambda depth: ConnectionConfig("layerscale", initial=0.1),
    SMALL: lambda depth: ConnectionConfig("layerscale", initial=1e-4),
    REZERO: lambda depth: ConnectionConfig("rezero"),
    SKIPINIT: lambda depth: ConnectionConfig("skipinit", initial=depth**-0.5),
}
"""The connection of each method in a model of so many blocks; all with a norm before each sublayer."""

LAYERSCALES = {"large": LARGE, "small": SMALL}
"""By their part of a check's name."""


def _gain_questions(prefix: str, model: str, unit: str) -> dict[str, Question]:
    """Sentence A5.1b on one task, for each LayerScale."""
    asked: dict[str, tuple[str, str]] = {}
    for size, method in LAYERSCALES.items():
        asked |= {
            f"{prefix}shallow_{size}": (unit, f"{method} gains nothing in {model} of {{{prefix}shallow}} blocks"),
            f"{prefix}appears_{size}": (unit, f"{method} gains in {model} of {{appears_at}} blocks"),
            f"{prefix}deep_{size}": (unit, f"{method} gains in {model} of {{{prefix}deep}} blocks"),
            f"{prefix}slope_{size}": (
                f"{unit} per doubling of depth",
                f"the gain of {method} in {model} grows with depth",
            ),
        }
    return {name: Question("A5.1b", "trained", *question) for name, question in asked.items()}


QUESTIONS = {
    # untrained
    "closed_loss": Question(
        "A5.1a",
        "control",
        "nats between depths",
        "at scale 0 the loss is the same at every depth, to {thousand} blocks",
    ),
    "closed_branches": Question(
        "A5.1a",
        "control",
        "largest gradient",
        "at scale 0 no weight of a branch has a gradient: only its scale can open it",
    ),
    "closed_scales": Question("A5.1a", "exact", "smallest gradient", "at scale 0 every scale has a gradient"),
    "jacobian_zero": Question(
        "A4.3c", "control", "|mean squared singular value - 1|", "at scale 0 the Jacobian of the stack is the identity"
    ),
    "jacobian_rezero": Question(
        "A4.3c",
        "exact",
        "log10 of mean squared singular value",
        "ReZero at scale 0.1 passes signals within a factor of ten through {jacobian} blocks",
    ),
    "jacobian_pre": Question(
        "A4.3c",
        "exact",
        "log10 of mean squared singular value",
        "Pre-LN enlarges them more than tenfold ({jacobian} blocks)",
    ),
    "jacobian_post": Question(
        "A4.3c",
        "exact",
        "log10 of mean squared singular value",
        "Post-LN shrinks them more than tenfold ({jacobian} blocks)",
    ),
    "thousand_passes": Question(
        "A4.3c",
        "exact",
        "|squared size passed on - 1|",
        "{thousand} untrained blocks at scale 1e-4 pass a gradient on within 1 %",
    ),
    # trained at 1000 blocks
    "thousand_rezero": Question(
        "A4.3c",
        "trained",
        "share of runs",
        "the loss of {thousand} blocks with ReZero falls below random guessing by {trains_from:g} nats, "
        "in {thousand_steps} steps",
    ),
    "thousand_layerscale": Question(
        "A4.3c", "trained", "share of runs", f"with {SMALL} the loss of {{thousand}} blocks falls so far"
    ),
    "thousand_plain": Question(
        "A4.3c",
        "trained",
        "share of runs",
        "without a scale the loss of {thousand} blocks does not fall so far, so that it is what helps",
    ),
    "thousand_over_ends_rezero": Question(
        "A4.3c",
        "trained",
        "nats per byte gained",
        "{thousand} blocks with ReZero end below the embedding and head trained alone",
    ),
    "thousand_over_ends_layerscale": Question(
        "A4.3c", "trained", "nats per byte gained", f"{{thousand}} blocks with {SMALL} do, too"
    ),
    "thousand_over_ends_plain": Question(
        "A4.3c",
        "trained",
        "nats per byte gained",
        "without a scale {thousand} blocks do not end below the embedding and head trained alone",
    ),
    "thousand_gain": Question(
        "A4.3c",
        "trained",
        "nats per byte gained",
        "ReZero beats plain Pre-LN at {thousand} blocks, each at its own best rate",
    ),
    "thousand_used": Question(
        "A4.3c",
        "trained",
        "nats per byte lost",
        "the {thousand} blocks take part: closing them again costs ReZero loss",
    ),
    "thousand_used_layerscale": Question(
        "A4.3c", "trained", "nats per byte lost", f"the {{thousand}} blocks take part: closing them costs {SMALL} loss"
    ),
    # how the network opens
    "early_rezero": Question(
        "A5.1a",
        "trained",
        "effective depth over plain's",
        "after {early:.0%} of training ReZero is effectively less than half as deep as plain ({looked_at} blocks)",
    ),
    "early_small": Question(
        "A5.1a", "trained", "effective depth over plain's", f"after {{early:.0%}} of training {SMALL} is so too"
    ),
    "gradual_rezero": Question(
        "A5.1a",
        "trained",
        "effective depth over its last",
        "ReZero opens gradually: after {early:.0%} of training it has not half the effective depth it ends with",
    ),
    "gradual_small": Question("A5.1a", "trained", "effective depth over its last", f"{SMALL} opens gradually, too"),
    # gain by depth
    "learns": Question(
        "A5.1b",
        "control",
        "nats below unigram entropy",
        "the plain decoder of {shallow} blocks has learnt from the context",
    ),
    "image_learns": Question(
        "A5.1b", "control", "accuracy", "the plain image encoder of {image_shallow} blocks has learnt its task"
    ),
    **_gain_questions("", "decoders", "nats per byte gained"),
    **_gain_questions("image_", "image encoders", "points of accuracy gained"),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Images(Settings):
    """The image encoders: CaiT's own setting, in small."""

    depths: tuple[int, ...]
    """Blocks, increasing."""
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    batch: int = Field(ge=1, le=data.DIGITS_FOR_TRAINING)
    steps: int = Field(ge=1)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates

    _depths_increase = field_validator("depths")(require_depths)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Images:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        return self


class Thousand(Settings):
    """The very deep and narrow decoders."""

    depth: int = Field(ge=2)
    """Blocks."""
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    context: int = Field(ge=2)
    batch: int = Field(ge=1)
    steps: int = Field(ge=2)
    sweep_steps: int = Field(ge=1)
    evaluation_windows: int = Field(ge=1)
    learning_rates: Rates
    trains_from: float = Field(gt=0)
    """How many nats below ln 256, that of random guessing, the held-out loss has to fall."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Thousand:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        return self


class Parameters(Section):
    """The section claims.layerscale_depth of params.yaml."""

    depths: tuple[int, ...]
    """Blocks of the decoders, increasing."""
    appears_at: int
    """Where the sentence says the gain appears; also the depth whose scales and shares are looked at."""
    steps: int = Field(ge=4)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates
    early: float = Field(gt=0, lt=0.5)
    """What counts as early in training, as a fraction of the steps."""
    images: Images
    thousand: Thousand
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    _depths_increase = field_validator("depths")(require_depths)

    @model_validator(mode="after")
    def _fits(self) -> Parameters:
        for name, depths in (("depths", self.depths), ("images.depths", self.images.depths)):
            if self.appears_at not in depths[1:]:
                raise ValueError(f"appears_at {self.appears_at} must be one of {name} after the first, {list(depths)}")
        if self.thousand.depth <= max(self.depths):
            raise ValueError(
                f"thousand.depth {self.thousand.depth} must be larger than the deepest of {list(self.depths)}"
            )
        if len(set(self.stages)) < len(self.stages):
            raise ValueError(f"early {self.early:g} of {self.steps} steps is too short; it needs at least 2 steps")
        return self

    @property
    def stages(self) -> tuple[int, ...]:
        """Updates after which the shares of the branches are measured: none, early/2, early, 2 early, all."""
        early = round(self.early * self.steps)
        return (0, early // 2, early, min(2 * early, self.steps - 1), self.steps)


# --- exact checks ---------------------------------------------------------------------------------


def initial_jacobians(params: Params) -> pd.DataFrame:
    """See `layerscale_depth_exact.jacobians`."""
    torch.set_num_threads(params.device.threads)
    return jacobians(params.claims.layerscale_depth.exact)


def initial_closed(params: Params) -> pd.DataFrame:
    """See `layerscale_depth_exact.closed_networks`; the depths of the decoders and the very deep one."""
    section = params.claims.layerscale_depth
    torch.set_num_threads(params.device.threads)
    return closed_networks(section.exact, [*section.depths, section.thousand.depth])


def checks_initial(params: Params, chis: pd.DataFrame, closed: pd.DataFrame) -> list[Check]:
    """Sentences A4.3c and A5.1a without training."""
    return _judged(params, exact_estimates(chis, closed))


def _judged(params: Params, estimates: dict[str, Estimate]) -> list[Check]:
    section = params.claims.layerscale_depth
    numbers = {
        "shallow": section.depths[0],
        "deep": section.depths[-1],
        "image_shallow": section.images.depths[0],
        "image_deep": section.images.depths[-1],
        "appears_at": section.appears_at,
        "looked_at": section.appears_at,
        "thousand": section.thousand.depth,
        "thousand_steps": section.thousand.steps,
        "trains_from": section.thousand.trains_from,
        "jacobian": section.exact.depths[-1],
        "early": section.early,
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- trained arms ---------------------------------------------------------------------------------


def arm_name(method: str, depth: int, *, images: bool = False) -> str:
    return f"{method}, {depth} blocks" + (", images" if images else "")


def depths_of(params: Params, method: str, *, images: bool = False) -> tuple[int, ...]:
    """The depths a method is trained at."""
    section = params.claims.layerscale_depth
    if images:
        return section.images.depths if method in IMAGE_METHODS else ()
    return section.depths


IMAGE_METHODS = (PLAIN, LARGE, SMALL)
THOUSAND_METHODS = (PLAIN, SMALL, REZERO)
CLOSED_METHODS = (SMALL, REZERO)
"""Those at a thousand blocks whose scales can be set to 0 again."""
OPENING_METHODS = (PLAIN, SMALL, REZERO)


def decoder_arms(params: Params) -> list[Arm]:
    section = params.claims.layerscale_depth
    return [
        Arm(
            arm_name(method, depth),
            decoder_run(params, depth, connect(depth), steps=section.steps),
            section.learning_rates,
        )
        for method, connect in METHODS.items()
        for depth in depths_of(params, method)
    ]


def image_arms(params: Params) -> list[Arm]:
    """Matrices start `plain`, not smaller with depth, as in the models that LayerScale was made for."""
    section = params.claims.layerscale_depth.images
    shape: dict[str, Any] = section.model_dump(include={"steps", "batch", "width", "heads"})
    arms = []
    for method in IMAGE_METHODS:
        for depth in section.depths:
            config = image_run(params, depth, METHODS[method](depth), **shape)
            plain = config.model.model_copy(update={"weight_init": "plain"})
            config = config.model_copy(update={"model": plain})
            arms.append(Arm(arm_name(method, depth, images=True), config, section.learning_rates))
    return arms


def thousand_arms(params: Params) -> list[Arm]:
    """The very deep decoders: narrow, with few and short sequences; and what they are without their blocks."""
    section = params.claims.layerscale_depth.thousand
    shape = section.model_dump(include={"width", "heads", "context"}) | {"init_std": 0.55 / section.width**0.5}
    small = params.model_copy(
        update={
            "decoder": params.decoder.model_copy(update=shape),
            "evaluation_windows": section.evaluation_windows,
            "optimisation": params.optimisation.model_copy(update={"batch": section.batch}),
        }
    )

    configs = {
        arm_name(method, section.depth): decoder_run(
            small, section.depth, METHODS[method](section.depth), steps=section.steps
        )
        for method in THOUSAND_METHODS
    }
    configs[ENDS] = ends_run(small, steps=section.steps)
    return [Arm(name, config, section.learning_rates) for name, config in configs.items()]


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    section = params.claims.layerscale_depth
    sweeps = (
        (decoder_arms(params), section.sweep_steps),
        (image_arms(params), section.images.sweep_steps),
        (thousand_arms(params), section.thousand.sweep_steps),
    )
    tables = [choose_rates(arms, params.sweep.of(steps), params.execution) for arms, steps in sweeps]
    return pd.concat(tables, ignore_index=True)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds; with weights where they are looked into."""
    looked_into = {arm_name(method, params.claims.layerscale_depth.appears_at) for method in METHODS}
    looked_into |= {arm_name(method, params.claims.layerscale_depth.thousand.depth) for method in CLOSED_METHODS}
    arms = [*decoder_arms(params), *image_arms(params), *thousand_arms(params)]
    trained: Runs = {}
    for weights in (True, False):
        part = [arm for arm in arms if (arm.name in looked_into) == weights]
        trained |= train_arms(part, chosen, params.seeds, params.execution, weights=weights)
    return {arm.name: trained[arm.name] for arm in arms}


# --- gain by depth --------------------------------------------------------------------------------


def gain(trained: Runs, method: str, depth: int, *, images: bool = False) -> list[float]:
    """What a method gains over plain Pre-LN of the same depth, seed by seed; not a number where either diverged.

    Nats per byte of test loss; for images points of test accuracy.
    """
    ours, plain = (trained[arm_name(name, depth, images=images)] for name in (method, PLAIN))
    if images:
        pairs = zip(held_out(ours, "test_accuracy"), held_out(plain, "test_accuracy"), strict=True)
        return [100 * (own - other) for own, other in pairs]
    return [other - own for own, other in zip(held_out(ours), held_out(plain), strict=True)]


def gain_slopes(trained: Runs, method: str, depths: Sequence[int], *, images: bool = False) -> list[float]:
    """Each seed's slope of the gain against log2 of the depth; not a number where a gain was not measured."""
    by_seed = zip(*(gain(trained, method, depth, images=images) for depth in depths), strict=True)
    doublings = np.log2(depths).tolist()
    return [slope(doublings, gains) if all(map(math.isfinite, gains)) else math.nan for gains in by_seed]


def gain_table(params: Params, trained: Runs) -> pd.DataFrame:
    """Every gain with its interval, and the smallest that this many seeds of this spread would have shown."""
    rows = []
    for images, unit in ((False, "nats per byte"), (True, "points of accuracy")):
        for method in [name for name in METHODS if name != PLAIN]:
            for depth in depths_of(params, method, images=images):
                gains = gain(trained, method, depth, images=images)
                rows.append(
                    {
                        "task": "images" if images else "text",
                        "method": method,
                        "depth": depth,
                        "gain [95 % interval]": str(mean_of(gains)),
                        "unit": unit,
                        "detectable": detectable(gains),
                    }
                )
    return pd.DataFrame(rows).set_index(["task", "method", "depth"])


def checks_gain(params: Params, trained: Runs) -> list[Check]:
    """Sentence A5.1b: who gains at which depth."""
    section = params.claims.layerscale_depth
    shallow = trained[arm_name(PLAIN, section.depths[0])]
    shallow_images = trained[arm_name(PLAIN, section.images.depths[0], images=True)]
    estimates = {
        "learns": mean_of(each(shallow, lambda record: record.context_free_loss - (record.test_loss or math.nan))),
        "image_learns": mean_of(held_out(shallow_images, "test_accuracy")),
    }
    for prefix, images in (("", False), ("image_", True)):
        for size, method in LAYERSCALES.items():
            depths = depths_of(params, method, images=images)
            places = {"shallow": depths[0], "appears": section.appears_at, "deep": depths[-1]}
            for place, depth in places.items():
                estimates[f"{prefix}{place}_{size}"] = mean_of(gain(trained, method, depth, images=images))
            estimates[f"{prefix}slope_{size}"] = mean_of(gain_slopes(trained, method, depths, images=images))
    return _judged(params, estimates)


# --- how the network opens ------------------------------------------------------------------------


def openings(params: Params, trained: Runs) -> pd.DataFrame:
    """Share and scale of every branch over training, at the depth `appears_at`: see `opening_table`."""
    section = params.claims.layerscale_depth
    torch.set_num_threads(params.device.threads)
    records = {method: trained[arm_name(method, section.appears_at)] for method in OPENING_METHODS}
    return opening_table(records, section.stages)


def checks_opening(params: Params, opened: pd.DataFrame) -> list[Check]:
    """Sentence A5.1a: shallow early, deeper later."""
    _, _, early, _, last = params.claims.layerscale_depth.stages

    def ratio(above: tuple[str, int], below: tuple[str, int]) -> Estimate:
        pairs = zip(effective_depths(opened, *above), effective_depths(opened, *below), strict=True)
        return mean_of([own / other if other else math.nan for own, other in pairs])

    return _judged(
        params,
        {
            "early_rezero": ratio((REZERO, early), (PLAIN, early)),
            "early_small": ratio((SMALL, early), (PLAIN, early)),
            "gradual_rezero": ratio((REZERO, early), (REZERO, last)),
            "gradual_small": ratio((SMALL, early), (SMALL, last)),
        },
    )


# --- a thousand blocks ----------------------------------------------------------------------------


def trains(params: Params, record: RunRecord) -> bool:
    """Is the held-out loss `trains_from` nats below that of guessing at random, and all finite?"""
    fallen = math.log(data.VOCABULARY) - (record.test_loss if record.test_loss is not None else math.inf)
    return record.outcome != "diverged" and fallen > params.claims.layerscale_depth.thousand.trains_from


def closing_costs(params: Params, trained: Runs) -> dict[str, list[float]]:
    """By method and seed, what closing the thousand blocks again costs: see `closing_cost`."""
    depth = params.claims.layerscale_depth.thousand.depth
    return {method: each(trained[arm_name(method, depth)], closing_cost) for method in CLOSED_METHODS}


def thousand_table(params: Params, trained: Runs, costs: dict[str, list[float]]) -> pd.DataFrame:
    """Test losses at a thousand blocks, as trained and closed again, and that of embedding and head alone."""
    rows = {}
    for method in (*THOUSAND_METHODS, ENDS):
        name = ENDS if method == ENDS else arm_name(method, params.claims.layerscale_depth.thousand.depth)
        losses = held_out(trained[name])
        rows[name] = {"test loss": str(mean_of(losses)), "closed again": ""}
        if method in costs:
            closed = [loss + cost for loss, cost in zip(losses, costs[method], strict=True)]
            rows[name]["closed again"] = str(mean_of(closed))
    return pd.DataFrame(rows).T


def checks_thousand(params: Params, trained: Runs, costs: dict[str, list[float]]) -> list[Check]:
    """Sentence A4.3c: do a thousand blocks train, and do they need a start near zero?"""
    depth = params.claims.layerscale_depth.thousand.depth
    plain, small, rezero = (trained[arm_name(method, depth)] for method in THOUSAND_METHODS)
    ends = held_out(trained[ENDS])

    def share(records: list[RunRecord]) -> Estimate:
        return share_of([trains(params, record) for record in records])

    return _judged(
        params,
        {
            "thousand_rezero": share(rezero),
            "thousand_layerscale": share(small),
            "thousand_plain": share(plain),
            "thousand_over_ends_rezero": paired_difference(ends, held_out(rezero)),
            "thousand_over_ends_layerscale": paired_difference(ends, held_out(small)),
            "thousand_over_ends_plain": paired_difference(ends, held_out(plain)),
            "thousand_gain": paired_difference(held_out(plain), held_out(rezero)),
            "thousand_used": mean_of(costs[REZERO]),
            "thousand_used_layerscale": mean_of(costs[SMALL]),
        },
    )


# --- published numbers ----------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    cait = "Touvron et al. 2021, CaiT, arXiv 2103.17239 (second-hand)"
    isometry = "Bachlechner et al. 2020, ReZero, arXiv 2003.04887, authors' notebook"

    def both(name: str) -> str:
        return f"0.1: {ours[f'{name}_large']}; 1e-4: {ours[f'{name}_small']}"

    return [
        Published(
            what="points of ImageNet accuracy gained by LayerScale, shallowest model",
            published="+0.6 at 12 blocks (79.9 to 80.5), scale 0.1 at the start; +1.6 at 18 (80.1 to 81.7)",
            ours=both("image_shallow"),
            source=cait,
        ),
        Published(
            what="the same at 24 blocks",
            published="+3.5 (78.9 to 82.4), scale 1e-5 at the start",
            ours=both("image_appears"),
            source=cait,
        ),
        Published(
            what="the same in the deepest model",
            published="+4.0 at 36 blocks (78.9 to 82.9), scale 1e-6 at the start",
            ours=both("image_deep"),
            source=cait,
        ),
        Published(
            what="counter-evidence: LayerScale in a language model (nats gained, deepest)",
            published="LLaMA-130M perplexity: Pre-LN 26.73, LayerScale 27.93 (-0.044 nats), SkipInit 27.41 (-0.025)",
            ours=both("deep"),
            source="Sun et al. 2025, arXiv 2502.05795",
        ),
        Published(
            what="log10 of the mean squared singular value, ReZero at 0.1",
            published="0.025 at 12 blocks (1.059), 0.33 at 128 (2.14)",
            ours=ours["jacobian_rezero"],
            source=isometry,
        ),
        Published(
            what="the same, Pre-LN",
            published="1.01 at 12 blocks (10.24), 1.82 at 128 (66.3)",
            ours=ours["jacobian_pre"],
            source=isometry,
        ),
        Published(
            what="the same, Post-LN",
            published="-0.09 at 12 blocks (.810), below -3 at 128 (.000)",
            ours=ours["jacobian_post"],
            source=isometry,
        ),
    ]
