"""What a decoder's step computes and moves, counted by formula, for comparisons at equal compute.

Letters: d width, L blocks, S = 2L sublayers, T tokens, V vocabulary, n sources of a read.
"""

from reslab.models.decoder import DecoderConfig
from reslab.residuals.depth_attention import AttnResOptions
from reslab.schema import UserError

__all__ = ["forward_flops", "modelled_cost", "norm_flops", "stream_traffic", "training_flops"]

ELEMENTWISE = ("none", "add", "weighted_skip", "scaled", "rezero", "skipinit", "layerscale", "rescaled")
"""Connections that multiply no matrices and sum over no sources: nothing is counted for them."""

BACKWARD = 2
"""A backward pass computes two products for each of the forward pass."""

BYTES = 4
"""Of a number in float32."""


def forward_flops(config: DecoderConfig) -> int:
    """Floating-point operations a token of a forward pass, a multiplication and an addition being two.

    2 (12 d^2 + 2 T d) a block (projections and MLP; all T keys, as `torch.utils.flop_counter` counts), 2 d V for the
    head, and 4 n d for each read of attention over depth (scores and sum; static weights 2 n d). Norms, activations and
    additions are left out. A UserError for a connection whose operations are not counted here.
    """
    blocks = config.depth * 2 * (12 * config.width**2 + 2 * config.context * config.width)
    return blocks + 2 * config.width * config.vocabulary + _connection_flops(config)


def _connection_flops(config: DecoderConfig) -> int:
    options = _options(config)
    if options is None:
        return 0
    each = 2 if options.query == "none" else 4
    reads = range(config.sublayers + 1)
    return each * config.width * sum(len(options.places(options.sources_before(read))) for read in reads)


def _options(config: DecoderConfig) -> AttnResOptions | None:
    """Those of attention over depth; None for an elementwise connection."""
    options = config.connection.options
    if config.connection.kind in ELEMENTWISE:
        return None
    if not isinstance(options, AttnResOptions):
        raise UserError(f"operations of connection '{config.connection.kind}' are not counted; use add or attnres")
    if options.query == "input" or options.key_rank or options.value_rank:
        raise UserError("operations of input queries and of low-rank keys or values are not counted; leave them out")
    return options


def norm_flops(config: DecoderConfig) -> int:
    """Floating-point operations a token of a forward pass in all norms, which `forward_flops` leaves out.

    A layernorm takes 7 d: mean 1, centre 1, squares and their sum 2, scale 1, gain 1, bias 1; an RMS norm 4 d.
    """
    on_sublayer = {"none": 0, "pre": 1, "post": 1, "deepnorm": 1, "sandwich": 2, "sandwich_sum": 2, "peri": 2}
    norms = on_sublayer[config.placement] * config.sublayers + (config.placement == "peri") + config.final_norm
    return (7 if config.norm == "layernorm" else 4) * config.width * norms


def stream_traffic(config: DecoderConfig) -> int:
    """Numbers of the residual stream a token that a forward pass reads and writes.

    3 d a sublayer for an elementwise connection (read, read to add, write; Kimi Team 2026, arXiv 2603.15031, table of
    memory traffic); for attention over depth the rows that grouped reads go through (`kernels.depth_attention.plan`),
    and one row written a sublayer.
    """
    options = _options(config)
    if options is None:
        return 3 * config.width * config.sublayers
    return config.width * (options.plan(config.sublayers, True).rows_mixed + config.sublayers)


def training_flops(config: DecoderConfig, steps: int, batch: int) -> float:
    """Floating-point operations of a whole training: forward and backward over `steps` batches of T tokens each."""
    return float((1 + BACKWARD) * forward_flops(config) * steps * batch * config.context)


def modelled_cost(config: DecoderConfig, balance: float) -> float:
    """Operations a token of a forward pass, and those a machine could do in the time the stream takes to move.

    `balance` is the machine's: floating-point operations in the time of one byte. Nothing is thought to overlap, so
    this is an upper bound of what the stream costs.
    """
    return forward_flops(config) + balance * BYTES * stream_traffic(config)
