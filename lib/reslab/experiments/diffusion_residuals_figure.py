"""The figure of claim 13."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reslab import plotting
from reslab.comparison import Runs, held_out
from reslab.experiments import diffusion_residuals_pictures as looks
from reslab.experiments.diffusion_residuals import INSIDE, TITLE, last_share
from reslab.experiments.diffusion_residuals_arms import ARMS, COMPARISONS
from reslab.sampling import Path
from reslab.stats import moving_average

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

GREY = plotting.COLOURS["control"]
SAMPLED = [arm for part in INSIDE for arm in COMPARISONS[part]]


def draw(
    params: Params,
    read: pd.DataFrame,
    read_after: pd.DataFrame,
    kept: pd.DataFrame,
    path: pd.DataFrame,
    made: dict[str, Path],
    trained: Runs,
) -> Figure:
    """The claim in six panels; `read` before training, `read_after` after it, `made` from noise alone."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_training(axes[0], trained)
        _draw_losses(axes[1], trained)
        _draw_structure(axes[2], params, kept)
        _draw_reading(axes[3], params, read, read_after)
        _draw_path(axes[4], path)
        _draw_samples(axes[5], params, made)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _style(arm: str) -> str:
    return "-" if arm.startswith("DiT") else "--"


def _draw_training(axes: Axes, trained: Runs) -> None:
    """Smoothed, or batches would hide the arms."""
    for arm in ARMS:
        losses = [record.train_loss for record in trained[arm] if record.train_loss]
        window = max(1, max(map(len, losses), default=1) // 10)
        smooth = [moving_average(loss, window) for loss in losses]
        plotting.seed_lines(axes, arm, smooth, style=_style(arm))
    axes.axhline(1, color=GREY, linewidth=1, label="no noise predicted")
    axes.set_yscale("log")
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set(title="Training (mean of last tenth)", xlabel="step", ylabel="mean square error of the noise")
    plotting.legend_beside(axes, fontsize=6)


def _across(axes: Axes, arms: tuple[str, ...]) -> None:
    """Arms as rows, the first on top."""
    axes.set_yticks(range(len(arms)), arms, fontsize=7)
    axes.set_ylim(len(arms) - 0.4, -0.6)


def _draw_losses(axes: Axes, trained: Runs) -> None:
    for row, arm in enumerate(ARMS):
        plotting.interval(axes, row, held_out(trained[arm]), plotting.colour(arm), sideways=True)
        if any(record.outcome == "diverged" for record in trained[arm]):
            axes.text(0.98, row, "diverged", transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7)
    linear = looks.linear_loss()
    axes.axvline(linear, color=plotting.colour(looks.LINEAR), linestyle=":", label="best linear predictor")
    axes.axvline(1, color=GREY, linewidth=1, label="no noise predicted")
    _across(axes, ARMS)
    axes.set_xlim(left=0)
    axes.set(title="Held-out test loss (seeds, 95 %)", xlabel="mean square error of the noise")
    axes.legend(fontsize=6, loc="center right", bbox_to_anchor=(0.95, 0.52))


def _draw_structure(axes: Axes, params: Params, kept: pd.DataFrame) -> None:
    """Above the noisy picture itself, which at little noise is nearly the clean one."""
    times = params.claims.diffusion_residuals.times
    table = kept.set_index(["arm", "seed", "time"])["structure"].unstack("time")
    nothing = table.loc[[(looks.UNTRAINED, -1)]].to_numpy()[0]
    width = 0.012
    for number, arm in enumerate(ARMS):
        gains = table.loc[arm].to_numpy() - nothing
        at = np.array(times) + (number - (len(ARMS) - 1) / 2) * width
        for x, values in zip(at, gains.T, strict=True):
            plotting.interval(axes, float(x), values.tolist(), plotting.colour(arm), size=2.5, width=3)
        axes.plot(at, gains.mean(0), color=plotting.colour(arm), linestyle=_style(arm), linewidth=1)
    linear = table.loc[[(looks.LINEAR, -1)]].to_numpy()[0] - nothing
    axes.plot(times, linear, color=plotting.colour(looks.LINEAR), linestyle=":", label="best linear predictor")
    axes.axhline(0, color=GREY, linewidth=1, label="noisy picture itself (untrained)")
    axes.set_xticks(times)
    axes.set(
        title="Picture regained at once (95 %)",
        xlabel="noise level (time)",
        ylabel="correlation with clean picture,\ngain over noisy picture",
    )
    axes.legend(fontsize=6)


def _draw_reading(axes: Axes, params: Params, read: pd.DataFrame, read_after: pd.DataFrame) -> None:
    for row, arm in enumerate(ARMS):
        colour = plotting.colour(arm)
        plotting.interval(axes, row - 0.17, last_share(read, arm), colour, marker="x", size=3.5, sideways=True)
        plotting.interval(axes, row + 0.17, last_share(read_after, arm), colour, size=3.5, sideways=True)
    axes.plot([], [], "x", color=GREY, markersize=4, label="untrained")
    axes.plot([], [], "o", color=GREY, markersize=4, label="trained")
    axes.axvline(0.5, color=GREY, linestyle=":", linewidth=1, label="most of it")
    _across(axes, ARMS)
    axes.set_xlim(-0.25, 1.05)
    level = params.claims.diffusion_residuals.looked_at
    axes.set(title="Input still held by the last block", xlabel=f"R$^2$ of a linear map (noise level {level:g}, 95 %)")
    axes.legend(fontsize=6, loc="lower right")


def _draw_path(axes: Axes, path: pd.DataFrame) -> None:
    for number, arm in enumerate(SAMPLED):
        series = path[path["arm"] == arm].pivot(index="step", columns="seed", values="structure")
        colour = plotting.colour(arm)
        axes.plot(series.index, series.to_numpy(), color=colour, linewidth=0.6, alpha=0.5, linestyle=_style(arm))
        axes.plot(series.index, series.mean(axis=1, skipna=False), color=colour, linestyle=_style(arm), label=arm)
        last = float(series.index[-1]) * (1.03 + 0.025 * number)
        plotting.interval(axes, last, series.iloc[-1].tolist(), colour, size=2.5, width=3)
    axes.set(
        title="Freed of noise step by step (95 % at end)",
        xlabel="sampling step",
        ylabel="correlation with clean picture",
    )
    axes.legend(fontsize=6)


def _draw_samples(axes: Axes, params: Params, made: dict[str, Path]) -> None:
    """One row a network, one column a starting noise."""
    count = params.claims.diffusion_residuals.samples
    blank = torch.full((count, 1, 8, 8), -1.0)
    rows = []
    for arm in SAMPLED:
        images = made[arm].states[-1] if arm in made else blank
        rows.append(np.concatenate([np.pad(image[0].numpy(), 1, constant_values=0) for image in images], 1))
    axes.imshow(np.concatenate(rows), cmap="gray_r", vmin=-1, vmax=1, aspect="equal")
    lost = {arm: "" if arm in made else " (diverged)" for arm in SAMPLED}
    axes.set_yticks(
        [10 * row + 4.5 for row in range(len(rows))],
        [(arm + lost[arm]).replace(", ", ",\n") for arm in SAMPLED],
        fontsize=7,
    )
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.set(title="Digits made from noise alone", xlabel="each column starts from the same noise")
