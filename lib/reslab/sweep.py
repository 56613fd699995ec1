"""Many runs: side by side, each kept on disk, so that claims share them and a killed sweep resumes.

A run leaves a record, <name>.json, and its weights, <name>.pt, where a claim looks into the trained model.
"""

import ast
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import joblib
import numpy
import torch
from pydantic import Field, TypeAdapter, ValidationError, field_validator

from reslab import data, lifeline, paths
from reslab.files import write_atomic
from reslab.fingerprint import fingerprint
from reslab.progress import Progress
from reslab.residuals import CONNECTIONS, Connection
from reslab.schema import Settings, UserError
from reslab.training import SCHEMA, Model, RunConfig, RunRecord, build, train_model

__all__ = ["Execution", "load", "run_all", "run_name", "trained_model", "training_code"]


class Execution(Settings):
    """How runs are spread over a machine or a cluster. Changes no number, so it is no part of a run's name."""

    workers: int = Field(ge=1)
    """Runs side by side, each with `device.threads` threads."""
    scheduler: str = "local"
    """`local`, or the address of a Dask scheduler such as tcp://host:8786."""

    @field_validator("scheduler")
    @classmethod
    def _scheduler_is_an_address(cls, scheduler: str) -> str:
        if not re.fullmatch(r"local|(tcp|tls|ucx)://.+:\d+", scheduler):
            raise ValueError(
                f"'{scheduler}' is no address of a Dask scheduler; give local, or one such as tcp://host:8786 "
                f"(tcp, tls or ucx)"
            )
        return scheduler


# --- names ----------------------------------------------------------------------------------------


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names of this package's modules that are, or may be, imported."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.split(".")[0] == "reslab")


def _without_docstrings(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            is_text = [isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in body]
            node.body = [n for n, text in zip(body, is_text, strict=True) if not text]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _sources(module: str) -> dict[str, str]:
    """`module` and all modules of this package that it imports, by name: their code without docstrings."""
    sources: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name) if _is_module(name) else None
        if name in sources or spec is None or spec.origin is None:
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        waiting += _imports(tree)
        sources[name] = _without_docstrings(tree)
    return sources


@cache
def training_code() -> str:
    """SHA-256 of all code of this package that `reslab.training` imports, and of the versions it runs on.

    Comments, docstrings and layout do not count.
    """
    versions = [torch.__version__, numpy.__version__]
    return hashlib.sha256(json.dumps([sorted(_sources("reslab.training").items()), versions]).encode()).hexdigest()


@cache
def _registered_late(module: str) -> bool:
    """Is this a module of the package that `reslab.training` does not import, such as a claim's?"""
    return module.split(".")[0] == "reslab" and module not in _sources("reslab.training")


@cache
def _module_code(module: str) -> str:
    """SHA-256 of a module of this package and all that it imports."""
    return hashlib.sha256(json.dumps(sorted(_sources(module).items())).encode()).hexdigest()


def _is_module(name: str) -> bool:
    path = Path(__file__).parent.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def run_name(config: RunConfig) -> str:
    """The name of a run: the same for the same config, data, training code, and versions of torch and numpy.

    The code of a connection that is registered outside this package counts too, and what of the user's it calls; of
    one that a claim registers, the code of its module.
    """
    task = data.load(config.task)
    text = task.corpus.sha256 if isinstance(task, data.Text) else ""
    own = _kind_code(kind) if (kind := _outside(config)) is not None else ""
    return hashlib.sha256(f"{training_code()}{text}{own}{config.model_dump_json()}".encode()).hexdigest()[:20]


def _outside(config: RunConfig) -> type[Connection] | None:
    """The run's kind of connection, where it is not one that `reslab.training` knows by itself."""
    kind = config.model.connection.type
    known = kind.__module__.split(".")[0] == "reslab" and not _registered_late(kind.__module__)
    return None if known else kind


def _kind_code(kind: type[Connection]) -> str:
    return _module_code(kind.__module__) if _registered_late(kind.__module__) else fingerprint(kind)


# --- the store ------------------------------------------------------------------------------------


def _path(config: RunConfig) -> Path:
    return paths.RUNS / f"{run_name(config)}.json"


def _encode(payload: str) -> bytes:
    digest = hashlib.sha256(payload.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "record": {payload}}}\n'.encode()


_RECORD = TypeAdapter(RunRecord)


def load(config: RunConfig) -> RunRecord | None:
    """The run's record, or None when there is none. A damaged record warns and counts as none."""
    path = _path(config)
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); check the folder and run again") from None
    payload = raw[len(_encode("")) - 2 : -2].decode(errors="replace")
    try:
        record = _RECORD.validate_json(payload)
        sound = _encode(payload) == raw and record.config == config and record.schema_version == SCHEMA
    except ValidationError:
        sound = False
    if not sound:
        warnings.warn(f"{path}: the run's record is damaged or out of date; training it again", stacklevel=2)
        return None
    return record


# --- weights --------------------------------------------------------------------------------------


def _weights_path(config: RunConfig) -> Path:
    return paths.RUNS / f"{run_name(config)}.pt"


def _weights(model: Model) -> bytes:
    """The model's state, behind its SHA-256."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()


def _kept_weights(config: RunConfig) -> bytes | None:
    """The run's weights as `torch.load` reads them, or None when there are none that are whole."""
    try:
        raw = _weights_path(config).read_bytes()
    except OSError:
        return None
    return raw[32:] if hashlib.sha256(raw[32:]).digest() == raw[:32] else None


def trained_model(config: RunConfig) -> Model:
    """The model as the run left it, on the CPU; a UserError when its weights were not kept."""
    weights = _kept_weights(config)
    if weights is None:
        raise UserError(f"{_weights_path(config)}: no weights of this run; train it by run_all(..., weights=True)")
    model = build(config.model, config.seed)
    model.load_state_dict(torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True))
    return model


# --- running --------------------------------------------------------------------------------------


class _Reporter:
    """Leaves a run's step and loss in a file, once a second, for the display of the process that sweeps."""

    def __init__(self, path: Path) -> None:
        self.path, self.last = path, 0.0

    def __call__(self, step: int, loss: float) -> None:
        if time.monotonic() - self.last > 1:
            self.last = time.monotonic()
            with contextlib.suppress(OSError):  # a remote worker need not share this folder
                self.path.write_text(f"{step + 1} {loss:.3f}")


def _work(
    config: RunConfig, report: Path, parent: int | None, outside: type[Connection] | None, weights: bool
) -> tuple[RunConfig, str, bytes | None]:
    """Train `config`; its record as JSON, and its weights if asked for.

    `outside` is its kind of connection, if a worker does not know it.
    """
    if outside is not None:
        CONNECTIONS[config.model.connection.kind] = outside
    if parent is not None:
        lifeline.die_with_parent(parent=parent)
    record, model = train_model(config, _Reporter(report))
    with contextlib.suppress(OSError):
        report.unlink(missing_ok=True)
    return config, record.model_dump_json(), _weights(model) if weights else None


def _cost(config: RunConfig) -> float:
    """Relative time of a run, for the order of the runs and the time left."""
    recipe = config.optimisation
    return float(recipe.steps * recipe.batch * config.model.depth * config.model.relative_cost)


@contextlib.contextmanager
def _backend(execution: Execution) -> Iterator[None]:
    if execution.scheduler == "local":
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
            yield
        return
    from distributed import Client

    try:
        client = Client(execution.scheduler, timeout=20)
    except (OSError, TimeoutError) as error:
        raise UserError(
            f"execution.scheduler: no Dask scheduler answers at {execution.scheduler} ({type(error).__name__}); "
            "start one, or set it to local"
        ) from None
    with client, joblib.parallel_config(backend="dask", wait_for_workers_timeout=60):
        yield


def _train_all(
    configs: list[RunConfig], execution: Execution, reports: Path, weights: bool
) -> Iterator[tuple[RunConfig, str, bytes | None]]:
    own_processes = execution.scheduler == "local" and execution.workers > 1
    parent = os.getpid() if own_processes else None
    jobs = (
        joblib.delayed(_work)(config, reports / run_name(config), parent, _outside(config), weights)
        for config in configs
    )
    with _backend(execution):
        parallel = joblib.Parallel(
            n_jobs=execution.workers, return_as="generator_unordered", batch_size=1, pre_dispatch="all"
        )
        yield from parallel(jobs)


class _Watch:
    """Updates a sweep's display once a second from what its workers report."""

    def __init__(self, label: str, configs: list[RunConfig], reports: Path) -> None:
        self.costs = {run_name(config): (_cost(config), config.optimisation.steps) for config in configs}
        self.reports, self.finished = reports, 0.0
        self.left = len(configs)
        self.total = len(configs)
        self.progress = Progress(label, sum(cost for cost, _ in self.costs.values()))
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._poll, daemon=True)

    def _poll(self) -> None:
        while not self.stop.wait(1):
            self._show()

    def _show(self) -> None:
        done, losses = self.finished, []
        for report in self.reports.iterdir():
            with contextlib.suppress(OSError, ValueError):
                step, loss = report.read_text().split()
                cost, steps = self.costs[report.name]
                done += cost * int(step) / steps
                losses.append(loss)
        now = f", losses now {' '.join(sorted(losses))}" if losses else ""
        self.progress.update(done, f"{self.total - self.left}/{self.total} runs{now}")

    def one_finished(self, config: RunConfig) -> None:
        self.finished += self.costs[run_name(config)][0]
        self.left -= 1

    def __enter__(self) -> "_Watch":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()
        self.progress.__exit__()


def run_all(
    configs: Iterable[RunConfig], execution: Execution, label: str, *, weights: bool = False
) -> list[RunRecord]:
    """The records of all `configs`, in their order; those not on disk yet are trained and put there.

    With `weights` the trained weights are kept too, for `trained_model`; a run whose weights were not kept is trained
    again, to the same record. A record is written as soon as its run ends, so that nothing finished is lost.
    """
    configs = list(configs)
    records = {config: load(config) for config in dict.fromkeys(configs)}
    if weights:
        records = {c: record if _kept_weights(c) is not None else None for c, record in records.items()}
    missing = sorted((c for c, record in records.items() if record is None), key=_cost, reverse=True)
    if missing:
        for device in {config.device for config in missing}:
            device.require()
        paths.require_writable(paths.RUNS)
        with tempfile.TemporaryDirectory() as reports, _Watch(label, missing, Path(reports)) as watch:
            for config, payload, kept in _train_all(missing, execution, Path(reports), weights):
                if kept is not None:
                    write_atomic(_weights_path(config), kept)
                write_atomic(_path(config), _encode(payload))
                records[config] = _RECORD.validate_json(payload)
                watch.one_finished(config)
    return [record for config in configs if (record := records[config]) is not None]
