"""A launch in several processes: the same bits, the same counts and the same errors as in one."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from hand_assembly import kernel

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.verify.emulator import BudgetExceeded, Buffer, GlobalRace, OutOfBounds, UnknownInstruction, launch
from rocm_sd.verify.emulator import processes as processes_module
from rocm_sd.verify.emulator.machine import Machine
from rocm_sd.verify.emulator.processes import NotDivided, divided, most_processes
from rocm_sd.verify.emulator.races import ATOMIC, READ, WRITE, Share, may_race

# Each lane of a workgroup writes its number, plus that of the workgroup.
NUMBERS = """
s_load_b64 s[4:5], s[0:1], 0x0
s_lshl_b32 s6, s2, 7
v_lshl_add_u32 v1, v0, 2, s6
v_add_nc_u32 v2, s2, v0
s_waitcnt lgkmcnt(0)
global_store_b32 v1, v2, s[4:5]
s_endpgm
"""
# Every lane adds 1 to the same word.
SUM = """
s_load_b64 s[4:5], s[0:1], 0x0
v_mov_b32 v1, 0
v_mov_b32 v2, 1
s_waitcnt lgkmcnt(0)
global_atomic_add_u32 v1, v2, s[4:5]
s_endpgm
"""


def written(workgroups: int, **options):
    out = Buffer(np.zeros(32 * workgroups, np.uint32), "out", initialised=False, must_write=True)
    counters = launch(kernel(NUMBERS), workgroups, [out], **options)
    return out.array, counters


@pytest.mark.parametrize("processes", [2, 3, 8])
@pytest.mark.parametrize("workgroups", [1, 7, 40])
def test_results_and_counts_are_those_of_one_process(processes, workgroups):
    wanted, one = written(workgroups, processes=1)
    got, several = written(workgroups, processes=processes, batch=2)
    assert (wanted == np.add.outer(np.arange(workgroups), np.arange(32)).reshape(-1)).all()
    assert (got == wanted).all()
    assert several.as_dict() == one.as_dict()
    assert several.by_name == one.by_name


def test_the_error_is_that_of_the_first_batch_that_fails():
    def raised(**options) -> str:
        short = Buffer(np.zeros(32 * 11, np.uint32), "out")
        with pytest.raises(OutOfBounds) as caught:
            launch(kernel(NUMBERS), 16, [short], batch=1, **options)
        assert caught.value.address
        return str(caught.value)

    assert raised(processes=1) == raised(processes=3) == raised(processes=2)


def test_the_budget_is_that_of_all_processes_together():
    executed = written(12, processes=1)[1].wave_instructions
    written(12, processes=3, budget=executed)
    with pytest.raises(BudgetExceeded):
        written(12, processes=3, budget=executed - 1)


def test_atomic_operations_stay_in_one_process(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork"))
    total = Buffer(np.zeros(1, np.uint32), "total")
    launch(kernel(SUM), 9, [total], processes=4)
    assert total.array[0] == 9 * 32
    assert most_processes(kernel(SUM), 4) == 1


def test_a_small_launch_is_not_divided_unasked(monkeypatch):
    forks, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(fork()) or forks[-1])
    for _ in range(2):
        written(40)
    assert not forks


def test_a_launch_that_takes_long_is_divided_unasked(monkeypatch):
    from rocm_sd.verify.emulator import dispatch

    monkeypatch.setattr(processes_module, "_CROWDED_SECONDS", 0.0)
    monkeypatch.setattr(processes_module, "_crowd", type(processes_module._crowd)())
    forks, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(fork()) or forks[-1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 2})
    monkeypatch.setattr(dispatch, "_SHARE_SECONDS", 1e-9)
    got, _ = written(40)
    assert len(forks) in (0, 2)  # none where the kernel is new and its first batch is all of it
    got, _ = written(40)
    assert forks
    assert (got == written(40, processes=1)[0]).all()


def test_no_launch_is_divided_unasked_while_others_use_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 2})
    crowd = type(processes_module._crowd)()
    monkeypatch.setattr(processes_module, "_crowd", crowd)
    assert most_processes(kernel(NUMBERS), None) == 3
    with crowd.looked_for():
        time.sleep(0.05)
    assert most_processes(kernel(NUMBERS), None) == 1
    assert most_processes(kernel(NUMBERS), 3) == 3


def nothing() -> None:
    return None


def test_reports_come_from_all_and_none_where_one_failed():
    done: list[int] = []
    assert divided(range(6), 3, done.append, lambda: list(done), done.clear) == [[0, 3], [1, 4], [2, 5]]

    def execute(batch: int) -> None:
        if batch == 3:
            raise UnknownInstruction("v_new", 0x40, "a reason")

    for count in (2, 3):
        with pytest.raises(NotDivided):
            divided(range(6), count, execute, nothing, nothing)


def test_a_process_that_is_gone_or_hangs_is_not_waited_for(monkeypatch):
    this = os.getpid()
    with pytest.raises(NotDivided, match="gone"):
        divided([0, 1], 2, lambda _batch: os.getpid() == this or os._exit(1), nothing, nothing)
    monkeypatch.setattr(processes_module, "_PATIENCE_SECONDS", 0.05)
    began = time.perf_counter()
    with pytest.raises(NotDivided, match="answer"):
        divided([0, 1], 2, lambda _batch: os.getpid() == this or time.sleep(60), nothing, nothing)
    assert time.perf_counter() - began < 30


def test_where_a_fork_fails_one_process_does_all(monkeypatch):
    this, begin = os.getpid(), Machine.begin
    monkeypatch.setattr(Machine, "begin", lambda *given: begin(*given) if os.getpid() == this else os._exit(1))
    got, counters = written(12, processes=3)
    monkeypatch.undo()
    wanted, one = written(12, processes=1)
    assert (got == wanted).all()
    assert counters.as_dict() == one.as_dict()


# A workgroup writes its word and then reads that of workgroup 0, which matters where it is stored.
FIRST = """
s_load_b64 s[4:5], s[0:1], 0x0
s_lshl_b32 s6, s2, 2
v_mov_b32 v1, s6
v_mov_b32 v2, 0
s_mov_b32 exec_lo, 1
s_waitcnt lgkmcnt(0)
global_load_b32 v3, v2, s[4:5]
s_waitcnt vmcnt(0)
{use}
global_store_b32 v1, v3, s[4:5]
s_endpgm
"""


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_reads_of_what_another_process_writes_matter_or_do_not(processes):
    for batch in (None, 1):
        words = Buffer(np.arange(12, dtype=np.uint32) + 7, "x")
        launch(kernel(FIRST.format(use="v_mov_b32 v3, 5")), 12, [words], processes=processes, batch=batch)
        assert (words.array == 5).all()
        words = Buffer(np.arange(12, dtype=np.uint32) + 7, "x")
        with pytest.raises(GlobalRace, match="byte 0 of x"):
            launch(kernel(FIRST.format(use="")), 12, [words], processes=processes, batch=batch)
        assert (words.array == np.arange(12) + 7).all()


def test_a_kernel_about_which_processes_disagree_stays_in_one(monkeypatch):
    code = kernel(FIRST.format(use="v_mov_b32 v3, 6"))
    forks, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(fork()) or forks[-1])
    for _ in range(2):
        words = Buffer(np.zeros(12, np.uint32), "x")
        launch(code, 12, [words], processes=2)
        assert (words.array == 6).all()
    assert len(forks) == 1, "the first launch tried, and the second did not"


def share(*kinds: int, unit: int = 4, read: frozenset[int] = frozenset(), doubtful: bool = False) -> Share:
    return Share({256: (unit, np.array(kinds, np.uint8))} if kinds else {}, set(read), doubtful)


def test_what_processes_touched_is_compared_to_the_byte():
    apart, common = share(WRITE, 0, READ), share(0, WRITE, READ, READ | WRITE)
    assert not may_race([apart, common, share(read=frozenset({512}))])
    assert may_race([apart, share(READ)])
    assert may_race([common, share(0, READ)])
    assert may_race([common, share(0, 0, 0, WRITE)])
    assert may_race([share(ATOMIC), share(ATOMIC)])
    assert may_race([apart, share(read=frozenset({256}))])
    assert may_race([apart, share(doubtful=True)])
    assert may_race([apart, share(), common, share(0, 0, WRITE)])
    assert not may_race([apart, share(0, 0, 0, 0, 0, 0, 0, WRITE, unit=1)])
    assert may_race([apart, share(0, 0, 0, WRITE, unit=1)])
    assert may_race([share(0, 0, 0, WRITE, unit=1), apart])


def test_a_kernel_launched_again_has_counts_of_its_own():
    first, counted = written(5, processes=1)
    again, recounted = written(5, processes=1)
    assert (first == again).all()
    assert counted.as_dict() == recounted.as_dict()
