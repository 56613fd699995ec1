"""The figure of claim 03."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from reslab import plotting
from reslab.comparison import Runs
from reslab.experiments.layerscale_depth import (
    METHODS,
    OPENING_METHODS,
    PLAIN,
    REZERO,
    THOUSAND_METHODS,
    TITLE,
    arm_name,
    depths_of,
    gain,
)
from reslab.experiments.layerscale_depth_exact import JACOBIANS
from reslab.experiments.layerscale_depth_opening import effective_depths
from reslab.experiments.runs import ENDS
from reslab.stats import mean_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

MARKERS = dict(zip(METHODS, "xos^D", strict=True))


def draw(params: Params, chis: pd.DataFrame, opened: pd.DataFrame, trained: Runs) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_gain(axes[0], params, trained, images=False)
        _draw_gain(axes[1], params, trained, images=True)
        _draw_thousand(axes[2], params, trained)
        _draw_jacobian(axes[3], chis)
        _draw_opening(axes[4], params, opened)
        _draw_scales(axes[5], params, opened)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _draw_gain(axes: Axes, params: Params, trained: Runs, *, images: bool) -> None:
    section = params.claims.layerscale_depth
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=1)
    axes.axvline(section.appears_at, color=plotting.COLOURS["control"], linestyle=":", linewidth=1)
    every = section.images.depths if images else section.depths
    for number, method in enumerate(name for name in METHODS if name != PLAIN):
        depths = depths_of(params, method, images=images)
        if depths:
            _draw_gains_of(axes, method, number, {d: gain(trained, method, d, images=images) for d in depths})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [str(depth) for depth in every])
    axes.set_xlim(every[0] / 1.3, every[-1] * 1.4)
    unit = "points of accuracy" if images else "nats per byte"
    model = "Image encoder" if images else "Decoder"
    axes.set(title=f"{model}: gain over Pre-LN (95 %)", xlabel="depth (blocks)", ylabel=f"gain, {unit}")
    axes.legend()


def _draw_gains_of(axes: Axes, method: str, number: int, gains: dict[int, list[float]]) -> None:
    """One method's seeds, means and intervals, a little to the side of the others'."""
    colour = plotting.colour(method)
    at = [depth * 1.06 ** (number - 1) for depth in gains]
    for x, values in zip(at, gains.values(), strict=True):
        plotting.interval(axes, x, values, colour, marker=MARKERS[method], size=3.5)
    means = [mean_of(values).value for values in gains.values()]
    axes.plot(
        at,
        [np.nan if mean is None else mean for mean in means],
        color=colour,
        marker=MARKERS[method],
        markersize=5,
        label=method,
    )


def _draw_thousand(axes: Axes, params: Params, trained: Runs) -> None:
    section = params.claims.layerscale_depth.thousand
    for method in THOUSAND_METHODS:
        plotting.seed_lines(axes, method, [record.train_loss for record in trained[arm_name(method, section.depth)]])
    plotting.seed_lines(axes, ENDS, [record.train_loss for record in trained[ENDS]], style="--")
    axes.axhline(np.log(256), color=plotting.COLOURS["control"], linewidth=1, label="guessing at random")
    axes.axhline(
        np.log(256) - section.trains_from,
        color=plotting.COLOURS["control"],
        linestyle=":",
        label=f"{section.trains_from:g} below",
    )
    axes.set(title=f"{section.depth} blocks: training loss", xlabel="step", ylabel="nats per byte (batch)")
    plotting.legend_beside(axes)


def _draw_jacobian(axes: Axes, chis: pd.DataFrame) -> None:
    for arm in JACOBIANS:
        chosen = chis[chis["arm"] == arm]
        colour = plotting.colour(arm)
        axes.plot(chosen["depth"], chosen["chi"], ".", color=colour, alpha=0.4)
        mean = chosen.groupby("depth")["chi"].agg(lambda values: np.exp(np.log(values).mean()))
        axes.plot(mean.index, mean.to_numpy(), color=colour, label=f"{arm}: 0" if arm == REZERO else arm)
    depths = sorted(chis["depth"].unique())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(
        title="Untrained: does the stack pass signals on?",
        xlabel="depth (blocks)",
        ylabel="mean squared singular value",
    )
    axes.legend()


def _draw_opening(axes: Axes, params: Params, opened: pd.DataFrame) -> None:
    section = params.claims.layerscale_depth
    for method in OPENING_METHODS:
        by_stage = np.array([effective_depths(opened, method, stage) for stage in section.stages])
        colour = plotting.colour(method)
        axes.plot(section.stages, by_stage, color=colour, linewidth=0.6, alpha=0.5, marker=".", markersize=3)
        axes.plot(section.stages, by_stage.mean(1), color=colour, label=method)
    axes.axvline(section.stages[2], color=plotting.COLOURS["control"], linestyle=":", linewidth=1, label="early")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_ylim(bottom=0)
    axes.set(
        title=f"How {section.appears_at} blocks open over training",
        xlabel="updates done",
        ylabel=f"effective depth (of {2 * section.appears_at} sublayers)",
    )
    plotting.legend_beside(axes)


def _draw_scales(axes: Axes, params: Params, opened: pd.DataFrame) -> None:
    section = params.claims.layerscale_depth
    for method in [name for name in OPENING_METHODS if name != PLAIN]:
        for stage, style in ((section.stages[2], "--"), (section.stages[-1], "-")):
            chosen = opened[(opened["method"] == method) & (opened["step"] == stage)]
            series = [seed.sort_values("sublayer")["scale"].to_numpy() for _, seed in chosen.groupby("seed")]
            plotting.seed_lines(axes, method, series, style=style, label=style == "-")
    axes.plot([], [], color="black", label="after training")
    axes.plot([], [], color="black", linestyle="--", label="early")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        title=f"Learnt scales by layer ({section.appears_at} blocks)",
        xlabel="sublayer (0: first attention)",
        ylabel="mean size of the scale",
    )
    plotting.legend_beside(axes)
