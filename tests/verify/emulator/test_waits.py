"""A register may not be used while its load is outstanding: on every architecture, for every counter."""

from __future__ import annotations

import numpy as np
import pytest
from hand_assembly import kernel

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd.verify.emulator import Buffer, MissingWait, launch

NAMES = {
    "gfx1100": {
        "scalar": "s_load_b128",
        "load": "global_load_b32",
        "store": "global_store_b32",
        "wait_scalar": "s_waitcnt lgkmcnt({})",
        "wait_load": "s_waitcnt vmcnt({})",
        "wait_lds": "s_waitcnt lgkmcnt({})",
        "lds_load": "ds_load_b32",
        "lds_store": "ds_store_b32",
        "add": "v_add_nc_u32",
    },
    "gfx1201": {
        "scalar": "s_load_b128",
        "load": "global_load_b32",
        "store": "global_store_b32",
        "wait_scalar": "s_wait_kmcnt {}",
        "wait_load": "s_wait_loadcnt {}",
        "wait_lds": "s_wait_dscnt {}",
        "lds_load": "ds_load_b32",
        "lds_store": "ds_store_b32",
        "add": "v_add_nc_u32",
    },
    "gfx942": {
        "scalar": "s_load_dwordx4",
        "load": "global_load_dword",
        "store": "global_store_dword",
        "wait_scalar": "s_waitcnt lgkmcnt({})",
        "wait_load": "s_waitcnt vmcnt({})",
        "wait_lds": "s_waitcnt lgkmcnt({})",
        "lds_load": "ds_read_b32",
        "lds_store": "ds_write_b32",
        "add": "v_add_u32",
    },
}
every_gfx = pytest.mark.parametrize("gfx", NAMES)

KERNEL = """
  {scalar} s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v9, 2, v0
  {first_wait}
  {load} v1, v9, s[4:5]
  {load} v2, v9, s[4:5] offset:4
  {second_wait}
  {add} v3, v1, v1
  {third_wait}
  {add} v3, v3, v2
  {store} v9, v3, s[6:7]
  s_endpgm
"""


def execute(gfx: str, text: str, **options: int) -> np.ndarray:
    lanes = 64 if gfx == "gfx942" else 32
    out = np.zeros(lanes, np.uint32)
    data = np.arange(lanes + 1, dtype=np.uint32)
    launch(kernel(text, gfx, pointers=2, **options), 1, [Buffer(data), Buffer(out, must_write=True)])
    return out


def program(gfx: str, scalar: int | None, second: int | None, third: int | None) -> str:
    names = NAMES[gfx]
    waits = {
        "first_wait": "" if scalar is None else names["wait_scalar"].format(scalar),
        "second_wait": "" if second is None else names["wait_load"].format(second),
        "third_wait": "" if third is None else names["wait_load"].format(third),
    }
    return KERNEL.format(**names, **waits)


@every_gfx
def test_loads_return_in_order(gfx):
    lane = np.arange(64 if gfx == "gfx942" else 32)
    assert (execute(gfx, program(gfx, 0, 1, 0)) == 3 * lane + 1).all()


@every_gfx
@pytest.mark.parametrize(
    ("waits", "register"),
    [((None, 0, 0), "s4"), ((0, None, 0), "v1"), ((0, 2, 0), "v1"), ((0, 1, None), "v2"), ((0, 1, 1), "v2")],
)
def test_a_wait_that_is_missing_or_too_loose(gfx, waits, register):
    with pytest.raises(MissingWait, match=f"uses {register} while") as caught:
        execute(gfx, program(gfx, *waits))
    assert caught.value.address is not None


@every_gfx
def test_scalar_loads_return_in_any_order(gfx):
    # Two are outstanding; waiting until one is left says nothing of which.
    names = NAMES[gfx]
    text = f"""
      {names["scalar"]} s[4:7], s[0:1], 0x0
      {names["scalar"]} s[8:11], s[0:1], 0x0
      {names["wait_scalar"].format(1)}
      s_mov_b32 s12, s4
      s_endpgm
    """
    with pytest.raises(MissingWait, match="s4"):
        execute(gfx, text)


@every_gfx
def test_overwriting_a_register_that_is_being_loaded(gfx):
    with pytest.raises(MissingWait, match="v_mov_b32 uses v1"):
        execute(gfx, program(gfx, 0, None, 0).replace("v3, v1, v1", "v3, v9, v9\n v_mov_b32 v1, 0"))


@every_gfx
def test_lds_loads_are_waited_for(gfx):
    names = NAMES[gfx]
    text = """
      {scalar} s[4:7], s[0:1], 0x0
      v_lshlrev_b32 v9, 2, v0
      {lds_store} v9, v0
      {wait}
      {lds_load} v1, v9
      {wait_again}
      {add} v3, v1, v1
      {wait_scalar0}
      {store} v9, v3, s[6:7]
      s_endpgm
    """
    wait = names["wait_lds"].format(0)
    fixed = {"wait": wait, "wait_scalar0": names["wait_scalar"].format(0)}
    whole = execute(gfx, text.format(**names, **fixed, wait_again=wait), lds=256)
    assert (whole == 2 * np.arange(len(whole))).all()
    with pytest.raises(MissingWait, match="v1"):
        execute(gfx, text.format(**names, **fixed, wait_again=""), lds=256)


def test_the_halves_of_a_register_are_loaded_apart():
    text = """
      s_load_b128 s[4:7], s[0:1], 0x0
      v_lshlrev_b32 v9, 2, v0
      v_mov_b32 v1, 0
      s_waitcnt lgkmcnt(0)
      global_load_d16_b16 v1, v9, s[4:5]
      v_mov_b16 v1.{half}, 7
      s_waitcnt vmcnt(0)
      global_store_b32 v9, v1, s[6:7]
      s_endpgm
    """
    assert (execute("gfx1100", text.format(half="h")) == np.arange(32) + 0x70000).all()
    with pytest.raises(MissingWait, match="v1"):
        execute("gfx1100", text.format(half="l"))


def test_waves_that_skipped_a_load_have_nothing_to_wait_for():
    # Wave 0 jumps over one of the loads, so vmcnt(1) is enough for wave 1 only.
    text = """
      s_load_b128 s[4:7], s[0:1], 0x0
      v_lshlrev_b32 v9, 2, v0
      v_lshrrev_b32 v8, 5, v0
      v_readfirstlane_b32 s8, v8
      s_waitcnt lgkmcnt(0)
      global_load_b32 v1, v9, s[4:5]
      s_cmp_eq_u32 s8, 0
      s_cbranch_scc1 .Lskip
      global_load_b32 v2, v9, s[4:5]
    .Lskip:
      s_waitcnt vmcnt({})
      v_mov_b32 v3, v1
      global_store_b32 v9, v3, s[6:7]
      s_endpgm
    """
    data, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    launch(kernel(text.format(0), pointers=2, waves=2), 1, [Buffer(data), Buffer(out, must_write=True)])
    assert (out == data).all()
    with pytest.raises(MissingWait, match="v1"):
        launch(kernel(text.format(1), pointers=2, waves=2), 1, [Buffer(data), Buffer(out)])


def test_stores_count_apart_from_loads_on_gfx11_and_with_them_on_gfx942():
    text = """
      {scalar} s[4:7], s[0:1], 0x0
      v_lshlrev_b32 v9, 2, v0
      {wait0}
      {load} v1, v9, s[4:5]
      {store} v9, v0, s[6:7]
      s_waitcnt vmcnt(1)
      {add} v3, v1, v1
      s_endpgm
    """
    for gfx, wait in (("gfx942", True), ("gfx1100", False)):
        body = text.format(**NAMES[gfx], wait0="s_waitcnt lgkmcnt(0)")
        if wait:
            execute(gfx, body)
        else:
            with pytest.raises(MissingWait, match="v1"):
                execute(gfx, body)


REFILL = """
  {scalar} s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v9, 2, v0
  v_mov_b32 v2, 5
  {wait_scalar0}
  scratch_store_{word} off, v0, off
  scratch_store_{word} off, v2, off offset:4
  {wait_store}
  {earlier}
  scratch_load_{word} v1, off, off offset:4
  {wait_load0}
  {store} v9, v1, s[6:7]
  s_endpgm
"""


def refill(gfx: str, earlier: str) -> np.ndarray:
    names = NAMES[gfx]
    word = "dword" if gfx == "gfx942" else "b32"
    wait_store = {"gfx1100": "s_waitcnt_vscnt null, 0x0", "gfx1201": "s_wait_storecnt 0x0"}.get(
        gfx, "s_waitcnt vmcnt(0)"
    )
    waits = {f"wait_{what}0": names[f"wait_{what}"].format(0) for what in ("scalar", "load")}
    text = REFILL.format(**names, **waits, wait_store=wait_store, word=word, earlier=earlier.format(**names, word=word))
    return execute(gfx, text, scratch=16, lds=256)


IN_ORDER = ["scratch_load_{word} v1, off, off", "scratch_load_{word}x2 v[0:1], off, off", "{load} v1, v9, s[4:5]"]


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
@pytest.mark.parametrize("earlier", IN_ORDER)
def test_a_later_load_of_the_same_kind_is_the_later_to_write(gfx, earlier):
    earlier = earlier.replace("{word}x2", "b64" if gfx == "gfx1100" else "dwordx2")
    assert (refill(gfx, earlier) == 5).all()


@pytest.mark.parametrize("earlier", ["scratch_load_b32 v1, off, off", "global_load_b32 v1, v9, s[4:5]"])
def test_gfx12_may_write_the_registers_of_loads_in_any_order(earlier):
    with pytest.raises(MissingWait, match="v1"):
        refill("gfx1201", earlier)


@every_gfx
def test_loads_of_two_counters_may_not_fill_one_register_at_once(gfx):
    with pytest.raises(MissingWait, match=r"scratch_load.* uses v1 while ds_"):
        refill(gfx, "{lds_store} v9, v0\n {lds_load} v1, v9")


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_a_load_whose_address_is_still_being_loaded(gfx):
    with pytest.raises(MissingWait, match="uses v9"):
        refill(gfx, "{load} v9, v9, s[4:5]\n {load} v9, v9, s[4:5]")


def test_a_load_of_half_a_register_reads_the_other_half_on_cdna():
    with pytest.raises(MissingWait, match="v1"):
        refill("gfx942", "{load} v1, v9, s[4:5]\n global_load_short_d16 v1, v9, s[4:5]")


@every_gfx
def test_scalar_loads_may_not_fill_one_register_at_once(gfx):
    again = "{scalar} s[4:7], s[0:1], 0x0".format(**NAMES[gfx])
    with pytest.raises(MissingWait, match="s4"):
        execute(gfx, f"{again}\n {again}\n s_endpgm")
