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
from reslab.experiments.attention_residual_cost import KEYS, PRENORM, TITLE, at_depths, in_plain_form, sizes
from reslab.stats import mean_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

TIMES = (0.5, 0.7, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0)
"""Marks of a logarithmic axis of times over pre-norm's."""


def draw(params: Params, times: pd.DataFrame, peaks: pd.DataFrame, traffic: pd.DataFrame, trained: Runs) -> Figure:
    """The claim in six panels."""
    section = params.claims.attention_residual_cost
    of_trained = times["blocks"] == section.depth
    _, width, sequences = sizes(params)[0]
    narrow, few = times["width"] == width, times["sequences"] == sequences
    tokens = times.assign(tokens=times["sequences"] * params.decoder.context)
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_time(axes[0], params, at_depths(params, times), "blocks", "depth (blocks)")
        _draw_time(axes[1], params, times[of_trained & few], "width", f"width ({section.depth} blocks)")
        _draw_time(axes[2], params, tokens[of_trained & narrow], "tokens", f"tokens a step ({section.depth} blocks)")
        _draw_memory(axes[3], params, at_depths(params, peaks))
        _draw_traffic(axes[4], traffic, section.residual.sublayers)
        _draw_pareto(axes[5], params, at_depths(params, times), trained)
        plotting.legend_beside(axes[0], room=0.35)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def ratios(times: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Of each round the time over pre-norm's: rows (round, `axis`), a column an arm."""
    table = times.pivot(index=["round", axis], columns="arm", values="ms")
    return table.div(table[PRENORM], axis=0)


def _style(params: Params, arm: str) -> str:
    """Lines of what runs without the kernel are dotted: beside the others they say what code costs."""
    return ":" if in_plain_form(params, arm) else "-"


def _draw_time(axes: Axes, params: Params, times: pd.DataFrame, axis: str, label: str) -> None:
    table = ratios(times, axis).groupby(level=axis)
    low, middle, high = (table.quantile(q) for q in (0.25, 0.5, 0.75))
    for arm in [str(arm) for arm in middle if arm != PRENORM]:
        colour = plotting.colour(arm)
        axes.fill_between(middle.index, low[arm], high[arm], color=colour, alpha=0.15, linewidth=0)
        axes.plot(middle.index, middle[arm], _style(params, arm), marker="o", color=colour, label=arm, markersize=3)
    axes.axhline(1, color=plotting.COLOURS[PRENORM], label=PRENORM)
    axes.set_xscale("log", base=2)
    axes.set_xticks(middle.index, [str(value) for value in middle.index])
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    ticks = [value for value in TIMES if bottom <= value <= top]
    axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
    axes.minorticks_off()
    axes.set(
        title=f"Measured time by {label.split(' (')[0]}",
        xlabel=label,
        ylabel="training step / pre-norm's\n(median, quartiles)",
    )


def _draw_memory(axes: Axes, params: Params, peaks: pd.DataFrame) -> None:
    table = peaks.pivot(index="blocks", columns="arm", values="inference") / 1e6
    for arm in map(str, table):
        style = "--" if arm == KEYS else _style(params, arm)  # low-rank keys lie on Full's line
        axes.plot(table.index, table[arm], style, marker="o", color=plotting.colour(arm), markersize=3)
    for style, name in (("-", "by the kernel"), (":", "plain form")):
        axes.plot([], [], style, color="0.3", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    plotting.legend_beside(axes, room=0.15)
    axes.set_xticks(table.index, [str(blocks) for blocks in table.index])
    axes.set(title="Memory without gradients", xlabel="depth (blocks)", ylabel="peak beyond the weights (MB)")


def _draw_traffic(axes: Axes, table: pd.DataFrame, sublayers: int) -> None:
    places = np.arange(len(table))
    styles = {"published": ("white", ""), "planned": ("0.75", " (counted)"), "measured": ("0.35", "")}
    for number, (column, (face, how)) in enumerate(styles.items()):
        at = places + 0.27 * (number - 1)
        bars = axes.bar(at, table[column], 0.25, color=face, edgecolor="black", label=column + how)
        axes.bar_label(bars, fmt=lambda value: "" if np.isnan(value) else f"{value:.3g}", fontsize=6)
    axes.set_yscale("log")
    axes.set_axisbelow(True)
    axes.set_xticks(places, [name.replace(", ", ",\n") for name in table.index])
    axes.set(
        title="Traffic of the stream",
        xlabel=f"{sublayers} sublayers (published: 128)",
        ylabel="moved a token and sublayer\n(times d numbers)",
    )
    plotting.legend_beside(axes, room=0.15, ncols=3)


def _draw_pareto(axes: Axes, params: Params, times: pd.DataFrame, trained: Runs) -> None:
    depth = params.claims.attention_residual_cost.depth
    cost = ratios(times, "blocks").groupby(level="blocks").median().loc[depth]
    for arm, records in trained.items():
        losses, colour = held_out(records), plotting.colour(arm)
        mean = mean_of(losses)
        axes.plot([cost[arm]] * len(losses), losses, "o", color=colour, markersize=3, alpha=0.6)
        height = np.nan if mean.value is None else mean.value
        name = f"{arm} (plain form)" if in_plain_form(params, arm) else arm
        axes.plot(cost[arm], height, "D", color=colour, markersize=6, label=name)
    axes.set(
        title=f"Loss beside cost ({depth} blocks)",
        xlabel="training step / pre-norm's (measured)",
        ylabel="nats per byte (test; seeds and mean)",
    )
    plotting.legend_beside(axes, room=0.35)
