// y = x @ weight^T + bias + residual as linear_residual.hip, and beside it the moments of the rows of y, as rounded, in
// parts of block_n columns: the norm that follows (norm_linear.hip) asks for nothing else. y may be the residual.
//
// Parameters: as linear_residual.hip, without wide: K, N and all strides are multiples of eight and all pointers of 16
// bytes.
#include "rocm_sd/norm.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, true>;
using product = gemm<this_arch, element, config>;
using epilogue = add_and_measure<element, config::block_n, ROCM_SD_HAS_BIAS, ROCM_SD_HAS_RESIDUAL>;

/// Grid: ceil(M / block_m) * ceil(N / block_n) workgroups in x. Strides count values; moments: [M, parts, 2], with parts
/// the second factor.
ROCM_SD_KERNEL(product::threads)
linear_moments(const element* x, const element* weight, const element* bias, const element* residual, element* y,
               float* moments, int M, int N, int K, int x_stride, int weight_stride, int residual_stride, int y_stride,
               int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const int parts = ceil_div(N, config::block_n);
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), parts, group_m);
    product::run(factor<element>{x, x_stride, M}, factor<element>{weight, weight_stride, N}, K,
                 tile.row * config::block_m, tile.column * config::block_n, lds,
                 epilogue{{bias, residual, y, residual_stride, y_stride}, moments, N, parts});
}

}  // namespace rocm_sd
