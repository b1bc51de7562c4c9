// y = (x @ weight[:F]^T + bias[:F]) * gelu(x @ weight[F:]^T + bias[F:]), x: [M, K], weight: [2F, K], y: [M, F]; the
// [M, 2F] between product and gate is never in memory. Accumulation, bias and GELU are float32, with one rounding.
//
// Half of a tile's columns are values, and the other half are the gates of the same columns of y: to the main loop it
// is one product of block_n columns, and value and gate meet where the sums come back from LDS as rows.
//
// Parameters: element (half or bfloat); block_m, block_n, block_k, waves_m, waves_n, stages and fragment, as
// gemm_config in gemm.hpp has them; wide: 1 where K, F and all strides are multiples of eight and all pointers of 16
// bytes, else 0; has_bias: 1 or 0.
#include "rocm_sd/geglu.hpp"

namespace rocm_sd {

using element = ROCM_SD_ELEMENT;
using config = gemm_config<ROCM_SD_BLOCK_M, ROCM_SD_BLOCK_N, ROCM_SD_BLOCK_K, ROCM_SD_WAVES_M, ROCM_SD_WAVES_N,
                           ROCM_SD_STAGES, ROCM_SD_FRAGMENT, ROCM_SD_WIDE>;
using product = gemm<this_arch, element, config>;
using epilogue = gate_values<element, config::wide, ROCM_SD_HAS_BIAS>;

/// Grid: ceil(M / block_m) * ceil(F / (block_n / 2)) workgroups in x. Strides count values.
ROCM_SD_KERNEL(product::threads)
linear_geglu(const element* x, const element* weight, const element* bias, element* y, int M, int F, int K,
             int x_stride, int weight_stride, int y_stride, int group_m) {
    constexpr int half_n = config::block_n / 2;
    ROCM_SD_SHARED __attribute__((aligned(16))) static char lds[product::lds_bytes];
    const sum_place tile = tile_of(block_x(), ceil_div(M, config::block_m), ceil_div(F, half_n), group_m);
    const int thread = thread_index(), first_row = tile.row * config::block_m, first_column = tile.column * half_n;
    using rows = product::rows_of<product::tile_a>;
    product::run_steps<2>(
        rows(factor<element>{x, x_stride, M}, K, first_row, thread),
        gate_pairs<product>(weight, weight_stride, F, K, first_column, thread),
        ceil_div(K, config::block_k), M, F, first_row, first_column, lds, epilogue{bias, y, F, y_stride});
}

}  // namespace rocm_sd
