"""A copy of the project in another folder, to run the pipeline at another scale without touching this one."""

import io
import os
import shutil
from pathlib import Path

from configobj import ConfigObj
from ruamel.yaml import YAML

from reslab import params, paths
from reslab.files import write_atomic

__all__ = ["allow_without_git", "create"]

COPIED = ("notebooks", "lib", "conf", "docs", ".dvc/config", ".dvcignore", "dvc.yaml")


def allow_without_git(root: Path) -> None:
    """Tell DVC to do without git where there is none, as in an unpacked tarball."""
    if (root / ".git").exists():
        return
    local = root / ".dvc" / "config.local"
    config = ConfigObj(str(local), list_values=False)  # as DVC reads it
    config.setdefault("core", {})["no_scm"] = "true"
    config.filename = None
    write_atomic(local, "".join(f"{line}\n" for line in config.write()).encode())


def create(folder: Path, scale: str) -> dict[str, str]:
    """Make or refresh the copy in `folder`, its params.yaml being the preset `scale`.

    Returns the environment in which DVC works there: that copy's code, this project's run records.
    """
    settings = params.preset(scale)
    for name in COPIED:
        source, target = paths.ROOT / name, folder / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    buffer = io.BytesIO()
    YAML(typ="safe", pure=True).dump(settings.model_dump(mode="json"), buffer)
    write_atomic(folder / "params.yaml", buffer.getvalue())
    allow_without_git(folder)
    return {
        **os.environ,
        "RESLAB_RUNS": str(paths.RUNS),
        "RESLAB_DATA": str(paths.DATA),
        "PYTHONPATH": str(folder / "lib"),
    }
