"""How weights start: one standard deviation for all matrices, times a factor for the role a matrix plays.

Letters: L blocks of two sublayers, S = 2L sublayers.
"""

from collections.abc import Iterator
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from reslab.residuals import Placement, connection_modules
from reslab.schema import UserError

__all__ = [
    "Role",
    "WeightInit",
    "Weights",
    "embedding_scale",
    "initialise",
    "require_init",
    "stream_writers",
    "weight_scale",
]

Role = Literal["query_key", "value", "output", "up", "down"]
"""`output` (of attention or a state space) and `down` (of an MLP) write to the stream."""

Weights = dict[Role, list[Tensor]]
"""Matrices, or rows of a packed one, by role."""

WeightInit = Literal["plain", "depth_scaled", "tfixup", "deepnorm"]
"""`plain` no factor;
`depth_scaled` 1/sqrt(S) on what writes to the stream (Radford et al. 2019, GPT-2, section 2.3: 1/sqrt(2L));
`tfixup` on all but query and key (9L)^(-1/4) in a decoder, 0.67 L^(-1/4) in an encoder, and as much on the
embedding (Huang et al. 2020, "Improving Transformer Optimization Through Better Initialization", section 3.2);
`deepnorm` on all but query and key (8L)^(-1/4) (Wang et al. 2022, arXiv 2203.00555, fig. 2).
"""

WRITERS: tuple[Role, ...] = ("output", "down")


class HasRoles(Protocol):
    """A branch that says which of its matrices play which role."""

    def weights_by_role(self) -> Weights: ...


def weight_scale(weight_init: WeightInit, role: Role, sublayers: int, causal: bool = True) -> float:
    """The factor for a matrix of `role` in a stack of `sublayers`; `causal` tells a decoder from an encoder."""
    blocks = sublayers / 2
    if weight_init == "depth_scaled":
        return sublayers**-0.5 if role in WRITERS else 1.0
    if weight_init == "plain" or role == "query_key":
        return 1.0
    if weight_init == "deepnorm":
        return (8 * blocks) ** -0.25
    return (9 * blocks) ** -0.25 if causal else 0.67 * blocks**-0.25


def embedding_scale(weight_init: WeightInit, sublayers: int, causal: bool = True) -> float:
    """The factor for the embedding: that of the values with `tfixup`, else 1."""
    return weight_scale(weight_init, "value", sublayers, causal) if weight_init == "tfixup" else 1.0


def require_init(weight_init: WeightInit, placement: Placement) -> None:
    """A UserError where the init makes no sense with norms placed so."""
    if weight_init == "deepnorm" and placement not in ("post", "deepnorm"):
        raise UserError(
            f"weight_init 'deepnorm' is made for a norm on the stream (placement deepnorm or post), "
            f"not for '{placement}'; use plain or depth_scaled"
        )


def _branches(model: nn.Module) -> Iterator[HasRoles]:
    return (cast(HasRoles, module) for module in model.modules() if hasattr(module, "weights_by_role"))


def stream_writers(model: nn.Module) -> list[Tensor]:
    """The matrices whose outputs join the stream."""
    return [w for branch in _branches(model) for role in WRITERS for w in branch.weights_by_role().get(role, [])]


@torch.no_grad()
def initialise(model: nn.Module, std: float, weight_init: WeightInit, sublayers: int, causal: bool = True) -> None:
    """Draw all linear weights anew, in the order of the modules, zero their biases and reset norms.

    Embeddings and whatever starts in a way of its own are left to the model; connections too, which are to
    come last (`reset_connections`), so that what they draw changes no other weight.
    """
    in_connections = connection_modules(model)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in in_connections:
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
    for branch in _branches(model):
        for role, weights in branch.weights_by_role().items():
            for weight in weights:
                weight *= weight_scale(weight_init, role, sublayers, causal)
