"""Notebook files: the clean form that the pipeline depends on, and the parameters cell."""

import ast
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from reslab import paths
from reslab.files import write_atomic
from reslab.schema import UserError, did_you_mean

__all__ = [
    "CLEAN",
    "check_parameters",
    "clean",
    "names",
    "normalise_executed",
    "read",
    "source",
    "write_clean",
]


def _nbformat() -> Any:
    """The module nbformat, without the three seconds in which jsonschema has a grammar of IRIs built.

    No notebook has a field of that format, and jsonschema does without the grammar where it is not installed.
    """
    grammar = "rfc3987_syntax"
    if grammar in sys.modules:
        return import_module("nbformat")
    sys.modules[grammar] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        return import_module("nbformat")
    finally:
        del sys.modules[grammar]


nbformat = _nbformat()

CLEAN = paths.BUILD / "clean"

KERNELSPEC = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def read(path: Path) -> Any:
    """The notebook at `path`, as nbformat 4.5; a UserError when there is none or it is no such notebook.

    Cells without an id, or with one that is taken, get one by their place, so that reading is repeatable.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["nbformat"] != 4:
            raise ValueError(f"its format is {raw['nbformat']}, not 4; open and save it in JupyterLab")
        seen: set[str] = set()
        for index, cell in enumerate(raw["cells"]):
            if cell.get("id") in seen | {None}:
                cell["id"] = f"cell-{index}"
            seen.add(cell["id"])
        raw["nbformat_minor"] = 5
        notebook = nbformat.reads(json.dumps(raw), as_version=4)
        nbformat.validate(notebook)
    except OSError as error:
        raise UserError(f"{path}: cannot read the notebook ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise UserError(f"{path}: not a notebook ({' '.join(str(error).split())[:120]})") from None
    return notebook


def names() -> list[str]:
    """The claims' notebooks, in order: those whose name begins with a digit."""
    return sorted(path.stem for path in paths.NOTEBOOKS.glob("[0-9]*.ipynb"))


def source(name: str) -> Path:
    """Where notebook `name` is; a UserError when there is none of that name."""
    if name not in names():
        raise UserError(f"no notebook '{name}'; {did_you_mean(name, names())}")
    return paths.NOTEBOOKS / f"{name}.ipynb"


def write_clean(name: str) -> Path:
    """Write the clean form of notebooks/<name>.ipynb to build/clean; returns where."""
    target = CLEAN / f"{name}.ipynb"
    write_atomic(target, clean(read(source(name))))
    return target


def clean(notebook: Any) -> bytes:
    """The notebook as its author wrote it: sources and tags; no outputs, counts, timings, nor the last user's kernel.

    Saving in JupyterLab changes only what is left out here, so that the heavy stage does not run again.
    """
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()


def check_parameters(notebook: Any, path: Path, injected: dict[str, Any]) -> None:
    """A UserError unless one cell is tagged `parameters` and assigns every name in `injected`."""
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise UserError(
            f"{path}: {len(tagged)} cells are tagged 'parameters', and there must be one; "
            "tag it in JupyterLab under Property Inspector, Cell Tags"
        )
    try:
        statements = ast.parse(tagged[0].source).body
    except SyntaxError as error:
        raise UserError(f"{path}: its parameters cell is not plain Python (line {error.lineno}: {error.msg})") from None
    targets = [target for s in statements if isinstance(s, ast.Assign) for target in s.targets]
    targets += [s.target for s in statements if isinstance(s, ast.AnnAssign)]
    known = {target.id for target in targets if isinstance(target, ast.Name)}
    for name in injected:
        if name not in known:
            raise UserError(f"{path}: its parameters cell has no '{name}'; {did_you_mean(name, known)}")


def normalise_executed(notebook: Any) -> bytes:
    """An executed notebook without what differs from run to run: timings, random ids, the kernel's name."""
    for index, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if tags and "injected-parameters" in tags:
            cell.id = f"injected-{index}"
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()
