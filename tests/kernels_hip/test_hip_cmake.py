"""The CMake build: code objects without ROCm, and the library with its test program, executed on the emulator.

The HIP runtime is the one of `fake_hip`: a launch comes here, and the emulator executes the code that the library
embeds on the program's own memory. What is proven is all of the library but the runtime: which variant is chosen, its
arguments, its grid, its workspace.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tinygrad")

from code_objects import kernels_of

import hip_tiles
from rocm_sd import arch as archs
from rocm_sd.kernels.hip import attention, linear_geglu, linear_residual, toolchain
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.emulator import Buffer, launch

SOURCE = toolchain.SOURCES.parent
FAKE = Path(__file__).parent / "fake_hip"
# Of one dtype: what differs between dtypes is proven by other tests, and each is as long to compile.
SMALL = ("--small", "--repeats", "1", "--dtype", "float16")
# The calls of the test program that are made each time, by architecture, kernel and a part of the shape, with a regular
# expression for the variants that they ask for: to compile them all takes minutes.
CALLS = {
    "gfx1100": (
        ("layout_copy", "", "layout_copy"),
        ("upsample", "", "upsample "),
        ("layer_norm_residual", "", "layer_norm_residual .*(chunks=1|chunks=5 threads=128)"),
        ("group_norm_silu", "", "group_norm_silu .*(width=8.*add=1 silu=1|width=1 .*add=0 silu=0)"),
        ("linear_residual", "x80", "linear_residual .*small wide=1 has_bias=1 has_residual=1"),
        ("linear_residual", "x77", "linear_residual .*wide=0 has_bias=0 has_residual=1"),
        ("batched_linear", "x80", "batched_linear .*small wide=1 has_bias=1 has_residual=1"),
        ("linear_geglu", "x80", "linear_geglu .*small wide=1 has_bias=1"),
        ("attention", "head 40", "attention .*head=40"),
        ("conv2d", "128x6x6", "conv2d_split .*size=3|conv2d_finish .*add=0 has_residual=1"),
        ("conv2d", "1x1, add", "conv2d .*small kernel_size=1.*wide=1 wide_out=1 has_add=1"),
        ("upsample_conv2d", "to 40", "upsample_conv2d .*large"),
        ("row_moments", "320", "row_moments .*width=8 .*chunks=1"),
        ("linear_moments", "x80", "linear_moments .*small has_bias=1"),
        ("norm_linear", "x80", "norm_linear .*small has_bias=1"),
        ("norm_geglu", "x80", "norm_geglu .*small has_bias=0"),
    ),
    # Waves of 64: what differs is how many threads a workgroup has.
    "gfx942": (
        ("layout_copy", "", "layout_copy"),
        ("group_norm_silu", "add", "group_norm_silu .*width=8.*add=1 silu=1"),
        ("linear_residual", "256", "linear_residual .*large wide=1 has_bias=1 has_residual=0"),
        ("attention", "77 1 of head 512", "attention .*head=512"),
        ("conv2d", "24x7x9", "conv2d .*small kernel_size=3.*wide=1 wide_out=1 .*has_residual=1"),
        ("conv2d", "128x6x6", "conv2d_split .*size=3|conv2d_finish .*add=0 has_residual=1"),
    ),
}  # fmt: skip
ARCHS = tuple(CALLS)
# The founding documents' own sizes, in the same words; they are not among the small ones.
FOUNDING = (
    ("attention", "1x64x512 with 8 heads", "attention .*head=64"),
    ("linear_residual", "512x512x512", "linear_residual .*large wide=1 has_bias=0 has_residual=0"),
)
KERNELS = {
    "layout_copy_wide", "layout_copy_plain", "upsample", "layer_norm_residual", "group_norm_silu_moments",
    "group_norm_silu_fold", "group_norm_silu_apply", "linear_residual", "batched_linear", "linear_geglu", "attend",
    "conv2d", "conv2d_split", "conv2d_finish", "upsample_conv2d", "row_moments", "linear_moments", "norm_linear",
    "norm_geglu",
}  # fmt: skip
# The library does not cut the depth of products into parts; the launchers of Python do.
FAMILIES = set(toolchain.source_names()) - {"linear_split"}

for program in ("cmake", "c++"):
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}: apt-get install cmake g++", allow_module_level=True)
try:
    CLANG = toolchain.find_compiler().path
except toolchain.NoHipCompiler as error:
    pytest.skip(str(error), allow_module_level=True)


def run(*command, fails=False):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def configure(folder, *options, fails=False):
    # In one line: cmake breaks its messages where it likes.
    return " ".join(run("cmake", "-S", SOURCE, "-B", folder, *options, fails=fails).split())


def build(folder, targets, *options):
    """A whole build in `folder`/build, with the test program as a library too, so that it can be called from here."""
    runtime = folder / "libamdhip64.so"
    run("c++", "-std=c++17", "-shared", "-fPIC", f"-I{FAKE}", FAKE / "fake_hip.cpp", "-o", runtime)
    configure(
        folder / "build", f"-DROCM_SD_COMPILER={CLANG}", f"-DCMAKE_HIP_ARCHITECTURES={';'.join(targets)}",
        "-DROCM_SD_DTYPES=float16", f"-DROCM_SD_HIP_INCLUDE={FAKE}", f"-DROCM_SD_HIP_RUNTIME={runtime}",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -fPIC", *options,
    )  # fmt: skip
    run("cmake", "--build", folder / "build")
    objects = (folder / "build" / "CMakeFiles" / "rocm_sd_kernel_test.dir").rglob("*.o")
    run(
        "c++", "-shared", *objects, "-o", folder / "build" / "libtest_program.so", f"-L{folder / 'build'}",
        "-lrocm_sd_kernels", runtime, f"-Wl,-rpath,{folder / 'build'}",
    )  # fmt: skip
    return folder / "build"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    only = "|".join(
        f"^{gfx} ({'|'.join(variants for _, _, variants in (*calls, *FOUNDING))})" for gfx, calls in CALLS.items()
    )
    return build(tmp_path_factory.mktemp("cmake"), ARCHS, f"-DROCM_SD_ONLY={only}", "-DCMAKE_UNITY_BUILD=ON")


class Emulated:
    """The fake runtime, connected to the emulator of one architecture."""

    CALLBACK = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, *([ctypes.c_int] * 4), ctypes.POINTER(ctypes.c_void_p)
    )

    def __init__(self, built, gfx):
        self.runtime = ctypes.CDLL(str(built.parent / "libamdhip64.so"))
        self.runtime.fake_hip_extent.restype = ctypes.c_size_t
        self.runtime.fake_hip_extent.argtypes = [ctypes.c_void_p]
        self.program = ctypes.CDLL(str(built / "libtest_program.so"))
        self.library = ctypes.CDLL(str(built / "librocm_sd_kernels.so"))
        self.library.rocm_sd_last_error.restype = ctypes.c_char_p
        self.callback = self.CALLBACK(self.launch)
        self.launched, self.errors = [], []
        self.runtime.fake_hip_connect(gfx.encode(), archs.get(gfx.split(":")[0]).wave_size, self.callback)

    def launch(self, image, kernel, x, y, z, threads, places):
        try:
            self.execute(elf_at(image), kernel.decode(), (x, y, z), threads, places)
        except Exception as error:  # noqa: BLE001 -- through C it would be lost
            self.errors.append(error)
            return 1
        return 0

    def execute(self, elf, kernel, grid, threads, places):
        code = CodeObject.from_elf(elf, "", kernel)
        assert threads == code.workgroup_size
        assert code.vgpr_spills == code.sgpr_spills == code.scratch == 0
        wanted = [argument for argument in code.arguments if not argument.is_hidden]
        raw = [ctypes.string_at(places[place], argument.size) for place, argument in enumerate(wanted)]
        pointers = {int.from_bytes(each, "little") for each, a in zip(raw, wanted, strict=True) if a.is_pointer}
        # Queries, keys and values of one packed product lie between one another, and nobody writes them.
        others = set() if kernel == "attend" else pointers
        buffers = {address: self.buffer(address, others) for address in pointers if address}
        values = [
            buffers.get(int.from_bytes(each, "little")) if argument.is_pointer else int.from_bytes(each, "little")
            for each, argument in zip(raw, wanted, strict=True)
        ]
        launch(replace(code, kernarg_size=-(-code.kernarg_size // 16) * 16), grid, values)
        self.launched.append(kernel)

    def buffer(self, address, others):
        """To the end of its allocation, or to the next argument in it: the pieces of a workspace."""
        size = self.runtime.fake_hip_extent(address)
        assert size, "a pointer to no memory of the device"
        size = min([size, *(other - address for other in others if other > address)])
        return Buffer(np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (size,)))

    def main(self, *words):
        words = [b"rocm_sd_kernel_test", *(word.encode() for word in words)]
        code = self.program.main(len(words), (ctypes.c_char_p * len(words))(*words))
        if self.errors:
            raise self.errors[0]
        return code


def elf_at(address):
    header = ctypes.string_at(address, 64)
    sections, size, count = struct.unpack_from("<Q", header, 40)[0], *struct.unpack_from("<HH", header, 58)
    return ctypes.string_at(address, sections + size * count)


@pytest.mark.parametrize("gfx", ARCHS)
def test_the_test_program_passes_on_the_emulator(built, gfx, capfd):
    device = Emulated(built, gfx)
    for kernel, shape, _ in CALLS[gfx]:
        assert device.main(*SMALL, "--kernel", kernel, "--shape", shape) == 0, capfd.readouterr().out
    text = capfd.readouterr().out
    assert f"emulator, {gfx}, 4 compute units" in text
    assert text.count("PASSED") >= len(CALLS[gfx])
    assert "FAILED" not in text
    assert device.runtime.fake_hip_allocations() == 0
    if gfx == "gfx1100":
        assert set(device.launched) == KERNELS
        assert "upsample element=half width=8 scale=2 bilinear=1" in text
        # A tile by its numbers.
        assert "norm_geglu element=half block_m=64 block_n=64" in text


@pytest.mark.slow
@pytest.mark.parametrize("gfx", ARCHS)
def test_the_founding_sizes_pass_and_all_that_was_promised_is_printed(built, gfx, capfd):
    device = Emulated(built, gfx)
    for kernel, shape, _ in FOUNDING:
        assert device.main("--repeats", "1", "--kernel", kernel, "--shape", shape) == 0, capfd.readouterr().out
    text = capfd.readouterr().out
    assert f"emulator, {gfx}, 4 compute units" in text
    assert text.count("1 of 1 passed") == len(FOUNDING)
    for kernel, shape, _ in FOUNDING:
        (line,) = (line for line in text.splitlines() if line.startswith(kernel) and shape in line)
        assert re.search(r"\d us +[\d.]+ GFLOP/s  error \S+ \(\d+% of allowed\)  PASSED$", line)
    tile = linear_residual.tiles(archs.get(gfx))[0]
    assert f"block_m={tile.block_m} block_n={tile.block_n}" in text
    # Before it says PASSED it has looked: of a device that computes nothing it does not.
    device.execute = lambda *_: None
    assert device.main("--repeats", "1", "--kernel", "attention", "--shape", "1x64x512") == 1
    assert "PASSED" not in capfd.readouterr().out


def test_the_library_has_the_promised_name_too(built):
    promised = built / "libattention_optimization.so"
    assert promised.resolve() == (built / "librocm_sd_kernels.so").resolve()
    library = ctypes.CDLL(str(promised))
    library.rocm_sd_architectures.restype = ctypes.c_char_p
    assert library.rocm_sd_architectures() == b"gfx1100 gfx942"
    program = built / "linked.c"
    program.write_text("const char* rocm_sd_architectures(void); int main(void) { return !*rocm_sd_architectures(); }")
    run("cc", program, "-o", built / "linked", f"-L{built}", "-lattention_optimization", f"-Wl,-rpath,{built}",
        built.parent / "libamdhip64.so")  # fmt: skip
    run(built / "linked")
    run("cmake", "--install", built, "--prefix", built / "installed")
    (found,) = (built / "installed").rglob("libattention_optimization.so")
    assert found.resolve().name == "librocm_sd_kernels.so"
    assert (built / "installed" / "include" / "ck_sd_templates.hpp").is_file()


def every_call(built, gfx):
    device = Emulated(built, gfx)
    return device.main(*SMALL), set(device.launched)


@pytest.mark.slow
def test_every_call_passes_on_the_emulator(tmp_path, capfd):
    gfx = "gfx942"  # whose tiles differ most from those of gfx1100
    folder = build(tmp_path, [gfx], "-DCMAKE_UNITY_BUILD=ON")
    # A process of its own: one that has a library by this name loads no second.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        code, launched = pool.submit(every_call, folder, gfx).result()
    text = capfd.readouterr().out
    assert code == 0, text
    assert "48 of 48 passed" in text
    assert launched == KERNELS


def test_a_device_that_computes_nothing_fails(built, capfd):
    device = Emulated(built, "gfx1100")
    device.execute = lambda *_: None
    assert device.main(*SMALL, "--kernel", "upsample") == 1
    text = capfd.readouterr().out
    assert text.count("values wrong  FAILED") == 4
    assert "2880 values wrong" in text
    assert "0 of 4 passed" in text


def test_a_kernel_that_writes_beyond_its_output_fails(built, capfd):
    device = Emulated(built, "gfx1100")
    execute = device.execute

    def one_more(elf, kernel, grid, threads, places):
        execute(elf, kernel, grid, threads, places)
        y = ctypes.cast(places[1], ctypes.POINTER(ctypes.c_uint64))[0]
        ctypes.memset(y + device.runtime.fake_hip_extent(y) - 256, 0, 1)

    device.execute = one_more
    assert device.main(*SMALL, "--kernel", "layout_copy") == 1
    assert capfd.readouterr().out.count("wrote beyond the end  FAILED") == 2


def test_a_device_that_the_library_was_not_built_for_says_so(built, capfd):
    assert Emulated(built, "gfx1201").main("--small", "--kernel", "layout_copy") == 1
    assert 'there is no code for gfx1201 of "layout_copy element=bits16 channels=1 last=0"' in capfd.readouterr().out
    # What was skipped is said in the same way.
    assert Emulated(built, "gfx1100").main("--small", "--kernel", "linear_residual", "--dtype", "bfloat16") == 1
    assert "in the library: gfx1100 gfx942" in capfd.readouterr().out


def test_features_in_the_name_of_a_device_are_no_other_device(built, capfd):
    device = Emulated(built, "gfx942:sramecc+:xnack-")
    assert device.main(*SMALL, "--kernel", "layout_copy") == 0
    assert "2 of 2 passed" in capfd.readouterr().out


def test_sizes_and_dtypes_that_do_not_fit_are_refused(built):
    device = Emulated(built, "gfx1100")
    library = device.library
    assert library.rocm_sd_layout_copy(None, None, 1, 0, 4, 1, 0, None) == -2
    assert library.rocm_sd_last_error() == b"sizes must be positive"
    assert library.rocm_sd_layout_copy(None, None, 1, 4, 4, 1, 7, None) == -2
    assert library.rocm_sd_last_error() == b"an unknown dtype"
    assert library.rocm_sd_linear_residual(*[None] * 5, 8, 8, 8, 2, None) == -2
    assert library.rocm_sd_last_error() == b"linear_residual takes float16 or bfloat16"
    eps = ctypes.c_float(1e-5)
    assert library.rocm_sd_layer_norm_residual(*[None] * 6, 1, 2**20, eps, 0, None) == -2
    assert b"do not stay in registers" in library.rocm_sd_last_error()
    assert library.rocm_sd_group_norm_silu(*[None] * 5, 1, 10, 4, 3, eps, 1, None, 0, None) == -2
    assert library.rocm_sd_last_error() == b"10 channels are not 3 equal groups"
    assert library.rocm_sd_conv2d(*[None] * 6, 1, 8, 4, 4, 8, 5, 1, 2, None, 0, None) == -2
    assert b"conv2d of 5x5 with padding 2" in library.rocm_sd_last_error()
    assert library.rocm_sd_conv2d(*[16] * 6, 1, 8, 4, 4, 8, 3, 1, 1, None, 0, None) == -2
    assert b"one of add and residual" in library.rocm_sd_last_error()
    scale = ctypes.c_float(0.125)
    assert library.rocm_sd_attention(*[16] * 4, 1, 8, 8, 2, 64, 64, 128, scale, 0, None) == -2
    assert b"overlap" in library.rocm_sd_last_error()
    assert library.rocm_sd_attention(*[16] * 4, 1, 8, 8, 2, 48, 96, 96, scale, 0, None) == -1
    assert b'of "attention element=half head=48"' in library.rocm_sd_last_error()
    assert library.rocm_sd_attention(*[16] * 4, 1, 8, 8, 2, 40, 80, 80, ctypes.c_float(0), 0, None) == -2
    assert library.rocm_sd_last_error() == b"attention: the scale must be above zero"
    assert library.rocm_sd_norm_linear(None, None, 64, None, None, eps, None, None, None, 8, 8, 12, 0, None) == -2
    assert b"rows do not begin at multiples of 16 bytes" in library.rocm_sd_last_error()
    assert library.rocm_sd_linear_moments(*[None] * 6, 8, 8, 8, 0, None) == -2
    assert library.rocm_sd_last_error() == b"linear_moments needs a residual"
    assert library.rocm_sd_linear_moments_span(8, 8, 2) == 0


def test_without_a_device_the_program_says_so_and_what_to_do(built):
    text = run(built / "rocm_sd_kernel_test", fails=True)
    assert "HIP sees no GPU here (no ROCm-capable device is detected)" in text
    assert "rocminfo" in text
    assert "This build has code for: gfx1100 gfx942" in text


def test_the_program_explains_itself(built):
    program = built / "rocm_sd_kernel_test"
    assert "--repeats N" in run(program, "--help")
    # The parts of a convolution are those of conv2d.
    assert {*run(program, "--list").split(), "conv2d_split", "conv2d_finish"} == FAMILIES
    assert 'What is "--fast"?' in run(program, "--fast", fails=True)
    assert "There is no kernel no_such." in run(program, "--kernel", "no_such", fails=True)
    assert "--repeats must be 1 or more." in run(program, "--repeats", "0", fails=True)


def test_code_objects_alone_for_every_target_need_clang_only(tmp_path):
    """And they are the machine code that Python compiles."""
    options = ["-DROCM_SD_LIBRARY=OFF", "-DROCM_SD_KERNELS=layout_copy"]
    configure(tmp_path, f"-DROCM_SD_COMPILER={CLANG}", *options)
    run("cmake", "--build", tmp_path)
    found = sorted(tmp_path.rglob("*.co"))
    assert {file.parent.name for file in found} == set(toolchain.TARGETS)
    assert len(found) == 2 * len(toolchain.TARGETS)
    for file in found:
        code = CodeObject.from_elf(file.read_bytes(), "", "layout_copy_wide")
        element = "bits16" if "bits16" in file.name else "bits32"
        ours = toolchain.compile_source(
            "layout_copy", file.parent.name, {"element": element, "channels": 1, "last": 0}
        )  # fmt: skip
        assert code.text == CodeObject.from_elf(ours.elf, "", "layout_copy_wide").text


def test_what_is_missing_is_named_before_anything_is_built(tmp_path):
    old = tmp_path / "old-clang"
    old.write_text("#!/bin/sh\necho 'AMD clang version 17.0.0'\n")
    old.chmod(0o755)
    compiler = f"-DROCM_SD_COMPILER={CLANG}"
    text = configure(tmp_path / "1", f"-DROCM_SD_COMPILER={old}", fails=True)
    assert "is not clang 19 or newer" in text
    assert "AMD clang version 17.0.0" in text
    text = configure(tmp_path / "2", "-DROCM_SD_COMPILER=no-such-clang", fails=True)
    assert "apt-get install clang-19 lld-19" in text
    text = configure(tmp_path / "3", compiler, "-DROCM_SD_KERNELS=no_such_kernel", fails=True)
    assert "there is no no_such_kernel" in text
    assert "there is no float8" in configure(tmp_path / "5", compiler, "-DROCM_SD_DTYPES=float8", fails=True)
    text = configure(
        tmp_path / "4", compiler, "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", "-DROCM_SD_HIP_RUNTIME=", fails=True
    )
    assert "There is no HIP runtime" in text


def variants(gfx, *dtypes):
    """(family, name, parameters) of all that CMake would compile."""
    script = f"""
        cmake_policy(VERSION 3.16)
        include({SOURCE / "library" / "variants.cmake"})
        set(ROCM_SD_DTYPES {" ".join(dtypes)})
        foreach(family ${{ROCM_SD_FAMILIES}})
            rocm_sd_variants(${{family}} {gfx} found)
            foreach(each ${{found}})
                message("${{family}}|${{each}}")
            endforeach()
        endforeach()
    """
    with tempfile.NamedTemporaryFile("w", suffix=".cmake") as file:
        file.write(script)
        file.flush()
        lines = run("cmake", "-P", file.name).splitlines()
    return [
        (family, name, dict(word.split("=") for word in words.split()))
        for family, name, words in (line.split("|") for line in lines)
    ]


@pytest.mark.parametrize("gfx", ["gfx906", "gfx1030", "gfx942", "gfx1201"])
def test_every_variant_says_all_that_its_source_asks_for(gfx):
    found = variants(gfx, "float16", "bfloat16", "float32")
    assert {family for family, _, _ in found} == FAMILIES
    assert len({name for _, name, _ in found}) == len(found)
    for family, name, parameters in found:
        text = (toolchain.SOURCES / f"{family}.hip").read_text()
        asked = set(re.findall(r"ROCM_SD_([A-Z_]+)", text)) - {"KERNEL", "DEVICE", "SHARED"}
        assert {key.upper() for key in parameters} == asked, name


def test_the_tiles_of_cmake_are_those_of_python():
    assert hip_tiles.FILE.read_text() == hip_tiles.text(), "type: python tools/hip_tiles.py"
    assert hip_tiles.HEADER.read_text() == hip_tiles.header(), "type: python tools/hip_tiles.py"
    for gfx in (*toolchain.TARGETS, "gfx906"):
        arch = archs.get(gfx)
        found = {name: parameters for _, name, parameters in variants(gfx, "bfloat16")}
        for head, configs in attention.tiles(arch).items():
            wanted = {"element": "bfloat", "head": head, **asdict(configs[0])}
            assert found[f"attention element=bfloat head={head}"] == {k: str(v) for k, v in wanted.items()}
        for tile, config in (("large", linear_geglu.tiles(arch)[0]), ("small", linear_geglu.tiles(arch)[-1])):
            wanted = dict(config.parameters, element="bfloat", wide=1, has_bias=0)
            name = f"linear_geglu element=bfloat tile={tile} wide=1 has_bias=0"
            assert found[name] == {k: str(v) for k, v in wanted.items()}


def fullest(found):
    """Of variants that differ in optional parts alone, those with as many as go together: the others are the same code
    without some loads and sums, and take fewer registers.
    """
    optional = re.compile(r"has_\w+|silu")

    def parts(parameters):
        return {key for key, value in parameters.items() if optional.fullmatch(key) and value == "1"}

    def rest(family, parameters):
        return family, *((key, value) for key, value in parameters.items() if not optional.fullmatch(key))

    alike = defaultdict(list)
    for family, _, parameters in found:
        alike[rest(family, parameters)].append(parts(parameters))
    return [
        (family, name, parameters)
        for family, name, parameters in found
        if not any(parts(parameters) < other for other in alike[rest(family, parameters)])
    ]


@pytest.mark.slow
def test_every_variant_of_the_library_compiles_for_gfx906_without_a_spill():
    found = variants("gfx906", "float16", "bfloat16", "float32")
    chosen = fullest(found)
    assert {(family, parameters["element"]) for family, _, parameters in chosen} == {
        (family, parameters["element"]) for family, _, parameters in found
    }
    for family, name, parameters in chosen:
        for code in kernels_of(toolchain.compile_source(family, "gfx906", parameters)).values():
            assert (code.vgpr_spills, code.sgpr_spills, code.scratch) == (0, 0, 0), name


def test_an_architecture_without_known_products_is_refused(tmp_path):
    options = (f"-DROCM_SD_COMPILER={CLANG}", "-DCMAKE_HIP_ARCHITECTURES=gfx900", "-DROCM_SD_LIBRARY=OFF")
    assert "Nothing is known of the products of gfx900" in configure(tmp_path, *options, fails=True)
    configure(tmp_path, *options, "-DROCM_SD_KERNELS=layout_copy")
    text = configure(tmp_path, *options, "-DROCM_SD_KERNELS=layout_copy", "-DROCM_SD_ONLY=no_such", fails=True)
    assert "There is nothing to compile" in text


def test_the_targets_of_cmake_are_those_of_python():
    text = (SOURCE / "library" / "variants.cmake").read_text()
    lists = dict(line[4:-1].split(" ", 1) for line in text.splitlines() if line.startswith("set(ROCM_SD_T"))
    assert tuple(lists["ROCM_SD_TARGETS"].split()) == toolchain.TARGETS
