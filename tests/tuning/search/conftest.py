"""A package of another author, as it would be installed: modules and entry points in a folder of their own."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch

from rocm_sd.ops import OPS, plugins
from rocm_sd.tuning.search.calls import Traced, argument_names, describe
from rocm_sd.tuning.search.candidates import plug_ins


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """On a CPU the tuner has what a user has there: Triton's interpreter is for other tests."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(source, groups): a module `tuner_plugin` with this source, and entry points {group: {name: value}}.

    Called again, it is the next version of the package, in a process that has seen nothing of the last.
    """
    # Of two versions within a second the second would be taken for the first, which is compiled.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def install(source: str, groups: dict[str, dict[str, str]]) -> None:
        folder = tmp_path / "site"
        information = folder / "tuner_plugin-1.0.dist-info"
        information.mkdir(parents=True, exist_ok=True)
        (folder / "tuner_plugin.py").write_text(textwrap.dedent(source))
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tuner-plugin\nVersion: 1.0\n")
        lines = []
        for group, points in groups.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
        (information / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(folder))
        forget()

    def forget() -> None:
        plugins.installed.cache_clear()
        plug_ins.cache_clear()
        sys.modules.pop("tuner_plugin", None)

    yield install
    forget()


@pytest.fixture
def geglu_call():
    """geglu_call(rows, columns): a problem of the op geglu, whose stock is two operations."""

    def make(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Traced:
        op = OPS["geglu"]
        arguments = (torch.empty(rows, 2 * columns, dtype=dtype), torch.empty(2 * columns, dtype=dtype))
        problem = op.verification.problem(*arguments)
        return Traced(describe("geglu", problem, arguments, argument_names(op.implementations[0].run)), 10)

    return make
