"""Layers skipped, swapped and repeated, against running the blocks by hand; and a model that stays as it was."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from reslab.models.attention import KeyValueCache
from reslab.models.decoder import DecoderConfig
from reslab.schema import UserError
from reslab.surgery import Blocks, arranged, repeated, skipped, swapped
from reslab.training import build

Surgery = Callable[[Blocks], AbstractContextManager[None]]

SURGERIES: dict[str, tuple[Surgery, list[int]]] = {
    "skip the first": (lambda blocks: skipped(blocks, {0}), [1, 2, 3]),
    "skip two": (lambda blocks: skipped(blocks, {1, 2}), [0, 3]),
    "skip the last": (lambda blocks: skipped(blocks, {3}), [0, 1, 2]),
    "swap": (lambda blocks: swapped(blocks, 1, 3), [0, 3, 2, 1]),
    "repeat": (lambda blocks: repeated(blocks, 1, times=3), [0, 1, 1, 1, 2, 3]),
    "arrange": (lambda blocks: arranged(blocks, [3, 0, 0, 2]), [3, 0, 0, 2]),
}
each_surgery = pytest.mark.parametrize(("surgery", "order"), SURGERIES.values(), ids=SURGERIES)


def decoder() -> tuple[nn.Module, Blocks]:
    config = DecoderConfig(vocabulary=32, width=8, heads=2, context=6, depth=4, init_std=0.3)
    model = build(config, 0).double()
    blocks = model.get_submodule("stack.blocks")
    assert isinstance(blocks, nn.ModuleList)
    return model, blocks


def tokens() -> Tensor:
    return torch.randint(32, (3, 6), generator=torch.Generator().manual_seed(0))


def by_hand(model: Any, order: list[int]) -> Tensor:
    stream = model.token_embedding(tokens()) + model.position_embedding(torch.arange(6))
    blocks = list(model.stack.blocks)
    for i in order:
        stream = blocks[i](stream)
    return model.head(model.norm(stream))


def everything(model: nn.Module) -> list[Any]:
    """Each module's identity, the identity of all it holds, and what its containers contain."""
    shown = []
    for name, module in model.named_modules():
        attributes = {
            key: dict(value) if isinstance(value, dict) else value if isinstance(value, int) else id(value)
            for key, value in vars(module).items()
        }
        shown.append((name, id(module), attributes))
    return shown


# --- which blocks run -----------------------------------------------------------------------------


@each_surgery
def test_blocks_run_in_the_given_order(surgery: Surgery, order: list[int]) -> None:
    model, blocks = decoder()
    expected, whole = by_hand(model, order), model(tokens())
    with surgery(blocks):
        assert len(blocks) == len(order)
        assert torch.equal(model(tokens()), expected)
    assert not torch.allclose(whole, expected)
    assert torch.equal(model(tokens()), whole)


def test_a_sequential_is_arranged_too() -> None:
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with swapped(blocks, 0, 2):
        out = blocks(x)
    assert torch.equal(out, blocks[0](blocks[1](blocks[2](x))))


def test_skipping_none_and_repeating_once_change_nothing() -> None:
    _, blocks = decoder()
    before = list(blocks)
    for surgery in (skipped(blocks, set()), repeated(blocks, 2, times=1)):
        with surgery:
            assert list(blocks) == before


def test_numpy_counts_blocks_too() -> None:
    model, blocks = decoder()
    first, last = np.array([0, 3])
    for surgery, order in (
        (skipped(blocks, np.array([0, 3])), [1, 2]),
        (skipped(blocks, last), [0, 1, 2]),
        (repeated(blocks, first), [0, 0, 1, 2, 3]),
    ):
        expected = by_hand(model, order)
        with surgery:
            assert torch.equal(model(tokens()), expected)


def test_contexts_nest() -> None:
    model, blocks = decoder()
    once, twice = by_hand(model, [0, 2, 1, 3]), by_hand(model, [0, 1, 3])
    before = list(blocks)
    with swapped(blocks, 1, 2):
        with skipped(blocks, {1}):  # what is second now: block 2
            assert torch.equal(model(tokens()), twice)
        assert torch.equal(model(tokens()), once)
    assert list(blocks) == before


# --- the model stays as it was --------------------------------------------------------------------


@each_surgery
@pytest.mark.parametrize("fails", [True, False])
def test_everything_is_restored(surgery: Surgery, order: list[int], fails: bool) -> None:
    model, blocks = decoder()
    blocks[1].register_forward_hook(lambda module, inputs, output: None)
    before = everything(model)
    with pytest.raises(RuntimeError, match="stop") if fails else nullcontext(), surgery(blocks):
        model(tokens())
        model.eval()
        if fails:
            raise RuntimeError("stop")
    model.train()
    assert everything(model) == before


@each_surgery
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hugging_face_models_are_restored(surgery: Surgery, order: list[int], kind: str) -> None:
    model, blocks = hugging_face(kind)
    before, config = everything(model), model.config.to_dict()
    with pytest.raises(IndexError), surgery(blocks):
        model.generate(prompt() + 99, max_new_tokens=2)
    with surgery(blocks):
        model.generate(prompt(), max_new_tokens=2)
    assert everything(model) == before
    assert model.config.to_dict() == config


def test_parameters_are_shared() -> None:
    model, blocks = decoder()
    by_hand(model, [0, 2, 2, 3]).sum().backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    names = {id(p) for p in model.parameters()}
    model.zero_grad()
    with arranged(blocks, [0, 2, 2, 3]):
        assert {id(p) for p in model.parameters()} < names
        model(tokens()).sum().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert (p.grad is None) == (gradient is None)
        if p.grad is not None and gradient is not None:
            torch.testing.assert_close(p.grad, gradient)
    assert any(gradient is None for gradient in expected)


def test_buffers_are_shared() -> None:
    blocks = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    with swapped(blocks, 0, 1):
        blocks(torch.randn(8, 4))
    assert [int(block.num_batches_tracked) for block in blocks] == [1, 1]  # type: ignore[arg-type]
    assert not blocks[1].running_mean.eq(0).any()  # type: ignore[operator]


def test_earlier_hooks_run_for_every_repeat_and_later_ones_for_one() -> None:
    model, blocks = decoder()
    earlier, later = [], []
    blocks[1].register_forward_hook(lambda module, inputs, output: earlier.append(module))
    with repeated(blocks, 1, times=3):
        blocks[2].register_forward_hook(lambda module, inputs, output: later.append(module))
        model(tokens())
        assert earlier == list(blocks)[1:4]
        assert later == [blocks[2]]
    model(tokens())
    assert earlier[3:] == [blocks[1]]
    assert len(later) == 1


def test_a_submodule_in_two_places_is_one_in_the_stand_in() -> None:
    shared = nn.Linear(4, 4)
    blocks = nn.ModuleList([nn.Sequential(shared, nn.Tanh(), shared), nn.Tanh()])
    with swapped(blocks, 0, 1):
        stand_in = blocks[1]
        assert isinstance(stand_in, nn.Sequential)
        assert stand_in[0] is stand_in[2] is not shared


def test_a_compiled_block_runs_its_stand_in() -> None:
    _, blocks = decoder()
    blocks[0].compile(backend="eager")
    ran: list[nn.Module] = []
    with swapped(blocks, 0, 1):
        blocks[1].register_forward_hook(lambda module, inputs, output: ran.append(module))
        blocks[1](torch.ones(1, 6, 8, dtype=torch.float64))
        assert ran == [blocks[1]]
    assert blocks[0]._compiled_call_impl is not None


# --- generation with and without a cache ----------------------------------------------------------

TINY: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def hugging_face(kind: str) -> tuple[Any, Blocks]:
    """Tiny models with weights large enough for each layer to matter. Qwen's layers see 8, 8, 3 and 3 tokens back."""
    torch.manual_seed(0)
    model: Any
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**TINY, **NO_TOKENS, n_positions=32, initializer_range=0.3))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**TINY, **NO_TOKENS, intermediate_size=32, initializer_range=0.3))
    else:
        windows: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 3}
        config = Qwen2Config(**TINY, **NO_TOKENS, **windows, num_key_value_heads=2, intermediate_size=32)
        config.initializer_range = 0.3
        model = Qwen2ForCausalLM(config)
    model = model.double().eval()
    return model, model.transformer.h if kind == "gpt2" else model.model.layers


def prompt() -> Tensor:
    return torch.randint(1, 32, (2, 5), generator=torch.Generator().manual_seed(0))


def generated(model: Any, use_cache: bool) -> Tensor:
    """Logits [B, steps, V] of greedy generation."""
    options = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    out = model.generate(
        prompt(), attention_mask=torch.ones_like(prompt()), max_new_tokens=6, use_cache=use_cache, **options
    )
    return torch.stack(out.logits, 1)


@each_surgery
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_cache_changes_no_logit(surgery: Surgery, order: list[int], kind: str) -> None:
    model, blocks = hugging_face(kind)
    whole = generated(model, use_cache=True)
    with surgery(blocks):
        cached, uncached = generated(model, use_cache=True), generated(model, use_cache=False)
    torch.testing.assert_close(cached, uncached, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(whole, cached)
    assert torch.equal(generated(model, use_cache=True), whole)


@each_surgery
def test_cache_of_a_decoder_changes_no_logit(surgery: Surgery, order: list[int]) -> None:
    model, blocks = decoder()
    with surgery(blocks):
        cache = KeyValueCache()
        steps = [model(step, cache) for step in tokens().split([3, 1, 2], dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), model(tokens()), rtol=1e-9, atol=1e-9)


@each_surgery
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_every_block_of_a_hugging_face_model_runs(surgery: Surgery, order: list[int], kind: str) -> None:
    """Once for each place, with its own weights and, in Qwen, its own attention window."""
    model, blocks = hugging_face(kind)
    ran: list[int] = []
    masks: dict[int, bool] = {}

    def note(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor], options: dict[str, Any]) -> None:
            ran.append(i)
            mask = options.get("attention_mask")
            masks.setdefault(i, mask is None)
            assert masks[i] == (mask is None)

        return hook

    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(note(i), with_kwargs=True)
    model(prompt())
    ran.clear()
    with surgery(blocks):
        model(prompt())
    assert ran == order


def test_layer_types_follow_their_blocks() -> None:
    model, blocks = hugging_face("qwen2")
    types = ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert model.config.layer_types == types
    with arranged(blocks, [3, 0, 0, 2, 1]):
        assert model.config.layer_types == [types[i] for i in (3, 0, 0, 2, 1)]
        assert [block.self_attn.layer_idx for block in blocks] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("surgery", "message"),
    [
        (lambda b: arranged(b, []), "no block is left to run; keep at least one"),
        (lambda b: skipped(b, {0, 1, 2, 3}), "no block is left to run"),
        (lambda b: skipped(b, {1, 4}), "there is no block 4 among 4 blocks; count from 0 to 3"),
        (lambda b: arranged(b, [0, -1]), "there is no block -1 among 4 blocks"),
        (lambda b: swapped(b, 0, 7), "there is no block 7 among 4 blocks"),
        (lambda b: swapped(b, 2, 2), "block 2 is to be swapped with itself; give two different blocks"),
        (lambda b: repeated(b, 9), "there is no block 9 among 4 blocks"),
        (lambda b: repeated(b, 1, times=0), r"times is 0, must be at least 1; use skipped\(\)"),
    ],
)
def test_errors(surgery: Surgery, message: str) -> None:
    model, blocks = decoder()
    before = everything(model)
    with pytest.raises(UserError, match=message), surgery(blocks):
        pass
    assert everything(model) == before


@pytest.mark.parametrize(
    ("surgery", "arguments", "message"),
    [
        (repeated, ({2},), r"\{2\} \(set\) is no block's number; give a whole one, counted from 0"),
        (repeated, (1, 1.5), "repeated: times is 1.5; give a whole number, at least 1"),
        (swapped, ("0", 1), r"'0' \(str\) is no block's number"),
        (skipped, ([True, False],), r"True \(bool\) is no block's number"),
        (skipped, (None,), "skipped: which is a NoneType; give a block's number, or a set of them"),
        (arranged, ({0, 2},), r"arranged: order is a set; give a list of blocks' numbers, such as \[0, 2\]"),
    ],
)
def test_what_counts_no_blocks_is_refused(surgery: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message), surgery(decoder()[1], *arguments):
        pass


def test_unfit_hugging_face_models_are_refused() -> None:
    def refused(kind: str, change: Callable[[Any, Any], None], message: str) -> None:
        model, blocks = hugging_face(kind)
        change(model, blocks)
        before = everything(model)
        with pytest.raises(UserError, match=message), skipped(blocks, {0}):
            pass
        assert everything(model) == before

    def forget_config(model: Any, blocks: Any) -> None:
        for block in blocks:
            for module in block.modules():
                vars(module).pop("config", None)

    def set_config(name: str, value: Any) -> Callable[[Any, Any], None]:
        return lambda model, blocks: setattr(model.config, name, value)

    def read_other_layer(model: Any, blocks: Any) -> None:
        blocks[0].self_attn.kv_shared_layer_index = 3

    def replace_forward(model: Any, blocks: Any) -> None:
        blocks[2].mlp.forward = blocks[2].mlp.forward

    refused(
        "llama", forget_config, r"the blocks \(LlamaDecoderLayer\) number themselves for a cache, but have no config"
    )
    refused("gpt2", set_config("num_hidden_layers", 3), "GPT2Config: num_hidden_layers is 3, but there are 4 blocks")
    refused("gpt2", set_config("is_encoder_decoder", True), "GPT2Config: an encoder-decoder")
    refused("llama", read_other_layer, "block 0: the kv_shared_layer_index of its LlamaAttention is 3, another layer")
    refused("llama", replace_forward, "block 2: the forward of its LlamaMLP was replaced")


def test_stand_ins_are_freed() -> None:
    _, blocks = decoder()
    with swapped(blocks, 0, 1):
        stand_in = weakref.ref(blocks[0])
    gc.collect()
    assert stand_in() is None
