"""A fingerprint changes with the code of a class and of what it calls, and with nothing else."""

import textwrap
from typing import Any

import pytest

from reslab.fingerprint import fingerprint

CODE = """
import math
from reslab.residuals import Connection, ConnectionOptions, Ends

FACTOR = 2.0
TABLE = (1, 2)

def helper(u):
    return inner(u) * FACTOR + TABLE[0]

def inner(u):
    return [math.sqrt(part) for part in u]

class MyEnds(Ends):
    def finish(self, stream):
        return stream + 1

class Base(Connection):
    share = 0.5
    def weigh(self, update):
        return self.share * helper(update)

class Mine(Base):
    \"\"\"What it does.\"\"\"
    ends = MyEnds
    class Options(ConnectionOptions):
        start: float = 0.1
    def write(self, stream, update, sign=1):
        \"\"\"How it writes.\"\"\"
        return stream + self.weigh(update)

UNUSED = 3
"""


def of(code: str) -> str:
    space: dict[str, Any] = {"__name__": "notebook"}
    exec(textwrap.dedent(code), space)
    return fingerprint(space["Mine"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 2.0", "FACTOR = 3.0"),
        ("TABLE = (1, 2)", "TABLE = (2, 2)"),
        ("inner(u) * FACTOR", "inner(u) / FACTOR"),
        ("math.sqrt(part)", "math.exp(part)"),
        ("return stream + 1", "return stream + 2"),
        ("share = 0.5", "share = 0.25"),
        ("self.share * helper", "self.share + helper"),
        ("start: float = 0.1", "start: float = 0.2"),
        ("start: float", "begin: float"),
        ("return stream + self.weigh", "return stream - self.weigh"),
        ("sign=1", "sign=2"),
    ],
)
def test_it_changes_with_what_is_done(old: str, new: str) -> None:
    assert old in CODE
    assert of(CODE.replace(old, new)) != of(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("What it does.", "Something."),
        ("How it writes.", "Words."),
        ("UNUSED = 3", "UNUSED = 4"),
        ("FACTOR = 2.0", "# a comment\n\nFACTOR = 2.0  # another"),
    ],
)
def test_it_does_not_change_with_what_is_said(old: str, new: str) -> None:
    assert old in CODE
    assert of(CODE.replace(old, new)) == of(CODE)


def test_it_is_found_without_a_source_file() -> None:
    assert "notebook.Mine.write" in of(CODE)
