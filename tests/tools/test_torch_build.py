"""The choice of torch, as a pure function of what was found and what was asked for."""

from __future__ import annotations

import http.server
import threading
from contextlib import contextmanager

import pytest

import torch_build
from rocm_sd.errors import InvalidOption
from torch_build import AMD_INDEX, CPU_INDEX, PYTORCH_ROCM_INDEX, Gpu

PYTHON = (3, 11)
NVIDIA = Gpu("nvidia", "NVIDIA H200")


def put_kfd_node(root, number, target_version, simd_count, cpu_cores=0):
    """One node as the kernel writes it; a CPU has no SIMDs, an integrated GPU shares its node with cores."""
    node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    node.mkdir(parents=True)
    lines = [
        f"cpu_cores_count {cpu_cores}",
        f"simd_count {simd_count}",
        "simd_per_cu 2",
        f"gfx_target_version {target_version}",
        "vendor_id 4098",
        "location_id 768",
    ]
    (node / "properties").write_text("\n".join(lines) + "\n")


def amd(gfx, *, integrated=False):
    return Gpu("amd", gfx, integrated)


def indexes(build):
    return [source.index for source in build.sources]


@pytest.mark.parametrize(
    ("gfx", "expected"),
    [
        ("gfx1100", [AMD_INDEX, PYTORCH_ROCM_INDEX]),
        ("gfx942", [AMD_INDEX, PYTORCH_ROCM_INDEX]),
        ("gfx1201", [AMD_INDEX, PYTORCH_ROCM_INDEX]),
        ("gfx1103", [AMD_INDEX]),
        ("gfx1032", [AMD_INDEX]),
    ],
)
def test_amd_gpu_gets_the_wheels_that_hold_its_kernels(gfx, expected):
    build = torch_build.choose((amd(gfx),), "auto", PYTHON)
    assert build.kind == "rocm"
    assert indexes(build) == expected
    assert build.sources[0].requirement == f"torch[device-{gfx}]==2.13.0+rocm10.0.0"
    assert gfx in build.reason


@pytest.mark.parametrize("gfx", sorted(torch_build.ROCM_WHEELS))
def test_every_row_of_the_table_leads_to_a_rocm_build(gfx):
    assert torch_build.choose((amd(gfx),), "auto", PYTHON).kind == "rocm"


@pytest.mark.parametrize("gfx", ["gfx803", "gfx1299"])
def test_unknown_amd_gpu_gets_the_cpu_build_and_is_named(gfx):
    build = torch_build.choose((amd(gfx),), "auto", PYTHON)
    assert (build.kind, indexes(build)) == ("cpu", [CPU_INDEX, None])
    assert gfx in build.reason


@pytest.mark.parametrize(("gpu", "missing"), [(Gpu("amd"), "compute driver"), (Gpu("nvidia"), "NVIDIA's driver")])
def test_a_gpu_whose_driver_is_missing_gets_the_cpu_build_and_is_reported(gpu, missing):
    build = torch_build.choose((gpu,), "auto", PYTHON)
    assert build.kind == "cpu"
    assert missing in build.reason


def test_nvidia_is_taken_where_the_amd_card_beside_it_has_no_wheel():
    assert torch_build.choose((amd("gfx803"), NVIDIA), "auto", PYTHON).kind == "cuda"


@pytest.mark.parametrize("gfx", sorted(torch_build.REFUSED))
def test_refused_gpu_gets_the_cpu_build_unless_asked_for_by_name(gfx):
    build = torch_build.choose((amd(gfx),), "auto", PYTHON)
    assert build.kind == "cpu"
    assert f"ROCM_SD_TORCH={gfx}" in build.reason
    forced = torch_build.choose((amd(gfx),), gfx, PYTHON)
    assert forced.kind == "rocm"
    assert torch_build.REFUSED[gfx] in forced.reason


def test_python_310_takes_pytorchs_wheel_and_has_none_for_gfx1103():
    assert indexes(torch_build.choose((amd("gfx1100"),), "auto", (3, 10))) == [PYTORCH_ROCM_INDEX]
    without = torch_build.choose((amd("gfx1103"),), "auto", (3, 10))
    assert without.kind == "cpu"
    assert "3.11" in without.reason


def test_the_card_chooses_not_the_integrated_gpu_listed_before_it():
    build = torch_build.choose((amd("gfx1036", integrated=True), amd("gfx1201")), "auto", PYTHON)
    assert build.sources[0].requirement == "torch[device-gfx1201]==2.13.0+rocm10.0.0"


def test_two_cards_share_one_torch_with_both_kernels():
    build = torch_build.choose((amd("gfx1100"), amd("gfx1031"), amd("gfx1100")), "auto", PYTHON)
    assert build.sources[0].requirement == "torch[device-gfx1100,device-gfx1031]==2.13.0+rocm10.0.0"
    assert indexes(build) == [AMD_INDEX]


def test_a_card_without_wheels_beside_one_that_has_them_is_named():
    build = torch_build.choose((amd("gfx1100"), amd("gfx803")), "auto", PYTHON)
    assert build.kind == "rocm"
    assert "gfx803 has no wheel" in build.reason


def test_nvidia_gets_pypis_build():
    build = torch_build.choose((NVIDIA,), "auto", PYTHON)
    assert (build.kind, indexes(build)) == ("cuda", [None])
    assert "H200" in build.reason


@pytest.mark.parametrize(("integrated", "kind"), [(True, "cuda"), (False, "rocm")])
def test_beside_nvidia_only_an_amd_card_is_preferred(integrated, kind):
    build = torch_build.choose((NVIDIA, amd("gfx1100", integrated=integrated)), "auto", PYTHON)
    assert build.kind == kind
    if kind == "rocm":
        assert "ROCM_SD_TORCH=cuda" in build.reason


def test_no_gpu_gets_exactly_the_pinned_cpu_build():
    build = torch_build.choose((), "auto", PYTHON)
    assert build.kind == "cpu"
    assert [(s.index, s.requirement) for s in build.sources] == [(CPU_INDEX, "torch==2.13.0"), (None, "torch==2.13.0")]


@pytest.mark.parametrize(
    ("wanted", "kind", "index"),
    [
        ("cpu", "cpu", CPU_INDEX),
        ("cuda", "cuda", None),
        ("rocm", "rocm", AMD_INDEX),
        ("gfx1030", "rocm", AMD_INDEX),
        ("https://example.org/whl/", "custom", "https://example.org/whl"),
    ],
)
def test_what_is_asked_for_wins_over_what_was_found(wanted, kind, index):
    build = torch_build.choose((amd("gfx1100"), NVIDIA), wanted, PYTHON)
    assert (build.kind, build.sources[0].index) == (kind, index)


@pytest.mark.parametrize("wanted", ["rcom", "", "gfx", "gfx99999", "ftp://example.org"])
def test_a_bad_override_is_answered_with_the_choices(wanted):
    with pytest.raises(InvalidOption, match="auto, rocm, cuda, cpu"):
        torch_build.choose((), wanted, PYTHON)


def test_rocm_asked_for_without_an_amd_gpu_says_how_to_name_one():
    with pytest.raises(InvalidOption, match="ROCM_SD_TORCH=gfx1100"):
        torch_build.choose((NVIDIA,), "rocm", PYTHON)


def test_a_gfx_asked_for_that_nobody_builds_for_says_what_to_type():
    with pytest.raises(InvalidOption, match="ROCM_SD_TORCH=https://"):
        torch_build.choose((), "gfx803", PYTHON)


def test_the_key_tells_builds_apart():
    choices = [((), "auto"), ((NVIDIA,), "auto"), ((amd("gfx1100"),), "auto"), ((amd("gfx1103"),), "auto")]
    assert len({torch_build.choose(gpus, wanted, PYTHON).key for gpus, wanted in choices}) == len(choices)


@pytest.mark.parametrize(
    ("target_version", "gfx", "kind"),
    [
        (110000, "gfx1100", "rocm"),
        (90402, "gfx942", "rocm"),
        (110003, "gfx1103", "rocm"),
        (80003, "gfx803", "cpu"),
        (130000, "gfx1300", "cpu"),
    ],
)
def test_from_the_kernels_files_to_the_choice(tmp_path, target_version, gfx, kind):
    put_kfd_node(tmp_path, 0, 0, 0, cpu_cores=16)
    put_kfd_node(tmp_path, 1, target_version, 192)
    build = torch_build.choose(torch_build.find_gpus(tmp_path), "auto", PYTHON)
    assert build.kind == kind
    assert gfx in build.reason


def test_from_the_kernels_files_an_integrated_gpu_yields_to_a_card(tmp_path):
    put_kfd_node(tmp_path, 0, 100306, 4)
    put_kfd_node(tmp_path, 1, 120001, 128)
    build = torch_build.choose(torch_build.find_gpus(tmp_path), "auto", PYTHON)
    assert "gfx1201" in build.reason
    assert "gfx1036" not in build.sources[0].requirement


def test_nvidia_is_found_by_its_driver_and_through_wsl(tmp_path):
    assert torch_build.find_gpus(tmp_path) == ()
    wsl = tmp_path / "wsl"
    (wsl / "usr/lib/wsl/lib").mkdir(parents=True)
    (wsl / "usr/lib/wsl/lib/nvidia-smi").touch()
    assert torch_build.choose(torch_build.find_gpus(wsl), "auto", PYTHON).kind == "cuda"
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t NVIDIA GeForce RTX 3090\n")
    build = torch_build.choose(torch_build.find_gpus(tmp_path), "auto", PYTHON)
    assert build.kind == "cuda"
    assert "RTX 3090" in build.reason


@contextmanager
def index_answering(status):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<a>torch</a>")

        def log_message(self, *args):
            """The test's output is kept free of the server's."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_index_that_answers_is_reachable():
    with index_answering(200) as index:
        assert torch_build.unreachable(index) is None


def test_an_index_that_refuses_is_named_by_its_code():
    with index_answering(403) as index:
        assert torch_build.unreachable(index) == "it answers 403"


def test_a_silent_host_and_a_missing_folder_are_unreachable(tmp_path):
    with index_answering(200) as index:
        pass
    assert "refused" in torch_build.unreachable(index, timeout=1)
    assert torch_build.unreachable(f"file://{tmp_path}") is None
    assert torch_build.unreachable(f"file://{tmp_path}/none") == "there is no such folder"


def test_wsl_bridge_is_seen_only_without_kfd(tmp_path):
    (tmp_path / "dev").mkdir()
    assert not torch_build.is_wsl_bridge_alone(tmp_path)
    (tmp_path / "dev/dxg").touch()
    assert torch_build.is_wsl_bridge_alone(tmp_path)
    (tmp_path / "dev/kfd").touch()
    assert not torch_build.is_wsl_bridge_alone(tmp_path)
