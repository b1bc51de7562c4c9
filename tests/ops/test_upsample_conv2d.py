from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rocm_sd import arch
from rocm_sd.arch import MatrixUnit
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import parity_weights, upsample_conv2d
from rocm_sd.ops.registry import needs_no_dispatcher
from rocm_sd.ops.upsample_conv2d import reference
from rocm_sd.ops.upsample_conv2d.op import OP
from rocm_sd.verify import numerics

# N, Cin, H, W, Cout: edge, odd and real.
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 16, 1, 3, 3),
    (2, 9, 3, 1, 33),
    (3, 20, 3, 5, 17),
    (2, 32, 4, 6, 40),
    (1, 320, 4, 4, 64),
]
IMPLEMENTATIONS = ["torch", "parity_library", "triton"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape[:4])) + f"to{shape[4]}"


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs(shape, dtype, device, *, bias=True, parity=True, seed=0):
    N, Cin, H, W, Cout = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, std=1.0):
        tensor = (torch.randn(*size, generator=generator) * std).to(device, dtype)
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    x, weight = normal(N, Cin, H, W), normal(Cout, Cin, 3, 3, std=(Cin * 9) ** -0.5)
    return x, weight, normal(Cout) if bias else None, parity_weights(weight) if parity else None


def in_float64(arguments):
    return [a.double() if isinstance(a, torch.Tensor) else a for a in arguments]


def check(arguments, implementation, config=None):
    if config is None:
        y = upsample_conv2d(*arguments, implementation=implementation)
    else:
        y = OP.implementation(implementation).run(
            *arguments, config=replace(OP.implementation("triton").default, **config)
        )
    exact = reference.upsample_conv2d(*in_float64(arguments))
    stock = upsample_conv2d(*arguments, implementation="torch")
    assert y.dtype == arguments[0].dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.stride() == stock.stride()
    numerics.require(f"upsample_conv2d ({implementation})", y, exact, stock)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    if implementation == "triton" and dtype is torch.float32:
        with pytest.raises(Unsupported, match="dtype float32"):
            upsample_conv2d(*inputs(shape, dtype, device), implementation=implementation)
        return
    check(inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("implementation", ["parity_library", "triton"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("parity", [True, False], ids=["given", "summed"])
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(bias, parity, implementation, device):
    check(inputs((2, 20, 3, 5, 17), torch.float16, device, bias=bias, parity=parity), implementation)


def test_parity_weights_are_the_sums_of_what_meets_the_same_pixel():
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = parity_weights(weight)
    assert sums.shape == (4, 3, 2, 2, 2)
    w = weight.permute(0, 2, 3, 1)
    even = sums[0]
    torch.testing.assert_close(even[:, 0, 0], w[:, 0, 0])
    torch.testing.assert_close(even[:, 1, 1], w[:, 1:, 1:].sum(dim=(1, 2)))
    odd_column = sums[1]
    torch.testing.assert_close(odd_column[:, 0, 0], w[:, 0, :2].sum(dim=1))
    odd = sums[3]
    torch.testing.assert_close(odd[:, 0, 0], w[:, :2, :2].sum(dim=(1, 2)))
    torch.testing.assert_close(odd[:, 1, 1], w[:, 2, 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_parity_weights_are_rounded_once(dtype):
    weight = torch.randn(4, 5, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = parity_weights(weight)
    assert sums.dtype == dtype
    assert torch.equal(sums, parity_weights(weight.float()).to(dtype))


CONFIGS = {
    "one_group": {"group_m": 1, "block_m": 32, "block_n": 16},
    "ragged_group": {"group_m": 2, "block_m": 32, "block_n": 16},
    "two_widths": {"block_n": 32, "block_n2": 16},
    "second_width_past_the_end": {"block_n": 64, "block_n2": 16},
    "deep_block": {"block_k": 64},
    "shallow_block": {"block_k": 16},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.usefixtures("poison_memory")
def test_no_config_changes_the_result(config, device):
    check(inputs((2, 48, 5, 7, 40), torch.float16, device), "triton", config)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["nchw", "sliced", "transposed", "expanded"])
def test_inputs_of_any_strides(kind, implementation, device):
    x, weight, bias, parity = inputs((2, 16, 4, 4, 16), torch.float16, device)
    strided = {
        "nchw": x.contiguous(),
        "sliced": torch.cat([x, x], dim=1)[:, ::2],
        "transposed": x.transpose(2, 3),
        "expanded": x[:1].expand(2, -1, -1, -1),
    }[kind]
    spread = parity.repeat_interleave(2, dim=-1)[..., ::2]
    check((strided, weight.contiguous(), bias.repeat_interleave(2)[::2], spread), implementation)


def test_infinite_pixels_stay_where_the_filter_reaches(device):
    x, weight, *_ = inputs((1, 20, 4, 4, 17), torch.float16, device)
    x[0, :, 0, 0] = float("inf")
    y = upsample_conv2d(x, weight.abs(), implementation="triton")
    assert (y[:, :, :3, :3] == float("inf")).all()
    assert y[:, :, 3:, :].isfinite().all()
    assert y[:, :, :, 3:].isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_input_gives_the_same_bits(implementation, device):
    arguments = inputs((3, 20, 3, 5, 17), torch.float16, device)
    first, second = (upsample_conv2d(*arguments, implementation=implementation) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(implementation, device):
    arguments = inputs((3, 20, 3, 5, 17), torch.float16, device)
    assert needs_no_dispatcher(*arguments)
    direct = upsample_conv2d(*arguments, implementation=implementation)
    dispatched = torch.ops.rocm_sd.upsample_conv2d(*arguments, implementation)
    assert torch.equal(direct, dispatched)
    assert direct.stride() == dispatched.stride()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_batch_is_an_empty_result(implementation, device):
    x, *rest = inputs((2, 32, 4, 4, 8), torch.float16, device)
    assert upsample_conv2d(x[:0], *rest, implementation=implementation).shape == (0, 8, 8, 8)


@pytest.mark.parametrize(("implementation", "dtype"), [("torch", torch.float32), ("triton", torch.float16)])
def test_opcheck(implementation, dtype, device):
    x, weight, bias, parity = inputs((2, 16, 3, 4, 8), dtype, device)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    # In half precision the two ways of summing the gradients may differ by a rounding: opcheck compares bits closely.
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    checks += ("test_aot_dispatch_dynamic",) if dtype is torch.float32 else ()
    arguments = (*tensors, parity, implementation)
    torch.library.opcheck(torch.ops.rocm_sd.upsample_conv2d.default, arguments, test_utils=checks)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
def test_gradcheck(bias):
    x, weight, shift, parity = inputs((2, 3, 2, 3, 2), torch.float64, torch.device("cpu"), bias=bias)
    tensors = tuple(t.requires_grad_() for t in (x, weight, shift) if t is not None)

    def function(x, weight, bias=None):
        return upsample_conv2d(x, weight, bias, parity)

    assert torch.autograd.gradcheck(function, tensors)


def test_half_precision_gradients_follow_float64(device):
    *tensors, parity = inputs((2, 16, 3, 5, 8), torch.float16, device)
    gradient = torch.randn(2, 8, 6, 10, generator=torch.Generator().manual_seed(1)).to(tensors[0])

    def gradients(function, tensors, gradient):
        tensors = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*tensors), tensors, gradient)

    def stock(x, weight, bias):
        return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), weight, bias, padding=1)

    exact = gradients(reference.upsample_conv2d, in_float64(tensors), gradient.double())
    ours = gradients(lambda *a: upsample_conv2d(*a, parity, implementation="triton"), tensors, gradient)
    theirs = gradients(stock, tensors, gradient)
    for name, a, e, s in zip(("x", "weight", "bias"), ours, exact, theirs, strict=True):
        assert a.dtype == torch.float16
        numerics.require(f"gradient of {name}", a, e, s)


@pytest.mark.parametrize("implementation", [None, "triton"], ids=["automatic", "triton"])
def test_compiles_as_one_graph(implementation, device):
    arguments = inputs((2, 16, 3, 5, 8), torch.float16, device)

    def block(x, *rest):
        return upsample_conv2d(x * 2, *rest, implementation) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), block(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8, 4)}, "x of 3 dimensions"),
        ({"x": torch.zeros(2, 8, 4, 4, dtype=torch.int32)}, "dtype torch.int32"),
        ({"weight": torch.zeros(8, 8, 1, 1)}, r"weight of shape \(8, 8, 1, 1\): it takes"),
        ({"weight": torch.zeros(8, 4, 3, 3)}, "a weight for 4 channels on x of 8: groups are not taken"),
        ({"bias": torch.zeros(7)}, "bias of shape"),
        ({"parity_weight": torch.zeros(4, 8, 8, 2, 2)}, "parity_weight of shape"),
        ({"weight": torch.zeros(8, 8, 3, 3, device="meta")}, "weight on meta"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    with pytest.raises(Unsupported, match=message):
        upsample_conv2d(**({"x": torch.zeros(2, 8, 4, 4), "weight": torch.zeros(8, 8, 3, 3)} | change))


def test_an_implementation_asked_for_by_name_never_falls_back(monkeypatch):
    x, weight = torch.zeros(1, 8, 4, 4), torch.zeros(8, 8, 3, 3)
    with pytest.raises(Unsupported, match="dtype float32"):
        upsample_conv2d(x, weight, implementation="triton")
    with pytest.raises(Unsupported, match="dtype float64"):
        upsample_conv2d(x.double(), weight.double(), implementation="parity_library")
    with pytest.raises(InvalidOption, match="torch, parity_library, triton"):
        upsample_conv2d(x, weight, implementation="cuda")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "upsample_conv2d=triton")
    with pytest.raises(Unsupported, match="dtype float32"):
        upsample_conv2d(x, weight)


def test_a_cpu_tensor_gets_stock_torch():
    x, weight, *_ = inputs((1, 16, 4, 4, 8), torch.float16, torch.device("cpu"))
    choice = OP.choose(OP.verification.problem(x, weight), torch.device("cpu"))
    assert (choice.implementation, choice.source) == ("torch", "stock")


@pytest.mark.parametrize("bucket", OP.tuning.buckets, ids=lambda bucket: bucket.sample.name)
def test_every_bucket_has_a_few_configs_on_every_matrix_unit(bucket):
    problem = OP.verification.problem(*bucket.sample.make(filled=False))
    for architecture in arch.ARCHS.values():
        if not architecture.triton_supported or architecture.matrix_unit in (MatrixUnit.DOT, MatrixUnit.NONE):
            continue
        configs = list(OP.tuning.space(problem, architecture))
        assert 1 <= len(configs) <= 12, architecture.name


def test_the_least_work_is_that_of_four_small_filters():
    arguments = inputs((2, 16, 4, 4, 32), torch.float16, torch.device("cpu"))
    work = OP.tuning.work(*arguments)
    assert work.flops == 2 * (2 * 8 * 8) * 32 * 16 * 4
    assert work.bytes == 2 * (2 * 16 * 16 + 16 * 32 * 16 + 32 + 2 * 32 * 64)
