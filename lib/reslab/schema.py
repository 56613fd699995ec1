"""Strict settings: every model of a settings file derives from `Settings`; bad input becomes one clear line."""

import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = ["Settings", "UserError", "did_you_mean", "validate"]


class UserError(ValueError):
    """The user's input is wrong. The message says what, where and what to do; the exit code is 2.

    A ValueError, so that one raised while settings are validated is reported with the place of the fault.
    """


class Settings(BaseModel):
    """Frozen settings: exact types (1 is not "1", 0.5 is no integer), unknown keys refused, by a UserError."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise UserError(_lines(type(self), error, type(self).__name__)) from None

    # so that settings inside others are validated without it, and a fault there keeps its path
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


S = TypeVar("S", bound=BaseModel)


def _nearest(name: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """The name spelt almost like `name`; else one that it begins with (`pre` of `prenorm`), or somewhat like it."""
    known = sorted(known)
    begun = [each for each in known if name.startswith(each)]
    close, alike = (difflib.get_close_matches(name, known, n=1, cutoff=cutoff) for cutoff in (0.8, least))
    return next(iter([*close, *sorted(begun, key=len, reverse=True), *alike]), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint that names the nearest valid name, or lists the valid ones."""
    known = sorted(known)
    nearest = _nearest(name, known)
    return f"did you mean '{nearest}'?" if nearest else f"valid are: {', '.join(known) or 'none'}"


def validate(model: type[S], data: Any, where: str) -> S:
    """`data` as a `model`, or a UserError with one line for each fault, each beginning with `where`."""
    try:
        # Settings hold tuples, which are hashable; YAML and JSON know only lists.
        return model.model_validate(_tuples(data))
    except ValidationError as error:
        raise UserError(_lines(model, error, where)) from None


def _lines(model: type[BaseModel], error: ValidationError, where: str) -> str:
    """One line for each fault, each beginning with `where`."""
    faults: list[Any] = error.errors()
    return "\n".join(f"{where}: {_one_line(model, fault)}" for fault in _without_echoes(model, faults))


def _without_echoes(model: type[BaseModel], faults: list[Any]) -> list[Any]:
    """The faults, less what others bring about: a missing name whose misspelling is reported as unknown, and a list
    that is called too short as its faulty items were not counted."""
    unknown = [fault["loc"] for fault in faults if fault["type"] == "extra_forbidden"]
    meant = [(*loc[:-1], _nearest(str(loc[-1]), _fields_at(model, list(loc[:-1])))) for loc in unknown]
    named = [fault for fault in faults if fault["type"] != "missing" or fault["loc"] not in meant]
    return [fault for fault in named if fault["type"] != "too_short" or _is_short(fault)]


def _is_short(fault: Any) -> bool:
    return len(fault["input"]) < fault["ctx"]["min_length"]


def _tuples(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _tuples(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return tuple(_tuples(value) for value in data)
    return data


def _one_line(model: type[BaseModel], fault: Any) -> str:
    path = list(fault["loc"])
    name = ".".join(str(part) for part in path) or "top level"
    if fault["type"] == "extra_forbidden":
        return f"{name}: unknown parameter; {did_you_mean(str(path[-1]), _fields_at(model, path[:-1]))}"
    if fault["type"] == "missing":
        return f"{name}: missing; add it (see params.yaml or conf/ for an example)"
    message = fault["msg"].removeprefix("Value error, ")
    got = "" if fault["type"] == "value_error" else f", got {fault['input']!r}"
    return f"{name}: {message[:1].lower()}{message[1:]}{got}{_hint(fault)}"


def _hint(fault: Any) -> str:
    """The allowed value that is spelt most like the one given, where the values are words."""
    if fault["type"] != "literal_error":
        return ""
    words = re.findall(r"'(.*?)'", fault["ctx"]["expected"])
    nearest = _nearest(str(fault["input"]), words, least=0.7)  # 'gpu' is not meant to be 'cpu'
    return f"; did you mean '{nearest}'?" if nearest else ""


def _fields_at(model: type[BaseModel], path: list[Any]) -> Iterable[str]:
    """The field names of the settings found at `path` below `model`."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(str(part))
        found = _settings_in(field.annotation) if field else None
        if found is None:
            return []
        model = found
    return model.model_fields


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _settings_in(inner)) is not None:
            return found
    return None
