"""Files are there whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from reslab import files, paths
from reslab.schema import UserError


def _failing(error: BaseException) -> object:
    def fail(handle: int) -> None:
        raise error

    return fail


def test_content_folder_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.json"
    files.write_atomic(path, b"one")
    files.write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o644, "the temporary file's private mode must not stay"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("code", "advice"), [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EIO, "check its")]
)
def test_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    path = tmp_path / "a.json"
    files.write_atomic(path, b"old")
    monkeypatch.setattr(os, "fsync", _failing(OSError(code, os.strerror(code))))
    with pytest.raises(UserError) as caught:
        files.write_atomic(path, b"new, longer than what fits")
    monkeypatch.undo()
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be written ({os.strerror(code)})")
    assert advice in message
    assert len(message.splitlines()) == 1
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"], "the temporary file must not stay"


def test_failed_first_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(UserError):
        files.write_atomic(tmp_path / "a.json", b"new")
    assert list(tmp_path.iterdir()) == []


def test_interrupted_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    files.write_atomic(path, b"old")
    monkeypatch.setattr(os, "fsync", _failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"], "the temporary file must not stay"


def _unwritable(tmp_path: Path) -> Path:
    """A folder in which nothing can be written: read-only, or for root (who may write anyway) below a file."""
    if os.geteuid() == 0:
        (tmp_path / "file").write_bytes(b"")
        return tmp_path / "file" / "folder"
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    return folder


def test_unwritable_folder(tmp_path: Path) -> None:
    path = _unwritable(tmp_path) / "a.json"
    with pytest.raises(UserError, match="check its permissions") as caught:
        files.write_atomic(path, b"new")
    assert str(path) in str(caught.value)
    assert not path.exists()


def test_require_writable_refuses_at_once(tmp_path: Path) -> None:
    folder = _unwritable(tmp_path)
    with pytest.raises(UserError, match="cannot write here") as caught:
        paths.require_writable(folder)
    assert str(folder) in str(caught.value)


def test_require_writable_leaves_no_trace(tmp_path: Path) -> None:
    paths.require_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_publish_copies_all(tmp_path: Path) -> None:
    sources = [tmp_path / "a.png", tmp_path / "a.json"]
    for source in sources:
        source.write_bytes(source.name.encode())
    files.publish(sources, tmp_path / "figures")
    published = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert published == {"a.png": b"a.png", "a.json": b"a.json"}
    assert all(source.exists() for source in sources)


def test_publish_keeps_what_it_cannot_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full at the second file, that one keeps its old content."""
    sources = [tmp_path / "a.png", tmp_path / "a.json"]
    for source in sources:
        source.write_bytes(b"old")
    files.publish(sources, tmp_path / "figures")
    for source in sources:
        source.write_bytes(b"new")
    original, calls = os.fsync, []

    def second_fails(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(UserError):
        files.publish(sources, tmp_path / "figures")
    published = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert published == {"a.png": b"new", "a.json": b"old"}
