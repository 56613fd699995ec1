"""How a sublayer reads the residual stream and how its output joins it: the vocabulary, and the registry of kinds.

A sublayer f (attention, MLP, convolution or state space) stands between two calls of its `Connection`::

    h      = connection.read(stream)       # [..., d], what the sublayer sees
    v      = f(norm(h))                    # [..., d], the update
    stream = connection.write(stream, v)

Letters: x the stream, v the update, d the width, l the sublayer's number from 1, S the number of sublayers
(a Transformer block has two). A new kind is one class with `@register("name")`; every model then takes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from reslab.schema import Settings, UserError, did_you_mean, validate

__all__ = [
    "CONNECTIONS",
    "Connection",
    "ConnectionConfig",
    "ConnectionOptions",
    "Ends",
    "Site",
    "Stream",
    "connect",
    "connection_modules",
    "connection_rates",
    "register",
    "reset_connections",
    "wide",
]

Stream = Any
"""A tensor [..., d]; kinds that keep more (past outputs, parallel streams) have a NamedTuple of tensors."""


@dataclass(frozen=True)
class Site:
    """Where a connection stands: at sublayer `index` (from 0) of `sublayers`, on a stream of `width`."""

    index: int
    sublayers: int
    width: int
    attention: int | None = None
    """The number (from 0) of the sublayer among those that are attentions, whose values a connection may join."""


class ConnectionOptions(Settings):
    """The options of a kind, each with its range and default; a kind without options takes none."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # what `describe` tells of each

    def require(self, sublayers: int, width: int) -> None:
        """A UserError when the options do not fit a stack of `sublayers` on a stream of `width`."""


class Ends(nn.Module):
    """How a stack enters and leaves the stream; once a stack. Also the place of weights that all its sites share."""

    def __init__(self, site: Site, options: Any) -> None:
        """`site` is the one after the last sublayer: its index is the number of sublayers."""
        super().__init__()

    def meet(self, connections: "Sequence[Connection]") -> None:
        """Told once which connections the stack has, in the order of their sublayers."""

    def start(self, x: Tensor) -> Stream:
        """The stream that begins with the embedding x [..., d]."""
        return x

    def finish(self, stream: Stream) -> Tensor:
        """What the model reads off at the end, [..., d]."""
        return stream

    def reset_parameters(self) -> None:
        """Start the own parameters anew; nothing where there are none."""

    def rates(self) -> dict[str, float]:
        """As `Connection.rates`."""
        return {}


class Connection(nn.Module):
    """One sublayer's read from and write to the stream. Subclasses define at least `write`.

    A subclass with parameters creates them in `__init__` and gives them their first values in
    `reset_parameters`, which every model calls, also after `to_empty`.
    """

    Options: ClassVar[type[ConnectionOptions]] = ConnectionOptions
    ends: ClassVar[type[Ends]] = Ends
    plain_stream: ClassVar[bool] = True
    """The stream is one tensor, so that a norm can stand on it (placements post, sandwich_sum, deepnorm)."""
    mixes_values: ClassVar[bool] = False
    """The kind also joins the value vectors of attention (`mix_values`)."""
    needs_input_norm: ClassVar[bool] = False
    """`feed` makes sense only behind a norm on the sublayer's input."""

    def __init__(self, site: Site, options: Any) -> None:
        super().__init__()
        self.site, self.options = site, options

    def reset_parameters(self) -> None:
        """Start the connection's own parameters anew; nothing where it has none."""

    def rates(self) -> dict[str, float]:
        """Learning-rate multipliers other than 1, by the parameter's name within the connection."""
        return {}

    def read(self, stream: Stream) -> Tensor:
        """What the sublayer sees before its norm, [..., d]."""
        return stream

    def feed(self, h: Tensor) -> Tensor:
        """What the sublayer gets, of what its norm put out; both [..., d]."""
        return h

    def mix_values(self, stream: Stream, values: Tensor) -> tuple[Tensor, Stream]:
        """The values [B, T, d] that attention is to use for its own ones, and the stream; where `mixes_values`."""
        raise NotImplementedError

    def weigh(self, update: Tensor) -> Tensor:
        """What of the update `write` adds to the stream, both [..., d]; probes measure it."""
        return update

    def write(self, stream: Stream, update: Tensor) -> Stream:
        """The stream after the sublayer put out `update` [..., d], in the stream's dtype."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options)


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is: sums over many sources are taken there and rounded once."""
    return x if x.dtype == torch.float64 else x.float()


# --- the registry ---------------------------------------------------------------------------------

CONNECTIONS: dict[str, type[Connection]] = {}
"""Every kind the project knows, by name."""


def register(name: str) -> Callable[[type[Connection]], type[Connection]]:
    """Class decorator: make a connection available to every model under `name`."""

    if not isinstance(name, str):
        raise UserError('a connection is registered under a name: write @register("name")')

    def add(kind: type[Connection]) -> type[Connection]:
        _require_complete(name, kind)
        known = CONNECTIONS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise UserError(f"connection '{name}' is {known.__module__}.{known.__qualname__}; choose another name")
        CONNECTIONS[name] = kind  # anew where a notebook's cell runs again
        return kind

    return add


def _require_complete(name: str, kind: Any) -> None:
    """A UserError where a class cannot be a connection."""
    if not (isinstance(kind, type) and issubclass(kind, Connection)):
        raise UserError(f"connection '{name}' is {kind!r}; derive a class from Connection")
    if kind.write is Connection.write:
        raise UserError(f"connection '{name}' has no write(self, stream, update); give it one, or derive it from Add")
    if not (isinstance(kind.Options, type) and issubclass(kind.Options, ConnectionOptions)):
        raise UserError(f"connection '{name}': derive its Options from ConnectionOptions")
    if "kind" in kind.Options.model_fields:
        raise UserError(f"connection '{name}': an option cannot be named 'kind'; choose another name")


class ConnectionConfig(Settings):
    """Which kind, and its options: `ConnectionConfig("layerscale", initial=1e-4)`, or the same as a mapping in YAML.

    A UserError names an unknown kind or a wrong option. Options left out have the kind's defaults, and are kept
    with the others, so that a record shows them.
    """

    model_config = ConfigDict(extra="allow")

    kind: str = "add"

    def __init__(self, kind: str = "add", **options: Any) -> None:
        if kind not in CONNECTIONS:
            raise UserError(f"unknown residual connection '{kind}'; {did_you_mean(kind, CONNECTIONS)}")
        complete = validate(CONNECTIONS[kind].Options, options, f"residual connection '{kind}'")
        super().__init__(kind=kind, **complete.model_dump())

    def __hash__(self) -> int:
        return hash((self.kind, *sorted((self.__pydantic_extra__ or {}).items())))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "ConnectionConfig":
        """With `update`, checked as a new one is; a new kind starts from its defaults."""
        changes = dict(update or {})
        kept = self.model_dump() if changes.get("kind", self.kind) == self.kind else {}
        return ConnectionConfig(**kept | changes)

    @property
    def type(self) -> type[Connection]:
        """The kind's class."""
        return CONNECTIONS[self.kind]

    @property
    def options(self) -> ConnectionOptions:
        """The kind's options, all of them."""
        return self.type.Options(**(self.__pydantic_extra__ or {}))


def connect(config: ConnectionConfig, site: Site) -> Connection:
    """The connection that `config` asks for at `site`, at its first values; a UserError where it does not fit there."""
    config.options.require(site.sublayers, site.width)
    connection = config.type(site, config.options)
    unset = config.type.reset_parameters is Connection.reset_parameters
    if unset and next(connection.parameters(), None) is not None:
        raise UserError(f"connection '{config.kind}' has parameters; give them first values in reset_parameters(self)")
    connection.reset_parameters()
    return connection


# --- the connections of a model -------------------------------------------------------------------


def _connections(model: nn.Module) -> list[Connection | Ends]:
    return [module for module in model.modules() if isinstance(module, Connection | Ends)]


def connection_modules(model: nn.Module) -> set[nn.Module]:
    """The connections of a model and all modules inside them: they start by themselves and are not decayed."""
    return {inner for connection in _connections(model) for inner in connection.modules()}


def connection_rates(model: nn.Module) -> dict[nn.Parameter, float]:
    """Learning-rate multipliers other than 1, of the parameters that have one."""
    return {
        connection.get_parameter(name): rate
        for connection in _connections(model)
        for name, rate in connection.rates().items()
    }


def reset_connections(model: nn.Module) -> None:
    """Start every connection's own parameters anew."""
    for connection in _connections(model):
        connection.reset_parameters()
