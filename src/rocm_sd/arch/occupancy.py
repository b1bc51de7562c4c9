"""How many waves of a kernel a compute unit holds at once, from what the compiler says the kernel uses.

One rule serves both vendors. A workgroup lives on one unit (a CU; the two CUs of a WGP on RDNA unless compiled for CU
mode; an SM) and its waves spread over the SIMDs of that unit, so

    slots      = SIMDs of the unit x min(wave limit, VGPR file // VGPRs, AGPR file // AGPRs, SGPR file // SGPRs)
    workgroups = min(slots // waves per workgroup, LDS of the unit // LDS, workgroup limit)

with every request rounded up to its allocation granule.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from rocm_sd.arch.types import Arch, Vendor
from rocm_sd.errors import InvalidOption, Unsupported

__all__ = ["Occupancy", "occupancy"]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """`waves_per_simd` counts the fullest SIMD; `fraction` is resident waves over the most the unit can hold.

    `limited_by` is "waves", "vgprs", "agprs", "sgprs", "lds", "workgroups" (the unit's limit on workgroups) or
    "threads" (the workgroup is larger than any may be). A launch that cannot run at all has `workgroups` 0.
    `unit` is "CU", "WGP" or "SM", and `workgroups` the number on one; on a WGP `workgroups_per_cu` is half of it.
    """

    waves_per_simd: int
    limited_by: str
    workgroups_per_cu: float
    fraction: float
    workgroups: int
    unit: str


def occupancy(
    arch: Arch,
    vgprs: int,
    lds: int,
    waves_per_workgroup: int,
    *,
    wave_size: int | None = None,
    sgprs: int | None = None,
    agprs: int = 0,
    cu_mode: bool = False,
) -> Occupancy:
    """Theoretical occupancy of a kernel that uses `vgprs` registers a lane and `lds` bytes a workgroup.

    On NVIDIA: registers a thread, shared bytes a block, warps a block. `sgprs` is the compiler's total; None means that
    they do not limit. `cu_mode` confines an RDNA workgroup to one CU (Triton's wgp_cu_mode="cu"; WGP mode is the
    default). Raises `Unsupported` when a figure that is needed is not known for `arch`.
    """
    if min(vgprs, lds, agprs, sgprs or 0) < 0 or waves_per_workgroup < 1:
        raise ValueError(
            f"register and LDS use cannot be negative and a workgroup has at least one wave, but vgprs={vgprs}, "
            f"agprs={agprs}, sgprs={sgprs}, lds={lds}, waves_per_workgroup={waves_per_workgroup}"
        )
    wave = _wave_size(arch, wave_size)
    max_waves = _need(arch, "max_waves_per_simd")
    cus_in_unit = 1 if cu_mode else _need(arch, "cus_per_wgp")
    simds = _need(arch, "simds_per_cu") * cus_in_unit

    per_simd = {"waves": max_waves, **_register_limits(arch, wave, vgprs, agprs, sgprs, max_waves)}
    groups = {name: waves * simds // waves_per_workgroup for name, waves in per_simd.items()}
    groups["lds"] = _lds_limit(arch, lds, cus_in_unit, max_waves * simds)
    # A workgroup of one wave needs no barrier on AMD, and barriers are what the limit counts there.
    if arch.vendor is Vendor.NVIDIA or waves_per_workgroup > 1:
        groups["workgroups"] = _need(arch, "max_workgroups_per_cu") * cus_in_unit
    if waves_per_workgroup * wave > _need(arch, "max_threads_per_workgroup"):
        groups["threads"] = 0

    # Among equals the first wins, and "waves" stands first: a full unit is limited by nothing the kernel does.
    limited_by = min(groups, key=lambda name: groups[name])
    workgroups = groups[limited_by]
    waves = workgroups * waves_per_workgroup
    return Occupancy(
        waves_per_simd=ceil(waves / simds),
        limited_by=limited_by,
        workgroups_per_cu=workgroups / cus_in_unit,
        fraction=waves / (max_waves * simds),
        workgroups=workgroups,
        unit=_unit_name(arch, cus_in_unit),
    )


def _register_limits(
    arch: Arch, wave: int, vgprs: int, agprs: int, sgprs: int | None, max_waves: int
) -> dict[str, int]:
    """Waves that fit on one SIMD by each register file."""
    granule = _known(arch, f"vgpr_granule_wave{wave}", arch.vgpr_granule(wave))
    file = _known(arch, "vgpr_file_bytes", arch.vgprs_per_simd(wave))
    # In a unified file the accumulation registers follow the ordinary ones, which are padded to four first.
    total = _round_up(vgprs, 4) + agprs if agprs and arch.agprs_unified else vgprs
    limits = {"vgprs": file // _round_up(max(total, 1), granule)}
    if total > _need(arch, "vgprs_per_wave"):
        limits["vgprs"] = 0
    if agprs:
        if agprs > _need(arch, "agprs_per_wave"):
            limits["agprs"] = 0
        elif not arch.agprs_unified:
            limits["agprs"] = _need(arch, "agpr_file_bytes") // (4 * wave) // _round_up(agprs, granule)
    if sgprs is not None and arch.vendor is Vendor.AMD:
        per_wave = _round_up(max(sgprs, 1), _need(arch, "sgpr_granule")) + _need(arch, "sgprs_reserved")
        limits["sgprs"] = _need(arch, "sgprs_per_simd") // per_wave
    return {name: min(limit, max_waves) for name, limit in limits.items()}


def _lds_limit(arch: Arch, lds: int, cus_in_unit: int, no_limit: int) -> int:
    if lds > _need(arch, "lds_per_workgroup"):
        return 0
    taken = _round_up(lds + _need(arch, "lds_reserved"), _need(arch, "lds_granule"))
    return _need(arch, "lds_per_cu") * cus_in_unit // taken if taken else no_limit


def _wave_size(arch: Arch, asked: int | None) -> int:
    default = _need(arch, "wave_size")
    if asked is None:
        return default
    if asked not in arch.wave_sizes:
        raise InvalidOption("wave_size", asked, [str(size) for size in arch.wave_sizes])
    return asked


def _unit_name(arch: Arch, cus_in_unit: int) -> str:
    if arch.vendor is Vendor.NVIDIA:
        return "SM"
    return "WGP" if cus_in_unit > 1 else "CU"


def _need(arch: Arch, field: str) -> int:
    value: int | None = getattr(arch, field)
    return _known(arch, field, value)


def _known(arch: Arch, field: str, value: int | None) -> int:
    if value is None:
        raise Unsupported(
            f"Occupancy of {arch.name}",
            f"an architecture whose {field} is not known",
            hint="Use an architecture of rocm_sd.arch.ARCHS, or leave the choice to stock torch.",
        )
    return value


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
