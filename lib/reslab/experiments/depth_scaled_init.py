"""Claim 09: how large matrices may start, and what the depth has to do with it (A6.1a, A6.1b)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator

from reslab.claims import Check, Published, Question, Role, Section, criteria_model, judge
from reslab.comparison import Arm, Rates, Runs, choose_rates, each, profile_of, train_arms
from reslab.experiments.depth_scaled_init_exact import INITS, NORMS, Exact, Norm, exact_estimates, start
from reslab.experiments.runs import decoder_run, require_depths
from reslab.stats import Estimate, detectable, deterministic, mean_of, moving_average, paired_difference
from reslab.training import RunRecord

if TYPE_CHECKING:
    from reslab.params import Params

TITLE = "Does smaller init in deep models hold variance, and ten times too large harm?"
STATEMENT = (
    "Scaling the start of the output matrices by 1/sqrt(depth) keeps the output variance in hand. A standard deviation "
    "of 0.2 in place of 0.02 does no harm in shallow models; beyond 16 layers it gives an abnormally high initial "
    "loss, huge first updates and a dead zone."
)
KEY = "loss_depth_norm"

SMALL, LARGE = "0.02", "0.2"
SCALED = {"small": "0.02 scaled", "large": "0.2 scaled"}
"""The same with what writes to the stream started smaller, by their part of a check's name."""

NO_VALUE = "no value where 0.02 learnt nothing"

BEHIND = {"norm": "with a final norm", "bare": "without a final norm"}


def _norm_questions(norm: Norm) -> dict[str, Question]:
    """Sentence A6.1b, for decoders with the final norm or without."""
    where = BEHIND[norm]
    ratio, lost = "log10 of a ratio", f"nats per byte lost ({NO_VALUE})"
    asked: dict[str, tuple[Role, str, str]] = {
        "loss_shallow": ("exact", "nats", f"0.2 starts no more than 1 nat above 0.02 at {{shallow}} blocks, {where}"),
        "loss_deep": ("exact", "nats", f"0.2 starts more than 1 nat above 0.02 at {{deep}} blocks, {where}"),
        "loss_depth": (
            "exact",
            "nats",
            f"the high initial loss comes with depth: at 0.2 {{deep}} blocks start above {{shallow}}, {where}",
        ),
        "loss_depth_wide": ("exact", "nats", f"the same at ten times GPT-2's size, {where}"),
        "sgd_deep": ("exact", ratio, f"the first gradient at 0.2 is tenfold that at 0.02 ({{deep}} blocks, {where})"),
        "sgd_depth": ("exact", ratio, f"the first gradient at 0.2 is tenfold from {{shallow}} to {{deep}}, {where}"),
        "adam_deep": (
            "exact",
            ratio,
            f"AdamW's first step moves the output at 0.2 tenfold that at 0.02 ({{deep}} blocks, {where})",
        ),
        "adam_depth": (
            "exact",
            ratio,
            f"AdamW's first step at 0.2 moves the output tenfold from {{shallow}} to {{deep}} blocks, {where}",
        ),
        "harm_shallow": ("trained", lost, f"0.2 does no harm at {{trained_shallow}} blocks, {where}"),
        "harm_deep": ("trained", lost, f"0.2 does harm at {{trained_deep}} blocks, {where}"),
        "harm_depth": ("trained", lost, f"the harm grows with depth, {where}"),
        "stalls": (
            "trained",
            "share of {seeds} runs",
            f"at {{trained_deep}} blocks most runs of 0.2 never get below the best context-free guess, {where}",
        ),
        "flat": (
            "trained",
            "share of the steps",
            f"at {{trained_deep}} blocks 0.2 goes longer than 0.02 without a new lowest loss, {where} ({NO_VALUE})",
        ),
    }
    return {f"{name}_{norm}": Question("A6.1b", *question) for name, question in asked.items()}


QUESTIONS = {
    # untrained: what scaling with depth does
    "writers_std": Question(
        "A6.1a", "control", "measured / 0.02 per sqrt(2L)", "scaled output matrices have std 0.02/sqrt(2L)"
    ),
    "branch_ratio": Question(
        "A6.1a", "exact", "ratio / 2L", "unscaled branches write 2L times the variance of scaled ones ({deep} blocks)"
    ),
    "exponent_plain": Question(
        "A6.1a", "exact", "power of the depth", "unscaled, the written variance grows in proportion to depth"
    ),
    "exponent_scaled": Question(
        "A6.1a", "exact", "power of the depth", "scaled, the written variance is the same at every depth (GPT-2's size)"
    ),
    "exponent_small": Question("A6.1a", "exact", "power of the depth", "so it is at 0.02"),
    "exponent_large": Question("A6.1a", "exact", "power of the depth", "so it is at 0.2"),
    # trained: is it still so?
    "trained_small": Question(
        "A6.1a",
        "trained",
        "ln of variance, unscaled over scaled",
        "after training the stream of 0.02 is larger unscaled than scaled ({trained_deep} blocks; no value where "
        "either learnt nothing)",
    ),
    "trained_large": Question(
        "A6.1a",
        "trained",
        "ln of variance, unscaled over scaled",
        "so is that of 0.2 ({trained_deep} blocks; no value where either learnt nothing)",
    ),
    # controls
    "predicted_loss": Question(
        "A6.1b",
        "control",
        "measured / predicted",
        "with a final norm the loss at 0.2 is ln V + d s^2/2, in which no depth occurs ({deep} blocks)",
    ),
    "adam_step": Question(
        "A6.1b", "control", "largest change / rate", "AdamW's first step is as large as the rate, whatever the init"
    ),
    "learns": Question(
        "A6.1b",
        "control",
        "nats below unigram entropy",
        "0.02 with a final norm has learnt from the context ({trained_shallow} blocks)",
    ),
    # dead zone at the start; the final norm does not enter
    "saturated": Question("A6.1b", "exact", "share of rows", "at 0.2 attention is saturated ({deep} blocks)"),
    "dead": Question("A6.1b", "exact", "share of units", "at 0.2 MLP units are never active ({deep} blocks)"),
    "saturated_wide": Question(
        "A6.1b", "exact", "share of rows", "at ten times GPT-2's size attention is saturated ({deep} blocks)"
    ),
    "dead_wide": Question(
        "A6.1b", "exact", "share of units", "at ten times GPT-2's size MLP units are never active ({deep} blocks)"
    ),
    **_norm_questions("norm"),
    **_norm_questions("bare"),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Parameters(Section):
    """The section claims.depth_scaled_init of params.yaml."""

    depths: tuple[int, ...]
    """Blocks of the decoders that are trained, increasing: the first is what counts as shallow, the last as deep."""
    steps: int = Field(ge=8)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates
    window: int = Field(ge=1)
    """Steps over which the training loss is averaged before its flat stretches are looked for."""
    exact: Exact
    criteria: Criteria  # type: ignore[valid-type]

    _depths_increase = field_validator("depths")(require_depths)

    def require(self, params: Params) -> None:
        deepest = (self.depths[-1], self.exact.depths[-1])
        if params.scale != "smoke" and min(deepest) <= 16:
            raise ValueError(
                f"the sentence speaks of more than 16 layers; the deepest are {deepest[0]} and {deepest[1]}"
            )
        if self.window > self.steps // 4:
            raise ValueError(f"window {self.window} must be at most a quarter of steps {self.steps}")


# --- exact checks ---------------------------------------------------------------------------------


def initial(params: Params) -> pd.DataFrame:
    """See `depth_scaled_init_exact.start`."""
    torch.set_num_threads(params.device.threads)
    return start(params.claims.depth_scaled_init.exact)


def checks_initial(params: Params, table: pd.DataFrame) -> list[Check]:
    """Sentences A6.1a and A6.1b without training."""
    return _judged(params, exact_estimates(params.claims.depth_scaled_init.exact, table))


def _judged(params: Params, estimates: dict[str, Estimate]) -> list[Check]:
    section = params.claims.depth_scaled_init
    numbers = {
        "shallow": section.exact.depths[0],
        "deep": section.exact.depths[-1],
        "trained_shallow": section.depths[0],
        "trained_deep": section.depths[-1],
        "seeds": len(params.seeds),
    }
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- trained arms ---------------------------------------------------------------------------------


def arm_name(init: str, depth: int, norm: Norm = "norm") -> str:
    return f"{init}, {depth} blocks" + ("" if NORMS[norm] else ", no final norm")


def arms(params: Params) -> list[Arm]:
    """0.02 and 0.2 at all depths, with the final norm and without; scaled with it, in the deepest."""
    section = params.claims.depth_scaled_init
    wanted = [(init, depth, norm) for init in (SMALL, LARGE) for norm in NORMS for depth in section.depths]
    wanted += [(init, section.depths[-1], "norm") for init in SCALED.values()]
    made = []
    for init, depth, norm in wanted:
        shape: dict[str, Any] = {
            "init_std": INITS[init].std(params.decoder.width),
            "weight_init": INITS[init].weight_init,
            "final_norm": NORMS[norm],
        }
        config = decoder_run(params, depth, steps=section.steps, **shape)
        made.append(Arm(arm_name(init, depth, norm), config, section.learning_rates))
    return made


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    sweep = params.sweep.of(params.claims.depth_scaled_init.sweep_steps)
    return choose_rates(arms(params), sweep, params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds."""
    return train_arms(arms(params), chosen, params.seeds, params.execution)


# --- checks on runs -------------------------------------------------------------------------------


def longest_flat(losses: Sequence[float], window: int) -> float:
    """Longest stretch without a new lowest value of the loss, as a share of all steps; losses averaged over `window`.

    0 where each step brings a new lowest value, near 1 where the first is never reached again.
    """
    smooth = moving_average(losses, window)[window - 1 :]
    lowest = np.minimum.accumulate(smooth)
    new = np.flatnonzero(np.append(True, lowest[1:] < lowest[:-1]))
    gaps = np.diff(np.append(new, len(smooth))) - 1
    return float(gaps.max() / len(losses))


def against_small(trained: Runs, depth: int, norm: Norm, measure: Callable[[RunRecord], float]) -> list[float]:
    """A measure of 0.2 less that of 0.02, seed by seed; not a number where 0.2 diverged or 0.02 learnt nothing."""
    large, small = (trained[arm_name(init, depth, norm)] for init in (LARGE, SMALL))
    learnt = [measure(record) if record.outcome == "trained" else math.nan for record in small]
    return [ours - theirs for ours, theirs in zip(each(large, measure), learnt, strict=True)]


def harm(trained: Runs, depth: int, norm: Norm) -> list[float]:
    """Test loss of 0.2 less that of 0.02, as `against_small`."""
    return against_small(trained, depth, norm, _test_loss)


def _test_loss(record: RunRecord) -> float:
    return math.nan if record.test_loss is None else record.test_loss


def first_loss(record: RunRecord) -> float:
    """Loss of the first batch, before any update; not a number where it is not finite."""
    return record.train_loss[0] if record.train_loss else math.nan


def harm_table(params: Params, trained: Runs) -> pd.DataFrame:
    """What 0.2 costs against 0.02, and the smallest cost that this many seeds of this spread would have shown."""
    rows = []
    for norm in NORMS:
        for depth in params.claims.depth_scaled_init.depths:
            lost = harm(trained, depth, norm)
            rows.append(
                {
                    "final norm": "yes" if NORMS[norm] else "no",
                    "depth": depth,
                    "nats per byte lost [95 % interval]": str(mean_of(lost)),
                    "detectable": detectable(lost),
                    "0.2 at the first step": str(
                        mean_of([first_loss(record) for record in trained[arm_name(LARGE, depth, norm)]])
                    ),
                }
            )
    return pd.DataFrame(rows).set_index(["final norm", "depth"])


def _variance(record: RunRecord) -> float:
    """ln of the mean square of the stream after the last block; not a number where the run learnt nothing."""
    return math.log(profile_of(record, "mean_square")[-1]) if record.outcome == "trained" else math.nan


def checks_variance(params: Params, trained: Runs) -> list[Check]:
    """Sentence A6.1a after training: does scaling still keep the variance in hand?"""
    deep = params.claims.depth_scaled_init.depths[-1]
    plain = {"small": SMALL, "large": LARGE}
    found = {}
    for size, init in plain.items():
        unscaled, scaled = (trained[arm_name(name, deep)] for name in (init, SCALED[size]))
        found[f"trained_{size}"] = paired_difference(each(unscaled, _variance), each(scaled, _variance))
    return _judged(params, found)


def checks_harm(params: Params, trained: Runs) -> list[Check]:
    """Sentence A6.1b after training: what 0.2 costs, and whether there is a dead zone."""
    section = params.claims.depth_scaled_init
    shallow, deep = section.depths[0], section.depths[-1]
    learnt = each(trained[arm_name(SMALL, shallow)], lambda record: record.context_free_loss - (record.test_loss or 0))
    found = {"learns": mean_of(learnt)}

    def flat(record: RunRecord) -> float:
        return longest_flat(record.train_loss, section.window)

    for norm in NORMS:
        large = trained[arm_name(LARGE, deep, norm)]
        found |= {
            f"harm_shallow_{norm}": mean_of(harm(trained, shallow, norm)),
            f"harm_deep_{norm}": mean_of(harm(trained, deep, norm)),
            f"harm_depth_{norm}": paired_difference(harm(trained, deep, norm), harm(trained, shallow, norm)),
            f"stalls_{norm}": deterministic(float(np.mean([record.outcome != "trained" for record in large]))),
            f"flat_{norm}": mean_of(against_small(trained, deep, norm, flat)),
        }
    return _judged(params, found)


# --- published numbers ----------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    gpt2 = "Radford et al. 2019, GPT-2, section 2.3"
    return [
        Published(
            what="std of the matrices that write to the stream, over 0.02/sqrt(2L)",
            published="1/sqrt(N) with N residual layers, N = 2L",
            ours=ours["writers_std"],
            source=gpt2,
        ),
        Published(
            what="variance the branches write, unscaled over scaled, over 2L",
            published="1: each of 2L branches has 1/(2L) of the variance",
            ours=ours["branch_ratio"],
            source=f"follows from {gpt2}",
        ),
    ]
