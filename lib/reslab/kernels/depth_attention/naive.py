"""The definition of depth attention, in plain PyTorch: any device and dtype, any number of derivatives.

Kimi Team 2026, "Attention Residuals", arXiv 2603.15031, eq. 2 to 4. Letters: n sources v_i [..., d], query w [d],
out h [..., d]; mean over the d channels of a token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["depth_attention"]


def depth_attention(query: Tensor, sources: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """h = sum_i a_i v_i with a = softmax_i(s_i), s_i = w . v_i / sqrt(mean(v_i^2) + eps); and ln sum_i exp(s_i) [...].

    Computed in float32, or in float64 where the sources are; h has the dtype of the sources.
    """
    values = torch.stack(list(sources))  # [n, ..., d]
    wide = values if values.dtype == torch.float64 else values.float()
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scores = (keys * query.to(wide.dtype)).sum(-1)  # [n, ...]
    mixed = (scores.softmax(0).unsqueeze(-1) * wide).sum(0)
    return mixed.to(values.dtype), scores.logsumexp(0)
