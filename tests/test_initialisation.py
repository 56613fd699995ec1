"""How weights start: the factor of every role, measured on every matrix."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reslab.models.decoder import Decoder
from reslab.models.initialisation import Role, WeightInit, require_init, weight_scale
from reslab.schema import UserError
from variants import config, decoder

LARGE: dict[str, Any] = {"width": 64, "depth": 8, "init_std": 0.07, "vocabulary": 256, "context": 64}
L = 8


def matrices(model: Decoder) -> dict[Role, list[Tensor]]:
    """Every matrix of the blocks by its role, found by name, without the model's help."""
    found: dict[Role, list[Tensor]] = {"query_key": [], "value": [], "output": [], "up": [], "down": []}
    for name, parameter in model.named_parameters():
        if name.endswith("query_key_value.weight"):
            query, key, value = parameter.detach().chunk(3)
            found["query_key"] += [query, key]
            found["value"].append(value)
        for ending, role in (("project.weight", "output"), ("up.weight", "up"), ("down.weight", "down")):
            if name.endswith(ending):
                found[role].append(parameter.detach())  # type: ignore[index]
    return found


WANG, TFIXUP, GPT2 = (8 * L) ** -0.25, (9 * L) ** -0.25, (2 * L) ** -0.5


@pytest.mark.parametrize(
    ("weight_init", "placement", "factors"),
    [
        ("plain", "pre", {"query_key": 1, "value": 1, "output": 1, "up": 1, "down": 1}),
        ("depth_scaled", "pre", {"query_key": 1, "value": 1, "output": GPT2, "up": 1, "down": GPT2}),
        ("tfixup", "none", {"query_key": 1, "value": TFIXUP, "output": TFIXUP, "up": TFIXUP, "down": TFIXUP}),
        ("deepnorm", "deepnorm", {"query_key": 1, "value": WANG, "output": WANG, "up": WANG, "down": WANG}),
        ("deepnorm", "post", {"query_key": 1, "value": WANG, "output": WANG, "up": WANG, "down": WANG}),
    ],
)  # fmt: skip
def test_every_matrix_starts_with_the_factor_of_its_role(
    weight_init: str, placement: str, factors: dict[Role, float]
) -> None:
    """Public reports: a scaled init whose name matched nothing, one on the up matrix, a value matrix left out."""
    model = decoder(weight_init=weight_init, placement=placement, **LARGE)
    for role, weights in matrices(model).items():
        assert len(weights) == L * (2 if role == "query_key" else 1)
        for weight in weights:
            assert float(weight.std()) == pytest.approx(0.07 * factors[role], rel=0.08), role
    assert float(model.head.weight.detach().std()) == pytest.approx(0.07, rel=0.05)


def test_depth_scaling_divides_the_variance_of_what_branches_write_by_2L() -> None:
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))

    def written(weight_init: str) -> list[float]:
        sublayers = decoder(weight_init=weight_init, **LARGE).stack.sublayers()
        with torch.no_grad():
            return [float(s.branch(x).var()) for s in sublayers]

    ratios = [plain / scaled for plain, scaled in zip(written("plain"), written("depth_scaled"), strict=True)]
    assert ratios == pytest.approx([2 * L] * 2 * L, rel=1e-4)


@pytest.mark.parametrize("depth", [1, 6, 100])
def test_published_constants(depth: int) -> None:
    assert weight_scale("deepnorm", "value", 2 * depth) == pytest.approx((8 * depth) ** -0.25)
    assert weight_scale("tfixup", "up", 2 * depth) == pytest.approx((9 * depth) ** -0.25)
    assert weight_scale("tfixup", "up", 2 * depth, causal=False) == pytest.approx(0.67 * depth**-0.25)
    assert weight_scale("depth_scaled", "down", 2 * depth) == pytest.approx((2 * depth) ** -0.5)
    inits: tuple[WeightInit, ...] = ("plain", "depth_scaled", "tfixup", "deepnorm")
    assert all(weight_scale(init, "query_key", 2 * depth) == 1 for init in inits)


def test_tfixup_scales_the_embedding_too() -> None:
    model = decoder(weight_init="tfixup", **LARGE)
    assert float(model.token_embedding.weight.detach().std()) == pytest.approx(TFIXUP, rel=0.03)


@pytest.mark.parametrize("placement", ["pre", "sandwich", "sandwich_sum", "peri", "none"])
def test_deepnorm_init_needs_a_norm_on_the_stream(placement: Any) -> None:
    with pytest.raises(UserError, match=f"made for a norm on the stream .*not for '{placement}'"):
        require_init("deepnorm", placement)
    with pytest.raises(UserError, match="use plain or depth_scaled"):
        config(weight_init="deepnorm", placement=placement)


def test_initial_loss_without_a_final_norm_grows_with_depth() -> None:
    """With one it is ln V + d std^2 / 2 of the head at every depth; without one the logits grow with the stream."""

    def logit_deviation(depth: int, final_norm: bool) -> float:
        shape = LARGE | {"depth": depth, "init_std": 0.2}
        model = decoder(weight_init="plain", final_norm=final_norm, **shape)
        text = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
        return float(model(text).detach().std())

    normed = [logit_deviation(depth, True) for depth in (2, 16)]
    assert normed == pytest.approx([0.2 * math.sqrt(64)] * 2, rel=0.05)
    assert logit_deviation(16, False) > 2 * logit_deviation(2, False) > 4 * normed[0]


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [("rezero", "alpha", 0.0), ("skipinit", "alpha", 0.2), ("layerscale", "gamma", 1e-2)],
)
@pytest.mark.parametrize("materialised", [False, True])
def test_scales_keep_their_start_after_a_reset(name: str, parameter: str, value: float, materialised: bool) -> None:
    """Public report: gamma became 1 or 0 by a later reset, or when materialised from the meta device."""
    if materialised:
        with torch.device("meta"):
            model = Decoder(config(name))
        model.to_empty(device="cpu")
    else:
        model = decoder(name)
    for p in model.parameters():
        nn.init.constant_(p, 7)
    model.reset_parameters()
    scales = [p.detach() for n, p in model.named_parameters() if n.endswith(parameter)]
    assert len(scales) == 6
    assert all(torch.equal(scale, torch.full_like(scale, value)) for scale in scales)


def test_layers_built_in_a_loop_differ() -> None:
    """Public report: layers made by cloning start identical."""
    for weights in matrices(decoder(**LARGE)).values():
        assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
