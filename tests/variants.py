"""Every kind of connection, with each of its options, that tests run through; and small models that take them."""

from typing import Any

import torch
from torch import Tensor

from reslab.models.decoder import Decoder, DecoderConfig
from reslab.residuals import CONNECTIONS, ConnectionConfig
from reslab.training import build

VARIANTS: dict[str, ConnectionConfig] = {
    "none": ConnectionConfig("none"),
    "add": ConnectionConfig("add"),
    "weighted_skip": ConnectionConfig("weighted_skip", weight=0.5),
    "scaled": ConnectionConfig("scaled", scale=0.3),
    "rezero": ConnectionConfig("rezero"),
    "skipinit": ConnectionConfig("skipinit", initial=0.2),
    "layerscale": ConnectionConfig("layerscale", initial=1e-2),
    "highway": ConnectionConfig("highway"),
    "kahan": ConnectionConfig("kahan", scale=0.5),
    "stochastic": ConnectionConfig("stochastic", scale=0.5),
    "rescaled": ConnectionConfig("rescaled"),
    "layernorm_scaling": ConnectionConfig("layernorm_scaling"),
    "denseformer": ConnectionConfig("denseformer"),
    "denseformer every sublayer": ConnectionConfig("denseformer", period=1),
    "hyper": ConnectionConfig("hyper", streams=2),
    "hyper static": ConnectionConfig("hyper", streams=2, dynamic=False),
    "hyper doubly stochastic": ConnectionConfig("hyper", doubly_stochastic=True),
    "value_residual": ConnectionConfig("value_residual"),
    "state_attention": ConnectionConfig("state_attention"),
    "attnres full": ConnectionConfig("attnres"),
    "attnres block": ConnectionConfig("attnres", block=2),
    "attnres odd block": ConnectionConfig("attnres", block=3),
    "attnres window": ConnectionConfig("attnres", window=2),
    "attnres window alone": ConnectionConfig("attnres", window=2, window_embedding=False),
    "attnres stride": ConnectionConfig("attnres", stride=2),
    "attnres key rank": ConnectionConfig("attnres", key_rank=4),
    "attnres value rank": ConnectionConfig("attnres", value_rank=4),
    "attnres heads": ConnectionConfig("attnres", heads=4),
    "attnres input query": ConnectionConfig("attnres", query="input"),
    "attnres static": ConnectionConfig("attnres", query="none"),
    "attnres sigmoid": ConnectionConfig("attnres", activation="sigmoid"),
    "attnres plain keys": ConnectionConfig("attnres", key_norm=False),
    "attnres slow query": ConnectionConfig("attnres", query_rate=0.1),
    "attnres static block heads": ConnectionConfig("attnres", query="none", block=2, heads=2, activation="sigmoid"),
    "attnres all low rank": ConnectionConfig("attnres", block=2, window=2, key_rank=4, value_rank=4, query="input"),
    "attnres stride heads keys": ConnectionConfig("attnres", stride=2, heads=2, key_rank=4, key_norm=False),
}

LIBRARY = {name for name, kind in CONNECTIONS.items() if kind.__module__.startswith("reslab.residuals.")}
"""The kinds of the library; a claim may register one of its own."""

assert {config.kind for config in VARIANTS.values()} == LIBRARY

SAMPLE = [
    VARIANTS[name]
    for name in ("add", "rezero", "layerscale", "rescaled", "denseformer", "hyper", "attnres full", "attnres block")
]
"""A few of all sorts."""

NORMED_STREAM = ("post", "sandwich_sum", "deepnorm")


def fits(connection: ConnectionConfig, placement: str) -> bool:
    """Whether the combination makes sense; the tests of refusals have the list of what does not."""
    if placement in NORMED_STREAM and not connection.type.plain_stream:
        return False
    if placement == "deepnorm" and connection.kind != "add":
        return False
    return connection.kind != "layernorm_scaling" or placement in ("pre", "sandwich", "sandwich_sum", "peri")


def config(connection: ConnectionConfig | str = "add", **changed: Any) -> DecoderConfig:
    """A decoder of three blocks, width 16; `changed` replaces its values."""
    shape: dict[str, Any] = {"vocabulary": 40, "width": 16, "heads": 4, "context": 7, "depth": 3, "init_std": 0.2}
    if isinstance(connection, str):
        connection = VARIANTS[connection]
    return DecoderConfig(**shape | changed, connection=connection)


def decoder(connection: ConnectionConfig | str = "add", seed: int = 0, **changed: Any) -> Decoder:
    """Built from `config`."""
    model = build(config(connection, **changed), seed)
    assert isinstance(model, Decoder)
    return model


def tokens(batch: int = 2, length: int = 7) -> Tensor:
    """Token ids [batch, length] below 40."""
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def perturbed(model: torch.nn.Module, size: float = 0.1) -> torch.nn.Module:
    """`model` with noise on every parameter, so that nothing is exactly at its start."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter))
    return model


def unreached(model: torch.nn.Module) -> list[str]:
    """Parameters without a gradient, or with one of exactly zero."""
    return [n for n, p in model.named_parameters() if p.grad is None or torch.count_nonzero(p.grad) == 0]
