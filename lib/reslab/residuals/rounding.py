"""Connections that add to a low-precision stream without losing small updates.

Letters: x the stream [..., d], v the update, s a fixed scale, c what rounding has added too much [..., d], fl rounding
to the stream's dtype.
"""

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from reslab.precision import format_of, round_with_noise
from reslab.residuals.connection import Connection, ConnectionOptions, Ends, register, wide

__all__ = ["Compensated", "Kahan", "Stochastic"]


class RoundingOptions(ConnectionOptions):
    scale: float = Field(default=1.0)
    """s on the branch, as in `scaled`."""


# --- compensated ----------------------------------------------------------------------------------


class Compensated(NamedTuple):
    """The stream of `kahan`; the sum it stands for is x - c."""

    x: Tensor
    """[..., d], what sublayers read."""
    c: Tensor
    """[..., d], in x's dtype."""


class CompensatedEnds(Ends):
    def start(self, x: Tensor) -> Compensated:
        return Compensated(x, torch.zeros_like(x))

    def finish(self, stream: Compensated) -> Tensor:
        return wide(stream.x) - wide(stream.c)


@register("kahan")
class Kahan(Connection):
    """y = fl(s v - c); x' = fl(x + y); c <- fl(fl(x' - x) - y); x <- x'. Compensated addition (Kahan 1965).

    Higham 2002, "Accuracy and Stability of Numerical Algorithms", algorithm 4.2: what rounding to the stream's dtype
    took away is kept in a second stream and added with the next update. Sublayers read x; the model reads off x - c.
    Gradients are those of plain addition. Not for compiled blocks, where fused additions are not rounded.
    """

    Options = RoundingOptions
    ends = CompensatedEnds
    plain_stream = False

    def read(self, stream: Compensated) -> Tensor:
        return stream.x

    def weigh(self, update: Tensor) -> Tensor:
        return self.options.scale * update

    def write(self, stream: Compensated, update: Tensor) -> Compensated:
        x, c = stream
        corrected = self.weigh(update).to(x.dtype) - c
        grown = x + corrected
        return Compensated(grown, ((grown - x) - corrected).detach())


# --- stochastic -----------------------------------------------------------------------------------


def _mixed(bits: Tensor) -> Tensor:
    """32-bit integers, in int64, mixed so that each bit depends on all (MurmurHash3's finaliser; Appleby 2011)."""
    bits = bits & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _bits(x: Tensor) -> Tensor:
    return x.float().view(torch.int32).to(torch.int64)


@register("stochastic")
class Stochastic(Connection):
    """x <- x + s v, rounded at random to one of the two neighbours in the stream's dtype, so that the mean is the sum.

    Gupta et al. 2015, arXiv 1502.02551, section 3.1. The random numbers are a hash of x, v, channel and sublayer: the
    same input gives the same output, whatever ran before. Gradients are those of plain addition. A float64 stream is
    added to plainly.
    """

    Options = RoundingOptions

    def weigh(self, update: Tensor) -> Tensor:
        return self.options.scale * update

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        added = self.weigh(update).to(stream.dtype)
        total = stream + added
        if stream.dtype == torch.float64:
            return total
        with torch.no_grad():
            exact = stream.double() + added.double()
            rounded = round_with_noise(exact, format_of(stream.dtype), self._noise(stream, added)).to(stream.dtype)
        return total + (rounded - total).detach()  # the same or a neighbour, so that both steps are exact

    def _noise(self, stream: Tensor, added: Tensor) -> Tensor:
        """Uniform in [0, 1), float64, of the shape of the stream."""
        place = torch.arange(stream.shape[-1], device=stream.device) + self.site.index * self.site.width
        mixed = _mixed(_mixed(_bits(stream) + place * 0x9E3779B1) ^ _bits(added))
        return mixed.double() / 2**32
