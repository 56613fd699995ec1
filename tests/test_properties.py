"""What holds for every kind of connection, norm placement, weight init and model that go together.

The decoder goes through all placements; in each other model, which shares its stack, a kind meets one of each sort in
turn (a norm on the input, on the stream, on the update and the embedding), so that over the models it meets all.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from reslab.models.decoder import DecoderConfig
from reslab.models.diffusion import DiffusionConfig
from reslab.models.image_encoder import ImageEncoderConfig
from reslab.models.initialisation import Role, WeightInit, weight_scale
from reslab.models.resnet import ResNetConfig
from reslab.models.state_space import StateSpaceConfig
from reslab.models.unet import UNetConfig
from reslab.probes import outputs_of, stacks
from reslab.residuals import ConnectionConfig, Placement
from reslab.training import MODELS, Model, ModelConfig, build
from variants import VARIANTS, fits, perturbed, tokens

Inputs = Tensor | tuple[Tensor, ...]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
INITS: tuple[WeightInit, ...] = get_args(WeightInit)
WIDTH = 8
BATCH = 3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Case:
    """A model's config but for what is combined, and what it is called with."""

    config: type[Any]
    shape: tuple[tuple[str, Any], ...]
    inputs: Callable[[], Inputs]
    placements: tuple[Placement, ...] = ("pre", "post", "peri")
    has_attention: bool = True
    inits: tuple[WeightInit, ...] = INITS


COMMON = (("width", WIDTH), ("depth", 2), ("init_std", 0.3))
SIZES = (("heads", 2), *COMMON)

CASES: dict[str, Case] = {
    "decoder": Case(DecoderConfig, (*SIZES, ("vocabulary", 40), ("context", 7)), lambda: tokens(BATCH), PLACEMENTS),
    "image encoder": Case(ImageEncoderConfig, (*SIZES, ("patch", 4), ("classes", 10)), lambda: random(BATCH, 1, 8, 8)),
    "diffusion": Case(
        DiffusionConfig,
        (*SIZES, ("patch", 4), ("classes", 10)),
        lambda: (random(BATCH, 1, 8, 8), torch.tensor([0.1, 0.5, 0.9]), torch.arange(BATCH)),
    ),
    "state space": Case(
        StateSpaceConfig,
        (*COMMON, ("vocabulary", 40), ("context", 7), ("mixer", "diagonal")),
        lambda: tokens(BATCH),
        has_attention=False,
    ),
    "unet": Case(
        UNetConfig,
        (("channels", WIDTH), ("depth", 3), ("levels", 2)),
        lambda: (random(BATCH, 1, 8, 8), torch.tensor([0.1, 0.5, 0.9])),
        has_attention=False,
        inits=("plain", "depth_scaled"),
    ),
    "resnet": Case(
        ResNetConfig,
        (("channels", WIDTH), ("depth", 4), ("classes", 10)),
        lambda: random(BATCH, 1, 8, 8),
        placements=("none",),
        has_attention=False,
        inits=(),
    ),
}

assert {get_args(case.config.model_fields["kind"].annotation)[0] for case in CASES.values()} == set(MODELS)


def config(name: str, connection: ConnectionConfig, placement: Placement, **more: Any) -> ModelConfig:
    case = CASES[name]
    chosen: ModelConfig = case.config(**dict(case.shape), connection=connection, placement=placement, **more)
    return chosen


def goes_together(case: Case, connection: ConnectionConfig, placement: Placement) -> bool:
    return fits(connection, placement) and (case.has_attention or connection.kind != "value_residual")


def placements(case: Case, connection: ConnectionConfig, turn: int) -> list[Placement]:
    """Those of `case` that go with `connection`: all for the decoder, else the one whose turn it is."""
    fitting = [placement for placement in case.placements if goes_together(case, connection, placement)]
    return fitting if case.placements == PLACEMENTS or not fitting else [fitting[turn % len(fitting)]]


COMBINATIONS = [
    (name, kind, placement)
    for number, (name, case) in enumerate(CASES.items())
    for order, (kind, connection) in enumerate(VARIANTS.items())
    for placement in placements(case, connection, number + order)
]

every_combination = pytest.mark.parametrize(
    ("name", "kind", "placement"), COMBINATIONS, ids=["-".join(combination) for combination in COMBINATIONS]
)


@cache
def built(name: str, kind: str, placement: Placement) -> Model:
    """At its start, for reading alone."""
    return build(config(name, VARIANTS[kind], placement), 0)


def made(name: str, kind: str, placement: Placement) -> Model:
    """At its start, to be changed."""
    return copy.deepcopy(built(name, kind, placement))


def output(name: str, model: nn.Module) -> Tensor:
    return outputs_of(model.eval(), CASES[name].inputs())


# --- gradients ------------------------------------------------------------------------------------


def without_a_choice(model: nn.Module) -> set[str]:
    """Weights over depth where there is one source to read: with softmax they change nothing."""
    idle = set()
    for path, module in model.named_modules():
        site, options = getattr(module, "site", None), getattr(module, "options", None)
        first = site is not None and site.index == 0 and getattr(options, "activation", "softmax") == "softmax"
        if first and hasattr(module, "weights") and isinstance(module.weights, nn.Module):
            idle |= {f"{path}.{name}" for name, _ in module.named_parameters()}
    return idle


@every_combination
def test_gradients_reach_every_parameter_that_should_learn(name: str, kind: str, placement: Placement) -> None:
    model = perturbed(made(name, kind, placement).double())
    inputs = CASES[name].inputs()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    exact = tuple(part.double() if part.is_floating_point() else part for part in inputs)
    exact = (exact[0], exact[1].float(), *exact[2:]) if len(exact) > 1 else exact
    model(*exact).square().sum().backward()
    unreached = {n for n, p in model.named_parameters() if p.grad is None or torch.count_nonzero(p.grad) == 0}
    assert unreached == without_a_choice(model)


# --- what does not mix ----------------------------------------------------------------------------


@every_combination
def test_examples_of_a_batch_do_not_mix(name: str, kind: str, placement: Placement) -> None:
    model = perturbed(made(name, kind, placement)).eval()
    inputs = CASES[name].inputs()
    together = outputs_of(model, inputs)
    for example in range(BATCH):
        only = slice(example, example + 1)
        alone = inputs[only] if isinstance(inputs, Tensor) else tuple(part[only] for part in inputs)
        torch.testing.assert_close(outputs_of(model, alone), together[only], rtol=1e-3, atol=1e-4)


CAUSAL_MODELS = ("decoder", "state space")
CAUSAL = [c for c in COMBINATIONS if c[0] in CAUSAL_MODELS]


@pytest.mark.parametrize(("name", "kind", "placement"), CAUSAL, ids=["-".join(c) for c in CAUSAL])
def test_no_token_sees_a_later_one(name: str, kind: str, placement: Placement) -> None:
    model = perturbed(made(name, kind, placement)).double()
    embedding = model.get_parameter("token_embedding.weight")
    text = torch.arange(7).unsqueeze(0)  # each token once, so that its row of the embedding is its place
    for at in (0, 3, 6):
        (gradient,) = torch.autograd.grad(model(text)[:, at].square().sum(), embedding)
        reached = gradient[:7].abs().amax(-1) > 0
        assert reached.tolist() == [place <= at for place in range(7)]


# --- weights --------------------------------------------------------------------------------------


@every_combination
def test_weights_survive_saving_and_start_equal_where_common(name: str, kind: str, placement: Placement) -> None:
    start = built(name, kind, placement).state_dict()
    plain = built(name, "add", "none" if name == "resnet" else "pre").state_dict()
    common = plain.keys() & start.keys()
    assert len(common) > len(plain) / 2
    assert all(torch.equal(plain[n], start[n]) for n in common)
    one, other = perturbed(made(name, kind, placement)), made(name, kind, placement)
    assert not torch.equal(output(name, one), output(name, other))
    other.load_state_dict(one.state_dict())
    assert torch.equal(output(name, one), output(name, other))


EXTRA: dict[str, Callable[[int, int], int]] = {
    "rezero": lambda s, d: s,
    "skipinit": lambda s, d: s,
    "layerscale": lambda s, d: s * d,
    "highway": lambda s, d: s * (d * d + d),
    "denseformer": lambda s, d: sum(range(2, 2 + s // 2)),
    "denseformer every sublayer": lambda s, d: sum(range(2, 2 + s)),
    "hyper": lambda s, d: s * (2 + 2 + 4 + 4 * d + 3),
    "hyper static": lambda s, d: s * (2 + 2 + 4),
    "hyper doubly stochastic": lambda s, d: s * (4 + 4 + 16 + (4 + 4 + 16) * 4 * d + 3),
    "value_residual": lambda s, d: s - 2,  # two at each attention but the first; every other sublayer is one
    "state_attention": lambda s, d: s * d,
    "attnres key rank": lambda s, d: (s + 1) * 4 + 4 * d,
    "attnres value rank": lambda s, d: (s + 1) * d + 8 * d,
    "attnres input query": lambda s, d: (s + 1) * (d + d * d),
    "attnres static": lambda s, d: sum(range(1, s + 2)),
    "attnres static block heads": lambda s, d: 2 * sum(1 + -(-i // 2) for i in range(s + 1)),
    "attnres all low rank": lambda s, d: (s + 1) * (4 + 4 * d) + 4 * d + 8 * d,
    "attnres stride heads keys": lambda s, d: (s + 1) * 4 + 4 * d,
}
"""Parameters of a kind in a stack of s sublayers and width d; what is not here has none, or one query [d] a read."""


def extra_parameters(kind: str, sublayers: int) -> int:
    if kind in EXTRA:
        return EXTRA[kind](sublayers, WIDTH)
    return (sublayers + 1) * WIDTH if kind.startswith("attnres") else 0


@every_combination
def test_number_of_parameters_is_as_stated(name: str, kind: str, placement: Placement) -> None:
    def count(model: nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    model, plain = built(name, kind, placement), built(name, "add", placement)
    extra = sum(extra_parameters(kind, len(stack.sublayers())) for stack in stacks(model))
    assert count(model) - count(plain) == extra


@every_combination
def test_reset_and_materialisation_give_the_intended_start(name: str, kind: str, placement: Placement) -> None:
    """From the meta device with the model's own init; with each other init, by a reset of what stood there."""
    wanted = built(name, kind, placement).state_dict()
    with torch.device("meta"):
        model: Model = MODELS[built(name, kind, placement).config.kind](config(name, VARIANTS[kind], placement))
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(7)
    torch.manual_seed(0)
    model.reset_parameters()
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(found, wanted[n]) for n, found in model.state_dict().items())
    for init in CASES[name].inits:
        if init != "deepnorm" or placement in ("post", "deepnorm"):
            assert_init_is_kept(name, model, init)


OWN: WeightInit = "depth_scaled"
"""What the models here are built with."""

ENDINGS: dict[str, Role] = {"mlp.branch.down.weight": "down", "mlp.branch.up.weight": "up"}


def assert_init_is_kept(name: str, model: Model, init: WeightInit) -> None:
    """After a reset with this init the MLPs' matrices have its factors, and are otherwise those of the plain kind."""
    settings: Any = model.config
    model.config = settings.model_copy(update={"weight_init": init})
    torch.manual_seed(0)
    model.reset_parameters()
    found, plain = model.state_dict(), built(name, "add", settings.placement).state_dict()
    for ending, role in ENDINGS.items():
        factor, own = (weight_scale(i, role, settings.sublayers, name in CAUSAL_MODELS) for i in (init, OWN))
        for n in (n for n in plain if n.endswith(ending)):
            torch.testing.assert_close(found[n], plain[n] * factor / own)


# --- dtype ----------------------------------------------------------------------------------------


@every_combination
def test_stream_is_read_in_the_asked_dtype(name: str, kind: str, placement: Placement) -> None:
    model = made(name, kind, placement).eval()
    reads: list[Tensor] = []
    for stack in stacks(model):
        stack.stream_dtype = torch.bfloat16
        for sublayer in stack.sublayers():
            sublayer.norm_input.register_forward_pre_hook(lambda module, inputs: reads.append(inputs[0]))
    out = output(name, model)
    assert {x.dtype for x in reads} == {torch.bfloat16}
    assert out.dtype == torch.float32
    assert out.isfinite().all()
