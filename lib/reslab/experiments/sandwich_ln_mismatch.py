"""Branches of a foreign scale, for claim 08: a connection that makes some updates much larger than the others.

Letters: x the stream, v the update, c the factor, d the width.
"""

from pydantic import Field
from torch import Tensor, nn

from reslab.models.layers import NormKind, make_norm
from reslab.residuals import ConnectionOptions, Site, register
from reslab.residuals.additive import Add

__all__ = ["Mismatched", "is_foreign"]


def is_foreign(sublayer: int) -> bool:
    """Is this sublayer (from 0) foreign? The attention of every second block is: sublayers 2, 6, 10 and so on."""
    return sublayer % 4 == 2


@register("mismatched")
class Mismatched(Add):
    """x <- x + c v in foreign sublayers, x + v in the others; with `norm`, of the norm of that: x + norm(c v), norm(v).

    What a block of another origin does to a stack, such as another kind of attention or an external memory: its
    output has a scale of its own. Placement `pre` with `norm` is placement `sandwich` with the factor inside
    (Ding et al. 2021, CogView, arXiv 2105.13290).
    """

    class Options(ConnectionOptions):
        factor: float = Field(default=30.0, gt=0)
        """c."""
        norm: NormKind | None = None
        """The norm on every update, the factor inside; none where None."""
        eps: float = Field(default=1e-5, ge=0)
        """Added to the variance (the mean square) in that norm."""

    def __init__(self, site: Site, options: Options) -> None:
        super().__init__(site, options)
        self.factor = options.factor if is_foreign(site.index) else 1.0
        self.norm = make_norm(options.norm, site.width, options.eps) if options.norm else nn.Identity()

    def reset_parameters(self) -> None:
        if isinstance(self.norm, nn.LayerNorm | nn.RMSNorm):
            self.norm.reset_parameters()

    def weigh(self, update: Tensor) -> Tensor:
        weighed: Tensor = self.norm(self.factor * update)
        return weighed
