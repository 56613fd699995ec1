"""Every claim through DVC at smoke scale, and again in this process: all results are there, and both times the same.

The pipeline has run records of its own; the second run trains anew, into the session's.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

import clones
from reslab import claims, notebook, paths

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clones.Clone]:
    """A tarball's clone whose pipeline has run to its end."""
    made = clones.clone(tmp_path_factory.mktemp("claims") / "project", git=False, every_claim=True)
    done = made.call("dvc", "repro", timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    made.end()


def test_every_notebook_leaves_its_results_and_no_noise(finished: clones.Clone) -> None:
    for name in notebook.names():
        record = claims.read(finished.root / "figures" / f"{name}.json")
        assert record.claim == name
        assert (finished.root / "figures" / f"{name}.png").stat().st_size > 10_000
        executed = nbformat.read(finished.root / "build" / "executed" / f"{name}.ipynb", as_version=4)
        outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
        assert outputs
        noise = [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
        assert noise == [], name


def _run_cells(name: str, figures: Path) -> None:
    """A notebook's code at smoke scale, cell after cell, in this process."""
    namespace: dict[str, object] = {}
    for cell in nbformat.read(paths.ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{name}, cell {cell.id}", "exec"), namespace)
            if "parameters" in cell.metadata.get("tags", ()):
                assert namespace["scale"] == "smoke"
                namespace["figures"] = str(figures)


@pytest.mark.parametrize("name", notebook.names())
def test_a_second_run_gives_the_same_files(finished: clones.Clone, name: str, tmp_path: Path) -> None:
    """All bytes but those of measured times, which are named by the role of their checks; trained anew."""
    assert finished.runs != paths.RUNS
    _run_cells(name, tmp_path)
    first, second = (claims.read(folder / f"{name}.json") for folder in (finished.root / "figures", tmp_path))
    if any(check.role == "measured" for check in first.checks):
        unmeasured = [[c for c in record.checks if c.role != "measured"] for record in (first, second)]
        assert unmeasured[0] == unmeasured[1]
        return
    for file in (f"{name}.json", f"{name}.png"):
        assert (tmp_path / file).read_bytes() == (finished.root / "figures" / file).read_bytes(), file


def test_scoreboard_lists_every_claim(finished: clones.Clone) -> None:
    board = (finished.root / "figures" / "README.md").read_text()
    table = (finished.root / "figures" / "claims.csv").read_text()
    for name in notebook.names():
        assert f"({name}.png)" in board
        assert f"\n{name},smoke," in table
    assert json.loads((finished.root / "figures" / f"{notebook.names()[0]}.json").read_text())["scale"] == "smoke"
