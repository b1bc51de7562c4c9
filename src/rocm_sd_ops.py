"""The public names that the founding documents promise, over the package that does the work.

They grow with the package: a name stands here when it works.
"""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["optimize_sd_model", "register_rocm_ops"]

Model = TypeVar("Model")


def register_rocm_ops() -> tuple[str, ...]:
    """Register the operators with torch, and return their names; a second call changes nothing."""
    from rocm_sd.ops import OPS  # noqa: PLC0415 -- importing torch is left until it is needed

    return tuple(f"rocm_sd::{name}" for name in OPS)


def optimize_sd_model(model: Model, optimization_level: str = "auto", **options: Any) -> Model:
    """`rocm_sd.optimize` under its promised name: levels auto, performance, memory."""
    from rocm_sd.engine import optimize  # noqa: PLC0415

    return optimize(model, level=optimization_level, **options)
