"""Attention over earlier states, as a popular article sketches attention residuals.

Letters: h_0 the embedding, h_l the stream after sublayer l, all [..., d]; w_l its query; a_i the depth weights.
"""

from typing import NamedTuple

from pydantic import Field
from torch import Tensor

from reslab.residuals.connection import Connection, ConnectionOptions, Ends, Site, register, wide
from reslab.residuals.depth_attention import AttnResOptions, DepthWeights, dot, inverse_rms, weighted_sum

__all__ = ["StateAttention", "StateAttentionOptions"]


class StateAttentionOptions(ConnectionOptions):
    key_norm: bool = True
    """Keys are the states divided by their rms; else the states."""
    query_rate: float = Field(default=1.0, gt=0)
    """Learning-rate multiplier of the queries."""


class States(NamedTuple):
    """The stream of `state_attention`."""

    states: tuple[Tensor, ...]
    """h_0 (the embedding) to the newest, each [..., d]."""
    scales: tuple[Tensor, ...]
    """1/rms of each state [..., 1]; 1 where keys are not normed."""


class StateEnds(Ends):
    def __init__(self, site: Site, options: StateAttentionOptions) -> None:
        super().__init__(site, options)
        self.key_norm = options.key_norm

    def start(self, x: Tensor) -> States:
        return States((x,), (state_scale(x, self.key_norm),))

    def finish(self, stream: States) -> Tensor:
        return stream.states[-1]


def state_scale(state: Tensor, key_norm: bool) -> Tensor:
    """[..., d] -> [..., 1]."""
    return inverse_rms(state) if key_norm else wide(state.new_ones(()))


@register("state_attention")
class StateAttention(Connection):
    """h_l = sum_{i<l} a_i h_i + f(h_{l-1}), a = softmax_i(w_l . RMSNorm(h_i)).

    Attention over the *outputs* h, added to the layer's function of the previous one: the loop that a popular
    article sketches for attention residuals (docs/claims.md, B4). Unlike `attnres` its sources are cumulative.
    """

    Options = StateAttentionOptions
    ends = StateEnds
    plain_stream = False

    def __init__(self, site: Site, options: StateAttentionOptions) -> None:
        super().__init__(site, options)
        self.weights = DepthWeights(AttnResOptions(key_norm=options.key_norm), site.width, site.index + 1)

    def reset_parameters(self) -> None:
        self.weights.reset_parameters()

    def rates(self) -> dict[str, float]:
        return {} if self.options.query_rate == 1 else {"weights.query": self.options.query_rate}

    def read(self, stream: States) -> Tensor:
        return stream.states[-1]

    def write(self, stream: States, update: Tensor) -> States:
        query = self.weights.query_for(stream.states[-1])
        scores = [dot(query, h) * scale for h, scale in zip(stream.states, stream.scales, strict=True)]
        mixed = weighted_sum(self.weights.activate(scores), stream.states)
        state = (mixed + update).to(stream.states[0].dtype)
        return States((*stream.states, state), (*stream.scales, state_scale(state, self.options.key_norm)))
