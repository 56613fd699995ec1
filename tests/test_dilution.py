"""What is read, taken apart: parts that add up, and shares worked out by hand."""

import math

import numpy as np
import pytest
import torch

from reslab.depth_weights import depth_weights, token_weights
from reslab.dilution import Dilution, dilution, part_behind_norm
from reslab.models.layers import LayerNorm, RMSNorm
from reslab.probes import stream_profile
from reslab.residuals import ConnectionConfig, Placement
from reslab.schema import UserError
from variants import decoder, perturbed, tokens

NAN = math.nan

KNOWN: list[tuple[ConnectionConfig, Placement, str]] = [
    (ConnectionConfig("add"), "pre", "layernorm"),
    (ConnectionConfig("add"), "post", "layernorm"),
    (ConnectionConfig("add"), "post", "rmsnorm"),
    (ConnectionConfig("add"), "none", "layernorm"),
    (ConnectionConfig("layerscale", initial=0.5), "pre", "layernorm"),
    (ConnectionConfig("layerscale", initial=0.5), "post", "rmsnorm"),
    (ConnectionConfig("layernorm_scaling"), "pre", "layernorm"),
    (ConnectionConfig("attnres", kernel="naive"), "pre", "layernorm"),
]


@pytest.mark.parametrize(("connection", "placement", "norm"), KNOWN, ids=lambda value: str(value)[:20])
def test_parts_add_up_whatever_the_weights(connection: ConnectionConfig, placement: Placement, norm: str) -> None:
    model = decoder(connection, placement=placement, norm=norm).double()
    perturbed(model, 0.3)
    found = dilution(model, tokens())
    assert found.unexplained < 1e-12
    sublayers = len(found.outputs)
    assert found.reads.shape == (sublayers + 1,)
    assert found.parts.shape == (sublayers + 1, sublayers + 1)
    assert np.array_equal(np.isfinite(found.parts), np.tri(sublayers + 1, dtype=bool))


def test_measures_are_those_of_the_stream() -> None:
    model = decoder(ConnectionConfig("add")).double()
    inputs = tokens()
    found = dilution(model, inputs)
    squares = stream_profile(model, inputs, inputs)["mean_square"]
    assert found.block_reads**2 == pytest.approx(squares, rel=1e-5)
    assert found.growth == pytest.approx(squares[-1] / squares[0], rel=1e-5)
    assert found.parts[:, 0] == pytest.approx([squares[0]] * len(found.reads), rel=1e-5)
    assert found.embedding_left == 1
    for source in range(1, len(found.reads)):
        assert found.parts[source:, source] == pytest.approx(found.outputs[source - 1])


def test_update_counts_as_it_joins_the_stream() -> None:
    plain, scaled = (
        dilution(decoder(connection).double(), tokens())
        for connection in (ConnectionConfig("add"), ConnectionConfig("scaled", scale=0.5))
    )
    assert scaled.outputs[0] == pytest.approx(plain.outputs[0] / 4)


def test_full_starts_with_equal_parts() -> None:
    full, plain = (
        dilution(decoder(connection, norm_eps=0.0).double(), tokens())
        for connection in (ConnectionConfig("attnres", kernel="naive"), ConnectionConfig("add"))
    )
    counts = np.arange(1, len(full.reads) + 1)
    assert full.outputs == pytest.approx(plain.outputs)
    assert full.parts[:, 0] == pytest.approx(plain.parts[:, 0] / counts**2)
    assert full.share(0) == pytest.approx(plain.share(0))


def test_means_of_token_weights_are_the_depth_weights() -> None:
    model = decoder(ConnectionConfig("attnres"))
    perturbed(model, 0.5)
    means = depth_weights(model, tokens())
    for row, weights in zip(means, token_weights(model, tokens()), strict=True):
        assert row[np.isfinite(row)] == pytest.approx([float(w.double().mean()) for w in weights])


@pytest.mark.parametrize(
    "norm", [LayerNorm(8), LayerNorm(8, elementwise_affine=False), RMSNorm(8), RMSNorm(8, eps=0.1)]
)
def test_parts_behind_a_norm_sum_to_what_it_puts_out(norm: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    for parameter in norm.parameters():
        parameter.data = torch.rand(8, generator=generator, dtype=torch.float64)
    total = parts.sum(0)
    with torch.no_grad():
        bias = getattr(norm, "bias", None)
        summed = sum(part_behind_norm(norm, total, part) for part in parts)
        expected = norm(total) if bias is None else norm(total) - bias
    torch.testing.assert_close(summed, expected, rtol=1e-12, atol=1e-12)


def test_part_behind_a_layernorm_by_hand() -> None:
    total, part = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])
    norm = LayerNorm(2, eps=0.0)
    assert part_behind_norm(norm, total, part).tolist() == [-0.5, 0.5]
    assert part_behind_norm(torch.nn.Identity(), total, part) is part


def test_shares_and_rates_by_hand() -> None:
    one = Dilution(
        reads=np.array([1.0, 4.0, 16.0]),
        outputs=np.array([3.0, 13.0]),
        parts=np.array([[1.0, NAN, NAN], [2.0, 1.0, NAN], [4.0, 4.0, 2.0]]),
        unexplained=0.0,
    )
    assert one.share(0).tolist() == [1, 0.5, 0.25]
    assert one.share(1, 2)[-1] == 0.375
    assert np.isnan(one.share(1, 2)[:2]).all()
    assert one.block_reads.tolist() == [1, 4]
    assert one.block_outputs.tolist() == [4]
    assert one.ratios.tolist() == [4]
    assert one.growth == 16
    assert one.embedding_left == 4


@pytest.mark.parametrize(
    ("connection", "placement"),
    [
        (ConnectionConfig("attnres", block=2), "pre"),
        (ConnectionConfig("attnres", window=2), "pre"),
        (ConnectionConfig("attnres", heads=2), "pre"),
        (ConnectionConfig("rescaled"), "pre"),
        (ConnectionConfig("add"), "sandwich"),
        (ConnectionConfig("add"), "peri"),
        (ConnectionConfig("add"), "deepnorm"),
    ],
    ids=str,
)
def test_what_cannot_be_taken_apart_is_refused(connection: ConnectionConfig, placement: Placement) -> None:
    with pytest.raises(UserError, match="can be taken apart in a model of one stack"):
        dilution(decoder(connection, placement=placement), tokens())
