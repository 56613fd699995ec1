"""Diffusion Transformer for small images (Peebles & Xie 2023, DiT, arXiv 2212.09748): predicts the noise.

Letters: B batch, c image channels, n image size, N patches, d width, L blocks; k [B, d] the condition.
"""

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.image_encoder import PatchSettings, reset_patch_weights, to_images, to_patches
from reslab.models.initialisation import embedding_scale, initialise
from reslab.models.layers import make_norm
from reslab.models.transformer import TransformerSettings, attention_and_mlp
from reslab.residuals import Stack, reset_connections
from reslab.schema import UserError

__all__ = ["Conditioned", "ConditionedAttention", "DiffusionConfig", "DiffusionTransformer", "TimeEmbedding"]

FREQUENCIES = 64
"""Sines, and as many cosines, that tell the time."""

FINEST_STEPS = 1000
"""Steps that the frequencies are made for: those of Ho et al. 2020, arXiv 2006.11239."""


class TimeEmbedding(nn.Module):
    """MLP of sines and cosines of the time: time [B] in 0..1 -> [B, width].

    As Ho et al. 2020 (arXiv 2006.11239, section 4) and DiT embed a step t of T = 1000, of which time is the fraction
    t/T: angles t / 10000^(i/64), i = 0..63.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(2 * FREQUENCIES, width)
        self.down = nn.Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        if time.ndim != 1 or not time.is_floating_point():
            raise UserError(
                f"time is {time.dtype} of shape {list(time.shape)}; give one number in 0..1 an image, e.g. step / steps"
            )
        steps = torch.arange(FREQUENCIES, device=time.device)
        frequencies = torch.exp(-math.log(10000) / FREQUENCIES * steps)
        angles = FINEST_STEPS * time.float().unsqueeze(-1) * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        out: Tensor = self.down(F.silu(self.up(waves.to(self.up.weight.dtype))))
        return out


class Conditioned(nn.Module):
    """gate(k) * f((1 + scale(k)) * h + shift(k)), [B, N, d] -> [B, N, d] (DiT, section 3.2, adaLN).

    f is the `branch`, whose forward takes h; shift, scale and gate [B, d] are linear in SiLU(k), and there is no gate
    unless `gated`. h comes out of a norm that has no gain of its own.
    """

    def __init__(self, branch: nn.Module, width: int, gated: bool) -> None:
        super().__init__()
        self.branch = branch
        self.gated = gated
        self.modulation = nn.Linear(width, (3 if gated else 2) * width)

    def reset_parameters(self) -> None:
        """Shift, scale and gate 0: the branch is unconditioned, and closed where gated."""
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, *gate = self._modulations(condition)
        return self._gated(self.branch((1 + scale) * x + shift), gate)

    def _modulations(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and, where gated, gate, each [B, 1, d]."""
        return self.modulation(F.silu(condition)).unsqueeze(-2).chunk(3 if self.gated else 2, -1)

    def _gated(self, update: Tensor, gate: list[Tensor]) -> Tensor:
        return gate[0] * update if gate else update


class ConditionedAttention(Conditioned):
    """As `Conditioned`, for an attention: connections may join its values."""

    def values(self, x: Tensor, condition: Tensor) -> Tensor:
        """The value vectors [B, N, d] of what the attention gets: x, modulated."""
        shift, scale, *_ = self._modulations(condition)
        out: Tensor = self.branch.values((1 + scale) * x + shift)  # type: ignore[operator]
        return out

    def forward(self, x: Tensor, condition: Tensor, values: Tensor | None = None) -> Tensor:
        shift, scale, *gate = self._modulations(condition)
        return self._gated(self.branch((1 + scale) * x + shift, values=values), gate)


class DiffusionConfig(PatchSettings, TransformerSettings):
    """A diffusion Transformer in full."""

    kind: Literal["diffusion_transformer"] = "diffusion_transformer"
    classes: int = Field(ge=1)
    """Labels an image can have; 'no label' is one more, for guidance (Ho & Salimans 2022, arXiv 2207.12598)."""
    conditioning: Literal["adaln_zero", "adaln"] = "adaln_zero"
    """`adaln_zero`: gated branches, and all gates and the head start at 0; `adaln`: no gates, and a drawn head.

    With placement sandwich and peri the norm on the update undoes the size of a small gate: branches open at once.
    """

    @model_validator(mode="after")
    def _gains_come_from_the_condition(self) -> "DiffusionConfig":
        if self.norm_gain != 1:
            raise ValueError(f"norm_gain {self.norm_gain:g}: this model's norms have no gain; leave it at 1")
        return self

    @property
    def relative_cost(self) -> float:
        """Multiplications per example and block, for planning."""
        modulation = 2 * (3 if self.conditioning == "adaln_zero" else 2) * self.width**2
        return self.patches * self.width * (12 * self.width + 2 * self.patches) + modulation

    def make_plain_norm(self) -> nn.Module:
        """A norm over the stream's width without gain and bias, which come from the condition."""
        return make_norm(self.norm, self.width, self.norm_eps, affine=False)


class DiffusionTransformer(nn.Module):
    """Noisy images [B, c, n, n] at a time, with a label -> the noise in them [B, c, n, n].

    With `adaln_zero` it starts at exactly 0, so that the mean square error is that of the noise itself; gradients
    then reach the head first, next the gates and the final modulation, and last the branches.
    """

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Linear(config.patch_values, config.width)
        self.position_embedding = nn.Embedding(config.patches, config.width)
        self.time_embedding = TimeEmbedding(config.width)
        self.label_embedding = nn.Embedding(config.classes + 1, config.width)
        branches = [self._branches() for _ in range(config.depth)]
        self.stack = Stack(branches, config.width, config, config.make_plain_norm)
        self.norm = config.make_plain_norm() if config.final_norm else nn.Identity()
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self.head = nn.Linear(config.width, config.patch_values)
        self.reset_parameters()

    def _branches(self) -> dict[str, nn.Module]:
        """One block's sublayers, by name."""
        width, gated = self.config.width, self.config.conditioning == "adaln_zero"
        plain = attention_and_mlp(self.config, causal=False)
        return {
            "attention": ConditionedAttention(plain["attention"], width, gated),
            "mlp": Conditioned(plain["mlp"], width, gated),
        }

    def reset_parameters(self) -> None:
        """Draw all weights anew; the only place that knows how they start."""
        config = self.config
        initialise(self, config.init_std, config.weight_init, config.sublayers, causal=False)
        scale = embedding_scale(config.weight_init, config.sublayers, causal=False)
        reset_patch_weights(self.patch_embedding, self.position_embedding, scale)
        nn.init.normal_(self.label_embedding.weight, std=config.init_std)  # as the maps that embed the time
        nn.init.zeros_(self.modulation.weight)
        for module in self.modules():
            if isinstance(module, Conditioned):
                module.reset_parameters()
        if config.conditioning == "adaln_zero":
            nn.init.zeros_(self.head.weight)
        reset_connections(self)  # last, so that what they draw changes no other weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.stack.blocks

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor | None = None) -> Tensor:
        """`time` [B] is the fraction of the diffusion that has passed, in 0..1; `label` [B] are integers.

        None is no label for all. A label equal to `classes` is 'no label' too, so that a batch may drop some.
        """
        patches = to_patches(noisy, self.config)
        condition = self._condition(time, label, len(noisy))
        tokens = self.patch_embedding(patches.to(self.patch_embedding.weight.dtype)) + self.position_embedding.weight
        hidden = self.norm(self.stack(tokens, condition=condition))
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(-2).chunk(2, -1)
        return to_images(self.head((1 + scale) * hidden + shift), self.config)

    def _condition(self, time: Tensor, label: Tensor | None, batch: int) -> Tensor:
        """k [B, d], the sum of what time and label are embedded as."""
        if label is None:
            label = torch.full((batch,), self.config.classes, device=time.device)
        for name, given in (("time", time), ("label", label)):
            if given.shape != (batch,):
                raise UserError(f"{name} has shape {list(given.shape)}; give one an image, shape [{batch}]")
        condition: Tensor = self.time_embedding(time) + self.label_embedding(label)
        return condition
