"""Claim 13's networks: diffusion Transformers and U-Nets, with and without residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from reslab import data
from reslab.comparison import Arm
from reslab.models.diffusion import DiffusionConfig
from reslab.models.unet import UNetConfig
from reslab.residuals import ConnectionConfig
from reslab.schema import Settings
from reslab.training import ModelConfig, RunConfig

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["ARMS", "COMPARISONS", "TASK", "TransformerSize", "UNetSize", "arms", "closed_model", "model_of"]

ZERO = "DiT, adaLN-Zero"
DIT = "DiT"
DIT_NONE = "DiT, no residuals"
UNET = "U-Net"
UNET_NONE = "U-Net, no residuals"
UNET_CUT = "U-Net, no long skips"
UNET_NEITHER = "U-Net, neither"

ARMS = (ZERO, DIT, DIT_NONE, UNET, UNET_NONE, UNET_CUT, UNET_NEITHER)
"""DiT without a name for its conditioning has plain adaLN: without a gate it runs with and without residuals."""

COMPARISONS = {
    "zero": (ZERO, DIT_NONE),
    "dit": (DIT, DIT_NONE),
    "unet": (UNET, UNET_NONE),
    "skips": (UNET, UNET_CUT),
    "both": (UNET, UNET_NEITHER),
}
"""With and without, by their part of a check's name."""

TASK = data.NoisyDigitsConfig(labels=False)
"""Without labels: what a network knows of a digit it has from the picture."""


class TransformerSize(Settings):
    """The diffusion Transformers, on patches of 2 x 2."""

    depth: int = Field(ge=1)
    """Blocks."""
    width: int = Field(ge=1)
    heads: int = Field(ge=1)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TransformerSize:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        return self


class UNetSize(Settings):
    """The U-Nets."""

    channels: int = Field(ge=1)
    depth: int = Field(ge=1)
    """Residual blocks a stack."""
    levels: int = Field(ge=2, le=4)
    """Sizes of the picture; with one there would be no long skip, and 8 pixels can be halved three times."""


def _dit(size: TransformerSize, *, zero: bool = False, residual: bool = True) -> DiffusionConfig:
    return DiffusionConfig(
        width=size.width,
        heads=size.heads,
        depth=size.depth,
        classes=10,
        patch=2,
        init_std=0.55 / size.width**0.5,
        conditioning="adaln_zero" if zero else "adaln",
        connection=ConnectionConfig("add" if residual else "none"),
    )


def _unet(size: UNetSize, *, residual: bool = True, skips: bool = True) -> UNetConfig:
    return UNetConfig(
        channels=size.channels,
        depth=size.depth,
        levels=size.levels,
        skips=skips,
        connection=ConnectionConfig("add" if residual else "none"),
    )


def model_of(transformer: TransformerSize, unet: UNetSize, arm: str) -> ModelConfig:
    """The network of an arm."""
    if arm.startswith("DiT"):
        return _dit(transformer, zero=arm == ZERO, residual=arm != DIT_NONE)
    return _unet(unet, residual=arm not in (UNET_NONE, UNET_NEITHER), skips=arm not in (UNET_CUT, UNET_NEITHER))


def closed_model(transformer: TransformerSize) -> DiffusionConfig:
    """DiT that starts from zero, gates and head, and has no residuals."""
    return _dit(transformer, zero=True, residual=False)


def arms(params: Params) -> list[Arm]:
    """All arms, on the same pictures and noise."""
    section = params.claims.diffusion_residuals
    recipe = params.optimisation.model_copy(update={"batch": section.batch, "steps": section.steps})
    return [
        Arm(
            arm,
            RunConfig(
                task=TASK,
                model=model_of(section.transformer, section.unet, arm),
                optimisation=recipe,
                learning_rate=1.0,
                seed=0,
                device=params.device,
            ),
            section.learning_rates,
        )
        for arm in ARMS
    ]
