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

__all__ = ["ENDS", "decoder_run", "ends_run", "hops_run", "image_run", "require_depths", "text_task"]

ENDS = "embedding and head alone"
"""The arm of `ends_run`: what a decoder can do without any block. Blocks are worth what a model ends below it."""


def require_depths(depths: tuple[int, ...]) -> tuple[int, ...]:
    """Refuses anything but two or more depths, in blocks, that increase."""
    if len(depths) < 2 or min(depths) < 1 or list(depths) != sorted(set(depths)):
        raise ValueError(f"depths must be two or more that increase from at least 1, got {list(depths)}")
    return depths


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
    recipe = {} if steps is None else {"steps": steps}
    return _run(params, text_task(params), depth, connection, placement, recipe, shape)


def ends_run(params: Params, *, steps: int | None = None, **shape: Any) -> RunConfig:
    """A decoder on the corpus whose one block is multiplied by 0: embedding, final norm and head alone."""
    return decoder_run(params, 1, ConnectionConfig("scaled", scale=0.0), steps=steps, **shape)


def hops_run(
    params: Params,
    depth: int,
    connection: ConnectionConfig | None = None,
    placement: Placement = "pre",
    *,
    hops: int,
    steps: int,
    batch: int,
    **shape: Any,
) -> RunConfig:
    """A decoder of `depth` blocks that chases pointers (`data.Hops`); vocabulary and context are the task's."""
    task = data.HopsConfig(hops=hops)
    return _run(params, task, depth, connection, placement, {"steps": steps, "batch": batch}, shape)


def _run(
    params: Params,
    task: data.TextConfig | data.HopsConfig,
    depth: int,
    connection: ConnectionConfig | None,
    placement: Placement,
    recipe: dict[str, int],
    shape: dict[str, Any],
) -> RunConfig:
    vocabulary = data.VOCABULARY if isinstance(task, data.TextConfig) else task.vocabulary
    model = DecoderConfig.model_validate(
        {
            **params.decoder.model_dump(),
            "context": task.context,
            **shape,
            "vocabulary": vocabulary,
            "depth": depth,
            "connection": connection or ConnectionConfig(),
            "placement": placement,
        }
    )
    return RunConfig(
        task=task,
        model=model,
        optimisation=params.optimisation.model_copy(update=recipe),
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
    """An image encoder of `depth` blocks that classifies the digits, in patches of 2 x 2; all else as `optimisation`.

    Matrices start with GPT-2's standard deviation, 0.55 / sqrt(width).
    """
    model = ImageEncoderConfig(
        width=width,
        heads=heads,
        depth=depth,
        classes=10,
        patch=2,
        init_std=0.55 / width**0.5,
        connection=connection or ConnectionConfig(),
        placement=placement,
    )
    return RunConfig(
        task=data.DigitsConfig(),
        model=model,
        optimisation=params.optimisation.model_copy(update={"batch": batch, "steps": steps}),
        learning_rate=1.0,
        seed=0,
        device=params.device,
    )
