from __future__ import annotations

import re
from pathlib import Path

import pytest

from rocm_sd.bench.profiling import families
from rocm_sd.bench.profiling.families import (
    ATTENTION,
    CONVOLUTION,
    COPIES,
    ELEMENTWISE,
    GEMM,
    MEMSET,
    NORM,
    OTHER,
    TRANSFERS,
    kernel_family,
    op_family,
)
from rocm_sd.ops import OPS

RECORDED = Path(__file__).with_name("kernels-sd15-h200.txt")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        # MIOpen
        ("naive_conv_ab_nonpacked_fwd_nchw_half_double_half.kd", CONVOLUTION),
        ("igemm_fwd_gtcx3_nhwc_fp16_bx0_ex1_bt256x128x32_wt32x32x8", CONVOLUTION),
        ("miopenSp3AsmConv_v30_3_1_gfx11_fp16_dot2_f2x3_dilation2", CONVOLUTION),
        ("ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle<ck::GridwiseGemmMultipleABD>", CONVOLUTION),
        ("gridwise_convolution_forward_implicit_gemm_v4r4r2_xdlops_nchw_kcyx_nkhw", CONVOLUTION),
        ("batched_transpose_32x32_half", COPIES),
        ("Im2d2Col", CONVOLUTION),
        ("MIOpenLayerNormFwd", NORM),
        # rocBLAS, hipBLASLt, CK, AOTriton, the runtime
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN", GEMM),
        ("ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3>", GEMM),
        ("attn_fwd", ATTENTION),
        ("ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<...>>", ATTENTION),
        ("__amd_rocclr_copyBuffer", COPIES),
        ("__amd_rocclr_fillBufferAligned", MEMSET),
        # CUDA
        ("Memcpy HtoD (Pageable -> Device)", TRANSFERS),
        ("Memcpy DtoD (Device -> Device)", COPIES),
        ("cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true>", COPIES),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop_optimized_f16_128x128_32x4_nhwc_align8>",
         CONVOLUTION),
        ("nvjet_sm90_hsh_320x128_64x3_1x2_h_bz_coopB_TNT", GEMM),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __half>", GEMM),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128>>", ATTENTION),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half>(long, float)", NORM),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", COPIES),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>", ELEMENTWISE),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::Half>>", MEMSET),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, func_wrapper_t<float>>>", NORM),
        ("triton_poi_fused_convolution_silu_3", ELEMENTWISE),
        ("triton_poi_fused_clone_7", COPIES),
        ("triton_per_fused__softmax_2", ATTENTION),
        ("triton_tem_fused_mm_9", GEMM),
        ("Custom_Cijk_Alik_Bljk_HHS_BH_Bias_MT96x64x32", GEMM),
        ("triton_red_fused_native_group_norm_0", NORM),
        ("some_vendor_mystery_7", OTHER),
    ],
)  # fmt: skip
def test_kernels_by_name(name, family):
    assert kernel_family(name) == family


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten::mkldnn_convolution", CONVOLUTION),
        ("aten::_slow_conv2d_forward", CONVOLUTION),
        ("aten::miopen_convolution", CONVOLUTION),
        ("aten::addmm", GEMM),
        ("aten::bmm", GEMM),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("aten::native_group_norm", NORM),
        ("aten::copy_", COPIES),
        ("aten::cat", COPIES),
        ("aten::upsample_nearest2d", ELEMENTWISE),
        ("aten::zero_", MEMSET),
        ("rocm_sd::upsample_conv2d", CONVOLUTION),
        ("rocm_sd::upsample", ELEMENTWISE),
        ("aten::as_strided", None),
        ("aten::empty_strided", None),
        ("vendor::mystery", OTHER),
    ],
)
def test_ops_by_name(name, family):
    assert op_family(name) == family


def test_every_op_and_every_kernel_of_this_project_has_a_family():
    assert {op.name for op in OPS.values() if op.family not in families.FAMILIES} == set()
    assert {name for name, op in OPS.items() if op_family(f"rocm_sd::{name}") != op.family} == set()
    kernels = {kernel for op in OPS.values() for kernel in op.verification.promises}
    assert {kernel for kernel in kernels if kernel_family(kernel, NORM) == OTHER} == set()


def test_a_name_of_two_ops_is_settled_by_the_kernel_before_it():
    shared = {name: both for name, both in families._own_kernels().items() if len(both) > 1}
    assert shared == {"_fold": (NORM, GEMM)}
    assert [kernel_family("_fold", before) for before in (NORM, GEMM, None)] == [NORM, GEMM, OTHER]


def test_no_kernel_of_a_recorded_picture_is_unknown():
    names = [re.sub(r"^\s*\d+ us\s+\d+ ", "", line) for line in RECORDED.read_text().splitlines()]
    assert len(names) > 40
    assert [name for name in names if kernel_family(name, GEMM) == OTHER] == []


def test_every_rule_has_a_reason_and_a_pattern_that_compiles():
    for rule in (*families.KERNEL_RULES, *families.OP_RULES):
        assert rule.family in families.FAMILIES
        assert rule.reason
        assert not rule.fits("")
