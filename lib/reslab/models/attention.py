"""Multi-head self-attention, and the key-value cache of a causal one.

Letters: B batch, T tokens, P past tokens, d width, H heads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.initialisation import Weights

__all__ = ["Attention", "KeyValueCache"]


class KeyValueCache:
    """Keys and values of past tokens, one slot for each attention in the order they run.

    The slots belong to the turn, not to a layer's number: a model whose layers were dropped, swapped or repeated
    before the first pass caches as well as the whole one. Nothing is overwritten or detached, so that
    gradients pass through.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """How many tokens have been seen."""
        self._slots: list[tuple[Tensor, Tensor]] = []
        self._turn = 0

    def begin(self, tokens: int) -> None:
        """Start a pass over `tokens` new tokens."""
        self.tokens, self._turn = self.tokens + tokens, 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Past and new keys and values [B, H, P + T, d/H] of the attention whose turn it is."""
        if self._turn < len(self._slots):
            past_key, past_value = self._slots[self._turn]
            key, value = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
            self._slots[self._turn] = (key, value)
        else:
            self._slots.append((key, value))
        self._turn += 1
        return key, value


class Attention(nn.Module):
    """Multi-head self-attention, [B, T, d] -> [B, T, d]; where `causal`, no token sees a later one.

    PyTorch's fused kernel has neither second derivatives nor forward-mode ones on the CPU: take those under
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def values(self, x: Tensor) -> Tensor:
        """The value vectors [B, T, d] of x, all heads side by side."""
        return F.linear(x, self.query_key_value.weight.chunk(3)[2])

    def forward(self, x: Tensor, values: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """`values` [B, T, d] stand in for the own ones; `cache` holds the tokens before x and is extended by x."""
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self._packed(x, values))
        mask = None
        if cache is not None:
            key, value = cache.extend(key, value)
            mask = _causal_mask(query, key) if query.shape[-2] != key.shape[-2] else None
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.causal and mask is None)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(-2))
        return out

    def _packed(self, x: Tensor, values: Tensor | None) -> tuple[Tensor, ...]:
        """Query, key and value, each [B, T, d]."""
        if values is None:
            return self.query_key_value(x).chunk(3, dim=-1)
        weight = self.query_key_value.weight
        return *F.linear(x, weight[: 2 * len(weight) // 3]).chunk(2, dim=-1), values

    def weights_by_role(self) -> Weights:
        query, key, value = self.query_key_value.weight.chunk(3)
        return {"query_key": [query, key], "value": [value], "output": [self.project.weight]}


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """True where one of the T newest tokens may look, [T, P + T]."""
    tokens, all_tokens = query.shape[-2], key.shape[-2]
    return torch.ones(tokens, all_tokens, dtype=torch.bool, device=query.device).tril(all_tokens - tokens)
