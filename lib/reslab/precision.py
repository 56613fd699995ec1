"""Rounding to low-precision formats: unit in the last place, absorption, and ways to add without losing.

Everything is computed in float64 and rounded to the format once, exactly; PyTorch's own casts from float64 to 16 and
8 bits pass through float32 and round twice. Letters: x a stream, u an update, both of any shape; p the bits of a
format's significand (the hidden one included); ulp the distance between neighbouring values of a format.

Higham 2002, "Accuracy and Stability of Numerical Algorithms", chapters 2 and 4; Micikevicius et al. 2022,
arXiv 2209.05433 (the 8-bit formats).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from reslab.schema import UserError, did_you_mean

__all__ = [
    "FORMATS",
    "Addition",
    "Format",
    "absorbed",
    "absorbed_by_law",
    "absorbed_probability",
    "accumulate",
    "accumulated_error",
    "add",
    "format_of",
    "neighbour_gap",
    "relative_accumulated_error",
    "round_stochastic",
    "round_to",
    "round_with_noise",
    "ulp",
]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format that PyTorch has."""

    name: str
    dtype: torch.dtype

    @property
    def bits(self) -> int:
        """p, bits of the significand with the hidden one: 11 for fp16, 8 for bf16, 4 for e4m3, 3 for e5m2."""
        return 1 - round(math.log2(torch.finfo(self.dtype).eps))

    @property
    def lowest_exponent(self) -> int:
        """Exponent of the smallest normal number; below it the values are evenly spaced."""
        return round(math.log2(torch.finfo(self.dtype).smallest_normal))

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def has_infinity(self) -> bool:
        """e4m3 (`float8_e4m3fn`) has none: what is too large becomes its largest value, 448."""
        return self.dtype != torch.float8_e4m3fn


FORMATS = {
    name: Format(name, dtype)
    for name, dtype in {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }.items()
}
"""By their usual names."""


def format_of(dtype: torch.dtype) -> Format:
    """The format of a dtype; a UserError where it has none here."""
    for form in FORMATS.values():
        if form.dtype == dtype:
            return form
    raise UserError(f"precision: no format for {dtype}; use one of {', '.join(str(f.dtype) for f in FORMATS.values())}")


# --- spacing and rounding -------------------------------------------------------------------------


def _exact(x: Tensor | float) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)  # a number goes through no float32


def ulp(x: Tensor | float, form: Format) -> Tensor:
    """Distance from |x| to the next larger value of the format, in float64; at 0 and below the normal range the
    smallest positive value. ulp(100) is 0.0625 in fp16 and 0.5 in bf16 (Higham 2002, section 2.1)."""
    return _power_of_two(_exact(x)).clamp_min(2.0**form.lowest_exponent) * 2.0 ** (1 - form.bits)


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two up to |x| [...], float64: its exponent bits alone; 0 at 0, infinite where x is not
    finite."""
    return (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)


def neighbour_gap(x: Tensor | float, direction: Tensor | float, form: Format) -> Tensor:
    """Distance from the format's value x to its neighbour on the side of `direction`'s sign.

    An ulp, but half of one from a power of two towards 0.
    """
    value, towards = torch.broadcast_tensors(_exact(x), _exact(direction))
    size, step = value.abs(), ulp(value, form)
    inwards = (value * towards < 0) & (size == _power_of_two(value)) & (size > 2.0**form.lowest_exponent)
    return torch.where(inwards, step / 2, step)


def _limited(x: Tensor, form: Format) -> Tensor:
    """x, a multiple of its ulp, with what is beyond the format's range at infinity, or at its largest value."""
    beyond = math.inf if form.has_infinity else form.largest
    return torch.where(x.abs() > form.largest, torch.copysign(torch.full_like(x, beyond), x), x)


def round_to(x: Tensor | float, form: Format) -> Tensor:
    """The format's value nearest to x, ties to the even significand (IEEE 754's default), in float64.

    Values beyond the range become infinite, in e4m3 its largest, 448, as PyTorch's cast does.
    """
    x = _exact(x)
    step = ulp(x, form)
    return _limited(torch.where(x.isfinite(), torch.round(x / step) * step, x), form)


def round_with_noise(x: Tensor, form: Format, noise: Tensor) -> Tensor:
    """x rounded down or up to a value of the format: up where `noise` in [0, 1) reaches 1 - (x - down) / ulp."""
    x = _exact(x)
    step = ulp(x, form)
    return _limited(torch.where(x.isfinite(), torch.floor(x / step + noise) * step, x), form)


def round_stochastic(x: Tensor | float, form: Format, generator: torch.Generator) -> Tensor:
    """x rounded at random to one of its two neighbours in the format, so that the mean is x, in float64.

    Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv 1502.02551, section 3.1.
    """
    x = _exact(x)
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float64, device=x.device)
    return round_with_noise(x, form, noise)


# --- absorption -----------------------------------------------------------------------------------


def add(x: Tensor | float, u: Tensor | float, form: Format) -> Tensor:
    """fl(x + u): both rounded to the format, their exact sum rounded to it again, in float64.

    float64 holds twice the significand of every format here and two bits more, so that its own rounding of the sum
    changes nothing (Figueroa 1995, "When is double rounding innocuous?").
    """
    return round_to(round_to(x, form) + round_to(u, form), form)


def absorbed(x: Tensor | float, u: Tensor | float, form: Format) -> Tensor:
    """Where adding u leaves the rounded x as it was (boolean); the mean is the absorbed share."""
    return add(x, u, form) == round_to(x, form)


def absorbed_by_law(x: Tensor | float, u: Tensor | float, form: Format) -> Tensor:
    """The same by the half-ulp law, without adding: |u| below half the gap to x's neighbour, or equal to it and x even.

    x and u are rounded to the format first; u has to be small enough to leave x + u within the format's range.
    """
    x, u = round_to(x, form), round_to(u, form)
    half = neighbour_gap(x, u, form) / 2
    even = torch.remainder(x / ulp(x, form), 2) == 0
    return (u.abs() < half) | ((u.abs() == half) & even)


def absorbed_probability(x: Tensor | float, rms: float, form: Format) -> float:
    """What the law says of normally distributed updates of this rms: the mean over x of the share that is absorbed.

    An update is rounded before it is added, so that the limit is not quite half the gap: for an even x it is the
    largest number that rounds to half the gap, for an odd one the smallest.
    """
    x = round_to(x, form)
    even = torch.remainder(x / ulp(x, form), 2) == 0
    shares = []
    for direction in (1.0, -1.0):
        half = neighbour_gap(x, direction, form) / 2
        up, down = (neighbour_gap(half, towards, form) / 2 for towards in (1.0, -1.0))
        shares.append(torch.erf(torch.where(even, half + up, half - down) / (rms * math.sqrt(2))).mean())
    return float(sum(shares) / 2)


# --- accumulation ---------------------------------------------------------------------------------

Addition = Literal["plain", "Kahan", "stochastic", "fp32"]
"""`plain` every sum is rounded to the format;
`Kahan` it is, and what rounding lost is kept in a second number of the format (Kahan 1965, "Further remarks on
reducing truncation errors"; Higham 2002, algorithm 4.2);
`stochastic` every sum is rounded at random (arXiv 1502.02551);
`fp32` the updates are rounded to the format, but the sum is kept in float32.
"""


def accumulate(
    start: Tensor | float,
    updates: Tensor,
    form: Format,
    method: Addition = "plain",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sums after 0, 1, ... n updates [n, ...] onto `start` [...], as the format holds them: [n + 1, ...] in float64.

    For `Kahan` the sum less its compensation. `stochastic` needs a generator; a UserError says so.
    """
    if method not in get_args(Addition):
        raise UserError(f"accumulate: unknown method '{method}'; {did_you_mean(method, get_args(Addition))}")
    updates = round_to(updates, form)
    total = torch.broadcast_to(round_to(start, form), updates.shape[1:]).to(updates.device)
    if method == "Kahan":
        return _kahan(total, updates, form)
    step = _step(form, method, generator)
    sums = [total]
    for update in updates:
        sums.append(step(sums[-1] + update))
    return torch.stack(sums)


def _step(form: Format, method: Addition, generator: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    """What happens to a sum before it is kept."""
    if method == "fp32":
        return lambda x: round_to(x, FORMATS["fp32"])
    if method == "plain":
        return lambda x: round_to(x, form)
    if generator is None:
        raise UserError("accumulate: method 'stochastic' draws random numbers; give generator=torch.Generator()")
    drawn = generator
    return lambda x: round_stochastic(x, form, drawn)


def _kahan(total: Tensor, updates: Tensor, form: Format) -> Tensor:
    compensation = torch.zeros_like(total)
    sums = [total]
    for update in updates:
        corrected = round_to(update - compensation, form)
        grown = round_to(total + corrected, form)
        compensation = round_to(round_to(grown - total, form) - corrected, form)
        total = grown
        sums.append(total - compensation)
    return torch.stack(sums)


def accumulated_error(sums: Tensor, updates: Tensor) -> Tensor:
    """Root mean square over the elements of what n updates were to add less what they added, for n = 1, 2, ...: [n].

    `sums` [n + 1, ...] are `accumulate`'s, `updates` [n, ...] the unrounded ones.
    """
    error = (sums[1:] - sums[0]) - _exact(updates).cumsum(0)
    return error.flatten(1).square().mean(1).sqrt()


def relative_accumulated_error(sums: Tensor, updates: Tensor) -> Tensor:
    """`accumulated_error` over the root mean square of what the updates were to add: 0 exact, 1 all is lost; [n]."""
    return accumulated_error(sums, updates) / _exact(updates).cumsum(0).flatten(1).square().mean(1).sqrt()
