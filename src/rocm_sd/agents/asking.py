"""What walled-in processes are asked about a proposal; what they answer is a stranger's, and is read strictly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd import typed_json
from rocm_sd.agents.confinement import confined
from rocm_sd.agents.modelling import Work, modelled
from rocm_sd.agents.proposals import Proposal, module_of
from rocm_sd.agents.trying import KERNELS, MANY, SOURCE
from rocm_sd.agents.verdicts import RULES, Rung
from rocm_sd.errors import RocmSdError
from rocm_sd.verify.ladder import EMULATED, HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rocm_sd.agents.confinement import Limits
    from rocm_sd.ops.registry import Op

__all__ = ["Asking", "climbed_as", "plain"]

_TRYING = "rocm_sd.agents.trying"


@dataclass(frozen=True)
class Interpreted:
    rungs: tuple[Rung, ...]
    counted: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Compiled:
    rungs: tuple[Rung, ...]
    compiled: dict[str, dict[str, Any]]
    counted: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Entry:
    """Of one config among several: what was counted or compiled, by architecture and call."""

    fault: str
    figures: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Entries:
    found: tuple[_Entry, ...]


class Asking:
    """`_read` are those of the architectures whose machine code climbs with no card."""

    def __init__(self, op: Op, architectures: Sequence[str], limits: Limits) -> None:
        self.op, self.architectures, self._limits = op, tuple(architectures), limits
        self._read = tuple(name for name in self.architectures if archs.get(name).has_gates)

    def _modelled(
        self, proposal: Proposal, compiled: Mapping[str, Mapping[str, Any]], counted: Mapping[str, Mapping[str, Any]]
    ) -> Work:
        """Raises RocmSdError or Misfit for whatever figures a process may have made up."""
        assert self.op.tuning is not None
        names = [bucket.sample.name for bucket in self.op.tuning.buckets]
        calls = [name for name in names if proposal.bucket in {"", name}]
        try:
            return modelled(calls, self._read, compiled, counted)
        except (ArithmeticError, LookupError, TypeError) as error:
            raise RocmSdError(
                f"The process answered with figures that no kernel has ({type(error).__name__})."
            ) from error

    def _files(self, proposal: Proposal) -> dict[str, str]:
        if proposal.kind == "hip":
            return {SOURCE: proposal.text}
        return {KERNELS: module_of(self.op, proposal)} if proposal.kind == "kernel" else {}

    def _figures(self, proposal: Proposal, files: Mapping[str, str]) -> tuple[Interpreted, Compiled]:
        """What the model needs, and no rung."""
        compiled = self._compiled(proposal, files, climb=False)
        if proposal.kind == "hip":
            return Interpreted((), compiled.counted), compiled
        return self._interpreted(proposal, files, climb=False), compiled

    def _interpreted(self, proposal: Proposal, files: Mapping[str, str], *, climb: bool) -> Interpreted:
        answer = confined(
            f"{_TRYING}:interpret",
            self._job(proposal, climb=climb),
            files=files,
            environment={"TRITON_INTERPRET": "1"},
            limits=self._limits,
        )
        found = typed_json.read(Interpreted, answer, RULES, top="the process's answer")
        return replace(found, rungs=climbed_as(found.rungs, [(2, HOST), (2, MANY)] if climb else []))

    def _compiled(self, proposal: Proposal, files: Mapping[str, str], *, climb: bool) -> Compiled:
        job = self._job(proposal, climb=climb)
        answer = confined(f"{_TRYING}:compile_and_execute", job, files=files, limits=self._limits)
        found = typed_json.read(Compiled, answer, RULES, top="the process's answer")
        emulated = [(4, arch) for arch in self._read if arch in EMULATED]
        wanted = [*((3, arch) for arch in self._read), *emulated]
        return replace(found, rungs=climbed_as(found.rungs, wanted if climb else []))

    def _each(
        self, function: str, proposal: Proposal, configs: Sequence[dict[str, int]], *, interpret: bool = False,
        climb: bool = False,
    ) -> tuple[_Entry, ...]:  # fmt: skip
        """Of several configs in one process; as many answers as configs, or Misfit."""
        found = typed_json.read(
            _Entries,
            confined(
                f"{_TRYING}:{function}",
                self._job(proposal, climb=climb) | {"configs": list(configs)},
                environment={"TRITON_INTERPRET": "1"} if interpret else {},
                limits=self._limits,
            ),
            RULES,
            top="the process's answer",
        ).found
        if len(found) != len(configs):
            raise RocmSdError(f"The process answered for {len(found)} configs of {len(configs)}.")
        return tuple(replace(each, fault=plain(each.fault)) for each in found)

    def _job(self, proposal: Proposal, *, climb: bool) -> dict[str, Any]:
        return {
            "op": self.op.name,
            "source": proposal.source,
            "bucket": proposal.bucket,
            "config": proposal.config,
            "architectures": list(self.architectures),
            "climb": climb,
        }


def climbed_as(found: Sequence[Rung], wanted: Sequence[tuple[int, str]]) -> tuple[Rung, ...]:
    """All that were to be climbed, or those to the first that failed: nothing is passed by leaving it out. Their words
    may be those of a proposal, and no terminal obeys them.
    """
    climbed = [(each.rung, each.arch) for each in found]
    failed = [number for number, each in enumerate(found, 1) if each.state == "failed"]
    whole = failed == [len(found)] if failed else len(found) == len(wanted)
    if not whole or climbed != list(wanted)[: len(climbed)]:
        shown = ", ".join(f"{rung} on {arch}" for rung, arch in wanted) or "none"
        raise RocmSdError(f"The process answered with other rungs than were to be climbed ({shown}).")
    figures = [{name: plain(value) for name, value in each.figures.items()} for each in found]
    return tuple(
        replace(each, finding=plain(each.finding), figures=values) for each, values in zip(found, figures, strict=True)
    )


def plain(value: Any) -> Any:
    return "".join(each if each.isprintable() else " " for each in value) if isinstance(value, str) else value
