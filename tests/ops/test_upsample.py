from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rocm_sd import numerics
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import upsample
from rocm_sd.ops.registry import needs_no_dispatcher
from rocm_sd.ops.upsample import reference
from rocm_sd.ops.upsample.op import OP

# N, C, H, W and the scale: edge, odd and real.
SHAPES = [
    (1, 1, 1, 1, 2),
    (2, 4, 1, 7, 2),
    (1, 9, 5, 1, 3),
    (2, 30, 13, 7, 2),
    (1, 24, 5, 6, 1),
    (1, 20, 3, 5, 4),
    (1, 12, 4, 3, 5),
    (1, 160, 4, 8, 2),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]
MODES = ["nearest", "bilinear"]


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape[:4])) + f"by{shape[4]}"


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def image(shape, dtype, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return x.contiguous(memory_format=torch.channels_last)


def check(x, scale, mode, implementation):
    y = upsample(x, scale, mode, implementation=implementation)
    exact = reference.upsample(x.double(), scale, mode)
    stock = upsample(x, scale, mode, implementation="torch")
    assert y.dtype == x.dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    numerics.require(f"upsample ({implementation}, {mode})", y, exact, stock)
    if mode == "nearest":
        assert torch.equal(y.double(), exact)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, mode, implementation, device):
    *size, scale = shape
    check(image(size, dtype, device), scale, mode, implementation)


@pytest.mark.parametrize("scale", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mode", MODES)
def test_the_reference_is_torchs_interpolate(mode, scale):
    x = image((2, 3, 4, 5), torch.float64, "cpu")
    theirs = F.interpolate(x, scale_factor=scale, mode=mode, align_corners=None if mode == "nearest" else False)
    torch.testing.assert_close(reference.upsample(x, scale, mode), theirs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["nchw", "sliced", "transposed", "expanded"])
@pytest.mark.usefixtures("poison_memory")
def test_inputs_of_any_strides(kind, mode, implementation, device):
    x = image((2, 16, 6, 6), torch.float16, device)
    strided = {
        "nchw": x.contiguous(),
        "sliced": torch.cat([x, x], dim=1)[:, ::2],
        "transposed": x.transpose(2, 3),
        "expanded": x[:1].expand(2, -1, -1, -1),
    }[kind]
    check(strided, 2, mode, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_large_half_precision_values_stay_finite(mode, implementation, device):
    """Two neighbours at the end of the range: their sum is infinite, their mean is not."""
    x = torch.full((1, 8, 3, 3), 65504.0, device=device, dtype=torch.float16)
    assert torch.equal(check(x, 2, mode, implementation), torch.full((1, 8, 6, 6), 65504.0).to(x))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_input_gives_the_same_bits(mode, device):
    x = image((2, 30, 5, 7), torch.float16, device)
    first, second = (upsample(x, 2, mode, implementation="triton") for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(mode, implementation, device):
    x = image((2, 30, 5, 7), torch.float16, device)
    assert needs_no_dispatcher(x)
    direct = upsample(x, 2, mode, implementation=implementation)
    dispatched = torch.ops.rocm_sd.upsample(x, 2, mode, implementation)
    assert torch.equal(direct, dispatched)
    assert direct.stride() == dispatched.stride()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_is_an_empty_result(mode, implementation, device):
    x = image((2, 8, 4, 4), torch.float16, device)
    assert upsample(x[:0], 2, mode, implementation=implementation).shape == (0, 8, 8, 8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode, implementation, device):
    x = image((2, 8, 3, 5), torch.float32, device).requires_grad_()
    torch.library.opcheck(torch.ops.rocm_sd.upsample.default, (x, 2, mode, implementation))


@pytest.mark.parametrize("scale", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode, scale):
    x = image((2, 3, 2, 4), torch.float64, "cpu").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: upsample(x, scale, mode), x)


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_gradients_follow_float64(mode, device):
    x = image((2, 8, 3, 5), torch.float16, device)
    gradient = torch.randn((2, 8, 6, 10), generator=torch.Generator().manual_seed(1)).to(x)

    def of(function, x, gradient):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x, 2, mode), x, gradient)[0]

    exact = of(reference.upsample, x.double(), gradient.double())
    numerics.require(f"gradient of {mode}", of(upsample, x, gradient), exact, of(reference.upsample, x, gradient))


@pytest.mark.parametrize("mode", MODES)
def test_compiles_as_one_graph(mode, device):
    x = image((2, 8, 6, 5), torch.float32, device)

    def block(x):
        return upsample(x * 2, 2, mode) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), block(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 32, 4)}, r"x of shape \(2, 32, 4\)"),
        ({"x": torch.zeros(2, 32, 0, 4)}, r"x of shape \(2, 32, 0, 4\)"),
        ({"x": torch.zeros(2, 32, 4, 4, dtype=torch.int32)}, "dtype torch.int32"),
        ({"scale": 0}, "scale 0"),
        ({"scale": 1.5}, "scale 1.5"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    with pytest.raises(Unsupported, match=message):
        upsample(**{"x": torch.zeros(2, 32, 4, 4)} | change)


def test_an_unknown_mode_is_refused_with_those_that_are_known():
    with pytest.raises(InvalidOption, match="nearest, bilinear"):
        upsample(torch.zeros(1, 4, 4, 4), mode="bicubic")


def test_an_implementation_asked_for_by_name_never_falls_back(monkeypatch):
    x = torch.zeros(1, 32, 4, 4, dtype=torch.float64)
    with pytest.raises(Unsupported, match="float64"):
        upsample(x, implementation="triton")
    with pytest.raises(InvalidOption, match="torch, triton"):
        upsample(x, implementation="cuda")
    with pytest.raises(Unsupported, match="scale 9"):
        upsample(x.float(), 9, implementation="triton")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "upsample=triton")
    with pytest.raises(Unsupported, match="float64"):
        upsample(x)


def test_a_cpu_tensor_gets_stock_torch():
    choice = OP.choose(OP.verification.problem(torch.zeros(1, 32, 4, 4), 2, "nearest"), torch.device("cpu"))
    assert (choice.implementation, choice.source) == ("torch", "stock")
