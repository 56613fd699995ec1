"""The figure of the kernel benchmark: time of one read, whole steps, peak memory; a row of panels a device measured."""

import io
from pathlib import Path

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
    "share_of_bandwidth", "ratio_low", "ratio_high", "peak_mb",
)  # fmt: skip

MARKERS = "osD^vPX*"

TICKS = (1, 1.2, 1.5, 2, 3, 5, 7, 10, 15, 20)
"""Ticks of a ratio."""


def write(table: pd.DataFrame, path: Path) -> None:
    """Draw the benchmark's table, whose cells are strings, to a PNG; no file where nothing in it is measured."""
    rows = table.copy()
    for name in NUMBERS:
        rows[name] = pd.to_numeric(rows[name], errors="coerce")
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
    """Of reading, in bytes a second, by which shares were taken: all of one measurement have the same.

    `share_of_bandwidth` has the median time of forward and backward together, whose quartiles the table has too; the
    sum of their two medians may lie beside it, where noise has two modes, but for few of the rows.
    """
    whole = (ops["forward_ms"] + ops["backward_ms"]) / 1e3
    return float((ops["modelled_bytes"] / whole / ops["share_of_bandwidth"]).median())


def _draw_reads(axes: Axes, ops: pd.DataFrame, where: str) -> None:
    """Forward and backward over the bytes modelled, on the most threads, with the time that reading them takes."""
    threads = int(ops["threads"].max())
    rows = ops[ops["threads"] == threads].sort_values("modelled_bytes")
    shapes = list(zip(rows["sublayers"], rows["tokens"], rows["width"], strict=True))
    places = list(dict.fromkeys(shapes))
    rows["at"] = [places.index(shape) for shape in shapes]
    bandwidth = _bandwidth(rows)
    rows["whole"] = rows["modelled_bytes"] / rows["share_of_bandwidth"] / bandwidth * 1e3
    each = rows.drop_duplicates("at")
    grey = plotting.COLOURS["control"]
    axes.plot(each["at"], each["modelled_bytes"] / bandwidth * 1e3, ":_", color=grey, label="moving these bytes once")
    for number, (name, mine) in enumerate(rows.groupby("implementation", sort=False)):
        whole = mine["whole"]
        spread = np.maximum([whole * (1 - mine["ratio_low"]), whole * (mine["ratio_high"] - 1)], 0)
        colour, marker = plotting.colour(str(name)), MARKERS[number % len(MARKERS)]
        axes.errorbar(mine["at"], whole, spread, color=colour, marker=marker, markersize=5, capsize=2, label=str(name))
    labels = [f"{n:.0f}×{tokens:.0f}×{width:.0f}" for n, tokens, width in places]
    megabytes = [f"{size / 1e6:.0f} MB" for size in each["modelled_bytes"]]
    axes.set_xticks(range(len(places)), ["\n".join(pair) for pair in zip(labels, megabytes, strict=True)], fontsize=7)
    axes.set(xlabel="sources × tokens × width; bytes modelled", ylabel="forward + backward (ms)", yscale="log")
    axes.margins(x=0.12)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_title(f"One read of n sources ({where})")
    _plain_numbers(axes)
    axes.legend(title=_count(threads, "thread"))


def _draw_steps(axes: Axes, steps: pd.DataFrame, device: str) -> None:
    """Ratio to pre-norm with quartiles; a group of points for each size and number of threads."""
    sizes = sorted(set(zip(steps["width"], steps["sublayers"], steps["threads"], strict=True)))
    compared = steps[steps["kind"] != "add"]
    arms = list(dict.fromkeys(zip(compared["kind"], compared["implementation"], strict=True)))
    for number, (kind, implementation) in enumerate(arms):
        mine = compared[(compared["kind"] == kind) & (compared["implementation"] == implementation)]
        groups = [sizes.index(size) for size in zip(mine["width"], mine["sublayers"], mine["threads"], strict=True)]
        ratio, colour = mine["ratio_to_prenorm"], plotting.colour(implementation)
        axes.errorbar(
            np.array(groups) + 0.16 * (number - (len(arms) - 1) / 2),
            ratio,
            np.maximum([ratio - mine["ratio_low"], mine["ratio_high"] - ratio], 0),
            color=colour,
            linestyle="",
            marker="o" if kind == "full" else "s",
            markersize=5,
            markerfacecolor=colour if kind == "full" else "white",
            capsize=2,
            label=f"{kind}, {implementation}",
        )
    axes.axhline(1, color=plotting.COLOURS["control"], linestyle=":")
    axes.set_yscale("log")
    highest = max(float(steps["ratio_high"].max()), 1.5)
    axes.set_yticks([tick for tick in TICKS if tick <= highest * 1.1])
    axes.set_ylim(min(0.9, 0.95 * float(steps["ratio_low"].min())), highest**1.3 * 1.1)  # room for the legend
    _plain_numbers(axes)
    labels = [f"{width:.0f}\n{sublayers:.0f}\n{threads:.0f}" for width, sublayers, threads in sizes]
    axes.set_xticks(range(len(sizes)), labels)
    axes.set_xlim(-0.6, len(sizes) - 0.4)
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
    colours = [plotting.colour(name if name != "torch" else "Pre-LN") for name in largest["implementation"]]
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


def _memory_label(kind: str, implementation: str) -> str:
    return "pre-norm" if kind == "add" else f"{kind}, {implementation}"


def _plain_numbers(axes: Axes) -> None:
    """On the logarithmic y axis: rather than powers of ten, and no ticks in between."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
