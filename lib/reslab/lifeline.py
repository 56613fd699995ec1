"""Processes that end when the one that started them is gone, even after kill -9."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

__all__ = ["die_with_parent", "end_descendants", "watch"]

POLL_SECONDS = 0.5


def end_descendants() -> None:
    """Kill every process below this one."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _end() -> None:
    end_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


def watch(gone: Callable[[], bool], then: Callable[[], None] = _end) -> None:
    """Calls `then` from a daemon thread as soon as `gone()` is true; by default ends this process and all below."""

    def poll() -> None:
        while not gone():
            time.sleep(POLL_SECONDS)
        then()

    threading.Thread(target=poll, daemon=True, name="lifeline").start()


_watching: set[int] = set()


def die_with_parent(then: Callable[[], None] = _end) -> None:
    """End this process and all below it once its present parent is gone. A second call does nothing."""
    if os.getpid() in _watching:
        return
    _watching.add(os.getpid())
    parent = os.getppid()
    watch(lambda: os.getppid() != parent, then)
