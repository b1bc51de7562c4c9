"""The form of a contribution as a JSON Schema, and a checker for the part of that language which it uses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.records import FORMAT as RECORD_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FORMAT", "SCHEMA", "STATEMENT", "violations"]

FORMAT = "rocm-sd-contribution/1"
STATEMENT = (
    "These figures are my own measurements, made with the command that is given here. "
    "I publish them under CC0 1.0: anyone may use them for anything."
)

_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_COUNT = {"type": "integer", "minimum": 1}
_MAYBE_NUMBER = {"type": ["number", "null"]}
_MAYBE_COUNT = {"type": ["integer", "null"]}
_MAYBE_TEXT = {"type": ["string", "null"]}
_TEXTS = {"type": "array", "items": _TEXT}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


_MACHINE = _object(
    {
        "device": _TEXT,
        "arch": {"type": "string", "pattern": "^(gfx[0-9a-f]+|sm_[0-9]+|cpu)$"},
        "compute_units": _MAYBE_COUNT,
        "memory_mib": _MAYBE_COUNT,
        "driver": _MAYBE_TEXT,
        "system": _TEXT,
        "versions": {"type": "object", "additionalProperties": _TEXT},
    }
)
_WORKLOAD = _object(
    {
        "name": _TEXT,
        "model": _TEXT,
        "weights": _TEXT,
        "height": _COUNT,
        "width": _COUNT,
        "steps": _COUNT,
        "scheduler": _TEXT,
        "guidance": _NUMBER,
        "dtype": _TEXT,
    },
    {"flops": _MAYBE_NUMBER},
)
_FIGURES = (
    "first_picture_s", "warm_up_s", "first_run_mib", "second_run_mib", "power_watt", "clock_mhz", "temperature_c",
    "floor_ms", "card_ms", "error", "stock_error",
)  # fmt: skip
_MEASUREMENT = _object(
    {
        "engine": _TEXT,
        "version": _TEXT,
        "provider": _TEXT,
        "batch": _COUNT,
        "ms": {"type": "array", "items": _POSITIVE},
        "steps": _COUNT,
    },
    {
        **dict.fromkeys(_FIGURES, _MAYBE_NUMBER),
        "left_out": _MAYBE_TEXT,
        "notes": _TEXTS,
    },
)
_COMPARISON = _object(
    {
        "engine": _TEXT,
        "against": _TEXT,
        "batch": _COUNT,
        "ratio": _POSITIVE,
        "low": _POSITIVE,
        "high": _POSITIVE,
        "verdict": {"enum": ["faster", "slower", "no difference"]},
    }
)
_RECORD = _object(
    {
        "format": {"enum": [RECORD_FORMAT]},
        "kind": {"enum": ["engines", "ablation", "op"]},
        "workload": _WORKLOAD,
        "machine": _MACHINE,
        "command": _TEXT,
        "when": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}"},
        "measurements": {"type": "array", "items": _MEASUREMENT, "minItems": 1},
    },
    {
        "comparisons": {"type": "array", "items": _COMPARISON},
        "complete": {"type": "boolean"},
        "notes": _TEXTS,
        "op_cases": _TEXTS,
        "extra": {"type": "object"},
    },
)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A contribution to the rocm-sd performance database",
    **_object(
        {"format": {"enum": [FORMAT]}, "statement": {"enum": [STATEMENT]}, "record": _RECORD},
        {"sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}},
    ),
}

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def _is(value: Any, name: str) -> bool:
    # JSON's true is Python's 1, and no number here.
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _TYPES[name])


def violations(value: Any, schema: dict[str, Any], where: str = "the file") -> tuple[str, ...]:
    """What of `value` is not as `schema` says, in words. Knows the words of JSON Schema that SCHEMA uses."""
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        return (f"{where} should be {' or '.join(types)}",)
    found = list(_of_value(value, schema, where))
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{where} has fewer than {schema['minItems']} entries")
        for number, entry in enumerate(value):
            found += violations(entry, schema.get("items", {}), f"{where}[{number}]")
    if isinstance(value, dict):
        found += _of_object(value, schema, where)
    return tuple(found)


def _of_value(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} should be one of {schema['enum']}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where} is {value!r}, which is not of the form {schema['pattern']}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield f"{where} is below {schema['minimum']}"
        if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
            yield f"{where} is not above {schema['exclusiveMinimum']}"


def _of_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    found = [f"{where} has no {name}" for name in schema.get("required", ()) if name not in value]
    for name, entry in value.items():
        inside = name if where == "the file" else f"{where}.{name}"
        if name in known:
            found += violations(entry, known[name], inside)
        elif others is False:
            found.append(f"{inside} is not known")
        elif isinstance(others, dict):
            found += violations(entry, others, inside)
    return found
