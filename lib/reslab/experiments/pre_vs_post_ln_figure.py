"""The figure of claim 02."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from reslab import plotting
from reslab.comparison import Runs, profile_of
from reslab.curves import LABELS, Label, label
from reslab.experiments.pre_vs_post_ln import GAIN, TITLE, WEIGHT, turns
from reslab.experiments.pre_vs_post_ln_exact import INITIAL_ARMS, initial_streams, stream_band
from reslab.experiments.pre_vs_post_ln_grid import METHODS, Grid, best, brackets, jumps
from reslab.stats import mean_of, moving_average

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

_SHADES = mpl.colormaps["cividis"](np.linspace(1, 0, 5))
MARKS: dict[Label, tuple[str, str]] = {
    name: (marker, mpl.colors.to_hex(shade)) for name, marker, shade in zip(LABELS, "o^>sX", _SHADES, strict=True)
}
"""Marker and shade of each outcome."""


def draw(params: Params, initial: pd.DataFrame, tried: Grid, trained: Runs) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_map(axes[0], params, tried)
        _draw_losses(axes[1], params, tried, trained)
        _draw_thresholds(axes[2], params, tried)
        _draw_streams(axes[3], params, tried)
        _draw_gradients(axes[4], initial)
        _draw_turns(axes[5], params, tried, trained)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _draw_map(axes: Axes, params: Params, tried: Grid) -> None:
    section = params.claims.pre_vs_post_ln
    rows = [(method, depth) for method in METHODS for depth in section.depths]
    places = [
        (column + 0.7 * ((seed + 0.5) / len(records) - 0.5), row, record)
        for row, (method, depth) in enumerate(rows)
        for column, rate in enumerate(section.learning_rates)
        for records in [tried[method, depth, rate]]
        for seed, record in enumerate(records)
    ]
    for name, (marker, shade) in MARKS.items():
        x, y = _unzipped([(x, y) for x, y, record in places if label(record) == name])
        axes.scatter(x, y, s=20, marker=marker, color=shade, edgecolors="0.3", linewidths=0.5, label=name)
    x, y = _unzipped([(x, y) for x, y, record in places if jumps(record)])
    axes.scatter(x, y, s=70, marker="o", facecolors="none", edgecolors="black", linewidths=0.9, label="its loss jumped")
    for border in range(1, len(METHODS)):
        axes.axhline(border * len(section.depths) - 0.5, color="0.3", linewidth=0.8)
    short = {"Post-LN, long warm-up": "long w."}
    names = [f"{short.get(method, method)}  {depth}" for method, depth in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_xticks(range(len(section.learning_rates)), [f"{rate:g}" for rate in section.learning_rates])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set(title="Outcomes (one mark a seed)", xlabel="peak learning rate", ylabel="norm, blocks")
    axes.grid(False)
    plotting.legend_beside(axes, room=0.18, ncols=3)


def _unzipped(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _draw_losses(axes: Axes, params: Params, tried: Grid, trained: Runs) -> None:
    section = params.claims.pre_vs_post_ln
    shallow, deep = section.depths[0], section.depths[-1]
    drawn = [
        (m, best(params, tried, m, depth), style)
        for m in ("Pre-LN", "Post-LN")
        for depth, style in ((shallow, "--"), (deep, "-"))
    ]
    drawn.append(("DeepNorm", trained["DeepNorm"], "-"))
    settled: list[float] = []
    for method, records, style in drawn:
        series = [moving_average(record.train_loss, 10) for record in records]
        plotting.seed_lines(axes, method, series, style=style, label=style == "-")
        settled += [value for values in series for value in values[len(values) // 5 :] if np.isfinite(value)]
    entropy = tried["Pre-LN", shallow, section.learning_rates[0]][0].context_free_loss
    axes.axhline(entropy, color=plotting.COLOURS["control"], linestyle=":", label="unigram entropy")
    axes.plot([], [], color="black", label=f"{deep} blocks")
    axes.plot([], [], color="black", linestyle="--", label=f"{shallow} blocks")
    axes.set(title="Training loss at the best rates", xlabel="step", ylabel="nats per byte (mean of 10 steps)")
    if settled:
        axes.set_ylim(min(settled) - 0.1, max(*settled, entropy) + 0.3)
    axes.legend()


def _draw_thresholds(axes: Axes, params: Params, tried: Grid) -> None:
    section = params.claims.pre_vs_post_ln
    lowest, highest = section.learning_rates[0], section.learning_rates[-1]
    for at, method in enumerate(METHODS):
        colour = plotting.colour(method)
        places = [depth * 1.05 ** (3 * (at - 1)) for depth in section.depths]
        means = []
        for depth, place in zip(section.depths, places, strict=True):
            found = brackets(params, tried, method, depth)
            for seed, bracket in enumerate(found):
                x = place * 1.05 ** (seed - (len(found) - 1) / 2)
                if math.isfinite(bracket.threshold):
                    axes.plot(x, bracket.threshold, "o", color=colour, markersize=4)
                elif bracket.bears is not None:
                    axes.plot(x, highest * 1.5, "^", color=colour, markersize=5, markerfacecolor="none")
                elif bracket.fails is not None:
                    axes.plot(x, lowest / 1.5, "v", color=colour, markersize=5, markerfacecolor="none")
            means.append(_draw_interval(axes, place, [b.threshold for b in found], colour))
        axes.plot(places, means, color=colour, linewidth=1, label=method)
    for edges, name in (((highest, highest * 1000), "not tried"), ((lowest / 1000, lowest), None)):
        axes.axhspan(*edges, facecolor="0.9", edgecolor="0.6", linewidth=0.5, zorder=0, label=name)
    axes.plot([], [], "^", color="0.3", markerfacecolor="none", linestyle="none", label="above all (▽ below)")
    axes.set(xscale="log", yscale="log", xlabel="depth (blocks)", ylabel="threshold learning rate")
    axes.set_ylim(lowest / 3, highest * 3)
    axes.set_xticks(section.depths, [str(depth) for depth in section.depths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title("Rate above which training fails")
    plotting.legend_beside(axes, below=True)


def _draw_interval(axes: Axes, x: float, values: Sequence[float], colour: tuple[float, ...]) -> float:
    """The 95 % interval of the logarithm as a bar; returns the geometric mean, not a number where there is none."""
    mean = mean_of([math.log10(value) for value in values])
    if mean.value is None:
        return math.nan
    if mean.low is not None and mean.high is not None:
        bar = [10**mean.low, 10**mean.high]
        axes.plot([x, x], bar, color=colour, linewidth=5, alpha=0.3, solid_capstyle="butt")
    return float(10**mean.value)


def _draw_streams(axes: Axes, params: Params, tried: Grid) -> None:
    section = params.claims.pre_vs_post_ln
    deep, exact = section.depths[-1], section.exact
    low, high = zip(*map(stream_band, range(deep + 1)), strict=True)
    axes.fill_between(range(deep + 1), low, high, color="0.85", label="proved (Pre-LN, untrained)", zorder=0)
    for method in ("Pre-LN", "Post-LN"):
        untrained = initial_streams(deep, exact.seeds, exact.tokens, exact.width, method)
        plotting.seed_lines(axes, method, untrained, style="--", label=False)
        after = [profile_of(record, "mean_square") for record in best(params, tried, method, deep)]
        plotting.seed_lines(axes, method, after)
    axes.plot([], [], color="black", label="trained")
    axes.plot([], [], color="black", linestyle="--", label="untrained, unit scale")
    axes.set(title=f"The stream's growth ({deep} blocks)", xlabel="after block (0: embedding)", yscale="log")
    axes.set_ylabel("mean square of the stream")
    plotting.legend_beside(axes, below=True)


def _draw_gradients(axes: Axes, initial: pd.DataFrame) -> None:
    depths = sorted(initial["depth"].unique())
    for arm in INITIAL_ARMS:
        chosen = initial[initial["arm"] == arm]
        axes.plot(chosen["depth"], chosen["gradient"], ".", color=plotting.colour(arm), alpha=0.4)
        mean = chosen.groupby("depth")["gradient"].mean()
        axes.plot(mean.index, mean.to_numpy(), color=plotting.colour(arm), label=arm)
    for arm, exponent in (("Pre-LN", -0.5), ("Post-LN", 0.0)):
        start = initial[(initial["arm"] == arm) & (initial["depth"] == depths[0])]["gradient"].mean()
        line = [start * (depth / depths[0]) ** exponent for depth in depths]
        axes.plot(depths, line, ":", color="0.3", label="theory: slopes 0 and -1/2" if exponent else None)
    axes.set(xscale="log", yscale="log", title="Untrained: gradient at the last MLP", xlabel="depth (blocks)")
    axes.set_ylabel("Frobenius norm of the gradient")
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend()


def _draw_turns(axes: Axes, params: Params, tried: Grid, trained: Runs) -> None:
    deep = params.claims.pre_vs_post_ln.depths[-1]
    shown = {"Pre-LN": trained["Pre-LN"], GAIN: trained[GAIN], WEIGHT: trained[WEIGHT]}
    shown["Post-LN"] = best(params, tried, "Post-LN", deep)
    for name, records in shown.items():
        axes.plot([], [], color=plotting.colour(name), label=name)  # also where all runs diverged
        series = [[math.nan, *turns(record)] for record in records if record.outcome != "diverged"]
        plotting.seed_lines(axes, name, series, label=False)
    axes.set(title=f"Trained: updates ({deep} blocks)", xlabel="block", ylabel="turn of the stream (degrees)")
    axes.set_ylim(bottom=0)
    axes.legend()
