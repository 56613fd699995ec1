"""The arms of claim 06: Pre-LN, Full and Block at every depth, the peers, and Full under other conditions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reslab.comparison import Arm
from reslab.experiments.runs import ENDS, decoder_run, ends_run, hops_run, image_run
from reslab.flops import forward_flops
from reslab.models.decoder import DecoderConfig
from reslab.residuals import ConnectionConfig, Placement
from reslab.training import RunConfig

if TYPE_CHECKING:
    from reslab.experiments.attention_residual_gains import Parameters
    from reslab.params import Params

__all__ = [
    "at_depth",
    "equal_compute_steps",
    "full",
    "looked_into",
    "main_methods",
    "other_arms",
    "section_of",
    "text_arms",
]

SMALL_EPS = 1e-8
"""Of the norms where the embedding starts small, in every arm: at a larger one depth attention's 1/n would vanish."""

SMALL_EMBEDDING: dict[str, dict[str, object]] = {"embedding 0.02": {"embedding": "gpt2", "norm_eps": SMALL_EPS}}
"""By name, the other scale of the embedding that arms choose from."""


def at_depth(method: str, depth: int) -> str:
    return f"{method}, {depth} blocks"


def section_of(params: Params) -> Parameters:
    return params.claims.attention_residual_gains


def full(**options: object) -> ConnectionConfig:
    return ConnectionConfig("attnres", **options)


def _with_queries(params: Params, connection: ConnectionConfig) -> dict[str, ConnectionConfig]:
    """By name, the connection at each learning rate of its queries, if it has some."""
    if "query_rate" not in type(connection.options).model_fields:
        return {"": connection}
    rates = section_of(params).query_rates
    return {
        f"query rate {rate:g}" if number else "": connection.model_copy(update={"query_rate": rate})
        for number, rate in enumerate(rates)
    }


def _text_arm(
    params: Params,
    name: str,
    depth: int,
    connections: dict[str, ConnectionConfig],
    *,
    placement: Placement = "pre",
    steps: int | None = None,
    small_embedding: bool = False,
    **shape: object,
) -> Arm:
    """An arm on text that also chooses how fast its queries learn, and with `small_embedding` that one's scale."""
    scales: dict[str, dict[str, object]] = {"": {}}
    if small_embedding:
        scales |= SMALL_EMBEDDING
    length = steps or section_of(params).steps
    settings = {
        ", ".join(filter(None, (scale, queries))): decoder_run(
            params, depth, connection, placement, steps=length, **shape, **scales[scale]
        )
        for scale in scales
        for queries, connection in connections.items()
    }
    return Arm(name, settings.pop(""), section_of(params).learning_rates, settings)


def equal_compute_steps(params: Params) -> int:
    """For how many steps Full at the deepest trains with the operations of Pre-LN's full training."""
    section = section_of(params)
    ours, theirs = (
        decoder_run(params, section.depths[-1], connection, steps=section.steps) for connection in (full(), None)
    )
    assert isinstance(ours.model, DecoderConfig)
    assert isinstance(theirs.model, DecoderConfig)
    steps = theirs.optimisation.steps
    return max(1, round(steps * forward_flops(theirs.model) / forward_flops(ours.model)))


def main_methods(params: Params) -> dict[str, ConnectionConfig]:
    return {"Pre-LN": ConnectionConfig(), "Full": full(), "Block": full(block=section_of(params).block)}


def ends_arm(params: Params) -> Arm:
    """Embedding and head alone, at the better of both scales of the embedding, as Pre-LN is."""
    section = section_of(params)
    settings = {name: ends_run(params, steps=section.steps, **shape) for name, shape in SMALL_EMBEDDING.items()}
    return Arm(ENDS, ends_run(params, steps=section.steps), section.ends_learning_rates, settings)


def peer_arms(params: Params) -> list[Arm]:
    peers = section_of(params).peers
    connections = {
        "rescaled": (peers.rescaled, ConnectionConfig("rescaled")),
        "static": (peers.static, full(query="none")),
        "DenseFormer": (peers.denseformer, ConnectionConfig("denseformer")),
        "mHC": (peers.mhc, ConnectionConfig("hyper", doubly_stochastic=True, streams=section_of(params).streams)),
        "article's form": (peers.article, ConnectionConfig("state_attention")),
    }
    return [
        _text_arm(params, at_depth(name, depth), depth, _with_queries(params, connection))
        for name, (depth, connection) in connections.items()
    ]


def text_arms(params: Params) -> list[Arm]:
    """All on text but those whose trained weights are looked into."""
    section = section_of(params)
    main = [
        _text_arm(params, at_depth(name, depth), depth, _with_queries(params, connection), small_embedding=True)
        for depth in section.depths
        for name, connection in main_methods(params).items()
    ]
    deep, middle = section.depths[-1], section.middle
    arm = partial(_text_arm, params)
    queries = partial(_with_queries, params)
    fast, slow = section.query_rates
    return [
        *main,
        ends_arm(params),
        *peer_arms(params),
        arm("Full, equal compute", deep, queries(full()), steps=equal_compute_steps(params)),
        arm("Pre-LN, plain init", middle, {"": ConnectionConfig()}, weight_init="plain"),
        arm("Full, plain init", middle, queries(full()), weight_init="plain"),
        arm("Peri-LN", middle, {"": ConnectionConfig()}, placement="peri"),
        arm("Full, Peri-LN", middle, queries(full()), placement="peri"),
        arm("Full, random queries", middle, queries(full(query_std=1.0))),
        arm("Full, fast queries", middle, {"": full(query_rate=fast)}),
        arm("Full, slow queries", middle, {"": full(query_rate=slow)}),
        arm("Full, keys without norm", middle, queries(full(key_norm=False))),
    ]


def other_arms(params: Params) -> tuple[list[Arm], list[Arm]]:
    """Pointer chasing, and the image encoder."""
    hops, image = section_of(params).hops, section_of(params).image

    def arm(task: str, name: str, run: partial[RunConfig], depth: int, rates: tuple[float, ...]) -> Arm:
        connections = _with_queries(params, main_methods(params)[name])
        settings = {setting: run(params, depth, connection) for setting, connection in connections.items()}
        return Arm(f"{name}, {task}", settings.pop(""), rates, settings)

    chase = partial(hops_run, hops=hops.hops, steps=hops.steps, batch=hops.batch)
    look = partial(image_run, steps=image.steps, batch=image.batch, width=image.width, heads=image.heads)
    methods = main_methods(params)
    return (
        [arm("hops", name, chase, hops.depth, hops.learning_rates) for name in methods],
        [arm("digits", name, look, image.depth, image.learning_rates) for name in methods],
    )


def looked_into(params: Params) -> list[str]:
    """The arms whose trained weights are kept."""
    return [at_depth(name, section_of(params).depths[-1]) for name in main_methods(params)]
