from __future__ import annotations

from dataclasses import replace

import pytest

from rocm_sd.ops.definition import KernelPromise
from rocm_sd.verify import compiler, gates, isa
from rocm_sd.verify.isa import MemoryAccess
from verify.kernels import attention, matmul
from verify.kernels.configs import config_of

PLAIN = KernelPromise()
DOT = KernelPromise(uses_dot=True)


@pytest.fixture(scope="module")
def good() -> isa.IsaReport:
    signature = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "M": "i32", "N": "i32", "K": "i32"}
    tile = {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32}
    config = config_of(signature, tile, divisible_by_16="MNK")
    return isa.report(compiler.compile_for("gfx1100", matmul.matmul, config))


def verdicts(report: isa.IsaReport, promise: KernelPromise) -> dict[str, bool | None]:
    found = gates.check(report, promise)
    assert [gate.name for gate in found] == list(gates.LIMITS)
    assert all(gate.sentence for gate in found)
    return {gate.name: gate.ok for gate in found}


def test_a_good_kernel_passes_every_gate_that_applies(good):
    assert verdicts(good, replace(DOT, bound_by_memory=True)) == dict.fromkeys(gates.LIMITS, True)


@pytest.mark.parametrize(
    ("gate", "change"),
    [
        ("spills", {"vgpr_spills": 1}),
        ("spills", {"sgpr_spills": 1}),
        ("scratch", {"scratch": 4}),
        ("lds", {"lds": 65537}),
        ("matrix", {"matrix_in_main": 0}),
        ("wide_loads", {"accesses_in_main": (MemoryAccess("global", True, 16), MemoryAccess("global", True, 8))}),
        ("waves", {"waves_per_simd": 7}),
    ],
)
def test_each_gate_can_fail(good, gate, change):
    found = verdicts(replace(good, **change), replace(DOT, bound_by_memory=True))
    assert [name for name, ok in found.items() if ok is False] == [gate]


def test_what_does_not_apply_is_neither_passed_nor_failed(good):
    bare = replace(good, matrix_in_main=0, accesses_in_main=(), waves_per_simd=1)
    found = verdicts(bare, PLAIN)
    assert (found["matrix"], found["wide_loads"], found["waves"]) == (None, None, None)
    assert verdicts(replace(bare, arch="gfx906"), DOT)["matrix"] is None


def test_an_op_may_say_why_its_loads_are_narrow(good):
    narrow = replace(good, accesses_in_main=(MemoryAccess("global", True, 2),))
    assert verdicts(narrow, PLAIN)["wide_loads"] is False
    assert verdicts(narrow, KernelPromise(narrow_loads_because="it gathers"))["wide_loads"] is None


@pytest.mark.parametrize(("gfx", "passes"), [("gfx1100", False), ("gfx942", True)])
def test_a_tile_that_spills_on_one_gfx_and_not_on_another(gfx, passes):
    """128x64 with 4 warps, a usual tile elsewhere: it does not fit the registers of gfx1100."""
    signature = {"q": "*fp16", "k": "*fp16", "v": "*fp16", "o": "*fp16", "length": "i32", "scale": "fp32"}
    constants = {"CAUSAL": False, "D": 64, "TILE_M": 128, "TILE_N": 64, "PRECISION": "ieee"}
    config = config_of(signature, constants, divisible_by_16=["length"], num_stages=1)
    report = isa.report(compiler.compile_for(gfx, attention.attention, config))
    found = verdicts(report, DOT)
    assert found["spills"] is passes
    assert found["scratch"] is passes
    assert found["matrix"] is True
