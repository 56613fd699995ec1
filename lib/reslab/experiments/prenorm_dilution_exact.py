"""How fast a stream grows and its sources fade at initial weights, in float64 (claim 11).

The setting is that of Xiong et al. 2020 (arXiv 2002.04745, section 3): one head, matrices of standard deviation
1/sqrt(d), embeddings of 1 without positions, and an MLP whose output has the variance of one with a hidden width of d.
There the stream of Pre-LN has a mean square between 1 + l/2 and 1 + 3l/2 after l blocks (lemma 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator

from reslab import data
from reslab.dilution import Dilution, dilution
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.models.initialisation import WeightInit
from reslab.residuals import ConnectionConfig, Placement
from reslab.schema import Settings
from reslab.stats import Estimate, deterministic, mean_of, slope
from reslab.training import build

__all__ = [
    "FULL",
    "INITIAL_ARMS",
    "LNS",
    "PLAIN",
    "POST",
    "PRE",
    "Exact",
    "depth_exponents",
    "exact_estimates",
    "growth_band",
    "initial_decoder",
    "initial_table",
    "require_depths",
]

PRE = "Pre-LN"
PLAIN = "Pre-LN, plain init"
LNS = "LayerNorm scaling"
FULL = "Full"
POST = "Post-LN"

INITIAL_ARMS: dict[str, tuple[ConnectionConfig, Placement, WeightInit]] = {
    PRE: (ConnectionConfig("add"), "pre", "depth_scaled"),
    PLAIN: (ConnectionConfig("add"), "pre", "plain"),
    LNS: (ConnectionConfig("layernorm_scaling"), "pre", "plain"),
    FULL: (ConnectionConfig("attnres", kernel="naive"), "pre", "plain"),
    POST: (ConnectionConfig("add"), "post", "plain"),
}
"""Connection, placement and initialisation of each untrained arm."""

BATCH = 4


def require_depths(depths: tuple[int, ...]) -> tuple[int, ...]:
    """Refuses anything but two or more depths that increase from at least 2."""
    if len(depths) < 2 or min(depths) < 2 or list(depths) != sorted(set(depths)):
        raise ValueError(f"depths must be two or more that increase from at least 2, got {list(depths)}")
    return depths


class Exact(Settings):
    """Size of the checks at initial weights."""

    depths: tuple[int, ...]
    """Blocks, increasing."""
    seeds: int = Field(ge=2)
    tokens: int = Field(ge=2)
    width: int = Field(ge=8)

    _depths_increase = field_validator("depths")(require_depths)


def initial_decoder(arm: str, depth: int, exact: Exact, seed: int) -> Decoder:
    """An untrained decoder of `INITIAL_ARMS`, float64, without eps in its norms."""
    connection, placement, weight_init = INITIAL_ARMS[arm]
    config = DecoderConfig(
        width=exact.width,
        heads=1,
        context=exact.tokens,
        vocabulary=data.VOCABULARY,
        depth=depth,
        init_std=exact.width**-0.5,
        weight_init=weight_init,
        norm_eps=0.0,
        connection=connection,
        placement=placement,
    )
    model = build(config, seed)
    assert isinstance(model, Decoder)
    with torch.no_grad():
        model.position_embedding.weight.zero_()
        for block in model.blocks:
            block.get_submodule("mlp.branch.down").get_parameter("weight").div_(2)
    return model.double()


def initial_table(exact: Exact) -> pd.DataFrame:
    """Untrained decoders on random tokens; one row for each arm, depth and seed.

    `growth`: mean square of the stream at its end over that at its start (for Full: of what is read); `embedding`,
    `first_block`: their shares in what the head reads; `embedding_left`: mean square of the embedding's part at the
    head over that at the start; `output_slope`: exponent of a block's output as a power of its number;
    `unexplained`: see `Dilution`.
    """
    rows = []
    for arm in INITIAL_ARMS:
        for depth in exact.depths:
            for seed in range(exact.seeds):
                tokens = np.random.default_rng(seed).integers(0, data.VOCABULARY, (BATCH, exact.tokens))
                found = dilution(initial_decoder(arm, depth, exact, seed), torch.from_numpy(tokens))
                rows.append({"arm": arm, "depth": depth, "seed": seed, **_row(found)})
    return pd.DataFrame(rows)


def _row(found: Dilution) -> dict[str, float]:
    blocks = np.arange(1, len(found.block_outputs) + 1)
    return {
        "growth": found.growth,
        "added": found.growth - 1,
        "embedding": float(found.share(0)[-1]),
        "first_block": float(found.share(1, 2)[-1]),
        "embedding_left": found.embedding_left,
        "output_slope": slope(np.log(blocks), np.log(found.block_outputs)),
        "unexplained": found.unexplained,
    }


def depth_exponents(table: pd.DataFrame, arm: str, column: str) -> list[float]:
    """By seed, the exponent of `column` as a power of the model's depth; not a number where a value is not positive."""
    exponents = []
    for _, rows in table[table["arm"] == arm].groupby("seed"):
        positive = bool((rows[column] > 0).all())
        exponents.append(slope(np.log(rows["depth"]), np.log(rows[column])) if positive else float("nan"))
    return exponents


def growth_band(blocks: int) -> tuple[float, float]:
    """Bounds of `growth` for Pre-LN after so many blocks (Xiong et al. 2020, arXiv 2002.04745, lemma 2)."""
    return 1 + blocks / 2, 1 + 3 * blocks / 2


def exact_estimates(table: pd.DataFrame) -> dict[str, Estimate]:
    """What `initial_table` says, by the name of the question."""
    deep = int(table["depth"].max())
    low, high = growth_band(deep)

    def at_deep(arm: str, column: str) -> list[float]:
        chosen = table[(table["arm"] == arm) & (table["depth"] == deep)].sort_values("seed")
        values: list[float] = chosen[column].tolist()
        return values

    def exponent(arm: str, column: str) -> Estimate:
        return mean_of(depth_exponents(table, arm, column))

    return {
        "adds_up": deterministic(float(table["unexplained"].max())),
        "full_starts_alike": deterministic(_difference(at_deep(FULL, "embedding"), at_deep(PLAIN, "embedding"))),
        "embedding_plain": exponent(PLAIN, "embedding"),
        "embedding_scaled": exponent(PRE, "embedding"),
        "first_plain": exponent(PLAIN, "first_block"),
        "first_scaled": exponent(PRE, "first_block"),
        "growth_band": mean_of([(growth - low) / (high - low) for growth in at_deep(PLAIN, "growth")]),
        "growth_plain": exponent(PLAIN, "added"),
        "growth_scaled": exponent(PRE, "added"),
        "growth_lns": exponent(LNS, "added"),
        "output_untrained": mean_of(at_deep(PLAIN, "output_slope")),
        "post_keeps": mean_of(at_deep(POST, "embedding_left")),
        "pre_controlled": mean_of(at_deep(PLAIN, "growth")),
        "pre_controlled_scaled": mean_of(at_deep(PRE, "growth")),
    }


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference of any pair."""
    return max(abs(own - other) for own, other in zip(ours, theirs, strict=True))
