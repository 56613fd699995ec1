"""What a noise prediction says about the picture, and what can be known of it without a network.

Letters: B batch, c channels, n image size; x a picture, e the noise in it, t the time in 0..1. As in
`data.NoisyDigits`, x_t = cos(pi t / 2) x + sin(pi t / 2) e (Nichol & Dhariwal 2021, arXiv 2102.09672, no offset).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from reslab.probes import evaluating
from reslab.schema import UserError

__all__ = ["LinearDenoiser", "Predictor", "add_noise", "clean_estimate", "predictor", "structure"]

Predictor = Callable[[Tensor, float], Tensor]
"""Noisy pictures [B, c, n, n], all at one time -> the noise in them, of the same shape."""


def predictor(model: nn.Module) -> Predictor:
    """What `model`, a diffusion model of this package, predicts: computed where its weights are, in their dtype.

    In evaluation mode and without gradient; the answer comes back to where the pictures are.
    """
    weight = next(model.parameters())

    def predict(noisy: Tensor, time: float) -> Tensor:
        at = torch.full((len(noisy),), time, device=weight.device)
        with torch.no_grad(), evaluating(model):
            out: Tensor = model(noisy.to(weight.device), at)
        return out.to(noisy.device, noisy.dtype)

    return predict


def _parts(time: float) -> tuple[float, float]:
    """Shares of picture and noise; a UserError where nothing of the picture, or of the noise, is left."""
    if not 0 < time < 1:
        raise UserError(f"time {time:g} must lie between 0 (no noise) and 1 (nothing but noise)")
    return math.cos(math.pi / 2 * time), math.sin(math.pi / 2 * time)


def add_noise(pictures: Tensor, noise: Tensor, time: float) -> Tensor:
    """x_t of x and e."""
    picture, noisy = _parts(time)
    return picture * pictures + noisy * noise


def clean_estimate(noisy: Tensor, noise: Tensor, time: float) -> Tensor:
    """The picture that is left when `noise` is taken out of x_t (Ho et al. 2020, arXiv 2006.11239, eq. 15)."""
    picture, share = _parts(time)
    return (noisy - share * noise) / picture


def structure(estimate: Tensor, clean: Tensor, mean: Tensor) -> Tensor:
    """[B]: correlation between what sets the estimate and what sets the clean picture apart from the mean picture.

    Pictures [B, c, n, n], the mean [c, n, n]. 1 for the clean picture itself, 0 on average for what knows nothing of
    it, and 0 for the mean picture. Deviations are taken as they are, not centred once more.
    """
    ours, theirs = (estimate - mean).flatten(1).double(), (clean - mean).flatten(1).double()
    sizes = ours.norm(dim=1) * theirs.norm(dim=1)
    products = (ours * theirs).sum(1)
    return torch.where(sizes > 0, products / sizes, torch.zeros_like(products))


class LinearDenoiser:
    """The best predictor of the noise that is linear in x_t, given the pictures' mean m and covariance C, in float64.

    e = s (a^2 C + s^2 I)^-1 (x_t - a m), with a, s the shares of picture and noise (the Wiener filter). `pictures`
    [B, c, n, n] are those that m and C are taken from.
    """

    def __init__(self, pictures: Tensor) -> None:
        flat = pictures.flatten(1).double()
        self.mean = flat.mean(0)
        self.values, self.vectors = torch.linalg.eigh(torch.cov(flat.T, correction=0))

    def __call__(self, noisy: Tensor, time: float) -> Tensor:
        picture, share = _parts(time)
        along = (noisy.flatten(1).double() - picture * self.mean) @ self.vectors
        shrunk = share * along / (picture**2 * self.values.clamp_min(0) + share**2)
        return (shrunk @ self.vectors.T).view_as(noisy).to(noisy.dtype)
