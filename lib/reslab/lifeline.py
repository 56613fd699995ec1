"""Processes that end when the one that started them is gone, even after kill -9."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

__all__ = ["die_with_parent", "end", "end_descendants", "watch"]

POLL_SECONDS = 0.5


def end_descendants() -> None:
    """Kill every process below this one."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def end() -> None:
    """Kill this process and all below it."""
    end_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


def watch(gone: Callable[[], bool], then: Callable[[], None] = end) -> None:
    """Calls `then` from a daemon thread as soon as `gone()` is true; by default ends this process and all below."""

    def poll() -> None:
        while not gone():
            time.sleep(POLL_SECONDS)
        then()

    threading.Thread(target=poll, daemon=True, name="lifeline").start()


_watching: set[int] = set()


def die_with_parent(then: Callable[[], None] = end, parent: int | None = None) -> None:
    """End this process and all below it once its parent is gone. A second call does nothing.

    Give the parent's id where it may be gone before this is called; otherwise the present parent counts.
    """
    if os.getpid() in _watching:
        return
    _watching.add(os.getpid())
    expected = os.getppid() if parent is None else parent
    watch(lambda: os.getppid() != expected, then)
