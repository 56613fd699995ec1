"""Small pre-activation ResNet (He et al. 2016, arXiv 1603.05027) for 8 x 8 images.

Letters: B batch, c channels, L residual blocks (two convolutions each).
"""

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from reslab.models.image_encoder import require_images
from reslab.residuals import ResidualSettings, Stack, connection_modules, reset_connections

__all__ = ["ResNet", "ResNetConfig"]


class ResNetConfig(ResidualSettings):
    kind: Literal["resnet"] = "resnet"
    channels: int = Field(ge=1)
    depth: int = Field(ge=1)
    """L, the number of residual blocks; the net has 2L + 1 convolutions."""
    classes: int = Field(ge=2)
    has_attention = False
    placement: Literal["none"] = "none"
    """The branches bring their own norms."""

    @model_validator(mode="after")
    def _connection_fits_depth(self) -> "ResNetConfig":
        self.connection.options.require(self.depth, self.channels)
        return self

    @property
    def relative_cost(self) -> float:
        """Multiplications per example and block, for planning; small convolutions run at a quarter of the speed."""
        return 4 * 64 * 18 * self.channels**2


def _convolution(channels_in: int, channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)


class _Branch(nn.Sequential):
    """Norm, ReLU, convolution, twice: [B, 8, 8, c] -> [B, 8, 8, c], channels last as on every stream."""

    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            _convolution(channels, channels),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            _convolution(channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


class ResNet(nn.Module):
    """Images [B, 1, 8, 8] -> logits [B, classes]."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = _convolution(1, config.channels)
        branches = [{"convolutions": _Branch(config.channels)} for _ in range(config.depth)]
        self.stack = Stack(branches, config.channels, config, nn.Identity)
        self.norm = nn.BatchNorm2d(config.channels)
        self.head = nn.Linear(config.channels, config.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """He-normal convolutions (He et al. 2015, arXiv 1502.01852); PyTorch's defaults elsewhere."""
        in_connections = connection_modules(self)
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module not in in_connections:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        self.head.reset_parameters()
        reset_connections(self)  # last, so that what they draw changes no other weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.stack.blocks

    def forward(self, images: Tensor) -> Tensor:
        require_images(images, 1, 8)
        hidden = self.stack(self.stem(images).movedim(1, -1)).movedim(-1, 1)
        pooled = self.norm(hidden).relu().mean((2, 3))
        logits: Tensor = self.head(pooled)
        return logits
