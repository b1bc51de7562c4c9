"""How high each implementation stands on the proof ladder, per architecture: proofs.json, each with evidence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

__all__ = ["RUNGS", "Proof", "proofs"]

Rung = Literal["reference", "interpreted", "compiled", "emulated", "tested"]
RUNGS: tuple[Rung, ...] = ("reference", "interpreted", "compiled", "emulated", "tested")


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
    text = files("rocm_sd.verify").joinpath("proofs.json").read_text(encoding="utf-8")
    return tuple(Proof(**entry) for entry in json.loads(text))
