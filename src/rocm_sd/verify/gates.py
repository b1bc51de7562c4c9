"""What machine code must be like before it is trusted to be fast. The thresholds are the table `LIMITS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd import arch as archs
from rocm_sd.arch import MatrixUnit

if TYPE_CHECKING:
    from rocm_sd.ops.definition import KernelPromise
    from rocm_sd.verify.isa import IsaReport

__all__ = ["LIMITS", "GateResult", "check"]

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
class GateResult:
    """One rule on one kernel; `ok` is None where the rule does not apply, and `sentence` says why."""

    name: str
    ok: bool | None
    figure: float | None
    sentence: str


def check(report: IsaReport, promise: KernelPromise) -> tuple[GateResult, ...]:
    """Every gate of the table on one kernel, given what its op promises of it."""
    spilled = f"{report.vgpr_spills} VGPRs and {report.sgpr_spills} SGPRs spilled, {report.vgprs} VGPRs used"
    return (
        GateResult("spills", report.spills <= LIMITS["spills"][0], report.spills, spilled),
        GateResult(
            "scratch",
            report.scratch <= LIMITS["scratch"][0],
            report.scratch,
            f"{report.scratch} bytes of scratch a lane",
        ),
        _lds(report),
        _matrix(report, promise),
        _wide_loads(report, promise),
        _waves(report, promise),
    )


def _lds(report: IsaReport) -> GateResult:
    most = archs.get(report.arch).lds_per_workgroup
    if most is None:
        return GateResult("lds", False, None, f"the LDS of {report.arch} is not known")
    share = report.lds / most
    return GateResult("lds", share <= LIMITS["lds"][0], share, f"{report.lds} of {most} bytes of LDS")


def _matrix(report: IsaReport, promise: KernelPromise) -> GateResult:
    found = report.matrix_in_main
    if not promise.uses_dot:
        return GateResult("matrix", None, found, "the kernel multiplies no matrices")
    if archs.get(report.arch).matrix_unit not in _UNITS:
        return GateResult("matrix", None, found, f"{report.arch} has no matrix unit")
    where = "in the main loop" if report.has_main_loop else "in the kernel, which has no loop"
    return GateResult("matrix", found >= LIMITS["matrix"][0], found, f"{found} matrix instructions {where}")


def _wide_loads(report: IsaReport, promise: KernelPromise) -> GateResult:
    share = report.share_of_wide_loads()
    if promise.narrow_loads_because:
        return GateResult("wide_loads", None, share, f"narrow loads, because {promise.narrow_loads_because}")
    if share is None:
        return GateResult("wide_loads", None, None, "the main loop loads nothing from global memory")
    loads = report.widths("global", loads=True, main=True)
    widths = ", ".join(f"{count} of {width} bytes" for width, count in loads.items())
    where = "the main loop" if report.has_main_loop else "the kernel, which has no loop"
    return GateResult("wide_loads", share >= LIMITS["wide_loads"][0], share, f"global loads in {where}: {widths}")


def _waves(report: IsaReport, promise: KernelPromise) -> GateResult:
    most = archs.get(report.arch).max_waves_per_simd or 1
    sentence = f"{report.waves_per_simd} of {most} waves a SIMD, limited by {report.limited_by}"
    share = report.waves_per_simd / most
    if not promise.bound_by_memory:
        return GateResult("waves", None, share, f"{sentence}; not bound by memory")
    return GateResult("waves", share >= LIMITS["waves"][0], share, sentence)
