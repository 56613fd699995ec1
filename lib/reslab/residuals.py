"""The heart: how a sublayer reads the residual stream, and how its output joins it.

A sublayer f (attention, MLP or convolution) stands between two calls of its `Connection`::

    h      = connection.read(stream)       # what the sublayer sees
    v      = f(norm(h))                    # the update
    stream = connection.write(stream, v)

Letters: x the stream, v the update, l the sublayer's index from 0, L the number of sublayers.
A new kind is one class with `@register("name")`; every model then takes it.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from reslab.schema import Settings, UserError, did_you_mean

__all__ = [
    "CONNECTIONS",
    "Connection",
    "ConnectionConfig",
    "Placement",
    "Residual",
    "connect",
    "connection_modules",
    "register",
    "reset_connections",
]

Placement = Literal["pre", "post", "none"]
"""Where the norm stands: `pre` f(norm(x)), `post` norm(x + f(x)), `none` no norm in the sublayer."""


class ConnectionConfig(Settings):
    """Which kind of connection, and the options of that kind (`weight` for those that take one)."""

    kind: str = "add"
    weight: float | None = None

    @property
    def options(self) -> dict[str, float]:
        return {} if self.weight is None else {"weight": self.weight}


class Connection(nn.Module):
    """Reads from and writes to a stream of any shape [..., d]. Subclasses define `write`."""

    def reset_parameters(self) -> None:
        """Start the connection's own parameters anew; nothing where it has none."""

    def read(self, stream: Tensor) -> Tensor:
        """What the sublayer sees, [..., d]."""
        return stream

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        """The stream after the sublayer put out `update`, both [..., d]."""
        raise NotImplementedError


CONNECTIONS: dict[str, type[Connection]] = {}
"""Every kind the project knows, by name."""


def register(name: str) -> Callable[[type[Connection]], type[Connection]]:
    """Class decorator: make a connection available to every model under `name`."""

    def add(kind: type[Connection]) -> type[Connection]:
        if name in CONNECTIONS:
            raise ValueError(f"connection '{name}' is registered twice")
        CONNECTIONS[name] = kind
        return kind

    return add


def connect(config: ConnectionConfig) -> Connection:
    """The connection that `config` asks for; a UserError names an unknown kind or a wrong option."""
    kind: Any = CONNECTIONS.get(config.kind)
    if kind is None:
        hint = did_you_mean(config.kind, CONNECTIONS)
        raise UserError(f"unknown residual connection '{config.kind}'; {hint}")
    takes_weight = "weight" in inspect.signature(kind).parameters
    if takes_weight and config.weight is None:
        raise UserError(f"residual connection '{config.kind}' needs a weight; give one, e.g. weight: 0.3")
    if config.weight is not None and not takes_weight:
        raise UserError(f"residual connection '{config.kind}' takes no weight; remove weight: {config.weight}")
    connection: Connection = kind(**config.options)
    return connection


@register("none")
class NoConnection(Connection):
    """x <- v. The update replaces the stream (Dong et al. 2021, arXiv 2103.03404, "without skip")."""

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        return update


@register("add")
class Add(Connection):
    """x <- x + v. The standard residual connection (He et al. 2016, arXiv 1603.05027, eq. 1)."""

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        return stream + update


@register("weighted_skip")
class WeightedSkip(Connection):
    """x <- s x + v with a fixed s. Shrinks the skip, not the branch (He et al. 2016, eq. 5).

    s = 1 is `add`, s = 0 is `none`; over n sublayers the first input arrives scaled by s^n.
    """

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        return torch.add(update, stream, alpha=self.weight)

    def extra_repr(self) -> str:
        return f"weight={self.weight}"


@register("rezero")
class ReZero(Connection):
    """x <- x + a v with a learnt scalar a that starts at 0 (Bachlechner et al. 2020, arXiv 2003.04887, eq. 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)

    def write(self, stream: Tensor, update: Tensor) -> Tensor:
        return stream + self.alpha * update


def connection_modules(model: nn.Module) -> set[nn.Module]:
    """The connections of a model and all modules inside them: they start by themselves and are not decayed."""
    connections = [module for module in model.modules() if isinstance(module, Connection)]
    return {inner for connection in connections for inner in connection.modules()}


def reset_connections(model: nn.Module) -> None:
    """Start every connection's own parameters anew."""
    for module in model.modules():
        if isinstance(module, Connection):
            module.reset_parameters()


class Residual(nn.Module):
    """One sublayer with its connection and its norm: [..., d] -> [..., d].

    `norm` is a factory for a norm of the right width; `placement` says where it stands.
    """

    def __init__(
        self,
        branch: nn.Module,
        connection: Connection,
        norm: Callable[[], nn.Module],
        placement: Placement = "pre",
    ) -> None:
        super().__init__()
        self.branch = branch
        self.connection = connection
        self.norm_input = norm() if placement == "pre" else nn.Identity()
        self.norm_output = norm() if placement == "post" else nn.Identity()

    def forward(self, stream: Tensor) -> Tensor:
        update = self.branch(self.norm_input(self.connection.read(stream)))
        written: Tensor = self.norm_output(self.connection.write(stream, update))
        return written
