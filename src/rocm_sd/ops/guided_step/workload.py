"""The calls that count: what guided_step is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.kernels.configs.guided_step import GuidedStepConfig
from rocm_sd.ops.definition import Bucket, KernelPromise, Tuning, Verification, Work
from rocm_sd.ops.guided_step import reference
from rocm_sd.ops.samples import Draw, Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["TUNING", "VERIFICATION", "problem"]


def problem(
    prediction: torch.Tensor,
    states: torch.Tensor,
    table: torch.Tensor,  # noqa: ARG001 -- the op's own arguments
    step: torch.Tensor,  # noqa: ARG001
    guidance: torch.Tensor | float | None,
    noise: torch.Tensor | None,
) -> Problem:
    S, B = states.shape[:2]
    return {
        "n": B,
        "inner": states.numel() // max(S * B, 1),
        "states": S,
        "guided": int(guidance is not None),
        "noise": int(noise is not None),
        "dtype": dtype_name(prediction.dtype),
        "state_dtype": dtype_name(states.dtype),
    }


def _sample(
    shape: tuple[int, int, int, int],
    states: int,
    dtype: torch.dtype = torch.float16,
    *,
    guidance: str = "number",
    noise: bool = False,
    channels_last: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Sample:
    """shape: of the latents, one for each picture; `guidance`: a number, one (in a tensor), each (picture) or none."""

    def build(draw: Draw) -> tuple[Any, ...]:
        B, C, H, W = shape
        wide = torch.promote_types(draw.dtype, torch.float32)
        model = (B if guidance == "none" else 2 * B, C, H, W)
        prediction = draw.image(*model) if channels_last else draw(*model)
        if channels_last:
            known = draw(states, B, H, W, C, dtype=state_dtype or wide).permute(0, 1, 4, 2, 3)
        else:
            known = draw(states, B, C, H, W, dtype=state_dtype or wide)
        table = draw(3, states + 1, states + 2, dtype=wide)
        step = torch.full((), 1, dtype=torch.int64, device=draw.device)
        scale: torch.Tensor | float | None = 7.5 if guidance == "number" else None
        if guidance in {"one", "each"}:
            scale = draw(*(() if guidance == "one" else (B,)), mean=7.5, dtype=wide)
        return prediction, known, table, step, scale, draw(*shape, dtype=wide) if noise else None

    size = "x".join(map(str, shape))
    parts = f"{states} states, guidance {guidance}{', noise' if noise else ''}"
    return Sample(f"{size}, {parts}, {dtype_name(dtype)}", dtype, build)


def _tiny(guidance: str, *, noise: bool) -> Sample:
    return _sample((2, 2, 2, 3), 2, torch.float64, guidance=guidance, noise=noise, channels_last=noise)


def _space(_problem: Problem, arch: Arch) -> Iterator[GuidedStepConfig]:
    wave = arch.wave_size or 32
    # 8 values a thread are one 16-byte load of a prediction in half precision; 4 spread a small batch wider.
    for block in (256, 512, 1024, 2048):
        for warps in (1, 2, 4, 8):
            if block // (warps * wave) in (4, 8):
                yield GuidedStepConfig(block, warps)


def _work(
    prediction: torch.Tensor,
    states: torch.Tensor,
    table: torch.Tensor,
    step: torch.Tensor,  # noqa: ARG001 -- the op's own arguments
    guidance: torch.Tensor | float | None,  # noqa: ARG001
    noise: torch.Tensor | None,
) -> Work:
    moved = 2 * prediction.numel() * prediction.element_size() + 2 * states.numel() * states.element_size()
    moved += 0 if noise is None else noise.numel() * noise.element_size()
    rows, columns = table.shape[1:]
    return Work(2.0 * rows * columns * states[0].numel(), float(moved))


VERIFICATION = Verification(
    implementation="triton",
    kernels="rocm_sd.kernels.triton.guided_step",
    reference=reference.guided_step,
    problem=problem,
    small=(
        _sample((2, 4, 8, 8), 1),
        _sample((1, 4, 7, 9), 4, torch.bfloat16, guidance="each", channels_last=False),
        _sample((2, 3, 5, 7), 2, torch.float32, guidance="none", noise=True),
        _sample((3, 4, 4, 5), 3, guidance="each", noise=True, state_dtype=torch.float16),
        _sample((1, 4, 1, 1), 5),
    ),
    # Stable Diffusion 1.5 with Euler, SDXL with DPM-Solver++ and with UniPC, and a batch of 8 with PNDM.
    real=(
        _sample((1, 4, 64, 64), 1),
        _sample((1, 4, 128, 128), 2),
        _sample((1, 4, 128, 128), 4),
        _sample((8, 4, 64, 64), 4, noise=True),
    ),
    tiny=(
        _tiny("each", noise=True),
        _tiny("one", noise=False),
        _tiny("number", noise=True),
        _tiny("none", noise=False),
    ),
    empty=(_sample((0, 4, 4, 4), 2), _sample((0, 4, 4, 4), 2, guidance="each")),
    promises={"_guided_step": KernelPromise(bound_by_memory=True)},
)

TUNING = Tuning(
    space=_space,
    buckets=(
        # Of 8 values a thread, four states and noise leave gfx908 3 of its 10 waves.
        Bucket({"states": [3, 2**31]}, _sample((1, 4, 128, 128), 4, noise=True)),
        Bucket({"inner": [1, 16384], "n": [1, 3]}, _sample((1, 4, 64, 64), 2)),
        Bucket({"inner": [1, 16384], "n": [4, 2**31]}, _sample((8, 4, 64, 64), 2)),
        Bucket({"inner": [16385, 2**31]}, _sample((1, 4, 128, 128), 2)),
    ),
    work=_work,
    # Stock torch makes a pass for each term of each equation, fifteen and more; this is one.
    untimed="triton",
    timed=(
        _sample((1, 4, 64, 64), 1),
        _sample((1, 4, 64, 64), 4),
        _sample((8, 4, 128, 128), 2),
        _sample((1, 4, 128, 128), 1, noise=True),
    ),
)
