"""What every claim's notebook shows: its parameters and criteria, its checks, and the record it ends with."""

import platform
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

import reslab
from reslab import claims, notebook, paths, plotting
from reslab.claims import Check, Record
from reslab.params import Params

__all__ = ["arms", "checks", "criteria", "parameters", "publish", "record"]


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _relevant(settings: Params, section: str) -> dict[str, Any]:
    """The parameters a claim depends on: all but how runs are spread, and the other claims' sections."""
    content = settings.model_dump(mode="json", exclude={"execution", "claims"})
    return {**content, section: settings.model_dump(mode="json")["claims"][section]}


def parameters(settings: Params, section: str) -> pd.DataFrame:
    """The parameters of this run, one a row, without the criteria."""
    flat = _flat(_relevant(settings, section))
    shown = {name: str(value) for name, value in flat.items() if ".criteria." not in name}
    return pd.DataFrame({"value": shown})


def criteria(settings: Params, section: str) -> pd.DataFrame:
    """The criteria of a claim, one a row."""
    return pd.DataFrame({"holds if": {n: str(c) for n, c in getattr(settings.claims, section).criteria}})


def checks(done: Sequence[Check]) -> pd.DataFrame:
    """Some checks, one a row."""
    columns = ["sentence", "check", "estimate [95 % interval]", "unit", "holds if", "outcome"]
    rows = [(c.sentence, c.statement, str(c.estimate), c.unit, str(c.criterion), c.outcome) for c in done]
    return pd.DataFrame(rows, columns=columns).set_index("sentence")


def arms(summary: dict[str, Any]) -> pd.DataFrame:
    """The arms of a comparison, one a row."""
    return pd.DataFrame(summary).T


def record(claim: ModuleType, settings: Params, done: Sequence[Check], summary: dict[str, Any]) -> Record:
    """The claim's record: verdict, checks, published numbers beside ours, and where it all comes from.

    `claim` is the claim's module under reslab.experiments.
    """
    section = claim.__name__.rsplit(".", 1)[-1]
    name = next(name for name in notebook.names() if name.endswith(f"_{section}"))
    outcome, because = claims.verdict(done)
    return Record(
        claim=name,
        title=claim.TITLE,
        statement=claim.STATEMENT,
        scale=settings.scale,
        verdict=outcome,
        because=because,
        key=claim.KEY,
        checks=tuple(done),
        published=tuple(claim.published(done)),
        arms=summary,
        provenance={
            "versions": {
                "reslab": reslab.__version__,
                **{package: version(package) for package in ("torch", "numpy", "scipy", "pandas")},
            },
            "python": platform.python_version(),
            "device": _device(settings),
            "parameters": _relevant(settings, section),
        },
    )


def _device(settings: Params) -> str:
    return torch.cuda.get_device_name() if settings.device.kind == "cuda" else "cpu"


def publish(finished: Record, drawn: Figure, figures: str | None) -> Path:
    """Write the figure and then the record into the folder `figures` (None: a temporary one); returns the folder."""
    folder = Path(tempfile.mkdtemp(prefix="reslab-")) if figures is None else paths.ROOT / figures
    folder.mkdir(parents=True, exist_ok=True)
    plotting.save(drawn, folder / f"{finished.claim}.png")
    claims.write(finished, folder)
    return folder
