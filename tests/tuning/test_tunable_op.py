"""Results of torch's TunableOp: read from recorded lines, refused where they do not fit, chosen product by product."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_sd import arch
from rocm_sd.cli import main
from rocm_sd.errors import Unsupported
from rocm_sd.ops import OPS, library_switch
from rocm_sd.ops.linear_residual import tunable
from rocm_sd.tuning import tunable_op
from rocm_sd.tuning.tunable_op import UnreadableResults, parse, read_results, why_stale, write_results

# As torch 2.9 writes it on an MI350X.
LINES = """Validator,PT_VERSION,2.9.1
Validator,HIP_VERSION,702
Validator,HIPBLASLT_VERSION,100201-5b515cf1bc
Validator,GCN_ARCH_NAME,gfx950:sramecc+:xnack-
Validator,ROCBLAS_VERSION,5.2.0.5b515cf1bc
GemmTunableOp_Half_TN,tn_51866_39232_1280_ld_1280_1280_51866,Gemm_Hipblaslt_477479,4.87196
GemmTunableOp_Half_TN,tn_320_8192_320,Gemm_Rocblas_477326,0.185983
GemmTunableOp_BFloat16_TN,tn_640_2048_640_ld_640_640_640,Default,0.3
GemmTunableOp_Half_TN,tn_640_2048_640_ld_640_1920_640,Gemm_Rocblas_1,0.3
GemmTunableOp_float_NN,nn_1024_512_2048,Gemm_Hipblaslt_NN_52565,0.0653662
GemmAndBiasTunableOp_Half_TN,tn_320_8192_320_ld_320_320_320,Gemm_Hipblaslt_7
"""
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
HALF = {"m": 8192, "n": 320, "k": 320, "bias": 1, "residual": 0, "dtype": "float16"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    tunable._refusal.cache_clear()
    yield tmp_path / "cache"
    tunable._refusal.cache_clear()


def kept(text=LINES):
    tunable_op.results_file().parent.mkdir(parents=True, exist_ok=True)
    tunable_op.results_file().write_text(text)


class Switch:
    """torch.cuda.tunable as a card has it: what it was told, in order."""

    def __init__(self, enabled=False, fixed=False, accepts=True, found=()):
        self.enabled, self.tuning, self.fixed, self.accepts = enabled, True, fixed, accepts
        self.log, self.results = [], list(found)

    def enable(self, value):
        self.enabled = self.enabled if self.fixed else value

    def is_enabled(self):
        return self.enabled

    def tuning_enable(self, value):
        self.tuning = value

    def tuning_is_enabled(self):
        return self.tuning

    def set_filename(self, name):
        self.log.append(("file", name))

    def read_file(self, name):
        self.log.append(("read", name, self.enabled))
        return self.accepts

    def set_max_tuning_duration(self, ms):
        self.log.append(("duration", ms))

    def set_max_tuning_iterations(self, count):
        self.log.append(("iterations", count))

    def get_validators(self):
        return (("PT_VERSION", torch.__version__), ("GCN_ARCH_NAME", "gfx942:sramecc+"))

    def get_results(self):
        return tuple(self.results)


class Products(TorchDispatchMode):
    """How the switch stands whenever a product is computed."""

    def __init__(self, switch):
        super().__init__()
        self.switch, self.seen = switch, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}:
            self.seen.append((self.switch.enabled, self.switch.tuning))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_card(monkeypatch):
    """A ROCm build with an MI300X, as far as this code asks."""

    def use(**options):
        switch = Switch(**options)
        monkeypatch.setattr(library_switch, "build_of_torch", lambda: "ROCm")
        monkeypatch.setattr(arch, "detect", lambda _device: arch.get("gfx942"))
        monkeypatch.setattr(tunable, "_tunable", lambda: switch)
        return switch

    return use


def here(text=LINES):
    return text.replace("gfx950", "gfx942").replace("2.9.1", torch.__version__)


class TestReading:
    def test_linears_are_known_by_their_sizes(self):
        found = parse(LINES)
        assert found.validators["GCN_ARCH_NAME"] == "gfx950:sramecc+:xnack-"
        assert len(found.products) == 6
        one = found.of(8192, 320, 320, "float16")
        assert (one.solution, one.ms, one.words) == ("Gemm_Rocblas_477326", 0.185983, "8192x320 @ 320x320, float16")
        assert found.of(39232, 51866, 1280, "float16").solution == "Gemm_Hipblaslt_477479"
        assert found.of(8192, 320, 320, "bfloat16") is None
        # Rows with gaps, other layouts and the product with a bias are other products.
        assert found.of(2048, 640, 640, "float16") is None
        assert [one.sizes for one in found.products[3:]] == [None, None, None]
        assert found.products[-1].ms is None

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "names no versions"),
            ("GemmTunableOp_Half_TN,tn_1_1_1,Default,1\n", "names no versions"),
            ("Validator,PT_VERSION\n", "line 1"),
            ("Validator,PT_VERSION,2\nno line of it\n", "line 2"),
            ("Validator,PT_VERSION,2\nGemmTunableOp_Half_TN,tn_1_1_1,Default,soon\n", "no time"),
            ("Validator,PT_VERSION,2\nGemmTunableOp_Half_TN,tn_1_1_1,Default,-1\n", "no time"),
            ("Validator,PT_VERSION,2\nGemmTunableOp_Half_TN,tn_1_1_1,Default,inf\n", "no time"),
            ("Validator,PT_VERSION,2\nA,b,c,1,2\n", "line 2"),
            ("Validator,PT_VERSION,2\nA,b,\x1b[31mred,1\n", "characters"),
            ("Validator,PT_VERSION,2\n" + "A,b,c,1\n" * 100_001, "more than"),
        ],
    )
    def test_what_is_no_such_file_is_refused_with_the_place(self, text, why):
        with pytest.raises(UnreadableResults, match=why):
            parse(text)

    def test_files(self, tmp_path):
        (tmp_path / "x.csv").write_bytes(b"\xff\xfe")
        for path in (tmp_path / "x.csv", tmp_path, tmp_path / "not-there"):
            with pytest.raises(UnreadableResults):
                read_results(path)
        with (tmp_path / "large.csv").open("wb") as large:
            large.truncate(2**24 + 1)
        with pytest.raises(UnreadableResults, match="larger"):
            read_results(tmp_path / "large.csv")

    def test_written_results_come_back(self, tmp_path):
        found = write_results(
            tmp_path / "a/b.csv", [("PT_VERSION", "2.9")], [("GemmTunableOp_Half_TN", "tn_1_2_3", "X", 0.5)]
        )
        assert read_results(tmp_path / "a/b.csv") == found
        assert found.of(2, 1, 3, "float16").ms == 0.5
        with pytest.raises(UnreadableResults):
            write_results(tmp_path / "a/b.csv", [], [])
        assert read_results(tmp_path / "a/b.csv") == found, "the file of before is there"

    def test_other_cards_and_versions_are_stale(self):
        found = parse(LINES)
        assert why_stale(found, "gfx950", "2.9.1+rocm7.2") is None
        assert "gfx950" in why_stale(found, "gfx942", "2.9.1")
        assert "torch 2.9.1" in why_stale(found, "gfx950", "2.10.0")

    def test_a_file_that_changed_is_read_again(self):
        assert tunable_op.results_here() is None
        kept()
        assert len(tunable_op.results_here().products) == 6
        kept(LINES + "GemmTunableOp_Half_TN,tn_8_8_8,Default,1\n")
        assert len(tunable_op.results_here().products) == 7


class TestCandidate:
    def test_nothing_of_it_here(self):
        kept()
        implementation = OPS["linear_residual"].implementation("tunable_op")
        assert "CPU build" in implementation.why_not(HALF, CPU) or "ROCm" in implementation.why_not(HALF, CPU)
        assert "float32" in implementation.why_not(HALF | {"dtype": "float32"}, CPU)

    def test_it_is_refused_with_the_reason(self, on_card):
        on_card()
        assert "rocm-sd tune --tunable-op" in tunable.why_not(HALF, CARD)
        kept("no such file")
        assert "is no file of TunableOp's results" in tunable.why_not(HALF, CARD)
        kept()
        assert "they are of gfx950" in tunable.why_not(HALF, CARD)
        kept(here())
        assert "has not tuned" in tunable.why_not(HALF | {"m": 7}, CARD)
        product = {"m": 2048, "n": 640, "k": 640, "dtype": "bfloat16"}
        assert "nothing faster" in tunable.why_not(HALF | product, CARD)

    def test_it_is_a_candidate_where_there_is_a_kernel_and_leaves_the_switch_off(self, on_card):
        switch = on_card()
        kept(here())
        assert tunable.why_not(HALF, CARD) is None
        assert switch.log == [("file", str(tunable_op.results_file())), ("read", str(tunable_op.results_file()), True)]
        assert not switch.enabled
        assert not switch.tuning
        assert tunable.why_not(HALF, CARD) is None
        assert len(switch.log) == 2, "torch reads it once"

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"enabled": True}, "whole process"),
            ({"fixed": True}, "environment keeps off"),
            ({"accepts": False}, "torch rejects"),
        ],
    )
    def test_a_process_that_cannot_use_it(self, on_card, options, why):
        on_card(**options)
        kept(here())
        assert why in tunable.why_not(HALF, CARD)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("residual", [True, False])
    def test_it_computes_the_op_with_the_switch_on_around_it(self, on_card, bias, residual):
        switch = on_card()
        x, weight = torch.randn(6, 5), torch.randn(4, 5)
        parts = torch.randn(4) if bias else None, torch.randn(6, 4) if residual else None
        op = OPS["linear_residual"]
        with Products(switch) as products:
            y = op.implementation("tunable_op")(x, weight, *parts)
        assert products.seen == [(True, False)], "one product, with the switch on and its tuning off"
        assert torch.allclose(y, op.implementations[0](x, weight, *parts), atol=1e-5)
        assert not switch.enabled
        assert switch.tuning, "as it was before"

    def test_the_switch_is_put_back_when_a_call_fails(self, on_card):
        switch = on_card()
        with pytest.raises(RuntimeError), tunable.in_use():
            raise RuntimeError
        assert (switch.enabled, switch.tuning) == (False, True)


class TestTuning:
    def test_products_are_tuned_one_by_one_and_kept_after_each(self, on_card, monkeypatch):
        switch = on_card()
        tuned = []

        def mm(x, weight):
            assert switch.enabled
            assert switch.tuning
            tuned.append((*x.shape, weight.shape[1]))
            n, m, k = weight.shape[1], *x.shape
            switch.results.append(("GemmTunableOp_Half_TN", f"tn_{n}_{m}_{k}_ld_{k}_{k}_{n}", "Gemm_Rocblas_7", 0.25))

        monkeypatch.setattr(torch, "mm", mm)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(library_switch, "why_not_built", lambda *_: None)
        monkeypatch.setattr(tunable, "why_not_built", lambda *_: None)
        products = [(8, 4, 16, "float16"), (6, 2, 16, "float16"), (1, 1, 1, "float16")]
        found = tunable.tune(products, CPU, go_on=lambda: len(tuned) < 2)
        assert tuned == [(8, 16, 4), (6, 16, 2)]
        assert found.of(8, 4, 16, "float16").solution == "Gemm_Rocblas_7"
        assert len(read_results(tunable_op.results_file()).products) == 2
        assert ("duration", 30) in switch.log
        assert not switch.enabled

    def test_elsewhere_it_is_refused_before_a_model_is_loaded(self, capsys):
        with pytest.raises(Unsupported, match="ROCm"):
            tunable.tune([(1, 1, 1, "float16")], CPU)
        with pytest.raises(SystemExit) as ended:
            main.run(["tune", "--tunable-op", "--device", "cpu"])
        assert ended.value.code == 3
        assert "ROCm build of torch" in " ".join(capsys.readouterr().err.split())


def test_list_and_info_show_what_there_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    kept()

    def printed(*arguments):
        with pytest.raises(SystemExit):
            main.run(list(arguments))
        return capsys.readouterr().out

    listed = printed("tune", "--list", "--device", "cpu")
    for words in (
        "8192x320 @ 320x320, float16",
        "Gemm_Rocblas_477326",
        "186.0",
        "They are not used: they are of gfx950",
    ):
        assert words in listed
    assert "6 products tuned; not used" in printed("info")


def test_a_broken_file_is_said_by_info_and_ends_a_listing(capsys):
    kept("no such file")
    from rocm_sd.cli.info import gather

    assert "is no file of TunableOp's results" in gather()["tunable_op"]["why_not_used"]
    with pytest.raises(SystemExit) as ended:
        main.run(["tune", "--list", "--device", "cpu"])
    assert ended.value.code
    assert "rocm-sd tune --tunable-op" in " ".join(capsys.readouterr().err.split())


def test_the_module_is_torchs_own():
    names = ("enable", "is_enabled", "tuning_enable", "tuning_is_enabled", "set_filename", "read_file", "get_results",
             "get_validators", "set_max_tuning_duration", "set_max_tuning_iterations")  # fmt: skip
    assert all(callable(getattr(torch.cuda.tunable, name)) for name in names)
