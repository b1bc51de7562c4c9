from __future__ import annotations

from inspect import signature

import pytest
import torch

from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import guided_step
from rocm_sd.ops.guided_step import reference, tables
from rocm_sd.ops.guided_step.op import OP
from rocm_sd.ops.registry import needs_no_dispatcher
from rocm_sd.verify import numerics

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


# The tables, against the schedulers of diffusers themselves.
STABLE_DIFFUSION = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
SHAPE = (2, 4, 3, 5)


def of_alphas(build, scheduler, steps, **options):
    numbers = scheduler.alphas_cumprod, scheduler.timesteps, 1000 // steps, float(scheduler.final_alpha_cumprod)
    return build(*numbers, scheduler.config.prediction_type, **options)


def of_sigmas(build, scheduler, _steps, **options):
    return build(scheduler.sigmas, scheduler.config.prediction_type, **options)


def of_lcm(build, scheduler, _steps):
    return build(scheduler.alphas_cumprod, scheduler.timesteps, scheduler.config.prediction_type)


BOTH = ("epsilon", "v_prediction")
ALL = (*BOTH, "sample")
# name: the scheduler's class, its settings, how its table is built, which predictions it takes.
SCHEDULERS = {
    "ddim": (
        "DDIMScheduler",
        {"clip_sample": False, "steps_offset": 1, "set_alpha_to_one": False},
        of_alphas, "ddim", {}, ALL,
    ),
    "ddim_to_one": ("DDIMScheduler", {"clip_sample": False}, of_alphas, "ddim", {}, BOTH),
    "ddim_eta": ("DDIMScheduler", {"clip_sample": False}, of_alphas, "ddim", {"eta": 0.7}, BOTH),
    "ddim_zero_snr": (
        "DDIMScheduler",
        {"clip_sample": False, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
        of_alphas, "ddim", {}, ("v_prediction",),
    ),
    "euler": (
        "EulerDiscreteScheduler", {"timestep_spacing": "leading", "steps_offset": 1}, of_sigmas, "euler", {}, ALL,
    ),
    "euler_karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}, of_sigmas, "euler", {}, BOTH),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {}, of_sigmas, "euler_ancestral", {}, BOTH),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {}, of_sigmas, "dpmpp_2m", {}, ALL),
    "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, of_sigmas, "dpmpp_2m", {}, BOTH),
    "dpmpp_2m_sigma_min": (
        "DPMSolverMultistepScheduler", {"final_sigmas_type": "sigma_min"}, of_sigmas, "dpmpp_2m", {}, BOTH,
    ),
    "dpmpp_2m_euler_at_final": (
        "DPMSolverMultistepScheduler",
        {"final_sigmas_type": "sigma_min", "euler_at_final": True},
        of_sigmas, "dpmpp_2m", {"first_order_end": True}, BOTH,
    ),
    "dpmpp_2m_sde": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True},
        of_sigmas, "dpmpp_2m", {"sde": True}, BOTH,
    ),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}, of_alphas, "pndm", {}, BOTH),
    "pndm_to_one": ("PNDMScheduler", {"skip_prk_steps": True, "set_alpha_to_one": True}, of_alphas, "pndm", {}, BOTH),
    "unipc": ("UniPCMultistepScheduler", {}, of_sigmas, "unipc", {}, ALL),
    "unipc_karras": ("UniPCMultistepScheduler", {"use_karras_sigmas": True}, of_sigmas, "unipc", {}, BOTH),
    "unipc_uncorrected": (
        "UniPCMultistepScheduler", {"disable_corrector": [0, 3]}, of_sigmas, "unipc", {"uncorrected": [0, 3]}, BOTH,
    ),
    "unipc_full_order": (
        "UniPCMultistepScheduler",
        {"lower_order_final": False, "final_sigmas_type": "sigma_min"},
        of_sigmas, "unipc", {"lower_order_final": False}, BOTH,
    ),
    "lcm": ("LCMScheduler", {}, of_lcm, "lcm", {}, ALL),
}  # fmt: skip


def trajectory(scheduler, predictions, sample, generator, eta):
    """The samples and the model inputs of diffusers' own run."""
    samples, model_inputs = [], []
    for number, (t, e) in enumerate(zip(scheduler.timesteps, predictions, strict=True)):
        scheduler.scale_model_input(sample, t)
        possible = {"generator": generator, "eta": eta}
        taken = {n: v for n, v in possible.items() if n in signature(scheduler.step).parameters}
        sample = scheduler.step(e, t, sample, **taken).prev_sample
        following = scheduler.timesteps[number + 1 :]
        samples.append(sample)
        model_inputs.append(scheduler.scale_model_input(sample, following[0]) if len(following) else None)
    return samples, model_inputs


def scheduler_of(name, prediction_type, steps):
    diffusers = pytest.importorskip("diffusers")
    class_name, settings, numbers, builder, options, _ = SCHEDULERS[name]
    scheduler = getattr(diffusers, class_name)(**STABLE_DIFFUSION, **settings, prediction_type=prediction_type)
    scheduler.set_timesteps(steps)
    return scheduler, numbers(getattr(tables, builder), scheduler, steps, **options)


@pytest.mark.parametrize("steps", [10, 20])
@pytest.mark.parametrize(
    ("name", "prediction_type"), [(name, kind) for name, entry in SCHEDULERS.items() for kind in entry[-1]]
)
def test_the_trajectory_is_that_of_the_scheduler(name, prediction_type, steps, device):
    scheduler, table = scheduler_of(name, prediction_type, steps)
    random = torch.Generator().manual_seed(0)
    count = len(scheduler.timesteps)
    outputs = torch.randn(count, 2, *SHAPE, generator=random)
    sample = torch.randn(SHAPE, generator=random) * float(scheduler.init_noise_sigma)
    guided = [u + 5.0 * (c - u) for u, c in outputs]
    first_input = scheduler.scale_model_input(sample, scheduler.timesteps[0])
    torch.testing.assert_close(sample * table.first_scale, first_input, rtol=1e-5, atol=0)
    eta = SCHEDULERS[name][4].get("eta", 0.0)
    samples, model_inputs = trajectory(scheduler, guided, sample, torch.Generator().manual_seed(1), eta)

    assert table.coefficients.shape == (count, table.states + 1, table.states + 2)
    coefficients = table.coefficients.to(device)
    states = torch.zeros(table.states, *SHAPE, device=device)
    states[0] = sample
    step, draws = torch.zeros((), dtype=torch.int64, device=device), torch.Generator().manual_seed(1)
    for number in range(count):
        noise = torch.randn(SHAPE, generator=draws).to(device) if table.noisy else None
        states, model_input = guided_step(
            outputs[number].flatten(0, 1).to(device), states, coefficients, step, 5.0, noise
        )
        step += 1
        _close(states[0], samples[number])
        if number + 1 < count:
            _close(model_input.chunk(2)[0], model_inputs[number])
            assert torch.equal(*model_input.chunk(2))


def _close(ours, theirs):
    error = float((ours.cpu() - theirs).abs().max() / theirs.abs().max())
    assert error < 1e-5, f"relative error {error:.2g}"


@pytest.mark.parametrize("name", ["euler", "dpmpp_2m_karras", "pndm", "unipc", "lcm"])
def test_the_kernel_runs_a_whole_schedule_as_stock_torch_does(name, device):
    _, table = scheduler_of(name, "epsilon", 10)
    random = torch.Generator().manual_seed(0)
    runs = {}
    for implementation in IMPLEMENTATIONS:
        random.manual_seed(0)
        states = torch.zeros(table.states, *SHAPE, device=device)
        states[0] = torch.randn(SHAPE, generator=random).to(device)
        for number in range(table.coefficients.shape[0]):
            e, noise = (torch.randn(n * SHAPE[0], *SHAPE[1:], generator=random).to(device) for n in (2, 1))
            step = torch.tensor([number], dtype=torch.int32, device=device)
            states, _ = guided_step(
                e, states, table.coefficients.to(device), step, 7.5, noise if table.noisy else None, implementation
            )
        runs[implementation] = states[0]
    _close(runs["triton"], runs["torch"].cpu())


@pytest.mark.parametrize("build", [tables.euler, tables.dpmpp_2m, tables.unipc])
def test_an_unknown_prediction_is_refused(build):
    with pytest.raises(InvalidOption, match="epsilon, v_prediction, sample"):
        build([10.0, 1.0, 0.0], "flow")


def test_pndm_has_no_prediction_of_the_picture():
    with pytest.raises(InvalidOption, match="epsilon, v_prediction"):
        tables.pndm([0.9, 0.5], [1, 0], 1, prediction="sample")
