"""require_same(part, file): ONNX Runtime computes the exported part as exactly as torch computes the part itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import numerics
from rocm_sd.errors import NumericsFailure, first_line
from rocm_sd.onnx.modules import ExportedModule, Sizes
from rocm_sd.onnx.providers import runtime, session_as_written

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["require_same"]

# Of other sizes than the traced ones, each of which might have become a constant.
_CHECKED = Sizes(batch=1, height=3, width=2, tokens=9)


def require_same(each: ExportedModule, file: Path) -> None:
    """error <= 2 * torch's error in the same dtype + a rounding; both against float64, or of float16 against float32.

    Raises NumericsFailure. The part's weights are widened where they are and rounded back, which changes none of them:
    a copy of a large model would not fit beside it.
    """
    inputs = each.inputs(_CHECKED)
    with torch.no_grad():
        stock = _tuple(each.module(**inputs))
        dtype = each.dtype
        wide = torch.float64 if dtype is torch.float32 else torch.float32
        each.module.to(wide)
        try:
            exact = _tuple(each.module(**{name: _widened(value, wide) for name, value in inputs.items()}))
        finally:
            each.module.to(dtype)
    ours = _computed(file, each.outputs, inputs)
    for name, one, its_exact, its_stock in zip(each.outputs, ours, exact, stock, strict=True):
        what = f"{name} of the exported {each.name}"
        if not its_stock.is_floating_point():
            if not torch.equal(one, its_stock):
                raise NumericsFailure(f"{what} is not torch's.")
            continue
        numerics.require(what, one, its_exact, its_stock)


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _widened(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The timestep stays in float32, which has it exactly.
    return value.to(dtype) if value.is_floating_point() and value.dim() else value


def _computed(file: Path, outputs: tuple[str, ...], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    try:
        session = session_as_written(file)
    except Exception as error:
        # Of onnxruntime's own classes, one a cause. onnx.checker lets mixed dtypes pass, for one.
        raise NumericsFailure(
            f"onnxruntime {runtime().__version__} cannot load what torch {torch.__version__} exported "
            f"({first_line(error)}).",
            hint="Please report it with the model's name. Another torch, or float32, may do.",
        ) from error
    found = session.run(list(outputs), {name: value.numpy() for name, value in inputs.items()})
    return [torch.from_numpy(one) for one in found]
