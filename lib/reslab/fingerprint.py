"""What a class of a user's own does, as text that changes with its code: for the names of runs.

From the compiled code rather than the source, which Python does not find for a class in a notebook. Comments and
layout do not count; another version of Python gives another text.
"""

from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["fingerprint"]

PACKAGES = ("reslab", "torch", "pydantic", "typing", "builtins", "abc", "numpy")
"""What comes from these is known by the package's own hash and the versions of libraries."""

PLAIN = (int, float, complex, str, bytes, bool, type(None))


def fingerprint(kind: type) -> str:
    """The code of `kind`, of its bases and of all functions, classes and constants of the user's that it names.

    Follows names of modules, not values that are made at run time.
    """
    found: dict[str, str] = {}
    _class(kind, found)
    return "\n".join(f"{name} {text}" for name, text in sorted(found.items()))


def _is_own(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "builtins").split(".")[0] not in PACKAGES


def _class(kind: type, found: dict[str, str]) -> None:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in found or not _is_own(kind):
        return
    found[name] = " ".join(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    for attribute, value in sorted(vars(kind).items()):
        if not attribute.startswith("__") or isinstance(value, FunctionType):
            _value(f"{name}.{attribute}", value, found)
    for field, info in getattr(kind, "model_fields", {}).items():  # pydantic keeps them apart
        found[f"{name}.{field}"] = repr(info)
    for base in kind.__mro__[1:]:
        _class(base, found)


def _value(name: str, value: Any, found: dict[str, str]) -> None:
    """Take in one attribute or global."""
    if name in found:
        return
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, type):
        _class(value, found)
    elif isinstance(value, FunctionType):
        if _is_own(value):
            _function(name, value, found)
    elif isinstance(value, PLAIN) or (
        isinstance(value, tuple | list) and all(isinstance(part, PLAIN) for part in value)
    ):
        found[name] = repr(value)


def _function(name: str, function: FunctionType, found: dict[str, str]) -> None:
    found[name] = f"{_code(function.__code__)} {function.__defaults__!r} {function.__kwdefaults__!r}"
    inner = [function.__code__]
    while inner:
        code = inner.pop()
        inner += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for used in code.co_names:
            _global(used, function.__globals__, code, found)
    for cell in function.__closure__ or ():
        _value(f"{name} closes over {len(found)}", cell.cell_contents, found)


def _global(used: str, space: dict[str, Any], code: CodeType, found: dict[str, str]) -> None:
    """A global that a function names; of a module of the user's, what the function may take from it."""
    if used not in space:
        return
    value = space[used]
    if isinstance(value, ModuleType):
        if value.__name__.split(".")[0] not in PACKAGES:
            for attribute in code.co_names:
                if attribute in vars(value):
                    _value(f"{value.__name__}.{attribute}", vars(value)[attribute], found)
    else:
        _value(f"{space.get('__name__')}:{used}", value, found)


def _code(code: CodeType) -> str:
    """Instructions and constants, without the docstring and the place in the file."""
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    if isinstance(code.co_consts[0] if code.co_consts else None, str) and code.co_name != "<lambda>":
        constants[0] = ""  # a docstring, where there is one
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"
