"""Numba's kernels on as many threads as PyTorch has."""

import threading
from collections.abc import Callable
from typing import Any

import numba
import torch

__all__ = ["call"]

_MOST = numba.get_num_threads()
"""What Numba has started with."""

_LOCK = threading.Lock()
"""Some of Numba's threading layers serve one caller at a time."""


def call(kernel: Callable[..., None], *arguments: Any) -> None:
    """A kernel that divides its work among threads by `prange`."""
    with _LOCK:
        numba.set_num_threads(min(torch.get_num_threads(), _MOST))
        kernel(*arguments)
