"""What the trained models of claim 06 are like inside: magnitudes, gradients, depth weights, what can be read off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reslab import data
from reslab.depth_weights import depth_weights, distance, sharpness, times_uniform
from reslab.probes import evaluating, stacks, stream_places, streams
from reslab.residuals import AttnRes, Residual, Stack
from reslab.sweep import trained_model
from reslab.training import RunRecord, loss_of

__all__ = ["Inside", "block_gradients", "column", "decodability", "look", "look_inside", "magnitudes"]

BATCHES = 4
"""Of up to 32 windows each, for fitting and for testing what can be read off."""


@dataclass(frozen=True)
class Inside:
    """One trained decoder of L blocks and S = 2L sublayers, on held-out text."""

    magnitudes: list[float]
    """rms of what each block reads and of what the head does, L + 1 values."""
    gradients: list[float]
    """Norm of the loss's gradient by each block's weights, L values."""
    decodability: float
    """Accuracy at which a linear map finds the input token in what the last block reads."""
    weights: NDArray[np.float64] | None
    """Mean depth weights [S + 1, sources]; None where nothing attends over depth."""

    def growth(self) -> float:
        """rms at the end over that half-way: sqrt(2) for a sum of independent updates, 1 where nothing grows."""
        return self.magnitudes[-1] / self.magnitudes[len(self.magnitudes) // 2]

    def unevenness(self) -> float:
        """Standard deviation over the blocks of the binary logarithm of their gradient."""
        return float(np.std(np.log2(self.gradients)))

    def kinds_apart(self) -> float:
        """How much more differently neighbours, which are of two kinds, weigh their sources than the next but one."""
        return distance(self._weights, 1) - distance(self._weights, 2)

    def mlp_sharper(self) -> float:
        """Mean sharpness of the MLP sublayers less that of the attention sublayers."""
        sharp = sharpness(self._weights)[:-1]
        return float(np.mean(sharp[1::2]) - np.mean(sharp[2::2]))  # the first attention has one source only

    def newest(self) -> float:
        """Mean weight times n of the newest source, over all sublayers that have more than one."""
        return float(np.mean(times_uniform(self._weights, -1)[1:-1]))

    def embedding_late(self) -> float:
        """Mean weight times n of the embedding, over the last quarter of the sublayers."""
        sublayers = times_uniform(self._weights, 0)[:-1]
        return float(np.mean(sublayers[-(len(sublayers) // 4) :]))

    @property
    def _weights(self) -> NDArray[np.float64]:
        assert self.weights is not None, "only models that attend over depth have weights"
        return self.weights


def column(seen: Sequence[Inside | None], measure: Callable[[Inside], float]) -> list[float]:
    """`measure` of each; not a number for a run that diverged."""
    return [math.nan if one is None else measure(one) for one in seen]


def look_inside(records: Sequence[RunRecord]) -> list[Inside | None]:
    """The trained model of each record; None where it diverged."""
    return [None if record.outcome == "diverged" else _trained(record) for record in records]


def _trained(record: RunRecord) -> Inside:
    config = record.config
    task = data.load(config.task)
    assert isinstance(task, data.Text)
    torch.set_num_threads(config.device.threads)
    return look(trained_model(config).to(config.device.kind), task)


def look(model: nn.Module, task: data.Text) -> Inside:
    """`model` on the held-out text of `task`: fitted on validation, all else on test windows."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in next(task.held_out("test")))
    (stack,) = stacks(model)
    attends = isinstance(stack.sublayers()[0].connection, AttnRes)
    return Inside(
        magnitudes=magnitudes(model, inputs),
        gradients=block_gradients(model, stack, inputs, targets),
        decodability=decodability(_last_reads(model, task, "validation"), _last_reads(model, task, "test")),
        weights=depth_weights(model, inputs) if attends else None,
    )


def magnitudes(model: nn.Module, inputs: Tensor) -> list[float]:
    """rms of what each block reads and of what the head does."""
    with torch.no_grad(), evaluating(model), streams(stream_places(model)) as seen:
        model(inputs)
    return [float(x.double().square().mean().sqrt()) for x in seen]


def block_gradients(model: nn.Module, stack: Stack, inputs: Tensor, targets: Tensor) -> list[float]:
    """Norm of the mean loss's gradient by the weights of each block's sublayers.

    Not by the stream: what a block reads has the gradient of all later blocks under Pre-LN, and its own alone where
    sublayers attend over depth, while weights mean the same in both.
    """
    branches = [
        [p for sublayer in block.children() if isinstance(sublayer, Residual) for p in sublayer.branch.parameters()]
        for block in stack.blocks
    ]
    with evaluating(model):
        loss = loss_of(model(inputs), targets)
        gradients = iter(torch.autograd.grad(loss, [p for weights in branches for p in weights]))
    return [math.sqrt(sum(float(next(gradients).double().square().sum()) for _ in weights)) for weights in branches]


def _last_reads(model: nn.Module, task: data.Text, split: data.Split) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What the last block reads [N, d], each at rms 1 as behind a norm, and the input tokens [N]."""
    found = list(_reads(model, task, split))
    return np.concatenate([reads for reads, _ in found]), np.concatenate([tokens for _, tokens in found])


def _reads(
    model: nn.Module, task: data.Text, split: data.Split
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    device = next(model.parameters()).device
    last = stream_places(model)[-2]
    for tokens, _ in islice(task.held_out(split), BATCHES):
        with torch.no_grad(), evaluating(model), streams([last]) as seen:
            model(tokens.to(device))
        reads = seen[0].double().flatten(0, -2)
        yield (reads / reads.square().mean(-1, keepdim=True).sqrt()).cpu().numpy(), tokens.flatten().numpy()


Labelled = tuple[NDArray[np.float64], NDArray[np.int64]]


def decodability(fit: Labelled, test: Labelled) -> float:
    """Accuracy on `test` of a linear classifier fitted on `fit`, each features [N, d] and classes [N].

    Ridge regression on one-hot classes, in closed form (Hastie et al. 2009, "The Elements of Statistical Learning",
    section 4.2), which has no learning rate that could favour one model.
    """
    from sklearn.linear_model import RidgeClassifier  # a second of imports, which params.py would pay for

    return float(RidgeClassifier(solver="cholesky").fit(*fit).score(*test))
