"""The state-space language model: its recurrences, what their gradients keep, and that it is a decoder otherwise."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.attention import KeyValueCache
from reslab.models.state_space import (
    DiagonalMixer,
    IncrementMixer,
    Mixer,
    StateMixer,
    StateSpace,
    StateSpaceConfig,
    decaying_sum,
    state_gradient,
)
from reslab.residuals import ConnectionConfig
from reslab.schema import UserError
from variants import SAMPLE, perturbed, unreached

MIXERS = ["state", "increment", "diagonal"]


def network(mixer: str = "diagonal", seed: int = 0, **changed: Any) -> StateSpace:
    shape: dict[str, Any] = {"vocabulary": 40, "width": 16, "context": 7, "depth": 2, "init_std": 0.2, "mixer": mixer}
    model = StateSpace(StateSpaceConfig(**shape | changed))
    torch.manual_seed(seed)
    model.reset_parameters()
    return model


def tokens(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(0))


def inputs(batch: int = 2, length: int = 7, width: int = 16) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(0))


def first_mixer(model: StateSpace) -> Mixer:
    branch = model.stack.sublayers()[0].branch
    assert isinstance(branch, Mixer)
    return branch


# --- the recurrences ------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_formula(mixer: str) -> None:
    branch: Any = first_mixer(network(mixer))
    x, s, wanted = inputs(), torch.zeros(2, 16), []
    for t in range(7):
        fed = x[:, t] @ branch.input_map.weight.T
        if mixer == "diagonal":
            a = branch.decay_logit.sigmoid()
            s = a * s + (1 - a**2).sqrt() * fed
        else:
            candidate = torch.tanh(s @ branch.state_map.weight.T + fed)
            s = candidate if mixer == "state" else s + candidate / 7  # 1/context
        wanted.append(s @ branch.output_map.weight.T)
    torch.testing.assert_close(branch(x), torch.stack(wanted, 1))


def test_given_rate_is_used() -> None:
    branch = first_mixer(network("increment", rate=0.25))
    state, fed = inputs()[0], inputs()[1]
    assert isinstance(branch, IncrementMixer)
    wanted = state + 0.25 * torch.tanh(branch.state_map(state) + fed)
    torch.testing.assert_close(branch.step(state, fed), wanted)


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 13])
def test_decaying_sum_is_the_loop(steps: int) -> None:
    x, decay = inputs(length=steps).double(), torch.linspace(0.01, 0.999, 16).double()
    state, wanted = torch.zeros(2, 16).double(), []
    for t in range(steps):
        state = decay * state + x[:, t]
        wanted.append(state)
    torch.testing.assert_close(decaying_sum(x, decay), torch.stack(wanted, 1))


def test_decaying_sum_is_safe_in_float32() -> None:
    """Also where the decay is so fast that its powers vanish, or so slow that it rounds to 1; with gradients."""
    logit = torch.linspace(-80, 30, 16).requires_grad_()
    x = inputs(1, 512)
    out = decaying_sum(x, logit.sigmoid())
    exact = decaying_sum(x.double(), logit.sigmoid().double())
    torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=1e-5)
    (gradient,) = torch.autograd.grad(out.square().mean(), logit)
    assert gradient.isfinite().all()


def test_decays_start_spread_over_the_context() -> None:
    mixer = DiagonalMixer(5, slowest=256)
    decay, scale = (part.detach() for part in mixer.decays(torch.float64))
    wanted = torch.exp(-1 / torch.tensor([1.0, 4, 16, 64, 256], dtype=torch.float64))
    torch.testing.assert_close(decay, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(scale, (1 - decay**2).sqrt(), atol=1e-6, rtol=1e-6)


def test_white_input_keeps_its_variance() -> None:
    mixer = DiagonalMixer(16, slowest=8)
    fed = inputs(2000, 64)
    torch.testing.assert_close(mixer.states(fed)[:, -1].detach().std(0), torch.ones(16), atol=0.06, rtol=0)


# --- what gradients keep over time ----------------------------------------------------------------


def with_state_map(mixer: StateMixer, gain: float) -> StateMixer:
    """W of Gaussian entries, whose eigenvalues fill a disc of radius `gain` (Girko 1984)."""
    torch.manual_seed(0)
    nn.init.normal_(mixer.state_map.weight, std=gain * mixer.width**-0.5)
    return mixer


def test_gradient_of_the_plain_recurrence_vanishes() -> None:
    mixer = with_state_map(StateMixer(16), 0.5)
    assert state_gradient(mixer, inputs(1, 100)[0]) < 1e-6
    assert state_gradient(mixer, torch.zeros(100, 16)) < 1e-6


@pytest.mark.parametrize("gain", [0.5, 1.0])
@pytest.mark.parametrize("steps", [100, 400])
def test_gradient_of_increments_is_kept(steps: int, gain: float) -> None:
    mixer = with_state_map(IncrementMixer(16, 1 / steps), gain)
    assert 0.5 < state_gradient(mixer, inputs(1, steps)[0]) < 3


def test_gradient_of_decays_is_their_power() -> None:
    mixer = DiagonalMixer(16, slowest=256)
    decay = mixer.decay_logit.detach().double().sigmoid()
    for steps in (1, 100):
        wanted = float((decay ** (2 * steps)).mean().sqrt())
        assert state_gradient(mixer, inputs(1, steps)[0]) == pytest.approx(wanted, rel=1e-10)


def test_state_gradient_is_the_product_of_the_steps() -> None:
    mixer = with_state_map(StateMixer(4), 1.0)
    x, weight = inputs(1, 5, 4)[0].double(), mixer.state_map.weight.detach().double()
    state, product = torch.zeros(4).double(), torch.eye(4).double()
    for fed in x @ mixer.input_map.weight.detach().double().T:
        state = torch.tanh(weight @ state + fed)
        product = (1 - state**2).diag() @ weight @ product
    assert state_gradient(mixer, x) == pytest.approx(float(product.norm()) / 2, rel=1e-10)
    assert mixer.state_map.weight.dtype == torch.float32


def test_tiny_gradients_keep_their_size() -> None:
    """1e-180, whose square is not a number of float64 but 0."""
    mixer = StateMixer(4)
    mixer.state_map.weight.data = torch.eye(4) / 10
    assert state_gradient(mixer, torch.zeros(180, 4)) == pytest.approx(1e-180, rel=1e-4)
    assert state_gradient(mixer, torch.zeros(400, 4)) == 0


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_model_is_its_sublayers_in_turn(mixer: str) -> None:
    model = network(mixer)
    x = model.token_embedding.weight[tokens()] + model.position_embedding.weight
    for sublayer in model.stack.sublayers():
        x = x + sublayer.branch(F.layer_norm(x, (16,)))
    logits = model(tokens())
    assert logits.shape == (2, 7, 40)
    torch.testing.assert_close(logits, F.layer_norm(x, (16,)) @ model.head.weight.T)


@pytest.mark.parametrize("mixer", MIXERS)
def test_no_token_sees_a_later_one(mixer: str) -> None:
    model = network(mixer)
    embedded: list[Tensor] = []
    model.stack.register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    for at in range(7):
        logits = model(tokens())
        (gradient,) = torch.autograd.grad(logits[:, at].square().sum(), embedded[-1])
        assert torch.count_nonzero(gradient[:, at + 1 :]) == 0
        assert gradient[:, : at + 1].abs().amax(-1).min() > 0


@pytest.mark.parametrize("mixer", MIXERS)
def test_examples_do_not_mix_and_short_ones_are_prefixes(mixer: str) -> None:
    model = network(mixer)
    torch.testing.assert_close(model(tokens(5)), torch.cat([model(row[None]) for row in tokens(5)]))
    torch.testing.assert_close(model(tokens())[:, :4], model(tokens()[:, :4]))


# --- how it starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_weights_start_by_their_role(mixer: str) -> None:
    model = network(mixer, width=64, depth=8, init_std=0.1)
    writers = {id(weight) for weight in model.stream_writers()}
    assert len(writers) == 16
    for name, module in model.stack.named_modules():
        if isinstance(module, nn.Linear):
            wanted = 0.1 / 4 if name.endswith(("output_map", "down")) else 0.1
            assert (id(module.weight) in writers) == (wanted != 0.1)
            assert float(module.weight.detach().std()) == pytest.approx(wanted, rel=0.06)


@pytest.mark.parametrize("mixer", MIXERS)
def test_materialised_model_starts_the_same(mixer: str) -> None:
    wanted = network(mixer, connection=ConnectionConfig("layerscale", initial=0.1))
    assert isinstance(wanted.config, StateSpaceConfig)
    with torch.device("meta"):
        model = StateSpace(wanted.config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7)
    torch.manual_seed(0)
    model.reset_parameters()
    for name, value in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("mixer", MIXERS)
def test_weights_survive_saving(mixer: str) -> None:
    one, other = network(mixer, seed=0), network(mixer, seed=1)
    assert not torch.equal(one(tokens()), other(tokens()))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(tokens()), other(tokens()))


# --- gradients, connections, precision ------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_reach_every_parameter(mixer: str) -> None:
    model = network(mixer)
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    assert unreached(model) == []


@pytest.mark.parametrize(("placement", "mixer"), [("pre", "state"), ("sandwich", "increment"), ("peri", "diagonal")])
@pytest.mark.parametrize("connection", SAMPLE, ids=str)
def test_runs_with_connection(connection: ConnectionConfig, placement: str, mixer: str) -> None:
    model = network(mixer, connection=connection, placement=placement)
    perturbed(model)
    loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())
    loss.backward()
    assert math.isfinite(loss.item())
    assert [name for name in unreached(model) if ".connection." not in name and ".ends." not in name] == []


@pytest.mark.parametrize("mixer", MIXERS)
def test_works_in_bfloat16(mixer: str) -> None:
    wanted = network(mixer)(tokens())
    out = network(mixer).bfloat16()(tokens())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0.1, rtol=0.1)


def test_small_increments_are_not_lost_in_bfloat16() -> None:
    """A thousandth of 1, a thousand times, is 1; bfloat16 would stop near 1/4."""
    mixer = IncrementMixer(4, rate=1e-3)
    for linear, value in ((mixer.input_map, 10.0), (mixer.output_map, 1.0), (mixer.state_map, 0.0)):
        linear.weight.data = value * torch.eye(4)
    out = mixer.bfloat16()(torch.ones(1, 1000, 4, dtype=torch.bfloat16))
    torch.testing.assert_close(out[0, -1].float(), torch.ones(4), atol=0.01, rtol=0)


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_use_is_refused() -> None:
    with pytest.raises(UserError, match="rate is for mixer: increment; remove it with mixer: diagonal"):
        network(rate=0.1)
    with pytest.raises(UserError, match="heads"):
        network(heads=2)
    with pytest.raises(UserError, match="no keys and values to cache; call the model on the whole sequence"):
        network()(tokens(), KeyValueCache())
    with pytest.raises(UserError, match="8 tokens are more than the decoder's context of 7"):
        network()(tokens(length=8))
    with pytest.raises(UserError, match="this model has no attention"):
        network(connection=ConnectionConfig("value_residual"))
