"""What a model with attention over depth reads: its mean depth weights, and what they say of its sublayers.

Letters: S sublayers; read l (from 0) is that of sublayer l, read S the output's; source 0 is the embedding, source n
the n-th block's output (in Full the n-th sublayer's); a[l, n] the weight that read l gives source n, mean over tokens.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reslab.probes import evaluating, outputs_of, stacks
from reslab.residuals import AttnRes
from reslab.schema import UserError

__all__ = ["depth_weights", "distance", "sharpness", "times_uniform", "token_weights"]

Weights = NDArray[np.float64]
"""a [reads, sources]; not a number where a read does not see the source."""


def depth_weights(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> Weights:
    """The mean softmax weights a [S + 1, sources] of a model with connection `attnres` on `inputs`.

    Mean over all tokens and heads of the weights of Kimi Team 2026, arXiv 2603.15031, eq. 3. Modes and gradients of the
    model stay as they were. A UserError where the model has another connection, or more than one stack.
    """
    reads, seen = _seen(model, inputs)
    options = reads[0].options
    table = np.full((len(reads), 1 + -(-(len(reads) - 1) // options.block)), np.nan)
    for number, weights in seen:
        begun, kept = 1 + -(-number // options.block), options.sources_before(number)
        places = [place + begun - kept if place else 0 for place in options.places(kept)]
        table[number, places] = [float(weight.double().mean()) for weight in weights]
    return table


def token_weights(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> list[list[Tensor]]:
    """By read, in the order they run, the weights [..., heads] of each source that it sees, oldest first.

    Those whose means over tokens and heads `depth_weights` has; same errors.
    """
    return [weights for _, weights in _seen(model, inputs)[1]]


def _seen(
    model: nn.Module, inputs: Tensor | tuple[Tensor, ...]
) -> tuple[list[AttnRes], list[tuple[int, list[Tensor]]]]:
    """The connections that read, and of each read its number and weights by token."""
    found = stacks(model)
    reads = [c for stack in found for c in _reads(stack)]
    if len(found) != 1 or not all(isinstance(read, AttnRes) for read in reads):
        raise UserError("depth weights are those of one stack with connection 'attnres'; give such a model")
    with torch.no_grad(), evaluating(model), _watched(reads) as seen:
        outputs_of(model, inputs)
    return reads, seen


def _reads(stack: nn.Module) -> list[Any]:
    """The connections that read, in the order they do."""
    connections = [sublayer.connection for sublayer in stack.sublayers()]  # type: ignore[operator]
    return [*connections, getattr(stack.ends, "output", None)]


@contextmanager
def _watched(reads: list[AttnRes]) -> Iterator[list[tuple[int, list[Tensor]]]]:
    """Collects each read's number and depth weights during a forward pass."""
    seen: list[tuple[int, list[Tensor]]] = []

    def watch(number: int, connection: AttnRes) -> Any:
        def read(stream: Any) -> Tensor:
            seen.append((number, connection.depth_weights(stream)))
            return AttnRes.read(connection, stream)

        return read

    with ExitStack() as on_exit:
        on_exit.enter_context(torch.compiler.set_stance("force_eager"))
        for number, connection in enumerate(reads):
            connection.read = watch(number, connection)  # type: ignore[method-assign]
            on_exit.callback(delattr, connection, "read")
        yield seen


# --- what they say --------------------------------------------------------------------------------


def times_uniform(weights: Weights, source: int) -> list[float]:
    """By read, the weight on one of its sources (0 the embedding, -1 the newest) over 1/n: 1 where all are equal."""
    rows = [row[np.isfinite(row)] for row in weights]
    return [float(row[source] * len(row)) for row in rows]


def sharpness(weights: Weights) -> list[float]:
    """By read, 1 - H(a) / ln n: 0 where all n sources weigh the same, 1 where one has all; NaN for a single source."""
    rows = [row[np.isfinite(row)] for row in weights]
    entropies = [-float(np.sum(row * np.log(np.maximum(row, np.finfo(float).tiny)))) for row in rows]
    return [1 - h / np.log(len(row)) if len(row) > 1 else np.nan for h, row in zip(entropies, rows, strict=True)]


def distance(weights: Weights, gap: int) -> float:
    """How differently sublayers `gap` apart weigh the sources that both see: mean total variation, between 0 and 1.

    Each pair's weights on these sources are first made to sum to 1. Pairs with one source in common are left out, and
    the output's read, which belongs to no sublayer. In a Transformer a gap of 1 is from attention to MLP or back, a gap
    of 2 from attention to attention or MLP to MLP. Not a number where there is no pair.
    """
    rows = weights[:-1]
    pairs = list(zip(rows[:-gap], rows[gap:], strict=True))
    distances = [_total_variation(a, b) for a, b in pairs if np.isfinite(a + b).sum() > 1]
    return float(np.mean(distances)) if distances else float("nan")


def _total_variation(a: Weights, b: Weights) -> float:
    common = np.isfinite(a + b)
    a, b = a[common] / a[common].sum(), b[common] / b[common].sum()
    return float(np.abs(a - b).sum() / 2)
