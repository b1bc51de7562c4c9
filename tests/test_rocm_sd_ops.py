from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, StableDiffusionPipeline

import rocm_sd
import rocm_sd_ops
from pipelines import CASES, call
from rocm_sd.errors import InvalidOption, ModelNotFound, NumericsFailure, Unsupported
from rocm_sd.ops import OPS, attention
from rocm_sd_ops import OptimizedAttentionFunction, ROCmOptimizedPipeline, ROCmSDBackend, ROCmSDProfiler


def heads(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def test_attention_of_heads_and_of_joined_heads_is_the_same(device):
    q, k, v = (heads(device, 2, length, 4, 8, seed=seed) for seed, length in enumerate((6, 9, 9)))
    expected = attention(q, k, v, 0.3)
    assert torch.equal(rocm_sd_ops.optimized_attention(q, k, v, scale=0.3), expected)
    assert torch.equal(rocm_sd_ops.optimized_attention(q, k, v, num_heads=4, scale=0.3), expected)
    joined = rocm_sd_ops.optimized_attention(q.flatten(2), k.flatten(2), v.flatten(2), num_heads=4, scale=0.3)
    assert joined.shape == (2, 6, 32)
    assert torch.equal(joined, expected.flatten(2))


@pytest.mark.parametrize(
    ("shape", "num_heads", "message"),
    [
        ((2, 6, 32), None, "3 dimensions with num_heads=None"),
        ((2, 6, 32), 5, "32 columns in 5 heads"),
        ((2, 6, 32), 0, "32 columns in 0 heads"),
        ((2, 6, 4, 8), 2, "4 dimensions with num_heads=2"),
        ((6, 32), 4, "2 dimensions"),
    ],
)
def test_bad_attention_input_is_refused_in_one_sentence(shape, num_heads, message):
    q = torch.zeros(shape)
    with pytest.raises(Unsupported, match=message):
        rocm_sd_ops.optimized_attention(q, q, q, num_heads=num_heads)


def test_a_key_of_another_width_is_refused_in_one_sentence():
    q, k = torch.zeros(2, 6, 32), torch.zeros(2, 6, 30)
    with pytest.raises(Unsupported, match="with a key of"):
        rocm_sd_ops.optimized_attention(q, k, k, num_heads=2)


def test_the_fallback_is_stock_torch_in_either_shape(device):
    q, k, v = (heads(device, 2, length, 4, 8, seed=seed) for seed, length in enumerate((6, 9, 9)))
    stock = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=0.3)
    found = rocm_sd_ops.pytorch_attention_fallback(q, k, v, scale=0.3)
    assert torch.equal(found, stock.transpose(1, 2))
    joined = rocm_sd_ops.pytorch_attention_fallback(*(t.flatten(2) for t in (q, k, v)), num_heads=4, scale=0.3)
    assert torch.equal(joined, found.flatten(2))
    with pytest.raises(Unsupported, match="pytorch_attention_fallback"):
        rocm_sd_ops.pytorch_attention_fallback(q.flatten(2), k, v)


class TestAttentionFunction:
    @staticmethod
    def inputs(*shape):
        made = (heads("cpu", *shape[:1], length, *shape[1:], seed=seed) for seed, length in enumerate((3, 5, 5)))
        return tuple(tensor.double().requires_grad_() for tensor in made)

    @pytest.mark.parametrize(
        ("shape", "rest"), [((2, 2, 4), ()), ((2, 8), (2,)), ((1, 8), (2, 0.3)), ((1, 6), (1, -0.5))]
    )
    def test_it_has_the_gradients_of_its_numbers(self, shape, rest):
        def function(q, k, v):
            return OptimizedAttentionFunction.apply(q, k, v, *rest)

        inputs = self.inputs(*shape)
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)

    def test_forward_and_gradients_are_those_of_the_op(self):
        q, k, v = self.inputs(2, 2, 4)
        ours, ops = OptimizedAttentionFunction.apply(q, k, v), attention(q, k, v)
        assert torch.equal(ours, ops)
        weight = heads("cpu", *ours.shape, seed=9).double()
        for found, expected in zip(
            torch.autograd.grad(ours, (q, k, v), weight), torch.autograd.grad(ops, (q, k, v), weight), strict=True
        ):
            assert torch.equal(found, expected)

    @pytest.mark.parametrize("wanted", [(0,), (1, 2), (0, 2)])
    def test_only_the_gradients_that_are_asked_for_are_computed(self, wanted):
        inputs = [t.detach().requires_grad_(place in wanted) for place, t in enumerate(self.inputs(2, 8))]
        OptimizedAttentionFunction.apply(*inputs, 2).sum().backward()
        assert [t.grad is not None for t in inputs] == [place in wanted for place in range(3)]

    def test_a_wrong_shape_is_refused(self):
        q, k, v = self.inputs(2, 8)
        with pytest.raises(Unsupported, match="8 columns in 3 heads"):
            OptimizedAttentionFunction.apply(q, k, v, 3)


class TestBackend:
    def test_without_kernels_stock_torch_runs_and_the_reason_is_said(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        backend = ROCmSDBackend("cpu")
        assert not backend.is_available()
        reason = "Triton has no code for a tensor on cpu; HIP has no code for a tensor on cpu"
        assert backend.why_not() == reason
        assert repr(backend) == f"ROCmSDBackend('cpu'): cpu, stock torch runs, because {reason}"
        assert backend.arch.name == "cpu"
        assert backend.ops() == rocm_sd_ops.register_rocm_ops()
        q = heads("cpu", 1, 4, 16)
        assert torch.equal(backend.attention(q, q, q, 2), rocm_sd_ops.optimized_attention(q, q, q, 2))

    def test_with_kernels_it_is_available(self, monkeypatch):
        monkeypatch.setattr("rocm_sd.kernels.hip.why_not", lambda _device: "no clang")
        monkeypatch.setattr("rocm_sd.kernels.triton.why_not", lambda _device: None)
        assert ROCmSDBackend("cpu").is_available()
        assert "its kernels run" in repr(ROCmSDBackend("cpu"))

    def test_the_one_of_the_program_is_for_what_torch_sees(self, device):
        assert isinstance(rocm_sd_ops.rocm_backend, ROCmSDBackend)
        assert rocm_sd_ops.rocm_backend.device.type == device.type


class TestProfiledAttention:
    def test_tensors_sizes_and_functions_are_timed_by_name(self, device):
        profile, q = ROCmSDProfiler(), heads(device, 1, 6, 32)
        assert profile.timings == {}
        assert torch.equal(profile.profile_attention(q, q, q, 4), rocm_sd_ops.optimized_attention(q, q, q, 4))
        assert profile.profile_attention(1, 64, 512, 8).shape == (1, 64, 8, 64)
        assert profile.profile_attention(batch_size=2, seq_len=3, d_model=8, num_heads=2).shape == (2, 3, 2, 4)
        fallback = rocm_sd_ops.pytorch_attention_fallback
        assert torch.equal(profile.profile_attention(fallback, q, q, q, num_heads=4), fallback(q, q, q, 4))
        assert {name: len(taken) for name, taken in profile.timings.items()} == {
            "attention": 3,
            "pytorch_attention_fallback": 1,
        }
        assert all(ms > 0 for taken in profile.timings.values() for ms in taken)

    def test_timed_calls_are_printed_beside_a_recording_and_without_one(self, capsys):
        profile, q = ROCmSDProfiler(), heads("cpu", 1, 6, 32)
        profile.profile_attention(q, q, q, 4)
        profile.print_stats()
        alone = capsys.readouterr().out
        assert "Timed calls" in alone
        assert "By family" not in alone
        profile.enable()
        profile.profile_attention(q, q, q, 4)
        profile.print_stats()
        both = capsys.readouterr().out
        assert "Timed calls" in both
        assert "By family" in both

    @pytest.mark.parametrize("given", [(), ("q",), (1, 64), (1, 64, 512, 8, 100), (1, 64, 30, 8)])
    def test_what_is_no_attention_is_refused(self, given):
        profile = ROCmSDProfiler()
        with pytest.raises(Unsupported, match="profile_attention"):
            profile.profile_attention(*given)
        assert profile.timings == {}


def test_the_attention_benchmark_times_both_and_says_what_ran(device):
    result = rocm_sd_ops.benchmark_attention(batch_size=1, seq_len=300, d_model=32, num_heads=2, num_runs=3)
    assert result["optimized_ms"] > 0
    assert result["speedup"] == pytest.approx(result["stock_ms"] / result["optimized_ms"])
    assert result["largest_error"] <= result["allowed_error"]
    assert result["runs"] == 3
    assert result["dtype"] == ("float16" if device.type == "cuda" else "float32")
    assert result["implementation"] in {i.name for i in OPS["attention"].implementations}


def test_the_attention_benchmark_is_a_number_of_milliseconds_with_the_rest_by_name():
    assert re.fullmatch(r"\d+\.\d\dms", f"{rocm_sd_ops.benchmark_attention(1, 64, 512, 8, 100):.2f}ms")
    found = rocm_sd_ops.benchmark_attention(1, 16, 32, 2, 1)
    assert float(found) == found["optimized_ms"] == found.optimized_ms
    assert dict(found) == dict(found.items()) == found.facts
    assert "device" in found.keys()  # noqa: SIM118 -- a number with names, not a mapping
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (float(other), other.facts) == (float(found), found.facts)
    with pytest.raises(AttributeError, match="no attribute 'slowdown'"):
        _ = found.slowdown
    with pytest.raises(KeyError):
        found["slowdown"]


def test_the_attention_benchmark_reports_no_time_for_a_wrong_result(monkeypatch):
    def wrong(q, k, v, scale=None, implementation=None):
        return attention(q, k, v, scale, implementation) * (1.0 if implementation else 1.5)

    monkeypatch.setattr("rocm_sd.ops.attention", wrong)
    with pytest.raises(NumericsFailure, match="differs from the reference"):
        rocm_sd_ops.benchmark_attention(batch_size=1, seq_len=64, d_model=32, num_heads=2, num_runs=1)


@pytest.mark.parametrize("sizes", [{"num_heads": 3}, {"num_runs": 0}, {"batch_size": 0}])
def test_the_attention_benchmark_refuses_sizes_that_do_not_fit(sizes):
    with pytest.raises(Unsupported, match="benchmark_attention"):
        rocm_sd_ops.benchmark_attention(**({"batch_size": 1, "seq_len": 16, "d_model": 32, "num_heads": 2} | sizes))


def test_every_op_is_registered_with_torch():
    for name in rocm_sd_ops.register_rocm_ops():
        namespace, op = name.split("::")
        assert hasattr(getattr(torch.ops, namespace), op)


class TestOptimizedPipeline:
    case = CASES["sd15"]

    @pytest.fixture(autouse=True)
    def on_the_cpu(self, monkeypatch):
        """Also on a machine with a GPU, where a pipeline would wait to be moved there."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    @pytest.fixture
    def stock(self, tmp_path):
        return self.case.build(tmp_path)

    def test_it_draws_what_the_optimized_pipeline_draws(self, stock, tmp_path):
        pipe = ROCmOptimizedPipeline(stock, optimization_level="memory", quality="high")
        assert pipe.pipeline is stock
        assert (pipe.report().level, pipe.report().quality) == ("memory", "high")
        wanted = call(rocm_sd.optimize(self.case.build(tmp_path), "memory"), self.case)
        assert torch.equal(call(pipe, self.case), wanted)

    @pytest.mark.parametrize("name", ["sd15", "sdxl", "refiner", "sd15-inpaint9"])
    def test_a_folder_is_loaded_as_what_it_says_it_is(self, name, tmp_path):
        case = CASES[name]
        case.build(tmp_path).save_pretrained(tmp_path / "model")
        pipe = ROCmOptimizedPipeline(tmp_path / "model", device="cpu")
        assert type(pipe.pipeline).__name__ == case.kind
        assert pipe.report().replaced
        pipe.set_progress_bar_config(disable=True)
        assert call(pipe, case).isfinite().all()

    def test_a_dtype_may_be_named(self, stock, tmp_path):
        stock.save_pretrained(tmp_path / "model")
        pipe = ROCmOptimizedPipeline(str(tmp_path / "model"), device="cpu", dtype=torch.bfloat16)
        assert pipe.unet.dtype == torch.bfloat16
        assert ROCmOptimizedPipeline(stock, dtype=torch.float64).unet.dtype == torch.float64
        assert rocm_sd.report(stock).replaced

    def test_attributes_are_the_pipelines(self, stock):
        pipe = ROCmOptimizedPipeline(stock)
        pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
        assert stock.scheduler is pipe.scheduler
        assert type(stock.scheduler) is EulerDiscreteScheduler
        pipe.mark = 1
        assert stock.mark == 1
        del pipe.mark
        assert not hasattr(stock, "mark")
        assert {"unet", "load_lora_weights", "report", "restore"} <= set(dir(pipe))
        assert repr(pipe).startswith("ROCmOptimizedPipeline of StableDiffusionPipeline")
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = pipe.nothing

    def test_restore_gives_the_stock_pipeline(self, stock, tmp_path):
        pipe = ROCmOptimizedPipeline(stock)
        call(pipe, self.case)
        assert pipe.restore() is stock
        assert torch.equal(call(pipe, self.case), call(self.case.build(tmp_path), self.case))
        with pytest.raises(Unsupported, match="not optimised"):
            pipe.report()

    def test_it_stays_optimized_where_it_is_moved_to(self, stock):
        pipe = ROCmOptimizedPipeline(stock, "memory")
        assert pipe.to(torch.float64) is pipe
        assert rocm_sd.report(stock).level == "memory"
        assert call(pipe, self.case).dtype == torch.float64

    def test_what_is_saved_is_the_stock_model(self, stock, tmp_path):
        ROCmOptimizedPipeline(stock).save_pretrained(tmp_path / "saved")
        assert type(DiffusionPipeline.from_pretrained(tmp_path / "saved")) is StableDiffusionPipeline

    def test_the_functions_of_rocm_sd_take_it_for_the_pipeline(self, stock):
        pipe = ROCmOptimizedPipeline(ROCmOptimizedPipeline(stock))
        assert pipe.pipeline is stock
        assert pipe == stock
        assert rocm_sd.report(pipe).to_dict() == rocm_sd.report(stock).to_dict()
        assert len(rocm_sd.report(rocm_sd.optimize(pipe, level="memory")).replaced) == len(pipe.report().replaced)
        rocm_sd.restore(pipe)
        assert "forward" not in stock.unet.mid_block.resnets[0].__dict__

    def test_without_a_model_it_is_the_one_that_comes_with_the_package(self):
        pipe = ROCmOptimizedPipeline()
        pipe.set_progress_bar_config(disable=True)
        assert pipe.report().level == "auto"
        (picture,) = pipe("a frog", num_inference_steps=2, generator=torch.Generator().manual_seed(0)).images
        assert min(high - low for low, high in picture.getextrema()) > 50
        assert ROCmOptimizedPipeline(optimization_level="Memory").report().level == "memory"

    @pytest.mark.parametrize("given", [None, 3, torch.nn.Linear(2, 2)])
    def test_what_is_no_pipeline_is_refused(self, given):
        with pytest.raises(Unsupported, match="it takes a Diffusers pipeline, a folder, a file or a hub id"):
            ROCmOptimizedPipeline(given)

    def test_a_model_that_is_not_there_and_an_unknown_level_are_refused(self, stock, tmp_path):
        with pytest.raises(ModelNotFound, match="no model at"):
            ROCmOptimizedPipeline(tmp_path / "nowhere.safetensors")
        with pytest.raises(InvalidOption, match="Use one of: auto"):
            ROCmOptimizedPipeline(stock, "fast")


def test_a_model_is_optimized_under_the_promised_name(tmp_path):
    pipe = CASES["sd15"].build(tmp_path)
    assert rocm_sd_ops.optimize_sd_model(pipe, "memory") is pipe
    assert rocm_sd.report(pipe).level == "memory"
    assert rocm_sd_ops.optimize_sd_model(pipe.unet, optimization_level="performance") is pipe.unet
    for level in ("Auto", "PERFORMANCE", "Memory"):
        assert rocm_sd.report(rocm_sd_ops.optimize_sd_model(pipe, level)).level == level.lower()
    with pytest.raises(InvalidOption, match="Use one of: auto"):
        rocm_sd_ops.optimize_sd_model(pipe, "fast")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'ROCmMagic'"):
        _ = rocm_sd_ops.ROCmMagic
    assert "ROCmOptimizedPipeline" in dir(rocm_sd_ops)
