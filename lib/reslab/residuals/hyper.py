"""Hyper-connections: n parallel streams that are read, mixed and written with learnt weights.

Letters: n streams, H [..., n, d] the streams, r [n] read weights, M [n, n] the mixing matrix, b [n] write weights.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.residuals.connection import Connection, ConnectionOptions, Ends, Site, register, wide

__all__ = ["HyperConnection", "HyperOptions", "sinkhorn"]


class HyperOptions(ConnectionOptions):
    streams: int = Field(default=4, ge=2)
    """n."""
    dynamic: bool = True
    """The weights also depend on the token."""
    doubly_stochastic: bool = False
    """mHC: rows and columns of M sum to 1, r and b are positive."""


def sinkhorn(logits: Tensor, rounds: int = 20) -> Tensor:
    """The doubly stochastic matrix [..., n, n] that belongs to exp(logits) (Sinkhorn & Knopp 1967)."""
    for _ in range(rounds):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


class HyperEnds(Ends):
    """Begins with n copies of the embedding and ends with the mean of the streams (the paper's sum, over n)."""

    def __init__(self, site: Site, options: HyperOptions) -> None:
        super().__init__(site, options)
        self.streams = options.streams

    def start(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2).repeat_interleave(self.streams, -2)

    def finish(self, stream: Tensor) -> Tensor:
        return stream.mean(-2)


@register("hyper")
class HyperConnection(Connection):
    """h = r H; H <- M H + b v (Zhu et al. 2024, arXiv 2409.19606, eq. 2 to 5).

    Each weight is a learnt one plus a scale times a token's own, tanh of a linear map of the normed streams; here
    each of r, M and b has its own scale. With `doubly_stochastic` manifold-constrained hyper-connections (Xie et al.
    2025, arXiv 2512.24880): M by Sinkhorn's iteration, r by a sigmoid, b by twice a sigmoid, and the token's part a
    linear map of all streams together. All start so that the model equals `add` exactly: r reads mostly stream
    (l mod n), M is (near) the identity, b is 1, and the token's parts are 0.
    """

    ends = HyperEnds
    plain_stream = False
    Options = HyperOptions

    def __init__(self, site: Site, options: HyperOptions) -> None:
        super().__init__(site, options)
        n = options.streams
        self.read_weight = nn.Parameter(torch.empty(n))
        self.mix_weight = nn.Parameter(torch.empty(n, n))
        self.write_weight = nn.Parameter(torch.empty(n))
        if options.dynamic:
            width, each = (n * site.width, n) if options.doubly_stochastic else (site.width, 1)
            self.read_map = nn.Linear(width, each, bias=False)
            self.mix_map = nn.Linear(width, each * n, bias=False)
            self.write_map = nn.Linear(width, each, bias=False)
            self.token_scale = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        n, first = self.options.streams, self.site.index % self.options.streams
        with torch.no_grad():
            if self.options.doubly_stochastic:
                self.read_weight.copy_(_mostly(F.one_hot(torch.tensor(first), n).float()).logit())
                self.mix_weight.copy_(_mostly(torch.eye(n)).log())
                self.write_weight.zero_()
            else:
                self.read_weight.zero_()[first] = 1
                self.mix_weight.copy_(torch.eye(n))
                self.write_weight.fill_(1)
        if self.options.dynamic:
            for token_map in (self.read_map, self.mix_map, self.write_map):
                nn.init.zeros_(token_map.weight)
            nn.init.constant_(self.token_scale, 0.01)

    def read(self, stream: Tensor) -> Tensor:
        read = wide(self.read_weight)
        if self.options.dynamic:
            read = read + self._token_part(0, self.read_map, self._normed(stream))
        if self.options.doubly_stochastic:
            read = read.sigmoid()
        return (read.unsqueeze(-1) * stream).sum(-2).to(stream.dtype)

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        mix, write = self._write_weights(stream)
        mixed = (mix.unsqueeze(-1) * stream.unsqueeze(-3)).sum(-2)
        return (mixed + write.unsqueeze(-1) * update.unsqueeze(-2)).to(stream.dtype)

    def _write_weights(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """M [..., n, n] and b [..., n]; without leading axes where they do not depend on the token."""
        mix, write, n = wide(self.mix_weight), wide(self.write_weight), self.options.streams
        if self.options.dynamic:
            normed = self._normed(stream)
            write = write + self._token_part(2, self.write_map, normed)
            columns = self._token_part(1, self.mix_map, normed).unflatten(-1, (n, n))
            mix = mix + columns.transpose(-1, -2)  # what stream j's features say is column j
        if self.options.doubly_stochastic:
            return sinkhorn(mix), 2 * write.sigmoid()
        return mix, write

    def _normed(self, stream: Tensor) -> Tensor:
        """The streams' features: each normed, [..., n, d], or together, [..., n d]."""
        x = stream.flatten(-2) if self.options.doubly_stochastic else stream
        return F.rms_norm(wide(x), x.shape[-1:], eps=1e-6).to(self.read_map.weight.dtype)

    def _token_part(self, number: int, token_map: nn.Module, normed: Tensor) -> Tensor:
        """What the token adds to r [..., n], M [..., n n] or b [..., n], which have the scales 0, 1 and 2."""
        part = wide(token_map(normed))
        part = part if self.options.doubly_stochastic else part.tanh().flatten(-2)
        return wide(self.token_scale)[number] * part


def _mostly(one: Tensor) -> Tensor:
    """`one`, whose rows hold a single 1, with a tenth of it spread over the other places."""
    n = one.shape[-1]
    return 0.9 * one + 0.1 * (1 - one) / (n - 1)
