from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.configs.linear_residual import LinearResidualConfig
from rocm_sd.ops import linear_residual
from rocm_sd.ops.linear_residual import libraries, pack_linears, split_columns, split_heads
from rocm_sd.ops.linear_residual.op import OP

# (..., K) and N: edge, odd and real.
SHAPES = [((1, 1), 1), ((3, 45), 77), ((2, 13, 96), 48), ((2, 77, 64), 80), ((20, 320), 320), ((9, 1280), 64)]
DTYPES = [torch.float16, torch.bfloat16]
IMPLEMENTATIONS = ["torch", "addmm", "triton"]
LIBRARY_NAMES = [library.name for library in libraries.GEMM_LIBRARIES]
SMALL = LinearResidualConfig(block_m=16, block_n=32, block_k=32, group_m=2, split_k=1, warps=4, stages=2)


check = partial(op_checks.check, OP)


def inputs(shape, dtype, device, *, bias=True, residual=True, seed=0):
    (*batch, K), N = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, std=1.0):
        return (torch.randn(*size, generator=generator) * std).to(device, dtype)

    return (
        normal(*batch, K),
        normal(N, K, std=K**-0.5),
        normal(N) if bias else None,
        normal(*batch, N) if residual else None,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    check(inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no_residual"])
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(bias, residual, implementation, device):
    check(inputs(((2, 7, 64), 40), torch.float16, device, bias=bias, residual=residual), implementation)


@pytest.mark.parametrize("implementation", ["torch", "addmm"])
def test_float32_is_for_stock_torch_and_addmm(implementation, device):
    arguments = inputs(((2, 7, 64), 40), torch.float32, device)
    check(arguments, implementation)
    with pytest.raises(Unsupported, match="float32"):
        linear_residual(*arguments, implementation="triton")


@pytest.mark.parametrize(
    "change", [{"group_m": 1}, {"split_k": 2}, {"split_k": 8}, {"block_k": 64, "split_k": 3}], ids=str
)
@pytest.mark.parametrize("K", [160, 150])
@pytest.mark.parametrize("parts", [True, False], ids=["epilogue", "bare"])
@pytest.mark.usefixtures("poison_memory")
def test_every_way_to_share_out_the_work(change, K, parts, device):
    arguments = inputs(((37, K), 72), torch.float16, device, bias=parts, residual=parts)
    first, second = (check(arguments, "triton", replace(SMALL, **change)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_residual_is_left_as_it_was(implementation, device):
    x, weight, bias, residual = inputs(((5, 32), 24), torch.float16, device)
    before = residual.clone()
    linear_residual(x, weight, bias, residual, implementation=implementation)
    linear_residual(x, weight, None, residual, implementation=implementation)
    assert torch.equal(residual, before)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # in rows that are masked
def test_products_that_overflow_before_the_residual_is_added(device):
    """x @ weight.T alone is 80000, beyond float16; with the residual it is 20000: rounded once, it stays finite."""
    x = torch.full((2, 32), 50.0, device=device, dtype=torch.float16)
    weight = torch.full((16, 32), 50.0, device=device, dtype=torch.float16)
    residual = torch.full((2, 16), -60000.0, device=device, dtype=torch.float16)
    y = linear_residual(x, weight, None, residual, implementation="triton")
    assert torch.equal(y, torch.full_like(y, 20000.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(())}, "x of shape"),
        ({"x": torch.zeros(2, 0)}, "x of shape"),
        ({"weight": torch.zeros(16, 31)}, "weight of shape"),
        ({"weight": torch.zeros(32)}, "weight of shape"),
        ({"weight": torch.zeros(16, 32, dtype=torch.float16)}, "weight of torch.float16"),
        ({"bias": torch.zeros(32)}, "bias of shape"),
        ({"residual": torch.zeros(16)}, "residual of shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 32), "weight": torch.zeros(16, 32), "bias": None, "residual": None} | change
    with pytest.raises(Unsupported, match=message):
        linear_residual(**arguments)


# The libraries of a GPU build of torch.


@pytest.mark.parametrize("name", LIBRARY_NAMES)
def test_a_library_that_is_not_there_says_why(name):
    """On a CPU none is; on a GPU those of the other vendor are not, and none takes a CPU tensor."""
    x, weight, *_ = inputs(((2, 32), 16), torch.float16, torch.device("cpu"))
    with pytest.raises(Unsupported, match=name):
        linear_residual(x, weight, implementation=name)


def test_a_library_of_the_other_vendor_is_named_as_such(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    cublas, rocblas = (libraries.GEMM_LIBRARIES[LIBRARY_NAMES.index(name)] for name in ("cublas", "rocblas"))
    assert "a library of CUDA, in a ROCm build" in libraries.why_not(cublas, torch.device("cuda"))
    assert "a tensor on cpu" in libraries.why_not(rocblas, torch.device("cpu"))


def test_the_preference_is_put_back_also_after_an_error():
    before = torch.backends.cuda.preferred_blas_library()
    with pytest.raises(ValueError, match="inside"), libraries.preferred(libraries.GEMM_LIBRARIES[0]):
        raise ValueError("inside")
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.parametrize("name", LIBRARY_NAMES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no_residual"])
def test_a_librarys_way_to_add_is_right(name, bias, residual):
    """The arithmetic around the call, which needs no GPU: torch's switch changes nothing for CPU tensors."""
    library = libraries.GEMM_LIBRARIES[LIBRARY_NAMES.index(name)]
    try:
        with libraries.preferred(library):
            pass
    except RuntimeError as error:
        pytest.skip(f"torch refuses the switch: {str(error).splitlines()[0]}")
    arguments = inputs(((2, 7, 64), 40), torch.float16, torch.device("cpu"), bias=bias, residual=residual)
    op_checks.gate(OP, arguments, OP.implementation(name)(*arguments), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LIBRARY_NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no_residual"])
def test_a_library_is_as_accurate_as_stock(name, dtype, bias, residual, device):
    arguments = inputs(((2, 77, 320), 640), dtype, device, bias=bias, residual=residual)
    library = libraries.GEMM_LIBRARIES[LIBRARY_NAMES.index(name)]
    reason = libraries.why_not(library, device)
    if reason:
        pytest.skip(reason)
    check(arguments, name)


# Packing.


def test_packed_linears_compute_what_each_does(device):
    torch.manual_seed(0)
    linears = [torch.nn.Linear(32, n, bias=has).to(device) for n, has in ((48, True), (48, False), (16, True))]
    weight, bias = pack_linears(*linears)
    x = torch.randn(2, 5, 32, device=device)
    parts = split_columns(linear_residual(x, weight, bias), 48, 48, 16)
    for part, linear in zip(parts, linears, strict=True):
        torch.testing.assert_close(part, linear(x))


def test_packed_weights_without_any_bias_have_none():
    weight, bias = pack_linears(torch.ones(3, 4), torch.nn.Linear(4, 2, bias=False))
    assert weight.shape == (5, 4)
    assert bias is None


def test_heads_are_views_of_the_packed_result():
    packed = torch.arange(2 * 5 * 24.0).reshape(2, 5, 24)
    q, k, v = split_heads(packed, 3, 2)
    assert q.shape == k.shape == v.shape == (2, 5, 2, 4)
    assert q.stride() == (120, 24, 4, 1)
    assert all(t.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr() for t in (q, k, v))
    assert torch.equal(k.flatten(2), packed[..., 8:16])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (pack_linears, "no linears at all"),
        (lambda: pack_linears(torch.ones(3, 4), torch.ones(3, 5)), "with one K"),
        (lambda: pack_linears(torch.ones(3, 4), torch.ones(3, 4).half()), "one dtype"),
        (lambda: split_columns(torch.ones(2, 10), 4, 5), "10 columns in parts of 4, 5"),
        (lambda: split_heads(torch.ones(2, 5, 10), 3, 2), "3 parts of 2 heads"),
        (lambda: split_heads(torch.ones(5, 12), 3, 2), "3 parts of 2 heads"),
    ],
)
def test_packing_refuses_in_one_sentence(call, message):
    with pytest.raises(Unsupported, match=message):
        call()
