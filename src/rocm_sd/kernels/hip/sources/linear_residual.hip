// y = x @ weight^T + bias + residual, x: [M, K], weight: [N, K], y: [M, N]; float32 accumulation, one rounding.
//
// Parameters: element (half or bfloat); block_m, block_n, block_k, waves_m, waves_n, stages and fragment, as
// gemm_config in gemm.hpp has them; wide: 1 where K, N and all strides are multiples of eight and all pointers of 16
// bytes, else 0;
// has_bias, has_residual: 1 or 0.
#include "rocm_sd/epilogue.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE>;
using product = gemm<this_arch, element, config>;
using epilogue = add_bias_and_residual<element, config::wide, ROCM_SD_HAS_BIAS, ROCM_SD_HAS_RESIDUAL>;

/// Grid: ceil(M / block_m) * ceil(N / block_n) workgroups in x. Strides count values.
ROCM_SD_KERNEL(product::threads)
linear_residual(const element* x, const element* weight, const element* bias, const element* residual, element* y,
                int M, int N, int K, int x_stride, int weight_stride, int residual_stride, int y_stride,
                int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), ceil_div(N, config::block_n), group_m);
    product::run(factor<element>{x, x_stride, M}, factor<element>{weight, weight_stride, N}, K,
                 tile.row * config::block_m, tile.column * config::block_n, lds,
                 epilogue{bias, residual, y, residual_stride, y_stride});
}

}  // namespace rocm_sd
