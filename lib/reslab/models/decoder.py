"""Decoder language model: causal self-attention and MLP sublayers on a residual stream.

Letters: B batch, T tokens, V vocabulary, d width, H heads, L blocks (two sublayers each).
"""

from functools import partial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.residuals import ConnectionConfig, Placement, Residual, connect, connection_modules, reset_connections
from reslab.schema import Settings

__all__ = ["CausalAttention", "Decoder", "DecoderConfig", "DecoderShape", "Mlp"]


class DecoderShape(Settings):
    """What the claims' decoders have in common."""

    width: int = Field(ge=1)
    """d, the width of the residual stream."""
    heads: int = Field(ge=1)
    context: int = Field(ge=1)
    """T, tokens per sequence."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    embedding: Literal["unit", "gpt2"] = "unit"
    """Standard deviation of the token embedding at the start: 1, or GPT-2's 0.02; positions have half."""
    init_std: float = Field(gt=0)
    """Standard deviation of all matrices at the start; GPT-2 has 0.02 at width 768, 0.55/sqrt(width)."""
    weight_init: Literal["plain", "depth_scaled"] = "depth_scaled"
    """depth_scaled: the matrices that write to the stream start smaller by 1/sqrt(2L) (GPT-2)."""
    tied_head: bool = False

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "DecoderShape":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        return self

    @model_validator(mode="after")
    def _tied_head_fits_embedding(self) -> "DecoderShape":
        if self.tied_head and self.embedding == "unit":
            raise ValueError("tied_head with embedding: unit starts with huge logits; use embedding: gpt2")
        return self


class DecoderConfig(DecoderShape):
    """A decoder in full."""

    kind: Literal["decoder"] = "decoder"
    vocabulary: int = Field(ge=2)
    depth: int = Field(ge=1)
    """L, the number of blocks."""
    connection: ConnectionConfig = ConnectionConfig()
    placement: Placement = "pre"

    @property
    def relative_cost(self) -> float:
        """Multiplications per example and block, for planning."""
        return self.context * self.width * (12 * self.width + 2 * self.context)


class CausalAttention(nn.Module):
    """Multi-head causal self-attention, [B, T, d] -> [B, T, d]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.query_key_value(x).chunk(3, dim=-1)  # each [B, T, d]
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in packed)  # [B, H, T, d/H]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(-2))
        return out

    @property
    def stream_writer(self) -> nn.Linear:
        """The matrix whose output is added to the stream."""
        return self.project


class Mlp(nn.Module):
    """GELU MLP with a hidden width of 4 d, [B, T, d] -> [B, T, d]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out

    @property
    def stream_writer(self) -> nn.Linear:
        """The matrix whose output is added to the stream."""
        return self.down


class Block(nn.Module):
    """An attention sublayer and an MLP sublayer, each with its own connection: what `torch.compile` compiles."""

    def __init__(self, attention: Residual, mlp: Residual) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, stream: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(stream))
        return out


def _norm(config: DecoderShape) -> nn.Module:
    return nn.LayerNorm(config.width) if config.norm == "layernorm" else nn.RMSNorm(config.width, eps=1e-5)


class Decoder(nn.Module):
    """Token ids [B, T] -> logits [B, T, V].

    Weights are drawn module by module in a fixed order, so that two decoders built at the same
    seed share the initial values of all weights they have in common, whatever their connections.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        norm = partial(_norm, config)

        def sublayer(branch: nn.Module) -> Residual:
            return Residual(branch, connect(config.connection), norm, config.placement)

        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            Block(sublayer(CausalAttention(config.width, config.heads)), sublayer(Mlp(config.width)))
            for _ in range(config.depth)
        )
        self.norm = norm()
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.reset_parameters()
        if config.tied_head:
            self.head.weight = self.token_embedding.weight

    def reset_parameters(self) -> None:
        """Draw all weights anew; the only place that knows how they start."""
        in_connections = connection_modules(self)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module not in in_connections:
                nn.init.normal_(module.weight, std=self.config.init_std)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
        scale = 1.0 if self.config.embedding == "unit" else 0.02
        nn.init.normal_(self.token_embedding.weight, std=scale)
        nn.init.normal_(self.position_embedding.weight, std=scale / 2)  # GPT-2's ratio
        if self.config.weight_init == "depth_scaled":
            with torch.no_grad():
                for writer in self.stream_writers():
                    writer.weight /= (2 * self.config.depth) ** 0.5
        reset_connections(self)  # last, so that what they draw changes no other weight

    def stream_writers(self) -> list[nn.Linear]:
        """The matrices whose outputs join the stream: attention output and MLP down."""
        return [module.stream_writer for module in self.modules() if isinstance(module, CausalAttention | Mlp)]

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits
