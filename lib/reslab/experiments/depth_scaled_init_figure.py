"""The figure of claim 09."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from reslab import data, plotting
from reslab.comparison import Runs
from reslab.experiments.depth_scaled_init import BEHIND, LARGE, SMALL, TITLE, arm_name, harm
from reslab.experiments.depth_scaled_init_exact import NORMS, predicted_loss
from reslab.stats import mean_of, moving_average

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

STYLES = {"norm": "-", "bare": "--"}
MARKERS = {"norm": "o", "bare": "s"}


def draw(params: Params, table: pd.DataFrame, trained: Runs) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_variance(axes[0], table)
        _draw_by_depth(axes[1], table, "loss", "Untrained: initial loss", "nats per byte")
        expected = predicted_loss(data.VOCABULARY, params.claims.depth_scaled_init.exact.width, 0.2)
        axes[1].axhline(expected, color=plotting.COLOURS["control"], linestyle=":", label="ln V + d·0.2²/2")
        axes[1].legend()
        _draw_by_depth(axes[2], table, "function", "Untrained: AdamW's first step", "change of log-probability (nats)")
        _draw_dead(axes[3], table)
        _draw_losses(axes[4], params, trained)
        _draw_harm(axes[5], params, trained)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _line(axes: Axes, rows: pd.DataFrame, column: str, init: str, norm: str = "norm", label: str = "") -> None:
    """Seeds as dots, their geometric mean as a line, by depth."""
    chosen = rows[(rows["init"] == init) & (rows["norm"] == norm)]
    colour = plotting.colour(f"std {init}")
    axes.plot(chosen["depth"], chosen[column], MARKERS[norm], markersize=3, color=colour, alpha=0.4)
    mean = chosen.groupby("depth")[column].agg(lambda values: np.exp(np.log(values).mean()))
    axes.plot(mean.index, mean.to_numpy(), color=colour, linestyle=STYLES[norm], label=label or init)


def _depth_axis(axes: Axes, table: pd.DataFrame) -> None:
    depths = sorted(table["depth"].unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("depth (blocks)")


def _log_scale(axes: Axes) -> None:
    """With numbers also where the values span less than a factor of ten."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    near = high / low < 100
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if near else (1.0,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_variance(axes: Axes, table: pd.DataFrame) -> None:
    for init in ("0.02", "0.02 scaled", "GPT-2's", "GPT-2's scaled", "0.2", "0.2 scaled"):
        _line(axes, table, "written", init)
    _depth_axis(axes, table)
    axes.set_yscale("log")
    axes.set(title="Untrained: what the branches write", ylabel="variance added to the stream")
    plotting.legend_beside(axes)


def _draw_by_depth(axes: Axes, table: pd.DataFrame, column: str, title: str, label: str) -> None:
    for init in (SMALL, LARGE):
        for norm in NORMS:
            _line(axes, table, column, init, norm, f"{init}, {BEHIND[norm]}")
    _depth_axis(axes, table)
    _log_scale(axes)
    axes.set(title=title, ylabel=label)
    plotting.legend_beside(axes)


def _draw_dead(axes: Axes, table: pd.DataFrame) -> None:
    rows = table[table["norm"] == "norm"]
    for init in (LARGE, "ten times"):
        colour = plotting.colour(f"std {init}")
        for column, what, style, marker in (
            ("saturated", "saturated rows", "-", "o"),
            ("dead", "units never active", "--", "s"),
        ):
            chosen = rows[rows["init"] == init]
            axes.plot(chosen["depth"], chosen[column], marker, markersize=3, color=colour, alpha=0.4)
            mean = chosen.groupby("depth")[column].mean()
            name = "ten times GPT-2's" if init == "ten times" else init
            axes.plot(mean.index, mean.to_numpy(), color=colour, linestyle=style, label=f"{name}: {what}")
    axes.axhline(0.5, color=plotting.COLOURS["control"], linestyle=":", linewidth=1, label="counts as a dead zone")
    _depth_axis(axes, table)
    axes.set(title="Untrained: dead parts", ylabel="share of all", ylim=(-0.03, 1.03))
    axes.legend(loc="center", bbox_to_anchor=(0.5, 0.3))


def _draw_losses(axes: Axes, params: Params, trained: Runs) -> None:
    section = params.claims.depth_scaled_init
    deep = section.depths[-1]
    for init in (SMALL, LARGE):
        for norm in NORMS:
            records = trained[arm_name(init, deep, norm)]
            series = [moving_average(record.train_loss, section.window) for record in records]
            plotting.seed_lines(axes, f"std {init}", series, style=STYLES[norm], label=False)
            colour = plotting.colour(f"std {init}")
            axes.plot([], [], color=colour, linestyle=STYLES[norm], label=f"{init}, {BEHIND[norm]}")
    entropy = trained[arm_name(SMALL, deep)][0].context_free_loss
    axes.axhline(entropy, color=plotting.COLOURS["control"], linestyle=":", label="unigram entropy")
    _log_scale(axes)
    axes.set(
        title=f"Training loss, {deep} blocks", xlabel="step", ylabel=f"nats per byte (mean of {section.window} steps)"
    )
    plotting.legend_beside(axes)


def _draw_harm(axes: Axes, params: Params, trained: Runs) -> None:
    depths = params.claims.depth_scaled_init.depths
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=1)
    for side, norm in enumerate(NORMS):
        colour = plotting.colour(f"std {LARGE}")
        lost = [harm(trained, depth, norm) for depth in depths]
        at = [place + 0.16 * side - 0.08 for place in range(len(depths))]
        for x, values in zip(at, lost, strict=True):
            plotting.interval(axes, x, values, colour, marker=MARKERS[norm])
            if mean_of(values).value is None:
                _write_no_value(axes, x)
        means = [mean_of(values).value for values in lost]
        line = [math.nan if mean is None else mean for mean in means]
        axes.plot(at, line, color=colour, linestyle=STYLES[norm], label=BEHIND[norm])
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_xlim(-0.5, len(depths) - 0.5)
    axes.set(title="Harm of 0.2 against 0.02 (95 %)", xlabel="depth (blocks)", ylabel="nats per byte lost (test)")
    axes.legend()


def _write_no_value(axes: Axes, at: float) -> None:
    """Above the seeds of a comparison that has no value, some of which may have been measured."""
    axes.text(
        at, 0.5, "no value", transform=axes.get_xaxis_transform(), rotation=90, ha="center", va="center", fontsize=7
    )
