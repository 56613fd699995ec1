"""Run records as they might have come out, for tests of what is made of them."""

from typing import Any

from reslab.training import RunRecord

__all__ = ["diverged"]


def diverged(record: RunRecord) -> RunRecord:
    """The same run, had its loss become infinite after three steps."""
    lost: dict[str, Any] = {"outcome": "diverged", "validation_loss": None, "test_loss": None, "test_accuracy": None}
    shorter = {"train_loss": record.train_loss[:3], "gradient_norm": record.gradient_norm[:3], "profile_after": {}}
    return record.model_copy(update=lost | shorter)
