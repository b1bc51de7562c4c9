"""Instructions bound to one launch: for each address, a ready-to-call operation with its class and its registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.verify.emulator import control, lanes
from rocm_sd.verify.emulator.decode import Decoded, Decoder
from rocm_sd.verify.emulator.ds import DsBinder
from rocm_sd.verify.emulator.errors import EmulationError, UnknownInstruction
from rocm_sd.verify.emulator.lds import Lds
from rocm_sd.verify.emulator.loader import register_count
from rocm_sd.verify.emulator.matrix_ops import bind_matrix, is_matrix
from rocm_sd.verify.emulator.operands import VGPR, scalar_bits, scalar_reader, scalar_writer
from rocm_sd.verify.emulator.scalar import bind_scalar, bind_scalar_load
from rocm_sd.verify.emulator.valu import VectorBinder
from rocm_sd.verify.emulator.vmem import MemoryBinder
from rocm_sd.verify.emulator.wave import Outstanding, vgpr_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.verify.code_object import CodeObject
    from rocm_sd.verify.emulator.counters import Counters
    from rocm_sd.verify.emulator.memory import Memory
    from rocm_sd.verify.emulator.wave import Group

    Run = Callable[[Group], None]

__all__ = ["Machine", "Operation"]

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
    """`flow` is None for an instruction that goes on to the next; else it says how control goes on."""

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


class Machine:
    """One launch of one kernel: memory, LDS of the workgroups at hand, and the operations met so far."""

    def __init__(self, code: CodeObject, memory: Memory, counters: Counters) -> None:
        self.code, self.memory, self.counters = code, memory, counters
        self.decoder = Decoder(code.arch, code.text, code.text_address)
        self.family = self.decoder.family
        self.wave_size = code.wave_size
        self.scratch_bytes = code.scratch
        self.lds = Lds(1, code.lds)
        self.scratch = Lds(1, code.scratch)
        self.operations: dict[int, Operation] = {}
        self._undeclared = vgpr_bits(0, 512) & ~vgpr_bits(0, register_count(code))
        self._memory_binder = MemoryBinder(self)
        self._vector = VectorBinder(code.arch.name, self.family, code.wave_size)
        self._ds = DsBinder(self, self._memory_binder.counters["lds"])

    def begin(self, workgroups: int, waves: int) -> None:
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
        flow = control.flow_of(inst, offset, following, self.family)
        if flow is not None:
            return Operation(inst.name, inst.address, offset, following, flow.kind, None, flow.touched, flow)
        run, touched, kind, flops = self._semantics(inst)
        if touched & self._undeclared:
            raise EmulationError(
                f"{inst.name} uses a vector register beyond the {self.code.vgprs} that the kernel declares.",
                address=inst.address,
            )
        return Operation(inst.name, inst.address, offset, following, kind, run, touched, None, 0, flops)

    def _semantics(self, inst: Decoded) -> tuple[Run, int, str, int]:  # noqa: PLR0911 - one a form
        name, form = inst.name, inst.form
        if name in _CACHE_CONTROL:
            return (*self._cache_control(inst), 0)
        waiting = control.bind_wait(inst, self.family)
        if waiting is not None:
            return waiting, 0, "wait", 0
        if form in ("SOP1", "SOP2", "SOPC", "SOPK"):
            return (*bind_scalar(inst, self.family), "salu", 0)
        if form == "SMEM":
            counter = self._memory_binder.counters["smem"]
            return (*bind_scalar_load(inst, self.family, self.memory, counter), "smem", 0)
        if form == "DS":
            return (*self._ds.bind(inst), 0)
        if form in ("GLOBAL", "FLAT", "SCRATCH", "MUBUF", "VGLOBAL", "VFLAT", "VSCRATCH", "VBUFFER"):
            return (*self._memory_binder.bind(inst), 0)
        if is_matrix(name):
            run, touched, flops = bind_matrix(inst, self.family, self.code.arch.name, self.wave_size)
            return run, touched, "matrix", flops
        if form.startswith("VOP"):
            special = self._lane_operation(inst)
            if special is not None:
                return (*special, "valu", 0)
            run, touched = self._vector.bind(inst)
            return run, touched, "trans" if name.startswith(_TRANSCENDENTAL) else "valu", 0
        raise UnknownInstruction(name, inst.address)

    def _cache_control(self, inst: Decoded) -> tuple[Run, int, str]:
        """Caches are not modelled, so there is nothing to flush; the wait counters still see these."""
        counter = _CACHE_CONTROL[inst.name]
        if counter is None:
            return (lambda _g: None), 0, "other"

        def run(g: Group) -> None:
            g.issue(counter, Outstanding(inst.name, inst.address, 0, in_order=True))

        return run, 0, "other"

    def _lane_operation(self, inst: Decoded) -> tuple[Run, int] | None:  # noqa: PLR0911 - one a name
        name = inst.name
        if name in ("v_readfirstlane_b32", "v_readlane_b32"):
            return self._read_lane(inst)
        if name == "v_writelane_b32":
            return self._write_lane(inst)
        if name in ("v_permlane16_b32", "v_permlanex16_b32"):
            return self._permlane16(inst)
        if name in ("v_permlane16_var_b32", "v_permlanex16_var_b32"):
            return self._permlane16_var(inst)
        if name == "v_permlane64_b32":
            number, target = inst.fields["src0"] - VGPR, inst.fields["vdst"]

            def run(g: Group) -> None:
                np.copyto(g.v[target], lanes.permlane64(g.v[number]), where=g.exec)

            return run, vgpr_bits(number) | vgpr_bits(target)
        if name in ("v_permlane16_swap_b32", "v_permlane32_swap_b32"):
            return self._swap(inst)
        if name in ("v_nop", "v_pipeflush"):
            return (lambda _g: None), 0
        if name.startswith("v_accvgpr"):
            return self._accumulator(inst)
        return None

    def _read_lane(self, inst: Decoded) -> tuple[Run, int]:
        code, target = inst.fields["src0"], inst.fields["vdst"]
        write = scalar_writer(target, 32, inst, self.family)
        if code < VGPR:
            raise UnknownInstruction(inst.name, inst.address, "a scalar source")
        number = code - VGPR
        touched = vgpr_bits(number) | scalar_bits(target, 32, self.family)
        if inst.name == "v_readfirstlane_b32":
            return (lambda g: write(g, lanes.read_first_lane(g.v[number], g.exec))), touched
        select = inst.fields["src1"]
        read = scalar_reader(select, 32, inst, self.family)
        return (lambda g: write(g, lanes.read_lane(g.v[number], read(g)))), touched | scalar_bits(
            select, 32, self.family
        )

    def _write_lane(self, inst: Decoded) -> tuple[Run, int]:
        value, select, target = inst.fields["src0"], inst.fields["src1"], inst.fields["vdst"]
        read, where = scalar_reader(value, 32, inst, self.family), scalar_reader(select, 32, inst, self.family)

        def run(g: Group) -> None:
            g.v[target] = lanes.write_lane(g.v[target], np.broadcast_to(read(g), (g.width,)), where(g))

        touched = scalar_bits(value, 32, self.family) | scalar_bits(select, 32, self.family)
        return run, touched | vgpr_bits(target)

    def _permlane16(self, inst: Decoded) -> tuple[Run, int]:
        number, target = inst.fields["src0"] - VGPR, inst.fields["vdst"]
        low, high = (scalar_reader(inst.fields[name], 32, inst, self.family) for name in ("src1", "src2"))
        cross, opsel = inst.name == "v_permlanex16_b32", inst.get("opsel")

        def run(g: Group) -> None:
            values, found = lanes.permlane16(
                g.v[number],
                low(g)[:, None],
                high(g)[:, None],
                g.exec,
                cross=cross,
                fetch_inactive=bool(opsel & 1),
                bound_control=bool(opsel & 2),
            )
            np.copyto(g.v[target], values, where=found & g.exec)

        touched = scalar_bits(inst.fields["src1"], 32, self.family) | scalar_bits(inst.fields["src2"], 32, self.family)
        return run, touched | vgpr_bits(number) | vgpr_bits(target)

    def _permlane16_var(self, inst: Decoded) -> tuple[Run, int]:
        number, select, target = inst.fields["src0"] - VGPR, inst.fields["src1"] - VGPR, inst.fields["vdst"]
        cross, opsel = inst.name == "v_permlanex16_var_b32", inst.get("opsel")

        def run(g: Group) -> None:
            values, found = lanes.permlane16_var(
                g.v[number],
                g.v[select],
                g.exec,
                cross=cross,
                fetch_inactive=bool(opsel & 1),
                bound_control=bool(opsel & 2),
            )
            np.copyto(g.v[target], values, where=found & g.exec)

        return run, vgpr_bits(number) | vgpr_bits(select) | vgpr_bits(target)

    def _swap(self, inst: Decoded) -> tuple[Run, int]:
        number, target = inst.fields["src0"] - VGPR, inst.fields["vdst"]
        swap = lanes.permlane16_swap if inst.name == "v_permlane16_swap_b32" else lanes.permlane32_swap

        def run(g: Group) -> None:
            first, second = swap(g.v[target], g.v[number])
            np.copyto(g.v[target], first, where=g.exec)
            np.copyto(g.v[number], second, where=g.exec)

        return run, vgpr_bits(number) | vgpr_bits(target)

    def _accumulator(self, inst: Decoded) -> tuple[Run, int]:
        """Moves between vector and accumulation registers; the latter follow the former in one file."""
        code, target = inst.fields["src0"], inst.fields["vdst"]
        into = inst.name in ("v_accvgpr_write_b32", "v_accvgpr_write", "v_accvgpr_mov_b32")
        out_of = inst.name in ("v_accvgpr_read_b32", "v_accvgpr_read", "v_accvgpr_mov_b32")
        target += VGPR if into else 0
        if code < VGPR:
            read = scalar_reader(code, 32, inst, self.family)

            def move_scalar(g: Group) -> None:
                np.copyto(g.v[target], read(g)[:, None], where=g.exec)

            return move_scalar, vgpr_bits(target) | scalar_bits(code, 32, self.family)
        number = code - VGPR + (VGPR if out_of else 0)

        def move(g: Group) -> None:
            np.copyto(g.v[target], g.v[number], where=g.exec)

        return move, vgpr_bits(target) | vgpr_bits(number)
