"""What a GPU is, as one value: `Arch`. Code asks the value (`arch.matrix_unit`), never a product name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Arch", "Fp8", "MatrixUnit", "Vendor"]

UNCONFIRMED = "unconfirmed"


class Vendor(Enum):
    AMD = "amd"
    NVIDIA = "nvidia"
    NONE = "none"

    @classmethod
    def of(cls, name: str) -> Vendor:
        """The vendor of an architecture, which the prefix of its name says."""
        return cls.AMD if name.startswith("gfx") else cls.NVIDIA if name.startswith(("sm_", "nvidia")) else cls.NONE


class MatrixUnit(Enum):
    """Which matrix instructions there are. gfx11 and gfx12 WMMA differ in register layout: neither serves both."""

    NONE = "none"
    DOT = "dot"
    MFMA = "mfma"
    WMMA_GFX11 = "wmma_gfx11"
    WMMA_GFX12 = "wmma_gfx12"
    TENSOR_CORE = "tensor_core"

    @property
    def is_wmma(self) -> bool:
        return self in (MatrixUnit.WMMA_GFX11, MatrixUnit.WMMA_GFX12)


class Fp8(Enum):
    """FNUZ and OCP e4m3 share a name and no scale: the largest finite value is 240 in the one, 448 in the other."""

    NONE = "none"
    FNUZ = "fnuz"
    OCP = "ocp"


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture, with the figures of one named product of it.

    None means "not known here" and is never read as a default. For every figure, `source(field)` says where it comes
    from. "CU" reads as compute unit on AMD and as SM on NVIDIA; "SIMD" reads as SM sub-partition there. All sizes are
    in bytes. An RDNA workgroup processor (WGP) is `cus_per_wgp` compute units that share their LDS.
    """

    name: str
    family: str
    vendor: Vendor
    known: bool
    product: str | None = None

    wave_size: int | None = None
    wave_sizes: tuple[int, ...] = ()
    max_threads_per_workgroup: int | None = None
    max_workgroups_per_cu: int | None = None

    lds_per_workgroup: int | None = None
    lds_per_cu: int | None = None
    lds_granule: int | None = None
    lds_reserved: int | None = None
    cus_per_wgp: int | None = None

    vgprs_per_wave: int | None = None
    vgpr_file_bytes: int | None = None
    vgpr_granule_wave32: int | None = None
    vgpr_granule_wave64: int | None = None
    agprs_per_wave: int | None = None
    agpr_file_bytes: int | None = None
    sgprs_per_simd: int | None = None
    sgpr_granule: int | None = None
    sgprs_reserved: int | None = None
    simds_per_cu: int | None = None
    max_waves_per_simd: int | None = None

    matrix_unit: MatrixUnit | None = None
    matrix_dtypes: frozenset[str] = frozenset()
    fp8: Fp8 | None = None
    has_bf16: bool | None = None
    has_wgmma: bool | None = None
    # Whether fp8 products with a scale for each row of the weight take no longer than with one scale for all of it.
    quick_fp8_by_channel: bool | None = None
    integrated: bool | None = None
    datacenter: bool | None = None

    compute_units: int | None = None
    l2_bytes: int | None = None
    llc_bytes: int | None = None
    peak_tflops: tuple[tuple[str, float], ...] = ()
    bandwidth_gbps: float | None = None

    triton_backend: str | None = None
    triton_supported: bool | None = None

    # Pairs and not a mapping, so that the value can be hashed, pickled and used as a cache key.
    sources: tuple[tuple[str, str], ...] = ()

    def source(self, field: str) -> str | None:
        """Where the figure comes from; a peak rate is asked for as "peak_tflops.float16"."""
        return dict(self.sources).get(field)

    def is_confirmed(self, field: str) -> bool:
        """True where a public document was read for the figure; False where it is general knowledge, or unknown."""
        source = self.source(field)
        return source is not None and not source.startswith(UNCONFIRMED)

    def peak(self, dtype: str) -> float | None:
        """Dense peak of the named product in TFLOP/s (TOP/s for integers)."""
        return dict(self.peak_tflops).get(dtype)

    def multiplies(self, dtype: str) -> bool:
        """Whether there are matrix instructions for a dtype of torch, by its name: of fp8, for that very format."""
        if dtype.startswith("float8_e4m3"):
            return self.fp8 is (Fp8.FNUZ if dtype.endswith("fnuz") else Fp8.OCP)
        return dtype in self.matrix_dtypes

    @property
    def has_gates(self) -> bool:
        """Whether kernels climb for it with no card: the gates and the model read what Triton makes for AMD alone."""
        return self.triton_backend == "hip"

    @property
    def agprs_unified(self) -> bool:
        """True where accumulation registers are carved out of the VGPR file (gfx90a and later)."""
        return bool(self.agprs_per_wave) and not self.agpr_file_bytes

    def vgprs_per_simd(self, wave_size: int) -> int | None:
        """Registers of one SIMD as one lane of a wave sees them: 1536 on gfx1100 at wave32, 768 at wave64."""
        return None if self.vgpr_file_bytes is None else self.vgpr_file_bytes // (4 * wave_size)

    def vgpr_granule(self, wave_size: int) -> int | None:
        return self.vgpr_granule_wave32 if wave_size == 32 else self.vgpr_granule_wave64
