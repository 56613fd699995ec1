"""Claim 13: residuals in diffusion models keep the input's structure while noise is removed step by step (A5.3a)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from pydantic import Field, model_validator

from reslab.claims import Check, Published, Question, Section, criteria_model, judge
from reslab.comparison import Rates, Runs, choose_rates, held_out, train_arms
from reslab.data import DIGITS_FOR_TRAINING
from reslab.experiments import diffusion_residuals_exact as exact
from reslab.experiments import diffusion_residuals_pictures as looks
from reslab.experiments.diffusion_residuals_arms import (
    ARMS,
    COMPARISONS,
    DIT,
    UNET,
    ZERO,
    TransformerSize,
    UNetSize,
    arms,
    closed_model,
    model_of,
)
from reslab.models.diffusion import DiffusionConfig
from reslab.stats import Estimate, detectable, mean_of, paired_difference

if TYPE_CHECKING:
    from reslab.params import Params
    from reslab.sampling import Path

TITLE = "Do residuals keep the picture while noise is removed?"
STATEMENT = (
    "In diffusion U-Nets and diffusion Transformers, residual connections keep the structure of the input while noise "
    "is removed step by step."
)
KEY = "structure_unet"

WORDS = {
    "zero": "DiT with adaLN-Zero, against DiT without residuals",
    "dit": "DiT, against DiT without residuals",
    "unet": "the U-Net, against one without residuals in its blocks",
    "skips": "the U-Net, against one without long skips",
    "both": "the U-Net, against one with neither",
}
"""The comparisons, in words."""

NO_VALUE = "no value where the latter learnt nothing"

INSIDE = ("dit", "both")
"""Comparisons that are looked into: those in which the one side has residuals and the other has none at all."""


def _trained_questions() -> dict[str, Question]:
    asked: dict[str, tuple[str, str]] = {}
    for part, words in WORDS.items():
        asked[f"noise_{part}"] = (
            "mean square error",
            f"residuals remove more of the noise: {words}, whether or not the latter learns",
        )
        asked[f"structure_{part}"] = (
            "correlation",
            f"residuals keep more of the picture's structure: {words} ({NO_VALUE})",
        )
    for part in INSIDE:
        asked[f"kept_{part}"] = (
            "R^2",
            f"after training the last block still holds most of the input: {WORDS[part].split(',')[0]}",
        )
        asked[f"read_{part}"] = ("R^2", f"it holds more of the input: {WORDS[part]} ({NO_VALUE})")
        asked[f"path_{part}"] = (
            "correlation",
            f"freed of noise step by step from time {{path_from:g}}, more structure is left: {WORDS[part]} "
            f"({NO_VALUE})",
        )
    return {name: Question("A5.3a", "trained", *question) for name, question in asked.items()}


QUESTIONS = {
    # untrained
    "start_error": Question(
        "A5.3a", "control", "|error / E[e^2] - 1|", "adaLN-Zero starts by predicting no noise: its error is the noise's"
    ),
    "unlock_order": Question(
        "A5.3a", "control", "parts out of order", "adaLN-Zero unlocks the head first, then the gates, then the branches"
    ),
    "start_keeps": Question(
        "A5.3a", "control", "largest difference", "at its start all {depth} blocks hand the picture on unchanged"
    ),
    "start_closed": Question(
        "A5.3a", "control", "largest gradient", "the same start without residuals never opens: nothing has a gradient"
    ),
    "untrained_dit": Question(
        "A5.3a", "exact", "R^2", "untrained, most of the input can be read off the last block of DiT"
    ),
    "untrained_dit_none": Question("A5.3a", "exact", "R^2", "without residuals it cannot"),
    "untrained_unet": Question(
        "A5.3a", "exact", "R^2", "untrained, most of the input can be read off the last block of the U-Net"
    ),
    "untrained_unet_none": Question("A5.3a", "exact", "R^2", "with neither residuals nor long skips it cannot"),
    # trained
    "learns_dit": Question("A5.3a", "control", "mean square error", "DiT has learnt to find most of the noise"),
    "learns_unet": Question("A5.3a", "control", "mean square error", "so has the U-Net"),
    "beats_linear_dit": Question(
        "A5.3a", "trained", "mean square error", "DiT removes more of the noise than the best linear predictor"
    ),
    "beats_linear_unet": Question("A5.3a", "trained", "mean square error", "so does the U-Net"),
    **_trained_questions(),
}
"""What is asked, by the name of its criterion in params.yaml."""

Criteria = criteria_model(QUESTIONS)


# --- parameters -----------------------------------------------------------------------------------


class Parameters(Section):
    """The section claims.diffusion_residuals of params.yaml."""

    transformer: TransformerSize
    unet: UNetSize
    batch: int = Field(ge=1, le=DIGITS_FOR_TRAINING)
    steps: int = Field(ge=1)
    sweep_steps: int = Field(ge=1)
    learning_rates: Rates
    times: tuple[float, ...]
    """Noise levels, between 0 (none) and 1 (nothing else), increasing."""
    looked_at: float = Field(gt=0, lt=1)
    """The noise level of the input that is read off the streams."""
    path_from: float = Field(gt=0, lt=1)
    """The noise level from which test pictures are freed of noise."""
    sample_from: float = Field(gt=0, lt=1)
    """The time that stands for noise alone."""
    sampling_steps: int = Field(ge=2)
    pictures: int = Field(ge=2, le=300)
    """Held-out pictures that are looked at, and as many that maps are fitted on."""
    samples: int = Field(ge=1)
    """Pictures made from noise alone, to look at."""
    criteria: Criteria  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _times_increase(self) -> Parameters:
        times = list(self.times)
        if len(times) < 2 or times != sorted(set(times)) or times[0] <= 0 or times[-1] >= 1:
            raise ValueError(f"times must be two or more that increase between 0 and 1, got {times}")
        return self


def _judged(params: Params, estimates: dict[str, Estimate]) -> list[Check]:
    section = params.claims.diffusion_residuals
    numbers = {"depth": section.transformer.depth, "path_from": section.path_from}
    return judge(QUESTIONS, section.criteria, estimates, numbers)


# --- exact checks ---------------------------------------------------------------------------------


def _zero(params: Params) -> DiffusionConfig:
    section = params.claims.diffusion_residuals
    config = model_of(section.transformer, section.unet, ZERO)
    assert isinstance(config, DiffusionConfig)
    return config


def initial_starts(params: Params) -> pd.DataFrame:
    """See `diffusion_residuals_exact.starts`, of DiT with adaLN-Zero."""
    torch.set_num_threads(params.device.threads)
    return exact.starts(_zero(params), params.seeds, params.claims.diffusion_residuals.batch)


def initial_gradients(params: Params, *, residual: bool = True) -> pd.DataFrame:
    """See `diffusion_residuals_exact.gradients`, of DiT with adaLN-Zero, also without residuals."""
    torch.set_num_threads(params.device.threads)
    section = params.claims.diffusion_residuals
    config = _zero(params) if residual else closed_model(section.transformer)
    return exact.gradients(config, params.seeds, section.batch)


def initial_readings(params: Params) -> pd.DataFrame:
    """See `diffusion_residuals_pictures.readings`, of all arms before training."""
    torch.set_num_threads(params.device.threads)
    section = params.claims.diffusion_residuals
    configs = {arm: model_of(section.transformer, section.unet, arm) for arm in ARMS}
    return looks.readings(looks.untrained(configs, params.seeds), section.looked_at, section.pictures)


def last_share(read: pd.DataFrame, arm: str) -> list[float]:
    """By seed, what can be read off the last place."""
    return [float(seed.sort_values("place")["share"].iloc[-1]) for _, seed in _of(read, arm).groupby("seed", sort=True)]


def _of(table: pd.DataFrame, arm: str) -> pd.DataFrame:
    return table[table["arm"] == arm]


def checks_initial(
    params: Params, start: pd.DataFrame, opening: pd.DataFrame, closed: pd.DataFrame, read: pd.DataFrame
) -> list[Check]:
    """Sentence A5.3a without training, and whether DiT starts as published."""
    (dit, dit_none), (unet, neither) = (COMPARISONS[part] for part in INSIDE)
    places = {
        "untrained_dit": dit,
        "untrained_dit_none": dit_none,
        "untrained_unet": unet,
        "untrained_unet_none": neither,
    }
    estimates = dict(exact.exact_estimates(start, opening, closed))
    return _judged(params, estimates | {name: mean_of(last_share(read, arm)) for name, arm in places.items()})


# --- runs -----------------------------------------------------------------------------------------


def rates(params: Params) -> pd.DataFrame:
    """Stage one of the comparison: a learning rate for every arm."""
    sweep = params.sweep.of(params.claims.diffusion_residuals.sweep_steps)
    return choose_rates(arms(params), sweep, params.execution)


def runs(params: Params, chosen: pd.DataFrame) -> Runs:
    """Stage two: every arm at its rate on all seeds, with weights."""
    return train_arms(arms(params), chosen, params.seeds, params.execution, weights=True)


def checks_noise(params: Params, trained: Runs) -> list[Check]:
    """How much of the noise is found, on held-out pictures."""
    estimates: dict[str, Estimate] = {}
    for name, arm in (("dit", DIT), ("unet", UNET)):
        losses = held_out(trained[arm])
        estimates[f"learns_{name}"] = mean_of(losses)
        estimates[f"beats_linear_{name}"] = mean_of([looks.linear_loss() - loss for loss in losses])
    for part, (ours, theirs) in COMPARISONS.items():
        estimates[f"noise_{part}"] = paired_difference(held_out(trained[theirs]), held_out(trained[ours]))
    return _judged(params, estimates)


def compared(
    trained: Runs, part: str, measure: Callable[[str], Sequence[float]]
) -> tuple[Sequence[float], Sequence[float]]:
    """By seed, in rising order, a measure of both sides' arms; without residuals not a number where the run stalled.

    A network that predicts hardly better than no noise shows what it is not to learn, and not what residuals keep.
    """
    ours, theirs = (measure(arm) for arm in COMPARISONS[part])
    records = sorted(trained[COMPARISONS[part][1]], key=lambda record: record.config.seed)
    pairs = zip(theirs, records, strict=True)
    return ours, [value if record.outcome == "trained" else math.nan for value, record in pairs]


# --- looks at pictures ----------------------------------------------------------------------------


def structures(params: Params, trained: Runs) -> pd.DataFrame:
    """See `diffusion_residuals_pictures.structures`."""
    torch.set_num_threads(params.device.threads)
    section = params.claims.diffusion_residuals
    return looks.structures(trained, section.times, section.pictures, params.device.kind)


def readings(params: Params, trained: Runs) -> pd.DataFrame:
    """See `diffusion_residuals_pictures.readings`, of the trained networks."""
    torch.set_num_threads(params.device.threads)
    section = params.claims.diffusion_residuals
    return looks.readings(looks.trained_models(trained), section.looked_at, section.pictures)


def paths(params: Params, trained: Runs) -> pd.DataFrame:
    """See `diffusion_residuals_pictures.paths`, of the arms that are looked into."""
    section = params.claims.diffusion_residuals
    torch.set_num_threads(params.device.threads)
    chosen = {arm: trained[arm] for part in INSIDE for arm in COMPARISONS[part]}
    return looks.paths(chosen, section.path_from, section.sampling_steps, section.pictures, params.device.kind)


def samples(params: Params, trained: Runs) -> dict[str, Path]:
    """See `diffusion_residuals_pictures.samples`."""
    section = params.claims.diffusion_residuals
    torch.set_num_threads(params.device.threads)
    return looks.samples(trained, section.sample_from, section.sampling_steps, section.samples, params.device.kind)


def mean_structure(kept: pd.DataFrame, arm: str) -> list[float]:
    """By seed, the mean over noise levels; not a number where one is missing."""
    return _by_seed(_of(kept, arm), lambda seed: float(seed["structure"].mean(skipna=False)))


def structure_at_end(path: pd.DataFrame, arm: str) -> list[float]:
    """By seed, the structure after the last step."""
    return _by_seed(_of(path, arm), lambda seed: float(seed.sort_values("step")["structure"].iloc[-1]))


def _by_seed(table: pd.DataFrame, measure: Callable[[pd.DataFrame], float]) -> list[float]:
    return [measure(seed) for _, seed in table.groupby("seed", sort=True)]


def compared_structure(trained: Runs, kept: pd.DataFrame, part: str) -> tuple[Sequence[float], Sequence[float]]:
    """`compared`, of the mean structure."""
    return compared(trained, part, lambda arm: mean_structure(kept, arm))


def checks_structure(params: Params, trained: Runs, kept: pd.DataFrame) -> list[Check]:
    """How much of the picture's structure the estimate of one step keeps."""
    pairs = {part: compared_structure(trained, kept, part) for part in COMPARISONS}
    return _judged(params, {f"structure_{part}": paired_difference(*pair) for part, pair in pairs.items()})


def checks_inside(params: Params, trained: Runs, read: pd.DataFrame) -> list[Check]:
    """How much of its input a trained network still holds before its head."""
    estimates: dict[str, Estimate] = {}
    for part in INSIDE:
        ours, theirs = compared(trained, part, lambda arm: last_share(read, arm))
        estimates |= {f"kept_{part}": mean_of(ours), f"read_{part}": paired_difference(ours, theirs)}
    return _judged(params, estimates)


def checks_path(params: Params, trained: Runs, path: pd.DataFrame) -> list[Check]:
    """How much structure there is after all steps of a sampler."""
    pairs = {part: compared(trained, part, lambda arm: structure_at_end(path, arm)) for part in INSIDE}
    return _judged(params, {f"path_{part}": paired_difference(*pair) for part, pair in pairs.items()})


# --- tables ---------------------------------------------------------------------------------------


def loss_table(trained: Runs) -> pd.DataFrame:
    """Test loss of every arm beside what needs no network, and how many of its runs learnt."""
    rows = [
        {
            "network": "no noise predicted (untrained adaLN-Zero)",
            "test loss": f"{trained[DIT][0].context_free_loss:.3g}",
        },
        {"network": "best linear predictor", "test loss": f"{looks.linear_loss():.3g}"},
    ]
    for arm in ARMS:
        learnt = sum(record.outcome == "trained" for record in trained[arm])
        loss = str(mean_of(held_out(trained[arm])))
        rows.append({"network": arm, "test loss": loss, "learnt": f"{learnt} of {len(trained[arm])}"})
    return pd.DataFrame(rows).set_index("network").fillna("")


def difference_table(trained: Runs, kept: pd.DataFrame) -> pd.DataFrame:
    """Every comparison with the smallest true difference that so many seeds would find four times in five."""
    rows = []
    for part, (ours, theirs) in COMPARISONS.items():
        losses = zip(held_out(trained[theirs]), held_out(trained[ours]), strict=True)
        kepts = zip(*compared_structure(trained, kept, part), strict=True)
        for what, pairs in (("noise", losses), ("structure", kepts)):
            differences = [a - b for a, b in pairs]
            rows.append(
                {
                    "comparison": WORDS[part],
                    "what": what,
                    "difference [95 % interval]": str(mean_of(differences)),
                    "detectable": detectable(differences),
                }
            )
    return pd.DataFrame(rows).set_index(["comparison", "what"])


def structure_table(kept: pd.DataFrame) -> pd.DataFrame:
    """Structure by arm and noise level, mean over seeds; not a number where a run diverged."""
    means = kept.groupby(["arm", "time"])["structure"].agg(lambda values: values.mean(skipna=False)).unstack()
    return means.reindex([*looks.CONTROLS, *ARMS]).round(3)


def reading_table(read: pd.DataFrame, read_after: pd.DataFrame) -> pd.DataFrame:
    """What can be read off the last place before and after training, mean over seeds."""
    columns = {"untrained": read, "trained": read_after}
    return pd.DataFrame(
        {name: {arm: _plain_mean(last_share(table, arm)) for arm in ARMS} for name, table in columns.items()}
    ).round(3)


def _plain_mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- published numbers ----------------------------------------------------------------------------


def published(checks: Sequence[Check]) -> list[Published]:
    ours = {c.name: str(c.estimate) for c in checks}
    dit = "Peebles & Xie 2023, DiT, arXiv 2212.09748"
    return [
        Published(
            what="error of DiT with adaLN-Zero at its start, over the noise's mean square: distance from 1",
            published="0: the output is 0 (section 3.2)",
            ours=ours["start_error"],
            source=dit,
        ),
        Published(
            what="parts that begin to learn out of order",
            published="0: head, then gates, then branches, which follows from gates and head at 0",
            ours=ours["unlock_order"],
            source=dit,
        ),
    ]
