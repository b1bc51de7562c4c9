from __future__ import annotations

from functools import partial

import pytest
import torch

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd.errors import Unsupported
from rocm_sd.ops import guided_step
from rocm_sd.ops.guided_step.op import OP

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


check = partial(op_checks.check, OP)


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


def test_more_states_than_there_are_registers_for_are_refused():
    with pytest.raises(Unsupported, match="9 states"):
        guided_step(*inputs((1, 4, 3, 3, 9), torch.float32, "cpu"), implementation="triton")
    wide = inputs((1, 4, 3, 3, 1), torch.float32, "cpu", state_dtype=torch.float64)
    with pytest.raises(Unsupported, match="dtype float64"):
        guided_step(*wide, implementation="triton")
