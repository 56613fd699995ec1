"""Static weights over the outputs of earlier blocks.

Letters: x_0 the embedding, x_i the stream after block i, all [..., d]; a_{b,i} the weight of x_i after block b.
"""

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from reslab.residuals.connection import Connection, ConnectionOptions, Ends, Site, register, wide
from reslab.residuals.depth_attention import align_to_sources, weighted_sum
from reslab.schema import UserError

__all__ = ["DenseFormer", "DenseFormerOptions"]


class DenseFormerOptions(ConnectionOptions):
    period: int = Field(default=2, ge=1)
    """Sublayers between two averages; 2 is once a Transformer block."""

    def require(self, sublayers: int, width: int) -> None:
        if self.period > sublayers:
            raise UserError(
                f"denseformer: period {self.period} is larger than the {sublayers} sublayers; make it smaller"
            )


class Averaged(NamedTuple):
    """The stream of `denseformer`."""

    x: Tensor
    """[..., d], what sublayers read and add to."""
    outputs: tuple[Tensor, ...]
    """The embedding and each finished block's output, each [..., d]."""


class AveragedEnds(Ends):
    def start(self, x: Tensor) -> Averaged:
        return Averaged(x, (x,))

    def finish(self, stream: Averaged) -> Tensor:
        return stream.x


@register("denseformer")
class DenseFormer(Connection):
    """x <- x + v; after each block x_b <- sum_{i<=b} a_{b,i} x_i with learnt scalars (Pagliardini et al. 2024).

    arXiv 2402.02622, eq. 5 (depth-weighted average). Starts at a_{b,b} = 1 and 0 elsewhere: `add` exactly.
    """

    Options = DenseFormerOptions
    ends = AveragedEnds
    plain_stream = False

    def __init__(self, site: Site, options: DenseFormerOptions) -> None:
        super().__init__(site, options)
        self.averages = (site.index + 1) % options.period == 0
        if self.averages:
            self.weights = nn.Parameter(torch.empty(1 + (site.index + 1) // options.period))

    def reset_parameters(self) -> None:
        if self.averages:
            nn.init.zeros_(self.weights)
            nn.init.ones_(self.weights[-1])

    def read(self, stream: Averaged) -> Tensor:
        return stream.x

    def write(self, stream: Averaged, update: Tensor) -> Averaged:
        x = stream.x + update
        if not self.averages:
            return Averaged(x, stream.outputs)
        outputs = (*stream.outputs, x)
        weights = align_to_sources(self.weights, len(outputs), surplus=0.0)
        average = weighted_sum(wide(weights).unsqueeze(-1).unbind(0), outputs)
        return Averaged(average.to(x.dtype), outputs)
