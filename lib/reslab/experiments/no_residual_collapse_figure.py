"""The figure of claim 01."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reslab import plotting
from reslab.comparison import Runs, held_out, profile_of
from reslab.curves import context_free_losses
from reslab.experiments.no_residual_collapse import (
    INITIAL_ARMS,
    TITLE,
    plateau,
    skip_name,
)
from reslab.experiments.runs import ENDS
from reslab.stats import moving_average

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]


def draw(params: Params, profiles: pd.DataFrame, trained: Runs) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_losses(axes[0], params, trained)
        _draw_test_losses(axes[1], params, trained)
        _draw_plateau(axes[2], trained)
        _draw_initial_cosine(axes[3], profiles)
        _draw_by_block(axes[4], trained, "token_cosine", "Trained: are the tokens alike?", "token cosine")
        _draw_by_block(
            axes[5], trained, "gradient_norm", "Trained: do gradients pass?", "gradient norm of the stream", "log"
        )
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _draw_losses(axes: Axes, params: Params, trained: Runs) -> None:
    settled: list[float] = []
    for weight in params.claims.no_residual_collapse.skips:
        series = [moving_average(record.train_loss, 20) for record in trained[skip_name(weight)]]
        plotting.seed_lines(axes, skip_name(weight), series)
        settled += [value for values in series for value in values[len(values) // 5 :] if np.isfinite(value)]
    entropy = trained[skip_name(0)][0].context_free_loss
    axes.axhline(entropy, color=plotting.COLOURS["control"], linestyle=":", label="unigram entropy")
    axes.set(title="Training loss", xlabel="step", ylabel="nats per byte (mean of 20 steps)")
    axes.set_ylim(min(settled) - 0.1, max(*settled, entropy) + 0.3)
    axes.legend()


def _draw_test_losses(axes: Axes, params: Params, trained: Runs) -> None:
    skips = params.claims.no_residual_collapse.skips
    for at, weight in enumerate(skips):
        name = skip_name(weight)
        plotting.interval(axes, at, held_out(trained[name]), plotting.colour(name))
    entropy = trained[skip_name(0)][0].context_free_loss
    grey = plotting.COLOURS["control"]
    axes.axhline(entropy, color=grey, linestyle=":", label="unigram entropy")
    ends = [loss for loss in held_out(trained[ENDS]) if np.isfinite(loss)]
    if ends:
        axes.axhline(float(np.mean(ends)), color=grey, linestyle="--", label=f"{ENDS} (mean)")
    axes.set_xticks(range(len(skips)), [f"{weight:g}" for weight in skips])
    axes.set(
        title="Held-out loss (seeds, 95 % interval)",
        xlabel="weight of the skip",
        ylabel="nats per byte (test)",
    )
    plotting.legend_beside(axes, ncols=1)


def _draw_plateau(axes: Axes, trained: Runs) -> None:
    record = trained[skip_name(0)][0]
    losses, guess = plateau(record.train_loss), plateau(context_free_losses(record))
    steps = range(len(record.train_loss) - len(losses), len(record.train_loss))
    axes.plot(
        steps,
        guess,
        color=plotting.COLOURS["control"],
        linewidth=3,
        alpha=0.4,
        label="best context-free guess",
    )
    axes.plot(steps, losses, color=plotting.COLOURS["skip 0"], linewidth=0.8, label="skip 0 on the same batches")
    axes.set(title="Plateau of skip 0 against its batches", xlabel="step", ylabel="nats per byte")
    axes.legend()


def _draw_initial_cosine(axes: Axes, profiles: pd.DataFrame) -> None:
    for arm in [arm for arm in INITIAL_ARMS if arm in plotting.COLOURS]:
        chosen = profiles[profiles["arm"] == arm]
        axes.plot(chosen["depth"], chosen["token_cosine"], ".", color=plotting.COLOURS[arm], alpha=0.4)
        mean = chosen.groupby("depth")["token_cosine"].mean()
        axes.plot(mean.index, mean.to_numpy(), color=plotting.COLOURS[arm], label=arm)
    depths = sorted(profiles["depth"].unique())
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.set(
        title="Untrained: are the tokens alike?", xlabel="depth (blocks)", ylabel="token cosine\nafter the last block"
    )
    plotting.legend_beside(axes, below=True)


def _draw_by_block(
    axes: Axes, trained: Runs, measure: str, title: str, label: str, scale: Literal["linear", "log"] = "linear"
) -> None:
    for name in (skip_name(0), skip_name(1)):
        plotting.seed_lines(axes, name, [profile_of(record, measure) for record in trained[name]])
        before = [profile_of(record, measure, trained=False) for record in trained[name]]
        plotting.seed_lines(axes, name, before, style="--", label=False)
    axes.set_yscale(scale)
    axes.plot([], [], color="black", label="trained")
    axes.plot([], [], color="black", linestyle="--", label="untrained")
    axes.set(title=title, xlabel="after block (0: embedding)", ylabel=label)
    plotting.legend_beside(axes)
