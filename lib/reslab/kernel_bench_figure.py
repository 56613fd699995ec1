"""The figure of the kernel benchmark: time of one read, whole steps, peak memory; a row of panels a device measured."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from reslab import plotting
from reslab.files import write_atomic

__all__ = ["draw", "write"]

NUMBERS = (
    "sublayers", "tokens", "width", "threads", "forward_ms", "backward_ms", "ratio_to_prenorm", "modelled_bytes",
    "share_of_bandwidth", "ratio_low", "ratio_high", "peak_mb",
)  # fmt: skip

MARKERS = "osD^vPX*"

STEPS = (1, 1.2, 1.5, 2, 3, 5, 7, 10, 15, 20)
"""Ticks of a ratio."""


def write(table: pd.DataFrame, path: Path) -> None:
    """Draw the benchmark's table, whose cells are strings, to a PNG; no file where nothing in it is measured."""
    rows = table.copy()
    for name in NUMBERS:
        rows[name] = pd.to_numeric(rows[name], errors="coerce")
    rows = rows[rows["forward_ms"].notna()]
    if len(rows):
        content = io.BytesIO()
        draw(rows).savefig(content, format="png", metadata={"Software": None})
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


def _draw_reads(axes: Axes, ops: pd.DataFrame, where: str) -> None:
    """Forward and backward over the bytes modelled, on the most threads, with the time that reading them takes."""
    threads = int(ops["threads"].max())
    chosen = ops[ops["threads"] == threads].sort_values("modelled_bytes")
    whole = chosen["forward_ms"] + chosen["backward_ms"]
    megabytes = chosen["modelled_bytes"] / 1e6
    bandwidth = (chosen["modelled_bytes"] / (whole / 1e3) / chosen["share_of_bandwidth"]).median()
    roof = np.array([megabytes.min() / 1.3, megabytes.max() * 1.3])
    axes.plot(roof, roof * 1e9 / bandwidth, ":", color=plotting.COLOURS["control"], label="reading them once")
    for number, name in enumerate(chosen["implementation"].unique()):
        mine = chosen["implementation"] == name
        spread = [whole[mine] * (1 - chosen["ratio_low"][mine]), whole[mine] * (chosen["ratio_high"][mine] - 1)]
        style = {"color": plotting.colour(name), "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        axes.errorbar(megabytes[mine], whole[mine], yerr=np.maximum(spread, 0), label=name, capsize=2, **style)
    axes.set(xscale="log", yscale="log", ylabel="forward + backward (ms)")
    axes.set_xlabel(f"bytes modelled, (3n + 2) X (MB); {_count(threads, 'thread')}")
    axes.set_title(f"One read of n sources ({where})")
    _plain_ticks(axes)
    axes.legend()


def _draw_steps(axes: Axes, steps: pd.DataFrame, device: str) -> None:
    """Ratio to pre-norm with quartiles; a group of points for each size and number of threads."""
    sizes = steps[["width", "sublayers", "threads"]].drop_duplicates().sort_values(["width", "sublayers", "threads"])
    groups = [tuple(int(part) for part in size) for size in sizes.to_numpy()]
    arms = list(steps[steps["kind"] != "add"].groupby(["kind", "implementation"], sort=False).groups)
    for number, arm in enumerate(arms):
        kind, implementation = arm
        mine = steps[(steps["kind"] == kind) & (steps["implementation"] == implementation)]
        size_of_row = zip(mine["width"], mine["sublayers"], mine["threads"], strict=True)
        at = np.array([groups.index(size) for size in size_of_row]) + 0.16 * (number - (len(arms) - 1) / 2)
        ratio = mine["ratio_to_prenorm"]
        spread = np.maximum([ratio - mine["ratio_low"], mine["ratio_high"] - ratio], 0)
        style = {"color": plotting.colour(implementation), "marker": "o" if kind == "full" else "s", "markersize": 5}
        filled = style["color"] if kind == "full" else "white"
        label = f"{kind}, {implementation}"
        axes.errorbar(at, ratio, yerr=spread, linestyle="", capsize=2, label=label, markerfacecolor=filled, **style)
    axes.axhline(1, color=plotting.COLOURS["control"], linestyle=":")
    axes.set_yscale("log")
    highest = max(float(steps["ratio_high"].max()), 1.5)
    axes.set_yticks([tick for tick in STEPS if tick <= highest * 1.1])
    axes.set_ylim(min(0.9, 0.95 * float(steps["ratio_low"].min())), highest * 1.5)  # room for the legend
    _plain_ticks(axes)
    axes.set_xticks(range(len(groups)), [f"{width}\n{sublayers}\n{threads}" for width, sublayers, threads in groups])
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set(xlabel="width, sublayers, threads", ylabel="time over that of pre-norm (quartiles)")
    axes.set_title(f"Whole training step ({device})")
    axes.legend(ncols=2, loc="upper center")


def _draw_memory(axes: Axes, steps: pd.DataFrame, device: str) -> None:
    """Of the largest size weighed, with the ratio to pre-norm."""
    axes.set_title(f"Peak memory of a step ({device})")
    if steps.empty:
        return
    _, largest = max(steps.groupby(["width", "sublayers"]), key=lambda group: group[0])
    names = [_memory_label(kind, name) for kind, name in zip(largest["kind"], largest["implementation"], strict=True)]
    colours = [plotting.colour(name if name != "torch" else "control") for name in largest["implementation"]]
    bars = axes.barh(names, largest["peak_mb"], color=colours, height=0.6)
    of_prenorm = largest[largest["kind"] == "add"]["peak_mb"]
    base = float(of_prenorm.iloc[0]) if len(of_prenorm) else float("nan")
    axes.bar_label(bars, [f"{peak / base:.2f}x" for peak in largest["peak_mb"]], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * float(largest["peak_mb"].max()))
    first = largest.iloc[0]
    axes.set_xlabel(f"MB; {first['sublayers']:.0f} sublayers, width {first['width']:.0f}, {first['tokens']:.0f} tokens")
    axes.grid(visible=False, axis="y")


def _memory_label(kind: str, implementation: str) -> str:
    return "pre-norm" if kind == "add" else f"{kind}, {implementation}"


def _plain_ticks(axes: Axes) -> None:
    """Numbers rather than powers of ten, at major ticks only."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
