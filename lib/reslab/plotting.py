"""House style: the same colour for the same method in every figure, and files that are equal byte for byte."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reslab.stats import Estimate, mean_of

__all__ = ["COLOURS", "colour", "figure", "interval", "legend_beside", "save", "seed_lines", "title"]

Colour = tuple[float, ...]

_PALETTE = sns.color_palette("colorblind", 10)
COLOURS = {
    "add": _PALETTE[0],
    "skip 0": _PALETTE[3],
    "skip 0.1": _PALETTE[1],
    "skip 0.3": _PALETTE[9],
    "skip 1": _PALETTE[0],
    "no skip": _PALETTE[3],
    "Pre-LN": _PALETTE[0],
    "Pre-LN, plain init": _PALETTE[1],
    "LayerNorm scaling": _PALETTE[2],
    "Post-LN": _PALETTE[4],
    "Post-LN, long warm-up": _PALETTE[3],
    "DeepNorm": _PALETTE[1],
    "Post-LN, DeepNet init": _PALETTE[6],
    "larger norm gain": _PALETTE[2],
    "learnt branch weight": _PALETTE[8],
    "Sandwich-LN": _PALETTE[1],
    "Norm after the sum": _PALETTE[4],
    "Peri-LN": _PALETTE[2],
    "ReZero": _PALETTE[2],
    "ReZero 0.1": _PALETTE[9],
    "SkipInit": _PALETTE[8],
    "LayerScale 0.1": _PALETTE[1],
    "LayerScale 1e-4": _PALETTE[3],
    "LayerScale": _PALETTE[1],
    "rescaled": _PALETTE[7],
    "static": _PALETTE[9],
    "DenseFormer": _PALETTE[8],
    "mHC": _PALETTE[6],
    "Full": _PALETTE[3],
    "Block": _PALETTE[2],
    "article's form": _PALETTE[5],
    "Full, plain form": _PALETTE[5],
    "window": _PALETTE[6],
    "every 4th source": _PALETTE[9],
    "low-rank keys": _PALETTE[4],
    "low-rank values": _PALETTE[8],
    "validation loss": _PALETTE[0],
    "Block Influence": _PALETTE[5],
    "Influence again": _PALETTE[9],
    "angular distance": _PALETTE[6],
    "last first": _PALETTE[4],
    "random": (0.4, 0.4, 0.4),
    "fp16": _PALETTE[1],
    "bf16": _PALETTE[4],
    "fp32": _PALETTE[0],
    "Kahan": _PALETTE[2],
    "stochastic": _PALETTE[8],
    "e4m3": _PALETTE[9],
    "e5m2": _PALETTE[3],
    "attention": _PALETTE[5],
    "MLP": _PALETTE[7],
    "current byte": _PALETTE[1],
    "previous byte": _PALETTE[2],
    "distant byte": _PALETTE[4],
    "next byte": _PALETTE[9],
    "symbol": _PALETTE[1],
    "1 hop": _PALETTE[2],
    "2 hops": _PALETTE[9],
    "3 hops": _PALETTE[4],
    "naive": _PALETTE[5],
    "compiled": _PALETTE[1],
    "numba": _PALETTE[3],
    "triton": _PALETTE[3],
    "flash-linear-attention": _PALETTE[2],
    "fast-attnres": _PALETTE[4],
    "flash-attn-res": _PALETTE[7],
    "Liger": _PALETTE[8],
    "std 0.02": _PALETTE[0],
    "std 0.02 scaled": _PALETTE[9],
    "std 0.2": _PALETTE[3],
    "std 0.2 scaled": _PALETTE[1],
    "std GPT-2's": _PALETTE[2],
    "std GPT-2's scaled": _PALETTE[8],
    "std ten times": _PALETTE[4],
    "no final norm": _PALETTE[5],
    "healthy": _PALETTE[0],
    "dead": _PALETTE[7],
    "exploding": _PALETTE[3],
    "shallow": _PALETTE[9],
    "deep": _PALETTE[0],
    "plain start": _PALETTE[4],
    "ratio": _PALETTE[0],
    "ratio at start": _PALETTE[9],
    "loss": _PALETTE[1],
    "gradient norm": _PALETTE[2],
    "learning rate": _PALETTE[7],
    "told band": _PALETTE[2],
    "band about the law": _PALETTE[4],
    "text": _PALETTE[0],
    "pointer chasing": _PALETTE[1],
    "DiT, adaLN-Zero": _PALETTE[2],
    "DiT": _PALETTE[0],
    "DiT, no residuals": _PALETTE[3],
    "U-Net": _PALETTE[9],
    "U-Net, no residuals": _PALETTE[1],
    "U-Net, no long skips": _PALETTE[4],
    "U-Net, neither": _PALETTE[5],
    "best linear": (0.0, 0.0, 0.0),
    "state": _PALETTE[3],
    "increment 1/T": _PALETTE[0],
    "increment, set short": _PALETTE[9],
    "increment 1": _PALETTE[1],
    "increment 0.1": _PALETTE[8],
    "leaky 1/T": _PALETTE[4],
    "diagonal": _PALETTE[2],
    "diagonal, set short": _PALETTE[7],
    "scale 1": _PALETTE[0],
    "scale 0.5": _PALETTE[4],
    "scale 0.3": _PALETTE[1],
    "scale 0.1": _PALETTE[2],
    "scale 0.03": _PALETTE[3],
    "control": (0.4, 0.4, 0.4),
}
"""Colour-blind-safe colour of each method and implementation; those that share one are in no figure together."""


TITLE_ROOM = 0.15
"""Inches between a figure's title and the titles of its axes, beyond what the layout leaves."""

_WIDEST = {"left": max, "right": min, "bottom": max, "top": min, "wspace": max, "hspace": max}


@contextmanager
def figure(rows: int, columns: int) -> Iterator[tuple[Figure, np.ndarray]]:
    """A figure in house style, with its axes as a flat array.

    Closed for pyplot when the context ends, or notebooks would show it a second time; it can still be shown and saved.
    """
    with plt.style.context(str(Path(__file__).parent / "house.mplstyle")):
        drawn, axes = plt.subplots(rows, columns, figsize=(3.9 * columns, 3.1 * rows), squeeze=False)
        try:
            yield drawn, axes.ravel()
            _arrange(drawn)
        finally:
            plt.close(drawn)


def _arrange(drawn: Figure) -> None:
    """Room for labels and titles.

    Not by the constrained layout, which solves for margins in the order of memory addresses: the same figure came out
    with other bytes in another process.
    """
    top = 1 - TITLE_ROOM / drawn.get_figheight() if drawn.get_suptitle() else 1.0
    passes = []
    for _ in range(3):  # axes of another size have other ticks, for which the margins before may be too small
        drawn.tight_layout(rect=(0, 0, 1, top), pad=0.8, w_pad=0.8, h_pad=0.8)
        passes.append({edge: getattr(drawn.subplotpars, edge) for edge in _WIDEST})
    drawn.subplots_adjust(**{edge: widest(found[edge] for found in passes) for edge, widest in _WIDEST.items()})


def title(drawn: Figure, text: str, scale: str) -> None:
    """The figure's title; at smoke scale it says that nothing here is meaningful."""
    mark = " (smoke scale: not meaningful)" if scale == "smoke" else ""
    drawn.suptitle(text + mark, fontsize=12, fontweight="bold", x=0.01, ha="left")


def interval(
    axes: Axes,
    at: float,
    values: Sequence[float],
    colour: Colour,
    *,
    marker: str = "o",
    size: float = 4.0,
    width: float = 5.0,
    sideways: bool = False,
    of: Callable[[Sequence[float]], Estimate] = mean_of,
) -> None:
    """Seeds as dots and the 95 % interval `of` them, their mean's or `stats.median_of`, as a bar, at `at` of the other
    axis.

    `size` of the dots and `width` of the bar are in points. Values that are not finite have no dot, and then there is
    no bar either.
    """
    estimate = of(values)
    dots = [value for value in values if math.isfinite(value)]

    def draw(along: Sequence[float], **style: Any) -> None:
        across = [at] * len(along)
        axes.plot(*((along, across) if sideways else (across, along)), color=colour, **style)

    if estimate.low is not None and estimate.high is not None:
        draw([estimate.low, estimate.high], linewidth=width, alpha=0.3, solid_capstyle="butt")
    draw(dots, marker=marker, markersize=size, linestyle="none")


def colour(name: str) -> Colour:
    """The method's colour; a method without one of its own gets one by its name."""
    return COLOURS.get(name, _PALETTE[sum(map(ord, name)) % len(_PALETTE)])


def legend_beside(
    axes: Axes,
    *,
    room: float = 0.3,
    below: bool = False,
    ncols: int = 2,
    fontsize: float = 6.5,
    labels: Sequence[str] | None = None,
) -> None:
    """A legend above the data (or below them), in a share `room` of the axes that is added for it, on any scale.

    `labels` where they are not those that were drawn with, in the same order; nothing where nothing has a label.
    """
    handles, drawn_with = axes.get_legend_handles_labels()
    if not handles:
        return
    scale = axes.yaxis.get_transform()
    low, high = scale.transform(np.array(axes.get_ylim()))
    added = (high - low) * room / (1 - room)
    limits = (low - added, high) if below else (low, high + added)
    axes.set_ylim(*scale.inverted().transform(np.array(limits)))
    names = labels or drawn_with
    place: Literal["lower center", "upper center"] = "lower center" if below else "upper center"
    axes.legend(handles, names, loc=place, ncols=ncols, fontsize=fontsize, columnspacing=1.0, handlelength=1.6)


def seed_lines(
    axes: Axes, name: str, series: Sequence[Sequence[float] | np.ndarray], *, style: str = "-", label: bool = True
) -> None:
    """One thin line a seed and the mean over seeds as a thick one, as far as all go; nothing for no series."""
    lines = [np.asarray(values, dtype=float) for values in series if len(values)]
    if not lines:
        return
    for values in lines:
        axes.plot(values, color=colour(name), linewidth=0.6, alpha=0.5, linestyle=style)
    shortest = min(map(len, lines))
    mean = np.mean([values[:shortest] for values in lines], axis=0)
    axes.plot(mean, color=colour(name), linestyle=style, label=name if label else None)


def save(drawn: Figure, path: Path) -> None:
    """Write a PNG that depends on nothing but what is drawn."""
    drawn.savefig(path, metadata={"Software": None})
