"""out = softmax(scale * q k^T) v over [B, S, H, D] as the projections leave it: no transposes, no padding copies.

It reads [B, S, H, D] views in place, also slices of a packed QKV projection. A head of 40 is multiplied as 32 + 16
columns, 80 as 64 + 16 and 160 as 128 + 32 where that serves, instead of being padded to the next power of two; on RDNA,
heads of 512 are read in chunks and each program owns a slice of the output's columns, since nothing else fits 256
registers. Where there are few heads the keys are divided between programs and merged.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rocm_sd import arch
from rocm_sd.arch.torch_libraries import why_not_fused
from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip, triton
from rocm_sd.kernels.configs.attention import AttentionConfig
from rocm_sd.kernels.hip.attention import BY_HEAD
from rocm_sd.ops.attention import libraries, reference
from rocm_sd.ops.attention.workload import HIP, HIP_HEADS, TUNING, VERIFICATION, problem, variant
from rocm_sd.ops.defining import Saved, define
from rocm_sd.ops.definition import HALVES, Implementation, where
from rocm_sd.tuning.choice import STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rocm_sd.kernels.config import Config
    from rocm_sd.kernels.hip.attention import AttentionConfig as HipConfig
    from rocm_sd.ops.layouts import Part
    from rocm_sd.tuning import Problem

__all__ = ["OP", "attention", "backward", "keeps_more_than_bounded", "stock_module_bytes"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """out = softmax(scale * q k^T) v for each head; q: [B, S, H, D]; k, v: [B, T, H, D]; fp16, bf16, fp32 or fp64.

    Any strides: views into packed projections are read in place where the columns of a head lie side by side, and
    copied otherwise. scale is D**-0.5 if None; out: dense [B, S, H, D], q's dtype. `implementation` names one and never
    falls back; without it the tuning data decides.
    """
    bound = OP.bound(implementation, q, k, v, scale)
    if bound is not None:
        return bound(q, k, v, scale)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise Unsupported(OP.name, f"{name} of {tensor.dim()} dimensions: it takes [batch, sequence, heads, head]")
    B, _, H, D = q.shape
    if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (B, H, D):
        shapes = f"q of shape {tuple(q.shape)} with k of {tuple(k.shape)} and v of {tuple(v.shape)}"
        raise Unsupported(OP.name, shapes)
    if not k.shape[1] or not D:
        raise Unsupported(OP.name, f"no keys or no columns: k of shape {tuple(k.shape)}")
    return OP.call(q, k, v, scale, implementation=implementation)


def _allocate(q: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _dense(out: Tensor) -> Tensor:
    """[B, H, S, D] of stock torch as dense [B, S, H, D]: flash kernels already lay it out so, and cost no copy."""
    return out.transpose(1, 2).contiguous()


def _positive(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The same product with a scale above zero: kernels mask with -inf and take the largest score for the largest
    product, and stock's flash kernels give NaN where the scale is 0 or less (torch 2.11 on an H200).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale else (torch.zeros_like(q), 1.0)


def _stock(q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, backend: SDPBackend | None = None) -> Tensor:
    if not q.numel():
        return _allocate(q)
    q, scale = _positive(q, scale)
    if backend is None and _keeps_scores(q, k):
        return _in_slices(q, k, v, scale)
    if backend in _CAN_USE:
        # Where they are not, cuDNN's result is wrong and the efficient kernel is not found (torch 2.11 on an H200).
        q, k, v = map(_in_whole_vectors, (q, k, v))
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if backend is None:
        return _dense(F.scaled_dot_product_attention(*heads, scale=scale))
    with sdpa_kernel([backend]):
        return _dense(F.scaled_dot_product_attention(*heads, scale=scale))


@lru_cache(maxsize=1024)
def _kept_from_fused(head: int, device: torch.device) -> str | None:
    return why_not_fused(arch.detect(device), head)


def _keeps_scores(q: Tensor, k: Tensor) -> bool:
    """Whether torch may not take a fused kernel for these, or has none and would keep more scores than are bounded."""
    B, S, H, D = q.shape
    if _kept_from_fused(D, q.device):
        return True
    T = k.shape[1]
    if q.device.type not in _MAY_BE_UNFUSED or B * H * S * T <= _SCORES:
        return False
    return not _is_fused(B, S, T, H, D, str(q.dtype).removeprefix("torch."), q.device, _switches())


def _in_slices(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Torch's unfused attention, so many queries at a time that their scores are bounded."""
    out = _allocate(q)
    B, S, H = q.shape[:3]
    rows = max(1, _SCORES // (B * H * k.shape[1]))
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    with sdpa_kernel([SDPBackend.MATH]):
        for start in range(0, S, rows):
            queries = q[:, start : start + rows].transpose(1, 2)
            part = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[:, start : start + rows] = part.transpose(1, 2)
    return out


# A CPU's own attention is always fused.
_MAY_BE_UNFUSED = frozenset({"cuda"})
_CAN_USE = {
    SDPBackend.FLASH_ATTENTION: "can_use_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "can_use_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "can_use_cudnn_attention",
}


@lru_cache(maxsize=1024)
def _backend_takes(
    backend: SDPBackend, b: int, s: int, t: int, h: int, d: int, dtype: str, device: torch.device
) -> bool:
    """Torch's own answer for unfilled tensors as the op hands them over: backends look at strides, too."""
    can_use = getattr(torch.backends.cuda, _CAN_USE[backend], None)
    if can_use is None:
        return False
    q, k = (
        torch.empty((b, length, h, d), dtype=getattr(torch, dtype), device=device).transpose(1, 2) for length in (s, t)
    )
    parameters = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, False, False)
    return bool(can_use(parameters, False))


def _switches() -> tuple[bool, ...]:
    """Torch's own for its fused kernels, which a program may turn."""
    cuda: Any = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()


@lru_cache(maxsize=1024)
def _is_fused(
    b: int, s: int, t: int, h: int, d: int, dtype: str, device: torch.device, _switches: tuple[bool, ...]
) -> bool:
    """Whether one of torch's fused kernels takes it, with its switches as they are."""
    return any(_backend_takes.__wrapped__(backend, b, s, t, h, d, dtype, device) for backend in _CAN_USE)


def _has_fused(problem: Problem, device: torch.device) -> bool:
    sizes = {name: int(problem[name]) for name in ("b", "s", "t", "h", "d")}
    return _is_fused(**sizes, dtype=str(problem["dtype"]), device=device, _switches=_switches())


def _instead_of_stock(problem: Problem, device: torch.device) -> tuple[str, ...]:
    """What keeps no scores, or few, where torch would write out more than are bounded; then comes stock, in slices."""
    if device.type not in _MAY_BE_UNFUSED or _scores(problem) <= _SCORES:
        return ()
    if not _kept_from_fused(int(problem["d"]), device) and _has_fused(problem, device):
        return ()
    return "hip", "triton", "gemm_softmax"


def _stock_why_not(problem: Problem, device: torch.device, *, backend: SDPBackend) -> str | None:
    if device.type != "cuda":
        return f"a tensor on {device.type}: this backend of torch is for GPUs"
    missing = f"torch {torch.__version__} has no {backend.name.lower()} kernel"
    return _kept_from_fused(int(problem["d"]), device) or _unless(_backend_takes, backend, problem, device, missing)


def _unless(takes: Callable[..., bool], by: Any, problem: Problem, device: torch.device, missing: str) -> str | None:
    sizes = {name: int(problem[name]) for name in ("b", "s", "t", "h", "d")}
    if takes(by, **sizes, dtype=str(problem["dtype"]), device=device):
        return None
    return f"{', '.join(f'{name}={value}' for name, value in problem.items())}: {missing} for it on this GPU"


def _math_why_not(problem: Problem, device: torch.device) -> str | None:
    """In half precision it computes in float32 within, and is the more exact for it."""
    if problem["dtype"] != "float32" or device.type not in _MAY_BE_UNFUSED or not _has_fused(problem, device):
        return None
    return "float32: its error can be more than twice that of torch's fused kernel"


def _backend(name: str, backend: SDPBackend) -> Implementation:
    return Implementation(name, partial(_stock, backend=backend), partial(_stock_why_not, backend=backend))


def _library(q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, library: libraries.AttentionLibrary) -> Tensor:
    """Torch's flash attention by one named library."""
    with libraries.preferred(library):
        return _stock(q, k, v, scale, backend=SDPBackend.FLASH_ATTENTION)


@lru_cache(maxsize=1024)
def _library_takes(
    library: libraries.AttentionLibrary, b: int, s: int, t: int, h: int, d: int, dtype: str, device: torch.device
) -> bool:
    """As `_backend_takes`, which does not know that torch asks the library that is preferred."""
    with libraries.preferred(library):
        return _backend_takes.__wrapped__(SDPBackend.FLASH_ATTENTION, b, s, t, h, d, dtype, device)


def _library_why_not(problem: Problem, device: torch.device, *, library: libraries.AttentionLibrary) -> str | None:
    reason = libraries.why_not(library, device) or _kept_from_fused(int(problem["d"]), device)
    return reason or _unless(_library_takes, library, problem, device, f"{library.title} has no kernel")


def _triton(q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, config: AttentionConfig) -> Tensor:
    out = _allocate(q)
    if q.numel():
        q, scale = _positive(q, scale)
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        units = arch.device_facts(q.device).compute_units or 1
        triton.launch_op("attention", q.device, q, k, v, out, scale, config, units)
    return out


# Scores of one turn, 64 MB in float32: half of what they need is still in the L2 cache when it is read again.
_SCORES = 2**24


def _gemm_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Two products of the library with a softmax between them, so many queries at a time; scores stay in float32."""
    from rocm_sd.kernels.triton.attention import softmax_rows  # noqa: PLC0415 -- needs Triton

    out = _allocate(q)
    B, S, H = q.shape[:3]
    T = k.shape[1]
    q, scale = _positive(q, scale)
    rows = min(S, max(1, _SCORES // T))
    for b, h, start in product(range(B), range(H), range(0, S, rows)):
        queries = q[b, start : start + rows, h]
        weights = torch.empty((len(queries), T), dtype=q.dtype, device=q.device)
        totals = torch.empty(len(queries), dtype=torch.float32, device=q.device)
        softmax_rows(_product(queries, k[b, :, h].T), weights, totals, scale)
        torch.div(_product(weights, v[b, :, h]), totals[:, None], out=out[b, start : start + rows, h])
    return out


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, from half precision as it is where the device can."""
    if a.device.type == "cpu":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


@cache
def _multiplies_into_float32(dtype: str, device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    a = torch.zeros((16, 16), dtype=getattr(torch, dtype), device=device)
    try:
        return _product(a, a).dtype is torch.float32
    except (RuntimeError, TypeError):
        return False


def _gemm_softmax_why_not(problem: Problem, device: torch.device) -> str | None:
    if int(problem["d"]) < 256 or int(problem["b"]) * int(problem["h"]) > 8:
        return f"{problem['h']} heads of {problem['d']}: their scores would be written to memory for nothing"
    reason = _half_by_triton(problem, device)
    if reason is None and not _multiplies_into_float32(str(problem["dtype"]), device):
        reason = f"torch {torch.__version__} has no product of {problem['dtype']} into float32 on this GPU"
    return reason


def _scores(problem: Problem) -> int:
    return int(problem["b"]) * int(problem["h"]) * int(problem["s"]) * int(problem["t"])


def _scores_bytes(problem: Problem, *, at_most: int | None = None) -> int:
    """What torch's unfused attention keeps of scores, in float32 at least: before the softmax and after it."""
    scores = _scores(problem)
    return (scores if at_most is None else min(scores, at_most)) * (8 if problem["dtype"] != "float64" else 16)


def _fused_bytes(problem: Problem, device: torch.device) -> int:
    """Nothing where one of torch's fused kernels takes it, all scores where none does."""
    if device.type not in _MAY_BE_UNFUSED:
        return 0
    return 0 if _has_fused(problem, device) else _scores_bytes(problem)


def stock_module_bytes(problem: Problem, device: torch.device) -> int:
    """What scores take where a model calls torch's attention itself: it can be more than all else in the model."""
    kept = _kept_from_fused(int(problem["d"]), device)
    return _scores_bytes(problem) if kept else _fused_bytes(problem, device)


def keeps_more_than_bounded(problem: Problem, device: torch.device) -> bool:
    """Whether a model that calls torch's attention itself keeps more scores than the op ever does."""
    return stock_module_bytes(problem, device) > _scores_bytes(problem, at_most=_SCORES)


def _stock_bytes(arguments: tuple[Any, ...], _config: Config, device: torch.device) -> int:
    asked = problem(*arguments)
    bounded = _scores_bytes(asked, at_most=_SCORES)
    if device.type == "cuda" and _kept_from_fused(int(asked["d"]), device):
        return bounded
    return min(_fused_bytes(asked, device), bounded)


def _math_bytes(arguments: tuple[Any, ...], _config: Config, _device: torch.device) -> int:
    return _scores_bytes(problem(*arguments))


def _gemm_softmax_bytes(arguments: tuple[Any, ...], _config: Config, _device: torch.device) -> int:
    """Scores in float32 and weights in q's dtype."""
    q, k, *_ = arguments
    B, S, H, _ = q.shape
    return int(min(B * H * S * k.shape[1], _SCORES) * (4 + q.itemsize))


def _triton_bytes(arguments: tuple[Any, ...], config: AttentionConfig, device: torch.device) -> int:
    """The parts of results where the keys are divided, with a maximum and a sum for each row, in float32."""
    q, k, *_ = arguments
    B, S, H, D = q.shape
    units = arch.device_facts(device).compute_units or 1
    ranges, _ = config.key_ranges(B * H, S, k.shape[1], D, units)
    return 4 * int(ranges * B * H * S * (D + 2)) if ranges > 1 else 0


_half_by_triton = where(triton, HALVES)


def _hip(q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, config: HipConfig) -> Tensor:
    out = _allocate(q)
    if q.numel():
        q, scale = _positive(q, scale)
        q, k, v = map(_in_whole_vectors, (q, k, v))
        hip.launch_op("attention", q.device, q, k, v, out, scale, config)
    return out


def _in_whole_vectors(t: Tensor) -> Tensor:
    """With columns side by side, and every row at a multiple of 16 bytes, as kernels read them: itself or a copy."""
    size = t.element_size()
    rows = (t.data_ptr(), *(stride * size for stride in t.stride()[:3]))
    if t.stride(-1) == 1 and not any(place % 16 for place in rows):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _no_such_head(problem: Problem) -> str | None:
    if problem["d"] not in HIP_HEADS:
        return f"heads of {problem['d']}: there are kernels for {', '.join(map(str, HIP_HEADS))}"
    return None


def backward(saved: Saved, grad: Tensor) -> Mapping[str, Part]:
    """Recompute through stock torch, whose own backward then needs no more memory than it must; where gradients of the
    gradients may be asked for, through the definition: no fused kernel of torch has them.
    """
    function = reference.attention if torch.is_grad_enabled() else _fused
    return saved.through(function, ("q", "k", "v", "scale"), grad)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    q, scale = _positive(q, scale)
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return F.scaled_dot_product_attention(*heads, scale=scale).transpose(1, 2)


OP = define(
    attention,
    summary="softmax(scale * q k^T) v over strided [B, S, H, D], heads of any size",
    family="attention",
    implementations=(
        Implementation(STOCK, _stock, scratch_bytes=_stock_bytes),
        Implementation(
            "triton",
            _triton,
            _half_by_triton,
            default=AttentionConfig(),
            scratch_bytes=_triton_bytes,
            variant=variant,
        ),
        Implementation("hip", _hip, where(hip, HALVES, _no_such_head), HIP, default=BY_HEAD),
        Implementation("gemm_softmax", _gemm_softmax, _gemm_softmax_why_not, scratch_bytes=_gemm_softmax_bytes),
        _backend("sdpa_flash", SDPBackend.FLASH_ATTENTION),
        _backend("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
        _backend("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
        *(
            Implementation(each.name, partial(_library, library=each), partial(_library_why_not, library=each))
            for each in libraries.LIBRARIES
        ),
        Implementation("sdpa_math", partial(_stock, backend=SDPBackend.MATH), _math_why_not, scratch_bytes=_math_bytes),
    ),
    allocate=_allocate,
    backward=backward,
    same_dtype=("k", "v"),
    verification=VERIFICATION,
    tuning=TUNING,
    instead_of_stock=_instead_of_stock,
)
