"""The diffusion Transformer: its condition, its exact start, and the order in which gradients reach its weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.diffusion import (
    Conditioned,
    ConditionedAttention,
    DiffusionConfig,
    DiffusionTransformer,
    TimeEmbedding,
)
from reslab.models.image_encoder import to_images, to_patches
from reslab.models.initialisation import stream_writers
from reslab.residuals import ConnectionConfig
from reslab.schema import UserError
from variants import SAMPLE, perturbed


def network(seed: int = 0, **changed: Any) -> DiffusionTransformer:
    shape: dict[str, Any] = {"width": 16, "heads": 4, "depth": 2, "init_std": 0.2, "classes": 10}
    model = DiffusionTransformer(DiffusionConfig(**shape | changed))
    torch.manual_seed(seed)
    model.reset_parameters()
    return model


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def times(count: int = 4) -> Tensor:
    return torch.linspace(0.1, 0.9, count)


def labels(count: int = 4) -> Tensor:
    return torch.arange(count)


def reached(model: nn.Module) -> set[str]:
    """The parameters with a gradient other than zero."""
    return {n for n, p in model.named_parameters() if p.grad is not None and torch.count_nonzero(p.grad) > 0}


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize("conditioning", ["adaln_zero", "adaln"])
@pytest.mark.parametrize("placement", ["pre", "none"])
def test_network_is_its_conditioned_sublayers_in_turn(placement: str, conditioning: str) -> None:
    model = network(placement=placement, conditioning=conditioning)
    perturbed(model)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,))

    k = F.silu(model.time_embedding(times()) + model.label_embedding.weight[:4])
    x = model.patch_embedding(to_patches(images(), model.config)) + model.position_embedding.weight
    for sublayer in model.stack.sublayers():
        conditioned: Any = sublayer.branch
        shift, scale, *gate = conditioned.modulation(k)[:, None].split(16, -1)
        h = (1 + scale) * (norm(x) if placement == "pre" else x) + shift
        x = x + conditioned.branch(h) * (gate[0] if gate else 1)
    shift, scale = model.modulation(k)[:, None].split(16, -1)
    wanted = to_images(model.head((1 + scale) * norm(x) + shift), model.config)
    assert wanted.shape == (4, 1, 8, 8)
    torch.testing.assert_close(model(images(), times(), labels()), wanted)


def test_norms_have_no_gain() -> None:
    norms = [module for module in network(placement="peri").modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 1 + 2 * 4 + 1
    assert not any(list(module.parameters()) for module in norms)


def test_time_is_embedded_as_the_step_of_a_thousand() -> None:
    torch.manual_seed(0)
    embedding, step = TimeEmbedding(8), 250
    angles = torch.tensor([step / 10000 ** (i / 64) for i in range(64)])
    hidden = F.silu(embedding.up(torch.cat([angles.cos(), angles.sin()])))
    torch.testing.assert_close(embedding(torch.tensor([step / 1000]))[0], embedding.down(hidden), atol=1e-4, rtol=1e-4)


def test_condition_is_seen() -> None:
    model = network()
    perturbed(model)
    plain = model(images(), times(), labels())
    assert not torch.allclose(model(images(), times().flip(0), labels()), plain, atol=1e-3)
    assert not torch.allclose(model(images(), times(), labels().flip(0)), plain, atol=1e-3)
    no_label = torch.full((4,), 10)
    assert torch.equal(model(images(), times()), model(images(), times(), no_label))


def test_values_are_those_of_the_modulated_input() -> None:
    model = network(connection=ConnectionConfig("value_residual"))
    perturbed(model)
    attention = model.stack.sublayers()[0].branch
    assert isinstance(attention, ConditionedAttention)
    x = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0))
    k = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    values = attention.values(x, k)
    torch.testing.assert_close(attention(x, k, values), attention(x, k))
    assert not torch.allclose(attention(x, k, 2 * values), attention(x, k), atol=1e-3)


def test_value_residual_with_only_its_own_values_is_add() -> None:
    plain, joined = network(), network(connection=ConnectionConfig("value_residual"))
    with torch.no_grad():
        for name, parameter in joined.named_parameters():
            if name.endswith("value_weights"):
                parameter.copy_(torch.tensor([1.0, 0.0]))
    perturbed(plain)
    joined.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(joined(images(), times()), plain(images(), times()))


# --- how it starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["pre", "sandwich", "peri"])
@pytest.mark.parametrize("connection", SAMPLE, ids=str)
def test_starts_at_exactly_zero(connection: ConnectionConfig, placement: str) -> None:
    model, noise = network(connection=connection, placement=placement), images()
    predicted = model(images(), times(), labels())
    assert torch.count_nonzero(predicted) == 0
    assert F.mse_loss(predicted, noise).item() == noise.square().mean().item()


def test_closed_branches_leave_the_embedding() -> None:
    model = network()
    x = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0))
    k = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.stack(x, condition=k), x)


def test_adaln_starts_unconditioned_but_open() -> None:
    model = network(conditioning="adaln")
    predicted = model(images(), times(), labels())
    assert predicted.detach().std() > 0.1
    assert torch.equal(predicted, model(images(), times().flip(0)))
    assert len([m for m in model.modules() if isinstance(m, Conditioned)]) == 4
    for module in model.modules():
        if isinstance(module, Conditioned):
            assert module.modulation.weight.shape == (32, 16)


@pytest.mark.parametrize("conditioning", ["adaln_zero", "adaln"])
def test_stream_writers_are_found_once_and_scaled(conditioning: str) -> None:
    model = network(width=64, depth=8, init_std=0.1, conditioning=conditioning)
    writers = stream_writers(model)
    names = [
        n for n, _ in model.named_parameters() if n.endswith(("branch.branch.project.weight", "branch.down.weight"))
    ]
    assert {id(weight) for weight in writers} == {id(model.get_parameter(name)) for name in names}
    assert len(writers) == len(names) == 16
    for weight in writers:
        assert float(weight.detach().std()) == pytest.approx(0.1 / 4, rel=0.06)


# --- gradients, connections, precision ------------------------------------------------------------


def test_gradients_unlock_in_order() -> None:
    """Head; then the gates, the final modulation and what the stream begins with; then all the rest."""
    model = network()
    gates = [m.modulation for m in model.modules() if isinstance(m, Conditioned)]

    def backward() -> set[str]:
        model.zero_grad()
        F.mse_loss(model(images(), times(), labels()), images().flip(0)).backward()
        return reached(model)

    def learn() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)

    head = {"head.weight", "head.bias"}
    assert backward() == head
    learn()
    second = backward()
    assert {n for n in second if ".branch.branch." in n or "time_embedding" in n or "label_embedding" in n} == set()
    assert head | {"modulation.weight", "modulation.bias", "patch_embedding.weight"} < second
    for gate in gates:
        shift, scale, opened = (rows.abs().max() for rows in gate.weight.grad.chunk(3))  # type: ignore[union-attr]
        assert shift == scale == 0
        assert opened > 0
    learn()
    assert backward() == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("placement", "conditioning"),
    [("pre", "adaln_zero"), ("sandwich", "adaln_zero"), ("peri", "adaln_zero"), ("pre", "adaln")],
)
@pytest.mark.parametrize("connection", SAMPLE, ids=str)
def test_runs_with_connection(connection: ConnectionConfig, placement: str, conditioning: str) -> None:
    model = network(connection=connection, placement=placement, conditioning=conditioning)
    perturbed(model)
    loss = F.mse_loss(model(images(), times(), labels()), images())
    loss.backward()
    assert math.isfinite(loss.item())
    missing = {name for name, _ in model.named_parameters()} - reached(model)
    assert [name for name in missing if ".connection." not in name and ".ends." not in name] == []


def test_checkpointing_hands_the_condition_on() -> None:
    model = network()
    perturbed(model)
    plain = model(images(), times())
    model.stack.checkpointing = True
    again = model(images(), times())
    assert torch.equal(again, plain)
    again.sum().backward()
    assert "time_embedding.up.weight" in reached(model)


def test_works_in_bfloat16() -> None:
    model = network()
    perturbed(model)
    wanted = model(images(), times(), labels())
    out = model.bfloat16()(images(), times(), labels())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0.1, rtol=0.1)


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_input_is_refused() -> None:
    model = network()
    with pytest.raises(UserError, match="image_size 8 is not divisible by patch 3"):
        network(patch=3)
    with pytest.raises(UserError, match="norm_gain 2: this model's norms have no gain"):
        network(norm_gain=2.0)
    with pytest.raises(UserError, match=r"shape \[4, 1, 8, 7\], the model takes \[B, 1, 8, 8\]"):
        model(images()[..., 1:], times())
    with pytest.raises(UserError, match=r"time has shape \[3\]; give one an image, shape \[4\]"):
        model(images(), times(3))
    with pytest.raises(UserError, match=r"label has shape \[3\]; give one an image, shape \[4\]"):
        model(images(), times(), labels(3))
    with pytest.raises(UserError, match=r"time is torch.int64 of shape \[4\]; give one number in 0..1 an image"):
        model(images(), torch.arange(4))
