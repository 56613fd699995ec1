"""The figure of claim 10."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from reslab import plotting
from reslab.experiments import residual_health as claim
from reslab.experiments.residual_health import DEAD, EXPLODING, HEALTHY, HOPS, PLAIN, SIGNS, TITLE, Early, text_name
from reslab.experiments.residual_health_measured import Looked, Replay
from reslab.experiments.residual_health_rules import RULES, centres

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["draw"]

RATIO = "|update| / |input|"
FLOOR = 1e-4
"""Smaller ratios are drawn here."""
SHORT = {"Pre-LN": "Pre-LN", "Post-LN": "Post-LN", "Post-LN, long warm-up": "Post-LN,\nlong w.-up"}


def draw(
    params: Params,
    found: Mapping[str, Sequence[Looked]],
    early: Sequence[Early],
    seen: claim.Replays,
    planted: claim.Replays,
) -> Figure:
    """The claim in six panels."""
    with plotting.figure(2, 3) as (drawn, axes):
        _draw_bands(axes[0], params, found[text_name(params.claims.residual_health.deep)])
        _draw_time(axes[1], params, seen)
        _draw_removal(axes[2], params, found)
        _draw_failure(axes[3], params, early)
        _draw_areas(axes[4], early)
        _draw_planted(axes[5], params, planted)
        plotting.title(drawn, TITLE, params.scale)
    return drawn


def _shade(axes: Axes, params: Params, label: str | None = "told to be healthy") -> None:
    """The told band, and the ratio of 1."""
    axes.axhspan(*params.claims.residual_health.band, color=plotting.colour(RULES[0]), alpha=0.15, label=label)
    axes.axhline(1, color=plotting.COLOURS["control"], linestyle="--", linewidth=0.8)
    axes.set(yscale="log", ylabel=RATIO)


def _draw_bands(axes: Axes, params: Params, models: Sequence[Looked]) -> None:
    _shade(axes, params)
    colour, kept = plotting.colour("healthy"), [i for i, model in enumerate(models) if not model.lost]
    for i in kept:
        kinds = np.array(models[i].column("kind"))
        ratios, before = (np.maximum(models[i].column("ratio", trained=after), FLOOR) for after in (True, False))
        places = np.arange(len(ratios))
        axes.plot(places, before, color=plotting.COLOURS["control"], linewidth=0.6, linestyle=":")
        axes.plot(places, ratios, color=colour, linewidth=0.4, alpha=0.5)
        for kind, marker in (("attention", "o"), ("mlp", "s")):
            axes.plot(places[kinds == kind], ratios[kinds == kind], marker, color=colour, markersize=3)
    _band_about_law(axes, params, models)
    for marker, name in (("o", "attention, trained"), ("s", "MLP, trained")):
        axes.plot([], [], marker, color=colour, markersize=3, label=name)
    axes.plot([], [], color=plotting.COLOURS["control"], linestyle=":", label="untrained")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=f"Healthy models of {params.claims.residual_health.deep} blocks", xlabel="sublayer (0: first)")
    plotting.legend_beside(axes)


def _band_about_law(axes: Axes, params: Params, models: Sequence[Looked]) -> None:
    """The band about the law for the first model that others calibrate."""
    band = params.claims.residual_health.band
    middles = [centres(models, seed, RULES[2], band) for seed in range(len(models))]
    middle = np.array(next((its for its in middles if its), []))
    if len(middle):
        colour, factor = plotting.colour(RULES[2]), math.sqrt(band[1] / band[0])
        axes.fill_between(range(len(middle)), middle / factor, middle * factor, color=colour, alpha=0.15)
        axes.plot(middle, color=colour, linewidth=1, label="law, other seeds")


def _draw_time(axes: Axes, params: Params, seen: claim.Replays) -> None:
    section = params.claims.residual_health
    _shade(axes, params)
    axes.axvspan(0, 100 * section.early, color=plotting.COLOURS["control"], alpha=0.12, linewidth=0)
    shown = {
        "deep": (text_name(section.deep), f"{section.deep} blocks"),
        "shallow": (text_name(section.shallow), f"{section.shallow} blocks"),
        PLAIN: (PLAIN, f"{section.plain_depth} blocks, plain start"),
    }
    for name, (arm, label) in shown.items():
        colour = plotting.colour(name)
        for i, replay in enumerate(seen[arm]):
            series = replay.series()
            at = 100 * series.index / replay_steps(params, arm)
            axes.plot(at, np.exp(series.mean(axis=1)), ".-", color=colour, markersize=3, label=None if i else label)
            if name == "deep":
                for sublayer in series.columns:
                    axes.plot(at, np.exp(series[sublayer]), color=colour, linewidth=0.3, alpha=0.15)
    axes.set(title="Ratios over training", xlabel="percent of the steps (grey: early)")
    plotting.legend_beside(axes)


def replay_steps(params: Params, arm: str) -> int:
    """Steps of the runs that are recorded over all of training."""
    if arm == PLAIN:
        return params.claims.pre_vs_post_ln.steps
    return params.claims.residual_health.steps or params.optimisation.steps


def _draw_removal(axes: Axes, params: Params, found: Mapping[str, Sequence[Looked]]) -> None:
    names = {"text": text_name(params.claims.residual_health.deep), "pointer chasing": HOPS}
    for task, name in names.items():
        for i, model in enumerate(model for model in found[name] if not model.lost):
            ratios = np.maximum(model.column("ratio"), FLOOR)
            label = None if i else task
            axes.plot(ratios, model.costs, "os^Dv"[i % 5], color=plotting.colour(task), markersize=3, label=label)
    axes.axvspan(*params.claims.residual_health.band, color=plotting.colour(RULES[0]), alpha=0.15)
    axes.axvline(1, color=plotting.COLOURS["control"], linestyle="--", linewidth=0.8)
    axes.axhline(0, color=plotting.COLOURS["control"], linewidth=0.8)
    axes.set(xscale="log", title="What leaving out a sublayer costs", xlabel=f"{RATIO} (markers: seeds)")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.margins(y=0.1)
    axes.set_ylabel("validation loss added (nats)")
    plotting.legend_beside(axes, room=0.12)


def _draw_failure(axes: Axes, params: Params, early: Sequence[Early]) -> None:
    _shade(axes, params, label=None)
    finite = [run.ratio for run in early if math.isfinite(run.ratio)]
    top = 3 * max([1.0, *finite])
    groups = list(dict.fromkeys(run.cell[:2] for run in early))
    for at, group in enumerate(groups):
        runs = [run for run in early if run.cell[:2] == group]
        for failed, aside, marker, name in ((False, -0.2, "o", "healthy"), (True, 0.2, "X", EXPLODING)):
            ratios = [min(run.ratio, top) for run in runs if run.failed == failed]
            shift = aside + np.linspace(-0.12, 0.12, len(ratios))
            axes.plot(at + shift, ratios, marker, color=plotting.colour(name), markersize=3.5, linestyle="none")
    for marker, name, label in (("o", "healthy", "did not fail"), ("X", EXPLODING, "failed")):
        axes.plot([], [], marker, color=plotting.colour(name), linestyle="none", label=label)
    if len(finite) < len(early):
        axes.axhline(top, color=plotting.COLOURS["control"], linestyle=":", linewidth=0.8, label="lost before")
    axes.set_xticks(range(len(groups)), [f"{SHORT[method]}\n{depth}" for method, depth in groups], fontsize=6)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set(title="Which runs fail?", xlabel="placement and blocks", ylabel=f"largest {RATIO}, early")
    plotting.legend_beside(axes)


def _draw_areas(axes: Axes, early: Sequence[Early]) -> None:
    measured = 0
    for at, sign in enumerate(SIGNS):
        for within, aside, marker in ((False, -0.15, "o"), (True, 0.15, "s")):
            values = claim.areas(early, sign, within=within)
            plotting.interval(axes, at + aside, values, plotting.colour(sign), marker=marker)
            measured += sum(map(math.isfinite, values))
    grey = plotting.COLOURS["control"]
    axes.axhline(0.5, color=grey, linestyle="--", linewidth=0.8, label="chance")
    axes.plot([], [], "o", color=grey, label="over all runs")
    axes.plot([], [], "s", color=grey, label="within placement and depth")
    if not measured:
        axes.text(0.5, 0.5, "no seed has runs of both outcomes", ha="center", transform=axes.transAxes, fontsize=8)
    axes.set_xticks(range(len(SIGNS)), [sign.replace(" ", "\n", 1) for sign in SIGNS], fontsize=7)
    axes.set(xlim=(-0.5, len(SIGNS) - 0.5), ylim=(-0.05, 1.05), title="What foretells failure?")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set(ylabel="area under the ROC curve", xlabel="known early, read as other seeds show (dots: seeds)")
    plotting.legend_beside(axes, ncols=1)


def _draw_planted(axes: Axes, params: Params, planted: Mapping[str, Sequence[Replay]]) -> None:
    _shade(axes, params, label=None)
    section = params.claims.residual_health
    sublayer = claim.planted_sublayer(params)
    for name, label in (
        (HEALTHY, "nothing planted"),
        (DEAD, "planted: 0"),
        (EXPLODING, f"planted: x {section.factor:g}"),
    ):
        for i, replay in enumerate(planted[name]):
            series = replay.series()
            at = 100 * series.index / replay_steps(params, text_name(section.shallow))
            ratios = np.maximum(np.exp(series[sublayer]), FLOOR) if sublayer in series else np.array([])
            end = f", loss {_mean_loss(planted[name])}"
            axes.plot(at, ratios, ".-", color=plotting.colour(name), markersize=3, label=None if i else label + end)
    axes.set(title=f"One MLP planted, {section.shallow} blocks", xlabel="percent of the steps")
    axes.set_ylabel(f"its {RATIO}")
    plotting.legend_beside(axes, ncols=1)


def _mean_loss(group: Sequence[Replay]) -> str:
    """Validation loss at the end, in words."""
    losses = [replay.validation_loss for replay in group]
    return f"{np.mean(losses):.2f}" if all(map(math.isfinite, losses)) else "lost"
