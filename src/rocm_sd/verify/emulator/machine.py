"""Instructions of one kernel: for each address, a ready-to-call operation with its class and its registers.

Binding an instruction takes as long as executing it for a batch of waves, so what was bound is kept for later launches.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rocm_sd.verify.emulator import control
from rocm_sd.verify.emulator.counters import Counters
from rocm_sd.verify.emulator.decode import Decoded, Decoder
from rocm_sd.verify.emulator.ds import DsBinder
from rocm_sd.verify.emulator.errors import EmulationError, UnknownInstruction
from rocm_sd.verify.emulator.lanes import bind_lane_operation
from rocm_sd.verify.emulator.lds import Lds
from rocm_sd.verify.emulator.loader import register_count
from rocm_sd.verify.emulator.matrix_operands import bind_matrix, is_matrix
from rocm_sd.verify.emulator.scalar import bind_scalar, bind_scalar_load
from rocm_sd.verify.emulator.valu import VectorBinder
from rocm_sd.verify.emulator.vmem import MemoryBinder
from rocm_sd.verify.emulator.wave import Outstanding, vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from rocm_sd.verify.code_object import CodeObject
    from rocm_sd.verify.emulator.memory import Memory
    from rocm_sd.verify.emulator.wave import Group

    Run = Callable[[Group], None]
    # Totals by name, and executed wave instructions by the offset of the instruction.
    Counts = tuple[dict[str, int], dict[int, int]]

__all__ = ["Machine", "Operation", "machine_for"]

_TRANSCENDENTAL = ("v_s_", "v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_CACHE_CONTROL = {
    "buffer_gl0_inv": None,
    "buffer_gl1_inv": None,
    "buffer_inv": None,
    "buffer_wbl2": None,
    "s_dcache_inv": None,
    "s_gl1_inv": None,
    # On gfx12 these are counted like loads and stores.
    "global_inv": "loadcnt",
    "global_wb": "storecnt",
    "global_wbinv": "storecnt",
}


@dataclass(slots=True)
class Operation:
    """`flow` is None for an instruction that goes on to the next; else it says how control goes on.

    `refilled` is for `Group.check`: what a load may fill while an earlier one is still filling it.
    """

    name: str
    address: int
    offset: int
    following: int
    kind: str
    run: Any
    touched: int
    flow: control.Flow | None = None
    executed: int = 0
    flops: int = 0
    refilled: tuple[str, int] = ("", 0)


class _Semantics(NamedTuple):
    """What an instruction does and uses; the fields are those of `Operation`."""

    run: Any
    touched: int
    kind: str
    flops: int = 0
    refilled: tuple[str, int] = ("", 0)


class Machine:
    """One kernel: the operations met so far; and of the launch at hand memory, totals, and LDS of its workgroups.

    Operations ask for `memory` when they run, and add to `totals`, which stays the same object.
    """

    memory: Memory

    def __init__(self, code: CodeObject) -> None:
        self.code = code
        self.totals = Counters(code.arch, code.wave_size)
        self.decoder = Decoder(code.arch, code.text, code.text_address)
        self.family = self.decoder.family
        self.wave_size = code.wave_size
        self.scratch_bytes = code.scratch
        self.lds = Lds(1, code.lds)
        self.scratch = Lds(1, code.scratch)
        self.operations: dict[int, Operation] = {}
        # Seconds a workgroup took of late, None before the first; and whether several processes did not agree about it.
        self.pace: float | None = None
        self.alone = False
        self._remembered: list[dict[Any, Any]] = []
        self._undeclared = vgpr_bits(0, 512) & ~vgpr_bits(0, register_count(code))
        self._memory_binder = MemoryBinder(self)
        self._vector = VectorBinder(code.arch.name, code.wave_size)
        self._ds = DsBinder(self, self._memory_binder.counters["lds"])

    def remembered(self) -> dict[Any, Any]:
        """A place for what an operation wants to know again in this launch; it is emptied afterwards."""
        place: dict[Any, Any] = {}
        self._remembered.append(place)
        return place

    @contextmanager
    def launched(self, memory: Memory) -> Iterator[None]:
        """Within, operations work on `memory`; counts begin at zero."""
        self.memory = memory
        self.totals.clear()
        for operation in self.operations.values():
            operation.executed = 0
        try:
            yield
        finally:
            del self.memory
            for place in self._remembered:
                place.clear()
            self._reset(0, 0)

    def executed(self) -> int:
        """Wave instructions of this launch."""
        return sum(operation.executed for operation in self.operations.values())

    def counts(self, since: Counts | None = None) -> Counts:
        """All that was counted in this launch so far, or `since` then."""
        executed = {offset: operation.executed for offset, operation in self.operations.items()}
        totals = {name: value for name, value in vars(self.totals).items() if isinstance(value, int)}
        if since is None:
            return totals, executed
        return _less(totals, since[0]), _less(executed, since[1])

    def add(self, counts: Counts) -> None:
        """What another process counted of the same launch."""
        totals, executed = counts
        for name, count in totals.items():
            setattr(self.totals, name, getattr(self.totals, name) + count)
        for offset, count in executed.items():
            self.operation(offset).executed += count

    def begin(self, workgroups: NDArray[np.int64], waves_per_workgroup: int) -> None:
        """These workgroups, by their numbers in the grid, start at the first instruction."""
        self._reset(len(workgroups), len(workgroups) * waves_per_workgroup)
        self.memory.races.begin(workgroups, waves_per_workgroup)

    def _reset(self, workgroups: int, waves: int) -> None:
        """Fresh LDS and scratch; operations hold on to the objects, so these are emptied and not replaced."""
        self.lds.reset(workgroups)
        self.scratch.reset(waves * self.wave_size)

    def operation(self, offset: int) -> Operation:
        found = self.operations.get(offset)
        if found is None:
            found = self._bind(offset)
            self.operations[offset] = found
        return found

    def _bind(self, offset: int) -> Operation:
        inst = self.decoder.at(offset)
        following = offset + inst.size
        flow = control.flow_of(inst, offset, following)
        if flow is not None:
            return Operation(inst.name, inst.address, offset, following, flow.kind, None, flow.touched, flow)
        run, touched, kind, flops, refilled = self._semantics(inst)
        if touched & self._undeclared:
            raise EmulationError(
                f"{inst.name} uses a vector register beyond the {self.code.vgprs} that the kernel declares.",
                address=inst.address,
            )
        return Operation(inst.name, inst.address, offset, following, kind, run, touched, None, 0, flops, refilled)

    def _semantics(self, inst: Decoded) -> _Semantics:  # noqa: PLR0911 - one a form
        name, form = inst.name, inst.form
        if name in _CACHE_CONTROL:
            return _Semantics(*self._cache_control(inst))
        waiting = control.bind_wait(inst)
        if waiting is not None:
            return _Semantics(waiting, 0, "wait")
        if form in ("SOP1", "SOP2", "SOPC", "SOPK"):
            return _Semantics(*bind_scalar(inst), "salu")
        if form == "SMEM":
            counter = self._memory_binder.counters["smem"]
            return _Semantics(*bind_scalar_load(inst, self, counter), "smem")
        if form == "DS":
            return _Semantics(*self._ds.bind(inst))
        if form in ("GLOBAL", "FLAT", "SCRATCH", "MUBUF", "VGLOBAL", "VFLAT", "VSCRATCH", "VBUFFER"):
            run, touched, kind, refilled = self._memory_binder.bind(inst)
            return _Semantics(run, touched, kind, refilled=(self._memory_binder.counters["load"], refilled))
        if is_matrix(name):
            run, touched, flops = bind_matrix(inst, self.code.arch.name, self.wave_size)
            return _Semantics(run, touched, "matrix", flops)
        if form.startswith("VOP"):
            special = bind_lane_operation(inst)
            if special is not None:
                return _Semantics(*special, "valu")
            run, touched = self._vector.bind(inst)
            return _Semantics(run, touched, "trans" if name.startswith(_TRANSCENDENTAL) else "valu")
        raise UnknownInstruction(name, inst.address)

    def _cache_control(self, inst: Decoded) -> tuple[Run, int, str]:
        """Caches are not modelled, so there is nothing to flush; the wait counters still see these."""
        counter = _CACHE_CONTROL[inst.name]

        def run(g: Group) -> None:
            if counter is not None:
                g.issue(counter, Outstanding(inst.name, inst.address, 0, in_order=True))

        return run, 0, "other"


def _less(counts: dict[Any, int], others: dict[Any, int]) -> dict[Any, int]:
    less = {key: count - others.get(key, 0) for key, count in counts.items()}
    return {key: count for key, count in less.items() if count}


# A UNet has some tens of kernels; a bound one takes about as many megabytes as it has thousands of instructions.
_MOST_KEPT = 64
_kept: OrderedDict[tuple[Any, ...], Machine] = OrderedDict()


@contextmanager
def machine_for(code: CodeObject, memory: Memory) -> Iterator[Machine]:
    """The kernel's machine, which nobody else has meanwhile: two threads that launch one kernel get two."""
    # By its name, too: several kernels may be in one text, each with its own entry.
    key = (
        code.arch, code.name, code.text, code.text_address, code.entry_offset, code.vgprs, code.agprs, code.lds,
        code.scratch, code.wave_size,
    )  # fmt: skip
    machine = _kept.pop(key, None) or Machine(code)
    with machine.launched(memory):
        yield machine
    # Not where the launch failed: what it left behind, if anything, is nobody's to find.
    _kept[key] = machine
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
