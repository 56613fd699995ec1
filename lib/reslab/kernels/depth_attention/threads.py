"""Numba's kernels on as many threads as PyTorch has."""

import threading
from collections.abc import Callable
from typing import Any

import numba
import torch

__all__ = ["call"]

_MOST = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
"""What Numba starts with. Not asked of `get_num_threads`, which starts it; see `call`."""

_LOCK = threading.Lock()
"""Some of Numba's threading layers serve one caller at a time."""


def call(kernel: Callable[..., None], *arguments: Any) -> None:
    """A kernel that divides its work among threads by `prange`."""
    threads = torch.get_num_threads()
    with _LOCK:
        numba.set_num_threads(min(threads, _MOST))
        kernel(*arguments)
    if torch.get_num_threads() != threads:  # Numba's OpenMP layer, when it starts, sets what PyTorch shares with it
        torch.set_num_threads(threads)
