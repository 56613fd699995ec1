"""The figure of claim 04."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reslab import plotting
from reslab.comparison import Runs, held_out
from reslab.experiments.fp16_swamping import TITLE
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
    """Held-out loss of every forced arm: one column a size of update, and one for the recipe."""
    section = params.claims.fp16_swamping
    at, ticks, labels = 0.0, [], []
    for size in (section.update, section.large):
        for stream in STREAMS:
            if (name := forced_name(params, size, stream)) in trained:
                plotting.interval(axes, at, held_out(trained[name]), plotting.colour(stream))
                ticks.append(at)
                labels.append(f"{stream}")
                at += 1
        at += 0.6
    for name in ("fp16", "bf16"):
        plotting.interval(axes, at, recipe[recipe["format"] == name]["scaled back"].tolist(), plotting.colour(name))
        ticks.append(at)
        labels.append(name)
        at += 1
    alone = [loss for loss in held_out(trained[ALONE]) if np.isfinite(loss)]
    if alone:
        axes.axhline(float(np.mean(alone)), color=GREY, linestyle=":", label="embedding alone")
        axes.legend(loc="best")
    axes.set_xticks(ticks, labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    small, large = len(STREAMS), at - 2 - 0.6
    for centre, text in (
        ((small - 1) / 2, f"{section.stream:g}:{section.update:g}"),
        ((small + 0.6 + large - 1) / 2, f"{section.stream:g}:{section.large:g}"),
        (at - 1.5, f"×{section.factor:g}, back"),
    ):
        axes.text(centre, 0.98, text, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=7)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.18 * (high - low))
    axes.set(title="Forced ratios: held-out loss", ylabel="nats per byte (test)", xlabel="how the stream is kept")


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
    for at, (_, ours, theirs, stream) in enumerate(pairs):
        differences = np.subtract(held_out(trained[ours]), held_out(trained[theirs]))
        plotting.interval(axes, at, differences.tolist(), plotting.colour(stream))
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axhspan(-0.05, 0.05, color=GREY, alpha=0.15, linewidth=0, label="about the same")
    labels = [f"{place} {stream}" for place, _, _, stream in pairs]
    axes.set_xticks(range(len(pairs)), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set(title="What the format costs (seeds, 95 %)", ylabel="nats per byte above fp32")
    axes.legend(loc="best")


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
