"""The code in README.md and docs/ runs as it stands, and prints what is said there."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from reslab import paths
from reslab.residuals import CONNECTIONS, Connection, ConnectionConfig
from reslab.residuals.describe import describe
from reslab.schema import UserError
from variants import LIBRARY, decoder, tokens

PAGE = (paths.ROOT / "docs" / "new_connection.md").read_text()
README = (paths.ROOT / "README.md").read_text()


def code(page: str) -> list[str]:
    """Its Python blocks."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def said(page: str) -> list[str]:
    """What its comments say that a line prints."""
    return re.findall(r"print\(.*\)  # (torch.Size.*|\d+ branches.*)", page)


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str]) -> Iterator[dict[str, Any]]:
    """What the page defines; its kinds are gone after the test."""
    known = dict(CONNECTIONS)
    space: dict[str, Any] = {"__name__": "page"}
    for block in code(PAGE):
        exec(compile(block, "page", "exec"), space)
    space["printed"] = capsys.readouterr().out
    yield space
    for name in CONNECTIONS.keys() - known.keys():
        del CONNECTIONS[name]


def test_every_block_of_the_page_runs_and_prints_what_it_says(page: dict[str, Any]) -> None:
    assert page["printed"].splitlines() == said(PAGE)
    assert len(said(PAGE)) == 2


def test_the_readmes_code_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "readme"}
    torch.manual_seed(0)
    for block in code(README):
        exec(compile(block, "README.md", "exec"), space)
    printed = capsys.readouterr().out.splitlines()
    assert len(said(README)) == 2
    assert set(said(README)) <= set(printed)


def test_each_block_of_the_readme_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for block in code(README):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert "trained" in capsys.readouterr().out


def test_the_page_of_connections_is_what_their_docstrings_say() -> None:
    """Where it is not: `python -m reslab.residuals.describe > docs/connections.md`."""
    known = dict(CONNECTIONS)
    assert (paths.ROOT / "docs" / "connections.md").read_text() == describe()
    options = [field for kind in known.values() for field in kind.Options.model_fields.values()]
    assert all(field.description for field in options)


def test_the_readme_lists_every_kind_and_option() -> None:
    table = README[README.index("| kind | stream") :]
    table = table[: table.index("\n\n")]
    for name, kind in ((name, CONNECTIONS[name]) for name in sorted(LIBRARY)):
        [row] = [line for line in table.splitlines() if f"`{name}`" in line.split("|")[1]]
        assert all(f"`{option}`" in row for option in kind.Options.model_fields), name


def test_the_new_kind_is_shorter_than_fifteen_lines() -> None:
    classes = [node for block in code(PAGE) for node in ast.parse(block).body if isinstance(node, ast.ClassDef)]
    kinds = [node for node in classes if node.decorator_list]
    assert len(kinds) == 2
    for node in kinds:
        assert node.end_lineno is not None
        assert node.end_lineno - node.decorator_list[0].lineno + 1 < 15


def test_the_new_kind_does_what_the_page_says(page: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="did you mean 'bias'"):
        ConnectionConfig("forgetful", bais=1.0)
    kept = decoder(ConnectionConfig("forgetful", bias=-60.0))
    torch.testing.assert_close(kept(tokens()), decoder("add")(tokens()))
    forgotten = decoder(ConnectionConfig("forgetful", bias=60.0))
    torch.testing.assert_close(forgotten(tokens()), decoder("none")(tokens()))
    assert issubclass(page["Newest"], Connection)
    assert decoder(ConnectionConfig("newest"))(tokens()).isfinite().all()
