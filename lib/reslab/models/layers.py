"""MLP and norms that models share. Letters: d width."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.initialisation import Weights

__all__ = ["LayerNorm", "Mlp", "NormKind", "RMSNorm", "make_norm"]

NormKind = Literal["layernorm", "rmsnorm"]


class Mlp(nn.Module):
    """GELU MLP with a hidden width of 4 d, [..., d] -> [..., d]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out

    def weights_by_role(self) -> Weights:
        return {"up": [self.up.weight], "down": [self.down.weight]}


def _set_gain(weight: Tensor | None, gain: float) -> None:
    if weight is not None:
        nn.init.constant_(weight, gain)


def _like(weight: Tensor | None, x: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that works in the dtype of its input, whatever that of its weights: [..., d] -> [..., d]."""

    initial_gain = 1.0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _set_gain(self.weight, self.initial_gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, _like(self.weight, x), _like(self.bias, x), self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` that works in the dtype of its input, whatever that of its weights: [..., d] -> [..., d]."""

    initial_gain = 1.0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _set_gain(self.weight, self.initial_gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, tuple(self.normalized_shape), _like(self.weight, x), self.eps)


def make_norm(kind: NormKind, width: int, eps: float, affine: bool = True, gain: float = 1.0) -> nn.Module:
    """A norm over the last axis; with a learnt gain that starts at `gain` (and bias, for layernorm) where `affine`."""
    norm = (LayerNorm if kind == "layernorm" else RMSNorm)(width, eps=eps, elementwise_affine=affine)
    norm.initial_gain = gain
    norm.reset_parameters()
    return norm
