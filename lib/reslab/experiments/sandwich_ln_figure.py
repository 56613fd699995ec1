"""The figure of claim 08."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reslab import plotting
from reslab.comparison import Runs, held_out
from reslab.experiments.sandwich_ln import (
    METHODS,
    MISMATCH_METHODS,
    PRE,
    SANDWICH,
    STABILITY_METHODS,
    TITLE,
    Grid,
    arm_name,
    gains,
    ratios,
)
from reslab.residuals import Placement
from reslab.stats import median_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

MARKERS = dict(zip(METHODS, "os^D", strict=True))
NAMES: dict[Placement, str] = {placement: method for method, placement in METHODS.items()}
GREY = plotting.COLOURS["control"]


def draw(params: Params, grown: pd.DataFrame, timed: pd.DataFrame, trained: Runs, tried: Grid) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_growth(axes[0], grown)
        _draw_equal(axes[1], params, trained)
        _draw_rates(axes[2], params, tried)
        _draw_times(axes[3], params, timed)
        _draw_mismatch(axes[4], params, trained)
        _draw_gains(axes[5], params, trained)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _draw_growth(axes: Axes, grown: pd.DataFrame) -> None:
    deepest = grown[grown["depth"] == grown["depth"].max()]
    for placement, method in NAMES.items():
        table = deepest[deepest["placement"] == placement].pivot(index="seed", columns="block", values="mean_square")
        style = "--" if placement == "peri" else "-"  # it lies on Sandwich-LN's line
        plotting.seed_lines(axes, method, list(table.to_numpy()), style=style)
    blocks = np.arange(deepest["depth"].max() + 1)
    start = deepest[(deepest["placement"] == "sandwich") & (deepest["block"] == 0)]["mean_square"].mean()
    axes.plot(blocks, start + 2 * blocks, color=GREY, linestyle=":", label=r"$s_0 + 2l$")
    axes.set_yscale("log", base=2)
    axes.set(title="Untrained: size of the stream", xlabel="block", ylabel=r"$E|x_l|^2/d$")
    axes.legend()


def _draw_equal(axes: Axes, params: Params, trained: Runs) -> None:
    """Held-out loss less Pre-LN's, within the margin of equivalence."""
    section = params.claims.sandwich_ln
    plain = held_out(trained[arm_name(PRE, section.depth)])
    criterion = section.criteria.equal_sandwich  # type: ignore[attr-defined]
    axes.axhspan(criterion.above, criterion.below, color=GREY, alpha=0.15, label="counts as equal")
    axes.axhline(0, color=GREY, linewidth=1)
    others = [method for method in METHODS if method != PRE]
    for at, method in enumerate(others):
        own = held_out(trained[arm_name(method, section.depth)])
        differences = [a - b for a, b in zip(own, plain, strict=True)]
        plotting.interval(axes, at, differences, plotting.colour(method), marker=MARKERS[method])
    axes.set_xticks(range(len(others)), [name.replace(" after", "\nafter") for name in others])
    axes.set_xlim(-0.6, len(others) - 0.4)
    axes.set(title=f"Loss less Pre-LN's, {section.depth} blocks (95 %)", ylabel="nats per byte (below 0: better)")
    axes.legend()


def _draw_rates(axes: Axes, params: Params, tried: Grid) -> None:
    """Validation loss by learning rate: where does each method stop training?"""
    section = params.claims.sandwich_ln
    for number, method in enumerate(STABILITY_METHODS):
        colour, rates = plotting.colour(method), section.stability.learning_rates
        at = [rate * 1.07 ** (number - 1) for rate in rates]
        values = [held_out(tried[method, rate], "validation_loss") for rate in rates]
        for x, losses in zip(at, values, strict=True):
            axes.plot([x] * len(losses), losses, MARKERS[method], color=colour, markersize=3.5, alpha=0.6)
        axes.plot(at, [float(np.mean(losses)) for losses in values], color=colour, label=method)
    guess = tried[PRE, section.stability.learning_rates[0]][0].context_free_loss
    axes.axhline(guess, color=GREY, linestyle=":", label="best guess without context")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    axes.minorticks_off()
    axes.set(
        title=f"Rates that are borne, {section.small_depth} blocks",
        xlabel="peak learning rate",
        ylabel=f"nats per byte after {section.stability.steps} steps",
    )
    axes.legend()


def _draw_times(axes: Axes, params: Params, timed: pd.DataFrame) -> None:
    section = params.claims.sandwich_ln
    criterion = section.criteria.time_sandwich  # type: ignore[attr-defined]
    axes.axhspan(criterion.above, criterion.below, color=GREY, alpha=0.15, label="a little")
    widths = sorted(timed["width"].unique())
    for number, method in enumerate(name for name in METHODS if name != PRE):
        for place, width in enumerate(widths):
            at, rounds = place + 0.22 * (number - 1), ratios(timed, method, width)
            plotting.interval(axes, at, rounds, plotting.colour(method), marker=MARKERS[method], of=median_of)
        axes.plot([], [], MARKERS[method], color=plotting.colour(method), label=method)
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_xlim(-0.6, len(widths) - 0.4)
    axes.set(
        title="Time of a training step",
        xlabel="width",
        ylabel="times Pre-LN's (rounds, median)",
    )
    plotting.legend_beside(axes)


def _draw_mismatch(axes: Axes, params: Params, trained: Runs) -> None:
    """Held-out losses without and with foreign branches."""
    section = params.claims.sandwich_ln
    for number, method in enumerate(MISMATCH_METHODS):
        at = [place + 0.1 * (2 * number - 1) for place in (0, 1)]
        losses = [
            held_out(trained[arm_name(method, section.small_depth, foreign=foreign)]) for foreign in (False, True)
        ]
        for x, values in zip(at, losses, strict=True):
            plotting.interval(axes, x, values, plotting.colour(method), marker=MARKERS[method])
        means = [float(np.mean(values)) for values in losses]
        axes.plot(at, means, color=plotting.colour(method), linewidth=1, label=method)
    axes.set_xticks([0, 1], ["all alike", f"foreign branches (x {section.factor:g})"])
    axes.set_xlim(-0.5, 1.5)
    axes.set(title=f"Test loss, {section.small_depth} blocks (95 %)", ylabel="nats per byte")
    axes.legend()


def _draw_gains(axes: Axes, params: Params, trained: Runs) -> None:
    """What Sandwich-LN gains over Pre-LN, seed by seed."""
    section = params.claims.sandwich_ln
    margin = section.criteria.gain_ordinary  # type: ignore[attr-defined]
    axes.axhspan(margin.above, margin.below, color=GREY, alpha=0.15, label="counts as nothing")
    axes.axhline(0, color=GREY, linewidth=1)
    found = [gains(params, trained, foreign=foreign) for foreign in (False, True)]
    for at, values in enumerate(found):
        plotting.interval(axes, at, values, plotting.colour(SANDWICH), marker=MARKERS[SANDWICH])
    for pair in zip(*found, strict=True):
        if all(map(math.isfinite, pair)):
            axes.plot([0, 1], pair, color=plotting.colour(SANDWICH), linewidth=0.6, alpha=0.5)
    axes.plot([], [], color=plotting.colour(SANDWICH), linewidth=0.6, label="one seed")
    axes.set_xticks([0, 1], ["all alike", f"foreign branches (x {section.factor:g})"])
    axes.set_xlim(-0.5, 1.5)
    axes.set(title="Sandwich-LN's gain (95 %)", ylabel="nats per byte gained")
    axes.legend()
