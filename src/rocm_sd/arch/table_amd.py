"""AMD architectures. The documents, and what was read in each:

- LLVM: AMDGPUBaseInfo.cpp (IsaInfo) and the user guide for the AMDGPU backend: waves, registers, granules, LDS limits.
- ROCm GPU specifications (rocm.docs.amd.com, reference/gpu-specs): compute units, caches, register files, wave sizes.
- Mesa ACO: the LDS allocation granule of gfx10.3 and later, which LLVM does not model.
- GPUOpen and AMD's matrix-core articles: operations per clock and compute unit.
"""

from __future__ import annotations

from rocm_sd.arch.figures import Chip, cite, matrix, peaks, unconfirmed
from rocm_sd.arch.types import Arch, Fp8, MatrixUnit

__all__ = ["AMD"]

_KIB = 1024
_MIB = 1024 * 1024

_LLVM = "LLVM AMDGPUBaseInfo.cpp, IsaInfo"
_LLVM_GUIDE = "LLVM user guide for the AMDGPU backend, processors"
_SPECS = "ROCm documentation, GPU specifications"
_ACO = "Mesa ACO, init_program: lds_alloc_granule"
_RATES = "ROCm documentation and GPUOpen: compute units x FLOP per clock and unit x boost clock"
_TRITON = "Triton 3.9 AMD backend, compiled for each target"
_MATRIX_CORES = "AMD matrix cores article (MI100, MI200)"
_CDNA3_ISA = "AMD CDNA3 instruction set architecture"
_GPUOPEN_WMMA = "GPUOpen, how to accelerate AI applications on RDNA 3 using WMMA"
_GPUOPEN_RDNA4 = "GPUOpen, using the matrix cores of RDNA 4"
_NO_MATRIX = "GPUOpen: WMMA begins with RDNA 3"
_VENDOR_PAGE = unconfirmed("AMD product page")
_EPILOGUE = "linear_8bit and conv2d_8bit in Triton: epilogues read a scale for each column in either case"

_TRITON_YES = cite(_TRITON, triton_backend="hip", triton_supported=True)

_ALL = cite(
    _LLVM,
    max_threads_per_workgroup=1024,
    lds_per_workgroup=64 * _KIB,
    lds_reserved=0,
    agprs_per_wave=0,
    agpr_file_bytes=0,
)

# Compute units with four SIMDs that run waves of 64. Beside the SGPRs a kernel asks for, the trap handler that ROCm
# always installs takes 16 for each wave: 104 SGPRs leave six waves a SIMD and not seven.
_GFX9 = (
    _ALL
    | cite(
        _LLVM,
        wave_size=64,
        wave_sizes=(64,),
        cus_per_wgp=1,
        simds_per_cu=4,
        max_workgroups_per_cu=16,
        lds_per_cu=64 * _KIB,
        lds_granule=512,
        sgprs_per_simd=800,
        sgpr_granule=16,
        sgprs_reserved=16,
    )
    | cite(_LLVM_GUIDE, integrated=False)
    | cite(_SPECS, datacenter=True)
    | _TRITON_YES
)

_GCN5 = _GFX9 | cite(_LLVM, max_waves_per_simd=10, vgprs_per_wave=256, vgpr_file_bytes=64 * _KIB, vgpr_granule_wave64=4)
_CDNA1 = _GCN5 | cite(_SPECS, agprs_per_wave=256, agpr_file_bytes=64 * _KIB)
# From gfx90a on one file holds both kinds, and a wave may take all 512 entries of it.
_CDNA2 = _GFX9 | cite(
    _LLVM,
    max_waves_per_simd=8,
    vgprs_per_wave=512,
    vgpr_file_bytes=128 * _KIB,
    vgpr_granule_wave64=8,
    agprs_per_wave=256,
    agpr_file_bytes=0,
)

# Two SIMDs a compute unit, two compute units a workgroup processor; a workgroup may use the LDS of both.
_RDNA = (
    _ALL
    | cite(
        _LLVM,
        wave_size=32,
        wave_sizes=(32, 64),
        cus_per_wgp=2,
        simds_per_cu=2,
        max_workgroups_per_cu=16,
        max_waves_per_simd=16,
        lds_per_cu=64 * _KIB,
        vgprs_per_wave=256,
        sgpr_granule=128,
        sgprs_reserved=0,
    )
    | cite(_SPECS, sgprs_per_simd=2048)
    | cite(_ACO, lds_granule=1024)
    | cite(_LLVM_GUIDE, integrated=False)
    | cite(_SPECS, datacenter=False)
    | _TRITON_YES
)
_VGPR_1024 = cite(_LLVM, vgpr_file_bytes=128 * _KIB, vgpr_granule_wave32=16, vgpr_granule_wave64=8)
_VGPR_1536 = cite(_LLVM, vgpr_file_bytes=192 * _KIB, vgpr_granule_wave32=24, vgpr_granule_wave64=12)

_RDNA3 = _RDNA | matrix(_GPUOPEN_WMMA, MatrixUnit.WMMA_GFX11, "float16 bfloat16 int8 int4", Fp8.NONE)
_RDNA4 = (
    _RDNA
    | _VGPR_1536
    | matrix(_GPUOPEN_RDNA4, MatrixUnit.WMMA_GFX12, "float16 bfloat16 float8 int8 int4", Fp8.OCP)
    | cite(_EPILOGUE, quick_fp8_by_channel=True)
)
_APU = cite(_LLVM_GUIDE, integrated=True)

AMD: tuple[Arch, ...] = (
    Chip("gfx906", "gcn5", "Radeon Instinct MI50").of(
        _GCN5,
        matrix(_LLVM_GUIDE, MatrixUnit.DOT, "", Fp8.NONE),
        cite(_SPECS, compute_units=60, l2_bytes=4 * _MIB),
        peaks(_RATES, float16=26.5),
        peaks(_VENDOR_PAGE, float32=13.3),
        cite(_VENDOR_PAGE, bandwidth_gbps=1024.0),
    ),
    Chip("gfx908", "cdna1", "Instinct MI100").of(
        _CDNA1,
        matrix(_MATRIX_CORES, MatrixUnit.MFMA, "float16 bfloat16 float32 int8", Fp8.NONE),
        cite(_SPECS, compute_units=120, l2_bytes=8 * _MIB, bandwidth_gbps=1200.0),
        # The first bfloat16 MFMA run at half the float16 rate: 512 FLOP per clock and compute unit against 1024.
        peaks(_MATRIX_CORES, float16=184.6, bfloat16=92.3),
        peaks(_VENDOR_PAGE, float32=46.1),
    ),
    Chip("gfx90a", "cdna2", "Instinct MI210").of(
        _CDNA2,
        matrix(_MATRIX_CORES, MatrixUnit.MFMA, "float16 bfloat16 float32 float64 int8", Fp8.NONE),
        cite(_SPECS, compute_units=104, l2_bytes=8 * _MIB, bandwidth_gbps=1600.0),
        peaks(_MATRIX_CORES, float16=181.0, bfloat16=181.0),
        peaks(_VENDOR_PAGE, float32=45.3),
    ),
    Chip("gfx942", "cdna3", "Instinct MI300X").of(
        _CDNA2,
        matrix(_CDNA3_ISA, MatrixUnit.MFMA, "float16 bfloat16 float32 tf32 float64 float8 int8", Fp8.FNUZ),
        cite(_EPILOGUE, quick_fp8_by_channel=True),
        cite(_SPECS, compute_units=304, l2_bytes=32 * _MIB, llc_bytes=256 * _MIB, bandwidth_gbps=5300.0),
        peaks("ROCm documentation, MI325X listing (same compute units and clock)", float16=1307.0),
        peaks(_VENDOR_PAGE, bfloat16=1307.0, float8=2614.0, int8=2614.0, tf32=653.0, float32=163.4),
    ),
    Chip("gfx950", "cdna4", "Instinct MI355X").of(
        _CDNA2,
        cite(_LLVM_GUIDE, lds_per_workgroup=160 * _KIB, lds_per_cu=160 * _KIB),
        cite(unconfirmed("LDS granule as used in AMD's gfx950 kernels"), lds_granule=1280),
        matrix(
            "ROCm documentation, data types and precision support",
            MatrixUnit.MFMA,
            "float16 bfloat16 float32 float64 float8 float6 float4 int8",
            Fp8.OCP,
        ),
        cite(_EPILOGUE, quick_fp8_by_channel=True),
        cite(_SPECS, compute_units=256, l2_bytes=32 * _MIB, llc_bytes=256 * _MIB),
        cite("AMD MI355X figures in ROCm documentation", bandwidth_gbps=8000.0),
        peaks(_VENDOR_PAGE, float16=2500.0, bfloat16=2500.0),
    ),
    Chip("gfx1030", "rdna2", "Radeon RX 6900 XT").of(
        _RDNA,
        _VGPR_1024,
        # Dot products of 16 and 8 bit values exist, matrix instructions do not; a bfloat16 dot product has no encoding
        # and aborts the compiler.
        matrix(_NO_MATRIX, MatrixUnit.DOT, "", Fp8.NONE),
        cite("Triton 3.9: the AMD backend refuses gfx1030", triton_backend="hip", triton_supported=False),
        cite(_SPECS, compute_units=80, l2_bytes=4 * _MIB, llc_bytes=128 * _MIB),
        cite("AMD RX 6900 XT specifications", bandwidth_gbps=512.0),
        peaks(_RATES, float16=46.0, float32=23.0),
    ),
    Chip("gfx1100", "rdna3", "Radeon RX 7900 XTX").of(
        _RDNA3,
        _VGPR_1536,
        cite(_SPECS, compute_units=96, l2_bytes=6 * _MIB, llc_bytes=96 * _MIB),
        cite("AMD RX 7900 XTX specifications", bandwidth_gbps=960.0),
        peaks(_RATES, float16=123.0, bfloat16=123.0, int8=123.0, float32=61.4),
    ),
    Chip("gfx1101", "rdna3", "Radeon RX 7800 XT").of(
        _RDNA3,
        _VGPR_1536,
        cite(_SPECS, compute_units=60, l2_bytes=4 * _MIB, llc_bytes=64 * _MIB),
        cite(_VENDOR_PAGE, bandwidth_gbps=624.0),
        peaks(_RATES, float16=75.0, bfloat16=75.0, int8=75.0, float32=37.3),
    ),
    Chip("gfx1102", "rdna3", "Radeon RX 7600").of(
        _RDNA3,
        _VGPR_1024,
        cite(_SPECS, compute_units=32, l2_bytes=2 * _MIB, llc_bytes=32 * _MIB),
        cite(_VENDOR_PAGE, bandwidth_gbps=288.0),
        peaks(_VENDOR_PAGE, float16=43.0, bfloat16=43.0, int8=43.0, float32=21.5),
    ),
    # The three below share the system's memory, so their bandwidth is that of the machine and not of the chip.
    Chip("gfx1103", "rdna3", "Radeon 780M").of(
        _RDNA3,
        _VGPR_1024,
        _APU,
        cite(_SPECS, compute_units=12, l2_bytes=2 * _MIB),
        peaks(_VENDOR_PAGE, float16=17.0, bfloat16=17.0, int8=17.0, float32=8.5),
    ),
    Chip("gfx1150", "rdna3.5", "Radeon 890M").of(
        _RDNA3,
        _VGPR_1024,
        _APU,
        cite(_SPECS, compute_units=16, l2_bytes=2 * _MIB),
        peaks(_RATES, float16=24.0, bfloat16=24.0, int8=24.0, float32=12.0),
    ),
    Chip("gfx1151", "rdna3.5", "Radeon 8060S").of(
        _RDNA3,
        _VGPR_1536,
        _APU,
        cite(_SPECS, compute_units=40, l2_bytes=2 * _MIB, llc_bytes=32 * _MIB),
        cite("AMD Ryzen AI Max specifications (256 bit LPDDR5X-8000)", bandwidth_gbps=256.0),
        peaks(_RATES, float16=59.4, bfloat16=59.4, int8=59.4, float32=29.7),
    ),
    Chip("gfx1200", "rdna4", "Radeon RX 9060 XT").of(
        _RDNA4,
        cite(_SPECS, compute_units=32, l2_bytes=4 * _MIB, llc_bytes=32 * _MIB),
        cite(_VENDOR_PAGE, bandwidth_gbps=320.0),
        peaks(_VENDOR_PAGE, float16=103.0, bfloat16=103.0, float8=205.0, int8=205.0, float32=25.6),
    ),
    Chip("gfx1201", "rdna4", "Radeon RX 9070 XT").of(
        _RDNA4,
        cite(_SPECS, compute_units=64, l2_bytes=8 * _MIB, llc_bytes=64 * _MIB),
        cite("AMD RX 9070 XT specifications", bandwidth_gbps=645.0),
        peaks(_GPUOPEN_RDNA4, float16=195.0, bfloat16=195.0, float8=389.0),
        peaks(_VENDOR_PAGE, int8=389.0, float32=48.7),
    ),
)
