"""The figure of claim 14."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from reslab import plotting
from reslab.comparison import Runs
from reslab.experiments.state_space_residuals import (
    ATTENTION,
    METHODS,
    RECURRENT,
    SUMS,
    TITLE,
    accuracy,
    arm_name,
    gradients_of,
)
from reslab.experiments.state_space_residuals_exact import INCREMENT, KINDS, STATE, WIDE_STATE
from reslab.stats import mean_of, moving_average

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

MARKERS = dict(zip(KINDS, "x+os^DvPd", strict=True)) | {ATTENTION: "*"}


def draw(params: Params, initial: pd.DataFrame, trained: Runs, after: pd.DataFrame) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_initial(axes[0], initial)
        _draw_accuracy(axes[1], params, trained)
        _draw_gains(axes[2], params, trained)
        _draw_after(axes[3], params, after)
        _draw_training(axes[4], params, trained)
        _draw_two_blocks(axes[5], params, trained)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _lengths_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.4)


def _draw_initial(axes: Axes, initial: pd.DataFrame) -> None:
    for kind in KINDS:
        by_seed = initial[initial["kind"] == kind].pivot(index="length", columns="seed", values="gradient")
        colour = plotting.colour(STATE if kind == WIDE_STATE else kind)
        axes.plot(by_seed.index, by_seed.to_numpy(), ".", color=colour, alpha=0.4, markersize=3)
        axes.plot(by_seed.index, by_seed.mean(axis=1), color=colour, marker=MARKERS[kind], markersize=4, label=kind)
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=1)
    _lengths_axis(axes, sorted(initial["length"].unique()))
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title="Untrained: gradient over T steps", xlabel="T (steps)", ylabel="log10 of gradient left")
    plotting.legend_beside(axes)


def _draw_series(axes: Axes, lengths: Sequence[int], values: dict[int, list[float]], method: str, place: int) -> None:
    """Seeds, mean and interval of one method by length, a little to the side of the others'."""
    colour = plotting.colour(method)
    at = [length * 1.05 ** (place - 2) for length in lengths]
    for x, length in zip(at, lengths, strict=True):
        plotting.interval(axes, x, values[length], colour, marker=MARKERS[method], size=3.5)
    means = [mean_of(values[length]).value for length in lengths]
    drawn = [np.nan if mean is None else mean for mean in means]
    axes.plot(at, drawn, color=colour, marker=MARKERS[method], markersize=5, label=method)


def _draw_accuracy(axes: Axes, params: Params, trained: Runs) -> None:
    section = params.claims.state_space_residuals
    for place, method in enumerate(METHODS):
        found = {length: accuracy(trained, method, length) for length in section.lengths}
        _draw_series(axes, section.lengths, found, method, place)
    axes.axhline(1 / section.symbols, color=plotting.COLOURS["control"], linestyle=":", label="guessing")
    _lengths_axis(axes, section.lengths)
    axes.set_ylim(-0.05, 1.1)
    axes.set(title="Recall by length, 1 block (95 %)", xlabel="distractors (tokens)", ylabel="test accuracy")
    axes.legend(fontsize=7, loc="center")


def _draw_gains(axes: Axes, params: Params, trained: Runs) -> None:
    section = params.claims.state_space_residuals
    for place, method in enumerate(SUMS.values(), 1):
        gains = {}
        for length in section.lengths:
            pairs = zip(accuracy(trained, method, length), accuracy(trained, STATE, length), strict=True)
            gains[length] = [own - other for own, other in pairs]
        _draw_series(axes, section.lengths, gains, method, place)
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=1)
    _lengths_axis(axes, section.lengths)
    axes.set(title="Gain over a replaced state (95 %)", xlabel="distractors (tokens)", ylabel="accuracy gained")
    axes.legend()


def _draw_after(axes: Axes, params: Params, after: pd.DataFrame) -> None:
    lengths = params.claims.state_space_residuals.lengths
    for place, method in enumerate(RECURRENT):
        found = {length: gradients_of(after, method, length) for length in lengths}
        _draw_series(axes, lengths, found, method, place)
    axes.axhline(-1, color=plotting.COLOURS["control"], linestyle=":", label="a tenth")
    _lengths_axis(axes, lengths)
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title="Trained: gradient over time (95 %)", xlabel="distractors (tokens)", ylabel="log10 of gradient left")
    axes.legend(fontsize=6, loc="lower left")


def _draw_training(axes: Axes, params: Params, trained: Runs) -> None:
    section = params.claims.state_space_residuals
    for method in METHODS:
        records = trained[arm_name(method, section.lengths[-1])]
        window = max(1, section.steps // 18)
        plotting.seed_lines(axes, method, [moving_average(r.train_loss, window) for r in records])
    axes.axhline(np.log(section.symbols), color=plotting.COLOURS["control"], linestyle=":", label="guessing")
    axes.set(title=f"Training over {section.lengths[-1]} tokens", xlabel="step", ylabel="nats (mean of last batches)")
    plotting.legend_beside(axes, ncols=3)


def _draw_two_blocks(axes: Axes, params: Params, trained: Runs) -> None:
    section = params.claims.state_space_residuals
    shapes = {"1 block": {}, "2 blocks": {"blocks": 2}, "2 blocks,\nno skip": {"blocks": 2, "skip": False}}
    for place, method in enumerate((STATE, INCREMENT)):
        for at, shape in enumerate(shapes.values()):
            found = accuracy(trained, method, section.deep_length, **shape)
            x = at + 0.2 * (place - 0.5)
            plotting.interval(axes, x, found, plotting.colour(method), marker=MARKERS[method])
        axes.plot([], [], color=plotting.colour(method), marker=MARKERS[method], linestyle="none", label=method)
    axes.axhline(1 / section.symbols, color=plotting.COLOURS["control"], linestyle=":", label="guessing")
    axes.set_xticks(range(len(shapes)), list(shapes))
    axes.set_xlim(-0.5, len(shapes) - 0.5)
    axes.set_ylim(-0.05, 1.1)
    axes.set(
        title=f"Time or depth? {section.deep_length} tokens (95 %)",
        xlabel="residual connections over depth",
        ylabel="test accuracy",
    )
    axes.legend()
