"""Pictures out of noise, step by step: DDIM and DDPM (Song et al. 2021, arXiv 2010.02502; Ho et al. 2020, 2006.11239).

Letters as in `reslab.denoising`.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from reslab.denoising import Predictor, clean_estimate
from reslab.schema import UserError

__all__ = ["Path", "denoise", "timetable"]


class Path(NamedTuple):
    """What a sampler passed through; both lists as long as there are steps, plus one for the states."""

    states: list[Tensor]
    """x_t at every time of the timetable; the last is the picture."""
    estimates: list[Tensor]
    """The clean picture as estimated at every step."""


def timetable(start: float, steps: int) -> list[float]:
    """`steps` + 1 times, evenly from `start` down to 0.

    A UserError unless 0 < start < 1: at 1 nothing of a picture is left that an estimate could be made from.
    """
    if not 0 < start < 1:
        raise UserError(f"start {start:g} must lie between 0 and 1; to begin with noise alone give, for instance, 0.98")
    if steps < 1:
        raise UserError(f"{steps} steps; a sampler needs at least one")
    return [start * (1 - step / steps) for step in range(steps + 1)]


def denoise(
    predict: Predictor,
    noisy: Tensor,
    times: list[float],
    *,
    eta: float = 0.0,
    seed: int = 0,
    limits: tuple[float, float] = (-1.0, 1.0),
) -> Path:
    """Takes the noise out of `noisy` [B, c, n, n], x_t at the first of `times`, until the last of them, 0.

    Song et al.'s eq. 12. `eta` 0 is DDIM, which draws nothing; 1 is DDPM's ancestral sampling, whose noise depends on
    `seed` alone. At every step the estimated picture is kept within `limits`, and the noise is what is left of x_t,
    as in the code of Ho et al. and of Nichol & Dhariwal.
    """
    if not 0 <= eta <= 1:
        raise UserError(f"eta {eta:g} must lie between 0 (DDIM) and 1 (DDPM)")
    random = torch.Generator().manual_seed(seed)
    states, estimates = [noisy], []
    for time, following in itertools.pairwise(times):
        estimate = clean_estimate(states[-1], predict(states[-1], time), time).clamp(*limits)
        estimates.append(estimate)
        states.append(_next(states[-1], estimate, time, following, eta, random))
    return Path(states, estimates)


def _next(
    noisy: Tensor, estimate: Tensor, time: float, following: float, eta: float, random: torch.Generator
) -> Tensor:
    """x at the `following` time; at 0 the estimate itself."""
    (picture, share), (later_picture, later_share) = _shares(time), _shares(following)
    noise = (noisy - picture * estimate) / share
    drawn = eta * later_share / share * math.sqrt(max(0.0, 1 - (picture / later_picture) ** 2))
    out = later_picture * estimate + math.sqrt(max(0.0, later_share**2 - drawn**2)) * noise
    if drawn:
        out = out + drawn * torch.randn(noisy.shape, generator=random).to(noisy)
    return out


def _shares(time: float) -> tuple[float, float]:
    return math.cos(math.pi / 2 * time), math.sin(math.pi / 2 * time)
