"""How high each implementation stands on the proof ladder, per architecture, each with evidence.

What the test suite proves of every op follows from the ops and their tuning data: `tests/ops/test_contract.py` runs
over all of them, and `test_ladder.py` and `test_hip_ladder.py` compile every kernel for every architecture that has a
config for it, and execute it on those of `EMULATED`. Runs on a card are written down by hand, in proofs.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.tuning import lookup
from rocm_sd.tuning.choice import STOCK
from rocm_sd.verify.compiler import targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.ops.registry import Op

__all__ = ["EMULATED", "RUNGS", "Proof", "proofs", "recorded"]

Rung = Literal["reference", "interpreted", "compiled", "emulated", "tested"]
RUNGS: tuple[Rung, ...] = ("reference", "interpreted", "compiled", "emulated", "tested")

# One of each family with its own instruction encoding and matrix layout: gfx11 and gfx12 WMMA, gfx94x MFMA.
EMULATED = ("gfx1100", "gfx1201", "gfx942")
_CONTRACT = "tests/ops/test_contract.py"


@dataclass(frozen=True)
class Proof:
    """`evidence` is the path, in the repository, of the test or of the recorded result that shows it."""

    op: str
    implementation: str
    arch: str
    rung: Rung
    evidence: str


@cache
def proofs() -> tuple[Proof, ...]:
    return (*(proof for op in OPS.values() for proof in _in_every_test_run(op)), *recorded())


@cache
def recorded() -> tuple[Proof, ...]:
    """The runs on cards."""
    text = files(__package__).joinpath("proofs.json").read_text(encoding="utf-8")
    return tuple(Proof(**entry) for entry in json.loads(text))


def _in_every_test_run(op: Op) -> Iterator[Proof]:
    if op.verification is None:
        return
    kernel = op.verification.implementation
    yield Proof(op.name, STOCK, "cpu", "reference", _CONTRACT)
    if op.verification.kernels:
        yield Proof(op.name, kernel, "cpu", "interpreted", _CONTRACT)
    for arch in targets():
        if lookup(op.name, arch.name, {}).config_for(kernel):
            yield Proof(op.name, kernel, arch.name, _rung(arch.name), "tests/verify/test_ladder.py")
    for implementation in op.implementations:
        if implementation.kernels is not None:
            for name in toolchain.TARGETS:
                yield Proof(op.name, implementation.name, name, _rung(name), "tests/verify/test_hip_ladder.py")


def _rung(arch: str) -> Rung:
    return "emulated" if arch in EMULATED else "compiled"
