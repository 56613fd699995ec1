"""Claim 01: without residual connections a Transformer does not break, it collapses (sentences A1 to A3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator
from torch.nn.attention import SDPBackend, sdpa_kernel

from reslab import collapse, data
from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, each, held_out, profile_of, train_arms
from reslab.curves import SPIKE, context_free_losses, excess_losses, spikes
from reslab.experiments.runs import ENDS, decoder_run, ends_run
from reslab.models.decoder import DecoderConfig
from reslab.models.resnet import ResNetConfig
from reslab.probes import stream_profile
from reslab.residuals import ConnectionConfig, Placement
from reslab.schema import Settings
from reslab.stats import (
    Estimate,
    deterministic,
    detrended,
    fisher_g,
    mean_of,
    paired_difference,
    unexplained_share,
)
from reslab.training import Optimisation, RunConfig, RunRecord, build

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does a Transformer collapse without residual connections?"
STATEMENT = (
    "Set the skip weight to 0 in every block: the model still runs, but its loss falls only for a few steps and then "
    "stays near the best context-free guess; token representations become alike layer by layer; gradients do not pass."
)
KEY = "loss_gap"


QUESTIONS = {
    # untrained
    "collapse_exponent": Question(
        "A2.2",
        "exact",
        "log-log slope",
        "bidirectional attention alone cubes its distance from rank one at every layer",
    ),
    "causal_halving": Question(
        "A2.2",
        "control",
        "ratio",
        "causal attention with equal weights halves its distance from rank one at every layer",
    ),
    "cosine_none": Question(
        "A2.2", "exact", "token cosine", "without skips the tokens point one way after {shallow} untrained blocks"
    ),
    "cosine_pre": Question(
        "A2.2", "exact", "token cosine", "with skips (Pre-LN) they do not, even after {deep} untrained blocks"
    ),
    "cosine_post": Question(
        "A2.2", "exact", "token cosine", "with skips (Post-LN) they do not, even after {deep} untrained blocks"
    ),
    "cosine_rezero": Question(
        "A2.2", "control", "change of token cosine", "ReZero's branches are closed: the token cosine is the embedding's"
    ),
    "gradient_plain": Question(
        "A2.1",
        "exact",
        "size of ln factor per block",
        "without skips and norms the gradient changes by more than 10 % a block (mean over {deep} untrained blocks)",
    ),
    "gradient_none": Question(
        "A2.1",
        "exact",
        "size of ln factor per block",
        "without skips but with norms it does so too (mean over {deep} untrained blocks)",
    ),
    "gradient_pre": Question(
        "A2.1",
        "exact",
        "size of ln factor per block",
        "with skips (Pre-LN) it changes by less than 10 % a block (mean over {deep} untrained blocks)",
    ),
    "hull_excess": Question(
        "A3.1h", "control", "excess", "attention outputs stay inside the range of their values in every coordinate"
    ),
    "spread_left": Question(
        "A3.1h", "exact", "share of the range", "after 12 attention layers little of the values' range is left"
    ),
    # trained
    "never_diverges": Question(
        "A1",
        "trained",
        "runs diverged",
        "without skips no run blows up: short ones at all rates tried, full ones at the best of them",
    ),
    "never_spikes": Question(
        "A1",
        "trained",
        "runs that spiked or diverged",
        "without skips no full run's loss, less the guess's on the same batches, jumps by {spike:g} nats",
    ),
    "loss_falls": Question(
        "A1", "trained", "nats per byte", "without skips the loss falls from its start to a plateau"
    ),
    "near_context_free": Question(
        "A1",
        "trained",
        "nats above unigram entropy",
        "its test loss ends level with that of the best guess that ignores the context",
    ),
    "above_guessing": Question(
        "A1", "trained", "accuracy gained", "its test accuracy ends slightly above that of guessing the commonest byte"
    ),
    "loss_gap": Question(
        "A1",
        "trained",
        "nats per byte, without - with skips",
        "without skips the model stays near guessing, with skips it learns: each at the best of the rates tried",
    ),
    "blocks_take_part": Question(
        "A1",
        "trained",
        "nats per byte gained",
        "with skips the blocks take part: the model ends below embedding and head trained alone",
    ),
    "resnet_learns": Question("A1r", "control", "test accuracy", "the ResNet with its skips learns the task"),
    "resnet_removed": Question(
        "A1r", "trained", "accuracy lost", "in a ResNet of moderate depth removing the skips costs little accuracy"
    ),
    "resnet_shrunk": Question(
        "A1r", "trained", "accuracy lost", "in a ResNet shrinking the skips to {shrunk:g} costs little accuracy"
    ),
    "gradient_trained_none": Question(
        "A2.1",
        "trained",
        "log10 (first / last), floored at float32's epsilon, -6.92",
        "after training without skips less than a hundredth of the gradient reaches the embedding",
    ),
    "gradient_trained_skip": Question(
        "A2.1",
        "trained",
        "log10 (first / last)",
        "after training with skips the gradient at the embedding is within a factor of ten of the last block's",
    ),
    "rank_trained_none": Question(
        "A2.2", "trained", "effective rank", "after training without skips the last block's tokens are of rank one"
    ),
    "rank_trained_skip": Question(
        "A2.2", "trained", "effective rank", "after training with skips their rank stays high"
    ),
    "tokens_alike": Question(
        "A3.1", "trained", "token cosine", "after training without skips all tokens point one way"
    ),
    "layers_alike": Question(
        "A3.1", "trained", "cosine of neighbours", "the outputs of the last {last} blocks are nearly identical"
    ),
    "not_batch_noise": Question(
        "A1",
        "trained",
        "variance not explained by the batch",
        "the plateau oscillates: most of its ups and downs are not those of the guess on the same batches",
    ),
    "periodic": Question(
        "A3.2",
        "trained",
        "share of power at one frequency",
        "the plateau oscillates regularly: one frequency stands out more than in the batches' own noise",
    ),
    "less_calm": Question(
        "A3.2",
        "trained",
        "std without / with skips",
        "with skips training is calmer: its loss, less the guess's on the same batches, varies less about its trend",
    ),
    "shifted": Question(
        "A3.2",
        "trained",
        "shift without / with skips",
        "without skips each layer's output, which replaces its input, is shifted further against it",
    ),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


EXACT_HEADS = 4
"""Heads of the decoders that are checked at their initial weights."""


class Exact(Settings):
    """Size of the checks at initial weights."""

    depths: tuple[int, ...] = Field(min_length=1)
    """Blocks of the decoders whose token cosine and gradients are measured, increasing."""
    seeds: int = Field(ge=2)
    tokens: int = Field(ge=8)
    width: int = Field(ge=8, multiple_of=EXACT_HEADS)

    @field_validator("depths")
    @classmethod
    def _depths_increase(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        if min(depths) < 2 or list(depths) != sorted(set(depths)):
            raise ValueError(f"depths must increase from at least 2, got {list(depths)}")
        return depths


class ResNetArms(Settings):
    """The image net of sentence A1r."""

    channels: int = Field(ge=1)
    depth: int = Field(ge=1)
    batch: int = Field(ge=1, le=data.DIGITS_FOR_TRAINING)
    steps: int = Field(ge=1)
    learning_rates: Rates


FEWEST_STEPS = 12
"""Half of them make a plateau with a trend and at least two frequencies."""


class Parameters(Section):
    """The section claims.no_residual_collapse of params.yaml."""

    depth: int = Field(ge=2)
    skips: tuple[float, ...]
    """Weights of the skip, from 0 (none) to 1 (the standard residual)."""
    learning_rates: Rates
    ends_learning_rates: Rates
    """Of embedding and head trained alone."""
    resnet: ResNetArms
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    def require(self, params: Params) -> None:
        if params.optimisation.steps < FEWEST_STEPS:
            raise ValueError(f"its plateau needs optimisation.steps of at least {FEWEST_STEPS}")

    @field_validator("skips")
    @classmethod
    def _from_none_to_full(cls, skips: tuple[float, ...]) -> tuple[float, ...]:
        if len(skips) < 3 or list(skips) != sorted(set(skips)) or skips[0] != 0 or skips[-1] != 1:
            raise ValueError(f"skips must increase from 0 to 1 with at least one between, got {list(skips)}")
        return skips


# --- exact checks at initial weights --------------------------------------------------------------

INITIAL_ARMS: dict[str, tuple[str, Placement]] = {
    "no skip, no norm": ("none", "none"),
    "no skip": ("none", "pre"),
    "Post-LN": ("add", "post"),
    "Pre-LN": ("add", "pre"),
    "ReZero": ("rezero", "pre"),
}


def initial_profiles(params: Params) -> pd.DataFrame:
    """Token cosine and gradient slope of untrained decoders; one row for each arm, depth and seed.

    `gradient_slope` is ln|dLoss/dx_0| - ln|dLoss/dx_L| per block: the factor by which going back one block
    multiplies the gradient, as a logarithm. Random tokens; matrices of std 1/sqrt(d); float64.
    """
    exact = params.claims.no_residual_collapse.exact
    torch.set_num_threads(params.device.threads)
    rows = []
    for depth in exact.depths:
        for seed in range(exact.seeds):
            tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, data.VOCABULARY, (1, exact.tokens + 1)))
            for arm, (kind, placement) in INITIAL_ARMS.items():
                config = DecoderConfig(
                    width=exact.width,
                    heads=EXACT_HEADS,
                    context=exact.tokens,
                    vocabulary=data.VOCABULARY,
                    depth=depth,
                    init_std=exact.width**-0.5,
                    weight_init="plain",
                    connection=ConnectionConfig(kind=kind),
                    placement=placement,
                )
                model = build(config, seed).double()
                with sdpa_kernel(SDPBackend.MATH):  # the fused backward is not finite at logits of 1e19
                    profile = stream_profile(model, tokens[:, :-1], tokens[:, 1:])
                gradient = profile["gradient_norm"]
                rows.append(
                    {
                        "arm": arm,
                        "depth": depth,
                        "seed": seed,
                        "embedding_cosine": profile["token_cosine"][0],
                        "token_cosine": profile["token_cosine"][-1],
                        "gradient_slope": math.log(gradient[0] / gradient[-1]) / depth,
                    }
                )
    return pd.DataFrame(rows)


def checks_initial(params: Params, profiles: pd.DataFrame) -> list[Check]:
    """Sentences A2.1, A2.2 and A3.1h without training."""
    exact = params.claims.no_residual_collapse.exact
    seeds, shallow, deep = range(exact.seeds), exact.depths[0], exact.depths[-1]

    def measured(arm: str, depth: int, column: str) -> list[float]:
        chosen = profiles[(profiles["arm"] == arm) & (profiles["depth"] == depth)]
        values: list[float] = chosen.sort_values("seed")[column].tolist()
        return values

    def slopes(arm: str) -> Estimate:
        return mean_of([abs(value) for value in measured(arm, deep, "gradient_slope")])

    halving = [collapse.causal_uniform_residuals(40, exact.tokens, exact.width, seed)[-2:] for seed in seeds]
    spreads = [collapse.attention_only_spread(12, exact.tokens, exact.width, seed) for seed in seeds]
    excess = [collapse.hull_excess(exact.tokens, exact.width, seed) for seed in seeds]
    rezero = [measured("ReZero", deep, column) for column in ("token_cosine", "embedding_cosine")]
    return _judged(
        params,
        collapse_exponent=mean_of([collapse.collapse_exponent(4, 32, 32, seed) for seed in seeds]),
        causal_halving=mean_of([after / before for before, after in halving]),
        cosine_none=mean_of(measured("no skip", shallow, "token_cosine")),
        cosine_pre=mean_of(measured("Pre-LN", deep, "token_cosine")),
        cosine_post=mean_of(measured("Post-LN", deep, "token_cosine")),
        cosine_rezero=paired_difference(*rezero),
        gradient_plain=slopes("no skip, no norm"),
        gradient_none=slopes("no skip"),
        gradient_pre=slopes("Pre-LN"),
        hull_excess=deterministic(max(excess)),
        spread_left=mean_of([spread[-1] / spread[0] for spread in spreads]),
    )


def _judged(params: Params, **estimates: Estimate) -> list[Check]:
    section = params.claims.no_residual_collapse
    numbers = {
        "shallow": section.exact.depths[0],
        "deep": section.exact.depths[-1],
        "shrunk": section.skips[1],
        "spike": SPIKE,
        "last": _last_blocks(params),
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


def _last_blocks(params: Params) -> int:
    """How many blocks are "the last" ones: a quarter of them."""
    return max(1, params.claims.no_residual_collapse.depth // 4)


# --- trained arms ---------------------------------------------------------------------------------


def skip_name(weight: float) -> str:
    return f"skip {weight:g}"


def resnet_name(weight: float) -> str:
    return f"ResNet skip {weight:g}"


def connection(weight: float) -> ConnectionConfig:
    """The plainest kind of connection with this skip weight, so that claims share their runs."""
    if weight in (0, 1):
        return ConnectionConfig(kind="add" if weight else "none")
    return ConnectionConfig(kind="weighted_skip", weight=weight)


def decoder_arm(params: Params, weight: float) -> Arm:
    section = params.claims.no_residual_collapse
    config = decoder_run(params, section.depth, connection(weight))
    return Arm(skip_name(weight), config, section.learning_rates)


def resnet_arm(params: Params, weight: float) -> Arm:
    section = params.claims.no_residual_collapse.resnet
    recipe = params.optimisation.model_copy(update={"batch": section.batch, "steps": section.steps})
    config = RunConfig(
        task=data.DigitsConfig(),
        model=ResNetConfig(channels=section.channels, depth=section.depth, classes=10, connection=connection(weight)),
        optimisation=Optimisation.model_validate(recipe),
        learning_rate=section.learning_rates[0],
        seed=0,
        device=params.device,
    )
    return Arm(resnet_name(weight), config, section.learning_rates)


def arms(params: Params) -> list[Arm]:
    section = params.claims.no_residual_collapse
    skips = section.skips
    return [
        *(decoder_arm(params, weight) for weight in skips),
        Arm(ENDS, ends_run(params), section.ends_learning_rates),
        *(resnet_arm(params, weight) for weight in (skips[0], skips[1], skips[-1])),
    ]


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    return choose_rates(arms(params), params.sweep, params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds."""
    return train_arms(arms(params), chosen, params.seeds, params.execution)


# --- checks on trained arms -----------------------------------------------------------------------


def plateau(series: Sequence[float]) -> Sequence[float]:
    """The plateau: the second half of the steps."""
    return series[len(series) // 2 :]


def _last(records: list[RunRecord], measure: str) -> list[float]:
    """A measure after the last block."""
    return each(records, lambda record: profile_of(record, measure)[-1])


def _gradient_passed(record: RunRecord) -> float:
    """log10 of the gradient norm at the embedding over that after the last block, at least float32's epsilon.

    Below epsilon the gradient is lost in rounding, and how far below says nothing.
    """
    norm = profile_of(record, "gradient_norm")
    return float(np.log10(np.maximum(norm[0] / norm[-1], np.finfo(np.float32).eps)))


def checks_loss(params: Params, chosen: pd.DataFrame, trained: Runs) -> list[Check]:
    """Sentences A1 and A1r: what the losses do; `chosen` has the runs at all rates."""
    none, full = trained[skip_name(0)], trained[skip_name(1)]
    shrunk = params.claims.no_residual_collapse.skips[1]
    nets = {weight: held_out(trained[resnet_name(weight)], "test_accuracy") for weight in (0, shrunk, 1)}
    commonest = [_most_common_byte_accuracy(record) for record in none]
    outcomes = [*chosen[chosen["arm"] == skip_name(0)]["outcome"], *(record.outcome for record in none)]
    return _judged(
        params,
        never_diverges=deterministic(outcomes.count("diverged")),
        never_spikes=deterministic(sum(map(_jumps, none))),
        loss_falls=mean_of(each(none, lambda r: r.train_loss[0] - float(np.mean(plateau(r.train_loss))))),
        near_context_free=paired_difference(held_out(none), [record.context_free_loss for record in none]),
        above_guessing=paired_difference(held_out(none, "test_accuracy"), commonest),
        loss_gap=paired_difference(held_out(none), held_out(full)),
        blocks_take_part=paired_difference(held_out(trained[ENDS]), held_out(full)),
        resnet_learns=mean_of(nets[1]),
        resnet_removed=paired_difference(nets[1], nets[0]),
        resnet_shrunk=paired_difference(nets[1], nets[shrunk]),
    )


def _jumps(record: RunRecord) -> bool:
    """Did the run diverge, or its loss spike by more than that of the guess on the same batches?"""
    return record.outcome == "diverged" or bool(spikes(excess_losses(record)))


def _most_common_byte_accuracy(record: RunRecord) -> float:
    """Test accuracy of always guessing the commonest byte of the training text."""
    task = data.load(record.config.task)
    assert isinstance(task, data.Text)
    commonest = int(task.corpus.unigram().argmax())
    targets = torch.cat([targets.flatten() for _, targets in task.held_out("test")])
    return float((targets == commonest).float().mean())


def checks_stream(params: Params, trained: Runs) -> list[Check]:
    """Sentences A2.1, A2.2 and A3.1 after training: what has become of the stream."""
    none, full = trained[skip_name(0)], trained[skip_name(1)]
    last = _last_blocks(params)
    return _judged(
        params,
        gradient_trained_none=mean_of(each(none, _gradient_passed)),
        gradient_trained_skip=mean_of(each(full, _gradient_passed)),
        rank_trained_none=mean_of(_last(none, "effective_rank")),
        rank_trained_skip=mean_of(_last(full, "effective_rank")),
        tokens_alike=mean_of(_last(none, "token_cosine")),
        layers_alike=mean_of(each(none, lambda r: float(np.mean(profile_of(r, "neighbour_cosine")[-last:])))),
    )


def checks_oscillation(params: Params, trained: Runs) -> list[Check]:
    """Sentences A1 and A3.2: is the plateau an oscillation, and do the layers cause it?"""
    none, full = trained[skip_name(0)], trained[skip_name(1)]
    shift = [each(records, lambda r: float(np.mean(profile_of(r, "mean_shift")))) for records in (none, full)]
    spread = [each(records, _plateau_spread) for records in (none, full)]
    return _judged(
        params,
        not_batch_noise=mean_of(each(none, lambda r: unexplained_share(plateau(r.train_loss), _guess_plateau(r)))),
        periodic=paired_difference(
            each(none, lambda r: fisher_g(plateau(r.train_loss))), each(none, lambda r: fisher_g(_guess_plateau(r)))
        ),
        less_calm=mean_of([ours / theirs for ours, theirs in zip(*spread, strict=True)]),
        shifted=mean_of([ours / theirs for ours, theirs in zip(*shift, strict=True)]),
    )


def _guess_plateau(record: RunRecord) -> Sequence[float]:
    return plateau(context_free_losses(record))


def _plateau_spread(record: RunRecord) -> float:
    """Standard deviation of the plateau about its linear trend, the guess on the same batches taken off."""
    return float(np.std(detrended(plateau(excess_losses(record)))))


# --- published numbers ---------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    return [
        Published(
            what="exponent of rank collapse per attention layer",
            published="3",
            ours=ours["collapse_exponent"],
            source="Dong et al. 2021, arXiv 2103.03404, theorem 2.2",
        ),
        Published(
            what="second eigenvalue of causal averaging",
            published="1/2",
            ours=ours["causal_halving"],
            source="eigenvalues 1/i of the triangular averaging matrix",
        ),
        Published(
            what="accuracy lost by a ResNet whose skips are removed",
            published="error over 20 % at 110 layers (original 6.6 %)",
            ours=ours["resnet_removed"],
            source="He et al. 2016, arXiv 1603.05027, table 1",
        ),
    ]
