"""The runs that claims have in common: built in one way, so that what two claims ask for is trained once.

The learning rate and the seed are set by the comparison (`comparison.Arm.at`); here they are placeholders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reslab import data
from reslab.models.decoder import DecoderConfig
from reslab.models.image_encoder import ImageEncoderConfig
from reslab.residuals import ConnectionConfig, Placement
from reslab.training import RunConfig

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["decoder_run", "hops_run", "image_run", "text_task"]


def text_task(params: Params) -> data.TextConfig:
    """Next-byte prediction on the corpus, with the decoder's context."""
    return data.TextConfig(
        corpus=params.corpus, context=params.decoder.context, evaluation_windows=params.evaluation_windows
    )


def decoder_run(
    params: Params,
    depth: int,
    connection: ConnectionConfig | None = None,
    placement: Placement = "pre",
    *,
    steps: int | None = None,
    **shape: Any,
) -> RunConfig:
    """A decoder of `depth` blocks on the corpus; `shape` goes over params.yaml's `decoder`."""
    model = DecoderConfig.model_validate(
        {
            **params.decoder.model_dump(),
            **shape,
            "vocabulary": data.VOCABULARY,
            "depth": depth,
            "connection": connection or ConnectionConfig(),
            "placement": placement,
        }
    )
    recipe = params.optimisation
    if steps is not None:
        recipe = recipe.model_copy(update={"steps": steps})
    return RunConfig(
        task=text_task(params),
        model=model,
        optimisation=recipe,
        learning_rate=1.0,
        seed=0,
        device=params.device,
    )


def hops_run(
    params: Params,
    depth: int,
    connection: ConnectionConfig | None = None,
    placement: Placement = "pre",
    *,
    hops: int,
    steps: int,
    batch: int,
) -> RunConfig:
    """A decoder of `depth` blocks that follows pointers `hops` times; its shape is params.yaml's `decoder`."""
    task = data.HopsConfig(hops=hops)
    model = DecoderConfig.model_validate(
        {
            **params.decoder.model_dump(),
            "vocabulary": task.vocabulary,
            "context": task.context,
            "depth": depth,
            "connection": connection or ConnectionConfig(),
            "placement": placement,
        }
    )
    return RunConfig(
        task=task,
        model=model,
        optimisation=params.optimisation.model_copy(update={"steps": steps, "batch": batch}),
        learning_rate=1.0,
        seed=0,
        device=params.device,
    )


def image_run(
    params: Params,
    depth: int,
    connection: ConnectionConfig | None = None,
    placement: Placement = "pre",
    *,
    steps: int,
    batch: int,
    width: int,
    heads: int,
) -> RunConfig:
    """An image encoder of `depth` blocks that classifies the digits, in patches of 2 pixels."""
    model = ImageEncoderConfig(
        patch=2,
        head="class",
        classes=10,
        width=width,
        heads=heads,
        init_std=0.55 / width**0.5,
        depth=depth,
        connection=connection or ConnectionConfig(),
        placement=placement,
    )
    return RunConfig(
        task=data.DigitsConfig(),
        model=model,
        optimisation=params.optimisation.model_copy(update={"steps": steps, "batch": batch}),
        learning_rate=1.0,
        seed=0,
        device=params.device,
    )
