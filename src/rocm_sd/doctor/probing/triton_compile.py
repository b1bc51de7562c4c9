"""Does Triton compile and run on this GPU: a sum in float32, and products of float16 and of bfloat16 matrices.

Each has a process of its own: on cards without bfloat16 the compiler does not refuse, it aborts the process.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from rocm_sd.doctor.probing.common import Cannot, Place, place, random
from rocm_sd.doctor.probing.isolated import isolated

__all__ = ["answer"]

_KERNELS = ("add_float32", "multiply_float16", "multiply_bfloat16")
_LIMIT_S = 15.0
# The wheel of torch for ROCm brings Triton under names of its own.
_PACKAGES = ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton", "triton-windows")


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """{"version", "add_float32": {"ok", "error"}, ...}; `quick` leaves out bfloat16.

    `device` is None where no process lived to tell it.
    """
    if find_spec("triton") is None:
        raise Cannot("Triton is not installed")
    told: dict[str, Any] = {"version": _version(), "device": None}
    for name in _KERNELS[: 2 if quick else None]:
        outcome = isolated(_compiled, name, device, limit_s=_LIMIT_S)
        if outcome.answer is None:
            told[name] = {"ok": False, "error": outcome.failed}
            continue
        told["device"] = outcome.answer["device"]
        if told["device"]["kind"] == "cpu":
            raise Cannot("there is no GPU, and Triton compiles for nothing else")
        told[name] = outcome.answer["result"]
    return told


def _version() -> str | None:
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            return f"{package} {version(package)}"
    return None


def _compiled(name: str, device: str | None) -> dict[str, Any]:
    where = place(device)
    if not where.is_gpu:
        return {"device": where.told()}
    # In a new folder nothing was compiled before: what is found there would prove nothing. Triton reads it at import.
    with tempfile.TemporaryDirectory(prefix="rocm-sd-probe-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        return {"device": where.told(), "result": _add(where) if name.startswith("add") else _multiply(name, where)}


def _add(where: Place) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    from rocm_sd.doctor.probing.tiny_kernel import add  # noqa: PLC0415 -- importing it needs Triton

    x, y = (random(where, 1000, dtype=torch.float32, seed=seed) for seed in (0, 1))
    result = torch.empty_like(x)
    with torch.cuda.device(where.device):
        add[(4,)](x, y, result, 1000, BLOCK=256)
    ok = torch.equal(result.cpu(), x.cpu() + y.cpu())
    return {"ok": ok, "error": "" if ok else "the sum is wrong"}


def _multiply(name: str, where: Place) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- as above

    from rocm_sd.doctor.probing.tiny_kernel import multiply  # noqa: PLC0415 -- importing it needs Triton

    dtype = getattr(torch, name.removeprefix("multiply_"))
    x, y = (random(where, 32, 32, dtype=dtype, seed=seed) for seed in (0, 1))
    result = torch.empty(32, 32, device=where.device)
    with torch.cuda.device(where.device):
        multiply[(1,)](x, y, result, SIZE=32)
    exact = x.cpu().double() @ y.cpu().double()
    # Products of two such numbers are exact in float32, and so but for a few roundings are their sums.
    error = float((result.cpu().double() - exact).abs().max())
    ok = error <= 1e-4
    return {"ok": ok, "error": "" if ok else f"the product is wrong by {error:.3g}"}
