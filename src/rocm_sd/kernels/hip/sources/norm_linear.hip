// y = layer_norm(x) @ weight^T + bias, x: [M, K], weight: [N, K], y: [M, N]; the norm's result is in LDS only, rounded
// as stock torch rounds it. Float32 accumulation, one rounding.
//
// Parameters: element (half or bfloat); block_m, block_n, block_k, waves_m, waves_n, stages and fragment, as
// gemm_config in gemm.hpp has them; has_bias: 1 or 0. K, N and all strides are multiples of eight and all pointers of
// 16 bytes.
#include "rocm_sd/transformer_block.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, true>;
using step = norm_linear_step<this_arch, element, config, ROCM_SD_HAS_BIAS>;

ROCM_SD_KERNEL(step::threads)
norm_linear(const element* x, const float* moments, const element* norm_weight, const element* norm_bias,
            const element* weight, const element* bias, element* y, int M, int N, int K, int x_stride,
            int weight_stride, int y_stride, int parts, int span, float share, float eps, int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[step::lds_bytes];
    step::run(x, moments, norm_weight, norm_bias, weight, bias, y, M, N, K, x_stride, weight_stride, y_stride, parts,
              span, share, eps, group_m, lds);
}

}  // namespace rocm_sd
