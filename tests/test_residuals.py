"""Residual connections: each kind's formula, its options, and that a new kind is one class."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab import residuals
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.residuals import Add, Connection, ConnectionConfig, Residual, ReZero, connect
from reslab.schema import UserError
from reslab.training import build, parameter_groups


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[type[Connection]], type[Connection]]]:
    """`register`, whose kinds are gone after the test."""
    monkeypatch.setattr(residuals, "CONNECTIONS", dict(residuals.CONNECTIONS))
    return residuals.register


Register = Callable[[str], Callable[[type[Connection]], type[Connection]]]


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A stream and an update, [2, 5, 8]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, 8, generator=generator), torch.randn(2, 5, 8, generator=generator)


def config(kind: str, weight: float | None = None) -> DecoderConfig:
    connection = ConnectionConfig(kind=kind, weight=weight)
    return DecoderConfig(vocabulary=32, width=8, heads=2, context=6, depth=2, init_std=0.3, connection=connection)


def logits(kind: str, weight: float | None = None) -> Tensor:
    """Of a decoder of seed 0 on fixed tokens."""
    out: Tensor = build(config(kind, weight), 0)(torch.arange(12).view(2, 6))
    return out


# --- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "weight", "formula"),
    [
        ("none", None, lambda x, v: v),
        ("add", None, lambda x, v: x + v),
        ("weighted_skip", 0.5, lambda x, v: x / 2 + v),
        ("weighted_skip", 0.3, lambda x, v: 0.3 * x + v),
        ("rezero", None, lambda x, v: x),
    ],
)
def test_formula(kind: str, weight: float | None, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    stream, update = (part.double() for part in pair())
    connection = connect(ConnectionConfig(kind=kind, weight=weight))
    torch.testing.assert_close(connection.write(stream, update), formula(stream, update))
    assert connection.read(stream) is stream


def test_rezero_scales_the_branch_not_the_skip() -> None:
    stream, update = pair()
    connection = ReZero()
    nn.init.constant_(connection.alpha, 0.25)
    assert torch.equal(connection.write(stream, update), stream + 0.25 * update)


def test_full_weight_is_add_and_no_weight_is_none() -> None:
    stream, update = pair()
    full, none = (connect(ConnectionConfig(kind="weighted_skip", weight=weight)) for weight in (1.0, 0.0))
    assert torch.equal(full.write(stream, update), stream + update)
    assert torch.equal(none.write(stream, update), update)
    assert torch.equal(logits("weighted_skip", 1.0), logits("add"))
    assert torch.equal(logits("weighted_skip", 0.0), logits("none"))
    assert not torch.allclose(logits("weighted_skip", 0.5), logits("add"), atol=1e-3)


@pytest.mark.parametrize(("kind", "weight"), [("add", None), ("weighted_skip", 0.3), ("rezero", None)])
def test_stream_keeps_its_precision(kind: str, weight: float | None) -> None:
    """Autocast hands over updates in bfloat16; the sum stays in float32."""
    stream, update = pair()
    written = connect(ConnectionConfig(kind=kind, weight=weight)).write(stream, update.bfloat16())
    assert written.dtype == torch.float32


def test_write_leaves_its_inputs_alone() -> None:
    for kind, weight in (("none", None), ("add", None), ("weighted_skip", 0.3), ("rezero", None)):
        stream, update = pair()
        connect(ConnectionConfig(kind=kind, weight=weight)).write(stream, update)
        assert torch.equal(stream, pair()[0])
        assert torch.equal(update, pair()[1])


# --- choosing a kind ------------------------------------------------------------------------------


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown residual connection 'rezro'; did you mean 'rezero'"):
        connect(ConnectionConfig(kind="rezro"))


def test_missing_weight_is_asked_for() -> None:
    with pytest.raises(UserError, match="'weighted_skip' needs a weight"):
        connect(ConnectionConfig(kind="weighted_skip"))


@pytest.mark.parametrize("kind", ["none", "add", "rezero"])
def test_weight_of_a_kind_without_one_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match=f"'{kind}' takes no weight; remove weight: 0.5"):
        connect(ConnectionConfig(kind=kind, weight=0.5))


def test_name_is_given_once(register: Register) -> None:
    with pytest.raises(ValueError, match="'add' is registered twice"):
        register("add")(ReZero)
    assert residuals.CONNECTIONS["add"] is Add


# --- ReZero ---------------------------------------------------------------------------------------


def test_rezero_starts_closed_and_closes_again() -> None:
    model = build(config("rezero"), 0)
    alphas = [module.alpha for module in model.modules() if isinstance(module, ReZero)]
    assert len(alphas) == 4
    assert all(alpha.detach().item() == 0 and alpha.requires_grad for alpha in alphas)
    for alpha in alphas:
        nn.init.ones_(alpha)
    model.reset_parameters()
    assert all(alpha.detach().item() == 0 for alpha in alphas)


def test_rezero_is_closed_after_materialisation() -> None:
    with torch.device("meta"):
        model = Decoder(config("rezero"))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7)
    model.reset_parameters()
    assert all(module.alpha.detach().item() == 0 for module in model.modules() if isinstance(module, ReZero))
    assert all(writer.weight.detach().std() < 0.3 for writer in model.stream_writers())


# --- norm placement -------------------------------------------------------------------------------


def residual(placement: residuals.Placement, connection: Connection) -> Residual:
    torch.manual_seed(0)
    return Residual(nn.Linear(8, 8), connection, lambda: nn.LayerNorm(8), placement)


def test_placement_is_where_the_norm_stands() -> None:
    stream, _ = pair()

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,))

    pre, post, none = residual("pre", Add()), residual("post", Add()), residual("none", Add())
    torch.testing.assert_close(pre(stream), stream + pre.branch(norm(stream)))
    torch.testing.assert_close(post(stream), norm(stream + post.branch(stream)))
    torch.testing.assert_close(none(stream), stream + none.branch(stream))


def test_sublayer_sees_what_the_connection_reads() -> None:
    class Doubled(Connection):
        def read(self, stream: Tensor) -> Tensor:
            return 2 * stream

        def write(self, stream: Tensor, update: Tensor) -> Tensor:
            return stream - update

    stream, _ = pair()
    sublayer = residual("none", Doubled())
    torch.testing.assert_close(sublayer(stream), stream - sublayer.branch(2 * stream))


# --- a new kind -----------------------------------------------------------------------------------


def test_new_kind_works_in_a_decoder(register: Register) -> None:
    @register("half")
    class Half(Connection):
        def write(self, stream: Tensor, update: Tensor) -> Tensor:
            return stream + update / 2

    halved = build(config("add"), 0)
    assert isinstance(halved, Decoder)
    with torch.no_grad():
        for writer in halved.stream_writers():
            writer.weight /= 2
    assert torch.equal(logits("half"), halved(torch.arange(12).view(2, 6)))
    assert not torch.equal(logits("half"), logits("add"))


def test_new_kind_takes_a_weight(register: Register) -> None:
    """With and without an annotation: how its author writes the class must not change what it takes."""

    @register("scaled")
    class Scaled(Connection):
        def __init__(self, weight: float) -> None:
            super().__init__()
            self.weight = weight

        def write(self, stream: Tensor, update: Tensor) -> Tensor:
            return stream + self.weight * update

    @register("plainly_scaled")
    class PlainlyScaled(Scaled):
        def __init__(self, weight) -> None:  # type: ignore[no-untyped-def]
            super().__init__(weight)

    assert torch.equal(logits("scaled", 0.3), logits("plainly_scaled", 0.3))


def gated(start: Callable[[Tensor], Tensor]) -> type[Connection]:
    """x <- x + (1 + G x) v with a learnt matrix G, which the kind starts by itself."""

    class Gated(Connection):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 8, bias=False)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            start(self.gate.weight)

        def write(self, stream: Tensor, update: Tensor) -> Tensor:
            out: Tensor = stream + (1 + self.gate(stream)) * update
            return out

    return Gated


def test_new_kind_owns_its_start(register: Register) -> None:
    register("gated")(gated(nn.init.zeros_))
    gates = [p for name, p in build(config("gated"), 0).named_parameters() if "gate" in name]
    assert len(gates) == 4
    assert all(torch.count_nonzero(gate) == 0 for gate in gates)


def test_weights_in_common_start_equal_beside_a_random_kind(register: Register) -> None:
    """The decoder promises it whatever the connection, so that arms are paired."""
    register("gated")(gated(nn.init.normal_))
    plain, random = build(config("add"), 0).state_dict(), build(config("gated"), 0).state_dict()
    assert [name for name in plain if not torch.equal(plain[name], random[name])] == []


def test_connections_are_not_decayed(register: Register) -> None:
    register("gated")(gated(nn.init.zeros_))
    model = build(config("gated"), 0)
    gates = {id(p) for name, p in model.named_parameters() if "gate" in name}
    decayed, free = ({id(p) for p in group["params"]} for group in parameter_groups(model, 0.1))  # type: ignore[attr-defined]
    assert len(gates) == 4
    assert not gates & decayed
    assert gates <= free
