"""What machine code must be like before it is trusted to be fast. The thresholds are the table `LIMITS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd.arch import MatrixUnit

if TYPE_CHECKING:
    from rocm_sd.ops.definition import KernelPromise
    from rocm_sd.verify.isa import Report

__all__ = ["LIMITS", "Gate", "check"]

#                   limit   what is counted
LIMITS: dict[str, tuple[float, str]] = {
    "spills":      (0,      "registers, vector and scalar, that did not fit and went to memory"),
    "scratch":     (0,      "bytes of private memory a lane"),
    "lds":         (1.0,    "LDS of a workgroup over what one may have"),
    "matrix":      (1,      "matrix instructions in the main loop, for kernels that multiply matrices"),
    "wide_loads":  (0.75,   "share of the main loop's global bytes that come by 16-byte loads"),
    "waves":       (0.5,    "waves a SIMD over the most it can hold, for kernels bound by memory"),
}  # fmt: skip

_UNITS = {MatrixUnit.MFMA, MatrixUnit.WMMA_GFX11, MatrixUnit.WMMA_GFX12}


@dataclass(frozen=True)
class Gate:
    """One rule on one kernel; `ok` is None where the rule does not apply, and `sentence` says why."""

    name: str
    ok: bool | None
    figure: float | None
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "figure": self.figure, "sentence": self.sentence}


def check(report: Report, promise: KernelPromise) -> tuple[Gate, ...]:
    """Every gate of the table on one kernel, given what its op promises of it."""
    return (
        _spills(report),
        _scratch(report),
        _lds(report),
        _matrix(report, promise),
        _wide_loads(report, promise),
        _waves(report, promise),
    )


def _spills(report: Report) -> Gate:
    told = f"{report.vgpr_spills} VGPRs and {report.sgpr_spills} SGPRs spilled, {report.vgprs} VGPRs used"
    return Gate("spills", report.spills <= LIMITS["spills"][0], report.spills, told)


def _scratch(report: Report) -> Gate:
    told = f"{report.scratch} bytes of scratch a lane"
    return Gate("scratch", report.scratch <= LIMITS["scratch"][0], report.scratch, told)


def _lds(report: Report) -> Gate:
    most = archs.get(report.arch).lds_per_workgroup
    if most is None:
        return Gate("lds", False, None, f"the LDS of {report.arch} is not known")
    share = report.lds / most
    return Gate("lds", share <= LIMITS["lds"][0], share, f"{report.lds} of {most} bytes of LDS")


def _matrix(report: Report, promise: KernelPromise) -> Gate:
    unit = archs.get(report.arch).matrix_unit
    if not promise.uses_dot:
        return Gate("matrix", None, report.matrix_in_main, "the kernel multiplies no matrices")
    if unit not in _UNITS:
        return Gate("matrix", None, report.matrix_in_main, f"{report.arch} has no matrix unit")
    where = "in the main loop" if report.has_main_loop else "in the kernel, which has no loop"
    told = f"{report.matrix_in_main} matrix instructions {where}"
    return Gate("matrix", report.matrix_in_main >= LIMITS["matrix"][0], report.matrix_in_main, told)


def _wide_loads(report: Report, promise: KernelPromise) -> Gate:
    share = report.share_of_wide_loads()
    if promise.narrow_loads_because:
        return Gate("wide_loads", None, share, f"narrow loads, because {promise.narrow_loads_because}")
    if share is None:
        return Gate("wide_loads", None, None, "the main loop loads nothing from global memory")
    loads = report.widths("global", loads=True, main=True)
    told = ", ".join(f"{count} of {width} bytes" for width, count in loads.items())
    where = "the main loop" if report.has_main_loop else "the kernel, which has no loop"
    return Gate("wide_loads", share >= LIMITS["wide_loads"][0], share, f"global loads in {where}: {told}")


def _waves(report: Report, promise: KernelPromise) -> Gate:
    most = archs.get(report.arch).max_waves_per_simd or 1
    told = f"{report.waves_per_simd} of {most} waves a SIMD, limited by {report.limited_by}"
    share = report.waves_per_simd / most
    if not promise.bound_by_memory:
        return Gate("waves", None, share, f"{told}; not bound by memory")
    return Gate("waves", share >= LIMITS["waves"][0], share, told)
