"""What the documents and type checkers know of the ops, from the ops themselves: `docs_tables.py` writes it."""

from __future__ import annotations

import sys
import textwrap
from importlib import import_module
from typing import Any

from rocm_sd.ops import OPS

__all__ = ["STUB", "api", "how_each_works", "stub"]

STUB = "src/rocm_sd/ops/__init__.pyi"
_WIDTH = 120


def _exports() -> dict[str, list[str]]:
    """What each op's package exports, by package."""
    return {f"rocm_sd.ops.{op}": sorted(import_module(f"rocm_sd.ops.{op}").__all__) for op in sorted(OPS)}


def stub() -> str:
    """`rocm_sd.ops` finds its ops when it is imported; this is what it finds, for who does not import it."""
    exported = _exports() | {"rocm_sd.ops.registry": ["OPS"]}
    imports = [f"from {package} import {', '.join(names)}" for package, names in sorted(exported.items())]
    names = ["OPS", *sorted(name for names in _exports().values() for name in names)]
    head = "# Written by tools/docs_tables.py from what the ops' packages export: not to be edited."
    return "\n".join([head, *imports, "", "__all__ = [", *(f'    "{name}",' for name in names), "]"]) + "\n"


def api() -> str:
    """A directive of mkdocstrings for each public function: those of the ops' own names first."""
    exported = [(package, name) for package, names in _exports().items() for name in names]
    own = [each for each in exported if each[1] in OPS]
    others = [each for each in exported if each[1] not in OPS]
    return "\n\n".join(f"::: {_defined(*each)}" for each in (*own, *others)) + "\n"


def _defined(package: str, name: str) -> str:
    found: Any = getattr(sys.modules[package], name)
    return f"{found.__module__}.{name}"


def how_each_works() -> str:
    """The second part of the docstring of each `op.py`, which begins with "It"."""
    paragraphs = []
    for op in sorted(OPS):
        _, _, how = (import_module(f"rocm_sd.ops.{op}.op").__doc__ or "").partition("\n\n")
        words = " ".join(how.split()).removeprefix("It ")
        paragraphs.append(textwrap.fill(f"**`{op}`** {words}", _WIDTH, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(paragraphs) + "\n"
