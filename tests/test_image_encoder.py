"""The image encoder: patches, what it computes, how it starts, and what its gradients reach."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.image_encoder import ImageEncoder, ImageEncoderConfig, PatchSettings, to_images, to_patches
from reslab.schema import UserError
from variants import unreached


def encoder(seed: int = 0, **changed: Any) -> ImageEncoder:
    shape: dict[str, Any] = {"width": 16, "heads": 4, "depth": 2, "init_std": 0.2}
    if changed.get("head") != "reconstruction":
        shape["classes"] = 10
    model = ImageEncoder(ImageEncoderConfig(**shape | changed))
    torch.manual_seed(seed)
    model.reset_parameters()
    return model


def images(count: int = 3, channels: int = 1, size: int = 8) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


def masks(count: int = 3) -> Tensor:
    """Six of sixteen patches, others in each image."""
    return torch.rand(count, 16, generator=torch.Generator().manual_seed(0)).argsort(1) < 6


# --- patches --------------------------------------------------------------------------------------


def test_patches_are_cut_row_by_row() -> None:
    settings = PatchSettings(image_size=6, image_channels=2, patch=3)
    given = images(4, 2, 6)
    patches = to_patches(given, settings)
    assert patches.shape == (4, settings.patches, settings.patch_values) == (4, 4, 18)
    assert torch.equal(patches[:, 1], given[:, :, :3, 3:].flatten(1))
    assert torch.equal(patches, F.unfold(given, 3, stride=3).transpose(1, 2))
    assert torch.equal(to_images(patches, settings), given)


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "size", "patch"), [(1, 8, 2), (1, 8, 4), (3, 12, 4), (1, 8, 8)])
def test_shapes(channels: int, size: int, patch: int) -> None:
    shape: dict[str, Any] = {"image_channels": channels, "image_size": size, "patch": patch}
    given = images(5, channels, size)
    assert encoder(**shape)(given).shape == (5, 10)
    assert encoder(head="reconstruction", **shape)(given).shape == given.shape


@pytest.mark.parametrize("placement", ["pre", "post", "none"])
def test_encoder_is_its_sublayers_in_turn(placement: str) -> None:
    model = encoder(placement=placement)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,))

    x = to_patches(images(), model.config) @ model.patch_embedding.weight.T + model.position_embedding.weight
    for sublayer in model.stack.sublayers():
        f: Any = sublayer.branch
        x = {
            "pre": lambda x, f=f: x + f(norm(x)),
            "post": lambda x, f=f: norm(x + f(x)),
            "none": lambda x, f=f: x + f(x),
        }[placement](x)
    torch.testing.assert_close(model(images()), norm(x).mean(1) @ model.head.weight.T)


def test_every_patch_sees_every_other() -> None:
    model = encoder(head="reconstruction")
    given = images(1).requires_grad_()
    for patch in (0, 7, 15):
        (gradient,) = torch.autograd.grad(to_patches(model(given), model.config)[:, patch].square().sum(), given)
        assert to_patches(gradient, model.config).abs().amax(-1).min() > 0


def test_positions_tell_patches_apart() -> None:
    model = encoder()
    turned = to_images(to_patches(images(), model.config).flip(1), model.config)
    assert not torch.allclose(model(turned), model(images()), atol=1e-3)
    nn.init.zeros_(model.position_embedding.weight)
    torch.testing.assert_close(model(turned), model(images()))


def test_masked_patches_are_not_seen() -> None:
    model = encoder(head="reconstruction")
    given = images().requires_grad_()
    (gradient,) = torch.autograd.grad(model(given, masks()).square().sum(), given)
    seen = to_patches(gradient, model.config).abs().amax(-1) > 0
    assert torch.equal(seen, ~masks())
    nothing = torch.zeros_like(masks())
    assert torch.equal(model(images(), nothing), model(images()))


# --- how it starts --------------------------------------------------------------------------------


def test_white_images_make_tokens_of_unit_variance() -> None:
    model = encoder(width=64, heads=4, patch=4)
    tokens = model.patch_embedding(to_patches(images(200), model.config))
    assert float(tokens.detach().std()) == pytest.approx(1, rel=0.05)
    assert float(model.position_embedding.weight.detach().std()) == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize(("weight_init", "scale"), [("plain", 1), ("depth_scaled", 1 / 4), ("tfixup", 0.67 * 8**-0.25)])
def test_stream_writers_are_scaled(weight_init: str, scale: float) -> None:
    model = encoder(width=64, depth=8, init_std=0.1, weight_init=weight_init)
    writers = [n for n, _ in model.named_parameters() if n.endswith(("branch.project.weight", "branch.down.weight"))]
    assert len(writers) == 16
    for name in writers:
        assert float(model.get_parameter(name).detach().std()) == pytest.approx(0.1 * scale, rel=0.06)
    embedding = model.patch_embedding.weight.detach().std()
    assert float(embedding) == pytest.approx(0.5 * (scale if weight_init == "tfixup" else 1), rel=0.1)


# --- gradients, connections, precision ------------------------------------------------------------


@pytest.mark.parametrize("head", ["class", "reconstruction"])
def test_gradients_reach_every_parameter(head: str) -> None:
    model = encoder(head=head)
    model(images(), masks() if head == "reconstruction" else None).square().sum().backward()
    assert unreached(model) == []


def test_works_in_bfloat16() -> None:
    for head in ("class", "reconstruction"):
        out = encoder(head=head).bfloat16()(images())
        assert out.dtype == torch.bfloat16
        assert out.isfinite().all()
        torch.testing.assert_close(out.float(), encoder(head=head)(images()), atol=0.1, rtol=0.1)


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UserError, match="image_size 8 is not divisible by patch 3"):
        encoder(patch=3)
    with pytest.raises(UserError, match=r"give classes, e\.g\. classes: 10"):
        encoder(classes=None)
    with pytest.raises(UserError, match="remove classes, or choose head: class"):
        encoder(head="reconstruction", classes=10)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(UserError, match=r"shape \[3, 1, 6, 6\], the model takes \[B, 1, 8, 8\]"):
        encoder()(images(size=6))
    with pytest.raises(UserError, match=r"shape \[3, 8, 8\], the model takes"):
        encoder()(images()[:, 0])
    with pytest.raises(UserError, match="leave masked out"):
        encoder()(images(), masks())
    with pytest.raises(UserError, match=r"torch.bool of shape \[3, 16\]"):
        encoder(head="reconstruction")(images(), masks(2))
    with pytest.raises(UserError, match=r"torch.bool of shape \[3, 16\]"):
        encoder(head="reconstruction")(images(), masks().float())
