"""Kernels broken on purpose: each mistake is caught, and by the name it deserves.

`IN_ASSEMBLY` removes or changes instructions of a right kernel, as a compiler bug or a hand-written kernel would have
it; `IN_SOURCE` are mistakes in Triton (tests/verify/kernels/broken.py). The kernels pass unbroken in test_kernels.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from rocm_sd import numerics
from rocm_sd.errors import NumericsFailure
from rocm_sd.verify import compiler, emulator
from rocm_sd.verify.runner import emulated
from verify.kernels import add, broken, matmul, softmax

if TYPE_CHECKING:
    from rocm_sd.verify.code_object import CodeObject

pytest.importorskip("triton", reason="AMD code is compiled by Triton")
pytest.importorskip("tinygrad", reason="AMD code is decoded by tinygrad")


@dataclass(frozen=True)
class Mutation:
    """Every match of `pattern` in the kernel's assembly is replaced by `text`."""

    name: str
    kernel: str
    gfx: str
    pattern: str
    caught: type[Exception]
    text: str = "s_nop 0"

    def __call__(self, code: CodeObject) -> CodeObject:
        changed, number = re.subn(self.pattern, self.text, code.assembly)
        assert number, f"{self.pattern} is not in the {self.kernel} of {self.gfx}"
        return compiler.assemble(code.arch, changed, lds=code.lds)


BARRIERS = {"gfx1100": r"\bs_barrier\b", "gfx1201": r"\bs_barrier_(signal|wait) -1", "gfx942": r"\bs_barrier\b"}
LOAD_WAITS = {
    "gfx1100": r"\bs_waitcnt vmcnt\(\d+\)",
    "gfx1201": r"\bs_wait_loadcnt 0x\w+",
    "gfx942": r"\bs_waitcnt vmcnt\(\d+\)",
}
# gfx942 finds its arguments in registers: the one scalar load of this kernel is for firmware that cannot preload them.
SCALAR_WAITS = {"gfx1100": r"\bs_waitcnt lgkmcnt\(0\)", "gfx1201": r"\bs_wait_kmcnt 0x0"}
LDS_WAITS = {
    # Counts above 0 wait for some of several LDS loads; 0 would also wait for scalar loads.
    "gfx1100": r"\bs_waitcnt lgkmcnt\([1-9]\d*\)",
    "gfx1201": r"\bs_wait_dscnt 0x[1-9a-f]\w*",
    "gfx942": r"\bs_waitcnt lgkmcnt\([1-9]\d*\)",
}
MATRIX_TYPES = {
    "gfx1100": (r"\bv_wmma_f32_16x16x16_f16\b", "v_wmma_f32_16x16x16_bf16"),
    "gfx1201": (r"\bv_wmma_f32_16x16x16_f16\b", "v_wmma_f32_16x16x16_bf16"),
    "gfx942": (r"\bv_mfma_f32_(\d+)x(\d+)x(\d+)_f16\b", r"v_mfma_f32_\1x\2x\3_bf16"),
}
IN_ASSEMBLY = [
    mutation
    for gfx in BARRIERS
    for mutation in (
        Mutation("barriers removed", "softmax", gfx, BARRIERS[gfx], emulator.LdsRace),
        Mutation("barriers removed", "matmul", gfx, BARRIERS[gfx], emulator.LdsRace),
        Mutation("waits for loads removed", "add", gfx, LOAD_WAITS[gfx], emulator.MissingWait),
        Mutation("waits for LDS removed", "matmul", gfx, LDS_WAITS[gfx], emulator.MissingWait),
        Mutation("wrong matrix type", "matmul", gfx, MATRIX_TYPES[gfx][0], NumericsFailure, MATRIX_TYPES[gfx][1]),
    )
]
IN_ASSEMBLY += [
    Mutation("waits for scalar loads removed", "add", gfx, pattern, emulator.MissingWait)
    for gfx, pattern in SCALAR_WAITS.items()
]
IN_SOURCE = {
    "index_off_by_one": emulator.OutOfBounds,
    # A buffer load answers 0 for an offset beyond its 2 GB, as -4 is: no fault on a card either, but a wrong sum.
    "negative_index": NumericsFailure,
    "no_mask": emulator.OutOfBounds,
    "unwritten_tail": emulator.UnwrittenOutput,
    "sum_into_empty_memory": emulator.UninitialisedRead,
    "endless_loop": emulator.BudgetExceeded,
    "lost_update": emulator.GlobalRace,
    "blocks_that_overlap": emulator.GlobalRace,
    "reads_what_another_program_writes": emulator.GlobalRace,
}


# Each barrier and each wait by itself: these alone may be removed unnoticed, since nothing depends on them.
EVERY_WAIT = {
    "gfx1100": r"\bs_waitcnt (?:vmcnt|lgkmcnt)[^\n;]*",
    "gfx1201": r"\bs_wait_(?:loadcnt|dscnt|kmcnt|loadcnt_dscnt)\b[^\n;]*",
    "gfx942": r"\bs_waitcnt (?:vmcnt|lgkmcnt)[^\n;]*",
}
WITHOUT_EFFECT = {
    ("gfx1201", "softmax"): 1,  # a second wait for the same loads, before a barrier
    ("gfx942", "add"): 1,  # one each in the prologue for firmware that cannot preload arguments, which is skipped
    ("gfx942", "softmax"): 1,
    ("gfx942", "matmul"): 1,
}


def run_add(gfx, edit=None, kernel=None, programs=4):
    x, y = torch.arange(1000.0), torch.ones(1000)
    module = add if kernel is None else broken
    with emulated(module, gfx, edit=edit, budget=100_000) as executed:
        z = torch.empty(1000)
        getattr(module, kernel or "add")[(programs,)](x, y, z, 1000, BLOCK=256)
    executed.require_written(z)
    numerics.require("add", z, (x + y).double(), x + y)


def run_softmax(gfx, edit=None):
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    with emulated(softmax, gfx, edit=edit) as executed:
        y = torch.empty_like(x)
        softmax.launch(x, y)
    executed.require_written(y)
    numerics.require("softmax", y, x.double().softmax(1), x.softmax(1))


def run_matmul(gfx, edit=None):
    a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(s)).half() for s in range(2))
    with emulated(matmul, gfx, edit=edit) as executed:
        c = torch.empty(64, 64, dtype=torch.float16)
        matmul.launch(a, b, c, tile=(64, 64, 32))
    executed.require_written(c)
    numerics.require("matmul", c, a.double() @ b.double(), a @ b)


RUNS = {"add": run_add, "softmax": run_softmax, "matmul": run_matmul}


@pytest.mark.parametrize("gfx", BARRIERS)
@pytest.mark.parametrize("kernel", RUNS)
def test_assembled_again_unchanged_the_kernel_is_right(kernel, gfx):
    RUNS[kernel](gfx, lambda code: compiler.assemble(code.arch, code.assembly, lds=code.lds))


@pytest.mark.parametrize("mutation", IN_ASSEMBLY, ids=lambda m: f"{m.name.replace(' ', '_')}-{m.kernel}-{m.gfx}")
def test_a_mistake_in_the_machine_code_is_caught(mutation):
    with pytest.raises(mutation.caught):
        RUNS[mutation.kernel](mutation.gfx, mutation)


@pytest.mark.parametrize("gfx", BARRIERS)
@pytest.mark.parametrize("kernel", RUNS)
def test_every_single_barrier_and_wait_matters(kernel, gfx):
    seen = []
    RUNS[kernel](gfx, lambda code: seen.append(code) or code)
    pairs = r"\bs_barrier_signal -1(?s:.*?)s_barrier_wait -1" if gfx == "gfx1201" else BARRIERS[gfx]
    places = [m for pattern in (pairs, EVERY_WAIT[gfx]) for m in re.finditer(pattern, seen[0].assembly)]
    assert places
    unnoticed = []
    for place in places:
        # Of a split barrier's two halves both go, and what stands between them stays.
        split = "s_barrier_signal" in place[0]
        kept = re.sub(BARRIERS["gfx1201"], "s_nop 0", place[0]) if split else "s_nop 0"
        changed = seen[0].assembly[: place.start()] + kept + seen[0].assembly[place.end() :]
        try:
            RUNS[kernel](gfx, lambda code, text=changed: compiler.assemble(code.arch, text, lds=code.lds))
        except (emulator.LdsRace, emulator.MissingWait):
            continue
        unnoticed.append(place[0])
    assert len(unnoticed) == WITHOUT_EFFECT.get((gfx, kernel), 0), unnoticed


@pytest.mark.parametrize("gfx", BARRIERS)
@pytest.mark.parametrize("kernel", IN_SOURCE)
def test_a_mistake_in_the_source_is_caught(kernel, gfx):
    with pytest.raises(IN_SOURCE[kernel]):
        run_add(gfx, kernel=kernel)


@pytest.mark.parametrize("gfx", BARRIERS)
def test_a_grid_that_is_too_small_leaves_a_tail(gfx):
    with pytest.raises(emulator.UnwrittenOutput, match="928 of 4000 bytes of output 0"):
        run_add(gfx, programs=3)
