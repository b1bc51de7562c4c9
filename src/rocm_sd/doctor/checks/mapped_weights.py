"""Do weights reach the GPU quickly from a memory-mapped file?"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, fine, measured_check, number, problem
from rocm_sd.doctor.probing.isolated import isolated_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.doctor.facts import Facts
    from rocm_sd.doctor.probing.common import Place

__all__ = ["mapped_weights"]

_MIB = 2**20
_REPEATS = 3
# Where one copy takes 5 s, the first one says it all.
_BUDGET_S = 4.0
_LIMIT_S = 18.0
# A map is read through the page table, which may well triple the time of a copy at 10 GB/s. At five times and below 320
# MB/s, SDXL's 7 GB take longer than 20 s: that is the pain.
_HARM = 5.0
_SLOW_BYTES_PER_S = 32 * 2**20 / 0.1
_MEANS = "Loading a model takes minutes, while neither the disk nor the processor is busy."
_SIZE = "GPU_PINNED_MIN_XFER_SIZE"
# Some versions of the runtime read it in KiB (1 GiB), others in MiB (1 TiB): above any tensor in both.
_NEVER = "1048576"


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """{"mapped_s", "heap_s", "bytes"}; `exceeded_s` where the copy from the file had not ended by then."""
    size = (8 if quick else 32) * _MIB
    with tempfile.TemporaryDirectory(prefix="rocm-sd-probe-", ignore_cleanup_errors=True) as folder:
        outcome = isolated_on(device, _times, size, folder, limit_s=_LIMIT_S)
    if outcome.answer is not None:
        return {**outcome.answer, "bytes": size, "exceeded_s": None}
    if outcome.exceeded:
        return {"device": None, "mapped_s": None, "heap_s": None, "bytes": size, "exceeded_s": _LIMIT_S}
    raise CannotRun(f"the copies failed: {outcome.failed}")


def _times(where: Place, size: int, folder: str) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it
    from safetensors.torch import save_file  # noqa: PLC0415 -- as above

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
    return {"mapped_s": median(mapped), "heap_s": median(heap)}


def _mapped(path: Path) -> torch.Tensor:
    from safetensors import safe_open  # noqa: PLC0415 -- as above

    with safe_open(path, framework="pt", device="cpu") as opened:
        tensor: torch.Tensor = opened.get_tensor("weights")
    return tensor


def _copy(tensor: torch.Tensor, where: Place) -> float:
    started = time.perf_counter()
    tensor.to(where.device, copy=True)
    where.synchronize()
    return time.perf_counter() - started


@measured_check(
    measures="the copy of 32 MiB to the GPU from a mapped safetensors file and from ordinary memory",
    reports="ROCm/ROCm#6358 ROCm/ROCm#6523 safetensors/safetensors#821 vladmandic/sdnext#5028 "
    "vllm-project/vllm/pull/56343",
    probe=Probe("mapped_weights", measure),
)
def mapped_weights(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    size = number(answer, "bytes")
    measured = {name: answer[name] for name in ("mapped_s", "heap_s", "bytes", "exceeded_s")}
    if answer["exceeded_s"] is not None:
        says = f"Copying {size / 2**20:.0f} MiB to the GPU had not ended after {number(answer, 'exceeded_s'):.0f} s."
        return problem(says, _MEANS, _fix(facts), measured)
    mapped, heap = number(answer, "mapped_s"), number(answer, "heap_s")
    says = f"{size / 2**20:.0f} MiB take {mapped:.2g} s from a mapped file, {heap:.2g} s from ordinary memory."
    if mapped > _HARM * heap and size / mapped < _SLOW_BYTES_PER_S:
        return problem(says, _MEANS, _fix(facts), measured)
    return fine(says, measured=measured)


def _fix(facts: Facts) -> Fix:
    elsewhere = "In ComfyUI start with --disable-mmap; in SD.Next set diffusers_disable_mmap."
    if facts.amd and facts.environment.get(_SIZE) != _NEVER:
        # Copies then go through the runtime's own buffer: right everywhere, so it is safe.
        return Fix(
            f"Set {_SIZE}={_NEVER}, so that the runtime copies the pages and does not pin them. {elsewhere}",
            env={_SIZE: _NEVER},
            safe=True,
        )
    return Fix(f"Read the weights into memory before they go to the GPU. {elsewhere}")
