"""The figure of claim 06."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from reslab import plotting
from reslab.comparison import Runs, held_out
from reslab.experiments.attention_residual_gains import TITLE, compute, gain_by_depth, gains, interplay
from reslab.experiments.attention_residual_gains_arms import at_depth, main_methods, section_of
from reslab.experiments.attention_residual_gains_inside import Inside
from reslab.experiments.runs import ENDS
from reslab.stats import mean_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

Seen = dict[str, list[Inside | None]]
Colour = tuple[float, ...]


def draw(params: Params, trained: Runs, seen: Seen) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_gain_by_depth(axes[0], params, trained)
        _draw_methods(axes[1], params, trained)
        _draw_compute(axes[2], compute(params, trained), params, trained)
        _draw_profiles(axes[3], seen)
        _draw_weights(axes[4], seen)
        _draw_elsewhere(axes[5], params, trained)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _zero(axes: Axes, *, sideways: bool = False) -> None:
    line = axes.axvline if sideways else axes.axhline
    line(0, color=plotting.COLOURS["control"], linestyle=":", linewidth=1)


def _draw_gain_by_depth(axes: Axes, params: Params, trained: Runs) -> None:
    section = section_of(params)
    margin = section.criteria.shallow_full  # type: ignore[attr-defined]
    if margin.above is not None and margin.below is not None:
        label = f"none, at {section.depths[0]}"
        axes.axhspan(margin.above, margin.below, color=plotting.COLOURS["control"], alpha=0.12, label=label)
    for number, method in enumerate(("Full", "Block")):
        by_depth = gain_by_depth(params, trained, method)
        places = [depth * (1.03 if number else 0.97) for depth in by_depth]
        means = [mean_of(values).value for values in by_depth.values()]
        axes.plot(places, [np.nan if m is None else m for m in means], color=plotting.colour(method), label=method)
        for place, values in zip(places, by_depth.values(), strict=True):
            plotting.interval(axes, place, values, plotting.colour(method))
    _zero(axes)
    axes.set_xscale("log")
    axes.set_xticks(section.depths, [str(depth) for depth in section.depths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(
        title="Gain over Pre-LN by depth (seeds, 95 %)",
        xlabel="depth (blocks)",
        ylabel="test loss gained (nats per byte)",
    )
    plotting.legend_beside(axes, room=0.2, ncols=3)


def _draw_methods(axes: Axes, params: Params, trained: Runs) -> None:
    section = section_of(params)
    deep, peers = section.depths[-1], section.peers
    rows = [
        ("rescaled", "rescaled", peers.rescaled),
        ("static", "static", peers.static),
        ("DenseFormer", "DenseFormer", peers.denseformer),
        ("mHC", "mHC", peers.mhc),
        ("article's form", "article's form", peers.article),
        ("Block", "Block", deep),
        ("Full", "Full", deep),
    ]
    for at, (_, method, depth) in enumerate(rows):
        baseline, ours = held_out(trained[at_depth("Pre-LN", depth)]), held_out(trained[at_depth(method, depth)])
        gains = [a - b for a, b in zip(baseline, ours, strict=True)]
        plotting.interval(axes, at, gains, plotting.colour(method), sideways=True)
    _zero(axes, sideways=True)
    axes.set_yticks(range(len(rows)), [f"{label} ({depth})" for label, _, depth in rows])
    axes.set(title="Gain over Pre-LN (at so many blocks)", xlabel="test loss gained (nats per byte)")


def _draw_compute(axes: Axes, table: pd.DataFrame, params: Params, trained: Runs) -> None:
    standard = table[table["method"] == "Pre-LN"].set_index("depth")["flops"]
    for method in main_methods(params):
        rows, colour = table[table["method"] == method], plotting.colour(method)
        costs = rows["relative_cost"] * rows["depth"].map(standard)
        axes.plot(rows["flops"], rows["test_loss"].astype(float), "o-", color=colour, label=method)
        for flops, depth in zip(rows["flops"], rows["depth"], strict=True):
            plotting.interval(axes, flops, held_out(trained[at_depth(method, depth)]), colour)
        if method != "Pre-LN":
            axes.plot(costs, rows["test_loss"].astype(float), "o--", color=colour, markerfacecolor="white")
    axes.plot([], [], "o--", color="black", markerfacecolor="white", label="by modelled cost")
    alone = table.loc[table["method"] == ENDS, "test_loss"].astype(float).item()
    if np.isfinite(alone):
        axes.axhline(alone, color=plotting.COLOURS["control"], linestyle=":", label=ENDS)
    axes.set_xscale("log")
    axes.set_xticks(
        standard.tolist(), [f"{flops:.1e}\n({depth})".replace("e+", "e") for depth, flops in standard.items()]
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(
        title="Loss against training compute",
        xlabel="operations, FLOP (blocks of Pre-LN)",
        ylabel="nats per byte (test)",
    )
    plotting.legend_beside(axes)


def _draw_profiles(axes: Axes, seen: Seen) -> None:
    for method, models in seen.items():
        found = [model for model in models if model is not None]
        magnitudes = [np.array(model.magnitudes) / np.median(model.magnitudes) for model in found]
        gradients = [np.array(model.gradients) / np.median(model.gradients) for model in found]
        plotting.seed_lines(axes, method, magnitudes)
        plotting.seed_lines(axes, method, gradients, style="--", label=False)
    axes.plot([], [], color="black", label="rms read")
    axes.plot([], [], color="black", linestyle="--", label="weights' gradient")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"))
    axes.set(title="Trained: magnitude and gradient", xlabel="block (from 0)", ylabel="value / the median block's")
    plotting.legend_beside(axes)


def _draw_weights(axes: Axes, seen: Seen) -> None:
    tables = [model.weights for model in seen["Full"] if model is not None and model.weights is not None]
    axes.set(title="Full: mean depth weight, times n", xlabel="source (0: embedding)", ylabel="read of sublayer")
    if not tables:
        axes.text(0.5, 0.5, "all runs diverged", ha="center", va="center", transform=axes.transAxes)
        return
    mean = np.mean(tables, axis=0)
    relative = np.log2(np.maximum(mean * np.isfinite(mean).sum(1, keepdims=True), 1 / 16))
    shown = axes.imshow(relative, cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    bar = axes.figure.colorbar(shown, ax=axes, ticks=[-3, -2, -1, 0, 1, 2, 3])
    bar.ax.set_yticklabels(["≤1/8", "1/4", "1/2", "1", "2", "4", "≥8"])
    bar.set_label("weight × n")


def _draw_elsewhere(axes: Axes, params: Params, trained: Runs) -> None:
    """Full's gain over Pre-LN where something else was changed, too; and what Full loses without what it needs."""
    section, found, crossed = section_of(params), gains(params, trained), interplay(params, trained)
    rows = [
        ("Full, random queries: lost", found["random_queries"], "control"),
        ("Full, fast queries: lost", found["fast_queries"], "control"),
        ("Full, no key norm: lost", found["key_norm"], "control"),
        ("Full, both Peri-LN", crossed["adds_to_norm"][1], "Full"),
        ("Full, both plain init", crossed["adds_to_init"][1], "Full"),
        ("Full, text", crossed["adds_to_init"][0], "Full"),
        ("Block, digits", found["digits_block"], "Block"),
        ("Full, digits", found["digits_full"], "Full"),
        ("Block, pointer chasing", found["hops_block"], "Block"),
        ("Full, pointer chasing", found["hops_full"], "Full"),
    ]
    for at, (_, values, method) in enumerate(rows):
        plotting.interval(axes, at, values, plotting.colour(method), sideways=True)
        if not np.isfinite(values).any():
            axes.text(0.01, at, "no value (ceiling, or lost)", fontsize=6, va="center")
    _zero(axes, sideways=True)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=6.5)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(
        title=f"Elsewhere (text: {section.middle} blocks)",
        xlabel="nats gained over Pre-LN (grey: lost)\nlogarithmic beyond 0.1",
    )
