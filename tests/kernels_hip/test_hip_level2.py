"""docs/hip-figures.md shows what the tuning data have, what clang makes, and what the emulator counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tinygrad", reason="the emulator decodes by tinygrad's tables")
pytest.importorskip("triton", reason="the page compares with Triton's kernels")

from benchmarks import hip_compiled

from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.verify.isa import report
from rocm_sd.verify.ladder import EMULATED
from rocm_sd.verify.runner import emulated_hip

try:
    COMPILER = toolchain.find_compiler()
except toolchain.NoHipCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

FILE = Path(hip_compiled.__file__).parent / "hip-compiled" / "kernels.json"
STORED = json.loads(FILE.read_text(encoding="utf-8"))
REMEDY = "type: python benchmarks/hip_compiled.py --out benchmarks/hip-compiled/kernels.json"
OWN_COMPILER = pytest.mark.skipif(
    COMPILER.version.splitlines()[0] != STORED["versions"]["clang"], reason="the figures are another compiler's"
)


def test_what_is_stored_is_what_the_tuning_data_have():
    assert hip_compiled.compiled() == STORED["compiled"], REMEDY


def test_every_architecture_of_every_op_is_compared_and_triton_is_there_where_it_compiles():
    for op in {row["op"] for row in STORED["compiled"]}:
        rows = [row for row in STORED["compiled"] if row["op"] == op]
        assert {row["arch"] for row in rows} == set(toolchain.TARGETS)
        assert {row["arch"] for row in rows if row["triton"]} == set(toolchain.TARGETS) - {"gfx1030"}


@OWN_COMPILER
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
@pytest.mark.parametrize("name", sorted({row["op"] for row in STORED["compiled"]}))
def test_the_first_size_compiles_to_the_figures_that_are_stored(name, gfx):
    op, hip = OPS[name], OPS[name].implementation("hip")
    row = next(row for row in STORED["compiled"] if (row["op"], row["arch"]) == (name, gfx))
    sample = next(bucket.sample for bucket in op.tuning.buckets if bucket.sample.name == row["call"])
    with emulated_hip(gfx, execute=False) as run:
        hip(*sample.make(filled=False), config=hip.config_from(row["hip"]["config"]))
    facts = [report(call.code) for call in run.calls]
    assert max(each.vgprs for each in facts) == row["hip"]["vgprs"], REMEDY
    assert max(each.lds for each in facts) == row["hip"]["lds"], REMEDY
    assert min(each.waves_per_simd for each in facts) == row["hip"]["waves_per_simd"], REMEDY


@OWN_COMPILER
@pytest.mark.parametrize("op", hip_compiled.CASES)
def test_lines_are_counted_again(op):
    # One architecture of three: each kernel's own test counts on all of them.
    gfx = EMULATED[0]
    stored = next(row for row in STORED["lines"] if (row["op"], row["arch"]) == (op, gfx))
    assert hip_compiled.lines(op, gfx) == stored, REMEDY


def test_ours_use_whole_lines_and_the_naive_ones_do_not():
    assert {(row["op"], row["arch"]) for row in STORED["lines"]} == {
        (o, g) for o in hip_compiled.CASES for g in EMULATED
    }
    for row in STORED["lines"]:
        assert row["ours"]["used"] >= 0.9
        assert row["ours"]["lds_bank_conflicts"] == 0
        # A wave of 64 lanes of two bytes fills a line, so there nothing but the number of reads is left to save.
        mild = row["op"] == "upsample"
        assert row["naive"]["lines"] > (1.5 if mild else 30) * row["ours"]["lines"]
    copy = next(row for row in STORED["lines"] if row["op"] == "layout_copy")
    assert copy["naive"]["bytes"] == copy["ours"]["bytes"], "the pure case: the same bytes, in other lines"


def test_a_wrong_result_is_not_counted(monkeypatch):
    def wrong(naive, ours):
        call, exact, *results = hip_compiled._attention(naive, ours)
        return call, exact + 1, *results

    monkeypatch.setitem(hip_compiled.CASES, "attention", wrong)
    with pytest.raises(SystemExit, match="attention on gfx1100: the naive result is wrong"):
        hip_compiled.lines("attention", "gfx1100")
