"""What is true of a family of AMD GPUs, for docs/performance-guide.md and docs/performance-guide-instinct.md.

From arch/, the shipped tuning data, the proofs and the counted work: nothing of it is written by hand. Where the GPUs
of a family differ, each value is followed by those that have it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_sd import arch
from rocm_sd.bench import projection
from rocm_sd.verify.proofs import RUNGS, proofs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.arch import Arch

__all__ = ["FAMILIES", "facts"]

DATA = Path(__file__).resolve().parents[1] / "src/rocm_sd/tuning/data"
# A section of the guide each; the 3.5 of RDNA has the same matrix unit as 3.
FAMILIES = {
    "rdna2": ("rdna2",), "rdna3": ("rdna3", "rdna3.5"), "rdna4": ("rdna4",), "cdna1": ("cdna1",), "cdna2": ("cdna2",),
    "cdna3": ("cdna3",), "cdna4": ("cdna4",),
}  # fmt: skip
_SHORT = {"bfloat16": "bf16"}
_UNITS = {
    arch.MatrixUnit.DOT: "none: dot products within a lane", arch.MatrixUnit.MFMA: "MFMA",
    arch.MatrixUnit.WMMA_GFX11: "WMMA of gfx11", arch.MatrixUnit.WMMA_GFX12: "WMMA of gfx12",
}  # fmt: skip
_FP8 = {arch.Fp8.NONE: "", arch.Fp8.FNUZ: "fp8 FNUZ (to 240)", arch.Fp8.OCP: "fp8 OCP (to 448)"}


def facts(family: str) -> str:
    """A line for each: Waves, Matrix unit, 8 bits, LDS, Untimed, Convolutions, Proven, Counted."""
    gpus = [gpu for gpu in arch.ARCHS.values() if gpu.family in FAMILIES[family]]
    asked: dict[str, Callable[[Arch], str]] = {
        "GPUs": lambda gpu: f"{gpu.product} (`{gpu.name}`)",
        "Waves": _waves,
        "Matrix unit": _matrix_unit,
        "8 bits": _eight_bits,
        "LDS of a workgroup": lambda gpu: f"{(gpu.lds_per_workgroup or 0) // 1024} KiB",
        "Untimed": _untimed,
        "Convolutions, untimed": _layout,
        "Proven": _proven,
        "Counted, UNet step of SD 1.5": _counted,
    }
    lines = []
    for name, fact in asked.items():
        words = ", ".join(map(fact, gpus)) if name == "GPUs" else _together(gpus, fact)
        lines += [f"- **{name}:** {words}."] if words else []
    return "\n".join(lines) + "\n"


def _together(gpus: Sequence[Arch], fact: Callable[[Arch], str]) -> str:
    by_value: dict[str, list[str]] = {}
    for gpu in gpus:
        by_value.setdefault(fact(gpu), []).append(f"`{gpu.name}`")
    known = {value: names for value, names in by_value.items() if value}
    if len(by_value) == 1:
        return next(iter(known), "")
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in known.items())


def _waves(gpu: Arch) -> str:
    others = [str(size) for size in gpu.wave_sizes if size != gpu.wave_size]
    return f"{gpu.wave_size} lanes" + (f", or {' or '.join(others)}" if others else "")


def _matrix_unit(gpu: Arch) -> str:
    assert gpu.matrix_unit is not None
    types = " ".join(sorted(_SHORT.get(each, each.replace("float", "f")) for each in gpu.matrix_dtypes))
    return _UNITS[gpu.matrix_unit] + (f", for {types}" if types else "")


def _eight_bits(gpu: Arch) -> str:
    """What its matrix unit multiplies of what `quality` may use."""
    assert gpu.fp8 is not None
    found = [*(["int8"] if gpu.multiplies("int8") else []), *filter(None, [_FP8[gpu.fp8]])]
    return " and ".join(found) or "none is multiplied: weights alone are stored so"


def _shipped(gpu: Arch) -> dict[str, str]:
    """By op, what runs where no card was timed."""
    read = (json.loads(path.read_text(encoding="utf-8")) for path in sorted((DATA / gpu.name).glob("*.json")))
    return {data["op"]: data["static"]["implementation"] for data in read if data.get("static")}


def _untimed(gpu: Arch) -> str:
    """Those of 8 bits run only where `quality` asks for them."""
    shipped = {op: name for op, name in _shipped(gpu).items() if "8bit" not in op and op not in _NOT_OF_EXACT}
    by_kernel = {
        language: [f"`{op}`" for op, name in shipped.items() if name == kernel]
        for kernel, language in (("triton", "Triton"), ("hip", "HIP"))
    }
    found = [f"{', '.join(ops)} in {language}" for language, ops in by_kernel.items() if ops]
    return f"{' and '.join(found)}; the rest by torch's libraries" if found else ""


_NOT_OF_EXACT = frozenset({"quantize_rows", "memory_format"})


def _layout(gpu: Arch) -> str:
    return {"channels_last": "channels-last", "torch": "torch's own layout"}.get(
        _shipped(gpu).get("memory_format", "torch"), ""
    )


def _proven(gpu: Arch) -> str:
    """The highest rung, and by how many ops; HIP kernels are counted by themselves."""
    here = [proof for proof in proofs() if proof.arch == gpu.name]
    words = []
    for rung in reversed(RUNGS):
        on_it = [proof for proof in here if proof.rung == rung]
        kernels = [f"{sum(p.implementation == kernel for p in on_it)} {language} kernels"
                   for kernel, language in (("triton", "Triton"), ("hip", "HIP"))
                   if any(p.implementation == kernel for p in on_it)]  # fmt: skip
        words += [f"{' and '.join(kernels)} {rung}"] if kernels else []
    return "; ".join(words) or "nothing yet"


def _counted(gpu: Arch) -> str:
    """Of the emulator, for the shipped plan."""
    calls = [call for call in projection.counted("sd15-512", gpu.name, "shipped") if call.part == "step"]
    if not calls:
        return ""
    ours = sum(call.count for call in calls if call.ours)
    flops, moved = (sum(call.count * value for call, value in zip(calls, values, strict=True))
                    for values in ([call.flops for call in calls], [call.bytes for call in calls]))  # fmt: skip
    return (
        f"{flops / 1e12:.2f} TFLOP, {moved / 1e9:.1f} GB moved, {sum(call.count for call in calls)} launches, of which "
        f"{ours} are this project's"
    )
