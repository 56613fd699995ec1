"""Where things are. Nothing in the project depends on the working directory."""

import os
from pathlib import Path

from reslab.schema import UserError

__all__ = ["BUILD", "CONF", "DATA", "FIGURES", "NOTEBOOKS", "PARAMS", "ROOT", "RUNS", "require_writable"]


ROOT = Path(__file__).resolve().parents[2]
PARAMS = ROOT / "params.yaml"
CONF = ROOT / "conf"
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"
BUILD = ROOT / "build"
RUNS = Path(os.environ.get("RESLAB_RUNS", ROOT / "runs"))
"""Run records; several checkouts may share one folder (set RESLAB_RUNS)."""
DATA = Path(os.environ.get("RESLAB_DATA", ROOT / "data"))
"""Downloaded corpora (set RESLAB_DATA to share them)."""


def require_writable(folder: Path) -> None:
    """Create `folder` where it is missing; a UserError says at once when nothing can be written there."""
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write here ({error.strerror}); "
            "free the space or change the folder's permissions, then run again"
        ) from None
