"""Measurements of many models, side by side in processes of one thread each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import joblib
import torch

from reslab import lifeline
from reslab.progress import Progress
from reslab.sweep import Execution

__all__ = ["side_by_side"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    job: Callable[[Item], Result], items: Sequence[Item], execution: Execution, label: str
) -> list[Result]:
    """`job` of each item, in their order, in `execution.workers` processes; the job must be a module's function."""
    parent = os.getpid() if execution.workers > 1 else None
    results: list[Result] = []
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1), Progress(label, len(items)) as progress:
        parallel = joblib.Parallel(n_jobs=execution.workers, return_as="generator", batch_size=1)
        for result in parallel(joblib.delayed(_alone)(job, item, parent) for item in items):
            results.append(result)
            progress.update(len(results), f"{len(results)}/{len(items)} models")
    return results


def _alone(job: Callable[[Item], Result], item: Item, parent: int | None) -> Result:
    torch.set_num_threads(1)  # in the order of one thread, sums are the same everywhere
    if parent is not None:
        lifeline.die_with_parent(parent=parent)
    return job(item)
