"""The figure of claim 11."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from reslab import plotting
from reslab.comparison import Runs
from reslab.dilution import Dilution
from reslab.experiments.prenorm_dilution import (
    TITLE,
    Pair,
    Seen,
    at_depth,
    column,
    embedding_share,
    first_share,
    layer_exponent,
    same_rate,
    section_of,
)
from reslab.experiments.prenorm_dilution_exact import FULL, INITIAL_ARMS, LNS, PLAIN, POST, PRE, growth_band
from reslab.stats import mean_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

GREY = plotting.COLOURS["control"]


def draw(params: Params, initial: pd.DataFrame, trained: Runs, seen: Seen, same: Seen) -> Figure:
    """The claim in six panels; `seen` in models at their own best rates, `same` in those at one rate."""
    rates = {name: records[0].config.learning_rate for name, records in trained.items()}
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_initial_shares(axes[0], initial)
        _draw_shares_by_depth(axes[1], params, seen, same)
        _draw_shares_by_layer(axes[2], params, seen, same)
        _draw_stream(axes[3], params, seen, same)
        _draw_outputs(axes[4], params, seen, same)
        _draw_exponents(axes[5], params, seen, rates)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _depth_axis(axes: Axes, depths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("depth of the model (blocks)")


def _draw_initial_shares(axes: Axes, initial: pd.DataFrame) -> None:
    depths = sorted(initial["depth"].unique())
    low, high = zip(*(growth_band(depth) for depth in depths), strict=True)
    axes.fill_between(
        depths, 1 / np.array(high), 1 / np.array(low), color=GREY, alpha=0.2, label="proved for plain init"
    )
    for arm in (PRE, LNS, PLAIN, POST):  # Full starts with the shares of plain init
        chosen = initial[initial["arm"] == arm]
        axes.plot(chosen["depth"], chosen["embedding"], ".", color=plotting.colour(arm), alpha=0.4)
        mean = chosen.groupby("depth")["embedding"].mean()
        axes.plot(mean.index, mean.to_numpy(), color=plotting.colour(arm), label=_initial_name(arm))
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-4)
    _depth_axis(axes, depths)
    axes.set(title="Untrained: what is left of the embedding", ylabel="its share in what the head reads")
    plotting.legend_beside(axes)


def _initial_name(arm: str) -> str:
    weight_init = INITIAL_ARMS[arm][2]
    return f"{arm}, scaled init" if weight_init == "depth_scaled" else arm


def _draw_shares_by_depth(axes: Axes, params: Params, seen: Seen, same: Seen) -> None:
    depths = section_of(params).depths
    stages = ((same, "trained", "-"), (seen, "trained", ":"), (same, "untrained", "--"))
    axes.plot(depths, [1 / (2 * d + 1) for d in depths], ":", color=GREY, label="equal shares (1 of 2L + 1)")
    axes.plot(depths, [2 / (2 * d + 1) for d in depths], "-.", color=GREY, label="equal shares (2 of 2L + 1)")
    measures = (("embedding", embedding_share, plotting.colour(PRE), "o"), ("first block", first_share, "black", "s"))
    for what, measure, colour, marker in measures:
        for models, stage, style in stages:
            by_depth = [column(models[at_depth(PRE, depth)], _of(stage, measure)) for depth in depths]
            means = [mean_of(values).value for values in by_depth]
            line = [np.nan if mean is None else mean for mean in means]
            axes.plot(depths, line, style, color=colour, label=what if style == "-" else None)
            for depth, values in zip(depths, by_depth, strict=True):
                axes.plot([depth] * len(values), values, marker, color=colour, markersize=3.5, alpha=0.7)
    axes.plot([], [], "--", color="black", label="before training")
    axes.plot([], [], ":", color="black", label="own best rate")
    axes.set_yscale("log")
    _depth_axis(axes, depths)
    axes.set(
        title="Pre-LN: shares in what the head reads", ylabel=f"share (solid: all trained at {same_rate(params):g})"
    )
    plotting.legend_beside(axes, below=True)


def _of(stage: str, measure: Callable[[Dilution], float]) -> Callable[[Pair], float]:
    return lambda pair: measure(getattr(pair, stage))


def _series(pairs: Sequence[Pair | None], stage: str, values: Callable[[Dilution], np.ndarray]) -> list[np.ndarray]:
    """One series a seed, of those that did not diverge."""
    return [values(getattr(pair, stage)) for pair in pairs if pair is not None]


def _arms(params: Params) -> dict[str, str]:
    """The arms of the panels by layer: by method the name of its deepest."""
    section = section_of(params)
    deep = {method: at_depth(method, section.depths[-1]) for method in (PRE, PLAIN, LNS, FULL)}
    return {**deep, POST: at_depth(POST, section.middle)}


def _legend_beside(params: Params, axes: Axes, *, below: bool) -> None:
    """The legend, in which Post-LN has its own number of blocks."""
    labels = axes.get_legend_handles_labels()[1]
    named = [f"{label} ({section_of(params).middle} blocks)" if label == POST else label for label in labels]
    plotting.legend_beside(axes, below=below, labels=named)


def _name_same_rate(axes: Axes, params: Params) -> None:
    """In the legend."""
    axes.plot([], [], "-.", color="black", label=f"trained at {same_rate(params):g}")


def _draw_shares_by_layer(axes: Axes, params: Params, seen: Seen, same: Seen) -> None:
    sublayers = 2 * section_of(params).depths[-1]
    axes.plot(1 / np.arange(1, sublayers + 2), ":", color=GREY, label="equal shares (1/n)")
    for method, name in _arms(params).items():
        for models, style in ((seen, "-"), (same, "-.")):
            series = _series(models.get(name, []), "trained", lambda one: one.share(0))
            plotting.seed_lines(axes, method, series, style=style, label=style == "-")
    _name_same_rate(axes, params)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        title="Trained: share of the embedding",
        xlabel=f"sublayer that reads, of {sublayers} (last: the head)",
        ylabel="share in what it reads",
    )
    _legend_beside(params, axes, below=True)


def _draw_stream(axes: Axes, params: Params, seen: Seen, same: Seen) -> None:
    for method, name in _arms(params).items():
        for models, stage, style in ((seen, "trained", "-"), (same, "trained", "-."), (seen, "untrained", "--")):
            series = _series(models.get(name, []), stage, lambda one: one.block_reads**2 / one.reads[0])
            plotting.seed_lines(axes, method, series, style=style, label=style == "-")
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1)
    axes.plot([], [], "--", color="black", label="before training")
    _name_same_rate(axes, params)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        title="What blocks read: its mean square",
        xlabel="block that reads (last: the head)",
        ylabel="mean square / the embedding's",
    )
    _legend_beside(params, axes, below=True)


def _draw_outputs(axes: Axes, params: Params, seen: Seen, same: Seen) -> None:
    for method, name in _arms(params).items():
        for models, stage, style in ((seen, "trained", "-"), (same, "trained", "-."), (seen, "untrained", "--")):
            series = _series(models.get(name, []), stage, lambda one: np.array([np.nan, *one.block_outputs]))
            plotting.seed_lines(axes, method, series, style=style, label=style == "-")
    axes.plot([], [], "--", color="black", label="before training")
    _name_same_rate(axes, params)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="What blocks put out", xlabel="block", ylabel="rms of its two updates")
    _legend_beside(params, axes, below=False)


def _draw_exponents(axes: Axes, params: Params, seen: Seen, rates: Mapping[str, float]) -> None:
    measures: tuple[tuple[str, str, Callable[[Dilution], float], str], ...] = (
        ("output, before training", "untrained", lambda one: layer_exponent(one.block_outputs), "x"),
        ("output, trained", "trained", lambda one: layer_exponent(one.block_outputs), "o"),
        ("output / stream, trained", "trained", lambda one: layer_exponent(one.ratios), "^"),
    )
    names = list(_arms(params).items())
    for row, (method, name) in enumerate(names):
        for number, (_, stage, measure, marker) in enumerate(measures):
            values = column(seen[name], _of(stage, measure))
            at = len(names) - row + 0.25 * (1 - number)
            plotting.interval(axes, at, values, plotting.colour(method), marker=marker, sideways=True)
    axes.axvline(0, color=GREY, linestyle=":", linewidth=1)
    for what, _, _, marker in measures:
        axes.plot([], [], marker, color="black", markersize=4, label=what)
    labels = [f"{method},\nat {rates[name]:g}" for method, name in names]
    axes.set_yticks(range(len(names), 0, -1), labels, fontsize=7)
    axes.set_ylim(0.5, len(names) + 1.6)
    axes.set(title="Do later blocks put out more? (95 %)", xlabel="exponent of the block's number (0: all alike)")
    axes.legend(fontsize=6.5, loc="upper left")
