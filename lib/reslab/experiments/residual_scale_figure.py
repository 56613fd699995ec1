"""The figure of claim 07."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from reslab import plotting
from reslab.comparison import Runs, each, held_out
from reslab.curves import excess_rise, label
from reslab.experiments.pre_vs_post_ln_figure import MARKS
from reslab.experiments.residual_scale import DEEP_SCALES, SHALLOW_SCALES, TITLE, Grid, arm_name
from reslab.experiments.residual_scale_exact import SCALES, growth_law
from reslab.experiments.residual_scale_inside import Inside
from reslab.stats import moving_average

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]


def draw(
    params: Params,
    against_law: pd.DataFrame,
    untrained: pd.DataFrame,
    tried: Grid,
    trained: Runs,
    seen: Mapping[str, Sequence[Inside]],
) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_growth(axes[0], params, against_law, untrained)
        _draw_map(axes[1], params, tried)
        _draw_rises(axes[2], params, tried)
        _draw_losses(axes[3], params, trained)
        _draw_results(axes[4], params, trained)
        _draw_costs(axes[5], params, seen)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _draw_growth(axes: Axes, params: Params, against_law: pd.DataFrame, untrained: pd.DataFrame) -> None:
    depth = params.claims.residual_scale.exact.decoder.depth
    line = np.geomspace(min(SCALES), max(SCALES), 50)
    axes.plot(line, [growth_law(s, depth) for s in line], color="0.3", linestyle=":", label="law: 1 + 2 L s²")
    laws = [growth_law(s, depth) for s in against_law["scale"]]
    size: dict[str, Any] = {"linestyle": "none", "markersize": 5, "alpha": 0.7}
    black = plotting.COLOURS["control"]
    axes.plot(against_law["scale"], against_law["stream"] * laws, "o", color=black, label="unit branches", **size)
    axes.plot(untrained["scale"], untrained["growth"], "^", color=plotting.colour("add"), label="decoder", **size)
    axes.set(xscale="log", yscale="log", xlabel="branch scale s", ylabel="mean square of the stream,\nlast / first")
    axes.set_title(f"Untrained: growth over {depth} blocks")
    axes.set_xticks(SCALES, [f"{s:g}" for s in SCALES])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(loc="upper left")


def _draw_map(axes: Axes, params: Params, tried: Grid) -> None:
    deep = params.claims.residual_scale.deep
    places = [
        (column + 0.7 * ((seed + 0.5) / len(records) - 0.5), row, label(record))
        for row, scale in enumerate(DEEP_SCALES)
        for column, rate in enumerate(deep.learning_rates)
        for records in [tried[scale, rate]]
        for seed, record in enumerate(records)
    ]
    for name, (marker, shade) in MARKS.items():
        x, y = ([place[axis] for place in places if place[2] == name] for axis in (0, 1))
        axes.scatter(x, y, s=34, marker=marker, color=shade, edgecolors="0.3", linewidths=0.5, label=name)
    axes.set_yticks(range(len(DEEP_SCALES)), [f"{scale:g}" for scale in DEEP_SCALES])
    axes.set_xticks(range(len(deep.learning_rates)), [f"{rate:g}" for rate in deep.learning_rates])
    axes.set_ylim(len(DEEP_SCALES) - 0.5, -1.3)
    axes.set(
        title=f"{deep.depth} blocks: outcomes (one mark a seed)",
        xlabel="peak learning rate",
        ylabel="branch scale s",
    )
    axes.grid(False)
    axes.legend(ncols=3, loc="upper center", columnspacing=1.0, handletextpad=0.2)


def _draw_rises(axes: Axes, params: Params, tried: Grid) -> None:
    deep = params.claims.residual_scale.deep
    for place, scale in enumerate(DEEP_SCALES):
        name, means = arm_name(scale), []
        at = [column + 0.18 * (place - (len(DEEP_SCALES) - 1) / 2) for column in range(len(deep.learning_rates))]
        for x, rate in zip(at, deep.learning_rates, strict=True):
            values = each(tried[scale, rate], excess_rise)
            plotting.interval(axes, x, values, plotting.colour(name))
            means.append(float(np.mean(values)))
        axes.plot(at, means, color=plotting.colour(name), linewidth=1, label=name)
    axes.set_xticks(range(len(deep.learning_rates)), [f"{rate:g}" for rate in deep.learning_rates])
    axes.set_title(f"{deep.depth} blocks: how far the loss rises")
    axes.set(xlabel="peak learning rate", ylabel="largest rise (nats),\nguess taken off")
    plotting.legend_beside(axes)


def _draw_losses(axes: Axes, params: Params, trained: Runs) -> None:
    settled: list[float] = []
    for scale in SHALLOW_SCALES:
        records = trained[arm_name(scale)]
        series = [moving_average(record.train_loss, 10) for record in records]
        plotting.seed_lines(axes, arm_name(scale), series)
        settled += [value for values in series for value in values[len(values) // 6 :] if np.isfinite(value)]
    entropy = trained[arm_name(SHALLOW_SCALES[0])][0].context_free_loss
    axes.axhline(entropy, color=plotting.COLOURS["control"], linestyle=":", label="unigram entropy")
    if settled:
        axes.set_ylim(min(*settled, entropy) - 0.1, max(*settled, entropy) + 0.3)
    axes.set(xlabel="step", ylabel="training loss\n(nats per byte, mean of 10)")
    axes.set_title(f"{params.claims.residual_scale.depth} blocks, each at its best rate")
    axes.legend()


def _draw_results(axes: Axes, params: Params, trained: Runs) -> None:
    for at, scale in enumerate(SHALLOW_SCALES):
        plotting.interval(axes, at, held_out(trained[arm_name(scale)]), plotting.colour(arm_name(scale)))
    axes.set_xticks(range(len(SHALLOW_SCALES)), [f"{scale:g}" for scale in SHALLOW_SCALES])
    axes.set_xlim(-0.5, len(SHALLOW_SCALES) - 0.5)
    axes.set_title(f"{params.claims.residual_scale.depth} blocks: result (bars: 95 % interval)")
    axes.set(xlabel="branch scale s", ylabel="test loss (nats per byte)")


def _draw_costs(axes: Axes, params: Params, seen: Mapping[str, Sequence[Inside]]) -> None:
    for scale in SHALLOW_SCALES:
        name, found = arm_name(scale), seen[arm_name(scale)]
        depth = np.mean([one.effective_depth for one in found])
        plotting.seed_lines(axes, name, [one.costs for one in found], label=False)
        axes.plot([], [], color=plotting.colour(name), label=f"s = {scale:g}: effective depth {depth:.2g}")
    blocks = params.claims.residual_scale.depth
    axes.set_xticks(range(0, blocks, max(1, blocks // 6)))
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set(title="Trained: what skipping a block costs", xlabel="block skipped (0: first)", ylabel="nats per byte")
    plotting.legend_beside(axes, ncols=1)
