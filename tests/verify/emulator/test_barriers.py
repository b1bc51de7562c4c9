"""LDS between waves: what a barrier orders, what it does not, and barriers that cannot be passed."""

from __future__ import annotations

import numpy as np
import pytest
from hand_assembly import kernel

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.verify.emulator import Buffer, Deadlock, DivergentBarrier, LdsRace, launch

# Each of two waves writes its own 128 bytes of LDS and then reads those of the other.
EXCHANGE = """
  s_load_b64 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v9, 2, v0
  v_xor_b32 v8, 0x80, v9
  ds_store_b32 v9, v0
  {wait}
  {barrier}
  ds_load_b32 v1, v8
  s_waitcnt lgkmcnt(0)
  {after}
  {place}
  global_store_b32 v9, v1, s[4:5]
  s_endpgm
"""
WAIT = "s_waitcnt lgkmcnt(0)"


def exchange(wait: str = WAIT, barrier: str = "s_barrier", after: str = "", grid: int = 1) -> np.ndarray:
    out = np.zeros((grid, 64), np.uint32)
    text = EXCHANGE.format(
        wait=wait, barrier=barrier, after=after, place="s_lshl_b32 s8, s2, 8\n v_add_nc_u32 v9, s8, v9"
    )
    launch(kernel(text, waves=2, lds=256), grid, [Buffer(out, initialised=False, must_write=True)])
    return out


def test_a_barrier_makes_stores_visible():
    assert (exchange(grid=3) == np.arange(64) ^ 32).all()


def test_gfx12_signals_and_waits():
    text = EXCHANGE.format(
        wait="s_wait_dscnt 0x0", barrier="s_barrier_signal -1\n s_barrier_wait -1", after="", place=""
    )
    text = text.replace(WAIT, "s_wait_dscnt 0x0\n s_wait_kmcnt 0x0")
    out = np.zeros(64, np.uint32)
    launch(kernel(text, "gfx1201", waves=2, lds=256), 1, [Buffer(out, must_write=True)])
    assert (out == np.arange(64) ^ 32).all()
    with pytest.raises(LdsRace):
        launch(
            kernel(text.replace("s_barrier_signal -1\n s_barrier_wait -1", ""), "gfx1201", waves=2, lds=256),
            1,
            [Buffer(out)],
        )


def test_gfx12_orders_what_was_finished_before_the_signal_and_no_more():
    text = EXCHANGE.format(
        wait="", barrier="s_barrier_signal -1\n s_wait_dscnt 0x0\n s_barrier_wait -1", after="", place=""
    )
    text = text.replace(WAIT, "s_wait_dscnt 0x0\n s_wait_kmcnt 0x0")
    with pytest.raises(LdsRace, match="wrote with no barrier"):
        launch(kernel(text, "gfx1201", waves=2, lds=256), 1, [Buffer(np.zeros(64, np.uint32))])
    late = text.replace("ds_store_b32 v9, v0\n", "").replace("signal -1\n", "signal -1\n ds_store_b32 v9, v0\n")
    assert late != text
    with pytest.raises(LdsRace, match="wrote with no barrier"):
        launch(kernel(late, "gfx1201", waves=2, lds=256), 1, [Buffer(np.zeros(64, np.uint32))])


def test_no_barrier():
    with pytest.raises(LdsRace, match="reads LDS byte"):
        exchange(barrier="")


def test_a_store_that_was_not_waited_for_may_come_after_the_barrier():
    with pytest.raises(LdsRace, match="wrote with no barrier"):
        exchange(wait="")


def test_write_after_read():
    assert (exchange(after="s_barrier\n ds_store_b32 v9, v1") == np.arange(64) ^ 32).all()
    with pytest.raises(LdsRace, match=r"writes LDS byte .* read with no barrier"):
        exchange(after="ds_store_b32 v9, v1")


def test_write_after_write():
    with pytest.raises(LdsRace, match=r"writes LDS byte .* wrote with no barrier"):
        exchange(after="s_barrier\n ds_store_b32 v9, v1\n ds_store_b32 v8, v9")


def test_two_waves_that_write_the_same_byte_at_once():
    with pytest.raises(LdsRace, match="wrote"):
        exchange(after="s_barrier\n v_and_b32 v7, 0x7f, v9\n ds_store_b32 v7, v0")


def test_two_waves_may_write_the_same_value():
    body = "s_barrier\n v_and_b32 v7, 0x7f, v9\n ds_store_b32 v7, v7"
    assert (exchange(after=body) == np.arange(64) ^ 32).all()


def test_neighbouring_bytes_of_a_word_belong_to_different_waves():
    body = """
      s_barrier
      v_lshrrev_b32 v7, 5, v0
      v_and_b32 v6, 31, v0
      v_lshl_add_u32 v7, v6, 1, v7
      ds_store_b8 v7, v0
    """
    assert (exchange(after=body) == np.arange(64) ^ 32).all()


PART = """
  v_lshrrev_b32 v8, 5, v0
  v_readfirstlane_b32 s8, v8
  s_cmp_eq_u32 s8, 0
  {}
"""


def test_waves_at_different_barriers():
    text = PART.format("s_cbranch_scc1 .Lother\n s_barrier\n s_endpgm\n .Lother:\n s_barrier\n s_endpgm")
    with pytest.raises(DivergentBarrier, match="different barriers"):
        launch(kernel(text, waves=2), 1, [None])


def test_a_wave_that_ends_while_others_wait():
    text = PART.format("s_cbranch_scc1 .Lout\n s_barrier\n .Lout:\n s_endpgm")
    with pytest.raises(DivergentBarrier, match="have ended"):
        launch(kernel(text, waves=2), 1, [None])


def test_a_workgroup_may_take_its_own_way():
    # All waves of a workgroup agree; workgroups do not.
    text = "s_cmp_eq_u32 s2, 0\n s_cbranch_scc1 .Lout\n s_barrier\n .Lout:\n s_endpgm"
    assert launch(kernel(text, waves=2), 4, [None]).by_name["s_barrier"] == 6


def test_waiting_for_a_barrier_that_nobody_signals():
    with pytest.raises(Deadlock, match="did not signal"):
        launch(kernel("s_barrier_wait -1\n s_endpgm", "gfx1201", waves=2), 1, [None])


def test_signalling_twice():
    with pytest.raises(Deadlock, match="twice"):
        launch(kernel("s_barrier_signal -1\n s_barrier_signal -1\n s_endpgm", "gfx1201", waves=2), 1, [None])
