"""Does a stack of layers pass signals on at their size? Singular values of its input-output Jacobian, exactly.

A stack whose singular values are all near 1 (dynamical isometry) neither shrinks nor blows up what passes through it,
forward or backward (Bachlechner et al. 2020, ReZero, arXiv 2003.04887, section 3). Letters: n values of the input.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["jacobian", "mean_squared_singular_value", "pulled_back"]


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """dy/dx of y = function(x) with x of n values and y of m, as a matrix [m, n]; exact, in the dtype of x."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no batched derivative
        exact: Tensor = torch.func.jacrev(function)(x)
    return exact.detach().reshape(-1, x.numel())


def mean_squared_singular_value(matrix: Tensor) -> float:
    """Mean square of the singular values of a square matrix [n, n]: |J|^2 / n in the Frobenius norm.

    1 for the identity and for every rotation. A ValueError where the matrix is not square.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"needs a square matrix, got one of shape {list(matrix.shape)}")
    return float(matrix.square().sum() / len(matrix))


def pulled_back(function: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> float:
    """|J^T u|^2 / |u|^2 for one random u, J = dy/dx: the mean squared singular value where J is too deep to build.

    u is standard normal, so that the numerator's mean is |J|^2 in the Frobenius norm (Hutchinson 1990); where all
    singular values are 1 the ratio is 1 for every u. x and y have the same shape.
    """
    x = x.detach().requires_grad_()
    y = function(x)
    u = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)
    (gradient,) = torch.autograd.grad(y, x, u)
    return float(gradient.square().sum() / u.square().sum())
