"""The models: what they compute, how they start, and what their gradients reach."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.attention import Attention
from reslab.models.decoder import Decoder
from reslab.models.layers import Mlp
from reslab.models.resnet import ResNet, ResNetConfig
from reslab.probes import stream_places, streams
from reslab.residuals import ConnectionConfig, ReZero
from reslab.schema import UserError
from reslab.training import build
from variants import VARIANTS, config, decoder, tokens

KINDS = [VARIANTS[name] for name in ("none", "add", "weighted_skip", "rezero")]


def loss(model: Decoder) -> Tensor:
    logits = model(tokens())
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


def deviation(weight: Tensor) -> float:
    return float(weight.detach().std())


# --- what the decoder computes --------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["pre", "post", "none"])
@pytest.mark.parametrize("connection", KINDS[:3], ids=str)
def test_no_token_sees_a_later_one(connection: ConnectionConfig, placement: str) -> None:
    model = decoder(connection, placement=placement)
    for at in range(7):
        with streams(stream_places(model)) as seen:
            logits = model(tokens())
        (gradient,) = torch.autograd.grad(logits[:, at].square().sum(), seen[0])
        assert torch.count_nonzero(gradient[:, at + 1 :]) == 0
        assert gradient[:, : at + 1].abs().amax(-1).min() > 0


def test_examples_of_a_batch_do_not_mix() -> None:
    model = decoder()
    together = model(tokens(5))
    apart = torch.cat([model(row[None]) for row in tokens(5)])
    torch.testing.assert_close(together, apart)


def test_shorter_sequences_are_prefixes() -> None:
    model = decoder()
    torch.testing.assert_close(model(tokens())[:, :4], model(tokens()[:, :4]))


def test_attention_is_softmax_over_earlier_tokens() -> None:
    torch.manual_seed(0)
    attention = Attention(8, 2, causal=True)
    x = torch.randn(3, 5, 8)
    query, key, value = (part.view(3, 5, 2, 4).transpose(1, 2) for part in attention.query_key_value(x).chunk(3, -1))
    scores = query @ key.transpose(-1, -2) / 2
    weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
    mixed = (weights @ value).transpose(1, 2).reshape(3, 5, 8)
    torch.testing.assert_close(attention(x), mixed @ attention.project.weight.T)


def test_mlp_formula() -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(8), torch.randn(3, 5, 8)
    assert mlp.up.weight.shape == (32, 8)
    torch.testing.assert_close(mlp(x), F.gelu(x @ mlp.up.weight.T) @ mlp.down.weight.T)


@pytest.mark.parametrize("placement", ["pre", "post", "none"])
def test_decoder_is_its_sublayers_in_turn(placement: str) -> None:
    model = decoder(placement=placement)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,))

    x = model.token_embedding.weight[tokens()] + model.position_embedding.weight
    for block in model.blocks:
        for sublayer in block.children():
            branch = sublayer.branch
            x = {
                "pre": lambda x, f=branch: x + f(norm(x)),
                "post": lambda x, f=branch: norm(x + f(x)),
                "none": lambda x, f=branch: x + f(x),
            }[placement](x)
    torch.testing.assert_close(model(tokens()), norm(x) @ model.head.weight.T)


def test_rmsnorm_replaces_every_norm() -> None:
    model = decoder(norm="rmsnorm")
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    assert len(norms) == 2 * 3 + 1
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    x = 3 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norms[0](x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert not torch.allclose(model(tokens()), decoder()(tokens()), atol=1e-3)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("materialised", [False, True])
def test_gain_of_the_stacks_norms_at_the_start(norm: str, materialised: bool) -> None:
    if materialised:
        with torch.device("meta"):
            model = Decoder(config(norm=norm, norm_gain=2.0))
        model.to_empty(device="cpu").reset_parameters()
    else:
        model = decoder(norm=norm, norm_gain=2.0)
    gains = [p.detach() for n, p in model.stack.named_parameters() if n.endswith("norm_input.weight")]
    assert len(gains) == 2 * 3
    assert all(torch.equal(gain, torch.full_like(gain, 2)) for gain in gains)
    assert torch.equal(model.norm.get_parameter("weight").detach(), torch.ones(16))


def test_gain_of_two_doubles_what_a_sublayer_gets() -> None:
    doubled = decoder(norm_gain=2.0).stack.sublayers()[0]
    plain = decoder().stack.sublayers()[0]
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(doubled.norm_input(x), 2 * plain.norm_input(x))
    with pytest.raises(UserError, match="norm_gain"):
        config(norm_gain=0.0)


@pytest.mark.parametrize(
    ("changed", "norms"),
    [({}, 2), ({"placement": "post"}, 2), ({"placement": "none"}, 0)],
)
@pytest.mark.parametrize(("norm", "per_norm"), [("layernorm", 2), ("rmsnorm", 1)])
@pytest.mark.parametrize(("kind", "extra"), [("add", 0), ("none", 0), ("rezero", 2)])
def test_number_of_parameters(
    kind: str, extra: int, norm: str, per_norm: int, changed: dict[str, Any], norms: int
) -> None:
    d, depth, vocabulary, context = 16, 3, 40, 7
    per_block = 12 * d * d + norms * per_norm * d + extra
    wanted = 2 * vocabulary * d + context * d + depth * per_block + per_norm * d
    assert sum(p.numel() for p in decoder(kind, norm=norm, **changed).parameters()) == wanted


def test_tied_head_is_the_embedding() -> None:
    tied, free = decoder(embedding="gpt2", tied_head=True), decoder(embedding="gpt2")
    assert tied.head.weight is tied.token_embedding.weight
    assert tied.head.weight.data_ptr() == tied.token_embedding.weight.data_ptr()
    count = sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters())
    assert count == 40 * 16
    assert 0.017 < deviation(tied.head.weight) < 0.023
    tied.reset_parameters()
    assert tied.head.weight is tied.token_embedding.weight
    assert 0.017 < deviation(tied.head.weight) < 0.023


def test_tied_head_is_tied_again_after_materialisation() -> None:
    with torch.device("meta"):
        model = Decoder(config(embedding="gpt2", tied_head=True))
    model.to_empty(device="cpu")
    model.reset_parameters()
    assert model.head.weight is model.token_embedding.weight


def test_tied_head_is_refused_with_unit_embedding() -> None:
    with pytest.raises(UserError, match="use embedding: gpt2"):
        config(embedding="unit", tied_head=True)


def test_weights_survive_saving() -> None:
    one, other = decoder("rezero", seed=0), decoder("rezero", seed=1)
    assert not torch.equal(one(tokens()), other(tokens()))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(tokens()), other(tokens()))


# --- how the decoder starts -----------------------------------------------------------------------

LARGE: dict[str, Any] = {"width": 64, "depth": 8, "init_std": 0.07, "vocabulary": 256, "context": 64}


def writers(model: Decoder) -> list[Tensor]:
    """Every matrix that writes to the stream, found without the model's help."""
    return [m.weight for name, m in model.named_modules() if name.endswith((".project", ".down"))]


def others(model: Decoder) -> list[Tensor]:
    """All other matrices of the blocks."""
    return [m.weight for name, m in model.named_modules() if name.endswith((".query_key_value", ".up"))]


@pytest.mark.parametrize(("weight_init", "scale"), [("depth_scaled", 1 / math.sqrt(2 * 8)), ("plain", 1.0)])
def test_depth_scaling_meets_the_stream_writers_alone(weight_init: str, scale: float) -> None:
    model = decoder(**LARGE, weight_init=weight_init)
    assert len(writers(model)) == len(others(model)) == 2 * 8
    for weight in writers(model):
        assert deviation(weight) == pytest.approx(0.07 * scale, rel=0.06)
    for weight in [*others(model), model.head.weight]:
        assert deviation(weight) == pytest.approx(0.07, rel=0.06)


@pytest.mark.parametrize(("embedding", "std"), [("unit", 1.0), ("gpt2", 0.02)])
def test_embeddings_start_as_asked(embedding: str, std: float) -> None:
    model = decoder(**LARGE, embedding=embedding)
    assert deviation(model.token_embedding.weight) == pytest.approx(std, rel=0.03)
    assert deviation(model.position_embedding.weight) == pytest.approx(std / 2, rel=0.04)


def test_stream_writers_are_all_of_them() -> None:
    model = decoder()
    assert {id(weight) for weight in model.stream_writers()} == {id(weight) for weight in writers(model)}


def test_layers_differ_at_the_start() -> None:
    for weights in (writers(decoder()), others(decoder())):
        assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i] if a.shape == b.shape)


@pytest.mark.parametrize("connection", KINDS, ids=str)
@pytest.mark.parametrize("placement", ["pre", "post", "none"])
def test_weights_in_common_start_equal(connection: ConnectionConfig, placement: str) -> None:
    plain, arm = decoder().state_dict(), decoder(connection, placement=placement).state_dict()
    common = plain.keys() & arm.keys()
    assert len(common) >= 3 + 4 * 3
    assert all(torch.equal(plain[name], arm[name]) for name in common)


def test_start_depends_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    one = decoder(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(11)
    assert all(torch.equal(a, b) for a, b in zip(one.values(), decoder(seed=3).state_dict().values(), strict=True))
    assert not torch.equal(one["head.weight"], decoder(seed=4).head.weight)


def test_start_is_the_same_in_threads() -> None:
    """Workers of a Dask cluster run several trainings as threads of one process by default."""

    def start(seed: int) -> Tensor:
        return torch.cat([p.detach().flatten() for p in decoder(seed=seed, depth=6).parameters()])

    alone, interval = [start(seed) for seed in range(16)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(start, range(16)))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_initial_loss_does_not_depend_on_depth() -> None:
    """With a final norm it is ln V + d std^2 / 2 of the head at every depth."""
    for depth in (2, 24):
        model = decoder(width=64, depth=depth, init_std=0.1, vocabulary=256, context=64)
        text = torch.randint(256, (16, 65), generator=torch.Generator().manual_seed(0))
        first = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).detach()
        assert first.item() == pytest.approx(math.log(256) + 64 * 0.1**2 / 2, abs=0.06)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["pre", "post", "none"])
def test_gradients_reach_every_parameter(placement: str) -> None:
    model = decoder(placement=placement)
    loss(model).backward()
    unreached = [n for n, p in model.named_parameters() if p.grad is None or torch.count_nonzero(p.grad) == 0]
    assert unreached == []


def test_rezero_loss_is_the_same_at_every_depth() -> None:
    shallow, deep = decoder("rezero", depth=1), decoder("rezero", depth=100)
    state = deep.state_dict() | {n: v for n, v in shallow.state_dict().items() if not n.startswith("stack.blocks")}
    deep.load_state_dict(state)
    assert torch.equal(loss(shallow), loss(deep))


def test_rezero_opens_by_alpha_alone() -> None:
    model = decoder("rezero")
    loss(model).backward()
    for module in model.modules():
        if isinstance(module, ReZero):
            assert module.alpha.grad is not None
            assert module.alpha.grad != 0
    branches = [p for name, p in model.named_parameters() if ".branch." in name]
    assert len(branches) == 4 * 3
    assert all(p.grad is not None and torch.count_nonzero(p.grad) == 0 for p in branches)


# --- ResNet ---------------------------------------------------------------------------------------


def resnet(connection: ConnectionConfig = KINDS[1], depth: int = 2) -> ResNet:
    model = build(ResNetConfig(channels=8, depth=depth, classes=10, connection=connection), 0)
    assert isinstance(model, ResNet)
    return model


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_resnet_shapes() -> None:
    model = resnet(depth=3)
    with streams(stream_places(model)) as seen:
        assert model(images()).shape == (6, 10)
    assert [x.shape for x in seen] == [(6, 8, 8, 8)] * 4
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 2 * 3 + 1


def test_resnet_block_formula() -> None:
    model = resnet(KINDS[2]).eval()
    with streams(stream_places(model)) as seen:
        model(images())
    block = model.blocks[0]
    x = seen[0]
    first, second = block.convolutions.branch[2], block.convolutions.branch[5]  # type: ignore[union-attr, index]
    scale = (1 + 1e-5) ** -0.5  # an untrained batch norm in evaluation mode
    channels_first = (x * scale).relu().movedim(-1, 1)
    update = second(first(channels_first).mul(scale).relu()).movedim(1, -1)  # type: ignore[operator]
    torch.testing.assert_close(seen[1], 0.5 * x + update)


def test_resnet_convolutions_start_he_normal() -> None:
    for module in resnet(depth=4).modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 1:
            assert deviation(module.weight) == pytest.approx(math.sqrt(2 / (9 * module.in_channels)), rel=0.15)


@pytest.mark.parametrize("connection", KINDS[1:3], ids=str)
def test_resnet_gradients_reach_every_parameter(connection: ConnectionConfig) -> None:
    model = resnet(connection)
    F.cross_entropy(model(images()), torch.arange(6)).backward()
    unreached = [n for n, p in model.named_parameters() if p.grad is None or torch.count_nonzero(p.grad) == 0]
    assert unreached == []


def test_resnet_weights_in_common_start_equal() -> None:
    plain = resnet().state_dict()
    for connection in KINDS:
        arm = resnet(connection).state_dict()
        assert all(torch.equal(value, arm[name]) for name, value in plain.items())
