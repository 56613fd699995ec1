"""Notebook files: what the heavy stage depends on, and the parameters cell."""

import ast
import copy
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from reslab import notebook, paths
from reslab.schema import UserError

COMMITTED = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
INJECTED = {"scale": "smoke", "changes": {}, "figures": "build"}


def _bare() -> Any:
    """A notebook as its author wrote it, in clean form."""
    cells = [
        v4.new_markdown_cell("# Title", id="title"),
        v4.new_code_cell(
            "scale = 'smoke'\nchanges = {}\nfigures = None", id="params", metadata={"tags": ["parameters"]}
        ),
        v4.new_code_cell("print(scale)", id="body"),
    ]
    return v4.new_notebook(cells=cells, metadata={"kernelspec": notebook.KERNELSPEC})


def _used() -> Any:
    """The same notebook as JupyterLab saves it after a run in somebody's conda environment."""
    used = copy.deepcopy(_bare())
    used.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "name": "conda-env-mine-py",
                "display_name": "Python [conda env:mine]",
                "language": "python",
            },
            "language_info": {"name": "python", "version": "3.12.1", "file_extension": ".py"},
            "toc-autonumbering": True,
        }
    )
    for cell in used.cells:
        cell.metadata["collapsed"] = True
    body = used.cells[2]
    body.execution_count = 7
    body.outputs = [v4.new_output("stream", text="smoke\n"), v4.new_output("execute_result", execution_count=7)]
    body.metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    return used


def _write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else nbformat.writes(content))
    return path


# --- clean ----------------------------------------------------------------------------------------


def test_clean_leaves_out_what_running_and_saving_add() -> None:
    cleaned = json.loads(notebook.clean(_used()))
    assert [cell["id"] for cell in cleaned["cells"]] == ["title", "params", "body"]
    assert [cell["metadata"] for cell in cleaned["cells"]] == [{}, {"tags": ["parameters"]}, {}]
    assert [cell.get("outputs") for cell in cleaned["cells"]] == [None, [], []]
    assert [cell.get("execution_count") for cell in cleaned["cells"]] == [None, None, None]
    assert "".join(cleaned["cells"][2]["source"]) == "print(scale)"
    assert cleaned["metadata"]["kernelspec"]["name"] == "python3"
    assert "conda" not in json.dumps(cleaned)


def test_clean_is_the_same_before_and_after_use() -> None:
    assert notebook.clean(_used()) == notebook.clean(_bare())


def test_clean_keeps_a_change_of_source_tags_or_order() -> None:
    cleaned = notebook.clean(_bare())
    changed, tagged, moved = _bare(), _bare(), _bare()
    changed.cells[2].source = "print( scale )"
    tagged.cells[2].metadata["tags"] = ["nbval-skip"]
    moved.cells.reverse()
    for other in (changed, tagged, moved):
        assert notebook.clean(other) != cleaned


def test_clean_is_idempotent(tmp_path: Path) -> None:
    once = notebook.clean(_used())
    path = _write(tmp_path / "a.ipynb", once.decode())
    assert notebook.clean(notebook.read(path)) == once
    assert once.endswith(b"}\n")


@pytest.mark.filterwarnings("ignore::nbformat.warnings.MissingIDFieldWarning")
@pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId")
@pytest.mark.parametrize("fault", ["no ids", "no ids in the old format", "the same id twice"])
def test_clean_of_one_file_is_always_the_same(tmp_path: Path, fault: str) -> None:
    """Where cells have no ids of their own (old notebooks, some editors), or share one, none may be drawn at random."""
    content = json.loads(nbformat.writes(_bare()))
    for cell in content["cells"]:
        if fault == "the same id twice":
            cell["id"] = "same"
        else:
            del cell["id"]
    if fault == "no ids in the old format":
        content["nbformat_minor"] = 4
    path = _write(tmp_path / "a.ipynb", json.dumps(content))
    first = notebook.clean(notebook.read(path))
    assert notebook.clean(notebook.read(path)) == first
    ids = [cell["id"] for cell in json.loads(first)["cells"]]
    assert len(set(ids)) == len(ids) == 3


# --- the committed notebooks ----------------------------------------------------------------------


def test_there_are_notebooks_and_names_lists_them() -> None:
    assert COMMITTED
    assert notebook.names() == [path.stem for path in COMMITTED if path.stem[0].isdigit()]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_notebook_is_clean(path: Path) -> None:
    assert path.read_bytes() == notebook.clean(notebook.read(path)), f"run: reslab clean {path.stem}"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_notebook_is_readable(path: Path) -> None:
    """Short cells, one parameters cell, and code that is Python."""
    read = notebook.read(path)
    code = [cell for cell in read.cells if cell.cell_type == "code"]
    assert code
    for number, cell in enumerate(code, 1):
        lines = cell.source.splitlines()
        assert len(lines) <= 15, f"code cell {number} has {len(lines)} lines; move what it does into lib/reslab"
        ast.parse(cell.source)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in read.cells) == 1
    notebook.check_parameters(read, path, INJECTED)
    assert read.cells[0].cell_type == "markdown"


# --- the parameters cell --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 2])
def test_one_parameters_cell_is_needed(number: int) -> None:
    made = _bare()
    for cell in made.cells[1:]:
        cell.metadata["tags"] = ["parameters"] if number else []
    with pytest.raises(UserError) as caught:
        notebook.check_parameters(made, Path("notebooks/01_x.ipynb"), INJECTED)
    message = str(caught.value)
    assert message.startswith("notebooks/01_x.ipynb: ")
    assert f"{number} cells are tagged 'parameters'" in message
    assert len(message.splitlines()) == 1


def test_unknown_parameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        notebook.check_parameters(_bare(), Path("01_x.ipynb"), {**INJECTED, "figure": "x"})
    assert "'figure'" in str(caught.value)
    assert "did you mean 'figures'?" in str(caught.value)
    assert str(caught.value).startswith("01_x.ipynb: ")


def test_a_name_that_is_only_read_is_no_parameter() -> None:
    made = _bare()
    made.cells[1].source = "scale = 'smoke'\nchanges = {}\nfigure = None\nprint(figure)"
    with pytest.raises(UserError, match="no 'figures'; did you mean 'figure'"):
        notebook.check_parameters(made, Path("01_x.ipynb"), INJECTED)


def test_annotated_parameters_count() -> None:
    """Papermill knows `scale: str = "smoke"` too."""
    made = _bare()
    made.cells[1].source = "scale: str = 'smoke'\nchanges: dict = {}\nfigures: str | None = None"
    notebook.check_parameters(made, Path("01_x.ipynb"), INJECTED)


@pytest.mark.parametrize("source", ["%matplotlib inline\nscale = 1", "scale = = 1"])
def test_parameters_cell_that_is_no_python_is_the_users_error(source: str) -> None:
    made = _bare()
    made.cells[1].source = source
    with pytest.raises(UserError, match=r"^01_x\.ipynb: .*parameters"):
        notebook.check_parameters(made, Path("01_x.ipynb"), INJECTED)


# --- files that are no notebooks ------------------------------------------------------------------

NOT_NOTEBOOKS = {
    "empty": "",
    "text": "# %%\nprint(1)\n",
    "list": "[]",
    "other json": "{}",
    "no cells": json.dumps({"metadata": {}, "nbformat": 4, "nbformat_minor": 5}),
    "merge conflict": "<<<<<<< HEAD\n{}\n=======\n{}\n>>>>>>> theirs\n",
    "cell without metadata": json.dumps(
        {"cells": [{"cell_type": "raw", "id": "a", "source": ""}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    ),
    "number for a cell": json.dumps({"cells": [3], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}),
    "version from the future": json.dumps({"cells": [], "metadata": {}, "nbformat": 99, "nbformat_minor": 0}),
}


@pytest.mark.parametrize("content", NOT_NOTEBOOKS.values(), ids=NOT_NOTEBOOKS.keys())
def test_not_a_notebook(tmp_path: Path, content: str) -> None:
    path = _write(tmp_path / "01_x.ipynb", content)
    with pytest.raises(UserError) as caught:
        notebook.clean(notebook.read(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: not a notebook")
    assert len(message.splitlines()) == 1


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "01_x.ipynb"
    with pytest.raises(UserError, match="No such file") as caught:
        notebook.read(path)
    assert str(path) in str(caught.value)


def test_unknown_name_is_refused_with_the_nearest() -> None:
    name = notebook.names()[0]
    with pytest.raises(UserError, match=f"did you mean '{name}'"):
        notebook.source(f"{name}s")
    assert notebook.source(name) == paths.NOTEBOOKS / f"{name}.ipynb"


# --- executed notebooks ---------------------------------------------------------------------------


def _executed(stamp: str) -> Any:
    """The notebook as papermill leaves it; `stamp` stands for what differs from run to run."""
    made = _used()
    made.cells.insert(2, v4.new_code_cell("scale = 'cpu'", metadata={"tags": ["injected-parameters"]}))
    made.cells[2].id = f"random-{stamp}"
    for cell in made.cells:
        cell.metadata["papermill"] = {"start_time": stamp, "end_time": stamp, "duration": 0.1, "status": "completed"}
        cell.metadata["execution"] = {"iopub.status.busy": stamp}
    made.metadata["papermill"] = {"start_time": stamp, "output_path": f"/tmp/{stamp}", "version": "2.7.0"}
    made.metadata["kernelspec"] = {"name": "reslab", "display_name": "reslab", "language": "python"}
    made.metadata["language_info"] = {"name": "python", "version": stamp}
    return made


def test_normalise_executed_leaves_nothing_that_differs_from_run_to_run() -> None:
    one, other = notebook.normalise_executed(_executed("2026-a")), notebook.normalise_executed(_executed("2027-b"))
    assert one == other
    for trace in (b"papermill", b"2026-a", b"random-", b"conda"):
        assert trace not in one


def test_normalise_executed_keeps_what_the_reader_needs() -> None:
    normalised = nbformat.reads(notebook.normalise_executed(_executed("x")).decode(), as_version=4)
    nbformat.validate(normalised)
    assert [cell.source for cell in normalised.cells][1:] == [
        "scale = 'smoke'\nchanges = {}\nfigures = None",
        "scale = 'cpu'",
        "print(scale)",
    ]
    assert [cell.metadata.get("tags") for cell in normalised.cells] == [
        None,
        ["parameters"],
        ["injected-parameters"],
        None,
    ]
    assert normalised.cells[3].outputs[0].text == "smoke\n"
    assert normalised.cells[3].execution_count == 7
    assert normalised.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in normalised.cells]
    assert len(set(ids)) == len(ids)
