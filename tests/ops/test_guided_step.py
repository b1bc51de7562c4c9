from __future__ import annotations

import pytest
import torch

from rocm_sd import numerics
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import guided_step
from rocm_sd.ops.guided_step import reference
from rocm_sd.ops.guided_step.op import OP
from rocm_sd.ops.registry import needs_no_dispatcher

# B, C, H, W, states: edge, odd and real.
SHAPES = [
    (1, 4, 1, 1, 1),
    (1, 1, 1, 1, 8),
    (2, 3, 5, 7, 2),
    (3, 4, 9, 13, 4),
    (1, 4, 64, 64, 1),
    (2, 4, 32, 32, 5),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IMPLEMENTATIONS = ["torch", "triton"]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
NAMES = ("prediction", "states", "table", "step", "guidance", "noise")


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape[:4])) + f"s{shape[4]}"


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs(
    shape,
    dtype,
    device,
    *,
    guidance=7.5,
    noise=False,
    layout=torch.contiguous_format,
    state_dtype=torch.float32,
    seed=0,
):
    B, C, H, W, S = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size, dtype=dtype):
        return torch.randn(*size, generator=generator).to(device, dtype)

    prediction = normal(B if guidance is None else 2 * B, C, H, W).contiguous(memory_format=layout)
    states = torch.stack([normal(B, C, H, W, dtype=state_dtype) for _ in range(S)])
    table = normal(5, S + 1, S + 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    step = torch.tensor(3, device=device)
    return prediction, states, table, step, guidance, normal(B, C, H, W) if noise else None


def in_float64(arguments):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]


def check(arguments, implementation):
    ours = guided_step(*arguments, implementation=implementation)
    exact = reference.guided_step(*in_float64(arguments))
    stock = guided_step(*arguments, implementation="torch")
    assert (ours[0].dtype, ours[1].dtype) == (arguments[1].dtype, arguments[0].dtype)
    for name, *results in zip(("new_states", "model_input"), ours, exact, stock, strict=True):
        numerics.require(f"guided_step ({implementation}) {name}", *results)
    return ours


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    check(inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("state_dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("noise", [True, False], ids=["noise", "no_noise"])
@pytest.mark.parametrize("guidance", ["none", "number", "whole", "one", "each"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.usefixtures("poison_memory")
def test_every_optional_part(layout, guidance, noise, state_dtype, device):
    scales = torch.tensor([7.5, -1.0, 3.25], device=device)
    value = {"none": None, "number": 7.5, "whole": 2, "one": scales[0], "each": scales}[guidance]
    arguments = inputs(
        (3, 4, 3, 5, 2), torch.float16, device, guidance=value, noise=noise, layout=layout, state_dtype=state_dtype
    )
    states, model_input = check(arguments, "triton")
    assert model_input.is_contiguous(memory_format=layout)
    assert states[0].is_contiguous(memory_format=layout)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_guidance_is_per_picture_and_the_unconditional_half_comes_first(implementation, device):
    B = 2
    unconditional = torch.arange(B * 4, device=device, dtype=torch.float32).reshape(B, 1, 2, 2)
    conditional = unconditional * 10
    table = torch.tensor([[[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]], device=device)
    states, model_input = guided_step(
        torch.cat([unconditional, conditional]),
        torch.zeros(1, B, 1, 2, 2, device=device),
        table,
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.tensor([0.0, 1.0], device=device),
        implementation=implementation,
    )
    expected = torch.stack([unconditional[0], conditional[1]])
    assert torch.equal(states[0], expected)
    assert torch.equal(model_input, torch.cat([expected, expected]) * 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["sliced", "transposed", "expanded", "mixed"])
def test_inputs_of_any_strides(kind, implementation, device):
    prediction, states, table, step, guidance, noise = inputs((2, 4, 6, 6, 2), torch.float16, device, noise=True)
    if kind == "sliced":
        prediction, states = torch.cat([prediction, prediction], dim=1)[:, ::2], torch.cat([states, states])[::2]
        table, noise = torch.stack([table, table], dim=3)[..., 0], torch.cat([noise, noise], dim=3)[..., :6]
    elif kind == "transposed":
        prediction, states, noise = (t.transpose(-1, -2) for t in (prediction, states, noise))
        table = table.transpose(1, 2).contiguous().transpose(1, 2)
    elif kind == "expanded":
        prediction, states = prediction[:1].expand(4, -1, -1, -1), states[:, :1].expand(-1, 2, -1, -1, -1)
    else:
        prediction = prediction.contiguous(memory_format=torch.channels_last)
    check((prediction, states, table, step, guidance, noise), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rank", [2, 3, 5])
def test_latents_of_any_rank(rank, implementation, device):
    """Video latents have five dimensions, sequences three."""
    image = (4, 3, 2, 3)[: rank - 1]
    generator = torch.Generator().manual_seed(0)
    prediction = torch.randn(4, *image, generator=generator).to(device)
    states = torch.randn(2, 2, *image, generator=generator).to(device)
    table = torch.randn(1, 3, 4, generator=generator).to(device)
    check((prediction, states, table, torch.zeros((), dtype=torch.int64, device=device), 3.0, None), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_half_precision_predictions_stay_finite(implementation, device):
    """In half precision, 7.5 times the difference of the two predictions is infinite."""
    prediction, states, _, step, guidance, _ = inputs((1, 4, 4, 4, 1), torch.float16, device)
    table = torch.full((5, 2, 3), 1e-3, device=device)
    check((prediction.clamp(-4, 4) * 15000, states, table, step, guidance, None), implementation)
    _, model_input = guided_step(prediction * 15000, states, table, step, guidance, implementation=implementation)
    assert model_input.isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_step_is_read_where_the_tensor_is(implementation, device):
    prediction, states, table, step, guidance, _ = inputs((1, 4, 4, 4, 1), torch.float32, device)
    for number in range(table.shape[0]):
        step.fill_(number)
        only = guided_step(prediction, states, table[number : number + 1], step * 0, guidance, implementation="torch")
        both = guided_step(prediction, states, table, step, guidance, implementation=implementation)
        torch.testing.assert_close(both, only)


@pytest.mark.parametrize("number", [-1, 5])
@pytest.mark.parametrize("zero", [True, False], ids=["zero_row", "any_row"])
def test_a_step_beyond_the_table_is_nan_and_reads_nothing_else(zero, number, device):
    prediction, states, table, step, guidance, _ = inputs((1, 4, 4, 4, 2), torch.float32, device)
    table = table * 0 if zero else table
    new = guided_step(prediction, states, table, step.fill_(number), guidance, implementation="triton")
    assert all(tensor.isnan().all() for tensor in new)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_input_gives_the_same_bits(implementation, device):
    arguments = inputs((2, 4, 9, 13, 3), torch.float16, device, noise=True)
    first, second = (guided_step(*arguments, implementation=implementation) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("guidance", ["number", "each", "none"])
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(guidance, implementation, device):
    value = {"number": 7.5, "each": torch.tensor([1.0, 2.0], device=device), "none": None}[guidance]
    arguments = inputs((2, 4, 6, 5, 2), torch.float16, device, guidance=value, noise=True, layout=torch.channels_last)
    prediction, states, table, step, _, noise = arguments
    assert needs_no_dispatcher(prediction, states, table, step, noise)
    direct = guided_step(*arguments, implementation=implementation)
    scale, scales = (None, value) if guidance == "each" else (value, None)
    dispatched = torch.ops.rocm_sd.guided_step(prediction, states, table, step, scale, scales, noise, implementation)
    for a, b in zip(direct, dispatched, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_batch_is_an_empty_result(implementation, device):
    prediction, states, table, step, guidance, _ = inputs((2, 4, 4, 4, 2), torch.float16, device)
    new, model_input = guided_step(prediction[:0], states[:, :0], table, step, guidance, implementation=implementation)
    assert (new.shape, model_input.shape) == ((2, 0, 4, 4, 4), (0, 4, 4, 4))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_opcheck(layout, implementation, device):
    scales = torch.tensor([2.0, 7.5], device=device)
    prediction, states, table, step, _, noise = inputs(
        (2, 4, 3, 5, 2), torch.float32, device, guidance=scales, noise=True, layout=layout
    )
    for tensor in (prediction, states, table, scales, noise):
        tensor.requires_grad_()
    torch.library.opcheck(
        torch.ops.rocm_sd.guided_step.default, (prediction, states, table, step, None, scales, noise, implementation)
    )


@pytest.mark.parametrize("guidance", ["number", "one", "each", "none"])
@pytest.mark.parametrize("noise", [True, False], ids=["noise", "no_noise"])
def test_gradcheck(noise, guidance):
    scales = torch.tensor([7.5, 2.0], dtype=torch.float64)
    value = {"number": 7.5, "one": scales[0].clone(), "each": scales, "none": None}[guidance]
    arguments = inputs(
        (2, 2, 2, 3, 2), torch.float64, torch.device("cpu"), guidance=value, noise=noise, state_dtype=torch.float64
    )
    named = dict(zip(NAMES, arguments, strict=True))
    wanted = [n for n, a in named.items() if isinstance(a, torch.Tensor) and a.is_floating_point()]
    tensors = [named[n].requires_grad_() for n in wanted]

    def function(*values):
        return guided_step(**named | dict(zip(wanted, values, strict=True)))

    assert torch.autograd.gradcheck(function, tensors)


def test_half_precision_gradients_follow_float64(device):
    arguments = inputs((2, 4, 5, 6, 2), torch.float16, device, noise=True, state_dtype=torch.float16)
    gradients = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t) for t in guided_step(*arguments)
    ]

    def of(function, arguments, gradients):
        prediction, states, table, step, guidance, noise = arguments
        tensors = [t.detach().requires_grad_() for t in (prediction, states, noise)]
        results = function(tensors[0], tensors[1], table, step, guidance, tensors[2])
        return torch.autograd.grad(results, tensors, gradients)

    exact = of(reference.guided_step, in_float64(arguments), [g.double() for g in gradients])
    ours, theirs = (of(function, arguments, gradients) for function in (guided_step, reference.guided_step))
    for name, a, e, s in zip(("prediction", "states", "noise"), ours, exact, theirs, strict=True):
        numerics.require(f"gradient of {name}", a, e, s)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_compiles_as_one_graph(layout, device):
    arguments = inputs((2, 4, 6, 5, 2), torch.float32, device, layout=layout)

    def loop(prediction, *rest):
        states, model_input = guided_step(prediction * 2, *rest)
        return states + 1, model_input - 1

    compiled = torch.compile(loop, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), loop(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prediction": torch.zeros(2, 4, 3, 3)}, "prediction of shape"),
        ({"guidance": None}, "prediction of shape"),
        ({"states": torch.zeros(4)}, "states of shape"),
        ({"states": torch.zeros(0, 2, 4, 3, 3)}, "states of shape"),
        ({"table": torch.zeros(5, 3, 3)}, "table of shape"),
        ({"table": torch.zeros(())}, "table of shape"),
        ({"table": torch.zeros(0, 3, 4)}, "table of shape"),
        ({"table": torch.zeros(5, 3, 4, dtype=torch.float16)}, "table of torch.float16"),
        ({"step": torch.zeros(2, dtype=torch.int64)}, "step of shape"),
        ({"step": torch.zeros(())}, "step of shape"),
        ({"guidance": torch.zeros(3)}, "guidance of shape"),
        ({"guidance": torch.zeros(2, dtype=torch.int64)}, "guidance of torch.int64"),
        ({"noise": torch.zeros(2, 4, 3)}, "noise of shape"),
        ({"prediction": torch.zeros(4, 4, 3, 3, dtype=torch.int32)}, "prediction of torch.int32"),
        ({"table": torch.zeros(5, 3, 4, device="meta")}, "table on meta"),
        ({"step": torch.zeros((), dtype=torch.int64, device="meta")}, "step on meta"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = dict(zip(NAMES, inputs((2, 4, 3, 3, 2), torch.float32, "cpu"), strict=True))
    with pytest.raises(Unsupported, match=message):
        guided_step(**arguments | change)


def test_an_implementation_asked_for_by_name_never_falls_back(monkeypatch):
    arguments = inputs((1, 4, 3, 3, 1), torch.float64, "cpu")
    with pytest.raises(Unsupported, match="float64"):
        guided_step(*arguments, implementation="triton")
    with pytest.raises(InvalidOption, match="torch, triton"):
        guided_step(*arguments, implementation="cuda")
    with pytest.raises(Unsupported, match="9 states"):
        guided_step(*inputs((1, 4, 3, 3, 9), torch.float32, "cpu"), implementation="triton")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "guided_step=triton")
    with pytest.raises(Unsupported, match="float64"):
        guided_step(*arguments)


def test_a_cpu_tensor_gets_stock_torch():
    arguments = inputs((1, 4, 3, 3, 1), torch.float16, "cpu")
    choice = OP.choose(OP.verification.problem(*arguments), torch.device("cpu"))
    assert (choice.implementation, choice.source) == ("torch", "stock")
