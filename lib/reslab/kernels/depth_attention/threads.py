"""Numba's kernels, compiled once for good and called on as many threads as PyTorch has.

A kernel takes the address of its int64 arguments and a range of tokens. One small function divides the tokens and jumps
to kernels by address: linked to them, it would be compiled, with all of them, for every combination.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch

from reslab.kernels.depth_attention.simd import FAST, jump

__all__ = ["call", "entry"]

AT_A_TIME = 64
"""Tokens that go through several kernels before the next ones do."""

_MOST = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
"""What Numba starts with. Not asked of `get_num_threads`, which starts it; see `call`."""

_LOCK = threading.Lock()
"""Some of Numba's threading layers serve one caller at a time."""


@cache
def _digest() -> str:
    """Of this folder's code. Numba's cache looks at one file only."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _own(function: Any, constants: dict[str, Any], name: str) -> FunctionType:
    """A copy of a function, cached under its `name`, with `constants` in place of globals."""
    own = FunctionType(function.__code__, function.__globals__ | constants, function.__name__)
    own.__qualname__ = f"{function.__name__}_{name}_{_digest()}"
    own.__module__ = function.__module__
    return own


def entry(function: Callable[[Any, Any, Any], None], constants: dict[str, Any], name: str) -> Any:
    """A kernel with an `address`: (address of its arguments, first token, token after the last).

    `constants` take the place of globals; `name` says which they are.
    """
    compile_ = numba.cfunc("void(int64, int64, int64)", cache=True, fastmath=FAST, error_model="numpy")
    return compile_(_own(function, constants, name))


def go_through(table: Any, steps: Any, tokens: Any, chunk: Any) -> None:
    """`table` begins with the kernels' addresses and the places in it of the arguments of each."""
    for part in numba.prange((tokens + chunk - 1) // chunk):
        for start in range(part * chunk, min((part + 1) * chunk, tokens), AT_A_TIME):
            stop = min(start + AT_A_TIME, min((part + 1) * chunk, tokens))
            for step in range(steps):
                jump(table[step], table.ctypes.data + 8 * table[steps + step], start, stop)


@cache
def _compiled(parallel: bool) -> Any:
    own = _own(go_through, {}, "side_by_side" if parallel else "in_turn")
    return numba.njit("void(int64[::1], int64, int64, int64)", parallel=parallel, nogil=True, cache=True)(own)


def _table(steps: Sequence[tuple[int, tuple[int, ...]]]) -> np.ndarray:
    places, numbers = [], []
    for _, arguments in steps:
        places.append(2 * len(steps) + len(numbers))
        numbers += arguments
    return np.array([*(address for address, _ in steps), *places, *numbers], dtype=np.int64)


def call(steps: Sequence[tuple[int, tuple[int, ...]]], tokens: int, chunk: int) -> None:
    """Kernels, by address, each with its arguments, one after the other on a few tokens at a time.

    Threads take whole chunks of tokens.
    """
    threads = torch.get_num_threads()
    if min(threads, _MOST) == 1:  # starting Numba's threads for one takes as long as a small kernel
        _compiled(False)(_table(steps), len(steps), tokens, chunk)
        return
    with _LOCK:
        numba.set_num_threads(min(threads, _MOST))
        _compiled(True)(_table(steps), len(steps), tokens, chunk)
    if torch.get_num_threads() != threads:  # Numba's OpenMP layer, when it starts, sets what PyTorch shares with it
        torch.set_num_threads(threads)
