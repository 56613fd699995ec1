"""The value residual: attention's value vectors are joined over depth, the stream as usual."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from reslab.residuals.connection import Connection, ConnectionOptions, Ends, Site, register

__all__ = ["ValueResidual"]


class ValueStream(NamedTuple):
    """The stream of `value_residual`."""

    x: Tensor
    """[..., d]."""
    first_values: Tensor | None
    """The values [..., d] of the first attention sublayer, once it has run."""


class ValueEnds(Ends):
    def start(self, x: Tensor) -> ValueStream:
        return ValueStream(x, None)

    def finish(self, stream: ValueStream) -> Tensor:
        return stream.x


@register("value_residual")
class ValueResidual(Connection):
    """x <- x + v, and in all attentions but the first V_n <- a_1 V_n + a_2 V_1 with learnt scalars from 1/2.

    ResFormer with learnable weights (Zhou et al. 2024, arXiv 2410.17897, section 3). Needs a model with attention.
    """

    ends = ValueEnds
    plain_stream = False
    mixes_values = True

    def __init__(self, site: Site, options: ConnectionOptions) -> None:
        super().__init__(site, options)
        self.joins = bool(site.attention)
        """An attention other than the first."""
        if self.joins:
            self.value_weights = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        if self.joins:
            nn.init.constant_(self.value_weights, 0.5)

    def read(self, stream: ValueStream) -> Tensor:
        return stream.x

    def write(self, stream: ValueStream, update: Tensor) -> ValueStream:
        return ValueStream(stream.x + update, stream.first_values)

    def mix_values(self, stream: ValueStream, values: Tensor) -> tuple[Tensor, ValueStream]:
        """The values [..., d] that attention uses, and the stream that remembers the first ones."""
        if stream.first_values is None or not self.joins:
            return values, ValueStream(stream.x, values)
        first = stream.first_values
        own, early = self.value_weights.unbind()
        return (own * values + early * first).to(values.dtype), ValueStream(stream.x, first)
