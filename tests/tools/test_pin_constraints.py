"""The pins: a supported Python must never be given one that it cannot install."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pin_constraints

CONSTRAINTS = Path(pin_constraints.__file__).parent.parent / "constraints.txt"


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        ("", ' ; python_version >= "3.11"'),
        (">=3.8", ' ; python_version >= "3.11"'),
        (">=3.11.0", ' ; python_version >= "3.11"'),
        ("!=3.14.1,>=3.12", ' ; python_version >= "3.12"'),
        (">=3.11.5", ' ; python_full_version >= "3.11.5"'),
        ("<3.16,>=3.11", ' ; python_version >= "3.11"'),
    ],
)
def test_a_pin_holds_only_where_the_package_installs(requires, expected):
    assert pin_constraints.marker(requires) == expected


def test_the_committed_pins_are_whole():
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    names = {re.split("==", line)[0] for line in lines}
    assert {"triton", "tinygrad", "diffusers", "transformers", "numpy", "pytest", "ruff", "mypy"} <= names
    unpinned = [line for line in lines if not re.match(r"[a-z0-9-]+==[^+; ]+( ; python_\w+ >= \"[\d.]+\")?$", line)]
    assert unpinned == []
