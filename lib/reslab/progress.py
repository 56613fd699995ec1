"""One progress display: a bar in a terminal or in JupyterLab, a line a minute in logs, quiet in CI.

Inside a notebook that a runner executes, the display's state goes to the file that RESLAB_PROGRESS
names; the runner shows it in its own terminal and the notebook stays free of it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

__all__ = ["Display", "Progress", "display"]

LOG_SECONDS = 60


class Display(Protocol):
    """Shows a fraction between 0 and 1 with a text, until it is closed."""

    def show(self, fraction: float, text: str) -> None: ...

    def close(self) -> None: ...


class _Quiet:
    def show(self, fraction: float, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self) -> None:
        self.bar = tqdm(total=1.0, bar_format="{percentage:3.0f}%|{bar:24}| {desc}", leave=False)

    def show(self, fraction: float, text: str) -> None:
        self.bar.n = fraction
        self.bar.set_description_str(text)

    def close(self) -> None:
        self.bar.close()


class _Log:
    def __init__(self) -> None:
        self.last, self.label = float("-inf"), ""

    def show(self, fraction: float, text: str) -> None:
        label = text.split(":")[0]
        if time.monotonic() - self.last >= LOG_SECONDS or label != self.label:
            self.last, self.label = time.monotonic(), label
            sys.stderr.write(f"{fraction:4.0%} {text}\n")
            sys.stderr.flush()

    def close(self) -> None:
        pass


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path

    def show(self, fraction: float, text: str) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps([fraction, text]))
        temporary.replace(self.path)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


class _Notebook:
    def __init__(self) -> None:
        from IPython.display import HTML, display

        self.html = HTML
        self.handle: Any = display(HTML(""), display_id=True)

    def show(self, fraction: float, text: str) -> None:
        bar = f"<progress value='{fraction:.4f}' max='1' style='width:16em'></progress> {text}"
        self.handle.update(self.html(bar))

    def close(self) -> None:
        self.handle.update(self.html(""))


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def display() -> Display:
    """The display that fits where this process runs."""
    if path := os.environ.get("RESLAB_PROGRESS"):
        return _File(Path(path))
    if os.environ.get("CI"):
        return _Quiet()
    if _in_notebook():
        return _Notebook()
    return _Bar() if sys.stderr.isatty() else _Log()


class Progress:
    """Work done, time left and a note, shown at each `update`. A context manager.

    Time left is told from the pace so far, once a twentieth of the work is done.
    """

    def __init__(self, label: str, work: float) -> None:
        self.label, self.work = label, work
        self.started = time.monotonic()
        self.display = display()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.display.close()

    def update(self, done: float, note: str) -> None:
        fraction = min(1.0, done / self.work) if self.work else 1.0
        elapsed = time.monotonic() - self.started
        left = elapsed * (1 - fraction) / fraction if fraction > 0.05 else None
        self.display.show(fraction, f"{self.label}: {note}, {_duration(left)}")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "time left not known yet"
    return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
