"""Does each kind of kernel run at all and give the right numbers: elementwise, GEMM, convolution, attention."""

from __future__ import annotations

from typing import Any

from rocm_sd.doctor.probing.common import Place, place, random
from rocm_sd.doctor.probing.isolated import isolated

__all__ = ["answer"]

_KINDS = ("elementwise", "gemm", "conv", "sdpa")
# A convolution may be searched for first.
_LIMIT_S = {"elementwise": 15.0, "gemm": 15.0, "conv": 30.0, "sdpa": 15.0}
# Sums of up to 576 products in float16: one part in a hundred is far above rounding, and far below a wrong kernel.
_ALLOWED = 0.01


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """A missing kernel is an error of this process, a wrong one may be a fault that ends it: each has its own.

    `device` is None where no process lived to tell it.
    """
    told: dict[str, Any] = {"device": None}
    for kind in _KINDS:
        outcome = isolated(_run, kind, device, 64 if quick else 256, limit_s=_LIMIT_S[kind])
        if outcome.answer is None:
            told[kind] = {"ok": False, "error": outcome.failed}
            continue
        told[kind] = outcome.answer["result"]
        told["device"] = outcome.answer["device"]
    return told


def _run(kind: str, device: str | None, size: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    where = place(device)
    inputs = _inputs(kind, where, size)
    with torch.no_grad():
        # .cpu() waits for the kernel, and raises what it met.
        result = _call(kind, inputs).cpu().double()
        exact = _call(kind, [tensor.cpu().double() for tensor in inputs])
    error = float((result - exact).abs().max() / exact.abs().max())
    ok = error <= _ALLOWED
    sentence = "" if ok else f"the result is wrong: largest error {error:.3g} of the largest value"
    return {"device": where.told(), "result": {"ok": ok, "error": sentence}}


def _inputs(kind: str, where: Place, size: int) -> list[Any]:
    shapes: dict[str, list[tuple[int, ...]]] = {
        "elementwise": [(size, size), (size, size)],
        "gemm": [(size, 320), (320, size)],
        "conv": [(1, 64, size // 4, size // 4), (64, 64, 3, 3)],
        "sdpa": [(1, 2, size, 64)] * 3,
    }
    return [random(where, *shape, seed=number) for number, shape in enumerate(shapes[kind])]


def _call(kind: str, inputs: list[Any]) -> Any:
    import torch  # noqa: PLC0415 -- as above
    from torch.nn import functional  # noqa: PLC0415 -- as above

    if kind == "elementwise":
        return torch.add(*inputs) * 0.5
    if kind == "gemm":
        return torch.mm(*inputs)
    if kind == "conv":
        return functional.conv2d(inputs[0], inputs[1], padding=1)
    return functional.scaled_dot_product_attention(*inputs)
