"""The logit lens against the model's own layers run by hand, and a model that stays as it was."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from reslab.lens import lens_divergence, logit_lens
from reslab.models.decoder import DecoderConfig
from reslab.residuals import ConnectionConfig
from reslab.schema import UserError
from reslab.surgery import repeated
from reslab.training import build


def decoder(**settings: Any) -> Any:
    config = DecoderConfig(vocabulary=32, width=8, heads=2, context=6, depth=3, init_std=0.3, **settings)
    return build(config, 0).double()


def tokens() -> Tensor:
    return torch.randint(32, (3, 6), generator=torch.Generator().manual_seed(0))


def lens(model: Any, places: Any = None) -> Tensor:
    return logit_lens(model, places or model.blocks, model.norm, model.head, tokens())


def streams(model: Any) -> list[Tensor]:
    seen = [model.token_embedding(tokens()) + model.position_embedding(torch.arange(6))]
    for block in model.blocks:
        seen.append(block(seen[-1]))
    return seen


# --- logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_logits_are_those_of_each_layers_own_norm(norm: str) -> None:
    model = decoder(norm=norm)
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2)
        direct = []
        for x in streams(model):
            centred = x - x.mean(-1, keepdim=True) if norm == "layernorm" else x
            scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            direct.append((scaled * model.norm.weight) @ model.head.weight.T)
    logits = lens(model)
    assert logits.shape == (4, 3, 6, 32)
    torch.testing.assert_close(logits, torch.stack(direct))
    assert torch.equal(logits[-1], model(tokens()))


def test_final_norms_scale_is_not_reused() -> None:
    """Each block of this model makes the stream three times as long and turns it nowhere: all places predict alike."""

    class Triple(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * x

    model = decoder()
    model.stack.blocks = nn.ModuleList(Triple() for _ in range(3))
    logits = lens(model)
    for place in logits:
        torch.testing.assert_close(place, logits[-1], rtol=1e-4, atol=1e-4)
    final = streams(model)[-1]
    scale = final.var(-1, keepdim=True, unbiased=False).sqrt()
    reused = [model.head((x - x.mean(-1, keepdim=True)) / scale) for x in streams(model)]
    assert not torch.allclose(reused[0], logits[0], rtol=0.5)


def test_gpt2() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32, n_positions=8, initializer_range=0.3)
    model: Any = GPT2LMHeadModel(config).train()  # with dropout, which the lens must not see
    parts = model.transformer.h, model.transformer.ln_f, model.lm_head
    logits = logit_lens(model, *parts, input_ids=tokens(), use_cache=False)
    assert model.training
    model.eval()
    with torch.no_grad():
        output = model(tokens(), output_hidden_states=True)
        before = [model.lm_head(model.transformer.ln_f(x)) for x in output.hidden_states[:-1]]
    torch.testing.assert_close(logits, torch.stack([*before, output.logits]))


def test_half_precision() -> None:
    model = decoder().bfloat16()
    logits = lens(model)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits[-1], model(tokens()))
    direct = lens(model.double())
    assert lens_divergence(logits) == pytest.approx(lens_divergence(direct), rel=0.1, abs=1e-2)


def test_a_stream_in_higher_precision() -> None:
    model = decoder(stream_dtype="float64").float()
    logits = lens(model)
    assert logits.dtype == torch.float32
    assert torch.equal(logits[-1], model(tokens()))


@pytest.mark.parametrize("kind", ["add", "value_residual", "attnres", "state_attention", "denseformer", "hyper"])
def test_streams_of_every_shape(kind: str) -> None:
    model = decoder(connection=ConnectionConfig(kind=kind))
    logits = lens(model, model.stack.block_inputs())
    assert logits.shape == (4, 3, 6, 32)
    assert torch.equal(logits[-1], model(tokens()))
    assert lens_divergence(logits)[0] > 0


def test_places_within_the_blocks() -> None:
    """Modules whose input is the stream, where a block's own input is not a tensor."""

    class Bank(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

        def forward(self, bank: list[Tensor]) -> list[Tensor]:
            return [*bank, self.linear(self.norm(sum(bank)))]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(32, 8), nn.ModuleList(Bank(8) for _ in range(3))
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 32)

        def forward(self, x: Tensor) -> Tensor:
            bank = [self.embedding(x)]
            for block in self.blocks:
                bank = block(bank)
            return self.head(self.norm(torch.stack(bank).sum(0)))

    torch.manual_seed(0)
    model: Any = Model()
    logits = lens(model, [block.norm for block in model.blocks])
    torch.testing.assert_close(logits[0], model.head(model.norm(model.embedding(tokens()))))
    assert torch.equal(logits[-1], model(tokens()))
    with pytest.raises(UserError, match=r"place 0 \(Bank\) has a list as its first input, not a tensor"):
        lens(model)


def test_a_stream_that_is_changed_in_place() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1 + x.roll(1, -1))

    model = decoder()
    reference = lens(model, [model.blocks[0]])[0]
    model.stack.blocks = nn.ModuleList(InPlace() for _ in range(3))
    assert torch.equal(lens(model)[0], reference)


def test_repeated_blocks_are_places_of_their_own() -> None:
    model = decoder()
    whole = lens(model)
    with repeated(model.blocks, 1):
        logits = lens(model)
        assert torch.equal(logits[-1], model(tokens()))
    assert len(logits) == 5
    assert torch.equal(logits[:3], whole[:3])


# --- divergence -----------------------------------------------------------------------------------


def test_divergence_is_that_of_the_definition() -> None:
    logits = torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    direct = [
        sum(
            float(p[-1, b, t, v]) * math.log(float(p[-1, b, t, v] / p[place, b, t, v]))
            for b in range(2)
            for t in range(3)
            for v in range(5)
        )
        / 6
        for place in range(4)
    ]
    assert lens_divergence(logits) == pytest.approx(direct, rel=1e-10)
    assert lens_divergence(logits)[-1] == 0
    assert min(lens_divergence(logits)[:-1]) > 0.1


def test_divergence_of_half_precision_is_computed_in_single() -> None:
    logits = torch.randn(3, 2, 4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert lens_divergence(logits) == pytest.approx(lens_divergence(logits.double()), rel=1e-4)


def test_divergence_of_a_model_ends_at_zero() -> None:
    divergence = lens_divergence(lens(decoder()))
    assert divergence[-1] == 0
    assert min(divergence[:-1]) > 0


# --- a model stays as it was ----------------------------------------------------------------------


def state(model: nn.Module) -> list[Any]:
    return [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("fails", [True, False])
def test_hooks_modes_and_gradients_stay(fails: bool) -> None:
    model = decoder().train()
    model.blocks[0].eval()
    out = model(tokens())
    F.cross_entropy(out.flatten(0, 1), tokens().flatten()).backward()
    before = state(model), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    with pytest.raises(IndexError) if fails else nullcontext():
        logits = logit_lens(model, model.blocks, model.norm, model.head, tokens() + (99 if fails else 0))
        assert not logits.requires_grad
    assert state(model) == before[0]
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.is_grad_enabled()
    assert torch.equal(model(tokens()), out)


# --- errors ---------------------------------------------------------------------------------------


def test_a_place_must_run_once() -> None:
    model = decoder()
    with pytest.raises(UserError, match=r"place 1 \(Linear\) ran 0 times; give modules that run once"):
        lens(model, [model.blocks[0], nn.Linear(8, 8)])
    model.stack.blocks = nn.ModuleList([model.blocks[0], model.blocks[0]])
    with pytest.raises(UserError, match=r"place 0 \(Block\) ran 2 times"):
        lens(model)


def test_norm_and_head_must_be_the_models() -> None:
    model = decoder()

    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return 2 * torch.tanh(self.inner(x) / 2)

    parts = model.blocks, model.norm
    with pytest.raises(UserError, match="what norm and head make of the last place is not what the model returns"):
        logit_lens(Capped(), *parts, model.head, tokens())
    logits = logit_lens(Capped(), *parts, lambda x: 2 * torch.tanh(model.head(x) / 2), tokens())
    assert torch.equal(logits[-1], Capped()(tokens()))
    with pytest.raises(UserError, match="is not what the model returns"):
        logit_lens(model, *parts, nn.Linear(8, 31).double(), tokens())
    with pytest.raises(UserError, match="is not what the model returns"):
        logit_lens(model, model.blocks[:2], model.blocks[2], model.head, tokens())
