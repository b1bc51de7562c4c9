"""Kernels and configs that `rocm-sd improve` has proven and a user has accepted by name: candidates as plug-ins are.

Each is one file in the folder `accepted` of the cache: what was proposed, by whom, on which architectures it was
proven, and a hash of all that. A file that was changed, that belongs to another version of the op's own kernel, or
that contains what no kernel may contain is skipped with a warning. What is left goes through the same test at first use
as every other candidate, and is chosen only where `rocm-sd tune` measured it to be the fastest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd import kernels
from rocm_sd.errors import RocmSdError
from rocm_sd.files import write_text
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.hip.toolchain import SOURCES
from rocm_sd.kernels.proposed import NotAllowed, checked, checked_hip, spliced
from rocm_sd.ops.definition import Implementation
from rocm_sd.ops.plugins import PlugIn
from rocm_sd.plain_json import read_json
from rocm_sd.tuning.choice import within
from rocm_sd.tuning.environment import kernel_hash
from rocm_sd.tuning.location import default_path
from rocm_sd.typed_json import Misfit, Rules, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import ModuleType

    import torch

    from rocm_sd.ops.candidates import OpCandidates
    from rocm_sd.tuning import Problem

__all__ = ["FORMAT", "Accepted", "accepted", "folder", "keep", "module_text", "plug_ins", "remove"]

log = logging.getLogger("rocm_sd")
FORMAT = "rocm-sd-accepted/1"
_NAME = "^[a-z0-9_]+-[0-9a-f]{8}$"
_RULES: Rules = {"Accepted.format": {"enum": [FORMAT]}, "Accepted.name": {"pattern": _NAME}}


class _Unusable(Exception):
    """Its text is the reason."""


@dataclass(frozen=True)
class Accepted:
    """`kernel`: the hash of the op's own kernel that it was proven beside; `evidence` is for people to read."""

    format: str
    name: str
    op: str
    kind: str
    architectures: tuple[str, ...]
    kernel: str
    text: str = ""
    source: str = ""
    config: dict[str, int] = field(default_factory=dict)
    bucket: str = ""
    proposer: str = ""
    why: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

    def hashed(self) -> str:
        plain = json.dumps({**asdict(self), "digest": ""}, sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()


def folder() -> Path:
    return default_path().parent / "accepted"


def keep(entry: Accepted) -> Path:
    """Write it down, whole or not at all."""
    path = folder() / f"{entry.name}.json"
    write_text(path, json.dumps(asdict(entry) | {"digest": entry.hashed()}, indent=1) + "\n")
    return path


def remove(name: str) -> None:
    """Raises where there is none of that name."""
    known = {each.stem: each for each in sorted(folder().glob("*.json"))}
    if name not in known:
        there = ", ".join(known) or "none was accepted yet"
        raise RocmSdError(f"No accepted kernel is named {name!r}.", hint=f"There are: {there}.")
    known[name].unlink()


def accepted() -> Iterator[Accepted]:
    """All that can be read and were not changed; any other is named in a warning."""
    for path in sorted(folder().glob("*.json")):
        with _skipped(path.name):
            entry = read(Accepted, read_json(path, _Unusable, of=dict, most=2**20), _RULES)
            if entry.hashed() != entry.digest or entry.name != path.stem:
                raise _Unusable("it was changed after it was accepted")
            yield entry


@contextmanager
def _skipped(name: str) -> Iterator[None]:
    """What cannot be used costs itself, and a warning."""
    try:
        yield
    except (_Unusable, Misfit, NotAllowed) as error:
        log.warning("the accepted kernel %s is skipped: %s", name, error)


def module_text(op: OpCandidates) -> str:
    """The op's own kernels in Triton, with their launcher."""
    assert op.verification is not None
    name = op.verification.kernels.rpartition(".")[2]
    return (Path(kernels.__file__).parent / "triton" / f"{name}.py").read_text(encoding="utf-8")


def plug_ins(ops: Mapping[str, OpCandidates]) -> Iterable[PlugIn]:
    for entry in accepted():
        with _skipped(entry.name):
            yield _plug_in(ops, entry)


def _plug_in(ops: Mapping[str, OpCandidates], entry: Accepted) -> PlugIn:
    op = ops.get(entry.op)
    if op is None or op.verification is None or op.tuning is None:
        raise _Unusable(f"there is no op {entry.op!r} that it could be for")
    own = _own(op, entry)
    if entry.kernel != _hash_of(op, own):
        raise _Unusable(
            f"{entry.op} has another kernel than the one that it was proven beside; "
            f"type: rocm-sd improve {entry.op}, or: rocm-sd improve --remove {entry.name}"
        )
    launch = _Launch(op, entry)
    when = next((bucket.when for bucket in op.tuning.buckets if bucket.sample.name == entry.bucket), None)

    def why_not(problem: Problem, device: torch.device) -> str | None:
        here = archs.detect(device).name
        if here not in entry.architectures:
            return f"it was proven on {', '.join(entry.architectures)}, and this is {here}"
        if when is not None and not within(when, problem):
            return f"its config is for {entry.bucket} and the like"
        return own.why_not(problem, device)

    def run(*arguments: Any, config: Any) -> Any:
        with launch.by():
            return own.run(*arguments, config=config)

    made = Implementation(entry.name, run, why_not, default=own.default, fuses_adds=own.fuses_adds)
    space = op.tuning.space if own.kernels is None or own.kernels.space is None else own.kernels.space
    fixed = [own.config_from(entry.config)] if entry.config else None
    return PlugIn(entry.op, made, lambda problem, arch: fixed or space(problem, arch), entry.digest[:16])


def _own(op: OpCandidates, entry: Accepted) -> Implementation:
    """The implementation whose launcher it takes."""
    assert op.verification is not None
    if entry.kind == "hip":
        found = next((each for each in op.own.values() if each.kernels is not None), None)
        if found is None or not (SOURCES / f"{entry.source}.hip").is_file():
            raise _Unusable(f"{entry.op} has no kernel in HIP of a source {entry.source!r}")
        return found
    return op.own[op.verification.implementation]


def _hash_of(op: OpCandidates, own: Implementation) -> str:
    assert op.verification is not None
    return kernel_hash(op.verification.kernels if own.kernels is None else own.kernels.module)


class _Launch:
    """Lets the op's own launcher launch the accepted kernel, which is read, checked and loaded at its first use."""

    def __init__(self, op: OpCandidates, entry: Accepted) -> None:
        self._op, self._entry = op, entry
        self._module: ModuleType | None = None
        self._lock = threading.Lock()
        if entry.kind == "kernel":
            own = module_text(op)
            self._text = spliced(own, checked(entry.text, own))
        elif entry.kind == "hip":
            own = (SOURCES / f"{entry.source}.hip").read_text(encoding="utf-8")
            self._text = checked_hip(entry.text, own)

    def by(self) -> Any:
        if self._entry.kind == "kernel":
            return triton.launched_by(self._op.name, self._loaded())
        return hip.with_sources({self._entry.source: self._file(".hip")} if self._entry.kind == "hip" else {})

    def _file(self, suffix: str) -> Path:
        """Triton and clang read files: one of its own for each text, which nobody else writes."""
        path = folder() / "sources" / f"{self._entry.name}-{self._entry.digest[:16]}{suffix}"
        if not path.is_file() or path.read_text(encoding="utf-8") != self._text:
            write_text(path, self._text)
        return path

    def _loaded(self) -> ModuleType:
        with self._lock:
            if self._module is None:
                name = f"rocm_sd_accepted_{self._entry.digest[:16]}"
                specification = importlib.util.spec_from_file_location(name, self._file(".py"))
                assert specification is not None
                assert specification.loader is not None
                module = importlib.util.module_from_spec(specification)
                sys.modules[name] = module
                specification.loader.exec_module(module)
                self._module = module
            return self._module
