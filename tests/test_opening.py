"""Shares of branches, worked out by hand; scales, and which parameters are which."""

import math

import pytest
import torch
from torch import Tensor, nn

from reslab.models.decoder import Decoder, DecoderConfig
from reslab.opening import branch_scales, branch_shares, effective_depth, set_scales, stack_parameters
from reslab.residuals import ConnectionConfig, ResidualSettings, Stack
from reslab.training import build


class Doubling(nn.Module):
    """A branch that puts out twice what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def stack(connection: ConnectionConfig, blocks: int = 2) -> Stack:
    settings = ResidualSettings(connection=connection, placement="none")
    return Stack([{"mlp": Doubling()} for _ in range(blocks)], 4, settings, norm=lambda: nn.LayerNorm(4))


def decoder(kind: str, **options: float) -> Decoder:
    config = DecoderConfig(
        width=8, heads=2, context=4, vocabulary=11, depth=2, init_std=0.2, connection=ConnectionConfig(kind, **options)
    )
    model = build(config, 0)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(
    ("connection", "share"),
    [
        (ConnectionConfig("add"), 4 / 5),  # r = 2
        (ConnectionConfig("scaled", scale=0.5), 1 / 2),  # r = 1
        (ConnectionConfig("skipinit", initial=0.25), 1 / 5),  # r = 1/2
        (ConnectionConfig("rezero"), 0.0),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_share_of_a_branch_that_doubles(connection: ConnectionConfig, share: float) -> None:
    shares = branch_shares(stack(connection), torch.randn(2, 3, 4))
    assert shares == pytest.approx([share, share], abs=1e-6)
    assert effective_depth(shares) == pytest.approx(2 * share, abs=1e-6)


def test_stream_that_is_not_finite_has_no_share() -> None:
    assert math.isnan(effective_depth(branch_shares(stack(ConnectionConfig("add")), torch.full((1, 2, 4), math.nan))))


def test_measuring_leaves_mode_and_gradients() -> None:
    model = decoder("rezero").train()
    branch_shares(model, torch.zeros(1, 4, dtype=torch.long))
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_scales_are_read_and_set() -> None:
    model = decoder("layerscale", initial=0.3)
    assert branch_scales(model) == pytest.approx([0.3] * 4)
    set_scales(model, -0.5)
    assert branch_scales(model) == [0.5] * 4
    assert branch_scales(decoder("add")) == [1.0] * 4


def test_parameters_of_branches_and_of_scales_are_apart() -> None:
    model = decoder("layerscale", initial=0.3)
    branches, scales = stack_parameters(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names[id(p)] for p in scales) == sorted(n for n in names.values() if n.endswith("connection.gamma"))
    assert {names[id(p)] for p in [*branches, *scales]} == {n for n in names.values() if n.startswith("stack.")}
    assert len(scales) == 4
