"""Nothing outlives the process that asked for it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from reslab import lifeline

GRANDCHILD = "import time; time.sleep(600)"

CHILD = f"""
import subprocess, sys, time
from reslab import lifeline
lifeline.die_with_parent()
grandchild = subprocess.Popen([sys.executable, "-c", {GRANDCHILD!r}])
print(grandchild.pid, flush=True)
time.sleep(600)
"""

PARENT = f"""
import subprocess, sys
from reslab import lifeline
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
print(child.pid, int(child.stdout.readline()), flush=True)
sys.stdin.readline()
lifeline.end_descendants()
print("goes on", flush=True)
"""


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _left(processes: list[psutil.Process], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [p.pid for p in processes if _alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A running parent, and its child (tied to it) and grandchild (not tied to anything)."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        below = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(below) == 2
        try:
            yield parent, below
        finally:
            parent.kill()
            for process in below:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def test_child_and_grandchild_end_with_a_killed_parent(
    family: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    parent, below = family
    time.sleep(3 * lifeline.POLL_SECONDS)
    assert all(map(_alive, below)), "they live as long as the parent does"
    parent.kill()
    parent.wait()
    assert _left(below, 5) == []


def test_end_descendants_ends_children_of_children(
    family: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    parent, below = family
    said, _ = parent.communicate("end them\n", timeout=10)
    assert _left(below, 5) == []
    assert said == "goes on\n", "the process itself goes on"
    assert parent.returncode == 0


def test_watch_calls_once_when_gone() -> None:
    gone, called = threading.Event(), threading.Event()
    lifeline.watch(gone.is_set, called.set)
    assert not called.wait(2 * lifeline.POLL_SECONDS)
    gone.set()
    assert called.wait(5)


def test_second_call_watches_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[object] = []
    monkeypatch.setattr(lifeline, "watch", lambda *a: watches.append(a))
    monkeypatch.setattr(lifeline, "_watching", set())
    lifeline.die_with_parent()
    lifeline.die_with_parent()
    assert len(watches) == 1


def test_a_worker_forked_from_a_watching_process_watches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork inherits the module's state but not its threads."""
    watches: list[object] = []
    monkeypatch.setattr(lifeline, "watch", lambda *a: watches.append(a))
    monkeypatch.setattr(lifeline, "_watching", {os.getpid() + 1})
    lifeline.die_with_parent()
    assert len(watches) == 1


def test_cheap_to_import() -> None:
    """It is armed before anything slow is imported, so it must not import anything slow itself."""
    code = "import sys, reslab.lifeline; print({'torch', 'pandas', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
