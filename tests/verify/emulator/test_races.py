"""Global memory that waves share: what a barrier and an atomic order, and that nothing orders workgroups."""

from __future__ import annotations

import numpy as np
import pytest
from hand_assembly import kernel

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.verify.emulator import Buffer, GlobalRace, launch, races

# s8 is the wave, s2 the workgroup, v9 the dword of a lane in its wave, v8 that in its workgroup; s[4:5] the buffer.
START = """
  s_load_b64 s[4:5], s[0:1], 0x0
  v_lshrrev_b32 v1, 5, v0
  v_readfirstlane_b32 s8, v1
  v_lshlrev_b32 v8, 2, v0
  v_and_b32 v9, 31, v0
  v_lshlrev_b32 v9, 2, v9
  v_mov_b32 v2, 0
  s_waitcnt lgkmcnt(0)
"""
STORE, LOOK = "global_store_b32 v9, v0, s[4:5]", "global_load_b32 v3, v9, s[4:5]"
# What was loaded is stored elsewhere: it matters.
KEEP = "\n s_waitcnt vmcnt(0)\n global_store_b32 v8, v3, s[4:5] offset:512"
LOAD = LOOK + KEEP
ATOMIC = "global_atomic_add_u32 v9, v0, s[4:5]"
COUNTED = iter(range(1000))


def only(which: str, number: int, body: str) -> str:
    """`body` for one wave of a workgroup (s8) or one workgroup (s2)."""
    label = f".Lskip{next(COUNTED)}"
    return f"s_cmp_lg_u32 {which}, {number}\n s_cbranch_scc1 {label}\n {body}\n{label}:\n"


def run(body: str, waves: int = 1, grid: int = 1, **options: int) -> np.ndarray:
    data = np.zeros(256, np.uint32)
    text = f"{START}\n{body}\n s_waitcnt vmcnt(0)\n s_endpgm"
    launch(kernel(text, waves=waves), grid, [Buffer(data, "x")], **options)
    return data


def in_turn(which: str, first: str, second: str, between: str = "") -> str:
    return only(which, 0, first) + between + only(which, 1, second)


CONFLICTS = {"writes_reads": (STORE, LOAD), "reads_writes": (LOAD, STORE), "writes_writes": (STORE, STORE)}


@pytest.mark.parametrize("pair", CONFLICTS.values(), ids=CONFLICTS)
def test_waves_of_a_workgroup_need_a_barrier_between(pair):
    with pytest.raises(GlobalRace, match=r"byte 0 of x, which wave . of the same workgroup .* with no barrier between"):
        run(in_turn("s8", *pair), waves=2)
    run(in_turn("s8", *pair, between="s_waitcnt_vscnt null, 0x0\n s_barrier\n"), waves=2)


@pytest.mark.parametrize(
    "options", [{}, {"batch": 1}, {"processes": 2}], ids=["one_batch", "two_batches", "two_processes"]
)
@pytest.mark.parametrize("pair", CONFLICTS.values(), ids=CONFLICTS)
def test_nothing_orders_workgroups(pair, options):
    for barrier in ("", "s_barrier\n"):
        with pytest.raises(GlobalRace, match=r"byte 0 of x, which wave 0 of workgroup . .* in the same launch"):
            run(in_turn("s2", *pair, between=barrier), grid=2, **options)


def test_reading_together_and_writing_apart_is_no_race():
    run(LOOK, waves=4, grid=4)
    body = "s_lshl_b32 s9, s2, 8\n v_add_nc_u32 v8, s9, v8\n global_load_b32 v3, v8, s[4:5]\n s_waitcnt vmcnt(0)\n"
    body += "v_add_nc_u32 v3, v0, v3\n global_store_b32 v8, v3, s[4:5]"
    assert (run(body, waves=2, grid=4) == np.tile(np.arange(64), 4)).all()


@pytest.mark.parametrize(
    "shape", [{"waves": 2}, {"grid": 2}, {"grid": 2, "batch": 1}, {"grid": 2, "processes": 2}], ids=str
)
def test_a_lost_update(shape):
    body = f"{LOOK}\n s_waitcnt vmcnt(0)\n v_add_nc_u32 v3, 1, v3\n global_store_b32 v9, v3, s[4:5]"
    with pytest.raises(GlobalRace):
        run(body, **shape)
    assert (run("v_mov_b32 v3, 1\n global_atomic_add_u32 v9, v3, s[4:5]", **shape)[:32] == 2).all()


@pytest.mark.parametrize("other", [LOAD, STORE])
@pytest.mark.parametrize("shape", [("s8", {"waves": 2}), ("s2", {"grid": 2})], ids=["waves", "workgroups"])
def test_an_atomic_is_ordered_with_atomics_alone(shape, other):
    which, options = shape
    run(in_turn(which, ATOMIC, ATOMIC), **options)
    with pytest.raises(GlobalRace, match="atomically"):
        run(in_turn(which, ATOMIC, other), **options)
    with pytest.raises(GlobalRace, match="atomically"):
        run(in_turn(which, other, ATOMIC), **options)


@pytest.mark.parametrize("processes", [1, 2])
def test_races_are_found_to_the_byte(processes):
    byte = "global_store_b8 v2, v0, s[4:5] offset:{}"
    options = {"grid": 2, "processes": processes}
    run("s_mov_b32 exec_lo, 1\n" + in_turn("s2", byte.format(1), byte.format(2)), **options)
    half = "global_store_b16 v2, v0, s[4:5] offset:2"
    with pytest.raises(GlobalRace, match="byte 2 of x"):
        run("s_mov_b32 exec_lo, 1\n" + in_turn("s2", half, byte.format(2)), **options)


def test_a_scalar_load_of_what_another_workgroup_writes():
    with pytest.raises(GlobalRace, match="byte 64 of x"):
        run(
            in_turn("s2", STORE, f"s_load_b32 s10, s[4:5], 0x40\n s_waitcnt lgkmcnt(0)\n v_mov_b32 v3, s10{KEEP}"),
            grid=2,
        )


BUFFER = "s_mov_b32 s12, s4\n s_mov_b32 s13, s5\n s_mov_b32 s14, {}\n s_mov_b32 s15, 0x31027000\n"


def test_a_buffer_store_that_the_descriptor_stops_writes_nothing():
    store = "buffer_store_b64 v[2:3], v9, s[12:15], 0 offen"
    one = "s_mov_b32 exec_lo, 2\n v_mov_b32 v3, 0\n"
    with pytest.raises(GlobalRace, match="byte 8 of x"):
        run(one + BUFFER.format(12) + in_turn("s2", store, f"global_load_b32 v3, v9, s[4:5] offset:4{KEEP}"), grid=2)
    # Of the two dwords the first goes through.
    run(one + BUFFER.format(8) + in_turn("s2", store, f"global_load_b32 v3, v9, s[4:5] offset:4{KEEP}"), grid=2)
    with pytest.raises(GlobalRace, match="byte 4 of x"):
        run(one + BUFFER.format(8) + in_turn("s2", store, LOAD), grid=2)


def test_two_views_of_the_same_bytes():
    data = np.zeros(256, np.uint32)
    text = START.replace("s_load_b64 s[4:5]", "s_load_b128 s[4:7]")
    text += in_turn("s2", STORE, LOAD.replace("s[4:5]", "s[6:7]")) + "s_endpgm"
    with pytest.raises(GlobalRace, match="byte 64 of x"):
        launch(kernel(text, pointers=2), 2, [Buffer(data[:48], "x"), Buffer(data[16:], "y")])
    launch(kernel(text, pointers=2), 2, [Buffer(data[:32], "x"), Buffer(data[32:], "y")])


def test_lanes_that_go_to_several_buffers_at_once():
    text = START.replace("s_load_b64 s[4:5]", "s_load_b128 s[4:7]")
    text += "v_mov_b32 v4, s4\n v_mov_b32 v5, s5\n v_mov_b32 v6, s6\n v_mov_b32 v7, s7\n v_cmp_lt_u32 vcc_lo, 15, v0\n"
    text += "v_cndmask_b32 v4, v4, v6, vcc_lo\n v_cndmask_b32 v5, v5, v7, vcc_lo\n"
    text += in_turn("s2", "global_store_b32 v[4:5], v2, off", LOAD.replace("s[4:5]", "s[6:7]")) + "s_endpgm"
    with pytest.raises(GlobalRace, match="byte 0 of y"):
        launch(kernel(text, pointers=2), 2, [Buffer(np.zeros(256, np.uint32), name) for name in "xy"])


SPLIT = """
  s_load_b64 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v9, 2, v0
  v_xor_b32 v8, 0x80, v9
  s_wait_kmcnt 0x0
  {before}
  s_wait_storecnt 0x0
  s_barrier_signal -1
  {between}
  s_barrier_wait -1
  {after}
  s_endpgm
"""


def split_barrier(**parts: str) -> None:
    text = SPLIT.format(**{"before": "", "between": "", "after": ""} | parts)
    launch(kernel(text, "gfx1201", waves=2), 1, [Buffer(np.zeros(256, np.uint32), "x")])


def test_gfx12_orders_what_was_done_before_the_signal_and_no_more():
    keep = KEEP.replace("s_waitcnt vmcnt(0)", "s_wait_loadcnt 0x0").replace("v8", "v9")
    store, load = STORE, f"global_load_b32 v3, v8, s[4:5]{keep}"
    split_barrier(before=store, after=load)
    for parts in ({"between": store, "after": load}, {"before": store, "between": load}):
        with pytest.raises(GlobalRace, match="no barrier between"):
            split_barrier(**parts)


def test_a_log_that_is_reduced_still_finds_races(monkeypatch):
    monkeypatch.setattr(races, "_KEPT_LANES", 0)
    reduced, reduce = [], races.Races._reduce
    monkeypatch.setattr(races.Races, "_reduce", lambda self: reduced.append(1) or reduce(self))
    # Workgroups 0 to 4 read, the last one writes what workgroup 2 alone has read.
    read = "s_lshl_b32 s9, s2, 2\n v_mov_b32 v3, s9\n global_load_b32 v4, v3, s[4:5]\n"
    write = "v_mov_b32 v3, {}\n global_store_b32 v3, v0, s[4:5]"
    run(read + only("s2", 5, write.format(24)), grid=6, batch=1)
    with pytest.raises(GlobalRace, match="workgroup 2 reads"):
        run(read + only("s2", 5, write.format(8)), grid=6, batch=1)
    run(f"{ATOMIC}\n s_waitcnt vmcnt(0)", grid=6, batch=1)
    with pytest.raises(GlobalRace, match="workgroup 5 writes"):
        run(ATOMIC + "\n" + only("s2", 5, STORE), grid=6, batch=1)
    assert len(reduced) == 4 * 5


# 32 rows in place by two waves: the second reads the last row again, which the first writes.
IN_PLACE = """
  v_min_u32 v4, 31, v0
  v_lshlrev_b32 v4, 2, v4
  global_load_b32 v3, v4, s[4:5]
  s_waitcnt vmcnt(0)
  v_add_nc_u32 v3, 5, v3
  {also}
  v_cmp_gt_u32 vcc_lo, 32, v0
  s_and_b32 exec_lo, exec_lo, vcc_lo
  global_store_b32 v4, v3, s[4:5]
"""


def test_a_read_of_what_another_wave_writes_may_be_forgotten():
    found = run(IN_PLACE.format(also=""), waves=2)
    assert (found[:32] == 5).all()
    assert (found[32:] == 0).all()
    with pytest.raises(GlobalRace, match="byte 124 of x"):
        run(IN_PLACE.format(also="global_store_b32 v8, v3, s[4:5] offset:512"), waves=2)


@pytest.mark.parametrize("use", ["v_and_b32 v3, 0x10, v3", "v_and_b32 v3, 1, v3", "v_max_i32 v3, 0, v3"])
def test_a_read_that_matters_a_little_matters(use):
    with pytest.raises(GlobalRace):
        run(in_turn("s2", STORE, f"{LOOK}\n s_waitcnt vmcnt(0)\n {use}{KEEP}"), grid=2)


def test_a_read_whose_value_is_an_address_matters():
    use = "s_waitcnt vmcnt(0)\n v_lshlrev_b32 v3, 2, v3\n global_load_b32 v4, v3, s[4:5] offset:512"
    with pytest.raises(GlobalRace, match="reads at"):
        run(in_turn("s2", "v_mov_b32 v0, 0\n" + STORE, f"{LOOK}\n {use}"), grid=2)
