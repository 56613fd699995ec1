"""The health probe: its numbers against direct computations, planted faults, and a model that stays as it was."""

import gc
import math
import pickle
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    Mamba2Config,
    Mamba2Model,
    MambaConfig,
    MambaModel,
    MistralConfig,
    MistralModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
)

from reslab.health import COLUMNS, HealthRule, ResidualHealth
from reslab.lens import logit_lens
from reslab.models.decoder import DecoderConfig
from reslab.probes import stream_places, stream_profile
from reslab.residuals import ConnectionConfig, Residual
from reslab.schema import UserError
from reslab.training import build

Part = tuple[Tensor, Tensor, Tensor]
"""Of one branch: x, f and the next stream."""

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def seeded(make: Callable[[], nn.Module]) -> Any:
    """In evaluation mode and float64."""
    torch.manual_seed(0)
    return make().eval().double()


def gpt2(**options: Any) -> Any:
    sizes: dict[str, Any] = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2, **options)
    return seeded(lambda: GPT2LMHeadModel(config))


def ids(seed: int = 0) -> Tensor:
    return torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(seed))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Block(nn.Module):
    """x + W tanh(x), which the probe does not know."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x.tanh())
        return out


class Chain(nn.Module):
    """Unknown blocks in turn, each as often as `repeats` says."""

    def __init__(self, *layers: nn.Module, repeats: int = 1, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.repeats, self.checkpointed = repeats, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(self.repeats):
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def chain(depth: int = 3, repeats: int = 1, checkpointed: bool = False) -> Chain:
    torch.manual_seed(0)
    return Chain(*(Block() for _ in range(depth)), repeats=repeats, checkpointed=checkpointed)


def stream(*shape: int) -> Tensor:
    return torch.randn(*shape or (2, 5, 8), generator=torch.Generator().manual_seed(1))


# --- against direct computations ------------------------------------------------------------------


def directly(x: Tensor, f: Tensor, after: Tensor, sequences: int = 2) -> dict[str, float]:
    """All measures of one branch, token by token."""
    a, b, c = (part.detach().double().numpy() for part in (x, f, after))
    tokens = [(a[i, j], b[i, j], c[i, j]) for i in range(a.shape[0]) for j in range(a.shape[1])]
    norm = np.linalg.norm
    units = a / norm(a, axis=-1, keepdims=True)
    cosines = [s @ t for example in units for i, s in enumerate(example) for j, t in enumerate(example) if i != j]
    ranks = []
    for example in a[:sequences]:
        values = np.linalg.svd(example, compute_uv=False)
        shares = values / values.sum()
        ranks.append(math.exp(-(shares * np.log(shares)).sum()))
    return {
        "ratio": float(np.mean([norm(v) / norm(u) for u, v, _ in tokens])),
        "update_norm": float(np.mean([norm(v) for _, v, _ in tokens])),
        "stream_norm": float(np.mean([norm(u) for u, _, _ in tokens])),
        "token_cosine": float(np.mean(cosines)),
        "effective_rank": float(np.mean(ranks)),
        "block_influence": 1 - float(np.mean([u @ w / norm(u) / norm(w) for u, _, w in tokens])),
    }


def assert_rows(table: pd.DataFrame, parts: list[Part], tolerance: float = 1e-6) -> None:
    assert len(table) == len(parts)
    assert list(table["layer"]) == list(range(len(parts)))
    for row, part in zip(table.to_dict("records"), parts, strict=True):
        for measure, value in directly(*part).items():
            assert row[measure] == pytest.approx(value, rel=tolerance, abs=1e-12), (row["name"], measure)


def gpt2_parts(model: Any, tokens: Tensor) -> tuple[list[Part], Tensor]:
    """The blocks one by one; and the stream at the end."""
    x = model.transformer.wte(tokens) + model.transformer.wpe(torch.arange(tokens.shape[1]))
    parts = []
    for block in model.transformer.h:
        for branch, norm in ((block.attn, block.ln_1), (block.mlp, block.ln_2)):
            out = branch(norm(x))
            f = out[0] if isinstance(out, tuple) else out
            parts.append((x, f, x + f))
            x = x + f
    return parts, x


def test_every_number_of_an_untrained_gpt2() -> None:
    model, tokens = gpt2(), ids()
    parts, last = gpt2_parts(model, tokens)
    with ResidualHealth(model) as health:
        out = model(tokens, output_hidden_states=True)
        out.loss = F.cross_entropy(out.logits.flatten(0, 1), tokens.flatten())
        out.loss.backward()
    for layer in (0, 1, 2):
        torch.testing.assert_close(out.hidden_states[layer], parts[2 * layer][0])
    table = health.table()
    assert_rows(table, parts)
    blocks = [f"transformer.h.{layer}.{branch}" for layer in range(3) for branch in ("attn", "mlp")]
    assert list(table["name"]) == blocks
    logits = model.lm_head(model.transformer.ln_f(last))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    gradients = torch.autograd.grad(loss, [f for _, f, _ in parts])
    assert list(table["gradient_norm"]) == pytest.approx([float(g.norm()) for g in gradients], rel=1e-6)
    largest = [max(part.detach().abs().max().item() for part in (x, f)) for x, f, _ in parts]
    largest = [value / torch.finfo(torch.float64).max for value in largest]
    assert list(table["largest"]) == pytest.approx(largest, rel=1e-6, abs=0)
    assert set(table["state"]) <= {"healthy", "rewriting"}
    assert table["finite"].all()


def test_single_precision_is_measured_in_single_precision() -> None:
    model, tokens = gpt2().float(), ids()
    parts, _ = gpt2_parts(model, tokens)
    with torch.no_grad(), ResidualHealth(model) as health:
        model(tokens)
    assert_rows(health.table(), parts, tolerance=1e-5)


def test_cross_attention_of_gpt2_is_a_branch() -> None:
    model, states = gpt2(add_cross_attention=True), stream(3, 4, 16).double()
    with ResidualHealth(model) as health:
        model(ids())
        assert len(health.table()) == 6
    with ResidualHealth(model) as health:
        model(ids(), encoder_hidden_states=states)
    assert [name.rpartition(".")[2] for name in health.table()["name"]] == ["attn", "crossattention", "mlp"] * 3


def llama_parts(model: Any, tokens: Tensor) -> list[Part]:
    x, parts = model.embed_tokens(tokens), []
    positions = model.rotary_emb(x, torch.arange(tokens.shape[1])[None])
    mask = torch.full((tokens.shape[1], tokens.shape[1]), -math.inf, dtype=x.dtype).triu(1)[None, None]
    for layer in model.layers:
        f = layer.self_attn(hidden_states=layer.input_layernorm(x), position_embeddings=positions, attention_mask=mask)[
            0
        ]
        parts.append((x, f, x + f))
        x = x + f
        f = layer.mlp(layer.post_attention_layernorm(x))
        parts.append((x, f, x + f))
        x = x + f
    return parts


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig, LlamaModel),
        (MistralConfig, MistralModel),
        (Qwen2Config, Qwen2Model),
        (Qwen3Config, Qwen3Model),
    ],
)
def test_llama_and_its_like(config: Callable, kind: Callable) -> None:
    model = seeded(lambda: kind(config(**SIZES, num_key_value_heads=2, head_dim=8, vocab_size=50)))
    with torch.no_grad(), ResidualHealth(model) as health:
        model(ids())
        assert_rows(health.table(), llama_parts(model, ids()))
    assert health.table()["name"][3] == "layers.1.mlp"


@pytest.mark.parametrize(("config", "kind"), [(BertConfig, BertModel), (RobertaConfig, RobertaModel)])
def test_bert_and_its_like(config: Callable, kind: Callable) -> None:
    model = seeded(lambda: kind(config(**SIZES, vocab_size=50)))
    tokens = ids().clamp_min(2)  # 1 is RoBERTa's padding
    with torch.no_grad(), ResidualHealth(model) as health:
        model(tokens)
        x, parts = model.embeddings(tokens), []
        for layer in model.encoder.layer:
            f = layer.attention.output.dense(layer.attention.self(x)[0])
            y = layer.attention.output.LayerNorm(x + f)
            g = layer.output.dense(layer.intermediate(y))
            parts += [(x, f, y), (y, g, layer.output.LayerNorm(y + g))]
            x = parts[-1][2]
        torch.testing.assert_close(model(tokens)[0], x)
    assert_rows(health.table(), parts)
    assert list(health.table()["name"][:2]) == ["encoder.layer.0.attention", "encoder.layer.0.mlp"]


def test_vit() -> None:
    model = seeded(lambda: ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4)))
    images, parts = stream(2, 3, 8, 8).double(), []
    with torch.no_grad(), ResidualHealth(model) as health:
        model(images)
        x = model.embeddings(images)
        for layer in model.layers:
            f = layer.attention(layer.layernorm_before(x))[0]
            parts.append((x, f, x + f))
            g = layer.mlp(layer.layernorm_after(x + f))
            parts.append((x + f, g, x + f + g))
            x = x + f + g
    assert_rows(health.table(), parts)


def test_vit_counts_dropout_once_a_branch() -> None:
    """Both branches go through the same dropout module."""
    model = seeded(lambda: ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4, hidden_dropout_prob=0.9))).train()
    with ResidualHealth(model) as health:
        model(stream(2, 3, 8, 8).double())
    assert list(health.table()["name"]) == [f"layers.{i}.{branch}" for i in range(2) for branch in ("attention", "mlp")]


MAMBAS: list[tuple[Any, Any]] = [
    (MambaModel, MambaConfig(num_hidden_layers=2, hidden_size=16, state_size=4, vocab_size=50)),
    (
        Mamba2Model,
        Mamba2Config(
            num_hidden_layers=2, hidden_size=16, state_size=4, vocab_size=50, num_heads=4, head_dim=8, n_groups=1
        ),
    ),
]


@pytest.mark.parametrize(("kind", "config"), MAMBAS)
def test_mamba(kind: Callable, config: object) -> None:
    torch.manual_seed(0)
    model = kind(config).eval()  # single precision: it keeps parts of the scan there
    parts = []
    with torch.no_grad(), ResidualHealth(model) as health:
        model(ids())
        x = model.embeddings(ids())
        for layer in model.layers:
            f = layer.mixer(layer.norm(x))
            parts.append((x, f, x + f))
            x = x + f
    assert_rows(health.table(), parts, tolerance=1e-5)


def encoder(norm_first: bool, batch_first: bool = True) -> nn.TransformerEncoder:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, batch_first=batch_first)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)

    model = seeded(make)
    assert isinstance(model, nn.TransformerEncoder)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # or its copies of one layer would hide a mistaken one
    return model


def encoder_parts(model: nn.TransformerEncoder, x: Tensor) -> list[Part]:
    parts = []
    for layer in model.layers:
        assert isinstance(layer, nn.TransformerEncoderLayer)
        for norm, branch in ((layer.norm1, attend), (layer.norm2, feed_forward)):
            f = branch(layer, norm(x) if layer.norm_first else x)
            parts.append((x, f, x + f if layer.norm_first else norm(x + f)))
            x = parts[-1][2]
    return parts


def attend(layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    out: Tensor = layer.self_attn(x, x, x, need_weights=False)[0]
    return out


def feed_forward(layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    out: Tensor = layer.linear2(F.relu(layer.linear1(x)))
    return out


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_encoder_layer(norm_first: bool, grad: bool) -> None:
    """Also where its fused inference path would hide the stream."""
    model, x = encoder(norm_first), stream(3, 5, 8).double()
    with torch.set_grad_enabled(grad), ResidualHealth(model) as health:
        model(x)
    assert_rows(health.table(), encoder_parts(model, x))
    assert health.table()["name"][0] == "layers.0.self_attn"


def test_torch_encoder_layer_with_tokens_first() -> None:
    model, x = encoder(True, batch_first=False), stream(5, 3, 8).double()
    with ResidualHealth(model) as health:
        model(x)
    parts = encoder_parts(model, x)
    assert_rows(health.table(), [(a.transpose(0, 1), f.transpose(0, 1), b.transpose(0, 1)) for a, f, b in parts])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_fast_path_is_off_in_recorded_passes_alone() -> None:
    """With padding it would hand the layers nested tensors, which their ordinary path does not take."""
    model, x = encoder(False), stream(3, 5, 8).double()
    padded = torch.arange(5) >= torch.tensor([5, 3, 2])[:, None]
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.mha.get_fastpath_enabled()), prepend=True)
    with torch.no_grad(), ResidualHealth(model, every=2) as health:
        first, second, third = (model(x, src_key_padding_mask=padded) for _ in range(3))
    assert seen == [False, True, False]
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(first, third)
    torch.testing.assert_close(first[~padded], second[~padded])
    assert health.table()["finite"].all()


def test_fast_path_comes_back_after_an_exception() -> None:
    model = encoder(False)
    with torch.no_grad(), ResidualHealth(model):
        with pytest.raises(AssertionError, match="embedding dimension"):
            model(stream(3, 5, 9).double())
        assert torch.backends.mha.get_fastpath_enabled()


# --- our own models -------------------------------------------------------------------------------


def decoder(connection: ConnectionConfig | None = None, placement: Any = "pre", **options: int) -> nn.Module:
    connection = connection or ConnectionConfig()
    shape: dict[str, Any] = {
        "vocabulary": 50,
        "width": 8,
        "heads": 2,
        "context": 8,
        "depth": 3,
        "init_std": 0.3,
    } | options
    return build(DecoderConfig(connection=connection, placement=placement, **shape), 0)


@pytest.mark.parametrize("placement", ["pre", "post", "none", "sandwich"])
@pytest.mark.parametrize("options", [{"kind": "add"}, {"kind": "weighted_skip", "weight": 0.3}, {"kind": "none"}])
def test_our_decoder(options: dict[str, Any], placement: str) -> None:
    model = decoder(ConnectionConfig(**options), placement).double()
    parts: list[Part] = []

    def note(module: Residual, inputs: tuple[Tensor], after: Tensor) -> None:
        x = inputs[0]
        parts.append((x, module.norm_update(module.branch(module.norm_input(x))), after))

    sublayers = {name: module for name, module in model.named_modules() if isinstance(module, Residual)}
    own = [module.register_forward_hook(note) for module in sublayers.values()]
    with torch.no_grad():
        model(ids())
        for handle in own:
            handle.remove()
        with ResidualHealth(model) as health:
            model(ids())
    assert list(health.table()["name"]) == list(sublayers)
    assert_rows(health.table(), parts)


@pytest.mark.parametrize("kind", ["value_residual", "denseformer", "hyper", "attnres"])
def test_connections_with_more_than_a_sum(kind: str) -> None:
    """What was read and the update are seen, whatever the connection keeps."""
    model, parts = decoder(ConnectionConfig(kind=kind)).double(), []
    seen: list[Tensor] = []
    own = []
    for module in model.modules():
        if isinstance(module, Residual):
            own.append(module.norm_input.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])))
            own.append(module.norm_update.register_forward_hook(lambda module, inputs, output: seen.append(output)))
    with torch.no_grad(), ResidualHealth(model) as health:
        model(ids())
    parts = [(x, f, x + f) for x, f in zip(seen[::2], seen[1::2], strict=True)]
    assert len(parts) == 6
    for handle in own:
        handle.remove()
    for row, part in zip(health.table().to_dict("records"), parts, strict=True):
        direct = directly(*part)
        for measure in ("ratio", "update_norm", "stream_norm", "token_cosine", "effective_rank"):
            assert row[measure] == pytest.approx(direct[measure], rel=1e-6)
        assert math.isfinite(float(row["block_influence"]))


@pytest.mark.parametrize(
    ("connection", "state"),
    [
        (ConnectionConfig("rezero"), "dead"),
        (ConnectionConfig("layerscale", initial=1e-6), "dead"),
        (ConnectionConfig("scaled", scale=0.1), "healthy"),
    ],
    ids=str,
)
def test_update_is_measured_as_it_joins_the_stream(connection: ConnectionConfig, state: str) -> None:
    """A branch behind a closed scale is dead, however much it puts out."""
    model = decoder(connection).double()
    with torch.no_grad(), ResidualHealth(model) as health:
        model(ids())
    assert set(health.table()["state"]) == {state}
    with torch.no_grad(), ResidualHealth(decoder(ConnectionConfig("add")).double()) as plain:
        plain._model(ids())
    first, whole = health.table()["update_norm"][0], plain.table()["update_norm"][0]
    scale = {"rezero": 0.0, "layerscale": 1e-6, "scaled": 0.1}[connection.kind]
    assert first == pytest.approx(scale * whole, rel=1e-6)


def test_a_block_as_the_whole_model() -> None:
    """x, f and the next stream may be the model's own input and output."""
    whole = decoder().double()
    model = next(module for module in whole.modules() if isinstance(module, Residual))
    x = stream().double()
    with torch.no_grad(), ResidualHealth(model) as health:
        after = model(x)
        assert_rows(health.table(), [(x, model.branch(model.norm_input(x)), after)])
    assert health.table()["name"][0] == "Residual"
    mamba = MambaModel(MAMBAS[0][1]).layers[0]
    with torch.no_grad(), ResidualHealth(mamba) as health:
        mamba(stream(2, 5, 16))
    assert list(health.table()["name"]) == ["mixer"]


# --- branches by name -----------------------------------------------------------------------------


def chain_parts(model: Chain, x: Tensor) -> list[Part]:
    parts = []
    for layer in model.layers:
        for _ in range(model.repeats):
            after = layer(x)
            parts.append((x, after - x, after))
            x = after
    return parts


def test_named_branches() -> None:
    model, x = chain().double(), stream().double()
    with ResidualHealth(model, branches=["layers.0", "layers.2"]) as health:
        model(x).square().sum().backward()
    parts = chain_parts(model, x)
    assert_rows(health.table(), [parts[0], parts[2]])
    assert list(health.table()["name"]) == ["layers.0", "layers.2"]
    gradients = torch.autograd.grad(parts[2][2].square().sum(), [after for _, _, after in parts])
    assert list(health.table()["gradient_norm"]) == pytest.approx([float(gradients[i].norm()) for i in (0, 2)])


@pytest.mark.parametrize("pattern", ["layers.*", ["layers.*"], ["layers.1", "layers.*", "layers.[02]"]])
def test_patterns_name_each_module_once(pattern: str | list[str]) -> None:
    model = chain()
    with ResidualHealth(model, branches=pattern) as health:
        model(stream())
    assert sorted(health.table()["name"]) == ["layers.0", "layers.1", "layers.2"]
    assert list(health.table()["layer"]) == [0, 1, 2]


def test_names_of_inner_modules() -> None:
    """One branch inside another: both are measured, the outer first."""
    model = Chain(Chain(Block(), Block()))
    with ResidualHealth(model, branches=["layers.0.layers.*", "layers.0"]) as health:
        model(stream())
    assert list(health.table()["name"]) == ["layers.0", "layers.0.layers.0", "layers.0.layers.1"]


def test_block_that_changes_its_input_in_place() -> None:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.linear(x.tanh()))

    torch.manual_seed(0)
    model = Chain(InPlace(), InPlace()).double()
    x = stream().double()
    with torch.no_grad(), ResidualHealth(model, branches="layers.*") as health:
        model(x.clone())
        first = model.layers[0](x.clone())
        second = model.layers[1](first.clone())
    assert_rows(health.table(), [(x, first - x, first), (first, second - first, second)])


def test_stream_by_keyword_and_in_a_tuple() -> None:
    class Keyword(Block):
        def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
            return super().forward(x), None

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Keyword()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.block(x=x, mask=torch.zeros(1, dtype=torch.bool))[0]
            return out

    model = Caller()
    with ResidualHealth(model, branches="block") as health:
        out = model(stream())
    assert health.table()["update_norm"][0] == pytest.approx((out - stream()).norm(dim=-1).mean().item(), rel=1e-5)


def test_the_same_block_twice_in_a_pass_has_two_rows() -> None:
    model, x = chain(2, repeats=2).double(), stream().double()
    with ResidualHealth(model, branches="layers.*") as health:
        model(x)
    assert list(health.table()["name"]) == ["layers.0", "layers.0", "layers.1", "layers.1"]
    assert_rows(health.table(), chain_parts(model, x))


def test_streams_of_other_shapes_have_no_token_measures() -> None:
    for shape in ((4, 8), (2, 3, 4, 8)):
        model = chain()
        with ResidualHealth(model, branches="layers.*") as health:
            model(stream(*shape))
        assert health.table()[["token_cosine", "effective_rank"]].isna().all(axis=None)
        assert health.table()[["ratio", "block_influence"]].notna().all(axis=None)


def test_effective_rank_can_be_left_out() -> None:
    model = chain()
    with ResidualHealth(model, branches="layers.*", sequences=0) as health:
        model(stream())
    assert health.table()["effective_rank"].isna().all()
    assert health.table()["token_cosine"].notna().all()


def test_an_empty_batch_is_passed_over() -> None:
    model = chain()
    with ResidualHealth(model, branches="layers.*") as health:
        model(torch.zeros(0, 5, 8))
    assert health.table().empty


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finite", "largest", "ratio", "state"),
    [
        (False, 0.9, 0.0, "non-finite"),
        (True, 0.51, 0.0, "overflow"),
        (True, 0.5, 0.000999, "dead"),
        (True, 0.0, 0.001, "healthy"),
        (True, 0.0, 1.0, "healthy"),
        (True, 0.0, 1.001, "rewriting"),
        (True, 0.0, math.inf, "rewriting"),
    ],
)
def test_rule(finite: bool, largest: float, ratio: float, state: str) -> None:
    assert HealthRule().state(finite=finite, largest=largest, ratio=ratio) == state


def test_rule_is_the_users() -> None:
    model = chain()
    with ResidualHealth(model, branches="layers.*", rule=HealthRule(dead_below=10.0, rewriting_above=20.0)) as health:
        model(stream())
    assert set(health.table()["state"]) == {"dead"}


def spoil(model: Any, layer: int, change: Callable[[Tensor], object]) -> None:
    """Change the matrix that writes the MLP's update to the stream."""
    with torch.no_grad():
        for parameter in model.transformer.h[layer].mlp.c_proj.parameters():
            change(parameter)


def test_planted_dead_branch() -> None:
    model = gpt2()
    spoil(model, 1, lambda p: p.zero_())
    with ResidualHealth(model) as health:
        model(ids())
    table = health.table()
    assert list(table["name"][table["state"] == "dead"]) == ["transformer.h.1.mlp"]
    assert table["ratio"][3] == table["update_norm"][3] == 0
    assert table["block_influence"][3] == pytest.approx(0, abs=1e-12)
    assert "1 dead (transformer.h.1.mlp 0)" in health.summary()
    assert health.first_fault() is None


def test_planted_exploding_branch() -> None:
    model = gpt2()
    with ResidualHealth(model) as before:
        model(ids())
    spoil(model, 1, lambda p: p.mul_(1e3))
    with ResidualHealth(model) as health:
        model(ids())
    told = list(health.table()["state"] == "rewriting")
    assert told[3]
    assert told[:3] == list(before.table()["state"] == "rewriting")[:3]
    assert health.table()["ratio"][3] == pytest.approx(1e3 * before.table()["ratio"][3], rel=1e-6)
    assert "rewriting (" in health.summary()


def test_planted_nan_is_found_where_it_starts() -> None:
    model = gpt2()
    spoil(model, 1, lambda p: p.view(-1)[0].fill_(math.nan))
    with ResidualHealth(model) as health:
        model(ids())
    assert list(health.table()["state"] == "non-finite") == [False] * 3 + [True] * 3
    fault = health.first_fault()
    assert fault is not None
    assert (fault.step, fault.layer, fault.name, fault.stream_finite) == (0, 3, "transformer.h.1.mlp", True)
    said = "step 0: transformer.h.1.mlp (layer 3) is the first that is non-finite; the stream going in was finite"
    assert str(fault) == said
    assert "3 non-finite (transformer.h.1.mlp, transformer.h.2.attn, transformer.h.2.mlp)" in health.summary()


def test_nan_from_before_the_branches_is_told_apart() -> None:
    model = gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight[0, 0] = math.nan
    with ResidualHealth(model) as health:
        model(ids())
    fault = health.first_fault()
    assert fault is not None
    assert (fault.name, fault.stream_finite) == ("transformer.h.0.attn", False)
    assert str(fault).endswith("the stream going in was so already")


class Scaled(nn.Module):
    """Returns its input `factor` times."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_half_precision_overflow_is_told_before_and_after() -> None:
    model = Chain(*(Scaled(10.0) for _ in range(6)))
    with ResidualHealth(model, branches="layers.*") as health:
        model(torch.full((2, 3, 4), 0.4, dtype=torch.float16))
    states = list(health.table()["state"])
    assert states == ["rewriting"] * 4 + ["overflow", "non-finite"]
    assert health.table()["largest"][4] == pytest.approx(40000 / 65504, rel=1e-2)
    fault = health.first_fault()
    assert fault is not None
    assert (fault.name, fault.state) == ("layers.4", "overflow")
    assert "1 overflow (layers.4 0.61 of its dtype)" in health.summary()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_measures_know_no_scale(scale: float) -> None:
    """Squares of such values underflow and overflow in float32; streams without norms get there."""
    model, x = Chain(Scaled(1.5)), stream()
    with ResidualHealth(model, branches="layers.*") as health:
        model(x * scale)
    row = health.table().iloc[0]
    direct = directly(x, x / 2, 1.5 * x)
    for measure in ("ratio", "token_cosine", "effective_rank"):
        assert row[measure] == pytest.approx(direct[measure], rel=1e-5)
    assert row["stream_norm"] == pytest.approx(scale * direct["stream_norm"], rel=1e-5)
    assert row["block_influence"] == pytest.approx(0, abs=1e-6)


def test_zero_tokens_are_left_out() -> None:
    """Such as padding; a stream that is zero throughout makes any update infinite."""

    class Plus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones_like(x)

    model, x = Chain(Plus()), torch.ones(2, 3, 4)
    x[:, 0] = 0
    with ResidualHealth(model, branches="layers.*", every=1) as health:
        for given in (x, torch.zeros(2, 3, 4)):
            model(given)
    assert list(health.table()["ratio"]) == [1.0, math.inf]
    silent = Chain(nn.Identity())
    with ResidualHealth(silent, branches="layers.*") as health:
        silent(torch.zeros(2, 3, 4))
    assert list(health.table()["state"]) == ["dead"]


# --- cadence and modes ----------------------------------------------------------------------------


def test_every_nth_pass_is_recorded() -> None:
    model = chain()
    with ResidualHealth(model, branches="layers.*", every=3) as health:
        for step in range(7):
            model(stream())
            assert hooks(model) == 3, "no hook stays on the branches"
            assert health.table()["step"].max() == 3 * (step // 3)
    assert list(health.table()["step"]) == [0] * 3 + [3] * 3 + [6] * 3


def test_gradient_norms_come_with_backward() -> None:
    model = chain()
    with ResidualHealth(model, branches="layers.*") as health:
        loss = model(stream()).sum()
        assert health.table()["gradient_norm"].isna().all()
    loss.backward()
    assert (health.table()["gradient_norm"] > 0).all()


def test_without_gradients_there_is_no_gradient_norm() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        model = chain()
        with mode(), ResidualHealth(model, branches="layers.*") as health:
            model(stream())
        assert health.table()["gradient_norm"].isna().all()
        assert health.table()["ratio"].notna().all()


def test_autocast() -> None:
    """Updates in bfloat16 on a stream in float32."""
    model = gpt2().float()
    with ResidualHealth(model) as plain:
        model(ids())
    with torch.autocast("cpu", torch.bfloat16), ResidualHealth(model) as health:
        model(ids()).logits.float().sum().backward()
    assert list(health.table()["ratio"]) == pytest.approx(list(plain.table()["ratio"]), rel=0.05)
    assert (health.table()["gradient_norm"] > 0).all()


@pytest.mark.parametrize("every", [1, 2])
def test_activation_checkpointing_is_no_further_pass(every: int) -> None:
    plain, model = chain(), chain(checkpointed=True)
    with ResidualHealth(plain, branches="layers.*", every=every) as expected:
        for _ in range(3):
            plain(stream()).sum().backward()
    with ResidualHealth(model, branches="layers.*", every=every) as health:
        for _ in range(3):
            model(stream()).sum().backward()
    pd.testing.assert_frame_equal(health.table(), expected.table())


def test_checkpointing_of_the_whole_model_is_no_further_pass() -> None:
    model, x = chain(), stream().requires_grad_()
    with ResidualHealth(model, branches="layers.*", every=1) as health:
        for _ in range(3):
            checkpoint(model, x, use_reentrant=False).sum().backward()
    assert list(health.table()["step"]) == [0] * 3 + [1] * 3 + [2] * 3
    assert health.table()["gradient_norm"].notna().all()


def test_hugging_face_checkpointing() -> None:
    plain, model = gpt2().train(), gpt2().train()
    model.activation_checkpointing_enable()
    tables = []
    for each in (plain, model):
        torch.manual_seed(1)
        with ResidualHealth(each, every=1) as health:
            for _ in range(2):
                each(ids(), use_cache=False).logits.sum().backward()
        tables.append(health.table())
    pd.testing.assert_frame_equal(tables[0], tables[1])


# --- a model stays as it was ----------------------------------------------------------------------


def trained(model: nn.Module, logits: Callable[[nn.Module], Tensor], probed: bool) -> list[Tensor]:
    """Outputs, gradients and weights of three steps."""
    health = ResidualHealth(model, every=2) if probed else None
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = []
    torch.manual_seed(3)
    for _ in range(3):
        optimiser.zero_grad()
        out = logits(model)
        F.cross_entropy(out.flatten(0, 1), ids().flatten()).backward()
        optimiser.step()
        kept += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    if health:
        assert health.table()["gradient_norm"].notna().all()
        health.remove()
    return [*kept, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("mode", [True, False])
def test_outputs_and_gradients_stay_bit_for_bit(mode: bool) -> None:
    cases: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = [
        (lambda: gpt2().float(), lambda model: model(ids()).logits),
        (decoder, lambda model: model(ids())),
    ]
    for make, logits in cases:
        with_probe, without = (trained(make().train(mode), logits, probed) for probed in (True, False))
        assert len(with_probe) == len(without) > 10
        assert all(torch.equal(a, b) for a, b in zip(with_probe, without, strict=True))


def test_removal_leaves_nothing() -> None:
    model = gpt2()
    names, before = list(model.state_dict()), pickle.dumps(model)
    health = ResidualHealth(model)
    assert list(model.state_dict()) == names
    assert hooks(model) == 3
    model(ids())
    recorded = health.table()
    for _ in range(2):
        health.remove()
    assert hooks(model) == 0
    assert pickle.dumps(model) == before
    model(ids())
    pd.testing.assert_frame_equal(health.table(), recorded)


def test_nothing_is_kept_alive() -> None:
    model, alive = chain(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: alive.append(weakref.ref(output)))
    health = ResidualHealth(model, branches="layers.*")
    model(stream()).sum().backward()
    gc.collect()
    assert len(alive) == 3
    assert all(ref() is None for ref in alive)
    kept = weakref.ref(model)
    health.remove()
    del model, health, layer
    gc.collect()
    assert kept() is None


def test_two_probes_do_not_disturb_each_other() -> None:
    model = chain()
    with ResidualHealth(model, branches="layers.0", every=1) as one, ResidualHealth(model, branches="layers.*") as two:
        model(stream())
        model(stream())
    assert list(one.table()["step"]) == [0, 1]
    assert list(two.table()["step"]) == [0, 0, 0]


# --- after exceptions -----------------------------------------------------------------------------


class Tripwire(nn.Module):
    """Raises `error` when it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error:
            raise self.error
        return x


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_failed_pass_leaves_no_record(error: BaseException) -> None:
    trip = Tripwire()
    model = Chain(Block(), trip, Block())
    with ResidualHealth(model, branches=["layers.0", "layers.2"], every=1) as health:
        model(stream())
        trip.error = error
        with pytest.raises(type(error)):
            model(stream())
        if isinstance(error, Exception):
            assert hooks(model) == 3, "PyTorch calls no hook after an interrupt; the next pass or removal clears up"
        trip.error = None
        assert list(health.table()["step"]) == [0, 0]
        model(stream())
        assert hooks(model) == 3
        assert list(health.table()["step"]) == [0, 0, 2, 2]
        trip.error = error
        with pytest.raises(type(error)):
            model(stream())
    assert hooks(model) == 0


def test_hooks_are_gone_after_an_exception_in_the_with_block() -> None:
    model = chain()
    with pytest.raises(ZeroDivisionError), ResidualHealth(model, branches="layers.*"):
        raise ZeroDivisionError
    assert hooks(model) == 0


# --- messages -------------------------------------------------------------------------------------


def test_unknown_model_is_told_what_to_pass() -> None:
    model = chain()
    with pytest.raises(UserError) as error:
        ResidualHealth(model)
    assert str(error.value) == (
        "Chain has no block that is known; pass branches=[...] with the names of modules that take the stream and "
        "return it; candidates: 'layers.*' (3 x Block)"
    )
    with pytest.raises(UserError, match=r"Linear has no block that is known; .* as model.named_modules\(\) has them"):
        ResidualHealth(nn.Linear(2, 2))
    assert hooks(model) == 0


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layer.*", "did you mean 'layers.*'?"),
        ("layer.1", "did you mean 'layers.1'?"),
        ("layers.7", "did you mean 'layers."),
        ("layrs", "did you mean 'layers'?"),
        ("layers.*.lineer", r"did you mean 'layers.*.linear'?"),
        ("qq.ww", "valid are: layers.*"),
        ("a.b.c.d.e", "valid are: layers"),
    ],
)
def test_name_that_matches_nothing(pattern: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        ResidualHealth(chain(), branches=[pattern])
    assert str(error.value).startswith(f"branches: no module of Chain is named '{pattern}'; {hint}")


def test_no_names() -> None:
    with pytest.raises(UserError, match=r"branches is empty; pass branches=.*candidates: 'layers"):
        ResidualHealth(chain(), branches=[])


def test_cadence_and_sample_are_checked() -> None:
    with pytest.raises(UserError, match="every is 0; give 1 to record each forward pass, or more"):
        ResidualHealth(gpt2(), every=0)
    with pytest.raises(UserError, match="sequences is -1; give how many"):
        ResidualHealth(gpt2(), sequences=-1)


def test_block_that_changes_shape() -> None:
    model = Chain(Block(), nn.Linear(8, 6))
    with ResidualHealth(model, branches="layers.*"):
        with pytest.raises(UserError) as error:
            model(stream())
        assert str(error.value) == (
            "layers.1 (Linear) cannot be measured as a residual branch: its input is [2, 5, 8] and its output "
            "[2, 5, 6]; give branches=[...] with modules that return a stream of the shape they take"
        )
        assert hooks(model) == 0
        model(stream())


def test_blocks_without_a_stream() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    for layers, fault in (
        ([Counting()], "layers.0 (Counting) cannot be measured as a residual branch: its output has no floating-point"),
        ([nn.Embedding(50, 8)], "layers.0 (Embedding) cannot be measured as a residual branch: its input has no"),
    ):
        model = Chain(*layers)
        with ResidualHealth(model, branches="layers.*"), pytest.raises(UserError) as error:
            model(ids() if isinstance(layers[0], nn.Embedding) else stream())
        assert str(error.value).startswith(fault)
        assert hooks(model) == 0


# --- table, summary, plot -------------------------------------------------------------------------


@pytest.fixture
def figures() -> Iterator[None]:
    yield
    plt.close("all")


def test_before_the_first_pass() -> None:
    health = ResidualHealth(chain(), branches="layers.*")
    assert health.table().empty
    assert tuple(health.table().columns) == COLUMNS
    assert health.summary() == "no forward pass of Chain recorded yet"
    assert health.first_fault() is None


def test_summary_is_of_the_latest_step() -> None:
    layers = [Scaled(factor) for factor in (1.5, 3.0, 1.0, 1.0, 1.0, 1.0)]
    model = Chain(*layers)
    with ResidualHealth(model, branches="layers.*", every=2) as health:
        for _ in range(4):
            model(stream())
    assert health.summary() == (
        "6 branches at step 2: 1 healthy, 1 rewriting (layers.1 2), 4 dead (layers.2 0, layers.3 0, layers.4 0, ...)"
    )
    one = Chain(Scaled(1.5))
    with ResidualHealth(one, branches="layers.*") as health:
        one(stream())
    assert health.summary() == "1 branch at step 0: 1 healthy"


@pytest.mark.usefixtures("figures")
def test_plot_has_a_line_a_step_and_the_thresholds() -> None:
    model = chain()
    with ResidualHealth(model, branches="layers.*", every=1) as health:
        for _ in range(12):
            model(stream())
    ax = health.plot()
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    assert len(ax.get_lines()) == 12 + 2
    assert np.asarray(lines["step 0"].get_ydata()).tolist() == list(health.table()["ratio"][:3])
    dashed = [line for line in ax.get_lines() if line.get_linestyle() == "--"]
    assert [float(np.asarray(line.get_ydata())[0]) for line in dashed] == [1e-3, 1.0]
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [f"step {step}" for step in (0, 3, 6, 8, 11)]
    assert ax.get_yscale() == "log"


@pytest.mark.usefixtures("figures")
def test_plot_on_given_axes_of_what_cannot_be_on_a_log_axis() -> None:
    model = Chain(Scaled(1.0), Scaled(math.nan), Scaled(1.0))
    _, given = plt.subplots()
    with ResidualHealth(model, branches="layers.*") as health:
        assert health.plot(given) is given, "also before the first pass"
        model(stream())
    ax = health.plot(given)
    drawn = next(line for line in ax.get_lines() if line.get_label() == "step 0").get_ydata()
    assert np.asarray(drawn).tolist() == pytest.approx([1e-4, math.nan, math.nan], nan_ok=True)


# --- cost -----------------------------------------------------------------------------------------


def test_overhead_of_the_default_cadence_is_below_a_tenth() -> None:
    """Twenty training steps with and twenty without in turn, of a small decoder; the ratio of the medians.

    Of processor time, on one thread, so that other load on the machine counts less.
    """
    models = [decoder(width=64, heads=4, context=64, depth=4) for _ in range(2)]
    optimisers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    tokens = torch.randint(50, (8, 65), generator=torch.Generator().manual_seed(0))

    def steps(which: int) -> float:
        begin = time.process_time()
        for _ in range(20):
            optimisers[which].zero_grad()
            F.cross_entropy(models[which](tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimisers[which].step()
        return time.process_time() - begin

    def ratio() -> float:
        pairs = [(steps(0), steps(1)) for _ in range(5)]
        return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)

    with ResidualHealth(models[0]) as health:
        steps(0), steps(1)
        assert any(ratio() < 1.10 for _ in range(5)), "the probe costs too much"
    assert list(health.table()["step"].unique()[:3]) == [0, 20, 40], "a multiple of the cadence was timed"


# --- compiled models, other models beside known ones, wrong use -----------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_blocks_that_are_compiled_are_measured_uncompiled() -> None:
    """What was compiled before a hook was set does not call it; between recorded passes it runs compiled."""
    model, graphs = decoder(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in model.get_submodule("stack.blocks").children():
        block.compile(backend=backend)
    plain = model(ids())
    assert len(graphs) == 1
    with ResidualHealth(model, every=2) as one, ResidualHealth(model) as other:
        assert torch.equal(model(ids()), plain)
        model(ids())
    assert len(one.table()) == len(other.table()) == 6
    torch._dynamo.reset()
    model(ids())
    assert len(graphs) == 2, "compiled again, now that nobody looks"
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_profile_and_lens_see_a_compiled_model_too() -> None:
    model = decoder()
    for block in model.get_submodule("stack.blocks").children():
        block.compile(backend="eager")
    places = stream_places(model)
    model(ids())
    assert len(stream_profile(model, ids(), ids())["token_cosine"]) == len(places) == 4
    logits = logit_lens(model, places[:-1], places[-1], model.get_submodule("head"), ids())
    assert len(logits) == 4
    torch._dynamo.reset()


def test_model_compiled_as_a_whole_is_refused() -> None:
    model = decoder()
    model.compile(backend="eager")
    with pytest.raises(UserError, match="compiled as a whole, in place"):
        ResidualHealth(model)


def test_blocks_that_are_not_measured_are_told() -> None:
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    with ResidualHealth(model) as health:
        model(stream(), stream())
    told = "not measured, for the block is not known: decoder.layers (3 x TransformerDecoderLayer)"
    assert health.summary().startswith("4 branches at step 0")
    assert told in health.summary()
    with ResidualHealth(decoder()) as known:
        known._model(ids())
    assert "not measured" not in known.summary()


def test_plot_shows_layers_that_are_not_finite() -> None:
    model = chain()
    with torch.no_grad():
        model.get_submodule("layers.2.linear").get_parameter("weight").fill_(math.nan)
    with ResidualHealth(model, branches="layers.*") as health:
        model(stream())
    ax = health.plot()
    crosses = next(line for line in ax.get_lines() if line.get_label() == "overflow or not finite")
    assert np.asarray(crosses.get_xdata()).tolist() == [2]
    assert ax.get_xlim() == (-0.5, 2.5)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(UserError, match=r"rule is a dict; give a HealthRule"):
        ResidualHealth(chain(), branches="layers.*", rule={"dead_below": 0.1})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="model is a function"):
        ResidualHealth(lambda x: x)  # type: ignore[arg-type]
    health = ResidualHealth(chain(), branches="layers.*")
    health.remove()
    with pytest.raises(UserError, match="this probe was removed"):
        health.__enter__()
