"""Where buffers lie: no index of one reaches another, and views of one array share their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_assembly import kernel

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.verify.emulator import Buffer, EmulationError, MisalignedAccess, OutOfBounds, UninitialisedRead, launch
from rocm_sd.verify.runner import emulated
from verify.kernels import views

# s[4:5] and s[6:7] are the two buffers, v9 the byte of each lane's dword.
TWO_BUFFERS = """
  s_load_b128 s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v9, 2, v0
  v_mov_b32 v10, 0
  s_waitcnt lgkmcnt(0)
  {body}
  s_waitcnt vmcnt(0)
  s_endpgm
"""
LANES = np.arange(32, dtype=np.uint32)


def run(body: str, *arrays: np.ndarray, **options: bool) -> None:
    buffers = [Buffer(array, name, **options) for array, name in zip(arrays, ("input", "output"), strict=True)]
    launch(kernel(TWO_BUFFERS.format(body=body), pointers=2), 1, buffers)


FAR = [0x10800, 0x20800, 0x100000, 0x7FFFFFFC, 0x80000000, 0xFFFFFFFC]


@pytest.mark.parametrize("distance", FAR)
@pytest.mark.parametrize("access", ["global_load_b32 v1, v8, s[4:5]", "global_store_b32 v8, v1, s[4:5]"])
def test_an_index_that_runs_far_out_of_a_buffer_finds_nothing(access, distance):
    # Two buffers of 2048 bytes: some distance leads from one into the other where they lie close together.
    arrays = np.zeros(512, np.uint32), np.zeros(512, np.uint32)
    with pytest.raises(OutOfBounds, match=f"nearest is input .* offset {distance} of it"):
        run(f"v_mov_b32 v1, 1\n v_add_nc_u32 v8, {distance}, v9\n s_mov_b32 exec_lo, 1\n {access}", *arrays)


@pytest.mark.parametrize("pages", [-1024, -1, 1, 16, 255])
def test_an_index_of_64_bits_that_runs_far_out_of_a_buffer_finds_nothing(pages):
    # In pages of 4 GiB.
    body = f"v_mov_b32 v2, s4\n s_add_i32 s8, s5, {pages}\n v_mov_b32 v3, s8\n global_load_b32 v1, v[2:3], off"
    with pytest.raises(OutOfBounds):
        run(body, np.zeros(512, np.uint32), np.zeros(512, np.uint32))


EACH_ITS_BUFFER = """
  v_mov_b32 v2, s4
  v_mov_b32 v3, s5
  v_mov_b32 v4, s6
  v_mov_b32 v5, s7
  v_and_b32 v6, 1, v0
  v_cmp_eq_u32 vcc_lo, 1, v6
  v_cndmask_b32 v2, v2, v4, vcc_lo
  v_cndmask_b32 v3, v3, v5, vcc_lo
  v_add_co_u32 v2, vcc_lo, v2, v9
  v_add_co_ci_u32 v3, vcc_lo, v3, v10, vcc_lo
  {access}
"""


def test_lanes_of_one_instruction_may_go_to_several_buffers():
    first, second = LANES + 100, LANES + 200
    body = "global_load_b32 v1, v[2:3], off\n s_waitcnt vmcnt(0)\n v_add_nc_u32 v1, 1000, v1\n"
    run(EACH_ITS_BUFFER.format(access=body + "global_store_b32 v[2:3], v1, off"), first, second)
    odd = LANES % 2
    assert (first == LANES + 100 + 1000 * (1 - odd)).all()
    assert (second == LANES + 200 + 1000 * odd).all()


def test_one_lane_of_many_that_leaves_its_buffer():
    body = EACH_ITS_BUFFER.format(access="global_load_b32 v1, v[2:3], off")
    with pytest.raises(OutOfBounds, match=r"nearest is output .* offset 124 of it"):
        run(body, LANES.copy(), LANES[:31].copy())


def test_an_address_whose_carry_is_lost():
    data, out = np.arange(2048, dtype=np.uint32), np.zeros(32, np.uint32)
    body = "s_add_u32 s4, s4, 0x1000\n {carry}\n global_load_b32 v1, v9, s[4:5]\n s_waitcnt vmcnt(0)\n"
    body += "global_store_b32 v9, v1, s[6:7]"
    run(body.format(carry="s_addc_u32 s5, s5, 0"), data, out)
    assert (out == data[1024:1056]).all()
    with pytest.raises(OutOfBounds):
        run(body.format(carry=""), data, out)


def test_more_buffers_than_there_is_room_for():
    with pytest.raises(EmulationError, match="room for 126"):
        launch(kernel("s_endpgm", pointers=130), 1, [Buffer(LANES.copy()) for _ in range(130)])


COPY_THROUGH_VIEWS = """
  v_add_nc_u32 v1, 7, v0
  global_store_b32 v9, v1, s[6:7]
  s_waitcnt_vscnt null, 0x0
  global_load_b32 v2, v9, s[4:5]
  s_waitcnt vmcnt(0)
  global_store_b32 v9, v2, s[4:5] offset:192
"""


def test_what_is_written_through_one_view_is_read_through_another():
    array = np.zeros(96, np.uint32)
    array[:16] = 1000
    # The second view is the dwords from 16 on; the first sees the half of what is written there, behind 16 others.
    run(COPY_THROUGH_VIEWS, array[:80], array[16:48])
    assert (array[:16] == 1000).all()
    assert (array[16:48] == LANES + 7).all()
    assert (array[48:64] == 1000).all()
    assert (array[64:80] == LANES[:16] + 7).all()
    assert (array[80:] == 0).all()


def test_views_that_overlap_keep_their_own_bounds():
    array = np.zeros(96, np.uint32)
    run("global_load_b32 v1, v9, s[4:5] offset:256", array[:96], array[16:48])
    for first in (array[:80], array[:16], array[64:]):
        with pytest.raises(OutOfBounds, match=r"nearest is output .* offset 128 of it"):
            run("global_load_b32 v1, v9, s[6:7] offset:128", first, array[16:48])


def test_a_value_that_one_view_holds_is_there_for_the_other():
    array, known = np.zeros(64, np.uint32), np.zeros(256, np.bool_)
    code = kernel(TWO_BUFFERS.format(body="global_load_b32 v1, v9, s[6:7]"), pointers=2)
    buffers = Buffer(array[:48], "x", known=known[:192]), Buffer(array[16:], "y", known=known[64:])
    with pytest.raises(UninitialisedRead, match="byte 0 of y"):
        launch(code, 1, list(buffers))
    known[:192] = True
    launch(code, 1, list(buffers))
    stores = kernel(TWO_BUFFERS.format(body="global_store_b32 v9, v0, s[6:7]"), pointers=2)
    known[:] = False
    launch(stores, 1, list(buffers))
    assert known[64:192].all()
    assert not known[:64].any()
    assert not known[192:].any()


def test_a_view_is_as_misaligned_as_it_is_in_memory():
    halves = np.zeros(256, np.uint16)
    with pytest.raises(MisalignedAccess):
        run("global_load_b32 v1, v9, s[4:5]", halves[1:129], np.zeros(64, np.uint32))


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201", "gfx942"])
def test_results_in_alternating_rows_of_one_tensor(gfx):
    """Each spans most of the other, so that writing one back must not undo the other."""
    x = torch.arange(256.0).view(4, 64)
    with emulated(views, gfx) as executed:
        rows = torch.empty(4, 2, 64)
        first, second = rows[:, 0], rows[:, 1]
        views.double_and_negate[(4,)](x, first, second, 128, COLUMNS=64)
    executed.require_written(first, second, rows)
    assert torch.equal(first, 2 * x)
    assert torch.equal(second, -x)
