"""Connections whose stream is one tensor [..., d]: the standard one, and what scales, gates or averages it.

Letters: x the stream, v the update, l the sublayer's number from 1, s and a scalars, g a vector [d].
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from reslab.residuals.connection import Connection, ConnectionOptions, Site, register

__all__ = [
    "Add",
    "Highway",
    "LayerNormScaling",
    "LayerScale",
    "NoConnection",
    "ReZero",
    "Rescaled",
    "Scaled",
    "SkipInit",
    "WeightedSkip",
]


@register("none")
class NoConnection(Connection):
    """x <- v. The update replaces the stream (Dong et al. 2021, arXiv 2103.03404, "without skip")."""

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        return update


@register("add")
class Add(Connection):
    """x <- x + v. The standard residual connection (He et al. 2016, arXiv 1603.05027, eq. 1)."""

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        return stream + self.weigh(update).to(stream.dtype)


@register("weighted_skip")
class WeightedSkip(Connection):
    """x <- w x + v with a fixed w. Shrinks the skip, not the branch (He et al. 2016, arXiv 1603.05027, eq. 5).

    w = 1 is `add`, w = 0 is `none`; over n sublayers the first input arrives scaled by w^n.
    """

    class Options(ConnectionOptions):
        weight: float
        """w."""

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        return torch.add(update, stream, alpha=self.options.weight)


@register("scaled")
class Scaled(Add):
    """x <- x + s v with a fixed s on the branch (Szegedy et al. 2017, arXiv 1602.07261, section 3.3: 0.1 to 0.3)."""

    class Options(ConnectionOptions):
        scale: float
        """s."""

    def weigh(self, update: Tensor) -> Tensor:
        return self.options.scale * update


@register("rezero")
class ReZero(Add):
    """x <- x + a v with a learnt scalar a that starts at 0 (Bachlechner et al. 2020, arXiv 2003.04887, eq. 2).

    In the paper with no norm in the block (placement `none`).
    """

    def __init__(self, site: Site, options: ConnectionOptions) -> None:
        super().__init__(site, options)
        self.alpha = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)

    def weigh(self, update: Tensor) -> Tensor:
        return self.alpha * update


@register("skipinit")
class SkipInit(ReZero):
    """x <- x + a v with a learnt scalar a (De & Smith 2020, arXiv 2002.10444, section 4).

    a starts at `initial`: 0 in the paper, which also tries 1/sqrt(number of blocks).
    """

    class Options(ConnectionOptions):
        initial: float = 0.0
        """a at the start."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.options.initial)


@register("layerscale")
class LayerScale(Add):
    """x <- x + g * v with a learnt g [d] that starts at `initial` (Touvron et al. 2021, arXiv 2103.17239, eq. 4).

    The paper's `initial`: 0.1 up to 18 blocks, 1e-5 at 24, 1e-6 deeper.
    """

    class Options(ConnectionOptions):
        initial: float = 0.1
        """Every channel of g at the start."""

    def __init__(self, site: Site, options: ConnectionOptions) -> None:
        super().__init__(site, options)
        self.gamma = nn.Parameter(torch.empty(site.width))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.options.initial)

    def weigh(self, update: Tensor) -> Tensor:
        return self.gamma * update


@register("highway")
class Highway(Connection):
    """x <- (1 - t) * x + t * v, t = sigmoid(W x + b) [..., d] (Srivastava et al. 2015, arXiv 1505.00387, eq. 3).

    W [d, d] starts at 0 and b [d] at `bias`; the paper's negative b lets the stream through at first.
    """

    class Options(ConnectionOptions):
        bias: float = -2.0
        """b at the start; negative lets the stream through."""

    def __init__(self, site: Site, options: ConnectionOptions) -> None:
        super().__init__(site, options)
        self.gate = nn.Linear(site.width, site.width)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, self.options.bias)

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        transform = self.gate(stream.to(self.gate.weight.dtype)).sigmoid().to(stream.dtype)
        return stream + transform * (update - stream)


@register("rescaled")
class Rescaled(Connection):
    """x <- (l x + v) / (l + 1): the stream is the plain mean of the embedding and all updates.

    The control for attention over depth: what equal weights do once the stream no longer grows
    (Kimi Team 2026, arXiv 2603.15031, with all depth queries held at zero).
    """

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        return stream + (update - stream) / (self.site.index + 2)


@register("layernorm_scaling")
class LayerNormScaling(Add):
    """x <- x + f(norm(x) / sqrt(b)), b the number of the block from 1 (Sun et al. 2025, arXiv 2502.05795, eq. 9).

    `sublayers_per_block`: how many sublayers share a b; 2 in a Transformer.
    """

    needs_input_norm = True

    class Options(ConnectionOptions):
        sublayers_per_block: int = Field(default=2, ge=1)
        """How many sublayers share a block's number."""

    def feed(self, h: Tensor) -> Tensor:
        return h * (1 + self.site.index // self.options.sublayers_per_block) ** -0.5
