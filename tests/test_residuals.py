"""Residual connections: each kind's formula, start and options, norm placements, and a new kind in one class."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.decoder import Decoder, DecoderConfig
from reslab.models.resnet import ResNetConfig
from reslab.models.state_space import StateSpaceConfig
from reslab.models.unet import UNetConfig
from reslab.residuals import (
    CONNECTIONS,
    Add,
    Connection,
    ConnectionConfig,
    ConnectionOptions,
    Residual,
    ReZero,
    Site,
    Stack,
    connect,
    require_fit,
)
from reslab.residuals import connection as registry
from reslab.residuals.hyper import sinkhorn
from reslab.residuals.stack import Placement, ResidualSettings
from reslab.schema import UserError, validate
from reslab.training import build, parameter_groups
from variants import NORMED_STREAM, VARIANTS, config, decoder, fits, tokens

Register = Callable[[str], Callable[[type[Connection]], type[Connection]]]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """`register`, whose kinds are gone after the test."""
    monkeypatch.setattr(registry, "CONNECTIONS", dict(registry.CONNECTIONS))
    return registry.register


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A stream and an update, [2, 5, 8]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, 8, generator=generator), torch.randn(2, 5, 8, generator=generator)


def site(index: int = 0, sublayers: int = 6) -> Site:
    return Site(index, sublayers, width=8)


def made(connection: ConnectionConfig | str, index: int = 0) -> Connection:
    chosen = VARIANTS[connection] if isinstance(connection, str) else connection
    return connect(chosen, site(index))


# --- formulas of the kinds whose stream is a tensor -----------------------------------------------


@pytest.mark.parametrize(
    ("connection", "index", "formula"),
    [
        (ConnectionConfig("none"), 0, lambda x, v: v),
        (ConnectionConfig("add"), 0, lambda x, v: x + v),
        (ConnectionConfig("weighted_skip", weight=0.3), 0, lambda x, v: 0.3 * x + v),
        (ConnectionConfig("scaled", scale=0.3), 0, lambda x, v: x + 0.3 * v),
        (ConnectionConfig("rezero"), 0, lambda x, v: x),
        (ConnectionConfig("skipinit"), 0, lambda x, v: x),
        (ConnectionConfig("skipinit", initial=0.25), 0, lambda x, v: x + v / 4),
        (ConnectionConfig("layerscale", initial=0.01), 0, lambda x, v: x + v / 100),
        (ConnectionConfig("highway", bias=-2.0), 0, lambda x, v: x + (v - x) / (1 + math.exp(2))),
        (ConnectionConfig("rescaled"), 0, lambda x, v: (x + v) / 2),
        (ConnectionConfig("rescaled"), 3, lambda x, v: (4 * x + v) / 5),
        (ConnectionConfig("layernorm_scaling"), 3, lambda x, v: x + v),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_formula(connection: ConnectionConfig, index: int, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    stream, update = (part.double() for part in pair())
    kind = made(connection, index).double()
    torch.testing.assert_close(kind.write(stream, update), formula(stream, update), rtol=1e-7, atol=1e-7)
    assert kind.read(stream) is stream


@pytest.mark.parametrize(("name", "parameter"), [("rezero", "alpha"), ("skipinit", "alpha"), ("layerscale", "gamma")])
def test_learnt_scale_is_on_the_branch_not_on_the_skip(name: str, parameter: str) -> None:
    stream, update = pair()
    kind = made(name)
    nn.init.constant_(kind.get_parameter(parameter), 0.25)
    assert torch.equal(kind.write(stream, update), stream + 0.25 * update)


@pytest.mark.parametrize("name", ["add", "scaled", "rezero", "skipinit", "layerscale", "layernorm_scaling"])
def test_what_is_weighed_is_what_is_added(name: str) -> None:
    stream, update = pair()
    kind = made(name)
    for parameter in kind.parameters():
        nn.init.constant_(parameter, 0.3)
    torch.testing.assert_close(kind.write(stream, update) - stream, kind.weigh(update))


def test_layerscale_has_one_scale_a_channel() -> None:
    stream, update = pair()
    kind = made("layerscale")
    gamma = kind.get_parameter("gamma")
    with torch.no_grad():
        gamma.copy_(torch.arange(8.0))
    torch.testing.assert_close(kind.write(stream, update), stream + torch.arange(8.0) * update)


def test_highway_gate_looks_at_the_stream() -> None:
    stream, update = pair()
    kind = made("highway")
    with torch.no_grad():
        kind.get_parameter("gate.weight").copy_(torch.eye(8))
    gate = torch.sigmoid(stream - 2)
    torch.testing.assert_close(kind.write(stream, update), (1 - gate) * stream + gate * update)


def test_rescaled_is_the_mean_of_embedding_and_updates() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(3, 8, generator=generator, dtype=torch.float64) for _ in range(7)]
    stream = terms[0]
    for index, update in enumerate(terms[1:]):
        stream = made("rescaled", index).write(stream, update)
    torch.testing.assert_close(stream, torch.stack(terms).mean(0))


def test_layernorm_scaling_counts_blocks() -> None:
    """Both sublayers of block b (from 1) get norm(x) / sqrt(b)."""
    h, _ = pair()
    for index, block in enumerate([1, 1, 2, 2, 3, 3]):
        torch.testing.assert_close(made("layernorm_scaling", index).feed(h), h / math.sqrt(block))


def test_value_residual_joins_values_with_the_first_ones() -> None:
    early = connect(VARIANTS["value_residual"], Site(0, 6, 8, attention=0))
    kind = connect(VARIANTS["value_residual"], Site(2, 6, 8, attention=1))
    (x, first), (own, update) = pair(0), pair(1)
    stream = early.write(type(kind).ends(site(6), ConnectionOptions()).start(x), torch.zeros_like(x))
    values, stream = early.mix_values(stream, first)
    assert torch.equal(values, first)
    assert list(early.parameters()) == []  # nothing to join at the first attention, nor at an MLP
    values, stream = kind.mix_values(stream, own)
    torch.testing.assert_close(values, (own + first) / 2)
    assert torch.equal(kind.write(stream, update).x, x + update)


def test_full_weight_is_add_and_no_weight_is_none() -> None:
    def logits(connection: ConnectionConfig) -> Tensor:
        return decoder(connection)(tokens())

    add, none = logits(ConnectionConfig("add")), logits(ConnectionConfig("none"))
    assert torch.equal(logits(ConnectionConfig("weighted_skip", weight=1.0)), add)
    assert torch.equal(logits(ConnectionConfig("weighted_skip", weight=0.0)), none)
    assert torch.equal(logits(ConnectionConfig("scaled", scale=1.0)), add)
    assert not torch.allclose(logits(ConnectionConfig("weighted_skip", weight=0.5)), add, atol=1e-3)


# --- formulas of hyper-connections and of static depth weights ------------------------------------


def test_hyper_formula() -> None:
    """h = r H, H <- M H + b v with each token's own weights."""
    n, d = 3, 8
    kind = connect(ConnectionConfig("hyper", streams=n), site())
    generator = torch.Generator().manual_seed(0)
    for parameter in kind.parameters():
        nn.init.normal_(parameter, generator=generator)
    streams = torch.randn(4, n, d, generator=generator)
    update = torch.randn(4, d, generator=generator)
    scale = kind.get_parameter("token_scale")
    for token in range(4):
        H = streams[token]
        normed = F.normalize(H, dim=-1) * math.sqrt(d)
        of_read, of_mix, of_write = (
            torch.tanh(normed @ kind.get_parameter(f"{name}_map.weight").T) for name in ("read", "mix", "write")
        )
        r = kind.get_parameter("read_weight") + scale[0] * of_read[:, 0]
        M = kind.get_parameter("mix_weight") + scale[1] * of_mix.T
        b = kind.get_parameter("write_weight") + scale[2] * of_write[:, 0]
        torch.testing.assert_close(kind.read(streams)[token], r @ H, rtol=1e-4, atol=1e-4)
        wanted = M @ H + torch.outer(b, update[token])
        torch.testing.assert_close(kind.write(streams, update)[token], wanted, rtol=1e-4, atol=1e-4)


def test_doubly_stochastic_formula() -> None:
    """Of all streams together: r = sigmoid, M = Sinkhorn, b = 2 sigmoid of a linear map of the normed streams."""
    n, d = 3, 8
    kind = connect(ConnectionConfig("hyper", streams=n, doubly_stochastic=True), site())
    generator = torch.Generator().manual_seed(0)
    for parameter in kind.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    streams, update = torch.randn(4, n, d, generator=generator), torch.randn(4, d, generator=generator)
    scale = kind.get_parameter("token_scale")
    for token in range(4):
        normed = F.normalize(streams[token].flatten(), dim=0) * math.sqrt(n * d)
        of_read, of_mix, of_write = (
            kind.get_parameter(f"{name}_map.weight") @ normed for name in ("read", "mix", "write")
        )
        r = torch.sigmoid(kind.get_parameter("read_weight") + scale[0] * of_read)
        M = sinkhorn(kind.get_parameter("mix_weight") + (scale[1] * of_mix).view(n, n).T)
        b = 2 * torch.sigmoid(kind.get_parameter("write_weight") + scale[2] * of_write)
        torch.testing.assert_close(kind.read(streams)[token], r @ streams[token], rtol=1e-4, atol=1e-4)
        wanted = M @ streams[token] + torch.outer(b, update[token])
        torch.testing.assert_close(kind.write(streams, update)[token], wanted, rtol=1e-4, atol=1e-4)


def test_sinkhorn_is_doubly_stochastic() -> None:
    matrix = sinkhorn(torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert (matrix > 0).all()
    torch.testing.assert_close(matrix.sum(-2), torch.ones(5, 4, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(-1), torch.ones(5, 4, dtype=torch.float64), rtol=1e-3, atol=1e-3)


def test_doubly_stochastic_mixing_keeps_the_mean_of_the_streams() -> None:
    kind = made("hyper doubly stochastic")
    for parameter in kind.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    streams = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    mixed = kind.write(streams, torch.zeros(6, 8))
    torch.testing.assert_close(mixed.mean(-2), streams.mean(-2), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["hyper", "hyper static", "hyper doubly stochastic"])
def test_hyper_mixing_is_not_stuck(name: str) -> None:
    """Public report: a peer's mixing matrix stayed at the identity, for it got no gradient."""
    model = decoder(name)
    model(tokens()).square().sum().backward()
    inner = [p for n, p in model.named_parameters() if n.endswith(("mix_weight", "read_weight", "write_weight"))]
    assert len(inner) == 3 * 6
    assert all(p.grad is not None and p.grad.abs().max() > 1e-6 for p in inner[:-3])


def test_denseformer_averages_after_each_block() -> None:
    model = decoder("denseformer").double()
    weights = [p for n, p in model.named_parameters() if "connection.weights" in n]
    assert [len(w) for w in weights] == [2, 3, 4]
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        nn.init.normal_(weight, generator=generator)

    def branch(sublayer: Any, x: Tensor) -> Tensor:
        return sublayer.branch(F.layer_norm(x, (16,)))

    x = model.token_embedding.weight[tokens()] + model.position_embedding.weight
    outputs = [x]
    for block, weight in zip(model.blocks, weights, strict=True):
        for sublayer in block.children():
            x = x + branch(sublayer, x)
        outputs.append(x)
        x = sum(w * output for w, output in zip(weight, outputs, strict=True))
    torch.testing.assert_close(model(tokens()), F.layer_norm(x, (16,)) @ model.head.weight.T)


# --- exactly at the start -------------------------------------------------------------------------

EQUAL_TO_ADD = [
    ("scaled", {"scale": 1.0}),
    ("skipinit", {"initial": 1.0}),
    ("layerscale", {"initial": 1.0}),
    ("rescaled", {}),
    ("denseformer", {}),
    ("hyper", {}),
    ("hyper", {"dynamic": False, "streams": 3}),
    ("hyper", {"doubly_stochastic": True}),
    ("attnres", {}),
    ("attnres", {"block": 2}),
    ("attnres", {"block": 4}),
    ("attnres", {"block": 6}),
    ("attnres", {"heads": 4}),
    ("attnres", {"key_rank": 4}),
    ("attnres", {"key_norm": False}),
    ("attnres", {"query": "input"}),
    ("attnres", {"query": "none"}),
    ("attnres", {"activation": "sigmoid"}),
    ("attnres", {"window": 7}),
]


@pytest.mark.parametrize(("kind", "options"), EQUAL_TO_ADD)
def test_starts_equal_to_the_standard_model(kind: str, options: dict[str, Any]) -> None:
    """With pre-norm and eps = 0, to rounding in float64: a mean or a half is undone by the norm."""
    shape: dict[str, Any] = {"norm": "rmsnorm", "norm_eps": 0.0}
    standard, model = decoder("add", **shape).double(), decoder(ConnectionConfig(kind, **options), **shape).double()
    torch.testing.assert_close(model(tokens()), standard(tokens()), rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", [{"window": 2}, {"stride": 2}, {"window": 3, "window_embedding": False}])
def test_reading_a_part_of_the_history_breaks_the_equality(options: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"norm": "rmsnorm", "norm_eps": 0.0}
    standard, model = decoder("add", **shape), decoder(ConnectionConfig("attnres", **options), **shape)
    assert (model(tokens()) - standard(tokens())).abs().max() > 0.1


def test_small_embedding_with_a_large_eps_breaks_the_equality() -> None:
    """The trap: the mean over n sources is 1/n of the sum, so that eps weighs n^2 times as much."""

    def deviation(eps: float) -> float:
        shape: dict[str, Any] = {"norm": "rmsnorm", "norm_eps": eps, "embedding": "gpt2", "init_std": 0.02}
        standard, model = (
            decoder("add", **shape).double()(tokens()),
            decoder("attnres full", **shape).double()(tokens()),
        )
        return float(((model - standard).norm() / standard.norm()).detach())

    assert deviation(1e-5) > deviation(1e-6) > 0.01
    assert deviation(1e-12) < 1e-6


@pytest.mark.parametrize("name", ["rezero", "skipinit closed", "layerscale closed"])
def test_closed_branches_make_every_depth_the_same(name: str) -> None:
    closed = {
        "skipinit closed": ConnectionConfig("skipinit"),
        "layerscale closed": ConnectionConfig("layerscale", initial=0.0),
    }
    connection = closed.get(name, VARIANTS["rezero"])
    shallow, deep = decoder(connection, depth=1), decoder(connection, depth=30)
    common = {n: v for n, v in shallow.state_dict().items() if not n.startswith("stack.blocks")}
    deep.load_state_dict(deep.state_dict() | common)
    assert torch.equal(shallow(tokens()), deep(tokens()))
    deep(tokens()).square().mean().backward()
    branches = [p for n, p in deep.named_parameters() if ".branch." in n]
    scales = [p for n, p in deep.named_parameters() if n.endswith(("alpha", "gamma"))]
    assert len(branches) == 4 * 30
    assert all(p.grad is not None and torch.count_nonzero(p.grad) == 0 for p in branches)
    assert all(p.grad is not None and torch.count_nonzero(p.grad) > 0 for p in scales)


def mean_square_after(depth: int, placement: str) -> float:
    """E x^2 at the end of an untrained stack."""
    model = decoder("add", depth=depth, placement=placement, width=64, vocabulary=256, context=32, weight_init="plain")
    text = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        x = model.stack(model.token_embedding(text) + model.position_embedding.weight)
    return float(x.square().mean())


@pytest.mark.parametrize("depth", [4, 12, 48])
def test_norm_on_the_branch_makes_the_stream_grow_by_one_a_sublayer(depth: int) -> None:
    """E x^2 = s_0 + 2L where branches are uncorrelated; Peri-LN norms the embedding too, so that s_0 = 1."""
    assert mean_square_after(depth, "sandwich") == pytest.approx(1.25 + 2 * depth, rel=0.2)
    assert mean_square_after(depth, "peri") == pytest.approx(1 + 2 * depth, rel=0.2)


@pytest.mark.parametrize("placement", ["post", "sandwich_sum", "deepnorm"])
def test_norm_on_the_stream_keeps_it_at_one(placement: str) -> None:
    assert mean_square_after(12, placement) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("name", ["add", "scaled", "layerscale", "rescaled", "denseformer", "hyper", "attnres block"])
def test_a_stream_that_is_scaled_as_a_whole_changes_nothing(name: str) -> None:
    """Public report: a rescaling of the residual stream applied twice. Once is undone by the norms, exactly."""
    model = decoder(name, norm="rmsnorm", norm_eps=0.0)
    before = model(tokens())
    with torch.no_grad():
        for weight in (model.token_embedding.weight, model.position_embedding.weight, *model.stream_writers()):
            weight *= 4.0  # a power of two rounds nothing
    torch.testing.assert_close(model(tokens()), before, rtol=0, atol=1e-6 if name == "attnres block" else 0)
    with torch.no_grad():
        for weight in model.stream_writers():
            weight *= 4.0
    assert not torch.allclose(model(tokens()), before, atol=1e-2)


# --- dtype and inputs -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, c in VARIANTS.items() if c.type.plain_stream and n != "none"])
def test_stream_keeps_its_precision(name: str) -> None:
    """Autocast hands over updates in bfloat16; the sum stays in float32."""
    stream, update = pair()
    assert made(name).write(stream, update.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("name", [n for n, c in VARIANTS.items() if c.type.plain_stream])
def test_write_leaves_its_inputs_alone(name: str) -> None:
    stream, update = pair()
    made(name).write(stream, update)
    assert torch.equal(stream, pair()[0])
    assert torch.equal(update, pair()[1])


@pytest.mark.parametrize("name", ["hyper", "hyper doubly stochastic", "denseformer", "attnres full", "attnres block"])
def test_a_low_precision_stream_is_rounded_once(name: str) -> None:
    """At the start these equal `add`; in bfloat16 they are nearly as far from it as `add` itself."""
    shape: dict[str, Any] = {"depth": 12, "norm": "rmsnorm", "norm_eps": 0.0}
    exact = decoder("add", **shape)(tokens()).detach()

    def error(kind: str) -> float:
        return float((decoder(kind, stream_dtype="bfloat16", **shape)(tokens()).detach() - exact).norm() / exact.norm())

    assert error(name) < 2 * error("add")


@pytest.mark.parametrize("name", [n for n in VARIANTS if n.startswith("attnres")])
def test_depth_weights_are_in_float32_in_a_bfloat16_model(name: str) -> None:
    model = decoder(name).bfloat16()
    stream = model.stack.ends.start(torch.randn(2, 16, dtype=torch.bfloat16))
    for sublayer in model.stack.sublayers():
        stream = sublayer.connection.write(stream, torch.randn(2, 16, dtype=torch.bfloat16))
    output = model.stack.ends.get_submodule("output")
    assert {w.dtype for w in output.depth_weights(stream)} == {torch.float32}  # type: ignore[operator]


# --- choosing a kind ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("rezro", {}, "unknown residual connection 'rezro'; did you mean 'rezero'"),
        ("attnress", {}, "unknown residual connection 'attnress'; did you mean 'attnres'"),
        ("weighted_skip", {}, "'weighted_skip': weight: missing; add it"),
        ("add", {"weight": 0.5}, "'add': weight: unknown parameter; valid are: none"),
        ("layerscale", {"intial": 0.1}, "'layerscale': intial: unknown parameter; did you mean 'initial'"),
        ("scaled", {"scale": "big"}, "'scaled': scale: input should be a valid number, got 'big'"),
        ("attnres", {"window": 0}, "'attnres': window: input should be greater than or equal to 1, got 0"),
        ("attnres", {"block": 0}, "'attnres': block: input should be greater than or equal to 1, got 0"),
        ("attnres", {"stride": 0}, "'attnres': stride: input should be greater than or equal to 1"),
        ("attnres", {"query": "learned"}, "'attnres': query: input should be 'learnt', 'input' or 'none'"),
        ("attnres", {"query": "none", "key_rank": 4}, "key_rank with query: none has no keys"),
        ("attnres", {"query": "none", "key_norm": False}, "key_norm: false with query: none"),
        ("attnres", {"window_embedding": False}, "window_embedding: false needs a window"),
        ("attnres", {"heads": 2, "value_rank": 4}, "a compressed source has no heads"),
        ("attnres", {"window": 1, "window_embedding": False}, "window 1 with stride 1 .* nothing to attend to"),
        ("attnres", {"window": 2, "stride": 2, "window_embedding": False}, "leaves the newest source alone"),
        ("hyper", {"streams": 1}, "'hyper': streams: input should be greater than or equal to 2, got 1"),
    ],
)
def test_wrong_kind_or_option(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConnectionConfig(kind, **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("attnres", {"block": 7}, "block 7 is larger than the 6 sublayers"),
        ("attnres", {"heads": 3}, "width 16 is not divisible by heads 3"),
        ("attnres", {"heads": 4, "key_rank": 6}, "key_rank 6 is not divisible by heads 4"),
        ("attnres", {"key_rank": 17}, "key_rank 17 is larger than width 16"),
        ("attnres", {"value_rank": 17}, "value_rank 17 is larger than width 16"),
        ("denseformer", {"period": 7}, "period 7 is larger than the 6 sublayers"),
    ],
)
def test_option_that_does_not_fit_the_model(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(ConnectionConfig(kind, **options))
    with pytest.raises(UserError, match=message):
        connect(ConnectionConfig(kind, **options), Site(0, 6, 16))


def test_fault_in_settings_names_its_place() -> None:
    shape = {"vocabulary": 40, "width": 16, "heads": 4, "context": 7, "depth": 3, "init_std": 0.2}
    with pytest.raises(UserError, match=r"params.yaml: connection: residual connection 'attnres': blok: unknown"):
        validate(DecoderConfig, shape | {"connection": {"kind": "attnres", "blok": 2}}, "params.yaml")


def test_config_keeps_every_option_and_survives_json() -> None:
    chosen = ConnectionConfig("attnres", block=2)
    assert '"window":null' in chosen.model_dump_json()
    assert ConnectionConfig.model_validate_json(chosen.model_dump_json()) == chosen
    assert hash(ConnectionConfig("attnres", block=2)) == hash(chosen)
    assert ConnectionConfig("attnres", block=3) != chosen
    assert chosen.model_dump() == validate(ConnectionConfig, {"kind": "attnres", "block": 2}, "x").model_dump()


def test_name_is_given_once(register: Register) -> None:
    with pytest.raises(ValueError, match=r"connection 'add' is reslab\.residuals\.additive\.Add; choose another"):
        register("add")(ReZero)
    assert registry.CONNECTIONS["add"] is Add


def test_a_cell_that_runs_again_replaces_its_kind(register: Register) -> None:
    def define(factor: float) -> type[Connection]:
        class Own(Connection):
            def write(self, stream: Tensor, update: Tensor) -> Tensor:
                return stream + factor * update

        return Own

    register("own")(define(1.0))
    second = register("own")(define(2.0))
    assert registry.CONNECTIONS["own"] is second


def written(stream: Tensor, update: Tensor) -> Tensor:
    return stream + update


class HasKind(ConnectionOptions):
    kind: str = "x"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (type("Named", (Add,), {"Options": HasKind}), "an option cannot be named 'kind'"),
        (type("Plain", (Add,), {"Options": object}), "derive its Options from ConnectionOptions"),
        (type("Empty", (Connection,), {}), "has no write"),
        (nn.Linear, "derive a class from Connection"),
        (written, "derive a class from Connection"),
    ],
)
def test_what_cannot_be_a_connection_is_refused_when_registered(register: Register, kind: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        register("own")(kind)
    assert "own" not in registry.CONNECTIONS


def test_register_without_a_name_is_refused(register: Register) -> None:
    with pytest.raises(UserError, match=r'write @register\("name"\)'):
        register(Add)  # type: ignore[arg-type]


def test_parameters_without_a_start_are_refused(register: Register) -> None:
    class Startless(Add):
        def __init__(self, site: Site, options: ConnectionOptions) -> None:
            super().__init__(site, options)
            self.gain = nn.Parameter(torch.empty(()))

    register("startless")(Startless)
    with pytest.raises(UserError, match="'startless' has parameters; give them first values in reset_parameters"):
        connect(ConnectionConfig("startless"), site())


def test_copies_of_a_config_are_checked() -> None:
    layerscale = ConnectionConfig("layerscale", initial=0.5)
    assert layerscale.model_copy(update={"initial": 0.25}) == ConnectionConfig("layerscale", initial=0.25)
    assert layerscale.model_copy(update={"kind": "skipinit"}) == ConnectionConfig("skipinit")
    with pytest.raises(UserError, match="did you mean 'initial'"):
        layerscale.model_copy(update={"intial": 0.25})
    assert len({hash(ConnectionConfig("scaled", scale=i / 50)) for i in range(50)}) == 50


def test_every_kind_has_a_docstring_with_formula_and_source() -> None:
    for name, kind in CONNECTIONS.items():
        text = kind.__doc__ or ""
        assert "<-" in text or "=" in text, name
        assert re.search(r"arXiv|docs/claims.md|\b19\d\d\b", text), name  # before there was arXiv, the year


# --- norm placement -------------------------------------------------------------------------------


def residual(placement: Placement, connection: Connection) -> Residual:
    torch.manual_seed(0)
    return Residual(nn.Linear(8, 8), connection, lambda: nn.LayerNorm(8), placement)


def test_placement_is_where_the_norm_stands() -> None:
    stream, _ = pair()

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,))

    f = residual("none", Add(site(), ConnectionOptions())).branch
    formulas: dict[Placement, Tensor] = {
        "pre": stream + f(norm(stream)),
        "post": norm(stream + f(stream)),
        "sandwich": stream + norm(f(norm(stream))),
        "sandwich_sum": norm(stream + f(norm(stream))),
        "peri": stream + norm(f(norm(stream))),
        "deepnorm": norm(6**0.25 * stream + f(stream)),
        "none": stream + f(stream),
    }
    for placement, wanted in formulas.items():
        torch.testing.assert_close(residual(placement, made("add"))(stream), wanted)


def test_peri_norms_the_embedding() -> None:
    peri, sandwich = decoder(placement="peri"), decoder(placement="sandwich")
    assert isinstance(peri.stack.norm_start, nn.LayerNorm)
    assert isinstance(sandwich.stack.norm_start, nn.Identity)


@pytest.mark.parametrize(("depth", "alpha"), [(3, 6**0.25), (6, 12**0.25), (100, 200**0.25)])
def test_deepnorm_alpha(depth: int, alpha: float) -> None:
    """(2L)^(1/4) for L blocks of two sublayers (Wang et al. 2022, fig. 2, decoder only)."""
    sublayers = decoder(placement="deepnorm", depth=depth).stack.sublayers()
    assert [s.skip_scale for s in sublayers] == pytest.approx([alpha] * 2 * depth)


@pytest.mark.parametrize("placement", NORMED_STREAM)
@pytest.mark.parametrize("name", [n for n, c in VARIANTS.items() if not c.type.plain_stream])
def test_norm_on_a_stream_that_is_no_tensor_is_refused(name: str, placement: Placement) -> None:
    with pytest.raises(UserError, match=f"placement '{placement}' norms the stream, which for connection"):
        require_fit(VARIANTS[name], placement)
    with pytest.raises(UserError, match="is not one tensor; use one of pre, sandwich, peri, none"):
        config(name, placement=placement)


def test_deepnorm_takes_the_standard_connection_alone() -> None:
    with pytest.raises(UserError, match="use connection 'add', not 'rezero'"):
        require_fit(VARIANTS["rezero"], "deepnorm")


@pytest.mark.parametrize("placement", ["post", "none"])
def test_layernorm_scaling_needs_a_norm_to_scale(placement: Placement) -> None:
    with pytest.raises(UserError, match="scales what the norm puts out"):
        require_fit(VARIANTS["layernorm_scaling"], placement)


def test_value_residual_needs_attention() -> None:
    settings = ResidualSettings(connection=VARIANTS["value_residual"])
    with pytest.raises(UserError, match="joins attention's values, and this model has no attention"):
        Stack([{"mlp": nn.Linear(8, 8)}], 8, settings, nn.Identity)


@pytest.mark.parametrize(
    "settings",
    [
        (ResNetConfig, {"channels": 4, "depth": 2, "classes": 10}),
        (UNetConfig, {"channels": 4, "depth": 2}),
        (StateSpaceConfig, {"vocabulary": 9, "width": 8, "context": 4, "depth": 2, "init_std": 0.1, "mixer": "state"}),
    ],
    ids=lambda value: value[0].__name__,
)
def test_config_without_attention_refuses_the_value_residual(settings: tuple[type[Any], dict[str, Any]]) -> None:
    model, shape = settings
    with pytest.raises(UserError, match="joins attention's values, and this model has no attention"):
        model(**shape, connection=VARIANTS["value_residual"])


def test_the_refusals_are_the_ones_the_tests_know() -> None:
    placements: tuple[Placement, ...] = ("pre", "post", "sandwich", "sandwich_sum", "peri", "deepnorm", "none")
    for connection in VARIANTS.values():
        for placement in placements:
            try:
                require_fit(connection, placement)
                refused = False
            except UserError:
                refused = True
            assert refused is not fits(connection, placement), (connection, placement)


def test_sublayer_sees_what_the_connection_reads() -> None:
    class Doubled(Connection):
        def read(self, stream: Tensor) -> Tensor:
            return 2 * stream

        def write(self, stream: Tensor, update: Tensor) -> Tensor:
            return stream - update

    stream, _ = pair()
    sublayer = residual("none", Doubled(site(), ConnectionOptions()))
    torch.testing.assert_close(sublayer(stream), stream - sublayer.branch(2 * stream))


@pytest.mark.parametrize(
    ("branches", "norm", "message"),
    [
        ([], nn.Identity, "branches is empty"),
        ([nn.Linear(8, 8)], nn.Identity, "block 0 is a Linear; give a mapping"),
        ([{"f": lambda x: x}], nn.Identity, "block 0: 'f' is a function; give an nn.Module"),
        ([{"forward": nn.Linear(8, 8)}], nn.Identity, "'forward' is a name of nn.Module's own"),
        ([{"f": nn.Linear(8, 8)}], nn.LayerNorm(8), "norm is to make a norm each time it is called"),
    ],
)
def test_wrong_branches_are_refused(branches: Any, norm: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Stack(branches, 8, ResidualSettings(), norm)


def test_wrapped_branches_get_all_the_context() -> None:
    """As `torch.compile` and adapters wrap them: with a forward that takes anything."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Masked()

        def forward(self, *inputs: Any, **named: Any) -> Tensor:
            out: Tensor = self.inner(*inputs, **named)
            return out

    stack = Stack([{"f": Wrapped()}], 8, ResidualSettings(connection=VARIANTS["none"], placement="none"), nn.Identity)
    assert torch.equal(stack(torch.ones(2, 8), mask=torch.zeros(8)), torch.zeros(2, 8))


@pytest.mark.parametrize(("here", "there"), [("cpu", "meta"), ("meta", "cpu")])
@pytest.mark.parametrize("name", ["add", "attnres full", "hyper"])
def test_input_on_another_device_is_named(name: str, here: str, there: str) -> None:
    stack = Stack([{"f": nn.Linear(8, 8)}] * 2, 8, ResidualSettings(connection=VARIANTS[name]), nn.Identity).to(here)
    with pytest.raises(UserError, match=rf"x is on {there}, the parameters of this stack on {here}; move one of them"):
        stack(torch.ones(2, 8, device=there))
    assert stack(torch.ones(2, 8, device=here)).device.type == here


def test_a_fault_that_is_not_the_devices_stays_as_it_is() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        Stack([{"f": nn.Linear(8, 8)}, {"f": Broken()}], 8, ResidualSettings(), nn.Identity)(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("x", "found"), [(None, "a NoneType"), (torch.ones(2, 7), r"\[2, 7\] torch.float32"), ([1.0] * 8, "a list")]
)
def test_input_that_is_no_stream_is_refused(x: Any, found: str) -> None:
    with pytest.raises(UserError, match=rf"x is {found}; this stack takes a tensor of .* \[..., 8\]"):
        Stack([{"f": nn.Linear(8, 8)}], 8, ResidualSettings(), nn.Identity)(x)


def test_branch_that_puts_out_no_tensor_is_named() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return x, None

    with pytest.raises(UserError, match=r"sublayer 0 \(Pair\) turned \[2, 5, 8\] into a tuple; .* one tensor"):
        Stack([{"f": Pair()}], 8, ResidualSettings(), nn.Identity)(pair()[0])


def test_branch_that_changes_the_shape_is_named() -> None:
    settings = ResidualSettings()
    stack = Stack([{"f": nn.Linear(8, 8)}, {"f": nn.Linear(8, 4)}], 8, settings, nn.Identity)
    with pytest.raises(UserError, match=r"sublayer 1 \(Linear\) turned \[2, 5, 8\] into \[2, 5, 4\]"):
        stack(pair()[0])


# --- a new kind -----------------------------------------------------------------------------------


def logits(connection: ConnectionConfig) -> Tensor:
    """Of a decoder of seed 0 on fixed tokens."""
    out: Tensor = decoder(connection)(tokens())
    return out


def test_new_kind_works_in_a_decoder(register: Register) -> None:
    @register("half")
    class Half(Connection):
        def write(self, stream: Tensor, update: Tensor) -> Tensor:
            return stream + update / 2

    halved = decoder("add")
    with torch.no_grad():
        for writer in halved.stream_writers():
            writer /= 2
    assert torch.equal(logits(ConnectionConfig("half")), halved(tokens()))
    assert not torch.equal(logits(ConnectionConfig("half")), logits(VARIANTS["add"]))


def test_new_kind_takes_options(register: Register) -> None:
    @register("tripled")
    class Tripled(Connection):
        class Options(ConnectionOptions):
            factor: float = 3.0

        def write(self, stream: Tensor, update: Tensor) -> Tensor:
            return stream + self.options.factor * update

    torch.testing.assert_close(logits(ConnectionConfig("tripled", factor=0.3)), logits(VARIANTS["scaled"]))
    assert ConnectionConfig("tripled").model_dump() == {"kind": "tripled", "factor": 3.0}
    with pytest.raises(UserError, match="did you mean 'factor'"):
        ConnectionConfig("tripled", facto=1.0)


def gated(start: Callable[[Tensor], Tensor]) -> type[Connection]:
    """x <- x + (1 + G x) v with a learnt matrix G, which the kind starts by itself."""

    class Gated(Connection):
        def __init__(self, site: Site, options: ConnectionOptions) -> None:
            super().__init__(site, options)
            self.gate = nn.Linear(site.width, site.width, bias=False)

        def reset_parameters(self) -> None:
            start(self.gate.weight)

        def write(self, stream: Tensor, update: Tensor) -> Tensor:
            out: Tensor = stream + (1 + self.gate(stream)) * update
            return out

    return Gated


def test_new_kind_owns_its_start(register: Register) -> None:
    register("gated")(gated(nn.init.zeros_))
    gates = [p for name, p in decoder(ConnectionConfig("gated")).named_parameters() if "gate" in name]
    assert len(gates) == 6
    assert all(torch.count_nonzero(gate) == 0 for gate in gates)


def test_weights_in_common_start_equal_beside_a_random_kind(register: Register) -> None:
    """The decoder promises it whatever the connection, so that arms are paired."""
    register("gated")(gated(nn.init.normal_))
    plain, random = decoder("add").state_dict(), decoder(ConnectionConfig("gated")).state_dict()
    assert [name for name in plain if not torch.equal(plain[name], random[name])] == []


def test_connections_are_not_decayed(register: Register) -> None:
    register("gated")(gated(nn.init.zeros_))
    model = decoder(ConnectionConfig("gated"))
    gates = {id(p) for name, p in model.named_parameters() if "gate" in name}
    groups = parameter_groups(model, 1e-3, 0.1)
    free = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    assert len(gates) == 6
    assert gates <= free


# --- where parameters stand -----------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_scales_norms_and_queries_are_not_decayed(name: str) -> None:
    """Public report: weight decay on ReZero's alpha."""
    model = decoder(name)
    decayed = {id(p) for g in parameter_groups(model, 1e-3, 0.1) if g["weight_decay"] for p in g["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in decayed}
    assert all(".branch." in n or n == "head.weight" for n in names)
    assert len(names) == 4 * 3 + 1


@pytest.mark.parametrize(
    ("connection", "slow"),
    [
        (ConnectionConfig("attnres", query_rate=0.1), 7),
        (ConnectionConfig("attnres", query_rate=0.1, query="input"), 14),
        (ConnectionConfig("attnres", query_rate=0.1, query="none"), 7),
        (ConnectionConfig("attnres", query_rate=0.1, key_rank=4, value_rank=4), 7),
        (ConnectionConfig("state_attention", query_rate=0.1), 6),
        (ConnectionConfig("attnres"), 0),
    ],
    ids=str,
)
def test_depth_queries_learn_at_their_own_rate(connection: ConnectionConfig, slow: int) -> None:
    model = decoder(connection)
    groups = parameter_groups(model, 1e-2, 0.1)
    assert sum(len(g["params"]) for g in groups if g["lr"] == pytest.approx(1e-3)) == slow
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"placement": "sandwitch"}, "placement: input .* 'peri', .*, got 'sandwitch'; did you mean 'sandwich'"),
        ({"placement": "prenorm"}, "placement: input should be 'pre', 'post', .*, got 'prenorm'; did you mean 'pre'"),
        ({"placement": 1}, "placement: input should be .* or 'none', got 1$"),
        ({"placment": "pre"}, "placment: unknown parameter; did you mean 'placement'"),
        ({"stream_dtype": "fp16"}, "stream_dtype: input .*, got 'fp16'$"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^ResidualSettings: {message}") as refused:
        ResidualSettings(**settings)
    assert "\n" not in str(refused.value)


def test_build_gives_the_asked_model() -> None:
    assert isinstance(build(config("attnres block"), 0), Decoder)
