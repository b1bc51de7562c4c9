// y = layer_norm(x) @ weight^T + bias, x: [M, K], weight: [N, K], y: [M, N]; the norm's result is in LDS only, rounded
// as stock torch rounds it. Float32 accumulation, one rounding.
//
// Parameters: element (half or bfloat); block_m, block_n, block_k, waves_m, waves_n, stages and fragment, as
// gemm_config in gemm.hpp has them; has_bias: 1 or 0. K, N and all strides are multiples of eight and all pointers of
// 16 bytes.
#include "rocm_sd/norm.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, true>;
using product = gemm<this_arch, element, config>;
using epilogue = add_bias_and_residual<element, true, ROCM_SD_HAS_BIAS, false>;
using normed_rows = normed_steps<product::tile_a, element, product::threads>;

/// Grid: ceil(M / block_m) * ceil(N / block_n) workgroups in x. Strides count values; moments: [M, parts, 2].
ROCM_SD_KERNEL(product::threads)
norm_linear(const element* x, const float* moments, const element* norm_weight, const element* norm_bias,
            const element* weight, const element* bias, element* y, int M, int N, int K, int x_stride,
            int weight_stride, int y_stride, int parts, int span, float share, float eps, int group_m) {
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), ceil_div(N, config::block_n), group_m);
    const int thread = thread_index();
    const int first_row = tile.row * config::block_m, first_column = tile.column * config::block_n;
    using columns = product::rows_of<product::tile_b>;
    product::run_steps<1>(
        normed_rows(factor<element>{x, x_stride, M}, K, first_row, thread, norm_weight, norm_bias,
                    row_moments{moments, parts, span, K, share, eps}),
        columns(factor<element>{weight, weight_stride, N}, K, first_column, thread), ceil_div(K, config::block_k), M,
        N, first_row, first_column, lds, epilogue{bias, nullptr, y, 0, y_stride});
}

}  // namespace rocm_sd
