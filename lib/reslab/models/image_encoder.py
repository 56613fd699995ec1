"""Vision Transformer for small images (Dosovitskiy et al. 2021, ViT, arXiv 2010.11929), and cutting into patches.

Letters: B batch, c image channels, n image size, p patch size, N = (n/p)^2 patches, d width, L blocks.
"""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from reslab.models.initialisation import embedding_scale, initialise
from reslab.models.transformer import TransformerSettings, attention_and_mlp
from reslab.residuals import Stack, reset_connections
from reslab.schema import Settings, UserError

__all__ = [
    "ImageEncoder",
    "ImageEncoderConfig",
    "PatchSettings",
    "require_images",
    "reset_patch_weights",
    "to_images",
    "to_patches",
]


class PatchSettings(Settings):
    """Square images, and how they are cut into patches."""

    image_size: int = Field(default=8, ge=1)
    """n, height and width in pixels."""
    image_channels: int = Field(default=1, ge=1)
    patch: int = Field(default=2, ge=1)
    """p, height and width of a patch in pixels."""

    @model_validator(mode="after")
    def _patch_divides_image(self) -> "PatchSettings":
        if self.image_size % self.patch:
            raise ValueError(f"image_size {self.image_size} is not divisible by patch {self.patch}; change one of them")
        return self

    @property
    def patches(self) -> int:
        """N."""
        return (self.image_size // self.patch) ** 2

    @property
    def patch_values(self) -> int:
        """c p^2, numbers in a patch."""
        return self.image_channels * self.patch**2


def require_images(images: Tensor, channels: int, size: int) -> None:
    """A UserError unless `images` are [B, c, n, n] with these c and n."""
    if list(images.shape[1:]) != [channels, size, size]:
        raise UserError(
            f"images have shape {list(images.shape)}, the model takes [B, {channels}, {size}, {size}]; "
            f"reshape them, or change image_size and image_channels"
        )


def to_patches(images: Tensor, settings: PatchSettings) -> Tensor:
    """Images [B, c, n, n] as patches [B, N, c p^2], row by row; in a patch, channel by channel and row by row."""
    require_images(images, settings.image_channels, settings.image_size)
    p = settings.patch
    grid = images.unflatten(-1, (-1, p)).unflatten(-3, (-1, p))  # [B, c, n/p, p, n/p, p]
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(-3).flatten(1, 2)


def to_images(patches: Tensor, settings: PatchSettings) -> Tensor:
    """The inverse of `to_patches`: [B, N, c p^2] -> [B, c, n, n]."""
    p, side = settings.patch, settings.image_size // settings.patch
    grid = patches.unflatten(-1, (-1, p, p)).unflatten(1, (side, side))  # [B, n/p, n/p, c, p, p]
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(-2).flatten(-3, -2)


def reset_patch_weights(patch_embedding: nn.Linear, position_embedding: nn.Embedding, scale: float) -> None:
    """Pixels of unit variance make tokens of variance scale^2; positions have half the deviation, as in the decoder."""
    nn.init.normal_(patch_embedding.weight, std=scale * patch_embedding.in_features**-0.5)
    nn.init.normal_(position_embedding.weight, std=scale / 2)


class ImageEncoderConfig(PatchSettings, TransformerSettings):
    """An image encoder in full."""

    kind: Literal["image_encoder"] = "image_encoder"
    head: Literal["class", "reconstruction"] = "class"
    """`class` logits; `reconstruction` the pixels of every patch, for plain or masked autoencoding."""
    classes: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _head_has_what_it_needs(self) -> "ImageEncoderConfig":
        if self.head == "class" and self.classes is None:
            raise ValueError("head: class needs to know how many classes; give classes, e.g. classes: 10")
        if self.head == "reconstruction" and self.classes is not None:
            raise ValueError("head: reconstruction puts out pixels; remove classes, or choose head: class")
        return self

    @property
    def relative_cost(self) -> float:
        """Multiplications per example and block, for planning."""
        return self.patches * self.width * (12 * self.width + 2 * self.patches)


class ImageEncoder(nn.Module):
    """Images [B, c, n, n] -> logits [B, classes], or images [B, c, n, n] where the head reconstructs.

    Logits are read off the mean over patches, after the final norm, in place of a class token: as accurate, and
    every token of the stream is a patch (Dosovitskiy et al. 2021, appendix D.3; Beyer et al. 2022, arXiv 2205.01580).
    """

    def __init__(self, config: ImageEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Linear(config.patch_values, config.width)
        self.position_embedding = nn.Embedding(config.patches, config.width)
        branches = [attention_and_mlp(config, causal=False) for _ in range(config.depth)]
        self.stack = Stack(branches, config.width, config, config.make_stack_norm)
        self.norm = config.make_norm() if config.final_norm else nn.Identity()
        self.head = nn.Linear(config.width, config.classes or config.patch_values)
        if config.head == "reconstruction":
            self.mask_token = nn.Parameter(torch.empty(config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew; the only place that knows how they start."""
        config = self.config
        initialise(self, config.init_std, config.weight_init, config.sublayers, causal=False)
        scale = embedding_scale(config.weight_init, config.sublayers, causal=False)
        reset_patch_weights(self.patch_embedding, self.position_embedding, scale)
        if config.head == "reconstruction":
            nn.init.normal_(self.mask_token, std=scale)  # stands in for an embedded patch
        reset_connections(self)  # last, so that what they draw changes no other weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.stack.blocks

    def forward(self, images: Tensor, masked: Tensor | None = None) -> Tensor:
        """`masked` [B, N] is true where a learnt token replaces the patch; only where the head reconstructs.

        All patches run through one encoder and a linear head (SimMIM, Xie et al. 2022, arXiv 2111.09886), which
        is simpler than an encoder of the visible patches and a decoder (He et al. 2022, MAE, arXiv 2111.06377).
        """
        patches = to_patches(images, self.config)
        tokens = self.patch_embedding(patches.to(self.patch_embedding.weight.dtype))
        if masked is not None:
            tokens = torch.where(self._mask(masked, tokens).unsqueeze(-1), self.mask_token, tokens)
        hidden = self.norm(self.stack(tokens + self.position_embedding.weight))
        out: Tensor = self.head(hidden.mean(1) if self.config.head == "class" else hidden)
        return out if self.config.head == "class" else to_images(out, self.config)

    def _mask(self, masked: Tensor, tokens: Tensor) -> Tensor:
        """`masked` [B, N], if it fits."""
        if self.config.head != "reconstruction":
            raise UserError(
                "masked patches are for head: reconstruction, and this encoder classifies; leave masked out"
            )
        if masked.shape != tokens.shape[:2] or masked.dtype != torch.bool:
            raise UserError(
                f"masked is {masked.dtype} of shape {list(masked.shape)}; "
                f"give torch.bool of shape {list(tokens.shape[:2])}, one value a patch"
            )
        return masked
