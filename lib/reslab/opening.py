"""How far the branches of a network are open: each one's share in the stream, and the depth they add up to.

Letters: S sublayers, x the stream going into a sublayer, u the update as it joins the stream (a learnt scale included).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from reslab.health import ResidualHealth
from reslab.probes import evaluating, outputs_of, stacks
from reslab.residuals import connection_modules

__all__ = ["branch_scales", "branch_shares", "effective_depth", "set_scales", "stack_parameters"]


def branch_shares(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> list[float]:
    """Share of each branch in the stream after it, r^2 / (1 + r^2) with r the mean of |u| / |x| over tokens; S values.

    0 where a branch is closed, 1/2 where the update is as large as the stream, 1 where it replaces the stream; not a
    number where the stream is not finite. In evaluation mode and without gradients; the model stays as it is.
    """
    with torch.no_grad(), evaluating(model), ResidualHealth(model, every=1, sequences=0) as health:
        outputs_of(model, inputs)
    ratios: list[float] = health.table()["ratio"].tolist()
    return [1 - 1 / (1 + ratio**2) for ratio in ratios]


def effective_depth(shares: Iterable[float]) -> float:
    """Sum of the branches' shares: the mean length, in sublayers, of a path that takes each branch by its share.

    A residual network is a sum over paths, and most of what passes takes short ones (Veit et al. 2016, arXiv
    1605.06431). 0 where all branches are closed, S where each replaces the stream.
    """
    return float(sum(shares))


def branch_scales(model: nn.Module) -> list[float]:
    """Mean magnitude of the learnt weights of each sublayer's connection; 1 where it has none. S values."""
    return [_scale(sublayer.connection) for stack in stacks(model) for sublayer in stack.sublayers()]


def _scale(connection: nn.Module) -> float:
    weights = [weight.detach().flatten() for weight in connection.parameters()]
    return float(torch.cat(weights).abs().mean()) if weights else 1.0


def stack_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of a model's stacks: those of branches and norms, and those of connections (the scales)."""
    own = {id(weight) for connection in connection_modules(model) for weight in connection.parameters()}
    every: Sequence[nn.Parameter] = [weight for stack in stacks(model) for weight in stack.parameters()]
    return [w for w in every if id(w) not in own], [w for w in every if id(w) in own]


@torch.no_grad()
def set_scales(model: nn.Module, scale: float) -> None:
    """Set all weights of the model's connections to `scale`, in place."""
    for weight in stack_parameters(model)[1]:
        weight.fill_(scale)
