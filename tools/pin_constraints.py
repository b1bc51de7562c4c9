"""Writes constraints.txt from what .venv holds, once the tests passed: .venv/bin/python tools/pin_constraints.py."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

HEADER = """\
# The versions the tests were last run with. Written by tools/pin_constraints.py.
# Many of them have left Python 3.10 behind, and the rest fit only each other: 3.10 takes what fits it, torch excepted.
# torch and triton are taken out by the set-up where a ROCm or CUDA torch brings its own.
"""
# pip belongs to the environment; rocm-sd is the project.
NOT_PINNED = {"pip", "setuptools", "rocm-sd"}
FOR_ALL_PYTHONS = {"torch"}


def marker(requires_python: str) -> str:
    """Debian 12's Python is 3.11.2, and some packages ask for 3.11.5: there the newest that fits is taken instead."""
    floors = [
        tuple(int(part) for part in floor.split(".")) for floor in re.findall(r">=\s*([\d.]+\d)", requires_python)
    ]
    floor = max([(3, 11), *floors])
    if len(floor) > 2 and floor[2]:
        return f' ; python_full_version >= "{".".join(map(str, floor))}"'
    return f' ; python_version >= "{floor[0]}.{floor[1]}"'


def pins() -> list[str]:
    lines = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name not in NOT_PINNED:
            # torch's +cpu names the build, and any build of that version will do.
            version = distribution.version.split("+")[0]
            where = "" if name in FOR_ALL_PYTHONS else marker(distribution.metadata["Requires-Python"] or "")
            lines[name] = f"{name}=={version}{where}"
    return [lines[name] for name in sorted(lines)]


def main() -> int:
    if sys.prefix == sys.base_prefix:
        print("This is not the project's environment. Type: .venv/bin/python tools/pin_constraints.py", file=sys.stderr)
        return 2
    target = Path(__file__).resolve().parent.parent / "constraints.txt"
    target.write_text(HEADER + "\n".join(pins()) + "\n", encoding="utf-8")
    print(f"{target.name}: {len(pins())} pins")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
