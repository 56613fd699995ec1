"""Executes one claim's notebook for the pipeline, safely.

One run at a time for each claim; nothing outlives the process that asked for it; figures and record are
published together after the notebook has run to its end and written its record, and not before.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock

from reslab import claims, data, lifeline, notebook, params, paths, progress, published
from reslab.files import publish, write_atomic
from reslab.schema import UserError

__all__ = ["RunFailed", "preflight", "run"]

EXECUTED = paths.BUILD / "executed"
REPORTS = paths.BUILD / "reports"
FAILED = paths.BUILD / "failed"
STAGING = paths.BUILD / "staging"


class RunFailed(Exception):
    """A notebook failed for a reason that is not the user's input."""


def preflight(settings: params.Params, names: list[str]) -> None:
    """All that can be known to be wrong before the notebooks `names` train anything, as a UserError."""
    settings.device.require()
    task = data.TextConfig(
        corpus=settings.corpus,
        context=settings.decoder.context,
        evaluation_windows=settings.evaluation_windows,
    )
    data.load(task)
    for name in names:
        path = notebook.source(name)
        notebook.check_parameters(notebook.read(path), path, _injected(settings, name))
    for folder in (paths.FIGURES, paths.RUNS, notebook.CLEAN, EXECUTED, REPORTS, STAGING, published.COPIES):
        paths.require_writable(folder)


def run(name: str) -> None:
    """Execute notebook `name` with the values of params.yaml and publish its figures, record and report."""
    notebook.source(name)
    with _lock(name), _restoring(name):
        settings = params.read()
        preflight(settings, [name])
        staging = STAGING / name
        source = notebook.write_clean(name)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        started = time.time()
        executed = _execute(source, staging / f"{name}.ipynb", _injected(settings, name))
        _publish(name, staging, executed, started)


def _injected(settings: params.Params, name: str) -> dict[str, Any]:
    """The values that a notebook's parameters cell is given."""
    folder = (STAGING / name).relative_to(paths.ROOT)
    return {"scale": settings.scale, "changes": params.changes(settings), "figures": str(folder)}


# --- guards ---------------------------------------------------------------------------------------


@contextmanager
def _lock(name: str) -> Iterator[None]:
    lock = paths.BUILD / "locks" / f"{name}.lock"
    paths.require_writable(lock.parent)
    try:
        with filelock.FileLock(lock, timeout=0):
            yield
    except filelock.Timeout:
        raise UserError(f"{name} is being run by another process; wait for it or stop it, then run again") from None


@contextmanager
def _restoring(name: str) -> Iterator[None]:
    """When the run fails: end what it started, and put back the figures that DVC removed before it."""

    def end(number: int, frame: Any) -> None:
        logging.disable()  # or the client of the kernel tells that it died
        lifeline.end_descendants()
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException:
        lifeline.end_descendants()
        published.restore(name)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # or it tells of the cell that was interrupted
        raise


# --- execution ------------------------------------------------------------------------------------


@contextmanager
def _kernel() -> Iterator[str]:
    """A kernel of this very Python, whatever kernels are installed; yields its name."""
    with tempfile.TemporaryDirectory() as folder:
        specification = Path(folder) / "kernels" / "reslab" / "kernel.json"
        specification.parent.mkdir(parents=True)
        argv = [sys.executable, "-m", "reslab.kernel", "-f", "{connection_file}", "--log-level=ERROR"]
        specification.write_text(json.dumps({"argv": argv, "display_name": "reslab", "language": "python"}))
        os.environ["JUPYTER_PATH"] = folder
        library = str(Path(__file__).resolve().parents[1])
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (library, os.environ.get("PYTHONPATH")) if p)
        yield "reslab"


@contextmanager
def _showing_progress() -> Iterator[None]:
    """Shows in this process's terminal or log what the notebook's progress display reports."""
    shown = progress.display()
    with tempfile.TemporaryDirectory() as folder:
        file, stop = Path(folder) / "progress", threading.Event()

        def poll() -> None:
            while not stop.wait(0.5):
                with suppress(OSError, ValueError):
                    fraction, text = json.loads(file.read_text())
                    shown.show(fraction, text)

        thread = threading.Thread(target=poll, daemon=True)
        os.environ["RESLAB_PROGRESS"] = str(file)
        thread.start()
        try:
            yield
        finally:
            del os.environ["RESLAB_PROGRESS"]
            stop.set()
            thread.join()
            shown.close()


def _execute(source: Path, output: Path, injected: dict[str, Any]) -> Any:
    """The executed notebook; RunFailed or UserError say in which cell it failed and why."""
    import papermill
    from nbclient.exceptions import DeadKernelError

    try:
        with _kernel() as kernel, _showing_progress():
            return papermill.execute_notebook(
                source,
                output,
                injected,
                kernel_name=kernel,
                language="python",
                cwd=paths.ROOT,
                progress_bar=False,
            )
    except papermill.PapermillExecutionError as error:
        kept = _keep_failed(output)
        if error.ename == "UserError":
            raise UserError(error.evalue) from None
        raise RunFailed(
            f"{source.stem}: cell {error.exec_count} failed with {error.ename}: {error.evalue}; see {kept}"
        ) from None
    except DeadKernelError:
        kept = _keep_failed(output)
        raise RunFailed(
            f"{source.stem}: its kernel died, most often for lack of memory; lower execution.workers in params.yaml "
            f"and run again, finished runs are kept; see {kept}"
        ) from None


def _keep_failed(output: Path) -> Path:
    kept = FAILED / output.name
    with suppress(UserError, OSError):
        publish([output], FAILED)
    return kept


def _publish(name: str, staging: Path, executed: Any, started: float) -> None:
    """Check that the notebook left all it must, then put everything in its place, the record last."""
    image, record = staging / f"{name}.png", staging / f"{name}.json"
    if not image.exists() or not record.exists():
        raise RunFailed(f"{name}: the notebook ended without writing its figure and record; its last cell must do so")
    if claims.read(record).claim != name:
        raise RunFailed(f"{name}: the notebook wrote the record of another claim")
    content = notebook.normalise_executed(executed)
    write_atomic(EXECUTED / f"{name}.ipynb", content)
    write_atomic(REPORTS / f"{name}.html", _html(EXECUTED / f"{name}.ipynb"))
    write_atomic(paths.FIGURES / f"{name}.runtime.json", _runtime(started))
    publish([image, record], published.COPIES)
    publish([image, record], paths.FIGURES)
    shutil.rmtree(staging)


def _html(path: Path) -> bytes:
    from nbconvert import HTMLExporter

    html, _ = HTMLExporter().from_filename(str(path))
    return str(html).encode()


def _runtime(started: float) -> bytes:
    """What differs from run to run by nature."""
    commit = published.git("rev-parse", "HEAD")
    runtime = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "wall_seconds": round(time.time() - started, 1),
        "commit": commit.decode().strip() if commit else None,
        "host": os.uname().nodename,
        "dvc": version("dvc"),
    }
    return (json.dumps(runtime, indent=1) + "\n").encode()
