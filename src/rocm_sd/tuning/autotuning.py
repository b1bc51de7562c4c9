"""FindOptimalConfig(op, problem, arch) -> AutotuningConfig: what a kernel's template is filled with, with no GPU here.

It reads what `rocm-sd tune --static` found: every config of the op's spaces was compiled and ranked there, so nothing
is compiled here. Two figures come with a config:

    occupancy         = waves a SIMD holds of the kernel / waves a SIMD can hold
    memory efficiency = bytes that a workgroup asks for / bytes of the cache lines that they lie in
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported
from rocm_sd.tuning.choice import entries, entries_with_figures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.tuning.choice import Problem

__all__ = ["AutotuningConfig", "FindOptimalConfig"]


@dataclass(frozen=True)
class AutotuningConfig:
    """`config` is what the kernel takes; the rest says the same, and what follows from it, in one form for every op.

    A workgroup has `block` threads in `waves` waves. Tiles are of products, and None elsewhere. What was not counted is
    None too: the bytes of Triton's kernels, and everything of a config that won no bucket.
    """

    op: str
    arch: str
    implementation: str
    config: Mapping[str, int]
    block: int | None
    waves: int | None
    tile_m: int | None
    tile_n: int | None
    tile_k: int | None
    stages: int | None
    occupancy: float | None
    memory_efficiency: float | None
    modelled_us: float | None
    why: str


def FindOptimalConfig(  # noqa: N802 -- the name is promised
    op: str, problem: Problem, arch: Arch | str, implementation: str | None = None
) -> AutotuningConfig:
    """The kernel and config of the least modelled time; of one implementation, "triton" or "hip", where it is named.

    `problem` is the op's, as in the tuning data: {"m": 512, "n": 1280, "k": 1280}. What the data do not limit may be
    left out. Raises `Unsupported` where nothing was searched.
    """
    gpu = archs.get(arch) if isinstance(arch, str) else arch
    found = entries(op, gpu.name, problem)
    if implementation is not None:
        found = {name: entry for name, entry in found.items() if name == implementation}
    if not found:
        what = op if implementation is None else f"{op} ({implementation})"
        hint = f"Type: rocm-sd tune --static {op}{':hip' if implementation == 'hip' else ''} --arch {gpu.name}"
        raise Unsupported("FindOptimalConfig", f"{what} on {gpu.name}: no config was searched there", hint=hint)
    whole = {name: _with_figures(op, gpu.name, name, entry) for name, entry in found.items()}
    # One without a time stands back; of two without, the op's own kernel comes first.
    name = min(whole, key=lambda each: whole[each]["figures"].get("modelled_us", float("inf")))
    return _described(op, gpu, name, whole[name])


def _with_figures(op: str, arch: str, implementation: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A static entry has none of its own: registers, threads and bytes are those of a bucket that it won."""
    if "figures" in entry:
        return entry
    same = (other for other in entries_with_figures(op, arch, implementation) if other["config"] == entry["config"])
    # The time was that of the bucket's own call.
    figures = {name: value for name, value in next(same, {"figures": {}})["figures"].items() if name != "modelled_us"}
    return {**entry, "figures": figures}


def _described(op: str, gpu: Arch, implementation: str, entry: Mapping[str, Any]) -> AutotuningConfig:
    config, figures = entry["config"], entry["figures"]
    # Of several kernels, the one that takes longest is the one that is tuned.
    kernel: Mapping[str, Any] = max(figures.get("kernels", ()), key=lambda each: each["modelled_us"], default={})
    wave_size = gpu.wave_size or 32
    waves = kernel["threads"] // wave_size if "threads" in kernel else config.get("warps")
    occupancy = None
    if "waves_per_simd" in kernel and gpu.max_waves_per_simd:
        occupancy = kernel["waves_per_simd"] / gpu.max_waves_per_simd
    return AutotuningConfig(
        op,
        gpu.name,
        implementation,
        dict(config),
        None if waves is None else waves * wave_size,
        waves,
        config.get("block_m"),
        config.get("block_n"),
        config.get("block_k"),
        config.get("stages"),
        occupancy,
        kernel.get("coalescing"),
        figures.get("modelled_us"),
        entry["why"],
    )
