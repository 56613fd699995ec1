"""The figure of claim 05."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reslab import plotting
from reslab.experiments.layer_drop_measured import BY_INFLUENCE, BY_LOSS, ORDERS, Healed, Measured, quarter
from reslab.experiments.layer_drop_redundancy import HOPS_METHODS, TITLE, Models, hops_name, methods, text_name
from reslab.stats import mean_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]


def draw(
    params: Params,
    initial: pd.DataFrame,
    found: Models,
    untrained: Sequence[Measured],
    after: Mapping[str, Sequence[Healed]],
) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_orders(axes[0], params, found[text_name("add")], untrained)
        _draw_single(axes[1], found)
        _draw_influence(axes[2], initial, found[text_name("add")], untrained)
        _draw_methods(axes[3], params, {name: found[text_name(name)] for name in methods(params)}, "Text")
        _draw_methods(axes[4], params, {name: found[hops_name(name)] for name in HOPS_METHODS}, "Pointer chasing")
        _draw_healing(axes[5], params, after)
        mark = " (smoke scale: not meaningful)" if params.scale == "smoke" else ""
        drawn.suptitle(TITLE + mark, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return drawn


def _draw_orders(axes: Axes, params: Params, found: Sequence[Measured], untrained: Sequence[Measured]) -> None:
    for order in ORDERS:
        _band(axes, order, [model.curves[order] for model in found], label=order)
    _band(axes, "random", [model.random_curve() for model in found], label="random")
    _band(axes, BY_INFLUENCE, [model.curves[BY_INFLUENCE] for model in untrained], style="--")
    _band(axes, "random", [model.random_curve() for model in untrained], style="--")
    axes.plot([], [], color="black", linestyle="--", label="untrained model")
    _mark_quarter(axes, params.claims.layer_drop_redundancy.text.depth)
    axes.set(title="Text, add: which blocks go?", xlabel="blocks dropped", ylabel="test loss added (nats per byte)")
    axes.legend(fontsize=7)


def _band(
    axes: Axes,
    name: str,
    series: Sequence[Sequence[float]],
    *,
    label: str | None = None,
    style: str = "-",
    first: int = 1,
    interval: bool = True,
) -> None:
    """One thin line a seed, the mean as a thick one with its 95 % interval; at `first`, `first` + 1, ..."""
    colour, xs = plotting.colour(name), range(first, first + len(series[0]))
    for values in series:
        axes.plot(xs, values, color=colour, linewidth=0.6, alpha=0.5, linestyle=style)
    means = [mean_of(values) for values in zip(*series, strict=True)]
    centre = [np.nan if mean.value is None else mean.value for mean in means]
    axes.plot(xs, centre, color=colour, linestyle=style, label=label)
    if interval:
        low, high = ([np.nan if (end := getattr(m, side)) is None else end for m in means] for side in ("low", "high"))
        seen = [value for values in series for value in values if np.isfinite(value)]
        axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        if seen:  # an interval over few seeds may be much wider than what was seen
            _widen(axes, min(seen), max(seen))


def _widen(axes: Axes, low: float, high: float) -> None:
    """Limits that hold everything drawn so far by `_band`, and this, with some room."""
    held = getattr(axes, "held", (low, high))
    axes.held = min(low, held[0]), max(high, held[1])  # type: ignore[attr-defined]
    room = 0.08 * (axes.held[1] - axes.held[0]) or 0.1  # type: ignore[attr-defined]
    axes.set_ylim(axes.held[0] - room, axes.held[1] + room)  # type: ignore[attr-defined]


def _mark_quarter(axes: Axes, depth: int) -> None:
    axes.axvline(quarter(depth), color=plotting.COLOURS["control"], linewidth=0.8, linestyle=":")
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=0.8)
    axes.set_xticks(range(1, depth // 2 + 1))


def _draw_single(axes: Axes, found: Models) -> None:
    for task, name, style in (("text", text_name, "-"), ("pointer chasing", hops_name, "--")):
        for method in HOPS_METHODS:
            series = [[model.share(cost) for cost in model.single] for model in found[name(method)]]
            _band(axes, method, series, label=f"{method}, {task}", style=style, first=0)
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=0.8)
    axes.set(title="One block deleted", xlabel="block (0: first)", ylabel="share of the gain lost")
    axes.legend(fontsize=7)


def _draw_influence(
    axes: Axes, initial: pd.DataFrame, found: Sequence[Measured], untrained: Sequence[Measured]
) -> None:
    grey = plotting.COLOURS["control"]
    plotting.seed_lines(axes, "add", [model.influence for model in found if np.isfinite(model.gain)], label=False)
    plotting.seed_lines(axes, "add", [model.influence for model in untrained], style="--", label=False)
    mean = initial.groupby("block")[["measured", "predicted"]].mean()
    axes.plot(mean.index, mean["predicted"], color=grey, linestyle=":", label="plain start: $1-\\sqrt{S_l/S_{l+1}}$")
    axes.plot(initial["block"], initial["measured"], ".", color=grey, alpha=0.4, markersize=4)
    axes.plot([], [], ".", color=grey, label="plain start: measured")
    axes.plot([], [], color=plotting.colour("add"), label="text, add: trained")
    axes.plot([], [], color=plotting.colour("add"), linestyle="--", label="text, add: untrained")
    axes.set(title="Block Influence", xlabel="block (0: first)", ylabel="1 - cosine of input and output", yscale="log")
    axes.legend(fontsize=7)


def _draw_methods(axes: Axes, params: Params, found: Models, task: str) -> None:
    section = params.claims.layer_drop_redundancy
    depth = section.text.depth if task == "Text" else section.hops.depth
    for method, models in found.items():
        _band(axes, method, [model.shares(BY_LOSS) for model in models], label=method)
    _mark_quarter(axes, depth)
    axes.set(title=f"{task}: {depth} blocks, best order", xlabel="blocks dropped", ylabel="share of the gain lost")
    axes.legend(fontsize=7)


def _draw_healing(axes: Axes, params: Params, after: Mapping[str, Sequence[Healed]]) -> None:
    steps = params.claims.layer_drop_redundancy.healing_steps
    for at, (method, models) in enumerate(after.items()):
        colour, places = plotting.colour(method), (at - 0.2, at + 0.2)
        costs = [[model.cost(healed=healed) for model in models] for healed in (False, True)]
        for pair in zip(*costs, strict=True):
            axes.plot(places, pair, "o-", color=colour, linewidth=0.8, markersize=4)
        for place, values in zip(places, costs, strict=True):
            mean = mean_of(values)
            if mean.low is not None and mean.high is not None:
                axes.plot([place] * 2, [mean.low, mean.high], color=colour, linewidth=5, alpha=0.25)
    seen = [model.cost(healed=healed) for models in after.values() for model in models for healed in (False, True)]
    finite = [cost for cost in seen if np.isfinite(cost)]
    if finite:
        _widen(axes, min(*finite, 0.0), max(finite))
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=0.8)
    axes.set_xticks(range(len(after)), [f"{method}\nat once | {steps} steps on" for method in after], fontsize=8)
    axes.set(title="Text: healing a quarter", ylabel="share of the gain lost")
