"""Decoder language model: causal self-attention and MLP sublayers on a residual stream.

Letters: B batch, T tokens, V vocabulary, d width, H heads, L blocks (two sublayers each).
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from reslab.models.attention import KeyValueCache
from reslab.models.initialisation import embedding_scale, initialise, stream_writers
from reslab.models.transformer import TransformerSettings, TransformerShape, attention_and_mlp
from reslab.residuals import Stack, reset_connections
from reslab.schema import UserError

__all__ = ["Decoder", "DecoderConfig", "DecoderShape"]


class DecoderShape(TransformerShape):
    """What the claims' decoders have in common."""

    context: int = Field(ge=1)
    """T, tokens per sequence."""
    embedding: Literal["unit", "gpt2"] = "unit"
    """Standard deviation of the token embedding at the start: 1, or GPT-2's 0.02; positions have half."""
    tied_head: bool = False

    @model_validator(mode="after")
    def _tied_head_fits_embedding(self) -> "DecoderShape":
        if self.tied_head and self.embedding == "unit":
            raise ValueError("tied_head with embedding: unit starts with huge logits; use embedding: gpt2")
        return self


class DecoderConfig(DecoderShape, TransformerSettings):
    """A decoder in full."""

    kind: Literal["decoder"] = "decoder"
    vocabulary: int = Field(ge=2)
    embedding_factor: float = Field(default=1.0, gt=0)
    """The embedding is multiplied with it as it enters the stream (sqrt(d) in Gemma, arXiv 2403.08295)."""
    embedding_offset: float = 0.0
    """Added to every channel of the embedding: a layernorm takes it off again, but the stream has to carry it."""

    @property
    def relative_cost(self) -> float:
        """Multiplications per example and block, for planning."""
        return self.context * self.width * (12 * self.width + 2 * self.context)


class Decoder(nn.Module):
    """Token ids [B, T] -> logits [B, T, V].

    Weights are drawn module by module in a fixed order, so that two decoders built at the same
    seed share the initial values of all weights they have in common, whatever their connections.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.stack = Stack(
            [self._branches(config) for _ in range(config.depth)], config.width, config, config.make_stack_norm
        )
        self.norm = config.make_norm() if config.final_norm else nn.Identity()
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.reset_parameters()

    def _branches(self, config: DecoderConfig) -> Mapping[str, nn.Module]:
        """One block's sublayers, by name."""
        return attention_and_mlp(config, causal=True)

    def reset_parameters(self) -> None:
        """Draw all weights anew; the only place that knows how they start."""
        config = self.config
        if config.tied_head:  # here, for `to_empty` parts them
            self.head.weight = self.token_embedding.weight
        initialise(self, config.init_std, config.weight_init, config.sublayers)
        scale = 1.0 if config.embedding == "unit" else 0.02
        scale *= embedding_scale(config.weight_init, config.sublayers)
        nn.init.normal_(self.token_embedding.weight, std=scale)
        nn.init.normal_(self.position_embedding.weight, std=scale / 2)  # GPT-2's ratio
        reset_connections(self)  # last, so that what they draw changes no other weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.stack.blocks

    def stream_writers(self) -> list[Tensor]:
        """The matrices whose outputs join the stream: attention output and MLP down."""
        return stream_writers(self)

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """`cache` holds what came before `tokens`, and is extended by them."""
        first = 0 if cache is None else cache.tokens
        self._require_room(first + tokens.shape[1])
        if cache is not None:
            cache.begin(tokens.shape[1])
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        if self.config.embedding_factor != 1 or self.config.embedding_offset != 0:
            x = x * self.config.embedding_factor + self.config.embedding_offset
        hidden = self.stack(x) if cache is None else self.stack(x, cache=cache)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _require_room(self, tokens: int) -> None:
        if tokens > self.config.context:
            raise UserError(
                f"{tokens} tokens are more than the decoder's context of {self.config.context}; "
                f"give fewer, or build it with a larger context"
            )

    def new_cache(self) -> KeyValueCache | None:
        """What `generate` remembers tokens in."""
        return KeyValueCache()

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """tokens [B, T] and `count` more, [B, T + count]: the likeliest at temperature 0, else drawn."""
        if tokens.ndim != 2 or not tokens.shape[1] or count < 0 or temperature < 0:
            raise UserError(
                f"generate from tokens {list(tokens.shape)}, count {count}, temperature {temperature}: give tokens "
                f"[B, T] with T >= 1, and numbers not below 0"
            )
        self._require_room(tokens.shape[1] + count)
        cache, fed = self.new_cache(), tokens
        for _ in range(count):
            logits = self(tokens if cache is None else fed, cache)[:, -1]
            if temperature == 0:
                fed = logits.argmax(-1, keepdim=True)
            else:
                fed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, fed], 1)
        return tokens
