"""FLOPs and bytes of the torch ops in a trace, from the shapes that the profiler recorded with them.

Bytes are the least that must be moved: every input and the output once. An op without a formula has no work here, and
no percent of a peak is given for it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd.arch import Arch, roofline
from rocm_sd.bench.profiling.families import CONVOLUTION, ELEMENTWISE, GEMM, op_family
from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["OpWork", "floor_seconds", "op_work"]

# The profiler's words, the table's words and the bytes of an element.
_DTYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::Half": ("float16", 2),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Float8_e4m3fn": ("float8", 1),
    "c10::Float8_e4m3fnuz": ("float8", 1),
    "c10::Float8_e5m2": ("float8", 1),
    "signed char": ("int8", 1),
}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpWork:
    flops: float
    bytes: float
    dtype: str
    family: str


@dataclass(frozen=True)
class _ProfiledOp:
    """What the profiler recorded of a call: shapes of its tensors, and its other arguments as text."""

    name: str
    shapes: tuple[Shape, ...]
    widths: tuple[int, ...]
    values: tuple[str, ...]

    @property
    def width(self) -> int:
        """Of a value of the result: as of the first tensor that holds numbers."""
        return next(width for width in self.widths if width)

    def size(self, number: int) -> int:
        return math.prod(self.shapes[number]) if number < len(self.shapes) and self.shapes[number] else 0

    def moved(self, *inputs: int, out: int) -> float:
        """Bytes of these inputs, and of a result of `out` values."""
        read = sum(self.size(number) * self.widths[number] for number in inputs if number < len(self.widths))
        return float(read + out * self.width)

    def numbers(self, number: int) -> Any:
        """The text "[1, 1]" as a list; None where the argument was not recorded."""
        try:
            return json.loads(self.values[number].lower())
        except (IndexError, ValueError):
            return None


def op_work(name: str, inputs: Mapping[str, Any]) -> OpWork | None:
    """`inputs` as a trace has them. None where there is no formula for the op, or its shapes were not recorded."""
    formula = _FORMULAS.get(name)
    dims, types = inputs.get("Input Dims"), inputs.get("Input type")
    if formula is None or not dims or not types:
        return None
    # A list of tensors has no type in the trace; those of a model are of one, and a lone list is not counted.
    dtype = next((_DTYPES[kind][0] for kind in types if kind in _DTYPES), None)
    shapes = tuple(_shape(each) for each in dims)
    if dtype is None or not shapes[0]:
        return None
    widths = tuple(_DTYPES[kind][1] if kind in _DTYPES else 0 for kind in types)
    counted = formula(_ProfiledOp(name, shapes, widths, tuple(inputs.get("Concrete Inputs", ()))))
    return None if counted is None else OpWork(*counted, dtype, op_family(name) or ELEMENTWISE)


def floor_seconds(work: OpWork, arch: Arch) -> tuple[float, str] | None:
    """(the least time for it, what bounds it), where the table knows the architecture's peaks; never a guess."""
    try:
        least = roofline(arch, work.flops, work.bytes, _rate(work, arch))
    except Unsupported:
        return None
    return least.seconds, least.bound


def _rate(work: OpWork, arch: Arch) -> str:
    """float32 on tensor cores is TF32 where torch allows it, and may then be faster than the float32 peak."""
    if work.dtype != "float32" or arch.peak("tf32") is None:
        return work.dtype
    import torch  # noqa: PLC0415 -- only this question needs it

    if work.family == CONVOLUTION:
        allowed = torch.backends.cudnn.allow_tf32
    else:
        allowed = work.family == GEMM and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else work.dtype


def _shape(dims: Any) -> Shape:
    if dims and isinstance(dims[0], list):
        return (sum(math.prod(each) for each in dims),)
    return tuple(int(size) for size in dims or ())


def _product(call: _ProfiledOp, first: int, second: int, *others: int) -> tuple[float, float] | None:
    """[.., M, K] times [.., K, N]."""
    a, b = call.shapes[first], call.shapes[second]
    if len(a) < 2 or len(a) != len(b) or a[-1] != b[-2]:
        return None
    out = math.prod(a[:-1]) * b[-1]
    return 2.0 * out * a[-1], call.moved(first, second, *others, out=out)


def _linear(call: _ProfiledOp) -> tuple[float, float] | None:
    """x[.., K] times weight[N, K] transposed, and a bias."""
    x, weight = call.shapes[:2]
    if len(weight) != 2 or x[-1] != weight[1]:
        return None
    out = math.prod(x[:-1]) * weight[0]
    return 2.0 * out * x[-1], call.moved(0, 1, 2, out=out)


def _convolution(call: _ProfiledOp) -> tuple[float, float] | None:
    """conv2d(x, weight, bias, stride, padding, dilation, groups); convolution has transposed and output_padding too."""
    x, weight = call.shapes[:2]
    stride, padding, dilation = (call.numbers(i) for i in (3, 4, 5))
    if call.name == "aten::convolution" and call.numbers(6) is not False:
        return None
    if len(x) != 4 or len(weight) != 4 or not all(isinstance(v, list) for v in (stride, padding, dilation)):
        return None
    out = [x[0], weight[0]]
    for i in range(2):
        two = [values[i % len(values)] for values in (stride, padding, dilation)]
        out.append((x[2 + i] + 2 * two[1] - two[2] * (weight[2 + i] - 1) - 1) // two[0] + 1)
    # A weight's second size is the input channels of one group: groups need no further thought.
    return 2.0 * math.prod(out) * math.prod(weight[1:]), call.moved(0, 1, 2, out=math.prod(out))


def _attention(call: _ProfiledOp) -> tuple[float, float] | None:
    q, k, v = call.shapes[:3]
    if len(q) != 4 or len(k) != 4 or len(v) != 4:
        return None
    B, H, S, D = q
    out = B * H * S * v[-1]
    return 2.0 * B * H * S * k[2] * (D + v[-1]), call.moved(0, 1, 2, out=out)


def _norm(call: _ProfiledOp) -> tuple[float, float]:
    # Five operations a value for its moments and five to apply them, as `ops.group_norm_silu` counts.
    return 10.0 * call.size(0), call.moved(0, out=call.size(0))


def _elementwise(call: _ProfiledOp) -> tuple[float, float]:
    """Each tensor once, and an output of the largest one's size."""
    largest = max(call.size(number) for number in range(len(call.shapes)))
    return float(largest), call.moved(*range(len(call.shapes)), out=largest)


def _copy(call: _ProfiledOp) -> tuple[float, float]:
    """copy_(to, from)."""
    return 0.0, call.moved(1, out=call.size(0))


def _upsample(call: _ProfiledOp) -> tuple[float, float] | None:
    out = call.numbers(1)
    if not isinstance(out, list) or len(call.shapes[0]) != 4:
        return None
    pixels = math.prod(call.shapes[0][:2]) * math.prod(out)
    return 0.0, call.moved(0, out=pixels)


def _named(formula: Callable[[_ProfiledOp], tuple[float, float] | None], names: Sequence[str]) -> dict[str, Any]:
    return {f"aten::{name}": formula for name in names}


_FORMULAS: dict[str, Callable[[_ProfiledOp], tuple[float, float] | None]] = {
    **_named(_convolution, ("conv2d", "convolution")),
    **_named(_linear, ("linear",)),
    **_named(lambda call: _product(call, 1, 2, 0), ("addmm", "baddbmm")),
    **_named(lambda call: _product(call, 0, 1), ("mm", "bmm")),
    **_named(_attention, ("scaled_dot_product_attention",)),
    **_named(_norm, ("group_norm", "native_group_norm", "layer_norm", "native_layer_norm")),
    **_named(_elementwise, ("add", "add_", "sub", "mul", "mul_", "div", "silu", "gelu", "sigmoid")),
    **_named(_copy, ("copy_",)),
    **_named(_upsample, ("upsample_nearest2d",)),
}
