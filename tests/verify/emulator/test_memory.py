"""Global memory and LDS: every width moves the right bytes, and each kind of bad access is named."""

from __future__ import annotations

import numpy as np
import pytest
from hand_assembly import kernel

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.verify.emulator import (
    Buffer,
    MisalignedAccess,
    OutOfBounds,
    UninitialisedRead,
    UnwrittenOutput,
    launch,
)

# v8 = byte offset into the input, v9 = 16 bytes a lane of the output, s[4:5] input, s[6:7] output.
COPY = """
  s_load_b128 s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v8, {shift}, v0
  v_lshlrev_b32 v9, 4, v0
  v_mov_b32 v1, 0x11111111
  v_mov_b32 v2, 0x22222222
  v_mov_b32 v3, 0x33333333
  v_mov_b32 v4, 0x44444444
  s_waitcnt lgkmcnt(0)
  {body}
  s_waitcnt vmcnt(0) lgkmcnt(0)
  global_store_b128 v9, v[1:4], s[6:7]
  s_endpgm
"""
DATA = np.arange(1, 513, dtype=np.uint32) * np.uint32(0x9E3779B1)
KEPT = [0x11111111, 0x22222222, 0x33333333, 0x44444444]


def copied(body: str, shift: int, **options: int) -> np.ndarray:
    out = np.zeros((32, 4), np.uint32)
    arguments = [Buffer(DATA, "input"), Buffer(out, "output", initialised=False, must_write=True)]
    launch(kernel(COPY.format(body=body, shift=shift), pointers=2, **options), 1, arguments)
    return out


def signed_bytes() -> np.ndarray:
    return DATA.view(np.int8)[:32].astype(np.int32).view(np.uint32)


LOADS = {
    "u8 v1": (0, lambda: DATA.view(np.uint8)[:32].astype(np.uint32)),
    "i8 v1": (0, signed_bytes),
    "u16 v1": (1, lambda: DATA.view(np.uint16)[:32].astype(np.uint32)),
    "i16 v1": (1, lambda: DATA.view(np.int16)[:32].astype(np.int32).view(np.uint32)),
    "d16_b16 v1": (1, lambda: DATA.view(np.uint16)[:32] | np.uint32(0x11110000)),
    "d16_hi_b16 v1": (1, lambda: DATA.view(np.uint16)[:32].astype(np.uint32) << 16 | np.uint32(0x1111)),
    "d16_u8 v1": (0, lambda: DATA.view(np.uint8)[:32] | np.uint32(0x11110000)),
    "d16_hi_i8 v1": (0, lambda: signed_bytes() << np.uint32(16) | np.uint32(0x1111)),
    "b32 v1": (2, lambda: DATA[:32]),
    "b64 v[1:2]": (3, lambda: DATA[:64].reshape(32, 2)),
    "b96 v[1:3]": (4, lambda: DATA[:128].reshape(32, 4)[:, :3]),
    "b128 v[1:4]": (4, lambda: DATA[:128].reshape(32, 4)),
}


@pytest.mark.parametrize("form", LOADS)
def test_global_loads_of_every_width(form):
    width, register = form.split()
    shift, expected = LOADS[form]
    wanted = np.tile(np.array(KEPT, np.uint32), (32, 1))
    values = expected().reshape(32, -1)
    wanted[:, : values.shape[1]] = values
    assert (copied(f"global_load_{width} {register}, v8, s[4:5]", shift) == wanted).all()


def test_negative_and_positive_offsets():
    assert (copied("global_load_b32 v1, v8, s[4:5] offset:64", 2)[:, 0] == DATA[16:48]).all()
    body = "v_add_nc_u32 v8, 0x100, v8\n global_load_b32 v1, v8, s[4:5] offset:-256"
    assert (copied(body, 2)[:, 0] == DATA[:32]).all()


LDS_COPY = """
  v_lshlrev_b32 v10, 4, v0
  global_load_b128 v[12:15], v10, s[4:5]
  s_waitcnt vmcnt(0)
  ds_store_b128 v10, v[12:15]
  s_waitcnt lgkmcnt(0)
  {body}
"""


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("ds_load_b32 v1, v10 offset:4", lambda d: [d[:, 1]]),
        ("ds_load_b64 v[1:2], v10 offset:8", lambda d: [d[:, 2], d[:, 3]]),
        ("ds_load_b128 v[1:4], v10", lambda d: list(d.T)),
        ("ds_load_2addr_b32 v[1:2], v10 offset0:3 offset1:1", lambda d: [d[:, 3], d[:, 1]]),
        ("ds_load_2addr_b64 v[1:4], v10 offset0:1 offset1:0", lambda d: [d[:, 2], d[:, 3], d[:, 0], d[:, 1]]),
        ("ds_load_u16 v1, v10 offset:6", lambda d: [d[:, 1] >> np.uint32(16)]),
        ("ds_load_u16_d16_hi v1, v10 offset:4", lambda d: [d[:, 1] << np.uint32(16) | np.uint32(0x1111)]),
        ("ds_load_i8 v1, v10", lambda d: [d[:, 0].astype(np.int8).astype(np.int32).view(np.uint32)]),
    ],
)
def test_lds_loads_of_every_width(load, expected):
    found = copied(LDS_COPY.format(body=load), 2, lds=512)
    for column, values in enumerate(expected(DATA[:128].reshape(32, 4))):
        assert (found[:, column] == values).all()


def test_lds_stores_of_two_addresses_and_of_halves():
    body = """
      ds_store_2addr_b32 v10, v12, v13 offset0:2 offset1:3
      ds_store_b16 v10, v14 offset:0
      ds_store_b16_d16_hi v10, v14 offset:2
      ds_store_b8 v10, v15 offset:4
      s_waitcnt lgkmcnt(0)
      ds_load_b128 v[1:4], v10
    """
    found = copied(LDS_COPY.format(body=body), 2, lds=512)
    d = DATA[:128].reshape(32, 4)
    assert (found[:, 0] == d[:, 2]).all()
    assert (found[:, 1] == (d[:, 1] & 0xFFFFFF00 | d[:, 3] & 0xFF)).all()
    assert (found[:, 2:] == d[:, :2]).all()


BUFFER = """
  s_mov_b32 s12, s4
  s_mov_b32 s13, s5
  s_mov_b32 s14, {records}
  s_mov_b32 s15, 0x31027000
  buffer_load_b32 v1, v8, s[12:15], 0 offen
"""


def test_a_buffer_access_beyond_the_descriptor_gives_zero():
    found = copied(BUFFER.format(records=80), 2)[:, 0]
    assert (found[:20] == DATA[:20]).all()
    assert (found[20:] == 0).all()


def test_a_buffer_access_inside_the_descriptor_but_in_no_buffer():
    body = "v_add_nc_u32 v8, 0x7c4, v8\n" + BUFFER.format(records="0x7ffffffe")
    with pytest.raises(OutOfBounds, match="input"):
        copied(body, 2)


def test_one_past_the_end():
    with pytest.raises(OutOfBounds, match="offset 2048 of it"):
        copied("v_add_nc_u32 v8, 0x784, v8\n global_load_b32 v1, v8, s[4:5]", 2)


def test_masked_lanes_access_nothing():
    body = """
      s_mov_b32 exec_lo, 0x0000ffff
      v_lshlrev_b32 v8, 7, v0
      global_load_b32 v1, v8, s[4:5]
      s_mov_b32 exec_lo, -1
    """
    found = copied(body, 2)[:, 0]
    assert (found[:16] == DATA[:512:32]).all()
    assert (found[16:] == KEPT[0]).all()


def test_misaligned():
    with pytest.raises(MisalignedAccess, match="4 bytes"):
        copied("global_load_b32 v1, v8, s[4:5] offset:2", 2)
    with pytest.raises(MisalignedAccess, match="LDS"):
        copied(LDS_COPY.format(body="ds_load_b32 v1, v10 offset:1"), 2, lds=512)


def test_a_null_pointer():
    out = np.zeros((32, 4), np.uint32)
    code = kernel(COPY.format(body="global_load_b32 v1, v8, s[4:5]", shift=2), pointers=2)
    with pytest.raises(OutOfBounds):
        launch(code, 1, [None, Buffer(out)])


def test_reading_memory_that_nothing_wrote():
    with pytest.raises(UninitialisedRead, match="byte 0 of output"):
        copied("global_load_b32 v1, v8, s[6:7]", 4)
    with pytest.raises(UninitialisedRead, match="LDS byte 512"):
        copied(LDS_COPY.format(body="ds_load_b32 v1, v10 offset:512"), 2, lds=1024)


def test_what_was_stored_may_be_loaded():
    body = "global_store_b128 v9, v[1:4], s[6:7]\n s_waitcnt_vscnt null, 0x0\n global_load_b32 v2, v9, s[6:7]"
    assert (copied(body, 2)[:, 1] == KEPT[0]).all()


def test_lds_beyond_what_the_kernel_reserves():
    with pytest.raises(OutOfBounds, match="512 bytes that the kernel reserves"):
        copied(LDS_COPY.format(body="ds_load_b32 v1, v10 offset:512"), 2, lds=512)


def test_an_unwritten_tail():
    out = np.zeros((33, 4), np.uint32)
    code = kernel(COPY.format(body="", shift=2), pointers=2)
    with pytest.raises(UnwrittenOutput, match="16 of 528 bytes of output were never written, the first at offset 512"):
        launch(code, 1, [Buffer(DATA), Buffer(out, "output", initialised=False, must_write=True)])


def test_an_array_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        Buffer(np.zeros((4, 4), np.float32).T[:2])


ATOMIC = """
  s_load_b128 s[4:7], s[0:1], 0x0
  v_mov_b32 v2, 0
  v_add_nc_u32 v3, 1, v0
  v_lshlrev_b32 v9, 2, v0
  s_waitcnt lgkmcnt(0)
  {body}
  s_waitcnt vmcnt(0)
  s_endpgm
"""


def test_atomic_additions_of_all_lanes_and_waves():
    total = np.zeros(1, np.uint32)
    before = np.zeros(64, np.uint32)
    body = "global_atomic_add_u32 v1, v2, v3, s[4:5] glc\n s_waitcnt vmcnt(0)\n global_store_b32 v9, v1, s[6:7]"
    launch(kernel(ATOMIC.format(body=body), pointers=2, waves=2), 1, [Buffer(total), Buffer(before)])
    assert total[0] == 64 * 65 // 2
    assert sorted(np.append(before, total[0])) == sorted({*before.tolist(), int(total[0])})


def test_atomic_float_addition_and_maximum():
    total = np.zeros(2, np.float32)
    body = """
      v_cvt_f32_u32 v3, v3
      global_atomic_add_f32 v2, v3, s[4:5]
      global_atomic_max_f32 v2, v3, s[4:5] offset:4
    """
    launch(kernel(ATOMIC.format(body=body), pointers=2), 1, [Buffer(total), None])
    assert total.tolist() == [32 * 33 / 2, 32.0]
