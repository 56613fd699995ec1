"""The worked pages of docs/ run as they stand."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from reslab import paths
from reslab.residuals import CONNECTIONS, Connection, ConnectionConfig
from reslab.schema import UserError
from variants import decoder, tokens

PAGE = paths.ROOT / "docs" / "new_connection.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str]) -> Iterator[dict[str, Any]]:
    """What the page defines; its kinds are gone after the test."""
    known = dict(CONNECTIONS)
    space: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, PAGE.name, "exec"), space)
    space["printed"] = capsys.readouterr().out
    yield space
    for name in CONNECTIONS.keys() - known.keys():
        del CONNECTIONS[name]


def test_every_block_of_the_page_runs_and_prints_what_it_says(page: dict[str, Any]) -> None:
    said = re.findall(r"print\(.*#  ?(\[.*\])", PAGE.read_text())
    assert [line.removeprefix("torch.Size(").removesuffix(")") for line in page["printed"].splitlines()] == said
    assert len(said) == 2


def test_the_new_kind_is_shorter_than_fifteen_lines() -> None:
    classes = [node for block in BLOCKS for node in ast.parse(block).body if isinstance(node, ast.ClassDef)]
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
