"""NVIDIA architectures, in the words of this package: an SM is a CU, one of its four sub-partitions is a SIMD.

The 65536 registers of an SM are four files of 64 KiB, and 256 registers a warp are 8 a thread: with those two readings
the occupancy rules of both vendors are one rule.
"""

from __future__ import annotations

from rocm_sd.arch.figures import Chip, cite, matrix, peaks, unconfirmed
from rocm_sd.arch.types import Arch, Fp8, MatrixUnit

__all__ = ["NVIDIA"]

_KIB = 1024
_MIB = 1024 * 1024

_GUIDE = "CUDA programming guide, technical specifications per compute capability"
_CALCULATOR = "cuda_occupancy.h of CUDA 13.1"
_PTX = "PTX ISA, mma and wgmma types per target"
_WGMMA = "PTX ISA, wgmma.mma_async: sm_90a alone has it"
_DATA_SHEET = unconfirmed("NVIDIA data sheet or architecture white paper")
_CLASSES = unconfirmed("NVIDIA, compute capabilities of its data center, workstation and GeForce products")
_HOPPER_RATES = "glennklockwood.com, H100 SXM rates after NVIDIA's H100 white paper"

_SM = (
    cite(
        _GUIDE,
        wave_size=32,
        wave_sizes=(32,),
        max_threads_per_workgroup=1024,
        vgprs_per_wave=255,
        vgpr_file_bytes=64 * _KIB,
    )
    | cite(
        _CALCULATOR,
        cus_per_wgp=1,
        simds_per_cu=4,
        vgpr_granule_wave32=8,
        lds_granule=128,
        lds_reserved=1 * _KIB,
        agprs_per_wave=0,
        agpr_file_bytes=0,
    )
    | cite("CUDA programming guide, compute capabilities", integrated=False)
    | cite(_WGMMA, has_wgmma=False)
    | cite("Triton 3.9 NVIDIA backend", triton_backend="cuda", triton_supported=True)
)

# Resident warps per SM, divided by the four sub-partitions.
_WARPS_64 = cite(_GUIDE, max_waves_per_simd=16)
_WARPS_48 = cite(_GUIDE, max_waves_per_simd=12)
_WARPS_32 = cite(_GUIDE, max_waves_per_simd=8)

_DATACENTER, _DESKTOP = cite(_CLASSES, datacenter=True), cite(_CLASSES, datacenter=False)

_CORES = MatrixUnit.TENSOR_CORE
_AMPERE = "float16 bfloat16 tf32 int8 int4"
_HOPPER = "float16 bfloat16 tf32 float64 float8 int8"

NVIDIA: tuple[Arch, ...] = (
    Chip("sm_75", "turing", "Tesla T4").of(
        _SM,
        _DATACENTER,
        _WARPS_32,
        cite(_GUIDE, max_workgroups_per_cu=16, lds_per_cu=64 * _KIB, lds_per_workgroup=64 * _KIB),
        cite(_CALCULATOR, lds_granule=256, lds_reserved=0),
        matrix(_PTX, _CORES, "float16 int8 int4", Fp8.NONE),
        cite(_DATA_SHEET, compute_units=40, l2_bytes=4 * _MIB, bandwidth_gbps=320.0),
        peaks(_DATA_SHEET, float16=65.0, int8=130.0, float32=8.1),
    ),
    Chip("sm_80", "ampere", "A100 SXM 80GB").of(
        _SM,
        _DATACENTER,
        _WARPS_64,
        cite(_GUIDE, max_workgroups_per_cu=32, lds_per_cu=164 * _KIB, lds_per_workgroup=163 * _KIB),
        matrix(_PTX, _CORES, f"{_AMPERE} float64", Fp8.NONE),
        cite(_DATA_SHEET, compute_units=108, l2_bytes=40 * _MIB, bandwidth_gbps=2039.0),
        peaks(_DATA_SHEET, float16=312.0, bfloat16=312.0, tf32=156.0, int8=624.0, float32=19.5),
    ),
    Chip("sm_86", "ampere", "GeForce RTX 3090").of(
        _SM,
        _DESKTOP,
        _WARPS_48,
        cite(_GUIDE, max_workgroups_per_cu=16, lds_per_cu=100 * _KIB, lds_per_workgroup=99 * _KIB),
        matrix(_PTX, _CORES, _AMPERE, Fp8.NONE),
        cite(_DATA_SHEET, compute_units=82, l2_bytes=6 * _MIB, bandwidth_gbps=936.0),
        # With float32 accumulation, which is what a pipeline uses; float16 accumulation is twice as fast on GeForce.
        peaks(_DATA_SHEET, float16=71.0, bfloat16=71.0, tf32=35.6, int8=284.0, float32=35.6),
    ),
    Chip("sm_89", "ada", "GeForce RTX 4090").of(
        _SM,
        _DESKTOP,
        _WARPS_48,
        cite(_GUIDE, max_workgroups_per_cu=24, lds_per_cu=100 * _KIB, lds_per_workgroup=99 * _KIB),
        matrix(_PTX, _CORES, f"{_AMPERE} float8", Fp8.OCP),
        cite(_DATA_SHEET, compute_units=128, l2_bytes=72 * _MIB, bandwidth_gbps=1008.0),
        peaks(_DATA_SHEET, float16=165.2, bfloat16=165.2, float8=330.3, tf32=82.6, int8=660.6, float32=82.6),
    ),
    Chip("sm_90", "hopper", "H200 SXM").of(
        _SM,
        _DATACENTER,
        _WARPS_64,
        cite(_GUIDE, max_workgroups_per_cu=32, lds_per_cu=228 * _KIB, lds_per_workgroup=227 * _KIB),
        matrix(_PTX, _CORES, _HOPPER, Fp8.OCP),
        cite(_WGMMA, has_wgmma=True),
        cite(unconfirmed("torch._scaled_mm: with scales for rows another kernel, slower"), quick_fp8_by_channel=False),
        cite("cuDeviceGetAttribute on an H200", compute_units=132, l2_bytes=60 * _MIB),
        cite("NVIDIA H200 product page", bandwidth_gbps=4800.0),
        peaks(_HOPPER_RATES, float16=989.4, bfloat16=989.4, float8=1978.9, tf32=494.7, int8=1978.9, float32=66.9),
    ),
    Chip("sm_100", "blackwell", "B200").of(
        _SM,
        _DATACENTER,
        _WARPS_64,
        cite(_GUIDE, max_workgroups_per_cu=32, lds_per_cu=228 * _KIB, lds_per_workgroup=227 * _KIB),
        matrix(_PTX, _CORES, f"{_HOPPER} float6 float4", Fp8.OCP),
        cite(_DATA_SHEET, compute_units=148, bandwidth_gbps=8000.0),
        cite(unconfirmed("NVIDIA Blackwell tuning guide"), l2_bytes=126 * _MIB),
        peaks(_DATA_SHEET, float16=2250.0, bfloat16=2250.0, float8=4500.0, tf32=1125.0, float32=75.0),
    ),
    Chip("sm_120", "blackwell", "GeForce RTX 5090").of(
        _SM,
        _DESKTOP,
        _WARPS_48,
        cite(_GUIDE, max_workgroups_per_cu=24, lds_per_cu=100 * _KIB, lds_per_workgroup=99 * _KIB),
        matrix(_PTX, _CORES, "float16 bfloat16 tf32 float8 float6 float4 int8", Fp8.OCP),
        cite(_DATA_SHEET, compute_units=170, l2_bytes=96 * _MIB, bandwidth_gbps=1792.0),
        peaks(_DATA_SHEET, float16=209.5, bfloat16=209.5, float8=419.0, tf32=104.8, float32=104.8),
    ),
)
