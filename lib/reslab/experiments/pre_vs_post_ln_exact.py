"""Pre-LN and Post-LN at their initial weights, in the setting of Xiong et al. 2020 (arXiv 2002.04745, section 3).

Letters: L blocks, d width, x_l [B, T, d] the stream after block l.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from reslab import data
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.models.initialisation import WeightInit
from reslab.probes import stream_profile
from reslab.residuals import Placement
from reslab.stats import slope
from reslab.training import build

__all__ = [
    "INITIAL_ARMS",
    "block_angles",
    "initial_measures",
    "initial_streams",
    "last_mlp_gradient",
    "log_slopes",
    "stream_band",
    "xiong_decoder",
]

INITIAL_ARMS: dict[str, tuple[Placement, WeightInit]] = {
    "Pre-LN": ("pre", "plain"),
    "Post-LN": ("post", "plain"),
    "Post-LN, DeepNet init": ("post", "deepnorm"),
    "DeepNorm": ("deepnorm", "deepnorm"),
}

BATCH = 4


def xiong_decoder(
    placement: Placement, weight_init: WeightInit, depth: int, width: int, context: int, seed: int
) -> Decoder:
    """An untrained decoder, float64, as theory has it.

    One head; matrices of standard deviation 1/sqrt(d); embeddings of 1, without positions; and an MLP whose output has
    the variance of one with a hidden width of d, as theirs (here it is 4d, and what it writes is halved).
    """
    config = DecoderConfig(
        width=width,
        heads=1,
        context=context,
        vocabulary=data.VOCABULARY,
        depth=depth,
        init_std=width**-0.5,
        weight_init=weight_init,
        placement=placement,
    )
    model = build(config, seed)
    assert isinstance(model, Decoder)
    with torch.no_grad():
        model.position_embedding.weight.zero_()
        for block in model.blocks:
            block.get_submodule("mlp.branch.down").get_parameter("weight").div_(2)
    return model.double()


def _random_text(context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens and those that follow them, both [BATCH, context]."""
    text = torch.from_numpy(np.random.default_rng(seed).integers(0, data.VOCABULARY, (BATCH, context + 1)))
    return text[:, :-1], text[:, 1:]


def last_mlp_gradient(model: Decoder, inputs: Tensor, targets: Tensor) -> float:
    """Frobenius norm of the loss gradient by the last block's second MLP matrix (Xiong et al. 2020, theorem 1).

    At initial weights O(d sqrt(ln d)) for Post-LN, and O(d sqrt(ln d / L)) for Pre-LN.
    """
    weight = model.blocks[-1].get_submodule("mlp.branch.down").get_parameter("weight")
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    [gradient] = torch.autograd.grad(loss, [weight])
    return float(gradient.norm())


def block_angles(neighbour_cosines: Sequence[float]) -> list[float]:
    """By how many degrees each block turns the stream, from `stream_profile`'s cosines: its effective update.

    About |f| / |x| radians where the update f is small and orthogonal to the stream x. Both norms read x through a
    norm, or norm it, so that the turn is all of an update that later blocks see.
    """
    angles: list[float] = np.degrees(np.arccos(np.clip(neighbour_cosines, -1, 1))).tolist()
    return angles


def initial_measures(depths: Sequence[int], seeds: int, tokens: int, width: int) -> pd.DataFrame:
    """Untrained decoders on random text; one row for each arm, depth and seed.

    `gradient`: `last_mlp_gradient`; `mean_square`: E|x_L|^2 / d; `growth`: the same over E|x_0|^2 / d;
    `last_angle`: of `block_angles` the last block's.
    """
    rows = []
    for arm, (placement, weight_init) in INITIAL_ARMS.items():
        for depth in depths:
            for seed in range(seeds):
                model = xiong_decoder(placement, weight_init, depth, width, tokens, seed)
                inputs, targets = _random_text(tokens, seed)
                profile = stream_profile(model, inputs, targets)
                squares = profile["mean_square"]
                rows.append(
                    {
                        "arm": arm,
                        "depth": depth,
                        "seed": seed,
                        "gradient": last_mlp_gradient(model, inputs, targets),
                        "mean_square": squares[-1],
                        "growth": squares[-1] / squares[0],
                        "last_angle": block_angles(profile["neighbour_cosine"])[-1],
                    }
                )
    return pd.DataFrame(rows)


def log_slopes(measures: pd.DataFrame, arm: str, column: str) -> list[float]:
    """Exponent of `column` as a power of depth, by seed: the slope of its logarithm against that of the depth."""
    chosen = measures[measures["arm"] == arm]
    return [slope(np.log(rows["depth"]), np.log(rows[column])) for _, rows in chosen.groupby("seed")]


def stream_band(blocks: float) -> tuple[float, float]:
    """Bounds of E|x_l|^2 / d for Pre-LN after l blocks: 1 + l/2 and 1 + 3l/2 (Xiong et al. 2020, lemma 2)."""
    return 1 + blocks / 2, 1 + 3 * blocks / 2


def initial_streams(depth: int, seeds: int, tokens: int, width: int, arm: str) -> list[list[float]]:
    """E|x_l|^2 / d of untrained decoders at l = 0 to L, by seed."""
    placement, weight_init = INITIAL_ARMS[arm]
    series = []
    for seed in range(seeds):
        model = xiong_decoder(placement, weight_init, depth, width, tokens, seed)
        series.append(stream_profile(model, *_random_text(tokens, seed))["mean_square"])
    return series
