from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rocm_sd import arch
from rocm_sd.arch import MatrixUnit
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import conv2d
from rocm_sd.ops.conv2d import reference
from rocm_sd.ops.conv2d.op import OP
from rocm_sd.ops.registry import needs_no_dispatcher
from rocm_sd.verify import numerics

# N, Cin, H, W, Cout, kernel, stride, padding: edge, odd and real.
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1, 0),
    (1, 4, 1, 1, 3, 3, 1, 1),
    (2, 4, 9, 9, 24, 3, 1, 1),
    (1, 9, 5, 6, 33, 3, 1, 1),
    (3, 20, 5, 7, 17, 3, 1, 1),
    (2, 32, 9, 8, 40, 3, 2, 1),
    (1, 32, 7, 9, 16, 3, 1, 0),
    (1, 16, 6, 5, 16, 1, 2, 1),
    (2, 96, 5, 7, 40, 1, 1, 0),
    (1, 64, 12, 10, 4, 3, 1, 1),
    (1, 320, 8, 8, 64, 3, 1, 1),
]
IMPLEMENTATIONS = ["torch", "library_epilogue", "triton"]
# What each implementation is asked for in half precision and in float32, which the matrix units do not take.
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def shape_id(shape: tuple[int, ...]) -> str:
    N, Cin, H, W, Cout, kernel, stride, padding = shape
    return f"{N}x{Cin}x{H}x{W}to{Cout}k{kernel}s{stride}p{padding}"


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs(shape, dtype, device, *, parts="bias add residual", seed=0):
    N, Cin, H, W, Cout, kernel, stride, padding = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, std=1.0):
        tensor = (torch.randn(*size, generator=generator) * std).to(device, dtype)
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    Ho, Wo = ((size + 2 * padding - kernel) // stride + 1 for size in (H, W))
    x, weight = normal(N, Cin, H, W), normal(Cout, Cin, kernel, kernel, std=(Cin * kernel**2) ** -0.5)
    bias = normal(Cout) if "bias" in parts else None
    add = normal(N, Cout) if "add" in parts else None
    residual = normal(N, Cout, Ho, Wo) if "residual" in parts else None
    return x, weight, bias, add, residual, stride, padding


def in_float64(arguments):
    return [a.double() if isinstance(a, torch.Tensor) else a for a in arguments]


def check(arguments, implementation, config=None):
    if config is None:
        y = conv2d(*arguments, implementation=implementation)
    else:
        y = OP.implementation(implementation).run(
            *arguments, config=replace(OP.implementation("triton").default, **config)
        )
    exact = reference.conv2d(*in_float64(arguments))
    stock = conv2d(*arguments, implementation="torch")
    assert y.dtype == arguments[0].dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.stride() == stock.stride()
    numerics.require(f"conv2d ({implementation})", y, exact, stock)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    if implementation == "triton" and dtype is torch.float32:
        with pytest.raises(Unsupported, match="dtype float32"):
            conv2d(*inputs(shape, dtype, device), implementation=implementation)
        return
    check(inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("parts", ["", "bias", "bias add residual"])
@pytest.mark.usefixtures("poison_memory")
def test_a_1x1_convolution_as_the_librarys_gemm(parts, dtype, device):
    check(inputs((2, 96, 5, 7, 40, 1, 1, 0), dtype, device, parts=parts), "library_gemm")
    check(inputs((1, 16, 1, 1, 1, 1, 1, 0), dtype, device, parts=parts), "library_gemm")


@pytest.mark.parametrize("parts", ["", "bias", "add", "residual", "bias residual"])
@pytest.mark.parametrize("implementation", ["library_epilogue", "triton"])
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(parts, implementation, device):
    check(inputs((2, 20, 5, 7, 17, 3, 1, 1), torch.float16, device, parts=parts), implementation)


CONFIGS = {
    "split": {"split_k": 4},
    "more_splits_than_blocks": {"split_k": 64},
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
    check(inputs((2, 48, 7, 6, 40, 3, 1, 1), torch.float16, device), "triton", config)
    check(inputs((1, 64, 8, 8, 24, 1, 1, 0), torch.bfloat16, device), "triton", config)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["nchw", "sliced", "transposed", "expanded"])
def test_inputs_of_any_strides(kind, implementation, device):
    x, weight, bias, add, residual, stride, padding = inputs((2, 16, 6, 6, 16, 3, 1, 1), torch.float16, device)

    def strided(tensor):
        return {
            "nchw": tensor.contiguous(),
            "sliced": torch.cat([tensor, tensor], dim=1)[:, ::2],
            "transposed": tensor.transpose(2, 3),
            "expanded": tensor[:1].expand(2, -1, -1, -1),
        }[kind]

    weights = weight.contiguous() if kind == "nchw" else weight.transpose(2, 3)
    parts = (bias.repeat_interleave(2)[::2], torch.stack([add, add], dim=2)[:, :, 1], strided(residual))
    check((strided(x), weights, *parts, stride, padding), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parts_of_another_dtype_are_taken(implementation, device):
    x, weight, bias, add, residual, stride, padding = inputs((2, 16, 6, 6, 16, 3, 1, 1), torch.float16, device)
    mixed = (x, weight.float(), bias.float(), add.float(), residual, stride, padding)
    y = conv2d(*mixed, implementation=implementation)
    assert y.dtype == torch.float16
    numerics.require("mixed", y, reference.conv2d(*in_float64(mixed)), conv2d(*mixed, implementation="torch"))


@pytest.mark.parametrize("implementation", ["library_epilogue", "triton"])
def test_sums_beyond_half_precision_overflow_no_sooner_than_stock(implementation, device):
    """320 products of 25 x 25 make 200000: the sum must live in float32 and only its rounding may be infinite."""
    x = torch.full((1, 320, 2, 2), 25.0, dtype=torch.float16, device=device)
    weight = torch.full((2, 320, 1, 1), 25.0, dtype=torch.float16, device=device)
    weight[1, 160:] = -25.0
    stock = conv2d(x, weight, implementation="torch")
    y = conv2d(x, weight, implementation=implementation)
    assert torch.equal(y, stock)
    assert (y[:, 0] == float("inf")).all()
    assert (y[:, 1] == 0).all()


def test_a_residual_that_brings_a_sum_back_in_range_is_added_before_rounding(device):
    x = torch.full((1, 320, 2, 2), 25.0, dtype=torch.float16, device=device)
    weight = torch.full((1, 320, 1, 1), 10.0, dtype=torch.float16, device=device)
    residual = torch.full((1, 1, 2, 2), -40000.0, dtype=torch.float16, device=device)
    y = conv2d(x, weight, None, None, residual, implementation="triton")
    assert (y == 40000.0).all()


def test_infinite_pixels_stay_where_the_filter_reaches(device):
    """Masked taps and channels past the end must not make NaN of 0 x infinity."""
    x, weight, *_ = inputs((1, 20, 5, 5, 17, 3, 1, 1), torch.float16, device, parts="")
    x[0, :, 0, 0] = float("inf")
    y = conv2d(x, weight.abs(), padding=1, implementation="triton")
    assert (y[:, :, :2, :2] == float("inf")).all()
    assert y[:, :, 2:, :].isfinite().all()
    assert y[:, :, :, 2:].isfinite().all()


@pytest.mark.parametrize("config", [{}, {"split_k": 4}], ids=["whole", "split"])
def test_the_same_input_gives_the_same_bits(config, device):
    arguments = inputs((2, 48, 7, 6, 40, 3, 1, 1), torch.float16, device)
    run = OP.implementation("triton").run
    first, second = (run(*arguments, config=replace(OP.implementation("triton").default, **config)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(implementation, device):
    arguments = inputs((2, 20, 5, 7, 17, 3, 1, 1), torch.float16, device)
    assert needs_no_dispatcher(*arguments[:5])
    direct = conv2d(*arguments, implementation=implementation)
    dispatched = torch.ops.rocm_sd.conv2d(*arguments, implementation)
    assert torch.equal(direct, dispatched)
    assert direct.stride() == dispatched.stride()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_input_is_written_to(implementation, device):
    arguments = inputs((2, 20, 5, 7, 17, 3, 1, 1), torch.float16, device)
    before = [t.clone() for t in arguments[:5]]
    conv2d(*arguments, implementation=implementation)
    assert all(torch.equal(a, b) for a, b in zip(arguments[:5], before, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_batch_is_an_empty_result(implementation, device):
    x, weight, bias, add, residual, *rest = inputs((2, 32, 4, 4, 8, 3, 1, 1), torch.float16, device)
    y = conv2d(x[:0], weight, bias, add[:0], residual[:0], *rest, implementation=implementation)
    assert y.shape == (0, 8, 4, 4)


@pytest.mark.parametrize(("implementation", "dtype"), [("torch", torch.float32), ("triton", torch.float16)])
@pytest.mark.parametrize("parts", ["", "bias add residual"], ids=["bare", "all"])
def test_opcheck(implementation, dtype, parts, device):
    *tensors, stride, padding = inputs((2, 16, 6, 5, 8, 3, 2, 1), dtype, device, parts=parts)
    tensors = [None if t is None else t.requires_grad_() for t in tensors]
    # In half precision the two ways of summing the gradients may differ by a rounding: opcheck compares bits closely.
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    checks += ("test_aot_dispatch_dynamic",) if dtype is torch.float32 else ()
    arguments = (*tensors, stride, padding, implementation)
    torch.library.opcheck(torch.ops.rocm_sd.conv2d.default, arguments, test_utils=checks)


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 3, 2, 3, 1, 1), (1, 2, 5, 4, 3, 3, 2, 1), (2, 3, 2, 2, 2, 1, 1, 0)], ids=shape_id
)
@pytest.mark.parametrize("parts", ["", "bias add residual"], ids=["bare", "all"])
def test_gradcheck(shape, parts):
    *tensors, stride, padding = inputs(shape, torch.float64, torch.device("cpu"), parts=parts)
    given = tuple(t.requires_grad_() for t in tensors if t is not None)

    def function(x, weight, bias=None, add=None, residual=None):
        return conv2d(x, weight, bias, add, residual, stride, padding)

    assert torch.autograd.gradcheck(function, given)


def test_a_gradient_is_computed_only_where_it_is_wanted(device):
    *tensors, stride, padding = inputs((2, 8, 4, 4, 8, 3, 1, 1), torch.float16, device)
    tensors[2].requires_grad_()
    conv2d(*tensors, stride, padding).sum().backward()
    assert [t.grad is not None for t in tensors] == [False, False, True, False, False]


def test_half_precision_gradients_follow_float64(device):
    *tensors, stride, padding = inputs((2, 16, 6, 5, 8, 3, 1, 1), torch.float16, device)
    gradient = torch.randn(2, 8, 6, 5, generator=torch.Generator().manual_seed(1)).to(tensors[0])

    def gradients(function, tensors, gradient):
        tensors = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*tensors, stride, padding), tensors, gradient)

    def stock(x, weight, bias, add, residual, stride, padding):
        return F.conv2d(x, weight, bias, stride, padding) + add[:, :, None, None] + residual

    exact = gradients(reference.conv2d, in_float64(tensors), gradient.double())
    ours = gradients(lambda *a: conv2d(*a, implementation="triton"), tensors, gradient)
    theirs = gradients(stock, tensors, gradient)
    for name, a, e, s in zip(("x", "weight", "bias", "add", "residual"), ours, exact, theirs, strict=True):
        assert a.dtype == torch.float16
        numerics.require(f"gradient of {name}", a, e, s)


@pytest.mark.parametrize("implementation", [None, "triton"], ids=["automatic", "triton"])
def test_compiles_as_one_graph(implementation, device):
    *tensors, stride, padding = inputs((2, 16, 6, 5, 8, 3, 2, 1), torch.float16, device)

    def block(x, *rest):
        return conv2d(x * 2, *rest, stride, padding, implementation) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), block(*tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8, 4)}, "x of 3 dimensions"),
        ({"x": torch.zeros(2, 8, 4, 4, dtype=torch.int32)}, "dtype torch.int32"),
        ({"weight": torch.zeros(8, 8, 3)}, "weight of 3 dimensions"),
        ({"weight": torch.zeros(8, 4, 3, 3)}, "a weight for 4 channels on x of 8: groups are not taken"),
        ({"weight": torch.zeros(8, 8, 5, 5)}, "a kernel of 5x5: it takes 1x1 and 3x3"),
        ({"weight": torch.zeros(8, 8, 1, 3)}, "a kernel of 1x3"),
        ({"stride": 0}, "stride 0"),
        ({"padding": -1}, "padding -1"),
        ({"x": torch.zeros(2, 8, 2, 4), "padding": 0}, "a 3x3 kernel on 2x4 pixels"),
        ({"bias": torch.zeros(7)}, "bias of shape"),
        ({"add": torch.zeros(8)}, "add of shape"),
        ({"residual": torch.zeros(2, 8, 3, 4)}, "residual of shape"),
        ({"weight": torch.zeros(8, 8, 3, 3, device="meta")}, "weight on meta"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"x": torch.zeros(2, 8, 4, 4), "weight": torch.zeros(8, 8, 3, 3), "padding": 1} | change
    with pytest.raises(Unsupported, match=message):
        conv2d(**arguments)


def test_an_implementation_asked_for_by_name_never_falls_back(monkeypatch):
    x, weight = torch.zeros(1, 8, 4, 4), torch.zeros(8, 8, 3, 3)
    with pytest.raises(Unsupported, match="dtype float32"):
        conv2d(x, weight, implementation="triton")
    with pytest.raises(Unsupported, match="dtype float64"):
        conv2d(x.double(), weight.double(), implementation="library_epilogue")
    with pytest.raises(Unsupported, match="1x1 kernel"):
        conv2d(x, weight, implementation="library_gemm")
    with pytest.raises(InvalidOption, match="torch, library_epilogue, library_gemm, triton"):
        conv2d(x, weight, implementation="cuda")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "conv2d=triton")
    with pytest.raises(Unsupported, match="dtype float32"):
        conv2d(x, weight)


def test_a_cpu_tensor_gets_stock_torch():
    x, weight, *_ = inputs((1, 16, 4, 4, 8, 3, 1, 1), torch.float16, torch.device("cpu"))
    choice = OP.choose(OP.verification.problem(x, weight, None, None, None, 1, 1), torch.device("cpu"))
    assert (choice.implementation, choice.source) == ("torch", "stock")


@pytest.mark.parametrize("bucket", OP.tuning.buckets, ids=lambda bucket: bucket.sample.name)
def test_every_bucket_has_a_few_configs_on_every_matrix_unit(bucket):
    problem = OP.verification.problem(*bucket.sample.make(filled=False))
    for architecture in arch.ARCHS.values():
        if not architecture.triton_supported or architecture.matrix_unit in (MatrixUnit.DOT, MatrixUnit.NONE):
            continue
        configs = list(OP.tuning.space(problem, architecture))
        assert 1 <= len(configs) <= 12, architecture.name


def test_the_least_work_counts_each_product_and_each_tensor_once():
    arguments = inputs((2, 16, 8, 8, 32, 3, 2, 1), torch.float16, torch.device("cpu"))
    work = OP.tuning.work(*arguments)
    assert work.flops == 2 * (2 * 4 * 4) * 32 * 16 * 9
    assert work.bytes == 2 * (2 * 16 * 64 + 32 * 16 * 9 + 32 + 2 * 32 + 2 * (2 * 32 * 16))
