"""Do weights reach the GPU quickly from a memory-mapped file?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.answers import number, on_the_gpu
from rocm_sd.doctor.check import Check, Finding, Fix, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.doctor.facts import Facts

__all__ = ["CHECK"]

# A map is read through the page table, which may well triple the time of a copy at 10 GB/s. At five times and below 320
# MB/s, SDXL's 7 GB take longer than 20 s: that is the pain.
_HARM = 5.0
_SLOW_BYTES_PER_S = 32 * 2**20 / 0.1
_MEANS = "Loading a model takes minutes, while neither the disk nor the processor is busy."
_SIZE = "GPU_PINNED_MIN_XFER_SIZE"
# Some versions of the runtime read it in KiB (1 GiB), others in MiB (1 TiB): above any tensor in both.
_NEVER = "1048576"


def judge(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    size = number(answer, "bytes")
    measured = {name: answer[name] for name in ("mapped_s", "heap_s", "bytes", "exceeded_s")}
    if answer["exceeded_s"] is not None:
        says = f"Copying {size / 2**20:.0f} MiB to the GPU had not ended after {number(answer, 'exceeded_s'):.0f} s."
        return Finding(Status.PROBLEM, says, _MEANS, _fix(facts), measured)
    mapped, heap = number(answer, "mapped_s"), number(answer, "heap_s")
    says = f"{size / 2**20:.0f} MiB take {mapped:.2g} s from a mapped file, {heap:.2g} s from ordinary memory."
    if mapped > _HARM * heap and size / mapped < _SLOW_BYTES_PER_S:
        return Finding(Status.PROBLEM, says, _MEANS, _fix(facts), measured)
    return Finding(Status.OK, says, measured=measured)


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


CHECK = Check(
    name="mapped_weights",
    question="Do weights reach the GPU quickly from a memory-mapped file?",
    measures="the copy of 32 MiB to the GPU from a mapped safetensors file and from ordinary memory",
    links=(
        "https://github.com/ROCm/ROCm/issues/6358",
        "https://github.com/ROCm/ROCm/issues/6523",
        "https://github.com/safetensors/safetensors/issues/821",
        "https://github.com/vladmandic/sdnext/issues/5028",
        "https://github.com/vllm-project/vllm/pull/56343",
    ),
    run=on_the_gpu("mapped_weights", judge),
)
