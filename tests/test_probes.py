"""Measurements on a stream, against direct computations in float64, and on a model that stays as it was."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab import probes
from reslab.models.decoder import DecoderConfig
from reslab.models.resnet import ResNetConfig
from reslab.residuals import ConnectionConfig
from reslab.training import build


def stream(batch: int = 3, tokens: int = 5, width: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# --- measures -------------------------------------------------------------------------------------


def test_token_cosine_is_the_mean_over_pairs() -> None:
    x = stream() + 0.7
    pairs = [
        cosine(example[i], example[j])
        for example in x.numpy()
        for i in range(5)
        for j in range(5)
        if i != j
    ]  # fmt: skip
    assert probes.token_cosine(x) == pytest.approx(np.mean(pairs), rel=1e-10)
    assert probes.token_cosine(x.float()) == pytest.approx(np.mean(pairs), rel=1e-5)


def test_token_cosine_at_its_ends() -> None:
    direction = torch.arange(1.0, 9.0)
    assert probes.token_cosine(torch.rand(2, 5, 1) * direction + direction) == pytest.approx(1, abs=1e-6)
    assert probes.token_cosine(torch.eye(8)[None]) == 0
    assert probes.token_cosine(torch.stack([direction, -direction])[None]) == pytest.approx(-1)


def test_effective_rank_is_the_exponential_of_the_entropy() -> None:
    direct = []
    for example in stream().numpy():
        values = np.linalg.svd(example, compute_uv=False)
        shares = values / values.sum()
        direct.append(math.exp(-(shares * np.log(shares)).sum()))
    assert probes.effective_rank(stream()) == pytest.approx(np.mean(direct), rel=1e-10)


def test_effective_rank_at_its_ends() -> None:
    assert probes.effective_rank(torch.eye(8)[None]) == pytest.approx(8)
    assert probes.effective_rank(torch.rand(2, 5, 1).double() * torch.arange(1.0, 9.0)) == pytest.approx(1, abs=1e-6)
    two = torch.zeros(1, 5, 8)
    two[0, 0, 0] = two[0, 1, 1] = 3.0
    assert probes.effective_rank(two) == pytest.approx(2)


def test_effective_rank_of_zeros_is_a_number() -> None:
    """What a stream without skips can underflow to."""
    assert 0 <= probes.effective_rank(torch.zeros(2, 5, 8)) <= 5


def test_neighbour_cosine_is_token_by_token() -> None:
    x, y = stream(seed=0), stream(seed=1) + 0.5
    tokens = zip(x.flatten(0, 1).numpy(), y.flatten(0, 1).numpy(), strict=True)
    assert probes.neighbour_cosine(x, y) == pytest.approx(np.mean([cosine(a, b) for a, b in tokens]), rel=1e-10)
    assert probes.neighbour_cosine(x, 3 * x) == pytest.approx(1)
    assert probes.neighbour_cosine(x, -x) == pytest.approx(-1)


def test_mean_shift_is_relative_to_the_tokens_length() -> None:
    x, y = stream(seed=0), stream(seed=1) + 0.5
    moved = np.linalg.norm(y.numpy().mean((0, 1)) - x.numpy().mean((0, 1)))
    length = math.sqrt((x.numpy() ** 2).sum(-1).mean())
    assert probes.mean_shift(x, y) == pytest.approx(moved / length, rel=1e-10)
    assert probes.mean_shift(x, x) == 0
    assert probes.mean_shift(5 * x, 5 * y) == pytest.approx(moved / length)


# --- on a model -----------------------------------------------------------------------------------


def decoder() -> nn.Module:
    config = DecoderConfig(vocabulary=32, width=8, heads=2, context=6, depth=3, init_std=0.3)
    return build(config, 0).double()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (4, 7), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def blocks_of(model: nn.Module) -> nn.ModuleList:
    blocks = model.get_submodule("stack.blocks")
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_streams_are_the_embedding_and_every_blocks_output() -> None:
    model = decoder()
    with probes.streams(probes.stream_places(model)) as seen:
        logits = model(batch()[0])
    assert len(seen) == 4
    for before, block, after in zip(seen[:-1], blocks_of(model), seen[1:], strict=True):
        assert torch.equal(block(before), after)
    assert torch.equal(model.get_submodule("head")(model.get_submodule("norm")(seen[-1])), logits)


def test_hooks_are_gone_after_an_exception() -> None:
    model = decoder()

    def stop(module: nn.Module, inputs: tuple[Tensor]) -> None:
        assert hooks(model) == 4 + 1
        raise RuntimeError("stop")

    own = blocks_of(model)[1].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop"), probes.streams(probes.stream_places(model)):
        model(batch()[0])
    own.remove()
    assert hooks(model) == 0
    with pytest.raises(IndexError):
        probes.stream_profile(model, torch.full((2, 6), 99), torch.zeros(2, 6, dtype=torch.int64))
    assert hooks(model) == 0


def test_profile_is_made_of_the_measures() -> None:
    model, (inputs, targets) = decoder(), batch()
    profile = probes.stream_profile(model, inputs, targets)
    with probes.streams(probes.stream_places(model)) as seen:
        model(inputs)
    places = [x.detach() for x in seen]
    assert profile["mean_square"] == pytest.approx([float(x.square().sum()) / x.numel() for x in places], rel=1e-5)
    assert profile["token_cosine"] == pytest.approx([probes.token_cosine(x) for x in places], rel=1e-5)
    assert profile["effective_rank"] == pytest.approx([probes.effective_rank(x) for x in places], rel=1e-5)
    for measure in (probes.neighbour_cosine, probes.mean_shift):
        direct = [measure(x, y) for x, y in pairwise(places)]
        assert profile[measure.__name__] == pytest.approx(direct, rel=1e-5)


def test_gradient_norm_is_that_of_finite_differences() -> None:
    model, (inputs, targets) = decoder(), batch()
    profile = probes.stream_profile(model, inputs, targets)
    with torch.no_grad(), probes.streams(probes.stream_places(model)) as seen:
        model(inputs)

    def loss_from(place: int, x: Tensor) -> float:
        for block in blocks_of(model)[place:]:
            x = block(x)
        logits = model.get_submodule("head")(model.get_submodule("norm")(x))
        return float(F.cross_entropy(logits.transpose(1, 2), targets))

    with torch.no_grad():
        for place in (0, 2, 3):
            squares = 0.0
            for at in range(seen[place].numel()):
                step = torch.zeros_like(seen[place])
                step.view(-1)[at] = 1e-6
                squares += ((loss_from(place, seen[place] + step) - loss_from(place, seen[place] - step)) / 2e-6) ** 2
            assert profile["gradient_norm"][place] == pytest.approx(math.sqrt(squares), rel=1e-4)


def test_vanishing_gradients_keep_their_size() -> None:
    """Without skips and norms they fall far below what float32 can hold; a model in float64 still shows by how much."""
    none = ConnectionConfig(kind="none")
    shape = {"vocabulary": 32, "width": 8, "heads": 2, "context": 6, "depth": 24, "init_std": 0.1}
    model = build(DecoderConfig(**shape, connection=none, placement="none", weight_init="plain"), 0).double()  # type: ignore[arg-type]
    inputs, targets = batch()
    with probes.streams(probes.stream_places(model)) as seen:
        loss = F.cross_entropy(model(inputs).transpose(1, 2), targets)
        direct = [float(gradient.norm()) for gradient in torch.autograd.grad(loss, seen)]
    assert 0 < direct[0] < 1e-46
    profile = probes.stream_profile(model, inputs, targets)
    assert profile["gradient_norm"] == pytest.approx(direct, rel=1e-4, abs=0)


def test_images_have_a_gradient_profile_alone() -> None:
    model = build(ResNetConfig(channels=4, depth=2, classes=10), 0)
    profile = probes.stream_profile(model, torch.randn(3, 1, 8, 8), torch.arange(3))
    assert set(profile) == {"gradient_norm"}
    assert len(profile["gradient_norm"]) == 3


# --- a model stays as it was ----------------------------------------------------------------------


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_mode_stay(training: bool) -> None:
    model = decoder().train(training)
    model(batch()[0]).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    probes.stream_profile(model, *batch())
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert modes(model) == [training] * len(modes(model))
    assert torch.equal(torch.get_rng_state(), random)


def test_running_statistics_stay() -> None:
    model = build(ResNetConfig(channels=4, depth=2, classes=10), 0).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    probes.stream_profile(model, torch.randn(3, 1, 8, 8), torch.arange(3))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_mixed_modes_stay() -> None:
    """A model whose first block is frozen in evaluation mode."""
    model = decoder().train()
    blocks_of(model)[0].eval()
    before = modes(model)
    probes.stream_profile(model, *batch())
    assert modes(model) == before


def test_mode_stays_after_an_exception() -> None:
    model = decoder().train()
    with pytest.raises(IndexError):
        probes.stream_profile(model, torch.full((2, 6), 99), torch.zeros(2, 6, dtype=torch.int64))
    assert all(modes(model))
