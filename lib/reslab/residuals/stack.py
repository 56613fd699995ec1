"""A stack of sublayers on a residual stream: what every model is made of, whatever its connections.

Letters: d width, L blocks, S sublayers in all.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, Literal, Protocol, TypeGuard

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reslab.residuals.connection import Connection, ConnectionConfig, Ends, Site, Stream, connect
from reslab.schema import Settings, UserError, did_you_mean

__all__ = ["Block", "Placement", "Residual", "ResidualSettings", "Stack", "compile_blocks", "require_fit"]

Placement = Literal["pre", "post", "sandwich", "sandwich_sum", "peri", "deepnorm", "none"]
"""Where norms stand, written for the connection `add`:

`pre` x + f(norm(x)) and `post` norm(x + f(x)) (Xiong et al. 2020, arXiv 2002.04745);
`sandwich` x + norm(f(norm(x))), on the branch output (Ding et al. 2021, CogView, arXiv 2105.13290);
`sandwich_sum` norm(x + f(norm(x))), after the addition;
`peri` as `sandwich`, and a norm on the embedding (Kim et al. 2025, Peri-LN, arXiv 2502.02732);
`deepnorm` norm(S^(1/4) x + f(x)) (Wang et al. 2022, arXiv 2203.00555: alpha = (2L)^(1/4));
`none` x + f(x).
"""

NORM_ON_INPUT = ("pre", "sandwich", "sandwich_sum", "peri")
NORM_ON_UPDATE = ("sandwich", "peri")
NORM_ON_STREAM = ("post", "sandwich_sum", "deepnorm")

StreamDtype = Literal["float64", "float32", "bfloat16", "float16"]


class ResidualSettings(Settings):
    """How a model's sublayers are connected. Model configs derive from it."""

    connection: ConnectionConfig = ConnectionConfig()
    placement: Placement = "pre"
    has_attention: ClassVar[bool] = True
    """The model has attentions, whose values a connection may join."""
    stream_dtype: StreamDtype | None = None
    """Dtype in which the stream is kept and added to; None is that of the embedding."""

    @model_validator(mode="after")
    def _fits(self) -> "ResidualSettings":
        require_fit(self.connection, self.placement)
        if self.connection.type.mixes_values and not self.has_attention:
            raise UserError(_no_attention(self.connection))
        return self


def _no_attention(connection: ConnectionConfig) -> str:
    return (
        f"connection '{connection.kind}' joins attention's values, and this model has no attention with a method "
        f"values(x) and a forward that takes values=...; use another connection, or give the attention both"
    )


def require_fit(connection: ConnectionConfig, placement: Placement) -> None:
    """A UserError where this connection makes no sense with norms placed so."""
    kind = connection.type
    if placement in NORM_ON_STREAM and not kind.plain_stream:
        raise UserError(
            f"placement '{placement}' norms the stream, which for connection '{connection.kind}' is not one tensor; "
            f"use one of pre, sandwich, peri, none"
        )
    if placement == "deepnorm" and connection.kind != "add":
        raise UserError(f"placement 'deepnorm' is norm(alpha x + f(x)): use connection 'add', not '{connection.kind}'")
    if kind.needs_input_norm and placement not in NORM_ON_INPUT:
        raise UserError(
            f"connection '{connection.kind}' scales what the norm puts out, and placement '{placement}' has none "
            f"before the sublayer; use one of {', '.join(NORM_ON_INPUT)}"
        )


class HasValues(Protocol):
    """An attention: its forward takes `values` [B, T, d] in place of its own ones, which `values(x)` computes.

    `values` gets of the context what it has parameters for, as forward does.
    """

    values: Callable[..., Tensor]


def _has_values(branch: Any) -> TypeGuard[HasValues]:
    return hasattr(branch, "values")


class _Accepted:
    """What context a function takes beside its input, which is its first parameter.

    What it has parameters for, or all where it has `**` ones (as wrappers have).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        self.names = frozenset(list(parameters)[1:])
        self.all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def of(self, context: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in context.items() if self.all or name in self.names}


class Residual(nn.Module):
    """One sublayer with its connection and its norms: stream -> stream.

    `branch` is f, [..., d] -> [..., d]; `norm` makes a norm of the right width; `placement` says where it stands.
    The input of `norm_input` is what was read, the output of `norm_update` is the update: probes look there.
    The branch runs in the dtype of its weights, the stream keeps its own.
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
        self.norm_input = norm() if placement in NORM_ON_INPUT else nn.Identity()
        self.norm_update = norm() if placement in NORM_ON_UPDATE else nn.Identity()
        self.norm_output = norm() if placement in NORM_ON_STREAM else nn.Identity()
        self.skip_scale = connection.site.sublayers**0.25 if placement == "deepnorm" else 1.0
        self.takes = _Accepted(branch.forward)
        self._values_take = _Accepted(branch.values) if _has_values(branch) else None

    def forward(self, stream: Stream, **context: Any) -> Stream:
        """`context` goes to the branch, as far as its forward has parameters of these names."""
        h = self.connection.read(stream)
        fed = self.connection.feed(self.norm_input(h)).to(self._branch_dtype(h))
        known = self.takes.of(context)
        if self.connection.mixes_values and _has_values(self.branch) and self._values_take is not None:
            own = self.branch.values(fed, **self._values_take.of(known))
            known["values"], stream = self.connection.mix_values(stream, own)
        put_out = self.branch(fed, **known)
        if not isinstance(put_out, Tensor) or put_out.shape != h.shape:
            raise UserError(self._wrong_output(h, put_out))
        update = self.norm_update(put_out.to(h.dtype))
        if self.skip_scale != 1:
            stream = stream * self.skip_scale
        return self.norm_output(self.connection.write(stream, update))

    def _branch_dtype(self, h: Tensor) -> torch.dtype:
        """That of the branch's weights; of what was read where it has none."""
        weights = (p.dtype for p in self.branch.parameters() if p.dtype.is_floating_point)
        return next(weights, h.dtype)

    def _wrong_output(self, h: Tensor, put_out: Any) -> str:
        found = list(put_out.shape) if isinstance(put_out, Tensor) else f"a {type(put_out).__name__}"
        return (
            f"sublayer {self.connection.site.index} ({type(self.branch).__name__}) turned {list(h.shape)} into "
            f"{found}; what joins the stream must be one tensor of the shape that was read"
        )


class Block(nn.Module):
    """Named sublayers in turn, such as attention and MLP; the unit of compilation and of checkpointing."""

    def __init__(self, **sublayers: Residual) -> None:
        super().__init__()
        for name, sublayer in sublayers.items():
            self.add_module(name, sublayer)

    def forward(self, stream: Stream, **context: Any) -> Stream:
        for sublayer in self.children():
            stream = sublayer(stream, **context)
        return stream


def _require_branches(branches: Any, norm: Any) -> None:
    """A UserError unless these are blocks of named modules, and a function that makes norms."""
    if not branches:
        raise UserError("branches is empty; give one mapping a block, such as {'attention': ..., 'mlp': ...}")
    for number, block in enumerate(branches):
        if not isinstance(block, Mapping):
            raise UserError(f"block {number} is a {type(block).__name__}; give a mapping, such as {{'mlp': module}}")
        for name, branch in block.items():
            if not isinstance(branch, nn.Module):
                raise UserError(f"block {number}: '{name}' is a {type(branch).__name__}; give an nn.Module")
            if hasattr(nn.Module, name):
                raise UserError(f"block {number}: '{name}' is a name of nn.Module's own; choose another")
    if isinstance(norm, nn.Module) or not callable(norm):
        raise UserError("norm is to make a norm each time it is called; give e.g. norm=lambda: nn.RMSNorm(64)")


class Stack(nn.Module):
    """Blocks of sublayers on one stream: embedding [..., d] -> what the model reads off at the end, [..., d].

    `branches` has one mapping a block, from a sublayer's name to its f; `width` is d; `norm` makes a norm.
    Set `checkpointing` for less memory; `compile_blocks` compiles. A connection may draw random numbers for its own
    weights: seed and start anew after building (as `reslab.training.build` does) where weights are to be paired.
    """

    def __init__(
        self,
        branches: Sequence[Mapping[str, nn.Module]],
        width: int,
        settings: ResidualSettings,
        norm: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        _require_branches(branches, norm)
        self.width = width
        config, placement = settings.connection, settings.placement
        sublayers = sum(len(block) for block in branches)
        self.checkpointing = False
        """Keep only each block's input for the backward pass, and compute the rest again; not beside a cache."""
        self.stream_dtype = getattr(torch, settings.stream_dtype) if settings.stream_dtype else None
        self.norm_start = norm() if placement == "peri" else nn.Identity()
        config.options.require(sublayers, width)
        self.ends: Ends = config.type.ends(Site(sublayers, sublayers, width), config.options)
        self.blocks = nn.ModuleList()
        indices, attentions = count(), count()
        for block in branches:
            made = {}
            for name, branch in block.items():
                attention = next(attentions) if _has_values(branch) else None
                site = Site(next(indices), sublayers, width, attention)
                made[name] = Residual(branch, connect(config, site), norm, placement)
            self.blocks.append(Block(**made))
        self.ends.meet([sublayer.connection for sublayer in self.sublayers()])
        takes = [sublayer.takes for sublayer in self.sublayers()]
        self._takes = None if any(each.all for each in takes) else frozenset().union(*(each.names for each in takes))
        self.ends.reset_parameters()
        if config.type.mixes_values and not any(_has_values(s.branch) for s in self.sublayers()):
            raise UserError(_no_attention(config))

    def sublayers(self) -> list[Residual]:
        """All sublayers, in the order they run."""
        return [sublayer for block in self.blocks for sublayer in block.children() if isinstance(sublayer, Residual)]

    def block_inputs(self) -> list[nn.Module]:
        """The modules whose input is what each block's first sublayer reads."""
        firsts = [next(block.children()) for block in self.blocks]
        return [first.norm_input for first in firsts if isinstance(first, Residual)]

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """x [..., d] -> [..., d], in the dtype of x; `context` goes to the sublayers that take it.

        A UserError names what none of them takes, and two devices where x and the parameters are not on one.
        """
        for name in context.keys() - (self._takes if self._takes is not None else context.keys()):
            raise UserError(f"no sublayer of this stack takes '{name}'; {did_you_mean(name, self._takes or ())}")
        if not isinstance(x, Tensor) or x.shape[-1:] != (self.width,) or not x.is_floating_point():
            found = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UserError(f"x is {found}; this stack takes a tensor of floating-point numbers [..., {self.width}]")
        try:
            return self._run(x, context)
        except Exception as error:
            if (elsewhere := self._other_device(x)) is None:
                raise
            raise UserError(
                f"x is on {x.device}, the parameters of this stack on {elsewhere}; move one of them, "
                f"such as x.to('{elsewhere}')"
            ) from error

    def _run(self, x: Tensor, context: dict[str, Any]) -> Tensor:
        checkpointing = self.checkpointing and torch.is_grad_enabled() and context.get("cache") is None
        start = self.norm_start(x)
        stream = self.ends.start(start if self.stream_dtype is None else start.to(self.stream_dtype))
        for block in self.blocks:
            if checkpointing:
                stream = checkpoint(block, stream, use_reentrant=False, **context)
            else:
                stream = block(stream, **context)
        return self.ends.finish(stream).to(x.dtype)

    def _other_device(self, x: Tensor) -> torch.device | None:
        """Where the parameters are, if none is where x is. Asked once something failed: to look costs time, and
        parameters that a wrapper fetches from another device are no fault."""
        devices = [parameter.device for parameter in self.parameters()]
        return devices[0] if devices and x.device not in devices else None


def compile_blocks(model: nn.Module) -> None:
    """`torch.compile` each block of the model's stacks in place: one compilation where they differ in weights alone.

    Blocks that read a history, or whose formula has their number, get one each; dynamo's limit is raised to it.
    """
    blocks = [block for stack in model.modules() if isinstance(stack, Stack) for block in stack.blocks]
    dynamo = torch._dynamo
    dynamo.reset()  # else what was compiled before counts towards the limit, and no more would be compiled
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 3 * len(blocks))  # with and without gradients
    for block in blocks:
        block.compile()
