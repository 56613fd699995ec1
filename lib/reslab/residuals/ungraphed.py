"""The call that torch.compile leaves out of its graphs.

Import it where a trace comes to it: it imports torch._dynamo, which takes seconds, and most of what imports `reslab`
compiles nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["call"]

R = TypeVar("R")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., R], *args: Any) -> R:
    """function(*args), run as plain PyTorch also inside compiled code."""
    return function(*args)
