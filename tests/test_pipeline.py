"""The whole pipeline at smoke scale, through DVC: killed and resumed, from git and from a tarball, and what reruns."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

import clones
from reslab import params

pytestmark = pytest.mark.slow

CLEAN, CLAIM = f"clean@{clones.NOTEBOOK}", f"claim@{clones.NOTEBOOK}"


@dataclass
class Killed:
    """A pipeline that was killed in its sweep."""

    clone: clones.Clone
    finished: dict[str, int] = field(default_factory=dict)
    """Time stamps of the run records that were there a while after the kill."""
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """A clone whose pipeline has run to its end."""

    clone: clones.Clone
    root: Path
    """Where the results are."""
    stdout: str
    outputs: dict[str, bytes]


def _stamps(clone: clones.Clone) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in clone.runs.glob("[!.]*.json")}


def _outputs(root: Path) -> dict[str, bytes]:
    """All results that must not differ from run to run, nor from machine to machine of one kind."""
    figures = [path for path in (root / "figures").iterdir() if not path.name.endswith(".runtime.json")]
    found = sorted([*figures, *(root / "build" / "executed").iterdir()])
    return {str(path.relative_to(root)): path.read_bytes() for path in found if path.name != ".gitignore"}


def _differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[clones.Clone, clones.Clone]]:
    """A git clone and an unpacked tarball of the same state of the project."""
    made = (
        clones.clone(tmp_path_factory.mktemp("git") / "project", git=True),
        clones.clone(tmp_path_factory.mktemp("tarball") / "project", git=False),
    )
    yield made
    for clone in made:
        clone.end()


@pytest.fixture(scope="module")
def killed(pair: tuple[clones.Clone, clones.Clone]) -> Killed:
    """The git clone, whose `reslab repro` was killed (kill -9) when some of its runs had finished."""
    clone, _ = pair
    state = Killed(clone)
    process = clone.start(sys.executable, "-m", "reslab", "repro")
    deadline = time.monotonic() + 300
    while len(_stamps(clone)) < 2:
        assert process.poll() is None, clone.log.read_text()
        assert time.monotonic() < deadline, clone.log.read_text()
        time.sleep(0.01)
    process.kill()
    process.wait()
    state.left = clone.left_after(5)
    clone.end()
    state.finished = _stamps(clone)
    return state


@pytest.fixture(scope="module")
def resumed(killed: Killed) -> Finished:
    """The same clone, run again to its end and committed."""
    clone = killed.clone
    done = clone.reslab("repro")
    assert done.returncode == 0, done.stdout + done.stderr
    clone.commit()
    return Finished(clone, clone.root, done.stdout, _outputs(clone.root))


@pytest.fixture(scope="module")
def undisturbed(pair: tuple[clones.Clone, clones.Clone]) -> Finished:
    """The unpacked tarball, in which `reslab repro --scale smoke` ran once, with run records of its own."""
    _, clone = pair
    (clone.root / "params.yaml").write_text("# not for this run\n")
    done = clone.reslab("repro", "--scale", "smoke", cwd=Path("/"))
    assert done.returncode == 0, done.stdout + done.stderr
    root = clone.root / "build" / "scale-smoke"
    return Finished(clone, root, done.stdout, _outputs(root))


# --- killed and resumed ---------------------------------------------------------------------------


def test_killed_pipeline_leaves_no_process(killed: Killed) -> None:
    assert killed.left == []


def test_resumed_pipeline_keeps_the_finished_runs(killed: Killed, resumed: Finished) -> None:
    after = _stamps(resumed.clone)
    assert 2 <= len(killed.finished) < len(after), "it was killed in the middle of its sweep"
    assert {name: after.get(name) for name in killed.finished} == killed.finished


def test_scoreboard_is_printed_and_marked_as_smoke(resumed: Finished) -> None:
    lines = resumed.stdout.splitlines()
    board = next(line for line in lines if line.startswith(f"{clones.NOTEBOOK} "))
    assert board.endswith("(smoke: not meaningful)")
    assert lines[-1].endswith(str(resumed.root / "figures" / "README.md"))


def test_all_results_are_there(resumed: Finished) -> None:
    assert set(resumed.outputs) == {
        f"build/executed/{clones.NOTEBOOK}.ipynb",
        "figures/README.md",
        "figures/claims.csv",
        f"figures/{clones.NOTEBOOK}.json",
        f"figures/{clones.NOTEBOOK}.png",
    }
    assert all(resumed.outputs.values())
    assert "(smoke: not meaningful)" in resumed.outputs["figures/README.md"].decode()
    executed = nbformat.reads(resumed.outputs[f"build/executed/{clones.NOTEBOOK}.ipynb"].decode(), as_version=4)
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == [], "no noise of any kind"


def test_killed_and_undisturbed_runs_give_the_same_files(resumed: Finished, undisturbed: Finished) -> None:
    """From git and from a tarball; killed and resumed, or in one go; in two folders of different depth."""
    assert _differing(resumed.outputs, undisturbed.outputs) == []
    assert {path.name: path.read_bytes() for path in resumed.clone.runs.glob("*.json")} == {
        path.name: path.read_bytes() for path in undisturbed.clone.runs.glob("*.json")
    }


def test_another_scale_leaves_the_project_alone(undisturbed: Finished) -> None:
    root = undisturbed.clone.root
    assert (root / "params.yaml").read_text() == "# not for this run\n"
    assert not (root / "dvc.lock").exists()
    assert not (root / "figures").exists()


# --- what reruns ----------------------------------------------------------------------------------


def _reran(clone: clones.Clone) -> list[str]:
    """The stages that `dvc repro` runs."""
    done = clone.dvc("repro")
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split("'")[1] for line in done.stdout.splitlines() if line.startswith("Running stage")]


def _changed(clone: clones.Clone) -> dict[str, object]:
    """The stages that `dvc repro` would run for a change of their own inputs, and why."""
    done = clone.dvc("status", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture
def settled(resumed: Finished) -> Iterator[clones.Clone]:
    """The finished git clone; what the test changes is put back after it."""
    clone = resumed.clone
    before = {path: path.read_bytes() for path in (clone.root / "params.yaml", *clone.root.glob("notebooks/*.ipynb"))}
    yield clone
    for path, content in before.items():
        path.write_bytes(content)


def test_nothing_reruns_without_a_change(settled: clones.Clone) -> None:
    done = settled.dvc("repro")
    assert done.returncode == 0
    assert "up to date" in done.stdout
    assert "Running stage" not in done.stdout
    assert settled.git("status", "--porcelain") == ""


def test_how_runs_are_spread_reruns_nothing(settled: clones.Clone) -> None:
    settled.change("execution.workers", 2)
    assert _reran(settled) == []


def test_a_claims_parameter_concerns_that_claim_only(settled: clones.Clone) -> None:
    settled.change("claims.no_residual_collapse.exact.seeds", 3)
    changed = _changed(settled)
    assert set(changed) == {CLAIM}
    assert "claims.no_residual_collapse" in json.dumps(changed)


def test_saving_a_notebook_reruns_the_clean_stage_only(settled: clones.Clone, resumed: Finished) -> None:
    path = settled.root / "notebooks" / f"{clones.NOTEBOOK}.ipynb"
    content = nbformat.read(path, as_version=4)
    content.metadata.kernelspec = {"name": "conda-env-mine-py", "display_name": "mine", "language": "python"}
    for count, cell in enumerate(content.cells):
        cell.metadata["collapsed"] = False
        if cell.cell_type == "code":
            cell.execution_count = count
            cell.outputs = [v4.new_output("stream", text="seen\n")]
    nbformat.write(content, path)
    assert _reran(settled) == [CLEAN]
    assert _differing(_outputs(settled.root), resumed.outputs) == []


def test_damaged_run_records_are_trained_again(settled: clones.Clone, resumed: Finished) -> None:
    """One cut short and one with a changed digit, as by a bad disk."""
    short, changed = sorted(settled.runs.glob("*.json"))[:2]
    before = {path: path.read_bytes() for path in (short, changed)}
    short.write_bytes(before[short][:-200])
    at = before[changed].index(b'"train_loss":[') + 16
    digit = b"1" if before[changed][at : at + 1] != b"1" else b"2"
    changed.write_bytes(before[changed][:at] + digit + before[changed][at + 1 :])
    done = settled.dvc("repro", "--force", "--single-item", CLAIM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.read_bytes() for path in before} == before
    figures = {name: content for name, content in _outputs(settled.root).items() if name.startswith("figures/")}
    assert _differing(figures, {name: resumed.outputs[name] for name in figures}) == []
    assert len(figures) == 4


def test_dvc_exp_run_composes_the_scale(settled: clones.Clone) -> None:
    settled.change("scale", "cpu")
    settled.change("optimisation.steps", 9999)
    done = settled.dvc("exp", "run", "-S", "scale=smoke", CLEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert params.read(settled.root / "params.yaml") == params.preset("smoke")
