"""Sweeps: each run is trained once, kept whole on disk, and the same wherever it is trained."""

import ast
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import distributed
import pytest
import torch
from joblib.externals.loky import get_reusable_executor

from reslab import data, sweep
from reslab.data import CorpusConfig
from reslab.models.decoder import DecoderConfig
from reslab.schema import UserError
from reslab.sweep import Execution, load, run_all, run_name, trained_model
from reslab.training import Device, Model, RunConfig, RunRecord, evaluate, train, train_model

ALONE = Execution(workers=1)
PACKAGE = Path(sweep.__file__).parent


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs that were trained, in order."""
    configs: list[RunConfig] = []

    def spy(config: RunConfig, *rest: Any) -> tuple[RunRecord, Model]:
        configs.append(config)
        return train_model(config, *rest)

    monkeypatch.setattr(sweep, "train_model", spy)
    return configs


def seeds(config: RunConfig, *values: int) -> list[RunConfig]:
    return [config.model_copy(update={"seed": seed}) for seed in values]


def of_depth(config: RunConfig, depth: int) -> RunConfig:
    model = DecoderConfig.model_validate(config.model.model_dump() | {"depth": depth})
    return config.model_copy(update={"model": model})


# --- records --------------------------------------------------------------------------------------


def test_records_are_kept_and_shared(tiny: RunConfig, runs: Path, trained: list[RunConfig]) -> None:
    first = run_all(seeds(tiny, 0, 1), ALONE, "one claim")
    assert {path.name for path in runs.iterdir()} == {f"{run_name(c)}.json" for c in seeds(tiny, 0, 1)}
    second = run_all(seeds(tiny, 1, 2), ALONE, "another claim")
    assert [config.seed for config in trained] == [0, 1, 2]
    assert second[0] == first[1] == load(seeds(tiny, 1)[0])


def test_record_is_the_run(tiny: RunConfig, runs: Path) -> None:
    assert run_all([tiny], ALONE, "") == [train(tiny)]


def test_results_come_in_the_order_asked_for(tiny: RunConfig, runs: Path, trained: list[RunConfig]) -> None:
    asked = [of_depth(tiny, depth) for depth in (1, 3, 2, 1)]
    assert [record.config for record in run_all(asked, ALONE, "")] == asked
    assert [config.model.depth for config in trained] == [3, 2, 1]  # the longest first, each once


def test_nothing_to_do_is_no_error(runs: Path) -> None:
    assert run_all([], ALONE, "") == []


def test_missing_record_is_none(tiny: RunConfig, runs: Path) -> None:
    assert load(tiny) is None


def cut(content: bytes) -> bytes:
    return content[:-20]


def empty(content: bytes) -> bytes:
    return b""


def edit(content: bytes) -> bytes:
    return content.replace(b'"outcome":"stalled"', b'"outcome":"trained"')


def add_space(content: bytes) -> bytes:
    return content + b" "


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x80]) + content[middle + 1 :]


def outdate(content: bytes) -> bytes:
    payload = json.loads(content)["record"] | {"schema_version": 0}
    return sweep._encode(json.dumps(payload, separators=(",", ":")))


@pytest.mark.parametrize("damage", [cut, empty, edit, add_space, flip, outdate])
def test_damaged_record_is_told_and_trained_again(
    tiny: RunConfig, runs: Path, trained: list[RunConfig], damage: Callable[[bytes], bytes]
) -> None:
    [good] = run_all([tiny], ALONE, "")
    [path] = runs.iterdir()
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert path.read_bytes() != content
    with pytest.warns(UserWarning, match=f"{path.name}: the run's record is damaged or out of date"):
        assert run_all([tiny], ALONE, "") == [good]
    assert len(trained) == 2
    assert path.read_bytes() == content


def test_record_of_another_run_counts_as_damaged(tiny: RunConfig, runs: Path) -> None:
    run_all([tiny], ALONE, "")
    [path], [other] = runs.iterdir(), seeds(tiny, 1)
    shutil.copy(path, runs / f"{run_name(other)}.json")
    with pytest.warns(UserWarning, match="damaged or out of date"):
        assert load(other) is None


def test_changed_text_is_trained_on_anew(tiny: RunConfig, runs: Path, trained: list[RunConfig]) -> None:
    """Also where no SHA-256 is given: all that a run's numbers depend on is in its name."""
    assert isinstance(tiny.task, data.TextConfig)
    path = Path(tiny.task.corpus.source)
    old = run_all([tiny], ALONE, "")
    path.write_bytes(path.read_bytes().upper())
    data.load.cache_clear()
    assert run_all([tiny], ALONE, "") != old
    assert len(trained) == 2


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"learning_rate": 0.0100000001},
        {"device": Device(threads=2)},
        {"device": Device(compile=True)},
    ],
)
def test_name_changes_with_the_config(tiny: RunConfig, changed: dict[str, Any]) -> None:
    assert run_name(tiny.model_copy(update=changed)) != run_name(tiny) == run_name(tiny.model_copy())


def test_name_changes_with_nested_values(tiny: RunConfig) -> None:
    recipe = tiny.optimisation.model_copy(update={"clip": 1.5})
    assert isinstance(tiny.task, data.TextConfig)
    task = tiny.task.model_copy(update={"corpus": CorpusConfig(source="pandas")})
    changed: list[dict[str, Any]] = [{"optimisation": recipe}, {"task": task}, {"model": of_depth(tiny, 3).model}]
    names = {run_name(tiny.model_copy(update=change)) for change in changed}
    assert len(names | {run_name(tiny)}) == 4


CodeHash = Callable[[str, str, str], str]


@pytest.fixture
def code_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodeHash:
    """The hash of the training code with one piece of one module's text replaced, in a copy of the package."""

    def after(module: str, old: str, new: str) -> str:
        copy = Path(tempfile.mkdtemp(dir=tmp_path)) / "reslab"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        text = (copy / module).read_text()
        assert old in text
        (copy / module).write_text(text.replace(old, new, 1))

        def find_spec(name: str) -> SimpleNamespace:
            path = copy.joinpath(*name.split(".")[1:])
            return SimpleNamespace(origin=str(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")))

        with monkeypatch.context() as patched:
            patched.setattr(importlib.util, "find_spec", find_spec)
            return sweep.training_code.__wrapped__()

    return after


def test_name_depends_on_the_training_code(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_name(tiny)
    monkeypatch.setattr(sweep, "training_code", lambda: "other code")
    assert run_name(tiny) != before


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("training.py", "fused=True", "fused=False"),
        ("residuals/additive.py", "return self.alpha * update", "return update * self.alpha"),
        ("models/layers.py", "4 * width", "5 * width"),
        ("models/resnet.py", "padding=1", "padding=2"),
        ("data.py", "total // 20", "total // 21"),
        ("probes.py", "model.eval()", "model.train()"),
    ],
)
def test_code_that_trains_counts(code_hash: CodeHash, module: str, old: str, new: str) -> None:
    assert code_hash(module, old, new) != sweep.training_code()


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("training.py", "import math\n", "import math  # a comment\n\n\n"),
        ("training.py", "Run `config` to its end.", "Trains it."),
        ("residuals/additive.py", "The standard residual connection", "Plain"),
        ("training.py", "How far below the context-free loss", "How far"),
        ("plotting.py", "linewidth=0.6", "linewidth=0.7"),
        ("claims.py", '"refuted"', '"wrong"'),
        ("sweep.py", "timeout=20", "timeout=30"),
    ],
    ids=["comment", "docstring", "class docstring", "docstring of a constant", "plots", "verdicts", "sweeps"],
)
def test_all_else_does_not_count(code_hash: CodeHash, module: str, old: str, new: str) -> None:
    assert code_hash(module, old, new) == sweep.training_code()


@pytest.mark.parametrize(
    "statement",
    ["from reslab import data", "from reslab.data import load", "import reslab.data", "import reslab.data as d"],
)
def test_every_way_to_import_counts(statement: str) -> None:
    assert "reslab.data" in sweep._imports(ast.parse(statement))


def test_versions_of_torch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sweep.training_code()
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    assert sweep.training_code.__wrapped__() != before


# --- disks that fail ------------------------------------------------------------------------------


def full_disk(*args: Any, **options: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_is_a_user_error_and_leaves_no_part(
    tiny: RunConfig, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_disk)
        with pytest.raises(UserError, match=r"No space left on device.*free some space and run again"):
            run_all([tiny], ALONE, "")
    assert list(runs.iterdir()) == []


def test_runs_before_the_full_disk_are_kept(
    tiny: RunConfig, runs: Path, trained: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        plain, calls = os.fsync, iter(range(9))
        patched.setattr(os, "fsync", lambda file: plain(file) if next(calls) == 0 else full_disk())
        with pytest.raises(UserError, match="No space left"):
            run_all(seeds(tiny, 0, 1), ALONE, "")
    assert [path.name for path in runs.iterdir()] == [f"{run_name(trained[0])}.json"]
    trained.clear()
    run_all(seeds(tiny, 0, 1), ALONE, "")
    assert [config.seed for config in trained] == [1]


def test_read_only_disk_is_told_before_training(
    tiny: RunConfig, runs: Path, trained: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*args: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(UserError, match=r"cannot write here .Read-only file system"):
        run_all([tiny], ALONE, "")
    assert trained == []


def test_folder_that_cannot_be_made_is_a_user_error(tiny: RunConfig, runs: Path) -> None:
    runs.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write here"):
        run_all([tiny], ALONE, "")


# --- where runs are trained -----------------------------------------------------------------------


@pytest.fixture
def _no_workers_left() -> Iterator[None]:
    yield
    get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


@pytest.mark.usefixtures("_no_workers_left")
def test_workers_give_the_same_bytes(tiny: RunConfig, runs: Path) -> None:
    asked = [*seeds(tiny, 0, 1), of_depth(tiny, 3)]
    records = run_all(asked, ALONE, "")
    alone = {path.name: path.read_bytes() for path in runs.iterdir()}
    shutil.rmtree(runs)
    assert run_all(asked, Execution(workers=2), "") == records
    assert {path.name: path.read_bytes() for path in runs.iterdir()} == alone


@pytest.mark.parametrize("address", ["host:8786", "tcp://host", "http://host:8786", "", "lokal", "tcp://:x"])
def test_wrong_scheduler_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="scheduler"):
        Execution(workers=1, scheduler=address)


def test_unreachable_scheduler_is_a_user_error(tiny: RunConfig, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda address, timeout: plain(address, timeout="200ms"))
    with pytest.raises(UserError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9 .*set it to local"):
        run_all([tiny], Execution(workers=1, scheduler="tcp://127.0.0.1:9"), "")


def test_dask_cluster_gives_the_same_records(tiny: RunConfig, runs: Path) -> None:
    alone = run_all(seeds(tiny, 0, 1), ALONE, "")
    shutil.rmtree(runs)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address=None
    ) as cluster:
        execution = Execution(workers=1, scheduler=cluster.scheduler_address)
        assert run_all(seeds(tiny, 0, 1), execution, "") == alone
    assert len(list(runs.iterdir())) == 2


def test_missing_device_is_told_before_training(
    tiny: RunConfig, runs: Path, trained: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device"):
        run_all([tiny, tiny.model_copy(update={"device": Device(kind="cuda")})], ALONE, "")
    assert trained == []


# --- connections from outside the package ---------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from reslab import paths
from reslab.residuals import Connection, ConnectionConfig, register
from reslab.sweep import Execution, run_all, run_name
from reslab.training import RunConfig

DIVISOR = 2

@register("divided")
class Divided(Connection):
    def write(self, stream, update):
        return stream + update / DIVISOR

if __name__ == "__main__":
    paths.RUNS = Path(sys.argv[2])
    config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    model = config.model.model_copy(update={"connection": ConnectionConfig("divided")})
    configs = [config.model_copy(update={"seed": seed, "model": model}) for seed in (0, 1)]
    records = run_all(configs, Execution(workers=int(sys.argv[3])), "")
    print(run_name(configs[0]), records[0].train_loss[-1])
"""


def test_own_connection_is_trained_in_workers_and_names_its_runs(tiny: RunConfig, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(tiny.model_dump_json())

    def run(divisor: str, workers: int) -> list[str]:
        script = tmp_path / "own.py"
        script.write_text(SCRIPT.replace("DIVISOR = 2", f"DIVISOR = {divisor}"))
        command = [sys.executable, str(script), str(config), str(tmp_path / "runs"), str(workers)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split()

    one, other = run("2", 2), run("4", 1)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert len(list((tmp_path / "runs").iterdir())) == 4


# --- weights --------------------------------------------------------------------------------------


def test_weights_are_kept_where_asked_for(tiny: RunConfig, runs: Path, trained: list[RunConfig]) -> None:
    record = run_all([tiny], ALONE, "")[0]
    with pytest.raises(UserError, match=r"no weights of this run; train it by run_all\(..., weights=True\)"):
        trained_model(tiny)
    assert run_all([tiny], ALONE, "", weights=True) == [record]  # trained again: the weights were not kept
    assert run_all([tiny], ALONE, "", weights=True) == [record]
    assert len(trained) == 2
    task, model = data.load(tiny.task), trained_model(tiny)
    assert evaluate(tiny, task, model, "test") == (record.test_loss, record.test_accuracy)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-7], lambda raw: b"", lambda raw: raw[:40] + b"?" + raw[41:]])
def test_damaged_weights_are_trained_again(
    tiny: RunConfig, runs: Path, trained: list[RunConfig], damage: Callable[[bytes], bytes]
) -> None:
    run_all([tiny], ALONE, "", weights=True)
    path = runs / f"{run_name(tiny)}.pt"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    run_all([tiny], ALONE, "", weights=True)
    assert len(trained) == 2
    assert path.read_bytes() == before
