"""Files that are either there whole or not at all."""

import errno
import os
import tempfile
from pathlib import Path

from reslab.schema import UserError

__all__ = ["publish", "write_atomic"]


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` under a temporary name and rename it; a UserError says when it cannot be written."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check its permissions"
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); {advice} and run again, finished work is kept"
        ) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def publish(sources: list[Path], folder: Path) -> None:
    """Put copies of `sources` into `folder`, one after the other, each atomically."""
    for source in sources:
        write_atomic(folder / source.name, source.read_bytes())
