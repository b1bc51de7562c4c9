from __future__ import annotations

import pytest
import torch

import rocm_sd_ops
from rocm_sd.errors import NumericsFailure, Unsupported
from rocm_sd.ops import OPS, attention


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


def test_the_attention_benchmark_times_both_and_says_what_ran(device):
    result = rocm_sd_ops.benchmark_attention(batch_size=1, seq_len=300, d_model=32, num_heads=2, num_runs=3)
    assert result["optimized_ms"] > 0
    assert result["speedup"] == pytest.approx(result["stock_ms"] / result["optimized_ms"])
    assert result["largest_error"] <= result["allowed_error"]
    assert result["runs"] == 3
    assert result["dtype"] == ("float16" if device.type == "cuda" else "float32")
    assert result["implementation"] in {i.name for i in OPS["attention"].implementations}


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
