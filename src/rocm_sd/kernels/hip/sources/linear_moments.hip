// y = x @ weight^T + bias + residual as linear_residual.hip, and beside it the moments of the rows of y, as rounded, in
// parts of block_n columns: the norm that follows (norm_linear.hip) asks for nothing else. y may be the residual.
//
// Parameters: as linear_residual.hip, without wide: K, N and all strides are multiples of eight and all pointers of 16
// bytes.
#include "rocm_sd/transformer_block.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, true>;
using step = linear_moments_step<this_arch, element, config, ROCM_SD_HAS_BIAS, ROCM_SD_HAS_RESIDUAL>;

ROCM_SD_KERNEL(step::threads)
linear_moments(const element* x, const element* weight, const element* bias, const element* residual, element* y,
               float* moments, int M, int N, int K, int x_stride, int weight_stride, int residual_stride, int y_stride,
               int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[step::lds_bytes];
    step::run(x, weight, bias, residual, y, moments, M, N, K, x_stride, weight_stride, residual_stride, y_stride,
              group_m, lds);
}

}  // namespace rocm_sd
