"""32 MiB of weights to the device, straight from a memory-mapped file against from ordinary memory."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.probing.common import Cannot, Place, place
from rocm_sd.doctor.probing.isolated import isolated

if TYPE_CHECKING:
    import torch

__all__ = ["answer"]

_MIB = 2**20
_REPEATS = 3
# Where one copy takes 5 s, the first one says it all.
_BUDGET_S = 4.0
_LIMIT_S = 18.0


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """{"mapped_s", "heap_s", "bytes"}; `exceeded_s` where the copy from the file had not ended by then."""
    size = (8 if quick else 32) * _MIB
    with tempfile.TemporaryDirectory(prefix="rocm-sd-probe-", ignore_cleanup_errors=True) as folder:
        outcome = isolated(_times, device, size, folder, limit_s=_LIMIT_S)
    if outcome.answer is not None:
        return {**outcome.answer, "bytes": size, "exceeded_s": None}
    if outcome.exceeded:
        return {"device": None, "mapped_s": None, "heap_s": None, "bytes": size, "exceeded_s": _LIMIT_S}
    raise Cannot(f"the copies failed: {outcome.failed}")


def _times(device: str | None, size: int, folder: str) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it
    from safetensors.torch import save_file  # noqa: PLC0415 -- as above

    where = place(device)
    weights = torch.randint(0, 255, (size,), dtype=torch.uint8)
    files = [Path(folder) / f"{number}.safetensors" for number in range(_REPEATS)]
    # The driver's first copy of all sets up its buffers.
    _copy(weights[:_MIB].clone(), where)
    heap = [_copy(weights.clone(), where) for _ in range(_REPEATS)]
    mapped: list[float] = []
    for path in files:
        # A file for each: pages that the driver has pinned once are quick the second time.
        save_file({"weights": weights}, path)
        mapped.append(_copy(_mapped(path), where))
        if sum(mapped) > _BUDGET_S:
            break
    return {"device": where.told(), "mapped_s": median(mapped), "heap_s": median(heap)}


def _mapped(path: Path) -> torch.Tensor:
    from safetensors import safe_open  # noqa: PLC0415 -- as above

    with safe_open(path, framework="pt", device="cpu") as opened:
        tensor: torch.Tensor = opened.get_tensor("weights")
    return tensor


def _copy(tensor: torch.Tensor, where: Place) -> float:
    import torch  # noqa: PLC0415 -- as above

    started = time.perf_counter()
    tensor.to(where.device, copy=True)
    if where.is_gpu:
        torch.cuda.synchronize(where.device)
    return time.perf_counter() - started
