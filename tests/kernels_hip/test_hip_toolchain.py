"""From HIP source to machine code: what is found, compiled, kept and refused."""

from __future__ import annotations

import re
import shutil

import pytest
from code_objects import kernels_of

from rocm_sd import arch as archs
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.kernels.hip import launch, toolchain

LAYOUT = {"element": "bits16", "channels": 3, "last": 1}


def _why_not():
    try:
        toolchain.find_compiler()
    except toolchain.NoHipCompiler as error:
        return str(error)
    return ""


needs_clang = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs_clang
@pytest.mark.parametrize("gfx", toolchain.TARGETS)
def test_every_kernel_of_a_source_is_in_the_code_object(gfx):
    compiled = toolchain.compile_source("layout_copy", gfx, LAYOUT)
    kernels = kernels_of(compiled)
    assert set(kernels) == {"layout_copy_wide", "layout_copy_few", "layout_copy_plain"}
    for code in kernels.values():
        assert code.arch.name == compiled.arch == gfx
        # What the code object tells is what the text says of it.
        text = compiled.assembly.split(f".name:           {code.name}\n")[1].split("\n  - ")[0]
        printed = dict(re.findall(r"\.(\w+):\s*(\S+)", text))
        spills = (code.vgpr_spills, code.sgpr_spills)
        assert tuple(map(int, (printed["vgpr_count"], printed["sgpr_count"]))) == (code.vgprs, code.sgprs)
        assert tuple(map(int, (printed["vgpr_spill_count"], printed["sgpr_spill_count"]))) == spills


@needs_clang
def test_what_was_compiled_is_kept_until_source_header_parameter_or_compiler_change(cache, monkeypatch, tmp_path):
    calls = []
    compile_ = toolchain._compile

    def counted(*arguments):
        calls.append(arguments)
        return compile_(*arguments)

    monkeypatch.setattr(toolchain, "_compile", counted)
    include, file = tmp_path / "include", tmp_path / "kernel.hip"
    shutil.copytree(toolchain.INCLUDE, include)
    monkeypatch.setattr(toolchain, "INCLUDE", include)
    text = "#include <rocm_sd/types.hpp>\nROCM_SD_KERNEL(64) k(int* y) { *y = ROCM_SD_VALUE; }\n"
    file.write_text(text)

    def compile_it(value=1):
        return toolchain.compile_source(file, "gfx1100", {"value": value})

    first = compile_it()
    assert compile_it() == first
    assert len(calls) == 1
    compile_it(2)
    assert len(calls) == 2
    file.write_text(text.replace("*y =", "y[1] ="))
    assert compile_it().elf != first.elf
    assert len(calls) == 3
    with (include / "rocm_sd" / "types.hpp").open("a") as header:
        header.write("// another line\n")
    compile_it()
    assert len(calls) == 4
    monkeypatch.setattr(toolchain, "_version", lambda _path: "clang version 19.9, another compiler")
    compile_it()
    assert len(calls) == 5


@needs_clang
def test_a_damaged_entry_is_made_anew(cache):
    first = toolchain.compile_source("layout_copy", "gfx1100", {**LAYOUT, "element": "bits32"})
    (entry,) = cache.rglob("*.json.z")
    entry.write_bytes(entry.read_bytes()[:-7])
    assert toolchain.compile_source("layout_copy", "gfx1100", {**LAYOUT, "element": "bits32"}) == first


@needs_clang
def test_the_compilers_own_words_are_reported(cache, tmp_path):
    file = tmp_path / "broken.hip"
    file.write_text("wrong x;")
    with pytest.raises(toolchain.HipCompilationFailed, match=r"refused broken\.hip for gfx1100: .*unknown type name"):
        toolchain.compile_source(file, "gfx1100", {})
    assert not list(cache.rglob("*.json.z"))


@needs_clang
def test_a_gfx_without_a_tag_inherits_nothing(tmp_path):
    with pytest.raises(toolchain.HipCompilationFailed, match="no tag for this gfx"):
        toolchain.compile_source("layout_copy", "gfx908", LAYOUT)


def test_without_a_compiler_the_error_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "CLANGS", ("no-such-clang",))
    with pytest.raises(toolchain.NoHipCompiler, match=r"looked for no-such-clang .* apt-get install clang-19 lld-19"):
        toolchain.compile_source("layout_copy", "gfx1100", LAYOUT)


def test_a_compiler_that_is_too_old_is_passed_over(monkeypatch, tmp_path):
    versions = {"clang-19": "", "clang-20": "Debian clang version 14.0.6", "clang": "AMD clang version 20.0.0git"}
    monkeypatch.setattr(toolchain, "CLANGS", tuple(versions))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: name)
    monkeypatch.setattr(toolchain, "_version", versions.__getitem__)
    assert toolchain.find_compiler().path == "clang"
    monkeypatch.setattr(toolchain, "CLANGS", ("clang-20",))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(toolchain.NoHipCompiler, match="found only older ones: clang-20"):
        toolchain.find_compiler()


def test_unknown_sources_architectures_and_parameters_are_refused():
    with pytest.raises(InvalidOption, match="layout_copy"):
        toolchain.compile_source("no_such_op", "gfx1100", {})
    for name in ("gfx1", "sm_75", "sm_100"):
        with pytest.raises(Unsupported, match=name):
            toolchain.compile_source("layout_copy", name, LAYOUT)
    for name, value in (("Element", "half"), ("element", "half -include x"), ("element", "a;b")):
        with pytest.raises(InvalidOption, match="HIP parameter"):
            toolchain.compile_source("layout_copy", "gfx1100", {name: value})


def test_every_target_is_in_the_table_and_every_source_has_a_launcher():
    assert all(archs.get(name).known for name in toolchain.TARGETS)
    folder = toolchain.SOURCES.parent
    assert toolchain.source_names()
    launchers = "".join(file.read_text() for file in folder.glob("*.py"))
    assert set(re.findall(r'\bKernel\(\s*"(\w+)"', launchers)) == set(toolchain.source_names())


def test_an_access_is_as_wide_as_rows_and_tensors_allow():
    torch = pytest.importorskip("torch")
    x = torch.empty(64, dtype=torch.float16)
    assert launch.access_width(2, 320) == 8
    assert launch.access_width(4, 320) == 4
    assert launch.access_width(2, 320, 10) == 2
    assert launch.access_width(2, 77) == 1
    assert [launch.access_width(2, 320, tensors=(x[first:],)) for first in (8, 4, 2, 1)] == [8, 4, 2, 1]
