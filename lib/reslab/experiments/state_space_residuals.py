"""Claim 14: does "state + learnable increment" keep long dependencies from decaying (A5.3b)?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from reslab import data
from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, each, held_out, train_arms
from reslab.experiments.state_space_residuals_exact import (
    DIAGONAL,
    INCREMENT,
    START,
    STATE,
    SUM,
    WIDE,
    Exact,
    exact_estimates,
    gradients_over_time,
    log_gradient,
)
from reslab.models.decoder import DecoderConfig
from reslab.models.state_space import Mixer, StateSpaceConfig
from reslab.residuals import ConnectionConfig
from reslab.stats import Estimate, detectable, mean_of, paired_difference, slope
from reslab.sweep import trained_model
from reslab.training import RunConfig, RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does a sum over time keep what a replaced state loses?"
STATEMENT = (
    'In state-space models "state + learnable increment", a residual connection over time, keeps long dependencies '
    "from decaying."
)
KEY = "increment_gain"

ATTENTION = "attention"

METHODS: dict[str, dict[str, Any] | None] = {
    STATE: {"mixer": "state"},
    INCREMENT: {"mixer": "increment"},
    SUM: {"mixer": "increment", "rate": 1.0},
    DIAGONAL: {"mixer": "diagonal"},
    ATTENTION: None,
}
"""How tokens meet in each method's sublayer; None is attention. The rate of an increment is 1/context unless given."""

RECURRENT = (STATE, INCREMENT, SUM, DIAGONAL)
SUMS = {"increment": INCREMENT, "sum": SUM, "diagonal": DIAGONAL}
"""Those of the form state + increment, by their part of a check's name."""

EXAMPLES = 4
"""Held-out sequences over which the gradient over time of a trained model is averaged."""

_ALONE = {"increment": "increments of 1/T", "sum": "whole increments (step 1)", "diagonal": "learnt decays"}


def _question(role: Any, unit: str, statement: str) -> Question:
    return Question("A5.3b", role, unit, statement)


QUESTIONS = {
    # untrained
    "state_rate": _question(
        "control",
        "log10 of gradient a step",
        "a state that is replaced, contractive by construction (W of radius 0.55), loses a fifth of the gradient and "
        "more a step",
    ),
    "state_rate_wide": _question(
        "exact", "log10 of gradient a step", "so does one whose W starts with radius 1, not contractive by itself"
    ),
    "leaky_share": _question(
        "control", "gradient over that without leak", "a leak of 1/T leaves 1/e of it over {T} steps"
    ),
    "fixed_grows": _question(
        "control", "log10 of gradient", "a fixed step of 0.1 makes the gradient explode: tenfold over {T} steps"
    ),
    "increment_kept": _question(
        "exact", "log10 of gradient", "increments of 1/T keep the gradient over {T} steps within a factor of two"
    ),
    "increment_flat": _question(
        "exact", "exponent of gradient by T", "with increments of 1/T it does not depend on the length, {t} to {T}"
    ),
    "sum_kept": _question(
        "exact", "log10 of gradient", "a whole increment (step 1, as told) does not let it decay to a tenth"
    ),
    "sum_steady": _question(
        "exact", "log10 of gradient", "nor explode: a whole increment keeps it within a factor of two, as 1/T does"
    ),
    "diagonal_flat": _question(
        "exact", "exponent of gradient by T", "decays spread up to T lose next to nothing as T grows from {t} to {T}"
    ),
    "increment_beyond": _question(
        "exact", "log10 of gradient", "increments made for {t} steps do not let it decay over {T} steps"
    ),
    "increment_beyond_steady": _question(
        "exact", "log10 of gradient", "nor explode: made for {t} steps, they keep it within a factor of two over {T}"
    ),
    "diagonal_beyond": _question(
        "exact", "log10 of gradient", "decays made for {t} steps do not let it decay over {T} steps"
    ),
    # trained
    "attention_recalls": _question("control", "accuracy", "attention, which has no decay, recalls over {long} tokens"),
    "short_recalls": _question("control", "accuracy", "a replaced state recalls over {short} tokens"),
    "state_forgets": _question("trained", "accuracy", "a replaced state does not recall over {long} tokens"),
    **{
        f"{name}_recalls": _question("trained", "accuracy", f"{words} recall over {{long}} tokens")
        for name, words in _ALONE.items()
    },
    **{
        f"{name}_gain": _question(
            "trained", "accuracy gained", f"{words} recall more than a replaced state over {{long}} tokens"
        )
        for name, words in _ALONE.items()
    },
    "increment_slope": _question(
        "trained", "accuracy per doubling of length", "with increments of 1/T accuracy does not fall with length"
    ),
    "slope_gap": _question("trained", "accuracy per doubling of length", "it falls less than that of a replaced state"),
    "time_not_depth": _question(
        "trained",
        "accuracy gained",
        "with 2 blocks, increments without a residual over depth recall more than a replaced state with one "
        "({deep} tokens)",
    ),
    "trained_state": _question(
        "trained", "log10 of gradient", "after training, too, a replaced state leaves less than a tenth ({long} tokens)"
    ),
    **{
        f"trained_{name}": _question(
            "trained", "log10 of gradient", f"after training {words} leave a tenth and more ({{long}} tokens)"
        )
        for name, words in _ALONE.items()
    },
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Parameters(Section):
    """The section claims.state_space_residuals of params.yaml."""

    lengths: tuple[int, ...]
    """T, distractors between the symbol and the question, increasing; models of one block."""
    deep_length: int
    """The length at which models of two blocks are compared."""
    symbols: int = Field(ge=2)
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    """Of the attention decoder."""
    batch: int = Field(ge=1)
    steps: int = Field(ge=1)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    @field_validator("lengths")
    @classmethod
    def _lengths_increase(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if len(lengths) < 2 or min(lengths) < 1 or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths must be two or more that increase from at least 1, got {list(lengths)}")
        return lengths

    @model_validator(mode="after")
    def _fits(self) -> Parameters:
        if self.deep_length not in self.lengths:
            raise ValueError(f"deep_length {self.deep_length} must be one of lengths {list(self.lengths)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        return self


def section_of(params: Params) -> Parameters:
    """This claim's section, with the threads of a run set for what is computed here."""
    torch.set_num_threads(params.device.threads)
    return params.claims.state_space_residuals


def _judged(params: Params, estimates: Mapping[str, Estimate]) -> list[Check]:
    section = params.claims.state_space_residuals
    numbers = {
        "t": section.exact.lengths[0],
        "T": section.exact.lengths[-1],
        "short": section.lengths[0],
        "long": section.lengths[-1],
        "deep": section.deep_length,
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- exact checks ---------------------------------------------------------------------------------


def initial_gradients(params: Params) -> pd.DataFrame:
    """See `state_space_residuals_exact.gradients_over_time`."""
    return gradients_over_time(section_of(params).exact)


def checks_initial(params: Params, gradients: pd.DataFrame) -> list[Check]:
    """What is left of a gradient over time, without training."""
    return _judged(params, exact_estimates(gradients))


# --- trained arms ---------------------------------------------------------------------------------


def arm_name(method: str, length: int, *, blocks: int = 1, skip: bool = True) -> str:
    deep = "" if blocks == 1 else f", {blocks} blocks"
    return f"{method}, {length} tokens{deep}" + ("" if skip else ", no skip")


def recall_run(
    params: Params, method: str, length: int, *, blocks: int = 1, skip: bool = True, start: float = START
) -> RunConfig:
    """A model that remembers a symbol over `length` tokens (`data.Recall`); `skip`: a residual connection over depth.

    Matrices have std `start` / sqrt(width). Learning rate and seed are placeholders.
    """
    section = params.claims.state_space_residuals
    task = data.RecallConfig(symbols=section.symbols, length=length)
    mixer = METHODS[method]
    shape = {
        **params.decoder.model_dump(),
        "context": task.context,
        "width": section.width,
        "heads": section.heads if mixer is None else 1,
        "init_std": start * section.width**-0.5,
        "vocabulary": task.vocabulary,
        "depth": blocks,
        "connection": ConnectionConfig("add" if skip else "none"),
    }
    model = DecoderConfig.model_validate(shape) if mixer is None else StateSpaceConfig.model_validate(shape | mixer)
    recipe = {"batch": section.batch, "steps": section.steps}
    return RunConfig(
        task=task,
        model=model,
        optimisation=params.optimisation.model_copy(update=recipe),
        learning_rate=1.0,
        seed=0,
        # a loop over time would be unrolled into one graph for each length
        device=params.device.model_copy(update={"compile": False}),
    )


def recall_arms(params: Params) -> list[Arm]:
    """Every method at every length with one block; two recurrences with two blocks, with and without skip.

    A replaced state may choose the wide start along with its rate, or its W would shrink it by construction.
    """
    section = params.claims.state_space_residuals
    shapes: list[tuple[str, int, dict[str, Any]]] = [
        (method, length, {}) for method in METHODS for length in section.lengths
    ]
    shapes += [
        (method, section.deep_length, {"blocks": 2, "skip": skip})
        for method in (STATE, INCREMENT)
        for skip in (True, False)
    ]
    return [_arm(params, method, length, **shape) for method, length, shape in shapes]


def _arm(params: Params, method: str, length: int, **shape: Any) -> Arm:
    starts = {"wide start": WIDE} if method == STATE else {}
    return Arm(
        arm_name(method, length, **shape),
        recall_run(params, method, length, **shape),
        params.claims.state_space_residuals.learning_rates,
        settings={name: recall_run(params, method, length, start=start, **shape) for name, start in starts.items()},
    )


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm, and a start for those of a replaced state."""
    sweep = params.sweep.of(params.claims.state_space_residuals.sweep_steps)
    return choose_rates(recall_arms(params), sweep, params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds; with weights, for they are looked into."""
    return train_arms(recall_arms(params), chosen, params.seeds, params.execution, weights=True)


# --- recall by length -----------------------------------------------------------------------------


def accuracy(trained: Runs, method: str, length: int, **shape: Any) -> list[float]:
    """Test accuracy of an arm, seed by seed; not a number where a run diverged."""
    return held_out(trained[arm_name(method, length, **shape)], "test_accuracy")


def accuracy_slopes(trained: Runs, method: str, lengths: Sequence[int]) -> list[float]:
    """Each seed's slope of the accuracy against log2 of the length."""
    by_seed = np.array([accuracy(trained, method, length) for length in lengths]).T
    doublings = np.log2(lengths).tolist()
    return [slope(doublings, row.tolist()) if np.isfinite(row).all() else float("nan") for row in by_seed]


def recall_table(params: Params, trained: Runs) -> pd.DataFrame:
    """Accuracy of every method and length (one block) with its interval and its gain over a replaced state.

    `detectable` is the smallest true gain that this many seeds of this spread would have shown.
    """
    rows = []
    for length in params.claims.state_space_residuals.lengths:
        state = accuracy(trained, STATE, length)
        for method in METHODS:
            ours = accuracy(trained, method, length)
            row = {"tokens": length, "method": method, "accuracy [95 % interval]": str(mean_of(ours))}
            gains = [own - other for own, other in zip(ours, state, strict=True)]
            compared = method != STATE
            rows.append(
                {
                    **row,
                    "gain over state": str(mean_of(gains)) if compared else "",
                    "detectable": detectable(gains) if compared else float("nan"),
                }
            )
    return pd.DataFrame(rows).set_index(["tokens", "method"])


def checks_recall(params: Params, trained: Runs) -> list[Check]:
    """Who remembers, over how many tokens; gains are paired by seed."""
    section = params.claims.state_space_residuals
    short, long, deep = section.lengths[0], section.lengths[-1], section.deep_length
    state = accuracy(trained, STATE, long)
    deep_increment = accuracy(trained, INCREMENT, deep, blocks=2, skip=False)
    slopes = {method: accuracy_slopes(trained, method, section.lengths) for method in (STATE, INCREMENT)}
    estimates = {
        "attention_recalls": mean_of(accuracy(trained, ATTENTION, long)),
        "short_recalls": mean_of(accuracy(trained, STATE, short)),
        "state_forgets": mean_of(state),
        "increment_slope": mean_of(slopes[INCREMENT]),
        "slope_gap": paired_difference(slopes[INCREMENT], slopes[STATE]),
        "time_not_depth": paired_difference(deep_increment, accuracy(trained, STATE, deep, blocks=2)),
    }
    for name, method in SUMS.items():
        ours = accuracy(trained, method, long)
        estimates[f"{name}_recalls"] = mean_of(ours)
        estimates[f"{name}_gain"] = paired_difference(ours, state)
    return _judged(params, estimates)


# --- gradients over time after training -----------------------------------------------------------


@torch.no_grad()
def mixer_inputs(model: nn.Module, tokens: Tensor) -> tuple[Mixer, Tensor]:
    """The first recurrence of a model and what it is fed, [B, T, d], when the model reads `tokens` [B, T]."""
    mixer = next(module for module in model.modules() if isinstance(module, Mixer))
    seen: list[Tensor] = []
    handle = mixer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(tokens)
    handle.remove()
    return mixer, seen[0]


def trained_gradient(record: RunRecord) -> float:
    """log10 of the gradient over time in a trained model, from before the first token to the question.

    Mean over EXAMPLES held-out sequences; of the first recurrence, which sees the tokens themselves.
    """
    inputs, _ = next(data.load(record.config.task).held_out("validation"))
    assert isinstance(inputs, Tensor)
    mixer, fed = mixer_inputs(trained_model(record.config), inputs[:EXAMPLES])
    return float(np.mean([log_gradient(mixer, example) for example in fed]))


def trained_gradients(params: Params, trained: Runs) -> pd.DataFrame:
    """`trained_gradient` of all models of one block: columns method, length, seed, gradient."""
    section = section_of(params)
    rows = []
    for method in RECURRENT:
        for length in section.lengths:
            records = trained[arm_name(method, length)]
            for record, found in zip(records, each(records, trained_gradient), strict=True):
                rows.append({"method": method, "length": length, "seed": record.config.seed, "gradient": found})
    return pd.DataFrame(rows)


def gradients_of(gradients: pd.DataFrame, method: str, length: int) -> list[float]:
    """One method's trained gradients at a length, seed by seed."""
    chosen = gradients[(gradients["method"] == method) & (gradients["length"] == length)]
    return [float(value) for value in chosen["gradient"]]


def checks_gradients(params: Params, gradients: pd.DataFrame) -> list[Check]:
    """What is left of a gradient over time in trained models."""
    long = params.claims.state_space_residuals.lengths[-1]
    names = {"state": STATE, **SUMS}
    return _judged(
        params, {f"trained_{name}": mean_of(gradients_of(gradients, method, long)) for name, method in names.items()}
    )


# --- published numbers ----------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    """None: no number that we know of is comparable; what theory says stands beside the criteria."""
    return []
