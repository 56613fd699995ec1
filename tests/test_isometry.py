"""Singular values of Jacobians, against matrices whose answer is known."""

import pytest
import torch
from torch import Tensor

from reslab.isometry import jacobian, mean_squared_singular_value, pulled_back
from reslab.models.attention import Attention

torch.set_num_threads(1)


def diagonal(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).reshape(1, 2, 2)


X = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]], dtype=torch.float64)


def test_jacobian_of_a_diagonal_map() -> None:
    found = jacobian(diagonal, X)
    assert found.tolist() == torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
    assert mean_squared_singular_value(found) == (1 + 4 + 9 + 16) / 4


def test_mean_square_is_that_of_the_singular_values() -> None:
    matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert mean_squared_singular_value(matrix) == pytest.approx(float(torch.linalg.svdvals(matrix).square().mean()))


def test_matrix_that_is_not_square_is_refused() -> None:
    with pytest.raises(ValueError, match=r"square matrix, got one of shape \[2, 3\]"):
        mean_squared_singular_value(torch.zeros(2, 3))


def test_jacobian_of_attention_is_that_of_finite_differences() -> None:
    """The fused kernel has no batched derivative, so another one is taken."""
    torch.manual_seed(0)
    attention = Attention(4, 2, causal=True).double()
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    found = jacobian(attention, x)
    for column in range(12):
        step = torch.zeros(12, dtype=torch.float64)
        step[column] = 1e-6
        moved = (attention(x + step.reshape(x.shape)) - attention(x - step.reshape(x.shape))).detach().flatten() / 2e-6
        assert torch.allclose(found[:, column], moved, atol=1e-7)


def test_pulled_back_is_one_for_rotations_and_their_scale_squared_else() -> None:
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    for seed in range(3):
        assert pulled_back(lambda x: x @ rotation, torch.ones(2, 4, dtype=torch.float64), seed) == pytest.approx(1)
        assert pulled_back(lambda x: 3 * x, torch.ones(2, 4, dtype=torch.float64), seed) == pytest.approx(9)


def test_pulled_back_is_the_mean_squared_singular_value_on_average() -> None:
    found = [pulled_back(diagonal, X, seed) for seed in range(2000)]
    assert sum(found) / len(found) == pytest.approx(7.5, rel=0.05)
