"""Attention's key-value cache, and what runs around a stack: dtypes, checkpointing, compilation, autocast."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reslab.models.attention import Attention, KeyValueCache
from reslab.models.decoder import Decoder
from reslab.residuals import ConnectionConfig, ResidualSettings, Stack, compile_blocks
from reslab.residuals.depth_attention import Banked, Sources
from reslab.residuals.value_residual import ValueStream
from reslab.schema import UserError
from reslab.surgery import repeated, skipped, swapped
from variants import VARIANTS, decoder, perturbed, tokens

# --- key-value cache ------------------------------------------------------------------------------


def in_pieces(model: Decoder, text: Tensor, pieces: list[int]) -> Tensor:
    cache = KeyValueCache()
    return torch.cat([model(piece, cache) for piece in text.split(pieces, 1)], 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_cache_changes_no_logits(name: str) -> None:
    model = decoder(name).double()
    perturbed(model)
    for pieces in ([7], [1] * 7, [3, 1, 3], [5, 2]):
        torch.testing.assert_close(in_pieces(model, tokens(), pieces), model(tokens()))


@pytest.mark.parametrize("name", ["add", "attnres full", "attnres block", "value_residual", "hyper"])
def test_gradients_pass_through_the_cache(name: str) -> None:
    """Public report: backward through a cache failed "a second time"."""
    whole, cached = decoder(name).double(), decoder(name).double()
    perturbed(whole)
    perturbed(cached)
    whole(tokens()).square().sum().backward()
    in_pieces(cached, tokens(), [3, 2, 2]).square().sum().backward()
    for (n, a), b in zip(whole.named_parameters(), cached.parameters(), strict=True):
        assert a.grad is not None, n
        torch.testing.assert_close(b.grad, a.grad, msg=n)


@pytest.mark.parametrize("name", ["add", "attnres block", "value_residual"])
def test_cache_changes_no_logits_with_layers_dropped_swapped_or_repeated(name: str) -> None:
    """Public report: a popped layer broke the cache, which counted layers by their number."""
    model = decoder(name).double()
    for change in (skipped(model.blocks, {1}), swapped(model.blocks, 0, 2), repeated(model.blocks, 1)):
        with change:
            torch.testing.assert_close(in_pieces(model, tokens(), [2, 1, 4]), model(tokens()))


def test_generated_tokens_are_the_likeliest() -> None:
    model = decoder(context=20, init_std=0.5)
    text = model.generate(tokens(length=4), 10)
    assert text.shape == (2, 14)
    assert torch.equal(text[:, :4], tokens(length=4))
    for end in range(4, 14):
        assert torch.equal(text[:, end], model(text[:, :end])[:, -1].argmax(-1))


def test_drawn_tokens_depend_on_the_generator_alone() -> None:
    model = decoder(context=20)

    def drawn(seed: int) -> Tensor:
        return model.generate(tokens(length=4), 12, temperature=1.0, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(UserError, match="8 tokens are more than the decoder's context of 7"):
        decoder()(tokens(length=8))
    with pytest.raises(UserError, match="104 tokens are more"):
        decoder().generate(tokens(length=4), 100)


def test_wrong_use_of_generate_is_refused() -> None:
    for arguments in ((tokens(length=0), 1), (tokens()[0], 1), (tokens(length=2), -1), (tokens(length=2), 1, -1.0)):
        with pytest.raises(UserError, match="numbers not below 0"):
            decoder().generate(*arguments)


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    model, cache = decoder(), KeyValueCache()
    first = model(tokens()[:, :5], cache)
    with pytest.raises(UserError, match="10 tokens are more"):
        model(tokens()[:, :5], cache)
    rest = model(tokens()[:, 5:7], cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), torch.cat([first, model(tokens())[:, 5:]], 1))


def test_a_cache_goes_with_checkpointing() -> None:
    plain, saving = decoder().double(), decoder().double()
    saving.stack.checkpointing = True
    for model in (plain, saving):
        in_pieces(model, tokens(), [3, 4]).square().sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_bidirectional_attention_sees_everything() -> None:
    torch.manual_seed(0)
    attention, x = Attention(8, 2, causal=False), torch.randn(1, 5, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(attention(x)[:, 0].sum(), x)
    assert gradient.abs().amax(-1).min() > 0


def test_given_values_stand_in_for_the_own_ones() -> None:
    torch.manual_seed(0)
    attention, x = Attention(8, 2, causal=True), torch.randn(2, 5, 8)
    torch.testing.assert_close(attention(x, values=attention.values(x)), attention(x))
    assert torch.count_nonzero(attention(x, values=torch.zeros(2, 5, 8))) == 0


# --- dtype of the stream --------------------------------------------------------------------------


def streams_seen(model: Decoder) -> list[Tensor]:
    """What every sublayer and the head read, and what every sublayer left in the stream, during one pass."""
    seen: list[Tensor] = []

    def keep(value: Any) -> None:
        if isinstance(value, Tensor):
            seen.append(value)
        elif isinstance(value, ValueStream):
            seen.append(value.x)  # the values beside it are attention's, in its dtype
        elif isinstance(value, Sources | Banked):
            seen.extend(value.values)  # as are the low-rank keys
        else:  # States and Averaged
            for part in value[:1]:
                keep(part) if isinstance(part, Tensor) else seen.extend(part)

    handles = [s.norm_input.register_forward_pre_hook(lambda m, i: keep(i[0])) for s in model.stack.sublayers()]
    handles += [s.register_forward_hook(lambda m, i, o: keep(o)) for s in model.stack.sublayers()]
    model(tokens())
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_stream_has_the_asked_dtype_after_every_write(name: str, weights: torch.dtype, dtype: torch.dtype) -> None:
    """Public report: a float32 stream silently cast down."""
    model = decoder(name, stream_dtype=str(dtype).removeprefix("torch.")).to(weights)
    assert {x.dtype for x in streams_seen(model)} == {dtype}
    assert model(tokens()).dtype == weights


@pytest.mark.parametrize("name", VARIANTS)
def test_stream_stays_in_float32_under_autocast(name: str) -> None:
    model = decoder(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert {x.dtype for x in streams_seen(model)} <= {torch.float32} | (
            {torch.bfloat16} if name == "none" else set()
        )
        out = model(tokens())
    exact = model(tokens())
    assert (out.float() - exact).abs().max() < 0.15 * exact.abs().max()


@pytest.mark.parametrize("name", VARIANTS)
def test_model_in_bfloat16_gains_from_a_float32_stream(name: str) -> None:
    """It is no farther from the exact model than with a bfloat16 one."""
    exact = decoder(name)(tokens()).detach()
    error = {
        dtype: float((decoder(name, stream_dtype=dtype).bfloat16()(tokens()).detach() - exact).norm())
        for dtype in ("float32", "bfloat16")
    }
    assert error["float32"] < 1.25 * error["bfloat16"]


# --- checkpointing and compilation ----------------------------------------------------------------


def gradients(model: Decoder) -> list[Tensor]:
    model.zero_grad()
    model(tokens()).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def bytes_saved(model: Decoder) -> int:
    """Of all tensors that autograd keeps for the backward pass, each storage once, without the parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for address, size in kept.items() if address not in own)


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpointing_changes_no_gradient_and_keeps_less(name: str) -> None:
    """Public report: a custom block bypassed checkpointing."""
    model = decoder(name, depth=6)
    perturbed(model)
    plain, plain_bytes = gradients(model), bytes_saved(model)
    model.stack.checkpointing = True
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))
    assert bytes_saved(model) < 0.7 * plain_bytes


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """`torch.compile` without a compiler behind it; one entry a compilation."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend=backend, fullgraph=True))
    limit = torch._dynamo.config.recompile_limit
    yield graphs
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "compilations"),
    [("add", 1), ("layerscale", 1), ("hyper", 1), ("value_residual", 2), ("rescaled", 9), ("attnres naive", 9)],
)
def test_every_kind_compiles_without_a_break(name: str, compilations: int, traced: list[Any]) -> None:
    naive = ConnectionConfig("attnres", kernel="naive")
    model = decoder(naive if name == "attnres naive" else name, depth=9)  # one more than dynamo compiles by default
    perturbed(model)
    plain = gradients(model)
    compile_blocks(model)
    for a, b in zip(plain, gradients(model), strict=True):
        torch.testing.assert_close(a, b)
    assert len(traced) == compilations


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["attnres full", "attnres block"])
def test_blocks_around_a_bank_compile_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes of a bank run as they are; what is between them is compiled."""
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    model = decoder(name)
    perturbed(model)
    plain = gradients(model)
    compile_blocks(model)
    for a, b in zip(plain, gradients(model), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", VARIANTS)
def test_model_can_be_copied(name: str) -> None:
    model = decoder(name)
    perturbed(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens()), model(tokens()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.count_nonzero(twin(tokens())) > 0


def test_branch_gets_the_context_it_has_a_name_for() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return x + shift

    settings = ResidualSettings(connection=ConnectionConfig("none"), placement="none")
    stack = Stack([{"a": Shifted(), "b": nn.Identity()}], 8, settings, nn.Identity)
    assert torch.equal(stack(torch.zeros(2, 8), shift=torch.ones(8)), torch.ones(2, 8))
    with pytest.raises(UserError, match="no sublayer of this stack takes 'shifft'; did you mean 'shift'"):
        stack(torch.zeros(2, 8), shifft=torch.ones(8))
    with pytest.raises(UserError, match=r"no sublayer of this stack takes 'input'; valid are: shift$"):
        stack(torch.zeros(2, 8), input=torch.ones(8))  # its own input is not context
