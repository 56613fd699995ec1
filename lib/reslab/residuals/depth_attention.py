"""Connections that read a weighted sum of past outputs: attention over depth, learnt or computed.

Letters: v_0 the embedding, v_i the output of sublayer i (not the cumulative stream), all [..., d]; n sources;
G heads; l the sublayer's number from 1; w_l its query; a_i [..., G] the depth weights.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from reslab.residuals.connection import Connection, ConnectionOptions, Ends, Site, register
from reslab.schema import UserError

__all__ = ["AttnRes", "AttnResOptions", "DenseFormer", "DepthWeights", "StateAttention", "align_to_sources"]


def align_to_sources(weights: Tensor, count: int, surplus: float) -> Tensor:
    """One weight for each of `count` sources, from `weights` [..., m] made for m; the same where count = m.

    Where layers were skipped or repeated the first weight goes with the embedding, the others with the newest
    sources; sources beyond m get `surplus`.
    """
    expected = weights.shape[-1]
    if count == expected:
        return weights
    if count == 1:
        return weights[..., -1:]
    if count < expected:
        return torch.cat([weights[..., :1], weights[..., expected - count + 1 :]], -1)
    extra = weights.new_full((*weights.shape[:-1], count - expected), surplus)
    return torch.cat([weights[..., :1], extra, weights[..., 1:]], -1)


# --- attention over depth -------------------------------------------------------------------------


class AttnResOptions(ConnectionOptions):
    """Full attention residuals, unless an option says otherwise; all combine freely but for what is refused."""

    block: int = Field(default=1, ge=1)
    """Sublayers a block: sources are sums over blocks (Block form). 1 is Full."""
    window: int | None = Field(default=None, ge=1)
    """Only the newest so many sources are read."""
    window_embedding: bool = True
    """The embedding is read besides the window."""
    stride: int = Field(default=1, ge=1)
    """Of the sources, counted back from the newest, only every so-many-th is read, and the embedding."""
    key_rank: int | None = Field(default=None, ge=1)
    """Low-rank keys: k_i = P norm(v_i) with one P [rank, d] for all layers; queries have that rank too."""
    value_rank: int | None = Field(default=None, ge=1)
    """Compressed values: all but the embedding and the newest source are kept as C v_i [..., rank]."""
    heads: int = Field(default=1, ge=1)
    """G groups of the width, each with its own weights."""
    query: Literal["learnt", "input", "none"] = "learnt"
    """`learnt` w_l; `input` w_l + W_l norm(v_newest); `none` static: one learnt logit a source, no content."""
    activation: Literal["softmax", "sigmoid"] = "softmax"
    key_norm: bool = True
    query_rate: float = Field(default=1.0, gt=0)
    """Learning-rate multiplier of the queries (static: of the logits)."""
    key_eps: float = Field(default=1e-6, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> "AttnResOptions":
        if self.query == "none" and self.key_rank is not None:
            raise ValueError("key_rank with query: none has no keys to shrink; remove key_rank or choose another query")
        if self.query == "none" and not self.key_norm:
            raise ValueError("key_norm: false with query: none has no keys; remove key_norm or choose another query")
        if self.window is None and not self.window_embedding:
            raise ValueError("window_embedding: false needs a window; give one, e.g. window: 8")
        if self.heads > 1 and self.value_rank is not None:
            raise ValueError("value_rank with heads > 1: a compressed source has no heads; remove one of them")
        return self

    def require(self, sublayers: int, width: int) -> None:
        if self.block > sublayers:
            raise UserError(f"attnres: block {self.block} is larger than the {sublayers} sublayers; make it smaller")
        for name, rank in (("key_rank", self.key_rank), ("value_rank", self.value_rank)):
            if rank is not None and rank > width:
                raise UserError(f"attnres: {name} {rank} is larger than width {width}; make it smaller")
        keys = self.key_rank or width
        if width % self.heads or keys % self.heads:
            raise UserError(
                f"attnres: width {width} or key_rank {self.key_rank} is not divisible by heads {self.heads}; change one"
            )

    def sources_before(self, index: int) -> int:
        """How many sources there are before sublayer `index` (from 0): the embedding and the blocks begun."""
        return 1 + -(-index // self.block)


class Sources(NamedTuple):
    """The stream of `attnres`. The newest source is a running sum until its block is full."""

    values: tuple[Tensor, ...]
    """Each [..., d], or [..., value_rank] where compressed."""
    keys: tuple[Tensor, ...]
    """Low-rank keys, each [..., key_rank]; empty where keys are made from the values."""
    block: int
    """Number of the newest source's block; -1 is the embedding."""
    ends: "DepthEnds"
    """What all layers share: key and value projections."""


def _key_norm(v: Tensor, eps: float) -> Tensor:
    """v / rms(v) over the last axis, in float32 or more."""
    v = v if v.dtype == torch.float64 else v.float()
    return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


class DepthWeights(nn.Module):
    """A layer's own weights over its sources: a query, or static logits. Starts at zero: equal weights."""

    def __init__(self, options: AttnResOptions, width: int, sources: int) -> None:
        super().__init__()
        self.options, self.width = options, width
        keys = options.key_rank or width
        if options.query == "none":
            self.logits = nn.Parameter(torch.empty(options.heads, sources))
        else:
            self.query = nn.Parameter(torch.empty(keys))
        if options.query == "input":
            self.query_map = nn.Linear(width, keys, bias=False)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, keys: Sequence[Tensor], newest: Tensor, places: Sequence[int], count: int) -> list[Tensor]:
        """a_i [..., G], one for each key [..., k] read, in float32 or more.

        `newest` [..., d] is what an input-dependent query looks at; `places` says which of all `count` sources
        the keys are.
        """
        if self.options.query == "none":
            aligned = align_to_sources(self.logits, count, surplus=float("-inf"))
            scores = [aligned[:, place] for place in places]
        else:
            query = self._query(newest)
            scores = [(query * self._per_head(key)).sum(-1) for key in keys]
        if self.options.activation == "sigmoid":
            return [score.sigmoid() for score in scores]
        return list(torch.stack(scores, -1).softmax(-1).unbind(-1))

    def _query(self, newest: Tensor) -> Tensor:
        """[..., G, k/G]; without leading axes where it does not depend on the input."""
        query = self.query
        if self.options.query == "input":
            normed = _key_norm(newest, self.options.key_eps)
            query = query + self.query_map(normed.to(self.query_map.weight.dtype))
        return query.unflatten(-1, (self.options.heads, -1))

    def _per_head(self, key: Tensor) -> Tensor:
        """[..., G, k/G], normed per head where the key is the source itself."""
        key = key.unflatten(-1, (self.options.heads, -1))
        if self.options.key_norm and self.options.key_rank is None:
            return _key_norm(key, self.options.key_eps)
        return key


class DepthEnds(Ends):
    """Begins the sources with the embedding, owns the shared projections, and reads the output with its own query."""

    def __init__(self, site: Site, options: AttnResOptions) -> None:
        super().__init__(site, options)
        self.options = options
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

    def start(self, x: Tensor) -> Sources:
        return Sources((x,), self.keys_of(x), -1, self)

    def finish(self, stream: Sources) -> Tensor:
        return self.output.read(stream)

    def keys_of(self, source: Tensor) -> tuple[Tensor, ...]:
        """The low-rank key [..., key_rank] of a source [..., d]; empty without key_rank."""
        if self.options.key_rank is None:
            return ()
        key = _key_norm(source, self.options.key_eps) if self.options.key_norm else source
        return (self.key_map(key.to(self.key_map.weight.dtype)),)

    def keep(self, source: Tensor, index: int) -> Tensor:
        """What is kept of a source [..., d] that is no longer the newest: [..., value_rank], or all of it."""
        if self.options.value_rank is None or index == 0:
            return source
        return self.compress(source.to(self.compress.weight.dtype)).to(source.dtype)


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
        self.weights = DepthWeights(options, site.width, options.sources_before(site.index))

    def reset_parameters(self) -> None:
        self.weights.reset_parameters()

    def rates(self) -> dict[str, float]:
        if self.options.query_rate == 1:
            return {}
        return {f"weights.{name}": self.options.query_rate for name, _ in self.weights.named_parameters()}

    def read(self, stream: Sources) -> Tensor:
        places = self._places(len(stream.values))
        weights = self.depth_weights(stream)
        return self._mix(stream, places, weights)

    def depth_weights(self, stream: Sources) -> list[Tensor]:
        """a_i [..., G] of the sources this layer reads, oldest first."""
        count = len(stream.values)
        places = self._places(count)
        keys = [self._key(stream, place) for place in places] if self.options.query != "none" else []
        return self.weights(keys, stream.values[-1], places, count)

    def write(self, stream: Sources, update: Tensor) -> Sources:
        block = self.site.index // self.options.block
        *older, newest = stream.values
        if block == stream.block:
            values, keys = (*older, newest + update), stream.keys[:-1]
        else:
            values = (*older, stream.ends.keep(newest, len(older)), update)
            keys = stream.keys
        return Sources(values, keys + stream.ends.keys_of(values[-1]), block, stream.ends)

    def _places(self, count: int) -> list[int]:
        """Which of `count` sources are read, oldest first."""
        options = self.options
        oldest = 0 if options.window is None else max(0, count - options.window)
        places = set(range(count - 1, oldest - 1, -options.stride))
        return sorted(places | {0} if options.window_embedding else places)

    def _is_whole(self, place: int, count: int) -> bool:
        return self.options.value_rank is None or place in (0, count - 1)

    def _key(self, stream: Sources, place: int) -> Tensor:
        """The key of a source; a compressed one's is made from what was kept of it."""
        if self.options.key_rank is not None:
            return stream.keys[place]
        value = stream.values[place]
        return value if self._is_whole(place, len(stream.values)) else self._expand(stream, value)

    def _expand(self, stream: Sources, kept: Tensor) -> Tensor:
        """[..., value_rank] -> [..., d]."""
        expand = stream.ends.expand
        return expand(kept.to(expand.weight.dtype))

    def _mix(self, stream: Sources, places: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
        """sum_i a_i v_i [..., d] in the sources' dtype, summed in float32 or more, without a stack of the sources."""
        whole: Tensor | None = None
        compressed: Tensor | None = None
        for place, weight in zip(places, weights, strict=True):
            term = _weighted(weight, stream.values[place])
            if self._is_whole(place, len(stream.values)):
                whole = term if whole is None else whole + term
            else:
                compressed = term if compressed is None else compressed + term
        assert whole is not None, "the newest source is always read, and whole"
        if compressed is not None:
            whole = whole + self._expand(stream, compressed)
        return whole.to(stream.values[0].dtype)


def _weighted(weight: Tensor, value: Tensor) -> Tensor:
    """weight [..., G] on the G groups of value [..., d], in the wider dtype of the two."""
    return (weight.unsqueeze(-1) * value.unflatten(-1, (weight.shape[-1], -1))).flatten(-2)


# --- the seed article's form ----------------------------------------------------------------------


class StateAttentionOptions(ConnectionOptions):
    key_norm: bool = True
    query_rate: float = Field(default=1.0, gt=0)
    """Learning-rate multiplier of the queries."""


class States(NamedTuple):
    """The stream of `state_attention`: h_0 (the embedding) to the newest, each [..., d]."""

    states: tuple[Tensor, ...]


class StateEnds(Ends):
    def start(self, x: Tensor) -> States:
        return States((x,))

    def finish(self, stream: States) -> Tensor:
        return stream.states[-1]


@register("state_attention")
class StateAttention(Connection):
    """h_l = sum_{i<l} a_i h_i + f(h_{l-1}), a = softmax_i(w_l . RMSNorm(h_i)).

    Attention over the *outputs* h, added to the layer's function of the previous one: the loop that a popular
    article sketches for attention residuals (docs/claims.md, B4). Unlike `attnres` its sources are cumulative.
    """

    Options = StateAttentionOptions
    ends = StateEnds
    plain_stream = False

    def __init__(self, site: Site, options: StateAttentionOptions) -> None:
        super().__init__(site, options)
        self.weights = DepthWeights(AttnResOptions(key_norm=options.key_norm), site.width, site.index + 1)

    def reset_parameters(self) -> None:
        self.weights.reset_parameters()

    def rates(self) -> dict[str, float]:
        return {} if self.options.query_rate == 1 else {"weights.query": self.options.query_rate}

    def read(self, stream: States) -> Tensor:
        return stream.states[-1]

    def write(self, stream: States, update: Tensor) -> States:
        states = stream.states
        count = len(states)
        weights = self.weights(states, states[-1], range(count), count)
        mixed = _weighted(weights[0], states[0])
        for weight, state in zip(weights[1:], states[1:], strict=True):
            mixed = mixed + _weighted(weight, state)
        return States((*states, (mixed + update).to(states[0].dtype)))


# --- static weights over block outputs ------------------------------------------------------------


class DenseFormerOptions(ConnectionOptions):
    period: int = Field(default=2, ge=1)
    """Sublayers between two averages; 2 is once a Transformer block."""

    def require(self, sublayers: int, width: int) -> None:
        if self.period > sublayers:
            raise UserError(
                f"denseformer: period {self.period} is larger than the {sublayers} sublayers; make it smaller"
            )


class Averaged(NamedTuple):
    """The stream of `denseformer`."""

    x: Tensor
    """[..., d], what sublayers read and add to."""
    outputs: tuple[Tensor, ...]
    """The embedding and each finished block's output, each [..., d]."""


class AveragedEnds(Ends):
    def start(self, x: Tensor) -> Averaged:
        return Averaged(x, (x,))

    def finish(self, stream: Averaged) -> Tensor:
        return stream.x


@register("denseformer")
class DenseFormer(Connection):
    """x <- x + v; after each block x_b <- sum_{i<=b} a_{b,i} x_i with learnt scalars (Pagliardini et al. 2024).

    arXiv 2402.02622, eq. 5 (depth-weighted average). Starts at a_{b,b} = 1 and 0 elsewhere: `add` exactly.
    """

    Options = DenseFormerOptions
    ends = AveragedEnds
    plain_stream = False

    def __init__(self, site: Site, options: DenseFormerOptions) -> None:
        super().__init__(site, options)
        self.averages = (site.index + 1) % options.period == 0
        if self.averages:
            self.weights = nn.Parameter(torch.empty(1 + (site.index + 1) // options.period))

    def reset_parameters(self) -> None:
        if self.averages:
            nn.init.zeros_(self.weights)
            nn.init.ones_(self.weights[-1])

    def read(self, stream: Averaged) -> Tensor:
        return stream.x

    def write(self, stream: Averaged, update: Tensor) -> Averaged:
        x = stream.x + update
        if not self.averages:
            return Averaged(x, stream.outputs)
        outputs = (*stream.outputs, x)
        weights = align_to_sources(self.weights, len(outputs), surplus=0.0)
        average = weights[0] * outputs[0]
        for weight, output in zip(weights[1:], outputs[1:], strict=True):
            average = average + weight * output
        return Averaged(average.to(x.dtype), outputs)
