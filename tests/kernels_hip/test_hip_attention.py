"""HIP attention: compiled for six architectures through the gates, executed on three, beside a naive one and Triton."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from benchmarks.hip_compiled import NAIVE

pytest.importorskip("tinygrad")
pytest.importorskip("triton")

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip import attention, toolchain
from rocm_sd.kernels.hip.launch import Kernel
from rocm_sd.numerics import in_float64, require
from rocm_sd.ops import OPS
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.emulator import LdsRace
from rocm_sd.verify.gates import check
from rocm_sd.verify.isa import report
from rocm_sd.verify.ladder import EMULATED
from rocm_sd.verify.runner import Call, Run, _Argument, emulated

try:
    toolchain.find_compiler()
except toolchain.NoHipCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

OP = OPS["attention"]
HEADS = (40, 64, 80, 128, 160, 512)
LINE = 128


@functools.cache
def code_of(kernel, gfx):
    """Once for all tests of this file."""
    compiled = toolchain.compile_source(kernel.source, gfx, dict(kernel.parameters))
    code = CodeObject.from_elf(compiled.elf, compiled.assembly, kernel.name)
    # clang reads the last arguments in wider loads than they are: a runtime's segments are padded to 16 bytes.
    return replace(code, kernarg_size=-(-code.kernarg_size // 16) * 16)


class EmulatedLauncher:
    """A `Launcher` that compiles for an architecture that is not there, and executes on the tensors' memory."""

    def __init__(self, gfx, *, execute=True, edit=None):
        self.arch, self.edit = archs.get(gfx), edit
        self.run = Run(self.arch, execute)

    def launch(self, kernel, grid, arguments):
        code = code_of(self.edit(kernel) if self.edit else kernel, self.arch.name)
        given = [_Argument(f"argument {place}", "", value) for place, value in enumerate(arguments)]
        counters = self.run.executed(code, grid, given) if self.run.execute else None
        self.run.calls.append(Call(kernel.name, grid, None, code, counters))


def first_config(q, launcher):
    return attention.configs(q.shape[-1], launcher.arch)[0]


def run(launcher, q, k, v, scale=None, config=None):
    """What the op's implementation `hip` does: allocate, then launch."""
    out = torch.empty(q.shape, dtype=q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    attention.launch(q, k, v, out, scale, config or first_config(q, launcher), launcher)
    return out


def executed(gfx, arguments, *, config=None, edit=None):
    """Proven whole and as close to float64 as stock torch; the counters and the comparison."""
    launcher = EmulatedLauncher(gfx, edit=edit)
    exact = OP.verification.reference(*in_float64(arguments))
    stock = OP.implementations[0](*arguments)
    with launcher.run._allocations:
        out = run(launcher, *arguments, config=config)
    launcher.run.require_written(out)
    comparison = require(f"attention on {gfx}", out, exact, stock)
    return launcher.run.calls[0].counters, comparison


def draw(B, S, T, H, D, dtype=torch.float16):
    random = torch.Generator().manual_seed(S * T + D)

    def normal(*shape):
        return torch.randn(shape, generator=random).to(dtype)

    return normal(B, S, H, D), normal(B, T, H, D), normal(B, T, H, D), None


def facts_of(gfx, D, dtype=torch.float16, config=None):
    launcher = EmulatedLauncher(gfx, execute=False)
    run(launcher, *draw(1, 8, 8, 1, D, dtype), config=config)
    return report(launcher.run.calls[0].code)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize("sample", OP.verification.small, ids=lambda sample: sample.name)
def test_small_samples_are_as_close_to_float64_as_stock_torch(sample, gfx):
    counters, _ = executed(gfx, sample.make())
    q = sample.make(filled=False)[0]
    # Every row once, and nothing beyond the last.
    assert counters.bytes_stored == q.numel() * q.element_size()
    assert counters.lds_bank_conflicts == 0


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize(("S", "T"), [(1, 1), (3, 200), (130, 33)])
def test_lengths_that_no_block_divides(S, T, gfx):
    counters, _ = executed(gfx, draw(1, S, T, 2, 64))
    assert counters.bytes_stored == S * 2 * 64 * 2


@pytest.mark.parametrize("gfx", EMULATED)
def test_other_choices_of_the_table_compute_the_same(gfx):
    for D, choices in attention.TILES[archs.get(gfx).matrix_unit].items():
        for config in choices[1:]:
            counters, _ = executed(gfx, draw(1, 40, 72, 1, D), config=config)
            assert counters.lds_bank_conflicts == 0, (D, config)


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_wave_may_have_several_fragments_of_queries(gfx):
    executed(gfx, draw(1, 70, 77, 1, 64), config=attention.AttentionConfig(64, 32, 2, 1, 16))


@pytest.mark.parametrize("gfx", EMULATED)
def test_large_scores_lose_nothing(gfx):
    q, k, v, _ = draw(1, 20, 70, 1, 64)
    executed(gfx, (q * 100, k * 100, v, None))


def test_keys_beyond_the_last_count_for_nothing_whatever_stands_there():
    q, k, v, _ = draw(1, 5, 40, 1, 64)
    k[:, 33:], v[:, 33:] = float("nan"), float("inf")
    for gfx in EMULATED:
        executed(gfx, (q, k[:, :33], v[:, :33], None))


def rdna2_on_gfx1100(folder):
    """The emulator does not know gfx1030; its products are made of instructions that gfx1100 has too."""
    text = (toolchain.SOURCES / "attention.hip").read_text()
    assert "attention_step<this_arch," in text
    source = folder / "attention.hip"
    source.write_text(text.replace("attention_step<this_arch,", "attention_step<rdna2,"))
    return lambda kernel: replace(kernel, source=source)


@pytest.mark.parametrize(("D", "dtype"), [(40, torch.float16), (64, torch.bfloat16), (160, torch.float16)])
def test_dot_products_of_gfx1030(D, dtype, tmp_path):
    config = attention.configs(D, archs.get("gfx1030"))[0]
    edit = rdna2_on_gfx1100(tmp_path)
    counters, _ = executed("gfx1100", draw(1, 20, 45, 1, D, dtype), config=config, edit=edit)
    assert counters.matrix_flops == 0
    assert counters.lds_bank_conflicts == 0


def test_waves_of_gfx1030_that_share_queries_share_their_sums(tmp_path):
    config = attention.AttentionConfig(16, 64, 1, 2, 16, queries_in_lds=1, values_ahead=0)
    executed("gfx1100", draw(1, 16, 70, 1, 64), config=config, edit=rdna2_on_gfx1100(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("D", HEADS)
@pytest.mark.parametrize("gfx", [*EMULATED, "gfx1030"])
def test_every_head_over_several_blocks_of_queries_and_keys(D, gfx, tmp_path):
    config = attention.configs(D, archs.get(gfx))[0]
    edit = rdna2_on_gfx1100(tmp_path) if gfx == "gfx1030" else None
    # A block of 128 queries and the begin of another; two whole blocks of 64 keys and the begin of a third.
    for dtype, heads in ((torch.float16, 2), (torch.bfloat16, 1)):
        given = draw(1, 133, 141, heads, D, dtype)
        counters, _ = executed("gfx1100" if edit else gfx, given, config=config, edit=edit)
        assert counters.lds_bank_conflicts == 0


# --- machine code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_real_samples_pass_every_gate(gfx):
    launcher = EmulatedLauncher(gfx, execute=False)
    for sample in OP.verification.real:
        run(launcher, *sample.make(filled=False))
    found = {call.code.elf: call.code for call in launcher.run.calls}
    assert len(found) == len(HEADS)
    for code in found.values():
        broken = [
            gate.sentence for gate in check(report(code), OP.verification.promises["_attend"]) if gate.ok is False
        ]
        assert not broken, code.name
        assert code.lds <= 64 * 1024
        assert "flat_load" not in code.assembly
        assert "flat_store" not in code.assembly


@pytest.mark.slow
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_no_choice_of_the_table_spills_in_either_dtype(gfx):
    for D, choices in attention.TILES[archs.get(gfx).matrix_unit].items():
        for config in choices:
            for dtype in (torch.float16, torch.bfloat16):
                facts = facts_of(gfx, D, dtype, config)
                assert (facts.spills, facts.scratch) == (0, 0), (D, config)


@pytest.mark.parametrize("gfx", EMULATED)
def test_a_score_takes_one_exponential_and_products_are_not_computed_twice(gfx):
    # Whole blocks: nothing is padding.
    for D in (64, 512):
        config = attention.configs(D, archs.get(gfx))[0]
        S, T = config.block_m, 2 * config.block_n
        counters, _ = executed(gfx, draw(1, S, T, 1, D))
        assert counters.matrix_flops == 4 * S * T * D
        # Every lane has the factor that older sums shrink by; with one wave a query that is one lane in `rows`.
        lanes = archs.get(gfx).wave_size
        exponentials = sum(count for name, count in counters.by_name.items() if name.startswith("v_exp_f32"))
        shrinking = config.waves_m * config.waves_d * (S // config.waves_m // config.fragment) * 2
        assert exponentials == S * T // lanes + shrinking


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201"])
def test_a_missing_barrier_is_noticed(gfx, tmp_path, monkeypatch):
    text = (toolchain.INCLUDE / "rocm_sd" / "attention.hpp").read_text()
    broken, removed = re.subn(r"(next_v\.commit\(.*\);\n) +barrier\(\);\n", r"\1", text)
    assert removed == 1
    include = tmp_path / "rocm_sd"
    include.mkdir()
    for header in (toolchain.INCLUDE / "rocm_sd").glob("*.hpp"):
        (include / header.name).write_text(broken if header.name == "attention.hpp" else header.read_text())
    source = tmp_path / "attention.hip"
    source.write_text((toolchain.SOURCES / "attention.hip").read_text())
    monkeypatch.setattr(toolchain, "INCLUDE", tmp_path)
    with pytest.raises(LdsRace):
        run(EmulatedLauncher(gfx, edit=lambda kernel: replace(kernel, source=source)), *draw(1, 40, 72, 1, 64))


# --- memory -----------------------------------------------------------------------------------------------------------


def lines_of(tensor):
    """The cache lines of all rows of all heads, each row by itself: 80 bytes may lie in two."""
    B, S, H, D = tensor.shape
    first = torch.zeros(B, S, H, dtype=torch.int64)
    for dimension, stride in enumerate(tensor.stride()[:3]):
        shape = [1, 1, 1]
        shape[dimension] = -1
        first += torch.arange(tensor.shape[dimension]).view(shape) * stride * 2
    return int(((first + 2 * D - 1) // LINE - first // LINE + 1).sum())


# Of the lines that a head's rows lie in, the share that are its own bytes, with eight heads beside each other as in
# Stable Diffusion 1.5. A workgroup has one head: no order of its loads gets beyond that.
CEILINGS = {40: 80 / (1.5 * LINE), 64: 1.0, 80: 160 / (2 * LINE), 128: 1.0, 160: 320 / (3 * LINE), 512: 1.0}


@pytest.mark.parametrize("D", HEADS)
def test_rows_of_a_head_share_their_lines_with_the_heads_beside(D):
    rows = torch.empty(1, 3, 8, D, dtype=torch.float16, device="meta")
    begins = [(row * 8 + head) * D * 2 for row in range(3) for head in range(8)]
    lines = [len({byte // LINE for byte in range(first, first + 2 * D)}) for first in begins]
    assert sum(lines) == lines_of(rows)
    assert sum(lines) * LINE * CEILINGS[D] == rows.numel() * 2


# As many heads as fill whole lines: rows of one head begin at the same place of a line, as those of eight heads do.
BESIDE = {40: 8, 64: 2, 80: 4, 128: 1, 160: 2, 512: 1}


@pytest.mark.parametrize("D", HEADS)
@pytest.mark.parametrize("gfx", EMULATED)
def test_global_memory_moves_in_whole_lines(D, gfx):
    # Two blocks of queries, and two or four of keys.
    block = attention.configs(D, archs.get(gfx))[0].block_m
    q, k, v, _ = draw(1, 2 * block, 2 * 64, BESIDE[D], D)
    counters, _ = executed(gfx, (q, k, v, None))
    assert counters.lds_bank_conflicts == 0
    wanted = 2 * q.numel() * 2 + 2 * (k.numel() + v.numel()) * 2  # each block reads all keys and values
    assert counters.bytes_loaded + counters.bytes_stored == wanted
    least = 2 * lines_of(q) + 2 * (lines_of(k) + lines_of(v))
    assert wanted == pytest.approx(least * LINE * CEILINGS[D])
    if D % 64 == 0:
        assert counters.coalescing_efficiency == 1.0
    # Of other rows a wave's instruction takes no whole number: where one ends within a line, the next asks again.
    assert counters.lines_loaded + counters.lines_stored <= least / 0.9


@pytest.mark.parametrize("gfx", EMULATED)
@pytest.mark.parametrize("D", [80, 160])
def test_values_are_found_wherever_in_a_line_their_rows_begin(D, gfx):
    # Rows an odd number of chunks apart: eight of them begin at the eight chunks of a line.
    q, k, v, _ = draw(1, 9, 45, 1, D)
    for before in (0, 8, 24):
        values = torch.zeros(1, 45, 1, D + 56, dtype=v.dtype)[..., before : before + D].copy_(v)
        counters, _ = executed(gfx, (q, k, values, None))
        assert counters.lds_bank_conflicts == 0


@pytest.mark.parametrize("gfx", EMULATED)
def test_before_and_after(gfx, record_property):
    """The naive kernel: a query a thread, scores through global memory."""
    q, k, v, _ = draw(1, 64, 64, 1, 64)
    after, _ = executed(gfx, (q, k, v, None))
    launcher = EmulatedLauncher(gfx)
    out, scores = torch.empty(q.shape, dtype=q.dtype), torch.empty(64, 64)
    scale = 64**-0.5 * attention.LOG2_E
    launcher.launch(Kernel(NAIVE / "attention.hip", "naive"), (1, 1, 1), (q, k, v, out, scores, 64, 64, 64, scale))
    before = launcher.run.calls[0].counters
    exact = OP.verification.reference(*in_float64((q, k, v, None)))
    assert torch.allclose(out.double(), exact, atol=2e-3)

    def moved(counters):
        return counters.bytes_loaded + counters.bytes_stored, counters.lines_loaded + counters.lines_stored

    for name, counters in (("naive", before), ("attention.hip", after)):
        record_property(
            f"{gfx} {name}: bytes, lines, share of them used", (*moved(counters), counters.coalescing_efficiency)
        )
    # q, k, v and out, once each.
    assert moved(after) == (4 * 64 * 64 * 2, 4 * 64 * 64 * 2 // LINE)
    assert moved(before)[0] > 50 * moved(after)[0]
    assert moved(before)[1] > 1000 * moved(after)[1]
    assert before.coalescing_efficiency < 0.05


# --- beside Triton ----------------------------------------------------------------------------------------------------


@functools.cache
def triton_facts(gfx, D):
    sample = next(sample for sample in OP.verification.real if f"x{D} to" in sample.name)
    arguments = sample.make(filled=False)
    problem = OP.verification.problem(*arguments)
    config = OP.lookup(gfx, problem).config_for("triton") or next(iter(OP.tuning.space(problem, archs.get(gfx))))
    with emulated(OP.verification.kernels, gfx, execute=False) as recorded:
        OP.implementation("triton")(*arguments, config=config)
    facts = next(report(call.code) for call in recorded.calls if call.kernel.startswith("_attend"))
    return facts, config, arguments[0].dtype


def beside_triton(gfx, D):
    """(HIP's figures, Triton's) of one architecture and head: registers, spills, LDS, waves a SIMD, queries."""
    figures, config, dtype = triton_facts(gfx, D)
    ours, chosen = facts_of(gfx, D, dtype), attention.configs(D, archs.get(gfx))[0]
    return tuple(
        (facts.vgprs, facts.spills, facts.lds, facts.waves_per_simd, queries)
        for facts, queries in ((ours, chosen.block_m), (figures, config.block_m))
    )


# Where Triton's kernel leaves room for more waves, and why.
_WIDE = "the queries stay in LDS, 32 KiB of them, where Triton reads them again for each block of keys"
FEWER_WAVES = {
    "gfx1100": {
        64: "10 for 12: the next keys and values are on their way in registers beside the queries",
        160: "4 for 5: a workgroup has 128 queries and Triton's 32, which reads keys and values four times as often",
        512: _WIDE,
    },
    "gfx1200": {512: _WIDE},
    "gfx1201": {512: _WIDE},
}


def test_beside_triton_at_the_largest_self_attention():
    ours, triton = beside_triton("gfx1100", 40)
    assert ours[3] >= triton[3], (ours, triton)


@pytest.mark.slow
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_the_table_beside_triton(gfx, record_property):
    fewer = set()
    for D in HEADS:
        if not archs.get(gfx).triton_supported:
            record_property(f"{gfx}, {D}: HIP", facts_of(gfx, D).vgprs)
            continue
        ours, triton = beside_triton(gfx, D)
        record_property(f"{gfx}, {D}: registers, spills, LDS, waves a SIMD, queries; HIP and Triton", (ours, triton))
        if ours[3] < triton[3]:
            fewer.add(D)
    assert fewer == set(FEWER_WAVES.get(gfx, {}))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_it_cannot_do_is_refused_with_a_reason():
    launcher = EmulatedLauncher("gfx1100", execute=False)
    q, k, v, _ = draw(1, 8, 8, 1, 64)
    config = first_config(q, launcher)

    def refused(match, q, k, v):
        with pytest.raises(Unsupported, match=match):
            attention.launch(q, k, v, torch.empty(q.shape, dtype=q.dtype), 1.0, config, launcher)

    refused("float32", q.float(), k.float(), v.float())
    refused("16 bytes", *(torch.empty(1, 8, 1, 65).half()[..., :64] for _ in range(3)))
    refused("side by side", *(torch.empty(1, 8, 64, 8).half().transpose(2, 3)[..., :8] for _ in range(3)))
    far = torch.empty_strided((1, 8, 1, 64), (2**31, 2**28, 64, 1), dtype=torch.float16, device="meta")
    refused("31 bits", q, far, v)
    with pytest.raises(Unsupported, match=r"heads of 72\. There are 40, 64"):
        attention.configs(72, launcher.arch)
    with pytest.raises(Unsupported, match="nothing is known"):
        attention.configs(64, archs.get("gfx1010"))
    assert not launcher.run.calls
