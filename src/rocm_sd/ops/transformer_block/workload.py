"""The calls that count: what transformer_block is proven on, tuned for and timed at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.errors import Unsupported
from rocm_sd.kernels.hip.transformer_plan import FoldConfig, config_for
from rocm_sd.ops.definition import KernelPromise, Kernels, Tuning, Verification, Work
from rocm_sd.ops.samples import Draw, Sample, dtype_name
from rocm_sd.ops.transformer_block import reference

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rocm_sd.arch import Arch
    from rocm_sd.tuning import Problem

__all__ = ["HIP", "TUNING", "VERIFICATION", "problem", "problem_of"]


def problem_of(x: torch.Tensor, text: int, heads: int, hidden: int) -> Problem:
    """Of tokens x, [B, S, C], `text` tokens of text, and as many hidden values in the feed-forward."""
    B, S, C = x.shape
    return {"b": B, "s": S, "t": text, "c": C, "h": heads, "f": hidden, "dtype": dtype_name(x.dtype)}


def problem(x: torch.Tensor, keys: torch.Tensor, _values: torch.Tensor, *weights: Any) -> Problem:
    return problem_of(x, keys.shape[1], keys.shape[2], weights[-3].shape[1])


def _sample(
    B: int, S: int, C: int, heads: int, T: int, F: int | None = None, dtype: torch.dtype = torch.float16
) -> Sample:
    hidden = 4 * C if F is None else F

    def build(draw: Draw) -> tuple[Any, ...]:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return draw(rows, columns, std=columns**-0.5)

        def norm() -> tuple[torch.Tensor, torch.Tensor]:
            return draw(C, mean=1.0, std=0.2), draw(C, std=0.2)

        def added(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            return matrix(C, columns), draw(C, std=0.1)

        text = [draw(B, T, heads, C // heads) for _ in range(2)]
        itself = (*norm(), matrix(3 * C, C), *added(C))
        to_text = (*norm(), matrix(C, C), *added(C))
        feed_forward = (*norm(), matrix(2 * hidden, C), draw(2 * hidden, std=0.1), *added(hidden))
        return draw(B, S, C), *text, *itself, *to_text, *feed_forward, 1e-5

    return Sample(f"{B}x{S}x{C}, {heads} heads, {T} of text, {dtype_name(dtype)}", dtype, build)


def _space(problem: Problem, arch: Arch) -> Iterable[FoldConfig]:
    """What the model folds, every norm, and none: how much a folded norm costs is what the model knows least of."""
    rows = int(problem["b"]) * int(problem["s"])
    try:
        chosen = config_for(rows, int(problem["c"]), int(problem["h"]), arch).fold
    except Unsupported:
        return ()
    folds = {chosen: FoldConfig(), (True, True, True): FoldConfig(1, 1, 1), (False, False, False): FoldConfig(0, 0, 0)}
    return [FoldConfig(), *(config for fold, config in folds.items() if fold != chosen)]


def _work(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *weights: Any) -> Work:
    B, S, C = x.shape
    matrices = sum(each.numel() for each in weights[:-1] if each.dim() == 2)
    attended = 4 * B * S * C * (S + keys.shape[1])
    moved = 2 * x.numel() + keys.numel() + values.numel() + matrices
    return Work(2.0 * B * S * matrices + attended, float(moved * x.element_size()))


# The transformers of Stable Diffusion 1.5 at 512x512 and of SDXL at 1024x1024; 2 maps are one picture with guidance.
_SD15 = tuple(_sample(2, S, C, 8, 77) for S, C in ((4096, 320), (1024, 640), (256, 1280), (64, 1280)))
_SDXL = tuple(_sample(2, S, C, C // 64, 77) for S, C in ((4096, 640), (1024, 1280)))

VERIFICATION = Verification(
    implementation="hip",
    kernels="",
    reference=reference.transformer_block,
    problem=problem,
    small=(_sample(2, 9, 64, 1, 5, 72), _sample(1, 17, 80, 2, 7, 96, torch.bfloat16)),
    real=(_SD15[0], _SDXL[1]),
    tiny=(_sample(1, 3, 4, 2, 2, 3, torch.float64),),
    empty=(_sample(0, 9, 64, 1, 5, 72),),
    promises={},
)

_PRODUCT = KernelPromise(uses_dot=True)
HIP = Kernels(
    module="rocm_sd.kernels.hip.transformer_block",
    promises={
        **dict.fromkeys(
            ("norm_linear", "linear_residual", "linear_moments", "norm_geglu", "linear_geglu", "attend"), _PRODUCT
        ),
        "row_moments": KernelPromise(bound_by_memory=True),
        "layer_norm_residual": KernelPromise(bound_by_memory=True),
    },
    space=_space,
    small_configs=(FoldConfig(1, 1, 1), FoldConfig(0, 0, 0)),
)

TUNING = Tuning(
    space=_space,
    # None: what is shipped comes from a model of single kernels, and it does not see what a block saves between them.
    buckets=(),
    work=_work,
    untimed="torch",
    timed=(*_SD15, *_SDXL),
)
