// h = layer_norm(x); y = (h @ weight[:F]^T + bias[:F]) * gelu(h @ weight[F:]^T + bias[F:]), x: [M, K], weight: [2F, K],
// y: [M, F]. Neither h nor the [M, 2F] between product and gate is in memory: linear_geglu.hip with the norm of
// norm_linear.hip.
//
// Parameters: as norm_linear.hip; F is a multiple of eight too.
#include "rocm_sd/transformer_block.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, true>;
using step = norm_geglu_step<this_arch, element, config, ROCM_SD_HAS_BIAS>;

ROCM_SD_KERNEL(step::threads)
norm_geglu(const element* x, const float* moments, const element* norm_weight, const element* norm_bias,
           const element* weight, const element* bias, element* y, int M, int F, int K, int x_stride, int weight_stride,
           int y_stride, int parts, int span, float share, float eps, int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[step::lds_bytes];
    step::run(x, moments, norm_weight, norm_bias, weight, bias, y, M, F, K, x_stride, weight_stride, y_stride, parts,
              span, share, eps, group_m, lds);
}

}  // namespace rocm_sd
