"""What attention over depth is at its start, in float64 and without training (claim 06)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from reslab import data
from reslab.claims import Check
from reslab.depth_weights import depth_weights, times_uniform
from reslab.experiments.attention_residual_gains import judged
from reslab.experiments.attention_residual_gains_arms import full, section_of
from reslab.experiments.runs import decoder_run
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.residuals import ConnectionConfig
from reslab.stats import Estimate, deterministic
from reslab.training import build

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["checks_initial", "decoder_of", "parameters_of", "start_difference"]


GPT2: dict[str, object] = {"embedding": "gpt2", "init_std": 0.02}
"""GPT-2's start: a standard deviation of 0.02 for the embedding and all matrices, whatever the width."""


def decoder_of(params: Params, connection: ConnectionConfig, **shape: object) -> DecoderConfig:
    """Of the size of the exact checks, without eps in its norms unless `shape` says otherwise."""
    exact = section_of(params).exact
    defaults = {
        "width": exact.width,
        "heads": 4,
        "context": exact.tokens,
        "vocabulary": data.VOCABULARY,
        "depth": exact.depth,
        "init_std": 0.55 * exact.width**-0.5,
        "norm_eps": 0.0,
    }
    return DecoderConfig.model_validate({**defaults, **shape, "connection": connection})


def _tokens(seed: int, length: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, data.VOCABULARY, (2, length)))


@torch.no_grad()
def start_difference(ours: DecoderConfig, theirs: DecoderConfig, seeds: int) -> float:
    """|logits - logits'| / |logits'| of two untrained decoders with the same weights, on random tokens in float64.

    The largest over `seeds`.
    """
    worst = 0.0
    for seed in range(seeds):
        tokens = _tokens(seed, ours.context)
        own, other = (build(config, seed).double()(tokens) for config in (ours, theirs))
        worst = max(worst, float((own - other).norm() / other.norm()))
    return worst


def _start(params: Params, ours: ConnectionConfig, theirs: ConnectionConfig, **shape: object) -> Estimate:
    own, other = (decoder_of(params, connection, **shape) for connection in (ours, theirs))
    return deterministic(start_difference(own, other, section_of(params).exact.seeds))


def _trained_decoder(params: Params, connection: ConnectionConfig) -> DecoderConfig:
    """The deepest on text."""
    model = decoder_run(params, section_of(params).depths[-1], connection).model
    assert isinstance(model, DecoderConfig)
    return model


def parameters_of(config: DecoderConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def _wrong_source_counts(params: Params) -> int:
    """How many reads of four sublayers in blocks of two, and of the output, see another number than published."""
    config = decoder_of(params, full(block=2), depth=2)
    counts = np.isfinite(depth_weights(build(config, 0), _tokens(0, config.context))).sum(1)
    return sum(int(found) != expected for found, expected in zip(counts, (1, 2, 2, 3, 3), strict=True))


def _largest_inequality(params: Params) -> float:
    """Largest |a n - 1| of the untrained Full in float64."""
    config = decoder_of(params, full())
    weights = depth_weights(build(config, 0).double(), _tokens(0, config.context))
    return max(abs(times_uniform(weights, source)[read] - 1) for source in (0, -1) for read in range(len(weights)))


def checks_initial(params: Params) -> list[Check]:
    """Sentences B3a, B3b and B7c without training."""
    torch.set_num_threads(params.device.threads)
    section, standard = section_of(params), ConnectionConfig()
    ours, theirs = (_trained_decoder(params, connection) for connection in (full(), standard))
    extra = parameters_of(ours) - parameters_of(theirs)
    return judged(
        params,
        full_starts_as_standard=_start(params, full(), standard),
        block_starts_as_standard=_start(params, full(block=section.block), standard),
        rescaled_is_held_full=_start(params, full(), ConnectionConfig("rescaled"), norm_eps=1e-5, **GPT2),
        source_counts=deterministic(_wrong_source_counts(params)),
        parameters_exact=deterministic(extra - (ours.sublayers + 1) * ours.width),
        parameter_share=deterministic(extra / parameters_of(theirs)),
        eps_trap=_start(params, full(), standard, norm_eps=1e-6, **GPT2),
        eps_here=deterministic(start_difference(ours, theirs, seeds=1)),
        uniform_untrained=deterministic(_largest_inequality(params)),
    )
