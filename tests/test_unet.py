"""The U-Net: what it computes, what its long skips are, how it starts, and what its gradients reach."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.initialisation import stream_writers
from reslab.models.unet import UNet, UNetConfig
from reslab.residuals import ConnectionConfig, Stack
from reslab.schema import UserError
from variants import perturbed, unreached


def network(seed: int = 0, **changed: Any) -> UNet:
    model = UNet(UNetConfig(**{"channels": 8, "depth": 2} | changed))
    torch.manual_seed(seed)
    model.reset_parameters()
    return model


def images(count: int = 3, channels: int = 1, size: int = 8) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


def times(count: int = 3) -> Tensor:
    return torch.linspace(0.1, 0.9, count)


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(("levels", "channels", "size"), [(1, 1, 8), (2, 1, 8), (3, 1, 8), (4, 1, 8), (2, 3, 6)])
def test_shapes(levels: int, channels: int, size: int, skips: bool) -> None:
    model = network(levels=levels, skips=skips, image_channels=channels, image_size=size)
    seen: list[torch.Size] = []
    for stack in model.stacks:
        stack.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    given = images(channels=channels, size=size)
    assert model(given, times()).shape == given.shape
    sides = [size // 2**level for level in range(levels)]
    assert seen == [(3, side, side, 8) for side in [*sides, *sides[-2::-1]]]
    assert len(model.blocks) == model.config.sublayers == 2 * (2 * levels - 1)


@pytest.mark.parametrize("skips", [True, False])
def test_network_is_what_ronneberger_drew(skips: bool) -> None:
    """With images as [B, c, H, W], and the long skips as concatenations before a 1 x 1 convolution."""
    model = network(levels=2, depth=1, skips=skips)
    perturbed(model)
    time = F.silu(model.time_embedding(times()))

    def norm(x: Tensor, module: nn.Module) -> Tensor:
        return module(x.movedim(1, -1)).movedim(-1, 1)

    def stack(module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, Stack)
        (sublayer,) = module.sublayers()
        branch: Any = sublayer.branch
        hidden = F.conv2d(F.silu(norm(x, sublayer.norm_input)), branch.up.weight, padding=1)
        hidden = hidden + branch.time(time)[:, :, None, None]
        return x + F.conv2d(F.silu(hidden), branch.down.weight, padding=1)

    left = stack(model.down[0], F.conv2d(images(), model.stem.weight, padding=1))
    low = stack(model.middle, F.conv2d(left, model.halve[0].weight, padding=1, stride=2))  # type: ignore[arg-type]
    raised, merge = F.interpolate(low, scale_factor=2.0, mode="nearest"), model.merge[0]
    weight, joined = merge.weight, raised
    if skips:
        weight = torch.cat([merge.weight, model.merge_skip[0].weight], 1)  # type: ignore[list-item]
        joined = torch.cat([raised, left], 1)
    x = F.conv2d(joined, weight[:, :, None, None], merge.bias)  # type: ignore[arg-type, index]
    x = F.silu(norm(stack(model.up[0], x), model.norm))
    wanted = F.conv2d(x, model.head.weight[:, :, None, None], model.head.bias)
    torch.testing.assert_close(model(images(), times()), wanted)


def test_skips_of_weight_zero_are_no_skips() -> None:
    with_skips, without = network(), network(skips=False)
    assert not torch.allclose(with_skips(images(), times()), without(images(), times()), atol=1e-3)
    for merge in with_skips.merge_skip:
        nn.init.zeros_(merge.weight)  # type: ignore[arg-type]
    torch.testing.assert_close(with_skips(images(), times()), without(images(), times()))


def test_without_skips_all_passes_the_lowest_level() -> None:
    for skips in (True, False):
        model = network(skips=skips)
        model.middle.register_forward_hook(lambda module, inputs, out: torch.zeros_like(out))
        changed = not torch.equal(model(images(), times()), model(2 * images(), times()))
        assert changed == skips


def test_time_is_seen() -> None:
    model = network()
    assert not torch.allclose(model(images(), times()), model(images(), times().flip(0)), atol=1e-3)


# --- how it starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight_init", "scale"), [("plain", 1.0), ("depth_scaled", 10**-0.5)])
def test_weights_start_by_their_role(weight_init: str, scale: float) -> None:
    model = network(channels=32, weight_init=weight_init)
    he_normal = math.sqrt(2 / (9 * 32))
    writers = {id(weight) for weight in stream_writers(model)}
    assert len(writers) == 10
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module is not model.stem:
            wanted = he_normal * (scale if id(module.weight) in writers else 1)
            assert float(module.weight.detach().std()) == pytest.approx(wanted, rel=0.06)
        elif isinstance(module, nn.Linear) and module.in_features == 32 and module is not model.head:
            assert float(module.weight.detach().std()) == pytest.approx(32**-0.5, rel=0.1)
    waves = model.time_embedding.up.weight.detach()
    assert float(waves.std()) == pytest.approx(64**-0.5, rel=0.06)


def test_long_skips_change_no_other_weight() -> None:
    plain, arm = network(skips=False).state_dict(), network().state_dict()
    assert {name for name in arm if name not in plain} == {"merge_skip.0.weight", "merge_skip.1.weight"}
    assert [name for name in plain if not torch.equal(plain[name], arm[name])] == []


# --- gradients, connections, precision ------------------------------------------------------------


@pytest.mark.parametrize("skips", [True, False])
def test_gradients_reach_every_parameter(skips: bool) -> None:
    model = network(skips=skips)
    F.mse_loss(model(images(), times()), images().flip(0)).backward()
    assert unreached(model) == []


def test_works_in_bfloat16() -> None:
    wanted = network()(images(), times())
    out = network().bfloat16()(images(), times())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0.1, rtol=0.1)


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"image_size 8 cannot be halved 4 times; .* a multiple of 16"):
        network(levels=5)
    with pytest.raises(UserError, match="block 3 is larger than the 2 sublayers"):
        network(connection=ConnectionConfig("attnres", block=3))
    with pytest.raises(UserError, match="this model has no attention"):
        network(connection=ConnectionConfig("value_residual"))


def test_wrong_input_is_refused() -> None:
    model = network()
    with pytest.raises(UserError, match=r"shape \[3, 1, 6, 6\], the model takes \[B, 1, 8, 8\]"):
        model(images(size=6), times())
    with pytest.raises(UserError, match=r"time has shape \[2\]; give one an image, shape \[3\]"):
        model(images(), times(2))
    with pytest.raises(UserError, match=r"give one number in 0\.\.1 an image"):
        model(images(), torch.arange(3))
