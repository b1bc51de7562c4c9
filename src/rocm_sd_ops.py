"""The public names that the founding documents promise, over the package that does the work.

They grow with the package: a name stands here when it works.
"""

from __future__ import annotations

import statistics
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rocm_sd.bench.profiling import ROCmSDProfiler, profiler
    from rocm_sd.integrations.diffusers import ROCmOptimizedPipeline

__all__ = [
    "ROCmOptimizedPipeline",
    "ROCmSDProfiler",
    "benchmark_attention",
    "optimize_sd_model",
    "optimized_attention",
    "profiler",
    "register_rocm_ops",
]

# Resolved on first use: Diffusers takes seconds to import, and the profiler is seldom wanted.
_LATER = {
    "ROCmOptimizedPipeline": "rocm_sd.integrations.diffusers",
    "ROCmSDProfiler": "rocm_sd.bench.profiling",
    "profiler": "rocm_sd.bench.profiling",
}

Model = TypeVar("Model")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__


def register_rocm_ops() -> tuple[str, ...]:
    """Register the operators with torch, and return their names; a second call changes nothing."""
    from rocm_sd.ops import OPS  # noqa: PLC0415 -- importing torch is left until it is needed

    return tuple(f"rocm_sd::{name}" for name in OPS)


def optimize_sd_model(model: Model, optimization_level: str = "auto", **options: Any) -> Model:
    """`rocm_sd.optimize` under its promised name: levels auto, performance, memory."""
    from rocm_sd.engine import optimize  # noqa: PLC0415

    return optimize(model, level=optimization_level, **options)


def optimized_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_heads: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of [B, S, H, D], or of [B, S, H * D] with `num_heads`; the result has the query's shape.

    Queries and keys may differ in length. Without `scale` it is D**-0.5.
    """
    from rocm_sd.errors import Unsupported  # noqa: PLC0415
    from rocm_sd.ops import attention  # noqa: PLC0415

    if query.dim() == 4 and num_heads in (None, query.shape[2]):
        return attention(query, key, value, scale)
    if query.dim() != 3 or num_heads is None:
        given = f"{query.dim()} dimensions with num_heads={num_heads}"
        raise Unsupported("optimized_attention", given, hint="Give [B, S, H, D], or [B, S, H * D] with num_heads.")
    if num_heads < 1 or query.shape[2] % num_heads:
        raise Unsupported("optimized_attention", f"{query.shape[2]} columns in {num_heads} heads")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 3 or tensor.shape[2] != query.shape[2]:
            shapes = f"a query of shape {tuple(query.shape)} with a {name} of {tuple(tensor.shape)}"
            raise Unsupported("optimized_attention", shapes)
    q, k, v = (tensor.view(*tensor.shape[:2], num_heads, -1) for tensor in (query, key, value))
    return attention(q, k, v, scale).flatten(2)


def benchmark_attention(
    batch_size: int = 2, seq_len: int = 4096, d_model: int = 320, num_heads: int = 8, num_runs: int = 50
) -> dict[str, Any]:
    """Median milliseconds of attention as this package chooses it and of stock torch, timed in turns on this machine.

    float16 on a GPU, float32 on a CPU. The numbers are compared first: a wrong result raises NumericsFailure.
    """
    import torch  # noqa: PLC0415

    from rocm_sd.errors import Unsupported  # noqa: PLC0415
    from rocm_sd.measuring import Stopwatch, interleaved  # noqa: PLC0415
    from rocm_sd.ops import OPS, attention  # noqa: PLC0415
    from rocm_sd.ops.attention.workload import problem  # noqa: PLC0415
    from rocm_sd.tuning.choice import STOCK  # noqa: PLC0415

    if min(batch_size, seq_len, d_model, num_heads, num_runs) < 1 or d_model % num_heads:
        sizes = f"batch_size={batch_size}, seq_len={seq_len}, d_model={d_model}, num_heads={num_heads}"
        raise Unsupported("benchmark_attention", f"{sizes}, num_runs={num_runs}", hint="Give d_model in whole heads.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    random = torch.Generator(device).manual_seed(0)
    packed = torch.randn(
        (batch_size, seq_len, 3, num_heads, d_model // num_heads), generator=random, device=device, dtype=dtype
    )
    q, k, v = packed.unbind(2)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "optimized": lambda: attention(q, k, v),
        "stock": lambda: attention(q, k, v, implementation=STOCK),
    }
    comparison = _compare(q, k, v, {name: way() for name, way in ways.items()})
    times = interleaved(ways, Stopwatch(device), repeats=num_runs)
    optimized, stock = (statistics.median(times[name]) for name in ("optimized", "stock"))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "implementation": OPS["attention"].choose(problem(q, k), device).implementation,
        "runs": num_runs,
        "optimized_ms": optimized,
        "stock_ms": stock,
        "speedup": stock / optimized,
        "largest_error": comparison.largest,
        "allowed_error": comparison.allowed_largest,
    }


def _compare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: dict[str, torch.Tensor]) -> Any:
    """At most 256 queries, spread over all of them: the float64 scores of all would not fit beside a large call."""
    from rocm_sd import numerics  # noqa: PLC0415
    from rocm_sd.ops.attention import reference  # noqa: PLC0415

    step = -(-q.shape[1] // 256)
    exact = reference.attention(q[:, ::step].double(), k.double(), v.double())
    return numerics.require("attention", results["optimized"][:, ::step], exact, results["stock"][:, ::step])
