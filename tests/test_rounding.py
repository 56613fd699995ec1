"""Connections for low-precision streams, and a decoder whose stream is far from 0."""

import pytest
import torch
from torch import Tensor

from reslab.models.decoder import Decoder
from reslab.precision import FORMATS, accumulate
from reslab.residuals import Connection, ConnectionConfig, Site, connect
from variants import config, decoder, perturbed, tokens


def added(kind: str, start: Tensor, updates: Tensor, scale: float = 1.0) -> Tensor:
    """What a stack of these connections makes of `start` [..., d] and `updates` [n, ..., d]."""
    width = start.shape[-1]
    chosen = ConnectionConfig(kind, scale=scale)
    connections = [connect(chosen, Site(i, len(updates), width)) for i in range(len(updates))]
    ends = chosen.type.ends(Site(len(updates), len(updates), width), chosen.options)
    stream = ends.start(start)
    for connection, update in zip(connections, updates, strict=True):
        assert isinstance(connection, Connection)
        stream = connection.write(stream, update)
    return ends.finish(stream)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_kahan_is_the_librarys_compensated_addition(name: str) -> None:
    form = FORMATS[name]
    start = 100 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    updates = torch.randn(24, 50, generator=torch.Generator().manual_seed(1))
    found = added("kahan", start.to(form.dtype), updates.to(form.dtype))
    assert found.dtype == torch.float32
    wanted = accumulate(start, updates, form, "Kahan")[-1]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_kahan_keeps_what_a_bf16_stream_would_swallow() -> None:
    start, updates = torch.full((1,), 100.0, dtype=torch.bfloat16), torch.ones(96, 1, dtype=torch.bfloat16)
    assert added("kahan", start, updates, scale=0.1).item() == pytest.approx(109.6, abs=0.02)
    assert added("scaled", start, updates, scale=0.1).item() == 100.0


def test_stochastic_gives_neighbours_whose_mean_is_the_sum() -> None:
    start = torch.full((200, 100), 100.0, dtype=torch.bfloat16)
    start += torch.arange(200).unsqueeze(1) / 16  # steps of ulps below it: several different streams
    updates = torch.full((24, 200, 100), 0.1, dtype=torch.bfloat16)
    once = added("stochastic", start, updates[:1]) - start
    assert set(once.unique().tolist()) == {0.0, 0.5}
    grown = (added("stochastic", start, updates).double() - start.double()).mean()
    assert float(grown) == pytest.approx(24 * float(updates[0, 0, 0]), abs=4 * (24**0.5 * 0.2) / 100)


def test_stochastic_depends_on_nothing_but_its_input() -> None:
    model = decoder("stochastic", stream_dtype="bfloat16").eval()
    first = model(tokens())
    assert torch.equal(first, model(tokens()))
    assert torch.equal(first[:1], model(tokens()[:1]))


def test_stochastic_noise_is_uniform_and_differs_by_channel_and_sublayer() -> None:
    x, u = torch.ones(1000, 64, dtype=torch.bfloat16), torch.ones(1000, 64, dtype=torch.bfloat16)
    x += torch.arange(1000).unsqueeze(1) / 128
    sites = [connect(ConnectionConfig("stochastic"), Site(i, 2, 64)) for i in range(2)]
    one, other = (site._noise(x, u) for site in sites)  # type: ignore[operator]
    for noise in (one, other):
        counts = torch.histc(noise.float(), 10, 0, 1) / noise.numel()
        assert float((counts - 0.1).abs().max()) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([one[:, 1:].flatten(), one[:, :-1].flatten()]))[0, 1])) < 0.02


@pytest.mark.parametrize("kind", ["kahan", "stochastic"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_gradients_are_those_of_plain_addition(kind: str, dtype: str) -> None:
    start = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)).requires_grad_()
    updates = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1)).to(start.dtype).requires_grad_()
    gradients = torch.autograd.grad(added(kind, start, updates, scale=0.5).sum(), [start, updates])
    assert torch.equal(gradients[0], torch.ones_like(start))
    assert torch.equal(gradients[1], torch.full_like(updates, 0.5))


@pytest.mark.parametrize("kind", ["kahan", "stochastic"])
def test_in_float64_they_are_scaled(kind: str) -> None:
    models = [perturbed(decoder(ConnectionConfig(k, scale=0.3)).double()) for k in (kind, "scaled")]
    torch.testing.assert_close(models[0](tokens()), models[1](tokens()))


# --- an embedding that is larger, or far from 0 ----------------------------------------------------


def test_an_offset_changes_nothing_but_the_stream() -> None:
    far = decoder(embedding_offset=100.0).double()
    reads: list[Tensor] = []
    far.stack.block_inputs()[0].register_forward_pre_hook(lambda _, inputs: reads.append(inputs[0].detach()))
    torch.testing.assert_close(far(tokens()), decoder().double()(tokens()))
    assert float((reads[0] - 100).abs().max()) < 10


def test_a_factor_enlarges_the_embedding_alone() -> None:
    large, plain = decoder(embedding_factor=4.0).double(), decoder().double()
    assert torch.equal(large.token_embedding.weight, plain.token_embedding.weight)
    with torch.no_grad():
        for embedding in (plain.token_embedding, plain.position_embedding):
            embedding.weight *= 4
    torch.testing.assert_close(large(tokens()), plain(tokens()))


def test_other_decoders_have_the_plain_embedding() -> None:
    assert (config().embedding_factor, config().embedding_offset) == (1.0, 0.0)
    assert isinstance(decoder(), Decoder)
