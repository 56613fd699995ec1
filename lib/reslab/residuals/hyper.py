"""Hyper-connections: n parallel streams that are read, mixed and written with learnt weights.

Letters: n streams, H [..., n, d] the streams, r [n] read weights, M [n, n] the mixing matrix, b [n] write weights.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.residuals.connection import Connection, ConnectionOptions, Ends, Site, register

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

    With `doubly_stochastic` manifold-constrained hyper-connections (Xie et al. 2025, arXiv 2512.24880): M by
    Sinkhorn's iteration, r by a sigmoid, b by twice a sigmoid. All start so that the model equals `add` exactly:
    r reads mostly stream (l mod n), M is (near) the identity, b is 1. The token's part of each weight starts at 0.
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
            self.token_map = nn.Linear(site.width, n + 2, bias=False)
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
            nn.init.zeros_(self.token_map.weight)
            nn.init.constant_(self.token_scale, 0.01)

    def read(self, stream: Tensor) -> Tensor:
        read = self._weights(stream)[0].to(stream.dtype)
        return (read.unsqueeze(-1) * stream).sum(-2)

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        _, mix, write = (weight.to(stream.dtype) for weight in self._weights(stream))
        mixed = (mix.unsqueeze(-1) * stream.unsqueeze(-3)).sum(-2)
        return mixed + write.unsqueeze(-1) * update.unsqueeze(-2)

    def _weights(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """r [..., n], M [..., n, n] and b [..., n]; without leading axes where they do not depend on the token."""
        weights: tuple[Tensor, ...] = (self.read_weight, self.mix_weight, self.write_weight)
        if self.options.dynamic:
            weights = tuple(own + part for own, part in zip(weights, self._token_parts(stream), strict=True))
        read, mix, write = weights
        if self.options.doubly_stochastic:
            return read.sigmoid(), sinkhorn(mix), 2 * write.sigmoid()
        return read, mix, write

    def _token_parts(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each stream's token adds to r [..., n], M [..., n, n] (its column) and b [..., n]."""
        normed = F.rms_norm(stream, stream.shape[-1:], eps=1e-6).to(self.token_map.weight.dtype)
        parts = self.token_map(normed).tanh()  # [..., n, n + 2]
        n = self.options.streams
        read, write, mix = parts[..., 0], parts[..., 1], parts[..., 2 : n + 2].transpose(-1, -2)
        return self.token_scale[0] * read, self.token_scale[1] * mix, self.token_scale[2] * write


def _mostly(one: Tensor) -> Tensor:
    """`one`, whose rows hold a single 1, with a tenth of it spread over the other places."""
    n = one.shape[-1]
    return 0.9 * one + 0.1 * (1 - one) / (n - 1)
