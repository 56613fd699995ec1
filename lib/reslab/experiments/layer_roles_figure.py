"""The figure of claim 12."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reslab import plotting
from reslab.experiments.layer_roles import HOPS, TITLE, Models, shallow_name, text_name
from reslab.experiments.layer_roles_seen import CURRENT, NEXT, Seen
from reslab.stats import mean_of

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

GREY = plotting.COLOURS["control"]
NAMED = {"add": "add", "none": "no skip"}
"""The colours of the two kinds of connection."""


def draw(params: Params, found: Models, before: Models) -> Figure:
    """The claim in six panels."""
    section = params.claims.layer_roles
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_skills(axes[0], found[text_name("add")], before[text_name("add")])
        axes[0].set_title(f"Text, {section.text.depth} residual blocks: what can be read")
        _draw_skills(axes[1], found[HOPS], before[HOPS])
        axes[1].set_title(f"Pointer chasing, {section.hops.depth} residual blocks")
        _draw_kinds(axes[2], params, found)
        _draw_shared(axes[3], params, found, before)
        _draw_surgery(axes[4], params, found)
        _draw_lens(axes[5], params, found)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _lines(
    axes: Axes,
    colour: tuple[float, ...],
    xs: Sequence[float] | np.ndarray,
    series: Sequence[Sequence[float]],
    *,
    label: str | None = None,
    style: str = "-",
    intervals: bool = True,
) -> None:
    """The mean over seeds as a line, seeds as dots and 95 % intervals as bars; breaks where a seed was not measured."""
    columns = list(zip(*series, strict=True))
    means = [mean_of(values).value for values in columns]
    axes.plot(xs, [np.nan if m is None else m for m in means], color=colour, linestyle=style, label=label)
    for x, values in zip(xs, columns, strict=True):
        if intervals:
            plotting.interval(axes, x, values, colour, size=2, width=3)


def _limit(axes: Axes, series: Sequence[Sequence[float]], extra: Sequence[float] = ()) -> None:
    """Limits that hold the values; an interval over few seeds may reach far beyond and is cut off."""
    seen = [value for values in (*series, extra) for value in values if np.isfinite(value)] or [0.0, 1.0]
    room = 0.08 * (max(seen) - min(seen)) or 0.1
    axes.set_ylim(min(seen) - room, max(seen) + room)


def _draw_skills(axes: Axes, found: Sequence[Seen], before: Sequence[Seen]) -> None:
    shown: list[list[float]] = []
    for name in found[0].skills:
        own, start = [model.own(name) for model in found], [model.own(name) for model in before]
        colour, places = plotting.colour(name), np.arange(len(own[0]))
        _lines(axes, colour, places, own, label=name)
        _lines(axes, colour, places, start, style="--", intervals=False)
        shown += [*own, *start]
    axes.plot([], [], color="black", linestyle="--", label="untrained")
    axes.axhline(0, color=GREY, linewidth=0.8)
    _limit(axes, shown)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="after block (0: embedding)", ylabel="skill of a linear probe (1: certain)")
    plotting.legend_beside(axes, ncols=3)


def _draw_kinds(axes: Axes, params: Params, found: Models) -> None:
    """Hue by property; with residuals solid, without dotted."""
    shown: list[list[float]] = []
    for kind, style in (("add", "-"), ("none", ":")):
        for name in (CURRENT, NEXT):
            own = [model.own(name) for model in found[shallow_name(params, kind)]]
            label = f"{name}, {NAMED[kind]}"
            _lines(axes, plotting.colour(name), np.arange(len(own[0])), own, label=label, style=style)
            shown += own
    axes.axhline(0, color=GREY, linewidth=0.8)
    _limit(axes, shown)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        title=f"Text, {params.claims.layer_roles.shallow.depth} blocks: with skips and without",
        xlabel="after block (0: embedding)",
        ylabel="skill of a linear probe (1: certain)",
    )
    plotting.legend_beside(axes)


def _arms(params: Params) -> list[tuple[str, str, tuple[float, ...], str]]:
    """Arms that may have learned something: name, label, colour, line style."""
    section = params.claims.layer_roles
    add, none = plotting.colour("add"), plotting.colour("no skip")
    return [
        (text_name("add"), f"add, {section.text.depth} blocks", add, "-"),
        (shallow_name(params, "add"), f"add, {section.shallow.depth} blocks", add, "--"),
        (shallow_name(params, "none"), f"no skip, {section.shallow.depth} blocks", none, "-"),
        (HOPS, f"add, {section.hops.depth} blocks, pointers", add, ":"),
    ]


def _draw_shared(axes: Axes, params: Params, found: Models, before: Models) -> None:
    def kept(models: Sequence[Seen]) -> tuple[range, list[list[float]]]:
        distances = range(1, len(models[0].lens))
        return distances, [[model.kept(distance) for distance in distances] for model in models]

    for name, label, colour, style in _arms(params):
        _lines(axes, colour, *kept(found[name]), label=label, style=style)
    _lines(axes, GREY, *kept(before[text_name("add")]), label="add, untrained", style="--", intervals=False)
    near = params.claims.layer_roles.criteria.shared_text.above  # type: ignore[attr-defined]
    axes.axhline(near, color=GREY, linestyle=":", linewidth=0.8, label="nearly as well")
    axes.set_ylim(-0.05, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        title="A layer's probe, used in later layers",
        xlabel="layers further on",
        ylabel="share of what can be read\n(a probe that misleads: 0)",
    )
    plotting.legend_beside(axes, room=0.4, ncols=1)


MARKERS = {"-": "o", "--": "s", ":": "^"}
"""By line style, where there are no lines."""

SURGERY: dict[str, Callable[[Seen], Sequence[float]]] = {
    "left\nout": lambda model: model.skip,
    "run\ntwice": lambda model: model.repeat,
    "neighbours\nexchanged": lambda model: model.neighbours,
    "far ones\nexchanged": lambda model: model.far,
}


def _draw_surgery(axes: Axes, params: Params, found: Models) -> None:
    shown: list[list[float]] = []
    for number, (name, label, colour, style) in enumerate(_arms(params)):
        marker, mine = MARKERS[style], list[float]()
        for at, costs in enumerate(SURGERY.values()):
            values = [model.cost(costs(model)) for model in found[name]]
            plotting.interval(axes, at + 0.18 * (number - 1.5), values, colour, marker=marker)
            shown.append(values)
            mine += values
        axes.plot(
            [],
            [],
            marker=marker,
            color=colour,
            linestyle="none",
            label=label if any(map(np.isfinite, mine)) else f"{label}: not measured",
        )
    axes.axhline(0, color=GREY, linewidth=0.8)
    little = params.claims.layer_roles.criteria.neighbours_text.below  # type: ignore[attr-defined]
    axes.axhline(little, color=GREY, linestyle=":", linewidth=0.8, label="counts as little")
    _limit(axes, shown, [0.0, little])
    axes.set_xticks(range(len(SURGERY)), list(SURGERY), fontsize=8)
    axes.set(title="Blocks left out, repeated, exchanged", ylabel="share of the gain lost\n(mean over blocks)")
    plotting.legend_beside(axes, room=0.4, ncols=1)


def _draw_lens(axes: Axes, params: Params, found: Models) -> None:
    shown: list[list[float]] = []
    for name, label, colour, style in _arms(params):
        # the last place is 0 by definition, which a logarithm cannot show
        series = [list(model.lens[:-1]) for model in found[name]]
        if not np.isfinite(series).any():
            label = f"{label}: not measured"
        left = np.arange(len(series[0])) - len(series[0])
        _lines(axes, colour, left, series, label=label, style=style)
        shown += series
    little = params.claims.layer_roles.criteria.lens_text.below  # type: ignore[attr-defined]
    axes.axhline(little, color=GREY, linestyle=":", linewidth=0.8, label="counts as little")
    positive = [value for values in shown for value in values if np.isfinite(value) and value > 0] or [0.1, 1.0]
    axes.set_yscale("log")
    axes.set_ylim(min(*positive, little) / 1.5, max(positive) * 1.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        title="Logit lens: what the head reads earlier",
        xlabel="blocks before the end",
        ylabel="share of the prediction missing",
    )
    plotting.legend_beside(axes, room=0.4, ncols=1)
