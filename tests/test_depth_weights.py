"""Depth weights against the definition, and what is read off them against values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from reslab.depth_weights import depth_weights, distance, sharpness, times_uniform
from reslab.kernels.depth_attention import naive
from reslab.probes import stacks
from reslab.residuals import AttnRes, ConnectionConfig
from reslab.residuals.depth_attention import KEY_EPS
from reslab.schema import UserError
from variants import decoder, perturbed, tokens

NAN = math.nan


def sources_and_queries(model: torch.nn.Module, inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """v_0 to v_S, and the query of every read."""
    seen: list[Tensor] = []
    (stack,) = stacks(model)
    handles = [stack.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))]
    for sublayer in stack.sublayers():
        handles.append(sublayer.branch.register_forward_hook(lambda module, inputs, out: seen.append(out)))
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    reads = [*(sublayer.connection for sublayer in stack.sublayers()), stack.ends.output]
    return seen, [read.weights.query for read in reads if isinstance(read, AttnRes)]


@pytest.mark.parametrize("kernel", ["auto", "naive"])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_weights_are_those_of_the_definition(block: int, kernel: str) -> None:
    model = decoder(ConnectionConfig("attnres", block=block, kernel=kernel))
    perturbed(model, 0.5)
    inputs = tokens()
    outputs, queries = sources_and_queries(model, inputs)
    found = depth_weights(model, inputs)
    assert found.shape == (7, 1 + math.ceil(6 / block))
    for read, query in enumerate(queries):
        blocks = [outputs[1 + at : 1 + min(at + block, read)] for at in range(0, read, block)]
        sources = [outputs[0], *(torch.stack(block).sum(0) for block in blocks)]
        with torch.no_grad():
            total = naive.depth_attention(query, sources, KEY_EPS)[1]
            scores = [naive.depth_attention(query, [source], KEY_EPS)[1] for source in sources]
        expected = [float((score - total).exp().mean()) for score in scores]
        assert found[read, : len(sources)] == pytest.approx(expected, rel=1e-4)
        assert np.isnan(found[read, len(sources) :]).all()


def test_untrained_weights_are_uniform_and_looking_changes_nothing() -> None:
    model = decoder("attnres full").train()
    before = model(tokens())
    weights = depth_weights(model, tokens())
    assert times_uniform(weights, 0) == pytest.approx([1] * 7)
    assert torch.equal(model(tokens()), before)
    assert model.training
    assert all("read" not in vars(sublayer.connection) for sublayer in model.stack.sublayers())


def test_a_window_has_its_place_among_all_sources() -> None:
    weights = depth_weights(decoder("attnres window"), tokens())
    assert np.isfinite(weights[6]).tolist() == [True, False, False, False, False, True, True]
    assert np.isfinite(weights[1]).tolist() == [True, True, False, False, False, False, False]
    weights = depth_weights(decoder("attnres stride"), tokens())
    assert np.isfinite(weights[5]).tolist() == [True, True, False, True, False, True, False]


@pytest.mark.parametrize("kind", ["add", "state_attention"])
def test_other_connections_have_no_such_weights(kind: str) -> None:
    with pytest.raises(UserError, match="connection 'attnres'"):
        depth_weights(decoder(kind), tokens())


def test_what_weights_say() -> None:
    weights = np.array(
        [
            [1.0, NAN, NAN, NAN],
            [0.5, 0.5, NAN, NAN],
            [0.25, 0.75, 0.0, NAN],
            [0.0, 0.0, 0.0, 1.0],
        ]
    )
    assert times_uniform(weights, 0) == pytest.approx([1, 1, 0.75, 0])
    assert times_uniform(weights, -1) == pytest.approx([1, 1, 0, 4])
    single, equal, some, one = sharpness(weights)
    assert math.isnan(single)
    assert (equal, one) == pytest.approx((0, 1))
    assert some == pytest.approx(1 - (0.25 * math.log(4) + 0.75 * math.log(4 / 3)) / math.log(3))


def test_distance_is_over_the_sources_that_both_see() -> None:
    weights = np.array(
        [
            [1.0, NAN, NAN, NAN],
            [0.5, 0.5, NAN, NAN],
            [0.1, 0.3, 0.6, NAN],  # of the first two: 1/4 and 3/4
            [0.4, 0.4, 0.0, 0.2],  # of the first two: 1/2 and 1/2; of three: 1/2, 1/2, 0
            [0.2, 0.2, 0.2, 0.4],
        ]
    )
    assert distance(weights, 1) == pytest.approx((0.25 + 0.6) / 2)
    assert distance(weights, 2) == pytest.approx(0)
    assert math.isnan(distance(weights, 3))
