"""Block Influence, angular distance and drop orders against values by hand; the prediction at initial weights."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reslab import influence
from reslab.schema import UserError
from reslab.surgery import skipped
from variants import decoder, tokens


def turned(*angles: float) -> Tensor:
    """One token [1, 1, 2] at each angle (as a multiple of pi) from the x axis; lengths differ, and do not count."""
    rows = [[(1 + i) * math.cos(math.pi * a), (1 + i) * math.sin(math.pi * a)] for i, a in enumerate(angles)]
    return torch.tensor(rows, dtype=torch.float64)


# --- how far a block turns the stream -------------------------------------------------------------


def test_block_influence_is_one_minus_the_mean_cosine() -> None:
    x, y = turned(0, 0, 0), turned(0, 1 / 3, 1)
    assert influence.block_influence(x, y) == pytest.approx(1 - (1 + 0.5 - 1) / 3)
    assert influence.block_influence(x, 7 * x) == pytest.approx(0, abs=1e-15)


def test_angular_distance_is_the_mean_angle_over_pi() -> None:
    x, y = turned(0, 0, 0), turned(0, 1 / 3, 1)
    assert influence.angular_distance(x, y) == pytest.approx((0 + 1 / 3 + 1) / 3)
    assert influence.angular_distance(x, 3 * x) == 0, "rounding beyond a cosine of 1 is no angle"


def test_what_is_not_finite_is_not_a_number() -> None:
    x = torch.full((2, 3), math.nan)
    assert math.isnan(influence.block_influence(x, x))
    assert math.isnan(influence.angular_distance(x, x))


def test_prediction_is_exact_for_updates_at_right_angles() -> None:
    """x_1 = (3, 0), x_2 = (3, 4): cos = 3/5, and sqrt(9 / 25) = 3/5."""
    xs = [torch.tensor([[3.0, 0.0]]), torch.tensor([[3.0, 4.0]])]
    assert influence.predicted_influences(xs) == pytest.approx([0.4])
    assert influence.block_influences(xs) == pytest.approx([0.4])


def test_block_influence_at_the_start_follows_from_the_streams_growth() -> None:
    """1 - cos(x_l, x_{l+1}) = 1 - sqrt(S_l / S_{l+1}), S = E|x|^2: an untrained deep layer looks redundant too."""
    model = decoder("add", depth=16, width=64, vocabulary=256, context=32, heads=1, weight_init="plain", init_std=0.1)
    xs = influence.reads(model, torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0)))
    measured = influence.block_influences(xs)
    assert measured == pytest.approx(influence.predicted_influences(xs), abs=0.03)
    assert measured[0] > 4 * measured[-1]


def test_reads_are_the_streams_of_each_block_and_leave_the_model_alone() -> None:
    model = decoder("add", depth=3).train()
    xs = influence.reads(model, tokens())
    with torch.no_grad():
        by_hand = [model.token_embedding(tokens()) + model.position_embedding(torch.arange(tokens().shape[1]))]
        for block in model.blocks:
            by_hand.append(block(by_hand[-1]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(xs, by_hand, strict=True))
    assert model.training
    assert not xs[-1].requires_grad


# --- orders ---------------------------------------------------------------------------------------


def test_lowest_influence_goes_first_and_of_equal_ones_the_earlier() -> None:
    assert influence.by_influence([0.3, 0.1, 0.2, 0.1]) == (1, 3, 2, 0)


def test_greedy_takes_what_costs_least_after_those_before_it() -> None:
    """Blocks 1 and 2 stand in for each other: each is free alone, together they cost 5."""
    asked = []

    def cost(gone: frozenset[int]) -> float:
        asked.append(gone)
        return (5 if {1, 2} <= gone else 0) + (3 if 0 in gone else 0) + (1 if 3 in gone else 0)

    assert influence.by_loss(cost, 4, 3) == (1, 3, 0)
    assert len(asked) == 4 + 3 + 2
    assert all(isinstance(gone, frozenset) for gone in asked)


@pytest.mark.parametrize("kind", ["add", "attnres full"])
def test_influence_measured_again_is_that_of_the_model_without_the_first(kind: str) -> None:
    model = decoder(kind, depth=4, init_std=0.3, weight_init="plain")
    first, second = influence.by_influence_again(model, model.blocks, tokens(), 2)
    assert first == influence.by_influence(influence.block_influences(influence.reads(model, tokens())))[0]
    left = [i for i in range(4) if i != first]
    with skipped(model.blocks, first):
        influences = influence.block_influences(influence.reads(model, tokens()))
    assert second == left[int(np.argmin(influences))]


def test_nearest_run_turns_the_stream_least() -> None:
    """Angles of x_0 ... x_4: the single nearest neighbours are 2 and 3, the nearest two apart are 1 and 3."""
    xs = [turned(angle) for angle in (0.0, 0.5, 0.4, 0.41, 0.95)]
    assert influence.nearest_run(xs, 1) == {2}
    assert influence.nearest_run(xs, 2) == {1, 2}
    assert influence.nearest_run(xs, 3) == {0, 1, 2}, "0.41 against 0.45"


def test_a_random_order_is_the_same_for_the_same_seed() -> None:
    assert sorted(influence.random_order(6, 0)) == list(range(6))
    assert influence.random_order(6, 0) == influence.random_order(6, 0) != influence.random_order(6, 1)


def test_sets_are_the_beginnings_of_an_order() -> None:
    assert influence.first_of((2, 0, 1), 2) == [{2}, {0, 2}]


@pytest.mark.parametrize("count", [0, 4])
def test_none_and_all_blocks_are_refused(count: int) -> None:
    calls: list[Any] = [
        lambda: influence.by_loss(lambda gone: 0.0, 4, count),
        lambda: influence.nearest_run([turned(0.0)] * 5, count),
    ]
    for call in calls:
        with pytest.raises(UserError, match=f"{count} of 4 blocks to be dropped; drop at least one and keep"):
            call()
