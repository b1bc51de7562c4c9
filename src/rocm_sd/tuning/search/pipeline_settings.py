"""Settings of a whole pipeline as ops of their own, timed on the convolutions that its UNet makes in one step.

`memory_format`: contiguous (torch) or channels-last. `convolution_library`: as torch is set (torch); `searched`, where
cuDNN tries its algorithms instead of taking the one that it guesses; `none`, without the library (MIOpen on ROCm,
oneDNN on a CPU). What is clearly faster is put to use by engine/convolution_library.py. The VAE runs once a picture and
the UNet at every step, so the UNet decides.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.arch.torch_libraries import convolution_library
from rocm_sd.ops.definition import Implementation, Verification, anywhere
from rocm_sd.ops.registry import Op
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.search.calls import OpCall, TensorSpec

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from rocm_sd.tuning import Problem

__all__ = ["CONVOLUTION_LIBRARY", "MEMORY_FORMAT", "SETTINGS", "PreparedImplementation", "convolution_calls"]

_FIELDS = 8  # of one convolution: x, weight, bias, stride, padding, dilation, groups, how often
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class PreparedImplementation(Implementation):
    """An implementation whose arguments stand ready in a layout of their own, outside of what is timed."""

    prepare: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda arguments: arguments


def convolution_calls(called: Counter[OpCall]) -> list[OpCall]:
    """One call of each setting with all convolutions of a step, the costliest first, as far as memory allows."""
    arguments: list[Any] = []
    used = storages = 0
    for call, count in sorted(called.items(), key=lambda each: -_work(each[0]) * each[1]):
        tensors = [a for a in call.arguments if isinstance(a, TensorSpec)]
        needed = sum(spec.extent * getattr(torch, spec.dtype).itemsize for spec in tensors)
        if used and used + needed > _MOST_BYTES:
            continue
        used += needed
        arguments += [
            replace(a, storage=a.storage + storages) if isinstance(a, TensorSpec) else a for a in call.arguments
        ]
        arguments.append(count)
        storages += len(tensors)
    # The problem is empty: `optimize` asks once for a pipeline, before it knows a size.
    return [OpCall(op.name, (), tuple(arguments)) for op in SETTINGS] if arguments else []


def _work(call: OpCall) -> float:
    x, weight = call.arguments[:2]
    stride = call.arguments[3][0]
    pixels = x.shape[0] * x.shape[2] * x.shape[3] / stride**2
    products = weight.shape[0] * weight.shape[1] * weight.shape[2] * weight.shape[3]
    return float(pixels * products)


def _each(arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for start in range(0, len(arguments), _FIELDS):
        yield arguments[start : start + _FIELDS]


def _convolved(arguments: tuple[Any, ...], *, once: bool = False) -> tuple[torch.Tensor, ...]:
    results = []
    for x, weight, bias, stride, padding, dilation, groups, count in _each(arguments):
        for _ in range(1 if once else count):
            y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        results.append(y)
    return tuple(results)


def _reference(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return _convolved(arguments, once=True)


def _as_is(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return _convolved(arguments)


def _laid_out(layout: torch.memory_format) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    def prepare(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            a.contiguous(memory_format=layout) if isinstance(a, torch.Tensor) and a.dim() == 4 else a for a in arguments
        )

    return prepare


@contextmanager
def _library(device: torch.device, *, enabled: bool, benchmark: bool) -> Iterator[None]:
    if device.type == "cpu":
        with torch.backends.mkldnn.flags(enabled=enabled):
            yield
        return
    cudnn = torch.backends.cudnn
    with cudnn.flags(
        enabled=enabled, benchmark=benchmark, deterministic=cudnn.deterministic, allow_tf32=cudnn.allow_tf32
    ):
        yield


def _searched(*arguments: Any) -> tuple[torch.Tensor, ...]:
    with _library(arguments[0].device, enabled=True, benchmark=True):
        return _convolved(arguments)


def _without(*arguments: Any) -> tuple[torch.Tensor, ...]:
    with _library(arguments[0].device, enabled=False, benchmark=False):
        return _convolved(arguments)


def _searched_why_not(_problem: Problem, device: torch.device) -> str | None:
    return convolution_library(device.type).no_search_because


def _setting(name: str, summary: str, *implementations: Implementation) -> Op:
    verification = Verification(STOCK, "", _reference, lambda *_arguments: {}, (), (), {})
    return Op(name, summary, implementations, verification)


MEMORY_FORMAT = _setting(
    "memory_format",
    "contiguous or channels-last convolutions, for a whole pipeline",
    PreparedImplementation(STOCK, _as_is, anywhere, prepare=_laid_out(torch.contiguous_format)),
    PreparedImplementation("channels_last", _as_is, anywhere, prepare=_laid_out(torch.channels_last)),
)
CONVOLUTION_LIBRARY = _setting(
    "convolution_library",
    "the library that convolves, searched or not, for a whole pipeline",
    Implementation(STOCK, _as_is, anywhere),
    Implementation("searched", _searched, _searched_why_not),
    Implementation("none", _without, anywhere),
)
SETTINGS = (MEMORY_FORMAT, CONVOLUTION_LIBRARY)
