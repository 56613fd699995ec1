"""Kernels on as many threads as PyTorch has."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch

__all__ = ["spread"]


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Of this process: a fork has none of its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="reslab-kernel")


def spread(kernel: Callable[..., None], tokens: int, unit: int, *arguments: Any) -> None:
    """Call `kernel(*arguments, start, stop)` on parts of the tokens, each of whole units but the last.

    The kernel is one that lets go of the interpreter's lock.
    """
    units = -(-tokens // unit)
    threads = min(torch.get_num_threads(), units)
    if threads <= 1:
        kernel(*arguments, 0, tokens)
        return
    edges = [min(tokens, unit * (units * part // threads)) for part in range(threads + 1)]
    pool = _pool(torch.get_num_threads() - 1, os.getpid())
    others = [pool.submit(kernel, *arguments, *part) for part in zip(edges[1:], edges[2:], strict=False)]
    kernel(*arguments, edges[0], edges[1])
    for other in others:
        other.result()
