"""Rank collapse at initial weights: the exponents of theory, and what a hull allows."""

import math
from itertools import pairwise

import pytest
import torch

from reslab import collapse


@pytest.mark.parametrize("seed", range(3))
def test_attention_alone_cubes_its_distance_from_rank_one(seed: int) -> None:
    assert 2.9 < collapse.collapse_exponent(4, 32, 32, seed) < 3.2


@pytest.mark.parametrize("seed", range(3))
def test_causal_averaging_halves_it(seed: int) -> None:
    residuals = collapse.causal_uniform_residuals(40, 64, 64, seed)
    assert residuals[40] / residuals[39] == pytest.approx(0.5, abs=1e-3)
    ratios = [after / before for before, after in pairwise(residuals[30:])]
    assert ratios == pytest.approx([0.5] * 10, abs=5e-3)


def test_causal_averaging_is_the_triangular_matrix() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    averaging = torch.ones(6, 6, dtype=torch.float64).tril() / torch.arange(1, 7)[:, None]
    wanted = [collapse.residual_from_rank_one(x), collapse.residual_from_rank_one(averaging @ x)]
    assert collapse.causal_uniform_residuals(1, 6, 4, 3) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_attention_stays_in_the_box_of_its_values(seed: int) -> None:
    assert collapse.hull_excess(32, 16, seed) <= 0


def test_excess_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that do not sum to 1 leave the box."""
    plain = collapse._attend
    monkeypatch.setattr(collapse, "_attend", lambda x, score, causal: 1.5 * plain(x, score, causal) + 10)
    assert collapse.hull_excess(32, 16, 0) > 5


def test_residual_is_relative_distance_from_rank_one() -> None:
    equal = torch.ones(5, 3, dtype=torch.float64) * torch.tensor([1.0, -2.0, 3.0])
    assert collapse.residual_from_rank_one(equal) == 0
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    # x - mean is +-1/2 everywhere: l1 and linf norms are both 1, and those of x are both 1
    assert collapse.residual_from_rank_one(x) == 1
    assert collapse.residual_from_rank_one(7 * x) == 1


def test_orthogonal_values_keep_lengths() -> None:
    q = collapse._orthogonal(16, torch.Generator().manual_seed(0))
    torch.testing.assert_close(q @ q.T, torch.eye(16, dtype=torch.float64))


def test_residuals_start_near_the_size_asked_for_and_end_above_the_floor() -> None:
    small, large = (collapse.attention_only_residuals(6, 32, 32, 0, start) for start in (0.005, 0.1))
    assert large[0] / small[0] == pytest.approx(20, rel=0.5)
    assert all(after < before for before, after in pairwise(large))
    assert min(large[-1], small[-1]) >= collapse.FLOOR
    assert len(small) <= len(large) < 7


def test_spread_never_grows() -> None:
    spread = collapse.attention_only_spread(12, 64, 64, 0)
    assert len(spread) == 13
    assert all(after <= before for before, after in pairwise(spread))
    assert spread[-1] / spread[0] < 0.1


def test_results_depend_on_the_seed_alone() -> None:
    one = collapse.collapse_exponent(2, 16, 16, 0)
    torch.manual_seed(5)
    assert collapse.collapse_exponent(2, 16, 16, 0) == one != collapse.collapse_exponent(2, 16, 16, 1)


@pytest.mark.parametrize(("layers", "tokens"), [(0, 8), (4, 1)], ids=["no layer", "one token"])
def test_stack_without_a_slope_is_refused(layers: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="layer"):
        collapse.collapse_exponent(layers, tokens, 8, 0)


def test_equal_tokens_stay_equal() -> None:
    spread = collapse.attention_only_spread(2, 1, 8, 0)
    assert spread == [0, 0, 0]
    assert math.isfinite(collapse.hull_excess(1, 8, 0))
