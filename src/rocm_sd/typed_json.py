"""Dataclasses from JSON that anyone may have written: read strictly, and all that is wrong with it said in words.

    read(Machine, values)          a Machine, or Misfit: "arch should be string; the file has no driver"
    schema(Machine, RULES)         the same form as a JSON Schema, for other programs

A dataclass says what its fields hold: text, numbers, lists as `tuple[X, ...]`, objects as `dict[str, X]` or as another
dataclass. `rules` say more, in the words of JSON Schema by "Class.field": {"Machine.arch": {"pattern": "^gfx"}}.
Patterns are read as there: a digit is one of ten, and the end is the end of the text.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from rocm_sd.plain_json import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Misfit", "Rules", "is_number", "read", "schema", "violations"]

Rules = Mapping[str, Mapping[str, Any]]
_BEYOND = 2**1023  # the largest power of two that a float holds
Value = TypeVar("Value")

_NAMES = {str: "string", float: "number", int: "integer", bool: "boolean", type(None): "null"}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "boolean": bool,
    "null": type(None),
}  # fmt: skip


# A file of a million wrong entries is described by the first of them.
_MOST_SAID = 8


class Misfit(ValueError):
    """Values that are not those of the dataclass; `problems` are sentences."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        more = (f"and {len(problems) - _MOST_SAID} more",) if len(problems) > _MOST_SAID else ()
        super().__init__("; ".join((*problems[:_MOST_SAID], *more)))
        self.problems = problems


def read(kind: type[Value], values: Any, rules: Rules | None = None, *, top: str = "the file") -> Value:
    """What `dataclasses.asdict` gave and JSON carried, as `kind` again; raises Misfit, which calls the whole `top`."""
    wrong = violations(values, _form(kind, rules), top=top)
    if wrong:
        raise Misfit(wrong)
    made: Value = _built(kind, values)
    return made


def is_number(value: object) -> bool:
    """JSON as Python reads it has NaN and Infinity, and True is an int: none of them is a measurement."""
    if isinstance(value, bool):
        return False
    # Of an integer beyond all floats `isfinite` asks for a float.
    return abs(value) < _BEYOND if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)


def schema(kind: Any, rules: Rules | None = None) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _schema_of_dataclass(kind, rules or {})
    if origin in {Union, types.UnionType}:
        return {"type": [_NAMES[one] for one in inner]}
    if origin is tuple:
        return {"type": "array", "items": schema(inner[0], rules)}
    if origin in {dict, Mapping}:
        values = schema(inner[1], rules)
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    return {} if kind is Any else {"type": _NAMES[kind]}


# Finding out what the fields of a dataclass are takes 300 us: once is enough.
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
_forms: dict[tuple[Any, int], tuple[dict[str, Any], Rules | None]] = {}


def _form(kind: Any, rules: Rules | None) -> dict[str, Any]:
    """The schema of `kind`, made once for each set of rules, which is kept with it: its id stays its own."""
    key = (kind, id(rules))
    if key not in _forms:
        _forms[key] = schema(kind, rules), rules
    return _forms[key][0]


def _schema_of_dataclass(kind: Any, rules: Rules) -> dict[str, Any]:
    hints = _hints(kind)
    return {
        "type": "object",
        "properties": {
            each.name: schema(hints[each.name], rules) | dict(rules.get(f"{kind.__name__}.{each.name}", {}))
            for each in fields(kind)
        },
        "required": [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING],
        "additionalProperties": False,
    }


def _built(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _built(hints[name], each) for name, each in value.items()})  # type: ignore[operator]
    return tuple(_built(inner[0], each) for each in value) if origin is tuple else value


def violations(value: Any, form: Mapping[str, Any], place: str = "", *, top: str = "the file") -> tuple[str, ...]:
    """What of `value` is not as the JSON Schema `form` says. Knows the words of that language that `schema` writes."""
    where = place or top
    names = form.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(_is(value, name) for name in names):
        return (f"{where} should be {' or '.join(names)}",)
    found = list(_of_value(value, form, where))
    if isinstance(value, list):
        if len(value) < form.get("minItems", 0):
            found.append(f"{where} has fewer than {form['minItems']} entries")
        for number, entry in enumerate(value):
            found += violations(entry, form.get("items", {}), f"{place}[{number}]")
    if isinstance(value, dict):
        found += [f"{where} has no {name}" for name in form.get("required", ()) if name not in value]
        found += _of_entries(value, form, f"{place}." if place else "")
    return tuple(found)


def _is(value: Any, name: str) -> bool:
    # JSON's true is Python's 1, and no number here.
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _TYPES[name]) and (name not in {"number", "integer"} or is_number(value))


def _of_value(value: Any, form: Mapping[str, Any], where: str) -> Iterator[str]:
    if "enum" in form and value not in form["enum"]:
        yield f"{where} should be one of {form['enum']}"
    if isinstance(value, str):
        if len(value) > form.get("maxLength", len(value)):
            yield f"{where} is longer than {form['maxLength']} characters"
        elif "pattern" in form and not _compiled(form["pattern"]).search(value):
            yield f"{where} is {shortened(repr(value))}, which is not of the form {form['pattern']}"
    if isinstance(value, float) and not math.isfinite(value):
        # Where anything may stand: where a number should, its type has been named.
        yield f"{where} is {value}, which is no number"
    elif is_number(value):
        if value > form.get("maximum", value):
            yield f"{where} is above {form['maximum']}"
        if "exclusiveMinimum" in form and value <= form["exclusiveMinimum"]:
            yield f"{where} is not above {form['exclusiveMinimum']}"
        elif value < form.get("minimum", value):
            yield f"{where} is below {form['minimum']}"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Python's $ is also before a last line break."""
    whole = rf"{pattern[:-1]}\Z" if pattern.endswith("$") and not pattern.endswith(r"\$") else pattern
    return re.compile(whole, re.ASCII)


def _of_entries(value: dict[str, Any], form: Mapping[str, Any], before: str) -> Iterator[str]:
    known, others = form.get("properties", {}), form.get("additionalProperties", True)
    for name, entry in value.items():
        place = f"{before}{shortened(name)}"
        if "propertyNames" in form:
            yield from violations(name, form["propertyNames"], f"the name {place}")
        if name in known:
            yield from violations(entry, known[name], place)
        elif others is False:
            yield f"{place} is not known"
        else:
            yield from violations(entry, others if isinstance(others, dict) else {}, place)
