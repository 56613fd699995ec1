"""Claim 04 without training: what formats do to a stream and its updates, in float64 with exact rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from reslab.precision import (
    FORMATS,
    Addition,
    Format,
    absorbed,
    absorbed_by_law,
    absorbed_probability,
    accumulate,
    accumulated_error,
    add,
    relative_accumulated_error,
    round_to,
    ulp,
)
from reslab.stats import slope

if TYPE_CHECKING:
    from reslab.experiments.fp16_swamping import Parameters
    from reslab.params import Params

__all__ = [
    "LOW",
    "METHODS",
    "STREAM_FORMATS",
    "absorption_curve",
    "accumulation_curve",
    "examples",
    "format_table",
    "growth",
    "growth_exponents",
    "near_values",
    "recipe_errors",
]

LOW = ("fp16", "bf16", "e4m3", "e5m2")
STREAM_FORMATS = ("fp16", "bf16")
"""In which streams are kept."""
METHODS: tuple[Addition, ...] = get_args(Addition)
POWER_OF_TWO = 16


def _section(params: Params) -> Parameters:
    torch.set_num_threads(params.device.threads)
    return params.claims.fp16_swamping


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, len(shape)]).standard_normal(shape))


def _near(seed: int, size: float, *shape: int) -> Tensor:
    """Within 10 % of `size`, of either sign."""
    random = np.random.default_rng([seed, len(shape)])
    return torch.from_numpy(size * random.uniform(0.9, 1.1, shape) * random.choice([-1.0, 1.0], shape))


# --- tables ---------------------------------------------------------------------------------------


def format_table(params: Params) -> pd.DataFrame:
    """What each format makes of one stream value and one update, one row a format."""
    x, u = _section(params).stream, _section(params).update
    rows = {
        name: {
            "bits of significand": FORMATS[name].bits,
            "largest": FORMATS[name].largest,
            f"{x:g} becomes": float(round_to(x, FORMATS[name])),
            f"ulp({x:g})": float(ulp(x, FORMATS[name])),
            f"{x:g} + {u:g}": float(add(x, u, FORMATS[name])),
            "absorbed": bool(absorbed(x, u, FORMATS[name])),
            "absorbed below": float(ulp(x, FORMATS[name])) / 2,
        }
        for name in ("fp32", *LOW)
    }
    return pd.DataFrame(rows).T


def examples(params: Params, count: int = 96) -> pd.DataFrame:
    """`count` additions of one update onto one stream value, by format and method; the true sum is in the title row."""
    section = _section(params)
    updates = torch.full((count, 1), section.update, dtype=torch.float64)
    rows = {}
    for name in STREAM_FORMATS:
        sums = [
            accumulate(section.stream, updates, FORMATS[name], method, torch.Generator().manual_seed(0))
            for method in METHODS
        ]
        rows[name] = {method: float(s[-1]) for method, s in zip(METHODS, sums, strict=True)}
    table = pd.DataFrame(rows).T
    table["true sum"] = section.stream + count * section.update
    return table


# --- one addition ---------------------------------------------------------------------------------


def near_values(params: Params, form: Format) -> list[float]:
    """Absorbed share of updates near `update` on values near `stream` (within 10 %, signs at random), by seed."""
    section = _section(params)
    elements = section.exact.elements
    shares = []
    for seed in range(section.exact.seeds):
        x, u = _near(seed, section.stream, elements), _near(seed, section.update, 1, elements)[0]
        shares.append(float(absorbed(x, u, form).double().mean()))
    return shares


def absorption_curve(params: Params) -> pd.DataFrame:
    """Absorbed share of a normally distributed update vector on a normally distributed stream, by their rms' ratio.

    One row a format, ratio and seed: `measured` by rounding the sums, `law` from the half-ulp law, and `exceptions`,
    the elements in which rounding and law disagree.
    """
    section = _section(params)
    rows = []
    for name in LOW:
        form = FORMATS[name]
        for seed in range(section.exact.seeds):
            x = section.stream * _normal(seed, section.exact.elements)
            unit = _normal(seed, 1, section.exact.elements)[0]
            for ratio in section.exact.ratios:
                u = ratio * section.stream * unit
                lost = absorbed(x, u, form)
                within = x.abs() + u.abs() < form.largest
                rows.append(
                    {
                        "format": name,
                        "ratio": ratio,
                        "seed": seed,
                        "measured": float(lost.double().mean()),
                        "law": absorbed_probability(x, ratio * section.stream, form),
                        "exceptions": int(((lost != absorbed_by_law(x, u, form)) & within).sum()),
                    }
                )
    return pd.DataFrame(rows)


# --- many additions -------------------------------------------------------------------------------


def _stream_and_updates(params: Params, seed: int, ratio: float) -> tuple[Tensor, Tensor]:
    """A normally distributed stream [elements] of rms `stream`, and updates [additions, elements] at this ratio."""
    section = _section(params)
    x = section.stream * _normal(seed, section.exact.elements)
    return x, ratio * section.stream * _normal(seed, section.exact.additions, section.exact.elements)


def accumulation_curve(params: Params) -> pd.DataFrame:
    """Relative error of what `additions` random updates add up to, one row a format, method, ratio and seed.

    Plain addition at all ratios, the other methods at the ratio update / stream of the forced models.
    """
    section = _section(params)
    forced = section.update / section.stream
    rows = []
    for seed in range(section.exact.seeds):
        for ratio in section.exact.ratios:
            x, updates = _stream_and_updates(params, seed, ratio)
            for name in STREAM_FORMATS:
                for method in METHODS if math.isclose(ratio, forced) else METHODS[:1]:
                    sums = accumulate(x, updates, FORMATS[name], method, torch.Generator().manual_seed(seed))
                    error = float(relative_accumulated_error(sums, updates)[-1])
                    rows.append({"format": name, "method": method, "ratio": ratio, "seed": seed, "error": error})
    return pd.DataFrame(rows)


def growth(params: Params) -> pd.DataFrame:
    """Root mean square error after 1, 2, 4, ... additions of updates that all point one way, near `update`.

    One row a format, method, seed and number of additions, onto `stream` in every element.
    """
    section = _section(params)
    counts = [2**k for k in range(section.exact.growth_additions.bit_length())]
    rows = []
    for seed in range(section.exact.seeds):
        updates = _near(seed, section.update, counts[-1], section.exact.elements).abs()
        for name in STREAM_FORMATS:
            for method in METHODS:
                sums = accumulate(section.stream, updates, FORMATS[name], method, torch.Generator().manual_seed(seed))
                errors = accumulated_error(sums, updates)
                rows += [
                    {"format": name, "method": method, "seed": seed, "additions": n, "error": float(errors[n - 1])}
                    for n in counts
                ]
    return pd.DataFrame(rows)


def growth_exponents(grown: pd.DataFrame) -> pd.DataFrame:
    """Log-log slope of the error over the number of additions, one row a format, method and seed."""
    rows = []
    for (name, method, seed), part in grown.groupby(["format", "method", "seed"], sort=False):
        exponent = slope(np.log(part["additions"]).tolist(), np.log(part["error"]).tolist())
        rows.append({"format": name, "method": method, "seed": seed, "exponent": exponent})
    return pd.DataFrame(rows)


# --- the recipe: times ten, and back --------------------------------------------------------------


def recipe_errors(params: Params) -> pd.DataFrame:
    """Relative error of the accumulated update with the recipe of sentence A6.2c, one row a format and seed.

    `plain` without it; `scaled along` stream and updates times `factor`, the sum divided by it; `branch only` the
    updates times `factor`, and what they added up to divided by it. `changed by 16` is the share of elements that
    differ from `plain` when stream and updates are scaled by 16, a power of two.
    """
    section = _section(params)
    factor, rows = section.factor, []
    for seed in range(section.exact.seeds):
        x, updates = _stream_and_updates(params, seed, section.update / section.stream)
        for name in STREAM_FORMATS:
            form = FORMATS[name]
            plain = accumulate(x, updates, form)
            along = accumulate(factor * x, factor * updates, form) / factor
            only = accumulate(x, factor * updates, form)
            power = accumulate(POWER_OF_TWO * x, POWER_OF_TWO * updates, form) / POWER_OF_TWO
            rows.append(
                {
                    "format": name,
                    "seed": seed,
                    "plain": float(relative_accumulated_error(plain, updates)[-1]),
                    "scaled along": float(relative_accumulated_error(along, updates)[-1]),
                    "branch only": float(relative_accumulated_error((only - only[0]) / factor, updates)[-1]),
                    "changed by 16": float((power != plain).double().mean()),
                }
            )
    return pd.DataFrame(rows)
