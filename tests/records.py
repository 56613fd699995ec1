"""Run records as they might have come out, for tests of what is made of them."""

from collections.abc import Sequence
from typing import Any

from reslab.curves import context_free_losses
from reslab.training import RunRecord

__all__ = ["around_guess", "diverged"]


def around_guess(record: RunRecord, excess: Sequence[float]) -> RunRecord:
    """The same run, had its losses lain by `excess` above the context-free guess's on the same batches."""
    guess = context_free_losses(record.model_copy(update={"train_loss": tuple(excess)}))
    losses = tuple(own + other for own, other in zip(excess, guess, strict=True))
    return record.model_copy(update={"outcome": "trained", "train_loss": losses})


def diverged(record: RunRecord) -> RunRecord:
    """The same run, had its loss become infinite after three steps."""
    lost: dict[str, Any] = {"outcome": "diverged", "validation_loss": None, "test_loss": None, "test_accuracy": None}
    shorter = {"train_loss": record.train_loss[:3], "gradient_norm": record.gradient_norm[:3], "profile_after": {}}
    return record.model_copy(update=lost | shorter)
