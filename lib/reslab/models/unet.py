"""Small U-Net that predicts the noise in an image (Ronneberger et al. 2015, arXiv 1505.04597; Ho et al. 2020).

Letters: B batch, H and W height and width, c channels, K levels, S sublayers a stack.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.diffusion import TimeEmbedding
from reslab.models.image_encoder import require_images
from reslab.models.initialisation import Weights, initialise
from reslab.models.layers import NormKind, make_norm
from reslab.residuals import ResidualSettings, Stack, connection_modules, reset_connections
from reslab.schema import UserError

__all__ = ["UNet", "UNetConfig"]


class UNetConfig(ResidualSettings):
    """A U-Net in full. Every level has the same number of channels.

    Each stack begins a stream of its own: connections that count sublayers, blocks or sources count within it. A
    sublayer here is a whole residual block, so that `sublayers_per_block` and `period` are 1 where a block is meant.
    """

    kind: Literal["unet"] = "unet"
    has_attention = False
    channels: int = Field(ge=1)
    """c, on every stream."""
    depth: int = Field(ge=1)
    """S, the sublayers (two convolutions each) of a stack; there is one on the way down and one up at each level."""
    levels: int = Field(default=3, ge=1)
    """K; each has half the height and width of the one before. The lowest has a single stack."""
    skips: bool = True
    """Long skips: the way up also reads what the way down left at its level."""
    image_size: int = Field(default=8, ge=1)
    """Height and width in pixels."""
    image_channels: int = Field(default=1, ge=1)
    norm: NormKind = "layernorm"
    norm_eps: float = Field(default=1e-5, ge=0)
    """Added to the variance (the mean square) in every norm."""
    weight_init: Literal["plain", "depth_scaled"] = "depth_scaled"
    """`depth_scaled`: each sublayer's last convolution starts smaller by 1/sqrt(number of sublayers)."""

    @model_validator(mode="after")
    def _fits_together(self) -> "UNetConfig":
        self.connection.options.require(self.depth, self.channels)
        if self.placement == "deepnorm":
            raise ValueError("placement deepnorm needs its weight init, which a unet has not; use post")
        if self.image_size % 2 ** (self.levels - 1):
            raise ValueError(
                f"image_size {self.image_size} cannot be halved {self.levels - 1} times; "
                f"lower levels, or make it a multiple of {2 ** (self.levels - 1)}"
            )
        return self

    @property
    def sublayers(self) -> int:
        """Those of all stacks, which an image passes one after the other."""
        return self.depth * (2 * self.levels - 1)

    @property
    def relative_cost(self) -> float:
        """Multiplications per example and sublayer of every stack; small convolutions run at a quarter of the speed."""
        ways = [2] * (self.levels - 1) + [1]
        pixels = sum(way * (self.image_size // 2**level) ** 2 for level, way in enumerate(ways))
        return 4 * pixels * 18 * self.channels**2

    def make_norm(self) -> nn.Module:
        """A norm over the channels of each pixel (as in Liu et al. 2022, ConvNeXt, arXiv 2201.03545)."""
        return make_norm(self.norm, self.channels, self.norm_eps)


class _Convolution(nn.Conv2d):
    """3 x 3, on channels-last images: [B, H, W, c] -> [B, H/stride, W/stride, c']."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__(channels_in, channels, 3, stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


class _Branch(nn.Module):
    """SiLU, convolution, plus what the time says, SiLU, convolution: [B, H, W, c] -> [B, H, W, c].

    The residual block of Ho et al. 2020 (arXiv 2006.11239, appendix B), whose norm is the stack's.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = _Convolution(channels, channels)
        self.time = nn.Linear(channels, channels)
        self.down = _Convolution(channels, channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`condition` [B, c] is the embedded time."""
        shift = self.time(F.silu(condition))[:, None, None]
        out: Tensor = self.down(F.silu(self.up(F.silu(x)) + shift))
        return out

    def weights_by_role(self) -> Weights:
        return {"up": [self.up.weight], "down": [self.down.weight]}


class UNet(nn.Module):
    """Noisy images [B, image_channels, H, W] at a time -> the noise in them, of the same shape.

    On the way up h, twice as large, meets the skip s of its level in a 1 x 1 convolution of both, side by side:
    [M N] [h; s] = M h + N s. Without skips there is no N, and all other weights are the same.
    """

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        channels, halvings = config.channels, range(config.levels - 1)
        self.time_embedding = TimeEmbedding(channels)
        self.stem = _Convolution(config.image_channels, channels)
        self.down = nn.ModuleList(self._stack() for _ in halvings)
        self.halve = nn.ModuleList(_Convolution(channels, channels, stride=2) for _ in halvings)
        self.middle = self._stack()
        self.merge = nn.ModuleList(nn.Linear(channels, channels) for _ in halvings)
        self.up = nn.ModuleList(self._stack() for _ in halvings)
        self.norm = config.make_norm()
        self.head = nn.Linear(channels, config.image_channels)
        # last, so that whether they are there changes no other weight
        self.merge_skip = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in halvings if config.skips)
        self.reset_parameters()

    def _stack(self) -> Stack:
        config = self.config
        branches = [{"convolutions": _Branch(config.channels)} for _ in range(config.depth)]
        return Stack(branches, config.channels, config, config.make_norm)

    def reset_parameters(self) -> None:
        """He-normal convolutions (He et al. 2015, arXiv 1502.01852), and linear maps that keep the variance."""
        config = self.config
        in_connections = connection_modules(self)
        for module in self.modules():  # before `initialise`, which scales them by their role
            if isinstance(module, nn.Conv2d) and module not in in_connections:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        initialise(self, config.channels**-0.5, config.weight_init, config.sublayers)
        waves = self.time_embedding.up
        with torch.no_grad():  # sines and cosines have a mean square of 1/2
            waves.weight *= (2 * config.channels / waves.in_features) ** 0.5
        reset_connections(self)  # last, so that what they draw changes no other weight

    @property
    def stacks(self) -> list[Stack]:
        """All stacks, in the order they run."""
        found: Iterable[nn.Module] = [*self.down, self.middle, *self.up]
        return [stack for stack in found if isinstance(stack, Stack)]

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all stacks, in the order they run."""
        return [block for stack in self.stacks for block in stack.blocks]

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        """`time` [B] is the fraction of the diffusion that has passed, in 0..1."""
        self._require(noisy, time)
        condition = self.time_embedding(time)
        x = self.stem(noisy.to(self.stem.weight.dtype).movedim(1, -1))
        skips: list[Tensor] = []
        for stack, halve in zip(self.down, self.halve, strict=True):
            skips.append(stack(x, condition=condition))
            x = halve(skips[-1])
        x = self.middle(x, condition=condition)
        for level, (stack, merge) in enumerate(zip(self.up, self.merge, strict=True), start=1):
            x = merge(x.repeat_interleave(2, 1).repeat_interleave(2, 2))
            if self.config.skips:
                x = x + self.merge_skip[level - 1](skips[-level])
            x = stack(x, condition=condition)
        out: Tensor = self.head(F.silu(self.norm(x))).movedim(-1, 1)
        return out

    def _require(self, noisy: Tensor, time: Tensor) -> None:
        require_images(noisy, self.config.image_channels, self.config.image_size)
        if time.shape != noisy.shape[:1]:
            raise UserError(f"time has shape {list(time.shape)}; give one an image, shape [{len(noisy)}]")
