"""What Transformers here have in common: shape, depth, connections, and the sublayers of a block.

Letters: d width, H heads, L blocks (two sublayers each).
"""

from pydantic import Field, model_validator
from torch import nn

from reslab.models.attention import Attention
from reslab.models.initialisation import WeightInit, require_init
from reslab.models.layers import Mlp, NormKind, make_norm
from reslab.residuals import ResidualSettings
from reslab.schema import Settings

__all__ = ["TransformerSettings", "TransformerShape", "attention_and_mlp"]


class TransformerShape(Settings):
    """What all Transformers here have in common."""

    width: int = Field(ge=1)
    """d, the width of the residual stream."""
    heads: int = Field(ge=1)
    norm: NormKind = "layernorm"
    norm_eps: float = Field(default=1e-5, ge=0)
    """Added to the variance (the mean square) in every norm."""
    norm_gain: float = Field(default=1.0, gt=0)
    """Gain of the stack's norms at the start; that of the norm before the head starts at 1."""
    init_std: float = Field(gt=0)
    """Standard deviation of all matrices at the start; GPT-2 has 0.02 at width 768, 0.55/sqrt(width)."""
    weight_init: WeightInit = "depth_scaled"
    """Factors by the role of a matrix; depth_scaled: what writes to the stream starts smaller by 1/sqrt(2L)."""
    final_norm: bool = True
    """A norm between the stream and the head."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "TransformerShape":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        return self

    def make_norm(self) -> nn.Module:
        """A norm over the stream's width."""
        return make_norm(self.norm, self.width, self.norm_eps)

    def make_stack_norm(self) -> nn.Module:
        """One of the stack's norms, whose gain starts at `norm_gain`."""
        return make_norm(self.norm, self.width, self.norm_eps, gain=self.norm_gain)


class TransformerSettings(TransformerShape, ResidualSettings):
    """A Transformer's shape, depth and connections, which have to fit together."""

    depth: int = Field(ge=1)
    """L, the number of blocks."""

    @property
    def sublayers(self) -> int:
        return 2 * self.depth

    @model_validator(mode="after")
    def _connection_fits_depth(self) -> "TransformerSettings":
        self.connection.options.require(self.sublayers, self.width)
        require_init(self.weight_init, self.placement)
        return self


def attention_and_mlp(config: TransformerShape, causal: bool) -> dict[str, nn.Module]:
    """One block's sublayers, by name."""
    return {"attention": Attention(config.width, config.heads, causal), "mlp": Mlp(config.width)}
