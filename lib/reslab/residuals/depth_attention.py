"""Connections that read a weighted sum of past outputs: attention over depth, learnt or computed.

Letters: v_0 the embedding, v_i the output of sublayer i (not the cumulative stream), all [..., d]; n sources;
G heads; l the sublayer's number from 1; w_l its query; a_i [..., G] the depth weights.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from reslab.kernels.depth_attention.bank import Bank, implementation
from reslab.kernels.depth_attention.plan import Plan
from reslab.residuals.connection import Connection, ConnectionOptions, Ends, Site, register, wide
from reslab.schema import UserError

__all__ = [
    "AttnRes",
    "AttnResOptions",
    "DepthWeights",
    "align_to_sources",
    "dot",
    "inverse_rms",
    "weighted_sum",
]

R = TypeVar("R")


def align_to_sources(weights: Tensor, count: int, surplus: float) -> Tensor:
    """One weight for each of `count` sources, from `weights` [..., m] made for m; the same where count = m.

    Where layers were skipped or repeated the first weight goes with the embedding, the others with the newest
    sources (a single one with the newest); sources beyond m get `surplus`.
    """
    expected = weights.shape[-1]
    if count == expected:
        return weights
    if count == 1:
        return weights[..., -1:]
    if count < expected:
        return torch.cat([weights[..., :1], weights[..., expected - count + 1 :]], -1)
    extra = weights.new_full((*weights.shape[:-1], count - expected), surplus)
    oldest = min(1, expected - 1)
    return torch.cat([weights[..., :oldest], extra, weights[..., oldest:]], -1)


# --- attention over depth -------------------------------------------------------------------------


class AttnResOptions(ConnectionOptions):
    """Full attention residuals, unless an option says otherwise; all combine freely but for what is refused."""

    block: int = Field(default=1, ge=1)
    """Sublayers a block: sources are sums over blocks (Block form). 1 is Full."""
    window: int | None = Field(default=None, ge=1)
    """Only the newest so many sources are read, and kept."""
    window_embedding: bool = True
    """The embedding is read besides the window."""
    stride: int = Field(default=1, ge=1)
    """Of the sources, counted back from the newest, only every so-many-th is read, and the embedding."""
    key_rank: int | None = Field(default=None, ge=1)
    """Low-rank keys: k_i = P norm(v_i) with one P [rank, d] for all layers; queries have that rank too."""
    value_rank: int | None = Field(default=None, ge=1)
    """Compressed values: all but the embedding and the newest source are kept as C v_i [..., rank], read as D C v_i."""
    heads: int = Field(default=1, ge=1)
    """G groups of the width, each with its own weights."""
    query: Literal["learnt", "input", "none"] = "learnt"
    """`learnt` w_l; `input` w_l + W_l norm(v_newest); `none` static: one learnt logit a source, no content."""
    activation: Literal["softmax", "sigmoid"] = "softmax"
    """`softmax` over the sources; `sigmoid` of each by itself, so that weights need not sum to 1."""
    key_norm: bool = True
    """Keys are the sources divided by their rms; else the sources."""
    query_rate: float = Field(default=1.0, gt=0)
    """Learning-rate multiplier of the queries (static: of the logits)."""
    query_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the learnt w_l at the start; 0 as published, else weights start unequal."""
    kernel: Literal["auto", "naive"] = "auto"
    """`auto` one bank of all rows for a pass, where the device has a kernel and the variant learnt queries, softmax,
    one head and whole values; `naive` a plain sum of plain tensors, which also has second derivatives."""

    @model_validator(mode="after")
    def _fits_together(self) -> "AttnResOptions":
        if self.query == "none" and self.key_rank is not None:
            raise ValueError("key_rank with query: none has no keys to shrink; remove key_rank or choose another query")
        if self.query == "none" and not self.key_norm:
            raise ValueError("key_norm: false with query: none has no keys; remove key_norm or choose another query")
        if self.query == "none" and self.query_std:
            raise ValueError("query_std with query: none has no queries; remove query_std or choose another query")
        if self.heads > 1 and self.value_rank is not None:
            raise ValueError("value_rank with heads > 1: a compressed source has no heads; remove one of them")
        if not self.window_embedding:
            self._require_choice()
        return self

    def _require_choice(self) -> None:
        if self.window is None:
            raise ValueError("window_embedding: false needs a window; give one, e.g. window: 8")
        if self.window <= self.stride:
            raise ValueError(
                f"window {self.window} with stride {self.stride} and without the embedding leaves the newest source "
                f"alone, with nothing to attend to; widen the window, or use connection 'none'"
            )

    def require(self, sublayers: int, width: int) -> None:
        if self.block > sublayers:
            raise UserError(f"attnres: block {self.block} is larger than the {sublayers} sublayers; make it smaller")
        for name, rank in (("key_rank", self.key_rank), ("value_rank", self.value_rank)):
            if rank is not None and rank > width:
                raise UserError(f"attnres: {name} {rank} is larger than width {width}; make it smaller")
        keys = self.key_rank or width
        if width % self.heads or keys % self.heads:
            what = f"key_rank {keys}" if self.key_rank and width % self.heads == 0 else f"width {width}"
            raise UserError(f"attnres: {what} is not divisible by heads {self.heads}; change one of them")

    def sources_before(self, index: int) -> int:
        """How many sources are kept before sublayer `index` (from 0): the embedding and the blocks begun."""
        sources = 1 + -(-index // self.block)
        return sources if self.window is None else min(sources, 1 + self.window)

    @property
    def fused(self) -> bool:
        """Whether a bank computes this variant, on devices that have a kernel."""
        plain = self.query == "learnt" and self.activation == "softmax" and self.heads == 1
        return self.kernel == "auto" and plain and self.value_rank is None

    def rows(self, count: int) -> list[int]:
        """Of the embedding and `count` - 1 running sums, one after each sublayer, those that are kept: the sources."""
        ends = [min(start + self.block, count - 1) for start in range(0, count - 1, self.block)]
        kept = self.sources_before(count - 1) - 1
        return [0, *ends[len(ends) - kept :]]

    def plan(self, sublayers: int, keep: bool) -> Plan:
        """What each sublayer, and the output last, reads of these rows."""
        return _plan(self, sublayers, keep)

    def places(self, count: int) -> list[int]:
        """Which of `count` sources are read, oldest first; 0 is the embedding."""
        oldest = 0 if self.window is None else max(0, count - self.window)
        places = set(range(count - 1, oldest - 1, -self.stride))
        return sorted(places | {0} if self.window_embedding else places)


@lru_cache(maxsize=64)
def _plan(options: AttnResOptions, sublayers: int, keep: bool) -> Plan:
    sources = tuple(tuple(options.rows(count)) for count in range(1, sublayers + 2))
    reads = tuple(tuple(rows[place] for place in options.places(len(rows))) for rows in sources)
    joins = (False, *(index % options.block > 0 for index in range(sublayers)))
    return Plan.of(reads, joins, keep, sources)


class Sources(NamedTuple):
    """The stream of `attnres`. The newest source is a running sum until its block is full."""

    values: tuple[Tensor, ...]
    """The embedding and what is kept after it, each [..., d], or [..., value_rank] where compressed."""
    keys: tuple[Tensor, ...]
    """Of each source what scores need besides its value, so that it is computed once: 1/rms [..., G] of the value, or
    its low-rank key [..., key_rank]; empty where they need nothing."""
    block: int
    """Number of the newest source's block; -1 is the embedding."""
    ends: "DepthEnds"
    """What all layers share: key and value projections."""


def _ungraphed(function: Callable[..., R], *args: Any) -> R:
    """function(*args), which a trace leaves out of its graphs: the bank's kernels keep their rows outside of it."""
    if not torch.compiler.is_compiling():
        return function(*args)
    from reslab.residuals.ungraphed import call

    return call(function, *args)


class Banked(NamedTuple):
    """The stream of `attnres` where a bank keeps the sources."""

    bank: Bank
    token: Tensor
    rows: int
    """Rows so far: the embedding, and a running sum after each sublayer."""
    ends: "DepthEnds"

    def sources(self) -> Sources:
        """The same as tensors of their own, for what the bank does not do: layers skipped, swapped or repeated.

        With gradients if the pass has them, though a layer may not.
        """
        with torch.set_grad_enabled(self.bank.plan.keep or torch.is_grad_enabled()):
            values = tuple(self.bank.row(self.token, row) for row in self.ends.options.rows(self.rows))
            keys = tuple(key for value in values for key in self.ends.key_of(value))
        block = -1 if self.rows == 1 else (self.rows - 2) // self.ends.options.block
        return Sources(values, keys, block, self.ends)

    @property
    def values(self) -> tuple[Tensor, ...]:
        """As `Sources.values`."""
        return self.sources().values

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """As `Sources.keys`."""
        return self.sources().keys


KEY_EPS = 1e-6
"""Added to the mean square in every norm of keys, so that a source of zeros has a key of zeros."""


def inverse_rms(x: Tensor, heads: int = 1) -> Tensor:
    """1 / rms over each head's share of the last axis: [..., d] -> [..., G], in float32 or more."""
    return torch.rsqrt(wide(x).unflatten(-1, (heads, -1)).square().mean(-1) + KEY_EPS)


class DepthWeights(nn.Module):
    """A layer's own weights over the sources it reads: a query, or static logits.

    Starts at zero, which makes equal weights, unless the option query_std says otherwise.
    """

    def __init__(self, options: AttnResOptions, width: int, reads: int) -> None:
        super().__init__()
        self.options = options
        keys = options.key_rank or width
        if options.query == "none":
            self.logits = nn.Parameter(torch.empty(options.heads, reads))
        else:
            self.query = nn.Parameter(torch.empty(keys))
        if options.query == "input":
            self.query_map = nn.Linear(width, keys, bias=False)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if self.options.query_std:
            nn.init.normal_(self.query, std=self.options.query_std)

    def query_for(self, newest: Tensor) -> Tensor:
        """The query [..., k]; it looks at the newest source [..., d] where it depends on the input, else it is [k]."""
        if self.options.query != "input":
            return wide(self.query)
        normed = wide(newest) * inverse_rms(newest)
        return wide(self.query) + wide(self.query_map(normed.to(self.query_map.weight.dtype)))

    def static_scores(self, reads: int) -> list[Tensor]:
        """A logit [G] for each source read."""
        return list(wide(align_to_sources(self.logits, reads, surplus=float("-inf"))).unbind(-1))

    def activate(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """a_i [..., G] of the scores [..., G] of the sources read."""
        if self.options.activation == "sigmoid":
            return [score.sigmoid() for score in scores]
        return list(torch.stack(list(scores), -1).softmax(-1).unbind(-1))


def dot(query: Tensor, value: Tensor, heads: int = 1) -> Tensor:
    """Per head, in float32 or more: [..., k] and [..., k] -> [..., G]."""
    return (query * wide(value)).unflatten(-1, (heads, -1)).sum(-1)


def weighted_sum(weights: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """sum_i a_i v_i [..., d] in float32 or more, of a_i [..., G] on the G groups of v_i, without a stack of the v_i."""
    total: Tensor | None = None
    for weight, value in zip(weights, values, strict=True):
        groups = wide(value).unflatten(-1, (weight.shape[-1], -1))
        term = (weight.unsqueeze(-1) * groups).flatten(-2)
        total = term if total is None else total + term
    assert total is not None, "there is a newest source"
    return total


class DepthEnds(Ends):
    """Begins the sources with the embedding, owns the shared projections, and reads the output with its own query."""

    def __init__(self, site: Site, options: AttnResOptions) -> None:
        super().__init__(site, options)
        self.options = options
        self.sites: tuple[AttnRes, ...] = ()
        self.ran: frozenset[str] = frozenset()
        """What has computed the reads of the newest pass so far: `numba`, `triton`, `naive`; a bank's and `naive` where
        a layer was skipped, swapped or repeated, or ran in another grad mode, and left the bank."""
        self.output = AttnRes(site, options)
        if options.key_rank is not None:
            self.key_map = nn.Linear(site.width, options.key_rank, bias=False)
        if options.value_rank is not None:
            self.compress = nn.Linear(site.width, options.value_rank, bias=False)
            self.expand = nn.Linear(options.value_rank, site.width, bias=False)

    def reset_parameters(self) -> None:
        self.output.reset_parameters()
        if self.options.key_rank is not None:
            nn.init.normal_(self.key_map.weight, std=self.key_map.in_features**-0.5)
        if self.options.value_rank is not None:
            nn.init.orthogonal_(self.compress.weight)
            with torch.no_grad():
                self.expand.weight.copy_(self.compress.weight.T)

    def meet(self, connections: Sequence[Connection]) -> None:
        self.sites = tuple(each for each in connections if isinstance(each, AttnRes))

    def start(self, x: Tensor) -> "Sources | Banked":
        if self.implementation(x) == "naive":
            self.ran = frozenset({"naive"})
            return Sources((x,), self.key_of(x), -1, self)
        return _ungraphed(self._start_bank, x)

    def _start_bank(self, x: Tensor) -> Banked:
        queries = torch.stack([wide(site.weights.query) for site in (*self.sites, self.output)])
        if self.options.key_rank is not None:  # q . P k = (P^T q) . k
            queries = queries @ wide(self.key_map.weight)
        plan = self.options.plan(len(self.sites), torch.is_grad_enabled())
        bank, token = Bank.start(plan, x, queries, KEY_EPS, self.options.key_norm)
        self.ran = frozenset()
        return Banked(bank, token, 1, self)

    def implementation(self, x: Tensor) -> str:
        """What is to compute reads of a stream like x where every layer takes its turn: `numba`, `triton` or `naive`.
        What has, also where layers are skipped, swapped or repeated, is in `ran`."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            found = x.dtype if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UserError(f"depth attention: x is {found}; give a floating-point tensor [..., d]")
        if not self.options.fused or len(self.sites) != self.output.site.sublayers:
            return "naive"
        return implementation(x) or "naive"

    def finish(self, stream: "Sources | Banked") -> Tensor:
        return self.output.read(stream)

    def key_of(self, value: Tensor) -> tuple[Tensor, ...]:
        """What scores need of a whole source [..., d] besides itself; see `Sources.keys`."""
        if self.options.key_rank is not None:
            key = wide(value) * inverse_rms(value) if self.options.key_norm else value
            return (self.key_map(key.to(self.key_map.weight.dtype)),)
        if self.options.query == "none" or not self.options.key_norm:
            return ()
        return (inverse_rms(value, self.options.heads),)

    def settle(self, stream: Sources) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Values and keys as they are kept once the newest is no longer to change: compressed, within the window."""
        values, keys = stream.values, stream.keys
        if self.options.value_rank is not None and len(values) > 1:
            newest = values[-1]
            kept = self.compress(newest.to(self.compress.weight.dtype)).to(newest.dtype)
            values = (*values[:-1], kept)
            if keys and self.options.key_rank is None:
                keys = (*keys[:-1], *self.key_of(self.expanded(kept)))
        return self._within_window(values), self._within_window(keys)

    def _within_window(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first, the embedding's, and so many of the others that one more fills the window."""
        if self.options.window is None or not kept:
            return kept
        others = kept[1:]
        return kept[0], *others[max(0, len(others) - self.options.window + 1) :]

    def expanded(self, kept: Tensor) -> Tensor:
        """[..., value_rank] -> [..., d]."""
        out: Tensor = self.expand(kept.to(self.expand.weight.dtype))
        return out


@register("attnres")
class AttnRes(Connection):
    """h_l = sum_i a_i v_i, a = softmax_i(w_l . RMSNorm(v_i)) (Kimi Team 2026, arXiv 2603.15031, eq. 2 to 4).

    Values are not normed; w_l [d] starts at 0, which makes all weights 1/n: with the sublayer's own pre-norm
    (eps = 0) the model then equals the standard one. A source is the embedding, or the sum of a block's
    outputs; a layer inside a block also reads the block's running sum. The options are the variants.
    """

    Options = AttnResOptions
    ends = DepthEnds
    plain_stream = False

    def __init__(self, site: Site, options: AttnResOptions) -> None:
        super().__init__(site, options)
        self.weights = DepthWeights(options, site.width, len(options.places(options.sources_before(site.index))))

    def reset_parameters(self) -> None:
        self.weights.reset_parameters()

    def rates(self) -> dict[str, float]:
        if self.options.query_rate == 1:
            return {}
        return {f"weights.{name}": self.options.query_rate for name, _ in self.weights.named_parameters()}

    def read(self, stream: Sources | Banked) -> Tensor:
        return _ungraphed(self._read_bank, stream) if isinstance(stream, Banked) else self._read(stream)

    def _read_bank(self, stream: Banked) -> Tensor:
        if stream.bank.takes_read(self.site.index, stream.rows):
            stream.ends.ran |= {stream.bank.name}
            return stream.bank.read(stream.token, self.site.index)
        stream.ends.ran |= {"naive"}
        return self._read(stream.sources())

    def _read(self, stream: Sources) -> Tensor:
        places = self.options.places(len(stream.values))
        weights = dict(zip(places, self.depth_weights(stream), strict=True))
        whole = [place for place in places if not self._is_compressed(stream, place)]
        mixed = weighted_sum([weights[i] for i in whole], [stream.values[i] for i in whole])
        if len(whole) < len(places):
            kept = [place for place in places if place not in whole]
            compressed = weighted_sum([weights[i] for i in kept], [stream.values[i] for i in kept])
            mixed = mixed + wide(stream.ends.expanded(compressed))
        return mixed.to(stream.values[0].dtype)

    def depth_weights(self, stream: Sources | Banked) -> list[Tensor]:
        """a_i [..., G] of the sources this layer reads, oldest first."""
        if isinstance(stream, Banked):
            stream = stream.sources()
        places = self.options.places(len(stream.values))
        if self.options.query == "none":
            return self.weights.activate(self.weights.static_scores(len(places)))
        query = self.weights.query_for(stream.values[-1])
        return self.weights.activate([self._score(stream, place, query) for place in places])

    def write(self, stream: Sources | Banked, update: Tensor) -> Sources | Banked:
        if isinstance(stream, Banked):
            return _ungraphed(self._write_bank, stream, update)
        return self._write(stream, update)

    def _write_bank(self, stream: Banked, update: Tensor) -> Sources | Banked:
        row = self.site.index + 1
        if stream.bank.takes_row(row, stream.rows):
            return stream._replace(token=stream.bank.write(stream.token, row, update), rows=row + 1)
        stream.ends.ran |= {"naive"}  # as all reads after it
        return self._write(stream.sources(), update)

    def _write(self, stream: Sources, update: Tensor) -> Sources:
        block = self.site.index // self.options.block
        if block == stream.block:
            values, keys = stream.values[:-1], stream.keys[:-1]
            newest = stream.values[-1] + update
        else:
            values, keys = stream.ends.settle(stream)
            newest = update
        return Sources((*values, newest), keys + stream.ends.key_of(newest), block, stream.ends)

    def _is_compressed(self, stream: Sources, place: int) -> bool:
        return self.options.value_rank is not None and 0 < place < len(stream.values) - 1

    def _score(self, stream: Sources, place: int, query: Tensor) -> Tensor:
        """w_l . k_i, [..., G]; of a compressed source with what it expands to, without expanding it."""
        heads = self.options.heads
        if self.options.key_rank is not None:
            return dot(query, stream.keys[place], heads)
        if self._is_compressed(stream, place):
            query = query @ wide(stream.ends.expand.weight)  # w . D c = (D^T w) . c
        score = dot(query, stream.values[place], heads)
        return score * stream.keys[place] if self.options.key_norm else score
