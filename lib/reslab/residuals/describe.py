"""Every kind of connection and its options, in words: from the docstrings, for the documentation."""

import inspect
import re

from pydantic_core import PydanticUndefined

from reslab.residuals.connection import CONNECTIONS

__all__ = ["describe"]

HEAD = """# Every kind of residual connection

x is the stream, v the update, l the number of the sublayer from 1, d the width. Use `ConnectionConfig("kind",
option=value)`, or the same as a mapping in params.yaml. Made from the docstrings.
"""


def describe() -> str:
    """All kinds of this folder as Markdown: what each does, its source, its options with defaults."""
    own = sorted(name for name, kind in CONNECTIONS.items() if kind.__module__.startswith("reslab.residuals."))
    return "\n".join([HEAD, *(_section(name) for name in own)])


def _section(name: str) -> str:
    kind = CONNECTIONS[name]
    text = inspect.cleandoc(kind.__doc__ or "")
    lines = [f"## `{name}`", "", *text.splitlines(), ""]
    for option, field in kind.Options.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"default `{field.default}`"
        meaning = re.sub(r"\s+", " ", field.description or "").strip()
        lines.append(f"- **`{option}`** ({_type(field.annotation)}, {default}): {meaning}")
    return "\n".join([*lines, ""]) if kind.Options.model_fields else "\n".join(lines)


def _type(annotation: object) -> str:
    text = getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation)
    return str(text).replace("typing.Literal", "one of ").replace("[", "").replace("]", "").replace("|", "or")


if __name__ == "__main__":
    print(describe(), end="")  # noqa: T201
