from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rocm_sd import arch
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip import toolchain
from rocm_sd.verify import compiler, isa
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.compiler import CompilationFailed
from verify.kernels import add, matmul, softmax
from verify.kernels.configs import config_of

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton", reason="AMD code is compiled by Triton")

ADD = config_of({"x": "*fp32", "y": "*fp32", "z": "*fp32", "n": "i32"}, {"BLOCK": 256}, divisible_by_16=["n"])
HIP = """
extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(64, 64)))
void twice(float *x) { x[__builtin_amdgcn_workitem_id_x()] *= 2.0f; }
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    return tmp_path


def entries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.json.z"))


def test_every_gfx_that_triton_accepts_gets_code_of_its_own(cache):
    names = [a.name for a in compiler.targets()]
    assert {"gfx906", "gfx90a", "gfx942", "gfx1100", "gfx1201"} <= set(names)
    codes = [compiler.compile_for(name, add.add, ADD) for name in names]
    assert [code.arch.name for code in codes] == names
    assert {code.wave_size for code in codes} == {32, 64}
    assert all(code.name == "add" and code.workgroup_size == 4 * code.wave_size for code in codes)
    assert len(entries(cache)) == len(names)


def test_the_same_request_is_compiled_once(cache):
    first = compiler.compile_for("gfx1100", add.add, ADD)
    (entry,) = entries(cache)
    written = entry.stat().st_mtime_ns
    second = compiler.compile_for(arch.get("gfx1100"), add.add, ADD)
    assert first.elf == second.elf
    assert entry.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "changed",
    [
        config_of(dict(ADD.signature), {"BLOCK": 512}, divisible_by_16=["n"]),
        config_of(dict(ADD.signature), {"BLOCK": 256}),
        config_of(dict(ADD.signature), {"BLOCK": 256}, divisible_by_16=["n"], num_warps=8),
        config_of({"x": "*fp16", "y": "*fp16", "z": "*fp16", "n": "i32"}, {"BLOCK": 256}),
    ],
    ids=["constant", "attribute", "warps", "type"],
)
def test_whatever_changes_the_code_is_another_entry(cache, changed):
    first, second = (compiler.compile_for("gfx1100", add.add, config) for config in (ADD, changed))
    assert first.elf != second.elf
    assert len(entries(cache)) == 2


def test_a_change_of_the_source_is_seen(cache, tmp_path):
    """Also of a function that the kernel calls: another file of the same module name is another kernel."""
    text = (
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef helper(x):\n    return x {} 3.0\n\n"
        "@triton.jit\ndef kernel(x, BLOCK: tl.constexpr):\n    at = x + tl.arange(0, BLOCK)\n"
        "    tl.store(at, helper(tl.load(at)))\n"
    )
    config = config_of({"x": "*fp32"}, {"BLOCK": 128})
    codes = []
    for name, sign in (("one", "+"), ("two", "*")):
        file = tmp_path / f"{name}.py"
        file.write_text(text.format(sign))
        specification = compiler.importlib.util.spec_from_file_location("changing", file)
        module = compiler.importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        codes.append(compiler.compile_for("gfx1100", module.kernel, config))
    assert codes[0].text != codes[1].text


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_entry_is_discarded(cache, damage):
    code = compiler.compile_for("gfx1100", add.add, ADD)
    (entry,) = entries(cache)
    content = entry.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "changed": content[:-1] + b"\x00", "emptied": b""}[damage]
    entry.write_bytes(damaged)
    assert compiler.compile_for("gfx1100", add.add, ADD).elf == code.elf
    assert entry.read_bytes() == content


def test_nothing_half_written_is_left(cache):
    compiler.compile_for("gfx1100", add.add, ADD)
    assert [path for path in cache.rglob("*") if path.is_file()] == entries(cache)


def test_the_lds_that_triton_asks_for_at_launch_is_known(cache):
    config = config_of({"x": "*fp32", "y": "*fp32", "columns": "i32"}, {"BLOCK": 1024})
    assert compiler.compile_for("gfx1100", softmax.softmax, config).lds == 16  # one float for each of four waves


def test_a_gfx_that_triton_refuses_is_named_with_those_it_takes():
    with pytest.raises(Unsupported, match=r"gfx1030.*gfx1100"):
        compiler.compile_for("gfx1030", add.add, ADD)


def test_a_missing_argument_is_named(cache):
    config = config_of({"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BLOCK": 256})
    with pytest.raises(Unsupported, match="without z"):
        compiler.compile_for("gfx1100", add.add, config)


def test_what_triton_refuses_costs_one_candidate(cache):
    """A dot of tiles that are no powers of two is refused; its neighbour is compiled."""
    signature = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "M": "i32", "N": "i32", "K": "i32"}
    good, bad = (config_of(signature, {"TILE_M": m, "TILE_N": 32, "TILE_K": 32}) for m in (32, 33))
    with pytest.raises(CompilationFailed, match=r"Compiling matmul of matmul\.py for gfx942"):
        compiler.compile_for("gfx942", matmul.matmul, bad)
    assert compiler.compile_for("gfx942", matmul.matmul, good).name == "matmul"


def test_assembly_is_assembled_again_to_the_same_code(cache):
    code = compiler.compile_for("gfx1100", add.add, ADD)
    again = compiler.assemble("gfx1100", code.assembly, lds=code.lds)
    assert again.text == code.text
    with pytest.raises(CompilationFailed, match="gfx1100"):
        compiler.assemble("gfx1100", code.assembly.replace("s_endpgm", "s_no_such_instruction", 1))


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942", "gfx1201"])
def test_the_code_of_a_hip_source_is_read_like_any_other(gfx, tmp_path):
    try:
        toolchain.find_compiler()
    except toolchain.NoHipCompiler as error:
        pytest.skip(str(error))
    file = tmp_path / "twice.hip"
    file.write_text(HIP)
    compiled = toolchain.compile_source(file, gfx, {})
    code = CodeObject.from_elf(compiled.elf, compiled.assembly)
    assert (code.name, code.arch.name, code.workgroup_size) == ("twice", gfx, 64)
    assert isa.report(code).widths("global", loads=True) == {4: 1}
