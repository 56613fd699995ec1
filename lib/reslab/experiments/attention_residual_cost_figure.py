"""The figure of claim 15."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from reslab import plotting
from reslab.comparison import Runs, held_out
from reslab.experiments.attention_residual_cost import KEYS, PRENORM, TITLE, at_depths, sizes
from reslab.stats import mean_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]


def draw(params: Params, times: pd.DataFrame, peaks: pd.DataFrame, traffic: pd.DataFrame, trained: Runs) -> Figure:
    """The claim in six panels."""
    measured = params.claims.attention_residual_cost.measured
    deepest = times["blocks"] == measured.depths[-1]
    _, width, sequences = sizes(params)[0]
    narrow, few = times["width"] == width, times["sequences"] == sequences
    tokens = times.assign(tokens=times["sequences"] * params.decoder.context)
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_time(axes[0], at_depths(params, times), "blocks", "depth (blocks)")
        _draw_time(axes[1], times[deepest & few], "width", f"width ({measured.depths[-1]} blocks)")
        _draw_time(axes[2], tokens[deepest & narrow], "tokens", f"tokens a step ({measured.depths[-1]} blocks)")
        _draw_memory(axes[3], at_depths(params, peaks))
        _draw_traffic(axes[4], traffic, params.claims.attention_residual_cost.residual.sublayers)
        _draw_pareto(axes[5], params, at_depths(params, times), trained)
        plotting.legend_beside(axes[0], room=0.35)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def ratios(times: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Of each round the time over pre-norm's: rows (round, `axis`), a column an arm."""
    table = times.pivot(index=["round", axis], columns="arm", values="ms")
    return table.div(table[PRENORM], axis=0)


def _draw_time(axes: Axes, times: pd.DataFrame, axis: str, label: str) -> None:
    table = ratios(times, axis).groupby(level=axis)
    low, middle, high = (table.quantile(q) for q in (0.25, 0.5, 0.75))
    for arm in [str(arm) for arm in middle if arm != PRENORM]:
        colour = plotting.colour(arm)
        axes.fill_between(middle.index, low[arm], high[arm], color=colour, alpha=0.15, linewidth=0)
        axes.plot(middle.index, middle[arm], "o-", color=colour, label=arm, markersize=3)
    axes.axhline(1, color=plotting.COLOURS[PRENORM], label=PRENORM)
    axes.set_xscale("log", base=2)
    axes.set_xticks(middle.index, [str(value) for value in middle.index])
    axes.set(title=f"Measured time by {axis}", xlabel=label, ylabel="training step / pre-norm's\n(median, quartiles)")


def _draw_memory(axes: Axes, peaks: pd.DataFrame) -> None:
    table = peaks.pivot(index="blocks", columns="arm", values="inference") / 1e6
    for arm in map(str, table):
        style = "--" if arm == KEYS else "-"  # which keeps as much as Full
        axes.plot(table.index, table[arm], style, marker="o", color=plotting.colour(arm), markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(table.index, [str(blocks) for blocks in table.index])
    axes.set(title="Memory without gradients", xlabel="depth (blocks)", ylabel="peak beyond the weights (MB)")


def _draw_traffic(axes: Axes, table: pd.DataFrame, sublayers: int) -> None:
    places = np.arange(len(table))
    styles = {"published": "white", "planned": "0.75", "measured": "0.35"}
    for number, (column, face) in enumerate(styles.items()):
        bars = axes.bar(places + 0.27 * (number - 1), table[column], 0.25, color=face, edgecolor="black", label=column)
        axes.bar_label(bars, fmt=lambda value: "" if np.isnan(value) else f"{value:.3g}", fontsize=6)
    axes.set_yscale("log")
    axes.set_xticks(places, [name.replace(", ", ",\n") for name in table.index])
    axes.set(
        title="Traffic of the stream",
        xlabel=f"{sublayers} sublayers (published: 128)",
        ylabel="d numbers a token and sublayer",
    )
    axes.legend(fontsize=7)


def _draw_pareto(axes: Axes, params: Params, times: pd.DataFrame, trained: Runs) -> None:
    depth = params.claims.attention_residual_cost.depth
    cost = ratios(times, "blocks").groupby(level="blocks").median().loc[depth]
    for arm, records in trained.items():
        losses, colour = held_out(records), plotting.colour(arm)
        mean = mean_of(losses)
        axes.plot([cost[arm]] * len(losses), losses, "o", color=colour, markersize=3, alpha=0.6)
        height = np.nan if mean.value is None else mean.value
        axes.plot(cost[arm], height, "D", color=colour, markersize=6, label=arm)
    axes.set(
        title=f"Loss beside cost ({depth} blocks)",
        xlabel="training step / pre-norm's (measured)",
        ylabel="nats per byte (test; seeds and mean)",
    )
    plotting.legend_beside(axes)
