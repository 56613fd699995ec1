"""Every claim through DVC at smoke scale, twice: all results are there, and the same on a second run."""

import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

import clones
from reslab import claims, notebook

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clones.Clone]:
    """A tarball's clone whose pipeline has run to its end."""
    made = clones.clone(tmp_path_factory.mktemp("claims") / "project", git=False, every_claim=True)
    done = made.call("dvc", "repro", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    made.end()


def _results(root: Path) -> dict[str, bytes]:
    """Figures, records and executed notebooks by name, but for the claims whose record has measured times."""
    found: dict[str, bytes] = {}
    for path in sorted((root / "figures").glob("[0-9]*.json")):
        if path.name.endswith(".runtime.json"):
            continue
        if any(check.role == "measured" for check in claims.read(path).checks):
            continue
        files = [path, path.with_suffix(".png"), root / "build" / "executed" / f"{path.stem}.ipynb"]
        found |= {str(file.relative_to(root)): file.read_bytes() for file in files}
    return found


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


def test_a_second_run_gives_the_same_files(finished: clones.Clone) -> None:
    """All but the measured times; those are named by the role of their checks."""
    before = _results(finished.root)
    untimed = [name for name in notebook.names() if name not in ("08_sandwich_ln", "15_attention_residual_cost")]
    assert len(before) == 3 * len(untimed)
    done = finished.call("dvc", "repro", "--force", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    after = _results(finished.root)
    assert [name for name in before if before[name] != after.get(name)] == []


def test_scoreboard_lists_every_claim(finished: clones.Clone) -> None:
    board = (finished.root / "figures" / "README.md").read_text()
    table = (finished.root / "figures" / "claims.csv").read_text()
    for name in notebook.names():
        assert f"({name}.png)" in board
        assert f"\n{name},smoke," in table
    assert json.loads((finished.root / "figures" / f"{notebook.names()[0]}.json").read_text())["scale"] == "smoke"
