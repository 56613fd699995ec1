"""The figures and records last published, kept so that a failed run can put back what DVC deleted before it.

Imports nothing slow, since it is used while a process ends.
"""

import subprocess
from contextlib import suppress
from pathlib import Path

from reslab import paths
from reslab.files import write_atomic
from reslab.schema import UserError

__all__ = ["COPIES", "git", "restore"]

COPIES = paths.BUILD / "published"


def git(*arguments: str) -> bytes | None:
    """What git prints, or None: there is no git, no repository, or no such thing in it."""
    command = ["git", "-C", str(paths.ROOT), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def restore(name: str) -> list[Path]:
    """Put back the figure and record of notebook `name` where they are missing; returns those that stay missing."""
    files = [paths.FIGURES / f"{name}{ending}" for ending in (".png", ".json")]
    for lost in files:
        if lost.exists():
            continue
        with suppress(OSError, UserError):
            copy = COPIES / lost.name
            old = copy.read_bytes() if copy.exists() else git("show", f"HEAD:./figures/{lost.name}")
            if old is not None:
                write_atomic(lost, old)
    return [file for file in files if not file.exists()]
