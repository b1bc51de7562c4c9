"""Runs a kernel: workgroups in batches, waves in groups that stand at one instruction, barriers between them.

Of several groups the one furthest behind runs, until it meets or overtakes the next; groups that meet become one again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.errors import InvalidOption
from rocm_sd.verify.emulator.errors import BudgetExceeded, Deadlock, DivergentBarrier, EmulationError
from rocm_sd.verify.emulator.loader import load_arguments, start_group
from rocm_sd.verify.emulator.machine import machine_for
from rocm_sd.verify.emulator.processes import NotDivided, divided, most_processes
from rocm_sd.verify.emulator.races import may_race
from rocm_sd.verify.emulator.wave import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.verify.code_object import CodeObject
    from rocm_sd.verify.emulator.control import Flow
    from rocm_sd.verify.emulator.counters import Counters
    from rocm_sd.verify.emulator.lds import LdsAccess
    from rocm_sd.verify.emulator.machine import Counts, Machine, Operation
    from rocm_sd.verify.emulator.memory import Memory
    from rocm_sd.verify.emulator.races import Doubt, Share

__all__ = ["launch"]

# Of 1, 2, 4 and 8 MB of registers the launches of benchmarks/emulator_speed.py took 3.7, 2.9, 2.5 and 2.4 s: the fewer
# waves, the more of the time is Python's, and beyond the caches nothing is gained.
_BATCH_BYTES = 1 << 22
_LARGEST_BATCH = 256
_BUDGET = 50_000_000
# A fork of a process with torch in it costs 45 ms of the system's time: its tables of pages, the pages that are copied
# as either writes them, and its end. A share should be worth several times that.
_SHARE_SECONDS = 0.25
# Every bit, which gives unlike numbers, and the upper ones of each byte, which gives unlike signs and sizes.
_OTHER_VALUES = (0xFF, 0xF0)


def launch(
    code: CodeObject,
    grid: int | Sequence[int],
    arguments: Sequence[Any],
    *,
    batch: int | None = None,
    budget: int = _BUDGET,
    only: range | None = None,
    processes: int | None = None,
) -> Counters:
    """Execute `code` on `grid` workgroups and write the results into the buffers of `arguments`.

    grid: workgroups in x, y and z. arguments: a `Buffer`, a number or None for each kernel argument; the two scratch
    pointers that Triton appends may be missing. batch: waves executed at once. budget: wave instructions after
    which the launch is given up. only: the workgroups to execute, x fastest, by default all. processes: how many share
    the workgroups, by default up to one a core where the launch takes long enough; results, counts and errors are
    the same. Kernels with atomic operations are always executed by one.
    """
    sizes = _grid(grid)
    per_workgroup = max(code.workgroup_size // code.wave_size, 1)
    chosen = range(sizes[0] * sizes[1] * sizes[2])
    chosen = chosen if only is None else chosen[only.start : only.stop]
    total = len(chosen)
    at_once = _workgroups_at_once(code, per_workgroup, batch)

    def begin(*, shared: bool = False) -> Memory:
        return load_arguments(code, arguments, sizes, per_workgroup, shared=shared)

    def execute(memory: Memory, most: int = 1, *, alone: bool = False) -> Counters:
        with machine_for(code, memory) as machine, np.errstate(all="ignore"):
            work = _Work(machine, sizes, per_workgroup, budget)
            machine.alone |= alone
            start, count = 0, 1 if machine.alone else most
            if count > 1 and processes is None:
                if machine.pace is None:
                    # How long a kernel takes is known after its first batch.
                    start = work.execute(chosen[:at_once])
                count = min(count, int((total - start) * (machine.pace or 0.0) / _SHARE_SECONDS))
            count = max(min(count, total - start), 1)
            work.divide(_batches(chosen[start:], at_once, count), count)
            return _collect(machine)

    most = most_processes(code, processes)
    memory = begin(shared=most > 1)
    began = time.perf_counter()
    try:
        counters = execute(memory, most)
    except NotDivided:
        memory = begin()
        counters = execute(memory, alone=True)
    counters.seconds = time.perf_counter() - began
    counters.workgroups, counters.waves = total, total * per_workgroup
    doubt = memory.races.finish()
    if doubt is not None:
        _require_same(memory, doubt, begin, execute)
    memory.finish()
    return counters


def _batches(workgroups: range, at_once: int, processes: int) -> list[range]:
    """Of nearly one size, so many that each process gets as many of them."""
    turns = -(-len(workgroups) // (at_once * processes))
    size = max(-(-len(workgroups) // max(turns * processes, 1)), 1)
    return [workgroups[start : start + size] for start in range(0, len(workgroups), size)]


class _Work:
    """The workgroups of one launch."""

    def __init__(self, machine: Machine, grid: tuple[int, int, int], per_workgroup: int, budget: int) -> None:
        self.machine, self.grid, self.per_workgroup, self.budget = machine, grid, per_workgroup, budget

    def execute(self, workgroups: range) -> int:
        """One batch; how many workgroups it had."""
        machine, began = self.machine, time.perf_counter()
        numbers = np.arange(workgroups.start, workgroups.stop)
        machine.begin(numbers, self.per_workgroup)
        group = start_group(machine.code, machine.family, machine.memory, self.grid, numbers, self.per_workgroup)
        _Scheduler(machine, group, self.per_workgroup, self.budget - machine.executed()).run()
        machine.pace = (time.perf_counter() - began) / len(numbers)
        return len(numbers)

    def divide(self, batches: list[range], processes: int) -> None:
        """All batches. Raises NotDivided where it takes one process to say what the kernel does."""
        if processes == 1:
            for batch in batches:
                self.execute(batch)
            return
        machine = self.machine
        before = machine.counts()

        def report() -> tuple[Counts, Share]:
            return machine.counts(before), machine.memory.races.share()

        reports = divided(batches, processes, self.execute, report, machine.memory.races.forget)
        if may_race([share for _, share in reports]):
            raise NotDivided("Workgroups of different processes may race.")
        for counts, _ in reports[1:]:
            machine.add(counts)
        if machine.executed() > self.budget:
            raise NotDivided("The budget of all processes together is spent.")


def _require_same(
    memory: Memory, doubt: Doubt, begin: Callable[[], Memory], execute: Callable[[Memory], Counters]
) -> None:
    """Raise the race in doubt unless the results are the same whatever the doubtful reads give."""
    for pattern in _OTHER_VALUES:
        again = begin()
        again.races.repeat_with(pattern, doubt)
        try:
            execute(again)
        except EmulationError as error:
            raise doubt.race from error
        if not np.array_equal(again.data, memory.data):
            raise doubt.race


def _grid(grid: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = (grid,) if isinstance(grid, int) else tuple(int(size) for size in grid)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise InvalidOption("grid", grid, ["one to three positive numbers"])
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _workgroups_at_once(code: CodeObject, per_workgroup: int, batch: int | None) -> int:
    if batch is None:
        registers = (code.vgprs + code.agprs) * code.wave_size * 4
        batch = min(max(_BATCH_BYTES // max(registers, 1), 16), _LARGEST_BATCH)
    return max(batch // per_workgroup, 1)


def _collect(machine: Machine) -> Counters:
    totals = machine.totals
    counters = replace(totals, by_class=dict(totals.by_class), by_name={})
    for operation in machine.operations.values():
        if not operation.executed:
            continue
        counters.by_class[operation.kind] += operation.executed
        counters.by_name[operation.name] = counters.by_name.get(operation.name, 0) + operation.executed
        counters.wave_instructions += operation.executed
        counters.matrix_flops += operation.flops * operation.executed
    return counters


class _Scheduler:
    """One batch of workgroups, from the first instruction to the last."""

    def __init__(self, machine: Machine, group: Group, per_workgroup: int, budget: int) -> None:
        self.machine = machine
        self.running: list[Group] = [group]
        self.waiting: list[Group] = []
        self.per_workgroup = per_workgroup
        self.ended = np.zeros(group.width, np.bool_)
        self.budget = budget

    def run(self) -> None:
        while self.running or self.waiting:
            if not self.running:
                self._release()
                continue
            self.running.sort(key=lambda group: group.pc)
            group = self.running.pop(0)
            while self.running and self.running[0].pc == group.pc:
                group = Group.merge(group, self.running.pop(0))
            limit = self.running[0].pc if self.running else None
            self._advance(group, limit)

    def _advance(self, group: Group, limit: int | None) -> None:
        """Until the group parts, waits, ends, or comes to where another one stands."""
        operations, bind = self.machine.operations, self.machine.operation
        width = group.width
        pc = group.pc
        while limit is None or pc < limit:
            operation = operations.get(pc) or bind(pc)
            if group.pending & operation.touched:
                group.check(operation.touched, operation.name, operation.address, operation.refilled)
            operation.executed += width
            self.budget -= width
            if self.budget < 0:
                raise BudgetExceeded(
                    "The launch executed more wave instructions than its budget allows.",
                    address=operation.address,
                    hint="Look for a loop that does not end, make the grid smaller, or pass a larger budget.",
                )
            if operation.flow is None:
                operation.run(group)
                pc = operation.following
                continue
            following = self._follow(group, operation, operation.flow)
            if following is None:
                return
            pc = following
        group.pc = pc
        self.running.append(group)

    def _follow(self, group: Group, operation: Operation, flow: Flow) -> int | None:
        """The next place for the whole group, or None where it was taken care of."""
        group.pc = operation.offset
        if flow.action == "branch":
            return self._branch(group, operation, flow)
        if flow.action == "jump":
            target: int = flow.jump(group)
            return target
        if flow.action == "end":
            self.ended[group.waves] = True
            return None
        if flow.action == "signal":
            if group.signalled.any():
                raise Deadlock("A wave signals a barrier twice without waiting for it.", address=operation.address)
            group.carried = _unfinished(group)
            group.signalled[:] = True
            return operation.following
        if flow.action == "barrier_wait" and not group.signalled.all():
            raise Deadlock("A wave waits for a barrier that it did not signal.", address=operation.address)
        self.waiting.append(group)
        return None

    def _branch(self, group: Group, operation: Operation, flow: Flow) -> int | None:
        if flow.condition is None:
            return flow.target
        taken = flow.condition(group)
        count = int(np.count_nonzero(taken))
        if count == len(taken):
            return flow.target
        if count == 0:
            return operation.following
        there, here = group.split(taken)
        there.pc, here.pc = flow.target, operation.following
        self.running += [there, here]
        return None

    def _release(self) -> None:
        """Every group waits: all waves of a workgroup must have come to the same barrier."""
        place = np.full(self.ended.shape, -1)
        for group in self.waiting:
            place[group.waves] = group.pc
        table, ended = place.reshape(-1, self.per_workgroup), self.ended.reshape(-1, self.per_workgroup)
        for workgroup in np.flatnonzero(table.min(axis=1) != table.max(axis=1)):
            there = np.unique(table[workgroup][~ended[workgroup]])
            first = int(there[there >= 0][0])
            address = self.machine.operation(first).address
            if ended[workgroup].any():
                raise DivergentBarrier(
                    f"Some waves of workgroup {int(workgroup)} wait at a barrier and others have ended.",
                    address=address,
                )
            if len(there) > 1:
                places = ", ".join(f"{self.machine.operation(int(p)).address:#x}" for p in there if p >= 0)
                raise DivergentBarrier(
                    f"The waves of workgroup {int(workgroup)} wait at different barriers: {places}.", address=address
                )
        groups, self.waiting = self.waiting, []
        unfinished = [access for group in groups for access in _unfinished(group)]
        workgroups = np.concatenate([group.workgroups for group in groups])
        self.machine.lds.barrier(workgroups, unfinished)
        self.machine.memory.races.barrier(workgroups)
        for group in groups:
            group.signalled[:] = False
            group.carried = []
            group.pc = self.machine.operation(group.pc).following
        self.running += groups


def _unfinished(group: Group) -> list[LdsAccess]:
    """LDS accesses that the group has not waited for, as far as they are its own."""
    held = [(access, group.waves) for access in group.carried]
    for queue in group.queues.values():
        for entry in queue:
            mine = group.waves if entry.waves is None else group.waves[entry.waves]
            held += [(access, mine) for access in entry.lds_bytes or ()]
    found: list[LdsAccess] = []
    for access, mine in held:
        keep = np.isin(access.workgroups * group.waves_per_workgroup + access.waves, mine)
        found.append(access if keep.all() else access.only(keep))
    return found
