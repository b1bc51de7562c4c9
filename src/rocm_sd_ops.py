"""The public names that the founding documents promise, over the package that does the work; docs/founding-names.md."""

from __future__ import annotations

import statistics
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView, KeysView, Mapping

    import torch
    from typing_extensions import Self

    from rocm_sd.arch import Arch
    from rocm_sd.bench.profiling import ROCmSDProfiler, profiler
    from rocm_sd.integrations.diffusers import ROCmOptimizedPipeline
    from rocm_sd.ops.attention.joined_heads import (
        OptimizedAttentionFunction,
        optimized_attention,
        pytorch_attention_fallback,
    )

__all__ = [
    "AttentionBenchmark",
    "OptimizedAttentionFunction",
    "ROCmOptimizedPipeline",
    "ROCmSDBackend",
    "ROCmSDProfiler",
    "benchmark_attention",
    "optimize_sd_model",
    "optimized_attention",
    "profiler",
    "pytorch_attention_fallback",
    "register_rocm_ops",
    "rocm_backend",
]

# Resolved on first use: torch and Diffusers take seconds to import, and the profiler is seldom wanted.
_LATER = {
    "OptimizedAttentionFunction": "rocm_sd.ops.attention.joined_heads",
    "ROCmOptimizedPipeline": "rocm_sd.integrations.diffusers",
    "ROCmSDProfiler": "rocm_sd.bench.profiling",
    "optimized_attention": "rocm_sd.ops.attention.joined_heads",
    "profiler": "rocm_sd.bench.profiling",
    "pytorch_attention_fallback": "rocm_sd.ops.attention.joined_heads",
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
    """Optimise a pipeline or a module of it in place, and return it; of a ComfyUI model or VAE an optimised copy.

    `optimization_level`: auto, performance or memory, in any case. Options are those of `rocm_sd.optimize`.
    """
    from rocm_sd.integrations.unified import optimize  # noqa: PLC0415

    found: Model = optimize(model, optimization_level, **options)
    return found


class ROCmSDBackend:
    """What there is for one device: its architecture, whether this package's own kernels run there, and the ops.

    Without a device it is the GPU that torch sees, else the CPU. Nothing is asked of torch before the first question.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        self._device = device

    @cached_property
    def device(self) -> torch.device:
        import torch  # noqa: PLC0415

        return torch.device(self._device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def arch(self) -> Arch:
        from rocm_sd.arch import detect  # noqa: PLC0415

        return detect(self.device)

    def is_available(self) -> bool:
        """Whether kernels of this package can run there; stock torch runs where they cannot."""
        return self.why_not() is None

    def why_not(self) -> str | None:
        """The reason that neither Triton's kernels nor those in HIP can run there; None if either can."""
        from rocm_sd.kernels import hip, triton  # noqa: PLC0415

        reasons = [language.why_not(self.device) for language in (triton, hip)]
        return None if None in reasons else "; ".join(filter(None, reasons))

    def ops(self) -> tuple[str, ...]:
        """The operators, registered with torch."""
        return register_rocm_ops()

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        num_heads: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """`optimized_attention`; on a device without kernels of this package it is stock torch's."""
        from rocm_sd.ops.attention import joined_heads  # noqa: PLC0415

        return joined_heads.optimized_attention(query, key, value, num_heads, scale)

    def __repr__(self) -> str:
        reason = self.why_not()
        found = "its kernels run" if reason is None else f"stock torch runs, because {reason}"
        return f"ROCmSDBackend({str(self.device)!r}): {self.arch.name}, {found}"


rocm_backend = ROCmSDBackend()


class AttentionBenchmark(float):
    """The median milliseconds of attention as this package chooses it; and by name, as items or attributes, all that
    was measured: f"{found:.2f}ms", found["speedup"], found.stock_ms.
    """

    facts: dict[str, Any]

    def __new__(cls, facts: Mapping[str, Any]) -> Self:
        made = super().__new__(cls, facts["optimized_ms"])
        made.facts = dict(facts)
        return made

    def __getnewargs__(self) -> tuple[dict[str, Any]]:  # type: ignore[override]
        return (self.facts,)

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def __getattr__(self, name: str) -> Any:
        # A copy that is being made has no facts yet.
        if name == "facts" or name not in self.facts:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return self.facts[name]

    def keys(self) -> KeysView[str]:
        return self.facts.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.facts.items()


def benchmark_attention(
    batch_size: int = 2, seq_len: int = 4096, d_model: int = 320, num_heads: int = 8, num_runs: int = 50
) -> AttentionBenchmark:
    """Median milliseconds of attention as this package chooses it and of stock torch, timed in turns on this machine.

    The result is the first as a number, and has the rest by name.

    float16 on a GPU, float32 on a CPU. The numbers are compared first: a wrong result raises NumericsFailure.
    """
    import torch  # noqa: PLC0415

    from rocm_sd.bench.profiling.calls import random_attention_inputs  # noqa: PLC0415
    from rocm_sd.errors import Unsupported  # noqa: PLC0415
    from rocm_sd.measuring import Stopwatch, interleaved  # noqa: PLC0415
    from rocm_sd.ops import OPS, attention  # noqa: PLC0415
    from rocm_sd.ops.attention.workload import problem  # noqa: PLC0415
    from rocm_sd.tuning.choice import STOCK  # noqa: PLC0415

    if num_runs < 1:
        raise Unsupported("benchmark_attention", f"num_runs={num_runs}", hint="Give 1 or more.")
    q, k, v = random_attention_inputs("benchmark_attention", batch_size, seq_len, d_model, num_heads)
    device, dtype = q.device, q.dtype
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "optimized": lambda: attention(q, k, v),
        "stock": lambda: attention(q, k, v, implementation=STOCK),
    }
    comparison = _compare(q, k, v, {name: way() for name, way in ways.items()})
    times = interleaved(ways, Stopwatch(device), repeats=num_runs)
    optimized, stock = (statistics.median(times[name]) for name in ("optimized", "stock"))
    facts = {
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
    return AttentionBenchmark(facts)


def _compare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: dict[str, torch.Tensor]) -> Any:
    """At most 256 queries, spread over all of them: the float64 scores of all would not fit beside a large call."""
    from rocm_sd import numerics  # noqa: PLC0415
    from rocm_sd.ops.attention import reference  # noqa: PLC0415

    step = -(-q.shape[1] // 256)
    exact = reference.attention(q[:, ::step].double(), k.double(), v.double())
    return numerics.require("attention", results["optimized"][:, ::step], exact, results["stock"][:, ::step])
