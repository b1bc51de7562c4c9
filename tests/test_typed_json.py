"""Dataclasses from JSON: what fits comes back as it was, and all that does not is said at once."""

from __future__ import annotations

import json
from collections.abc import Mapping  # noqa: TC003 -- read at run time, as the annotations of a dataclass are
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from rocm_sd.typed_json import Misfit, is_number, read, schema, violations


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    title: str
    weight: float | None
    parts: tuple[Part, ...]
    first: Part
    is_new: bool = False
    words: Mapping[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


WHOLE = Whole("a", 1.5, (Part("x", (1, 2)), Part("y")), Part("z"), True, {"k": "v"}, {"n": [1]})
RULES = {"Part.name": {"pattern": "^[a-z]$"}, "Whole.weight": {"exclusiveMinimum": 0}, "Whole.parts": {"minItems": 1}}


def as_json(whole: Whole) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(whole)))


def test_what_was_written_comes_back():
    assert read(Whole, as_json(WHOLE), RULES) == WHOLE
    # Fields with a default may be missing.
    assert read(Whole, {"title": "a", "weight": None, "parts": [], "first": {"name": "b"}}) == Whole(
        "a", None, (), Part("b")
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"title": 1}, "title should be string"),
        ({"weight": "1"}, "weight should be number or null"),
        ({"weight": True}, "weight should be number or null"),
        ({"weight": float("nan")}, "weight should be number or null"),
        ({"weight": 0}, "weight is not above 0"),
        ({"parts": []}, "parts has fewer than 1 entries"),
        ({"parts": {}}, "parts should be array"),
        ({"parts": [{"name": "x", "sizes": [1, 2.5]}]}, "parts[0].sizes[1] should be integer"),
        ({"parts": [{"name": "x", "sizes": [1, 10**400]}]}, "parts[0].sizes[1] should be integer"),
        ({"parts": [{}]}, "parts[0] has no name"),
        ({"first": {"name": "ZZ"}}, "first.name is 'ZZ', which is not of the form ^[a-z]$"),
        ({"is_new": 1}, "is_new should be boolean"),
        ({"words": {"k": 1}}, "words.k should be string"),
        ({"owner": "ann"}, "owner is not known"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(change, problem):
    with pytest.raises(Misfit) as error:
        read(Whole, as_json(WHOLE) | change, RULES)
    assert error.value.problems == (problem,)


def test_all_problems_are_reported_at_once():
    with pytest.raises(Misfit, match="the file has no first; title should be string; size is not known"):
        read(Whole, {"title": None, "weight": 1, "parts": [], "size": 3})
    with pytest.raises(Misfit, match="the file should be object"):
        read(Whole, [])


def test_the_schema_is_the_form_in_the_words_of_json_schema():
    form = schema(Whole, RULES)
    assert form["required"] == ["title", "weight", "parts", "first"]
    assert form["additionalProperties"] is False
    assert form["properties"]["weight"] == {"type": ["number", "null"], "exclusiveMinimum": 0}
    assert form["properties"]["words"] == {"type": "object", "additionalProperties": {"type": "string"}}
    assert form["properties"]["extra"] == {"type": "object"}
    assert form["properties"]["parts"]["items"] == form["properties"]["first"] == schema(Part, RULES)
    assert violations({"name": "a"}, schema(Part)) == ()


def test_numbers_are_finite_and_no_booleans():
    assert all(map(is_number, (0, -1, 1.5)))
    assert not any(map(is_number, (True, float("inf"), float("nan"), 10**400, "1", None)))
