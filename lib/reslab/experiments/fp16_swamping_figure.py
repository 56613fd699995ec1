"""The figure of claim 04."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reslab import plotting
from reslab.comparison import Runs, held_out
from reslab.experiments.fp16_swamping import TITLE, margin, worth
from reslab.experiments.fp16_swamping_arms import ALONE, ORDINARY, STREAMS, forced_name, spread_name
from reslab.experiments.fp16_swamping_exact import LOW, METHODS, STREAM_FORMATS

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

GREY = plotting.COLOURS["control"]


def draw(
    params: Params,
    curve: pd.DataFrame,
    errors: pd.DataFrame,
    grown: pd.DataFrame,
    trained: Runs,
    recipe: pd.DataFrame,
    ratios: pd.DataFrame,
) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_absorbed(axes[0], params, curve)
        _draw_lost(axes[1], params, errors)
        _draw_growth(axes[2], params, grown)
        _draw_losses(axes[3], params, trained, recipe)
        _draw_costs(axes[4], params, trained)
        _draw_ratios(axes[5], params, ratios)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _mark_forced(axes: Axes, params: Params) -> None:
    section = params.claims.fp16_swamping
    for size in (section.update, section.large):
        axes.axvline(size / section.stream, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{section.stream:g}:{size:g}",
            (size / section.stream, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -3),
            textcoords="offset points",
            va="top",
            fontsize=7,
            color=GREY,
        )


def _draw_absorbed(axes: Axes, params: Params, curve: pd.DataFrame) -> None:
    for name in LOW:
        chosen = curve[curve["format"] == name]
        law = chosen.groupby("ratio")["law"].mean()
        axes.plot(law.index, law.to_numpy(), color=plotting.colour(name), label=name)
        axes.plot(chosen["ratio"], chosen["measured"], "o", color=plotting.colour(name), markersize=3, alpha=0.5)
    axes.plot([], [], color="black", label="half-ulp law")
    axes.plot([], [], "o", color="black", markersize=3, label="measured, by seed")
    _mark_forced(axes, params)
    axes.set_xscale("log")
    axes.set(
        title="One addition: what is swallowed", xlabel="update / stream (rms)", ylabel="share of updates absorbed"
    )
    axes.set_ylim(-0.03, 1.12)
    axes.legend(loc="lower left", fontsize=6.5)


def _draw_lost(axes: Axes, params: Params, errors: pd.DataFrame) -> None:
    plain = errors[errors["method"] == "plain"]
    for name in STREAM_FORMATS:
        chosen = plain[plain["format"] == name]
        mean = chosen.groupby("ratio")["error"].mean()
        axes.plot(mean.index, mean.to_numpy(), color=plotting.colour(name), label=name)
        axes.plot(chosen["ratio"], chosen["error"], "o", color=plotting.colour(name), markersize=3, alpha=0.5)
    axes.axvspan(0.01, 0.1, color=GREY, alpha=0.15, linewidth=0, label="one to two orders")
    axes.axhline(0.1, color="black", linewidth=0.8, linestyle="--", label="a tenth is lost")
    axes.set_xscale("log")
    axes.set_yscale("log")
    additions = params.claims.fp16_swamping.exact.additions
    axes.set(
        title=f"{additions} random updates: what is lost",
        xlabel="update / stream (rms)",
        ylabel="share of their sum lost",
    )
    axes.legend(loc="lower left")


def _draw_growth(axes: Axes, params: Params, grown: pd.DataFrame) -> None:
    chosen = grown[grown["format"] == "bf16"]
    names = {"plain": "bf16", "fp32": "fp32", "Kahan": "Kahan", "stochastic": "stochastic"}
    for method in METHODS:
        part = chosen[chosen["method"] == method]
        for _, one in part.groupby("seed"):
            axes.plot(one["additions"], one["error"], color=plotting.colour(names[method]), linewidth=0.6, alpha=0.5)
        mean = part.groupby("additions")["error"].mean()
        label = {"plain": "plain bf16", "fp32": "bf16 updates, fp32 sum"}.get(method, f"bf16, {method}")
        axes.plot(mean.index, mean.to_numpy(), color=plotting.colour(names[method]), label=label)
    section = params.claims.fp16_swamping
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(
        title=f"Updates of {section.update:g} onto {section.stream:g}, all one way",
        xlabel="number of additions",
        ylabel="error (rms)",
    )
    plotting.legend_beside(axes)


def _draw_losses(axes: Axes, params: Params, trained: Runs, recipe: pd.DataFrame) -> None:
    """Held-out loss of every forced arm: one column a size of update, and one for the recipe.

    The recipe's losses may be whole nats higher; the axis ends where all else can be told apart.
    """
    section = params.claims.fp16_swamping
    groups = {
        f"{section.stream:g}:{size:g}": {
            stream: held_out(trained[name])
            for stream in STREAMS
            if (name := forced_name(params, size, stream)) in trained
        }
        for size in (section.update, section.large)
    }
    groups[f"×{section.factor:g}, back"] = {
        name: recipe[recipe["format"] == name]["scaled back"].tolist() for name in ("fp16", "bf16")
    }
    at = 0.0
    columns: dict[float, tuple[str, list[float]]] = {}
    for text, losses in groups.items():
        centre = at + (len(losses) - 1) / 2
        axes.text(centre, 0.98, text, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=7)
        for stream, by_seed in losses.items():
            plotting.interval(axes, at, by_seed, plotting.colour(stream))
            columns[at] = (stream, by_seed)
            at += 1
        at += 0.6
    labels = [stream for stream, _ in columns.values()]
    axes.set_xticks(list(columns), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set(title="Forced ratios: held-out loss", ylabel="nats per byte (test)", xlabel="how the stream is kept")
    if alone := [loss for loss in held_out(trained[ALONE]) if np.isfinite(loss)]:
        level = float(np.mean(alone))
        axes.axhline(level, color=GREY, linestyle=":", label="embedding alone")
        axes.legend(loc="center left", fontsize=7)
        _cut(axes, {at: by_seed for at, (_, by_seed) in columns.items()}, level)


ROOM = 0.3
"""Nats per byte above the embedding alone at which the axis of the held-out losses ends."""


def _cut(axes: Axes, columns: Mapping[float, Sequence[float]], level: float) -> None:
    """End the axis `ROOM` above `level`; a column with seeds beyond has an arrow and their losses."""
    top = level + ROOM
    within = [loss for by_seed in columns.values() for loss in by_seed if loss <= top]
    lowest = min([*within, level])
    axes.set_ylim(lowest - 0.1 * (top - lowest), top)
    for at, by_seed in columns.items():
        if beyond := sorted(loss for loss in by_seed if top < loss < np.inf):
            text = " to ".join(dict.fromkeys(f"{loss:.2f}" for loss in (beyond[0], beyond[-1])))
            axes.annotate(
                text,
                (at, 0.88),
                (at, 0.74),
                xycoords=axes.get_xaxis_transform(),
                rotation=90,
                ha="center",
                va="top",
                fontsize=6.5,
                arrowprops={"arrowstyle": "->"},
            )


def _draw_costs(axes: Axes, params: Params, trained: Runs) -> None:
    """Held-out loss less that of the FP32 stream, paired by seed."""
    section = params.claims.fp16_swamping
    pairs = [
        (f"{section.stream:g}:{size:g}", forced_name(params, size, stream), forced_name(params, size, "fp32"), stream)
        for size in (section.update, section.large)
        for stream in STREAMS
        if stream != "fp32" and forced_name(params, size, stream) in trained
    ]
    pairs.append(("embedding 100:1", spread_name(params, "bf16"), spread_name(params, "fp32"), "bf16"))
    pairs.append(("ordinary", ORDINARY["bf16"], ORDINARY["fp32"], "bf16"))
    for at, (place, ours, theirs, stream) in enumerate(pairs):
        differences = np.subtract(held_out(trained[ours]), held_out(trained[theirs]))
        plotting.interval(axes, at, differences.tolist(), plotting.colour(stream))
        if place != "ordinary" and not all(value > margin(params) for value in worth(trained, theirs)):
            _say_idle(axes, at, margin(params))
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axhspan(-0.05, 0.05, color=GREY, alpha=0.15, linewidth=0, label="about the same")
    labels = [f"{place} {stream}" for place, _, _, stream in pairs]
    axes.set_xticks(range(len(pairs)), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set(title="What the format costs (seeds, 95 %)", ylabel="nats per byte above fp32")
    axes.legend(loc="best")


def _say_idle(axes: Axes, at: float, least: float) -> None:
    """Beside a column: with FP32, too, the branches are in some seed worth too little for anything to be lost."""
    axes.text(
        at + 0.15,
        0.03,
        f"no value: branches worth < {least:g}",
        transform=axes.get_xaxis_transform(),
        rotation=90,
        ha="left",
        va="bottom",
        fontsize=6,
        color=GREY,
    )


def _draw_ratios(axes: Axes, params: Params, ratios: pd.DataFrame) -> None:
    chosen = ratios[ratios["arm"] == ORDINARY["fp32"]]
    for kind in ("attention", "MLP"):
        part = chosen[chosen["kind"] == kind]
        axes.plot(part["sublayer"], part["ratio"], ".", color=plotting.colour(kind), alpha=0.5)
        mean = part.groupby("sublayer")["ratio"].mean()
        axes.plot(mean.index, mean.to_numpy(), color=plotting.colour(kind), label=kind)
    section = params.claims.fp16_swamping
    axes.axhspan(0.01, 0.1, color=GREY, alpha=0.15, linewidth=0, label="one to two orders")
    axes.axhline(section.update / section.stream, color="black", linestyle=":", linewidth=1)
    axes.annotate(
        f"{section.stream:g}:{section.update:g}",
        (1.0, section.update / section.stream),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        fontsize=7,
    )
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, section.update / section.stream / 2), max(high, 2.0))
    axes.set(title="Ordinary model, trained", xlabel="sublayer", ylabel="update / stream")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plotting.legend_beside(axes)
