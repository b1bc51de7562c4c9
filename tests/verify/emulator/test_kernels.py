"""Whole kernels as machine code for three architectures, executed and compared with torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_sd import arch, numerics
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS
from rocm_sd.verify import ladder
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.emulator import Buffer, launch
from rocm_sd.verify.ladder import EMULATED
from rocm_sd.verify.runner import emulated, total
from verify.kernels import add, attention, layernorm, matmul, softmax

pytest.importorskip("triton", reason="AMD code is compiled by Triton")
pytest.importorskip("tinygrad", reason="AMD code is decoded by tinygrad")

every_gfx = pytest.mark.parametrize("gfx", EMULATED)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def normal(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(module, gfx, inputs, out, **options):
    """The launcher of the test kernel, with every output checked to be written whole."""
    with emulated(module, gfx) as executed:
        out = out()
        module.launch(*inputs[:2], out, *inputs[2:], **options)
    executed.require_written(out)
    return out, total(call.counters for call in executed.calls)


@every_gfx
@pytest.mark.parametrize("n", [1, 255, 256, 1000])
def test_add(gfx, n):
    x, y = normal(n), normal(n, seed=1)
    z, counters = run(add, gfx, (x, y), lambda: torch.empty(n))
    assert torch.equal(z, x + y)
    assert counters.bytes_loaded >= 8 * n
    assert counters.bytes_stored == 4 * n


@every_gfx
@pytest.mark.parametrize(("rows", "columns"), [(3, 77), (2, 512)])
def test_softmax(gfx, rows, columns):
    x = normal(rows, columns)
    with emulated(softmax, gfx) as executed:
        y = torch.empty_like(x)
        softmax.launch(x, y)
    executed.require_written(y)
    numerics.require("softmax", y, x.double().softmax(1), x.softmax(1))


@every_gfx
@pytest.mark.parametrize("dtype", DTYPES)
def test_layernorm(gfx, dtype):
    x, weight, bias = (normal(*size, dtype=DTYPES[dtype], seed=s) for s, size in enumerate([(3, 200), (200,), (200,)]))
    with emulated(layernorm, gfx) as executed:
        y = torch.empty_like(x)
        layernorm.launch(x, y, weight, bias)
    executed.require_written(y)

    def norm(*tensors):
        return torch.nn.functional.layer_norm(tensors[0], (200,), *tensors[1:])

    numerics.require("layernorm", y, norm(x.double(), weight.double(), bias.double()), norm(x, weight, bias))


@every_gfx
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("M", "N", "K"), [(32, 32, 32), (33, 17, 50)])
def test_matmul(gfx, dtype, M, N, K):
    a, b = normal(M, K, dtype=DTYPES[dtype]), normal(K, N, dtype=DTYPES[dtype], seed=1)
    c, counters = run(matmul, gfx, (a, b), lambda: torch.empty(M, N, dtype=DTYPES[dtype]))
    numerics.require("matmul", c, a.double() @ b.double(), a @ b)
    tiles = -(-M // 32) * -(-N // 32) * -(-K // 32)
    # Four waves share a tile of 32x32, in which the smallest matrix instruction leaves some of them the same work.
    assert counters.matrix_flops >= tiles * 2 * 32**3
    assert counters.by_class["matrix"] > 0


@every_gfx
def test_matmul_of_more_tiles_and_stages(gfx):
    """Two programs, a loop that the compiler pipelines, and a matrix tile for each wave."""
    a, b = normal(64, 96, dtype=torch.float16), normal(96, 64, dtype=torch.float16, seed=1)
    c, _ = run(matmul, gfx, (a, b), lambda: torch.empty(64, 64, dtype=torch.float16), tile=(64, 32, 32), num_stages=2)
    numerics.require("matmul", c, a.double() @ b.double(), a @ b)


@every_gfx
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention(gfx, dtype, causal):
    q, k, v = (normal(2, 45, 32, dtype=DTYPES[dtype], seed=s) for s in range(3))
    with emulated(attention, gfx) as executed:
        o = torch.empty_like(q)
        attention.launch(q, k, v, o, causal=causal)
    executed.require_written(o)

    def exact(*tensors):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

    numerics.require("attention", o, exact(q.double(), k.double(), v.double()), exact(q, k, v))


def test_attention_in_the_reduced_precision_of_gfx942():
    """Triton multiplies float32 as xf32 there unless a precision is named: ten bits of fraction, as in float16."""
    q, k, v = (normal(1, 32, 32, seed=s) for s in range(3))
    with emulated(attention, "gfx942") as executed:
        o = torch.empty_like(q)
        attention.launch(q, k, v, o, precision="tf32")
    executed.require_written(o)
    assert any(name.startswith("v_mfma") and name.endswith("xf32") for name in executed.calls[0].counters.by_name)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    half = torch.nn.functional.scaled_dot_product_attention(q.half(), k.half(), v.half()).float()
    assert numerics.compare(o, exact, half).ok
    assert not torch.allclose(o.double(), exact, atol=1e-6, rtol=0)


@every_gfx
def test_group_norm_silu(gfx):
    op = OPS["group_norm_silu"]
    state, sentence, figures = ladder._emulated(op, op.verification, gfx)
    assert state == "passed", sentence
    assert set(figures["kernels"]) == set(op.verification.promises)
    # Lanes that read the same bytes count each of them, so that the figure may pass 1.
    assert all(kernel["coalescing_efficiency"] > 0 for kernel in figures["kernels"].values())
    # Each picture is written once, by the one or the other.
    assert sum(figures["kernels"][name]["bytes_stored"] for name in ("_whole", "_apply")) == sum(
        op.verification.reference(*sample.make()).nbytes for _, sample in op.verification.calls(arch=arch.get(gfx))
    )


@every_gfx
def test_hip_source(gfx, tmp_path):
    """y[i] = sum of x[0..i] in a workgroup of 64, through LDS and barriers, from a HIP file without headers."""
    source = """
    #define LANE __builtin_amdgcn_workitem_id_x()
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(64, 64)))
    void running_sum(const float *x, float *y) {
        __attribute__((shared)) static float part[64];
        unsigned lane = LANE;
        part[lane] = x[lane];
        for (unsigned step = 1; step < 64; step *= 2) {
            __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
            __builtin_amdgcn_s_barrier();
            __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
            float more = lane >= step ? part[lane - step] : 0.0f;
            __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
            __builtin_amdgcn_s_barrier();
            __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
            part[lane] += more;
        }
        y[lane] = part[lane];
    }
    """
    try:
        toolchain.find_compiler()
    except toolchain.NoHipCompiler as error:
        pytest.skip(str(error))
    file = tmp_path / "running_sum.hip"
    file.write_text(source)
    compiled = toolchain.compile_source(file, gfx, {})
    code = CodeObject.from_elf(compiled.elf, compiled.assembly)
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    launch(code, 1, [Buffer(x, "x"), Buffer(y, "y", initialised=False, must_write=True)])
    np.testing.assert_array_equal(y, np.cumsum(x))


def test_the_ladder_runs_the_emulator_in_a_worker():
    (outcome,) = ladder.verify(ladder.plan(["group_norm_silu"], ["gfx1100"], [4]))
    assert outcome.state == "passed", outcome.sentence
    assert outcome.figures["kernels"]["_apply"]["wave_instructions"] > 0
