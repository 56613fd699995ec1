"""Claim 04's models: decoders whose stream is forced to be large beside its updates, and ordinary ones.

A decoder is forced by a constant: `stream` is added to every channel of its unit embedding, and every branch is normed
and scaled to the size of an update. Layernorm takes the constant off again, so that in exact arithmetic it changes
nothing: what differs between formats is rounding alone, and the updates matter as much as in any model.
The other way, an embedding that is itself `stream` times larger, makes the updates small beside what the head reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reslab.comparison import Arm
from reslab.experiments.runs import decoder_run
from reslab.models.decoder import DecoderConfig
from reslab.residuals import ConnectionConfig
from reslab.training import RunConfig

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["ALONE", "ORDINARY", "PLAIN", "STREAMS", "arms", "forced_name", "kept_in", "spread_name"]

STREAMS: dict[str, tuple[str, str]] = {
    "fp32": ("scaled", "float32"),
    "fp16": ("scaled", "float16"),
    "bf16": ("scaled", "bfloat16"),
    "Kahan": ("kahan", "bfloat16"),
    "stochastic": ("stochastic", "bfloat16"),
}
"""How the stream is kept: the kind of connection, and its dtype."""

PLAIN = ("fp32", "fp16", "bf16")

ALONE = "embedding alone"
"""A forced model whose branches are multiplied by 0."""

ORDINARY = {"fp32": "ordinary fp32", "bf16": "ordinary bf16"}


def forced_name(params: Params, update: float, stream: str) -> str:
    return f"{params.claims.fp16_swamping.stream:g}:{update:g} {stream}"


def spread_name(params: Params, stream: str) -> str:
    section = params.claims.fp16_swamping
    return f"embedding times {section.stream:g}, :{section.large:g} {stream}"


def kept_in(model: DecoderConfig, stream: str, scale: float) -> DecoderConfig:
    """The same decoder with its stream kept as `STREAMS` says, and its branches scaled by `scale`."""
    kind, dtype = STREAMS[stream]
    connection = ConnectionConfig(kind, scale=scale)
    return model.model_copy(update={"connection": connection, "stream_dtype": dtype})


def _uncompiled(config: RunConfig) -> RunConfig:
    """A compiler fuses additions and leaves out the rounding between them."""
    return config.model_copy(update={"device": config.device.model_copy(update={"compile": False})})


def _forced(params: Params, stream: str, scale: float, depth: int, **embedding: Any) -> RunConfig:
    config = decoder_run(params, depth, placement="sandwich", norm="layernorm", **embedding)
    assert isinstance(config.model, DecoderConfig)
    return _uncompiled(config.model_copy(update={"model": kept_in(config.model, stream, scale)}))


def arms(params: Params) -> list[Arm]:
    """All of them; the ordinary decoder in float32 is the one that other claims have too."""
    section = params.claims.fp16_swamping
    offset, rates = {"embedding_offset": section.stream}, section.learning_rates
    forced = [(section.update, stream) for stream in STREAMS] + [(section.large, stream) for stream in PLAIN]
    ordinary = decoder_run(params, section.ordinary_depth)
    low = ordinary.model.model_copy(update={"stream_dtype": "bfloat16"})
    return [
        *(
            Arm(forced_name(params, update, stream), _forced(params, stream, update, section.depth, **offset), rates)
            for update, stream in forced
        ),
        *(
            Arm(
                spread_name(params, stream),
                _forced(params, stream, section.large, section.depth, embedding_factor=section.stream),
                rates,
            )
            for stream in ("fp32", "bf16")
        ),
        Arm(ALONE, _forced(params, "fp32", 0.0, 1, **offset), rates),
        Arm(ORDINARY["fp32"], ordinary, rates),
        Arm(ORDINARY["bf16"], _uncompiled(ordinary.model_copy(update={"model": low})), rates),
    ]
