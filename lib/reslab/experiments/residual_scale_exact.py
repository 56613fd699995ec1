"""A fixed scale on the branches, without training: what it does to the stream, to gradients and to effective depth.

Letters: L blocks, S = 2L sublayers, s the scale, d width, x_l [tokens, d] the stream before sublayer l, f_l its branch.
Float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from reslab import data
from reslab.isometry import mean_squared_singular_value, pulled_back
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.opening import branch_shares, effective_depth
from reslab.probes import evaluating, stacks, stream_places, streams
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.stats import Estimate, mean_of
from reslab.training import build

__all__ = [
    "HALF",
    "LOW",
    "MODERATE",
    "ONE",
    "SCALES",
    "SMALL",
    "Exact",
    "Shape",
    "built",
    "constructed",
    "exact_estimates",
    "growth_law",
    "jacobians",
    "orthogonal_stack",
]

ONE, HALF, MODERATE, LOW, SMALL = 1.0, 0.5, 0.3, 0.1, 0.03
SCALES = (ONE, HALF, MODERATE, LOW, SMALL)
"""The textbook's scale, two of those said to be stable (0.1 to 0.5), and one that is too small."""


class Shape(Settings):
    """Sizes of untrained networks; the law is one of means, whose spread falls with width, tokens and seeds."""

    depth: int = Field(ge=1)
    """Blocks."""
    width: int = Field(ge=4)
    tokens: int = Field(ge=2)
    seeds: int = Field(ge=2)


class Exact(Settings):
    """Sizes of the checks without training."""

    stack: Shape
    """The constructed stack."""
    jacobian: Shape
    """The constructed stack whose whole Jacobian is built, token by token."""
    decoder: Shape

    @model_validator(mode="after")
    def _as_deep(self) -> Exact:
        if self.stack.depth != self.decoder.depth:
            raise ValueError(f"stack.depth {self.stack.depth} and decoder.depth {self.decoder.depth} must be the same")
        return self


def growth_law(scale: float, depth: int) -> float:
    """1 + 2 L s^2: E|x|^2 / d after L blocks, where it is 1 before and each branch writes unit variance at right
    angles to the stream. So also the mean squared singular value of the Jacobian of pre-norm branches that are
    rotations: the factors 1 + s^2 / (1 + l s^2) of the sublayers telescope."""
    return 1 + 2 * depth * scale**2


def orthogonal_stack(width: int, sublayers: int, scale: float, seed: int) -> Callable[[Tensor], Tensor]:
    """x <- x + s Q_l x / rms(x), with random rotations Q_l: every branch has a variance of exactly 1. x is [..., d]."""
    generator = torch.Generator().manual_seed(seed)
    rotations = [_rotation(width, generator) for _ in range(sublayers)]

    def forward(x: Tensor) -> Tensor:
        for rotation in rotations:
            x = x + scale * F.rms_norm(x, (width,), eps=0.0) @ rotation
        return x

    return forward


def _rotation(width: int, generator: torch.Generator) -> Tensor:
    """Uniform over all rotations and reflections: QR of a normal matrix, with the signs of R's diagonal."""
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    rotation: Tensor = q * r.diagonal().sign()
    return rotation


def _unit_tokens(tokens: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 1)
    return F.rms_norm(torch.randn(tokens, width, generator=generator, dtype=torch.float64), (width,), eps=0.0)


def constructed(shape: Shape, scales: Sequence[float]) -> pd.DataFrame:
    """The constructed stack over the law; one row for each scale and seed, all of them 1 where the law holds.

    `stream`: E|x|^2 / d after the stack; `gradient`: squared size of a random gradient by the stack's input over that
    by its output.
    """
    rows = []
    for scale in scales:
        law = growth_law(scale, shape.depth)
        for seed in range(shape.seeds):
            stack = orthogonal_stack(shape.width, 2 * shape.depth, scale, seed)
            x = _unit_tokens(shape.tokens, shape.width, seed)
            stream, gradient = float(stack(x).square().mean()), pulled_back(stack, x, seed)
            rows.append({"scale": scale, "seed": seed, "stream": stream / law, "gradient": gradient / law})
    return pd.DataFrame(rows)


def jacobians(shape: Shape, scales: Sequence[float]) -> pd.DataFrame:
    """The same of the mean squared singular value of the whole Jacobian, in the mean over tokens: `jacobian`."""
    rows = []
    for scale in scales:
        for seed in range(shape.seeds):
            stack = orthogonal_stack(shape.width, 2 * shape.depth, scale, seed)
            matrices = torch.func.vmap(torch.func.jacrev(stack))(_unit_tokens(shape.tokens, shape.width, seed))
            found = float(np.mean([mean_squared_singular_value(matrix) for matrix in matrices]))
            rows.append({"scale": scale, "seed": seed, "jacobian": found / growth_law(scale, shape.depth)})
    return pd.DataFrame(rows)


def _decoder(shape: Shape, scale: float, seed: int) -> Decoder:
    """An untrained decoder whose matrices start with GPT-2's standard deviation, not smaller with depth."""
    config = DecoderConfig(
        width=shape.width,
        heads=1,
        context=shape.tokens,
        vocabulary=data.VOCABULARY,
        depth=shape.depth,
        init_std=0.55 / shape.width**0.5,
        weight_init="plain",
        connection=ConnectionConfig("scaled", scale=scale),
    )
    model = build(config, seed)
    assert isinstance(model, Decoder)
    return model.double()


def _stream_squares(model: Decoder, tokens: Tensor) -> tuple[float, float, float]:
    """E|x|^2 / d before the first and after the last block, and the sum over sublayers of E|f|^2 / d."""
    written: list[float] = []

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        written.append(float(output.square().mean()))

    branches = [sublayer.branch for stack in stacks(model) for sublayer in stack.sublayers()]
    handles = [branch.register_forward_hook(note) for branch in branches]
    try:
        with torch.no_grad(), evaluating(model), streams(stream_places(model)) as seen:
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    first, last = (float(x.square().mean()) for x in (seen[0], seen[-1]))
    return first, last, sum(written)


def built(shape: Shape, scales: Sequence[float]) -> pd.DataFrame:
    """Untrained decoders on random tokens; one row for each scale and seed.

    `growth`: E|x_L|^2 / E|x_0|^2; `law`: E|x_L|^2 over E|x_0|^2 + s^2 sum E|f_l|^2, 1 where branches are at right
    angles to the stream; `effective_depth`: `opening.effective_depth`, in sublayers.
    """
    rows = []
    for scale in scales:
        for seed in range(shape.seeds):
            model = _decoder(shape, scale, seed)
            values = np.random.default_rng(seed).integers(0, data.VOCABULARY, (4, shape.tokens))
            tokens = torch.from_numpy(values)
            first, last, written = _stream_squares(model, tokens)
            rows.append(
                {
                    "scale": scale,
                    "seed": seed,
                    "growth": last / first,
                    "law": last / (first + scale**2 * written),
                    "effective_depth": effective_depth(branch_shares(model, tokens)),
                }
            )
    return pd.DataFrame(rows)


def _of(table: pd.DataFrame, column: str, scale: float) -> list[float]:
    values: list[float] = table[table["scale"] == scale][column].tolist()
    return values


def _worst(table: pd.DataFrame, column: str) -> Estimate:
    """Mean over seeds of the column, at the scale where that mean is farthest from 1."""
    means = table.groupby("scale")[column].mean()
    return mean_of(_of(table, column, float(means.index[int((means - 1).abs().argmax())])))


def exact_estimates(law: pd.DataFrame, chis: pd.DataFrame, decoders: pd.DataFrame) -> dict[str, Estimate]:
    """The checks on `constructed`, `jacobians` and `built` at SCALES, by name."""
    depths = zip(*(_of(decoders, "effective_depth", scale) for scale in (SMALL, ONE)), strict=True)
    return {
        "stream_law": _worst(law, "stream"),
        "jacobian_law": _worst(chis, "jacobian"),
        "gradient_law": _worst(law, "gradient"),
        "stream_built": _worst(decoders, "law"),
        "growth_one": mean_of(_of(decoders, "growth", ONE)),
        "growth_low": mean_of(_of(decoders, "growth", LOW)),
        "effective_untrained": mean_of([small / large for small, large in depths]),
    }
