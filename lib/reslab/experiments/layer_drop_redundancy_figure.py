"""The figure of claim 05."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reslab import plotting
from reslab.experiments.layer_drop_measured import BY_INFLUENCE, BY_LOSS, ORDERS, Healed, Measured, quarter
from reslab.experiments.layer_drop_redundancy import HOPS_METHODS, SHARE, TITLE, Models, hops_name, on_text, text_name
from reslab.stats import mean_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

RANDOM = "random"
LINEAR = 0.01
"""Share below which the axis of single blocks is linear: on text they cost hundredths, at pointer chasing all."""
SHARES = (-1, -0.1, -LINEAR, 0, LINEAR, 0.1, 1)
"""Ticks of that axis."""


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
        _draw_influence(axes[2], initial, found, untrained)
        _draw_methods(axes[3], params, on_text(params, found), "Text")
        _draw_methods(axes[4], params, {name: found[hops_name(name)] for name in HOPS_METHODS}, "Pointer chasing")
        _draw_healing(axes[5], params, after)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _draw_orders(axes: Axes, params: Params, found: Sequence[Measured], untrained: Sequence[Measured]) -> None:
    series: dict[str, list[Sequence[float]]] = {order: [m.curves[order] for m in found] for order in ORDERS}
    series[RANDOM] = [model.random_curve() for model in found]
    before: dict[str, list[Sequence[float]]] = {
        BY_INFLUENCE: [model.curves[BY_INFLUENCE] for model in untrained],
        RANDOM: [model.random_curve() for model in untrained],
    }
    for at, (order, curves) in enumerate(series.items()):
        _lines(axes, order, curves, label=order, aside=0.08 * (at - 2.5))
    for order, curves in before.items():
        _lines(axes, order, curves, style="--")
    axes.plot([], [], color="black", linestyle="--", label="untrained model")
    _mark_quarter(axes, params.claims.layer_drop_redundancy.text.depth)
    _show(axes, [v for drawn in (series, before) for curves in drawn.values() for curve in curves for v in curve])
    axes.set(title="Text, add: which blocks go?", xlabel="blocks dropped", ylabel="test loss added (nats per byte)")
    plotting.legend_beside(axes, room=0.35)


def _lines(
    axes: Axes,
    name: str,
    series: Sequence[Sequence[float]],
    *,
    label: str | None = None,
    style: str = "-",
    first: int = 1,
    aside: float = 0.0,
) -> None:
    """A dot a seed, and the mean over seeds with its 95 % interval; at `first`, `first` + 1, ..., moved `aside`."""
    colour, xs = plotting.colour(name), np.arange(len(series[0])) + first + aside
    columns = list(zip(*series, strict=True))
    means = [mean_of(values).value for values in columns]
    centre = [np.nan if mean is None else mean for mean in means]
    axes.plot(xs, centre, color=colour, linestyle=style, linewidth=1.2, label=label)
    for x, values in zip(xs, columns, strict=True):
        plotting.interval(axes, x, values, colour, size=1.5, width=2.5)


def _show(axes: Axes, values: Iterable[float]) -> None:
    """Limits, on any scale, that hold the values and zero; an interval over few seeds may reach beyond and is cut."""
    scale = axes.yaxis.get_transform()
    seen = scale.transform(np.array([0.0, *(value for value in values if np.isfinite(value))]))
    room = 0.1 * (seen.max() - seen.min()) or 0.1
    axes.set_ylim(*scale.inverted().transform(np.array([seen.min() - room, seen.max() + room])))


def _mark_quarter(axes: Axes, depth: int) -> None:
    axes.axvline(quarter(depth), color=plotting.COLOURS["control"], linewidth=0.8, linestyle=":", label="a quarter")
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=0.8)
    axes.set_xticks(range(1, depth // 2 + 1))


def _draw_single(axes: Axes, found: Models) -> None:
    drawn: list[list[list[float]]] = []
    for task, name, style in (("text", text_name, "-"), ("pointer chasing", hops_name, "--")):
        for method in HOPS_METHODS:
            series = [[model.share(cost) for cost in model.single] for model in found[name(method)]]
            aside = 0.12 * (len(drawn) - 1.5)
            _lines(axes, method, series, label=f"{method}, {task}", style=style, first=0, aside=aside)
            drawn.append(series)
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set_yticks(SHARES, [f"{share:g}" for share in SHARES])
    _show(axes, [value for series in drawn for values in series for value in values])
    axes.set(title="One block deleted", xlabel="block (0: first)", ylabel=SHARE)
    plotting.legend_beside(axes)


def _draw_influence(axes: Axes, initial: pd.DataFrame, found: Models, untrained: Sequence[Measured]) -> None:
    grey = plotting.COLOURS["control"]
    for method in HOPS_METHODS:
        learnt = [model.influence for model in found[text_name(method)] if np.isfinite(model.gain)]
        plotting.seed_lines(axes, method, learnt, label=False)
    plotting.seed_lines(axes, "add", [model.influence for model in untrained], style="--", label=False)
    mean = initial.groupby("block")[["measured", "predicted"]].mean()
    axes.plot(mean.index, mean["predicted"], color=grey, linestyle=":", label="plain start: $1-\\sqrt{S_l/S_{l+1}}$")
    axes.plot(initial["block"], initial["measured"], ".", color=grey, alpha=0.4, markersize=4)
    axes.plot([], [], ".", color=grey, label="plain start: measured")
    for method in HOPS_METHODS:
        axes.plot([], [], color=plotting.colour(method), label=f"text, {method}: trained")
    axes.plot([], [], color=plotting.colour("add"), linestyle="--", label="text, add: untrained")
    axes.set(title="Block Influence", xlabel="block (0: first)", ylabel="1 - cosine of input and output", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plotting.legend_beside(axes)


def _draw_methods(axes: Axes, params: Params, found: Models, task: str) -> None:
    section = params.claims.layer_drop_redundancy
    depth = section.text.depth if task == "Text" else section.hops.depth
    series = {method: [model.shares(BY_LOSS) for model in models] for method, models in found.items()}
    for at, (method, curves) in enumerate(series.items()):
        _lines(axes, method, curves, label=method, aside=0.1 * (at - 1.5))
    _mark_quarter(axes, depth)
    little = getattr(section.criteria, "quarter_text" if task == "Text" else "quarter_hops").below
    _show(axes, [value for curves in series.values() for curve in curves for value in curve])
    if little is not None and little < axes.get_ylim()[1]:
        axes.axhline(little, color=plotting.COLOURS["control"], linestyle="--", linewidth=0.8, label="little effect")
    axes.set(title=f"{task}: dropped by loss", xlabel=f"of {depth} blocks dropped", ylabel=SHARE)
    plotting.legend_beside(axes)


def _draw_healing(axes: Axes, params: Params, after: Mapping[str, Sequence[Healed]]) -> None:
    steps = params.claims.layer_drop_redundancy.healing_steps
    for at, (method, models) in enumerate(after.items()):
        colour, places = plotting.colour(method), (at - 0.2, at + 0.2)
        costs = [[model.cost(healed=healed) for model in models] for healed in (False, True)]
        for pair in zip(*costs, strict=True):
            axes.plot(places, pair, "o-", color=colour, linewidth=0.8, markersize=4)
        for place, values in zip(places, costs, strict=True):
            plotting.interval(axes, place, values, colour)
    _show(
        axes, [model.cost(healed=healed) for models in after.values() for model in models for healed in (False, True)]
    )
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=0.8)
    axes.set_xticks(range(len(after)), list(after))
    axes.set_xlim(-0.5, len(after) - 0.5)
    axes.set(title="Text: a quarter dropped, healed", ylabel=SHARE)
    axes.set_xlabel(f"left: at once; right: {steps} training steps on")
