"""The runner: published whole or not at all, nothing outlives it, the same again on a rerun.

The clone's only notebook is a tiny one that writes a record and a figure without training. One process
(DRIVER) runs the notebooks that fail, one after the other, since half of a run's time is imports.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import pytest

import clones

NAME = "01_tiny"

PARAMETERS = "scale = 'smoke'\nchanges = {}\nfigures = None"

START = """
from pathlib import Path
import sys
folder = Path(figures)
Path("kernel-started").write_text(sys.executable)
print(sys.executable, Path.cwd(), scale, changes, figures)
"""

DRAW = f"""
from matplotlib.figure import Figure
drawn = Figure(figsize=(2, 1))
drawn.subplots().plot([0, number])
drawn.savefig(folder / "{NAME}.png", metadata={{"Software": None}})
"""

RECORD = f"""
from reslab import claims, stats
done = claims.Check(sentence="A1", name="c", statement="it is so", role="trained", unit="nats", outcome="holds",
                    estimate=stats.deterministic(number), criterion=claims.Criterion(above=0))
record = claims.Record(claim="{NAME}", title="t", statement="s", scale=scale, verdict="supported", key="c",
                       because="1 of 1 checks hold", checks=(done,), published=(), arms={{}}, provenance={{}})
claims.write(record, folder)
record.table()
"""

OTHER = RECORD.replace(NAME, "02_other")

DIE = "import os\nos.kill(os.getpid(), 9)"

HANG = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path("hangs").write_text("")
time.sleep(600)
"""

WHOLE = {"start": START, "number": "number = 1.5", "draw": DRAW, "record": RECORD}

CASES: dict[str, dict[str, str]] = {
    "rerun": WHOLE,
    "no git": WHOLE,
    "kernel dies": WHOLE | {"number": "number = 2.5", "die": DIE},
    "no record": WHOLE | {"number": "number = 2.5", "record": "'forgotten'"},
    "no figure": WHOLE | {"number": "number = 2.5", "draw": "'forgotten'"},
    "another's record": WHOLE | {"record": f"{OTHER}(folder / '02_other.json').rename(folder / '{NAME}.json')"},
    "user error": WHOLE | {"number": "from reslab.schema import UserError\nraise UserError('a text: too short')"},
    "value error": WHOLE | {"number": "raise ValueError('number: no such thing')"},
    "no parameters": WHOLE,
    "from the commit": WHOLE | {"number": "1 / 0"},
    "locked": WHOLE,
}

DRIVER = f"""
import contextlib, io, json, os, shutil, subprocess, sys
from pathlib import Path
from reslab import cli, paths

PUBLISHED = [paths.FIGURES / "{NAME}.png", paths.FIGURES / "{NAME}.json"]
HOLD = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(1, flush=True); input()"
path, results = os.environ["PATH"], {{}}
for case in json.loads(sys.argv[1]):
    shutil.copy(Path("cases") / f"{{case}}.ipynb", paths.NOTEBOOKS / "{NAME}.ipynb")
    for file in [*PUBLISHED, paths.BUILD / "executed" / "{NAME}.ipynb", paths.BUILD / "reports" / "{NAME}.html"]:
        file.unlink(missing_ok=True)  # as DVC does
    Path("kernel-started").unlink(missing_ok=True)
    if case == "from the commit":
        shutil.rmtree(paths.BUILD / "published")
    os.environ["PATH"] = str(Path(sys.executable).parent) if case == "no git" else path
    if case == "locked":
        lock = str(paths.BUILD / "locks" / "{NAME}.lock")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        holder = subprocess.Popen([sys.executable, "-c", HOLD, lock], **pipes)
        holder.stdout.readline()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = cli.main(["run", "{NAME}"])
        except Exception as error:
            code = repr(error)
    results[case] = {{
        "code": code,
        "said": said.getvalue(),
        "kernel": Path("kernel-started").exists(),
        "figures": [file.read_bytes().hex() if file.exists() else None for file in PUBLISHED],
        "executed": (paths.BUILD / "executed" / "{NAME}.ipynb").exists(),
        "kept": str(paths.BUILD / "failed" / "{NAME}.ipynb") in said.getvalue()
                and (paths.BUILD / "failed" / "{NAME}.ipynb").exists(),
    }}
    if case == "rerun":
        results[case]["outputs"] = {{str(file.relative_to(paths.ROOT)): file.read_bytes().hex() for file in
            [*PUBLISHED, paths.BUILD / "executed" / "{NAME}.ipynb", paths.BUILD / "reports" / "{NAME}.html"]}}
holder.communicate(b'release\\n')
print(json.dumps(results))
"""

OUTPUTS = [f"figures/{NAME}.png", f"figures/{NAME}.json", f"build/executed/{NAME}.ipynb", f"build/reports/{NAME}.html"]


@dataclass(frozen=True)
class Result:
    """What one of CASES came to."""

    code: object
    said: str
    kernel: bool
    figures: list[str | None]
    executed: bool
    kept: bool
    outputs: dict[str, str] | None = None


def _write(project: clones.Clone, cells: dict[str, str], kernel: str = "python3") -> None:
    path = project.root / "notebooks" / f"{NAME}.ipynb"
    clones.write_notebook(path, {"parameters": PARAMETERS, **cells}, kernel)


def _outputs(project: clones.Clone) -> dict[str, bytes]:
    return {name: (project.root / name).read_bytes() for name in OUTPUTS}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clones.Clone]:
    """A git clone whose only notebook is the tiny one, last saved in a conda environment that is not there.

    The user's own `python3` kernel is one of another environment, as `ipykernel install --user` leaves it.
    """
    made = clones.clone(tmp_path_factory.mktemp("runner") / "project", git=True)
    users = tmp_path_factory.mktemp("jupyter")
    specification = users / "kernels" / "python3" / "kernel.json"
    specification.parent.mkdir(parents=True)
    foreign = {"argv": ["/conda/envs/gone/bin/python", "-f", "{connection_file}"], "display_name": "Python 3"}
    specification.write_text(json.dumps(foreign | {"language": "python"}))
    made.environment.update(JUPYTER_DATA_DIR=str(users), JUPYTER_PREFER_ENV_PATH="0")
    for path in (made.root / "notebooks").iterdir():
        path.unlink()
    _write(made, WHOLE, kernel="conda-env-mine-py")
    yield made
    made.end()


@pytest.fixture(scope="module")
def first(project: clones.Clone) -> subprocess.CompletedProcess[str]:
    """The first run, from a folder that has nothing to do with the project; then the figures are committed."""
    assert not (project.root / "figures").exists()
    assert not (project.root / "build").exists()
    done = project.reslab("run", NAME, cwd=Path("/"))
    if done.returncode == 0:
        project.commit()
    return done


@pytest.fixture(scope="module")
def published(project: clones.Clone, first: subprocess.CompletedProcess[str]) -> dict[str, bytes]:
    """What the first run left."""
    assert first.returncode == 0, first.stderr
    return _outputs(project)


@pytest.fixture(scope="module")
def results(project: clones.Clone, published: dict[str, bytes]) -> dict[str, Result]:
    """What became of CASES. Before each, the published files are deleted, as DVC does before it runs a stage."""
    for case, cells in CASES.items():
        own = {} if case == "no parameters" else {"parameters": PARAMETERS}
        clones.write_notebook(project.root / "cases" / f"{case}.ipynb", {**own, **cells})

    done = project.call(sys.executable, "-c", DRIVER, json.dumps(list(CASES)))
    assert done.returncode == 0, done.stderr
    return {case: Result(**result) for case, result in json.loads(done.stdout.splitlines()[-1]).items()}


def _old(published: dict[str, bytes]) -> list[str | None]:
    return [published[name].hex() for name in OUTPUTS[:2]]


# --- success --------------------------------------------------------------------------------------


def test_everything_is_published(
    project: clones.Clone, first: subprocess.CompletedProcess[str], published: dict[str, bytes]
) -> None:
    assert first.stdout == ""
    assert "Traceback" not in first.stderr
    assert "Warning" not in first.stderr
    assert published[f"figures/{NAME}.png"].startswith(b"\x89PNG")
    assert json.loads(published[f"figures/{NAME}.json"])["claim"] == NAME
    assert b"</html>" in published[f"build/reports/{NAME}.html"]
    runtime = json.loads((project.root / "figures" / f"{NAME}.runtime.json").read_text())
    assert runtime["commit"] == project.git("rev-parse", "HEAD~").strip()
    assert runtime["wall_seconds"] > 0
    assert sorted(p.name for p in (project.root / "figures").iterdir()) == sorted(
        [f"{NAME}.json", f"{NAME}.png", f"{NAME}.runtime.json"]
    )
    assert not (project.root / "build" / "staging" / NAME).exists()
    assert project.processes() == []


def test_executed_notebook(project: clones.Clone, published: dict[str, bytes]) -> None:
    """In this very Python and in the project's folder, whatever the file says and wherever the call came from."""
    executed = nbformat.reads(published[f"build/executed/{NAME}.ipynb"].decode(), as_version=4)
    nbformat.validate(executed)
    printed = executed.cells[2].outputs[0].text.split()
    assert printed == [sys.executable, str(project.root), "smoke", "{}", f"build/staging/{NAME}"]
    assert [cell.execution_count for cell in executed.cells] == [1, 2, 3, 4, 5, 6]
    assert executed.metadata.kernelspec.name == "python3"
    assert b"papermill" not in published[f"build/executed/{NAME}.ipynb"]


def test_rerun_is_byte_equal(results: dict[str, Result], published: dict[str, bytes]) -> None:
    again = results["rerun"]
    assert again.code == 0, again.said
    assert again.outputs is not None
    assert [name for name in OUTPUTS if bytes.fromhex(again.outputs[name]) != published[name]] == []


def test_machine_without_git(results: dict[str, Result], published: dict[str, bytes]) -> None:
    """An unpacked tarball on a machine that has no git: known after minutes of training, if not before."""
    assert results["no git"].code == 0, results["no git"].said or results["no git"].code
    assert results["no git"].figures == _old(published)


# --- failure --------------------------------------------------------------------------------------

FAILURES = ["kernel dies", "no record", "no figure", "another's record", "user error", "value error", "no parameters"]


@pytest.mark.parametrize("case", [*FAILURES, "from the commit"])
def test_failed_run_brings_the_old_figures_back(
    results: dict[str, Result], published: dict[str, bytes], case: str
) -> None:
    """From build/published, or where that is gone (`from the commit`) from HEAD. Nothing of the failed run is there."""
    assert results[case].code in (1, 2)
    assert results[case].figures == _old(published)
    assert not results[case].executed


def test_kernel_that_dies_after_its_record(results: dict[str, Result]) -> None:
    result = results["kernel dies"]
    assert result.code == 1
    assert f"reslab: {NAME}: its kernel died, most often for lack of memory" in result.said
    assert "lower execution.workers" in result.said
    assert result.kept


@pytest.mark.parametrize("case", ["no record", "no figure"])
def test_notebook_that_ends_without_record_or_figure(results: dict[str, Result], case: str) -> None:
    """Those of the run before, which died after it had written both, do not count."""
    result = results[case]
    assert result.code == 1
    assert f"reslab: {NAME}: the notebook ended without writing its figure and record" in result.said
    assert result.said.count("\n") == 1


def test_record_of_another_claim(results: dict[str, Result]) -> None:
    assert results["another's record"].code == 1
    assert "record of another claim" in results["another's record"].said


def test_user_error_in_a_notebook(results: dict[str, Result]) -> None:
    assert results["user error"].code == 2
    assert results["user error"].said == "reslab: a text: too short\n"


def test_other_error_in_a_notebook_names_the_cell(results: dict[str, Result]) -> None:
    result = results["value error"]
    assert result.code == 1
    assert f"reslab: {NAME}: cell 4 failed with ValueError: number: no such thing; see " in result.said
    assert result.kept
    assert result.said.count("\n") == 1


def test_missing_parameters_tag_is_refused_before_a_kernel_starts(results: dict[str, Result]) -> None:
    result = results["no parameters"]
    assert result.code == 2
    assert f"{NAME}.ipynb: 0 cells are tagged 'parameters'" in result.said
    assert not result.kernel
    assert results["value error"].kernel, "the mark of a started kernel works"


def test_locked_by_another_process(results: dict[str, Result]) -> None:
    result = results["locked"]
    assert result.code == 2
    assert f"reslab: {NAME} is being run by another process" in result.said
    assert result.said.count("\n") == 1
    assert not result.kernel


# --- the end of the process -----------------------------------------------------------------------

LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"
"""Stands for DVC, whose shell becomes the runner."""

RUN = (sys.executable, "-m", "reslab", "run", NAME)


@pytest.fixture
def hanging(project: clones.Clone, published: dict[str, bytes]) -> Iterator[clones.Clone]:
    """The clone with a notebook that never ends and has a child process; DVC has just deleted the published figures."""
    _write(project, {"start": START, "hang": HANG})
    for name in OUTPUTS[:2]:
        (project.root / name).unlink(missing_ok=True)
    published_copies = project.root / "build" / "published"
    published_copies.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS[:2]:
        (published_copies / Path(name).name).write_bytes(published[name])
    (project.root / "hangs").unlink(missing_ok=True)
    yield project
    project.end()


def _figures(project: clones.Clone) -> list[str | None]:
    files = [project.root / name for name in OUTPUTS[:2]]
    return [file.read_bytes().hex() if file.exists() else None for file in files]


def _started(project: clones.Clone, *command: str, **variables: str) -> subprocess.Popen[bytes]:
    process = project.start(*command, **variables)
    clones.wait_for(project.root / "hangs", 120, process, project.log)
    assert len(project.processes()) >= 3, "runner, kernel and the kernel's child"
    return process


def test_killed_runner_leaves_no_process(hanging: clones.Clone) -> None:
    process = _started(hanging, *RUN)
    process.kill()
    process.wait()
    assert hanging.left_after(5) == []


def test_terminated_runner_leaves_no_process_and_brings_the_figures_back(
    hanging: clones.Clone, published: dict[str, bytes]
) -> None:
    process = _started(hanging, *RUN)
    process.terminate()
    assert process.wait(20) != 0
    assert hanging.left_after(5) == []
    assert _figures(hanging) == _old(published)
    told = hanging.log.read_text()
    assert "run the same again to continue" in told
    assert "died" not in told, "the kernel was ended, it did not die"


def test_runner_ends_with_a_killed_dvc_and_brings_the_figures_back(
    hanging: clones.Clone, published: dict[str, bytes]
) -> None:
    process = _started(hanging, sys.executable, "-c", LAUNCHER, *RUN, DVC_STAGE=f"claim@{NAME}")
    process.kill()
    process.wait()
    assert hanging.left_after(5) == []
    assert _figures(hanging) == _old(published)


def test_runner_ends_with_a_dvc_that_is_killed_while_it_still_imports(hanging: clones.Clone) -> None:
    """The imports take seconds; DVC may be gone before they are done."""
    process = hanging.start(sys.executable, "-c", LAUNCHER, *RUN, DVC_STAGE=f"claim@{NAME}")
    deadline = time.monotonic() + 60
    while not any(map(_imports_torch, psutil.Process(process.pid).children())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert hanging.left_after(5) == []


SWEEP = """
from reslab import params, sweep
from reslab.experiments import no_residual_collapse as claim
settings = params.load("smoke", {"optimisation": {"steps": 100000}, "execution": {"workers": 2}})
configs = [arm.at(1e-3, seed) for arm in claim.arms(settings) for seed in (0, 1)]
sweep.run_all(configs, settings.execution, "sweep")
"""


def test_workers_end_with_a_sweep_that_is_killed_while_they_still_import(project: clones.Clone) -> None:
    """As when the kernel runs out of memory, or is restarted in JupyterLab.

    They can notice only when their imports are done; they must not then train for nobody, nor wait for work.
    """
    process = project.start(sys.executable, "-c", SWEEP)
    deadline = time.monotonic() + 120
    while not any(map(_imports_torch, psutil.Process(process.pid).children(recursive=True))):
        assert process.poll() is None, project.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    left = project.left_after(30)
    project.end()
    assert left == []


def _imports_torch(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("libtorch" in area.path for area in process.memory_maps())
    return False
