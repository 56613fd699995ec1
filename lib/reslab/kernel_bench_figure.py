"""The figure of the kernel benchmark: time of one read, whole steps, peak memory; a row of panels a device measured."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from reslab import plotting
from reslab.files import write_atomic

__all__ = ["draw", "write"]

NUMBERS = (
    "sublayers", "tokens", "width", "threads", "forward_ms", "backward_ms", "ratio_to_prenorm", "modelled_bytes",
    "share_of_bandwidth", "ratio_low", "ratio_high", "peak_mb", "bandwidth_gbs",
)  # fmt: skip

MARKERS = "osD^vPX*"

LOWEST, HIGHEST = 0.9, 1.7
"""Ratios to pre-norm that are drawn; a median above has its number at the upper edge."""

TARGETS = {("full", 64): 1.25, ("full", 256): 1.12, ("block", 64): 1.10, ("block", 256): 1.05}
"""Of the ratio to pre-norm, by kind and width."""


def write(table: pd.DataFrame, path: Path) -> None:
    """Draw the benchmark's table, whose cells are strings, to a PNG; no file where nothing in it is measured."""
    rows = table.copy()
    for name in NUMBERS:  # an older file lacks some
        rows[name] = pd.to_numeric(rows[name], errors="coerce") if name in rows else np.nan
    rows = rows[rows["forward_ms"].notna()]
    if len(rows):
        content = io.BytesIO()
        draw(rows).savefig(content, format="png", dpi=130, metadata={"Software": None})
        write_atomic(path, content.getvalue())


def draw(rows: pd.DataFrame) -> Figure:
    """Of measured rows."""
    devices = [device for device in ("cpu", "cuda") if (rows["device"] == device).any()]
    with plotting.figure(len(devices), 3) as (drawn, axes):
        drawn.set_size_inches(12.4, 4.6 * len(devices))
        for number, device in enumerate(devices):
            here = rows[rows["device"] == device]
            dtype = here["dtype"].iloc[0]
            _draw_reads(axes[3 * number], here[here["what"] == "op"], f"{device}, {dtype}")
            _draw_steps(axes[3 * number + 1], here[here["what"] == "step"], device)
            _draw_memory(axes[3 * number + 2], here[here["peak_mb"].notna()], device)
    return drawn


def _bandwidth(ops: pd.DataFrame) -> float:
    """In bytes a second, by which shares were taken: all of one measurement have the same.

    Where the table has none: `share_of_bandwidth` has the median time of forward and backward together, whose quartiles
    the table has too; the sum of their two medians may lie beside it, where noise has two modes, but for few rows.
    """
    if ops["bandwidth_gbs"].notna().any():
        return 1e9 * float(ops["bandwidth_gbs"].median())
    whole = (ops["forward_ms"] + ops["backward_ms"]) / 1e3
    return float((ops["modelled_bytes"] / whole / ops["share_of_bandwidth"]).median())


def _draw_reads(axes: Axes, ops: pd.DataFrame, where: str) -> None:
    """Forward and backward by shape, on the most threads, with the time that moving the modelled bytes once takes."""
    threads = int(ops["threads"].max())
    rows = ops[ops["threads"] == threads].sort_values("modelled_bytes")
    shapes = list(zip(rows["sublayers"], rows["tokens"], rows["width"], strict=True))
    places = list(dict.fromkeys(shapes))
    rows["at"] = [places.index(shape) for shape in shapes]
    bandwidth = _bandwidth(rows)
    rows["whole"] = rows["modelled_bytes"] / rows["share_of_bandwidth"] / bandwidth * 1e3
    each = rows.drop_duplicates("at")
    least = each["modelled_bytes"] / bandwidth * 1e3
    how = "moving these bytes once,\nat " + ("copy" if rows["device"].iloc[0] == "cuda" else "read") + " bandwidth"
    grey = plotting.COLOURS["control"]
    axes.hlines(least, each["at"] - 0.4, each["at"] + 0.4, colors=[grey], linestyles=":", label=how)
    names = list(dict.fromkeys(rows["implementation"]))
    for number, name in enumerate(names):
        mine = rows[rows["implementation"] == name]
        whole, at = mine["whole"], mine["at"] + _beside(number, len(names))
        spread = np.maximum([whole * (1 - mine["ratio_low"]), whole * (mine["ratio_high"] - 1)], 0)
        colour, marker = plotting.colour(name), MARKERS[number % len(MARKERS)]
        axes.errorbar(at, whole, spread, color=colour, linestyle="", marker=marker, markersize=5, capsize=2, label=name)
    labels = [f"{n:.0f}×{tokens:.0f}×{width:.0f}" for n, tokens, width in places]
    megabytes = [f"{size / 1e6:.0f} MB" for size in each["modelled_bytes"]]
    axes.set_xticks(range(len(places)), ["\n".join(pair) for pair in zip(labels, megabytes, strict=True)], fontsize=6.5)
    axes.set(xlabel="sources × tokens × width; bytes modelled", ylabel="forward + backward (ms)", yscale="log")
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_title(f"One read of n sources ({where})")
    _plain_numbers(axes)
    axes.legend(title=_count(threads, "thread"))


def _beside(number: int, count: int) -> float:
    """How far beside its place one of `count` points is drawn."""
    return 0.64 / max(count, 4) * (number - (count - 1) / 2)


def _draw_steps(axes: Axes, steps: pd.DataFrame, device: str) -> None:
    """Ratio to pre-norm with quartiles, and targets; a group of points for each size and number of threads."""
    sizes = sorted(set(zip(steps["width"], steps["sublayers"], steps["threads"], strict=True)))
    axes.axhline(1, color=plotting.COLOURS["control"], linestyle=":")
    _draw_targets(axes, [width for width, *_ in sizes])
    compared = steps[steps["kind"] != "add"]
    arms = list(dict.fromkeys(zip(compared["kind"], compared["implementation"], strict=True)))
    for number, (kind, implementation) in enumerate(arms):
        mine = compared[(compared["kind"] == kind) & (compared["implementation"] == implementation)]
        groups = [sizes.index(size) for size in zip(mine["width"], mine["sublayers"], mine["threads"], strict=True)]
        at = np.array(groups) + _beside(number, len(arms))
        _draw_arm(axes, at, mine, kind, implementation)
    axes.set_ylim(LOWEST, HIGHEST)
    axes.set_yticks(np.arange(LOWEST, HIGHEST - 0.05, 0.1))
    labels = [f"{width:.0f}\n{sublayers:.0f}\n{threads:.0f}" for width, sublayers, threads in sizes]
    axes.set_xticks(range(len(sizes)), labels)
    axes.set_xlim(-0.6, len(sizes) - 0.4)
    axes.set(xlabel="width, sublayers, threads", ylabel="time over that of pre-norm (quartiles)")
    axes.set_title(f"Whole training step ({device})")
    plotting.legend_beside(axes, room=0.22, fontsize=7)


def _draw_arm(axes: Axes, at: np.ndarray, mine: pd.DataFrame, kind: str, implementation: str) -> None:
    colour, marker = _colour(implementation), "o" if kind == "full" else "s"
    fill: dict[str, Any] = {"color": colour, "markerfacecolor": colour if kind == "full" else "white"}
    ratio = mine["ratio_to_prenorm"].to_numpy()
    low, high = (np.clip(mine[name].to_numpy(), LOWEST, HIGHEST) for name in ("ratio_low", "ratio_high"))
    inside = ratio <= HIGHEST - 0.05
    spread = np.maximum([ratio - low, high - ratio], 0)[:, inside]
    label = f"{kind}, {implementation}"
    axes.errorbar(
        at[inside], ratio[inside], spread, linestyle="", marker=marker, markersize=5, capsize=2, label=label, **fill
    )
    for place, value in zip(at[~inside], ratio[~inside], strict=True):
        axes.plot(place, HIGHEST - 0.09, marker="^", markersize=4, **fill)
        axes.text(place, HIGHEST - 0.07, f"{value:.1f}", color=colour, fontsize=6, rotation=90, ha="center")


def _draw_targets(axes: Axes, widths: Sequence[float]) -> None:
    """A line over all groups of a width."""
    styles: dict[str, Literal["-", "--"]] = {"full": "-", "block": "--"}
    for kind, style in styles.items():
        label = f"target, {kind}"
        for width in sorted({width for width in widths if (kind, width) in TARGETS}):
            groups = [number for number, each in enumerate(widths) if each == width]
            ends = groups[0] - 0.45, groups[-1] + 0.45
            axes.hlines(TARGETS[kind, int(width)], *ends, colors=["black"], linestyles=style, linewidth=1, label=label)
            label = "_again"


def _draw_memory(axes: Axes, steps: pd.DataFrame, device: str) -> None:
    """Of the largest size weighed, with the ratio to pre-norm."""
    axes.set_title(f"Peak memory of a step ({device})")
    if steps.empty:
        return
    _, largest = max(steps.groupby(["width", "sublayers"]), key=lambda group: group[0])
    names = [_memory_label(kind, name) for kind, name in zip(largest["kind"], largest["implementation"], strict=True)]
    colours = [_colour(name) for name in largest["implementation"]]
    bars = axes.barh(names, largest["peak_mb"], color=colours, height=0.6)
    of_prenorm = largest[largest["kind"] == "add"]["peak_mb"]
    base = float(of_prenorm.iloc[0]) if len(of_prenorm) else float("nan")
    axes.bar_label(bars, [f"{peak / base:.2f}x" for peak in largest["peak_mb"]], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * float(largest["peak_mb"].max()))
    first = largest.iloc[0]
    axes.set_xlabel(f"MB; {first['sublayers']:.0f} sublayers, width {first['width']:.0f}, {first['tokens']:.0f} tokens")
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)


def _colour(implementation: str) -> plotting.Colour:
    """Of a step's."""
    return plotting.colour({"torch": "Pre-LN", "plain": "Full, plain form"}.get(implementation, implementation))


def _memory_label(kind: str, implementation: str) -> str:
    return "pre-norm" if kind == "add" else f"{kind}, {implementation}"


def _plain_numbers(axes: Axes) -> None:
    """On the logarithmic y axis: rather than powers of ten, and no ticks in between."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
