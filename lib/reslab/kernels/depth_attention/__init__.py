"""Attention over depth: one query a layer over the outputs of earlier layers, token by token."""

from reslab.kernels.depth_attention.op import depth_attention, implementation

__all__ = ["depth_attention", "implementation"]
