"""The runs that claims have in common: built in one way, so that what two claims ask for is trained once.

The learning rate and the seed are set by the comparison (`comparison.Arm.at`); here they are placeholders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reslab import data
from reslab.models.decoder import DecoderConfig
from reslab.residuals import ConnectionConfig, Placement
from reslab.training import RunConfig

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = ["decoder_run", "hops_run", "text_task"]


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
