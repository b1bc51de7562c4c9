"""The HIP sources for NVIDIA through nvidia.hpp: compiled by clang and by NVRTC, assembled, and run where a card is."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from driver_library import DriverLibrary, HostCard, build
from test_hip_kernels import EmulatedLauncher

from rocm_sd import arch as archs
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.hip import toolchain
from rocm_sd.kernels.hip.driver import CUDA, Driver
from rocm_sd.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
MATRIX_KERNEL = {
    "element": "half", "block_m": 64, "block_n": 64, "block_k": 64, "waves_m": 2, "waves_n": 2, "stages": 2,
    "fragment": 16, "wide": 1, "has_bias": 1, "has_residual": 1,
}  # fmt: skip
UPSAMPLE = {"element": "bfloat", "width": 8, "scale": 2, "bilinear": 1}
SMALL = ("upsample", "layout_copy", "layer_norm_residual", "group_norm_silu", "conv2d_finish", "row_moments")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("hip_numerics", ROOT / "benchmarks" / "hip_numerics.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["hip_numerics"] = module
    spec.loader.exec_module(module)
    return module


def ptxas():
    """Triton's wheel brings one."""
    path = Path(pytest.importorskip("triton").__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not path.is_file():
        pytest.skip("this build of Triton has no ptxas")
    return path


def assembled(ptx, arch, folder):
    """What ptxas says of each kernel."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    done = subprocess.run(
        [ptxas(), f"-arch={arch}", "-v", file, "-o", folder / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", SMALL)
def test_every_kernel_of_the_small_samples_is_assembled_without_spills(name, script, tmp_path):
    texts = script.compiled("sm_90", script.cases([name]))
    assert texts
    for ptx in texts.values():
        printed = assembled(ptx, "sm_90", tmp_path)
        kernels = printed.count("Compiling entry function")
        assert kernels == ptx.count(".visible .entry") > 0
        assert printed.count("0 bytes spill stores, 0 bytes spill loads") == kernels, printed


@pytest.mark.parametrize("arch", toolchain.NVIDIA_TARGETS)
def test_ptx_is_for_the_architecture_that_was_asked_for(arch, tmp_path):
    compiled = toolchain.compile_source("upsample", arch, UPSAMPLE)
    assert compiled.elf.decode() == compiled.assembly
    assert f".target {arch}\n" in compiled.assembly
    assert "Used" in assembled(compiled.assembly, arch, tmp_path)


def test_a_lane_moves_16_bytes_at_once():
    ptx = toolchain.compile_source("upsample", "sm_90", UPSAMPLE).assembly
    # Nine neighbours are read, four children written.
    assert (ptx.count("ld.global.v4"), ptx.count("st.global.v4")) == (9, 4)


def test_a_matrix_kernel_is_refused_in_words():
    with pytest.raises(toolchain.HipCompilationFailed, match="no matrix kernels for this architecture"):
        toolchain.compile_source("linear_residual", "sm_90", MATRIX_KERNEL)


def test_a_move_between_lanes_that_has_no_counterpart_is_refused(tmp_path):
    file = tmp_path / "move.hip"
    file.write_text(
        "#include <rocm_sd/wave.hpp>\n"
        "ROCM_SD_KERNEL(64) k(int* y) { *y = __builtin_amdgcn_update_dpp(1, 1, ROCM_SD_CONTROL, 15, 15, true); }\n"
    )
    assert "shfl.sync.bfly" in toolchain.compile_source(file, "sm_90", {"control": 0x140}).assembly
    with pytest.raises(toolchain.HipCompilationFailed, match="does not know this move"):
        toolchain.compile_source(file, "sm_90", {"control": 0x111})  # row_shr:1


def test_the_tag_says_what_the_table_says(tmp_path):
    file = tmp_path / "tag.hip"
    file.write_text(
        f"""#include <rocm_sd/arch.hpp>
        using namespace rocm_sd;
        static_assert(this_arch::wave_size == {archs.get("sm_90").wave_size});
        static_assert(this_arch::lds_bytes <= {archs.get("sm_90").lds_per_workgroup});
        static_assert(this_arch::matrix == matrix_kind::none);
        ROCM_SD_KERNEL(64) nothing() {{}}"""
    )
    assert ".maxntid 64, 1, 1" in toolchain.compile_source(file, "sm_90", {}).assembly


def nvrtc():
    """The wheel of torch for CUDA brings one."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:
        spec = None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [file for folder in folders for file in sorted(folder.glob("*/lib/libnvrtc.so.*"))]
    if not found:
        pytest.skip("there is no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
    return ctypes.CDLL(str(found[0]))


@pytest.mark.parametrize("name", SMALL)
def test_nvrtc_compiles_the_same_text(name, script, tmp_path):
    library = nvrtc()
    kernels = {}

    class Collecting:
        arch = archs.get("sm_90")

        def launch(self, kernel, _grid, _arguments):
            kernels[script.file_name(kernel)] = kernel

    with hip_kernels.launched_by(Collecting()):
        for case in script.cases([name]):
            case.run(*case.sample.make(filled=False))
    for kernel in kernels.values():
        definitions = [f"-DROCM_SD_{key.upper()}={value}" for key, value in kernel.parameters]
        # Lambdas have no place for a word that says where they run.
        options = ["-std=c++17", "-arch=sm_90", "-default-device", f"-I{toolchain.INCLUDE}", *definitions]
        text = (toolchain.SOURCES / f"{kernel.source}.hip").read_bytes()
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.hip", 0, None, None) == 0
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = library.nvrtcCompileProgram(program, len(options), given)
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        assert code == 0, log.value.decode()
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        library.nvrtcGetPTX(program, ptx)
        library.nvrtcDestroyProgram(ctypes.byref(program))
        assert f".entry {kernel.name}(" in ptx.value.decode()
        assert "0 bytes spill stores" in assembled(ptx.value.decode(), "sm_90", tmp_path)


class Emulated(EmulatedLauncher):
    """AMD's code in place of a card: what the script does around a launch is the same."""

    launched: list[str]

    def launch(self, kernel, grid, arguments):
        super().launch(kernel, grid, arguments)
        self.launched.append(kernel.name)


def test_a_row_has_the_errors_beside_what_is_allowed(script):
    for name in ("layer_norm_residual", "conv2d_finish"):
        row = script.try_case(script.cases([name])[0], Emulated("gfx1100"), "cpu")
        assert row["ok"]
        assert row["same_bits"]
        assert row["kernels"] == [name]
        assert all(0 <= error["largest"] <= error["allowed"] for error in row["errors"])


@pytest.mark.parametrize("name", SMALL)
def test_a_kernel_that_writes_nothing_fails(name, script):
    class Idle:
        arch = archs.get("sm_90")

        def launch(self, kernel, _grid, _arguments):
            self.launched.append(kernel.name)

    assert not script.try_case(script.cases([name])[0], Idle(), "cpu")["ok"]


def test_every_kernel_that_multiplies_no_matrices_is_among_the_cases(script):
    """By the promises of every op, so that a new one cannot be forgotten."""
    launched = set()

    class Noting:
        arch = archs.get("sm_90")

        def launch(self, kernel, _grid, _arguments):
            launched.add(kernel.name)

    with hip_kernels.launched_by(Noting()):
        for case in script.cases():
            case.run(*case.sample.make(filled=False))
    all_own = (i.kernels.promises for op in OPS.values() for i in op.implementations if i.kernels is not None)
    of_ops = {name for own in all_own for name, promise in own.items() if not promise.uses_dot}
    # The transformer block, which is no op, has one more.
    assert launched == of_ops | {"row_moments"}


def test_prepared_ptx_goes_through_the_projects_own_loader(script, tmp_path, monkeypatch):
    """By a driver that notes what it is given: no clang is asked, and a kernel that was not prepared is reported."""
    fake = DriverLibrary(build(tmp_path, "libcuda.so.1", "-DROCM_SD_CUDA"))
    case = next(case for case in script.cases(["layout_copy"]) if case.sample.dtype is torch.float16)
    ptx = script.compiled("sm_90", [case])
    monkeypatch.setattr(toolchain, "CLANGS", ("no-such-clang",))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    launcher = script.loader(ptx, archs.get("sm_90"), HostCard(), Driver(CUDA, fake.library))
    row = script.try_case(case, launcher, "cpu")
    assert not row["ok"], "this driver computes nothing"
    (load,), launches = fake.calls("load"), fake.calls("launch")
    (text,) = ptx.values()
    assert load.values[0] == len(text.encode())
    assert len(launches) == 2
    (kernel,) = row["kernels"]
    assert launches[0].values[4] == {"layout_copy_wide": 64, "layout_copy_few": 128, "layout_copy_plain": 256}[kernel]
    with pytest.raises(script.WrongFolder, match="was not prepared"):
        script.try_case(script.cases(["upsample"])[0], launcher, "cpu")


def test_a_prepared_folder_holds_what_a_run_needs_and_is_refused_when_sources_change(script, tmp_path, capsys):
    assert script.main(["--prepare", str(tmp_path), "--op", "upsample"]) == 0
    assert "for sm_90" in capsys.readouterr().out
    ptx, manifest = script.read_prepared(tmp_path)
    assert ptx == script.compiled("sm_90", script.cases(["upsample"]))
    assert manifest["arch"] == "sm_90"
    (tmp_path / script.MANIFEST).write_text(json.dumps({**manifest, "sources": "others"}))
    with pytest.raises(script.WrongFolder, match="other sources"):
        script.read_prepared(tmp_path)
    with pytest.raises(script.WrongFolder, match="has no manifest"):
        script.read_prepared(tmp_path / "nothing")


@pytest.mark.gpu
def test_every_small_sample_is_right_on_a_card(script, tmp_path):
    if torch.version.hip:
        pytest.skip("nvidia.hpp is for NVIDIA's cards")
    assert script.main(["--out", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["rows"]
